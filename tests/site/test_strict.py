"""A fault of mkdocs.yml is told in one line, before anything is computed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sites import ROOT

from calc.site.build.strict import Strict
from calc.site.faults import BuildError

PLANTED = {
    ("use_directory_urls", "use_directoy_urls"): "mkdocs.yml: Config value 'use_directoy_urls': Unrecognised",
    ("nav:\n", "nav: [\n"): "mkdocs.yml: MkDocs encountered an error parsing the configuration file: ",
    ("name: material", "name: materials"): "mkdocs.yml: Config value 'theme': Unrecognised theme name: 'materials'",
    ("custom_dir: overrides", "custom_dir: override"): "mkdocs.yml: Config value 'theme': The path set in custom_dir",
    (
        "  - admonition\n",
        "  - admonitions\n",
    ): "mkdocs.yml: Config value 'markdown_extensions': Failed to load",
    ("  - search\n", "  - serach\n"): "mkdocs.yml: Config value 'plugins': The \"serach\" plugin is not installed",
    ("on_undefined: strict", "on_undefind: strict"): "mkdocs.yml: Config value 'plugins': Plugin 'macros' option",
    ("absolute_links: warn", "absolute_links: wran"): "mkdocs.yml: Config value 'validation': Sub-option 'nav'",
    ("  - main.py", "  - maim.py"): "mkdocs.yml: Config value 'watch': The path ",
}


@pytest.mark.parametrize(("old", "new"), PLANTED)
def test_a_planted_fault_is_one_line_that_names_the_field(tmp_path: Path, old: str, new: str) -> None:
    for name in ("calc", "docs", "hardware", "models", "measurements", "overrides", "main.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    config = Path(shutil.copy(ROOT / "mkdocs.yml", tmp_path))
    text = config.read_text("utf-8")
    assert old in text
    config.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(BuildError) as stopped:
        Strict("mkdocs", config, tmp_path / "site")
    assert str(stopped.value).startswith(PLANTED[old, new])
    assert "\n" not in str(stopped.value)
