"""A Markdown extension: the first use of a glossary term on a page gets a tooltip with its meaning.

It builds on Python-Markdown's own abbreviations and their markup; but it marks a term once per page, and neither in
headings nor in links, so that a page stays light and readable.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.extensions.abbr import AbbrTreeprocessor
from markdown.util import HTML_PLACEHOLDER, AtomicString

from calc.site.text import glossary

# HTML from macros is set aside, tag by tag; text between the tags of one of these is left alone.
KEPT_ASIDE = re.compile(HTML_PLACEHOLDER % r"(\d+)")
CLOSED = re.compile(r'<(?:a|code|span class="verdict)[ >"]')
HAN = re.compile(r"[\u4e00-\u9fff]")
LEFT_ALONE = {"a", "abbr", "code", "pre", "h1", "h2", "h3", "h4", "h5", "h6"}


class Tooltips(AbbrTreeprocessor):
    """Marks the first use of each term."""

    def run(self, root: Element) -> None:
        """Walks the page in reading order."""
        # a page's script tells its language
        text = "".join(root.itertext())
        self.abbrs: dict[str, str] = glossary.tips("zh" if len(HAN.findall(text)) > len(text) / 10 else "")
        forms = sorted(self.abbrs, key=len, reverse=True)
        self.pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, forms))})(?![\w-])")
        self.seen: set[str] = set()
        self._walk(root)

    def _walk(self, element: Element) -> None:
        """Marks terms in an element's own text, then in its children and the text after each of them."""
        if element.tag in LEFT_ALONE:
            return
        children = list(element)
        element.text, marked = self._marked(element.text)
        for place, one in enumerate(marked):
            element.insert(place, one)
        for child in children:
            self._walk(child)
            child.tail, marked = self._marked(child.tail)
            place = list(element).index(child) + 1
            for offset, one in enumerate(marked):
                element.insert(place + offset, one)

    def _marked(self, text: str | None) -> tuple[str | None, list[Element]]:
        """A text up to its first new term, then this term and any further ones, each with the text after it."""
        if not text or isinstance(text, AtomicString):
            return text, []
        found, closed = [], self._closed(text)
        for match in self.pattern.finditer(text):
            meaning = self.abbrs[match.group()]
            if meaning not in self.seen and not any(start < match.start() < end for start, end in closed):
                self.seen.add(meaning)
                found.append(match)
        if not found:
            return text, []
        ends = [match.start() for match in found[1:]] + [len(text)]
        marked = [
            self.create_element(self.abbrs[match.group()], match.group(), text[match.end() : end])
            for match, end in zip(found, ends, strict=True)
        ]
        return text[: found[0].start()], marked

    def _closed(self, text: str) -> list[tuple[int, int]]:
        """The spans of a text between the tags of a link, code or a verdict; entities, also set aside, are no tags."""
        aside = [(match, str(self.md.htmlStash.rawHtmlBlocks[int(match[1])])) for match in KEPT_ASIDE.finditer(text)]
        tags = [(match, raw) for match, raw in aside if raw.startswith("<")]
        return [(tag.start(), after.start()) for (tag, raw), (after, _) in pairwise(tags) if CLOSED.match(raw)]


class TooltipExtension(Extension):
    """Registers the tooltips where Python-Markdown has its own abbreviations."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Priority 7: after inline patterns, so that code and links are elements already."""
        md.treeprocessors.register(Tooltips(md, {}), "tooltips", 7)


def makeExtension(**kwargs: Any) -> TooltipExtension:
    """The entry point that Python-Markdown calls."""
    return TooltipExtension(**kwargs)
