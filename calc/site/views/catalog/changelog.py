"""The changes of each release in the published numbers: one file per release, written by `make release`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from calc.answers import answers
from calc.base.project import ROOT
from calc.site.tables.tables import Cell, Column, Table
from calc.site.text import sources

FOLDER = ROOT / "docs" / "changelog"  # so each file is also a download of the site
NONE = "No version has been released yet, so there is nothing to compare."
FIRST = "The first release: there is nothing to compare it with."
SAME = "No published number or verdict changed."


class Release(NamedTuple):
    """A version, its date, the version that it is compared with, and each change as (place, name, before, after)."""

    version: str
    date: str
    since: str | None
    changes: tuple[tuple[str, str, Any, Any], ...]


def order(version: str) -> tuple[int, ...]:
    """The sort key of a version."""
    return tuple(int(part) for part in version.split("."))


@cache
def releases() -> tuple[Release, ...]:
    """All releases, the newest first."""
    found = [sources.data(path, "release") for path in FOLDER.glob("*.json")]
    made = [Release(f["version"], f["date"], f["since"], tuple(map(tuple, f["changes"]))) for f in found]
    return tuple(sorted(made, key=lambda release: order(release.version), reverse=True))


def save(release: Release) -> Path:
    """Writes a release's file, one change per line."""
    FOLDER.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(change, ensure_ascii=False) for change in release.changes)
    head = json.dumps({"version": release.version, "date": release.date, "since": release.since})
    path = FOLDER / f"{release.version}.json"
    path.write_text(f'{head[:-1]}, "changes": [\n{lines}\n]}}\n', "utf-8")
    releases.cache_clear()
    return path


def table(release: Release, root: str) -> Table | None:
    """One row per table or page in which a value changed; None if none did."""
    rows = tuple(_rows(release, root))
    columns = (
        Column("place", "Table or page"),
        Column("changed", "Values changed", kind="number"),
        Column("verdicts", "of them verdicts", kind="number"),
        Column("new", "New", kind="number"),
        Column("gone", "Gone", kind="number"),
        Column("example", "The first of them"),
    )
    caption = f"Version {release.version} against {release.since}: what changed in the published numbers"
    table_id = f"changes-{release.version.replace('.', '-')}"
    return Table(table_id, caption, columns, rows, versions=answers.versions()) if rows else None


def _rows(release: Release, root: str) -> Iterator[tuple[Cell, ...]]:
    for place, group in groupby(release.changes, key=lambda change: change[0]):
        changes = list(group)
        changed = [c for c in changes if c[2] is not None and c[3] is not None]
        kind, _, name = place.partition(" ")
        _, what, before, after = (changed or changes)[0]
        yield (
            Cell(place, f'<a href="{escape(root + name)}">{escape(place)}</a>' if kind == "page" else ""),
            Cell(len(changed)),
            Cell(sum("verdict" in c[1] for c in changed)),
            Cell(sum(c[2] is None for c in changes)),
            Cell(sum(c[3] is None for c in changes)),
            Cell(f"{what}: {before} → {after}" if changed else what or "the whole"),
        )
