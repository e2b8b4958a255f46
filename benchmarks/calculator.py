"""Times of the calculator in a browser, on a built site: `python -m benchmarks.calculator [FOLDER]`.

An address of a job that the page does not show is opened: with nothing cached over a line of 50 Mbit/s, then again with
everything cached; then the length is changed a few times, and the GPU. Each time ends when there is something to read,
and once more when nothing is left to be compared; it stands beside the processor time that the browser took for it,
which says more where other programs run, too. It needs Linux, Chromium, and what `make test` sets up.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.site.browsing import ARGUMENTS, CHROMIUM, Host, packed, served, until

ROOT = Path(__file__).parents[1]
JOB = "model=qwen2.5-7b&task=dpo&gpu=a100-80-sxm&gpus=4&framework=trl"
CHANGES = {
    "seq_len": ("1024", "4096", "1536", "3072", "2048", "6144"),
    "gpu": ("h100-sxm", "rtx4090", "h200", "a100-40-sxm", "a40", "l40s"),
}
LINE = 50e6 / 8  # bytes a second
DELAY = 20  # milliseconds
ANSWERED = """words => {
  const box = document.querySelector('#calculator .answer');
  return box && !box.hidden && !box.ariaBusy && box.querySelector('.headline')?.textContent.includes(words);
}"""
WHOLE = "document.querySelector('#calculator .stop').hidden"
CHANGE = """([name, value]) => {
  const form = document.querySelector('#calculator form');
  form.elements[name].value = value;
  form.requestSubmit();
}"""
KEPT = "max-age=600"  # as hosts of static sites send it


class Took(NamedTuple):
    """Seconds of a clock, and of a processor."""

    clock: float
    processor: float

    def __str__(self) -> str:
        """Both, in words."""
        return f"{self.clock:.2f} s ({self.processor:.2f} s of a processor)"


class Watch:
    """Measures from where it is made."""

    def __init__(self) -> None:
        """Starts."""
        self.clock, self.processor = time.perf_counter(), spent()

    def read(self) -> Took:
        """The seconds since then."""
        return Took(time.perf_counter() - self.clock, spent() - self.processor)


def spent() -> float:
    """Processor seconds of all processes that descend from this one, the browser's among them, ended or not."""
    parents: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            parents[path.parent.name] = fields[1]
            seconds[path.parent.name] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    own = {str(os.getpid())}
    while more := {process for process, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(seconds[process] for process in own if process != str(os.getpid()))


class Cached(Host):
    """A host whose files a browser may keep."""

    def end_headers(self) -> None:
        """Adds the header that says so."""
        self.send_header("Cache-Control", KEPT)
        super().end_headers()


def opened(context: BrowserContext, address: str, *, slow: bool) -> tuple[Page, Took]:
    """The page of an address, and what it took until its answer is there."""
    page = context.new_page()
    if slow:
        line = {"offline": False, "latency": DELAY, "downloadThroughput": LINE, "uploadThroughput": LINE}
        context.new_cdp_session(page).send("Network.emulateNetworkConditions", line)
    watch = Watch()
    page.goto(address, wait_until="commit")
    until(page, ANSWERED, "Qwen2.5 7B", seconds=120)
    return page, watch.read()


def changed(page: Page, name: str, value: str) -> tuple[Took, Took]:
    """The time until there is an answer for another value of a field, and until it is whole."""
    watch = Watch()
    page.evaluate(CHANGE, [name, value])
    until(page, ANSWERED, "Qwen2.5 7B")
    shown = watch.read()
    until(page, WHOLE)
    return shown, watch.read()


def middle(times: Iterable[Took]) -> Took:
    """The median of each of both."""
    return Took(*(median(each) for each in zip(*times, strict=True)))


def measure(browser: Browser, origin: str) -> None:
    """Prints the times."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    address = f"{origin}/index.html?{JOB}"
    page, cold = opened(context, address, slow=True)
    page.close()
    page, warm = opened(context, address, slow=False)
    until(page, WHOLE)
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print(f"first answer, nothing cached, at 50 Mbit/s: {cold}")
    print(f"first answer, everything cached: {warm}")
    for name, values in CHANGES.items():
        shown, whole = zip(*(changed(page, name, value) for value in values), strict=True)
        print(f"a change of {name}, in the median: {middle(shown)}; whole {middle(whole)}")


def main() -> None:
    """Measures the site that `make site` has built, or the one in the folder that is named."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")
    for path in (folder / "assets/calculator").rglob("*.*"):
        packed(path, path.stat().st_mtime_ns)  # as hosts have it before anybody asks
    with sync_playwright() as playwright, served(folder, Cached) as origin:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        measure(browser, origin)
        browser.close()


if __name__ == "__main__":
    main()
