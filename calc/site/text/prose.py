"""A check that no memory figure is typed into the guide: if no macro computes it, it must be marked as a quotation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from calc.site.text.sources import Source

FIGURE = re.compile(r"\d[\d.,]*\s?(?:[KMGT]i?B|[kmgt]igabytes?|bytes?)\b", re.I)
MARKED = [
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"^```.*?^```", re.S | re.M),  # commands and scenario files
        (r"`[^`\n]*`", re.M),
        (r"\[\[.*?\]\]", re.S),  # macros
        (r"^>.*?$", re.M),  # quotations
        (r"<q>.*?</q>", re.M),
    )
]


def typed(page: Source) -> Iterator[tuple[int, str]]:
    """The memory figures of a page that are not marked as quotations, each with its line."""
    text = page.text
    for marked in MARKED:
        text = marked.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in FIGURE.finditer(text):
        yield page.line + text.count("\n", 0, found.start()), found[0]
