"""Pages as their macros give them: Markdown with a place for each table, and the tables, which the theme puts there.

Macros run here alone, once a page: the exports, the engine's plugin and the preview take what they gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml

from calc.schema import InputError
from calc.site import datasets, languages
from calc.site.bound import FIGURES, PageError, Record, View
from calc.site.macros import Macros
from calc.site.tables import Table

NOTED = (FIGURES, datasets.KEY)  # of a page's metadata what its macros add for the theme


class BuildError(Exception):
    """A site that cannot be built; the text is what to print."""


class Rendered(NamedTuple):
    """A page's Markdown, and what the theme needs beside it."""

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
        """None is rendered yet."""
        self.docs = docs
        self.record = Record()
        self._view = View("", "", {})
        self.found: dict[str, Rendered] = {}
        self._environment = jinja2.Environment(
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
        """A page by its file; BuildError, one line, where its macros find a fault."""
        if source not in self.found:
            original, language = languages.split(source)
            if language:
                self.page(original)  # whose tables a translation shows
            self.found[source] = self._render(source)
        return self.found[source]

    def all(self, made: Callable[[Sequence[tuple[Table, str]]], object] = len) -> dict[str, Rendered]:
        """Every page by its file, and of each its tables to `made`; those that speak of all tables come last."""
        for path in sorted(self.docs.rglob("*.md")):
            known = len(self.record.tables)
            self.page(path.relative_to(self.docs).as_posix())
            made([*self.record.tables.values()][known:])
        self.record.whole = True
        for source in self.record.waiting:
            self.found[source] = self._render(source)
        return self.found

    def _render(self, source: str) -> Rendered:
        path = self.docs / source
        try:
            own, body = languages.front(path)
            self._view = View(source, languages.url(source), languages.meta(source, own, self.docs))
            text = self._environment.from_string(body).render(page=self._view)
        except (InputError, PageError, jinja2.TemplateError, yaml.YAMLError) as error:
            raise BuildError(f"docs/{source}: {' '.join(str(error).split())}") from error
        return Rendered(text, {name: self._view.meta[name] for name in NOTED if name in self._view.meta})


@cache
def pages(docs: Path) -> Pages:
    """The pages under `docs`, the same for all who ask."""
    return Pages(docs)


def give(env: Any) -> None:
    """Before mkdocs-macros renders a page: gives it what the macros gave, so that it has nothing to do."""
    found = pages(Path(env.conf["docs_dir"])).page(env.page.file.src_uri)
    env.markdown = found.text
    env.page.meta.update(found.noted, render_macros=False)
