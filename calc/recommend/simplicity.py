"""The simpler of two configurations: the one that somebody would run first if their times cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from calc.recommend.space import KEPT, TURNS, Branch
from calc.scenario.scenario import Scenario

# From what every loop can run to what takes most care. FSDP 2, which replaces FSDP 1 in PyTorch, saves and loads each
# parameter by its name and takes frozen ones beside trained ones in any order, where FSDP 1 has flat parameters.
SHARDING = ("none", "ddp", "zero1", "zero2", "fsdp2", "zero3", "fsdp1", "megatron")


class Effort(NamedTuple):
    """The effort that a configuration asks of those who run it; less is simpler, and the first difference decides.

    The number of `offloaded` settings, the degree of `recomputation`, the rank of its `sharding` in SHARDING, into how
    many parts the model is `cut`, whether vLLM has GPUs `apart`, and the `ranks` of one engine, none if the trained
    model generates by itself.
    """

    offloaded: int
    recomputation: int
    sharding: int
    cut: int
    apart: bool
    ranks: int


def efforts(branch: Branch) -> Iterator[tuple[Effort, tuple[int, ...]]]:
    """The effort of every choice of a branch's turns; the lean axes cost none."""
    base = branch.base
    for turn in product(*[range(n + 1) for n in branch.leanest[: branch.turns]]):
        changes: dict[str, Any] = {}
        for axis, index in zip(branch.axes, turn, strict=False):
            changes |= axis.values[index]
        yield effort(base, changes), turn


def effort(base: Scenario, changes: dict[str, Any]) -> Effort:
    """The effort of `base` with some settings changed."""
    offload = base.offload
    offloads = dict(zip(KEPT, (offload.optimizer, offload.parameters, offload.fraction), strict=True))
    moved = offloads | {name: value for name, value in changes.items() if name.endswith(tuple(KEPT))}
    checkpointing = changes.get("checkpointing", base.checkpointing)
    return Effort(
        sum(map(bool, moved.values())),
        TURNS["checkpointing"].index(checkpointing),
        SHARDING.index(base.sharding),
        base.together * base.expert_parallel * base.expert_tensor_parallel,
        base.placement == "separate",
        base.rollout.tensor_parallel if base.rollout and base.rollout.serves else 0,
    )
