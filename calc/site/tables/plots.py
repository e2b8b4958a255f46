"""Memory over sequence length or number of GPUs as SVG: colours from the page's style, text that stays text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import log2
from typing import NamedTuple

from calc.base.units import GiB
from calc.site.tables import charts
from calc.site.tables.pictures import LETTER, LINE, Picture, text
from calc.site.tables.tables import WORDS

# the drawing in its own units, small enough that a phone shows its text at a readable size
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BELOW = 420, 330, 40, 28, 10, 42
FIELD, DEEP = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BELOW
# The words for a verdict, longest first, each with the width that it needs: narrow bands get the shorter ones.
SAID = {
    "fits": ((WORDS["fits"], 30),),
    "tight": ((WORDS["tight"], 32),),
    "oom": ((WORDS["oom"], 96), ("OOM", 34)),
}


class Point(NamedTuple):
    """A point on the axis: the bytes that one GPU needs there, by component, and the verdict."""

    at: int
    parts: Mapping[str, int]
    verdict: str

    @property
    def bytes(self) -> int:
        """The sum of all components."""
        return sum(self.parts.values())


class Band(NamedTuple):
    """A stretch of the axis with one verdict."""

    verdict: str
    start: float
    end: float


class Plot(NamedTuple):
    """Points from left to right on a logarithmic axis called `axis`, the card's limit in bytes, and the bands.

    `steps`: the places between the points do not exist, so that each point is drawn as a column of its own.
    """

    id: str
    points: Sequence[Point]
    bands: Sequence[Band]
    limit: int
    axis: str
    words: str
    steps: bool

    @property
    def top(self) -> float:
        """The GiB at the upper edge of the drawing's field."""
        return 1.12 * max(self.limit, *(p.bytes for p in self.points)) / GiB

    def y(self, n_bytes: float) -> float:
        """The vertical coordinate of so many bytes."""
        return TOP + DEEP * (1 - n_bytes / GiB / self.top)

    def x(self, at: float) -> float:
        """The horizontal coordinate of a place on the axis; columns leave half a step free at both ends."""
        first, last = self.points[0].at, self.points[-1].at
        free = 0.5 * FIELD / len(self.points) if self.steps else 0.0
        return LEFT + free + (FIELD - 2 * free) * log2(at / first) / max(log2(last / first), 1e-9)


def picture(p: Plot) -> Picture:
    """The plot as a drawing."""
    components = charts.ordered([c for point in p.points for c, n in point.parts.items() if n])
    shapes = _columns(p, components) if p.steps else _areas(p, components)
    hatch = f"{p.id}-hatch"
    body = (
        f'<pattern id="{hatch}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path class="hatch" d="M0 0V7"/></pattern>{"".join(_bands(p, hatch))}{"".join(_grid(p))}{"".join(shapes)}'
        f"{_limit(p)}{''.join(_numbers(p))}"
        f"{text(LEFT + FIELD / 2, HEIGHT - 4, p.axis, 'middle')}{text(4, TOP - 10, 'GiB')}"
    )
    return Picture(WIDTH, HEIGHT, body, p.words, charts.keys(components, "what a process can use"))


def _bands(p: Plot, hatch: str) -> Iterator[str]:
    """One band per verdict behind everything, with its word on top; bands out of memory are also hatched."""
    for band in p.bands:
        left, right = _ends(p, band)
        room, middle = right - left, (left + right) / 2
        yield f'<rect class="band {band.verdict}" x="{left:.1f}" y="{TOP}" width="{room:.1f}" height="{DEEP}"/>'
        if band.verdict == "oom":
            yield f'<rect fill="url(#{hatch})" x="{left:.1f}" y="{TOP}" width="{room:.1f}" height="{DEEP}"/>'
        for word in [word for word, needed in SAID[band.verdict] if room >= needed][:1]:
            yield text(middle, TOP - 10, word, "middle", f"word {band.verdict}")


