"""Tables of how far estimates lie from measured memory: traced steps by kind of job, published reports by metric."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, TypeVar

from calc.accuracy.residuals import ALLOWED, NUMBERS, RANGES, Part, Residual, Summary, residual, summary, summed
from calc.answers import answers, words
from calc.answers.kept import Kept, fingerprint, of_gpu, of_model
from calc.base.units import GiB
from calc.catalog.catalog import Catalog
from calc.scenario.rules import flatten
from calc.site.tables.tables import WORDS, Cell, Column, Table
from calc.site.views.accuracy import records

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
    Column("median", "Median error", "%", "number", 2),
    Column("mean", "Mean", "%", "number", 2),
    Column("p95", "95th percentile", "%", "number", 2),
    Column("worst", "Worst", "%", "number", 2),
    Column("bias", "Mean with its sign", "%", "number", 2),
)
ALL = "all"
OF = {"phase": "the phase's own peak", "peak": "the peak"}
Record = Mapping[str, Any]
T = TypeVar("T")


@cache
def residuals() -> tuple[Residual, ...]:
    """The residuals, one for each record that can be compared."""
    return by_model("residuals", {record_key(r): r for r in comparable(answers.catalog())}, _residuals)


def by_model(
    topic: str, records: Mapping[Hashable, Record], compute: Callable[[Sequence[Record]], list[T]]
) -> tuple[T, ...]:
    """The result of `compute` for each record, kept between builds under its key.

    Records are grouped by model, because all of a model share what calc compiles of it.
    """
    asked: dict[str, dict[Hashable, Record]] = {}
    for key, record in records.items():
        name = record["scenario"]["model"].replace("/", "--")  # one of a hub has its owner before it
        asked.setdefault(f"{topic}-{name}", {})[key] = record
    found = {key: one for kept in Kept().complete(asked, compute).values() for key, one in kept.items()}
    return tuple(found[key] for key in records)


def comparable(catalog: Catalog) -> list[Record]:
    """The records that give a number, or a job that ran or died out of memory.

    A search for the largest size is not a job; the jobs that it ran have records of their own.
    """
    records = [r for r in catalog.measurements if "edge" not in r]
    return [r for r in records if r["measured_bytes"] or r["verdict"] in ("fits", "oom")]


def record_key(record: Record) -> Hashable:
    """A key of everything that a residual depends on apart from calc itself."""
    job = flatten(record["scenario"])
    cards = {job["gpu"], record.get("machine", {}).get("gpu", job["gpu"])}
    models = {name for field, name in job.items() if field.rpartition(".")[2] == "model"}
    return fingerprint(record), *map(of_gpu, sorted(cards)), *map(of_model, sorted(models))


def _residuals(records: Sequence[Record]) -> list[Residual]:
    return [residual(record, answers.catalog()) for record in records]


def traced() -> list[Residual]:
    """The residuals of steps of the real implementation, traced without a GPU."""
    return [r for r in residuals() if r.kind == "traced" and r.metric == "allocated"]


def published(metrics: Iterable[str]) -> list[Residual]:
    """The residuals of records that others published with one of `metrics`."""
    wanted = set(metrics)
    return [r for r in residuals() if r.kind == "published" and r.metric in wanted]


def overall() -> Summary | None:
    """The errors of all traced steps; None if nothing has been traced."""
    return summary(traced()) if traced() else None


# ---- traced -------------------------------------------------------------------------------------------------------


def by_kind() -> Table:
    """Errors of traced steps by task, method and sharding, and over all."""
    columns = (Column("task", "Task"), Column("method", "Method"), Column("sharding", "Sharding"), *ERRORS)
    rows = [
        tuple(Cell(word) for word in key) + error_cells(summary(members))
        for key, members in grouped(traced(), lambda r: words.kind(r.task, r.method, r.sharding))
    ]
    if every := overall():
        rows.append((Cell(ALL), Cell(""), Cell(""), *error_cells(every)))
    caption = "Estimated against traced peaks: relative error, by kind of job"
    return table("by-kind", caption, columns, rows, ASSUMPTIONS)


def worst(count: int) -> Table:
    """The traced steps whose estimates are furthest off."""
    caption = f"The {count} records whose estimates are furthest off"
    return furthest("worst", caption, traced(), count, ASSUMPTIONS)


def by_part() -> Table:
    """Errors of each phase's own peak, and of the components of the overall peak."""
    columns = (Column("part", "Part"), Column("of", "Of"), *ERRORS)
    found = traced()
    parts: list[tuple[str, Part, int]] = [("phase", part, part.measured) for r in found for part in r.phases]
    parts += [("peak", part, r.measured) for r in found for part in r.components]
    rows = []
    for (what, name), members in grouped(parts, lambda p: (p[0], p[1].name)):
        errors = summed([(part.predicted - part.measured) / whole for _, part, whole in members])
        rows.append((Cell(name), Cell(OF[what]), *error_cells(errors)))
    caption = "Estimated against traced: each phase, and what the peak is made of"
    note = (
        "A phase's error is relative to its own peak, a part's to the whole one. Parts are not told apart under ZeRO."
    )
    return table("by-part", caption, columns, rows, ASSUMPTIONS, note)


