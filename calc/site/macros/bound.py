"""The state that a macro has: its page's address and front matter, and the record of what pages publish."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from calc.answers import answers
from calc.answers.answers import Answer
from calc.base.ledger import Phase
from calc.base.project import ROOT
from calc.base.schema import closest
from calc.site.formats import datasets
from calc.site.i18n import languages, speech
from calc.site.macros import menus
from calc.site.tables import tables
from calc.site.tables.tables import Table
from calc.site.views.advice import recipes
from calc.site.views.advice.recipes import Recipe
from calc.site.views.catalog import changelog
from calc.site.views.jobs import ledgers

T = TypeVar("T")
ID = re.compile(r"[a-z0-9][a-z0-9.-]*")  # of a table: part of addresses, file names and HTML
FIGURES = "figures"  # in a page's metadata: its tables by their places, which overrides/main.html fills


class PageError(ValueError):
    """A page that asks for something that does not exist; one line."""


class View(NamedTuple):
    """The page that is being rendered: its file under docs/, its address in the site, its front matter."""

    source: str
    url: str
    meta: MutableMapping[str, Any]

    @property
    def root(self) -> str:
        """The relative path from the page to the top of the site."""
        return "../" * self.url.count("/")


class Spoken(NamedTuple):
    """A number or a verdict in a sentence."""

    page: str
    call: str
    text: str


@dataclass(slots=True)
class Record:
    """The record of what pages publish: tables by id with their page, and the numbers in sentences."""

    tables: dict[str, tuple[Table, str]] = field(default_factory=dict)
    spoken: list[Spoken] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # pages that list all tables, to be rendered again
    whole: bool = False  # every page has been rendered: from now on nothing is recorded

    def table(self, table: Table, page: str) -> None:
        """Records a table; one id on two pages, or twice on one, is an error."""
        if self.whole:
            return
        if not ID.fullmatch(table.id):
            raise PageError(f"table id {table.id!r}, allowed: lower-case letters, digits, dots and dashes")
        if table.id in self.tables:
            raise PageError(f"table id {table.id!r} stands on {self.tables[table.id][1]} already")
        self.tables[table.id] = (table, page)

    def again(self, table: Table, original: str) -> None:
        """Records nothing: a translation shows the tables of its original, and no other."""
        if table.id not in self.tables or self.tables[table.id][1] != languages.url(original):
            raise PageError(f"table id {table.id!r} does not stand on {original}, which this page translates")

    def say(self, spoken: Spoken) -> None:
        """Records a number in a sentence."""
        if not self.whole:
            self.spoken.append(spoken)

    def every(self, page: str) -> Mapping[str, tuple[Table, str]] | None:
        """All tables; None while pages may still add to them, in which case `page` is to be rendered again."""
        if not self.whole:
            self.waiting.append(page)
            return None
        return self.tables


class Bound:
    """Macros bound to the page that is being rendered: where they find its jobs, and where their results go."""

    def __init__(self, current: Callable[[], View], record: Record | None = None) -> None:
        """`current` gives the page; `record`, if given, collects what the pages publish."""
        self._current = current
        self._record = record

    @property
    def _root(self) -> str:
        return self._current().root

    @property
    def _language(self) -> str:
        return languages.split(self._current().source)[1]

    @property
    def _translated(self) -> frozenset[str]:
        """The addresses of the pages in the page's language."""
        return languages.translated(self._language, ROOT / "docs")

    @property
    def _scenarios(self) -> Mapping[str, Any]:
        return self._current().meta.get("scenarios") or {}

    def _ask(self, job: str) -> Answer:
        named = self._scenarios
        if job not in named:
            raise PageError(
                f"no scenario {job!r} in the front matter; it has {', '.join(named) or 'none'}{closest(job, named)}"
            )
        return answers.ask(named[job], f"scenarios.{job}")

    def _recipe(self, job: str) -> Recipe:
        named = self._current().meta.get("recipes") or {}
        if job not in named:
            raise PageError(
                f"no recipe {job!r} in the front matter; it has {', '.join(named) or 'none'}{closest(job, named)}"
            )
        return recipes.recommended(named[job], f"recipes.{job}")

    def _phase(self, job: str, phase: str | None, group: str | None) -> Phase:
        answer = self._ask(job)
        return self._or_fault(job, lambda: ledgers.find_phase(answer, phase, group))

    def _or_fault(self, about: str, found: Callable[[], T]) -> T:
        """The result of `found`; its ValueError is raised as a fault of the page."""
        try:
            return found()
        except ValueError as error:
            raise PageError(f"{about}: {error}") from error

    def _label(self, job: str) -> str:
        return str((self._current().meta.get("labels") or {}).get(job, job))

    def _labelled(
        self, jobs: Iterable[str], table_id: str, caption: str
    ) -> tuple[dict[str, Answer], str, str, dict[str, str]]:
        said = self._current().meta.get("said") or {}
        chosen = list(jobs)
        return (
            {self._label(job): self._ask(job) for job in chosen},
            table_id,
            caption,
            {self._label(job): str(said[job]) for job in chosen if job in said},
        )

    @property
    def _every(self) -> Mapping[str, tuple[Table, str]] | None:
        """All tables of the guide; None while they are not known."""
        return self._record.every(self._current().source) if self._record else None

    def _say(self, call: str, text: str) -> str:
        if self._record is not None and not self._language:
            self._record.say(Spoken(self._current().url, call, text))
        return self._said(text).replace(" ", "&nbsp;")

    def _place(self, table: Table) -> str:
        """A placeholder, which the theme fills: neither Markdown nor the search index has to read the table's HTML."""
        view = self._current()
        original, language = languages.split(view.source)
        if self._record is not None and language:
            self._record.again(table, original)
        elif self._record is not None:
            self._record.table(table, view.url)
        if not language:
            datasets.note(view.meta, table, view.url, view.root)
        place = tables.place(table)
        view.meta.setdefault(FIGURES, {})[place] = self._worded(
            tables.to_html(table, menus.footer(table, view.url, view.root, language))
        )
        return place

    def _said(self, text: str) -> str:
        """A line generated outside the page, in the page's language."""
        return speech.say(text, self._language)

    def _worded(self, html: str) -> str:
        """HTML generated outside the page, with its words, and the pages that it leads to, in the page's language."""
        return speech.lead(speech.speak(html, self._language), self._root, self._language, self._translated)

    def _released(self, release: changelog.Release) -> str:
        """A release as a section of the changelog."""
        made = changelog.table(release, self._root)
        said = self._place(made) if made else changelog.SAME if release.since else changelog.FIRST
        every = f"[Every change](changelog/{release.version}.json)\n\n" if release.changes else ""
        return f"## {release.version} · {release.date}\n\n{every}{said}"
