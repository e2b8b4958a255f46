"""What people type wrong, and the one line each gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calc.schema import InputError, closest, parse_json, parse_mapping, read_bytes, show, validator

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


def line(call: Callable[[], Any]) -> str:
    """The one line that a call is refused with."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert text.isprintable()
    return text


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


def test_a_misspelt_required_field_is_called_misspelt_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(SCHEMA))
    assert (
        line(lambda: validator(path)({"name": "x", "siez": 1}, "f")) == "f: unknown field 'siez'; did you mean 'size'?"
    )
    assert line(lambda: validator(path)({"name": "x"}, "f")) == "f: missing field 'size'"


def test_a_name_with_a_line_break_stays_on_one_line(check: Callable[..., None]) -> None:
    assert "\\n" in line(lambda: check(**{"a\nb": 1}))
    assert "\\udc80" in line(lambda: check(**{"a\udc80": 1}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml: given nothing, allowed: a mapping of fields"),
        ("- a", "f.yaml: given a list, ['a'], allowed: a mapping of fields"),
        ("abc", "f.yaml: given 'abc', allowed: a mapping of fields"),
        ("a: 1\nb: [1", "f.yaml:2: not YAML: "),
        ("a:\n\tb: 1", "f.yaml:2: not YAML: "),
        ("a: \x01", "f.yaml:1: not YAML: "),
        ("a: 1\n---\nb: 2", "f.yaml:2: not YAML: "),
        ("a: *b", "f.yaml:1: not YAML: "),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml:1: not YAML: "),
        ("a: 1\nb:\n  c: 1\n  c: 2", "f.yaml:4: field 'c' given twice"),
        ("1: a", "f.yaml:1: a field's name must be text"),
        ("[a]: b", "f.yaml:1: a field's name must be text"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "f.yaml: field 'c' given twice"),
        ("a: " + "9" * 5000, "f.yaml: given a number of thousands of digits, allowed: a shorter one"),
    ],
)
def test_what_is_no_mapping_of_fields_is_refused_with_its_line(text: str, message: str) -> None:
    got = line(lambda: parse_mapping(text, "f.yaml"))
    assert got.startswith(message) if message.endswith(": ") else got == message


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 50_000, '{"a":' * 50_000 + "1" + "}" * 50_000])
@pytest.mark.parametrize("name", ["f.yaml", "f.json"])
def test_deep_nesting_neither_overflows_the_stack_nor_hangs(text: str, name: str) -> None:
    assert line(lambda: parse_mapping(text, name)).startswith(f"{name}:")


def test_deep_indentation_is_refused() -> None:
    text = "\n".join(" " * depth + "a:" for depth in range(3000))
    assert line(lambda: parse_mapping(text, "f.yaml")) == "f.yaml: nested too deeply"


def test_aliases_that_unfold_exponentially_or_into_themselves_are_checked_at_once(tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    path.write_text("{}")
    laughs = "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))])
    validator(path)(parse_mapping(laughs, "f.yaml"), "f.yaml")
    validator(path)(parse_mapping("&a\nb: *a", "f.yaml"), "f.yaml")


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "a: 1e3\nb: on\nc: 2024-01-01\nd: 12:30\ne: 1_000\nf: .5\ng:\nh: 010\ni: -1.5E+2\nj: .nan\nk: 4.40\nl: '5'"
    expected = [1000.0, "on", "2024-01-01", "12:30", 1000, 0.5, None, "010", -150.0, ".nan", 4.4, "5"]
    assert parse_mapping(text, "f.yaml") == dict(zip("abcdefghijkl", expected, strict=True))


def test_json_is_told_by_the_file_name_and_its_errors_name_the_line() -> None:
    assert line(lambda: parse_mapping('{"a": 1,\n"b": }', "c.json")).startswith("c.json:2: not JSON: ")
    assert line(lambda: parse_mapping("a: 1", "c.json")).startswith("c.json:1: not JSON: ")
    assert line(lambda: parse_json("{", "c.jsonl", 7)).startswith("c.jsonl:7: not JSON: ")
    assert line(lambda: parse_json('{"a": 1, "a": 2}', "c.jsonl", 7)) == "c.jsonl:7: field 'a' given twice"


def test_json_with_tabs_and_escapes_and_flow_yaml_are_both_read() -> None:
    assert parse_mapping('{\n\t"a": "\\ud83d\\ude00"}', "stdin") == {"a": "\U0001f600"}
    assert parse_mapping("{a: 1, b: [x]}", "stdin") == {"a": 1, "b": ["x"]}


def test_bytes_are_utf_8_with_or_without_a_mark() -> None:
    assert parse_mapping(b"\xef\xbb\xbfa: 1", "f.yaml") == {"a": 1}
    assert line(lambda: parse_mapping(b"a: 1\nb: \xe9", "f.yaml")) == "f.yaml:2: not UTF-8: byte 0xe9"


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert line(lambda: read_bytes(tmp_path / "none", "none")) == "none: no such file or directory"
    assert line(lambda: read_bytes(tmp_path, "dir")) == "dir: is a directory"
    assert line(lambda: read_bytes(Path("a\0b"), "odd")).startswith("odd: ")


def test_values_are_shown_short() -> None:
    assert show("x" * 500) == "'" + "x" * 78 + "…"
    assert (show(None), show(True), show({"a": 1}), show([1])) == ("null", "true", "a mapping of fields", "a list, [1]")


def test_the_nearest_name_is_found_whatever_the_case() -> None:
    assert closest("RTX409", ["rtx4090", "a10"]) == "; did you mean 'rtx4090'?"
    assert closest("zzz", ["rtx4090", "a10"]) == ""
