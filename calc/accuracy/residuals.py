"""Residuals of estimated against measured memory, one for each record of `measurements/`, and their summaries.

The record's metric says what is compared: a number if PyTorch's allocator was asked (`allocated`, `held`), a range if
fragmentation counts too (`reserved`, `nvidia-smi`, `unknown`), or whether the job ran (`verdict`). A record measured on
a real card has more: the bytes that the job had asked the allocator for, the bytes that the allocator reserved, and
those that the process took beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import mean, median
from typing import Any, NamedTuple

from calc.base.ledger import Line, Moment, Phase, Sums
from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import Keeps
from calc.base.versions import at_least
from calc.catalog.catalog import Catalog
from calc.estimate.estimate import estimate, loading_moments, reserved_in_turn
from calc.estimate.result import Estimate, Group
from calc.estimate.verdict import Verdict
from calc.frameworks.registry import plan
from calc.memory import runtime
from calc.replay import replay
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.scenario.words import SHARDED, Family, Sharding
from calc.step.roles import Roles

# a trace follows tensors; cuBLAS takes its workspaces from the allocator too, but only on a real card and in a step
UNTRACED = frozenset({"workspace"})
NUMBERS = ("allocated", "held")
RANGES = ("reserved", "nvidia-smi", "unknown")
# The parts of a peak that a trace and the ledger tell apart in the same way, by the names that either gives them.
# Everything else counts as made in the step, since the two differ on when an activation or a buffer becomes a gradient.
PARTS = {"weights": "weights", "adapter": "weights", "optimizer_states": "states", "master_weights": "states"}
MADE = "made in the step"
BUFFERS = "weights#tables"  # the source of lines for a model's buffers, which a trace tells apart from its parameters
# a published number further off than this is listed, with its reason
ALLOWED = 0.04
# a source that says GB without showing which may mean 2^30 bytes
GIB_PER_GB = 2**30 / 10**9


class Part(NamedTuple):
    """A phase's peak, or one part of the largest phase's, in bytes as estimated and as measured."""

    name: str
    predicted: int
    measured: int


class Allocator(NamedTuple):
    """The statistics of PyTorch's allocator at a measured job's peak, in bytes.

    `requested` is what the job had asked for: a cached block is handed out whole where at most 1 MiB of it is left over
    (c10/cuda/CUDACachingAllocator.cpp, `should_split`), unless segments are `expandable`. `low` to `high` is the
    estimated range of `reserved`, and `undisturbed` what a replay without a limit reserves; 0 where none is known.
    """

    requested: int
    reserved: int
    low: int
    high: int
    expandable: bool
    undisturbed: int

    @property
    def inside(self) -> bool:
        """True if the estimated range holds what was reserved."""
        return self.low <= self.reserved <= self.high


class Outside(NamedTuple):
    """Bytes that a process took of its card beside PyTorch's memory: before its first kernel, and at its end.

    `predicted` is what the estimate has at its peak outside the allocator: the context, and states that are paged to
    the host.
    """

    machine: str
    kind: str
    at_start: int
    measured: int
    predicted: int


class Top(NamedTuple):
    """The totals of a phase's peak instant, and the bytes that its card has for them."""

    sums: Sums
    usable: int


