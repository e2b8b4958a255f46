"""Step times, as tables: a job term by term, jobs side by side, and estimates against timed runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from itertools import groupby
from statistics import mean, median

from calc.accuracy.step_time_errors import (
    COLLECTIVES,
    Pace,
    iterations,
    judging,
    paces,
    rank_correlation,
    stages,
    steps,
)
from calc.answers import answers, words
from calc.answers.answers import Answer
from calc.answers.workings import method_url
from calc.estimate import report
from calc.estimate.estimate import speed
from calc.scenario.words import PAIRED
from calc.site.tables.tables import Cell, Column, Table
from calc.site.views.jobs import waterfall
from calc.throughput import Term, Throughput, rates, rollout, training, work
from calc.throughput.terms import Constant

RESTS_ON = (
    "Records of measurements/ with a rate, each with its source and quote. A record that set a constant is left out. "
    "The job's links are those of the node of the catalog that its cards usually come in, the slower where there are "
    "two: no source names its own."
)
MEASURED_ON = (
    "The median step of plain PyTorch after two to warm up, on one card: measurements/bench. Steps that "
    "set a constant are left out, as are cards that stood in for smaller ones. Of FSDP2 and ZeRO one rank ran, and its "
    "collectives moved nothing: the estimate leaves them out. What DeepSpeed itself does on the host, hook by hook, is "
    "not counted."
)
ALL = "all"
WORST = 10
FIFTH = 20.0


@cache
def residuals() -> tuple[Pace, ...]:
    """The step-time errors of published rates that may judge the estimate."""
    return tuple(judging(paces(answers.catalog())))


@cache
def measured() -> tuple[Pace, ...]:
    """The step-time errors of measured steps that may judge the estimate."""
    return tuple(judging(steps(answers.catalog())))


@cache
def rl_stages() -> tuple[Pace, ...]:
    """The errors of stages of iterations of RL that may judge the estimate."""
    return tuple(judging(stages(answers.catalog())))


@cache
def rl_iterations() -> tuple[Pace, ...]:
    """The errors of published iterations of RL."""
    return tuple(judging(iterations(answers.catalog())))


def of(answer: Answer) -> Throughput:
    """The speed of a job; raises Unrated if a rate is not known."""
    return speed(answer.estimate, answers.catalog())


def traffic(t: Throughput) -> float:
    """The seconds of a step in data-parallel collectives."""
    return sum(term.seconds for term in t.terms if term.name in COLLECTIVES and term.seconds > 0)


def seconds_each(answer: Answer) -> float:
    """Seconds per sequence of a step, per pair if the task has pairs, or, for RL, per response of an iteration."""
    return of(answer).step_seconds / report.samples(answer.scenario)


def hours(answer: Answer, items: int) -> float:
    """Hours for `items` sequences, pairs if the task has pairs, or responses for RL."""
    return seconds_each(answer) * items / 3600


def terms(answer: Answer, table_id: str, caption: str, root: str) -> Table:
    """One row per term, with its formula and the values put in, and the terms as a drawing."""
    columns = (
        Column("term", "Term"),
        Column("seconds", "Seconds", "s", "number", 3),
        Column("formula", "Formula"),
        Column("values", "With"),
    )
    t = of(answer)
    rows = [
        (Cell(x.name, f'<a href="{root}{method_url(x.source)}">{escape(x.name)}</a>'), Cell(x.seconds),
         Cell(x.formula), Cell(_values(x)))
        for x in t.terms
    ]  # fmt: skip
    rows.append((Cell("one step"), Cell(t.step_seconds), Cell("sum"), Cell("")))
    note = f"{report.tokens(t)}; most of the time goes into {t.bound_by}."
    drawn = waterfall.picture(t)
    rests_on = words.describe(answer)
    return Table(table_id, caption, columns, tuple(rows), rests_on, note, versions=answers.versions(), picture=drawn)


def _values(term: Term) -> str:
    return ", ".join(f"{name} = {value:,.4g}" for name, value in term.values.items())


def compare(answered: Mapping[str, Answer], table_id: str, caption: str, items: int) -> Table:
    """Jobs side by side: a step, its share without collectives, its collectives, and the hours that `items` take."""
    first = next(iter(answered.values()))
    named = "pairs" if first.scenario.task in PAIRED else "sequences"
    columns = (
        Column("job", "Job"),
        Column("length", "Mean length", "tokens", "number"),
        Column("step", "One step", "s", "number", 1),
        Column("work", "Without collectives", "s", "number", 1, "The step less its data-parallel collectives"),
        Column("traffic", "Collectives", "s", "number", 1, "Gathers and reductions, whatever part of them is hidden"),
        Column("hours", f"{items:,} {named}", "h", "number", 1),
        Column("times", "Quicker than the first", "×", "number", 2),
    )
    rows = []
    for label, answer in answered.items():
        t = of(answer)
        computed = sum(x.seconds for x in t.terms if x.name not in COLLECTIVES)
        rows.append(
            (
                Cell(label),
                Cell(answer.scenario.expected_len),
                Cell(t.step_seconds),
                Cell(computed),
                Cell(traffic(t)),
                Cell(hours(answer, items)),
                Cell(hours(first, items) / hours(answer, items)),
            )
        )
    return Table(table_id, caption, columns, tuple(rows), words.describe(first), versions=answers.versions())


def constants() -> Table:
    """Every constant of the step time that no formula gives, with its source."""
    columns = (
        Column("name", "Name"),
        Column("what", "What it is"),
        Column("value", "Value"),
        Column("status", "Status"),
        Column("source", "Where it comes from"),
    )
    found: list[tuple[str, Constant]] = []
    for module in (rates, work, training, rollout):
        for name, value in vars(module).items():
            if isinstance(value, Constant):
                found.append((name, value))
            elif isinstance(value, dict):
                found += [(f"{name}, {key}", one) for key, one in value.items() if isinstance(one, Constant)]
    found = list({id(c): (n, c) for n, c in reversed(found)}.values())[::-1]  # modules import constants from each other
    rows = [(Cell(n), Cell(c.what), Cell(f"{c:.3g}"), Cell(c.status), Cell(c.source)) for n, c in found]
    caption = "Every constant of a step time, measured or assumed"
    note = "A calibrated constant was set by steps of records, named in calc/accuracy/timing.py, that no error counts."
    return Table("speed-constants", caption, columns, tuple(rows), note, versions=answers.versions())


def by_source() -> Table:
    """Errors of estimated step times by source, with the rank correlation over each source's jobs."""
    caption = "Estimated against published step times: relative error, by source"
    return _by_group(residuals(), "speed-by-source", "Source", caption, RESTS_ON)


