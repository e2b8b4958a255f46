"""The fastest configuration that fits, found without looking at most of them.

Six properties let configurations be passed over, and tests hold each:

- Along every axis of a branch the step time never falls, but for the time that pipeline stages idle: of that, a bound
  has what smallest micro batches leave, or once a place's turn comes the least of all micro batches that are left. So a
  place's bound is one for all places behind it: places are taken in the order of their bounds, and once the best found
  is below all bounds it is the fastest.
- Along the lean axes no peak grows, and vLLM never runs short of room to start. So with the other settings unchanged,
  nothing fits if the leanest place does not; and a value that does not fit with the other axes at their leanest fits
  with none of their values.
- While vLLM sleeps, or has GPUs of its own, training and scoring take the same memory whatever vLLM's share, and
  whatever its tensor parallelism but for NCCL's buffers where that is more than 1. Loading, generating, handing weights
  over and saving take the same whatever the micro batch, unless the trained model generates by itself, and whatever is
  recomputed. So each half is computed once.
- What leaves the GPUs between the phases of a role that has them for itself takes the same from its update, wherever it
  is in between; and where more of it leaves, no phase that trains or scores needs more.
- What is resident as roles train is the same whatever they recompute and whatever vLLM does, for all micro batches of a
  branch. So where that alone is too much for a GPU, one place answers for all of them.
- Sleep, shares and micro batches never lower what the host needs. So if host memory is too small for what is offloaded
  with the lean axes at their first values, it is too small with any.

Host memory grows where device memory falls: it is checked place by place among the places that are left.

Then the fastest gives way to the simplest that takes no longer within the error of times (`calc/recommend/simplicity`):
where an estimate cannot tell two apart, the one that is easier to run wins. Among equally simple ones the faster wins,
to three digits, and among those the one whose tensors leave more room on the GPU, which takes no replay to tell.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, product
from math import inf
from operator import le
from typing import NamedTuple

from calc.base.ledger import Phase, most
from calc.catalog.catalog import Catalog
from calc.engines.rollout import Cache
from calc.estimate import verdict
from calc.estimate.estimate import estimate
from calc.estimate.gpu_group import GpuGroup, decisive
from calc.estimate.host_memory import HostMemory
from calc.estimate.host_nodes import Hosts
from calc.estimate.result import Estimate, Group
from calc.recommend.clock import TOLERANCE, Bound, Clock
from calc.recommend.simplicity import Effort, efforts
from calc.recommend.space import SHARE, Branch, placed
from calc.scenario.scenario import Scenario
from calc.step.roles import Job

Place = tuple[int, ...]
Groups = dict[Effort, list[tuple[int, Place]]]


class Fit:
    """The fit of a configuration on its machine, without a verdict; each figure is computed when first asked for."""

    def __init__(
        self,
        job: Job,
        host: HostMemory,
        trains: bool | None = None,
        server: Fit | None = None,
        told: Callable[[Fit], None] | None = None,
    ) -> None:
        """The fit of `job` on nodes with the host memory `host`.

        `trains`: whether another with the same trainers does, if one is known; `server`: another with the same vLLM.
        `told` is called once it is known of this one whether it trains.
        """
        self._job, self._host, self._trains, self._server, self._told = job, host, trains, server, told

    @cached_property
    def _sets(self) -> list[GpuGroup]:
        return decisive(self._job)

    @cached_property
    def _caches(self) -> list[Cache]:
        return [cache for each in self._sets if (cache := each.cache())]

    @cached_property
    def training(self) -> int:
        """Free bytes beside the peak and its error, on the fullest GPU, over the phases in which vLLM has no part."""
        return min([each.room(serving=False) for each in self._sets])

    @property
    def trains(self) -> bool:
        """True if the training phases fit; cheaper than `training`."""
        if self._trains is None:
            self._trains = all(each.trains for each in self._sets)
            if self._told:
                self._told(self)
        return self._trains

    @property
    def perhaps_trains(self) -> bool:
        """False if `trains` is; takes no replay."""
        if self._trains is None and not self.apart:
            return all(each.perhaps_trains for each in self._sets)
        return self.trains  # no job in which vLLM is apart is replayed

    @cached_property
    def updates(self) -> bool:
        """False if the update of a role does not fit, whatever leaves the GPUs before it."""
        return self.trains or all(each.updates for each in self._sets)

    @cached_property
    def training_at_most(self) -> int:
        """An upper bound of `training`; cheaper."""
        return min([each.free_at_most for each in self._sets])

    @cached_property
    def beside_resident(self) -> int:
        """Bytes beside weights, gradients and states on the fullest GPU, whatever is recomputed; below 0 if too few."""
        return min([each.beside_resident for each in self._sets])

    @cached_property
    def tensors(self) -> int:
        """The most bytes of tensors on a GPU in the training phases; the same on any card."""
        return max([known.allocated for each in self._sets for known in each.training], default=0)

    @cached_property
    def serving(self) -> int:
        """Free bytes as in `training`, over the phases in which vLLM has a part."""
        return self._server.serving if self._server else min([each.room(serving=True) for each in self._sets])

    @cached_property
    def short(self) -> int:
        """Bytes of host memory that are lacking on a node."""
        needed = most(Hosts(self._job).phases())
        s, usable = self._job.s, self._job.gpu.usable_bytes
        on_gpus = min(s.gpus, s.gpus_per_node) * (usable - self.slack) if self._host.unified and needed else 0
        return self._host.short(needed, on_gpus)

    @cached_property
    def refused(self) -> bool:
        """True if vLLM does not start."""
        return any([cache.refusal for cache in self._caches])

    @cached_property
    def crowded(self) -> bool:
        """True if vLLM does not start because others have taken the memory."""
        return any([cache.crowded for cache in self._caches])

    @cached_property
    def cache_tokens(self) -> int | None:
        """Tokens that the KV cache holds, or None if vLLM does not serve."""
        return max([cache.tokens for cache in self._caches], default=0) or None

    @property
    def apart(self) -> bool:
        """True if vLLM takes no memory from training and scoring."""
        return apart(self._job)

    @property
    def slack(self) -> int:
        """Free bytes in the fullest phase of all."""
        return min(self.training, self.serving)

    @property
    def spare(self) -> int:
        """The same as if PyTorch reserved what the tensors take; cheaper."""
        return min(self._job.gpu.usable_bytes - self.tensors, self.serving)

    @property
    def _trainings(self) -> tuple[int, int]:
        """The least and the most that `training` can be, by the replays so far."""
        low, high = zip(*[each.rooms for each in self._sets], strict=True)
        return min(low), min(high)

    def _narrow(self) -> None:
        """Replays once more, to know `training` better."""
        for each in self._sets:
            each.narrow()

    def leaves(self, room: float) -> bool:
        """True if `training` is more than `room`; replays no more than that takes."""
        while True:
            low, high = self._trainings
            if low > room or high <= room:
                return low > room
            self._narrow()

    @property
    def fits(self) -> bool:
        """True if it runs with the probability that a verdict asks for, and the host has room."""
        return self.trains and self.serving >= 0 and not self.short and not self.refused

    @property
    def on_device(self) -> bool:
        """False if a GPU limit rules the configuration out, and with it all hungrier ones."""
        return self.trains and self.serves

    @property
    def perhaps_on_device(self) -> bool:
        """False if `on_device` is; takes no replay."""
        return self.perhaps_trains and self.serves

    @property
    def serves(self) -> bool:
        """True if the phases of vLLM fit and leave it the room that it needs to start."""
        return self.serving >= 0 and not self.crowded

    @property
    def too_lean(self) -> bool:
        """True if vLLM does not start because its share of the card is too small."""
        return self.refused and not self.crowded


def apart(job: Job) -> bool:
    """True if vLLM takes no memory from training and scoring: it sleeps meanwhile, or has GPUs of its own."""
    s = job.s
    return bool(job.engine and s.rollout and (s.rollout.sleep or s.placement == "separate"))


class Unmade(NamedTuple):
    """The fit of a place that is ruled out by what is resident or by the host, until somebody asks for it.

    `beside_resident`: at least what `Fit` has under that name.
    """

    beside_resident: int


UNKNOWN = Unmade(0)


class Judged(NamedTuple):
    """A configuration with its memory, line by line; `slack` and `short` as in `Fit`."""

    scenario: Scenario
    estimate: Estimate
    slack: int
    short: int

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that the KV cache holds, or None if vLLM does not serve."""
        return max(g.cache_tokens for g in self.estimate.groups) or None


