"""Reading YAML and JSON: what it refuses, with the line it is on, and that it is bounded whatever it is given."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest
from refused import line

from calc.base.reading import DOCUMENT, lines, parse_json, parse_mapping, read_bytes, read_input


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
        ("a: *b", "f.yaml:1: given the alias 'b', allowed: one that is complete above it"),
        (
            "a: !!python/object/apply:os.system [ls]",
            "f.yaml:1: given the tag '!!python/object/apply:os.system', allowed: ",
        ),
        ("a: !!bool maybe", "f.yaml:1: given the tag '!!bool', allowed: values without tags"),
        ('a: !!int ""', "f.yaml:1: given the tag '!!int', allowed: values without tags"),
        ("a: !!timestamp x", "f.yaml:1: given the tag '!!timestamp', allowed: values without tags"),
        ("a: !!map [1]", "f.yaml:1: given the tag '!!map', allowed: values without tags"),
        ("a: !!str 5", "f.yaml:1: given the tag '!!str', allowed: values without tags"),
        ("a: !own {b: 1}", "f.yaml:1: given the tag '!own', allowed: values without tags"),
        ("!!set {a, b}", "f.yaml:1: given the tag '!!set', allowed: values without tags"),
        ("a: ! 5", "f.yaml:1: given the tag '!', allowed: values without tags"),
        ("a: !!binary 5", "f.yaml:1: given the tag '!!binary', allowed: values without tags"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "f.yaml:4: field 'c' given twice"),
        ("1: a", "f.yaml:1: a field's name must be text"),
        ("[a]: b", "f.yaml:1: a field's name must be text"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "f.yaml: field 'c' given twice"),
        ("b: 1\na: " + "9" * 5000, "f.yaml:2: given an integer of more than 30 digits, allowed: a shorter one"),
        ('{"a": [' + "9" * 31 + "]}", "f.yaml: given an integer of more than 30 digits, allowed: a shorter one"),
        ('{"a": ' + "9" * 5000 + "}", "f.yaml:1: given an integer of more than 30 digits, allowed: a shorter one"),
        ("a: &a [*a]", "f.yaml:1: given the alias 'a', allowed: one that is complete above it"),
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
    text = "\n".join(" " * depth + "a:" for depth in range(300))
    assert line(lambda: parse_mapping(text, "f.yaml")) == "f.yaml: nested too deeply, allowed: at most 32 levels"


MANY = "f.yaml: given more than 20,000 values, allowed: no more"


@pytest.mark.parametrize(
    ("text", "told"),
    {
        "aliases that write out exponentially": (
            "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))]),
            MANY,
        ),
        "fields": ("".join(f"k{i}: 1\n" for i in range(20_000)), MANY),
        "items in flow": (f"a: [{'1,' * 400_000}]", MANY),
        "fields of JSON": (json.dumps({f"k{i}": 1 for i in range(20_000)}), MANY),
        "a line of hyphens": ("- " * 50_000 + "x", "f.yaml: nested too deeply, allowed: at most 32 levels"),
        "a long document": ("a: " + "x" * 2**20, "f.yaml: given 1,048,579 characters, allowed: at most 1,048,576"),
    }.values(),
)
def test_a_document_is_bounded_in_size_values_and_depth(text: str, told: str) -> None:
    """Bounded while it is read: a million fields took 12 seconds and a gigabyte."""
    assert line(lambda: parse_mapping(text, "f.yaml")) == told


def test_aliases_within_bounds_are_the_value_that_they_name() -> None:
    assert parse_mapping("a: &x {b: [1, &y 2]}\nc: *x\nd: *y", "f.yaml") == {
        "a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": 2,
    }  # fmt: skip


def test_a_merge_key_fills_in_what_is_not_given() -> None:
    text = "a: &x {p: 1, q: 1}\nb: &y {q: 2, r: 2}\nc: {<<: [*x, *y], p: 3}\nd: {<<: *x}"
    read = parse_mapping(text, "f.yaml")
    assert (read["c"], read["d"]) == ({"p": 3, "q": 1, "r": 2}, {"p": 1, "q": 1})
    told = "f.yaml:2: <<: given 5, allowed: a mapping of fields, or a list of them"
    assert line(lambda: parse_mapping("a: 1\nb: {<<: 5}", "f.yaml")) == told


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
    assert line(lambda: read_bytes(Path("/dev/zero"), "zero")) == (
        "zero: given what is no regular file, allowed: a file, or - for standard input"
    )
    os.mkfifo(pipe := tmp_path / "pipe")
    assert line(lambda: read_bytes(pipe, "pipe")).startswith("pipe: given what is no regular file")
    (tmp_path / "long").write_bytes(b"x" * 11)
    assert read_bytes(tmp_path / "long", "long", 11) == b"x" * 11
    assert line(lambda: read_bytes(tmp_path / "long", "long", 10)) == "long: given more than 10 bytes, allowed: no more"


def test_a_file_that_opens_and_cannot_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/self/mem, a broken disk, or a standard input that the shell has closed."""

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        readline = read

    (tmp_path / "f").touch()
    monkeypatch.setattr(Path, "open", lambda path, mode: Broken())
    assert line(lambda: read_bytes(tmp_path / "f", "f")) == "f: input/output error"
    assert line(lambda: list(lines(str(tmp_path / "f")))) == f"{tmp_path / 'f'}: input/output error"
    monkeypatch.setattr("sys.stdin", None)
    for read in (lambda: read_input("-"), lambda: list(lines("-"))):
        assert line(read) == "standard input: given closed, allowed: a file, or a pipe"


def test_lines_come_one_by_one_and_one_that_never_ends_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(b"1\n\n" + b"x" * 5 * DOCUMENT + b"\n2")
    first, blank, endless, last = lines(str(tmp_path / "f.jsonl"))
    assert (first, blank, last) == (b"1\n", b"\n", b"2")
    assert len(endless) == DOCUMENT + 1
