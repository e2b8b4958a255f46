"""Pasted text as it was before a terminal and a log wrapped it: lines without colours, ranks, processes and times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

LINES = 10_000  # of the end of a text, which are read
LONGEST = 4000  # characters of a line that are looked at where a pattern would walk back and forth

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# What stands before a line of a log: each is taken off once, whatever their order. The first two say who speaks.
_SPEAKERS = (
    re.compile(r"\(([\w.:<>-]+(?: rank=\d+)? pid=\d+(?:, ip=[\d.]+)?)\)\s?"),
    re.compile(r"\[(rank\d+)\]:\s?"),
)
_PREFIXES = (
    re.compile(r"\[?\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]?\s*"),
    re.compile(r"\d\d:\d\d:\d\d[.,]\d+\s?"),
    re.compile(r"\[(?:INFO|WARNING|ERROR|Driver)\]\s*|- \w+ - (?:INFO|WARNING|ERROR) - "),
    re.compile(r"(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\]\s?"),
    re.compile(r"[\w-]{1,40}\s+\| (?=\S)"),
)


class Line(NamedTuple):
    """A line of a log without its prefixes, and the process that wrote it; "" where none is named."""

    text: str
    speaker: str


def end(text: str) -> str:
    """The end of a long text, where a log says what happened."""
    return "\n".join(_one_kind(text).rsplit("\n", LINES)[-LINES:])


def lines(text: str) -> list[Line]:
    """The lines of pasted text."""
    return [_line(raw) for raw in _COLOUR.sub("", _one_kind(text)).split("\n")]


def _one_kind(text: str) -> str:
    """A text with line ends of one kind; a progress bar writes a line over another."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _line(raw: str) -> Line:
    speaker, left = "", True
    whole = raw.rstrip()
    text, rest = whole[:LONGEST], whole[LONGEST:]
    while left:
        left = False
        for pattern in (*_SPEAKERS, *_PREFIXES):
            match = pattern.match(text.lstrip())
            if match:
                text, left = text.lstrip()[match.end() :], True
                speaker = match[1] if pattern in _SPEAKERS else speaker
    return Line(text + rest, speaker)


def joined(read: list[Line]) -> str:
    """The text of all lines."""
    return "\n".join([line.text for line in read])


# a comment after the backslash is a slip that people paste
_CONTINUED = re.compile(r"\\\s*(?:#.*)?$")


def logical(read: list[Line]) -> Iterator[str]:
    """Lines as a shell reads them: those that end in a backslash are joined with the next."""
    held = ""
    for line in read:
        match = _CONTINUED.search(line.text[-LONGEST:]) if "\\" in line.text else None
        if match and line.text.strip() != "\\":
            held += line.text[: line.text.rindex("\\")] + " "
            continue
        if held or line.text.strip():
            yield held + ("" if line.text.strip() == "\\" else line.text)
        held = ""
    if held:
        yield held
