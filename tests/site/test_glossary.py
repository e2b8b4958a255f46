"""The glossary: each term once, each used, each leading to a page; and its tooltips where a term is first used."""

from __future__ import annotations

import re
from pathlib import Path

import markdown
import pytest
from sites import ROOT

from calc.site.text import glossary
from calc.site.text.sources import front
from calc.site.text.tooltips import TooltipExtension

DOCS = ROOT / "docs"


def html(text: str) -> str:
    return markdown.markdown(text, extensions=[TooltipExtension(), "attr_list"])


def test_each_term_is_used_on_a_page_by_hand() -> None:
    bodies = [front(p) for p in DOCS.rglob("*.md") if p.stem != "glossary"]
    text = "\n".join(
        re.sub(r"\[\[.*?\]\]|`[^`]*`", "", body, flags=re.S) for meta, body in bodies if "generated" not in meta
    )
    for term in glossary.terms():
        assert any(re.search(rf"(?<![\w-]){re.escape(form)}(?![\w-])", text) for form in term.forms), term.name


def test_each_term_leads_to_a_page_and_says_a_sentence() -> None:
    for term in glossary.terms():
        assert (DOCS / term.see.partition("#")[0]).is_file(), term
        assert term.tip.endswith((".", ".)")), term
        assert len(term.tip) <= 140, term  # a tooltip
    assert len({t.id for t in glossary.terms()}) == len(glossary.terms())
    assert len({t.tip for t in glossary.terms()}) == len(glossary.terms())


def test_a_spelling_stands_for_one_term(tmp_path: Path) -> None:
    file = tmp_path / "glossary.yaml"
    line = "- {{term: {}, forms: [{}], tip: 'A thing.', see: index.md}}\n"
    file.write_text(line.format("one", "one, ones") + line.format("two", "ones"), "utf-8")
    with pytest.raises(glossary.GlossaryError, match="'ones' stands for 'one' and for 'two'"):
        glossary.terms(file)


def test_the_page_has_every_term() -> None:
    page = glossary.page("../")
    assert page.count("<dt") == len(glossary.terms())
    assert 'href="../method/loss.html"' in page


def test_the_chinese_page_has_every_term_under_the_same_anchor() -> None:
    english, chinese = glossary.page("../"), glossary.page("../", "zh")
    assert re.findall(r'<dt id="([^"]+)"', english) == re.findall(r'<dt id="([^"]+)"', chinese)
    assert "activations：激活值" in chinese
    assert all(re.search("[一-鿿]", said.tip) for said in glossary.said("zh").values())


def test_a_translation_with_other_terms_is_refused(tmp_path: Path) -> None:
    (tmp_path / "glossary.yaml").write_text("- {term: one, tip: A thing., see: index.md}\n", "utf-8")
    (tmp_path / "glossary.zh.yaml").write_text("- {term: two, name: 二, tip: 二。}\n", "utf-8")
    with pytest.raises(glossary.GlossaryError, match=r"not the terms of glossary\.yaml: one, two"):
        glossary.said("zh", tmp_path / "glossary.yaml")


def test_terms_on_a_chinese_page_are_explained_in_chinese() -> None:
    assert re.findall(r'<abbr title="([^"]+)">vLLM', html("由 vLLM 生成。")) == [glossary.said("zh")["vLLM"].tip]


def test_the_first_use_of_a_term_has_its_meaning() -> None:
    found = html("Logits are large. *logits* again, and **vLLM**, and vLLM.\n\nThe logits of FSDP.")
    assert re.findall(r"<abbr title=\"[^\"]+\">(.*?)</abbr>", found) == ["Logits", "vLLM", "FSDP"]
    assert re.sub(r"</?abbr[^>]*>", "", found) == (
        "<p>Logits are large. <em>logits</em> again, and <strong>vLLM</strong>, and vLLM.</p>\n"
        "<p>The logits of FSDP.</p>"
    )


@pytest.mark.parametrize(
    "text",
    [
        "# Logits",
        "`logits`",
        "[logits](x.html)",
        "no-logits-here",
        "<b title='logits'></b>",
        "<code>a &#x27;b&#x27; logits</code>",
    ],
)
def test_headings_code_links_and_parts_of_words_are_left_alone(text: str) -> None:
    assert "abbr" not in html(text)


def test_a_term_after_a_verdict_is_marked() -> None:
    found = html('*<span class="verdict fits">fits</span>* in backward, and <a href="x">PPO</a> or DPO')
    assert re.findall(r"<abbr[^>]*>(.*?)</abbr>", found) == ["backward", "DPO"]


def test_text_around_several_terms_stays_in_order() -> None:
    found = html("a GRPO b *c* PPO d DPO e")
    assert re.sub(r"<[^>]+>", "", found) == "a GRPO b c PPO d DPO e"
    assert found.count("<abbr") == 3
