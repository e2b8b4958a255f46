"""The tracer's and the harness's commands without PyTorch: help is shown, and why nothing runs is one line.

So is what is wrong with a file that they are given.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from measurements.bench import __main__ as bench
from measurements.trace import __main__ as trace
from measurements.trace import stored
from measurements.trace.case import MODELS, CaseError, from_scenario, model_config

COMMANDS = (trace, stored, bench)


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No PyTorch, whether the Python that runs this has one or not."""

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else found(name, *a))
    monkeypatch.setattr(stored, "installed", lambda name: None)
    for name in ("torch", "measurements.trace.fake"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_shown(command: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["command", "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()  # type: ignore[attr-defined]
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m measurements.")


@pytest.mark.parametrize(
    ("command", "arguments", "line"),
    [
        (trace, [str(MODELS / "qwen2.5-0.5b.yaml")], "torch is not installed here: make trace sets it up"),
        (trace, ["--batch", "-"], "torch is not installed here: make trace sets it up"),
        (stored, ["--only", "qwen2.5-0.5b/sft/s512"], "torch is not installed here: make trace sets it up"),
    ],
)
def test_what_is_missing_is_one_line(
    command: object,
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    assert command.main() == 2  # type: ignore[attr-defined]
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.parametrize("command", [trace, stored])
def test_a_file_that_is_not_there_is_named(
    command: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once `[Errno 2] No such file or directory`."""
    arguments = ["nowhere.yaml"] if command is trace else ["--add", "nowhere.yaml"]
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    assert command.main() == 2  # type: ignore[attr-defined]
    assert capsys.readouterr() == ("", "nowhere.yaml: no such file or directory\n")


@pytest.mark.parametrize(
    ("command", "arguments", "line"),
    [
        (trace, [], "python -m measurements.trace: a scenario file or --batch is needed; "),
        (trace, ["--detial", "x"], "python -m measurements.trace: unrecognized arguments: --detial; "),
        (stored, ["--jobs", "0"], "python -m measurements.trace.stored: --jobs: given 0, allowed: 1 or more; "),
        (stored, ["--jobs", "x"], "python -m measurements.trace.stored: argument --jobs: invalid int value: 'x'; "),
        (bench, [], "python -m measurements.bench: the following arguments are required: SUITE.yaml, --out; "),
    ],
)
def test_arguments_that_cannot_be_used_are_one_line(
    command: object,
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()  # type: ignore[attr-defined]
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(line) and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: qwen2.5-0.5b\npacking: !!bool maybe\n", ":2: given a tag, allowed: plain values"),
        ("seq_len: !!int ''\n", ":1: given a tag, allowed: plain values"),
        ("model: x\nseq_len: [1\n", ":3: expected ',' or ']', but got '<stream end>'"),
        ("model: 2001-99-99\n", ": not YAML: month must be in 1..12"),
        ("[" * 2000, ": nested too deep"),
        ("model: \0", ": not YAML: unacceptable character #x0000: special characters are not allowed"),
        ("- 1\n", ": given [1], allowed: a mapping of fields"),
        ("", ": given 0 documents, allowed: a mapping of fields"),
        ("model: x\n---\nmodel: y\n", ": given 2 documents, allowed: a mapping of fields"),
        ("model: \xe9", ": not UTF-8: unexpected end of data"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode("latin-1"))
    monkeypatch.setattr("sys.argv", ["command", str(path)])
    assert trace.main() == 2
    assert capsys.readouterr() == ("", f"{path}{line}\n")


@pytest.mark.parametrize("asked", [["/dev/zero"], ["--batch", "/dev/zero"]])
def test_a_device_is_no_file(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no end, and would fill the memory."""
    monkeypatch.setattr("sys.argv", ["command", *asked])
    monkeypatch.setitem(sys.modules, "measurements.trace.fake", ModuleType("fake"))
    assert trace.main() == 2
    told = "given what is no regular file, allowed: a file, or - for standard input"
    assert capsys.readouterr() == ("", f"/dev/zero: {told}\n")


def test_scenarios_to_add_and_a_models_file_are_read_as_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config = tmp_path / "jobs.yaml", tmp_path / "config.json"
    path.write_text("model: x\n---\nmodel: !!bool maybe\n", "utf-8")
    monkeypatch.setattr("sys.argv", ["command", "--add", str(path)])
    assert stored.main() == 2
    assert capsys.readouterr() == ("", f"{path}:3: given a tag, allowed: plain values\n")
    config.write_text("{", "utf-8")
    with pytest.raises(CaseError, match=f"{config}: not JSON: Expecting property name"):
        model_config(str(config))


def test_a_setting_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(CaseError, match=r"precision: \['bf16'\] cannot be traced; allowed: bf16"):
        from_scenario({"model": "qwen2.5-0.5b", "precision": ["bf16"]})
