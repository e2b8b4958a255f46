"""Reads what people write, YAML and JSON, bounded in size; any fault is one line that names file and line.

Scalars are those of YAML 1.2 (1e3 is a number, `on` and dates are text), the merge key is that of YAML 1.1; explicit
tags and fields given twice are refused.
"""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from calc.base.schema import InputError, show
from calc.base.units import MiB

DOCUMENT = MiB  # bytes of one document; the longest config.json in use has a hundredth of it
FILE = 256 * MiB  # bytes of a file of many lines, each a document
VALUES = 20_000  # values of one document, aliases expanded
DEEPEST = 32  # levels of one document
DIGITS = 30  # digits of an integer; a float has no more
TOO_LARGE = 10**DIGITS
MERGE = "<<"  # YAML 1.1's key, which everybody's front matter uses

# ---- files ---------------------------------------------------------------------------------------------------------


def read_bytes(path: Path, where: str, limit: int = DOCUMENT) -> bytes:
    """A file's bytes; `InputError` says why it cannot be read, or that it has more than `limit` of them."""
    with _opened(path, where) as file:
        return _bounded(file, where, limit)


def read_input(path: str, limit: int = DOCUMENT) -> tuple[bytes, str]:
    """The bytes of the file at `path` (`-`: standard input), at most `limit`, and its name in messages."""
    if path == "-":
        return _bounded(_standard(), "standard input", limit), "standard input"
    return read_bytes(Path(path), path, limit), path


def lines(path: str) -> Iterator[bytes]:
    """The lines of a file (`-`: standard input) as they come; a line too long to be a document is cut off.

    Raises `InputError` if the file cannot be read.
    """
    if path == "-":
        yield from _split(_standard(), "standard input")
        return
    with _opened(Path(path), path) as file:
        yield from _split(file, path)


def _standard() -> BinaryIO:
    if sys.stdin is None:  # the shell's `<&-`
        raise InputError("standard input: given closed, allowed: a file, or a pipe")
    return sys.stdin.buffer


def _opened(path: Path, where: str) -> BinaryIO:
    try:
        # a device may never end, and a pipe that nobody writes to never begins
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise InputError(f"{where}: given what is no regular file, allowed: a file, or - for standard input")
        return path.open("rb")
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise _unreadable(error, where) from None


def _unreadable(error: OSError | ValueError, where: str) -> InputError:
    reason = getattr(error, "strerror", None) or str(error)
    return InputError(f"{where}: {reason[0].lower()}{reason[1:]}")


def _bounded(file: BinaryIO, where: str, limit: int) -> bytes:
    try:
        raw = file.read(limit + 1)
    except OSError as error:  # a file that opens may still not be read: /proc/self/mem, a broken disk
        raise _unreadable(error, where) from None
    if len(raw) > limit:
        raise InputError(f"{where}: given more than {limit:,} bytes, allowed: no more")
    return raw


def _split(file: BinaryIO, where: str) -> Iterator[bytes]:
    while line := _line(file, where):
        rest = line
        while len(rest) > DOCUMENT and not rest.endswith(b"\n"):
            rest = _line(file, where)
        yield line


def _line(file: BinaryIO, where: str) -> bytes:
    try:
        return file.readline(DOCUMENT + 1)
    except OSError as error:
        raise _unreadable(error, where) from None


def decode(raw: bytes, where: str) -> str:
    """UTF-8 text (a byte order mark is dropped); `InputError` names the line of the first byte that is not."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where}:{line}: not UTF-8: byte 0x{raw[error.start]:02x}") from None


def parse_mapping(raw: bytes | str, where: str) -> dict[str, Any]:
    """A file that holds one mapping of fields: JSON if `where` ends in .json, YAML otherwise."""
    text = raw if isinstance(raw, str) else decode(raw, where)
    data = parse_json(text, where) if where.endswith(".json") else parse_yaml(text, where)
    if not isinstance(data, dict):
        raise InputError(f"{where}: given {'nothing' if data is None else show(data)}, allowed: a mapping of fields")
    return data


# ---- JSON ----------------------------------------------------------------------------------------------------------


def parse_json(text: str, where: str, line: int | None = None) -> Any:
    """The JSON value of `text`; `InputError` (`where:line: …`) if it is not JSON, gives a field twice, or is too large.

    `line`: the line number of `text` in the file `where`, if `text` is one line of it.
    """
    place = f"{where}:{line}" if line else where
    _fits(text, place)
    try:
        value = json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        at = place if line else f"{where}:{error.lineno}"
        raise InputError(f"{at}: not JSON: {error.msg} at column {error.colno}") from None
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    except RecursionError:
        raise InputError(_deep(place)) from None
    except ValueError:  # Python's limit on the digits of an integer
        raise InputError(_digits(place)) from None
    _count(value, place)
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InputError(f"field {twice!r} given twice")
    return fields


def _count(value: Any, place: str) -> None:
    """Refuses a value of too many parts, levels or digits."""
    level, values, depth = [value], 0, 0
    while level:
        values, depth = values + len(level), depth + 1
        if values > VALUES:
            raise InputError(_many(place))
        if any([isinstance(v, int) and abs(v) >= TOO_LARGE for v in level]):
            raise InputError(_digits(place))
        if depth > DEEPEST:
            raise InputError(_deep(place))
        inner = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [item for items in inner for item in items]


def _fits(text: str, place: str) -> None:
    if len(text) > DOCUMENT:
        raise InputError(f"{place}: given {len(text):,} characters, allowed: at most {DOCUMENT:,}")


def _many(place: str) -> str:
    return f"{place}: given more than {VALUES:,} values, allowed: no more"


def _deep(place: str) -> str:
    return f"{place}: nested too deeply, allowed: at most {DEEPEST} levels"


def _digits(place: str) -> str:
    return f"{place}: given an integer of more than {DIGITS} digits, allowed: a shorter one"


# ---- YAML ----------------------------------------------------------------------------------------------------------

# A number such as 012 is neither YAML 1.2's nor clearly decimal: it stays text, and its field refuses it.
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"(?![-+]?0[0-9])[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


def parse_yaml(text: str, where: str) -> Any:
    """The one YAML document of `text` (JSON is YAML too); `InputError` (`where:line: …`) when it is not."""
    _fits(text, where)
    if text.lstrip().startswith(("{", "[")):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            pass  # flow YAML, perhaps
        else:
            return parse_json(text, where)
    try:
        return _Document(where).value(text)
    except yaml.MarkedYAMLError as error:
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        # the end of a file is on its last line
        line = f":{min(mark.line, text.count(chr(10))) + 1}" if mark else ""
        raise InputError(f"{where}{line}: not YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = str(text.count("\n", 0, error.position) + 1)
        raise InputError(f"{where}:{line}: not YAML: {error.reason}") from None


def scalar(text: str, place: str) -> Any:
    """The value of a plain scalar; a number of too many digits is refused."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        if len(text) > DIGITS:
            raise InputError(_digits(place))
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text


