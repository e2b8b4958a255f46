"""The theme's style on a built site: what its pages need stays, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from calc.site.build import theme
from calc.site.faults import BuildError

CSS = """@charset "UTF-8";
:root{--read:1px;--unread:url('data:image/svg+xml;charset=utf-8,<svg>}</svg>');--scripted:2px}
.page,.gone{width:var(--read)}
.gone .page{color:red}
.page:not(.gone)>a[href="{;}"]{color:green}
@media print{.gone{color:red}}
@media screen{.made\\:it{color:blue}.gone{color:red}}
@keyframes gone{0%{width:0}to{width:1px}}
/* a comment } */.scripted--on{color:black}""".replace("\n", "")
KEPT = (
    ':root{--read:1px;--scripted:2px}.page,.gone{width:var(--read)}.page:not(.gone)>a[href="{;}"]{color:green}'
    "@media screen{.made\\:it{color:#00f}}.scripted--on{color:#000}"
)


def test_the_themes_style_keeps_what_pages_and_scripts_name_and_others_lose_comments_alone(tmp_path: Path) -> None:
    files = {
        "index.html": '<p class="page made:it">gone</p>',
        "assets/own.js": 'p.classList.add("scripted--on"); p.style.getPropertyValue("--scripted");',
        "assets/own.css": "/* said */ .gone { color: red; }",
        "assets/stylesheets/main.1.css": CSS,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    theme.trim(tmp_path)
    assert (tmp_path / "assets/stylesheets/main.1.css").read_text("utf-8") == KEPT
    assert (tmp_path / "assets/own.css").read_text("utf-8") == ".gone{color:red}"


def test_a_style_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.css").write_text("a{color:red} } b{", "utf-8")
    with pytest.raises(BuildError, match=r"^own\.css: Parsing stylesheet failed: [^\n]+$"):
        theme.trim(tmp_path)
