"""A table as a drawing: SVG elements whose colours are classes, so that a page and a file each have their own.

`docs/assets/drawings.css` has the rules, for the page that shows a drawing and for the file that a reader takes away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

NARROW = 460  # units of a drawing that a phone shows whole; a wider one scrolls in its box
LINE = 15  # the height of a line of text, in units
LETTER = 7.2  # the width of a letter


class Key(NamedTuple):
    """A colour of a drawing, as a class, with its meaning, and its shape, a path of ten units, if that is no square."""

    style: str
    words: str
    shape: str = "h10v10h-10z"


class Picture(NamedTuple):
    """A drawing of so many units: its SVG elements, the same in words, and the key to its colours."""

    width: float
    height: float
    body: str
    words: str
    keys: tuple[Key, ...] = ()


def svg(p: Picture, label: str) -> str:
    """The drawing as a page shows it; `label` is the id of its caption."""
    size = f'width="{p.width:.0f}" height="{p.height:.0f}" viewBox="0 0 {p.width:.0f} {p.height:.0f}"'
    drawn = f'<svg class="drawing" {size} role="img" aria-label="{escape(p.words)}">{p.body}</svg>'
    if p.width <= NARROW:
        return drawn
    return f'<div class="drawn" tabindex="0" role="group" aria-labelledby="{label}">{drawn}</div>'


def legend(keys: Iterable[Key]) -> str:
    """The key to the colours, as a list."""
    items = "".join(
        f'<li><span class="swatch {key.style}" aria-hidden="true"></span>{escape(key.words)}</li>' for key in keys
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def text(x: float, y: float, words: str, anchor: str = "start", style: str = "axis") -> str:
    """Words on a line at `y`, which start, end or have their middle at `x`."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def lines(x: float, y: float, words: Sequence[str]) -> str:
    """A sentence in lines below each other, the first at `y`: one element, so that it can be said otherwise."""
    spans = "".join(f'<tspan x="{x:.1f}" y="{y + LINE * n:.1f}">{escape(line)}</tspan>' for n, line in enumerate(words))
    return f'<text class="axis">{spans}</text>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    """A rectangle in the colour of a class."""
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def line(x: float, y: float, dx: float, dy: float, style: str) -> str:
    """A straight line from a point, so far to the right and down."""
    return f'<path class="{style}" d="M{x:.1f} {y:.1f}l{dx:.1f} {dy:.1f}"/>'


def fits(words: str, width: float) -> bool:
    """True if the words find room in so many units."""
    return LETTER * len(words) <= width
