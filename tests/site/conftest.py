"""The site, built once a session in a copy of the project."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import ARGUMENTS, CHROMIUM, WHOLE, served
from playwright.sync_api import Browser, sync_playwright
from sharing import PROJECT, alone
from sites import build, command
from sites import tiny as small

TINY = "tiny"
BUILT, LONG = {"project", "site", "origin"}, "test_lighthouse_marks"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks at the built site comes last, because it is being built; of that, what takes longest comes first."""
    items.sort(
        key=lambda item: (
            not BUILT.isdisjoint(getattr(item, "fixturenames", ())),
            getattr(item, "originalname", "") != LONG,
        )
    )


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with one GPU more than its sample, and its built site in `site/`; workers of one run share it.

    Where there are several, it is being built since they started (`tests/conftest.py`): if it is not there once that
    has ended, it is built again, to say why.
    """
    with alone(tmp_path_factory, PROJECT) as root:
        made = root / PROJECT
        if not (made / "site").exists():
            built = build(made)
            assert built.returncode == 0, built.stdout[-1000:] + built.stderr[-2000:]
    return made


@pytest.fixture(scope="session")
def tiny_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project and its built site in `site/`, for all workers of one run; no test changes it."""
    with alone(tmp_path_factory, TINY) as root:
        made = root / TINY
        if not (made / "site").exists():
            shutil.rmtree(made, ignore_errors=True)
            built = command(small(made), "build", "site")
            assert built.returncode == 0, built.stderr[-2000:]
            assert "for 0 scenarios" not in built.stdout
    return made


@pytest.fixture
def tiny(tiny_built: Path, tmp_path: Path) -> Path:
    """A copy of the small project and its site, for one test: it builds what that changes."""
    return Path(shutil.copytree(tiny_built, tmp_path / "project", symlinks=True))


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Path:
    """The built site."""
    if WHOLE:
        return Path(WHOLE)
    project: Path = request.getfixturevalue("project")
    return project / "site"


@pytest.fixture(scope="session")
def origin(site: Path) -> Iterator[str]:
    """The address of the built site."""
    with served(site) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, else Playwright's own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()