@dataclass(frozen=True, slots=True)
class Residual:
    """A record's memory in bytes as estimated and as measured, and whether the job ran.

    `predicted` is a peak of the allocator, `counted` the estimate of what the metric counts, `low` to `high` its range;
    the range and the verdict of a traced step, which nothing is compared with, are those of the ledger alone.
    `measured` is 0 for a mere verdict; `most` is the largest value that the source may mean by its number. `phases` and
    `components` come from a trace, `allocator` and `outside` from a measured job. `tops` are those of all phases, none
    where vLLM does not start.
    """

    id: str
    group: str
    framework: str
    task: str
    method: str
    sharding: Sharding
    kind: str  # the record's class
    metric: str
    predicted: int
    counted: int
    low: int
    high: int
    measured: int
    most: int
    verdict: Verdict
    reported: str | None
    explanation: str
    phases: tuple[Part, ...] = ()
    components: tuple[Part, ...] = ()
    checkpointing: str = "none"
    allocator: Allocator | None = None
    outside: Outside | None = None
    tops: tuple[Top, ...] = ()

    @property
    def family(self) -> Family:
        """The family of the sharding, without its stage or version."""
        return SHARDED[self.sharding].family

    @property
    def error(self) -> float:
        """The relative error, positive where the estimate is too high."""
        return self.predicted / self.measured - 1

    @property
    def asked_error(self) -> float | None:
        """The relative error against the bytes that the job had asked the allocator for, or None if unknown."""
        return self.predicted / self.allocator.requested - 1 if self.allocator else None

    @property
    def inside(self) -> bool:
        """True if the range holds a value that the source may mean."""
        return self.low <= self.most and self.measured <= self.high

    @property
    def same_verdict(self) -> bool:
        """True if the job ran out of memory both by the estimate and in the record, or in neither."""
        return (self.verdict == "oom") == (self.reported == "oom")

    @property
    def agrees(self) -> bool:
        """True if the estimate and the record agree by the record's metric."""
        if self.metric == "verdict":
            return self.same_verdict
        return self.inside if self.metric in RANGES else abs(self.error) <= ALLOWED


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of several residuals, relative; `bias` keeps their sign, the others do not."""

    count: int
    median: float
    mean: float
    p95: float
    worst: float
    bias: float


def residual(record: Mapping[str, Any], catalog: Catalog) -> Residual:
    """The residual of a record; raises ScenarioError for a scenario that cannot be used."""
    catalog = as_run(record, catalog)
    scenario = parse(record["scenario"], where=record["id"], catalog=catalog)
    own = record["class"] in ("traced", "measured")  # every batch is as long as the scenario says
    traced = record["class"] == "traced"  # without a card, so that there is nothing to compare with a verdict
    e = estimate(scenario, catalog, replays=not traced)
    metric, measured = record["metric"], record["measured_bytes"] or 0
    predicted = held(scenario, record["moment"], catalog) if metric == "held" else peak_allocated(e, traced=traced)
    low, high = reach(e, metric, filled=own)
    count = counted(e, metric, catalog) if metric in RANGES else predicted
    return Residual(
        id=record["id"],
        group=record.get("group", ""),
        framework=scenario.framework,
        task=scenario.task,
        method=scenario.method,
        sharding=scenario.sharding,
        kind=record["class"],
        metric=metric,
        predicted=predicted,
        counted=count,
        low=low,
        high=max(count, high) if metric in RANGES else high,
        measured=measured,
        most=int(measured * GIB_PER_GB) if record.get("unit") == "GB or GiB" else measured,
        verdict=e.verdict,
        reported=record["verdict"],
        explanation=record.get("explanation", ""),
        phases=tuple(phase_parts(e, record)),
        components=tuple(component_parts(e, record)),
        checkpointing=scenario.checkpointing,
        allocator=allocator(e, record, catalog),
        outside=outside(e, record),
        tops=() if any(g.refusal for g in e.groups) else tuple(tops(e)),
    )


def tops(e: Estimate) -> Iterator[Top]:
    """The peak instant of each phase, on each GPU group."""
    return (Top(phase.moment.sums, g.usable_bytes) for g in e.groups for phase in g.phases)


def as_run(record: Mapping[str, Any], catalog: Catalog) -> Catalog:
    """The catalog with the record's card as it was where the record was made.

    If another card stood in for it, the record's card has its own memory and the other card's kernels and workspaces.
    """
    named = catalog.gpu(record["scenario"]["gpu"])
    real = catalog.gpu(record.get("machine", {}).get("gpu", named.id))
    if real.id == named.id:
        return catalog
    card = replace(real, id=named.id, usable_mib=named.usable_mib)
    return replace(catalog, gpus={**catalog.gpus, named.id: card})


def allocator(e: Estimate, record: Mapping[str, Any], catalog: Catalog) -> Allocator | None:
    """The allocator's statistics at a measured peak, or None if the record has none."""
    seen = record.get("observed", {})
    if record["metric"] != "allocated" or "allocator" not in seen:
        return None
    requested, expandable = seen["allocator"]["requested_bytes"], seen["expandable_segments"]
    low, high = reach(e, "reserved", filled=True)
    return Allocator(requested, seen["reserved_bytes"], low, high, expandable, undisturbed(e.scenario, catalog))


def undisturbed(s: Scenario, catalog: Catalog) -> int:
    """The bytes that a replay of a job without a limit reserves, as its estimate has asked; 0 where none is known."""
    act = replay.act(Roles(s))
    return replay.reserve(act, runtime.workspace(catalog.gpu(s.gpu).architecture)).undisturbed if act else 0


