"""The flags of one command, read by name; those that were read are remembered, so that the others can be named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from calc.base.reading import scalar
from calc.base.schema import InputError
from calc.diagnose.shell import Command, unknown

ON = "true"  # the value of a switch
_FALSE = ("false", "0", "no", "none", "null", "")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"\S+\.(?:py|sh)")
_NUMBER = re.compile(r"\d[\d.e+-]*")


class Flags:
    """Settings by name, as text, with `-` for `_` in names made alike; of one given twice the last counts.

    `variables` are settings whose value is a shell variable that the text does not set: they are not in `values`.
    """

    def __init__(self, values: Mapping[str, str], variables: Mapping[str, str], program: str = "") -> None:
        self.values = dict(values)
        self.variables = dict(variables)
        self.program = program
        self.asked: set[str] = set()

    def has(self, *names: str) -> bool:
        """True if one of these is set, even to a variable."""
        self.asked |= set(names)
        return any(name in self.values or name in self.variables for name in names)

    def text(self, *names: str) -> str | None:
        """The value of the first of these names that is set."""
        self.asked |= set(names)
        return next((self.values[name] for name in names if name in self.values), None)

    def on(self, *names: str) -> bool:
        """True if a switch is given, or set to something that is not false."""
        value = self.text(*names)
        return value is not None and value.casefold() not in _FALSE

    def switch(self, *names: str) -> bool | None:
        """A switch that is on by default in some releases, so that only what is given counts; None if none is set."""
        return None if self.text(*names) is None else self.on(*names)

    def recomputed(self, *names: str) -> str | None:
        """The switch of checkpointing as a value of the field; None if it is not set."""
        on = self.switch(*names)
        return None if on is None else "full" if on else "none"

    def machine(self, each: tuple[str, ...], nodes: tuple[str, ...]) -> dict[str, Any]:
        """The numbers of GPUs by flags for those of one node, `each`, and for the number of `nodes`."""
        own, count = self.integer(*each), self.integer(*nodes) or 1
        return {"gpus": own and own * count, "gpus_per_node": own if own and count > 1 else None}

    def integer(self, *names: str) -> int | None:
        """A whole number of at least 1; None for anything else."""
        value = self.number(*names)
        return int(value) if value is not None and value >= 1 and value == int(value) else None

    def number(self, *names: str) -> float | None:
        """A number; None for anything else."""
        value = self.text(*names)
        try:
            found = None if value is None else scalar(value.strip(), "a flag")
        except InputError:
            return None
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None

    def left(self, ignored: re.Pattern[str]) -> list[str]:
        """The settings that nothing has read, without those that decide no memory."""
        return [name for name in self.values if name not in self.asked and not ignored.search(name)]


def of(command: Command) -> Flags:
    """The options and overrides of a command."""
    values: dict[str, str] = {}
    variables: dict[str, str] = {}
    words = list(command.words)
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if match := _OVERRIDE.fullmatch(word):
            name, value = match[1], match[2].strip("'\"")
        elif (match := _OPTION.fullmatch(word)) and not re.fullmatch(r"-\d.*", word):
            name = match[1].replace("-", "_")
            given: list[str] = [match[2]] if match[2] is not None else []
            while match[2] is None and index < len(words) and not _next(words[index], given):
                given.append(words[index])
                index += 1
                if word in ("-m", "--module"):
                    break
            value = " ".join(given) if given else ON
        else:
            continue
        if missing := unknown(value):
            variables[name] = missing
            values.pop(name, None)
            if "made of " in value:  # a placeholder of our own commands says what it stands for
                values[name] = value.rpartition("made of ")[2].strip('"}')
            continue
        values[name] = value
    return Flags(values, variables, " ".join(words))


def _next(word: str, given: list[str]) -> bool:
    """True if a word ends a setting's value: it begins the next setting, or is the program that a launcher starts."""
    if _OVERRIDE.fullmatch(word) or re.match(r"--?[A-Za-z]", word) or word in ("--", "&"):
        return True
    return bool(given) and (
        bool(_PROGRAM.fullmatch(word)) or (bool(_NUMBER.fullmatch(given[-1])) and not _NUMBER.fullmatch(word))
    )


def flat(data: Mapping[Any, Any], head: str = "") -> dict[str, str]:
    """A nested mapping, as a file of settings holds it, as text by dotted name."""
    found: dict[str, str] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{head}{name}.")
        elif isinstance(value, list):
            found[f"{head}{name}"] = " ".join(map(word, value))
        elif value is not None:
            found[f"{head}{name}"] = word(value)
    return found


def word(value: Any) -> str:
    """A value as a file of settings spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def listed(value: str) -> list[str]:
    """The items of a value that lists several: `a,b`, `a b`, `[a,b]` or `['a', 'b']`."""
    return [item for item in re.split(r"[\s,\[\]'\"]+", value) if item]


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are known."""
    return {name: value for name, value in fields.items() if value is not None}
