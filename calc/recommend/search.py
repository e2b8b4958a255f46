"""The fastest configuration that fits, found without looking at most of them.

Four properties let configurations be passed over, and tests hold each:

- Along every axis of a branch a step takes no less time. So a place's time bounds those behind it from below: places
  are taken in the order of their bounds, and once the best found is below all bounds it is the fastest.
- Along the lean axes no peak grows, and no vLLM starts to lack room. So with the same other settings nothing fits where
  the leanest does not, and a value that does not fit with the others at their leanest fits with none.
- While vLLM sleeps, or has GPUs of its own, what trains and scores takes the same memory whatever vLLM's share, and
  whatever its tensor parallelism but for the buffers that NCCL has where it is more than 1. Loading, generating,
  handing weights over and saving take the same whatever the micro batch. So each half is computed once.
- Sleep, shares and micro batches never lower what the host needs. So where it lacks memory for what is offloaded with
  the lean axes at their first values, it does with any.

Host memory grows where device memory falls: of what is left it is asked place by place.

Then the fastest gives way to the simplest that takes no longer within the error of times (`calc/recommend/simplicity`):
what an estimate cannot tell apart, somebody has to run. Among equally simple ones the faster wins, to three digits, and
among those the one with more room on the GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, product
from math import inf
from typing import NamedTuple

from calc import verdict
from calc.catalog import Catalog
from calc.engines.vllm import Cache
from calc.estimate import estimate
from calc.groups import Shared, sets
from calc.host_memory import HostMemory
from calc.job import Job
from calc.ledger import Estimate, Group, Phase, most
from calc.nodes import Hosts
from calc.recommend.clock import TOLERANCE, Clock
from calc.recommend.simplicity import Effort, efforts
from calc.recommend.space import SHARE, Branch
from calc.scenario import Scenario, on_card

Place = tuple[int, ...]
Groups = dict[Effort, list[tuple[int, Place]]]


class Fit:
    """How a configuration lies on its machine, with no verdict worked out; each figure when it is first asked for."""

    def __init__(self, job: Job, host: int) -> None:
        """Of `job`, on nodes that have `host` bytes each for it."""
        self._job, self._host = job, host

    @cached_property
    def _sets(self) -> list[Shared]:
        return sets(self._job)

    @cached_property
    def _caches(self) -> list[Cache]:
        return [cache for each in self._sets if (cache := each.cache())]

    @cached_property
    def training(self) -> int:
        """Bytes free on the fullest GPU beside a phase's peak and its error, in those in which vLLM has no part."""
        return min([each.room(serving=False) for each in self._sets])

    @cached_property
    def trains(self) -> bool:
        """True if that is none below 0; known sooner than by how much."""
        return all([each.trains for each in self._sets])

    @cached_property
    def training_at_most(self) -> int:
        """A bound of `training` that is known sooner."""
        return min([each.free_at_most for each in self._sets])

    @cached_property
    def tensors(self) -> int:
        """The most bytes of tensors on a GPU in those phases, which it has on any card."""
        return max([known.allocated for each in self._sets for known in each.training], default=0)

    @cached_property
    def serving(self) -> int:
        """As `training`, in the phases in which vLLM has a part."""
        return min([each.room(serving=True) for each in self._sets])

    @cached_property
    def short(self) -> int:
        """Bytes that the host lacks."""
        return max(0, most(Hosts(self._job).phases()) - self._host)

    @cached_property
    def refused(self) -> bool:
        """Whether vLLM does not start."""
        return any([cache.refusal for cache in self._caches])

    @cached_property
    def crowded(self) -> bool:
        """Whether it does not start for want of what others have taken."""
        return any([cache.crowded for cache in self._caches])

    @cached_property
    def cache_tokens(self) -> int | None:
        """What the KV cache holds, where vLLM serves."""
        return max([cache.tokens for cache in self._caches], default=0) or None

    @property
    def apart(self) -> bool:
        """Whether vLLM takes nothing from those that train and score, as it sleeps meanwhile or is elsewhere."""
        s = self._job.s
        return bool(self._job.engine and s.rollout and (s.rollout.sleep or s.placement == "separate"))

    @property
    def slack(self) -> int:
        """Bytes free in the fullest phase of all."""
        return min(self.training, self.serving)

    @property
    def fits(self) -> bool:
        """Whether it runs with the probability that a verdict asks, and the host has room."""
        return self.trains and self.serving >= 0 and not self.short and not self.refused

    @property
    def on_device(self) -> bool:
        """Whether nothing on the GPUs speaks against it that would speak against all hungrier ones, too."""
        return self.trains and self.serves

    @property
    def serves(self) -> bool:
        """Whether the phases fit in which vLLM has a part, and leave it the room that it wants at its start."""
        return self.serving >= 0 and not self.crowded

    @property
    def too_lean(self) -> bool:
        """Whether vLLM does not start because its share of the card is too small."""
        return self.refused and not self.crowded


