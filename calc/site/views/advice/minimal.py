"""Minimal configurations that others publish, as a table beside ours."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from html import escape

from calc.answers import answers, searched, words
from calc.answers.kept import Kept
from calc.answers.workings import of_phase
from calc.recommend.published import SOURCE, VERL, Comparison, Published, compare
from calc.site.tables.tables import Cell, Column, Table
from calc.site.views.jobs import ledgers


@cache
def table() -> Table:
    """verl's minimal configurations beside ours: the number of GPUs of each, and the settings that ours changes."""
    columns = (
        Column("job", "Job"),
        Column("gpu", "GPU"),
        Column("theirs", "Theirs", "GPUs", "number"),
        Column("ours", "Ours", "GPUs", "number"),
        Column("different", "What ours sets otherwise"),
        Column("total", "Ours needs", "GiB", "number", 1, "Everything the process takes of the fullest GPU"),
        Column("usable", "Usable", "GiB", "number", 1, "What the card lets a process use"),
        Column("probability", "Likely to fit", "%", "number", 0),
        Column("step", "One step", "s", "number", 0, "Of the global batch, every sequence at full length"),
        Column("settings", "Theirs sets"),
    )
    rows = []
    for each in _compared():
        theirs = ", ".join(f"{name}: {ledgers.spelled(value)}" for name, value in each.published.settings.items())
        rows.append((
            Cell(each.published.title),
            Cell(answers.catalog().gpu(str(each.published.job["gpu"])).name),
            Cell(each.published.gpus),
            *_ours(each),
            Cell(theirs, f"<code>{escape(theirs)}</code>"),
        ))  # fmt: skip
    return Table(
        "recipes-verl-minimum",
        "The smallest machines of verl's tuning guide, and ours for the same jobs",
        columns,
        tuple(rows),
        "Same model, GPU, lengths and batch; five responses a prompt, with a reference model; verl 0.4.",
        f'Theirs: <a href="{SOURCE}">verl, docs/perf/device_tuning.rst</a> and the scripts that it names.',
        versions=answers.versions(),
    )


def _compared() -> list[Comparison]:
    """Each published configuration beside ours, kept between builds."""
    key: Hashable = searched.catalog()
    asked = {f"minimum-{place}": {key: row} for place, row in enumerate(VERL)}
    return [found[key] for found in Kept().complete(asked, _compare).values()]


def _compare(rows: Sequence[Published]) -> list[Comparison]:
    return [compare(row, answers.catalog()) for row in rows]


def _ours(each: Comparison) -> Iterator[Cell]:
    if each.ours is None:
        yield from [Cell(None, "—")] * 6
        return
    answer = words.answered(each.ours.judged)
    changed = ", ".join(
        f"{d.field}: {ledgers.spelled(d.theirs)} → {ledgers.spelled(d.ours)}"
        for d in each.differences
        if d.field != "gpus"
    )
    yield Cell(each.gpus, scenario=answer.given)
    yield Cell(changed or "nothing", f"<code>{escape(changed)}</code>" if changed else "nothing", style="long")
    yield ledgers.held(of_phase(answer.peak), answer)
    yield ledgers.in_gib(answer.group.usable_bytes)
    yield Cell(round(100 * answer.estimate.fit_probability))
    yield Cell(each.ours.throughput.step_seconds) if each.ours.throughput else Cell(None, "—")
