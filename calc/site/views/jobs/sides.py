"""Machines or configurations side by side: memory on one scale, speed, hours for a number of samples, and their price.

The price is the reader's own: the catalog has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from calc.answers import answers, words
from calc.answers.answers import Answer
from calc.answers.workings import of_phase
from calc.base.units import GB, GiB
from calc.estimate import report
from calc.scenario.scenario import Scenario
from calc.site.tables import charts
from calc.site.tables.tables import Cell, Column, Table
from calc.site.views.jobs import ledgers
from calc.throughput import Throughput

NONE = Cell(None, "—")
PRICED = (
    Column("price", "A GPU hour", "$", "number", 2, "As you say"),
    Column("cost", "Cost", "$", "number", 0, "Hours, times GPUs, times your price"),
)


class Side(NamedTuple):
    """A job with its answer, its speed if known, and the reader's price in $ per GPU hour.

    A job that cannot be asked has no answer but `refused`, the reason in one line, and the `name` that its reader gave.
    """

    answer: Answer | None
    rate: Throughput | None = None
    price: float | None = None
    refused: str = ""
    name: str = ""


def hours(side: Side, samples: int) -> float | None:
    """The hours that the job takes for so many samples; None if it does not run, or its speed is not known."""
    if side.answer is None or side.rate is None or side.answer.estimate.verdict == "oom":
        return None
    return side.rate.step_seconds * samples / report.samples(side.answer.scenario) / 3600


def cost(side: Side, samples: int) -> float | None:
    """The price of those hours on all GPUs, in $."""
    time = hours(side, samples)
    return None if side.answer is None or time is None or side.price is None else (
        time * side.price * side.answer.scenario.gpus
    )  # fmt: skip


def names(sides: Sequence[Side]) -> list[str]:
    """The machine of each job, and what else tells it from the others: model, task, framework, length, method."""
    said = [_parts(side.answer.scenario) if side.answer else [] for side in sides]
    known = [parts for parts in said if parts]
    differ = [n for n in range(1, len(known[0])) if len({parts[n] for parts in known}) > 1] if known else []
    return [
        ", ".join([parts[0], *(parts[n] for n in differ)]) if parts else side.name
        for parts, side in zip(said, sides, strict=True)
    ]


def _parts(s: Scenario) -> list[str]:
    version = f"{words.FRAMEWORKS[s.framework]} {s.framework_version}"
    return [words.machine(s), words.model(s.model), words.task(s.task), version, report.lengths(s)]


def table(sides: Sequence[Side], samples: int, id: str, caption: str) -> Table:
    """One row per job, in the order in which they were named."""
    known = [side.answer for side in sides if side.answer]
    full = round(1.04 * max([n for a in known for n in (a.device_bytes, a.group.usable_bytes)], default=1))
    components = charts.ordered([x.component for a in known for x in a.peak.moment.lines])
    priced = any(side.price is not None for side in sides)
    kinds = {report.sample(a.scenario) for a in known}
    what = f"{kinds.pop()}s" if len(kinds) == 1 else "samples"
    columns = (
        Column("job", "Job"),
        Column("run", "Fullest GPU, and what to run", "GiB", "verdict", 1, "Everything the process takes of the GPU"),
        Column("bar", "Against the limit", kind="bar"),
        Column("usable", "Usable", "GiB", "number", 1, "What the card lets a process use"),
        ledgers.TOKENS,
        Column("step", "One step", "s", "number", 1),
        Column("hours", f"{samples:,} {what}", "h", "number", 1, "At that speed, each of them once"),
        *(PRICED if priced else ()),
        Column("host", "Host memory", "GB", "number", 0, "Needed of a node"),
    )
    rows = [(Cell(name), *_cells(side, samples, full, priced)) for name, side in zip(names(sides), sides, strict=True)]
    return Table(
        id,
        caption,
        columns,
        tuple(rows),
        ledgers.shared(known) if known else "",
        "Tokens a second, and hours, are estimates for all GPUs together; what does not fit has no hours.",
        charts.legend(components, "what a process can use"),
        answers.versions(),
    )


def _cells(side: Side, samples: int, full: int, priced: bool) -> Iterator[Cell]:
    answer, rate = side.answer, side.rate
    time, price = hours(side, samples), cost(side, samples)
    prices = [_number(side.price), _number(price)] if priced else []
    if answer is None:
        yield Cell((None, None, side.refused))
        yield from (Cell(html=""), NONE, NONE, NONE, NONE, *prices, NONE)
        return
    needs, usable = of_phase(answer.peak), answer.group.usable_bytes
    said = (answer.estimate.verdict, needs.bytes / GiB, ", ".join(words.settings(answer.scenario)))
    yield Cell(said, exact=needs.bytes, scenario=answer.given, working=needs)
    yield Cell(bar=charts.Bar(ledgers.by_component(answer.peak.moment.lines), full, usable))
    yield Cell(usable / GiB)
    yield _number(rate.tokens_per_second if rate else None)
    yield _number(rate.step_seconds if rate else None)
    yield _number(time)
    yield from (*prices, Cell(answer.estimate.host_peak / GB))


def _number(value: float | None) -> Cell:
    return NONE if value is None else Cell(value)
