"""litgpt's scripts on Lightning's Fabric: a model, adapters and a loss of their own, and FSDP 1 with a unit a layer.

With plain PyTorch they are the scenario's `trainer`. Read in litgpt 0.4.0, which in all of this is as lit-gpt was in
the spring of 2024, when its published tables were made, and in lightning 2.6 (`fabric/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calc.base.plan import Path
from calc.base.refusal import Refusal
from calc.frameworks.torch.trainers import habits as shared
from calc.models.architecture import Architecture, ConfigError
from calc.scenario.scenario import Scenario

TASKS = ("sft", "inference")
FAMILIES = ("llama", "mistral", "falcon")
PIECE = 128  # positions for which the head makes logits at once (`finetune/lora.py`: lm_head_chunk_size)


def modelled(arch: Architecture) -> Architecture:
    """The model as `litgpt/model.py` has it: one product for q, k and v, a head of its own, no window.

    Parameters are those of Transformers' model, except that no head is tied. Raises ConfigError for the field `trainer`
    if litgpt's code for the family has not been read.
    """
    if arch.family not in FAMILIES:
        known = f"litgpt's code is read for {', '.join(FAMILIES)}"
        raise ConfigError("trainer", "litgpt", f"own, transformers for the family {arch.family}; {known}")
    return replace(
        arch, modeling="litgpt", tied=False, rotation="joined", sliding_window=None,
        specs=tuple(spec._replace(slides=False) for spec in arch.specs),
        fused_qkv="", joined=False, masked=False, own_eager=False,
    )  # fmt: skip


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of litgpt's scripts, by dotted key (`finetune/lora.py`)."""
    several = int(given.get("gpus", 1)) > 1
    adapters = {
        "lora.dropout": 0.05,
        "lora.units": "layer" if several else "own",
        "lora.dtype": "bf16",
        "lora.targets": ["q_proj", "v_proj"],
    }
    return {
        "precision": "bf16",  # bf16-true
        "sharding": "fsdp1" if several else "none",
        "no_sync": several,
        "checkpointing": "full" if several else "none",  # activation_checkpointing_policy={Block}
        "reentrant": False,  # CheckpointImpl.NO_REENTRANT (lightning fabric/strategies/fsdp.py)
        "optimizer_impl": "foreach",
        "grad_dtype": "bf16",
        "loss": "chunked",
        **(adapters if given.get("method", "full") != "full" else {}),
    }


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: pieces of logits that a variable of the loop holds until there are new ones (`fit`)."""
    if s.task == "inference":
        return usual
    return Path("pieces", held="step", tile=min(PIECE, s.longest_len) * s.rows)


def keeps(s: Scenario) -> dict[str, Any]:
    """The fields that Fabric sets in the trained `Role`: 4-bit weights unpack to fp16, and are then cast to bf16.

    They were quantised in fp16 (`plugins/precision/bitsandbytes.py`, `torch.half`); both copies exist at once.
    """
    return {"unpacks": 4} if s.method == "qlora" else {}


def notes(s: Scenario) -> tuple[str, ...]:
    """Notes on what no field of a scenario says: none."""
    return ()


def refuse(s: Scenario) -> Refusal | None:
    """The reason why litgpt cannot run `s`, in one line, or None."""
    if s.offload.activations:
        return Refusal("offload.activations", "true with trainer litgpt", "false; it has no switch for it")
    given = "with trainer litgpt"
    if s.task == "sft" and s.method == "full":
        return Refusal("method", f"'full' {given}", "lora, qlora; the loss of its full fine-tuning is not modelled")
    fixed: dict[str, tuple[str, ...]] = {
        "sharding": ("none", "ddp", "fsdp1"),
        "precision": ("bf16", "fp32"),
        "kernels": ("eager",),
        "loss": ("chunked",),
        "attention": ("sdpa",),
        "checkpointing": ("none", "full"),
    }
    if fault := shared.refuse(s, TASKS, fixed):
        return fault
    if s.lora and s.lora.dtype != s.precision:
        return Refusal("lora.dtype", f"{s.lora.dtype!r} {given}", f"{s.precision}, as the model")
    return None
