"""Published figures that were kept back: scenarios written without sight of them, the first comparison and today's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from math import ceil
from statistics import median
from typing import Any, NamedTuple

from calc.accuracy.residuals import RANGES, Residual
from calc.answers import answers
from calc.base.project import ROOT
from calc.base.reading import parse_mapping, read_bytes
from calc.base.units import GiB
from calc.site.tables.tables import Cell, Column, Table
from calc.site.views.accuracy import accuracy, records

FILE = ROOT / "measurements" / "blind" / "unsaid.yaml"
RESTS_ON = (
    "Records of measurements/published_blind.jsonl: each scenario with a first comparison was written from the "
    "source's settings before any estimate, by somebody who had not seen the figure unless its note says so; those "
    "without one came later. The first comparison is that of the code of its day, and is not computed again. Since "
    "then a scenario has changed only where a field came for what it could not say, or where the source or the code "
    "says otherwise."
)
# the revisions that scenarios, written blind, were first compared with, and how tables name these comparisons
ROUNDS = {
    "136e11c": "first, 2026-11-23",
    "ab27c8b": "first, 2026-11-26",
    "bd4c898": "first, 2026-11-26, third round",
    "22483b7": "first, 2026-11-26, fourth round",
    "1d82256": "first, 2026-11-27, fifth round",
    "8fca1b8": "first, 2026-11-27, sixth round",
    "92a0e63a": "first, 2026-11-28, seventh round",
    "f2ebcae2": "first, 2026-11-28, eighth round",
    "307dea55": "first, 2026-11-28, ninth round",
    "1b77e3fe": "first, 2026-11-29, tenth round",
    "b88dc900": "first, 2026-11-29, eleventh round",
    "78b5af1e": "first, 2026-11-29, twelfth round",
    "cbae8d20": "first, 2026-11-29, thirteenth round",
    "322a2f1b": "first, 2026-11-29, fourteenth round",
    "ca0aa76d": "first, 2026-11-30, fifteenth round",
    "0994b1ec": "first, 2026-11-30, sixteenth round",
    "68ce2637": "first, 2026-11-30, seventeenth round",
    "03f1d49f": "first, 2026-11-30, eighteenth round",
    "6a15b1f4": "first, 2026-11-30, nineteenth round",
    "bec29675": "first, 2026-11-30, twentieth round",
    "aa287f81": "first, 2026-11-30, twenty-first round",
    "c53ba3cf": "first, 2026-11-30, twenty-second round",
    "7b395332": "first, 2026-12-01, twenty-third round",
}
# the names of the rounds after the first, in that order
LATER = (
    "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
    "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth",
    "twentieth", "twenty-first", "twenty-second", "twenty-third",
)  # fmt: skip
SAID = {"all": "the whole job", "part": "a part of it"}


class Compared(NamedTuple):
    """An estimate of what a `metric` counts, its range in bytes, and its verdict."""

    estimated: int
    low: int
    high: int
    verdict: str
    metric: str = ""

    @property
    def ranged(self) -> bool:
        """True if the figure is compared with a range."""
        return self.metric in RANGES


class Kept(NamedTuple):
    """A figure that was kept back, in bytes (0: only whether the job ran), with the first comparison and today's.

    `first` is None where the code of that day had no word for the job.
    """

    record: Mapping[str, Any]
    measured: int
    most: int
    first: Compared | None
    now: Compared

    def error(self, of: Compared) -> float:
        """The relative error, positive where the estimate is too high; of a figure in GB or GiB, against the nearer."""
        return min((of.estimated / figure - 1 for figure in (self.measured, self.most)), key=abs)

    def inside(self, of: Compared) -> bool:
        """True if the range holds a value that the source may mean."""
        return of.low <= self.most and self.measured <= of.high

    def same_verdict(self, of: Compared) -> bool:
        """True if the job ran out of memory both by the estimate and in the record, or in neither."""
        return bool((of.verdict == "oom") == (self.record["verdict"] == "oom"))


def found() -> list[Kept]:
    """Every figure and verdict that was kept back and that a scenario can say, in whole or in part."""
    records = {r["id"]: r for r in answers.catalog().measurements if r["class"] == "blind"}
    return [_kept(records[r.id], r) for r in accuracy.residuals() if r.kind == "blind"]


def _kept(record: Mapping[str, Any], r: Residual) -> Kept:
    then, first = record["blind"]["first"], None
    if then:
        metric = then.get("metric", record["metric"])
        first = Compared(then["estimated_bytes"], then["low_bytes"], then["high_bytes"], then["verdict"], metric)
    return Kept(record, r.measured, r.most, first, Compared(r.counted, r.low, r.high, r.verdict, record["metric"]))


@cache
def unsaid_jobs() -> tuple[Mapping[str, Any], ...]:
    """The jobs that no scenario says, each with what is missing."""
    return tuple(parse_mapping(read_bytes(FILE, FILE.name), FILE.name)["jobs"])


def figures() -> list[Kept]:
    """The records whose source prints a figure."""
    return [one for one in found() if one.measured]


def figure(what: str) -> str:
    """A figure of the class: `count`, `unsaid`, `whole` (jobs said as a whole), or of the figures said as a whole today
    `median`, `p90`, `inside`; `first_median`, `first_p90` and `first_inside` of the first round's first comparison, of
    all then said; `second_count` to `twenty-third_count` and the like of later rounds', of jobs then said as a whole.
    """
    every, lost = figures(), sum(job["figure"] for job in unsaid_jobs())
    whole = [(one, one.now) for one in every if one.record["blind"]["said"] == "all"]
    first, *later = (compared(every, revision) for revision in ROUNDS)
    values = {"count": str(len(every) + lost), "unsaid": str(lost), "whole": str(len(whole)), **_summed(whole)}
    values |= {f"first_{name}": value for name, value in _summed(first).items()}
    for word, pairs in zip(LATER, later, strict=True):
        then = [(one, of) for one, of in pairs if one.record["blind"]["first"]["said"] == "all"]
        values |= {f"{word}_count": str(len(then))} | {f"{word}_{name}": it for name, it in _summed(then).items()}
    if what not in values:
        raise ValueError(f"no {what!r}; there is {', '.join(values)}")
    return values[what]


def compared(every: Iterable[Kept], revision: str) -> list[tuple[Kept, Compared]]:
    """Those of `every` that were first compared with `revision`, with that comparison."""
    return [(one, one.first) for one in every if one.first and one.record["blind"]["first"]["revision"] == revision]


def _summed(pairs: Sequence[tuple[Kept, Compared]]) -> dict[str, str]:
    """Their median, 90th percentile and number inside the range; `none` of no pairs, as in a part of the catalog."""
    if not pairs:
        return dict.fromkeys(("median", "p90", "inside"), "none")
    errors = sorted(abs(one.error(of)) for one, of in pairs)
    inside = [one.inside(of) for one, of in pairs if of.ranged]
    return {
        "median": f"{100 * median(errors):.1f} %",
        "p90": f"{100 * _ninetieth(errors):.0f} %",
        "inside": f"{sum(inside)} of {len(inside)}",
    }


def _ninetieth(errors: Sequence[float]) -> float:
    """The 90th percentile of sorted errors."""
    return errors[ceil(0.9 * len(errors)) - 1]


def summary() -> Table:
    """The errors of the first comparison and today's, of jobs said as a whole, in part, and all."""
    columns = (
        Column("said", "The scenario says"),
        Column("when", "Compared"),
        Column("figures", "Figures", kind="number"),
        Column("median", "Median error", "%", "number", 1),
        Column("p90", "90th percentile", "%", "number", 1),
        Column("inside", "Inside the range", kind="number"),
        Column("ranges", "of", kind="number"),
        Column("jobs", "Jobs that ran or died", kind="number"),
        Column("agree", "Verdict agrees", kind="number"),
    )
    rows = []
    for said in (*SAID, None):
        for revision, when in ROUNDS.items():
            then = compared(found(), revision)
            first = [pair for pair in then if said in (None, pair[0].record["blind"]["first"]["said"])]
            rows.append((Cell(SAID[said] if said else "either"), Cell(when), *_cells(first)))
        now = [(one, one.now) for one in found() if said in (None, one.record["blind"]["said"])]
        rows.append((Cell(SAID[said] if said else "either"), Cell("today"), *_cells(now)))
    caption = "Published figures that were kept back: the first comparison, and today's"
    note = (
        "An allocated figure is compared with the allocated peak, a reserved one with what is reserved, any other with "
        "all that the process takes. What no scenario says stands in the last table of this section."
    )
    return accuracy.table("blind", caption, columns, rows, RESTS_ON, note)


