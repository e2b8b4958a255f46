"""Words from data within a page's Markdown: whatever is in a name, it stays text, for Markdown, HTML and the macros."""

from __future__ import annotations

import re

# Written as HTML's character references, of which none of the three takes anything for its own.
OWN = re.compile(r"[&<>\"'`*_\[\]{}|\\#!]")
OWN_BESIDE_HTML = re.compile(r"[`*_\[\]{}|\\]")


def inline(words: str) -> str:
    """Words on one line, of which no character is Markdown or HTML; for a front matter and for attributes, too."""
    return OWN.sub(_reference, " ".join(words.split()))


def within(html: str) -> str:
    """HTML of which Markdown leaves what is text alone."""
    return OWN_BESIDE_HTML.sub(_reference, html)


def coded(words: str) -> str:
    """Words with what stands between `backticks` as code."""
    return re.sub("&#96;(.*?)&#96;", r"<code>\1</code>", inline(words))


def _reference(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"