def _ends(p: Plot, band: Band) -> tuple[float, float]:
    """The left and right edge of a band; at the ends of the axis it extends to the field's edge."""
    left = LEFT if band.start <= p.points[0].at else p.x(band.start)
    right = LEFT + FIELD if band.end >= p.points[-1].at else p.x(band.end)
    return left, right


def tick(top: float) -> int:
    """The distance between the marks of an axis that ends at `top`."""
    return next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if top / s <= 6)


def _grid(p: Plot) -> Iterator[str]:
    for gib in range(0, int(p.top) + 1, tick(p.top)):
        y = p.y(gib * GiB)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}h{FIELD}"/>'
        yield text(LEFT - 5, y + 4, f"{gib:,}", "end")
    for point in p.points:
        x = p.x(point.at)
        yield text(x, TOP + DEEP + 16, _short(point.at), _anchor(x, 12))


def _short(n: int) -> str:
    """A number in short: 512, 1k, 32k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n:,}"


def _anchor(x: float, room: float) -> str:
    """The text anchor: middle, but the start or the end at an edge, so that text stays within the field."""
    return "end" if x > LEFT + FIELD - room else "start" if x < LEFT + room else "middle"


def _areas(p: Plot, components: Sequence[str]) -> Iterator[str]:
    """One stacked area per component; its name inside at the right end, if the whole of it finds room there."""
    below = [0] * len(p.points)
    names = []
    for c in components:
        above = [n + point.parts.get(c, 0) for n, point in zip(below, p.points, strict=True)]
        there = [f"{p.x(q.at):.1f} {p.y(n):.1f}" for q, n in zip(p.points, above, strict=True)]
        back = [f"{p.x(q.at):.1f} {p.y(n):.1f}" for q, n in zip(p.points, below, strict=True)]
        yield f'<path class="c-{c}" d="M{"L".join([*there, *reversed(back)])}Z"/>'
        start = LEFT + FIELD - 6 - LETTER * len(charts.name(c))
        top, bottom = max(_height(p, above, start), p.y(above[-1])), min(_height(p, below, start), p.y(below[-1]))
        if bottom - top >= LINE:
            y = (bottom + top) / 2 + 4
            names.append(
                f'<text class="name" x="{LEFT + FIELD - 6}" y="{y:.1f}" text-anchor="end">{charts.name(c)}</text>'
            )
        below = above
    yield from names


def _height(p: Plot, edge: Sequence[int], x: float) -> float:
    """The height of an area's edge at a horizontal coordinate, interpolated between points."""
    for (left, low), (right, high) in pairwise([(p.x(q.at), p.y(n)) for q, n in zip(p.points, edge, strict=True)]):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return p.y(edge[-1])


def _columns(p: Plot, components: Sequence[str]) -> Iterator[str]:
    """One stacked column per point."""
    wide = min(44.0, 0.7 * FIELD / len(p.points))
    for point in p.points:
        base = 0
        for c in components:
            n = point.parts.get(c, 0)
            y, high = p.y(base + n), p.y(base) - p.y(base + n)
            x = p.x(point.at) - wide / 2
            yield f'<rect class="c-{c}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"/>'
            base += n


def _limit(p: Plot) -> str:
    """The card's limit; its number is where there is most room: curves rise to the right, columns to the left."""
    y = p.y(p.limit)
    x, anchor = (LEFT + FIELD - 5, "end") if p.steps else (LEFT + 5, "start")
    words = text(x, y - 4, f"{p.limit / GiB:.1f} usable", anchor, "name")
    return f'<path class="limit" d="M{LEFT} {y:.1f}h{FIELD}"/>{words}'


def _numbers(p: Plot) -> Iterator[str]:
    """The total of each point, above it."""
    for point in p.points:
        x, y = p.x(point.at), p.y(point.bytes)
        if not p.steps:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
        yield text(x, y - 6, f"{point.bytes / GiB:,.1f}", _anchor(x, 14), "name total")
