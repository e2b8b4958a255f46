"""What the last build rendered is taken again where nothing that it follows from has changed, and only there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sites import command

from calc.site.build import guide
from calc.site.macros import rendered
from calc.site.macros.rendered import Pages, Rendered

PAGE = Rendered("# A page", {"figures": {"<figure>": "<table>"}})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of a few files whose only page was rendered and kept."""
    for name in ("docs/index.md", "calc/a.py", "hardware/gpus/x.yaml", "build/data/t.csv", *guide.FILES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(guide, "ROOT", tmp_path)
    monkeypatch.setattr(guide, "FILE", tmp_path / "build/pages")
    made = Pages(tmp_path / "docs")
    made.found["index.md"] = PAGE
    guide.Guide(made, tmp_path / "build/data").keep()
    return tmp_path


def recalled(project: Path) -> dict[str, Rendered]:
    pages = Pages(project / "docs")
    assert guide.Guide(pages, project / "build/data").recall() == bool(pages.found)
    return pages.found


def test_where_nothing_changed_the_pages_are_those_of_the_last_build(project: Path) -> None:
    assert recalled(project) == {"index.md": PAGE}


@pytest.mark.parametrize(
    "change",
    [
        lambda p: (p / "docs/index.md").write_text("other"),
        lambda p: (p / "calc/a.py").unlink(),
        lambda p: (p / "hardware/gpus/y.yaml").write_text("new"),
        lambda p: (p / "hardware/gpus/x.yaml").rename(p / "hardware/gpus/z.yaml"),
        lambda p: (p / "package-lock.json").write_text("other"),
        lambda p: (p / "build/data/t.csv").write_text("other"),
        lambda p: (p / "build/data/t.csv").unlink(),
        lambda p: (p / "build/data/u.csv").write_text("more"),
        lambda p: (p / "build/pages").write_bytes((p / "build/pages").read_bytes()[:-1] + b"x"),
        lambda p: (p / "build/pages").unlink(),
    ],
    ids=["page", "code", "gpu", "name", "packages", "data", "no-data", "more-data", "damaged", "none"],
)
def test_whatever_changed_they_are_rendered_anew(project: Path, change: Callable[[Path], object]) -> None:
    change(project)
    assert recalled(project) == {}


def test_pages_kept_by_another_calc_are_not_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes may have been elsewhere: to read them would fail."""
    (project / "calc/a.py").write_text("moved")
    monkeypatch.delattr(rendered, "Rendered")
    assert recalled(project) == {}


def test_another_address_is_another_guide(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_SITE_URL", "https://example.org/")
    assert recalled(project) == {}


def test_what_changes_while_pages_are_rendered_counts_for_the_next_build(project: Path) -> None:
    pages = Pages(project / "docs")
    begun = guide.Guide(pages, project / "build/data")
    (project / "docs/index.md").write_text("saved meanwhile")
    pages.found["index.md"] = PAGE
    begun.keep()
    assert recalled(project) == {}


def test_a_second_build_asks_nothing_and_gives_the_same_site(tiny: Path) -> None:
    second = command(tiny, "build", "second")
    assert second.returncode == 0, second.stderr
    assert "for 0 scenarios" in second.stdout
    assert_second_is_the_first(tiny)


def test_a_build_elsewhere_that_keeps_nothing_gives_the_same_site(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder, time zone and locale, with other hashes; `.ci/again` does it with the whole site."""
    (tiny / "build/kept").unlink()  # a link to the answers of this project
    shutil.rmtree(tiny / "build")
    for name, value in {"TZ": "XXX-14", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONHASHSEED": "1"}.items():
        monkeypatch.setenv(name, value)
    second = command(tiny, "build", "second")
    assert second.returncode == 0, second.stderr
    assert "for 0 scenarios" not in second.stdout
    assert_second_is_the_first(tiny)


def assert_second_is_the_first(project: Path) -> None:
    """Every file of both builds is the same."""
    files = {p.relative_to(project / "site"): p for p in (project / "site").rglob("*") if p.is_file()}
    assert len(files) > 50
    for name, path in files.items():
        if name.name not in ("sitemap.xml", "sitemap.xml.gz"):  # which have the time
            assert path.read_bytes() == (project / "second" / name).read_bytes(), name