# ---- published ----------------------------------------------------------------------------------------------------


def published_numbers() -> Table:
    """Errors against published figures of PyTorch's allocated memory, by source."""
    columns = (Column("metric", "Metric"), Column("source", "Source"), *ERRORS)
    rows = [(*word_cells(key), *error_cells(summary(members))) for key, members in with_all(published(NUMBERS))]
    caption = "Estimated against published allocations: relative error, by source"
    return table("published-allocated", caption, columns, rows, PUBLISHED)


def published_ranges() -> Table:
    """Published values that include fragmentation: the number inside the estimated range, by source."""
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
    for key, members in with_all(published(RANGES)):
        inside = sum(r.inside for r in members)
        above = sum(r.measured > r.high for r in members)
        counts = (len(members), inside, above, len(members) - inside - above, 100 * inside / len(members))
        rows.append((*word_cells(key), *(Cell(count) for count in counts)))
    caption = "Published values that include what the allocator reserves, against the range"
    note = "The range of 'reserved' leaves context and NCCL out; where no tool is named, a value may be any."
    return table("published-reserved", caption, columns, rows, PUBLISHED, note)


def published_verdicts() -> Table:
    """Published jobs that ran or did not, against the estimated verdicts; records with a figure have their own rows."""
    caption = "Published jobs that ran and that did not, against the verdict"
    kind = ("The source gives", lambda r: "a verdict" if r.metric == "verdict" else "a figure")
    return verdicts("published-verdicts", caption, published(("verdict", *NUMBERS, *RANGES)), kind, PUBLISHED)


def published_by_job() -> Table:
    """The number of published records that agree with the estimate, by framework, task, method and metric."""
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
    for key, members in grouped(
        found, lambda r: (words.FRAMEWORKS[r.framework], *words.kind(r.task, r.method, r.sharding)[:2], r.metric)
    ):
        agree = sum(r.agrees for r in members)
        rows.append((*word_cells(key), Cell(len(members)), Cell(agree), Cell(100 * agree / len(members))))
    caption = "Published records that the estimate agrees with, by framework, task, method and metric"
    note = (
        f"A number agrees within {100 * ALLOWED:.0f} %, a range when it holds the value, a verdict when it is the same."
    )
    return table("published-by-job", caption, columns, rows, PUBLISHED, note)


def published_off() -> Table:
    """Every published record that the estimate disagrees with, by id, and the reason."""
    columns = (
        records.LABEL,
        Column("metric", "Metric"),
        Column("estimated", "Estimated", "GiB"),
        Column("measured", "Measured", "GiB"),
        Column("explanation", "Why"),
        records.ID,
    )
    rows = [
        (label, Cell(r.metric), Cell(_estimated(r)), Cell(_measured(r)), Cell(r.explanation), record)
        for r in published(("verdict", *NUMBERS, *RANGES))
        if not r.agrees
        for label, record in [records.cells(r.id)]
    ]
    return table("published-off", "Published records that the estimate disagrees with", columns, rows, PUBLISHED)


