"""How property tests draw. Lies here so that tests of every folder can import this one's helpers, too."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

import pytest
from commands import Run
from hypothesis import HealthCheck, settings

from calc.__main__ import main

# A busy machine is no failure: what is drawn is judged, not how long it takes.
# The same examples every time, so that a run tells something about the change alone; HYPOTHESIS_PROFILE=explore draws
# new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


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
