"""What takes long is done once a run: by the worker that needs it first, while others wait for it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def alone(folders: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """The folder that all workers of this run share, and nobody else at work on what has this name."""
    root = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield root
