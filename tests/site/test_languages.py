"""Translations: the same numbers and tables as the page that they translate, and nothing of their own."""

from __future__ import annotations

import re
from pathlib import Path

from sites import ROOT, command, tiny

from calc.site.i18n import chinese, languages
from calc.site.tables import charts
from calc.site.text import fullwidth


def test_a_translation_has_the_numbers_and_tables_of_its_original(tmp_path: Path) -> None:
    project = tiny(tmp_path / "project")
    built = command(project, "build", "site")
    assert built.returncode == 0, built.stderr[-2000:]
    english, chinese = ((project / "site" / name).read_text("utf-8") for name in ("index.html", "zh/index.html"))
    assert '<html lang="zh"' in chinese
    assert '<html lang="en"' in (project / "site/404.html").read_text("utf-8")
    peaks = [re.search(r"([\d.]+)(?:&nbsp;|\xa0)(?:<abbr[^>]*>)?GiB", page) for page in (english, chinese)]
    assert peaks[0] and peaks[1] and peaks[0][1] == peaks[1][1]
    rows = [re.findall(r"<tbody>.*?</tbody>", page) for page in (english, chinese)]
    assert rows[0] == rows[1] != []
    assert "按阶段的显存" in chinese
    heads = [re.findall(r"<th scope=\"col\"[^>]*>([^<]*?) ?<", page) for page in (english, chinese)]
    assert heads[0][:3] == ["Phase", "Needs", "Peak at"]
    assert heads[1][:3] == ["阶段", "需要", "峰值时刻"]
    assert not set(heads[0]) & set(heads[1]) - {"NCCL", "Logits"}
    assert 'href="../hardware/index.html#cards"' in chinese
    assert 'hreflang="zh"' in english
    assert 'href="zh/index.html" hreflang="zh"' in english
    other = (project / "site/hardware/index.html").read_text("utf-8")
    assert 'rel="alternate"' not in english + other  # the theme would ask for a sitemap beside the page
    assert 'href="../zh/index.html"' in other

    page = project / "docs/index.zh.md"
    page.write_text(page.read_text("utf-8").replace("job-phases", "its-own"), "utf-8")
    failed = command(project, "write")
    assert failed.returncode == 2
    assert "has [[ phases_table(job, its-own) ]], which the page that it translates lacks" in failed.stderr


def test_every_component_has_a_chinese_name_and_no_word_is_translated_that_nothing_says() -> None:
    assert set(chinese.COMPONENTS) == set(charts.COMPONENTS)
    code = "".join(p.read_text("utf-8") for p in (ROOT / "calc").rglob("*.py") if p.stem != "chinese")
    names = {form(c) for c in charts.COMPONENTS for form in (charts.name, charts.title)}
    made = re.compile(r"Supervised fine-tuning, \w+, on |Tokens a ")  # of parts, as the code has them
    told = [word for word in chinese.WORDS if word not in names and not made.match(word)]
    assert [word for word in told if word.casefold() not in code.casefold()] == []


def test_text_has_no_holes_beside_chinese_punctuation() -> None:
    given = "**答案。** 在六张\n卡上，\n  [见](x.md) 第 2 页 （附录）\nGiB\n\n- 一、\n- 二"
    assert fullwidth.close(given) == "**答案。**在六张卡上，[见](x.md) 第 2 页（附录）GiB\n\n- 一、\n- 二"
    english = "One, two\nthree (four) — five.\n\n    code  is left"
    assert fullwidth.close(english) == english


def test_addresses() -> None:
    assert languages.split("a/b.zh.md") == ("a/b.md", "zh")
    assert languages.split("a/qwen2.5.md") == ("a/qwen2.5.md", "")
    assert languages.url("a/b.zh.md") == "zh/a/b.html"
    assert languages.url("models/qwen2.5-7b.md") == "models/qwen2.5-7b.html"
