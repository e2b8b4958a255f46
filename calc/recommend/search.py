"""The fastest configuration that fits, found without looking at most of them.

Two properties of the ledger and of the step time let configurations be passed over, and the tests hold both:

- Along every axis of a branch, from hungry to lean, no peak grows and no vLLM that lacked room starts to lack it. So
  where the leanest place of a branch does not fit, none does; and a value that does not fit with all other axes at
  their leanest fits with none.
- Along every axis the step takes no less time. So a place's time bounds that of all leaner ones from below, and places
  are taken in the order of their bounds: the first that fits is the fastest.

Host memory grows where device memory falls: it is asked of each place itself, and prunes nothing. Times count to three
digits, as no estimate of them is better; among equals the one with more room on the GPU wins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from calc.catalog import Catalog
from calc.estimate import estimate
from calc.groups import FITS
from calc.ledger import Estimate
from calc.recommend.space import Branch
from calc.scenario import Scenario
from calc.units import GB

# Ray ends workers when a node's memory is so full (RAY_memory_usage_threshold); others leave the rest to the system.
HOST_SHARE = 0.95
# Below any host memory of a job that offloads nothing.
Place = tuple[int, ...]
Clock = Callable[[Scenario], float]


class Judged(NamedTuple):
    """A configuration with its memory: whether it fits, and whether its device memory alone does.

    `slack`: bytes free on the fullest GPU beside the peak and its error. `short`: bytes that the host lacks.
    `too_lean`: vLLM's share is too small for its cache, which a smaller one is too.
    """

    scenario: Scenario
    estimate: Estimate
    fits: bool
    on_device: bool
    slack: int
    short: int
    too_lean: bool


class Found(NamedTuple):
    """A configuration that fits, and where it lies."""

    branch: int
    place: Place
    seconds: float
    judged: Judged

    @property
    def rank(self) -> tuple[float, int]:
        """By time, then by room."""
        return self.seconds, -self.judged.slack


def digits(seconds: float) -> float:
    """A time to the three digits that count."""
    return float(f"{seconds:.2e}")


def judge(s: Scenario, catalog: Catalog, host_bytes: int | None) -> Judged:
    """The memory of `s`, on nodes that have `host_bytes` each, None where that is not known."""
    e = estimate(s, catalog)
    slack = min(g.slack for g in e.groups)
    crowded = any(g.crowded for g in e.groups)
    refused = any(g.refusal for g in e.groups)
    needed = max([p.moment.device_bytes for p in e.host_phases], default=0)
    short = 0 if host_bytes is None else max(0, needed - host_bytes)
    return Judged(
        scenario=s,
        estimate=e,
        fits=e.fit_probability >= FITS and not short,
        on_device=slack >= 0 and not crowded,
        slack=slack,
        short=short,
        too_lean=refused and not crowded,
    )


def host_bytes(ram_gb: int | None) -> int | None:
    """What a job may take of a node's memory."""
    return None if ram_gb is None else int(HOST_SHARE * ram_gb * GB)


