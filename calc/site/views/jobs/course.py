"""A job from loading to the end of a step, instant by instant: a drawing over the table of what is alive at each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from calc.answers import answers, words
from calc.answers.answers import Answer
from calc.answers.workings import of_phase
from calc.base.ledger import Phase
from calc.base.units import GiB
from calc.estimate.wording import spoken
from calc.site.tables import charts
from calc.site.tables.charts import Bar
from calc.site.tables.pictures import Picture, box, fits, line, text
from calc.site.tables.plots import tick
from calc.site.tables.tables import Cell, Column, Table
from calc.site.views.jobs import ledgers

# of the drawing, in its units
LEFT, DEEP, TOP, BELOW, SLANTED = 44, 230, 22, 40, 74
LEAST, MOST = 26, 64  # the width of an instant
WIDE = 640  # what instants share, if that leaves each its least width


class Shown(NamedTuple):
    """An instant of a GPU group."""

    group: str
    phase: Phase
    usable: int

    @property
    def bar(self) -> Bar:
        """Its bytes by component against the card."""
        return Bar(ledgers.by_component(self.phase.moment.lines), self.usable, self.usable)


def course(answer: Answer, table_id: str, caption: str) -> Table:
    """One row per instant, in the order in which a step goes through them, under a drawing of them all."""
    usable = {group.name: group.usable_bytes for group in answer.estimate.groups}
    shown = [Shown(group, phase, usable[group]) for group, phases in answer.course() for phase in phases]
    several = len(usable) > 1
    components = charts.ordered([c for one in shown for c, _ in one.bar.stacked])
    columns = (
        Column("number", "No.", "", "number"),
        *([Column("group", "GPUs of")] if several else []),
        Column("phase", "Phase"),
        Column("instant", "Instant"),
        Column("total", "On the GPU", "GiB", "number", 2, "Everything the processes take of the card"),
        *(Column(c, charts.title(c), "GiB", "number", 2) for c in components),
    )
    rows = tuple(
        (
            Cell(number),
            *([Cell(one.group)] if several else []),
            Cell(one.phase.name),
            Cell(spoken(one.phase.moment.name)),
            ledgers.held(of_phase(one.phase), answer, "over" if one.bar.beyond > 0 else ""),
            *(ledgers.held(of_phase(one.phase).of(c), answer) for c in components),
        )
        for number, one in enumerate(shown, 1)
    )
    return Table(
        table_id,
        caption,
        columns,
        rows,
        words.describe(answer),
        "From left to right in the order of a step, not to scale in time. Of forward, backward and optimizer step "
        "the fullest instant stands for all.",
        versions=answers.versions(),
        folded="The instants as a table",
        picture=picture(shown),
    )


def picture(shown: Sequence[Shown]) -> Picture:
    """Columns side by side, one an instant, over the names of their phases."""
    wide = min(MOST, max(LEAST, WIDE / len(shown)))
    top = 1.08 * max(max(one.bar.total, one.usable) for one in shown)
    field = wide * len(shown)
    runs = [(key[1], [n for n, _ in run]) for key, run in groupby(enumerate(shown), key=_phase)]
    slanted = not all(fits(name, wide * len(places)) for name, places in runs)
    parts = (
        *_grid(top, field),
        *_columns(shown, wide, top),
        *_limits(shown, wide, top),
        *_numbers(shown, wide, top),
        *_phases(runs, wide, slanted),
    )
    components = [c for one in shown for c, _ in one.bar.stacked]
    said = "; ".join(f"{one.phase.name}, {spoken(one.phase.moment.name)}: {one.bar.words} GiB" for one in shown)
    limit = f"what a process can use: {shown[0].usable / GiB:.2f} GiB"
    below = SLANTED if slanted else BELOW
    return Picture(
        LEFT + field + 12 + (30 if slanted else 0),
        TOP + DEEP + below,
        "".join(parts),
        f"{said}. Limit: {limit}",
        charts.keys(components, limit),
    )


def _phase(numbered: tuple[int, Shown]) -> tuple[str, str]:
    """The GPU group and the phase of an instant."""
    return numbered[1].group, numbered[1].phase.name


def _y(n: float, top: float) -> float:
    return TOP + DEEP * (1 - n / top)


def _grid(top: float, field: float) -> Iterator[str]:
    step = tick(top / GiB)
    for gib in range(0, int(top / GiB) + 1, step):
        yield line(LEFT, _y(gib * GiB, top), field, 0, "grid")
        yield text(LEFT - 6, _y(gib * GiB, top) + 4, f"{gib:,}", "end")
    yield text(4, TOP - 8, "GiB")


def _columns(shown: Sequence[Shown], wide: float, top: float) -> Iterator[str]:
    for n, one in enumerate(shown):
        x, base = LEFT + wide * n, 0
        for component, size in one.bar.stacked:
            high = _y(base, top) - _y(base + size, top)
            yield box(x + 1, _y(base + size, top), wide - 2, high, f"c-{component}")
            base += size


def _numbers(shown: Sequence[Shown], wide: float, top: float) -> Iterator[str]:
    """The sum of each instant above it, and its number below."""
    for n, one in enumerate(shown):
        x, over = LEFT + wide * (n + 0.5), " over" if one.bar.beyond > 0 else ""
        yield text(x, _y(one.bar.total, top) - 5, f"{one.bar.total / GiB:.0f}", "middle", f"name{over}")
        yield text(x, TOP + DEEP + 14, str(n + 1), "middle")


def _phases(runs: Sequence[tuple[str, Sequence[int]]], wide: float, slanted: bool) -> Iterator[str]:
    """A bracket below each run of instants of one phase, with its name."""
    for name, places in runs:
        x, long = LEFT + wide * places[0], wide * len(places)
        yield line(x + 2, TOP + DEEP + 19, long - 4, 0, "bracket")
        turned = " rotate(40)" if slanted else ""
        place = f"translate({x + long / 2 - 4 * slanted:.1f} {TOP + DEEP + 33:.1f})"
        yield f'<g transform="{place}{turned}">{text(0, 0, name, "start" if slanted else "middle")}</g>'


def _limits(shown: Sequence[Shown], wide: float, top: float) -> Iterator[str]:
    """The limit of each GPU group over its instants."""
    for (name, usable), run in groupby(enumerate(shown), key=lambda numbered: (numbered[1].group, numbered[1].usable)):
        places = [n for n, _ in run]
        x, long = LEFT + wide * places[0], wide * len(places)
        yield line(x, _y(usable, top), long, 0, "limit")
        if len(places) < len(shown):
            yield text(x + 4, TOP - 8, f"GPUs of {name}")
            yield line(x, TOP - 18, 0, DEEP + 18 + BELOW, "slot")
