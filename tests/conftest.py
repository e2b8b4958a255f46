"""Lies here so that tests of every folder can import this one's helpers, `strategies` and `formulas` among them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
from commands import Run

from calc.__main__ import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Runs one command in this process: its arguments, and what it reads from standard input."""

    def command(*argv: str, stdin: str | bytes = b"") -> Run:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        capsys.readouterr()
        status = main(argv)
        captured = capsys.readouterr()
        return Run(status, captured.out, captured.err)

    return command
