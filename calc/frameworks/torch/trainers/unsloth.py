"""Unsloth's `unsloth train` on TRL's SFTTrainer: adapters beside 4-bit weights, a fused loss, kernels of its own.

Files are those of unsloth 2026.10.9 and unsloth_zoo 2026.10.9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calc.base.plan import Path
from calc.base.refusal import Refusal
from calc.frameworks import trainer
from calc.frameworks.releases import NOTHING, Default, Table, stated
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import habits as shared
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft")
FIRST = "2026.10.9"
RELEASES: Mapping[str, Pins] = {FIRST: Pins("0.19.8", "2.13.0", "5.17.0")}  # PyTorch, Transformers: as METADATA allows
FIXED = {"optimizer": "adamw-8bit"}  # what its command sets for good (unsloth_cli/commands/train.py:63)
ACCUMULATION = 4  # gradient_accumulation_steps (unsloth_cli/config.py:36)

DEFAULTS = Table(
    Default("seq_len", FIRST, 2048, "max_seq_length (unsloth_cli/config.py:30)"),
    Default("micro_batch", FIRST, 2, "batch_size (unsloth_cli/config.py:35)"),
    Default("optimizer", FIRST, FIXED["optimizer"], "adamw_8bit (unsloth_cli/commands/train.py:63)"),
    Default("checkpointing", FIRST, "full", "gradient_checkpointing unsloth (unsloth_cli/config.py:44)"),
    Default("attention", FIRST, "flash", "flash-attn, or else xFormers: both keep the same (models/llama.py)"),
    Default("loss", FIRST, "fused", "unsloth_fused_ce_loss (unsloth_zoo/fused_losses/cross_entropy_loss.py)"),
    Default("packing", FIRST, False, "packing (unsloth_cli/config.py:42)"),
)
ADAPTERS = Table(
    Default("lora.rank", FIRST, 64, "lora_r (unsloth_cli/config.py:67)"),
    Default("lora.dropout", FIRST, 0, "lora_dropout (unsloth_cli/config.py:69)"),
    Default(
        "lora.targets", FIRST, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "target_modules (unsloth_cli/config.py:70)",
    ),
    Default("lora.dtype", FIRST, "fp32", "prepare_model_for_training (unsloth_zoo, training_utils.py:359)"),
    Default("double_quantization", FIRST, True, "bnb_4bit_use_double_quant (unsloth/models/llama.py:4017)"),
)  # fmt: skip


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of its command for `task`, by dotted key; weights are bf16, trained whole too (models/vision.py)."""
    version, libraries = shared.release("unsloth", RELEASES, given)
    values = stated(task, version, DEFAULTS, NOTHING if given.get("method", "full") == "full" else ADAPTERS)
    return {
        **libraries,
        **values,
        **shared.batches(values, given, ACCUMULATION),
        "sharding": shared.sharded(given),
        "precision": "bf16",
        # the checkpointing named unsloth (unsloth_zoo/gradient_checkpointing.py): of the reentrant kind
        "offload.activations": given.get("checkpointing", values["checkpointing"]) == "full",
        "reentrant": True,
    }


def refuse(s: Scenario) -> Refusal | None:
    """The reason why Unsloth cannot run `s`, in one line, or None."""
    fixed: dict[str, tuple[str, ...]] = {
        "sharding": ("none", "ddp"),
        # chosen by the card (models/vision.py:2294); what is trained whole in fp16 is kept in fp32 (:4043)
        "precision": ("bf16",) if s.method == "full" else ("bf16", "fp16"),
        "kernels": ("eager",),
        "loss": ("full", "fused"),
        "checkpointing": ("none", "full"),
    }
    return shared.refuse(s, TASKS, fixed)


def keeps(s: Scenario) -> dict[str, Any]:
    """The Trainer's fields of the trained role."""
    return trainer.keeps(s) | ({"streams": "buffers"} if s.offload.activations else {})


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: gradients made going forward, or the model's own."""
    return usual


def notes(s: Scenario) -> Iterator[str]:
    """Notes on parts of Unsloth that are computed otherwise."""
    yield from shared.told(s, RELEASES)
    yield "Unsloth's kernels for norms, rotation, MLP and adapters keep less than the layers computed, Transformers'"
    if s.loss == "fused":
        yield "its fused loss takes chunks as large as free memory allows: computed with as small ones as Liger's"
