"""How a built folder takes the place of the last one: whole, at once, whatever stops the build or builds beside it.

A build works in a folder `.site-…` beside its result. What a killed one has left there, the next removes.
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
ASIDE = "old"  # within a build's folder, where a site cannot be exchanged in one step
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


@contextlib.contextmanager
def alone(*folders: Path) -> Iterator[bool]:
    """Waits until no other build works in `folders`; false where a file system has no locks, as NFS may.

    A lock ends with the process that holds it, however that ends.
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
    """A folder to build in, beside the result: only there is taking its place one step."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=beside.parent, ignore_cleanup_errors=True) as made:
        yield Path(made)


def sweep(folder: Path) -> None:
    """Removes what killed builds have left in `folder`; a site that one of them had put aside comes back."""
    for left in folder.glob(f"{PREFIX}*"):
        for site in left.glob(f"{ASIDE}/*"):
            if not (folder / site.name).exists():
                site.rename(folder / site.name)
        shutil.rmtree(left, ignore_errors=True)


def place(fresh: Path, out: Path) -> None:
    """Puts `fresh` where `out` is.

    On Linux there is the old site or the new one at every moment. Elsewhere, and on file systems that cannot exchange,
    there is none between two renamings; the next build brings back what was put aside if this one is killed there.
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
    """Whether two folders have changed places in one step."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # none on other systems, and in C libraries before 2018
    if exchange is None:
        return False
    return bool(exchange(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)
