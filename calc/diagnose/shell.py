"""Commands in pasted text: their words as a shell has them, with the variables that the text sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from calc.diagnose import pasted

# $X, ${X}, ${X:-default}, ${X:?message}
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-?])([^{}]*))?\}|\$(\w+)")
_ASSIGNED = re.compile(
    r"\s*(?:export\s+|declare\s+|local\s+|\+\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|]*)\s*(?:#.*)?"
)
# NAME=(, lines of words, none of which opens another array, and ); and where bash puts them: ${NAME[@]}
_ARRAY = re.compile(
    r"^[ \t]*([A-Za-z_]\w*)=\([ \t]*\n((?:(?![ \t]*\)|.*=\([ \t]*\n).*\n)*)[ \t]*\)[ \t]*$", re.MULTILINE
)
_USED = re.compile(r"\"?\$\{(\w+)\[@\]\}\"?([ \t]*\\\n)?")
_COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
_LISTED = re.compile(r"""\[\s*(?:'[^'\n]*'|"[^"\n]*")(?:\s*,\s*(?:'[^'\n]*'|"[^"\n]*"))*\s*,?\s*\]""")
_ITEM = re.compile(r"""'([^']*)'|"([^"]*)\"""")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(?:\.\w+)+=.*", re.DOTALL)
_WHOLE = 32_768  # characters of a line that are split into words: shlex's time grows faster than a line
_ROOM = 100_000  # characters that variables, or arrays, may add to the commands of a text: each may hold another twice
_OPERATORS = {"&&", "||", ";", "|", "&"}
_STARTS = (
    "torchrun", "deepspeed", "accelerate", "trl", "swift", "megatron", "llamafactory-cli", "axolotl", "tune", "litgpt",
    "run_train.sh",
)  # fmt: skip


class Command(NamedTuple):
    """One command: its words, and the environment variables that are set for it."""

    words: tuple[str, ...]
    environment: dict[str, str]


def commands(text: str) -> list[Command]:
    """Every command of a pasted text that has options, overrides, or a launcher in front."""
    read = pasted.lines(_inlined(text))
    variables: dict[str, str] = {}
    found: list[Command] = []
    room = _ROOM

    def known(word: str) -> str:
        nonlocal room
        whole = expand(word, variables)
        if len(whole) - len(word) > min(room, pasted.LONGEST):
            return word
        room -= max(0, len(whole) - len(word))
        return whole

    for line in pasted.logical(read):
        if (match := _ASSIGNED.fullmatch(line[: pasted.LONGEST])) and not _OVERRIDE.fullmatch(line.strip()):
            variables[match[1]] = known(match[2].strip("\"'"))
            continue
        for words in _split(line):
            environment, rest = _environment([known(word) for word in words], variables)
            if is_command(rest):
                found.append(Command(tuple(rest), environment))
    return found + list(_listed(read))


def _inlined(text: str) -> str:
    """The text with bash's arrays put where they are used, and no longer where they are set."""
    if not _USED.search(text):
        return text
    room = _ROOM
    arrays = {match[1]: " ".join(_COMMENT.sub("", match[2]).split()) for match in _ARRAY.finditer(text)}

    def words(used: re.Match[str]) -> str:
        nonlocal room
        found = arrays.get(used[1])
        if found is None or len(found) > room:
            return used[0]
        room -= len(found)
        # an empty array leaves no line behind that ends the command
        return found and found + (used[2] or "")

    return _USED.sub(words, _ARRAY.sub("", text))


def is_command(words: list[str]) -> bool:
    """True if a line's words are a command: a launcher's, or with options or overrides of a configuration."""
    if not words or words[0].startswith(("#", "File", "Traceback")):
        return False
    launched = words[0].rpartition("/")[2] in _STARTS and len(words) > 1
    options = sum(1 for word in words if re.match(r"--[A-Za-z]", word) or _OVERRIDE.fullmatch(word))
    return launched or options > 1 or (options == 1 and words[0].startswith(("python", "--")))


def _split(line: str) -> Iterator[list[str]]:
    """The words of each command of a line."""
    line = line[:_WHOLE]
    try:
        words = shlex.split(line, posix=True)
    except ValueError:  # a quote that was cut off
        words = line.replace('"', " ").replace("'", " ").split()
    current: list[str] = []
    for word in words:
        if word in _OPERATORS:
            yield current
            current = []
        else:
            current.append(word.removesuffix(";"))
    yield current


def _environment(words: list[str], variables: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The assignments in front of a command, with those that the text exports, and the words after."""
    own = {name: value for name, value in variables.items() if name.isupper()}
    rest = list(words)
    while rest:
        name, equals, value = rest[0].partition("=")
        if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            own[name] = value
        elif rest[0] not in ("env", "export", "sudo", "nohup", "+", "$"):
            break
        rest.pop(0)
    return own, rest


def _listed(read: list[pasted.Line]) -> Iterator[Command]:
    """Commands as a launcher logs them, as Python lists of words; a terminal may have broken their lines."""
    text = "".join([line.text for line in read])
    for match in _LISTED.finditer(text[:500_000]):
        words = [one or other for one, other in _ITEM.findall(match[0])]
        if is_command(words):
            yield Command(tuple(words), {})


def expand(word: str, variables: dict[str, str]) -> str:
    """A word with the variables that are known; others stay as they are, of a message only the name and the message."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        if name in variables:
            return variables[name]
        return match[3] if match[2] == "-" else match[0]

    return _VARIABLE.sub(value, word)


def unknown(word: str) -> str | None:
    """The variable that a word still needs, or None."""
    match = _VARIABLE.search(word)
    return (match[1] or match[4]) if match else None
