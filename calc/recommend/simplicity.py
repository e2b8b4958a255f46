"""The simpler of two configurations: the one that somebody would run first if their times cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from calc.recommend.space import KEPT, TURNS, Branch, Fields
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
    """The effort of every choice of a branch's turns; the lean axes cost none.

    Each axis has fields of its own, so that what its values add is added up.
    """
    usual = effort(branch.base)
    added = [[added_by(branch.base, value) for value in axis.values] for axis in branch.axes[: branch.turns]]
    for turn in product(*[range(len(values)) for values in added]):
        offloaded, recomputation = usual.offloaded, usual.recomputation
        for values, index in zip(added, turn, strict=True):
            moved, again = values[index]
            offloaded, recomputation = offloaded + moved, recomputation + again
        yield Effort(offloaded, recomputation, *usual[2:]), turn


def effort(base: Scenario) -> Effort:
    """The effort of `base`."""
    return Effort(
        sum(map(bool, _offloads(base).values())),
        TURNS["checkpointing"].index(base.checkpointing),
        SHARDING.index(base.sharding),
        base.together * base.expert_parallel * base.expert_tensor_parallel,
        base.placement == "separate",
        base.rollout.tensor_parallel if base.rollout and base.rollout.serves else 0,
    )


def added_by(base: Scenario, changes: Fields) -> tuple[int, int]:
    """The offloaded settings and the degrees of recomputation that `base` has more with some settings changed."""
    kept, rank = _offloads(base), TURNS["checkpointing"].index
    moved = [bool(value) - bool(kept.get(name)) for name, value in changes.items() if name.endswith(tuple(KEPT))]
    return sum(moved), rank(changes.get("checkpointing", base.checkpointing)) - rank(base.checkpointing)


def _offloads(base: Scenario) -> Fields:
    """The settings of offload that turns change."""
    offload = base.offload
    return dict(zip(KEPT, (offload.optimizer, offload.parameters, offload.fraction), strict=True))
