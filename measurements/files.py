"""How the commands of this folder put new content into a file."""

import contextlib
import os
import shutil
from pathlib import Path


def replace(path: Path, raw: bytes) -> None:
    """Put `raw` in the file's place at once, and on the disk: whoever reads it finds all of the one or of the other."""
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
