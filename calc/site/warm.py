"""A result of one build for the next, as long as nothing that it could rest on has changed: code, catalog, Python."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "warm"
READ = ("calc", "hardware", "models")
T = TypeVar("T")


def state(root: Path = ROOT) -> str:
    """A hash of all of calc, of the catalog and of the Python that runs it."""
    whole = hashlib.sha256(sys.version.encode())
    for path in sorted(p for name in READ for p in (root / name).rglob("*") if p.suffix in (".py", ".json", ".yaml")):
        raw = path.read_bytes()
        whole.update(f"{path.relative_to(root).as_posix()}\0{len(raw)}\0".encode() + raw)
    return whole.hexdigest()[:32]


def kept(name: str, compute: Callable[[], T], folder: Path = FOLDER) -> T:
    """What `compute` gives, from an earlier build where there is one of this very state; one file a name."""
    path = folder / f"{name}.pickle"
    now = state()
    try:
        with path.open("rb") as file:
            if pickle.load(file) == now:
                return pickle.load(file)  # type: ignore[no-any-return]
    except Exception:  # whatever is wrong with a file of an earlier build, it is computed anew
        pass
    found = compute()
    _write(path, now, found)
    return found


def _write(path: Path, *things: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    with fresh.open("wb") as file:
        for thing in things:
            pickle.dump(thing, file, pickle.HIGHEST_PROTOCOL)
    fresh.replace(path)  # a build beside this one finds the old file or the new one, whole
