"""Every record with a figure: the estimate against what was measured, as a chart whose table holds each point."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import median

from calc.accuracy.residuals import Residual
from calc.answers import answers
from calc.base.units import GiB
from calc.site.tables.pictures import Key, Picture, text
from calc.site.tables.tables import Cell, Column, Table
from calc.site.views.accuracy import accuracy, records

# the drawing in its own units: a square field with margins for the labels
FIELD, LEFT, BELOW = 400, 52, 40
LOW, HIGH = 0.5, 8000.0  # GiB at the ends of both axes
FURTHEST = 150  # rows that the page shows: all would be half of what it transfers
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
# the kinds of points in drawing order, each with the class that sets its colour
KINDS = {"traced": "c-weights", "published": "c-logits", "blind": "c-gradients", "measured": "c-optimizer_states"}
# the shape of each kind around its place, for readers to whom the colours look alike
SHAPES = {
    "traced": ("dots", "m-2.4 0a2.4 2.4 0 1 0 4.8 0a2.4 2.4 0 1 0-4.8 0"),
    "published": ("diamonds", "m0-3.3l3.3 3.3-3.3 3.3-3.3-3.3z"),
    "blind": ("triangles", "m0-3.4l3.2 5.8h-6.4z"),
    "measured": ("squares", "m-2.5-2.5h5v5h-5z"),
}


def _at(gib: float) -> float:
    """The place of `gib` on an axis."""
    return FIELD * log(min(max(gib, LOW), HIGH) / LOW) / log(HIGH / LOW)


def _place(r: Residual) -> str:
    """The place of a record's point, to half a unit: points that nobody can tell apart are one."""
    x, y = LEFT + _at(r.measured / GiB), FIELD - _at(r.predicted / GiB)
    return f"{round(2 * x) / 2:g} {round(2 * y) / 2:g}"


def picture(points: Sequence[Residual]) -> Picture:
    """The chart: measured to the right, estimated upwards, both axes logarithmic; the diagonal means no error."""
    grid = "".join(
        f'<path class="grid" d="M{LEFT + _at(t):.1f} 0V{FIELD}M{LEFT} {FIELD - _at(t):.1f}h{FIELD}"/>'
        f"{text(LEFT + _at(t), FIELD + 16, str(t), 'middle')}{text(LEFT - 6, FIELD - _at(t) + 4, str(t), 'end')}"
        for t in TICKS
    )
    dots = "".join(
        f'<path class="point {KINDS[kind]}" d="{"".join(f"M{place}{SHAPES[kind][1]}" for place in places)}"/>'
        for kind in KINDS
        if (places := sorted({_place(r) for r in points if r.kind == kind}))
    )
    body = (
        f'{grid}<path class="even" d="M{LEFT} {FIELD}L{LEFT + FIELD} 0"/>{dots}'
        f"{text(LEFT + FIELD / 2, FIELD + 34, 'measured, GiB', 'middle')}"
        f'<g transform="translate(12 {FIELD / 2}) rotate(-90)">{text(0, 0, "estimated, GiB", "middle")}</g>'
    )
    return Picture(LEFT + FIELD, FIELD + BELOW, body, _words(points), (*_keys(points), Key("even", "no error")))


def _words(points: Sequence[Residual]) -> str:
    """The drawing in words: how many points there are, and how far off they are."""
    off = 100 * median(abs(r.error) for r in points)
    return f"{len(points)} records, estimated against measured memory: half are off by less than {off:.2f} %"


def _keys(points: Sequence[Residual]) -> list[Key]:
    return [Key(c, f"{kind} ({SHAPES[kind][0]})") for kind, c in KINDS.items() if any(r.kind == kind for r in points)]


def scattered() -> Table:
    """Every record with a figure, one per row, furthest off first."""
    points = sorted((r for r in accuracy.residuals() if r.measured), key=lambda r: -abs(r.error))
    columns = (
        records.LABEL,
        Column("kind", "Class"),
        Column("metric", "Metric"),
        Column("estimated", "Estimated", "GiB", "number", 3),
        Column("measured", "Measured", "GiB", "number", 3),
        Column("error", "Error", "%", "number", 2),
        records.ID,
    )
    rows = tuple(
        (
            label,
            Cell(r.kind),
            Cell(r.metric),
            Cell(r.predicted / GiB, exact=r.predicted),
            Cell(r.measured / GiB, exact=r.measured),
            Cell(100 * r.error),
            record,
        )
        for r in points
        for label, record in [records.cells(r.id)]
    )
    note = (
        "The estimate is what PyTorch's allocator counts at its peak. A figure that counts what the allocator keeps as "
        "well lies below the line by that much. Points at one place are drawn once. The table has the "
        f"{FURTHEST} records that are furthest off; its files have all of them."
    )
    return Table(
        "accuracy-records",
        "Every record: estimated against measured",
        columns,
        rows,
        note=note,
        versions=answers.versions(),
        picture=picture(points),
        most=FURTHEST,
    )