def _cells(pairs: Iterable[tuple[Kept, Compared]]) -> tuple[Cell, ...]:
    every = list(pairs)
    errors = sorted(abs(one.error(of)) for one, of in every if one.measured)
    inside = [one.inside(of) for one, of in every if one.measured and of.ranged]
    judged = [one.same_verdict(of) for one, of in every if one.record["verdict"] in ("fits", "oom")]
    return (
        Cell(len(errors)),
        Cell(100 * median(errors)) if errors else Cell(None, "—"),
        Cell(100 * _ninetieth(errors)) if errors else Cell(None, "—"),
        Cell(sum(inside)),
        Cell(len(inside)),
        Cell(len(judged)),
        Cell(sum(judged)),
    )


def one_by_one() -> Table:
    """Every figure with the first estimate and today's, and why it is missed."""
    columns = (
        records.LABEL,
        Column("metric", "Metric"),
        Column("printed", "Printed", "GiB"),
        Column("first", "At first", "GiB", "number", 1),
        Column("first_error", "Off by", "%", "number", 1),
        Column("now", "Today", "GiB", "number", 1),
        Column("error", "Off by", "%", "number", 1),
        Column("inside", "In the range"),
        Column("lacks", "Not said"),
        Column("open", "Left open by the source"),
        Column("why", "Why it is off"),
        records.ID,
    )
    rows = []
    for one in sorted(figures(), key=lambda one: str(one.record["id"])):
        record, none = one.record, Cell(None, "—")
        label, name = records.cells(record["id"])
        rows.append(
            (
                label,
                Cell(record["metric"]),
                Cell(_printed(one)),
                Cell(one.first.estimated / GiB) if one.first else none,
                Cell(100 * one.error(one.first)) if one.first else none,
                Cell(one.now.estimated / GiB, exact=one.now.estimated),
                Cell(100 * one.error(one.now)),
                Cell("yes" if one.inside(one.now) else "no") if one.now.ranged else Cell("—"),
                Cell(record["blind"]["lacks"] or ""),
                Cell(record["blind"].get("open", "")),
                Cell(record.get("explanation", "")),
                name,
            )
        )
    return accuracy.table("blind-rows", "Every figure that was kept back", columns, rows, RESTS_ON)


