"""What takes long is done once a run: by the worker that needs it first, while others wait for it."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


@contextmanager
def alone(folders: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """The folder that all workers of this run share, and nobody else at work on what has this name."""
    root = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield root


def once(folders: pytest.TempPathFactory, name: str, compute: Callable[[], T]) -> T:
    """What `compute` gives, computed with every run anew, and by one of its workers."""
    with alone(folders, name) as root:
        file = root / f"{name}.pickle"
        if file.exists():
            found: T = pickle.loads(file.read_bytes())
        else:
            found = compute()
            file.write_bytes(pickle.dumps(found))
        return found
