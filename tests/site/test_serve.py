"""`make serve`: a saved change in data, code or prose is on the page within seconds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sites import tiny

Wait = Callable[[str, str], None]
PATIENCE = 60  # seconds; a quiet machine needs three


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that tests may change."""
    return tiny(tmp_path / "project")


@pytest.fixture
def page_shows(project: Path) -> Iterator[Wait]:
    """Serves the project; gives a function that waits until a page contains a text."""
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

        def wait(page: str, text: str) -> None:
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                try:
                    with urllib.request.urlopen(f"http://{address}/{page}", timeout=10) as answer:
                        if text in answer.read().decode():
                            return
                except OSError:
                    pass  # not up yet, or being built
                time.sleep(0.2)
            raise AssertionError(f"{page} never shows {text!r}: {(project / 'serve.log').read_text()[-1500:]}")

        try:
            yield wait
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=20)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def test_changes_of_data_code_and_prose_reach_the_page(project: Path, page_shows: Wait) -> None:
    page_shows("hardware/gpus/rtx4090.html", "23.64")
    edit(project / "hardware/gpus/rtx4090.yaml", "value: 24207", "value: 24107")
    page_shows("hardware/gpus/rtx4090.html", "23.54")
    new = (
        (project / "hardware/gpus/rtx4090.yaml")
        .read_text("utf-8")
        .replace("rtx4090", "newcard")
        .replace("GeForce RTX 4090", "New Card")
    )
    (project / "hardware/gpus/newcard.yaml").write_text(new, "utf-8")
    page_shows("hardware/gpus/newcard.html", "New Card")
    page_shows("data/tables/gpus-overview.csv", "New Card")
    edit(project / "calc/site/ledgers.py", '"Largest moment"', '"Highest moment"')
    page_shows("index.html", "Highest moment")
    edit(project / "docs/index.md", "# A job {", "# Will it fit now? {")
    page_shows("index.html", "Will it fit now?")


def test_a_changed_formula_is_on_the_page_and_what_takes_minutes_to_ask_anew_says_so(
    project: Path, page_shows: Wait
) -> None:
    page_shows("hardware/gpus/rtx4090.html", "python -m calc recommend")
    edit(project / "calc/memory/weights.py", '"weights#', '"weights-moved#')
    page_shows("hardware/gpus/rtx4090.html", "asked anew by make site")
