"""Pages in other languages: `index.zh.md` stands beside `index.md`, and takes its jobs and tables from it.

A translation has its own title, description, labels and prose. Jobs are read from the page that it translates, so a
number cannot differ between languages; a table keeps its id, and only the original is exported.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

LANGUAGES = ("zh",)
# Of the front matter: a translation cannot have its own jobs, and need not have its own words for them.
JOBS, WORDS = ("scenarios", "recipes"), ("labels", "said")


def front(path: Path) -> tuple[dict[str, Any], str]:
    """A page's front matter and its Markdown."""
    found, body = _front(path, path.stat().st_mtime_ns)
    return dict(found), body


@cache
def _front(path: Path, changed: int) -> tuple[dict[str, Any], str]:
    # each number of a translation asks for its original's jobs
    source = path.read_text("utf-8")
    if not source.startswith("---\n"):
        return {}, source
    found, _, body = source[4:].partition("\n---")
    return yaml.safe_load(found) or {}, body.lstrip("-")


def split(source: str) -> tuple[str, str]:
    """A page's source without its language, and the language: `("index.md", "zh")`, `("index.md", "")`."""
    stem, _, language = source.removesuffix(".md").rpartition(".")
    return (f"{stem}.md", language) if language in LANGUAGES else (source, "")


def url(source: str) -> str:
    """Where a page stands in the site."""
    original, language = split(source)
    address = original.removesuffix(".md") + ".html"
    return f"{language}/{address}" if language else address


def meta(source: str, own: MutableMapping[str, Any], docs: Path) -> MutableMapping[str, Any]:
    """A page's front matter; a translation has the jobs of its original."""
    original, language = split(source)
    if not language:
        return own
    shared, _ = front(docs / original)
    return (
        {name: shared[name] for name in WORDS if name in shared}
        | dict(own)
        | {name: shared[name] for name in JOBS if name in shared}
    )
