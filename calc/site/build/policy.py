"""The content security policy of pages: hooks for overrides/partials/policy.html, and a check of the built site.

The theme writes a few scripts into a page. Each is allowed by its hash, made of the templates alone: a script that came
in through a page's text or through data has none, and does not run.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

SCRIPT = re.compile(r"<script>(.*?)</script>", re.S)
INLINE = re.compile(r"<style|<[a-z][^<>]*\s(?:style|on[a-z]+)=", re.I)
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
HEAD, OWN = '<meta charset="utf-8">', "script-src 'self'"


def hashes(html: str) -> str:
    """The sources that a policy needs for the scripts written into a piece of HTML."""
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in SCRIPT.findall(html))


def reloading(html: bytes) -> bytes:
    """A page with the preview's reload script at its end, its policy extended to allow that script."""
    text = html.decode()
    last = text[text.rindex("<script>") :]
    return text.replace(OWN, f"{OWN} {hashes(last)}", 1).encode()


def faults(site: Path) -> Iterator[str]:
    """One line for each page of a built site that has no policy, or has something that its policy forbids."""
    for path in sorted(site.rglob("*.html")):
        name, html = path.relative_to(site).as_posix(), path.read_text("utf-8")
        policy = POLICY.search(html)
        if not policy:
            yield f"{name}: has no policy"
            continue
        if any(hashed not in policy[1].split("; ")[1].split() for hashed in hashes(html).split()):
            yield f"{name}: has a script of its own, which its policy forbids: it belongs into a file of docs/assets/"
        if found := INLINE.search(html):
            yield f"{name}: has a style or a handler in {found.group()!r}, which its policy forbids"


# ---- hooks that the site engine calls ------------------------------------------------------------------------------


def on_env(env: Any, **others: Any) -> None:
    """Gives templates the filter `hashes`."""
    env.filters["hashes"] = hashes


def on_post_build(config: Any) -> None:
    """Gives a policy to the redirects of moved pages, which no template makes and which do nothing but lead on."""
    for path in Path(config.site_dir).rglob("*.html"):
        html = path.read_text("utf-8")
        if HEAD in html and not POLICY.search(html):
            policy = f"default-src 'none'; script-src {hashes(html)}; base-uri 'none'; form-action 'none'"
            meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            path.write_text(html.replace(HEAD, HEAD + meta, 1), "utf-8")
