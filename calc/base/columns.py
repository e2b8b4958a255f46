"""Rows of text in columns, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> Iterator[str]:
    """The rows of a text table: columns two spaces apart, those in `right` aligned to the right."""
    sizes = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    layout = "  ".join(f"{{:{'>' if i in right else '<'}{size}}}" for i, size in enumerate(sizes))
    for row in (head, *rows):
        yield f"  {layout.format(*row)}".rstrip()
