"""A Markdown extension that removes spaces where Chinese has none.

A line of the source ends where an editor breaks it, and Markdown makes a space of that. Between two Chinese characters,
and beside Chinese punctuation, which has its own spacing, that space is a gap in the text.
"""

from __future__ import annotations

import re
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

MARK = "[\u3001-\u3011\uff01-\uff0f\uff1a-\uff1f]"  # full-width punctuation
LETTER = "[\u3400-\u9fff]"
OPENED = r"(?:<[^<>/][^<>]*>|\[|\*\*)*"  # markup that may precede a character: a tag, a link, bold type
BREAK = r"\n[ ]*(?![ \n#>|]|[-*+] |\d+\. |\[\[)"  # the end of a line within a paragraph
HOLES = re.compile(
    rf"(?<={MARK})(\*\*)?(?:[ ]+|{BREAK})(?=[^\s{{])|(?<={LETTER}){BREAK}(?={OPENED}{LETTER})|(?<=\S)[ ]+(?={MARK})"
)


def close(text: str) -> str:
    """The text without those gaps."""
    return HOLES.sub(lambda found: found[1] or "", text)


class FullWidth(Preprocessor):
    """Removes the gaps from a page."""

    def run(self, lines: list[str]) -> list[str]:
        """Treats all lines at once, since a line break may be a gap."""
        return close("\n".join(lines)).split("\n")


class FullWidthExtension(Extension):
    """Registers the preprocessor after code blocks, which are set aside by then."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Priority 5: after `fenced_code_block` (25) and `html_block` (20)."""
        md.preprocessors.register(FullWidth(md), "fullwidth", 5)


def makeExtension(**kwargs: Any) -> FullWidthExtension:
    """The entry point that Python-Markdown calls."""
    return FullWidthExtension(**kwargs)
