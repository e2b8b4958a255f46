"""The ledger behind each recommendation: `calc.site.advice` keeps what to run, and this keeps the lines of its peak."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calc.ledger import Line
from calc.site import advice, answers
from calc.site.kept import Kept
from calc.site.workings import Shared, Working, of_phase

_FOUND: dict[str, Working] = {}


def working(scenario: Mapping[str, Any]) -> Working:
    """What the fullest GPU of a recommended configuration holds."""
    name = advice.key(scenario)
    if name not in _FOUND:
        _FOUND[name] = _asked(scenario)
    return _FOUND[name]


def _asked(scenario: Mapping[str, Any]) -> Working:
    groups = answers.ask(scenario).estimate.groups
    return of_phase(max((g.peak for g in groups), key=lambda phase: phase.moment.device_bytes))


def fill(folder: Path = advice.BUILD) -> None:
    """Finds the ledgers of all recommendations, over all cores, and keeps them in `folder`."""
    started, store, shared = time.perf_counter(), Kept(folder), Shared()
    wanted = {_name(of): _scenarios(found) for of, found in advice.FOUND.items()}
    kept = {name: store.read(name) for name in wanted}
    missing = {name: {k: s for k, s in asked.items() if k not in kept[name]} for name, asked in wanted.items()}
    missing = {name: asked for name, asked in missing.items() if asked}
    made = advice.spread(_compute, [list(asked.values()) for asked in missing.values()]) if missing else ()
    for (name, asked), computed in zip(missing.items(), made, strict=True):
        kept[name] |= dict(zip(asked, computed, strict=True))
        store.write(name, {key: kept[name][key] for key in wanted[name]})
        answers.Clock.asked += len(asked)
    for name, asked in wanted.items():
        for key in asked:
            at, lines = kept[name][key]
            _FOUND[key] = shared(Working(at, tuple(Line(*line) for line in lines)))
    answers.Clock.seconds += time.perf_counter() - started


def _name(of: tuple[str, str]) -> str:
    return f"ledgers-{'-'.join(of)}"


def _scenarios(found: advice.Found) -> dict[str, Mapping[str, Any]]:
    """The recommended configurations of one task of a model, by the keys of their answers."""
    cells, smallest = found
    every = [*cells.values(), *(s.advice for s in smallest.values() if s.advice)]
    return {advice.key(a.scenario): a.scenario for a in every if a.scenario}


def _compute(scenarios: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The ledgers as JSON has them."""
    return [[w.at, [list(line) for line in w.lines]] for w in map(_asked, scenarios)]
