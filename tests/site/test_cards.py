"""The picture that others show beside a link to a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image
from sites import command

from calc.site.build import cards


def test_every_page_has_its_card_and_names_it_where_the_address_of_the_site_is_known(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADROOM_SITE_URL", "https://example.org/guide/")
    project = tiny
    built = command(project, "build", "site")
    assert built.returncode == 0, built.stderr[-2000:]
    site, named = project / "site", set()
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue
        (address,) = re.findall(r'<meta property="og:image" content="([^"]+)"', path.read_text("utf-8"))
        assert address.startswith("https://example.org/guide/cards/")
        card = site / address.removeprefix("https://example.org/guide/")
        named.add(card)
        with Image.open(card) as image:
            assert image.size == (1200, 630)
        assert card.stat().st_size < 60_000
    assert named == {p for p in (site / "cards").rglob("*.png")} and len(named) > 5


def test_a_long_title_stays_between_the_margins() -> None:
    image = cards.drawn("Reward model " * 12, "What to run instead, " * 30).convert("L")
    ground = image.getpixel((2, 600))
    right = image.crop((cards.SIZE[0] - cards.MARGIN + 4, 20, *cards.SIZE))
    assert right.getextrema() == (ground, ground)
