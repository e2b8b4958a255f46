"""The preview picture of each page, 1200 × 630 pixels, that other sites show with a link: its title and description.

A translation has the card of its original, whose letters the font has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from importlib.resources import as_file, files
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from calc.site.i18n.languages import LANGUAGES

FOLDER = "cards"
SIZE = (1200, 630)
MARGIN = 80
# Drawn in shades, from the ground to white; the one above the ground stands for the band.
GROUND, BAND, DIM, BRIGHT = 0, 1, 200, 255
NAVY, ORANGE = (0x1D, 0x3B, 0x53), (0xE6, 0x9F, 0x00)
PALETTE = [round(c + (255 - c) * shade / 255) for shade in range(256) for c in NAVY]
PALETTE[3:6] = ORANGE
NAME = "Headroom"
TITLE = re.compile(r"<title>(.*?)</title>", re.S)
ABOUT = re.compile(r'<meta name="description" content="([^"]*)"')


def write(site: Path) -> None:
    """Draws the card of every page of the built site."""
    for path in sorted(site.rglob("*.html")):
        place = path.relative_to(site)
        html = path.read_text("utf-8")
        about = ABOUT.search(html)
        if place.parts[0] in LANGUAGES or place.name == "404.html" or not about:
            continue
        title = TITLE.search(html)
        card = site / FOLDER / place.with_suffix(".png")
        card.parent.mkdir(parents=True, exist_ok=True)
        words = unescape(title[1]).removesuffix(f" - {NAME}").strip() if title else NAME
        drawn(words, unescape(about[1])).save(card)


def drawn(title: str, about: str) -> Image.Image:
    """The card of one page."""
    image = Image.new("L", SIZE, GROUND)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, SIZE[0], 16), fill=BAND)
    draw.text((MARGIN, 70), NAME, DIM, _font("Semibold", 40))
    top = 150
    for text, size, face, colour, most in ((title, 72, "Bold", BRIGHT, 3), (about, 38, "Regular", DIM, 4)):
        font = _font(face, size)
        for words in list(_lines(draw, text, font))[:most]:
            draw.text((MARGIN, top), words, colour, font)
            top += round(1.25 * size)
        top += 30
    image.putpalette(PALETTE)
    return image


def _lines(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont) -> Iterator[str]:
    """A text in lines that fit between the margins."""
    line = ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and draw.textlength(longer, font) > SIZE[0] - 2 * MARGIN:
            yield line
            longer = word
        line = longer
    yield line


@cache
def _font(face: str, size: int) -> ImageFont.FreeTypeFont:
    with as_file(files("font_source_sans_pro") / "files" / f"SourceSansPro-{face}.ttf") as path:
        return ImageFont.truetype(str(path), size)
