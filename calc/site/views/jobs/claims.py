"""The claims of the five posts: what each says, in its own words, what this guide finds, and where it treats it."""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

from calc.answers import answers
from calc.base.project import ROOT
from calc.base.schema import InputError
from calc.site.tables.tables import Cell, Column, Table
from calc.site.text import sources
from calc.site.views.jobs.strategies import POSTS

FILE = ROOT / "docs" / "case-studies" / "claims.yaml"
COLUMNS = (
    Column("claim", "Claim"),
    Column("quote", "In the words of the post"),
    Column("finding", "Finding"),
    Column("where", "Treated in"),
)


class ClaimError(InputError):
    """A claim that cannot be used; one line."""


class Claim(NamedTuple):
    """A claim of a post.

    `post`: its key in `POSTS`; `quote`: its own words; `where`: the page below docs/ that treats it, and an anchor or
    the id of a table there.
    """

    post: str
    claim: str
    quote: str
    finding: str
    where: str

    @property
    def page(self) -> str:
        """The page that treats it, below docs/."""
        return self.where.partition("#")[0]

    @property
    def anchor(self) -> str:
        """The anchor or table on that page."""
        return self.where.partition("#")[2]


@cache
def claims(file: Path = FILE) -> tuple[Claim, ...]:
    """Every claim, post by post; raises ClaimError if one stands twice."""
    found = tuple(Claim(**told) for told in sources.data(file, "claim"))
    for n, claim in enumerate(found):
        if claim[:3] in {each[:3] for each in found[:n]}:
            raise ClaimError(f"{file.name}: [{n}]: given {claim.claim!r} of {claim.post} twice, allowed: once")
    return found


def counted(finding: str = "", post: str = "") -> int:
    """The number of claims, or of those with a finding, or of a post."""
    return len([each for each in claims() if finding in ("", each.finding) and post in ("", each.post)])


def of_post(post: str, root: str) -> Table:
    """The claims of one post, each with a link to its treatment; `root` leads to the top of the site."""
    rows = []
    for each in claims():
        if each.post != post:
            continue
        title = str(sources.front(ROOT / "docs" / each.page)[0]["title"])
        link = f'<a href="{root}{each.page.removesuffix(".md")}.html#{each.anchor}">{escape(title)}</a>'
        quote = f'<q lang="zh">{escape(each.quote)}</q>'
        rows.append((Cell(each.claim), Cell(each.quote, quote), Cell(each.finding), Cell(title, link)))
    case = sources.front(ROOT / "docs" / "case-studies" / f"{POSTS[post][2]}.md")[0]["title"]
    caption = f"Claims of the post: {case.partition(':')[0]}"
    return Table(f"claims-{post}", caption, COLUMNS, tuple(rows), versions=answers.versions())
