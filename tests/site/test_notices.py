"""Third-party files of the site: every file has an owner, and every owner's licence goes along."""

from __future__ import annotations

import json
from html import unescape
from importlib import metadata
from pathlib import Path

import pytest
from sites import ROOT

from calc.base.schema import InputError
from calc.site.calculator import browser_engine
from calc.site.macros import notices


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A site with one file for each pattern of third-party/parts.yaml."""
    for part in notices.parts():
        for pattern in part.files:
            path = tmp_path / pattern.replace("*", "x")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"sources": []}', "utf-8")
    return tmp_path


def test_a_built_site_holds_nothing_that_is_nobodys(site: Path) -> None:
    assert list(notices.faults(site)) == []
    assert (site / notices.FILE).read_text("utf-8") == notices.text()
    page = unescape((site / "reference/third-parties.html").read_text("utf-8"))
    assert [part.name for part in notices.parts() if part.name not in page] == []


STRAY = {
    "assets/jquery.min.js": "",
    "assets/javascripts/lunr/wordcut.js": "",
    "fonts/letters.woff2": "",
    "assets/javascripts/bundle.x.min.js.map": json.dumps({"sources": ["node_modules/left-pad/index.js", "src/own.ts"]}),
}


@pytest.mark.parametrize("name", STRAY)
def test_a_file_or_a_package_inside_of_one_that_is_nobodys_fails_the_build(built: Path, name: str) -> None:
    assert list(notices.faults(built)) == []
    (built / name).parent.mkdir(parents=True, exist_ok=True)
    (built / name).write_text(STRAY[name], "utf-8")
    (found,) = notices.faults(built)
    assert found.startswith(f"{name}: ")


def test_a_package_in_the_calculator_that_is_nobodys_fails_the_build(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser_engine, "packages", lambda: {"yaml", "leftpad"})
    (found,) = notices.faults(built)
    assert found.startswith(f"assets/calculator/x/{browser_engine.SNAPSHOT}: holds leftpad, ")


def test_a_part_whose_files_are_gone_fails_the_build(built: Path) -> None:
    (built / "assets/images/favicon.png").unlink()
    (found,) = notices.faults(built)
    assert found.startswith("third-party/parts.yaml: Material for MkDocs: given 'assets/images/favicon.png'")


def test_the_notices_have_each_licence_of_each_package_in_full() -> None:
    text = notices.text()
    for name in ("PyYAML", "fastjsonschema", "mkdocs-material"):
        kept = [path for path in metadata.files(name) or () if path.match(notices.LEGAL)]
        assert kept
        assert all(path.read_text("utf-8").strip() in text for path in kept)
    for path in (ROOT / "third-party/texts").iterdir():
        assert path.read_text("utf-8").strip() in text
    for part in notices.parts():
        assert part.title in text
        assert all(line in text for line in part.copyright)
    assert f"Pyodide {json.loads((browser_engine.PYODIDE / 'package.json').read_bytes())['version']}" in text


def test_a_licence_without_a_text_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    notices.parts.cache_clear()
    listed = notices._listed()
    hiwire = next(given for given in listed["parts"] if given["name"] == "hiwire")
    monkeypatch.setitem(hiwire, "texts", [])
    with pytest.raises(InputError, match="hiwire: given no text of its licence"):
        notices.parts()
    notices.parts.cache_clear()
