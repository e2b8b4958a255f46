"""The content of computed tables: on a page, in their JSON, and if a row of words says what a row of values does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from browsing import WHOLE

from calc.site.tables import charts
from calc.site.views.catalog.sheets import NODES

FEW = 4  # tables of a kind
WORDS = {"oom": "out of memory"}


class Figures(HTMLParser):
    """The rows of each computed table of a page, by the figure's id; cells that only draw are left out.

    So is what unfolds below a cell's value: a command and its notes.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, list[list[str]]] = {}
        self._id = ""
        self._cell: list[str] | None = None
        self._folded = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "figure" and "computed" in (given.get("class") or ""):
            self._id = given["id"] or ""
            self.found[self._id] = []
        elif self._id and tag == "tr":
            self.found[self._id].append([])
        elif self._id and tag in ("td", "th") and "aria-hidden" not in given:
            self._cell, self._folded = [], False

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self.found[self._id][-1].append(" ".join("".join(self._cell).split()))
            self._cell = None
        elif tag == "summary":
            self._folded = True
        elif tag == "figure":
            self._id = ""

    def handle_data(self, data: str) -> None:
        if self._cell is not None and not self._folded:
            self._cell.append(data)


def table_of(site: Path, name: str) -> dict[str, Any]:
    """One table, each cell with its whole scenario; to read all of them takes two seconds."""
    found: dict[str, Any] = json.loads((site / f"data/tables/{name}.json").read_text("utf-8"))
    for cell in found["cells"]:
        cell["scenario"] = found["scenario"] | cell["scenario"]
    return found


def tables(site: Path) -> dict[str, dict[str, Any]]:
    return {p.stem: table_of(site, p.stem) for p in sorted((site / "data/tables").glob("*.json"))}


def of_each_kind(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first few tables of those with the same columns, which one function writes; of a whole site all tables."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name, data in found.items():
        kinds.setdefault(tuple([column["key"] for column in data["columns"]]), []).append(name)
    return {name: found[name] for names in kinds.values() for name in (names if WHOLE else names[:FEW])}


def agrees(column: str, cell: str, value: Any) -> bool:
    """True if a cell's text says what the JSON holds."""
    if value == 0 and cell == "none":  # a card does not have it
        return True
    if isinstance(value, int | float):
        return float(cell.replace(",", "")) == value
    if column == "component":
        return cell in (value, charts.name(value))
    if column == "field" and cell != value:  # of a node, in the words of its column
        return cell in [known.title for known in NODES if known.key == value]
    if value is None:
        return cell in ("not published", "—")  # the sources do not say; there is nothing to say
    return cell.strip("“”") in (("", "—") if not value else (value,))


def disagreement(cells: Sequence[str], row: dict[str, Any]) -> tuple[str, str, Any] | None:
    """The first column in which the words of `cells` are not the values of `row`, with both; None where all agree."""
    values = iter(row.items())
    for cell in cells:
        name, value = next(values, ("nothing", None))
        if name.endswith("_verdict"):
            peak, how = next(values)[1], next(values)[1]
            said = f"{WORDS.get(value, value)} {peak:,.1f} {how}".strip() if value else how or "cannot run"
            if cell != said:
                return name, cell, said
        elif not agrees(name, cell, value):
            return name, cell, value
    return next(((name, "", value) for name, value in values), None)
