"""Pages as rendered by their macros: Markdown with a placeholder for each table, which the theme fills.

Macros run only here, once per page: the exports, the engine's plugin and the preview use the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import SandboxedEnvironment

from calc.base.schema import InputError
from calc.site.faults import BuildError, line_of
from calc.site.formats import datasets
from calc.site.i18n import languages
from calc.site.macros.bound import FIGURES, PageError, Record, View
from calc.site.macros.macros import Macros
from calc.site.tables.tables import Table
from calc.site.text import glossary, sources
from calc.site.text.prose import typed
from calc.site.text.sources import Source

TYPED = " typed in, allowed: a macro that computes it, or a mark that somebody is quoted: >, <q> or `"
NOTED = (FIGURES, datasets.KEY)  # the page metadata that macros add for the theme
VIEW = "page"  # what macros and templates call the page being rendered


class Rendered(NamedTuple):
    """A page's Markdown, and the metadata that the theme needs with it."""

    text: str
    noted: Mapping[str, Any]

    @property
    def whole(self) -> str:
        """The Markdown with its tables in their places."""
        text = self.text
        for place, table in self.noted.get(FIGURES, {}).items():
            text = text.replace(place, table)
        return text


class Pages:
    """The pages under `docs`, each rendered when it is first asked for."""

    def __init__(self, docs: Path) -> None:
        """Sets up the macros; nothing is rendered yet."""
        self.docs = docs
        self.record = Record()
        self._view = View("", "", {})
        self.found: dict[str, Rendered] = {}
        self._environment = SandboxedEnvironment(  # ranges have an end, and nothing inside Python is in reach
            # {#anchor} and {{ }} belong to Markdown and to quoted code.
            variable_start_string="[[",
            variable_end_string="]]",
            block_start_string="[%",
            block_end_string="%]",
            comment_start_string="[#",
            comment_end_string="#]",
            undefined=jinja2.StrictUndefined,
        )
        self._environment.globals.update(Macros(lambda: self._view, self.record).all())

    def page(self, source: str) -> Rendered:
        """The rendered page of a file; BuildError, one line, if its macros find a fault."""
        if source not in self.found:
            original, language = languages.split(source)
            if language:
                self._read(source)
                self.page(original)  # a translation shows the tables of its original
            self.found[source] = self._render(source)
        return self.found[source]

    def check(self) -> None:
        """Reads every page and the glossary; BuildError or InputError for a fault that shows before macros run."""
        for path in sorted(self.docs.rglob("*.md")):
            self._read(path.relative_to(self.docs).as_posix())
        for language in ("", *languages.LANGUAGES):
            glossary.said(language)

    def all(self, made: Callable[[Sequence[tuple[Table, str]]], object] = len) -> dict[str, Rendered]:
        """Every page by its file; `made` receives each page's tables. Pages that list all tables are rendered last."""
        for path in sorted(self.docs.rglob("*.md")):
            known = len(self.record.tables)
            self.page(path.relative_to(self.docs).as_posix())
            made([*self.record.tables.values()][known:])
        self.record.whole = True
        for source in self.record.waiting:
            self.found[source] = self._render(source)
        return self.found

    def _render(self, source: str) -> Rendered:
        page = self._read(source)
        try:
            self._view = View(source, languages.url(source), languages.meta(source, dict(page.meta), self.docs))
            text = self._environment.from_string(page.text).render({VIEW: self._view})
        except OSError:
            raise
        except Exception as error:
            raise BuildError(f"docs/{source}{_line(error, page)}: {_told(error)}") from error
        return Rendered(text, {name: self._view.meta[name] for name in NOTED if name in self._view.meta})

    def _read(self, source: str) -> Source:
        """A page's file, checked for faults that no macro finds: typed-in figures, an incomplete translation."""
        page = sources.read(self.docs / source)
        original, language = languages.split(source)
        if language and not (self.docs / original).is_file():
            raise BuildError(f"docs/{source}: a translation of docs/{original}, which is not there")
        found = []
        if not page.meta.get("generated"):
            self._parse(source, page)
            found += [(line, f"given {what!r}{TYPED}") for line, what in typed(page)]
        found += languages.strays(sources.read(self.docs / original), page) if language else []
        if found:
            raise BuildError("\n".join(f"docs/{source}:{line}: {words}" for line, words in found))
        return page

    def _parse(self, source: str, page: Source) -> None:
        """Refuses a page by hand whose macros cannot be read, or are not there: a translation is not blamed for it."""
        try:
            tree = self._environment.parse(page.text)
        except jinja2.TemplateSyntaxError as error:
            raise BuildError(f"docs/{source}{_line(error, page)}: {error.message}") from error
        unknown = meta.find_undeclared_variables(tree) - self._environment.globals.keys() - {VIEW}
        for name in tree.find_all(nodes.Name):
            if name.name in unknown:
                raise BuildError(f"docs/{source}:{page.line + name.lineno - 1}: {name.name!r} is undefined")


def _line(error: Exception, page: Source) -> str:
    """The line of a page at which its macros stopped, as `:12`; empty if it is not known."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f":{page.line + error.lineno - 1}"
    place = line_of(error)
    return f":{page.line + place[1] - 1}" if place else ""


def _told(error: Exception) -> str:
    """An error on one line; with its type if no macro foresees it, as for arguments that do not go together."""
    text = " ".join(str(error).split())
    foreseen = isinstance(error, InputError | PageError | jinja2.TemplateError)
    return text if foreseen else f"{type(error).__name__}: {text}"


@cache
def pages(docs: Path) -> Pages:
    """The pages under `docs`, one shared object."""
    return Pages(docs)


def give(env: Any) -> None:
    """Hook before mkdocs-macros renders a page: hands it the rendered Markdown, so that it has nothing to do."""
    found = pages(Path(env.conf["docs_dir"])).page(env.page.file.src_uri)
    env.markdown = found.text
    env.page.meta.update(found.noted, render_macros=False)
