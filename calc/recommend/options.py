"""The command line of `recommend`: every field of a scenario is an option, spelled with dashes, nested ones dotted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calc.base.reading import parse_yaml
from calc.base.schema import InputError, closest, show
from calc.scenario.scenario import SCHEMA

FLAGS = ("--json", "--scenario", "--help")


def names(schema: Mapping[str, Any] = SCHEMA, head: str = "") -> Iterator[tuple[str, str]]:
    """Every field's dotted name with its JSON Schema type."""
    for name, definition in schema["properties"].items():
        while "$ref" in definition:
            definition = SCHEMA["properties"][definition["$ref"].removeprefix("#/properties/")]
        kinds = definition.get("type", "string")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if "properties" in definition:
            yield from names(definition, f"{head}{name}.")
        if "properties" not in definition or "string" in kinds:
            yield head + name, next(kind for kind in kinds if kind not in ("object", "null"))


def read(words: Sequence[str], program: str) -> dict[str, Any]:
    """The fields that the options of a command line give: `--seq-len 4096`, `--offload.optimizer=true`.

    Raises InputError, one line that names the option, for one that is unknown, given twice, or without a value.
    """
    fields: dict[str, Any] = {}
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
        if name in fields:
            raise InputError(f"{program}: {option}: given twice, allowed: once")
        text = kind == "string" and not value.startswith(("[", "{"))
        fields[name] = value if text else parse_yaml(value, option)
    return fields
