"""No memory figure is typed into the guide: what no macro computes must be marked as somebody's quotation."""

from __future__ import annotations

import pytest

from calc.site.text.prose import typed
from calc.site.text.sources import Source

# That no page has one is asked by every build: see test_rendered.py.


@pytest.mark.parametrize(
    "text", ["It needs 13.8 GiB.", "needs 24GB", "1.6 TB", "about 512 MiB", "18 bytes a parameter"]
)
def test_the_search_finds_what_is_typed(text: str) -> None:
    assert [line for line, _ in typed(Source({}, f"```\n1 GB\n```\n\n{text}\n", 3))] == [7]


@pytest.mark.parametrize("text", ['[[ peak("a") ]]', "> 24GB each", "<q>1.6 TB</q>", "```\n--mem 24GB\n```", "`24 GB`"])
def test_the_search_leaves_what_is_marked(text: str) -> None:
    assert list(typed(Source({}, text, 1))) == []
