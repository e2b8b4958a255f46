"""The glossary: one file of terms, from which come its page and the tooltips of all pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FILE = Path(__file__).parents[2] / "docs" / "glossary.yaml"


class Term(NamedTuple):
    """A term, the spellings that stand for it in texts, what it means, and the page that says more."""

    name: str
    forms: tuple[str, ...]
    tip: str
    see: str

    @property
    def id(self) -> str:
        """Its anchor on the glossary's page."""
        return "".join(c if c.isalnum() else "-" for c in self.name.replace("+", "p").casefold())


class GlossaryError(ValueError):
    """A term that cannot be used; one line."""


def _term(told: dict[str, Any]) -> Term:
    return Term(told["term"], tuple(told.get("forms", [told["term"]])), told["tip"], told["see"])


@cache
def terms(file: Path = FILE) -> tuple[Term, ...]:
    """All terms by name; raises GlossaryError where two have a spelling in common."""
    found = sorted(map(_term, yaml.safe_load(file.read_text("utf-8"))), key=lambda t: t.name.casefold())
    owner: dict[str, str] = {}
    for term in found:
        for form in {term.name, *term.forms}:
            if form in owner:
                raise GlossaryError(f"{file.name}: {form!r} stands for {owner[form]!r} and for {term.name!r}")
            owner[form] = term.name
    return tuple(found)


def tips() -> dict[str, str]:
    """What each spelling means."""
    return {form: term.tip for term in terms() for form in term.forms}


def page(root: str) -> str:
    """Every term with its meaning, letter by letter; `root` is the way to the top of the site."""
    return "\n".join(_letters(root))


def _letters(root: str) -> Iterator[str]:
    for letter, found in groupby(terms(), key=lambda t: t.name[0].upper()):
        entries = "".join(_entry(term, root) for term in found)
        yield f'\n## {letter}\n\n<dl class="glossary">{entries}</dl>\n'


def _entry(term: Term, root: str) -> str:
    path, _, anchor = term.see.partition("#")
    address = f"{root}{path.removesuffix('.md')}.html{'#' + anchor if anchor else ''}"
    more = f'<a href="{address}" aria-label="More on {escape(term.name)}">More</a>'
    return f'<dt id="{term.id}">{escape(term.name)}</dt><dd>{escape(term.tip)} {more}</dd>'
