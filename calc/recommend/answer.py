"""The answer for one machine: the configuration to run, the alternatives, and what the next faster one lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from calc.base.units import gb
from calc.catalog.catalog import Catalog, load
from calc.estimate.estimate import host_notes, on_gpus
from calc.launch import Launch, LaunchError, launch
from calc.recommend.failing import changes, closest, next_faster, passed, tight
from calc.recommend.problem import Configuration, Miss, Problem, configured, posed
from calc.recommend.search import Search
from calc.recommend.space import steps_on_host
from calc.recommend.trades import advice, lighter, methods, slower, trades
from calc.resolve.parse import given
from calc.scenario.scenario import Scenario
from calc.scenario.words import RL
from calc.throughput.rates import CORES

CANNOT_RUN = "the framework can run no configuration of this job on this machine"
CANNOT = "cannot run"  # the verdict where the framework, or the card, can run no configuration


@dataclass(frozen=True)
class Recommendation:
    """The answer. `recommended` is None where nothing fits; `fails` is then the closest miss, else the next faster one.

    Where nothing safer was found `recommended` is tight, and `fails` says what it lacks itself. `passed` is the closest
    miss of full fine-tuning where that was passed over for adapters, or of LoRA for QLoRA. `considered` configurations
    had their memory computed, `pruned` ones were ruled out without. Until it is `whole` it is still `growing`.
    """

    recommended: Configuration | None
    alternatives: tuple[Configuration, ...] = ()
    fails: Miss | None = None
    advice: tuple[str, ...] = ()
    considered: int = 0
    pruned: int = 0
    notes: tuple[str, ...] = ()
    launch: Launch | None = None
    passed: Miss | None = None
    whole: bool = False

    @property
    def verdict(self) -> str:
        """`fits`, `tight`, `vLLM does not start` (or another engine), `nothing fits`, or CANNOT."""
        if self.recommended:
            return self.recommended.judged.estimate.verdict
        if self.fails is None:
            return CANNOT
        return self.fails.reason.verdict if self.fails.reason else "nothing fits"


def recommend(job: Mapping[str, Any], catalog: Catalog | None = None, *, where: str = "scenario") -> Recommendation:
    """The configuration to run for `job`, a scenario's fields by dotted key; others are searched or take defaults.

    Raises ScenarioError, one line, for fields that cannot be used. That nothing fits is an answer, not an error.
    """
    *_, whole = growing(job, catalog or load(), where=where)
    return whole


def growing(job: Mapping[str, Any], catalog: Catalog, *, where: str = "scenario") -> Iterator[Recommendation]:
    """The answer of `recommend` as it grows: what to run, or the closest miss, then what stands beside it.

    What an answer has stays in all that follow; the last one is `whole`.
    """
    yield from answering(posed(given(job, where=where, catalog=catalog), catalog, where))


def answering(problem: Problem) -> Iterator[Recommendation]:
    """The same for a problem, whatever has been found out of it before."""
    first = problem.first()
    if first is None:
        yield from _nothing(problem)
        return
    rung, search, found = first
    best = configured(search, search.chosen(found))
    command, why = _launch(best.scenario, problem)
    answer = Recommendation(recommended=best, launch=command, passed=passed(problem, rung))
    yield answer
    fails = next_faster(search, found)
    answer = replace(answer, fails=fails, advice=tuple(advice(search, found)))
    yield answer
    others = (slower(problem, rung), lighter(problem, rung, search, found), methods(problem, rung, best))
    for other in chain(*others, trades(problem, rung, search, found)):
        answer = replace(answer, alternatives=(*answer.alternatives, other))
        yield answer
    yield _whole(answer, problem, (*_notes(problem, search, best), *why))


def _whole(answer: Recommendation, problem: Problem, notes: Sequence[str]) -> Recommendation:
    """The whole answer, once everything has been looked at."""
    considered = problem.considered
    pruned = problem.size - considered
    return replace(answer, considered=considered, pruned=pruned, notes=(*problem.notes, *notes), whole=True)


def fitting(
    job: Mapping[str, Any], catalog: Catalog, *, where: str = "scenario", failed: set[str] | None = None
) -> Configuration | None:
    """The configuration that `recommend` gives for `job` if one fits, nothing beside it; `failed` as in `Problem`."""
    problem = posed(given(job, where=where, catalog=catalog), catalog, where, names=False, failed=failed)
    first = problem.first()
    return configured(first[1], first[1].chosen(first[2])) if first else None


def _nothing(problem: Problem) -> Iterator[Recommendation]:
    """The answer where nothing fits: the closest miss, recommended if it is tight, and what would have to change."""
    nearest = closest(problem)
    best = tight(nearest)
    notes: tuple[str, ...]
    command, notes = None, (CANNOT_RUN,)
    if best:
        command, why = _launch(best.scenario, problem)
        notes = (*_notes(problem, problem.misses[0], best), *why)
    elif nearest:
        e = nearest.judged.estimate
        lacked = host_notes(e.host_memory, e.host_peak, on_gpus(e.scenario, e.groups))
        notes = (
            *[note for note in e.notes if note not in lacked],
            f"host memory: compared with {problem.misses[0].host}",
        )
    answer = Recommendation(recommended=best, fails=nearest, launch=command)
    yield answer
    yield _whole(replace(answer, advice=tuple(changes(problem, nearest))), problem, notes)


def _launch(s: Scenario, problem: Problem) -> tuple[Launch | None, tuple[str, ...]]:
    """The command, of the weights that were asked for, or a note on why there is none."""
    try:
        return launch(s, problem.catalog.checkpoint(str(problem.job["model"]))), ()
    except LaunchError as error:
        return None, (f"no command: {error}",)


def _notes(problem: Problem, search: Search, best: Configuration) -> Iterator[str]:
    s = best.scenario
    yield from best.judged.estimate.notes
    if reason := search.clock.unrated(s):
        yield f"{reason}: configurations are ranked by how simple they are"
    needed = best.judged.estimate.host_peak
    yield f"host memory: {gb(needed) if needed else 'none'} needed of {search.host}"
    trained = s.method == "full" and s.optimizer != "none"
    if s.precision == "bf16" and trained and "precision" not in problem.job:
        yield "precision bf16: no weight has an fp32 copy, and updates of less than 1/512 of it are rounded away"
    if s.task in RL and not s.has("reference"):
        yield "no reference model runs, the framework's default; `--roles.reference {}` adds one for a KL term"
    if s.task in RL and s.has("reward") and not any(name.startswith("roles.reward") for name in problem.job):
        yield "a reward model scores, the framework's default; `--roles.reward none` where a function does"
    if steps_on_host(s) and s.cpu_threads and "cpu_threads" not in problem.job:
        node = search.clock.node
        known = f"in the catalog's {node.name}" if node and node.cpu_cores else f"assumed: {CORES:g} a GPU"
        yield f"cpu_threads {s.cpu_threads}: the cores of each rank, {known}, with which its Adam steps on the host"
