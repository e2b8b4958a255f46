"""The comparison of two site engines' builds: every page, every table cell, every id and every link."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from calc.site.build.checks import Page


def differences(one: Path, other: Path) -> Iterator[str]:
    """One line for each page that only one site has, and for the first cell, id or link of a page that differs."""
    left, right = _paths(one), _paths(other)
    yield from (f"{path}: only in {one.name}" for path in sorted(left - right))
    yield from (f"{path}: only in {other.name}" for path in sorted(right - left))
    for path in sorted(left & right):
        if path.endswith(".html"):
            a, b = (Page((site / path).read_text("utf-8")) for site in (one, other))
            for what in ("cells", "ids", "links"):
                pairs = enumerate(zip_longest(getattr(a, what), getattr(b, what)), 1)
                yield from [f"{path}: {what} {n}: {x!r}, {y!r}" for n, (x, y) in pairs if x != y][:1]


def _paths(site: Path) -> set[str]:
    return {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()}
