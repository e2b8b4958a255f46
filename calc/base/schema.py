"""Checks what people write against a JSON Schema: a fault is one line with file, field, what was given and allowed."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fastjsonschema

from calc.base.refusal import Refusal

FINITE = (str, int, type(None))  # the types of most fields
SCALARS = (str, int, float)  # told from mappings sooner than these from anything else
LONGEST = 128  # characters of a name that are compared with known ones
MANY, SHOWN = 20, 6  # fields of which a line no longer lists all, and how many it lists then


class InputError(ValueError):
    """Input that cannot be used; `str()` is the one line to print."""

    def __init__(self, message: str, refusal: Refusal | None = None, field: str = "") -> None:
        """Keeps the message on one line, whatever the input had in its names.

        `refusal`: the parts of the message. `field`: the field at fault, where there is one and no refusal.
        """
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
        self.refusal, self.field = refusal, refusal.field if refusal else field


def closest(name: str, names: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `names`, case aside; empty when none is near."""
    known = {n.casefold(): n for n in names}
    name = name[:LONGEST]  # the time that difflib takes grows with the square
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


@functools.cache
def validator(schema: Path, required: tuple[str, ...] | None = None) -> Callable[[Any, str], None]:
    """A function `(data, where)` that raises `InputError` (one line, beginning with `where`) for the first fault.

    `schema` is a JSON Schema file (draft 7); `required` replaces the fields that it asks for. Beyond it, numbers must
    be finite; booleans are no numbers.
    """
    root = _read(schema)
    if required is not None:
        root = {**root, "required": list(required)}
    needed = frozenset(root.get("required", ()))

    def check(data: Any, where: str) -> None:
        if isinstance(data, Mapping) and not needed <= data.keys():
            fault = _misnamed(root, data, "")
            raise InputError(f"{where}: {fault.line}", field=fault.field)
        try:
            for field in _apart(root, data):
                _compiled(schema, field)(data[field], name_prefix=f"data.{field}")
            _compiled(schema)(data)
        except fastjsonschema.JsonSchemaValueException as error:
            fault = _fault(error, root)
            raise InputError(f"{where}: {fault.line}", field=fault.field) from None
        if (place := _not_finite(data, set())) is not None:
            refusal = Refusal(place, "a number that is not finite", "a finite number")
            raise InputError(f"{where}: {refusal}", refusal)

    return check


@functools.cache
def _read(schema: Path) -> Mapping[str, Any]:
    try:
        read = json.loads(schema.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{schema}: {str(error.strerror).lower()}") from None
    if not isinstance(read, Mapping):
        raise InputError(f"{schema}: given {show(read)}, allowed: a JSON Schema")
    return read


def _apart(schema: Mapping[str, Any], data: Any) -> Iterator[str]:
    """The fields of `data` that are checked one by one, in the schema's order; none where they share definitions.

    Few fields of many are given: to compile the rules of all would take longer than most answers.
    """
    if isinstance(data, Mapping) and "definitions" not in schema:
        yield from (field for field in schema.get("properties", ()) if field in data)


@functools.cache
def _compiled(schema: Path, field: str | None = None) -> Callable[..., Any]:
    """The check of one field's value, or of what `_apart` leaves, compiled once for every choice of required fields."""
    root = {rule: value for rule, value in _read(schema).items() if rule != "required"}
    if field is not None:
        root["$ref"] = f"#/properties/{field}"  # which stands for all beside it
    elif "definitions" not in root and "properties" in root:
        root["properties"] = dict.fromkeys(root["properties"], True)
    try:
        return fastjsonschema.compile(root, use_default=False)
    except (fastjsonschema.JsonSchemaDefinitionException, re.error) as error:
        raise InputError(f"{schema}: no JSON Schema of draft 7: {error}") from None


def _not_finite(value: Any, seen: set[int]) -> str | None:
    """The first field of `value` that holds NaN or an infinity, empty for `value` itself; None where none does.

    `seen` keeps YAML's aliases from being walked twice.
    """
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    nested = isinstance(value, Mapping)
    if not (nested or isinstance(value, list)) or id(value) in seen:
        return None
    seen.add(id(value))
    for name, item in value.items() if nested else enumerate(value):
        if not isinstance(item, FINITE) and (found := _not_finite(item, seen)) is not None:
            return f"{name}.{found}" if found else str(name)
    return None


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


class _Fault(NamedTuple):
    """The field at fault, and the line on it: an unknown or a missing one, or what was given and what is allowed."""

    field: str
    line: str


def _fault(error: fastjsonschema.JsonSchemaValueException, root: Mapping[str, Any], prefix: str = "") -> _Fault:
    """A failed rule in words."""
    field = prefix + (error.name or "").removeprefix("data")
    definition, value = error.definition, error.value
    inside = f"{field.lstrip('.')}." if field else ""
    if error.rule in ("required", "additionalProperties"):
        return _misnamed(definition, value, inside)
    if error.rule in ("anyOf", "oneOf"):  # the one alternative meant is the one of the value's type
        options = [_resolve(option, root) for option in definition[error.rule]]
        meant = [o for o in options if isinstance(value, _TYPES.get(o.get("type", ""), ()))]
        if len(meant) == 1:
            definitions = {key: root[key] for key in ("definitions", "$defs") if key in root}
            try:
                fastjsonschema.compile({**definitions, **meant[0]}, use_default=False)(value)
            except fastjsonschema.JsonSchemaValueException as deeper:
                return _fault(deeper, root, field)
    allowed = _allowed(definition, root)
    near = ""
    if isinstance(value, str):
        meant = definition.get("meant", {}).get(value.casefold())  # another name for one of the values
        near = closest(meant or value, map(str, definition.get("enum", ())))
    return _Fault(inside[:-1], f"{inside[:-1]}: given {show(value)}, allowed: {allowed}{near}".removeprefix(": "))


def _misnamed(definition: Mapping[str, Any], value: Mapping[str, Any], inside: str) -> _Fault:
    """The field of a mapping that is not known or, if there is none, the one that is missing."""
    known = list(definition.get("properties", ()))
    patterns = definition.get("patternProperties", ())
    if definition.get("additionalProperties") is False:
        for name in value:  # before what is missing: a misspelt field is both
            if name not in known and not any(re.search(pattern, name) for pattern in patterns):
                near = closest(name, (n for n in known if n not in value))
                hint = near.replace("did you mean '", f"did you mean '{inside}")
                allowed = hint or f", allowed: {_nearest(name, known)}"
                return _Fault(inside + name, f"unknown field {inside + name!r}{allowed}")
    missing = next(name for name in definition["required"] if name not in value)
    return _Fault(inside + missing, f"missing field {inside + missing!r}")


def _nearest(name: str, known: list[str]) -> str:
    """The known fields, or of many the nearest to `name`."""
    if len(known) <= MANY:
        return ", ".join(known)
    near = difflib.get_close_matches(name[:LONGEST], known, n=SHOWN, cutoff=0)
    return f"{', '.join(near)}, or one of {len(known) - len(near)} others"


def _allowed(definition: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """The values that a definition of the schema allows, in words."""
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
    """The values of one JSON type that a definition allows, in words."""

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
