"""Many verdicts at a glance: a grid of marks, which differ in shape as in colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from calc.site.tables.pictures import LETTER, Key, Picture, text
from calc.site.tables.tables import WORDS, Value

SIDE, ROW = 15, 17  # of a mark's place, in units
ACROSS, UP = 0.5, 0.87  # of a slanted label's length
# The shape of each verdict in a square of ten units, as a path.
SHAPES = {
    "fits": "h10v10h-10z",
    "tight": "m0 10h10v-10z",
    "oom": "l10 10m-10 0l10-10",
}


class Row(NamedTuple):
    """A line of the grid: its label, and a verdict, or nothing, for each column."""

    label: str
    verdicts: Sequence[Value]


def grid(rows: Sequence[Row], columns: Sequence[str]) -> Picture:
    """The grid of `rows`, with slanted labels over its columns."""
    left = 12 + 1.08 * LETTER * max(len(row.label) for row in rows)
    top = 14 + UP * 1.08 * LETTER * max(len(words) for words in columns)
    widest = max(left + SIDE * (n + 1) + ACROSS * LETTER * len(words) for n, words in enumerate(columns))
    marks = {verdict: "" for verdict in WORDS}
    for y, row in enumerate(rows):
        for x, verdict in enumerate(row.verdicts):
            if verdict is not None:
                marks[str(verdict)] += f"M{left + SIDE * x + 2:.0f} {top + ROW * y + 3:.0f}{SHAPES[str(verdict)]}"
    body = "".join(f'<path class="mark {verdict}" d="{path}"/>' for verdict, path in marks.items() if path)
    body += "".join(text(left - 8, top + ROW * y + 12, row.label, "end") for y, row in enumerate(rows))
    body += "".join(
        f'<g transform="translate({left + SIDE * x + 9:.0f} {top - 5:.0f}) rotate(-60)">{text(0, 0, words)}</g>'
        for x, words in enumerate(columns)
    )
    keys = tuple(Key(f"mark {verdict}", WORDS[verdict], SHAPES[verdict]) for verdict, path in marks.items() if path)
    return Picture(max(left + SIDE * len(columns) + 8, widest), top + ROW * len(rows) + 6, body, _words(rows), keys)


def _words(rows: Sequence[Row]) -> str:
    """The grid in words: how many of each verdict a row has."""
    said = []
    for row in rows:
        counts = Counter(str(verdict) for verdict in row.verdicts if verdict is not None)
        said.append(f"{row.label}: " + ", ".join(f"{counts[v]} {word}" for v, word in WORDS.items() if counts[v]))
    return "; ".join(said)
