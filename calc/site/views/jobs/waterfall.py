"""The terms of a step's time as a drawing: each starts where those before it end, and what is hidden goes back."""

from __future__ import annotations

from itertools import accumulate, pairwise

from calc.site.tables.pictures import Key, Picture, box, text
from calc.throughput import Throughput

# of the drawing, in its units, so many that a phone shows it whole
LABEL, FIELD, WORDS, THICK, ROW = 185, 210, 62, 12, 18
KEYS = (Key("time", "time of its own"), Key("hidden", "time hidden behind another term"))


def picture(t: Throughput) -> Picture:
    """The terms below each other, in seconds, and their sum last."""
    ends = [0.0, *accumulate(term.seconds for term in t.terms)]
    rows = [(term.name, *span) for term, span in zip(t.terms, pairwise(ends), strict=True)]
    rows.append(("one step", 0.0, t.step_seconds))
    body = "".join(_row(name, start, end, ROW * n, FIELD / max(ends)) for n, (name, start, end) in enumerate(rows))
    words = "; ".join(f"{name}: {end - start:,.3f} s" for name, start, end in rows)
    hides = any(end < start for _, start, end in rows)
    return Picture(LABEL + FIELD + WORDS, ROW * len(rows), body, words, KEYS if hides else ())


def _row(name: str, start: float, end: float, top: float, each: float) -> str:
    """A term from `start` to `end`, in seconds that are `each` so many units wide."""
    left, right = LABEL + each * min(start, end), LABEL + each * max(start, end)
    bar = box(left, top + 3, right - left, THICK, "time" if end >= start else "hidden")
    return text(0, top + 13, name) + bar + text(right + 6, top + 13, f"{end - start:,.3f}", style="axis total")
