"""Reading what people write: any bad input becomes one line that names file, field, what was given, what is allowed."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import fastjsonschema
import yaml


class InputError(ValueError):
    """Input that cannot be used; `str()` is the one line to print."""

    def __init__(self, message: str) -> None:
        """Keeps the message on one line, whatever the input had in its names."""
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))


def closest(name: str, names: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `names`, case aside; empty when none is near."""
    known = {n.casefold(): n for n in names}
    near = [n for n in known if name and n.startswith(name.casefold())]
    near = near or difflib.get_close_matches(name.casefold(), known, n=1)
    return f"; did you mean {known[near[0]]!r}?" if near else ""


def show(value: Any) -> str:
    """A given value as a short text on one line, spelled as YAML spells it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping of fields"
    # reprlib: YAML's aliases can write a list that spells out to gigabytes
    text = f"a list, {reprlib.repr(list(value))}" if isinstance(value, list | tuple) else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


# --- reading: YAML 1.2's scalars (1e3 is a number, `on` and dates are text), no field twice, field names are text ---

# A number such as 012 is neither YAML 1.2's nor clearly decimal: it stays text, and its field refuses it.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"(?![-+]?0[0-9])[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
)


class _FieldError(yaml.MarkedYAMLError):
    """YAML, but no mapping of fields."""


class _Rules:
    """What both of PyYAML's loaders are told."""

    yaml_implicit_resolvers: ClassVar = {  # by a scalar's first character
        first: [
            (f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$")) for tag, pattern, by in _SCALARS if first in by
        ]
        for first in ["", *"~nNtTfF-+.0123456789"]
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _FieldError(problem="a field's name must be text", problem_mark=key.start_mark)
            if key.value in seen:
                raise _FieldError(problem=f"field {key.value!r} given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)  # type: ignore[misc]
        return mapping


class _Loader(_Rules, yaml.SafeLoader):
    pass


class _FastLoader(_Rules, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    pass


def _loader(text: str) -> type[yaml.SafeLoader]:
    """The fast loader where the text cannot nest deeply: it is recursive C, and overflows the stack unguarded."""
    deepest = text.count("[") + text.count("{") + 2 * max(map(len, text.splitlines()), default=0)
    return _FastLoader if deepest < 4000 else _Loader


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise InputError(f"field {next(n for n in names if names.count(n) > 1)!r} given twice")
    return fields


def parse_json(text: str, where: str, line: int | None = None) -> Any:
    """The JSON value of `text`; `InputError` (`where:line: …`) when it is not JSON or gives a field twice.

    `line`: the number of the line in the file `where` that `text` is, where it is one.
    """
    place = f"{where}:{line}" if line else where
    try:
        return json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        at = place if line else f"{where}:{error.lineno}"
        raise InputError(f"{at}: not JSON: {error.msg} at column {error.colno}") from None
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    except RecursionError:
        raise InputError(f"{place}: nested too deeply") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise InputError(f"{place}: given a number of thousands of digits, allowed: a shorter one") from None


def parse_yaml(text: str, where: str) -> Any:
    """The one YAML document of `text` (JSON is YAML too); `InputError` (`where:line: …`) when it is not."""
    if text.lstrip().startswith(("{", "[")):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            pass  # flow YAML, perhaps
        else:
            return parse_json(text, where)
    try:
        return yaml.load(text, _loader(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{min(mark.line, text.count(chr(10))) + 1}" if mark else ""  # the end of a file is on its last line
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise InputError(f"{where}{line}: {'' if isinstance(error, _FieldError) else 'not YAML: '}{problem}") from None
    except yaml.reader.ReaderError as error:
        line = str(text.count("\n", 0, error.position) + 1)
        raise InputError(f"{where}:{line}: not YAML: {error.reason}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise InputError(f"{where}: given a number of thousands of digits, allowed: a shorter one") from None


def decode(raw: bytes, where: str) -> str:
    """UTF-8 text (a byte order mark is dropped); `InputError` names the line of the first byte that is not."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where}:{line}: not UTF-8: byte 0x{raw[error.start]:02x}") from None


def read_bytes(path: Path, where: str) -> bytes:
    """A file's bytes; `InputError` says why it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{where}: {reason[0].lower()}{reason[1:]}") from None


def parse_mapping(raw: bytes | str, where: str) -> dict[str, Any]:
    """A file that holds one mapping of fields: JSON if `where` ends in .json, YAML otherwise."""
    text = raw if isinstance(raw, str) else decode(raw, where)
    data = parse_json(text, where) if where.endswith(".json") else parse_yaml(text, where)
    if not isinstance(data, dict):
        raise InputError(f"{where}: given {'nothing' if data is None else show(data)}, allowed: a mapping of fields")
    return data


# --- validating: one validator for all, JSON Schema compiled once ---


@functools.cache
def validator(schema: Path) -> Callable[[Any, str], None]:
    """A function `(data, where)` that raises `InputError` (one line, beginning with `where`) for the first fault.

    `schema` is a JSON Schema file (draft 7). Beyond it, numbers must be finite; booleans are no numbers.
    """
    root = json.loads(read_bytes(schema, str(schema)))
    compiled = fastjsonschema.compile(root, use_default=False)

    def check(data: Any, where: str) -> None:
        try:
            compiled(data)
        except fastjsonschema.JsonSchemaValueException as error:
            raise InputError(f"{where}: {_line(error, root)}") from None
        if (field := _not_finite(data, "", set())) is not None:
            raise InputError(f"{where}: {field}: given a number that is not finite, allowed: a finite number")

    return check


def _not_finite(value: Any, field: str, seen: set[int]) -> str | None:
    """The first field that holds NaN or an infinity; `seen` keeps YAML's aliases from being walked twice."""
    if isinstance(value, float):
        return None if math.isfinite(value) else field
    if not isinstance(value, Mapping | list) or id(value) in seen:
        return None
    seen.add(id(value))
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    within = (_not_finite(item, f"{field}.{name}" if field else str(name), seen) for name, item in items)
    return next((found for found in within if found is not None), None)


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (Mapping,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "integer": (int, float), "number": (int, float),
}  # fmt: skip


def _resolve(definition: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in definition:
        target: Any = root
        for part in definition["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        definition = target
    return definition


def _line(error: fastjsonschema.JsonSchemaValueException, root: Mapping[str, Any], prefix: str = "") -> str:
    """A failed rule in words: unknown field, missing field, or what was given and what is allowed."""
    field = prefix + (error.name or "").removeprefix("data")
    definition, value = error.definition, error.value
    inside = f"{field.lstrip('.')}." if field else ""
    if error.rule in ("required", "additionalProperties"):
        known = list(definition.get("properties", ()))
        patterns = definition.get("patternProperties", ())
        if definition.get("additionalProperties") is False:
            for name in value:  # before what is missing: a misspelt field is both
                if name not in known and not any(re.search(pattern, name) for pattern in patterns):
                    near = closest(name, (n for n in known if n not in value))
                    return f"unknown field {inside + name!r}" + (
                        near.replace("did you mean '", f"did you mean '{inside}") or f", allowed: {', '.join(known)}"
                    )
        missing = next(name for name in definition["required"] if name not in value)
        return f"missing field {inside + missing!r}"
    if error.rule in ("anyOf", "oneOf"):  # the one alternative meant is the one of the value's type
        options = [_resolve(option, root) for option in definition[error.rule]]
        meant = [o for o in options if isinstance(value, _TYPES.get(o.get("type", ""), ()))]
        if len(meant) == 1:
            definitions = {key: root[key] for key in ("definitions", "$defs") if key in root}
            try:
                fastjsonschema.compile({**definitions, **meant[0]}, use_default=False)(value)
            except fastjsonschema.JsonSchemaValueException as deeper:
                return _line(deeper, root, field)
    allowed = _allowed(definition, root)
    near = closest(value, map(str, definition.get("enum", ()))) if isinstance(value, str) else ""
    return f"{inside[:-1]}: given {show(value)}, allowed: {allowed}{near}".removeprefix(": ")


def _allowed(definition: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """What a definition of the schema allows, in words."""
    definition = _resolve(definition, root)
    if "enum" in definition or "const" in definition:
        values = definition.get("enum", [definition.get("const")])
        return ", ".join(v if isinstance(v, str) else show(v) for v in values)
    for rule in ("anyOf", "oneOf"):
        if rule in definition:
            return " or ".join(_allowed(option, root) for option in definition[rule])
    kinds = definition.get("type", [])
    return " or ".join(_kind(kind, definition, root) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _kind(kind: str, definition: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """What a definition allows of one JSON type, in words."""

    def bounded(what: str, unit: str, **words: str) -> str:
        limits = [f"{word} {definition[rule]}{unit}" for rule, word in words.items() if rule in definition]
        text = " and ".join([f"{what} {limits[0]}", *limits[1:]]) if limits else what
        return text.replace(f"of at least 1{unit}", "that is not empty") if unit else text

    if kind in ("number", "integer"):
        what = "a number" if kind == "number" else "an integer"
        words = {
            "exclusiveMinimum": "above",
            "minimum": "of at least",
            "exclusiveMaximum": "below",
            "maximum": "of at most",
        }
        return bounded(what, "", **words)
    if kind == "string":
        if "examples" in definition:
            return f"text such as {definition['examples'][0]!r}"
        if "pattern" in definition:
            return f"text that matches {definition['pattern']}"
        return bounded("text", " characters", minLength="of at least", maxLength="of at most")
    if kind == "array":
        what = "a list without repetition" if definition.get("uniqueItems") else "a list"
        what = bounded(what, " items", minItems="of at least", maxItems="of at most")
        return f"{what}, each {_allowed(definition['items'], root)}" if "items" in definition else what
    return {"object": "a mapping of fields", "boolean": "true or false", "null": "null"}[kind]
