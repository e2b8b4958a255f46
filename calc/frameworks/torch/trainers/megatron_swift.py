"""ms-swift's `megatron pt`, `megatron sft` and `megatron rlhf`: Megatron-core's layers under its own loop and defaults.

Files are those of ms-swift 4.6.0 (`swift/megatron/`) unless a release is named; 3.12.0 has the arguments in
`argument/megatron_args.py`. See `calc.frameworks.torch.trainers.megatron` for what Megatron-core keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calc.base.plan import Path
from calc.base.refusal import Refusal
from calc.base.schema import show
from calc.base.versions import at_least
from calc.frameworks import megatron_core
from calc.frameworks.releases import NOTHING, Default, Table, stated
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import habits as shared
from calc.frameworks.torch.trainers import megatron
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft", "rm", "dpo", "kto")
FIRST = "3.12.0"
# Libraries as those of `ms_swift.RELEASES`; it leaves Megatron-core's version open
RELEASES: Mapping[str, Pins] = {
    FIRST: Pins("0.17.6", "2.8.0", "4.57.1"),
    "4.6.0": Pins("0.19.8", "2.13.0", "5.19.0"),
}
STEP = 16  # sequences of a step over all GPUs (arguments/megatron_args.py:503)

DEFAULTS = Table(
    Default("micro_batch", FIRST, 1, "micro_batch_size (arguments/megatron_args.py:502)"),
    Default("loss", FIRST, "full", "cross_entropy_loss_fusion false (argument/megatron_args.py:420 of 3.12.0)"),
    Default("loss", "4.6.0", "fused", "cross_entropy_loss_fusion (arguments/megatron_args.py:516)"),
    Default("attention", FIRST, "flash", "attention_backend flash (arguments/megatron_args.py:519)"),
    Default("sequence_parallel", FIRST, False, "sequence_parallel (arguments/megatron_args.py:628)"),
    Default("expert_tensor_parallel", FIRST, 1, "expert_tensor_parallel_size (arguments/megatron_args.py:645)"),
    Default("padding_free", FIRST, True, "padding_free (arguments/megatron_args.py:545)"),
    Default("packing", FIRST, False, "packing (swift/arguments/base_args/base_args.py:133)"),
    Default("versions.transformer-engine", FIRST, "2.10", "recommended (docs/source_en/Megatron-SWIFT/Quick-start.md)"),
    Default("versions.transformer-engine", "4.6.0", "2.16", "recommended, as before"),
)
ADAPTERS = Table(
    Default("lora.rank", FIRST, 8, "lora_rank (arguments/megatron_args.py:485)"),
    Default("lora.dropout", FIRST, 0.05, "lora_dropout (arguments/megatron_args.py:487)"),
    Default("lora.targets", FIRST, "all-linear", "target_modules (arguments/megatron_args.py:480)"),
    Default("lora.dtype", FIRST, "bf16", "Float16Module (utils/megatron_lm_utils.py:659)"),
)
# what stages hand on: the reference's stream with the policy's, for kto those of the KL estimate, too
# (trainers/dpo_trainer.py:94, trainers/kto_trainer.py:146)
HANDED = {"dpo": 2, "kto": 4}
MUON = "4.1"  # has `dist_muon`, by default of each rank's part of a matrix (4.1.0 arguments/megatron_args.py:432)
# since when layers and adapters are mcore-bridge's: the first matrix beside a cut linear sees a rank's own positions
BRIDGE = "4"
GEMMA = ("gemma4_text", "gemma4")  # families whose layers are mcore-bridge's (1.6.5 `model/mm_gpts/gemma4.py`)


def modelled(arch: Architecture, version: str, depths: int = 0) -> Architecture:
    """The model as Megatron-core has it, with mcore-bridge's linear attention and `depths` of multi-token prediction.

    Before, each rank ran Transformers' own on all positions (`swift/megatron/model/gpt/qwen3_next.py` of 3.12.0).
    """
    bridged = at_least(version, BRIDGE)
    linear = "" if bridged else f"megatron-swift from {BRIDGE} on; before, ranks did not share it: not modelled"
    further = (*GEMMA, *megatron_core.HYBRID) if bridged else ()
    own = megatron_core.modelled(
        arch, "trainer", "own", given="megatron-swift", linear=linear, by_head=True,
        adapters="own" if bridged else "whole", towers=True, further=(*megatron_core.GLM, *further),
    )  # fmt: skip
    return megatron_core.with_depths(own, depths)


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Its defaults for `task`, by dotted key: Megatron-core's, but for what its own arguments say."""
    version, libraries = shared.release("megatron-swift", RELEASES, given)
    values = stated(task, version, DEFAULTS, NOTHING if given.get("method", "full") == "full" else ADAPTERS)
    one = shared.batches(values, given, 1)["global_batch"]
    # a pack has as many tokens as a sequence may have: those of both halves of its pairs, or of completions and the KL
    # estimate's (swift/dataset/packing.py, `create_packed_idx`)
    halves = {"expected_len": max(1, int(given["seq_len"]) // 2)} if packs(task, given) else {}
    return {
        **megatron.habits(task, given),
        **halves,
        **libraries,
        **values,
        **shared.batches(values, given, max(1, -(-STEP // one))),
        "checkpointing": "none",
        "create_attention_mask_in_dataloader": False,  # it makes one where batches are padded
        **({"images.freeze": "vision", "images.checkpointing": hooks(version)} if "images.width" in given else {}),
    }


def hooks(version: str) -> bool:
    """True if it makes a tower's embedded patches require a gradient, frozen or not, and recomputes its blocks.

    Before 4.0 `vit_gradient_checkpointing` is on; since then it follows `freeze_vit` (`trainers/base.py:520` of 3.12.0,
    `_prepare_vit_gradient_checkpointing`; arguments/megatron_args.py:807).
    """
    return not at_least(version, BRIDGE)


def packs(task: str, given: Mapping[str, Any]) -> bool:
    """True if a pack of a given length holds what a scenario counts as two sequences."""
    return task in ("rm", "dpo", "kto") and bool(given.get("packing")) and "seq_len" in given


def refuse(s: Scenario) -> Refusal | None:
    """The reason why it cannot run `s`, or is not modelled for it, in one line, or None."""
    own: dict[str, tuple[Any, ...]] = {
        "packing": (False, True),
        "method": ("full", "lora"),
        "attention": ("flash", "eager"),
    }
    if s.images and s.images.freeze != "vision":
        return Refusal("images.freeze", f"{s.images.freeze!r} with trainer {s.trainer}", "vision; not modelled")
    # mcore-bridge has a forward of linear attention of its own, which runs no part again
    if s.method == "full" and at_least(s.versions.get("megatron-swift", FIRST), MUON):
        own["optimizer"] = ("adamw", "muon")
    fault = megatron.refuse_with(s, TASKS, own) or megatron_core.parts_fault(s, known=False) or unfused_fault(s)
    fault = fault or megatron.orthogonal_fault(s) or rlhf_fault(s)
    return fault or (adapters_fault(s) if s.lora else None)


def unfused_fault(s: Scenario) -> Refusal | None:
    """The reason why attention cannot write its scores out, or is not modelled so, in one line, or None.

    Transformer Engine's own has padded rows, on one rank each (`attention_backend unfused`).
    """
    if s.attention == "flash":
        return None
    given = f"with attention {s.attention}"
    for field, value, allowed in (
        ("padding_free", s.unpadded, False),
        ("context_parallel", s.context_parallel, 1),
        ("checkpointing", s.checkpointing, "full"),
    ):
        if value != allowed:
            return Refusal(field, f"{show(value)} {given}", f"{show(allowed)}; not modelled")
    return None


def rlhf_fault(s: Scenario) -> Refusal | None:
    """The reason why `megatron rlhf` cannot run `s`, or is not modelled for it, in one line, or None.

    The reference is a second model with the trained one's settings, or that model without its adapters
    (trainers/rlhf_mixin.py, `null_ref_context`).
    """
    given = f"for {s.task} with trainer {s.trainer}"
    if s.task in ("pretrain", "sft"):
        return None
    if s.task == "rm":
        context = s.context_parallel
        return Refusal("context_parallel", f"{context} {given}", "1; not modelled") if context > 1 else None
    own = s.roles["reference"]
    if isinstance(own, str):
        return Refusal("roles.reference", f"'none' {given}", "a model, which scores every micro batch")
    for field, value in own.items():
        if field != "model":
            return Refusal(f"roles.reference.{field}", f"{show(value)} {given}", "none; it has the trained model's")
    if s.lora and own["model"] != s.model:
        return Refusal("roles.reference.model", f"{own['model']!r} with method lora", f"{s.model}, without adapters")
    return None


def adapters_fault(s: Scenario) -> Refusal | None:
    """The reason why adapters cannot be as `s` asks, in one line, or None.

    `Float16Module` casts every parameter; "Currently, LoRA does not support ETP" (mcore-bridge 1.6.5 `tuners/lora.py`).
    """
    assert s.lora
    if s.lora.dtype != "bf16":
        return Refusal("lora.dtype", f"{s.lora.dtype!r} with trainer {s.trainer}", "bf16")
    if s.architecture.experts and s.expert_tensor_parallel > 1:
        return Refusal("expert_tensor_parallel", f"{s.expert_tensor_parallel} with method lora", "1")
    return None


def keeps(s: Scenario) -> dict[str, Any]:
    """The fields that it sets in a trained `Role`; batches that are padded have a mask (`template/base.py`)."""
    hooked = hooks(str(s.versions["megatron-swift"]))
    return {"handed": HANDED.get(s.task, 1), "masks": not s.unpadded, "hooks": hooked, "blockwise": True}


def path(s: Scenario, usual: Path) -> Path:
    """The loss path, Megatron-core's."""
    return megatron.path(s, usual)


def notes(s: Scenario) -> Iterator[str]:
    """Notes on what no field of a scenario says."""
    yield from shared.told(s, RELEASES)
    if packs(s.task, {"packing": s.packing, "seq_len": s.seq_len}):
        yield "a pack of max_length tokens holds two halves: expected_len is half of seq_len unless given"
    if s.task == "kto":
        yield "KL forwards, without gradient, run before the policy's: they need no more than the reference's"
    if s.checkpointing == "none":
        yield "recompute_granularity selective, of core_attn: a fused kernel leaves nothing that would be run again"
    yield from megatron.notes(s)
    yield from megatron_core.notes(s)