def _printed(one: Kept) -> str:
    return f"{one.measured / GiB:.1f}" + (f" to {one.most / GiB:.1f}" if one.most > one.measured else "")


def verdicts() -> Table:
    """Jobs of which the source prints only that they ran or died, against the verdicts."""
    kind = ("The scenario says", lambda r: SAID[_said(r)])
    caption = "Kept-back jobs that ran and that did not, against today's verdict"
    every = [r for r in accuracy.residuals() if r.kind == "blind" and r.metric == "verdict"]
    return accuracy.verdicts("blind-verdicts", caption, every, kind, RESTS_ON)


def _said(r: Residual) -> str:
    return str(next(x for x in answers.catalog().measurements if x["id"] == r.id)["blind"]["said"])


def unsaid() -> Table:
    """The jobs that no scenario says, and what is missing."""
    columns = (
        Column("job", "Source"),
        Column("framework", "Run by"),
        Column("figure", "Prints a figure"),
        Column("lacks", "No field says"),
        records.ID,
    )
    rows = [
        (
            Cell(name := records.source(row["url"]), f'<a href="{escape(row["url"])}">{escape(name)}</a>'),
            Cell(row["framework"]),
            Cell("yes" if row["figure"] else "no"),
            Cell(row["lacks"]),
            Cell(row["id"]),
        )
        for row in unsaid_jobs()
    ]
    rests_on = "Rows of measurements/blind/unsaid.yaml, of the same sources."
    return accuracy.table("blind-unsaid", "Kept-back jobs that no scenario describes", columns, rows, rests_on)
