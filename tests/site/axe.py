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
# Hundreds of rows of a table, or lines of a listing, are made alike, and axe takes long over each: it sees those that
# have an element of a class not met before in that table or listing, and all where the whole site is looked at.
CUT = """() => {
  const met = new Map();
  for (const each of document.querySelectorAll("tbody tr, pre code > span")) {
    const whole = each.closest("table, pre");
    if (!met.has(whole)) met.set(whole, new Set());
    const kinds = [each, ...each.querySelectorAll("*")].map(e =>
      [e.parentElement.getAttribute("class"), e.tagName, e.getAttribute("class"), e.getAttributeNames()].join());
    if (kinds.every(kind => met.get(whole).has(kind))) each.remove();
    kinds.forEach(kind => met.get(whole).add(kind));
  }
}"""


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
    passed = {rule["id"] for rule in found["passes"]}
    if rules != CONTRAST:
        assert len(passed) > (15 if place == "html" else 5)
        assert "target-size" in passed | {v["id"] for v in found["violations"]}  # 24 pixels, or the room
    return [(v["id"], [n["html"] for n in v["nodes"][:3]]) for v in found["violations"]]


def shuts_nobody_out(page: Page, place: str = "html", rules: list[str] = RULES) -> None:
    """Nothing is found in a place of a page that was opened in light; in the dark, which changes colours alone, too."""
    bring(page)
    assert violations(page, place, rules) == []
    page.emulate_media(color_scheme="dark")
    until(page, "document.body.dataset.mdColorScheme === 'slate'")
    assert violations(page, place, CONTRAST) == []
