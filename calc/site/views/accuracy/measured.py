"""Estimates against this project's measurements on real GPUs, as tables: memory, context, and the largest sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from calc.accuracy.largest_size import Search, search
from calc.accuracy.residuals import Allocator, Outside, Residual, Summary, summary, summed
from calc.answers import answers, words
from calc.memory.runtime import MIDDLE, REPLAYED
from calc.site.tables.tables import NOT_PUBLISHED, Cell, Column, Table
from calc.site.views.accuracy import accuracy
from calc.site.views.accuracy.accuracy import ALL, ERRORS, Record, error_cells, gib, grouped, table, word_cells

RESTS_ON = (
    "Records of measurements/ that its harness made on real GPUs. Where a larger GPU stood in for a smaller card, the "
    "estimate has the card's memory and the GPU's kernels."
)
SEGMENTS = {False: "fixed", True: "expandable"}
FURTHEST = 10
FRESH = "measured/h200-2026-11-26/"  # the suite `families`, measured after the formulas of all its models were there
OWN_LOOPS = ("torchtitan", "torchtune", "trl")
LARGEST = {"micro_batch": "micro batch", "seq_len": "tokens a sequence"}


def jobs() -> list[Residual]:
    """The residuals of measured jobs that ran, against PyTorch's allocated memory."""
    return [r for r in accuracy.residuals() if r.kind == "measured" and r.metric == "allocated"]


def _seen() -> list[tuple[Residual, Allocator]]:
    """The measured jobs whose records hold the allocator's own figures, with those figures."""
    return [(r, r.allocator) for r in jobs() if r.allocator]


def _records() -> list[Record]:
    """The records that the harness made."""
    return [r for r in answers.catalog().measurements if r["class"] == "measured" and "machine" in r]


@cache
def searches() -> tuple[Search, ...]:
    """The searches for the largest size, one for each record of one."""
    return accuracy.by_model("searches", {accuracy.record_key(r): r for r in _records() if "edge" in r}, _searches)


def _searches(records: Sequence[Record]) -> list[Search]:
    return [search(record, answers.catalog()) for record in records]


def _kind(r: Residual) -> tuple[str, ...]:
    return words.FRAMEWORKS[r.framework], *words.kind(r.task, r.method, r.sharding), r.checkpointing


KIND = tuple(Column(name.lower(), name) for name in ("Framework", "Task", "Method", "Sharding", "Checkpointing"))


# ---- what the allocator counts ------------------------------------------------------------------------------------


def by_kind() -> Table:
    """Errors by kind of job: against the allocated memory, and against the memory that the job had asked for."""
    columns = (
        *KIND,
        *ERRORS,
        Column("asked_median", "Median, asked for", "%", "number", 3),
        Column("asked_worst", "Worst, asked for", "%", "number", 3),
    )
    found: list[tuple[tuple[str, ...], list[Residual]]] = list(grouped(jobs(), _kind))
    if found:
        found.append(((ALL, "", "", "", ""), jobs()))
    rows = []
    for key, members in found:
        asked = _asked(members)
        figures = (asked.median, asked.worst) if asked else (None, None)
        rows.append((*word_cells(key), *error_cells(summary(members)), *map(_share, figures)))
    caption = "Estimated against measured peaks: relative error, by kind of job"
    note = "'Asked for' leaves the allocator's own rounding out of what was measured."
    return table("measured-by-kind", caption, columns, rows, RESTS_ON, note)


def _asked(found: Sequence[Residual]) -> Summary | None:
    errors = [r.asked_error for r in found if r.asked_error is not None]
    return summed(errors) if errors else None


def rounding() -> Table:
    """Errors against allocated and against requested memory, and the difference between those two."""
    columns = (Column("segments", "Segments"), Column("what", "What"), *ERRORS)
    rows = []
    for (word,), members in grouped(_seen(), lambda x: (SEGMENTS[x[1].expandable],)):
        compared = {
            "estimate against allocated": [r.error for r, _ in members],
            "estimate against asked for": [r.predicted / a.requested - 1 for r, a in members],
            "allocated beyond asked for": [r.measured / a.requested - 1 for r, a in members],
        }
        rows += [(Cell(word), Cell(what), *error_cells(summed(errors))) for what, errors in compared.items()]
    caption = "What PyTorch's allocator counts beyond what a job asks for"
    return table("measured-rounding", caption, columns, rows, RESTS_ON)


