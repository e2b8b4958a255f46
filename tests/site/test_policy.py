"""A page's policy in a real browser: what comes in by its text does not run and asks nobody; all that is ours works."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route

from calc.site.build import policy

# What markup that came in by data could try, each with what it would leave or where it would lead.
TRIED = [
    "<script>window.ran = 1</script>",
    "<script type=module>window.ran = 1</script>",
    "<img src=nowhere onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'></svg>",
    "<a id=trap href='javascript:window.ran = 1'>x</a>",
    "<iframe srcdoc='<script>parent.ran = 1</script>'></iframe>",
    "<div id=styled style='color: rgb(1, 2, 3)'>x</div>",
    "<style>body { color: rgb(1, 2, 3) }</style>",
    "<base href='{elsewhere}/'>",
    "<script src='{elsewhere}/script.js'></script>",
    "<img src='{elsewhere}/image.png'>",
    "<iframe src='{elsewhere}/frame.html'></iframe>",
    "<object data='{elsewhere}/object.svg'></object>",
    "<embed src='{elsewhere}/embed.svg'>",
    "<link rel=stylesheet href='{elsewhere}/style.css'>",
    "<video src='{elsewhere}/video.mp4'></video>",
    "<form id=sent action='{elsewhere}/form'><input name=x></form>",
]


UNUSED = ["font-src", "frame-src", "manifest-src", "media-src", "object-src", "base-uri", "form-action"]


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """Another origin, and what was asked of it."""
    asked: list[str] = []

    class Noted(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Noted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize("from_folder", [False, True], ids=["served", "from a folder"])
def test_nothing_that_comes_in_by_a_page_runs_or_asks_anybody(
    browser: Browser, origin: str, site: Path, tmp_path: Path, elsewhere: tuple[str, list[str]], from_folder: bool
) -> None:
    address, asked = elsewhere
    page = browser.new_context().new_page()
    home = f"{site.as_uri() if from_folder else origin}/index.html"

    def tainted(route: Route) -> None:
        html = (site / "index.html").read_text("utf-8")
        tried = "".join(TRIED).replace("{elsewhere}", address)
        route.fulfill(body=html.replace("</article>", f"{tried}</article>"), content_type="text/html; charset=utf-8")

    page.route(home, tainted)
    page.add_init_script(
        "window.refused = []; addEventListener('securitypolicyviolation', e => refused.push(e.effectiveDirective))"
    )
    page.goto(home)
    page.wait_for_load_state("networkidle")
    page.locator("#trap").evaluate("e => e.click()")
    page.evaluate("document.getElementById('sent').submit()")
    page.evaluate("url => fetch(url).catch(() => 0)", f"{address}/fetched")
    page.evaluate("url => { try { new WebSocket(url) } catch {} }", address.replace("http", "ws"))
    page.wait_for_timeout(300)
    assert page.evaluate("window.ran") is None
    assert "rgb(1, 2, 3)" not in page.evaluate(
        "[document.body, document.getElementById('styled')].map(e => getComputedStyle(e).color)"
    )
    assert page.evaluate("document.baseURI") == home
    assert asked == []
    refused = set(page.evaluate("refused"))
    assert refused >= {
        "script-src-elem", "script-src-attr", "style-src-elem", "style-src-attr", "img-src", "frame-src", "object-src",
        "media-src", "base-uri", "form-action", "connect-src",
    }  # fmt: skip
    page.context.close()


def test_every_page_has_a_policy_that_is_first_and_as_tight_as_can_be(site: Path) -> None:
    assert list(policy.faults(site)) == []
    for path in site.rglob("*.html"):
        head = path.read_text("utf-8").partition("<head>")[2]
        found = policy.POLICY.search(head)
        assert found and head[: found.start()].strip() == policy.HEAD, path
        assert "unsafe" not in found[1] and "*" not in found[1] and "http" not in found[1]
        allowed = dict(word.split(" ", 1) for word in found[1].split("; "))
        assert allowed["default-src"] == "'none'" or {allowed[name] for name in UNUSED} == {"'none'"}
        assert 'rel="next"' not in head or allowed["default-src"] == "'self'"  # Firefox fetches it ahead


WRONG = {
    "<script>run()</script>": "script of its own",
    '<p style="color: red">': "style or a handler",
    "<style>p { color: red }</style>": "style or a handler",
    '<p class="x" onclick="run()">': "style or a handler",
    "<P OnClick=run()>": "style or a handler",
}


@pytest.mark.parametrize("html", WRONG)
def test_what_a_policy_forbids_fails_the_build(tmp_path: Path, html: str) -> None:
    page = (
        f"{policy.HEAD}<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'self'\">"
    )
    (tmp_path / "page.html").write_text(page + html, "utf-8")
    (found,) = policy.faults(tmp_path)
    assert WRONG[html] in found
    (tmp_path / "page.html").write_text(html.replace("<", "&lt;"), "utf-8")
    assert list(policy.faults(tmp_path)) == ["page.html: has no policy"]