def _estimated(r: Residual) -> str:
    if r.metric == "verdict":
        return WORDS[r.verdict]
    return f"{r.low / GiB:.1f} to {r.high / GiB:.1f}" if r.metric in RANGES else f"{r.predicted / GiB:.1f}"


def _measured(r: Residual) -> str:
    if r.metric == "verdict":
        return WORDS[str(r.reported)]
    return f"{r.measured / GiB:.1f}" + (f" to {r.most / GiB:.1f}" if r.most > r.measured else "")


# ---- all ----------------------------------------------------------------------------------------------------------

_Key = tuple[str, ...]
Kind = tuple[str, Callable[[Residual], str]]  # a column's title, and the function that gives its word for a record


def grouped(found: Iterable[T], key: Callable[[T], _Key]) -> Iterator[tuple[_Key, list[T]]]:
    """Each key with its items, in the order of the keys."""
    for name, members in groupby(sorted(found, key=key), key):
        yield name, list(members)


def with_all(found: list[Residual]) -> Iterator[tuple[_Key, list[Residual]]]:
    """The residuals of each metric and source; after a metric's sources, all of the metric together."""
    for (metric,), members in grouped(found, lambda r: (r.metric,)):
        yield from grouped(members, lambda r: (r.metric, r.group))
        yield (metric, ALL), members


def furthest(id: str, caption: str, found: Iterable[Residual], count: int, rests_on: str) -> Table:
    """The records whose estimates are furthest off, one per row."""
    columns = (
        records.LABEL,
        Column("estimated", "Estimated", "GiB", "number", 2),
        Column("measured", "Measured", "GiB", "number", 2),
        Column("error", "Error", "%", "number", 2),
        records.ID,
    )
    shown = sorted(found, key=lambda r: -abs(r.error))[:count]
    rows = [
        (label, gib(r.predicted), gib(r.measured), Cell(100 * r.error), record)
        for r in shown
        for label, record in [records.cells(r.id)]
    ]
    return table(id, caption, columns, rows, rests_on)


def verdicts(id: str, caption: str, found: Iterable[Residual], kind: Kind, rests_on: str) -> Table:
    """Jobs that ran or did not, against the estimated verdicts, by the kind of job that `kind` gives."""
    title, of = kind
    columns = (
        Column("source", title),
        Column("reported", "The job"),
        Column("records", "Records", kind="number"),
        *(Column(word, f"Estimated: {shown}", kind="number") for word, shown in WORDS.items()),
        Column("share", "Agree", "%", "number"),
    )
    rows = []
    reported = [r for r in found if r.reported in ("fits", "oom")]
    for key, members in grouped(reported, lambda r: (of(r), WORDS[str(r.reported)])):
        counts = [sum(r.verdict == word for r in members) for word in WORDS]
        share = 100 * sum(r.same_verdict for r in members) / len(members)
        rows.append((*word_cells(key), *(Cell(value) for value in (len(members), *counts, share))))
    note = "A job that ran agrees with 'fits' and with 'tight', one that did not with 'out of memory' alone."
    return table(id, caption, columns, rows, rests_on, note)


def word_cells(key: _Key) -> tuple[Cell, ...]:
    """A cell for each word of a key."""
    return tuple(Cell(word) for word in key)


def error_cells(s: Summary) -> tuple[Cell, ...]:
    """The cells of the columns `ERRORS`, in per cent."""
    return (Cell(s.count), *(Cell(100 * value) for value in (s.median, s.mean, s.p95, s.worst, s.bias)))


def gib(amount: int) -> Cell:
    """Bytes as GiB."""
    return Cell(amount / GiB, exact=amount)


def table(
    id: str, caption: str, columns: tuple[Column, ...], rows: Iterable[tuple[Cell, ...]], rests_on: str, note: str = ""
) -> Table:
    """A table of the accuracy pages; its id begins with `accuracy-`."""
    return Table(f"accuracy-{id}", caption, columns, tuple(rows), rests_on, note, versions=answers.versions())
