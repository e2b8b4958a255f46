"""GPU groups, the GPUs that hold the same roles: what is on one of them at each instant of a step, and whether it fits.

`calc.step.stages` counts what the roles have there; the process itself and vLLM, which differ from card to card, are
added here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import add
from typing import NamedTuple

from calc.base.ledger import Line, Moment, Phase, Sums, staying, total
from calc.base.plan import Leaves
from calc.base.units import gib
from calc.engines.rollout import STARTING, Cache
from calc.estimate import verdict
from calc.estimate.result import Group
from calc.memory import runtime
from calc.replay import replay, rl_cache
from calc.scenario.words import RL
from calc.step import placement
from calc.step.roles import Job
from calc.step.stages import Candidate, Stages, sums

EMPTY = "no layers"  # the name of a group that holds no role

PHASES = ("load", "rollout", "score", "forward", "backward", "step", "sync", "save")


class Unknown(NamedTuple):
    """What a range has to allow for, beside the errors of the estimate.

    `caching`: how sizes of blocks differ from batch to batch; `pools`: shards come and go in streams of their own, and
    no replay has followed them. `least`: the length of the longest batch over the one that is counted, if data are as
    short as they may be. `usual`: the share of what comes and goes that PyTorch usually caches, 0 where a replay says
    what it has or nobody measured it. `compared`: cards of this maker are among the measured records, which tell a
    replay's error. `shuffled`: a replay has followed batches of other lengths, in an order that nobody knows.
    """

    caching: runtime.Caching = "one length"
    pools: bool = False
    least: float = 1.0
    usual: float = 0.0
    compared: bool = True
    shuffled: bool = False


FILLED = Unknown()


class GpuGroup:
    """A GPU group: GPUs that hold the same roles, seen from one of them."""

    def __init__(self, job: Job, names: Sequence[str], gpus: int, *, replays: bool = True) -> None:
        """The group of the roles called `names`, on `gpus` GPUs; `replays`: the allocator, where blocks are known."""
        self.job, self.names, self.gpus, self.replays = job, names, gpus, replays
        self.engine = job.engine if "rollout" in names else None

    @cached_property
    def stages(self) -> Stages:
        """The stages of a step, with what the group's roles have on a GPU."""
        return Stages(self.job.roles, self.names)

    def processes(self, names: Iterable[str]) -> list[Line]:
        """The lines of the processes of the roles called `names`: what they take of a GPU beside tensors."""
        gpu, found = self.job.gpu, [self.job.placed[name] for name in names]
        communicators = max([placed.s.communicators for placed in found], default=0)
        peers = max([placed.s.peers for placed in found], default=0)
        own = len({p.role.process for p in found})
        awake = min(own, 1) if self.job.keeps.disconnects else own
        lines = runtime.process(gpu.architecture, communicators, gpu.linked, own, peers=peers, awake=awake)
        return [*lines, *[line for placed in found for line in placed.workspaces()]]

    @cached_property
    def process(self) -> list[Line]:
        """The lines of all roles' processes, and of vLLM's own: all that is beside tensors and vLLM's pool.

        A process that spreads layers over GPUs has a context on each, also on one that gets none (accelerate 1.10.0
        `utils/modeling.py`, `get_max_memory`).
        """
        around = placement.around(self.job.s, self.job.keeps, self.job.gpu) if self.engine else []
        return [*self.processes(name for name in self.names or self.job.placed if name in self.job.placed), *around]

    @cached_property
    def others(self) -> int:
        """Bytes on the GPU that are not vLLM's, when vLLM measures it."""
        before = self.names[: self.names.index("rollout")]
        arrived = self.job.roles.serving.once(
            ("arrived", before), lambda: total([line for name in before for line in self.stages.arrived(name)])
        )
        return total(self.processes(before)) + arrived

    @cached_property
    def training(self) -> list[Sums]:
        """The totals of each phase that trains or scores, without fragmentation."""
        beside = sums(self.card_lines(loading=False, engine=""), fragmenting=False)
        return [Sums(*map(add, known, beside)) for _, known in self.largest(serving=False)]

    @cached_property
    def resting(self) -> Sums:
        """Totals that cover all of these phases: the most tensors of any, and the most beside tensors of any."""
        most = max([known.allocated for known in self.training])
        outside = max([known.needed - known.allocated for known in self.training])
        return Sums(outside + most, most, 0)

    @property
    def act(self) -> replay.Act | None:
        """The job as it is replayed; None where it is not `known`, or has more events than a replay may have."""
        return None if self.too_long else self.known

    @cached_property
    def too_long(self) -> bool:
        """True if a replay would have more events than it may."""
        return self.known is not None and self.known.events > replay.MOST

    @cached_property
    def replayable(self) -> bool:
        """True if the job's blocks are known, and a replay could let it fit."""
        if self.engine or not self.names or not replay.known(self.job.roles):
            return False
        # this spares most jobs the work of finding their blocks
        return not any(verdict.hopeless(known, self.job.gpu.usable_bytes) for known in self.training)

    @cached_property
    def known(self) -> replay.Act | None:
        """The job block by block; None where its blocks are not known, or no replay could let it fit."""
        if not self.replays or not self.replayable:
            return None
        return self.job.roles.training.once(("act", self.left), lambda: replay.act(self.job.roles))

    @cached_property
    def reserve(self) -> replay.Reserve:
        """The memory that PyTorch reserves in the replay, shared by all cards with the same cuBLAS workspace."""
        assert self.act
        return replay.reserve(self.act, runtime.workspace(self.job.gpu.architecture))

    @cached_property
    def reserved(self) -> tuple[int, int] | None:
        """The bytes that PyTorch reserves here, and the least that it must be allowed; None without a replay.

        It reserves what it would without a limit where the job fits with that, otherwise only the least.
        """
        if not self.act:
            return None
        undisturbed = self.replayed(self.reserve.undisturbed)
        if self._certain:
            return undisturbed.replayed, undisturbed.replayed
        least = self.replayed(self.reserve.least).replayed
        return (undisturbed.replayed if self._leaves_room(undisturbed) else least), least

    @cached_property
    def _certain(self) -> bool:
        """True if the job always fits with what it reserves undisturbed, so that the least is not needed."""
        return verdict.certain(self.replayed(self.reserve.undisturbed), self.job.gpu.usable_bytes)

    def reserved_in_turn(self) -> int | None:
        """The bytes that PyTorch reserves at most as roles of RL score and train in turn; None if not replayed.

        No more than the card has beside them: cached blocks go back to the driver before a request fails.
        """
        outside = [
            line for line in self.card_lines(False, "asleep") if line.role == runtime.SERVING or not line.allocated
        ]
        limit = self.job.gpu.usable_bytes - total(outside)
        return rl_cache.reserved(self.job.roles, self.names, limit, runtime.workspace(self.job.gpu.architecture))

    @property
    def events(self) -> int:
        """About how many events the replays behind `reserved` have, even if others asked for them before."""
        if not self.reserved or not self.act:
            return 0
        return self.act.events if self._certain else self.act.events + int(self.reserve.spent)

    @property
    def notes(self) -> Iterator[str]:
        """Notes on what the bounds of replays leave out."""
        if self.too_long:
            yield (
                f"the allocator is not replayed: that would take more than {replay.MOST:,} events, "
                "so the median of what other jobs lost stands for fragmentation"
            )
        elif self.reserved and not self._certain and self.reserve.cut:
            yield (
                f"the allocator may need up to {gib(self.reserve.unknown)} less than it is given here: "
                f"a closer search would take more than {replay.SOUGHT:,} events"
            )

    @property
    def rooms(self) -> tuple[int, int]:
        """The least and the most that `room` in the phases without vLLM can be, by the replays so far."""
        usable = self.job.gpu.usable_bytes
        if not self.act or self._certain:
            room = self.room(serving=False)
            return room, room
        low, high = self.reserve.known
        return verdict.room(self.replayed(high), usable), verdict.room(self.replayed(low), usable)

    def narrow(self) -> bool:
        """Replays once more where that may bring `rooms` nearer to each other; False where it cannot."""
        return self.act is not None and self.reserve.narrow()

    def replayed(self, reserved: int) -> Sums:
        """The totals where PyTorch reserves `reserved` bytes, or the bytes of the tensors if these are more."""
        needed, most, *_ = self.resting
        reserved = max(most, reserved)
        return Sums(needed - most + reserved, most, 0, reserved)

    def _leaves_room(self, moment: Sums) -> bool:
        return verdict.room(moment, self.job.gpu.usable_bytes) >= 0

    def largest(self, *, serving: bool) -> list[tuple[Candidate, Sums]]:
        """The peak instants of the roles, whatever the card; see `Stages.largest`."""
        memo = self.job.roles.serving if serving else self.job.roles.training
        return memo.once(("largest", *self.names, self.left), lambda: self.stages.largest(serving=serving))

    @cached_property
    def left(self) -> tuple[frozenset[Leaves], ...]:
        """What of each role leaves the GPUs between its own phases."""
        return tuple([role.leaves for role in self.job.keeps.roles])

    @cached_property
    def beside_resident(self) -> int:
        """Bytes beside what is resident as roles train, whatever they recompute; below 0 if the card has too few."""
        return self.job.gpu.usable_bytes - self.job.roles.training.once(("resident", *self.names), self.stages.resident)

    @cached_property
    def free_at_most(self) -> int:
        """An upper bound of `room` in the phases without vLLM, in bytes; below 0 for most jobs that never fit."""
        working = self.job.roles.training.once(("working", *self.names), self.stages.working)
        usable = self.job.gpu.usable_bytes
        if not working:
            return usable  # nothing is trained here
        process = 0 if self.job.keeps.disconnects else staying(self.process)
        return verdict.room(Sums(working + process, 0, 0), usable)

    @property
    def _hopeless(self) -> bool:
        """True if a bound shows that a role cannot train; the cheaper one first."""
        return self.beside_resident < 0 or self.free_at_most < 0

    @cached_property
    def perhaps_trains(self) -> bool:
        """False if the phases without vLLM do not fit, even if PyTorch reserved no more than its tensors take.

        It takes no replay. Without one to make it is `trains` itself.
        """
        if self._hopeless:
            return False
        return self._enough(0) if self.act else self.room(serving=False) >= 0

    @property
    def trains(self) -> bool:
        """True if the phases without vLLM fit; cheaper than `room`."""
        return self.perhaps_trains and (not self.act or self.reserve.meets(self._enough))

    def _enough(self, reserved: int) -> bool:
        """True if the job fits where PyTorch reserves so many bytes."""
        return self._leaves_room(self.replayed(reserved))

    @property
    def updates(self) -> bool:
        """False if the update of a role does not fit, whatever else a step has."""
        return not self._hopeless and (self.act is not None or self.room(serving=False, scoring=False) >= 0)

    def room(self, *, serving: bool, scoring: bool = True) -> int:
        """Bytes free beside the peak and its error, in the phases with vLLM if `serving`, else in the others.

        `scoring`: those of forwards without gradient are among them.
        """
        usable = self.job.gpu.usable_bytes
        beside: dict[tuple[bool, str], Sums] = {}
        rooms = [usable]
        if not serving and self.reserved:
            # PyTorch keeps what it has reserved: after the first step that is the same in all phases
            return verdict.room(self.replayed(self.reserved[1]), usable)
        for found, known in self.largest(serving=serving):
            if found.phase == "score" and not scoring:
                continue
            loading, engine = at = found.phase == "load", found.engine
            if at not in beside:
                beside[at] = sums(self.card_lines(loading, engine), fragmenting=not loading)
            rooms.append(verdict.room(Sums(*map(add, known, beside[at])), usable))
        return min(rooms)

    def phases(self) -> tuple[Phase, ...]:
        """The phases of this group, each at its peak instant."""
        found = (*self.largest(serving=True), *self.largest(serving=False))
        return peaks([Phase(candidate.phase, self.moment(candidate)) for candidate, _ in found])

    def loading(self) -> Iterator[Moment]:
        """Every instant of loading, in order."""
        return map(self.moment, self.stages.loading())

    def course(self) -> Iterator[Phase]:
        """Every instant that can be the peak of its phase, in order, from loading to the end of a step."""
        return (Phase(candidate.phase, self.moment(candidate)) for candidate in self.stages.moments())

    def moment(self, found: Candidate) -> Moment:
        """The instant of a candidate, with everything that is on the card, fragmentation included."""
        loading = found.phase == "load"
        every = [line for line in (*self.card_lines(loading, found.engine), *found.lines) if line.bytes]
        # no fragmentation: nothing has been freed while models load
        if loading:
            return Moment(found.at, tuple(every))
        lost = runtime.replayed(every, *self.reserved) if self.reserved else runtime.fragmentation(every)
        return Moment(found.at, tuple(self.paged([*every, lost])))

    def paged(self, lines: Sequence[Line]) -> list[Line]:
        """The lines with as much of the paged states as the card has room for."""
        if not any([line.paged for line in lines if not line.allocated]):
            return [*lines]
        usable = self.job.gpu.usable_bytes
        room = max(0, usable - staying(lines))
        values = {"U": usable, "R": usable - room}
        return [
            line._replace(bytes=room, formula="U - R", values={**values, "P": line.bytes}, source="optimizer#paged")
            if line.paged and line.bytes > room
            else line
            for line in lines
        ]

    def card_lines(self, loading: bool, engine: str) -> list[Line]:
        """The lines that differ from card to card: those of the process, and of vLLM in the state `engine`.

        cuBLAS takes its workspaces at the first multiplication, after loading.
        """
        process = [line for line in self.process if line.component != "workspace"] if loading else self.process
        if self.job.keeps.disconnects and engine in (*STARTING, "all"):
            # no trainer has process groups or tensors then, and as the engine starts there is none
            kept = {"context"} if engine == "all" else set[str]()
            process = [line for line in process if line.component in kept or line.role == "rollout"]
        return [*process, *self.serving(engine)]

    @cached_property
    def awake(self) -> list[Line]:
        """The lines of vLLM while it serves."""
        return self.engine.awake(self.others) if self.engine else []

    def serving(self, state: str) -> list[Line]:
        """The lines of vLLM in `state`: `all`, `weights` or `asleep`, or an instant of its start.

        If it cannot sleep, all of it stays.
        """
        if not (state and self.engine and self.job.s.rollout):
            return []
        if state in STARTING:
            return self.engine.starting(state, self.others)
        if state == "all" or not self.job.s.rollout.sleep:
            return self.awake
        return self.engine.with_weights() if state == "weights" else self.engine.asleep()

    def cache(self) -> Cache | None:
        """vLLM's KV cache on this card, and whether vLLM starts; None where it does not serve."""
        if not self.engine:
            return None
        cache = self.engine.cache(self.others)
        # vLLM refuses nothing where the card is full before its turn
        turn = self.others < self.job.gpu.usable_bytes
        return cache if turn else cache._replace(refusal=None, crowded=False)

    def group(self) -> Group:
        """The group's phases and its verdict."""
        usable = self.job.gpu.usable_bytes
        found = judged(
            "+".join(self.names) or EMPTY,
            self.gpus,
            self.phases(),
            usable,
            self.cache(),
            self.unknown,
        )
        if self.known:
            return replace(found, events=self.events, notes=tuple(self.notes))
        return replace(found, provisional=self.replayable and not self.replays)

    @property
    def unknown(self) -> Unknown:
        """What the range of this group has to allow for."""
        s = self.job.s
        return Unknown(
            caching=self.caching,
            pools=s.sharded.family in ("zero", "fsdp") and not self.act,
            least=s.least_len / s.longest_len,
            usual=self.usual,
            compared=self.job.gpu.vendor == "NVIDIA",
            shuffled=bool(self.act and self.act.others),
        )

    @property
    def usual(self) -> float:
        """The share of what comes and goes that PyTorch usually caches; of RL none, whose loops empty the cache."""
        s = self.job.s
        if self.act or s.task in RL or self.job.keeps.low_level:
            return 0.0
        return runtime.USUALLY.get((s.sharded.family, s.expandable_segments), 0.0)

    @property
    def caching(self) -> runtime.Caching:
        """The way block sizes differ from batch to batch: a trainer's packs are nearly full, but not quite.

        RL trainers unpad each micro batch on its own (verl 0.4.0 `workers/actor/dp_actor.py`, `unpad_input`).
        """
        s = self.job.s
        if s.expandable_segments:
            return "one segment"
        return "one length" if s.packing and s.task == "pretrain" else "lengths vary"


