"""The answer for one machine: the configuration to run, what else could be, and what the next faster one lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from calc.catalog import Catalog, load
from calc.launch import Launch, LaunchError, launch
from calc.recommend.failing import changes, closest, next_faster
from calc.recommend.problem import Configuration, Miss, Problem, configured
from calc.recommend.search import Search
from calc.recommend.trades import advice, methods, trades
from calc.scenario import Scenario, given
from calc.units import gb


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
    launch: Launch | None = None


def recommend(job: Mapping[str, Any], catalog: Catalog | None = None, *, where: str = "scenario") -> Recommendation:
    """The configuration to run for `job`: fields of a scenario by dotted key; those not given are searched or default.

    Raises ScenarioError, one line, for fields that cannot be used. Nothing feasible is an answer.
    """
    catalog = catalog or load()
    problem = Problem(given(job, where=where, catalog=catalog), catalog, where)
    first = problem.first()
    if first is None:
        return _nothing(problem)
    rung, search, found = first
    best = configured(search, search.chosen(found))
    fails = next_faster(search, found)
    said = tuple(advice(search, found))
    others = (*methods(problem, rung), *trades(problem, rung, search, found))
    return Recommendation(
        recommended=best,
        alternatives=others,
        fails=fails,
        advice=said,
        considered=problem.considered,
        pruned=problem.size - problem.considered,
        notes=(*problem.notes, *_notes(search, best)),
        launch=_launch(best.scenario),
    )


def _nothing(problem: Problem) -> Recommendation:
    """Nothing fits: the closest miss, and what would have to change."""
    nearest = closest(problem)
    return Recommendation(
        recommended=None,
        alternatives=(),
        fails=nearest,
        advice=tuple(changes(problem)),
        considered=problem.considered,
        pruned=problem.size - problem.considered,
        notes=(
            *problem.notes,
            f"host memory: held against {problem.misses[0].host}"
            if nearest
            else "the framework can run no configuration of this job on this machine",
        ),
    )


def _launch(s: Scenario) -> Launch | None:
    try:
        return launch(s)
    except LaunchError:
        return None


def _notes(search: Search, best: Configuration) -> Iterator[str]:
    s = best.scenario
    if reason := search.clock.unrated(s):
        yield f"{reason}: configurations are ranked by the room that they leave"
    yield f"host memory: {gb(best.judged.estimate.host_peak)} needed of {search.host}"
    try:
        launch(s)
    except LaunchError as error:
        yield f"no command: {error}"
