"""Machines or configurations side by side: memory on one scale, speed, hours for a number of samples, and their price.

The price is the reader's own: the catalog has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from calc.answers import answers, words
from calc.answers.answers import Answer
from calc.answers.workings import of_phase
from calc.base.units import GB, GiB
from calc.estimate import report
from calc.scenario.scenario import Scenario
from calc.site.tables import charts
from calc.site.tables.tables import Cell, Column, Table, verdict_html
from calc.site.views.jobs import ledgers
from calc.throughput import Throughput


class Side(NamedTuple):
    """A job with its answer, its speed if known, its verdict in words, and the reader's price in $ per GPU hour.

    A job that cannot be asked has no answer but `refused`, the reason in one line.
    """

    answer: Answer | None
    rate: Throughput | None = None
    verdict: str = ""
    price: float | None = None
    refused: str = ""


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
    return [", ".join([parts[0], *(parts[n] for n in differ)]) if parts else "cannot run" for parts in said]


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
        Column("verdict", "Verdict"),
        Column("total", "Needs", "GiB", "number", 1, "Everything the process takes of the fullest GPU"),
        Column("usable", "Usable", "GiB", "number", 1, "What the card lets a process use"),
        Column("bar", "Against the limit", kind="bar"),
        ledgers.TOKENS,
        Column("step", "One step", "s", "number", 1),
        Column("hours", f"{samples:,} {what}", "h", "number", 1, "At that speed, each of them once"),
        *([Column("price", "A GPU hour", "$", "number", 2, "As you say")] if priced else []),
        *([Column("cost", "What it costs", "$", "number", 0, "Hours, times GPUs, times your price")] if priced else []),
        Column("host", "Host memory", "GB", "number", 0, "Needed of a node"),
        Column("settings", "Configuration"),
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
    none = Cell(None, "—")
    prices = [Cell(side.price) if side.price is not None else none] if priced else []
    if side.answer is None:
        refusal = Cell(side.refused, style="settings")
        yield from (Cell("cannot run", verdict_html("oom", "cannot run")), none, none, Cell(html=""), none, none, none)
        yield from (*prices, *([none] if priced else []), none, refusal)
        return
    answer, group, rate = side.answer, side.answer.group, side.rate
    needs, time, price = answer.device_bytes, hours(side, samples), cost(side, samples)
    yield Cell(side.verdict, verdict_html(answer.estimate.verdict, side.verdict), scenario=answer.given)
    yield ledgers.held(of_phase(answer.peak), answer, "over" if needs > group.usable_bytes else "")
    yield Cell(group.usable_bytes / GiB)
    yield Cell(html=charts.bar(ledgers.by_component(answer.peak.moment.lines), full, group.usable_bytes))
    yield Cell(rate.tokens_per_second) if rate else none
    yield Cell(rate.step_seconds) if rate else none
    yield none if time is None else Cell(time)
    yield from (*prices, *([none if price is None else Cell(price)] if priced else []))
    yield Cell(answer.estimate.host_peak / GB)
    settings = ", ".join(words.settings(answer.scenario))
    yield Cell(settings, escape(settings), style="settings")
