"""The answer for one machine: the configuration to run, what else could be, and what the next faster one lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from calc.catalog import Catalog, load
from calc.launch import Launch, LaunchError, launch
from calc.ledger import Phase
from calc.recommend.clock import Clock
from calc.recommend.search import Found, Judged, Search, room
from calc.recommend.space import Branch, Fields, branches, rungs, seed
from calc.scenario import Scenario, ScenarioError
from calc.throughput import Throughput, node_of
from calc.units import GB, gib

# Ray ends workers when a node's memory is so full (RAY_memory_usage_threshold); elsewhere the rest is the system's.
HOST_SHARE = 0.95
# More margin is at least this share of the card, beside the peak and its error.
MARGIN = 0.10
LONGER = (8, 4, 2)  # times the sequences that were asked for
STEPS = 8  # towards more margin
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Configuration(NamedTuple):
    """A configuration that fits; `trades` says what it gives for what, beside the recommended one."""

    judged: Judged
    throughput: Throughput | None
    trades: str = ""

    @property
    def scenario(self) -> Scenario:
        """What to run."""
        return self.judged.scenario


class Miss(NamedTuple):
    """A configuration that does not fit: the phase and the bytes that are missing there, with the estimate's error.

    `where`: `gpu`, `host`, or `vllm` where the engine refuses to start, for a `reason` and no number of bytes.
    """

    judged: Judged
    throughput: Throughput | None
    where: str
    phase: str
    shortfall: int | None
    reason: str


@dataclass(frozen=True)
class Recommendation:
    """The answer. `recommended` is None where nothing fits; `fails` is then the closest miss, else the next faster one.

    `considered` configurations had their memory computed, `pruned` ones were ruled out without.
    """

    recommended: Configuration | None
    alternatives: tuple[Configuration, ...]
    fails: Miss | None
    advice: tuple[str, ...]
    considered: int
    pruned: int
    notes: tuple[str, ...] = ()
    launch: Launch | None = field(default=None)


class Problem:
    """One job on one machine: its rungs, each searched at most once, and what the searches cost."""

    def __init__(self, job: Fields, catalog: Catalog, where: str = "scenario") -> None:
        """Raises ScenarioError where no configuration of the job can be run."""
        self.catalog = catalog
        self.job = job
        self.fields = seed(job, catalog, where)
        self.rungs = list(rungs(self.fields))
        self.searches: list[Search] = []
        self.misses: list[Search] = []

    def search(self, rung: Fields, changes: Fields | None = None) -> Search | None:
        """A search of one rung, with some fields of the job changed; None where the framework refuses all of it."""
        fields = {**self.fields, **(changes or {})}
        found = branches(fields, rung, self.catalog)
        if not found:
            return None
        base = found[0].base
        node = node_of(base, self.catalog)
        host = int(HOST_SHARE * node.host_ram_gb * GB) if node and node.host_ram_gb else None
        made = Search(found, self.catalog, Clock(self.catalog.gpu(base.gpu), node), host)
        self.searches.append(made)
        return made

    def first(self) -> tuple[Fields, Search, Found] | None:
        """The first rung on which something fits."""
        for rung in self.rungs:
            search = self.search(rung)
            found = search.best() if search else None
            if search and found:
                return rung, search, found
            if search:
                self.misses.append(search)
        return None

    @property
    def considered(self) -> int:
        """Configurations whose memory was computed, in all searches."""
        return sum(search.considered for search in self.searches)

    @property
    def size(self) -> int:
        """Configurations of all searches."""
        return sum(search.size for search in self.searches)


def recommend(job: Mapping[str, Any], catalog: Catalog | None = None, *, where: str = "scenario") -> Recommendation:
    """The configuration to run for `job`: fields of a scenario by dotted key; those not given are searched or default.

    Raises ScenarioError, one line, for fields that cannot be used. Nothing feasible is an answer.
    """
    problem = Problem(job, catalog or load(), where)
    first = problem.first()
    if first is None:
        return _nothing(problem)
    rung, search, found = first
    best = _configuration(search, found.judged)
    fails = _next_faster(search, found)
    advice = tuple(_advice(search, found))
    others = (*_methods(problem, rung), *_trades(problem, rung, search, found))
    return Recommendation(
        recommended=best,
        alternatives=others,
        fails=fails,
        advice=advice,
        considered=problem.considered,
        pruned=problem.size - problem.considered,
        notes=tuple(_notes(search, best)),
        launch=_launch(best.scenario),
    )


def _configuration(search: Search, judged: Judged, trades: str = "") -> Configuration:
    return Configuration(judged, search.clock.full(judged.scenario, judged.cache_tokens), trades)


def _launch(s: Scenario) -> Launch | None:
    try:
        return launch(s)
    except LaunchError:
        return None


def _notes(search: Search, best: Configuration) -> Iterator[str]:
    s = best.scenario
    if reason := search.clock.unrated(s):
        yield f"{reason}: configurations are ranked by the room that they leave"
    if search.host is None and (s.offload.optimizer or s.offload.parameters):
        yield "the catalog does not know how much memory these nodes have: what offloading asks of them is not checked"
    try:
        launch(s)
    except LaunchError as error:
        yield f"no command: {error}"


# ---- what fails ---------------------------------------------------------------------------------------------------


def miss(search: Search, judged: Judged) -> Miss:
    """What a configuration that does not fit lacks."""
    e = judged.estimate
    throughput = search.clock.full(judged.scenario, judged.cache_tokens)
    if refusal := next((g.refusal for g in e.groups if g.refusal), None):
        return Miss(judged, throughput, "vllm", "load", None, refusal)
    if judged.slack < 0:
        _, phase = min(((g, p) for g in e.groups for p in g.phases), key=lambda at: room(*at))
        return Miss(judged, throughput, "gpu", phase.name, -judged.slack, "")
    phase = max(e.host_phases, key=lambda p: p.moment.device_bytes)
    return Miss(judged, throughput, "host", phase.name, judged.short, "")


def _next_faster(search: Search, found: Found) -> Miss | None:
    """What the next faster configuration lacks: along each setting the first that is faster, of these the slowest.

    Where no single setting makes it faster: the slowest of all faster ones that the search has looked at.
    """
    near = []
    for axis, index in enumerate(found.place):
        faster = ((*found.place[:axis], n, *found.place[axis + 1 :]) for n in reversed(range(index)))
        first = next((place for place in faster if search.bound(found.branch, place) < found.seconds), None)
        if first:
            near.append((search.bound(found.branch, first), first))
    for _, place in sorted(near, reverse=True):
        judged = search.judged(found.branch, place)
        if judged and not judged.fits:
            return miss(search, judged)
    failing = [
        (search.bound(b, place), judged.slack - judged.short, n, judged)
        for n, (b, place, judged) in enumerate(search.looked())
        if not judged.fits and search.bound(b, place) < found.seconds
    ]
    return miss(search, max(failing)[-1]) if failing else None


def _nothing(problem: Problem) -> Recommendation:
    """Nothing fits: the closest miss, and what would have to change."""
    looked = [(search, judged) for search in problem.misses for _, _, judged in search.looked()]
    closest = max(looked, key=lambda at: at[1].slack - at[1].short, default=None)
    advice = tuple(_changes(problem))
    return Recommendation(
        recommended=None,
        alternatives=(),
        fails=miss(*closest) if closest else None,
        advice=advice,
        considered=problem.considered,
        pruned=problem.size - problem.considered,
        notes=() if closest else ("the framework can run no configuration of this job on this machine",),
    )


def _changes(problem: Problem) -> Iterator[str]:
    """Of each thing that could be changed, the least change with which something fits."""
    rung = problem.rungs[0] if problem.rungs else None
    given = int(problem.fields.get("gpus", 1))
    for count in (n for n in COUNTS if given < n <= 16 * given):
        if _fits(problem.job, problem.catalog, {"gpus": count}):
            yield f"{count} GPUs instead of {given} suffice"
            break
    if rung and "method" in problem.job:
        for method in ("lora", "qlora"):
            if method != rung["method"] and _fits(problem.job, problem.catalog, {"method": method}):
                yield f"method {method} fits on this machine"
                break
    s = problem.misses[0].branches[0].base if problem.misses else None
    name = "response_len" if s and s.rollout else "seq_len"
    length = (s.response_len if s.rollout else s.seq_len) if s else 0
    while s and (length := length // 2) >= 128:
        if _fits(problem.job, problem.catalog, {name: length}):
            yield f"{name} {length} fits on this machine"
            break


def _fits(job: Fields, catalog: Catalog, changes: Fields) -> bool:
    """Whether something fits with some fields changed."""
    changed = {k: v for k, v in job.items() if not (k == "gpus_per_node" and "gpus" in changes)}
    try:
        return Problem({**changed, **changes}, catalog).first() is not None
    except ScenarioError:
        return False


# ---- what could be traded ------------------------------------------------------------------------------------------


def _methods(problem: Problem, chosen: Fields) -> Iterator[Configuration]:
    """The best of each other method, where the method is open."""
    for rung in problem.rungs:
        if rung["method"] == chosen["method"]:
            continue
        search = problem.search(rung)
        found = search.best() if search else None
        if search and found:
            rank = found.judged.scenario.lora
            assert rank
            base = "4-bit weights that stay frozen" if rung["method"] == "qlora" else "frozen weights"
            yield _configuration(search, found.judged, f"trains adapters of rank {rank.rank} beside {base}")


def _trades(problem: Problem, rung: Fields, search: Search, found: Found) -> Iterator[Configuration]:
    """Up to two configurations that trade something: fewer GPUs, longer sequences, more margin.

    They keep what the recommended one shards and places, so that they differ in little.
    """
    given = 0
    for find in (_fewer, _longer, _roomier):
        if given < 2 and (other := find(problem, rung, search, found)):
            given += 1
            yield other


def _kept(problem: Problem, s: Scenario) -> dict[str, Any]:
    """The branch of `s`, as far as it is not given."""
    kept: dict[str, Any] = {"sharding": s.sharding}
    if s.rollout:
        kept |= {"placement": s.placement, "rollout.engine": s.rollout.engine}
        if s.rollout.engine == "vllm" and s.placement == "colocated":
            kept["rollout.tensor_parallel"] = s.rollout.tensor_parallel
    return {name: value for name, value in kept.items() if name not in problem.fields}


def _fewer(problem: Problem, rung: Fields, search: Search, found: Found) -> Configuration | None:
    """The same job on the fewest GPUs, halving their number."""
    s = found.judged.scenario
    if s.placement == "separate" or any(name.endswith(".gpus") for name in problem.job):
        return None
    counts = [s.gpus >> n for n in range(s.gpus.bit_length(), 0, -1) if s.gpus % (1 << n) == 0]
    for gpus in counts:
        changes = _kept(problem, s) | {"gpus": gpus, "gpus_per_node": min(gpus, s.gpus_per_node)}
        if gpus == 1 and changes.get("sharding") == "ddp":
            changes["sharding"] = "none"
        if s.rollout and "rollout.tensor_parallel" in changes:
            changes["rollout.tensor_parallel"] = min(gpus, s.rollout.tensor_parallel)
        if fitting := _leanly(problem, rung, changes):
            return _configuration(*fitting, f"{gpus} GPU{'s' if gpus > 1 else ''} instead of {s.gpus}")
    return None


def _longer(problem: Problem, rung: Fields, search: Search, found: Found) -> Configuration | None:
    """The longest sequences, doubling them, that the model has positions for."""
    s = found.judged.scenario
    if "expected_len" in problem.job:
        return None
    for factor in LONGER:
        names = ("prompt_len", "response_len") if s.rollout else ("seq_len",)
        changes = _kept(problem, s) | {name: factor * getattr(s, name) for name in names}
        length = factor * s.seq_len
        if length <= s.architecture.max_positions and (fitting := _leanly(problem, rung, changes)):
            return _configuration(*fitting, f"sequences of {length} tokens, {factor} times as long")
    return None


def _leanly(problem: Problem, rung: Fields, changes: Fields) -> tuple[Search, Judged] | None:
    """The best configuration with `changes`, if the leanest place of a branch has room on the device."""
    search = problem.search(rung, changes)
    if search is None or not any(search.possible(b, branch.leanest) for b, branch in enumerate(search.branches)):
        return None
    found = search.best()
    return (search, found.judged) if found else None


def _roomier(problem: Problem, rung: Fields, search: Search, found: Found) -> Configuration | None:
    """The fastest leaner place of the same branch that leaves a tenth of the card free."""
    usable = found.judged.estimate.groups[0].usable_bytes
    wanted = MARGIN * usable
    if found.judged.slack >= wanted:
        return None
    ahead, seen = [(found.seconds, found.place)], {found.place}
    for _ in range(STEPS):
        if not ahead:
            break
        ahead.sort()
        _, place = ahead.pop(0)
        judged = search.judged(found.branch, place)
        if judged and judged.fits and judged.slack >= wanted:
            return _configuration(search, judged, f"{gib(judged.slack)} free beside the peak and its error")
        for following in search.behind(found.branch, place, range(len(place))):
            if following not in seen:
                seen.add(following)
                ahead.append((search.bound(found.branch, following), following))
    return None


# ---- what each setting does ----------------------------------------------------------------------------------------


def _advice(search: Search, found: Found) -> Iterator[str]:
    """What each setting of the recommended configuration saves, or would save, by switching it alone."""
    branch: Branch = search.branches[found.branch]
    for axis, index in enumerate(found.place[:-1]):
        other = index - 1 if index else 1
        judged = search.judged(found.branch, (*found.place[:axis], other, *found.place[axis + 1 :]))
        if judged is None:
            continue
        hungry, lean = (judged, found.judged) if index else (found.judged, judged)
        name = branch.axes[axis].name
        phase, saved = _saved(hungry, lean)
        if saved <= 0:
            continue
        setting = _worded(name, branch.axes[axis].values[max(index, other)], lean.scenario)
        if index:
            yield f"{setting} saves {gib(saved)} in `{phase}`"
        else:
            seconds = search.clock.seconds(judged.scenario, judged.cache_tokens)
            slower = f", for {seconds / found.seconds - 1:.0%} more time" if found.seconds else ""
            yield f"{setting} would save {gib(saved)} in `{phase}`{slower}"


def _saved(hungry: Judged, lean: Judged) -> tuple[str, int]:
    """The phase in which the hungry one peaks, and what the lean one saves there."""
    group = max(hungry.estimate.groups, key=lambda g: g.peak.moment.device_bytes / g.usable_bytes)
    peak: Phase = group.peak
    phases = [p for g in lean.estimate.groups if g.name == group.name for p in g.phases]
    beside = next((p for p in phases if p.name == peak.name), None)
    return peak.name, peak.moment.device_bytes - beside.moment.device_bytes if beside else 0


def _worded(name: str, value: Fields, s: Scenario) -> str:
    """A setting in words."""
    words = {
        "checkpointing": "full activation checkpointing",
        "offload.optimizer": "offloading the optimizer",
        "offload.parameters": "offloading the weights",
        "offload": "offloading weights and optimizer",
        "rollout.sleep": "letting vLLM sleep while others work",
        "rollout.gpu_memory_utilization": f"a share of {value.get(name)} of the card for vLLM",
    }
    return words.get(name, "offloading the frozen roles")
