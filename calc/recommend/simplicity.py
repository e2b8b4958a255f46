"""Which of two configurations is simpler: what somebody would run first where their times do not tell them apart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from calc.recommend.space import OFFLOADS, TURNS, Branch
from calc.scenario import Scenario

# From what every loop can run to what takes most care. FSDP 2 saves and loads each parameter by its name, and takes
# frozen ones beside trained ones in any order, where FSDP 1 has flat parameters; it replaces it in PyTorch.
SHARDING = ("none", "ddp", "zero1", "zero2", "fsdp2", "zero3", "fsdp1")


class Effort(NamedTuple):
    """What a configuration asks of those who run it; less is simpler, the first difference decides.

    `offloaded` settings, the degree of `recomputation`, the place of its `sharding` among all, vLLM on GPUs `apart`,
    the `ranks` of one engine.
    """

    offloaded: int
    recomputation: int
    sharding: int
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
    """That of `base` with some settings changed."""
    offloads = dict(zip(OFFLOADS, (base.offload.optimizer, base.offload.parameters), strict=True))
    moved = offloads | {name: value for name, value in changes.items() if name.endswith(OFFLOADS)}
    checkpointing = changes.get("checkpointing", base.checkpointing)
    return Effort(
        sum(map(bool, moved.values())),
        TURNS["checkpointing"].index(checkpointing),
        SHARDING.index(base.sharding),
        base.placement == "separate",
        base.rollout.tensor_parallel if base.rollout and base.rollout.engine == "vllm" else 1,
    )