class Found(NamedTuple):
    """A configuration that fits, and its place in a branch."""

    branch: int
    place: Place
    seconds: float
    fit: Fit

    @property
    def slack(self) -> int:
        """Free bytes in the fullest phase of all, from `Fit`."""
        return self.fit.slack

    @property
    def rank(self) -> tuple[float, int]:
        """The key that orders configurations: by time, then by the room that tensors leave."""
        return self.seconds, -self.fit.spare

    def before(self, other: Found | None) -> bool:
        """True if it comes first by rank; the room is asked only where times are equal."""
        if other is None or self.seconds != other.seconds:
            return other is None or self.seconds < other.seconds
        return self.rank < other.rank


def room(group: Group, phase: Phase) -> int:
    """Free bytes beside a phase's peak and its error: below 0 if it does not fit."""
    return verdict.room(phase.moment.sums, group.usable_bytes)


@dataclass(repr=False)
class Search:
    """One search over `branches`, on nodes with the host memory `host`.

    `names`: where nothing fits, the configuration that lacks least is asked for afterwards.
    """

    branches: Sequence[Branch]
    catalog: Catalog
    clock: Clock
    host: HostMemory
    names: bool = True
    _fits: dict[tuple[int, Place], Fit | Unmade | None] = field(default_factory=dict)
    _judged: dict[tuple[int, Place], Judged | None] = field(default_factory=dict)
    _found: dict[tuple[int, Place], Found | None] = field(default_factory=dict)
    _bounds: dict[tuple[int, Place], Bound] = field(default_factory=dict)
    _trains: dict[Hashable, bool] = field(default_factory=dict)
    _updates: dict[Hashable, bool] = field(default_factory=dict)
    _serves: dict[Hashable, Fit] = field(default_factory=dict)
    _training_at_most: dict[Hashable, int] = field(default_factory=dict)
    _beside: dict[Hashable, int] = field(default_factory=dict)
    _overfull: dict[tuple[int, int], dict[Place, int]] = field(default_factory=dict)
    _hostless: dict[Hashable, int] = field(default_factory=dict)
    _serves_off_host: dict[int, bool] = field(default_factory=dict)
    _fastest: Found | None = None  # of all, where it is known

    @cached_property
    def rated(self) -> bool:
        """True if the rates are known that step times follow from."""
        return not self.branches or self.clock.unrated(self.branches[0].base) is None

    @property
    def in_stages(self) -> bool:
        """True if a branch cuts the model into the stages of a pipeline."""
        return any(branch.base.pipeline_parallel > 1 for branch in self.branches)

    @property
    def size(self) -> int:
        """The number of configurations."""
        return sum([branch.size for branch in self.branches])

    @property
    def considered(self) -> int:
        """The number of configurations whose memory was computed."""
        return sum([not isinstance(known, Unmade) for known in self._fits.values()])

    def looked(self) -> Iterator[tuple[int, Place, Fit]]:
        """Every place whose memory was computed, except those that the framework refuses."""
        for (b, place), known in self._fits.items():
            if isinstance(known, Fit):
                yield b, place, known

    def lacking(self) -> Iterator[tuple[int, Place, int]]:
        """Every place that was looked at or ruled out, with at least the bytes beside what is resident."""
        for (b, place), known in self._fits.items():
            if known:
                yield b, place, known.beside_resident

    def scenario(self, b: int, place: Place) -> Scenario | None:
        """The scenario at a place, on no card; None if the framework refuses it."""
        return self.branches[b].at(place)

    def job(self, b: int, place: Place) -> Job | None:
        """The job at a place, on this search's card; None if the framework refuses it."""
        roles = self.branches[b].roles(place)
        return Job(roles.s, self.clock.gpu, roles) if roles else None

    def fit(self, b: int, place: Place) -> Fit | None:
        """The fit of a place on the machine; None if the framework refuses it."""
        key = b, place
        known = self._fits.get(key, UNKNOWN)
        if isinstance(known, Unmade):
            self._fits[key] = known = self._fit(b, place)
        return known

    def _fit(self, b: int, place: Place) -> Fit | None:
        job = self.job(b, place)
        if job and apart(job):
            return self._shared(b, place, job)
        return Fit(job, self.host) if job else None

    def _shared(self, b: int, place: Place, job: Job) -> Fit:
        """The fit of a place whose vLLM is apart: the two halves are those of other places where these are known."""
        trainer, server = self.trainer(b, place), self.server(b, place)
        trains = self._trains.get(trainer)
        if trains is None and self._trains.get(self.trainer(b, self.staying(b, place))):
            trains = True

        def told(fit: Fit) -> None:
            self._trains[trainer] = fit.trains
            self._updates[self.updater(b, place)] = fit.updates

        found = Fit(job, self.host, trains, self._serves.get(server), told)
        if trains and trainer not in self._trains:
            told(found)
        self._serves.setdefault(server, found)
        return found

    def training_at_most(self, b: int, place: Place) -> int | None:
        """An upper bound of `Fit.training`, asked once where vLLM is apart; None if the framework refuses the place."""
        trainer = self.trainer(b, place)
        if trainer in self._training_at_most:
            return self._training_at_most[trainer]
        fit = self.fit(b, place)
        if fit and fit.apart:
            self._training_at_most[trainer] = fit.training_at_most
        return fit.training_at_most if fit else None

    def staying(self, b: int, place: Place) -> Place:
        """The place where nothing leaves the GPUs between the phases of any role."""
        branch = self.branches[b]
        return (*branch.timed(place[: branch.turns]), *place[branch.turns :])

    def judged(self, b: int, place: Place) -> Judged | None:
        """The memory of a place, line by line; None if the framework refuses it."""
        key = b, place
        if key not in self._judged:
            found, s = self.fit(b, place), self.scenario(b, place)
            if s and found:
                s = placed(s, self.clock.gpu.id, self.clock.node)
                self._judged[key] = Judged(s, estimate(s, self.catalog), found.slack, found.short)
            else:
                self._judged[key] = None
        return self._judged[key]

    def chosen(self, found: Found) -> Judged:
        """A found configuration with its memory, line by line."""
        judged = self.judged(found.branch, found.place)
        assert judged
        return judged

    def found(self, b: int, place: Place) -> Found | None:
        """The configuration at a place with its time, or None if it does not fit."""
        key = b, place
        if key not in self._found:
            s, known = self.scenario(b, place), self.fit(b, place)
            if s and known and known.fits:
                seconds = self.clock.seconds(s, known.cache_tokens) if self.rated else self.bound(b, place)
                self._found[key] = Found(b, place, seconds, known)
            else:
                self._found[key] = None
        return self._found[key]

    def trainer(self, b: int, place: Place, *, one_rank: bool = False) -> tuple[int, bool, Place, int]:
        """The key that decides the memory of training and scoring while vLLM sleeps or has GPUs of its own.

        `one_rank`: as if each engine had one GPU, which needs no more memory.
        """
        branch = self.branches[b]
        rollout = branch.base.rollout
        one_rank = one_rank or rollout is None or rollout.tensor_parallel == 1
        return branch.kin, one_rank, place[: branch.turns], branch.micro(place)

    def server(self, b: int, place: Place) -> Hashable:
        """The key that decides the memory of the phases in which such a vLLM has a part."""
        branch = self.branches[b]
        return b, branch.kept(place[: branch.turns]), place[branch.turns : -1]

    def updater(self, b: int, place: Place, *, one_rank: bool = False) -> Hashable:
        """The key that decides the memory of updates; otherwise as `trainer`."""
        kin, alone, turn, micro = self.trainer(b, place, one_rank=one_rank)
        return kin, alone, self.branches[b].own(turn), micro

    def bound(self, b: int, place: Place) -> float:
        """A lower bound of the step time at a place and at all behind it; 0 if the framework refuses it.

        If no rate is known, steps along the lean axes stand for time.
        """
        return self.bounds(b, place).least

    def generating(self, b: int, place: Place) -> float:
        """The step time at a place and at all behind it that its rollout alone takes; 0 as long as that is not known.

        It is what a `bound` has as well; cheaper.
        """
        rollout = self.branches[b].base.rollout
        serves = self.rated and rollout is not None and rollout.serves
        return self.clock.generating(self.server_time(b, place)) if serves else 0.0

    def server_time(self, b: int, place: Place) -> Hashable:
        """The key that decides how long vLLM generates."""
        branch = self.branches[b]
        rollout = branch.base.rollout
        assert rollout
        return rollout.gpus, rollout.tensor_parallel, place[branch.turns : -1]

    def soonest(self, b: int, place: Place, known: float) -> float:
        """The bound of a place; where that is at most `known`, the least `time` with a micro batch that is left."""
        least, here = self.bounds(b, place)
        if least > known or here <= least:
            return least
        soonest = here
        for n in range(place[-1] + 1, self.branches[b].leanest[-1] + 1):
            smaller = self.bounds(b, (*place[:-1], n))
            soonest = min(soonest, smaller.here or here)
            if smaller.least >= soonest:  # as are those of all smaller ones
                break
        return soonest

    def time(self, b: int, place: Place) -> float:
        """The step time at a place as if vLLM had its card alone: its bound, with all that pipeline stages idle."""
        return self.bounds(b, place).here

    def bounds(self, b: int, place: Place) -> Bound:
        """The two bounds of a place's step time, `bound` and `time`."""
        key = b, place
        if key not in self._bounds:
            self._bounds[key] = self._bound(b, place)
        return self._bounds[key]

    @cached_property
    def floor(self) -> float:
        """The step time of the fastest configuration if memory did not count, in seconds.

        No GPU would shard with itself then, unless nothing else is open.
        """
        starts = [(branch.alone, self.bound(b, (0,) * len(branch.axes))) for b, branch in enumerate(self.branches)]
        return min([(alone, seconds) for alone, seconds in starts if seconds])[1]

    def _bound(self, b: int, place: Place) -> Bound:
        if not self.rated:
            steps = float(sum(place[self.branches[b].turns :]))
            return Bound(steps, steps)
        branch = self.branches[b]
        rollout = branch.base.rollout
        least = branch.micro(branch.leanest)
        if rollout is None or not rollout.serves:
            return self.clock.bound("", (b, place), "", lambda: self.scenario(b, place), least)
        leans = place[branch.turns : -1]
        asleep = leans[: len(leans) - bool(branch.shares)]
        return self.clock.bound(
            self.server_time(b, place),
            (branch.kin, branch.timed(place[: branch.turns]), branch.micro(place)),
            (branch.kin, branch.kept(place[: branch.turns]), asleep),
            lambda: self.scenario(b, place),
            least,
        )

    # ---- the pruned search ----

    def best(self) -> Found | None:
        """The simplest configuration that fits and is as fast as any within the error of times; None if none fits.

        Where GPUs are joined by PCIe alone, a vLLM engine spans several only if engines of one GPU each would not do.
        """
        if not self._fastest and self.leanest(looking=self.names) is False:
            return None
        groups = self.groups()
        found = self.simplest(self.groups(sharing=False)) or self.simplest(groups)
        while found and self.clock.slow_links and (one := self.one_rank(found)) and one in groups:
            if not self.fastest(groups[one], inf):
                break
            groups = {each: at for each, at in groups.items() if each.ranks <= 1 or each._replace(ranks=1) != one}
            found = self.simplest(groups)
        return found

    def one_rank(self, found: Found) -> Effort | None:
        """The effort of a found configuration with engines of one GPU each; None if it has such already."""
        branch = self.branches[found.branch]
        asked = next(effort for effort, turn in efforts(branch) if turn == found.place[: branch.turns])
        return asked._replace(ranks=1) if asked.ranks > 1 else None

    def groups(self, *, sharing: bool = True) -> Groups:
        """The first places of all lean lattices, grouped by effort, the simplest first.

        `sharing=False` leaves out the branches that shard on one GPU, which shares with nobody.
        """
        if sharing:
            return self._every_group
        alone = {b for b, branch in enumerate(self.branches) if branch.alone}
        left = {effort: [at for at in group if at[0] not in alone] for effort, group in self._every_group.items()}
        return {effort: group for effort, group in left.items() if group} if alone else self._every_group

    @cached_property
    def _every_group(self) -> Groups:
        found: Groups = {}
        for b, branch in enumerate(self.branches):
            for effort, turn in efforts(branch):
                found.setdefault(effort, []).append((b, (*turn, *[0] * (len(branch.axes) - branch.turns))))
        return dict(sorted(found.items()))

    def simplest(self, groups: Groups) -> Found | None:
        """The first configuration of the groups that takes no longer than the fastest within the error of times.

        If no rate is known, the first of all.
        """
        fastest = self.quickest(groups)
        if self.rated and fastest is None:
            return None
        limit = self.limit(fastest)
        for group in groups.values():
            within = [at for at in group if not self.known_overfull(*at) and self.reaches(*at, limit)]
            if within and (found := self.fastest(within, limit)):
                return found
        return fastest

    def within(self, seconds: float) -> bool:
        """True if a configuration fits that takes no longer; cheaper than `best`, as slower ones are not looked at."""
        return self.quickest(self.groups(), seconds) is not None

    def quickest(self, groups: Groups, limit: float = inf) -> Found | None:
        """The fastest of the groups' configurations; None if none fits within the limit or no rate is known.

        That of all groups is kept, as it is often asked for once more after `within`.
        """
        every = groups is self._every_group
        if every and self._fastest:
            return self._fastest if self._fastest.seconds <= limit else None
        asked = dict.fromkeys(at for group in groups.values() for at in group)
        first = dict.fromkeys((b, (0,) * len(place)) for b, place in asked)
        found = self.fastest(first, limit, asked.keys()) if self.rated else None
        if every:
            self._fastest = found
        return found

    def reaches(self, b: int, place: Place, limit: float) -> bool:
        """True if the bound of a place is at most `limit`; along the way to it bounds never fall."""
        return self.generating(b, place) <= limit and all(
            self.bound(b, (*place[:axis], *[0] * (len(place) - axis))) <= limit for axis in range(len(place) + 1)
        )

    def limit(self, fastest: Found | None) -> float:
        """The longest step time that cannot be told from that of the fastest, in seconds; infinite if there is none."""
        return fastest.seconds * (1 + TOLERANCE) if fastest and self.rated else inf

    def fastest(
        self, starts: Iterable[tuple[int, Place]], limit: float, asked: Set[tuple[int, Place]] | None = None
    ) -> Found | None:
        """The first by rank in the lean lattices of `starts` that takes at most `limit` seconds.

        With `asked`, only lattices are searched that start at one of its places, reached from `starts`.
        """
        found: Found | None = None
        ticket = count()
        # a bound, a ticket, a place, and for how many of the last axes it is known where they begin to fit
        heap: list[tuple[float, int, int, Place, int]] = []
        seen: set[tuple[int, Place, int]] = set()

        def push(b: int, place: Place, cut: int, bound: float) -> None:
            if (b, place, cut) not in seen:
                seen.add((b, place, cut))
                heapq.heappush(heap, (bound, next(ticket), b, place, cut))

        for b, place in starts:
            push(b, place, 0, 0.0)
        while heap and heap[0][0] < inf and heap[0][0] <= limit:
            bound, turn, b, place, cut = heapq.heappop(heap)
            if self.generating(b, place) > limit:
                continue
            # until its turn comes a place has the bound of one before it; one that is only passed through keeps that
            if not self.known_overfull(b, place) and bound < (own := self.soonest(b, place, bound)):
                heapq.heappush(heap, (own, turn, b, place, cut))
                continue
            turns, axes = self.branches[b].turns, len(place)
            if cut == 0:
                for following in self.behind(b, place, range(turns)) if asked is not None else ():
                    push(b, following, 0, bound)
                if asked is not None and (b, place) not in asked:
                    continue
                if self.overfull(b, place) or self.too_much_for_the_host(b, place):
                    continue
            if turns + cut < axes:
                # until something is found, cut all axes: an early find spares looking at slower places
                for n in range(cut, axes - turns if found is None else cut + 1):
                    cutting = self.cut(b, place, axes - 1 - n, limit)
                    if cutting is None:
                        break
                    place = cutting
                else:
                    push(b, place, axes - turns if found is None else cut + 1, bound)
                    if found is None:
                        found, limit = self.sooner(self.settled(b, place), None, limit)
                continue
            if self.time(b, place) <= limit:
                found, limit = self.sooner(self.settled(b, place), found, limit)
            for following in self.behind(b, place, range(turns, axes)):
                push(b, following, cut, bound)
        return found

    @staticmethod
    def sooner(here: Found | None, found: Found | None, limit: float) -> tuple[Found | None, float]:
        """The one of both that comes first by rank, and the seconds that the next may take."""
        if here and here.seconds <= limit and here.before(found):
            found = here
        return found, found.seconds if found else limit

    def any(self) -> bool:
        """True if anything fits."""
        known = self.leanest(looking=False)
        return self.best() is not None if known is None else known

    def leanest(self, *, looking: bool = True) -> bool | None:
        """True if anything fits, judged by the leanest places alone; None if they leave it open.

        Along the lean axes, a hungrier place fits on the device only if the leanest with which vLLM starts does.
        Branches are asked from the last, as they are ordered from shardings that shard nothing to those that shard all.
        With `looking`, each place is noted, as the closest miss may be any of them.
        """
        known: bool | None = False
        for b, at in self._leanest_places():
            # to tell whether roles have room as they train takes more than both
            if self.overfull(b, at) or self.too_much_for_the_host(b, at):
                if looking and (beside := self._beside.get(self.held(b, at))) is not None:
                    self._fits.setdefault((b, at), Unmade(beside))
                continue
            if not self.possible(b, at, looking=looking):
                continue
            found = self.starting(b, at)
            if found and found.fits:
                return True
            open_ = found is None or (found.on_device and not found.too_lean)
            if open_ and (looking or not self.fills_the_host(b, at)):
                known = None  # an engine that sleeps may fill the host, where one that stays does not
        return known

    def _leanest_places(self) -> Iterator[tuple[int, Place]]:
        """The leanest place of each lean lattice, from the last branch and turn to the first."""
        for b, branch in reversed([*enumerate(self.branches)]):
            for turn in product(*[reversed(range(n + 1)) for n in branch.leanest[: branch.turns]]):
                yield b, (*turn, *branch.leanest[branch.turns :])

    @cached_property
    def whatever_length(self) -> bool:
        """True if nothing fits however short sequences are: not what is resident, nor the host, nor a vLLM apart."""
        return all(
            self.overfull(b, at) or self.too_much_for_the_host(b, at) or self._unserved(b, at)
            for b, at in self._leanest_places()
        )

    def _unserved(self, b: int, lean: Place) -> bool:
        """True if the phases of a vLLM that is apart from training do not fit at a leanest place."""
        found = self.starting(b, lean)
        return found is not None and found.apart and not found.serves

    def starting(self, b: int, lean: Place) -> Fit | None:
        """The fit of the leanest place, or of the one with the smallest share with which vLLM starts."""
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
        """`place` with the hungriest value of a lean axis that may fit with the others at their leanest, or None.

        The allocator is not replayed for that: it tells whether a place fits when the turn of that place comes. Only
        values count that take at most `limit` seconds. The micro batch comes first, as other branches may already know
        where it begins to fit.
        """
        branch = self.branches[b]
        lean = (*place[: branch.turns], *branch.leanest[branch.turns :])

        def fits(value: int) -> bool:
            at = (*lean[:axis], value, *lean[axis + 1 :])
            trains = self._trains.get(self.trainer(b, at, one_rank=True)) if axis == len(place) - 1 else None
            return self.possible(b, at, replaying=False) if trains is None else trains

        last = branch.leanest[axis]
        if limit < inf:
            slower = _first(
                lambda n: n > last or self.bound(b, (*place[:axis], n, *place[axis + 1 :])) > limit, 0, last + 1
            )
            last = slower - 1
            if axis == len(place) - 1 and all(self.time(b, (*place[:-1], n)) > limit for n in reversed(range(slower))):
                return None
        if last < 0 or not fits(last):
            return None
        return (*place[:axis], _first(fits, 0, last), *place[axis + 1 :])

    def behind(self, b: int, place: Place, axes: Iterable[int]) -> Iterator[Place]:
        """The places one step further along each of `axes`."""
        branch = self.branches[b]
        known = self._fits.get((b, place))
        starved = isinstance(known, Fit) and known.too_lean
        for axis in axes:
            # a share smaller than one that is too small is too small as well
            if place[axis] < branch.leanest[axis] and not (starved and branch.axes[axis].name == SHARE):
                yield (*place[:axis], place[axis] + 1, *place[axis + 1 :])

    def possible(self, b: int, place: Place, *, looking: bool = False, replaying: bool = True) -> bool:
        """True unless the device rules out a place and all that are hungrier.

        With `looking`, a place is looked at although another that leaves the GPUs otherwise has ruled it out. Without
        `replaying`, only what needs no replay of the allocator rules it out.
        """
        if not looking and self._updates.get(self.updater(b, place)) is False:
            return False
        trains = self._trains.get(self.trainer(b, place))
        if trains is False or self._trains.get(self.trainer(b, place, one_rank=True)) is False:
            return False
        serves = self._serves.get(self.server(b, place))
        if trains is not None and serves is not None:
            return serves.serves
        found = self.fit(b, place)
        return found is None or (found.on_device if replaying else found.perhaps_on_device)

    def held(self, b: int, place: Place) -> tuple[int, int, Place]:
        """The key that decides what is resident as roles train: a branch has all its micro batches for that."""
        branch = self.branches[b]
        return branch.kin, branch.micro(branch.leanest), branch.kept(branch.own(place[: branch.turns]))

    def overfull(self, b: int, place: Place) -> bool:
        """True if what is resident is too much for a GPU, whatever is recomputed, and at every value of the lean axes.

        One place is asked for all that hold the same; if the framework refuses it, that tells nothing of the others.
        None is asked that holds more than another which is too much.
        """
        held = self.held(b, place)
        if held not in self._beside:
            branch = self.branches[b]
            if (leaner := self._leaner_overfull(*held)) is not None:
                self._beside[held] = leaner
                return True
            found = self.fit(b, (*place[: branch.turns], *branch.leanest[branch.turns :]))
            if found is None:
                return False
            self._beside[held] = found.beside_resident
            if found.beside_resident < 0:
                self._overfull.setdefault(held[:2], {})[held[2]] = found.beside_resident
        return self._beside[held] < 0

    def _leaner_overfull(self, kin: int, micro: int, kept: Place) -> int | None:
        """The bytes beside what is resident where as much or more leaves the GPUs, if that is known to be overfull."""
        known = self._overfull.get((kin, micro), {})
        return next((beside for more, beside in known.items() if all(map(le, kept, more))), None)

    def known_overfull(self, b: int, place: Place) -> bool:
        """True if `overfull` has found it so; computes nothing."""
        return self._beside.get(self.held(b, place), 0) < 0

    def too_much_for_the_host(self, b: int, place: Place) -> bool:
        """True if the host lacks memory at every value of the lean axes."""
        return self.host_lacks(b, place) > 0

    def host_lacks(self, b: int, place: Place) -> int:
        """Bytes of host memory that a node lacks at least, at every value of the lean axes; their first need least."""
        branch = self.branches[b]
        first = (*place[: branch.turns], *[0] * (len(place) - branch.turns))
        key = self.hosted(b, first)
        if key not in self._hostless:
            s = self.scenario(b, first)
            if s is None:
                return 0
            roles = [s, *filter(None, [s.role(name) for name in s.roles])]
            job = self.job(b, first) if any(role.offload.trained for role in roles) else None
            self._hostless[key] = max(0, most(Hosts(job).phases()) - self.host.bytes) if job else 0
        return self._hostless[key]

    def fills_the_host(self, b: int, lean: Place) -> bool:
        """True if the host lacks memory at the leanest place, and with each micro batch where vLLM does not sleep."""
        turns = self.branches[b].turns
        hungry = (*lean[:turns], *[0] * (len(lean) - turns))
        # what the host needs falls or grows along the micro batches, so that one of the ends needs least
        for at in dict.fromkeys((lean, hungry, (*hungry[:-1], lean[-1]))):
            job = self.job(b, at)
            if job is None or most(Hosts(job).phases()) <= self.host.bytes:
                return False
        return True

    def hosted(self, b: int, first: Place) -> Hashable:
        """The key that decides what the host needs: what is recomputed if checkpoints go there; vLLM's tensor
        parallelism, unless vLLM takes nothing there.
        """
        branch = self.branches[b]
        turn = first[: branch.turns]
        if b not in self._serves_off_host:
            job = self.job(b, (0,) * len(first))
            self._serves_off_host[b] = job is not None and not Hosts(job).serving(1)
        held = turn if branch.base.offload.activations else branch.kept(turn)
        return branch.kin, branch.micro(first), held, None if self._serves_off_host[b] else b

    def settled(self, b: int, place: Place) -> Found | None:
        """The leanest place with the same bound as `place`, or `place` itself if only that fits, or if it is faster.

        It is faster where other roles leave vLLM less room for its cache than the bound assumes.
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

    # ---- the full search, which tests compare `best` with ----

    def every(self) -> Iterator[Found]:
        """Every configuration that fits; `best` is one of them."""
        for b, branch in enumerate(self.branches):
            for place in branch.places():
                if found := self.found(b, place):
                    yield found


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first of `low` to `high` for which `holds`, given that it holds for `high` and stays true once it is."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
