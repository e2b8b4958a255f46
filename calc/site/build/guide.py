"""The rendered guide, kept between builds with a hash of the data beside it, under a hash of its inputs.

A build that changes none of the inputs runs no macro. If the data has been damaged since, all is made anew.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from calc.answers.kept import checked, of_files, sealed
from calc.base.project import ROOT
from calc.site.macros.rendered import Pages

FILE = ROOT / "build" / "pages"
# The inputs of macros: code and data, prose, the colours of drawings, and the versions of the packages that write.
FOLDERS = ("calc", "docs", "hardware", "models", "measurements", "requirements")
KINDS = (".css", ".json", ".jsonl", ".md", ".py", ".txt", ".yaml")
FILES = ("mkdocs.yml", "package-lock.json", "pyproject.toml")
SETTINGS = "HEADROOM_"  # environment variables with the guide's address and version


class Guide:
    """The pages that the last build rendered, and the check that this build would render the same."""

    def __init__(self, pages: Pages, data: Path, share: int = 1) -> None:
        """Reads the inputs before pages are rendered: a file may change meanwhile; `share` as in `topics.fill`."""
        self._pages, self._data, self._inputs = pages, data, f"{_inputs()} {share}"

    def recall(self) -> bool:
        """True if inputs and data are those of the last build; its pages then count as rendered."""
        try:
            text = checked(FILE.read_bytes())
        except OSError:
            return False
        inputs, contents, found = pickle.loads(text) if text else ("", "", b"")  # our own file
        if inputs != self._inputs or contents != self._contents():
            return False
        self._pages.found.update(pickle.loads(found))  # by now: another calc has perhaps no such class
        return True

    def keep(self) -> None:
        """Keeps all rendered pages, with a hash of the data that was written beside them."""
        found = pickle.dumps(self._pages.found, pickle.HIGHEST_PROTOCOL)
        FILE.write_bytes(sealed(pickle.dumps((self._inputs, self._contents(), found), pickle.HIGHEST_PROTOCOL)))

    def _contents(self) -> str:
        return of_files(self._data, self._data.rglob("*"))


def _inputs() -> str:
    """A hash of all inputs of pages and data."""
    read = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
    said = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    files = of_files(ROOT, [*read, *(ROOT / name for name in FILES)])
    return f"{files} {sys.version} {sorted(said.items())}"