def outside(e: Estimate, record: Mapping[str, Any]) -> Outside | None:
    """The memory beside PyTorch's that a measured job took, as the harness saw it, or None if the record has none.

    One process ran, whatever the scenario's number of GPUs, so nothing of NCCL is part of it.
    """
    seen = record.get("observed", {})
    if record["metric"] != "allocated" or "allocator" not in seen:
        return None
    group = max(e.groups, key=lambda g: g.peak.moment.device_bytes)
    lines = [x for x in group.peak.moment.lines if not x.allocated and x.component not in ("nccl", "fragmentation")]
    start, end = seen["context_at_start_bytes"], seen["context_bytes"]
    return Outside(record["machine"]["gpu"], loads(e.scenario), start, end, sum(line.bytes for line in lines))


def loads(s: Scenario) -> str:
    """The kind of job by the kernels that CUDA loads for it; each takes memory when first called."""
    if OPTIMIZERS[s.optimizer].paged:
        return "paged states"
    if s.sharded.family == "fsdp":
        return "FSDP, one process"
    if s.optimizer == "none":
        return "nothing trained"
    return "fp32, or eager attention" if s.precision == "fp32" or s.attention == "eager" else "other training"


def phase_parts(e: Estimate, record: Mapping[str, Any]) -> Iterator[Part]:
    """The peak of each phase that the record has too, on the GPU group where it is highest."""
    seen = record.get("observed", {}).get("phases", {}) if record["class"] == "traced" else {}
    highest: dict[str, int] = {}
    for phase in (phase for group in e.groups for phase in group.phases if phase.name in seen):
        allocated = _traceable(phase.moment.lines)
        highest[phase.name] = max(allocated, highest.get(phase.name, 0))
    yield from (Part(name, count, seen[name]["allocated_bytes"]) for name, count in highest.items())


