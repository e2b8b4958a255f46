"""A list to read, not a limit: first sentences, long ones, passives, and words of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from calc.site.i18n import languages
from calc.site.text import sources
from calc.site.text.prose import MARKED

LISTED = 20  # sentences of each kind
NO_PROSE = re.compile(
    r"^(?:\s*\||#|:::|!!!|<|\s*-\s*\[).*$", re.M
)  # tables, headings, admonitions, HTML, lists of links
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. ))")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)(?:\{[^}]*\})?")
END = re.compile(r"(?<=[.!?])[*_)\"]*\s+(?=[*_(\"]*[A-Z`<…])")
SET = re.compile(r"\[%.*?%\]|\[#.*?#\]", re.S)  # what a page computes for its macros
# Words of our own for what engineers call otherwise.
PRIVATE = re.compile(
    r"\b(?:mend(?:s|ed)?|held back|holds back|(?:largest|fullest) moments?|comes to the node|stirred|by way of|"
    r"breaks? it|knows? of|gives? way|namely|whatever is|what is told)\b"
)
# A form of `to be` with a participle: regular, or one of the usual irregular ones.
PASSIVE = re.compile(
    r"\b(?:is|are|was|were|be|been|being)\s+(?:\w+ly\s+|not\s+|never\s+|then\s+|also\s+)?"
    r"(?:\w{3,}ed|kept|held|made|taken|given|read|written|found|left|put|set|cut|told|shown|known|seen|spread|lost|run)\b"
)
OPENS = re.compile(r"\*\*The short answer\.\*\*\s*")


class Sentence(NamedTuple):
    """A sentence of a page, as plain text: a number that a macro gives is an ellipsis."""

    page: str
    text: str

    @property
    def words(self) -> int:
        """Its length."""
        return len(self.text.split())

    @property
    def passives(self) -> int:
        """The number of its passive verbs."""
        return len(PASSIVE.findall(self.text))


def sentences(page: str, text: str) -> Iterator[Sentence]:
    """The sentences of a page's prose: no code, no quotations, no tables, no headings."""
    for marked in MARKED:
        text = marked.sub("…", text)
    text = SET.sub("", text)
    text = LINK.sub(r"\1", NO_PROSE.sub("", text))
    for block in BLOCK.split(text):
        plain = " ".join(re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", block).split())
        for found in END.split(plain):
            if len(found.split()) > 1:
                yield Sentence(page, found)


def every(docs: Path) -> Iterator[Sentence]:
    """The sentences of all English pages that are written by hand."""
    for path in sorted(docs.rglob("*.md")):
        name = path.relative_to(docs).as_posix()
        page = sources.read(path)
        if not languages.split(name)[1] and not page.meta.get("generated"):
            yield from sentences(name, OPENS.sub("", page.text))


def report(docs: Path, only: str = "") -> Iterator[str]:
    """The list, line by line, of the pages with `only` in their path."""
    listed = [s for s in every(docs) if only in s.page]
    first = {s.page: s for s in reversed(listed)}
    yield f"{len(listed):,} sentences, {sum(s.words for s in listed) / max(1, len(listed)):.1f} words each"
    yield "\nFirst sentences: does each answer the title?"
    yield from (f"  {page}: {s.text}" for page, s in sorted(first.items()))
    yield "\nLongest sentences"
    longest = sorted(listed, key=lambda s: -s.words)[:LISTED]
    yield from (f"  {s.words} words, {s.page}: {s.text}" for s in longest)
    yield "\nWords of our own"
    yield from (f"  {found[0]}, {s.page}: {s.text}" for s in listed if (found := PRIVATE.search(s.text)))
    yield "\nMost passive"
    passive = sorted((s for s in listed if s.passives), key=lambda s: (-s.passives, -s.words))[:LISTED]
    yield from (f"  {s.passives} of {s.words} words, {s.page}: {s.text}" for s in passive)
