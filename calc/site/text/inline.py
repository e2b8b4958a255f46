"""Words from data within a page's Markdown: plain text to Markdown, HTML and the macros, whatever is in them."""

from __future__ import annotations

import re

# Characters special to Markdown, HTML or the macros; written as HTML character references they are plain text to all
# three.
OWN = re.compile(r"[&<>\"'`*_\[\]{}|\\#!]")
OWN_BESIDE_HTML = re.compile(r"[`*_\[\]{}|\\]")


def inline(words: str) -> str:
    """Words on one line, with nothing that Markdown or HTML would interpret; also for front matter and attributes."""
    return OWN.sub(_reference, " ".join(words.split()))


def within(html: str) -> str:
    """HTML whose text Markdown leaves alone."""
    return OWN_BESIDE_HTML.sub(_reference, html)


def coded(words: str) -> str:
    """Words with text between `backticks` as code."""
    return re.sub("&#96;(.*?)&#96;", r"<code>\1</code>", inline(words))


def _reference(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"