def reserved() -> Table:
    """Reserved memory: against the estimated range, and in excess of allocated memory."""
    columns = (
        Column("framework", "Framework"),
        Column("segments", "Segments"),
        Column("sharding", "Sharding"),
        Column("checkpointing", "Checkpointing"),
        Column("records", "Records", kind="number"),
        Column("inside", "Inside", kind="number"),
        Column("above", "More", kind="number"),
        Column("below", "Less", kind="number"),
        Column("median", "Beyond allocated, median", "%", "number", 1),
        Column("p95", "95th percentile", "%", "number", 1),
        Column("worst", "Most", "%", "number", 1),
    )
    found = list(grouped(_seen(), lambda x: (_kind(x[0])[0], SEGMENTS[x[1].expandable], *_kind(x[0])[3:])))
    if found:
        found.append(((ALL, "", "", ""), _seen()))
    rows = []
    for key, members in found:
        inside, above = sum(a.inside for _, a in members), sum(a.reserved > a.high for _, a in members)
        over = summed([a.reserved / r.measured - 1 for r, a in members])
        counts = (len(members), inside, above, len(members) - inside - above)
        figures = (100 * over.median, 100 * over.p95, 100 * over.worst)
        rows.append((*word_cells(key), *(Cell(value) for value in (*counts, *figures))))
    caption = "What PyTorch's allocator reserved at most, against the range and beside what was allocated"
    note = "Inside, more or less than the printed range, context left out: nine tenths of what a monitor may show."
    return table("measured-reserved", caption, columns, rows, RESTS_ON, note)


def trainers() -> Table:
    """Errors of jobs on whose sight formulas changed, by trainer: those of the code of their day, and now."""
    columns = (
        Column("trainer", "Trainer"),
        Column("records", "Records", kind="number"),
        Column("first_median", "Median at first", "%", "number", 2),
        Column("first_worst", "Worst at first", "%", "number", 2),
        Column("median", "Median now", "%", "number", 2),
        Column("worst", "Worst now", "%", "number", 2),
    )
    rows = []
    for (trainer,), members in grouped(_corrected(), lambda job: (job.trainer,)):
        first, now = summed([job.first for job in members]), summed([job.now for job in members])
        figures = (first.median, first.worst, now.median, now.worst)
        rows.append((Cell(trainer), Cell(len(members)), *(Cell(100 * value) for value in figures)))
    caption = "Jobs of trainers' own loops: before any formula had seen them, and now"
    return table("measured-trainers", caption, columns, rows, RESTS_ON)


def worst() -> Table:
    """The measured jobs whose estimates are furthest off."""
    caption = f"The {FURTHEST} measured jobs whose estimates are furthest off"
    return accuracy.furthest("measured-worst", caption, jobs(), FURTHEST, RESTS_ON)


def verdicts() -> Table:
    """Measured jobs that ran or ran out of memory, against the estimated verdicts."""
    found = [r for r in accuracy.residuals() if r.kind == "measured"]
    caption = "Measured jobs that ran and that ran out of memory, against the verdict"
    return accuracy.verdicts("measured-verdicts", caption, found, ("Task", lambda r: _kind(r)[1]), RESTS_ON)


# ---- outside the allocator ----------------------------------------------------------------------------------------


def outsides() -> list[Outside]:
    """The memory that each job that ran took of its card outside PyTorch's allocator."""
    return [r.outside for r in jobs() if r.outside]


def context() -> Table:
    """The memory that processes took outside PyTorch's allocator, and its estimate."""
    columns = (
        Column("gpu", "GPU"),
        Column("kind", "Kind of job"),
        Column("records", "Records", kind="number"),
        Column("start", "At its start", "GiB", "number", 3),
        Column("measured", "Measured", "GiB", "number", 3),
        Column("estimated", "Estimated", "GiB", "number", 3),
    )
    rows = [
        (_card(o.machine), Cell(o.kind), Cell(count), gib(o.at_start), gib(o.measured), gib(o.predicted))
        for o, count in sorted(Counter(outsides()).items())
    ]
    caption = "What a process took of the card besides PyTorch's memory"
    note = (
        "At its start no kernel has run: CUDA loads each when first called. One process ran, so NCCL has no part in it."
    )
    return table("measured-context", caption, columns, rows, RESTS_ON, note)


