"""torchtune's recipes: everything in bf16, FSDP 2 with embedding and head as units, logits in chunks.

Files are those of torchtune 0.6.1 unless a release is named. Defaults are those of the configurations for Llama 3.1 8B
(`recipes/configs/llama3_1/8B_*.yaml`), which those of other models follow. The layers of Llama, Mistral and Qwen are
its own, others are taken as Transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from calc.base.plan import Path
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.frameworks.releases import NOTHING, Default, Table, stated
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import habits as shared
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft", "dpo")
FIRST = "0.3.1"
# PyTorch of its day: it names none. Transformers does not run; DeepSpeed neither.
RELEASES: Mapping[str, Pins] = {
    FIRST: Pins("0.16.4", "2.5.0", "5.23.0"),
    "0.4.0": Pins("0.16.4", "2.5.1", "5.23.0"),
    "0.5.0": Pins("0.16.4", "2.5.1", "5.23.0"),
    "0.6.1": Pins("0.16.4", "2.6.0", "5.23.0"),
}
FIXED = {"attention": "sdpa"}  # no recipe has a key for it

DEFAULTS = Table(
    Default("micro_batch", FIRST, 2, "batch_size (8B_full.yaml)"),
    Default("precision", FIRST, "bf16", "dtype bf16 (8B_full.yaml)"),
    Default("grad_dtype", FIRST, "bf16", "fully_shard without a policy (training/_distributed.py:559)"),
    Default("optimizer", FIRST, "adamw", "torch.optim.AdamW (8B_full.yaml)"),
    Default("checkpointing", FIRST, "full", "enable_activation_checkpointing (8B_full.yaml)"),
    Default("attention", FIRST, FIXED["attention"], "F.scaled_dot_product_attention (modules/attention_utils.py)"),
    Default("loss", FIRST, "chunked", "CEWithChunkedOutputLoss (8B_full.yaml)"),
    Default("loss", FIRST, "full", "DPO's logits are whole (recipes/full_dpo_distributed.py)", ("dpo",)),
    Default("logprob", FIRST, "log-softmax-fp32", "log_softmax of fp32 logits (rlhf/sequence_processing.py:98)"),
    Default("packing", FIRST, False, "dataset.packed (8B_full.yaml)"),
    Default("no_sync", FIRST, False, "every micro batch is reduced (recipes/full_finetune_distributed.py)"),
    Default("reentrant", FIRST, False, "NO_REENTRANT (torchtune/training/activations.py:24)"),
)
# On one GPU, where all weights are trained.
SINGLE = Table(
    Default("optimizer", FIRST, "adamw-paged-8bit", "bitsandbytes.optim.PagedAdamW8bit (8B_full_single_device.yaml)"),
)
ADAPTERS = Table(
    Default("lora.rank", FIRST, 8, "lora_rank (8B_lora.yaml)"),
    Default("lora.targets", FIRST, ["q_proj", "v_proj"], "lora_attn_modules (8B_lora.yaml of 0.3.1)"),
    Default(
        "lora.targets", "0.4.0", ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "lora_attn_modules, apply_lora_to_mlp (8B_lora.yaml)",
    ),
    Default("lora.dropout", FIRST, 0, "lora_dropout (8B_lora.yaml)"),
    Default("lora.dtype", FIRST, "bf16", "dtype bf16 (8B_lora.yaml)"),
    Default("lora.units", FIRST, "own", "fully_shard wraps layers: no flat parameter joins types"),
    Default("double_quantization", FIRST, True, "NF4Tensor quantises its scales (torchao dtypes/nf4tensor.py)"),
)  # fmt: skip
# With adapters on several GPUs.
SPREAD = Table(Default("checkpointing", FIRST, "none", "enable_activation_checkpointing (8B_lora.yaml)"))
# Micro batches of a step of LoRA on several GPUs, and on one (gradient_accumulation_steps); full fine-tuning has one.
ACCUMULATION = {FIRST: (32, 64), "0.4.0": (8, 8), "0.5.0": (8, 8), "0.6.1": (8, 8)}


# Models whose embedding and head are units of FSDP: custom_sharded_layers of 8B_full.yaml and 70B_full.yaml in llama3
# and llama3_1; since 0.5.0 of 70B_lora.yaml there, and of 32B_lora.yaml and 72B_lora.yaml in qwen2_5.
UNITS = ("llama-3-8b", "llama-3.1-8b", "llama-3-70b", "llama-3.1-70b")
UNITS_WITH_ADAPTERS = ("llama-3-70b", "llama-3.1-70b", "qwen2.5-32b", "qwen2.5-72b")
SPREAD_ENDS = "0.5.0"
WIDE_NORMS = "0.5.0"
DROPS = "0.3.0"  # the first release that shifts labels, and drops the logits before backward
SHARDS = "0.3.0"  # the first whose recipes wrap layers in FSDP 2 (recipes/lora_finetune_distributed.py)
# Families built of `TransformerSelfAttentionLayer` with its own rotation, of pairs or of Qwen's halves.
ROTATED: Mapping[str, Literal["", "stacked"]] = {
    "llama": "stacked", "mistral": "stacked", "qwen2": "",
}  # fmt: skip


def modelled(arch: Architecture, version: str, *, packing: bool) -> Architecture:
    """The model as torchtune has it: keys and values for every query head, rotated before heads are put first.

    Packs pick cos and sin by the positions of their tokens; Qwen's halves else cast those of all positions, for queries
    and for keys (modules/attention.py, modules/position_embeddings.py, models/qwen2/_positional_embeddings.py). Since
    0.5.0 norms call `F.rms_norm` in fp32, and their weight multiplies before the cast (modules/rms_norm.py).
    """
    if arch.family not in ROTATED:
        return arch
    rotation = ROTATED[arch.family]
    tables = 0 if rotation or packing else 4 * arch.head_dim
    wide = arch.norm_fp32 or at_least(version, WIDE_NORMS)
    own = replace(arch, repeated=True, by_token=True, norm_fp32=wide)
    return replace(own, rotation=rotation, rotary_picked=packing, rotary_tables=tables)


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of its configurations for `task`, by dotted key."""
    version, libraries = shared.release("torchtune", RELEASES, given)
    adapters = given.get("method", "full") != "full"
    sharding = shared.sharded(given, sharded(str(given.get("versions.torchtune", version))))
    several = sharding != "none"
    tables = (ADAPTERS, SPREAD if several else NOTHING) if adapters else (NOTHING if several else SINGLE,)
    values = stated(task, version, DEFAULTS, *tables)
    steps = ACCUMULATION[version][0 if several else 1] if adapters else 1
    batches = shared.batches(values, given, steps)
    return {
        **libraries,
        **values,
        **batches,
        "optimizer_in_backward": not (adapters or several or task == "dpo") and stepped_once(given, batches),
        **shared.fused(given, str(values["optimizer"])),
        "sharding": sharding,
    }


