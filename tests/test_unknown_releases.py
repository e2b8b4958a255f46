"""`make versions`: a release that nobody has read is told, a known one is not, and silence is no news."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from calc.base.versions import numbers
from calc.frameworks.registry import FRAMEWORKS
from calc.frameworks.releases import READ
from calc.frameworks.torch.trainers.registry import RELEASED

PIP = (sys.executable, "-m", "pip")


@pytest.fixture(scope="module")
def versions() -> ModuleType:
    """The script, which lies in no package."""
    spec = importlib.util.spec_from_file_location("versions", Path(__file__).parents[1] / ".ci/versions.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole index of packages; pip reads the names alone."""
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path


def test_releases_later_than_the_newest_known_are_listed(
    versions: ModuleType, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oldest first; an earlier release is not, nor a later build of a known one, nor what is not released yet."""
    newest = {name: versions.known()[name] for name in ("vllm", "verl", "trl")}
    monkeypatch.setattr(versions, "known", lambda: newest)
    trl, major = newest["trl"], numbers(newest["trl"])[0] + 1
    for release in (trl, f"{trl}.post1", f"{major}.10.0", f"{major}.9.0", f"{major}.11.0rc1"):
        (index / f"trl-{release}-py3-none-any.whl").touch()
    for release in ("0.1", newest["verl"]):
        (index / f"verl-{release}-py3-none-any.whl").touch()
    assert versions.main(*PIP) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"trl: known to {trl}, since then {major}.9.0, {major}.10.0",
        f"verl: known to {newest['verl']}, none since",
        f"vllm: known to {READ['vllm']}, NOT ASKED: the index does not have it",
    ]


def test_every_framework_and_library_is_asked_about(versions: ModuleType) -> None:
    """PyTorch is both: the library's release is the finer one."""
    assert versions.known().keys() == {*FRAMEWORKS, *READ, *RELEASED}
    assert versions.known()["torch"] == READ["torch"]


def test_an_index_that_is_not_reached_is_said_in_a_line(
    versions: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert versions.main("false") == 0
    assert capsys.readouterr().out == "Nothing was asked: pip reaches no package index from here.\n"
