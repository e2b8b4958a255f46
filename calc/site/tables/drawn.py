"""The drawing of a table: its own picture, or one of the bars or the verdicts that its cells show on the page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from calc.site.tables import charts
from calc.site.tables.charts import Bar
from calc.site.tables.grids import Row, grid
from calc.site.tables.pictures import LINE, Picture, box, line, lines, text
from calc.site.tables.tables import Table

# of a drawing of bars, in its units
LABEL, FIELD, WORDS, THICK, GAP = 230, 380, 190, 16, 12
HEAD = LINE  # the line above the bars that says their unit
LETTERS = 28  # in a line of a label


def of(table: Table) -> Picture | None:
    """The drawing of a table; None if there is nothing in it to draw."""
    return table.picture or _of_bars(table) or _of_verdicts(table)


def drawable(table: Table) -> bool:
    """True if there is something in a table to draw, which is known sooner than its drawing."""
    return table.picture is not None or _barred(table) or _heated(table)


def _places(table: Table, kind: str) -> list[int]:
    """The columns of a kind, counted from 0."""
    return [n for n, c in enumerate(table.columns) if c.kind == kind]


def _barred(table: Table) -> bool:
    """True if a cell of the table shows bars."""
    return any(row[n].bar for row in table.rows for n in _places(table, "bar"))


def _heated(table: Table) -> bool:
    """True if a cell of the table is coloured by its verdict."""
    return any(row[n].style.startswith("heat") for row in table.rows for n in _places(table, "verdict"))


class Bars(NamedTuple):
    """The bars of one row, each under its name, if it has more than one."""

    label: str
    bars: Sequence[tuple[str, Bar]]

    @property
    def lines(self) -> list[str]:
        """The label, in lines."""
        return textwrap.wrap(self.label, LETTERS, break_long_words=False)

    @property
    def height(self) -> float:
        """The units that the row takes from top to bottom."""
        return GAP + max(LINE * len(self.lines), (THICK + 4) * len(self.bars))


def bars(rows: Sequence[Bars], limit: str) -> Picture:
    """Stacked bars below each other on one scale, each with its sum and any limit; `limit` says what that is."""
    every = [b for row in rows for _, b in row.bars]
    tops = [*accumulate((row.height for row in rows), initial=float(HEAD))]
    body = text(LABEL, HEAD - 3, every[0].unit) + "".join(
        part for row, top in zip(rows, tops, strict=False) for part in _row(row, top + GAP / 2)
    )
    said = [f"{row.label}{f', {name}' if name else ''}: {b.words} {b.unit}" for row in rows for name, b in row.bars]
    usable = dict.fromkeys(b.told(b.limit) for b in every if b.limit)
    words = "; ".join(said) + (f". Limit: {' and '.join(usable)} {every[0].unit}" if usable else "")
    return Picture(
        LABEL + FIELD + WORDS, tops[-1], body, words, charts.keys([c for b in every for c, _ in b.stacked], limit)
    )


def _row(row: Bars, top: float) -> Iterator[str]:
    yield lines(0, top + 12, row.lines)
    for n, (name, b) in enumerate(row.bars):
        y = top + (THICK + 4) * n
        yield from _bar(b, y)
        words = f"{b.words}{f' {name}' if name else ''}"
        reach = max(b.total, b.limit or 0) / b.scale  # clear of the limit's line, too
        yield text(LABEL + FIELD * reach + 6, y + 12, words, style=f"axis total{' over' if b.beyond > 0 else ''}")


def _bar(b: Bar, y: float) -> Iterator[str]:
    ends = [0, *accumulate(n for _, n in b.stacked)]
    for (component, n), start in zip(b.stacked, ends, strict=False):
        yield box(LABEL + FIELD * start / b.scale, y, FIELD * n / b.scale, THICK, f"c-{component}")
    if b.limit is not None:
        yield line(LABEL + FIELD * b.limit / b.scale, y - 3, 0, THICK + 6, "limit")


def _of_bars(table: Table) -> Picture | None:
    if not _barred(table):
        return None
    drawn = {n: table.columns[n].title.partition(",")[0].lower() for n in _places(table, "bar")}
    rows = []
    for row in table.rows:
        found = [(name if len(drawn) > 1 else "", b) for n, name in drawn.items() if (b := row[n].bar)]
        rows += [Bars(str(row[0].values[0]), found)] if found else []
    return bars(rows, "what a process can use")


def _of_verdicts(table: Table) -> Picture | None:
    """The verdicts of a table whose cells are coloured by them."""
    if not _heated(table):
        return None
    places = _places(table, "verdict")
    rows = [Row(str(row[0].values[0]), [row[n].values[0] for n in places]) for row in table.rows]
    return grid(rows, [table.columns[n].title.partition(":")[0] for n in places])
