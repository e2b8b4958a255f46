"""What axe finds on a page that shuts a reader out, by the rules of WCAG."""

from __future__ import annotations

from typing import Any

from browsing import WHOLE, until
from playwright.sync_api import Page
from sites import ROOT

AXE = (ROOT / "node_modules/axe-core/axe.min.js").read_text("utf-8")
# levels A and AA of every version of WCAG that axe knows rules of
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
CONTRAST = ["color-contrast"]
# What is laid out only near the reader would be out of axe's sight; a style element would be against the policy.
SHOW = """() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("figure.computed { content-visibility: visible !important; }");
  document.adoptedStyleSheets.push(sheet);
}"""
# Rows of a table are made alike, and so are lines of a listing: axe takes long over hundreds of them, so that it sees
# the first ones, and all of them where the whole site is looked at.
CUT = """() => document.querySelectorAll("tbody tr:nth-child(n + 6), pre code > span:nth-of-type(n + 9)")
  .forEach(each => each.remove())"""


def bring(page: Page) -> None:
    """Loads axe into the page as it is, all of it laid out."""
    page.evaluate(SHOW)
    if not WHOLE:
        page.evaluate(CUT)
    page.evaluate(AXE)


def violations(page: Page, place: str = "html", rules: list[str] = RULES) -> list[tuple[str, list[str]]]:
    """The violations that axe finds in a place of the page, with up to three elements each."""
    found: dict[str, Any] = page.evaluate(
        "([place, rules]) => axe.run(place, {runOnly: rules, resultTypes: ['violations']})", [place, rules]
    )
    applied = {rule["id"] for kind in ("passes", "violations") for rule in found[kind]}
    assert rules == CONTRAST or (len(applied) > 5 and "target-size" in applied)  # 24 pixels, or the room
    return [(v["id"], [n["html"] for n in v["nodes"][:3]]) for v in found["violations"]]


def shuts_nobody_out(page: Page, place: str = "html") -> None:
    """Nothing is found in a place of a page that was opened in light; in the dark, which changes colours alone, too."""
    bring(page)
    assert violations(page, place) == []
    page.emulate_media(color_scheme="dark")
    until(page, "document.body.dataset.mdColorScheme === 'slate'")
    assert violations(page, place, CONTRAST) == []
