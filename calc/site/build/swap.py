"""The swap of a built folder for the last one: complete and in one step, even if builds are killed or run side by side.

A build works in a folder `.site-…` beside its result. The next build removes what a killed one has left there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = ".site-"
ASIDE = "old"  # within a build's folder, for systems that cannot exchange folders in one step
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # Linux constants


@contextlib.contextmanager
def alone(*folders: Path) -> Iterator[bool]:
    """Waits until no other build works in `folders`; yields False on a file system without locks, as NFS may be.

    A lock ends with the process that holds it, however the process ends.
    """
    with contextlib.ExitStack() as held:
        yield all([_locked(folder, held) for folder in sorted({folder.resolve() for folder in folders})])


def _locked(folder: Path, held: contextlib.ExitStack) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{folder}: another build works here; this one waits for it", file=sys.stderr)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def scratch(beside: Path) -> Iterator[Path]:
    """A folder to build in, beside the result: only from there can it take its place in one step."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=beside.parent, ignore_cleanup_errors=True) as made:
        yield Path(made)


def sweep(folder: Path) -> None:
    """Removes what killed builds have left in `folder`, and restores a site that one of them had put aside."""
    for left in folder.glob(f"{PREFIX}*"):
        for site in left.glob(f"{ASIDE}/*"):
            if not (folder / site.name).exists():
                site.rename(folder / site.name)
        shutil.rmtree(left, ignore_errors=True)


def place(fresh: Path, out: Path) -> None:
    """Puts `fresh` in the place of `out`.

    On Linux either the old site or the new one is there at every instant. Elsewhere, and on file systems that cannot
    exchange, there is none between two renamings; if this build is killed there, the next one restores the site put
    aside.
    """
    if not out.exists():
        fresh.rename(out)
    elif not _exchanged(fresh, out):
        aside = fresh.parent / ASIDE
        aside.mkdir()
        try:
            out.rename(aside / out.name)
            fresh.rename(out)
        except BaseException:
            if not out.exists():
                (aside / out.name).rename(out)
            raise


def _exchanged(one: Path, other: Path) -> bool:
    """True if two folders have changed places in one step."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # missing on other systems, and in C libraries before 2018
    if exchange is None:
        return False
    return bool(exchange(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)
