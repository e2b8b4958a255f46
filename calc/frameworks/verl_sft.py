"""verl's SFT trainer: `trainer/sft_trainer.py` on the engine that trains actors, which is the only one since 0.7.1.

Before, `fsdp_sft_trainer.py` with a loss of its own stood beside it. Read in 0.7.1, 0.8.0, 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from calc.frameworks import at_least
from calc.keeps import Keeps, Path, Role, Stage

if TYPE_CHECKING:
    from calc.scenario import Scenario

TASKS = ("sft",)
FIRST = "0.7.1"
LENGTH = 1024  # data.max_length
TOKENS = 8192  # data.max_token_len_per_gpu: batches are filled up to it (use_dynamic_bsz)


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """`trainer/config/sft_trainer_engine.yaml`, by dotted key, where it differs from the actor's; `given` by the user.

    A dynamic batch is computed as the sequences of full length that it holds.
    """
    length = int(given.get("seq_len", LENGTH))
    share = TOKENS * int(given.get("context_parallel", 1)) // length
    return {"seq_len": LENGTH, "micro_batch": max(1, share), "global_batch": 256}  # data.train_batch_size


def refuse(s: Scenario) -> str | None:
    """One line on why the trainer cannot run `s`, beside what verl's engine refuses; None when it can."""
    if not at_least(s.framework_version, FIRST):
        version = s.framework_version
        return f"task: given 'sft', allowed with verl {version}: ppo, grpo, reinforce++; sft from {FIRST} on"
    if not s.packing:  # data.pad_mode no_padding, of which the engine's other way has no use here
        return "packing: given false for sft, allowed with verl: true; batches have no padding"
    return None


def keeps(s: Scenario, path: Path) -> Keeps:
    """One model, and the state dict of its shards for a checkpoint; `path` is that of an actor's log-probabilities."""
    leaves = {word for word, on in (("weights", s.offload.parameters), ("states", s.offload.optimizer)) if on}
    # `no_sync` in 0.9.0 alone, as for the actor
    deferring = s.framework_version == "0.9.0"
    role = Role("actor", path, path, s.rows, s.rows, frozenset(leaves), defers=deferring, exchange="all-to-all")
    save = Stage("save", "actor", holds=("units",), host="shards", host_bytes=4)
    stages = (Stage("train", "actor"), save if s.sharding == "fsdp1" else Stage("save", "actor"))
    return Keeps((role,), stages, ("actor",))
