"""`make serve`: a saved change in data, code or prose is on the page that shows it; no other page is made again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import opened
from playwright.sync_api import Browser
from sites import command, tiny

PATIENCE = 15  # seconds; a quiet machine needs two
RELOADS = re.compile(rb"<script>\nvar livereload.*?</script>", re.S)
ALLOWED = re.compile(rb"(?<=script-src 'self') 'sha256-[^']*'")
LEFT_OUT = "in a moment"


class Served:
    """A project that tests may change, and its preview."""

    def __init__(self, project: Path, address: str) -> None:
        self.project, self.address = project, address

    def get(self, page: str) -> str:
        """What a page shows now, without the script that reloads it, and its hash; empty while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/{page}", timeout=PATIENCE) as answer:
                found, reloads = RELOADS.subn(b"", answer.read())
                return ALLOWED.sub(b"", found, count=reloads).decode() if reloads else found.decode()
        except OSError:
            return ""

    def wait(self, page: str, text: str, without: str = "") -> str:
        """What the page shows once it has a text, and has another no more."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            shown = self.get(page)
            if text in shown and not (without and without in shown):
                return shown
            time.sleep(0.1)
        raise AssertionError(f"{page} never shows {text!r}: {self.log()[-1500:]}")

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.project / name
        text = path.read_text("utf-8")
        assert old in text
        path.write_text(text.replace(old, new), "utf-8")

    def log(self) -> str:
        return (self.project / "serve.log").read_text("utf-8")

    def made(self) -> list[str]:
        """The sources of the pages that were made so far."""
        return re.findall(r"Making (.*)", self.log())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """The preview of a small project."""
    project = tiny(tmp_path / "project")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    with (project / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "calc.site", "serve", "--address", address],
            cwd=project,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield Served(project, address)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=20)


CARD = "hardware/gpus/rtx4090"


def test_changes_of_data_code_and_prose_reach_every_page_that_shows_them(served: Served) -> None:
    served.wait(f"{CARD}.html", "23.64")
    served.edit(f"{CARD}.yaml", "value: 24207", "value: 24107")
    served.wait(f"{CARD}.html", "23.54")
    for page in ("hardware/index.html", "index.html", "zh/index.html", "data/tables/gpus-overview.csv"):
        assert "23.54" in served.get(page), page
        assert "23.64" not in served.get(page), page
    new = (served.project / f"{CARD}.yaml").read_text("utf-8").replace("rtx4090", "newcard")
    new = new.replace("GeForce RTX 4090", "New Card")
    (served.project / "hardware/gpus/newcard.yaml").write_text(new, "utf-8")
    served.wait("hardware/gpus/newcard.html", "New Card")
    assert "New Card" in served.get("data/tables/gpus-overview.csv")
    served.edit("calc/site/ledgers.py", '"Largest moment"', '"Highest moment"')
    served.wait("index.html", "Highest moment")
    served.edit("docs/index.md", "# A job {", "# Will it fit now? {")
    served.wait("index.html", "Will it fit now?")


def test_a_page_is_made_when_it_is_asked_for_and_no_other_one_is(served: Served) -> None:
    served.wait("hardware/index.html", "23.64")
    served.get("hardware/index.html")
    assert served.made() == ["hardware/index.md"]
    served.edit("docs/hardware/index.md", "# Cards", "# All cards")
    served.wait("hardware/index.html", "All cards")
    served.edit(f"{CARD}.yaml", "value: 24207", "value: 24107")
    served.wait("hardware/index.html", "23.54")
    assert served.made() == ["hardware/index.md"] * 3
    assert "A job" in served.get("index.html")
    assert served.made() == [*["hardware/index.md"] * 3, "index.md"]


def test_an_open_page_reloads_itself_which_its_policy_allows_here_alone(served: Served, browser: Browser) -> None:
    served.wait("index.html", "A job")
    page, _, complaints = opened(browser, f"http://{served.address}/models/index.html", wait="load")
    served.edit("docs/models/index.md", "# Models", "# All models")
    page.get_by_role("heading", name="All models").wait_for(timeout=1000 * PATIENCE)
    assert [line for line in complaints if "Policy" in line] == []
    page.context.close()


def test_every_page_is_what_the_build_publishes(served: Served) -> None:
    served.wait("index.html", "A job")
    run = command(served.project, "build", "site")
    assert run.returncode == 0, run.stderr
    site = served.project / "site"
    pages = [path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) > 8
    served.wait("models/qwen2.5-0.5b.html", "Qwen", LEFT_OUT)
    for page in pages:
        assert served.get(page) == (site / page).read_text("utf-8"), page
    for name in ("data/catalog.json", "data/tables/gpus-overview.md", "assets/extra.css", "search/search_index.json"):
        assert served.get(name) == (site / name).read_text("utf-8"), name


def test_a_changed_formula_is_on_the_page_and_what_takes_longer_follows_or_says_so(served: Served) -> None:
    served.wait(f"{CARD}.html", "python -m calc recommend")
    served.edit("calc/memory/weights.py", '"b·P/N"', '"b·P/moved"')
    assert '"formula":"b·P/moved"' in served.wait("data/tables/job-phases.json", "moved")
    page = served.wait(f"{CARD}.html", "asked anew by make site", LEFT_OUT)
    assert page.count('class="verdict fits"') > 2


FAULTS = {
    "a catalog": (f"{CARD}.yaml", "marketing_gb", "marketting_gb", "hardware/gpus/rtx4090.yaml"),
    "a macro": ("docs/hardware/index.md", "gpus_table()", "no_such_table()", "docs/hardware/index.md: 'no_such_table'"),
    "code": ("calc/site/sheets.py", "def gpus(", "def def gpus(", "invalid syntax"),
}


def test_a_fault_is_told_on_the_page_and_gone_when_it_is_mended(served: Served) -> None:
    served.wait("hardware/index.html", "23.64")
    for name, old, new, told in FAULTS.values():
        served.edit(name, old, new)
        shown = served.wait("hardware/index.html", "This page cannot be made")
        assert told.replace("'", "&#x27;") in shown
        assert "23.64" not in shown
        assert told in served.log()
        served.edit(name, new, old)
        served.wait("hardware/index.html", "23.64")


def test_a_catalog_that_is_broken_at_the_start_is_one_line(tmp_path: Path) -> None:
    project = tiny(tmp_path / "project")
    card = project / f"{CARD}.yaml"
    card.write_text(card.read_text("utf-8").replace("marketing_gb", "marketting_gb"), "utf-8")
    run = command(project, "serve")
    assert (run.returncode, run.stdout) == (2, "")
    assert len(run.stderr.splitlines()) == 1
    assert run.stderr.startswith("hardware/gpus/rtx4090.yaml")