def _card(name: str) -> Cell:
    return Cell(answers.catalog().gpu(name).name)


# ---- the largest sizes --------------------------------------------------------------------------------------------


def edges() -> Table:
    """Each search for the largest size that runs, beside the estimated one."""
    columns = (
        Column("gpu", "Card"),
        Column("model", "Model"),
        Column("field", "Looked for"),
        Column("found", "Ran", kind="number", hint="The largest that ran"),
        Column("fails_at", "Ran out", kind="number", hint="The smallest that ran out of memory"),
        Column("predicted", "Estimated", kind="number", hint="The largest that is more likely to fit than not"),
        Column("error", "Off by", "%", "number", 1),
        Column("predicted_fits", "Called 'fits'", kind="number", hint="The largest with that verdict"),
        Column("kept", "Did it run"),
        Column("full_found", "Need where it ran", "% of the card", "number", 1, "As estimated"),
        Column("full_failed", "Where it ran out", "% of the card", "number", 1, "As estimated"),
        Column("job", "Job"),
        Column("segments", "Segments"),
        Column("machine", "Measured on"),
    )
    rows = []
    for s in sorted(searches(), key=lambda s: (s.field, s.card, s.model, s.id)):
        job = f"{words.task(s.task)}, {words.METHODS[s.method]}, {words.checkpointing(s.checkpointing)}"
        job += f", {words.SHARDINGS[s.sharding]} on {s.gpus} GPUs" if s.gpus > 1 else ""
        job += f", {words.FRAMEWORKS[s.framework]}" if s.framework != "torch" else ""
        sizes = (Cell(s.found), _or_dash(s.fails_at), Cell(s.predicted), _share(s.error), Cell(s.predicted_fits))
        rows.append(
            (
                _card(s.card),
                Cell(answers.catalog().model(s.model).name),
                Cell(LARGEST[s.field]),
                *sizes,
                Cell("yes" if s.kept else "no"),
                _share(s.full_found),
                _share(s.full_failed),
                Cell(job),
                Cell(SEGMENTS[s.expandable]),
                _card(s.machine),
            )
        )
    caption = "The largest micro batch or length that runs: found, and estimated"
    note = (
        "Ran: the largest that did; ran out: the smallest that did not. Estimated: the largest more likely to fit than "
        "not; 'fits' asks for more. A need is an estimate, too."
    )
    return table("measured-edges", caption, columns, rows, RESTS_ON, note)


def _share(value: float | None) -> Cell:
    return _or_dash(None if value is None else 100 * value)


def _or_dash(value: float | None) -> Cell:
    return Cell(None, "—") if value is None else Cell(value)


# ---- the machines -------------------------------------------------------------------------------------------------


def machines() -> Table:
    """The jobs and libraries of each machine."""
    columns = (
        Column("machine", "Machine"),
        Column("ran", "Jobs that ran", kind="number"),
        Column("died", "Ran out of memory", kind="number"),
        Column("failed", "Failed otherwise", kind="number"),
        Column("searches", "Searches", kind="number"),
        Column("rates", "Tables of rates", kind="number"),
        Column("libraries", "Libraries"),
        Column("dates", "When"),
    )
    rows = []
    for (machine, libraries), members in grouped(_records(), lambda r: (r["machine"]["words"], _libraries(r))):
        found = Counter("searches" if "edge" in r else "rates" if "rates" in r else r["verdict"] for r in members)
        counts = (found["fits"], found["oom"], found["failed"], found["searches"], found["rates"])
        dates = ", ".join(sorted({r["date"] for r in members}))
        rows.append((Cell(machine), *(Cell(count) for count in counts), Cell(libraries), Cell(dates)))
    return table("measured-machines", "What was measured, and where", columns, rows, RESTS_ON)


def _libraries(record: Record) -> str:
    """The versions of libraries that the machine's description leaves out."""
    told = ("python", "torch", "cuda", "driver")
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name not in told)


TABLES: Mapping[str, Callable[[], Table]] = {
    "machines": machines,
    "by-kind": by_kind,
    "rounding": rounding,
    "trainers": trainers,
    "worst": worst,
    "reserved": reserved,
    "verdicts": verdicts,
    "context": context,
    "edges": edges,
}


