"""The calculator's files for a reader's browser: Python as WebAssembly, and calc itself in one file.

All of them come from packages and from this folder when the site is built; the same sources give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from calc.base.project import ROOT
from calc.scenario.scenario import SCHEMA_FILE
from calc.site.calculator.closure import closure

PYODIDE = ROOT / "node_modules" / "pyodide"
CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
ARCHIVE = "calc.json"  # all modules in one, compressed by hosts in transit; no zip is as small or the same everywhere
ENTRY = "calc.site.calculator.browser"  # the module that the browser calls
PACKAGES = ("yaml", "fastjsonschema")  # all that calc needs: both run as plain Python, compiled parts or not


def files() -> dict[str, bytes]:
    """Every file of the engine by its path; FileNotFoundError if the package is not installed."""
    made = {ARCHIVE: archive()} | {name: (PYODIDE / name).read_bytes() for name in CORE}
    return {f"{version()}/{name}": raw for name, raw in made.items()}


@cache
def archive() -> bytes:
    """A JSON archive of calc, its dependencies, as far as an answer and its page need them: sources by path."""
    texts = {name: path.read_text("utf-8") for name, path in sorted(_sources())}
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode()


@cache
def version() -> str:
    """The engine's folder name, a hash of its contents: no browser mixes old parts with new ones."""
    return hashlib.sha256(archive() + (PYODIDE / "package.json").read_bytes()).hexdigest()[:12]


def _sources() -> Iterator[tuple[str, Path]]:
    for path in (*closure(ENTRY), SCHEMA_FILE):
        yield path.relative_to(ROOT).as_posix(), path
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec and spec.origin
        for path in Path(spec.origin).parent.glob("*.py"):
            yield f"{package}/{path.name}", path


def write(folder: Path) -> None:
    """Makes `folder` hold the engine and nothing else; files that are already right are left alone."""
    wanted = files()
    (folder / version()).mkdir(parents=True, exist_ok=True)
    for name, raw in wanted.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != raw:
            (folder / name).write_bytes(raw)
    for other in folder.iterdir():
        if other.name != version():
            shutil.rmtree(other)
