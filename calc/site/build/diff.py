"""Changes of published numbers and verdicts between a revision and the working tree, or from release to release.

Each side is published by its own code, so that a change of formula shows as well as a change of data.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from calc.answers.kept import FOLDER
from calc.base.project import ROOT
from calc.site.build import exports
from calc.site.faults import BuildError

DATA = exports.FOLDER.relative_to(ROOT)


class Change(NamedTuple):
    """A changed value, new (before is None) or gone (after is None); without a name, a whole table or page."""

    place: str
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        """The change in one line."""
        where = " · ".join(filter(None, (self.place, self.name)))
        if self.after is None:
            return f"{where}: {self.before} → gone" if self.name else f"{where}: gone"
        if self.before is None:
            return f"{where}: new, {self.after}" if self.name else f"{where}: new"
        return f"{where}: {self.before} → {self.after}"


def report(revision: str) -> None:
    """Prints one line per change, and their count on the last line."""
    changes, places = since(revision)
    print("".join(f"{change}\n" for change in changes), end="")
    print(f"{len(changes)} changes in {places} tables and pages since {revision}.")


def since(revision: str) -> tuple[list[Change], int]:
    """The changes since a revision, and how many tables and pages are published now."""
    with tempfile.TemporaryDirectory(prefix="headroom-") as scratch:
        before = published(_at(revision, Path(scratch, "before")))
        after = published(_copy(Path(scratch, "after")))
    return list(compare(before, after)), len(after)


def _at(revision: str, tree: Path) -> Path:
    """The project as it was at `revision`, extracted into `tree`."""
    found = subprocess.run(["git", "archive", "--format=tar", revision], cwd=ROOT, capture_output=True)
    if found.returncode:
        raise BuildError(f"REV: given {revision!r}, allowed: a revision of this repository")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(tree, filter="data")
    if not (tree / "calc" / "site").is_dir():
        raise BuildError(f"REV: {revision!r} is older than the guide: it has no calc/site")
    return tree


def _copy(tree: Path) -> Path:
    """A copy of the working tree as git sees it: tracked and new files, without ignored ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    return tree


def published(tree: Path) -> dict[str, dict[str, Any]]:
    """The values that the project in `tree` publishes, by table or page, then by name."""
    if FOLDER.is_dir():  # a copy, because each calc deletes answers that are not its own
        shutil.copytree(FOLDER, tree / FOLDER.relative_to(ROOT), dirs_exist_ok=True)
    (tree / "node_modules").symlink_to(ROOT / "node_modules")
    run = subprocess.run(
        [sys.executable, "-m", "calc.site", "write"],
        cwd=tree,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tree)},
    )
    if run.returncode:
        raise BuildError(f"{tree.name} cannot be published: {run.stderr.strip().splitlines()[-1]}")
    found: dict[str, dict[str, Any]] = {}
    # up to 0.1 the data was under docs/
    data = next(place for place in (tree / DATA, tree / "docs" / "data") if place.is_dir())
    for path in sorted((data / "tables").glob("*.json")):
        table = json.loads(path.read_text("utf-8"))
        names = [f["name"] for f in table["fields"]]
        values: dict[str, Any] = {}
        for row in table["rows"]:
            key = str(row[names[0]])
            while f"{key} · {names[-1]}" in values:  # two rows may begin alike
                key += "'"
            values.update({f"{key} · {name}": row[name] for name in names[1:]})
        found[f"table {table['id']}"] = values
    for said in json.loads((data / "spoken.json").read_text("utf-8")):
        found.setdefault(f"page {said['page']}", {})[said["call"]] = said["text"]
    return found


def compare(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> Iterator[Change]:
    """Each value that is new, gone or different."""
    for place in sorted(before.keys() | after.keys()):
        if place not in before:
            yield Change(place, "", None, "new")
        elif place not in after:
            yield Change(place, "", "gone", None)
        else:
            old, new = before[place], after[place]
            for name in [*old, *(n for n in new if n not in old)]:
                if old.get(name) != new.get(name):
                    yield Change(place, name, old.get(name), new.get(name))
