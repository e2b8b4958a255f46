"""verl's SFT trainer: `trainer/sft_trainer.py` on either engine that trains actors, the only SFT trainer since 0.7.1.

Before, there was `fsdp_sft_trainer.py` with a loss of its own. Read in 0.7.1, 0.8.0, 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calc.base.plan import Keeps, Stage
from calc.base.refusal import Refusal
from calc.frameworks import megatron_core
from calc.frameworks.verl import engine, megatron
from calc.frameworks.verl.releases import reached
from calc.scenario.scenario import Scenario

TASKS = ("sft",)
FIRST = "0.7.1"


def defaults(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of a batch, dynamic unless a micro batch is given: `values` has its bound; `given` is the user's.

    Each batch has room for one sequence at least.
    """
    if "micro_batch" in given:
        return {"max_tokens_per_gpu": None}
    least = -(-int(given.get("seq_len", values["seq_len"])) // int(given.get("context_parallel", 1)))
    return {"max_tokens_per_gpu": max(values["max_tokens_per_gpu"], least)}


def refuse(s: Scenario) -> Refusal | None:
    """The reason why the trainer cannot run `s`, beside what verl's engine refuses, in one line, or None."""
    if not reached(s.framework_version, FIRST):
        version = s.framework_version
        return Refusal("task", "'sft'", f"ppo, grpo, reinforce++; sft from {FIRST} on", f"with verl {version}")
    if not s.packing:  # data.pad_mode no_padding, of which the engine's other way has no use here
        return Refusal("packing", "false for sft", "true; batches have no padding", "with verl")
    return None


def keeps(s: Scenario) -> Keeps:
    """The plan of SFT: one model, trained on log-probabilities as an actor is, and a checkpoint."""
    if s.sharding == "megatron":
        found = tuple(megatron.roles(s))
        names = tuple(role.name for role in found)
        return Keeps(found, megatron.stages(s, [*names]), names, notes=tuple(megatron_core.notes(s)))
    path = engine.loss_path(s, s.rows, entropy=False)
    stages = (Stage("train", "actor"), engine.saving(s, "actor"))
    return Keeps((engine.role("actor", s, path, path, s.rows, s.rows),), stages, ("actor",))
