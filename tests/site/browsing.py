"""A page of each kind in the system's Chromium, and a server that compresses what it sends, as hosts of sites do."""

from __future__ import annotations

import functools
import gzip
import http.server
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--no-first-run",
]
# A site that was built already, to be looked at in place of the sample: all of its pages, not one of each kind.
WHOLE = os.environ.get("WHOLE_SITE")
KINDS = [
    "index.html",
    "compare.html",
    "hardware/index.html",
    "hardware/gpus/rtx4090.html",
    "models/index.html",
    "models/qwen2.5-1.5b.html",
    "recipes/index.html",
    "recipes/reward-model.html",
    "strategies/model-parallelism.html",
    "case-studies/reward-model-6x4090.html",
    "method/activations.html",
    "reference/scenario.html",
    "reference/about.html",
    "validation.html",
    "mistakes.html",
    "data.html",
    "changelog.html",
    "diagnose.html",
    "zh/index.html",
    "case-studies/grpo-logic-rl-4xa100.html",
    "zh/case-studies/grpo-logic-rl-4xa100.html",
    "zh/glossary.html",
]
PAGES = sorted(p.relative_to(WHOLE).as_posix() for p in Path(WHOLE).rglob("*.html")) if WHOLE else KINDS


@functools.lru_cache(maxsize=256)
def packed(path: Path, changed: int) -> bytes:
    """A file, compressed once for as long as it was `changed` at this time."""
    return gzip.compress(path.read_bytes(), 6)


class Host(http.server.SimpleHTTPRequestHandler):
    """Sends files compressed, and says nothing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """One file."""
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            return self.send_error(HTTPStatus.NOT_FOUND)
        kind = self.guess_type(path)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if kind.startswith("text/") else kind)
        compressed = not kind.startswith("image/") or kind.endswith("+xml")
        raw = packed(path, path.stat().st_mtime_ns) if compressed else path.read_bytes()
        if compressed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def served(folder: Path, host: type[Host] = Host) -> Iterator[str]:
    """The address at which a folder is served."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(host, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def opened(
    browser: Browser, address: str, wait: Literal["load", "networkidle"] = "networkidle", **context: Any
) -> tuple[Page, list[str], list[str]]:
    """A page, every request it made, and every complaint of its console."""
    page = browser.new_context(**context).new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda r: requests.append(r.url))
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("response", lambda r: complaints.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    page.goto(address)
    page.wait_for_load_state(wait)
    return page, requests, complaints


def until(page: Page, expression: str, arg: Any = None, seconds: float = 30) -> None:
    """Waits for something to be so on a page. Playwright's own way evaluates in the page, which its policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"never so: {expression}"
        page.wait_for_timeout(50)
