"""How far estimates lie from measured memory, as tables: traced steps by kind of job, published reports by metric."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from itertools import groupby
from typing import Any, TypeVar

from calc.residuals import ALLOWED, NUMBERS, RANGES, Part, Residual, Summary, residual, summary, summed
from calc.site import answers, ledgers
from calc.site.kept import Kept, fingerprint, of_gpu, of_models
from calc.site.tables import WORDS, Cell, Column, Table, verdict_html
from calc.site.workings import of_phase
from calc.units import GiB

ASSUMPTIONS = (
    "Records of measurements/ whose metric is what PyTorch's allocator counts at its peak. A trace follows tensors: "
    "the cuBLAS workspaces, which only a real card allocates, are left out on both sides."
)
PUBLISHED = (
    "Records of measurements/ that others published, each with its source and quote. What a source leaves open was "
    "read as its note says, before the estimate was made."
)

ERRORS = (
    Column("records", "Records", kind="number", digits=0),
    Column("median", "Median error", "%", "number", 3),
    Column("mean", "Mean", "%", "number", 3),
    Column("p95", "95th percentile", "%", "number", 3),
    Column("worst", "Worst", "%", "number", 3),
    Column("bias", "Mean with its sign", "%", "number", 3),
)
ALL = "all"
OF = {"phase": "the phase's own peak", "peak": "the largest moment"}
Record = Mapping[str, Any]


@cache
def residuals() -> tuple[Residual, ...]:
    """One for each record that can be compared: with a number, or of a job that ran or died for want of memory."""
    records = answers.catalog().measurements
    comparable = {_key(r): r for r in records if r["measured_bytes"] or r["verdict"] in ("fits", "oom")}
    asked: dict[str, dict[Hashable, Record]] = {}
    for key, record in comparable.items():
        # what calc compiles of a model serves all its records
        asked.setdefault(f"residuals-{record['scenario']['model']}", {})[key] = record
    found = {key: one for kept in Kept().complete(asked, _residuals).values() for key, one in kept.items()}
    return tuple(found[key] for key in comparable)


def _key(record: Record) -> Hashable:
    """All that a residual depends on beside calc itself."""
    return fingerprint(record), of_gpu(record["scenario"]["gpu"]), of_models()


def _residuals(records: Sequence[Record]) -> list[Residual]:
    return [residual(record, answers.catalog()) for record in records]


def traced() -> list[Residual]:
    """Those of the real implementation, followed without a GPU."""
    return [r for r in residuals() if r.kind == "traced" and r.metric == "allocated"]


def published(metrics: Iterable[str]) -> list[Residual]:
    """Those that others reported with one of `metrics`."""
    wanted = set(metrics)
    return [r for r in residuals() if r.kind == "published" and r.metric in wanted]


def overall() -> Summary | None:
    """The errors of all traced ones; None where nothing has been traced."""
    return summary(traced()) if traced() else None


# ---- traced -------------------------------------------------------------------------------------------------------


def by_kind() -> Table:
    """Errors of traced steps by task, method and sharding, and over all."""
    columns = (Column("task", "Task"), Column("method", "Method"), Column("sharding", "Sharding"), *ERRORS)
    rows = [
        tuple(Cell(word) for word in key) + _errors(summary(members))
        for key, members in _groups(traced(), lambda r: (r.task, r.method, r.sharding))
    ]
    if every := overall():
        rows.append((Cell(ALL), Cell(""), Cell(""), *_errors(every)))
    caption = "Estimated against traced peaks: relative error, by kind of job"
    return _table("by-kind", caption, columns, rows, ASSUMPTIONS)


def worst(count: int) -> Table:
    """The traced steps whose estimates are furthest off."""
    columns = (
        Column("record", "Record"),
        Column("estimated", "Estimated", "GiB", "number", 2),
        Column("measured", "Measured", "GiB", "number", 2),
        Column("error", "Error", "%", "number", 3),
    )
    furthest = sorted(traced(), key=lambda r: -abs(r.error))[:count]
    rows = [(Cell(r.id), _gib(r.predicted), _gib(r.measured), Cell(100 * r.error)) for r in furthest]
    return _table("worst", f"The {count} records whose estimates are furthest off", columns, rows, ASSUMPTIONS)


def by_part() -> Table:
    """Errors of each phase's own peak, and of the parts that the largest is made of."""
    columns = (Column("part", "Part"), Column("of", "Of"), *ERRORS)
    found = traced()
    parts: list[tuple[str, Part, int]] = [("phase", part, part.measured) for r in found for part in r.phases]
    parts += [("peak", part, r.measured) for r in found for part in r.components]
    rows = []
    for (what, name), members in _groups(parts, lambda p: (p[0], p[1].name)):
        errors = summed([(part.predicted - part.measured) / whole for _, part, whole in members])
        rows.append((Cell(name), Cell(OF[what]), *_errors(errors)))
    caption = "Estimated against traced: each phase, and what the largest moment is made of"
    note = (
        "A phase's error is relative to its own peak, a part's to the whole one. Parts are not told apart under ZeRO."
    )
    return _table("by-part", caption, columns, rows, ASSUMPTIONS, note)


