"""Published reports of RL jobs beside the results computed for them, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from calc.accuracy.residuals import ALLOWED, Residual
from calc.answers import answers
from calc.answers.workings import of_phase
from calc.scenario.words import RL
from calc.site.tables.tables import WORDS, Cell, Column, Table, verdict_html
from calc.site.views.accuracy import accuracy, records
from calc.site.views.accuracy.accuracy import gib
from calc.site.views.jobs import ledgers


def found() -> list[Residual]:
    """The residuals of published RL jobs."""
    return [r for r in accuracy.residuals() if r.kind == "published" and r.task in RL]


def count(what: str) -> int:
    """A count of published RL reports: `count`, those that `agree` or `disagree`, those of `loading`, the `jobs`."""
    every = found()
    agree = sum(r.agrees for r in every)
    counts = {
        "count": len(every),
        "agree": agree,
        "disagree": len(every) - agree,
        "loading": sum(r.metric == "held" for r in every),
        "jobs": len({str(_record(r)["scenario"]) for r in every}),
    }
    if what not in counts:
        raise ValueError(f"no {what!r}; there is {', '.join(counts)}")
    return counts[what]


def table() -> Table:
    """Published RL reports beside computed results: whether the job runs, and memory at a moment of loading."""
    columns = (
        Column("report", "Report"),
        Column("job", "Job"),
        Column("reported", "Reported"),
        Column("computed", "Computed"),
        Column("agrees", "Agree"),
        Column("needs", "Needs", "GiB", "number", 1, "Computed: everything the process takes of the fullest GPU"),
        Column("usable", "Usable", "GiB", "number", 1, "What the card lets a process use"),
        Column("moment", "At a moment of loading"),
        Column("measured", "Log says", "GiB", "number", 2, "What PyTorch had allocated by then"),
        Column("held", "Computed then", "GiB", "number", 2, "What PyTorch should have allocated by then"),
        Column("error", "Off by", "%", "number", 2),
        Column("quote", "In the words of the source"),
        Column("note", "How it was read"),
        records.ID,
    )
    rows = []
    for r in found():
        record = _record(r)
        answer = answers.ask(record["scenario"], r.id)
        s = answer.scenario
        card, model = answers.catalog().gpu(s.gpu), answers.catalog().models.get(s.model)
        job = f"{s.task.upper()}, {model.name if model else s.model}, {s.gpus} × {card.name}"
        name = records.source(record["url"])
        exact = r.metric == "held"
        rows.append(
            (
                Cell(name, f'<a href="{escape(record["url"])}">{escape(name)}</a>'),
                Cell(f"{job}, {record['scenario'].get('framework', s.framework)}"),
                _reported(r),
                ledgers.verdict_cell(answer.estimate, answer),
                Cell("yes" if r.agrees else "no"),
                ledgers.held(of_phase(answer.peak), answer),
                ledgers.in_gib(answer.group.usable_bytes, answer),
                Cell(record["moment"] if exact else "—"),
                gib(r.measured) if exact else Cell(None, "—"),
                gib(r.predicted) if exact else Cell(None, "—"),
                Cell(100 * r.error) if exact else Cell(None, "—"),
                Cell(record["quote"], f"<q>{escape(record['quote'])}</q>"),
                Cell(" ".join([record.get("note", ""), *(f"{warning}." for warning in s.warnings)]).strip()),
                Cell(r.id),
            )
        )
    caption = "Published reports of RL jobs, and what the guide computes for them"
    note = (
        f"{count('agree')} of {len(rows)} agree: a job that ran is computed as 'fits' or 'tight', one that "
        f"died as 'out of memory'; where a log says what was allocated, that too, to {100 * ALLOWED:.0f} %."
    )
    rests_on = "Records of measurements/published_rl.jsonl, each with its source, its words and its scenario."
    return Table("rl-reports-records", caption, columns, tuple(rows), rests_on, note, versions=answers.versions())


def _reported(r: Residual) -> Cell:
    """The outcome of the job, if the source says it."""
    word = WORDS.get(str(r.reported))
    return Cell(word, verdict_html(str(r.reported), word)) if word else Cell("—")


def _record(r: Residual) -> Mapping[str, Any]:
    return next(record for record in answers.catalog().measurements if record["id"] == r.id)
