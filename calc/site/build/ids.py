"""The ids of all tables that were ever published, in ids.txt: ids never change, so a build that lacks one fails.

`make ids` adds the ids of the last build, as `make release` does, and removes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")


def known() -> set[str]:
    """Every listed id."""
    return set(FILE.read_text("utf-8").split()) if FILE.exists() else set()


def published(data: Path) -> set[str]:
    """The ids of the tables whose files are under `data`."""
    return {path.stem for path in (data / "tables").glob("*.json")}


def lost(site: Path) -> Iterator[str]:
    """One line for each listed table that a site lacks."""
    for name in sorted(known() - published(site / "data")):
        yield f"{FILE.name}: table {name!r} was published and is gone: an id never changes"


def add(data: Path) -> int:
    """Adds the ids of the last build to the list; returns the number of new ones."""
    before = known()
    every = before | published(data)
    FILE.write_text("".join(f"{name}\n" for name in sorted(every)), "utf-8")
    return len(every - before)