def shown(name: str) -> Table:
    """One of the tables; ValueError for another name."""
    if name not in TABLES:
        raise ValueError(f"no {name!r}; there is {', '.join(TABLES)}")
    return TABLES[name]()


def figure(what: str) -> str:
    """A figure of the measured jobs, by name.

    `count`: jobs that ran and were measured. `machines`: the machines. `median` and `worst`: errors of allocated
    memory. `asked_median` and `asked_worst`: errors against the memory that jobs asked for.

    `inside`: jobs whose reserved memory lies in the range. `died`: jobs that ran out of memory; `missed`: those of them
    called `fits`. `scared`: jobs that ran but were called out of memory. `searches`: searches for the largest size;
    `close`: those within 5 %; `kept`: those in which the size called fits did run. `replay_median`: the median error of
    replayed allocators. `fresh`: jobs of the suite that came after the formulas of its families; `fresh_models`: the
    models in it; `fresh_median` and `fresh_worst`: errors of their allocated memory. `corrected`: jobs that changed
    formulas; `corrected_median` and `corrected_worst`: today's errors of theirs, `first_median` and `first_worst`: the
    errors before that.
    """
    every = [r for r in accuracy.residuals() if r.kind == "measured"]
    died = [r for r in every if r.reported == "oom"]
    fresh = [r for r in jobs() if r.id.startswith(FRESH)]
    corrected = _corrected()
    first, now = _summed([job.first for job in corrected]), _summed([job.now for job in corrected])
    known: dict[str, Callable[[], str]] = {
        "count": lambda: str(len(jobs())),
        "machines": lambda: str(len({r["machine"]["words"] for r in _records()})),
        "inside": lambda: str(sum(a.inside for _, a in _seen())),
        "died": lambda: str(len(died)),
        "missed": lambda: str(sum(r.verdict == "fits" for r in died)),
        "scared": lambda: str(sum(r.verdict == "oom" for r in every if r.reported == "fits")),
        "searches": lambda: str(len(searches())),
        "close": lambda: str(sum(s.close for s in searches())),
        "kept": lambda: str(sum(s.kept for s in searches())),
        "fresh": lambda: str(len(fresh)),
        "fresh_models": lambda: str(len({r.id.split("/")[2] for r in fresh})),
        "fresh_median": partial(_per_cent, summary(fresh) if fresh else None, "median"),
        "fresh_worst": partial(_per_cent, summary(fresh) if fresh else None, "worst"),
        "corrected": lambda: str(len(corrected)),
        **{f"corrected_{name}": partial(_per_cent, now, name) for name in ("median", "worst")},
        **{f"first_{name}": partial(_per_cent, first, name) for name in ("median", "worst")},
        "replay_median": lambda: f"{100 * sorted(map(abs, REPLAYED))[MIDDLE]:.2f} %",
        **{name: partial(_per_cent, summary(jobs()) if jobs() else None, name) for name in ("median", "worst")},
        **{f"asked_{name}": partial(_per_cent, _asked(jobs()), name) for name in ("median", "worst")},
    }
    if what not in known:
        raise ValueError(f"no {what!r}; there is {', '.join(known)}")
    return known[what]()


class Corrected(NamedTuple):
    """A job on whose sight formulas have changed: its trainer, and the errors of its day's code and of today's."""

    trainer: str
    first: float
    now: float


def _corrected() -> list[Corrected]:
    """The jobs whose records have the estimate of the code of their day."""
    then = {r["id"]: r for r in _records() if "first" in r}
    return [
        Corrected(_trainer(then[r.id]), then[r.id]["first"]["estimated_bytes"] / r.measured - 1, r.error)
        for r in jobs()
        if r.id in then
    ]


def _trainer(record: Record) -> str:
    """The trainer that ran a record's job, with its release."""
    name = next(name for name in OWN_LOOPS if name in record["versions"])
    return f"{words.FRAMEWORKS.get(name, name)} {record['versions'][name]}"


def _summed(errors: Sequence[float]) -> Summary | None:
    return summed(errors) if errors else None


def _per_cent(errors: Summary | None, what: str) -> str:
    return f"{100 * getattr(errors, what):.2f} %" if errors else NOT_PUBLISHED
