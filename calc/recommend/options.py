"""Fields of a scenario as text: options of the command line, spelled with dashes, and the address of the calculator.

Every field is one, nested ones dotted: `--offload.optimizer true`, `?offload.optimizer=true`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calc.base.reading import parse_yaml
from calc.base.schema import InputError, closest, show
from calc.scenario.scenario import SCHEMA

FLAGS = ("--json", "--scenario", "--help")


def fields(schema: Mapping[str, Any] = SCHEMA, head: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every field's dotted name with its definition in JSON Schema."""
    for name, definition in schema["properties"].items():
        while "$ref" in definition:
            definition = SCHEMA["properties"][definition["$ref"].removeprefix("#/properties/")]
        if "properties" in definition:
            yield from fields(definition, f"{head}{name}.")
        if "properties" not in definition or "string" in _kinds(definition):
            yield head + name, definition


def names() -> Iterator[tuple[str, str]]:
    """Every field's dotted name with its JSON Schema type."""
    for name, definition in fields():
        yield name, next(kind for kind in _kinds(definition) if kind not in ("object", "null"))


def _kinds(definition: Mapping[str, Any]) -> list[str]:
    kinds = definition.get("type", "string")
    return [kinds] if isinstance(kinds, str) else list(kinds)


def typed(texts: Mapping[str, str], program: str) -> dict[str, Any]:
    """The values of fields that are given as text, by dotted name; what is no field stays as it is.

    Raises InputError, one line, for text that is neither a word nor YAML.
    """
    kinds = dict(names())
    return {name: _value(text, kinds.get(name, "string"), f"{program}: {name}") for name, text in texts.items()}


def spelled(values: Mapping[str, Any]) -> dict[str, str]:
    """The text of each value, of which `typed` makes the value again."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def _value(text: str, kind: str, where: str) -> Any:
    return text if kind == "string" and not text.startswith(("[", "{")) else parse_yaml(text, where)


def read(words: Sequence[str], program: str) -> dict[str, Any]:
    """The fields that the options of a command line give: `--seq-len 4096`, `--offload.optimizer=true`.

    Raises InputError, one line that names the option, for one that is unknown, given twice, or without a value.
    """
    given: dict[str, Any] = {}
    known = {f"--{name.replace('_', '-')}": (name, kind) for name, kind in names()}
    left = list(words)
    while left:
        option, equals, value = left.pop(0).partition("=")
        name, kind = known.get(option.replace("_", "-"), ("", ""))
        if not name:
            near = closest(option, [*known, *FLAGS]) if option.startswith("--") else ""
            raise InputError(f"{program}: given {show(option)}, allowed: an option, as --seq-len 4096{near}")
        if not equals:
            if not left or left[0].startswith("--"):
                raise InputError(f"{program}: {option}: given nothing, allowed: a value after it")
            value = left.pop(0)
        if name in given:
            raise InputError(f"{program}: {option}: given twice, allowed: once")
        given[name] = _value(value, kind, option)
    return given
