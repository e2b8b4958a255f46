"""The modules that a module of calc imports, directly or not: all that a reader's browser needs of calc."""

from __future__ import annotations

import re
from pathlib import Path

from calc.base.project import ROOT

# An import as ruff lays it out, at the top or within a function: its names on one line, or in parentheses. Parsing the
# sources takes 30 times as long.
IMPORT = re.compile(r"^ *from ([\w.]+) import (?:\(([^)#]*)\)|([^(#\n]+))", re.M)
NAME = re.compile(r"(?:^|,)\s*(\w+)")  # without the name after `as`


def closure(module: str, root: Path = ROOT) -> frozenset[Path]:
    """The files of `module`, `calc.base.units` for example, of all modules that it imports, and of their packages."""
    found: set[Path] = set()
    ahead = [module]
    while ahead:
        name = ahead.pop()
        path = _file(name, root)
        if path and path not in found:
            found.add(path)
            ahead += [name.rpartition(".")[0], *imported(path.read_text("utf-8"))]
    return frozenset(found)


def _file(module: str, root: Path) -> Path | None:
    """The file of a module or package of calc; None for a name within one, and for other modules."""
    if module.partition(".")[0] != "calc":
        return None
    place = root.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def imported(source: str) -> list[str]:
    """The names that a source imports, modules and names within modules alike."""
    found: list[str] = []
    for module, several, names in IMPORT.findall(source):
        found += [module, *[f"{module}.{name}" for name in NAME.findall(several or names)]]
    return found
