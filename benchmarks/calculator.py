"""Times of the calculator in a browser, on a built site: `python -m benchmarks.calculator [FOLDER]`.

An address of a job that the page does not show is opened: with nothing cached over a line of 50 Mbit/s, then again with
everything cached; then a field is changed a few times. Each time ends when the answer is there. It needs Chromium, and
what `make test` sets up.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.site.browsing import ARGUMENTS, CHROMIUM, Host, served, until

ROOT = Path(__file__).parents[1]
JOB = "model=qwen2.5-7b&task=dpo&gpu=a100-80-sxm&gpus=4&framework=trl"
LENGTHS = (1024, 4096, 1536, 3072, 2048, 6144)
LINE = 50e6 / 8  # bytes a second
DELAY = 20  # milliseconds
ANSWERED = """words => {
  const box = document.querySelector('#calculator .answer');
  return box && !box.hidden && !box.ariaBusy && box.querySelector('.headline')?.textContent.includes(words);
}"""
CHANGE = """length => {
  const form = document.querySelector('#calculator form');
  form.seq_len.value = length;
  form.requestSubmit();
}"""
KEPT = "max-age=600"  # as hosts of static sites send it


class Cached(Host):
    """A host whose files a browser may keep."""

    def end_headers(self) -> None:
        """Adds the header that says so."""
        self.send_header("Cache-Control", KEPT)
        super().end_headers()


def opened(context: BrowserContext, address: str, *, slow: bool) -> tuple[Page, float]:
    """The page of an address, and the seconds until its answer is there."""
    page = context.new_page()
    if slow:
        line = {"offline": False, "latency": DELAY, "downloadThroughput": LINE, "uploadThroughput": LINE}
        context.new_cdp_session(page).send("Network.emulateNetworkConditions", line)
    start = time.perf_counter()
    page.goto(address, wait_until="commit")
    until(page, ANSWERED, "Qwen2.5 7B", seconds=120)
    return page, time.perf_counter() - start


def changed(page: Page, length: int) -> float:
    """The seconds until the answer for sequences of another length is there."""
    start = time.perf_counter()
    page.evaluate(CHANGE, length)
    until(page, ANSWERED, "Qwen2.5 7B")
    return time.perf_counter() - start


def measure(browser: Browser, origin: str) -> None:
    """Prints the three times."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    address = f"{origin}/index.html?{JOB}"
    page, cold = opened(context, address, slow=True)
    page.close()
    page, warm = opened(context, address, slow=False)
    times = [changed(page, length) for length in LENGTHS]
    print(f"first answer: {cold:.1f} s with nothing cached at 50 Mbit/s, {warm:.1f} s with everything cached")
    print(f"a change: {median(times):.2f} s in the median, {max(times):.2f} s at most")


def main() -> None:
    """Measures the site that `make site` has built, or the one in the folder that is named."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")
    with sync_playwright() as playwright, served(folder, Cached) as origin:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        measure(browser, origin)
        browser.close()


if __name__ == "__main__":
    main()
