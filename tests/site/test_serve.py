"""`make serve`: a saved change in data, code or prose is on the page that shows it; no other page is made again.

And it answers for its own pages alone: whatever it is sent, it reads and writes nothing elsewhere, and goes on.
"""

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
from lightningcss import process_stylesheet
from playwright.sync_api import Browser
from sites import command

from calc.site.faults import BuildError
from calc.site.preview import preview

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

    def send(self, request: bytes) -> tuple[int, bytes]:
        """The status and the body that bytes get which no browser would send."""
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(request)
            head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def log(self) -> str:
        return (self.project / "serve.log").read_text("utf-8")

    def made(self) -> list[str]:
        """The sources of the pages that were made so far."""
        return re.findall(r"Making (.*)", self.log())


@pytest.fixture
def served(tiny: Path, tmp_path: Path) -> Iterator[Served]:
    """The preview of a small project."""
    project = tiny
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
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        try:
            yield Served(project, address)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=20)


CARD = "hardware/gpus/rtx4090"
HOST = b"Host: localhost\r\n\r\n"
HOSTILE = {
    # out of the folder, as a path and as bytes
    b"GET ../../../kept HTTP/1.0\r\n\r\n": 400,
    b"GET ../kept HTTP/1.1\r\n" + HOST: 400,
    b"GET http://localhost/index.html HTTP/1.1\r\n" + HOST: 400,
    b"GET /../../../kept HTTP/1.0\r\n\r\n": 404,
    b"GET /%2e%2e/%2e%2e/kept HTTP/1.1\r\n" + HOST: 404,
    b"GET /..%2f..%2f..%2fkept HTTP/1.1\r\n" + HOST: 404,
    b"GET /data/tables/../../../../kept HTTP/1.1\r\n" + HOST: 404,
    b"GET //etc/passwd HTTP/1.1\r\n" + HOST: 404,
    b"GET /linked/kept HTTP/1.1\r\n" + HOST: 404,
    b"GET /linked HTTP/1.1\r\n" + HOST: 404,
    # no names of files
    b"GET /a%00b HTTP/1.1\r\n" + HOST: 400,
    b"GET /a\x00b HTTP/1.1\r\n" + HOST: 400,
    b"GET /%zz HTTP/1.1\r\n" + HOST: 400,
    b"GET /% HTTP/1.1\r\n" + HOST: 400,
    b"GET /%ff%fe HTTP/1.1\r\n" + HOST: 400,
    b"GET /\xff HTTP/1.1\r\n" + HOST: 400,
    b"GET /%s.html HTTP/1.1\r\n" % (b"a" * 300) + HOST: 404,
    b"GET /%s HTTP/1.1\r\n" % (b"a/" * 3000) + HOST: 404,
    b"GET /%s HTTP/1.1\r\n" % (b"a" * 70000) + HOST: 414,
    # names that no page has, and folders
    b"GET /nope.html HTTP/1.1\r\n" + HOST: 404,
    b"GET /nope/nope.html HTTP/1.1\r\n" + HOST: 404,
    b"GET /index.html/nope HTTP/1.1\r\n" + HOST: 404,
    b"GET /hardware HTTP/1.1\r\n" + HOST: 302,  # with its slash
    b"GET /assets/ HTTP/1.1\r\n" + HOST: 404,
    b"GET /data/tables/nope.csv HTTP/1.1\r\n" + HOST: 404,
    b"GET /search/nope HTTP/1.1\r\n" + HOST: 404,
    b"GET /search/%s HTTP/1.1\r\n" % (b"a" * 300) + HOST: 404,
    b"GET /search/search_index.json/nope HTTP/1.1\r\n" + HOST: 404,
    # another site's name that leads here
    b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n": 403,
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1.example.org:80\r\n\r\n": 403,
    b"GET / HTTP/1.1\r\nHost: localhost@example.org\r\n\r\n": 403,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: example.org\r\n\r\n": 403,
    b"GET / HTTP/1.1\r\nHost:\r\n\r\n": 403,
    # no readers
    b"POST /index.html HTTP/1.1\r\n" + HOST: 405,
    b"DELETE /index.html HTTP/1.1\r\n" + HOST: 405,
    b"OPTIONS * HTTP/1.1\r\n" + HOST: 405,
    b"GET /livereload/x/1 HTTP/1.1\r\n" + HOST: 400,
    b"GET /livereload/-1/1 HTTP/1.1\r\n" + HOST: 400,
    b"GET /livereload/%s/1 HTTP/1.1\r\n" % (b"9" * 5000) + HOST: 400,
    # and readers
    b"GET /index.html HTTP/1.0\r\n\r\n": 200,
    b"GET /./index.html?%zz HTTP/1.1\r\n" + HOST: 200,
    b"GET / HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n": 200,
    b"HEAD / HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n\r\n": 200,
    b"GET /livereload/0/1 HTTP/1.1\r\n" + HOST: 200,
}


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
    served.edit("calc/site/views/jobs/ledgers.py", '"Peak at"', '"Highest at"')
    served.wait("index.html", "Highest at")
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
    for name in (
        "data/catalog.json",
        "data/tables/gpus-overview.md",
        "assets/tables.js",
        "search/search_index.json",
        "search/index.json",
    ):
        assert served.get(name) == (site / name).read_text("utf-8"), name
    assert process_stylesheet(served.get("assets/extra.css")) == (site / "assets/extra.css").read_text("utf-8")