def sets(job: Job, *, replays: bool = True) -> list[GpuGroup]:
    """The GPU groups of a job; `replays` as in `GpuGroup`."""
    return [GpuGroup(job, names, gpus, replays=replays) for names, gpus in placement.groups(job.s, job.keeps)]


HELD = 4  # tensors of the stream that a schedule's loops hold at most, see `calc.step.schedule_megatron.outliving`


def decisive(job: Job) -> list[GpuGroup]:
    """The GPU groups of which one is the fullest in each phase: of equal stages of Megatron-core's pipeline the first.

    A later one has as many micro batches in flight, or fewer, and what each keeps is more than what loops hold.
    """
    every = sets(job)
    if job.s.sharded.family != "megatron" or job.s.pipeline_parallel < 4:
        return every
    found: list[GpuGroup] = []
    parts = set[Hashable]()
    for each in every:
        roles = [job.keeps.role(name) for name in each.names if name in job.placed]
        held = tuple([placement.architecture(job.s.role(role.model) or job.s, role) for role in roles])
        between = all(0 < role.pipeline[0] < role.pipeline[1] - 1 for role in roles)
        least = HELD * job.s.virtual_pipeline
        deep = all(arch.layers >= least * role.handed for arch, role in zip(held, roles, strict=True))
        if not (held and between and deep and held in parts):
            found.append(each)
        parts.update([held] * between)
    return found


