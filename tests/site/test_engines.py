"""Two engines build the same site from one mkdocs.yml: the guide outlives the first."""

from __future__ import annotations

from pathlib import Path

from browsing import opened
from playwright.sync_api import Browser
from sites import command

from calc.site.build.compare_engines import differences


def test_properdocs_builds_the_same_cells_ids_and_links(tiny: Path, browser: Browser) -> None:
    """A page that has moved among them: its old address leads on, as its policy allows."""
    project = tiny
    config = project / "mkdocs.yml"
    moved = config.read_text("utf-8").replace("redirect_maps: {}", "redirect_maps: {gone/cards.md: hardware/index.md}")
    config.write_text(moved, "utf-8")
    for engine in ("mkdocs", "properdocs"):
        built = command(project, "build", engine, "--engine", engine)
        assert built.returncode == 0, built.stderr[-2000:]
    one, other = project / "mkdocs", project / "properdocs"
    assert "ProperDocs" in (other / "index.html").read_text("utf-8")
    assert list(differences(one, other)) == []
    for site in (one, other):
        leading, _, complaints = opened(browser, f"{site.as_uri()}/gone/cards.html#cards")
        assert leading.url == f"{site.as_uri()}/hardware/index.html#cards"
        assert [line for line in complaints if "Policy" in line] == []
        leading.context.close()
    assert "User-agent: *" in (one / "robots.txt").read_text("utf-8")

    page = other / "index.html"
    page.write_text(page.read_text("utf-8").replace('id="job-phases"', 'id="moved"'), "utf-8")
    (other / "robots.txt").unlink()
    found = list(differences(one, other))
    assert found[0] == "robots.txt: only in mkdocs"
    assert found[1].startswith("index.html: ids ")
    assert command(project, "same", "mkdocs", "properdocs").returncode == 2
