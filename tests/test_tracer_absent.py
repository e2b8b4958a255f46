"""The tracer's and the harness's commands without PyTorch: help is shown, and why nothing runs is one line."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from measurements.bench import __main__ as bench
from measurements.trace import __main__ as trace
from measurements.trace import stored

COMMANDS = (trace, stored, bench)


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No PyTorch, whether the Python that runs this has one or not."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else found(name, *a))
    monkeypatch.setattr(stored, "version", version)
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
        (trace, ["job.yaml"], "torch is not installed here: make trace sets it up"),
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