# ---- published ----------------------------------------------------------------------------------------------------


def published_numbers() -> Table:
    """Errors of what others saw PyTorch's allocator count, by source."""
    columns = (Column("metric", "Metric"), Column("source", "Source"), *ERRORS)
    rows = [(*_words(key), *_errors(summary(members))) for key, members in _with_all(published(NUMBERS))]
    caption = "Estimated against published allocations: relative error, by source"
    return _table("published-allocated", caption, columns, rows, PUBLISHED)


def published_ranges() -> Table:
    """How many published values that count what the allocator holds back lie inside the range, by source."""
    columns = (
        Column("metric", "Metric"),
        Column("source", "Source"),
        Column("records", "Records", kind="number"),
        Column("inside", "Inside the range", kind="number"),
        Column("above", "Measured more", kind="number"),
        Column("below", "Measured less", kind="number"),
        Column("share", "Inside", "%", "number"),
    )
    rows = []
    for key, members in _with_all(published(RANGES)):
        inside = sum(r.inside for r in members)
        above = sum(r.measured > r.high for r in members)
        counts = (len(members), inside, above, len(members) - inside - above, 100 * inside / len(members))
        rows.append((*_words(key), *(Cell(count) for count in counts)))
    caption = "Published values that count what the allocator holds back, against the range"
    note = "The range of 'reserved' leaves context and NCCL out; where no tool is named, a value may be any."
    return _table("published-reserved", caption, columns, rows, PUBLISHED, note)


def published_verdicts() -> Table:
    """Whether jobs ran, against the estimates' verdicts; those with a figure apart from mere verdicts."""
    columns = (
        Column("source", "The source gives"),
        Column("reported", "The job"),
        Column("records", "Records", kind="number"),
        *(Column(word, f"Estimated: {shown}", kind="number") for word, shown in WORDS.items()),
        Column("share", "Agree", "%", "number"),
    )

    def kind(r: Residual) -> tuple[str, str]:
        return "a verdict" if r.metric == "verdict" else "a figure", WORDS[str(r.reported)]

    rows = []
    reported = [r for r in published(("verdict", *NUMBERS, *RANGES)) if r.reported in ("fits", "oom")]
    for key, members in _groups(reported, kind):
        counts = [sum(r.verdict == word for r in members) for word in WORDS]
        share = 100 * sum(r.same_verdict for r in members) / len(members)
        rows.append((*_words(key), *(Cell(value) for value in (len(members), *counts, share))))
    caption = "Published jobs that ran and that did not, against the verdict"
    note = "A job that ran agrees with 'fits' and with 'tight', one that did not with 'out of memory' alone."
    return _table("published-verdicts", caption, columns, rows, PUBLISHED, note)


def published_by_job() -> Table:
    """How many published records agree, by framework, task, method and metric."""
    columns = (
        Column("framework", "Framework"),
        Column("task", "Task"),
        Column("method", "Method"),
        Column("metric", "Metric"),
        Column("records", "Records", kind="number"),
        Column("agree", "Agree", kind="number"),
        Column("share", "Agree", "%", "number"),
    )
    rows = []
    found = published((*NUMBERS, *RANGES, "verdict"))
    for key, members in _groups(found, lambda r: (r.framework, r.task, r.method, r.metric)):
        agree = sum(r.agrees for r in members)
        rows.append((*_words(key), Cell(len(members)), Cell(agree), Cell(100 * agree / len(members))))
    caption = "Published records that the estimate agrees with, by framework, task, method and metric"
    note = (
        f"A number agrees within {100 * ALLOWED:.0f} %, a range when it holds the value, a verdict when it is the same."
    )
    return _table("published-by-job", caption, columns, rows, PUBLISHED, note)


def published_off() -> Table:
    """Every published record that the estimate disagrees with, by name, and why."""
    columns = (
        Column("record", "Record"),
        Column("metric", "Metric"),
        Column("estimated", "Estimated", "GiB"),
        Column("measured", "Measured", "GiB"),
        Column("explanation", "Why"),
    )
    rows = [
        (Cell(r.id), Cell(r.metric), Cell(_estimated(r)), Cell(_measured(r)), Cell(r.explanation))
        for r in published(("verdict", *NUMBERS, *RANGES))
        if not r.agrees
    ]
    return _table("published-off", "Published records that the estimate disagrees with", columns, rows, PUBLISHED)


# ---- published RL jobs --------------------------------------------------------------------------------------------

RL = ("ppo", "grpo", "reinforce++")


