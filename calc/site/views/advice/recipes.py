"""Recommended configurations on a page: what to run, the alternatives, and what the next faster one lacks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from calc.answers import answers, words
from calc.answers.searched import recommendation
from calc.answers.workings import of_phase
from calc.base.units import GB, GiB, gb, gib
from calc.recommend import Recommendation
from calc.recommend.search import Judged
from calc.resolve.parse import parse
from calc.scenario.rules import flatten
from calc.scenario.scenario import Scenario
from calc.site.tables import charts
from calc.site.tables.charts import Bar
from calc.site.tables.tables import WORDS, Cell, Column, Table, verdict_html
from calc.site.views.jobs import ledgers
from calc.throughput import Throughput

NEXT, CLOSEST = "Next faster, which does not fit", "Closest miss"


class Recipe(NamedTuple):
    """A job as a page gives it, the scenario that its defaults make of it, and the recommendation."""

    job: Mapping[str, Any]
    asked: Scenario
    answer: Recommendation


def recommended(job: Mapping[str, Any], where: str = "scenario") -> Recipe:
    """The recommendation for a job, cached; raises ScenarioError, one line, for one that cannot be used."""
    return _kept(json.dumps(flatten(job), sort_keys=True), where)


@cache
def _kept(key: str, where: str) -> Recipe:
    start = time.perf_counter()
    job = json.loads(key)
    try:
        found = recommendation(job, where)
        first = found.recommended or found.fails
        asked = first.judged.scenario if first else parse({"micro_batch": 1, **job}, catalog=answers.catalog())
        return Recipe(job, asked, found)
    finally:
        answers.Clock.seconds += time.perf_counter() - start
        answers.Clock.asked += 1


# ---- words ---------------------------------------------------------------------------------------------------------


def title(recipe: Recipe) -> str:
    """A job in a few words: `Llama 3.1 8B, DPO on 8 × A100 80 GB`."""
    return f"{words.model(recipe.asked.model)}, {words.task(recipe.asked.task)} on {words.machine(recipe.asked)}"


def said(recipe: Recipe, what: str) -> str:
    """A figure of a recommendation, for a sentence; ValueError if the recommendation lacks it.

    `considered` and `pruned` configurations and the `verdict`; of a recommended one also `method`, `sharding`, `peak`,
    `host`.
    """
    found, best = recipe.answer, recipe.answer.recommended
    counts = {"considered": f"{found.considered:,}", "pruned": f"{found.pruned:,}"}
    if best is None:
        known = counts | {"verdict": found.verdict}
    else:
        parts, peak = words.settings(best.scenario), words.answered(best.judged).device_bytes
        host = f"{gb(best.judged.estimate.host_peak)} of {best.judged.estimate.host_memory}"
        known = counts | {
            "verdict": found.verdict,
            "method": parts[0],
            "sharding": parts[1],
            "peak": gib(peak),
            "host": host,
        }
    if what not in known:
        raise ValueError(f"no {what!r} of this recommendation; it has {', '.join(known)}")
    return known[what]


# ---- tables --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of a table: a configuration under its label, with its verdict in words."""

    label: str
    verdict: str
    judged: Judged | None
    throughput: Throughput | None = None
    extra: tuple[Cell, ...] = ()


COLUMNS = (
    Column("settings", "Settings"),
    Column("verdict", "Verdict"),
    Column("total", "Needs", "GiB", "number", 1, "Everything the process takes of the fullest GPU"),
    Column("bar", "Against the limit", kind="bar"),
    Column("usable", "Usable", "GiB", "number", 1, "What the card lets a process use", behind=True),
    ledgers.PROBABILITY,
    Column("step", "One step", "s", "number", 1, "Of the global batch, every sequence at full length"),
    ledgers.TOKENS,
    Column("bound", "Bound by", behind=True),
)
LAST = (
    Column("phase", "Peak in", behind=True),
    Column("host", "Host memory", "GB", "number", 0, "Of a node, at the most"),
)


def _table(rows: Sequence[Row], id: str, caption: str, first: str, extra: tuple[Column, ...], note: str) -> Table:
    every = [words.answered(row.judged) for row in rows if row.judged]
    scale = round(1.04 * max([n for a in every for n in (a.device_bytes, a.group.usable_bytes)], default=1))
    components = charts.ordered([x.component for a in every for x in a.peak.moment.lines])
    return Table(
        id,
        caption,
        (Column("job", first), *COLUMNS, *extra, *LAST),
        tuple((Cell(row.label), *_cells(row, scale)) for row in rows),
        ledgers.shared(every) if every else "",
        note,
        charts.legend(components, "what a process can use"),
        answers.versions(),
    )


