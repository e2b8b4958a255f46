"""A file that may join the catalog, and the trial that decides if it does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from calc.base.schema import InputError
from calc.catalog.catalog import Catalog
from calc.check import check

FOLDERS = ("hardware/gpus", "hardware/nodes", "hardware/schema", "measurements", "models")


@dataclass(frozen=True, slots=True)
class Draft:
    """A file for `folder`: its id, its bytes, and the lines that tell what it holds once it is part of a catalog."""

    folder: str
    id: str
    raw: bytes
    told: Callable[[Catalog], Iterable[str]]

    @property
    def where(self) -> str:
        """The path that the file will have, from the root."""
        return f"{self.folder}/{self.id}.yaml"


def tried(draft: Draft, root: Path, given: str) -> Catalog:
    """The catalog at `root` with the draft in it, after all checks. Nothing is written there.

    Raises InputError for the first fault; one of the draft is put down to the file `given`.
    """
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made)
        for folder in FOLDERS:
            _linked(root / folder, copy / folder, draft if folder == draft.folder else None)
        try:
            return check(copy)
        except InputError as error:
            own = str(error).startswith(draft.where)
            raise InputError(f"{given}: {error}" if own else str(error)) from None


def _linked(source: Path, target: Path, draft: Draft | None) -> None:
    """Makes `target` stand for the folder `source`, with the draft among its files if there is one."""
    target.parent.mkdir(exist_ok=True)
    if draft is None:
        target.symlink_to(source.resolve())
        return
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).symlink_to(path.resolve())
    new = target / f"{draft.id}.yaml"
    new.unlink(missing_ok=True)
    new.write_bytes(draft.raw)
