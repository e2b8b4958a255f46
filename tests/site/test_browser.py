"""Pages in a real browser: nothing asked of anyone else, no error, readable at 360 pixels, in light and in dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe import SHOW, shuts_nobody_out
from browsing import PAGES, opened, until
from playwright.sync_api import Browser

# What a finger is to hit, by its own size or that of its label, and is smaller than 24 pixels
SMALL = """() => [...document.querySelectorAll('button, select, summary, input')]
  .map(e => [e, e.type === 'checkbox' || e.type === 'radio' ? e.closest('label') ?? e : e])
  .filter(([e, hit]) => e.checkVisibility({visibilityProperty: true, opacityProperty: true}) && hit.offsetWidth)
  .filter(([, hit]) => Math.min(hit.offsetWidth, hit.offsetHeight) < 24)
  .map(([e]) => e.outerHTML.slice(0, 90))"""


@pytest.mark.parametrize("path", PAGES)
def test_page_asks_nobody_else_complains_of_nothing_fits_a_phone_and_shuts_nobody_out(
    browser: Browser, origin: str, path: str
) -> None:
    page, requests, complaints = opened(
        browser, f"{origin}/{path}", color_scheme="light", viewport={"width": 360, "height": 740}
    )
    assert requests
    assert [r for r in requests if not r.startswith((origin, "data:", "blob:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.body.dataset.mdColorScheme") == "default"
    page.evaluate(SHOW)
    assert page.evaluate(SMALL) == []
    page.emulate_media(color_scheme="dark")
    until(page, "document.body.dataset.mdColorScheme === 'slate'")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.emulate_media(color_scheme="light")
    until(page, "document.body.dataset.mdColorScheme === 'default'")
    shuts_nobody_out(page)
    assert complaints == []
    page.context.close()


def test_a_finger_on_a_term_writes_its_meaning_and_takes_it_away(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/case-studies/reward-model-6x4090.html", has_touch=True)
    term = page.locator("article abbr[title]").first
    term.tap()
    assert page.locator(".meaning").inner_text().strip() == f"({term.get_attribute('title')})"
    term.tap()
    assert page.locator(".meaning").count() == 0
    page.context.close()


def test_tables_scroll_in_their_own_named_box_that_the_keyboard_reaches(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/what-fits/sft-full-8.html", viewport={"width": 360, "height": 740})
    boxes = page.locator("figure.computed .scroll")
    assert boxes.count() == 2
    box = page.locator("#fits-sft-full-8 .scroll")
    box.scroll_into_view_if_needed()
    # it is laid out only now that it is near
    until(page, "(e => e.scrollWidth > e.clientWidth)(document.querySelector('#fits-sft-full-8 .scroll'))")
    assert box.evaluate("e => document.getElementById(e.getAttribute('aria-labelledby')).textContent.length > 20")
    box.focus()
    before = box.locator("tbody th").first.bounding_box()
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('#fits-sft-full-8 .scroll').scrollLeft > 0")
    after = box.locator("tbody th").first.bounding_box()
    assert before and after and before["x"] == after["x"]
    page.context.close()


def test_pages_work_without_script_and_from_a_folder(browser: Browser, site: Path) -> None:
    page, requests, _ = opened(
        browser, (site / "case-studies/reward-model-6x4090.html").as_uri(), java_script_enabled=False
    )
    assert page.locator("#rm-6x4090 tbody tr").count() == 6
    assert page.locator("#rm-6x4090 .stack").first.evaluate("e => e.getBoundingClientRect().width") > 100
    page.locator("a:has-text('GeForce RTX 4090')").first.click()
    assert page.locator("h1").inner_text().startswith("GeForce RTX 4090")
    assert all(r.startswith(("file:", "data:")) for r in requests)
    page.context.close()


def test_colours_of_neighbouring_components_differ_in_both_schemes(browser: Browser, origin: str) -> None:
    for scheme in ("light", "dark"):
        page, _, _ = opened(browser, f"{origin}/method/index.html", color_scheme=scheme)
        colours = page.locator(".legend .swatch:not(.limit)").evaluate_all(
            "es => es.map(e => getComputedStyle(e).backgroundColor + getComputedStyle(e).backgroundImage)"
        )
        assert len(colours) > 10
        assert len(set(colours)) == len(colours)
        page.context.close()