def _cells(row: Row, scale: int) -> Iterator[Cell]:
    """A configuration's cells; dashes if there is none."""
    none, speed = Cell(None, "—"), row.throughput
    verdict = Cell(row.verdict, verdict_html(row.verdict if row.verdict in WORDS else "oom", row.verdict))
    if row.judged is None:
        yield from [none, verdict, none, Cell(), *[none] * 5, *row.extra, none, none]
        return
    answer = words.answered(row.judged)
    group, needs = answer.group, answer.device_bytes
    yield Cell(", ".join(words.settings(answer.scenario)), style="settings")
    yield verdict
    yield ledgers.held(of_phase(answer.peak), answer, "over" if needs > group.usable_bytes else "")
    yield Cell(bar=Bar(ledgers.by_component(answer.peak.moment.lines), scale, group.usable_bytes))
    yield ledgers.in_gib(group.usable_bytes)
    yield Cell(round(100 * answer.estimate.fit_probability))
    yield Cell(speed.step_seconds) if speed else none
    yield Cell(speed.tokens_per_second) if speed else none
    yield Cell(speed.bound_by) if speed else none
    yield from row.extra
    yield Cell(answer.peak.name)
    yield Cell(answer.estimate.host_peak / GB)


def _best(label: str, found: Recommendation, *extra: Cell) -> Row:
    """The row of the recommended configuration; if nothing fits, a row with only the verdict and `extra`."""
    if found.recommended:
        return Row(label, found.verdict, found.recommended.judged, found.recommended.throughput, extra)
    return Row(label, found.verdict, None, None, extra)


def overview(found: Sequence[Recipe], id: str, caption: str) -> Table:
    """One row per job: the configuration to run, and what the next faster one lacks."""
    rows = []
    for recipe in found:
        faster = Cell(words.against(recipe.answer), style="settings")
        rows.append(_best(_label(recipe, found), recipe.answer, faster))
    extra = (Column("faster", "Next faster, and what it lacks"),)
    return _table(rows, id, caption, "Model", extra, _notes(n for r in found for n in r.answer.notes))


def _label(recipe: Recipe, among: Sequence[Recipe]) -> str:
    """The model, with the GPUs and lengths that tell the job from others in its table."""
    s = recipe.asked
    counts, lengths = {r.asked.gpus for r in among}, {r.asked.seq_len or r.asked.response_len for r in among}
    parts = [words.model(s.model)]
    parts += [f"{s.gpus} GPUs"] if len(counts) > 1 else []
    parts += [f"{(s.seq_len or s.response_len):,} tokens"] if len(lengths) > 1 else []
    return ", ".join(parts)


def whole(recipe: Recipe, id: str, caption: str) -> Table:
    """One row per configuration: to run, alternatives, and faster but too large; with the effect of each setting."""
    found = recipe.answer
    rows = [_best("Run this", found)] if found.recommended else []
    if found.fails and found.verdict != "tight":
        rows.append(
            Row(NEXT if rows else CLOSEST, words.lacks(found.fails), found.fails.judged, found.fails.throughput)
        )
    for other in found.alternatives:
        rows.append(Row(f"Or: {other.trades}", "fits", other.judged, other.throughput))
    said = [*(f"{line[:1].upper()}{line[1:]}." for line in found.advice)]
    said.append(f"{found.considered:,} configurations estimated, {found.pruned:,} excluded by quick checks.")
    return _table(rows, id, caption, "Configuration", (), _notes([*said, *found.notes]))


def _notes(lines: Iterable[str]) -> str:
    return "<br>".join(words.code(line) for line in dict.fromkeys(lines))


def matrix(rows: Sequence[Sequence[Recipe]], id: str, caption: str) -> Table:
    """One row per task, one column per machine: the verdict there, the peak, and the configuration."""
    machines = {(r.asked.gpu, r.asked.gpus): words.machine(r.asked) for row in rows for r in row}
    names = {at: f"{at[0]}_{at[1]}" for at in machines}
    columns = (
        Column("task", "Task"),
        *(Column(names[at], words, "GiB", "verdict", 1) for at, words in machines.items()),
    )
    made = [(Cell(words.TASKS[row[0].asked.task]), *(_verdict(recipe) for recipe in row)) for row in rows]
    best = [words.answered(r.answer.recommended.judged) for row in rows for r in row if r.answer.recommended]
    return Table(id, caption, columns, tuple(made), ledgers.shared(best), versions=answers.versions())


def _verdict(recipe: Recipe) -> Cell:
    best = recipe.answer.recommended
    if best is None:
        return Cell((None, None, "; ".join([recipe.answer.verdict, *recipe.answer.advice[:1]])))
    answer = words.answered(best.judged)
    how = ", ".join(words.settings(best.scenario)[:2])
    peak = answer.device_bytes
    return Cell(
        (answer.estimate.verdict, peak / GiB, how), exact=peak, scenario=answer.given, working=of_phase(answer.peak)
    )
