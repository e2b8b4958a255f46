"""No memory figure is typed into the guide: what no macro computes must be marked as somebody's quotation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sites import ROOT

FIGURE = re.compile(r"\d[\d.,]*\s?(?:[KMGT]i?B|[kmgt]igabytes?|bytes?)\b", re.I)
MARKED = (
    r"\A---\n.*?\n---\n",  # front matter
    r"^```.*?^```",  # commands and scenario files
    r"`[^`\n]*`",
    r"\[\[.*?\]\]",  # macros
    r"^>.*?$",  # quotations
    r"<q>.*?</q>",
)


def typed(text: str) -> list[str]:
    """The memory figures of a page that nothing marks."""
    for pattern in MARKED:
        text = re.sub(pattern, "", text, flags=re.S | re.M if pattern.startswith((r"\A", "^```", r"\[")) else re.M)
    return FIGURE.findall(text)


def pages() -> list[Path]:
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [p for p in found if "generated: true" not in p.read_text("utf-8")]


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_memory_figure_is_typed(page: Path) -> None:
    assert typed(page.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "text", ["It needs 13.8 GiB.", "needs 24GB", "1.6 TB", "about 512 MiB", "18 bytes a parameter"]
)
def test_the_search_finds_what_is_typed(text: str) -> None:
    assert len(typed(text)) == 1


@pytest.mark.parametrize("text", ['[[ peak("a") ]]', "> 24GB each", "<q>1.6 TB</q>", "```\n--mem 24GB\n```", "`24 GB`"])
def test_the_search_leaves_what_is_marked(text: str) -> None:
    assert typed(text) == []
