"""The draws of property tests, and fixtures of several folders; it lies here so that tests can import this folder's
helpers.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from hypothesis import HealthCheck, settings
from sharing import PROJECT, alone, begin, end

from calc.__main__ import main
from calc.accuracy import calibration, largest_size
from calc.accuracy.residuals import Residual
from calc.base.collecting import collect_rarely
from calc.site.views.accuracy import accuracy, measured, odds

# A busy machine is no failure: what is drawn is judged, not how long it takes.
# The same examples every time, so that a run tells something about the change alone; HYPOTHESIS_PROFILE=explore draws
# new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
collect_rarely()


BUILDER = Path(__file__).parent / "building.py"
BUILDING = pytest.StashKey[subprocess.Popen[bytes]]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores: there is always a test that waits for a browser, or for the built site."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """The site that tests look at is built beside the first tests, so that no worker waits for it; see `building`.

    This is the process that waits for the workers, so the build ends with the run.
    """
    stash = node.config.stash
    asked = any(test.startswith("tests/site/") for test in ids) and "WHOLE_SITE" not in os.environ
    if asked and BUILDING not in stash:
        root = node.config._tmp_path_factory.getbasetemp()  # as xdist itself asks for it
        stash[BUILDING] = begin(root, PROJECT, sys.executable, BUILDER, root / PROJECT)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that ends early needs no site."""
    if build := session.config.stash.get(BUILDING, None):
        end(build)


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


@pytest.fixture(scope="session")
def residuals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Residual, ...]:
    """The error of the estimate of each record that can be compared."""
    with alone(tmp_path_factory, "residuals"):
        return accuracy.residuals()


@pytest.fixture(scope="session")
def searches(tmp_path_factory: pytest.TempPathFactory) -> tuple[largest_size.Search, ...]:
    """Each measured search of the largest size, beside what is predicted."""
    with alone(tmp_path_factory, "searches"):
        return measured.searches()


@pytest.fixture(scope="session")
def outcomes(residuals: tuple[Residual, ...]) -> tuple[calibration.Outcome, ...]:
    """Each published job that ran or died, and the probability that it would."""
    return odds.judged()
