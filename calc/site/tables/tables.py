"""A computed table is one object; the page and the files beside it are views of it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from typing import Any, NamedTuple

from calc.answers.workings import Book, Working, spelled
from calc.recommend.answer import CANNOT
from calc.site.tables import charts, pictures
from calc.site.tables.charts import Bar
from calc.site.tables.pictures import Picture

Value = str | int | float | bool | None

NOT_PUBLISHED = "not published"
LONG = 90  # characters; such a cell gets a wider column
# Names of a verdict cell's parts in the exports: 'sft_full_8_verdict', 'sft_full_8_peak', 'sft_full_8_with'.
VERDICT_PARTS = ("verdict", "peak", "with")
TAG = re.compile(r"<[^>]*>")
WORDS = {"fits": "fits", "tight": "tight", "oom": "out of memory"}
# Shows the columns that stand behind, by the style sheet alone.
NUMBERS = '<label class="numbers"><input type="checkbox" autocomplete="off"> Numbers</label>'


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its key, title, unit and kind.

    `kind` is `text`, `number`, `verdict` (a word, a peak in `unit`, the configuration that reaches it) or `bar` (a
    picture of other columns, which no export repeats). Numbers show `digits` decimals, and export the same. A column
    that stands `behind` is out of sight until the reader asks for the numbers. `data`: what scripts need to know of it.
    """

    key: str
    title: str
    unit: str = ""
    kind: str = "text"
    digits: int = 0
    hint: str = ""
    behind: bool = False
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """The header with its unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def fields(self) -> tuple[tuple[str, str, str], ...]:
        """(name, type, unit) of each export field that this column becomes."""
        if self.kind == "bar":
            return ()
        if self.kind == "verdict":
            types = ("string", "number", "string")
            return tuple(
                (f"{self.key}_{part}", kind, self.unit if part == "peak" else "")
                for part, kind in zip(VERDICT_PARTS, types, strict=True)
            )
        return ((self.key, "number" if self.kind == "number" else "string", self.unit),)


class Cell(NamedTuple):
    """A value and its origin: exact bytes, the scenario that `calc` was asked, the lines of its ledger; or a bar.

    `data`: what scripts need to know of it, or, in the first column, of its row.
    """

    value: Value | tuple[Value, ...] = None
    html: str = ""
    exact: int | None = None
    scenario: Mapping[str, Any] | None = None
    style: str = ""
    working: Working | None = None
    data: Mapping[str, str] | None = None
    bar: Bar | None = None

    @property
    def values(self) -> tuple[Value, ...]:
        """The value as the exports want it: one item per field."""
        return self.value if isinstance(self.value, tuple) else (self.value,)


@dataclass(frozen=True, slots=True)
class Table:
    """Caption, columns, rows, and the assumptions behind the numbers in one line. A published `id` never changes.

    A chart is a table with a `picture` of what its rows hold; one whose cells have bars is drawn by them.
    Of more rows than `most` a page shows the first, and the files beside it have all. `data`: what scripts need to
    know of the whole.
    """

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    assumptions: str = ""
    note: str = ""
    legend: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    folded: str = ""  # the words that open the table, if it is not to stand open
    picture: Picture | None = None
    most: int | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def worked(self) -> bool:
        """True if any cell has its working."""
        return any(cell.working for row in self.rows for cell in row)

    @property
    def fields(self) -> tuple[tuple[str, str, str], ...]:
        """(name, type, unit) of every export field."""
        return tuple(f for column in self.columns for f in column.fields)

    def records(self) -> Iterator[tuple[Value, ...]]:
        """The rows as the exports hold them: the shown values, rounded as shown."""
        for row in self.rows:
            yield tuple(
                rounded(column, value)
                for column, cell in zip(self.columns, row, strict=True)
                if column.kind != "bar"
                for value in cell.values
            )


def rounded(column: Column, value: Value) -> Value:
    """A number with no more decimals than the page shows; any other value as it is."""
    return round(value, column.digits) if isinstance(value, float) else value


def text(column: Column, value: Value) -> str:
    """A value as the page shows it."""
    if value is None:
        return NOT_PUBLISHED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.{column.digits}f}"
    return value


def shown(column: Column, cell: Cell) -> str:
    """A cell's text as the page shows it; if the page shows more than a value, that of the value alone.

    Nothing, and none, are no such value: the page says in words what they mean.
    """
    if column.kind == "verdict":
        word, peak, how = cell.values
        if word is None:
            return str(how or CANNOT)
        return " ".join([WORDS[str(word)], text(column, peak), *([str(how)] if how else [])])
    value = cell.values[0]
    return unescape(TAG.sub("", cell.html)) if value in (None, 0) and cell.html else text(column, value)


def field_name(name: str, unit: str) -> str:
    """An export field's header."""
    return f"{name} ({unit})" if unit else name


def verdict_html(verdict: str, label: str | None = None) -> str:
    """A verdict as a word that colour only reinforces."""
    return f'<span class="verdict {verdict}">{escape(label or WORDS[verdict])}</span>'


def _cell_html(column: Column, cell: Cell, first: bool) -> str:
    if column.kind == "bar":
        return f'<td class="bar" aria-hidden="true">{charts.bar(cell.bar) if cell.bar else ""}</td>'
    classes = ([cell.style] if cell.style else []) + (["behind"] if column.behind else [])
    if column.kind == "verdict":
        word, peak, how = cell.values
        if word is None:
            inner = f'<span class="none">{escape(str(how or CANNOT))}</span>'
        else:
            inner = f"<b>{WORDS[str(word)]}</b> <span>{text(column, peak)}</span>"
            inner += f" <small>{whole(str(how))}</small>" if how else ""
        classes += ["verdict", str(word or "none")]
    else:
        shown = text(column, cell.values[0])
        inner = cell.html or escape(shown)
        missing = cell.values[0] is None and not cell.html
        classes += ["number"] if column.kind == "number" and not missing else []
        classes += ["empty"] if missing else []
        classes += ["long"] if len(shown) > LONG and not first else []
    attribute = (f' class="{" ".join(classes)}"' if classes else "") + _data(cell.data or {})
    return f'<th scope="row"{attribute}>{inner}</th>' if first else f"<td{attribute}>{inner}</td>"


