"""The evidence behind verdicts: comparable records, memory lost when it runs out, and how often 'fits' did fit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from math import sqrt

from calc.accuracy import calibration
from calc.accuracy.residuals import Residual, summary
from calc.answers import answers
from calc.base.units import GiB
from calc.estimate import verdict
from calc.memory import runtime
from calc.resolve.parse import parse
from calc.scenario.words import SHARDED, Family, Sharding
from calc.site.tables.pictures import Key, Picture, text
from calc.site.tables.tables import WORDS, Cell, Column, Table
from calc.site.views.accuracy import accuracy

# The way a model is spread over its GPUs decides which mechanisms make up its peak.
KINDS: Mapping[Family, str] = {
    "none": "whole",
    "ddp": "whole",
    "fsdp": "FSDP",
    "zero": "ZeRO",
    "megatron": "Megatron",
}
FULL, ADAPTERS = "full", "adapters"
FIELD, LEFT, TOP = 240, 52, 10  # of the drawing, in its own units
FOUND = {False: "tables and logs", True: "threads on runs that died"}
BINS = (0.0, verdict.TIGHT, 0.5, 0.8, verdict.FITS, 0.99, 1.0)


def kind(sharding: Sharding, method: str) -> tuple[str, str]:
    """The class of comparable cases: how the model is spread over its GPUs, and full training or adapters."""
    return KINDS[SHARDED[sharding].family], FULL if method == "full" else ADAPTERS


def anchor(of: tuple[str, str]) -> str:
    """The id of a class's row."""
    return f"rows-{of[0].lower()}-{of[1]}"


_CLASSES: dict[Hashable, tuple[str, str]] = {}  # by the fields of a job that decide its class


def rests_on(table: Table) -> list[tuple[str, str]]:
    """(id, words) of each class of records that a table's computed cells are comparable with."""
    found = set()
    for given in (cell.scenario for row in table.rows for cell in row if cell.scenario):
        said = [given.get(name) for name in ("framework", "task", "method", "sharding", "precision")]
        job = (*map(str, said), given.get("gpus", 1) > 1)
        if job not in _CLASSES:
            s = parse(given, catalog=answers.catalog())
            _CLASSES[job] = kind(s.sharding, s.method)
        found.add(_CLASSES[job])
    return [(anchor(of), ", ".join(of)) for of in sorted(found)]


def comparable() -> Table:
    """The records of each class: traced, measured and published."""
    columns = (
        Column("kind", "The model lies"),
        Column("method", "Trained"),
        Column("traced", "Traced", kind="number"),
        Column("median", "Median error", "%", "number", 2),
        Column("p95", "95th percentile", "%", "number", 2),
        Column("worst", "Worst", "%", "number", 2),
        Column("measured", "Measured", kind="number"),
        Column("measured_median", "Median error", "%", "number", 2),
        Column("measured_worst", "Worst", "%", "number", 2),
        Column("published", "Published", kind="number"),
        Column("agree", "Agree", kind="number"),
    )
    classes: dict[tuple[str, str], list[Residual]] = {
        (lies, trained): [] for lies in dict.fromkeys(KINDS.values()) for trained in (FULL, ADAPTERS)
    }
    for r in accuracy.residuals():
        classes[kind(r.sharding, r.method)].append(r)
    rows = []
    for of, members in classes.items():
        traced = [r for r in members if r.kind == "traced" and r.metric == "allocated"]
        others = [r for r in members if r.kind == "published"]
        real = [r for r in members if r.kind == "measured" and r.measured]
        errors = summary(traced) if traced else None
        figures = [100 * e for e in (errors.median, errors.p95, errors.worst)] if errors else [None] * 3
        off = summary(real) if real else None
        seen = [100 * e for e in (off.median, off.worst)] if off else [None] * 2
        rows.append(
            (
                Cell(of[0], f'<span id="{anchor(of)}">{of[0]}</span>'),
                Cell(of[1]),
                Cell(len(traced)),
                *(Cell(figure) for figure in figures),
                Cell(len(real)),
                *(Cell(figure, "" if off else "—") for figure in seen),
                Cell(len(others)),
                Cell(sum(r.agrees for r in others)),
            )
        )
    caption = "The records that a verdict is comparable with"
    note = (
        "whole: one GPU, or a copy on each. A table's line 'How far off' names the rows here that its verdicts rest on."
    )
    return Table(
        "calibration-classes", caption, columns, tuple(rows), accuracy.ASSUMPTIONS, note, versions=answers.versions()
    )