class _Open:
    """A collection that has begun: what is in it so far, the field whose value comes next, and its anchor."""

    def __init__(self, made: list[Any] | dict[str, Any], anchor: str | None, before: int) -> None:
        self.made, self.anchor, self.before = made, anchor, before
        self.field: str | None = None


class _Document:
    """One document, built from the parser's events as they come: one too large or too deep is never built whole."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.made: Any = None
        self.documents = self.values = 0
        self.open: list[_Open] = []
        self.anchors: dict[str, tuple[Any, int]] = {}  # each with its number of values, aliases expanded

    def value(self, text: str) -> Any:
        """The document's value."""
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            self.take(event)
        return self.made

    def take(self, event: Any) -> None:
        """Takes one event of the parser."""
        match event:
            case yaml.DocumentStartEvent():
                self.documents += 1
                if self.documents > 1:
                    raise self.refused(event, "not YAML: expected a single document, but found another one")
            case yaml.AliasEvent():
                if event.anchor not in self.anchors:
                    raise self.refused(
                        event, f"given the alias {show(event.anchor)}, allowed: one that is complete above it"
                    )
                self.add(event, *self.anchors[event.anchor])
            case yaml.ScalarEvent():
                found = event.value if event.style else scalar(event.value, self.at(event))
                self.add(event, found)
                if event.anchor:
                    self.anchors[event.anchor] = found, 1
            case yaml.CollectionStartEvent():
                before = self.values
                made: list[Any] | dict[str, Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
                self.add(event, made)
                self.open.append(_Open(made, event.anchor, before))
                if len(self.open) > DEEPEST:
                    raise InputError(_deep(self.where))
            case yaml.CollectionEndEvent():
                done = self.open.pop()
                if isinstance(done.made, dict) and MERGE in done.made:
                    self.merge(event, done.made)
                if done.anchor:
                    self.anchors[done.anchor] = done.made, self.values - done.before

    def add(self, event: Any, found: Any, count: int = 1) -> None:
        """Puts a value where it belongs: it is the document, an item, a field's name, or a field's value."""
        if tag := getattr(event, "tag", None):
            said = show(tag.replace("tag:yaml.org,2002:", "!!"))
            raise self.refused(event, f"given the tag {said}, allowed: values without tags")
        self.values += count
        if self.values > VALUES:
            raise InputError(_many(self.where))
        inside = self.open[-1] if self.open else None
        if inside is None:
            self.made = found
        elif isinstance(inside.made, list):
            inside.made.append(found)
        elif inside.field is not None:
            inside.made[inside.field] = found
            inside.field = None
        elif not isinstance(found, str):
            raise self.refused(event, "a field's name must be text")
        elif found in inside.made:
            raise self.refused(event, f"field {found!r} given twice")
        else:
            inside.field = found

    def merge(self, event: Any, made: dict[str, Any]) -> None:
        """Fills in the fields of the mappings under the merge key; the first of them takes precedence."""
        found = made.pop(MERGE)
        for other in found if isinstance(found, list) else [found]:
            if not isinstance(other, dict):
                raise self.refused(
                    event, f"{MERGE}: given {show(other)}, allowed: a mapping of fields, or a list of them"
                )
            made.update({name: value for name, value in other.items() if name not in made})

    def at(self, event: Any) -> str:
        """The line of an event."""
        return f"{self.where}:{event.start_mark.line + 1}"

    def refused(self, event: Any, why: str) -> InputError:
        """A fault at the line of an event."""
        return InputError(f"{self.at(event)}: {why}")
