"""litgpt's scripts on Lightning's Fabric: a model, adapters and a loss of their own, and FSDP 1 with a unit a layer.

`finetune/{lora,full}.py` and `pretrain.py`, which compiles the whole model: that is not computed.

With plain PyTorch they are the scenario's `trainer`. Read in litgpt 0.4.0, which in all of this is as lit-gpt was in
the spring of 2024, when its published tables were made, and in lightning 2.6 (`fabric/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calc.base.plan import Cut, Path
from calc.base.refusal import Refusal
from calc.frameworks.torch.trainers import habits as shared
from calc.models.architecture import Architecture, ConfigError
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft", "inference")
FAMILIES = ("llama", "mistral", "falcon")
# positions for which the head makes logits at once (`finetune/lora.py`: lm_head_chunk_size), or, where it makes all, of
# which a cross entropy is taken at once (`utils.py:chunked_cross_entropy`)
PIECE = 128


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
    """The defaults of litgpt's scripts, by dotted key (`finetune/{lora,full}.py`, `pretrain.py`)."""
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
        # activation_checkpointing_policy={Block} of finetune/
        "checkpointing": "full" if several and task != "pretrain" else "none",
        "reentrant": False,  # CheckpointImpl.NO_REENTRANT (lightning fabric/strategies/fsdp.py)
        "optimizer_impl": "fused" if task == "pretrain" else "foreach",
        "grad_dtype": "bf16",
        "loss": "chunked",
        **(adapters if given.get("method", "full") != "full" else {}),
    }


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: pieces of logits that a variable of the loop holds until there are new ones (`fit`).

    With adapters the head makes them so. Else it makes all, and Fabric fp32 of these (lightning
    `fabric/plugins/precision/half.py:convert_output`); pieces of them keep a log-softmax each. Fine-tuning cuts off the
    last position, where `reshape` copies several rows (`finetune/full.py:239`).
    """
    if s.task == "inference":
        return usual
    if s.method == "full":
        cut: Cut = "slice" if s.task == "sft" else ""
        copied = bool(cut) and s.rows > 1
        return Path("selective", head_fp32=True, held="next", cut=cut, copied=copied, tile=PIECE, outside=True)
    return Path("pieces", held="step", tile=min(PIECE, s.longest_len) * s.rows)


def keeps(s: Scenario) -> dict[str, Any]:
    """The fields that Fabric sets in the trained `Role`: 4-bit weights unpack to fp16, and are then cast to bf16.

    They were quantised in fp16 (`plugins/precision/bitsandbytes.py`, `torch.half`); both copies exist at once.
    """
    return {"unpacks": 4} if s.method == "qlora" else {}


def notes(s: Scenario) -> tuple[str, ...]:
    """Notes on what no field of a scenario says."""
    return ("pretrain.py compiles the whole model: computed as not compiled",) if s.task == "pretrain" else ()


def refuse(s: Scenario) -> Refusal | None:
    """The reason why litgpt cannot run `s`, in one line, or None."""
    if s.offload.activations:
        return Refusal("offload.activations", "true with trainer litgpt", "false; it has no switch for it")
    given = "with trainer litgpt"
    if s.task == "pretrain" and s.method != "full":
        return Refusal("method", f"{s.method!r} for {s.task} {given}", "full")
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
