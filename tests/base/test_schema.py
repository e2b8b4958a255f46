"""Mistakes that people type, and the one line that each gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refused import line

from calc.base.schema import InputError, closest, show, validator

SCHEMA = {
    "type": "object",
    "required": ["name", "size"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "size": {"type": "number", "exclusiveMinimum": 0},
        "count": {"type": "integer", "minimum": 1, "maximum": 1000000},
        "on": {"type": "boolean"},
        "kind": {"enum": ["none", "full", "selective", None]},
        "code": {"type": "string", "pattern": "^[a-z]+$", "examples": ["abc"]},
        "plain": {"type": "string", "pattern": "^[a-z]+$"},
        "inner": {"$ref": "#/definitions/inner"},
        "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "uniqueItems": True},
        "either": {"anyOf": [{"enum": ["all"]}, {"type": "array", "items": {"type": "string"}}]},
        "role": {"oneOf": [{"const": "none"}, {"$ref": "#/definitions/inner"}]},
    },
    "definitions": {
        "inner": {
            "type": "object",
            "required": ["rank"],
            "additionalProperties": False,
            "properties": {"rank": {"type": ["integer", "null"]}, "dropout": {"type": "number"}},
        }
    },
}
GOOD = {"name": "x", "size": 1}


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., None]:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return lambda **fields: validator(path)({**GOOD, **fields}, "f.yaml")


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ("[]", "given a list, [], allowed: a JSON Schema"),
        ('{"type": "objct"}', "no JSON Schema of draft 7: Unknown type"),
        ('{"properties": {"a": {"pattern": "("}}}', "no JSON Schema of draft 7: missing ), unterminated subpattern"),
    ],
)
def test_a_schema_that_is_none_is_one_line(tmp_path: Path, raw: str, line: str) -> None:
    path = tmp_path / "schema.json"
    path.write_text(raw)
    with pytest.raises(InputError, match=f"^{re.escape(f'{path}: {line}')}"):
        validator(path)({"a": "b"}, "f.yaml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": "abc"}, "f.yaml: size: given 'abc', allowed: a number above 0"),
        ({"size": 0}, "f.yaml: size: given 0, allowed: a number above 0"),
        ({"size": True}, "f.yaml: size: given true, allowed: a number above 0"),
        ({"size": None}, "f.yaml: size: given null, allowed: a number above 0"),
        ({"size": float("nan")}, "f.yaml: size: given a number that is not finite, allowed: a finite number"),
        ({"size": float("inf")}, "f.yaml: size: given a number that is not finite, allowed: a finite number"),
        ({"count": False}, "f.yaml: count: given false, allowed: an integer of at least 1 and of at most 1000000"),
        ({"count": 1.5}, "f.yaml: count: given 1.5, allowed: an integer of at least 1 and of at most 1000000"),
        ({"name": ""}, "f.yaml: name: given '', allowed: text that is not empty"),
        ({"on": "yes"}, "f.yaml: on: given 'yes', allowed: true or false"),
        ({"kind": "ful"}, "f.yaml: kind: given 'ful', allowed: none, full, selective, null; did you mean 'full'?"),
        ({"kind": "FULL"}, "f.yaml: kind: given 'FULL', allowed: none, full, selective, null; did you mean 'full'?"),
        ({"kind": "xyzzy"}, "f.yaml: kind: given 'xyzzy', allowed: none, full, selective, null"),
        ({"code": "A1"}, "f.yaml: code: given 'A1', allowed: text such as 'abc'"),
        ({"plain": "A1"}, "f.yaml: plain: given 'A1', allowed: text that matches ^[a-z]+$"),
        ({"inner": []}, "f.yaml: inner: given a list, [], allowed: a mapping of fields"),
        ({"inner": {}}, "f.yaml: missing field 'inner.rank'"),
        ({"inner": {"rank": "8"}}, "f.yaml: inner.rank: given '8', allowed: an integer or null"),
        ({"inner": {"rnk": 8}}, "f.yaml: unknown field 'inner.rnk'; did you mean 'inner.rank'?"),
        ({"list": [1, "b"]}, "f.yaml: list[1]: given 'b', allowed: an integer"),
        (
            {"list": [1, 1]},
            "f.yaml: list: given a list, [1, 1], allowed: a list without repetition that is not empty, each an integer",
        ),
        ({"either": "al"}, "f.yaml: either: given 'al', allowed: all or a list, each text"),
        ({"either": ["q", 1]}, "f.yaml: either[1]: given 1, allowed: text"),
        ({"role": "nothing"}, "f.yaml: role: given 'nothing', allowed: none or a mapping of fields"),
        ({"role": {"rank": 1, "dropot": 0}}, "f.yaml: unknown field 'role.dropot'; did you mean 'role.dropout'?"),
        ({"sise": 1}, "f.yaml: unknown field 'sise', allowed: "),
        ({"cuont": 1}, "f.yaml: unknown field 'cuont'; did you mean 'count'?"),
        ({"zz": 1}, "f.yaml: unknown field 'zz', allowed: name, size, count,"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_given_and_what_is_allowed(
    check: Callable[..., None], fields: dict[str, Any], message: str
) -> None:
    got = line(lambda: check(**fields))
    assert got.startswith(message) if message.endswith((", ", ",", ": ")) else got == message


def test_what_is_right_passes(check: Callable[..., None]) -> None:
    check(size=0.5, count=8.0, on=False, kind=None, inner={"rank": None}, list=[1, 2], either=["q_proj"], role="none")


def test_fields_that_share_no_definitions_are_checked_in_the_schemas_order_before_unknown_ones(tmp_path: Path) -> None:
    fields = {"first": {"type": "integer", "minimum": 1}, "second": {"$ref": "#/properties/first"}}
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"type": "object", "additionalProperties": False, "properties": fields}))
    for given, told in (
        ({"zz": 1, "second": 0, "first": 0}, "f: first: given 0, allowed: an integer of at least 1"),
        ({"zz": 1, "second": 0}, "f: second: given 0, allowed: an integer of at least 1"),
        ({"zz": 1, "second": 1}, "f: unknown field 'zz', allowed: first, second"),
        ([], "f: given a list, [], allowed: a mapping of fields"),
    ):
        assert line(lambda given=given: validator(path)(given, "f")) == told


def test_a_misspelt_required_field_is_called_misspelt_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(SCHEMA))
    assert (
        line(lambda: validator(path)({"name": "x", "siez": 1}, "f")) == "f: unknown field 'siez'; did you mean 'size'?"
    )
    assert line(lambda: validator(path)({"name": "x"}, "f")) == "f: missing field 'size'"


def test_of_many_fields_the_nearest_are_listed(tmp_path: Path) -> None:
    """A line that lists all forty fields of a scenario helps nobody."""
    fields = [f"field_{n}" for n in range(30)] + ["offload", "rollout"]
    path = tmp_path / "s.json"
    path.write_text(
        json.dumps({"type": "object", "additionalProperties": False, "properties": dict.fromkeys(fields, True)})
    )
    got = line(lambda: validator(path)({"onload": 1}, "f"))
    assert got.endswith("; did you mean 'offload'?")
    got = line(lambda: validator(path)({"lol": 1}, "f"))
    assert got.startswith("f: unknown field 'lol', allowed: ")
    assert {"rollout", "offload"} < set(got.partition("allowed: ")[2].split(", "))
    assert got.endswith(", or one of 26 others")


def test_a_name_with_a_line_break_stays_on_one_line(check: Callable[..., None]) -> None:
    assert "\\n" in line(lambda: check(**{"a\nb": 1}))
    assert "\\udc80" in line(lambda: check(**{"a\udc80": 1}))


def test_values_are_shown_short() -> None:
    assert show("x" * 500) == "'" + "x" * 78 + "…"
    assert (show(None), show(True), show({"a": 1}), show([1])) == ("null", "true", "a mapping of fields", "a list, [1]")


def test_the_nearest_name_is_found_whatever_the_case() -> None:
    assert closest("RTX409", ["rtx4090", "a10"]) == "; did you mean 'rtx4090'?"
    assert closest("zzz", ["rtx4090", "a10"]) == ""
