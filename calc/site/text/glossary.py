"""The glossary: one file of terms, the source of the glossary page and of the tooltips on all pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from calc.base.project import ROOT
from calc.base.schema import InputError
from calc.site.text import sources

FILE = ROOT / "docs" / "glossary.yaml"


class Term(NamedTuple):
    """A term, its spellings in texts, its meaning, and the page that says more."""

    name: str
    forms: tuple[str, ...]
    tip: str
    see: str

    @property
    def id(self) -> str:
        """The term's anchor on the glossary page."""
        return "".join(c if c.isalnum() else "-" for c in self.name.replace("+", "p").casefold())


class GlossaryError(InputError):
    """A term that cannot be used; one line."""


def _term(told: dict[str, Any]) -> Term:
    return Term(told["term"], tuple(told.get("forms", [told["term"]])), told["tip"], told["see"])


@cache
def terms(file: Path = FILE) -> tuple[Term, ...]:
    """All terms by name; raises GlossaryError if two have a spelling in common."""
    found = sorted(map(_term, sources.data(file, "term")), key=lambda t: t.name.casefold())
    owner: dict[str, str] = {}
    for term in found:
        for form in {term.name, *term.forms}:
            if form in owner:
                raise GlossaryError(f"{file.name}: {form!r} stands for {owner[form]!r} and for {term.name!r}")
            owner[form] = term.name
    return tuple(found)


class Said(NamedTuple):
    """A term in one language: its name there, and its meaning."""

    name: str
    tip: str


MORE = {"": ("More", "More on"), "zh": ("详见", "详见")}


@cache
def said(language: str = "", file: Path = FILE) -> dict[str, Said]:
    """Every term in a language, English if none is named; GlossaryError if a translation has other terms."""
    if not language:
        return {term.name: Said(term.name, term.tip) for term in terms(file)}
    there = file.with_suffix(f".{language}.yaml")
    found = {told["term"]: Said(told["name"], told["tip"]) for told in sources.data(there, "translated-term")}
    if off := {term.name for term in terms(file)} ^ found.keys():
        raise GlossaryError(f"{there.name}: not the terms of {file.name}: {', '.join(sorted(off))}")
    return found


def tips(language: str = "") -> dict[str, str]:
    """The meaning of each spelling, in a language."""
    return {form: said(language)[term.name].tip for term in terms() for form in term.forms}


def page(root: str, language: str = "") -> str:
    """Every term with its meaning, letter by letter; `root` is the relative path to the top of the site."""
    return "\n".join(_letters(root, language))


def _letters(root: str, language: str) -> Iterator[str]:
    for letter, found in groupby(terms(), key=lambda t: t.name[0].upper()):
        entries = "".join(_entry(term, root, language) for term in found)
        yield f'\n## {letter}\n\n<dl class="glossary">{entries}</dl>\n'


def _entry(term: Term, root: str, language: str) -> str:
    path, _, anchor = term.see.partition("#")
    address = f"{root}{path.removesuffix('.md')}.html{'#' + anchor if anchor else ''}"
    there, (word, words) = said(language)[term.name], MORE[language]
    name = term.name if there.name == term.name else f"{term.name}：{there.name}"
    elsewhere = ' hreflang="en"' if language else ""
    more = f'<a href="{escape(address)}" aria-label="{words} {escape(term.name)}"{elsewhere}>{word}</a>'
    return f'<dt id="{term.id}">{escape(name)}</dt><dd>{escape(there.tip)} {more}</dd>'
