"""The list of every published table with its downloads."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import groupby
from typing import NamedTuple

from calc.answers import answers
from calc.site.tables import drawn
from calc.site.tables.tables import Table

Tables = Mapping[str, tuple[Table, str]]  # by id, with the address of the page that each is on
ALTERNATES = ("json", "md", "tex", "xlsx")
DRAWN = ("svg", "png")
LISTED = ("csv", "json")  # the others stand in the menu of each table: all of them here would be half of the page
UNKNOWN = "(counted by make site)"  # while pages may still add tables; the preview renders only requested pages


def kinds(table: Table) -> tuple[str, ...]:
    """The kinds of file of a table; a table that can be drawn has pictures, too."""
    return ("csv", *ALTERNATES, *(DRAWN if drawn.drawable(table) else ()))


class Home(NamedTuple):
    """A table with its address."""

    address: str
    table: Table


# The part of the guide that a table is in, by the start of its page's address; the rest is home.
PARTS = {
    "hardware/gpus/": "Pages of GPUs",
    "hardware/": "Hardware",
    "models/": "Models",
    "recipes/": "Recipes",
    "strategies/": "Strategies",
    "case-studies/": "Case studies",
    "method/": "Method",
    "validation": "Validation",
    "reference/": "Reference",
}


def listed(tables: Tables, root: str) -> str:
    """All `tables` by their part of the guide; `root` is the relative path to the top of the site."""
    found = sorted((Home(f"{page}#{table.id}", table) for table, page in tables.values()), key=_place)
    whole = f"<p>{len(found)} tables, catalog <code>{escape(answers.versions()['catalog'])}</code>.</p>"
    return whole + "".join(_group(part, list(homes), root) for part, homes in groupby(found, key=_part))


def _place(home: Home) -> tuple[str, str]:
    return _part(home), home.address


def _part(home: Home) -> str:
    return next((name for start, name in PARTS.items() if home.address.startswith(start)), "Home and other pages")


def _group(part: str, homes: list[Home], root: str) -> str:
    items = "".join(
        f'<li><a href="{root}{escape(home.address)}">{escape(home.table.caption)}</a> {_files(home.table, root)}</li>'
        for home in homes
    )
    return f"<details><summary>{part}: {len(homes)} tables</summary><ul>{items}</ul></details>"


def _files(table: Table, root: str) -> str:
    return " ".join(f'<a href="{root}data/tables/{table.id}.{kind}" download>{kind.upper()}</a>' for kind in LISTED)