def by_kind() -> Table:
    """Errors of estimated step times against measured ones, by card and kind of job."""
    caption = "Estimated against measured step times: relative error, by card and kind of job"
    return _by_group(measured(), "speed-by-kind", "Card and kind of job", caption, MEASURED_ON)


def _by_group(found: Sequence[Pace], table_id: str, title: str, caption: str, rests_on: str) -> Table:
    columns = (
        Column("source", title),
        Column("records", "Records", kind="number"),
        Column("median", "Median error", "%", "number", 1),
        Column("worst", "Worst", "%", "number", 1),
        Column("bias", "Mean with its sign", "%", "number", 1, "Above zero: estimated too slow"),
        Column("rank", "Rank correlation", kind="number", digits=2, hint="Spearman's, over the jobs of the row"),
    )
    ordered = sorted(found, key=lambda p: p.group)
    groups = [(name, list(members)) for name, members in groupby(ordered, key=lambda p: p.group)]
    rows = [_errors(name, members, rank=True) for name, members in groups]
    if ordered:
        rows.append(_errors(ALL, ordered, rank=False))
    return Table(table_id, caption, columns, tuple(rows), rests_on, versions=answers.versions())


def _errors(name: str, members: list[Pace], *, rank: bool) -> tuple[Cell, ...]:
    errors = [p.error for p in members]
    sizes = [100 * abs(error) for error in errors]
    order = rank_correlation([(p.predicted, p.measured) for p in members]) if rank and len(members) > 1 else None
    numbers = (median(sizes), max(sizes), 100 * mean(errors))
    return (Cell(name), Cell(len(members)), *(Cell(n) for n in numbers), Cell(order, "—" if order is None else ""))


def each() -> Table:
    """Every published rate beside the estimate."""
    return _records(residuals(), "speed-records", "Published step times, one by one", RESTS_ON)


def rollouts() -> Table:
    """Every published iteration of RL beside the estimate."""
    caption = "Published iterations of RL, one by one"
    return _records(rl_iterations(), "speed-iterations", caption, RESTS_ON)


def by_stage() -> Table:
    """Errors of the estimated stages of RL iterations against logged ones."""
    caption = "Estimated against logged stages of iterations of RL: relative error, by stage"
    return _by_group(rl_stages(), "speed-by-stage", "Stage", caption, RESTS_ON)


def furthest() -> Table:
    """The measured steps whose estimates are furthest off."""
    found = sorted(measured(), key=lambda p: -abs(p.error))[:WORST]
    return _records(found, "speed-furthest", "Measured step times whose estimates are furthest off", MEASURED_ON)


def _records(found: Sequence[Pace], table_id: str, caption: str, rests_on: str) -> Table:
    columns = (
        Column("record", "Record"),
        Column("estimated", "Estimated step", "s", "number", 3),
        Column("measured", "Measured step", "s", "number", 3),
        Column("error", "Error", "%", "number", 1),
        Column("bound", "Most of the estimate"),
    )
    rows = [
        (Cell(p.id.partition("/")[2]), Cell(p.predicted), Cell(p.measured), Cell(100 * p.error), Cell(p.bound_by))
        for p in found
    ]
    return Table(table_id, caption, columns, tuple(rows), rests_on, versions=answers.versions())


def error(what: str, of: str = "published") -> float | None:
    """An error against `published` or `measured` steps, or `iterations` of RL or their `stages`.

    `what`: their `count`, the `median` error, the `worst`, or the share `within` a fifth. All but the count are in per
    cent; None if there are no such steps.
    """
    found = {"published": residuals, "measured": measured, "iterations": rl_iterations, "stages": rl_stages}[of]()
    sizes = [100 * abs(p.error) for p in found]
    known = {"count": len, "median": median, "worst": max, "within": _within}
    if what not in known:
        raise ValueError(f"no {what!r}; there is {', '.join(known)}")
    return float(known[what](sizes)) if sizes else None  # type: ignore[operator]


def _within(sizes: Sequence[float]) -> float:
    return 100 * mean(size <= FIFTH for size in sizes)
