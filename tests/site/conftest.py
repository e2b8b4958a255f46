"""The site, built once a session in a copy of the project."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import ARGUMENTS, CHROMIUM, WHOLE, served
from playwright.sync_api import Browser, sync_playwright
from sharing import alone
from sites import add_gpu, command, sample

FIRST, LAST = "test_no_leak_no_broken_link_no_request_elsewhere", "test_lighthouse_marks"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The site is built at once, beside other tests; Lighthouse comes last, when little is left to do."""
    items.sort(
        key=lambda item: (getattr(item, "originalname", "") == LAST) - (getattr(item, "originalname", "") == FIRST)
    )


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with one GPU more than its sample, and its built site in `site/`; workers of one run share it."""
    with alone(tmp_path_factory, "project") as root:
        made = root / "project"
        if not (made / "site").exists():
            shutil.rmtree(made, ignore_errors=True)
            add_gpu(sample(made))
            built = command(made, "build", "site")
            assert built.returncode == 0, built.stdout[-1000:] + built.stderr[-2000:]
    return made


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