def rl_reports() -> list[Residual]:
    """Those that others published of RL jobs."""
    return [r for r in residuals() if r.kind == "published" and r.task in RL]


def reports_count(what: str) -> int:
    """Of the published RL reports: their `count`, those that `agree` or `disagree`, those of `loading`, the `jobs`."""
    found = rl_reports()
    agree = sum(r.agrees for r in found)
    counts = {
        "count": len(found),
        "agree": agree,
        "disagree": len(found) - agree,
        "loading": sum(r.metric == "held" for r in found),
        "jobs": len({str(_record(r)["scenario"]) for r in found}),
    }
    if what not in counts:
        raise ValueError(f"no {what!r}; there is {', '.join(counts)}")
    return counts[what]


def reports() -> Table:
    """Published RL reports beside what is computed: whether the job runs, and what is held at a moment of loading."""
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
    )
    rows = []
    for r in rl_reports():
        record = _record(r)
        answer = answers.ask(record["scenario"], r.id)
        s = answer.scenario
        card, model = answers.catalog().gpu(s.gpu), answers.catalog().models.get(s.model)
        job = f"{s.task.upper()}, {model.name if model else s.model}, {s.gpus} × {card.name}"
        name = r.id.removeprefix("published/")
        exact = r.metric == "held"
        rows.append(
            (
                Cell(name, f'<a href="{escape(record["url"])}">{escape(name)}</a>'),
                Cell(f"{job}, {record['scenario'].get('framework', s.framework)}"),
                Cell(word := WORDS[str(r.reported)], verdict_html(str(r.reported), word)),
                ledgers.verdict_cell(answer.estimate, answer),
                Cell("yes" if r.agrees else "no"),
                ledgers.held(of_phase(answer.peak), answer),
                ledgers.in_gib(answer.group.usable_bytes, answer),
                Cell(record["moment"] if exact else "—"),
                _gib(r.measured) if exact else Cell(None, "—"),
                _gib(r.predicted) if exact else Cell(None, "—"),
                Cell(100 * r.error) if exact else Cell(None, "—"),
                Cell(record["quote"], f"<q>{escape(record['quote'])}</q>"),
                Cell(" ".join([record["note"], *(f"{warning}." for warning in s.warnings)])),
            )
        )
    caption = "Published reports of RL jobs, and what the guide computes for them"
    note = (
        f"{reports_count('agree')} of {len(rows)} agree: a job that ran is computed as 'fits' or 'tight', one that "
        f"died as 'out of memory'; where a log says what was allocated, that too, to {100 * ALLOWED:.0f} %."
    )
    rests_on = "Records of measurements/published_rl.jsonl, each with its source, its words and its scenario."
    return Table("rl-reports-records", caption, columns, tuple(rows), rests_on, note, versions=answers.versions())


def _record(r: Residual) -> Mapping[str, Any]:
    return next(record for record in answers.catalog().measurements if record["id"] == r.id)


def _estimated(r: Residual) -> str:
    if r.metric == "verdict":
        return WORDS[r.verdict]
    return f"{r.low / GiB:.1f} to {r.high / GiB:.1f}" if r.metric in RANGES else f"{r.predicted / GiB:.1f}"


def _measured(r: Residual) -> str:
    if r.metric == "verdict":
        return WORDS[str(r.reported)]
    return f"{r.measured / GiB:.1f}" + (f" to {r.most / GiB:.1f}" if r.most > r.measured else "")


# ---- both ---------------------------------------------------------------------------------------------------------

_Key = tuple[str, ...]
_T = TypeVar("_T")


def _groups(found: Iterable[_T], key: Callable[[_T], _Key]) -> Iterator[tuple[_Key, list[_T]]]:
    """What has each key, in the keys' order."""
    for name, members in groupby(sorted(found, key=key), key):
        yield name, list(members)


def _with_all(found: list[Residual]) -> Iterator[tuple[_Key, list[Residual]]]:
    """Those of each metric and source, and behind a metric's sources all of it."""
    for (metric,), members in _groups(found, lambda r: (r.metric,)):
        yield from _groups(members, lambda r: (r.metric, r.group))
        yield (metric, ALL), members


def _words(key: _Key) -> tuple[Cell, ...]:
    return tuple(Cell(word) for word in key)


def _errors(s: Summary) -> tuple[Cell, ...]:
    return (Cell(s.count), *(Cell(100 * value) for value in (s.median, s.mean, s.p95, s.worst, s.bias)))


def _gib(amount: int) -> Cell:
    return Cell(amount / GiB, exact=amount)


def _table(
    id: str, caption: str, columns: tuple[Column, ...], rows: Iterable[tuple[Cell, ...]], rests_on: str, note: str = ""
) -> Table:
    return Table(f"accuracy-{id}", caption, columns, tuple(rows), rests_on, note, versions=answers.versions())
