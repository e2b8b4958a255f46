"""Pages in a real browser: nothing asked of anyone else, no error, readable at 360 pixels, in light and in dark."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--no-first-run",
]
KINDS = [
    "index.html",
    "hardware/index.html",
    "hardware/gpus/rtx4090.html",
    "models/index.html",
    "models/llama-3-8b.html",
    "recipes/index.html",
    "recipes/grpo.html",
    "case-studies/reward-model-6x4090.html",
    "case-studies/ppo-llama-3-8b-4xa40.html",
    "method/activations.html",
    "method/ledger.html",
    "method/weights.html",
    "reference/scenario.html",
    "reference/about.html",
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture(scope="session")
def origin(site: Path) -> Iterator[str]:
    """The address of the built site."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, else Playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


def opened(browser: Browser, address: str, **context: Any) -> tuple[Page, list[str], list[str]]:
    """A page, every request it made, and every complaint of its console."""
    page = browser.new_context(**context).new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda r: requests.append(r.url))
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("response", lambda r: complaints.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    page.goto(address)
    page.wait_for_load_state("networkidle")
    return page, requests, complaints


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_asks_nobody_else_complains_of_nothing_and_fits_a_phone(
    browser: Browser, origin: str, kind: str, scheme: str
) -> None:
    page, requests, complaints = opened(
        browser, f"{origin}/{kind}", color_scheme=scheme, viewport={"width": 360, "height": 740}
    )
    assert requests
    assert [r for r in requests if not r.startswith((origin, "data:", "blob:"))] == []
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    wide = page.evaluate("document.body.dataset.mdColorScheme")
    assert wide == {"light": "default", "dark": "slate"}[scheme]
    page.context.close()


def test_tables_scroll_in_their_own_named_box_that_the_keyboard_reaches(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/index.html", viewport={"width": 360, "height": 740})
    boxes = page.locator("figure.computed .scroll")
    assert boxes.count() == 2
    box = boxes.first
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")
    assert box.evaluate("e => document.getElementById(e.getAttribute('aria-labelledby')).textContent.length > 20")
    box.focus()
    before = box.locator("tbody th").first.bounding_box()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.scroll').scrollLeft > 0")
    after = box.locator("tbody th").first.bounding_box()
    assert before and after and before["x"] == after["x"]
    page.context.close()


def test_search_finds_a_card(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/index.html", viewport={"width": 1280, "height": 900})
    # what is typed before the theme's script and its index have arrived is not heard: type until an answer comes
    page.wait_for_function("() => window.component$ !== undefined")
    box, found = page.locator("input.md-search__input"), page.locator(".md-search-result__link")
    for _ in range(10):
        box.fill("")
        box.press_sequentially("RTX 4090")
        page.wait_for_timeout(1500)
        if found.count():
            break
    assert "rtx4090" in (page.locator(".md-search-result__link").first.get_attribute("href") or "")
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