def whole(words: str) -> str:
    """Words as HTML, with each size of host memory kept on one line."""
    return escape(words).replace(" GB", "&nbsp;GB")


def place(table: Table) -> str:
    """An empty figure with the table's id: the placeholder that the theme fills."""
    return f'<figure class="computed" id="{table.id}" data-search-exclude></figure>'


def to_html(table: Table, footer: str = "") -> str:
    """The table's figure, on one line, so that no Markdown rule can touch it."""
    head = "".join(
        f'<th scope="col"{_kind(c)}{_hint(c)}{_data(c.data)}>{escape(c.title)}{_unit(c)}</th>'
        if c.kind != "bar"
        else f'<td class="bar" aria-hidden="true">{escape(c.title)}</td>'
        for c in table.columns
    )
    body = "".join(
        "<tr>"
        + "".join(_cell_html(c, cell, i == 0) for i, (c, cell) in enumerate(zip(table.columns, row, strict=True)))
        + "</tr>"
        for row in table.rows[: table.most]
    )
    caption = f'<figcaption id="{table.id}-caption">{escape(table.caption)}</figcaption>'
    note = f'<p class="assumptions">{escape(table.assumptions)}</p>' if table.assumptions else ""
    note += f'<p class="assumptions">{table.note}</p>' if table.note else ""
    grid = (
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{table.id}-caption">'
        f'<table class="data"{_data(table.data)}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    if table.folded:
        about = "" if table.picture else note  # what a drawing rests on stands below it
        grid = f'<details class="twin"><summary>{escape(table.folded)}</summary>{grid}{about}</details>'
        note = note if table.picture else ""
    drawing = (
        pictures.svg(table.picture, f"{table.id}-caption") + pictures.legend(table.picture.keys)
        if table.picture
        else ""
    )
    switch = NUMBERS if any(column.behind for column in table.columns) else ""
    inner = f"{caption}{drawing}{table.legend}{switch}{grid}{note}{footer}"
    return f'<figure class="computed" id="{table.id}" data-search-exclude>{inner}</figure>'


def _kind(column: Column) -> str:
    kinds = [column.kind] if column.kind in ("number", "verdict") else []
    kinds += ["behind"] if column.behind else []
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _data(facts: Mapping[str, str]) -> str:
    return "".join(f' data-{name}="{escape(value)}"' for name, value in facts.items())


def _hint(column: Column) -> str:
    return f' title="{escape(column.hint)}"' if column.hint else ""


def _unit(column: Column) -> str:
    return f' <span class="unit">({escape(column.unit)})</span>' if column.unit else ""


def to_csv(table: Table) -> str:
    """Comma-separated values with the unit in each header, `\\n` line ends; unpublished values are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(field_name(name, unit) for name, _, unit in table.fields)
    shown = [c.digits if c.kind in ("number", "verdict") else None for c in table.columns for _ in c.fields]
    for record in table.records():
        writer.writerow(
            "" if value is None else f"{value:.{digits or 0}f}" if isinstance(value, float) else value
            for value, digits in zip(record, shown, strict=True)
        )
    return out.getvalue()


def to_dict(table: Table) -> dict[str, Any]:
    """The table for JSON: the shown rows, and for each computed cell its exact bytes, its scenario and its working.

    A cell's `lines` are indices into the table's `lines`; those lines add up to its bytes. A cell's scenario has the
    fields in which cells differ; those that all share are in the table's `scenario`.
    """
    book = Book()
    alike = _alike([cell.scenario for row in table.rows for cell in row if cell.scenario is not None])
    computed = [
        {"row": i, "column": column.key, "bytes": cell.exact, "scenario": _without(alike, cell.scenario)}
        | ({"at": cell.working.at, "lines": book.places(cell.working.lines)} if cell.working else {})
        for i, row in enumerate(table.rows)
        for column, cell in zip(table.columns, row, strict=True)
        if cell.scenario is not None
    ]
    return {
        "id": table.id,
        "caption": table.caption,
        "assumptions": table.assumptions,
        "licence": "CC-BY-4.0",
        "catalog_version": table.versions.get("catalog"),
        "calc_version": table.versions.get("calc"),
        "columns": [{"key": c.key, "title": c.title, "unit": c.unit} for c in table.columns if c.kind != "bar"],
        "fields": [
            {"name": name, "type": kind} | ({"unit": unit} if unit else {}) for name, kind, unit in table.fields
        ],
        "rows": [dict(zip([name for name, _, _ in table.fields], record, strict=True)) for record in table.records()],
        "scenario": alike,
        "cells": computed,
        "components": {c: charts.name(c) for c in dict.fromkeys(line.component for line in book.lines)},
        "lines": [spelled(line) for line in book.lines],
    }


def _alike(scenarios: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields that all of these scenarios share."""
    first = scenarios[0] if scenarios else {}
    return {name: value for name, value in first.items() if all([s.get(name) == value for s in scenarios])}


def _without(alike: Mapping[str, Any], scenario: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scenario.items() if name not in alike}


def to_json(table: Table) -> str:
    """`to_dict` as text; the same table gives the same bytes."""
    return json.dumps(to_dict(table), ensure_ascii=False, separators=(",", ":")) + "\n"
