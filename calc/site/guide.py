"""The guide as its macros gave it, kept with the data beside it under all that they follow from.

A build that changes none of it runs no macro. What has been damaged since is made anew.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from calc.site.kept import checked, of_files, sealed
from calc.site.rendered import Pages

ROOT = Path(__file__).parents[2]
FILE = ROOT / "build" / "guide"
# What macros read: code and data, prose, and the versions of the packages that write.
FOLDERS = ("calc", "docs", "hardware", "models", "measurements", "requirements")
KINDS = (".json", ".jsonl", ".md", ".py", ".txt", ".yaml")
FILES = ("mkdocs.yml", "package-lock.json", "pyproject.toml")
SETTINGS = "HEADROOM_"  # environment variables with the guide's address and version


class Guide:
    """What the last build rendered, and whether it is what this one would render."""

    def __init__(self, pages: Pages, data: Path) -> None:
        """Reads what decides the pages, before they are rendered: a file may change meanwhile."""
        self._pages, self._data, self._inputs = pages, data, _inputs()

    def recall(self) -> bool:
        """Whether pages and data are those of the last build; then the pages are rendered."""
        try:
            text = checked(FILE.read_bytes())
        except OSError:
            return False
        inputs, contents, found = pickle.loads(text) if text else ("", "", {})  # our own file
        if inputs != self._inputs or contents != self._contents():
            return False
        self._pages.found.update(found)
        return True

    def keep(self) -> None:
        """Keeps all pages as they were rendered, with a hash of the data that was written beside them."""
        kept = (self._inputs, self._contents(), self._pages.found)
        FILE.write_bytes(sealed(pickle.dumps(kept, pickle.HIGHEST_PROTOCOL)))

    def _contents(self) -> str:
        return of_files(self._data, self._data.rglob("*"))


def _inputs() -> str:
    """A hash of all that pages and data follow from."""
    read = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
    said = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    files = of_files(ROOT, [*read, *(ROOT / name for name in FILES)])
    return f"{files} {sys.version} {sorted(said.items())}"
