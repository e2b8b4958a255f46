"""Third-party software that the site redistributes: its notices, and the owner of each file.

third-party/parts.yaml names the parts. Versions and licences come from the installed packages; texts that no package
includes are in third-party/texts/.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from calc.base.project import ROOT
from calc.base.reading import parse_mapping
from calc.base.schema import InputError
from calc.site.calculator import browser_engine

FOLDER = ROOT / "third-party"
FILE = "THIRD-PARTY-NOTICES.txt"
NODE = re.compile(r"node_modules/((?:@[^/]+/)?[^/]+)/")
LEGAL = "*.dist-info/licenses/*"
RULE = "=" * 100


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of third-party software, as third-party/parts.yaml lists it."""

    name: str
    licence: str
    home: str
    use: str
    files: Sequence[str]
    holds: Sequence[str] = ()
    package: dict[str, str] = field(default_factory=dict)
    legal: str = LEGAL
    copyright: Sequence[str] = ()
    texts: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The name, with the version if the part is itself a package."""
        return f"{self.name} {_version(self.package)}" if self.package and self.legal == LEGAL else self.name

    def legal_texts(self) -> Iterator[tuple[str, str]]:
        """Each of the part's licences: its origin, and the text."""
        if name := self.package.get("python"):
            yield from _packaged(name, self.legal)
        for name in self.texts:
            yield f"{name}, from: {_listed()['texts'][name]}", (FOLDER / "texts" / name).read_text("utf-8")


@cache
def _packaged(name: str, pattern: str) -> tuple[tuple[str, str], ...]:
    """The files of a Python package that match: the origin of each, and its text."""
    installed = metadata.distribution(name)
    matching = [Path(str(installed.locate_file(path))) for path in _recorded(name) if fnmatchcase(path, pattern)]
    return tuple([(f"{path.name} of the Python package {name}", path.read_text("utf-8")) for path in matching])


@cache
def _recorded(name: str) -> tuple[str, ...]:
    """The files of a package, as its installer has recorded them; `files` of `metadata` takes 20 times as long."""
    return tuple([row[0] for row in csv.reader((metadata.distribution(name).read_text("RECORD") or "").splitlines())])


@cache
def _listed() -> dict[str, Any]:
    path = FOLDER / "parts.yaml"
    return parse_mapping(path.read_bytes(), path.relative_to(ROOT).as_posix())


@cache
def parts() -> tuple[Part, ...]:
    """All parts. InputError, one line, for a part that has no text, or a text that no part has."""
    found = tuple(Part(**given) for given in _listed()["parts"])
    kept = {path.name for path in (FOLDER / "texts").iterdir()}
    named = {name for part in found for name in part.texts}
    if odd := sorted(kept ^ named | kept ^ {*_listed()["texts"]}):
        raise InputError(
            f"third-party/texts/{odd[0]}: given in the folder, in a part or under `texts`, allowed: in all"
        )
    for part in found:
        if part.licence != "public domain" and not list(part.legal_texts()):
            raise InputError(f"third-party/parts.yaml: {part.name}: given no text of its licence, allowed: one or more")
    return found


def _version(package: dict[str, str]) -> str:
    if "npm" in package:
        return str(json.loads((ROOT / "node_modules" / package["npm"] / "package.json").read_bytes())["version"])
    return metadata.version(package["python"])


# ---- the notices ---------------------------------------------------------------------------------------------------


def text() -> str:
    """The notices: each part, then each licence text once."""
    numbers: dict[tuple[str, str], int] = {}
    notes = [_note(part, numbers) for part in parts()]
    texts = [f"{RULE}\n[{n}] {where}\n{RULE}\n\n{body.strip()}\n" for (where, body), n in numbers.items()]
    return "\n".join(
        ["Third-party software that this site redistributes, and its licences in full below.\n", *notes, *texts]
    )


def _note(part: Part, numbers: dict[tuple[str, str], int]) -> str:
    seen = [numbers.setdefault(found, len(numbers) + 1) for found in part.legal_texts()]
    lines = [
        f"{part.title} ({part.licence})",
        f"Used for: {part.use}",
        f"Home and source: {part.home}",
        f"In: {', '.join(part.files)}",
        *part.copyright,
        *([f"Licence: {', '.join(f'[{n}]' for n in seen)}"] if seen else []),
    ]
    return "\n  ".join(lines) + "\n"


def table() -> str:
    """The parts as a table in Markdown."""
    rows = [f"| [{part.title}]({part.home}) | {part.use} | {part.licence} |" for part in parts()]
    return "\n".join(["| Software | Used for | Licence |", "| --- | --- | --- |", *rows]).replace("*", "\\*")


# ---- the owner of each file ----------------------------------------------------------------------------------------


def faults(site: Path) -> Iterator[str]:
    """One line for each file of a built site, or package in one, without an owner; and for each part without a file."""
    files = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*")) if path.is_file()]
    known = [*_listed()["ours"], *(pattern for part in parts() for pattern in part.files)]
    for name in files:
        if not any(fnmatchcase(name, pattern) for pattern in known):
            yield f"{name}: whose is it? third-party/parts.yaml has neither us nor a part for it"
    held = {name for part in parts() for name in part.holds}
    for name, package in _inside(site):
        if package not in held:
            yield f"{name}: holds {package}, which no part of third-party/parts.yaml does"
    for part in parts():
        for pattern in part.files:
            if not any(fnmatchcase(name, pattern) for name in files):
                yield f"third-party/parts.yaml: {part.name}: given {pattern!r}, allowed: a file of the site"


def _inside(site: Path) -> Iterator[tuple[str, str]]:
    """The packages that files are made of, each with the file."""
    for path in sorted(site.rglob("*.map")):
        sources = json.loads(path.read_bytes())["sources"]
        for package in dict.fromkeys(found[1] for found in map(NODE.match, sources) if found):
            yield path.relative_to(site).as_posix(), package
    for path in site.glob(f"assets/calculator/*/{browser_engine.SNAPSHOT}"):
        for package in sorted(browser_engine.packages()):
            yield path.relative_to(site).as_posix(), package