@cache
def judged() -> tuple[calibration.Outcome, ...]:
    """The outcomes of published jobs."""
    return tuple(calibration.outcomes(accuracy.residuals(), answers.catalog()))


def outcomes() -> Table:
    """The share of jobs that ran, by the probability of fitting that was estimated for them."""
    columns = (
        Column("found", "Found in"),
        Column("said", "Probability said", "%"),
        Column("verdict", "Verdict"),
        Column("jobs", "Published jobs", kind="number"),
        Column("sources", "Sources", kind="number"),
        Column("ran", "Ran", kind="number"),
        Column("share", "Ran", "%", "number"),
        Column("mean", "Said, in the mean", "%", "number"),
    )
    rows = []
    for sought, low, high, found in _binned():
        ran = sum(o.ran for o in found)
        rows.append(
            (
                Cell(FOUND[sought]),
                Cell(f"{100 * low:g} to {100 * high:g}"),
                Cell(WORDS[verdict.word(low)]),
                Cell(len(found)),
                Cell(len({o.source for o in found})),
                Cell(ran),
                Cell(100 * ran / len(found)),
                Cell(100 * sum(o.probability for o in found) / len(found)),
            )
        )
    return Table(
        "calibration-outcomes",
        "How often a job ran that was said to fit",
        columns,
        tuple(rows),
        accuracy.PUBLISHED,
        note=(
            "For each job its own source was left out of what the probability is computed from. Threads were searched "
            "for runs that died: what share of them ran says nothing, and the chart leaves them out."
        ),
        versions=answers.versions(),
        picture=curve(),
    )


def curve() -> Picture:
    """The calibration curve: the share that ran over the estimated probability, with its 95 % interval."""
    dots, said = "", []
    for sought, low_said, high_said, found in _binned():
        if not sought:
            ran, n = sum(o.ran for o in found), len(found)
            x = LEFT + FIELD * sum(o.probability for o in found) / n
            low, high = wilson(ran, n)
            dots += (
                f'<path class="interval" d="M{x:.1f} {TOP + FIELD * (1 - low):.1f}V{TOP + FIELD * (1 - high):.1f}"/>'
                f'<circle class="c-logits" cx="{x:.1f}" cy="{TOP + FIELD * (1 - ran / n):.1f}" '
                f'r="{3 + sqrt(n) / 2:.1f}"/>'
            )
            said.append(f"of {n} that were said to fit with {100 * low_said:g} to {100 * high_said:g} % {ran} ran")
    ticks = "".join(
        f'<path class="grid" d="M{LEFT + FIELD * t / 100} {TOP}v{FIELD}M{LEFT} {TOP + FIELD * (1 - t / 100)}h{FIELD}"/>'
        f"{text(LEFT + FIELD * t / 100, TOP + FIELD + 16, str(t), 'middle')}"
        f"{text(LEFT - 6, TOP + FIELD * (1 - t / 100) + 4, str(t), 'end')}"
        for t in (0, 20, 50, 80, 100)
    )
    body = (
        f'{ticks}<path class="even" d="M{LEFT} {TOP + FIELD}l{FIELD} {-FIELD}"/>{dots}'
        f"{text(LEFT + FIELD / 2, TOP + FIELD + 34, 'said to fit, %', 'middle')}"
        f'<g transform="translate(12 {TOP + FIELD / 2}) rotate(-90)">{text(0, 0, "ran, %", "middle")}</g>'
    )
    keys = (Key("c-logits", "jobs of published tables, with the 95 % interval"), Key("even", "as said"))
    words = f"{figure('jobs')} jobs of published tables: {'; '.join(said)}"
    return Picture(LEFT + FIELD + 16, TOP + FIELD + 40, body, words, keys)


