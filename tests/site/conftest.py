"""Sites built once a session, in copies of the project: a whole one, and a small one that tests may change."""

from __future__ import annotations

import fcntl
import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from browsing import ARGUMENTS, CHROMIUM, Host
from playwright.sync_api import Browser, sync_playwright
from sites import add_gpu, command, copy, named


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with one more GPU, and its built site in `site/`; workers of one run share it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    made = root / "project"
    with (root / "project.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "site").exists():
            shutil.rmtree(made, ignore_errors=True)
            add_gpu(copy(made))
            built = command(made, "build", "site")
            assert built.returncode == 0, built.stdout[-1000:] + built.stderr[-2000:]
    return made


@pytest.fixture(scope="session")
def site(project: Path) -> Path:
    """The built site."""
    return project / "site"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A copy of the project with the GPUs and models that pages name, and those GPUs' nodes; nothing is built yet."""
    made = copy(tmp_path / "project")
    kept_gpus, kept_models = named("hardware/gpus"), named("models")
    nodes = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (made / "hardware/nodes").glob("*.yaml")}
    kept_nodes = {name for name, node in nodes.items() if set(node["gpu_ids"]) <= kept_gpus}
    for folder, kept in (("hardware/gpus", kept_gpus), ("hardware/nodes", kept_nodes), ("models", kept_models)):
        for path in (made / folder).glob("*.yaml"):
            if path.stem not in kept:
                path.unlink()
    for path in (made / "measurements").rglob("*.jsonl"):
        path.unlink()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def origin(site: Path) -> Iterator[str]:
    """The address of the built site."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Host, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, else Playwright's own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()
