"""A Markdown extension: no space stands where Chinese has none.

A line of the source ends where an editor breaks it, and Markdown makes a space of that. Between two Chinese characters,
and beside Chinese punctuation, which brings its own room, it is a hole in the text.
"""

from __future__ import annotations

import re
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

MARK = "[\u3001-\u3011\uff01-\uff0f\uff1a-\uff1f]"  # punctuation as wide as a character
LETTER = "[\u3400-\u9fff]"
OPENED = r"(?:<[^<>/][^<>]*>|\[|\*\*)*"  # what may stand before a character: a tag, a link, bold type
BREAK = r"\n[ ]*(?![ \n#>|]|[-*+] |\d+\. |\[\[)"  # the end of a line within a paragraph
HOLES = re.compile(
    rf"(?<={MARK})(\*\*)?(?:[ ]+|{BREAK})(?=\S)|(?<={LETTER}){BREAK}(?={OPENED}{LETTER})|(?<=\S)[ ]+(?={MARK})"
)


def close(text: str) -> str:
    """The text without its holes."""
    return HOLES.sub(lambda found: found[1] or "", text)


class FullWidth(Preprocessor):
    """Closes the holes of a page."""

    def run(self, lines: list[str]) -> list[str]:
        """All lines at once, since a hole may be the end of one."""
        return close("\n".join(lines)).split("\n")


class FullWidthExtension(Extension):
    """Registers it behind code blocks, which are put aside by then."""

    def extendMarkdown(self, md: Markdown) -> None:
        """After `fenced_code_block` (25) and `html_block` (20)."""
        md.preprocessors.register(FullWidth(md), "fullwidth", 5)


def makeExtension(**kwargs: Any) -> FullWidthExtension:
    """The entry that Python-Markdown calls."""
    return FullWidthExtension(**kwargs)
