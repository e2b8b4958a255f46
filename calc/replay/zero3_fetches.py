"""The order in which ZeRO-3 gathers and releases parameters, and the blocks that this takes and gives back.

Read in DeepSpeed 0.19.8 `runtime/zero/partitioned_param_coordinator.py` and `partition_parameters.py`. Each module
fetches its parameters before it runs and releases them after. In the first pass DeepSpeed learns the order of the
modules; from the next one on each fetch, even that of a module without parameters, also gathers ahead what comes next,
and a release spares what is used again soon.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from calc.engines.zero import B

REUSE = 1_000_000_000  # elements of modules from now on whose parameters stay (`stage3_max_reuse_distance`)

Module = tuple[int, ...]  # the numbers of a module's own parameters, without those that are never cut
# A slot and the bytes that it requests, or 0 to free the slot's block; parameters have their numbers as slots, buffers
# are below 0
Steps = tuple[tuple[int, int], ...]


class Use(NamedTuple):
    """A module that begins, which fetches it, or ends, which releases it."""

    module: Module
    begins: bool


class Limits(NamedTuple):
    """DeepSpeed's limits in elements: of a gather `ahead`, and of parameters that are whole where any is ahead."""

    ahead: int
    live: int


@dataclass(slots=True)
class Gather:
    """Parameters gathered at once into a buffer, out of which they are copied when the first of them is used.

    The buffer is freed with the last of them, `left` being those that no module has come to.
    """

    slot: int
    parameters: Sequence[int]
    left: set[int] = field(default_factory=set)
    copied: bool = False


@lru_cache(maxsize=256)
def blocks(
    places: tuple[tuple[Use, ...], ...], elements: tuple[int, ...], ranks: int, limits: Limits, *, learnt: bool
) -> tuple[Steps, ...]:
    """The blocks at each of the `places` of a pass, of parameters with so many `elements`; `learnt`: see `steps`."""
    coordinator = Coordinator([use.module for uses in places for use in uses if use.begins], elements, ranks, limits)
    return tuple([coordinator.steps(uses, learnt=learnt) for uses in places])


class Coordinator:
    """DeepSpeed's `PartitionedParameterCoordinator` in one pass: of a model's modules in their `order`."""

    def __init__(self, order: Sequence[Module], elements: Sequence[int], ranks: int, limits: Limits) -> None:
        """Before a pass: nothing is gathered."""
        self.elements, self.ranks, self.limits = elements, ranks, limits
        self.queue = deque([(p, n) for n, module in enumerate(order) for p in module])
        self.uses: dict[int, list[int]] = {}
        for p, n in self.queue:
            self.uses.setdefault(p, []).append(n)
        self.before = [0, *accumulate([sum([elements[p] for p in module]) for module in order])]
        self.place = 0  # `__step_id`: modules that have begun
        self.latest: dict[int, int] = {}  # `__most_recent_step_id_param_fetched_for`
        self.there: set[int] = set()
        self.flying: dict[int, Gather | None] = {}
        self.live = self.buffers = 0

    def steps(self, uses: Iterable[Use], *, learnt: bool) -> Steps:
        """The blocks that come and go as modules begin and end; `learnt`: their order is known."""
        found: list[tuple[int, int]] = []
        for use in uses:
            found += self.fetch(use.module, learnt=learnt) if use.begins else self.release(use.module, learnt=learnt)
        return tuple(found)

    def fetch(self, module: Module, *, learnt: bool) -> Iterator[tuple[int, int]]:
        """Gathers what a module lacks, waits for all that it has, and gathers ahead (`_fetch_sub_module_impl`)."""
        yield from self.gather([p for p in module if p not in self.there])
        for p in module:
            yield from self.wait_for(p)
        if learnt:
            yield from self.ahead(module)
        self.place += 1

    def gather(self, wanted: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Gathers parameters: a single one in place, several through a buffer (`all_gather_coalesced`)."""
        if not wanted:
            return
        self.there.update(wanted)
        self.live += sum([self.elements[p] for p in wanted])
        padded = B * self.ranks * sum([-(-self.elements[p] // self.ranks) for p in wanted])
        if len(wanted) == 1:
            self.flying[wanted[0]] = None
            yield wanted[0], padded
            return
        self.buffers += 1
        each = Gather(-self.buffers, sorted(wanted), set(wanted))
        self.flying |= dict.fromkeys(wanted, each)
        yield each.slot, padded

    def wait_for(self, p: int) -> Iterator[tuple[int, int]]:
        """Waits for a parameter's gather, which copies out all that it has gathered (`AllGatherCoalescedHandle`)."""
        each = self.flying.pop(p, None)
        if not each:
            return
        if not each.copied:
            each.copied = True
            yield from [(q, B * self.elements[q]) for q in each.parameters]
        each.left.discard(p)
        if not each.left:
            yield each.slot, 0

    def ahead(self, module: Module) -> Iterator[tuple[int, int]]:
        """Gathers ahead, as far as the limits let it."""
        fresh = {p for p in module if self.latest.get(p, -1) < self.place}
        passed: set[int] = set()
        while self.queue and len(passed) < len(fresh):
            p, n = self.queue.popleft()
            self.latest[p] = n
            passed.add(p)
        room, wanted, size = min(self.limits.live - self.live, self.limits.ahead), list[int](), 0
        while self.queue and size < room:
            p, n = self.queue.popleft()
            self.latest[p] = max(self.latest.get(p, -1), n)
            if p not in self.there and p not in wanted:
                wanted.append(p)
                size += self.elements[p]
        yield from self.gather(wanted)

    def release(self, module: Module, *, learnt: bool) -> Iterator[tuple[int, int]]:
        """Frees a module's parameters but those that are used again soon (`__params_to_release`)."""
        for p in module:
            if p in self.there and not (learnt and self.soon(p)):
                self.there.remove(p)
                self.live -= self.elements[p]
                yield p, 0

    def soon(self, p: int) -> bool:
        """True if a parameter's next use has been passed over as it was there, or is within REUSE."""
        if self.latest.get(p, -1) > self.place:
            return True
        uses = self.uses[p]
        n = bisect_left(uses, self.place)
        return n < len(uses) and self.before[uses[n]] - self.before[self.place] < REUSE
