"""The working of a computed cell: lines of the ledger that add up to it, and the moment at which they are alive.

A table's JSON holds each line once, and for each cell the indices of its lines; the page shows them on a click.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from calc.base.ledger import Line, Moment, Phase, total
from calc.estimate.wording import spoken

NAMES = ("component", "role", "bytes", "formula", "values", "source")


class Working(NamedTuple):
    """Lines that add up to a cell's bytes, and the moment of the lines in words: `backward: loss gradient`."""

    at: str
    lines: tuple[Line, ...]

    @property
    def bytes(self) -> int:
        """The sum of the lines."""
        return total(self.lines)

    def allocated(self) -> Working:
        """The lines that PyTorch's allocator counts."""
        return Working(f"{self.at}, as PyTorch's allocator counts", tuple(x for x in self.lines if x.allocated))

    def of(self, component: str) -> Working:
        """The lines of one component."""
        return Working(self.at, tuple(x for x in self.lines if x.component == component))


def of_phase(phase: Phase) -> Working:
    """Everything on the device at a phase's peak."""
    return of_moment(phase.moment, phase.name)


def of_moment(moment: Moment, phase: str = "") -> Working:
    """Everything on the device at a moment."""
    name = spoken(moment.name)
    return Working(f"{phase}: {name}" if phase and phase != name else name, moment.lines)


def difference(after: Working, before: Working) -> Working:
    """The difference from `before` to `after`: the lines that only one of them has, those of `before` with a minus."""
    left = Counter(map(same, before.lines))
    added = []
    for line in after.lines:
        if left[same(line)]:
            left[same(line)] -= 1
        else:
            added.append(line)
    removed = []
    for line in before.lines:
        if left[same(line)]:
            left[same(line)] -= 1
            removed.append(line._replace(bytes=-line.bytes, formula=f"−({line.formula})"))
    return Working(f"{after.at}; against {before.at}", (*added, *removed))


def same(line: Line) -> Hashable:
    """A key that equal lines share."""
    component, role, n_bytes, formula, values, source, allocated = line
    return component, role, n_bytes, formula, tuple(values.items()), source, allocated


class Shared:
    """Equal lines as one object, so that thousands of cells carry them cheaply between processes."""

    def __init__(self) -> None:
        """Starts with no line."""
        self._known: dict[Hashable, Line] = {}

    def __call__(self, working: Working) -> Working:
        """The same working, made of shared lines."""
        return Working(working.at, tuple(self._known.setdefault(same(line), line) for line in working.lines))


class Book:
    """Lines numbered in order of appearance, each once, as a table's JSON holds them."""

    def __init__(self) -> None:
        """Starts with no line."""
        self.lines: list[Line] = []
        self._place: dict[Hashable, int] = {}
        self._seen: dict[int, tuple[Line, int]] = {}  # by identity, which is quicker; most lines are shared

    def places(self, lines: Iterable[Line]) -> list[int]:
        """The index of each of these lines in the book."""
        return [(self._seen.get(id(line)) or self._enter(line))[1] for line in lines]

    def _enter(self, line: Line) -> tuple[Line, int]:
        place = self._place.setdefault(same(line), len(self.lines))
        if place == len(self.lines):
            self.lines.append(line)
        self._seen[id(line)] = line, place
        return line, place


def spelled(line: Line) -> dict[str, Any]:
    """A line as an estimate's JSON has it, with only the values that its formula uses."""
    values = {k: line.values[k] for k in used(line.formula, tuple(line.values))}
    counted = {} if line.allocated else {"allocated": False}
    return {name: getattr(line, name) for name in NAMES} | {"values": values} | counted


def values_text(values: Mapping[str, object], formula: str) -> str:
    """The values put into a formula: `P = 8,030,261,248, N = 8`; symbols that it does not use are left out."""
    shown = {k: values[k] for k in used(formula, tuple(values))}
    return ", ".join(f"{k} = {v:,}" if isinstance(v, int | float) else f"{k} = {v}" for k, v in shown.items())


@cache
def used(formula: str, symbols: tuple[str, ...]) -> tuple[str, ...]:
    """The symbols that occur in a formula; all of them if none does."""
    return tuple(k for k in symbols if re.search(rf"(?<!\w){re.escape(k)}(?!\w)", formula)) or symbols


def method_url(source: str) -> str:
    """The address of a line's derivation: `weights#zero` is an anchor of the page method/weights."""
    page, _, anchor = source.partition("#")
    return f"method/{page}.html" + (f"#{anchor}" if anchor else "")
