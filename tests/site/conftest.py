"""Sites built once a session, in copies of the project: a whole one, and a small one that tests may change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import SMALL_GPUS, SMALL_MODELS, add_gpu, command, copy


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all tests of the site, so that it is built once."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("site"))


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with one more GPU, and its built site in `site/`."""
    made = copy(tmp_path_factory.mktemp("whole") / "project")
    add_gpu(made)
    built = command(made, "build", "site")
    assert built.returncode == 0, built.stderr[-2000:]
    return made


@pytest.fixture(scope="session")
def site(project: Path) -> Path:
    """The built site."""
    return project / "site"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A copy of the project with a few GPUs and models, which a test may change; nothing is built yet."""
    made = copy(tmp_path / "project")
    for folder, kept in (("hardware/gpus", SMALL_GPUS), ("hardware/nodes", {"hgx-a800"}), ("models", SMALL_MODELS)):
        for path in (made / folder).glob("*.yaml"):
            if path.stem not in kept:
                path.unlink()
    for path in (made / "measurements").glob("*.jsonl"):
        path.unlink()
    yield made
    shutil.rmtree(made)
