"""Files of settings within pasted text: mappings in YAML or JSON, among anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from calc.base.reading import parse_yaml
from calc.base.schema import InputError
from calc.diagnose.pasted import Line

# an exception's last line, `torch.OutOfMemoryError: CUDA out of memory`, is no field
_FIELD = re.compile(r"(\s*)(?:- )?['\"]?(?![\w.]*(?:Error|Exception)\s*:)[A-Za-z_][\w.-]*['\"]?\s*:(?:\s.*)?")
_ITEM = re.compile(r"\s*(?:- .*|-)")
_LEAST = 2  # fields of a mapping, to be one and not a line of a log


def mappings(lines: list[Line]) -> Iterator[dict[str, Any]]:
    """Every mapping of a text."""
    rest = list(lines)
    for start, end, found in _json("\n".join([line.text for line in lines])):
        yield found
        rest = [line for n, line in enumerate(rest) if not start <= n <= end] if len(rest) == len(lines) else rest
    for block in _blocks(rest):
        if read := _read(block):
            yield read


def _json(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The objects of JSON that begin a line, with the lines on which they begin and end."""
    decoder, position = json.JSONDecoder(), 0
    for match in re.finditer(r"(?m)^[^\S\n]*\{\s*(?:$|\")", text):
        start = text.index("{", match.start())
        if start < position:
            continue
        try:
            found, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and len(found) >= _LEAST:
            yield text.count("\n", 0, start), text.count("\n", 0, position), found


def _blocks(lines: list[Line]) -> Iterator[list[str]]:
    """Runs of lines that can be fields of a YAML mapping; blank lines and comments may stand between."""
    block: list[str] = []
    for line in lines:
        text = line.text
        field = _FIELD.fullmatch(text[:2000])
        if field or (block and (_ITEM.fullmatch(text) or not text.strip() or text.lstrip().startswith("#"))):
            block.append(text)
            continue
        yield block
        block = []
    yield block


def _read(block: list[str]) -> dict[str, Any] | None:
    """The mapping of a block: as YAML or, if it is none, the fields that stand on lines of their own."""
    if sum(1 for line in block if _FIELD.fullmatch(line[:2000])) < _LEAST:
        return None
    text = "\n".join(block)
    try:
        found = parse_yaml(text, "pasted")
    except InputError:
        found = {}
        for line in block:
            name, _, value = line.strip().removeprefix("- ").partition(":")
            try:
                found.setdefault(name.strip("'\" "), parse_yaml(value.strip() or "null", "pasted"))
            except InputError:
                continue
    return found if isinstance(found, dict) and len(found) >= _LEAST else None
