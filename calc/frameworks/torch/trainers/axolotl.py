"""Axolotl on Transformers' Trainer: weights in bf16, its own FSDP 2, TRL's DPO and reward trainers.

Files are those of axolotl 0.19.0 (`src/axolotl/`) and of trl 1.9.0, which it pins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from calc.base.plan import DeepSpeed, Path
from calc.base.refusal import Refusal
from calc.frameworks import trainer
from calc.frameworks.releases import NOTHING, Default, Table, stated
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import habits as shared
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario
from calc.scenario.words import PAIRED

TASKS = ("pretrain", "sft", "rm", "dpo")
FIRST = "0.19.0"
RELEASES: Mapping[str, Pins] = {FIRST: Pins("0.18.9", "2.13.0", "5.16.1")}  # PyTorch and DeepSpeed as METADATA allows

DEFAULTS = Table(
    Default("seq_len", FIRST, 512, "sequence_len (utils/schemas/config.py:671)"),
    Default("micro_batch", FIRST, 1, "micro_batch_size (utils/schemas/training.py:77)"),
    Default("optimizer", FIRST, "adamw", "optimizer adamw_torch_fused (utils/schemas/training.py:122)"),
    Default("checkpointing", FIRST, "none", "gradient_checkpointing false (utils/schemas/config.py:606)"),
    Default("attention", FIRST, "sdpa", "attn_implementation None: Transformers' choice (utils/schemas/config.py:845)"),
    Default("loss", FIRST, "full", "the model's own; cut_cross_entropy and Liger are plugins"),
    Default("logprob", FIRST, "selective", "selective_log_softmax (trl trainer/dpo_trainer.py:1347)"),
    Default("packing", FIRST, False, "sample_packing None (utils/schemas/config.py:694)"),
    Default("expandable_segments", FIRST, True, "expandable_segments (utils/__init__.py:84)"),
)
ADAPTERS = Table(
    Default("lora.dropout", FIRST, 0, "lora_dropout (utils/schemas/peft.py:80)"),
    Default("lora.targets", FIRST, "all-linear", "no default: lora_target_linear of the examples"),
    Default("double_quantization", FIRST, True, "bnb_4bit_use_double_quant (loaders/model.py:807)"),
)


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Its defaults for `task`, by dotted key; `bf16: auto` loads weights in bf16 (utils/config/__init__.py:198)."""
    version, libraries = shared.release("axolotl", RELEASES, given)
    values = stated(task, version, DEFAULTS, NOTHING if given.get("method", "full") == "full" else ADAPTERS)
    sharding = shared.sharded(given)
    # its fsdp2_prepare_model leaves weights in the type they have (monkeypatch/accelerate/fsdp2.py:429)
    precision = "bf16" if sharding == "fsdp2" else shared.narrow(given, sharding, wide="bf16")
    return {
        **libraries,
        **values,
        **shared.batches(values, given, 1),
        "sharding": sharding,
        "precision": precision,
        "no_sync": trainer.reduces_once(sharding, given),
        # unless `rl` is set (utils/config/__init__.py:401), or checkpoint wrappers are within TRL's OffloadActivations
        # (core/trainers/mixins/activation_checkpointing.py)
        "reentrant": task != "dpo" and not given.get("offload.activations"),
    }


def modelled(architecture: Architecture) -> Architecture:
    """The model, whose tower gets squares of its config's `image_size` (loaders/utils.py:78, ImageOps.pad in
    processing_strategies.py:295); what keeps an image's shape is left alone, as its config has no such side.
    """
    tower = architecture.vision
    return replace(architecture, vision=replace(tower, squared=True)) if tower and tower.edge else architecture


def refuse(s: Scenario) -> Refusal | None:
    """The reason why Axolotl cannot run `s`, in one line, or None."""
    if s.quantize_moe_experts and s.lora and isinstance(s.lora.targets, str):
        # utils/schemas/config.py:1953: lora_target_linear
        return Refusal(
            "lora.targets", f"{s.lora.targets!r} with quantize_moe_experts", "a list", "with trainer axolotl"
        )
    return shared.refuse(s, TASKS, {"loss": ("full", "chunked", "fused", "cut"), "checkpointing": ("none", "full")})


def deepspeed(s: Scenario) -> DeepSpeed:
    """DeepSpeed with the file that it ships for the stage (deepspeed_configs/zero2.json, zero3_bf16.json)."""
    return replace(shared.shipped(s), overlap_comm=True)


def keeps(s: Scenario) -> dict[str, Any]:
    """The Trainer's fields of the trained role; TRL's trainers of pairs switch dropout off."""
    # checkpointing is switched on as the model is loaded (loaders/model.py, `gradient_checkpointing_enable`)
    own: dict[str, Any] = {"dropout": s.task not in PAIRED, "adapts_first": False}
    return trainer.keeps(s, placed=True) | own | ({"streams": "stash"} if s.offload.activations else {})


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: the model's own, or one in chunks of its logits; for pairs TRL's, see `trainer.selective`.

    `chunked_cross_entropy` is a loss function in place of Transformers' own (monkeypatch/loss/chunked.py).
    """
    if s.loss == "chunked" and s.task not in PAIRED:
        return Path("chunked-views", outputs_fp32=trainer.wrapped(s))
    return trainer.selective(usual)


def notes(s: Scenario) -> Iterator[str]:
    """Notes on parts of Axolotl that are computed otherwise."""
    yield from shared.told(s, RELEASES)
    if s.lora and not s.lora.dropout:
        yield "lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel: on by themselves without dropout, computed as off"
    if not s.lora and s.attention != "flash" and s.sharded.family not in ("fsdp", "zero"):
        yield "without FlashAttention embeddings, head and norms are trained in fp32: computed in bf16"
