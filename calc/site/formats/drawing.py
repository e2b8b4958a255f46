"""A table's drawing as a file, SVG and PNG: with its caption, the key to its colours, its source and its versions."""

from __future__ import annotations

import re
import textwrap
from functools import cache
from html import escape
from importlib.resources import files

import resvg_py

from calc.base.project import ROOT
from calc.base.reading import decode
from calc.site.formats import cite
from calc.site.tables.pictures import LETTER, LINE, Key, Picture, box, line, text
from calc.site.tables.tables import Table

STYLES = [ROOT / "docs" / "assets" / name for name in ("extra.css", "drawings.css")]
# the page's own colours, which the theme names, as they are on paper
PAPER = {"md-default-bg-color": "#fff", "md-default-fg-color": "#222"}
ROOTS, SET, ASKED = (
    re.compile(r":root\s*{(.*?)}", re.S),
    re.compile(r"--([\w-]+):\s*([^;]+);"),
    re.compile(r"var\(--([\w-]+)\)"),
)
RULE = re.compile(r"^\.drawing [^{]*{[^}]*}$", re.M)
EDGE, LEAST = 16, 460  # the margin around everything, and the width below which no caption finds room
ZOOM = 1.5  # pixels for each unit
FONT = "Source Sans Pro"


def to_svg(table: Table, picture: Picture, address: str) -> str:
    """The drawing with all that it needs elsewhere; `address` is where the table stands."""
    width = max(picture.width, LEAST)
    caption = textwrap.wrap(table.caption, int(width / LETTER))
    source = textwrap.wrap(_source(table, address), int(width / LETTER * 1.2), break_long_words=True)
    keys = _keys(picture.keys, width)
    parts = [
        *(text(0, 15 + 18 * n, words, style="heading") for n, words in enumerate(caption)),
        *(f'<g transform="translate({x:.0f} {18 * len(caption) + 12 + y:.0f})">{_key(key)}</g>' for key, x, y in keys),
    ]
    top = 18 * len(caption) + 14 + (keys[-1][2] + LINE + 8 if keys else 0)
    parts.append(f'<g transform="translate(0 {top:.0f})">{picture.body}</g>')
    below = top + picture.height + 22
    parts += [text(0, below + 14 * n, words, style="source") for n, words in enumerate(source)]
    whole, high = width + 2 * EDGE, below + 14 * len(source) + EDGE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" width="{whole:.0f}" height="{high:.0f}" '
        f'viewBox="0 0 {whole:.0f} {high:.0f}" role="img" font-family="{FONT}, Helvetica, Arial, sans-serif">'
        f"<title>{escape(table.caption)}</title><desc>{escape(picture.words)}</desc><style>{_style()}</style>"
        f"{box(0, 0, whole, high, 'ground')}"
        f'<g transform="translate({EDGE} {EDGE})">{"".join(parts)}</g></svg>\n'
    )


def to_png(svg: str) -> bytes:
    """The same as pixels; the same drawing gives the same bytes."""
    return bytes(resvg_py.svg_to_bytes(svg, skip_system_fonts=True, font_files=list(_fonts()), zoom=ZOOM))


def _source(table: Table, address: str) -> str:
    return f"Headroom, {cite.edition(table.versions)}; {cite.LICENCE}. {address}"


def _keys(keys: tuple[Key, ...], width: float) -> list[tuple[Key, float, float]]:
    """The key's entries with their places, in as many lines as they need."""
    placed: list[tuple[Key, float, float]] = []
    x = y = 0.0
    for key in keys:
        takes = 36 + 0.9 * LETTER * len(key.words)
        if placed and x + takes > width:
            x, y = 0.0, y + LINE + 3
        placed.append((key, x, y))
        x += takes
    return placed


def _key(key: Key) -> str:
    """A colour as the drawing has it, a line or a shape, with its meaning."""
    drawn = f'<path class="{key.style}" d="M3 1{key.shape}"/>'
    mark = line(0, 6, 16, 0, key.style) if key.style in ("limit", "even") else drawn
    return mark + text(20, 11, key.words)


@cache
def _style() -> str:
    """The rules of drawings, each colour in the place of its name."""
    css = [decode(path.read_bytes(), path.name) for path in STYLES]
    colours = PAPER | {name: value for text in css for root in ROOTS.findall(text) for name, value in SET.findall(root)}
    fills = [f".{name}{{fill:{value}}}" for name, value in colours.items() if name.startswith("c-")]
    own = [*fills, f".ground{{fill:{PAPER['md-default-bg-color']}}}", ".drawing .source { font-size: 11px; }"]
    return "\n".join(ASKED.sub(lambda found: colours[found[1]], rule) for rule in [*RULE.findall("\n".join(css)), *own])


@cache
def _fonts() -> tuple[str, ...]:
    """The fonts of the pages' cards."""
    folder = files("font_source_sans_pro") / "files"
    return tuple(str(path) for face in ("Regular", "Bold") for path in [folder / f"SourceSansPro-{face}.ttf"])
