"""The peak instant among several: the model's activations plus what the engine adds at each."""

from __future__ import annotations

from collections.abc import Iterable

from calc.base.ledger import Line, total
from calc.engines.replica import TrainingEngine, Where
from calc.step.instants import Instant, Step


def largest(moments: Iterable[tuple[str, list[Line]]]) -> tuple[str, list[Line]]:
    """The instant whose lines add up to most; the first of equals."""
    return max(moments, key=lambda moment: total(moment[1]))


def beside(lines: list[Line], moment: tuple[str, list[Line]]) -> tuple[str, list[Line]]:
    """The instant `moment` with further `lines` that are alive at it."""
    return moment[0], [*lines, *moment[1]]


def peak(engine: TrainingEngine, step: Step, instants: Iterable[Instant]) -> tuple[str, list[Line]]:
    """The peak instant of `instants`: the model's activations and what the engine adds there."""
    tokens, length = step.batch
    # many instants share a place, and the engine adds the same lines to each of them
    places: dict[Where, tuple[int, Instant]] = {}
    for i in instants:
        size = i.total.bytes(tokens, length)
        if i.where not in places or size > places[i.where][0]:
            places[i.where] = size, i
    best, most, found = None, -1, []
    for where, (size, i) in places.items():
        added = engine.at(where)
        there = size + total(added)
        if there > most:
            best, most, found = i, there, added
    assert best is not None
    return best.name, [*found, *step.lines(best.parts)]