@dataclass
class Search:
    """One search over `branches`; `clock` gives the seconds of a step, `host` the bytes of a node for the job.

    `looked` counts the configurations whose memory was computed.
    """

    branches: Sequence[Branch]
    catalog: Catalog
    clock: Clock
    host: int | None = None
    _judged: dict[tuple[int, Place], Judged | None] = field(default_factory=dict)
    _seconds: dict[tuple[int, Place], float] = field(default_factory=dict)
    _scenarios: dict[tuple[int, Place], Scenario | None] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many configurations there are."""
        return sum(branch.size for branch in self.branches)

    @property
    def looked(self) -> int:
        """The configurations whose memory was computed."""
        return len(self._judged)

    def scenario(self, b: int, place: Place) -> Scenario | None:
        """The scenario there; None where the framework refuses it."""
        key = b, place
        if key not in self._scenarios:
            self._scenarios[key] = self.branches[b].at(place)
        return self._scenarios[key]

    def judged(self, b: int, place: Place) -> Judged | None:
        """The memory of a place; None where the framework refuses it."""
        key = b, place
        if key not in self._judged:
            s = self.scenario(b, place)
            self._judged[key] = None if s is None else judge(s, self.catalog, self.host)
        return self._judged[key]

    def seconds(self, b: int, place: Place) -> float:
        """The step time of a place; 0, below every other, where the framework refuses it."""
        key = b, place
        if key not in self._seconds:
            s = self.scenario(b, place)
            self._seconds[key] = 0.0 if s is None else digits(self.clock(s))
        return self._seconds[key]

    # ---- the pruned search ----

    def best(self) -> Found | None:
        """The fastest configuration that fits; None where none does."""
        return next(self.ranked(), None)

    def ranked(self) -> Iterator[Found]:
        """The best configuration by rank; nothing where none fits."""
        heap: list[tuple[float, int, int, Place, Place | None]] = []
        ticket = count()
        for b, branch in enumerate(self.branches):
            top = (0,) * len(branch.axes)
            heapq.heappush(heap, (self.seconds(b, top), next(ticket), b, top, None))
        found: Found | None = None
        seen: set[tuple[int, Place]] = set()
        while heap and (found is None or heap[0][0] <= found.seconds):
            _, _, b, place, floor = heapq.heappop(heap)
            if floor is None:  # a whole branch
                top = self.reduced(b)
                if top is not None:
                    heapq.heappush(heap, (self.seconds(b, top), next(ticket), b, top, top))
                continue
            if (b, place) in seen:
                continue
            seen.add((b, place))
            here = self.largest(b, place)
            if here and (found is None or here.rank < found.rank):
                found = here
            judged = self.judged(b, (*place[:-1], self.branches[b].leanest[-1]))
            for axis in range(len(place) - 1):
                leaner = (*place[:axis], place[axis] + 1, *place[axis + 1 :])
                if leaner[axis] > self.branches[b].leanest[axis] or (b, leaner) in seen:
                    continue
                if judged and judged.too_lean and self.branches[b].axes[axis].name == SHARE:
                    continue
                bound = self.seconds(b, leaner)
                if found is None or bound <= found.seconds:
                    heapq.heappush(heap, (bound, next(ticket), b, leaner, floor))
        if found:
            yield found

    def reduced(self, b: int) -> Place | None:
        """The hungriest value of each axis that fits with all others at their leanest; None where no place fits."""
        leanest = self.branches[b].leanest
        if not self.possible(b, leanest):
            return None
        top = []
        for axis in range(len(leanest)):

            def fits(value: int, axis: int = axis) -> bool:
                return self.possible(b, (*leanest[:axis], value, *leanest[axis + 1 :]))

            top.append(_first(fits, 0, leanest[axis]))
        return tuple(top)

    def possible(self, b: int, place: Place) -> bool:
        """Whether nothing on the device speaks against a place and all leaner ones."""
        judged = self.judged(b, place)
        return judged is None or judged.on_device

    def largest(self, b: int, place: Place) -> Found | None:
        """The largest micro batch from that of `place` on that fits, and the smallest that takes no more time."""
        last = self.branches[b].leanest[-1]

        def fits(value: int) -> bool:
            judged = self.judged(b, (*place[:-1], value))
            return judged is not None and judged.fits

        first = next((n for n in (place[-1],) if fits(n)), None)
        if first is None:
            if place[-1] == last or not self.possible(b, (*place[:-1], last)):
                return None
            first = _first(lambda n: self.possible(b, (*place[:-1], n)), place[-1] + 1, last)
            # the host, or the framework, may refuse what the device allows
            while not fits(first):
                if first == last:
                    return None
                first += 1
        seconds = self.seconds(b, (*place[:-1], first))
        least = first
        while least < last and self.seconds(b, (*place[:-1], least + 1)) == seconds and fits(least + 1):
            least += 1
        judged = self.judged(b, (*place[:-1], least))
        assert judged
        return Found(b, (*place[:-1], least), seconds, judged)

    # ---- what it must agree with ----

    def every(self) -> Iterator[Found]:
        """Every configuration that fits: what `best` is the least of by rank."""
        for b, branch in enumerate(self.branches):
            for place in branch.places():
                judged = self.judged(b, place)
                if judged and judged.fits:
                    yield Found(b, place, self.seconds(b, place), judged)


SHARE = "rollout.gpu_memory_utilization"


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first of `low` to `high` for which `holds`, given that it does for `high` and for all after one."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def exhaustive(found: Iterable[Found]) -> Found | None:
    """The least of all by rank."""
    return min(found, key=lambda f: f.rank, default=None)