def wilson(k: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of which `k` of `n` were seen (E. B. Wilson, 1927)."""
    z, p = 1.96, k / n
    middle, half = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def _binned() -> Iterator[tuple[bool, float, float, list[calibration.Outcome]]]:
    for sought in (False, True):
        for low, high in pairwise(BINS):
            found = [o for o in judged() if o.sought is sought and low <= o.probability < high + (high == 1)]
            if found:
                yield sought, low, high, found


def fragmentation() -> Table:
    """Memory lost to fragmentation when it runs out, by quantile, and how many messages of other sources lose less."""
    columns = (
        Column("quantile", "Of all messages", "%", "number"),
        Column("share", "Lost at most", "%", "number", 2),
        Column("covered", "Of messages whose source was left out", "%", "number"),
    )
    places = [place for _, place in calibration.covered(answers.catalog())]
    shares = runtime.FRAGMENTATION
    rows = []
    for q in (0.25, 0.5, 0.75, 0.9, 0.95) if places else ():
        below = 100 * sum(place <= q for place in places) / len(places)
        rows.append((Cell(100 * q), Cell(100 * shares[round(q * len(shares) - 0.5)]), Cell(below)))
    caption = "What is lost when memory runs out, as a share of what was asked for"
    rests = (
        f"{len(places)} messages of training runs that died of a small request, in measurements/exhausted, each with "
        "its link and words."
    )
    return Table("calibration-held-back", caption, columns, tuple(rows), rests, versions=answers.versions())


def figure(what: str) -> str:
    """A figure of the calibration, by name.

    `jobs`: jobs of tables and logs; `fitted`: those said to fit; `ran`: those of these that ran. `died`: all jobs that
    died; `foreseen`: those of them called out of memory. `messages`: out-of-memory messages. `formula` and `context`:
    the spreads of both.

    `24` and `80`: the share of a card of so many GiB that tensors may fill with the verdict still `fits`.
    """
    said = [o for o in judged() if o.probability >= verdict.FITS and not o.sought]
    died = [o for o in judged() if not o.ran]
    match what:
        case "jobs":
            return str(sum(not o.sought for o in judged()))
        case "died":
            return str(len(died))
        case "foreseen":
            return str(sum(o.probability < verdict.TIGHT for o in died))
        case "fitted":
            return str(len(said))
        case "ran":
            return str(sum(o.ran for o in said))
        case "messages":
            return str(len(answers.catalog().exhausted))
        case "formula":
            return f"{100 * verdict.FORMULA_SPREAD:.1f} %"
        case "context":
            return f"{verdict.CONTEXT_SPREAD / GiB:.2f} GiB"
        case "24" | "80":
            return f"{100 * _largest(int(what)):.0f} % of {what} GiB"
    raise ValueError(f"no {what!r}; there is jobs, fitted, ran, died, foreseen, messages, formula, context, 24, 80")


def _largest(card: int) -> float:
    """The largest share of a lone card of `card` GiB that tensors may fill and still fit, to a thousandth."""
    usable = card * GiB
    outside = sum(line.bytes for line in runtime.process("", 0, nvlink=False))
    for thousandths in range(1000, 0, -1):
        tensors = usable * thousandths // 1000
        p = verdict.fit_probability(tensors + outside, tensors, verdict.deviation(tensors), usable)
        if p >= verdict.FITS:
            return thousandths / 1000
    return 0.0
