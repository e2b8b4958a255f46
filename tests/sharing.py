"""Long work, done once a run: by the worker that needs it first, while others wait for it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROJECT = "project"  # the copy of the project whose built site tests look at


@contextmanager
def alone(folders: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """The folder that all workers of this run share, and nobody else at work on what has this name."""
    root = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with locked(root, name):
        yield root


@contextmanager
def locked(root: Path, name: str) -> Iterator[None]:
    """Nobody else of the run in this folder at work on what has this name."""
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def begin(root: Path, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
    """Starts a process that is at work alone on what has this name: the lock that it inherits ends with it."""
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.Popen(
            command,
            pass_fds=[lock.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends it with all that it has started, if it has not ended."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