def test_a_changed_formula_is_on_the_page_and_what_takes_longer_follows_or_says_so(served: Served) -> None:
    served.wait(f"{CARD}.html", "python -m calc recommend")
    served.edit("calc/memory/weights.py", '"b·P/N"', '"b·P/moved"')
    assert '"formula":"b·P/moved"' in served.wait("data/tables/job-phases.json", "moved")
    page = served.wait(f"{CARD}.html", "asked anew by make site", LEFT_OUT)
    assert page.count('class="verdict fits"') > 2


FAULTS = {
    "a catalog": (f"{CARD}.yaml", "marketing_gb", "marketting_gb", "hardware/gpus/rtx4090.yaml"),
    "a macro": (
        "docs/hardware/index.md",
        "gpus_table()",
        "no_such_table()",
        "docs/hardware/index.md:6: 'no_such_table'",
    ),
    "code": ("calc/site/views/catalog/sheets.py", "def gpus(", "def def gpus(", "invalid syntax"),
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


def test_a_table_that_was_never_published_is_not_sought_on_every_page(served: Served) -> None:
    (served.project / "calc/site/build/ids.txt").write_text("known\n", "utf-8")
    (served.project / "docs/broken.md").write_text("# Broken\n\n[[ nope() ]]\n", "utf-8")
    served.wait("broken.html", "This page cannot be made")
    assert b"docs/broken.md" in served.send(b"GET /data/tables/known.json HTTP/1.1\r\n" + HOST)[1]
    assert served.send(b"GET /data/tables/nope.json HTTP/1.1\r\n" + HOST)[0] == 404


def test_whatever_it_is_sent_it_touches_nothing_elsewhere_and_goes_on(served: Served, tmp_path: Path) -> None:
    served.wait("index.html", "A job")
    (folder,) = tmp_path.glob("headroom-*/site")
    for place in (tmp_path, folder.parent, served.project):
        (place / "kept").write_text("kept", "utf-8")
    (folder / "linked").symlink_to(tmp_path)
    served.get("hardware/index.html")
    before = {path for path in tmp_path.rglob("*") if path.suffix != ".pyc"}
    answers = {request: served.send(request) for request in HOSTILE}
    assert {request[:80]: status for request, (status, _) in answers.items()} == {r[:80]: s for r, s in HOSTILE.items()}
    assert [r for r, (status, body) in answers.items() if b"kept" in body or (r.startswith(b"HEAD") and body)] == []
    after = {path for path in tmp_path.rglob("*") if path.suffix != ".pyc"}
    assert after == before
    assert all((place / "kept").read_text("utf-8") == "kept" for place in (tmp_path, folder.parent, served.project))
    assert "Traceback" not in served.log()
    served.edit(f"{CARD}.yaml", "marketing_gb", "marketting_gb")  # what cannot be made leaves no file, either
    served.wait("nope.html", "This page cannot be made")
    served.edit(f"{CARD}.yaml", "marketting_gb", "marketing_gb")
    served.wait("index.html", "A job")
    assert not (folder / "nope.html").exists()


@pytest.mark.parametrize("address", ["localhost", "localhost:x", "127.0.0.1:65536", ":8000"])
def test_an_address_that_cannot_be_is_one_line(address: str) -> None:
    with pytest.raises(BuildError, match=f"^--address: given '{address}', allowed: host:port"):
        preview.serve(address)


def test_a_catalog_that_is_broken_at_the_start_is_one_line(tiny: Path) -> None:
    project = tiny
    card = project / f"{CARD}.yaml"
    card.write_text(card.read_text("utf-8").replace("marketing_gb", "marketting_gb"), "utf-8")
    run = command(project, "serve")
    assert (run.returncode, run.stdout) == (2, "")
    assert len(run.stderr.splitlines()) == 1
    assert run.stderr.startswith("hardware/gpus/rtx4090.yaml")
