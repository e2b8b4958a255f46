"""The claims of the five posts: each has a treatment that exists, and is counted on the page."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify
from sites import ROOT

from calc.base.schema import InputError
from calc.site.macros.macros import Macros, PageError, Record, View
from calc.site.text.sources import front
from calc.site.views.jobs import claims
from calc.site.views.jobs.strategies import POSTS

DOCS = ROOT / "docs"
ROW = '{post: rm, claim: A card, quote: "显卡", finding: right, where: "mistakes.md#logits"}'


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, and the ids of the tables that its macros place."""
    body = front(page)[1]
    found = set(re.findall(r'\bid="([\w.-]+)"', body))
    if "remedy_table()" in body:
        found.add(f"{page.stem}-summary")
    found |= {f"{page.stem}-{key}" for key in re.findall(r'before_after\("([\w-]+)"\)', body)}
    for heading in re.findall(r"^#+ (.*)$", body, re.M):
        own = re.search(r"\{ ?#([\w-]+) ?\}$", heading)
        found.add(own[1] if own else slugify(re.sub(r"<[^>]*>|[`*]", "", heading), "-"))
    return found


def test_every_claim_of_the_five_posts_is_there() -> None:
    """Issue 26 counts 111, and each of the five has some."""
    found = claims.claims()
    assert len(found) == 111
    assert Counter(each.post for each in found).keys() == POSTS.keys()
    assert {each.finding for each in found} == {"right", "weak", "wrong", "computed"}


@pytest.mark.parametrize("page", sorted({each.page for each in claims.claims()}))
def test_a_claim_is_treated_where_its_row_says(page: str) -> None:
    file = DOCS / page
    assert file.exists(), page
    there = anchors(file)
    assert not [each for each in claims.claims() if each.page == page and each.anchor not in there]


def test_a_quotation_is_in_the_words_of_a_chinese_post() -> None:
    """Names of flags and products aside; and no quotation is a line of ours."""
    for each in claims.claims():
        assert re.search(r"[\u4e00-\u9fff]", each.quote) or re.fullmatch(r"[\w ]+ = \w+|[\w×. +=().:]+", each.quote), (
            each
        )


def test_findings_and_posts_add_up_to_all() -> None:
    assert sum(claims.counted(finding) for finding in ("right", "weak", "wrong", "computed")) == claims.counted()
    assert sum(claims.counted(post=post) for post in POSTS) == claims.counted()
    assert claims.counted("wrong", "rm") == len([c for c in claims.claims() if (c.post, c.finding) == ("rm", "wrong")])


def test_the_page_has_a_table_for_each_post_whose_rows_are_its_claims() -> None:
    body = front(DOCS / "case-studies" / "claims.md")[1]
    assert re.findall(r'claims_table\("(\w+)"\)', body) == [*POSTS]
    assert re.findall(r'claims_counted\(post="(\w+)"\)', body) == [*POSTS]
    for post in POSTS:
        table = claims.of_post(post, "../")
        assert table.id == f"claims-{post}"
        assert len(table.rows) == claims.counted(post=post)
        for row, each in zip(table.rows, [c for c in claims.claims() if c.post == post], strict=True):
            title = front(DOCS / each.page)[0]["title"]
            assert [cell.value for cell in row] == [each.claim, each.quote, each.finding, title]
            assert f'href="../{each.page.removesuffix(".md")}.html#{each.anchor}"' in row[3].html


def test_a_count_of_nothing_stops_the_build() -> None:
    macros = Macros(lambda: View("case-studies/claims.md", "case-studies/claims.html", {}), Record())
    assert "111" in macros.claims_counted()
    with pytest.raises(PageError, match="there are none"):
        macros.claims_counted("doubtful")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"- {ROW}\n- {ROW}\n", "claims.yaml: [1]: given 'A card' of rm twice, allowed: once"),
        (f"- {ROW.replace('right', 'true')}\n", "[0].finding: given true, allowed: right, weak, wrong, computed"),
        (f"- {ROW.replace('right', 'good')}\n", "[0].finding: given 'good', allowed: right, weak, wrong, computed"),
        (f"- {ROW.replace('#logits', '')}\n", "[0].where: given 'mistakes.md', allowed: "),
        ("[]\n", "claims.yaml"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "claims.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(InputError) as caught:
        claims.claims(file)
    assert said in str(caught.value) and "\n" not in str(caught.value)
