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

Wait = Callable[[str, str], None]
PATIENCE = 60  # seconds; a quiet machine needs three


@pytest.fixture
def page_shows(small: Path) -> Iterator[Wait]:
    """Serves the small project; gives a function that waits until a page contains a text."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    with (small / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "calc.site", "serve", "--address", address],
            cwd=small,
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
            raise AssertionError(f"{page} never shows {text!r}: {(small / 'serve.log').read_text()[-1500:]}")

        try:
            yield wait
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=20)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


def test_changes_of_data_code_and_prose_reach_the_page(small: Path, page_shows: Wait) -> None:
    page_shows("hardware/gpus/rtx4090.html", "23.64")
    edit(small / "hardware/gpus/rtx4090.yaml", "value: 24207", "value: 24107")
    page_shows("hardware/gpus/rtx4090.html", "23.54")
    new = (
        (small / "hardware/gpus/rtx4090.yaml")
        .read_text("utf-8")
        .replace("rtx4090", "newcard")
        .replace("GeForce RTX 4090", "New Card")
    )
    (small / "hardware/gpus/newcard.yaml").write_text(new, "utf-8")
    page_shows("hardware/gpus/newcard.html", "New Card")
    page_shows("data/tables/gpus-overview.csv", "New Card")
    edit(small / "calc/site/ledgers.py", "out of memory in", "no memory in")
    page_shows("case-studies/reward-model-6x4090.html", "no memory in")
    edit(small / "docs/index.md", "# Will it fit?", "# Will it fit now?")
    page_shows("index.html", "Will it fit now?")