def component_parts(e: Estimate, record: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of the peak instant, if the record has them.

    None under DeepSpeed: a trace does not recognise its flat partitions as the optimizer's.
    """
    seen = record.get("observed", {}).get("components", {})
    if not seen or e.scenario.sharded.family == "zero":
        return
    phase = max(_steps(e), key=lambda p: _traceable(p.moment.lines))
    totals: dict[str, list[int]] = {part: [0, 0] for part in (*PARTS.values(), MADE)}
    for line in phase.moment.lines:
        if line.allocated and line.component not in UNTRACED:
            part = MADE if line.source == BUFFERS else PARTS.get(line.component, MADE)
            totals[part][0] += line.bytes
    for component, count in seen.items():
        totals[PARTS.get(component, MADE)][1] += count
    yield from (Part(name, *both) for name, both in totals.items())


def peak_allocated(e: Estimate, *, traced: bool = False) -> int:
    """The most that PyTorch's allocator counts at any instant; `traced`: as far as a trace of a step sees it."""
    if traced:
        return max(_traceable(phase.moment.lines) for phase in _steps(e))
    if _serves_apart(e.scenario):
        return max(_trainers(phase.moment.lines) for group in e.groups for phase in group.phases)
    return max(phase.moment.allocated_bytes + unmapped for group in e.groups for phase, unmapped in _unmapped(e, group))


def _unmapped(e: Estimate, group: Group) -> Iterator[tuple[Phase, int]]:
    """Each phase with the bytes that PyTorch counts in it beyond what the GPU holds: those of a vLLM that sleeps.

    vLLM's tensors stay allocated in a pool of PyTorch's while `CuMemAllocator.sleep` takes the pages from under them
    (vllm `device_allocator/cumem.py`, since 0.7.0), so that a counter of the process that both share may exceed the
    card.
    """
    pool = _asleep(e, group)
    for phase in group.phases:
        yield phase, 0 if phase.name == "load" else max(0, pool - _pooled(phase.moment.lines))


def _asleep(e: Estimate, group: Group) -> int:
    """The bytes of a vLLM that sleeps which PyTorch still counts in the trainer's process."""
    return max(_pooled(phase.moment.lines) for phase in group.phases) if _sleeps(e.scenario) else 0


def _sleeps(s: Scenario) -> bool:
    """True if vLLM sleeps by its own pool of memory, in the process of a trainer."""
    rollout = s.rollout
    if rollout is None or rollout.engine != "vllm" or not rollout.sleep:
        return False
    keeps = plan(s)
    serving = keeps.serving
    assert serving
    return at_least(serving.version, "0.7") and _shares_process(keeps)


def _shares_process(keeps: Keeps) -> bool:
    """True if a rollout engine runs in the process of a trainer."""
    return keeps.serving is not None and keeps.serving.process in {role.process for role in keeps.roles}


def _serves_apart(s: Scenario) -> bool:
    """True if a rollout engine runs in a process of its own, which a trainer's counter does not see.

    So do verl's since 0.7.1 (workers/rollout/vllm_rollout/vllm_async_server.py): `max_memory_allocated` that it prints
    is that of the actor's process (utils/metric/utils.py, `perf/max_memory_allocated_gb`).
    """
    if s.rollout is None:
        return False
    keeps = plan(s)
    return keeps.serving is not None and not _shares_process(keeps)


def _pooled(lines: Iterable[Line]) -> int:
    """Bytes of the engine's weights and KV cache, which lie in its pool."""
    return sum(
        line.bytes
        for line in lines
        if line.allocated and line.role == runtime.SERVING and line.component in ("weights", "kv_cache")
    )


def _steps(e: Estimate) -> list[Phase]:
    """All phases but loading, which is over when a trace begins."""
    return [phase for group in e.groups for phase in group.phases if phase.name != "load"]


def held(s: Scenario, moment: str, catalog: Catalog) -> int:
    """Bytes that the allocator counts at a given instant of loading, before any kernel has run."""
    return max(_traceable(m.lines) for _, m in loading_moments(s, catalog) if m.name == moment)


def _traceable(lines: Iterable[Line]) -> int:
    """Bytes that PyTorch's allocator counts, as far as a trace sees them."""
    return sum(line.bytes for line in lines if line.allocated and line.component not in UNTRACED)


def counted(e: Estimate, metric: str, catalog: Catalog) -> int:
    """The bytes of which `reach` is the range; a tool that is not named is taken to count all of the process.

    Where roles of RL take turns, PyTorch's counter of what it reserves has the blocks that it caches in their phases.
    """
    group = max(e.groups, key=lambda g: g.peak.moment.device_bytes)
    shown = group.shown_peak.moment.device_bytes
    if metric != "reserved":
        return shown
    in_turn = reserved_in_turn(e.scenario, catalog).get(group.name, 0)
    return max(_reserved(e, group) + shown - group.peak.moment.device_bytes, in_turn + _asleep(e, group))


def _reserved(e: Estimate, group: Group) -> int:
    """The most that PyTorch counts as reserved in a phase."""
    return max(_owned(e, phase.moment) + unmapped for phase, unmapped in _unmapped(e, group))


def _owned(e: Estimate, m: Moment) -> int:
    """The bytes that PyTorch has reserved at an instant in the process of a trainer."""
    held = _trainers(m.lines) if _serves_apart(e.scenario) else m.allocated_bytes
    return held + m.fragmentation


def reach(e: Estimate, metric: str, *, filled: bool = False) -> tuple[int, int]:
    """The range of bytes that `metric` counts on the fullest GPU: of the whole device, or of what PyTorch reserves.

    `filled`: batches are known to be as long as the scenario lets them be. A tool that is not named may count either,
    or the allocator's own peak, which has no fragmentation in it; and a trainer's own counter leaves out what a rollout
    engine beside it holds (EasyR1 `verl/workers/fsdp_workers.py`).
    """
    group = max(e.groups, key=lambda g: g.peak.moment.device_bytes)
    low, high = group.filled_low if filled else group.device_range[0], group.device_range[1]
    moment = group.peak.moment
    reserved = _owned(e, moment)
    outside = moment.device_bytes - reserved  # the context, NCCL, a rollout engine's process
    if metric == "reserved":
        more = _reserved(e, group) - reserved  # of a vLLM that sleeps
        # a card may be full without what NCCL takes beyond its lines
        beyond = 0 if high >= group.usable_bytes else runtime.beyond(moment.lines)
        return low - outside + more, high - outside - beyond + more
    if metric == "unknown":
        own = max(_trainers(phase.moment.lines) for phase in group.phases)
        return min(min(low, group.filled_low - moment.fragmentation) - outside, own), high
    return low, high


def _trainers(lines: Iterable[Line]) -> int:
    return sum(line.bytes for line in lines if line.allocated and line.role != runtime.SERVING)


def summary(residuals: Iterable[Residual]) -> Summary:
    """The summary of the residuals' errors; needs at least one residual."""
    return summed([r.error for r in residuals])


def summed(errors: Sequence[float]) -> Summary:
    """Median, mean, 95th percentile and worst of the absolute errors, and the mean signed error; needs at least one."""
    sizes = sorted(abs(error) for error in errors)
    return Summary(len(sizes), median(sizes), mean(sizes), sizes[ceil(0.95 * len(sizes)) - 1], sizes[-1], mean(errors))