def sharded(version: str) -> str:
    """The sharding of the recipes for several GPUs: FSDP 1 before 0.3.0, with adapters as units of their own."""
    return "fsdp2" if at_least(version, SHARDS) else "fsdp1"


def stepped_once(given: Mapping[str, Any], usual: Mapping[str, int]) -> bool:
    """True if a step has one micro batch, so that `optimizer_in_bwd` can be on, as it is for one GPU."""
    return int(given.get("global_batch", usual["global_batch"])) == usual["global_batch"]


def refuse(s: Scenario) -> Refusal | None:
    """The reason why torchtune's recipes cannot run `s`, in one line, or None."""
    fixed: dict[str, tuple[str, ...]] = {
        # a task that it does not run fills in no release
        "sharding": ("none", sharded(s.versions.get("torchtune", SHARDS))),
        "precision": ("bf16", "fp32"),
        "kernels": ("eager",),
        "loss": ("full", "chunked"),
        "checkpointing": ("none", "full"),
        "float8": ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp"),  # training/quantization.py, float8 alone
    }
    if fault := shared.refuse(s, TASKS, fixed):
        return fault
    if s.images:  # of all that read images it has Llama 3.2 Vision alone (torchtune/models of 0.6.1)
        return Refusal("images", f"{s.images.size!r} with trainer torchtune", "none")
    if s.lora and s.lora.dtype != s.precision:
        return Refusal("lora.dtype", f"{s.lora.dtype!r} with trainer torchtune", f"{s.precision}, as the model")
    return None


def keeps(s: Scenario) -> dict[str, Any]:
    """The fields of the trained role: where checkpoints wait, NF4Tensor's scales, which FSDP 2 cuts, and FSDP's units.

    4-bit weights are torchao's.
    """
    units = (
        UNITS if s.method == "full" else UNITS_WITH_ADAPTERS if at_least(s.versions["torchtune"], SPREAD_ENDS) else ()
    )
    ends = "freed" if s.sharding == "fsdp2" and s.model in units else ""
    return {"cut_scales": True, "ends": ends} | ({"streams": "stash"} if s.offload.activations else {})


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: logits in chunks, or whole ones that the model casts to fp32 (modules/transformer.py:655-659).

    Before 0.3.0 a recipe copied them without their last position into a variable that lived until the next forward
    (recipes/lora_finetune_single_device.py:447-453 of 0.1.1). DPO divides a slice of them by a temperature of 1, which
    copies it (rlhf/sequence_processing.py:95-98).
    """
    if s.task == "dpo":
        return replace(usual, head_fp32=True, upcast=False, scaled="copy")
    if s.loss == "chunked":
        return Path("chunked-logits")
    whole = Path("cross-entropy", head_fp32=True, outside=True)
    if at_least(s.versions["torchtune"], DROPS):
        return whole
    return replace(whole, shift_copy=True, held="next" if s.accumulation > 1 else "step")


def compiles_loss(s: Scenario) -> bool:
    """True if `compile` reaches the loss: `compile_loss` compiles one in chunks in place, and returns any other.

    All recipes but those for adapters on one GPU drop what it returns (recipes/full_finetune_single_device.py:294, the
    same in 0.3.1 to 0.6.1; lora_finetune_single_device.py:298).
    """
    return s.loss == "chunked" or (s.method != "full" and s.sharding == "none")


def notes(s: Scenario) -> Iterator[str]:
    """Notes on parts of torchtune that are computed otherwise."""
    yield from shared.told(s, RELEASES)
    if s.architecture.family not in ROTATED:
        yield f"layers of {s.architecture.family} are computed as Transformers'"
    if s.loss == "chunked" and s.compile == "none":
        yield "compile is computed as off: compiled, the loss keeps no fp32 log-softmax"