def peaks(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Each phase at the largest of its instants, the first of equals, in the order of `PHASES`."""
    largest: dict[str, Phase] = {}
    for phase in phases:
        if phase.name not in largest or phase.moment.device_bytes > largest[phase.name].moment.device_bytes:
            largest[phase.name] = phase
    return tuple([largest[name] for name in PHASES if name in largest])


def judged(
    name: str,
    gpus: int,
    phases: tuple[Phase, ...],
    usable: int,
    cache: Cache | None = None,
    unknown: Unknown = FILLED,
) -> Group:
    """The group with these phases on cards of `usable` bytes, with its range and its verdict."""
    peak = max((phase.moment for phase in phases), key=lambda moment: moment.device_bytes)  # any of equal ones
    refusal = cache.refusal if cache else None
    # a phase with a smaller peak may be less certain to fit
    odds = {p.name: verdict.odds(p.moment.sums, usable) for p in phases}
    probability = 0.0 if refusal else min(odds.values())
    word = verdict.word(probability)
    low, high = verdict.reach(peak)
    if unknown.shuffled:
        low = min(low, peak.device_bytes - peak.fragmentation)  # in another order all of them may fit cached blocks
    if peak.device_bytes <= usable and any(line.left for line in peak.lines):
        high = min(high, usable)  # more of the paged states leave
    most = max([phase.moment.allocated_bytes for phase in phases])
    low = max(low, most) if unknown.compared else most  # no less than tensors take
    short = max([runtime.shorter(p.moment.lines, unknown.least) for p in phases]) if unknown.least < 1 else low
    # freed blocks that the allocator keeps include fragmentation, which the ledger has as a line
    cached = [(runtime.cached(p.moment.lines, unknown.caching, pools=unknown.pools), p.moment) for p in phases]
    kept = max(max(0, count - moment.fragmentation) for count, moment in cached)
    return Group(
        name=name,
        gpus=gpus,
        phases=phases,
        usable_bytes=usable,
        # cached blocks fill at most what the card has
        device_range=(min(low, short), max(high, min(high + kept + runtime.beyond(peak.lines), usable))),
        filled_low=low,
        usual=unknown.usual,
        fit_probability=probability,
        verdict=word,
        verdict_phase="load" if refusal else _first_to_break(odds, word),
        refusal=refusal,
        cache_tokens=cache.tokens if cache else 0,
        cache_sequences=cache.sequences if cache else 0,
        crowded=bool(cache and cache.crowded),
    )


def _first_to_break(odds: Mapping[str, float], word: verdict.Verdict) -> str | None:
    """The first phase whose own verdict, by its odds, is at least as bad as the job's; None where the job fits."""
    if word == "fits":
        return None
    least = verdict.TIGHT if word == "oom" else verdict.FITS
    return next((name for name, probability in odds.items() if probability < least), None)
