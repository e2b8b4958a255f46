"""The modules of calc.site that a module imports, directly or not: they travel with it and decide its answers."""

from __future__ import annotations

import ast
from pathlib import Path

SITE = Path(__file__).parent


def closure(*names: str, site: Path = SITE) -> frozenset[str]:
    """The modules called `names` and all others of the folder `site` that they import, directly or not."""
    found: set[str] = set()
    ahead = [*names]
    while ahead:
        name = ahead.pop()
        path = site / f"{name}.py"
        if name not in found and path.is_file():
            found.add(name)
            ahead += _imported(path.read_text("utf-8"))
    return frozenset(found)


def _imported(source: str) -> list[str]:
    """The modules of calc.site that a source imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("calc.site"):
            inner = node.module.removeprefix("calc.site").strip(".")
            found += [inner] if inner else [alias.name for alias in node.names]
    return found
