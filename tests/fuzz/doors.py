"""The doors of `calc`, each as a function of what somebody gives: it answers, or refuses in one line.

A door returns True for an answer and False for a refusal; whatever else it raises is a fault.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple
from urllib.parse import urlencode

from fuzz import inputs
from hypothesis import strategies as st

from calc.__main__ import main
from calc.add import add
from calc.base.schema import InputError
from calc.catalog.catalog import load
from calc.site.calculator import calculator, compare
from calc.site.calculator.calculator import Place
from calc.site.tables import tables
from calc.site.text import sources

SCRATCH = Path(mkdtemp(prefix="headroom-fuzz-"))


class Door(NamedTuple):
    """A door: the function that makes input for it, and the one that takes it."""

    inputs: st.SearchStrategy[Any]
    enter: Callable[[Any], bool]


def command(argv: list[str], raw: bytes = b"") -> bool:
    """`python -m calc` in this process, held to what the command line promises."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(raw))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main(argv)
    except SystemExit as stopped:  # --help
        status = stopped.code
    finally:
        sys.stdin = before
    told = [line for line in err.getvalue().split("\n") if "machines too small" not in line and line]
    if status == 2:
        assert out.getvalue() == "", f"an answer beside a refusal: {out.getvalue()[:200]!r}"
        assert len(told) == 1, told
        assert told[0].isprintable(), told
        return False
    assert status == 0, f"status {status}"
    assert told == [], told
    assert "a fault of calc" not in out.getvalue(), out.getvalue()
    return True


def estimate(raw: bytes) -> bool:
    """A scenario file, as JSON and as text."""
    return command(["estimate", "-", "--json"], raw) and command(["estimate", "-"], raw)


def batch(raw: bytes) -> bool:
    """A batch: a line out for a line in."""
    return command(["estimate", "--batch", "-"], raw)


def recommend(words: list[str]) -> bool:
    """A question for a configuration."""
    return command(["recommend", *words])


def diagnose(raw: bytes) -> bool:
    """The diagnosis of what a job left behind, as JSON and as text."""
    return command(["diagnose", "-", "--json"], raw) and command(["diagnose", "-"], raw)


def config(raw: bytes) -> bool:
    """A model that a path to its config.json names."""
    path = SCRATCH / "config.json"
    path.write_bytes(raw)
    job = {"model": str(path), "task": "sft", "gpu": "h100-sxm", "gpus": 8, "sharding": "zero3", "seq_len": 512}
    return command(["estimate", "-", "--json"], json.dumps(job).encode())


def small(name: str) -> Path:
    """A folder with a small catalog, made once."""
    root = SCRATCH / name
    if not root.exists():
        for place, text in inputs.data_files().items():
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_text(text, "utf-8")
        for place in ("hardware/schema", "measurements/exhausted"):
            shutil.copytree(inputs.ROOT / place, root / place)
        for place in ("models/schema.json", "measurements/schema.json"):
            shutil.copy(inputs.ROOT / place, root / place)
        (root / "measurements/exhausted/messages.jsonl").write_text("", "utf-8")
    return root


def added(raw: bytes) -> bool:
    """A config.json that joins a small catalog."""
    path, root = SCRATCH / "added.json", small("added")
    path.write_bytes(raw)
    try:
        add(str(path), {"hf": "somebody/tuned"}, over=True, root=root)
    except InputError as error:
        assert str(error).isprintable()
        assert str(error).startswith(str(path)), error
        return False
    return True


def catalog(changed: tuple[str, bytes]) -> bool:
    """A data file of a small catalog."""
    root = small("catalog")
    place, raw = changed
    try:
        (root / place).write_bytes(raw)
        _ = load.__wrapped__(root).places  # of records, which that validates
    except InputError as error:
        assert str(error).isprintable()
        assert place in str(error) or "hardware/" in str(error) or "models/" in str(error), error
        return False
    finally:
        (root / place).write_text(inputs.data_files()[place], "utf-8")
    return True


def address(asked: dict[str, str]) -> bool:
    """An address of the calculator, and the comparison of its job."""
    try:
        *_, shown = calculator.asked(asked, load(), Place("", tables.to_html), print)
        compare.compared([urlencode(asked)], "100", Place("", tables.to_html), print)
    except InputError as error:
        assert str(error).isprintable()
        return False
    json.dumps(shown._asdict())
    return True


def pasted(raw: bytes) -> bool:
    """A scenario that is pasted into the calculator."""
    try:
        shown = calculator.check(raw.decode("utf-8", "replace"), load(), Place("", tables.to_html))
    except InputError as error:
        assert str(error).isprintable()
        return False
    json.dumps(shown._asdict())
    return True


def front(raw: bytes) -> bool:
    """A page with its front matter."""
    path = SCRATCH / "page.md"
    path.write_bytes(raw)
    try:
        sources._read.__wrapped__(path, 0)
    except InputError as error:
        assert str(error).isprintable()
        assert "page.md" in str(error), error
        return False
    return True


DOORS = {
    "estimate": Door(inputs.files(), estimate),
    "batch": Door(inputs.lines(), batch),
    "recommend": Door(inputs.commands(), recommend),
    "diagnose": Door(inputs.pasted(), diagnose),
    "config": Door(inputs.configs(), config),
    "added": Door(inputs.configs(), added),
    "catalog": Door(inputs.catalogs(), catalog),
    "address": Door(inputs.addresses(), address),
    "pasted": Door(inputs.files(), pasted),
    "front": Door(inputs.fronts(), front),
}
