"""A job with its roles placed: what every set of its GPUs and every node of it is made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

from calc import placement
from calc.architecture import Architecture
from calc.catalog import GPU
from calc.engines.replica import Replica
from calc.phases import Batch, Step, step
from calc.scenario import Scenario, cardless, framework

T = TypeVar("T")


class Roles:
    """The roles of a scenario, each under its engine: what is the same on every card, computed once for all of them."""

    def __init__(self, s: Scenario) -> None:
        """Place the roles of `s`."""
        keeps = framework(s.framework).keeps(s)
        self.keeps = keeps.without_rollout() if s.rollout and s.rollout.engine == "none" else keeps
        self.placed = {role.name: placement.place(s, role, self.keeps) for role in self.keeps.roles}
        self._known: dict[Hashable, Any] = {}

    def once(self, what: Hashable, found: Callable[[], T]) -> T:
        """What `found` gives, which follows from `what` and the roles alone."""
        if what not in self._known:
            self._known[what] = found()
        known: T = self._known[what]
        return known


# A search and the look-up tables ask the same configurations of a model on card after card.
@lru_cache(maxsize=1024)
def _roles(s: Scenario, *models: Architecture) -> Roles:
    """`models`: those of `s`, by which scenarios do not compare."""
    return Roles(s)


class Job:
    """One scenario with its roles placed on a card."""

    def __init__(self, s: Scenario, gpu: GPU) -> None:
        """Place the roles of `s` on its GPUs."""
        self.s, self.gpu = s, gpu
        self.roles = _roles(cardless(s), s.architecture, *s.architectures.values())
        self.keeps, self.placed = self.roles.keeps, self.roles.placed
        self.engine = placement.serving(s, self.keeps, gpu)

    def batch(self, s: Scenario, rows: int) -> Batch:
        """`rows` sequences as a role with scenario `s` runs them: at their cap, or at their mean without padding.

        Of their tokens a GPU has the share that context parallelism leaves it.
        """
        length = s.expected_len if s.packing else s.seq_len
        return Batch(-(-rows * length // s.context_parallel), length)

    def step(self, r: Replica, s: Scenario, batch: Batch) -> Step:
        """The activations of a model on one micro-batch.

        SDPA needs a mask once the window is no longer than what a rank's model sees of a sequence.
        """
        window, seen = r.arch.sliding_window, batch.length // s.context_parallel
        return step(
            r.role,
            r.run,
            r.path,
            r.trainable,
            batch,
            masked=s.attention == "sdpa" and window is not None and seen >= window,
            checkpointing=s.checkpointing if r.optimizer else "none",
            inner=s.sharding.startswith("fsdp") and not r.stays,
        )
