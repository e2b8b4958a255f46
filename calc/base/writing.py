"""The writing of files by commands: whole or not at all."""

import contextlib
import os
import shutil
from pathlib import Path


def replace(path: Path, raw: bytes) -> None:
    """Replaces the file's content by `raw`, flushed to disk: a reader finds all of the old or all of the new."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
