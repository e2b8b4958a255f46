"""The checks of the data folders: only files that belong there, with names and text that every machine reads alike."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from calc.base.reading import FILE, decode, parse_json, read_bytes
from calc.base.schema import InputError, show


class Folder(NamedTuple):
    """A data folder: the suffix of its data files ("": it has none), and the other names that belong there."""

    suffix: str
    others: tuple[str, ...] = ()


FOLDERS: Mapping[str, Folder] = {
    "hardware": Folder("", ("gpus", "nodes", "schema")),
    "hardware/gpus": Folder(".yaml"),
    "hardware/nodes": Folder(".yaml"),
    "hardware/schema": Folder("", ("gpu.schema.json", "node.schema.json")),
    "models": Folder(".yaml", ("schema.json",)),
    "measurements": Folder(
        ".jsonl",
        (
            "schema.json",
            "*.py",
            "bench",
            "blind",
            "exhausted",
            "megatron",
            "peers",
            "simumax",
            "suites",
            "trace",
            "__pycache__",
        ),
    ),
    "measurements/blind": Folder(".yaml", ("schema.json",)),
    "measurements/exhausted": Folder(".jsonl", ("schema.json",)),
    "measurements/megatron": Folder(".jsonl", ("schema.json",)),
    "measurements/peers": Folder(".yaml", ("schema.json",)),
    "measurements/simumax": Folder(".yaml", ("*.json",)),
    "measurements/suites": Folder(".yaml"),
}
# Temporary files that an editor, or a command that was killed, leaves beside a file.
MOMENTARY = (".*.sw?", ".#*", ".*.new")
_STEM = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")

# Control characters except tab and line feed; no-break and zero-width spaces, soft hyphens, marks of direction.
_UNSEEN = re.compile(
    rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\xa0\xad]|\xe2\x80[\x8b-\x8f\xa8-\xae]|\xe2\x81\xa0|\xef\xbb\xbf"
)
_SEEN = bytes(range(0x20, 0x7F)) + b"\t\n"
# JSON's and YAML's escapes of what no text can hold: half of a surrogate pair, and control characters.
_ESCAPED = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u00(?:[01][0-9a-fA-F]|7[fF])"
)


def faults(root: Path) -> Iterator[str]:
    """The faults in the names and the text of the data files at `root`, a line each."""
    for folder, kind in FOLDERS.items():
        for path in _listed(root / folder):
            where = f"{folder}/{path.name}"
            try:
                yield from _file(path, where, kind)
            except InputError as error:
                yield str(error)


def _listed(folder: Path) -> list[Path]:
    """The entries of a folder; none where it is missing, which the code that reads its files reports."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _file(path: Path, where: str, kind: Folder) -> Iterator[str]:
    if any(fnmatchcase(path.name, pattern) for pattern in (*kind.others, *MOMENTARY)):
        if path.name.endswith("schema.json"):
            parse_json(decode(read_bytes(path, where), where), where)
    elif wrong := misnamed(path.name, kind.suffix):
        yield f"{where}: {wrong}"
    elif not path.is_file():
        yield f"{where}: given what is no file, allowed: {_allowed(kind.suffix)}"
    else:
        yield from unreadable(read_bytes(path, where, FILE), where)


def misnamed(name: str, suffix: str) -> str:
    """The fault in the name of a data file; empty where there is none."""
    if suffix and name.endswith(suffix) and _STEM.fullmatch(name.removesuffix(suffix)):
        return ""
    return f"given a file of this name, allowed: {_allowed(suffix)}"


def _allowed(suffix: str) -> str:
    if not suffix:
        return "nothing but what is there"
    return f"names that end in {suffix}, in lower-case letters and digits, with . or - or _ between them"


def unreadable(raw: bytes, where: str) -> Iterator[str]:
    """The faults in a file's text: characters that are not seen, or that not every machine reads alike."""
    # most files are found clean by a check that is many times as quick as a pattern
    unseen = None if raw.isascii() and not raw.translate(None, _SEEN) else _UNSEEN.search(raw)
    escaped = _ESCAPED.search(raw) if b"\\u" in raw else None
    for found in (unseen, escaped):
        if found:
            line = raw.count(b"\n", 0, found.start()) + 1
            given = _NAMES.get(found[0], f"the character {show(found[0].decode('utf-8', 'replace'))}")
            yield f"{where}:{line}: given {given}, allowed: UTF-8 text that shows all it holds, lines that end in \\n"


_NAMES = {b"\xef\xbb\xbf": "a byte order mark", b"\r": "a carriage return", b"\xc2\xa0": "a no-break space"}
