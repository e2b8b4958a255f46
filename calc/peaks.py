"""Which of many moments is the largest: what a model's activations and what its engine adds there come to."""

from __future__ import annotations

from collections.abc import Iterable

from calc.engines.replica import Engine, Where
from calc.ledger import Line, total
from calc.phases import Instant, Step


def largest(moments: Iterable[tuple[str, list[Line]]]) -> tuple[str, list[Line]]:
    """The moment whose lines add up to most, the first of equals."""
    return max(moments, key=lambda moment: total(moment[1]))


def beside(lines: list[Line], moment: tuple[str, list[Line]]) -> tuple[str, list[Line]]:
    """A moment with lines that it shares with others."""
    return moment[0], [*lines, *moment[1]]


def peak(engine: Engine, step: Step, instants: Iterable[Instant]) -> tuple[str, list[Line]]:
    """The largest of `instants`: what the model's activations and what the engine adds there come to."""
    tokens, length = step.batch
    # many instants share a place, where the engine adds the same
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
