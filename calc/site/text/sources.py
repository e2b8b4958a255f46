"""A page's file, read and checked: its front matter and Markdown; and the data under docs/ that pages are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from calc.base.reading import decode, parse_json, parse_yaml, read_bytes
from calc.base.schema import InputError, closest, show, validator
from calc.scenario.rules import flatten
from calc.site.faults import short

SCHEMAS = Path(__file__).parent / "schema"
# Characters that are no text, but for a tab and line ends; and those that are not seen: zero-width, marks of direction.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\xad\u200b-\u200f\u2028-\u202e\u2060\ufeff]")
CONFLICT = re.compile(r"^(?:<{7}|>{7})(?: .*)?$", re.M)  # what a merge leaves
FRONT = re.compile(r"---\n(.*?^)---[ \t]*(?:\n|\Z)", re.M | re.S)
JOBS = ("scenarios", "recipes")
CHANGES = ("remedy", "switch")  # the pairs of jobs before and after a change, and the settings that make it
SPEAK = ("labels", "said")  # sentences and labels about jobs, keyed by the jobs' names


class Source(NamedTuple):
    """A page's front matter, its Markdown, and the line of the file on which the Markdown begins."""

    meta: Mapping[str, Any]
    text: str
    line: int


def front(path: Path) -> tuple[dict[str, Any], str]:
    """A page's front matter and its Markdown."""
    found = read(path)
    return dict(found.meta), found.text


def recipes(docs: Path) -> list[dict[str, Any]]:
    """The jobs of flat fields for which pages under `docs` recommend configurations, each once."""
    pages = [front(page)[0] for page in sorted(docs.rglob("*.md"))]
    jobs = [flatten(job) for meta in pages for job in meta.get("recipes", {}).values()]
    return [job for place, job in enumerate(jobs) if job not in jobs[:place]]


def read(path: Path) -> Source:
    """A page's file; InputError, one line, for a file that cannot be used."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        raise InputError(f"{short(path)}: no such page") from None


@cache
def _read(path: Path, changed: int) -> Source:
    # cached: each number of a translation asks for its original's jobs
    where = short(path)
    source = decode(read_bytes(path, where), where).replace("\r\n", "\n")
    if stray := CONTROL.search(source):
        line = 1 + source.count("\n", 0, stray.start())
        raise InputError(f"{where}:{line}: given the control character {show(stray[0])}, allowed: text")
    if left := CONFLICT.search(source):
        line = 1 + source.count("\n", 0, left.start())
        raise InputError(f"{where}:{line}: given {show(left[0])}, a conflict of a merge, allowed: text")
    found = FRONT.match(source)
    if not found:
        allowed = "front matter between two lines of ---, with a description"
        raise InputError(f"{where}:1: given {show(source.partition(chr(10))[0])}, allowed: {allowed}")
    meta = parse_yaml(f"\n{found[1]}", where) or {}  # the leading line break stands for the line of ---
    validator(SCHEMAS / "page.json")(meta, where)
    text = source[found.end() :]
    _named(meta, text, where)
    return Source(meta, text, 1 + found[0].count("\n"))


def _named(meta: Mapping[str, Any], text: str, where: str) -> None:
    """Refuses jobs that no macro of the page names, and labels for jobs that the page lacks."""
    jobs = {name: kind for kind in JOBS for name in meta.get(kind, ())}
    told = f"{meta.get('remedy')}{meta.get('reported')}"
    for name, kind in jobs.items():
        if f'"{name}"' not in text and f"'{name}'" not in text + told:
            raise InputError(
                f"{where}: {kind}.{name}: given a job that no macro of the page names, allowed: one that is"
            )
    for field in SPEAK if jobs else ():  # a translation's labels belong to jobs of its original
        for name in meta.get(field, ()):
            if name not in jobs:
                raise InputError(f"{where}: {field}.{name}: allowed: {', '.join(jobs)}{closest(name, jobs)}")


def data(path: Path, schema: str) -> Any:
    """A YAML or JSON file that pages are made of, checked; InputError, one line, for a file that cannot be used."""
    where = short(path)
    text = decode(read_bytes(path, where), where)
    found = parse_json(text, where) if path.suffix == ".json" else parse_yaml(text, where)
    validator(SCHEMAS / f"{schema}.json")(found, where)
    return found
