"""torchtitan's loop: FSDP 2 with fp32 shards, selective checkpointing, and since 0.3 a loss in chunks.

Files are those of torchtitan 0.3.0 unless a release is named; 0.1 and 0.2 keep their settings in `config_manager.py`
and `config/job_config.py`. The layers of Llama and Qwen3 are its own, others are taken as Transformers'; its
parallelism is PyTorch's, which `torch` computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from calc.base.plan import Path
from calc.base.refusal import Refusal
from calc.base.versions import at_least, nearest
from calc.frameworks.releases import NOTHING, Default, Table, stated
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import habits as shared
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft")
FIRST = "0.1.0"
CHUNKED = "0.3.0"
FREED = "0.1"  # and what the repository was from 2024-06-12 on, whose release before is 0.0.2
UNITS = "0.2"  # embedding and head are units (models/llama3/infra/parallelize.py:303); before, they were in the root
# PyTorch with a kernel for RMS norms (`_fused_rms_norm_backward`), and one whose autocast lists them
KERNEL, LISTED = "2.9", "2.12"
ROTATED: Mapping[str, Literal["", "complex"]] = {"llama": "complex", "qwen3": ""}
# PyTorch's nightly of its day. Transformers does not run; DeepSpeed neither.
RELEASES: Mapping[str, Pins] = {
    FIRST: Pins("0.16.4", "2.8.0", "5.23.0"),
    "0.2.2": Pins("0.16.4", "2.11.0", "5.23.0"),
    CHUNKED: Pins("0.16.4", "2.13.0", "5.23.0"),
}
FIXED = {"attention": "sdpa"}  # which a flag does not change: attn_backend is the configuration function's

DEFAULTS = Table(
    Default("micro_batch", FIRST, 8, "local_batch_size (config/configs.py:37)"),
    Default("seq_len", FIRST, 2048, "seq_len (config/configs.py:52)"),
    Default("optimizer", FIRST, "adamw", "default_adamw (components/optimizer/optimizer.py:378)"),
    Default("grad_dtype", FIRST, "fp32", "mixed_precision_reduce (config/configs.py:93)"),
    Default(
        "checkpointing", FIRST, "selective", "activation_checkpoint selective, by operators (train_configs/*.toml)"
    ),
    Default(
        "attention",
        FIRST,
        FIXED["attention"],
        "F.scaled_dot_product_attention, unless attn_backend is varlen (models/common/attention.py)",
    ),
    Default("loss", FIRST, "full", "cross_entropy_loss (components/loss.py of 0.1.0)"),
    Default("loss", CHUNKED, "chunked", "ChunkedLossWrapper (models/llama3/config_registry.py:187)"),
    Default("packing", FIRST, False, "rows are cut from a stream: none is padded (hf_datasets/text_datasets.py)"),
    Default("no_sync", FIRST, False, "every micro batch is reduced (trainer.py)"),
    Default("reentrant", FIRST, False, "PyTorch's own wrapper (distributed/activation_checkpoint.py)"),
    Default("expandable_segments", FIRST, True, "run_train.sh of the repository: PYTORCH_ALLOC_CONF"),
)
# Where GPUs share stages of the model.
WHOLE = Table(Default("loss", FIRST, "full", "what is computed there"))
CUT = Table(Default("sequence_parallel", FIRST, True, "enable_sequence_parallel (config/configs.py:160)"))
STAGED = Table(Default("micro_batch", FIRST, 1, "pipeline_parallel_microbatch_size (config/configs.py:226)"))


def modelled(arch: Architecture, version: str, torch: str) -> Architecture:
    """The model as torchtitan has it: PyTorch's own RMS norm, and rotation before heads are put first.

    Llama's pairs are complex numbers (models/common/rope.py:256), Qwen3's halves are rotated, since 0.3 in fp32 (:327).
    """
    if arch.family not in ROTATED:
        return arch
    new = at_least(nearest(version, tuple(RELEASES)), CHUNKED)
    own: dict[str, Any] = {"rotation": ROTATED[arch.family], "by_token": True}
    if arch.family == "qwen3":  # before, cos and sin were cast in each layer
        own |= {"rotation": "fp32"} if new else {"rotary_tables": 2 * arch.head_dim}
    if at_least(torch, KERNEL):  # its other operations multiply by the weight in fp32
        own |= {"norm": "kernel-listed" if at_least(torch, LISTED) else "kernel", "norm_fp32": True}
    return replace(arch, **own)


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of its configuration for `task`, by dotted key.

    Weights, gradients and states are fp32. FSDP's policy computes in bf16; without FSDP autocast does
    (distributed/utils.py:maybe_enable_amp of 0.2.2).
    """
    version, libraries = shared.release("torchtitan", RELEASES, given)
    cut, staged = int(given.get("tensor_parallel", 1)) > 1, int(given.get("pipeline_parallel", 1)) > 1
    tables = (WHOLE if staged else NOTHING, CUT if cut else NOTHING, STAGED if staged else NOTHING)
    values = stated(task, version, DEFAULTS, *tables)
    # on one GPU, too, since it is there that FSDP's policy casts (models/llama3/parallelize.py:80)
    one = "fsdp2" if at_least(version, CHUNKED) else "none"
    sharding = shared.sharded(given, "fsdp2", one)
    steps = int(given.get("pipeline_parallel", 1))
    return {
        **libraries,
        **values,
        **shared.batches(values, given, steps),
        **shared.fused(given),
        "sharding": sharding,
        "precision": "fsdp-mixed" if sharding == "fsdp2" else "fp32" if cut or staged else "autocast",
    }