class Judged(NamedTuple):
    """A configuration with its memory, line by line; `slack` and `short` as in `Fit`."""

    scenario: Scenario
    estimate: Estimate
    slack: int
    short: int

    @property
    def cache_tokens(self) -> int | None:
        """What the KV cache holds, where vLLM serves."""
        return max(g.cache_tokens for g in self.estimate.groups) or None


class Found(NamedTuple):
    """A configuration that fits, and where it lies."""

    branch: int
    place: Place
    seconds: float
    fit: Fit

    @property
    def slack(self) -> int:
        """As in `Fit`."""
        return self.fit.slack

    @property
    def rank(self) -> tuple[float, int]:
        """By time, then by room."""
        return self.seconds, -self.slack

    def before(self, other: Found | None) -> bool:
        """True if it comes first by rank; room is asked for only where times are equal."""
        if other is None or self.seconds != other.seconds:
            return other is None or self.seconds < other.seconds
        return self is not other and self.slack > other.slack


def room(group: Group, phase: Phase) -> int:
    """Bytes free beside a phase's peak and its error: below 0 where it does not fit."""
    return verdict.room(phase.moment.sums, group.usable_bytes)


@dataclass(repr=False)
class Search:
    """One search over `branches`, on nodes whose hosts have so much memory for the job."""

    branches: Sequence[Branch]
    catalog: Catalog
    clock: Clock
    host: HostMemory
    _fits: dict[tuple[int, Place], Fit | None] = field(default_factory=dict)
    _judged: dict[tuple[int, Place], Judged | None] = field(default_factory=dict)
    _found: dict[tuple[int, Place], Found | None] = field(default_factory=dict)
    _bounds: dict[tuple[int, Place], float] = field(default_factory=dict)
    _trains: dict[Hashable, bool] = field(default_factory=dict)
    _serves: dict[Hashable, Fit] = field(default_factory=dict)
    _hostless: dict[tuple[int, Place], bool] = field(default_factory=dict)
    _least: float = inf

    @cached_property
    def rated(self) -> bool:
        """True where the rates are known from which times follow."""
        return not self.branches or self.clock.unrated(self.branches[0].base) is None

    @property
    def size(self) -> int:
        """How many configurations there are."""
        return sum([branch.size for branch in self.branches])

    @property
    def considered(self) -> int:
        """The configurations whose memory was computed."""
        return len(self._fits)

    def looked(self) -> Iterator[tuple[int, Place, Fit]]:
        """Every place whose memory was computed, but those that the framework refuses."""
        for (b, place), known in self._fits.items():
            if known:
                yield b, place, known

    def scenario(self, b: int, place: Place) -> Scenario | None:
        """The scenario there, on no card; None where the framework refuses it."""
        return self.branches[b].at(place)

    def job(self, b: int, place: Place) -> Job | None:
        """The job there, on this card; None where the framework refuses it."""
        roles = self.branches[b].roles(place)
        return Job(roles.s, self.clock.gpu, roles) if roles else None

    def fit(self, b: int, place: Place) -> Fit | None:
        """How a place lies on the machine; None where the framework refuses it."""
        key = b, place
        if key not in self._fits:
            job = self.job(b, place)
            self._fits[key] = found = Fit(job, self.host.bytes) if job else None
            if found and found.apart:
                self._trains[self.trainer(b, place)] = found.trains
                self._serves[b, place[:-1]] = found
        return self._fits[key]

    def judged(self, b: int, place: Place) -> Judged | None:
        """The memory of a place, line by line; None where the framework refuses it."""
        key = b, place
        if key not in self._judged:
            found, s = self.fit(b, place), self.scenario(b, place)
            if s and found:
                s = on_card(s, self.clock.gpu.id)
                self._judged[key] = Judged(s, estimate(s, self.catalog), found.slack, found.short)
            else:
                self._judged[key] = None
        return self._judged[key]

    def chosen(self, found: Found) -> Judged:
        """What was found, line by line."""
        judged = self.judged(found.branch, found.place)
        assert judged
        return judged

    def found(self, b: int, place: Place) -> Found | None:
        """What fits at a place, with its time; None where it does not."""
        key = b, place
        if key not in self._found:
            s, known = self.scenario(b, place), self.fit(b, place)
            if s and known and known.fits:
                seconds = self.clock.seconds(s, known.cache_tokens) if self.rated else self.bound(b, place)
                self._found[key] = Found(b, place, seconds, known)
            else:
                self._found[key] = None
        return self._found[key]

    def trainer(self, b: int, place: Place, *, one_rank: bool = False) -> Hashable:
        """What the memory of all that trains and scores follows from where vLLM is asleep or elsewhere.

        `one_rank`: as if each engine had one GPU, which needs no more.
        """
        branch = self.branches[b]
        rollout = branch.base.rollout
        one_rank = one_rank or rollout is None or rollout.tensor_parallel == 1
        return branch.kin, one_rank, place[: branch.turns], branch.micro(place)

    def bound(self, b: int, place: Place) -> float:
        """No more than the step time of a place and of all behind it; 0 where the framework refuses it.

        Where no rate is known a step along a lean axis stands for time.
        """
        key = b, place
        if key not in self._bounds:
            self._bounds[key] = self._bound(b, place)
        return self._bounds[key]

    def _bound(self, b: int, place: Place) -> float:
        if not self.rated:
            return float(sum(place[self.branches[b].turns :]))
        branch = self.branches[b]
        rollout = branch.base.rollout
        if rollout is None or rollout.engine != "vllm":
            return self.clock.bound("", (b, place), lambda: self.scenario(b, place))
        leans = place[branch.turns : -1]
        asleep = leans[: len(leans) - bool(branch.shares)]
        return self.clock.bound(
            (rollout.gpus, rollout.tensor_parallel, leans),
            (self.trainer(b, place, one_rank=True), asleep),
            lambda: self.scenario(b, place),
        )

    # ---- the pruned search ----

    def best(self) -> Found | None:
        """The simplest configuration that fits and is as fast as any within the error of times; None where none fits.

        Where GPUs are joined by PCIe alone, an engine of vLLM spans several only if one each would not do.
        """
        if self.leanest() is False:
            return None
        groups = self.groups()
        found = self.simplest(self.groups(sharing=False)) or self.simplest(groups)
        while found and self.clock.slow_links and (one := self.one_rank(found)) and one in groups:
            if not self.fastest(groups[one], inf):
                break
            groups = {each: at for each, at in groups.items() if each.ranks == 1 or each._replace(ranks=1) != one}
            found = self.simplest(groups)
        return found

    def one_rank(self, found: Found) -> Effort | None:
        """The effort of what was found with engines of one GPU each; None where they have."""
        branch = self.branches[found.branch]
        asked = next(effort for effort, turn in efforts(branch) if turn == found.place[: branch.turns])
        return asked._replace(ranks=1) if asked.ranks > 1 else None

    def groups(self, *, sharing: bool = True) -> Groups:
        """The first places of all lean lattices by the effort that they ask for, the simplest first.

        Not `sharing`: without the branches that shard on one GPU, which shares with nobody.
        """
        found: Groups = {}
        for b, branch in [(b, branch) for b, branch in enumerate(self.branches) if sharing or not branch.alone]:
            for effort, turn in efforts(branch):
                found.setdefault(effort, []).append((b, (*turn, *[0] * (len(branch.axes) - branch.turns))))
        return dict(sorted(found.items()))

    def simplest(self, groups: Groups) -> Found | None:
        """Of the groups' configurations the first that takes no longer than the fastest within the error of times.

        Where no rate is known, the first of all.
        """
        fastest = self.quickest(groups)
        if self.rated and fastest is None:
            return None
        limit = self.limit(fastest)
        for group in groups.values():
            within = [at for at in group if self.bound(*at) <= limit]
            if within and (found := self.fastest(within, limit)):
                return found
        return fastest

    def quickest(self, groups: Groups) -> Found | None:
        """The fastest of the groups' configurations; None where none fits, or no rate is known."""
        asked = dict.fromkeys(at for group in groups.values() for at in group)
        first = dict.fromkeys((b, (0,) * len(place)) for b, place in asked)
        return self.fastest(first, inf, asked.keys()) if self.rated else None

    def limit(self, fastest: Found | None) -> float:
        """The seconds that nobody can tell from those of the fastest; any, where there are none."""
        return fastest.seconds * (1 + TOLERANCE) if fastest and self.rated else inf

    def fastest(
        self, starts: Iterable[tuple[int, Place]], limit: float, asked: Set[tuple[int, Place]] | None = None
    ) -> Found | None:
        """What comes first by rank in the lean lattices of `starts`, and takes no more seconds than `limit`.

        With `asked`, in those of its places that are behind `starts`.
        """
        found: Found | None = None
        ticket = count()
        # a bound, a place, and of how many of the last axes it is known where they begin to fit
        heap: list[tuple[float, int, int, Place, int]] = []
        seen: set[tuple[int, Place, int]] = set()

        def push(b: int, place: Place, cut: int) -> None:
            if (b, place, cut) not in seen:
                seen.add((b, place, cut))
                heapq.heappush(heap, (self.bound(b, place), next(ticket), b, place, cut))

        for b, place in starts:
            push(b, place, 0)
        while heap and heap[0][0] < inf and heap[0][0] <= limit:
            _, _, b, place, cut = heapq.heappop(heap)
            turns, axes = self.branches[b].turns, len(place)
            if cut == 0:
                for following in self.behind(b, place, range(turns)) if asked is not None else ():
                    push(b, following, 0)
                if (asked is not None and (b, place) not in asked) or self.too_much_for_the_host(b, place):
                    continue
            if turns + cut < axes:
                # until something is found, down to the end: what is found early spares looking at what is slower
                for n in range(cut, axes - turns if found is None else cut + 1):
                    cutting = self.cut(b, place, axes - 1 - n, limit)
                    if cutting is None:
                        break
                    place = cutting
                else:
                    push(b, place, axes - turns if found is None else cut + 1)
                    if found is None:
                        found, limit = self.sooner(self.settled(b, place), None, limit)
                continue
            found, limit = self.sooner(self.settled(b, place), found, limit)
            for following in self.behind(b, place, range(turns, axes)):
                push(b, following, cut)
        return found

    @staticmethod
    def sooner(here: Found | None, found: Found | None, limit: float) -> tuple[Found | None, float]:
        """Which of both comes first by rank, with the seconds that the next may take."""
        if here and here.seconds <= limit and here.before(found):
            found = here
        return found, found.seconds if found else limit

    def any(self) -> bool:
        """Whether anything fits."""
        known = self.leanest()
        return self.best() is not None if known is None else known

    def leanest(self) -> bool | None:
        """Whether anything fits, as the leanest places say; None where they leave it open.

        Along the lean axes, what is hungrier fits on the device only where the leanest that starts does. Branches are
        asked from the last, as shardings stand from those that shard nothing to those that shard all.
        """
        known: bool | None = False
        for b, branch in reversed([*enumerate(self.branches)]):
            for turn in product(*[reversed(range(n + 1)) for n in branch.leanest[: branch.turns]]):
                at = (*turn, *branch.leanest[branch.turns :])
                if not self.possible(b, at) or self.too_much_for_the_host(b, at):
                    continue
                found = self.starting(b, at)
                if found and found.fits:
                    return True
                if found is None or (found.on_device and not found.too_lean):
                    known = None  # an engine that sleeps may fill the host, where one that stays does not
        return known

    def starting(self, b: int, lean: Place) -> Fit | None:
        """How the leanest place lies on the machine, or that with the smallest share with which vLLM starts."""
        branch = self.branches[b]
        found = self.fit(b, lean)
        axis = next((i for i, axis in enumerate(branch.axes) if axis.name == SHARE), None)
        # no share makes room for those that train while vLLM is apart
        if axis is None or not found or (found.apart and not found.trains) or not found.too_lean:
            return found

        def small(n: int) -> bool:
            known = self.fit(b, (*lean[:axis], n, *lean[axis + 1 :]))
            return known is not None and known.too_lean

        first = _first(small, 0, lean[axis])  # too small a share, as all after it
        return self.fit(b, (*lean[:axis], max(first - 1, 0), *lean[axis + 1 :]))

    def cut(self, b: int, place: Place, axis: int, limit: float) -> Place | None:
        """`place` with the hungriest value of a lean axis that fits with the others at their leanest; None: no value.

        Values count that take no more seconds than `limit`. The micro batch comes first: of it, other branches may know
        already where it begins to fit.
        """
        branch = self.branches[b]
        lean = (*place[: branch.turns], *branch.leanest[branch.turns :])

        def fits(value: int) -> bool:
            at = (*lean[:axis], value, *lean[axis + 1 :])
            trains = self._trains.get(self.trainer(b, at, one_rank=True)) if axis == len(place) - 1 else None
            return self.possible(b, at) if trains is None else trains

        last = branch.leanest[axis]
        if limit < inf:
            slower = _first(
                lambda n: n > last or self.bound(b, (*place[:axis], n, *place[axis + 1 :])) > limit, 0, last + 1
            )
            last = slower - 1
        if last < 0:
            return None
        if not fits(last):
            return None
        return (*place[:axis], _first(fits, 0, last), *place[axis + 1 :])

    def behind(self, b: int, place: Place, axes: Iterable[int]) -> Iterator[Place]:
        """One step along each of `axes`."""
        branch = self.branches[b]
        known = self._fits.get((b, place))
        for axis in axes:
            # less than a share that is too small is too small as well
            if place[axis] < branch.leanest[axis] and not (
                known and known.too_lean and branch.axes[axis].name == SHARE
            ):
                yield (*place[:axis], place[axis] + 1, *place[axis + 1 :])

    def possible(self, b: int, place: Place) -> bool:
        """Whether the device does not speak against a place and all that is hungrier."""
        trains = self._trains.get(self.trainer(b, place))
        if trains is False or self._trains.get(self.trainer(b, place, one_rank=True)) is False:
            return False
        serves = self._serves.get((b, place[:-1]))
        if trains is not None and serves is not None:
            return serves.serves
        found = self.fit(b, place)
        return found is None or found.on_device

    def too_much_for_the_host(self, b: int, place: Place) -> bool:
        """Whether the host lacks memory whatever the lean axes say: at their first values it needs least."""
        turns = self.branches[b].turns
        first = (*place[:turns], *[0] * (len(place) - turns))
        if (b, first) not in self._hostless:
            s = self.scenario(b, first)
            roles = [s, *filter(None, [s.role(name) for name in s.roles])] if s else []
            offloads = any(role.offload.optimizer or role.offload.parameters for role in roles)
            job = self.job(b, first) if offloads else None
            lacks = most(Hosts(job).phases()) - self.host.bytes if job else 0
            self._hostless[b, first] = lacks > 0
            if 0 < lacks <= self._least:
                # those that lack least are looked at, one of them to be named where nothing fits
                self._least = lacks
                self.fit(b, self.branches[b].leanest)
        return self._hostless[b, first]

    def settled(self, b: int, place: Place) -> Found | None:
        """The leanest place whose bound is that of `place`; `place` itself where that fits alone, or is faster.

        It is where others leave vLLM less room for its cache than the bound has reckoned with.
        """
        bound, lean = self.bound(b, place), place
        for axis in reversed(range(self.branches[b].turns, len(place))):
            while lean[axis] < self.branches[b].leanest[axis]:
                leaner = (*lean[:axis], lean[axis] + 1, *lean[axis + 1 :])
                if self.bound(b, leaner) != bound:
                    break
                lean = leaner
        if not self.possible(b, lean):
            return None
        found: Found | None = None
        for at in dict.fromkeys((lean, place)):
            here = self.found(b, at) if self.possible(b, at) else None
            if here and here.before(found):
                found = here
            if here and here.seconds == bound:  # no hungrier place is faster
                break
        return found

    # ---- what it must agree with ----

    def every(self) -> Iterator[Found]:
        """Every configuration that fits; `best` is one of them."""
        for b, branch in enumerate(self.branches):
            for place in branch.places():
                if found := self.found(b, place):
                    yield found


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first of `low` to `high` for which `holds`, given that it does for `high` and for all after one."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
