"""Weights, gradients and optimizer states on each rank of jobs that are sharded in different ways."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from calc.answers import answers
from calc.answers.answers import Answer
from calc.answers.workings import Working, of_phase
from calc.base.units import GiB
from calc.site.tables import charts
from calc.site.tables.charts import Bar
from calc.site.tables.pictures import Picture, box, line, text
from calc.site.tables.plots import tick
from calc.site.tables.tables import Cell, Column, Table
from calc.site.views.jobs import ledgers

KEPT = ("weights", "rotary_tables", "master_weights", "optimizer_states", "gradients", "adapter")
# of the drawing, in its units
LEFT, TOP, DEEP, BELOW, RANK, APART = 44, 24, 220, 40, 13, 26


def kept(answer: Answer) -> Working:
    """The tensors of the trained model on each rank as the optimizer steps: weights, gradients, states."""
    whole = of_phase(ledgers.find_phase(answer, "step"))
    return Working(whole.at, tuple(x for x in whole.lines if x.component in KEPT))


def shares(answered: Mapping[str, Answer], table_id: str, caption: str) -> Table:
    """One row per job, under its ranks side by side."""
    found = {label: kept(answer) for label, answer in answered.items()}
    components = charts.ordered([x.component for working in found.values() for x in working.lines])
    columns = (
        Column("job", "Job"),
        Column("ranks", "GPUs", "", "number"),
        *(Column(c, charts.title(c), "GiB", "number", 2) for c in components),
        Column("each", "Together, on each", "GiB", "number", 2),
        Column("all", "On all GPUs", "GiB", "number", 1, "The same times the number of GPUs"),
    )
    rows = tuple(
        (
            Cell(label),
            Cell(answered[label].group.gpus),
            *(ledgers.held(working.of(c), answered[label]) for c in components),
            ledgers.held(working, answered[label]),
            Cell(working.bytes * answered[label].group.gpus / GiB),
        )
        for label, working in found.items()
    )
    return Table(
        table_id,
        caption,
        columns,
        rows,
        ledgers.shared([*answered.values()]),
        "A column is a GPU: the area of its colour is what all of them together hold. Activations, logits and buffers "
        "are left out; the limit is for all of it.",
        versions=answers.versions(),
        folded="The parts as a table",
        picture=picture(answered),
    )


def picture(answered: Mapping[str, Answer]) -> Picture:
    """The ranks of each job side by side, each filled with what it keeps."""
    stacks = {label: Bar(ledgers.by_component(kept(a).lines), 1, a.group.usable_bytes) for label, a in answered.items()}
    top = 1.1 * max(max(b.total, b.limit or 0) for b in stacks.values())
    body, said, left = "", [], float(LEFT)
    for label, b in stacks.items():
        ranks = answered[label].group.gpus
        body += "".join(_panel(label, b, ranks, left, top))
        said.append(f"{label}: {b.total / GiB:.1f} GiB on each of {ranks} GPUs, {ranks * b.total / GiB:.0f} on all")
        left += max(ranks * RANK, 120) + APART
    grid = "".join(_grid(top, left - APART))
    components = [c for b in stacks.values() for c, _ in b.stacked]
    return Picture(
        left, TOP + DEEP + BELOW, grid + body, "; ".join(said), charts.keys(components, "what a process can use")
    )


def _panel(label: str, b: Bar, ranks: int, left: float, top: float) -> Iterator[str]:
    for n in range(ranks):
        base = float(TOP + DEEP)
        for component, size in b.stacked:
            base -= DEEP * size / top
            yield box(left + n * RANK, base, RANK - 2, DEEP * size / top, f"c-{component}")
    wide = max(ranks * RANK, 120)
    high = DEEP * b.total / top
    yield text(left, TOP + DEEP - high - 6, f"{b.total / GiB:.1f} each", style="name total")
    if b.limit:
        yield line(left - 4, TOP + DEEP - DEEP * b.limit / top, wide, 0, "limit")
    name, *more = re.split(", |，", label, maxsplit=1)
    yield text(left, TOP + DEEP + 16, name, style="heading")
    yield text(left, TOP + DEEP + 32, "".join(more))


def _grid(top: float, right: float) -> Iterator[str]:
    for gib in range(0, int(top / GiB) + 1, tick(top / GiB)):
        y = TOP + DEEP * (1 - gib * GiB / top)
        yield line(LEFT - 6, y, right - LEFT + 6, 0, "grid")
        yield text(LEFT - 10, y + 4, f"{gib:,}", "end")
    yield text(4, TOP - 10, "GiB")