def refuse(s: Scenario) -> Refusal | None:
    """The reason why torchtitan cannot run `s`, in one line, or None."""
    if s.offload.activations:
        return Refusal("offload.activations", "true with trainer torchtitan", "false; it has no switch for it")
    fixed: dict[str, tuple[str | int, ...]] = {
        "method": ("full",),
        "sharding": ("none", "ddp", "fsdp2"),
        "kernels": ("eager",),
        "loss": ("full", "chunked"),
        "attention": ("sdpa", "flash"),
        "virtual_pipeline": (1, 2),  # stages_per_rank of a multi-stage schedule (distributed/pipeline_parallel.py)
    }
    if fault := shared.refuse(s, TASKS, fixed, together=True):
        return fault
    if not at_least(shared.ran(s, RELEASES), CHUNKED):
        # components/quantization of 0.2.2
        own = {"float8": ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")}
        return shared.refuse(s, TASKS, own, together=True)
    return None


def keeps(s: Scenario) -> dict[str, Any]:
    """The fields of the trained role: its attn_backend is PyTorch's varlen_attn (models/common/attention.py).

    Selective checkpointing knows that operator (distributed/activation_checkpoint.py:57, `_get_default_save_ops`;
    models/llama3/infra/parallelize.py:49 of 0.2.2).
    """
    own = at_least(s.versions["torchtitan"], UNITS) and not s.architecture.tied and s.pipeline_parallel == 1
    return {"varlen": s.attention == "flash", "ends": "kept" if own and s.sharding == "fsdp2" else ""}


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: labels come shifted; a chunk's backward runs at once.

    FSDP keeps gradients that it does not reduce yet in the type that it reduces in (`set_requires_gradient_sync`).
    Before `FREED` the model casts its logits (`self.output(h).float()`), and the loop's variable `pred` has them
    through backward (train.py; `del pred` came with commit e29b6b4d4).
    """
    if s.loss != "chunked":
        path = Path("cross-entropy", outside=s.pipeline_parallel == 1)
        early = not at_least(s.versions["torchtitan"], FREED)
        return replace(path, head_fp32=True, held="backward") if early else path
    narrow = 2 if s.layout == "bf16" else 4
    return Path("ahead", summed=narrow, copied=s.rows > 1)


def notes(s: Scenario) -> Iterator[str]:
    """Notes on parts of torchtitan that are computed otherwise."""
    yield from shared.told(s, RELEASES)
    if s.compile == "none":
        yield "compile.enable is off unless asked for, with compile: model-and-loss"
    if s.architecture.family not in ROTATED:
        yield f"layers of {s.architecture.family} are computed as Transformers'"
    if at_least(shared.ran(s, RELEASES), CHUNKED):
        # trainer.py:613, :874: `zero_grad(set_to_none=False)` where forward and backward are captured
        gradients = ", and gradients between steps" if s.pipeline_parallel == 1 else ""
        yield f"training.disable_cuda_graphs: computed as true; captured graphs keep a pool of their own{gradients}"
        if s.loss == "full" and s.pipeline_parallel > 1:
            yield "ChunkedLossWrapper is computed as a loss of whole logits under pipeline_parallel"
