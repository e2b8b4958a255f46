"""A result of one build for the next, as long as nothing that it could rest on has changed: code, data, Python."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
CATALOG = ("calc", "hardware", "models")
PAGES = (*CATALOG, "measurements", "docs")
KINDS = (".py", ".json", ".jsonl", ".yaml", ".csv", ".md")
T = TypeVar("T")


def state(folders: Sequence[str], root: Path = ROOT) -> str:
    """A hash of all code, data and prose in `folders` but what a build writes, of this Python, and the settings."""
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("HEADROOM_"))
    whole = hashlib.sha256(repr((sys.version, settings)).encode())
    written = root / "docs" / "data"
    for path in sorted(p for name in folders for p in (root / name).rglob("*") if p.suffix in KINDS):
        if written not in path.parents and path.is_file():
            raw = path.read_bytes()
            whole.update(f"{path.relative_to(root).as_posix()}\0{len(raw)}\0".encode() + raw)
    return whole.hexdigest()[:32]


def kept(name: str, folders: Sequence[str], compute: Callable[[], T], root: Path = ROOT) -> T:
    """What `compute` gives, from an earlier build where there is one of this very state; one file a name."""
    path = root / "build" / "warm" / f"{name}.pickle"
    now = state(folders, root)
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
