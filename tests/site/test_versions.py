"""Versions side by side: an old one keeps its addresses and its numbers, and the changelog says what moved."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from browsing import opened, served
from playwright.sync_api import Browser
from sites import ROOT, command

from calc.site.build import checks
from calc.site.views.catalog import changelog


def git(project: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=project, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def run(project: Path, *arguments: str) -> str:
    done = command(project, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def repository(tiny: Path) -> Path:
    """A small project under git, without any version."""
    made = tiny
    git(made, "init", "-q")
    git(made, "config", "user.name", "t")
    git(made, "config", "user.email", "t@example.org")
    return made


def release(project: Path, version: str) -> None:
    run(project, "release", version)
    git(project, "add", "-A")
    git(project, "commit", "-qm", version)
    git(project, "tag", f"v{version}")
    run(project, "publish")


def usable(site: Path) -> str:
    """A card's memory in the table of GPUs."""
    table = json.loads((site / "data/tables/gpus-overview.json").read_text("utf-8"))
    return str(next(row for row in table["rows"] if "4090" in str(row))["usable_gib"])


def test_an_old_version_keeps_its_tables_and_the_changelog_says_what_moved(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser
) -> None:
    monkeypatch.setenv("HEADROOM_SITE_URL", "https://example.org/")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2020-02-02T23:59:59Z")
    release(repository, "0.9")
    card = repository / "hardware/gpus/rtx4090.yaml"
    text = card.read_text("utf-8").replace("value: 24207", "value: 23207")
    card.write_text(text.replace("23.64 GiB", "22.66 GiB"), "utf-8")
    assert command(repository, "publish").stderr.startswith("what is checked out is not the tag v0.9, unchanged")
    assert command(repository, "release", "0.9").stderr.startswith("VERSION: given '0.9', allowed: more than 0.9")
    (repository / "docs/new.md").write_text("---\ndescription: A page of the second version.\n---\n# New\n", "utf-8")
    config = repository / "mkdocs.yml"
    config.write_text(config.read_text("utf-8").replace("nav:\n", "nav:\n  - new.md\n", 1), "utf-8")
    release(repository, "0.10")

    out = tmp_path / "published"
    out.mkdir()
    subprocess.run(f"git archive gh-pages | tar -x -C {out}", cwd=repository, shell=True, check=True)
    assert [v["version"] for v in json.loads((out / "versions.json").read_text("utf-8"))] == ["0.10", "0.9"]
    assert (out / "latest").resolve() == (out / "0.10").resolve()
    assert "latest" in (out / "index.html").read_text("utf-8")
    for version in ("0.9", "0.10"):
        assert list(checks.faults(out / version)) == []
        dates = re.findall("<lastmod>(.*?)</lastmod>", (out / version / "sitemap.xml").read_text("utf-8"))
        assert {*dates} == {"2020-02-02"}  # of the commit, whatever the clock says
        page = (out / version / "index.html").read_text("utf-8")
        assert "job-phases" in checks.Page(page).ids
        assert '<link rel="canonical" href="https://example.org/latest/index.html"' in page
        assert '"provider":"mike"' in re.sub(r"\s", "", page)
    assert (usable(out / "0.9"), usable(out / "0.10")) == ("23.64", "22.66")

    said = (out / "0.10/changelog.html").read_text("utf-8")
    assert said.index('id="changes-0-10"') < said.index(changelog.FIRST)
    assert "GeForce RTX 4090 · usable_gib: 23.64 → 22.66" in said
    every = json.loads((out / "0.10/changelog/0.10.json").read_text("utf-8"))
    assert ["table gpus-overview", "GeForce RTX 4090 · usable_gib", 23.64, 22.66] in every["changes"]
    assert "changes-0-10" not in (out / "0.9/changelog.html").read_text("utf-8")

    with served(out) as origin:
        page, requests, complaints = opened(browser, f"{origin}/0.10/hardware/index.html")
        page.locator(".md-version__current").focus()
        assert page.locator(".md-version__link").all_inner_texts() == ["0.10", "0.9"]
        page.locator(".md-version__link", has_text="0.9").click()
        page.wait_for_url(f"{origin}/0.9/hardware/index.html")
        assert "23.64" in page.locator("#gpus-overview tr", has_text="4090").inner_text()
        assert [r for r in requests if not r.startswith((origin, "data:", "blob:"))] == []
        assert complaints == []
        # the same page in the other version, and where there is none, its home page
        for start, ends in [
            ("latest/hardware/gpus/rtx4090.html#gpu-rtx4090-sft", "0.9/hardware/gpus/rtx4090.html#gpu-rtx4090-sft"),
            ("0.10/zh/index.html", "0.9/zh/index.html"),
            ("0.10/index.html#job-phases", "0.9/index.html#job-phases"),
            ("0.10/", "0.9/"),
            ("0.10/new.html", "0.9/"),
        ]:
            page.goto(f"{origin}/{start}")
            page.locator(".md-version__current").focus()
            page.locator(".md-version__link", has_text="0.9").click()
            page.wait_for_url(f"{origin}/{ends}")
        page.context.close()


def test_the_version_is_the_same_wherever_it_stands() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert version
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


@pytest.mark.parametrize("given", ["1.2-rc", "v1.2", ""])
def test_a_version_is_numbers_and_dots(given: str) -> None:
    done = command(ROOT, "release", given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"VERSION: given {given!r}, allowed: numbers and dots, as in 1.2\n"
