"""The search index: what readers call things is added to it, and it is set aside until somebody searches.

The theme loads `search/search_index.json` with every page. Here that file keeps the settings alone; the whole index is
`search/index.json`, which `docs/assets/search.js` loads with the first word that is typed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from calc.answers import answers
from calc.base.project import ROOT
from calc.site.faults import short
from calc.site.i18n import languages
from calc.site.text import sources

FILE = ROOT / "docs" / "search.yaml"
LIGHT, WHOLE = "search/search_index.json", "search/index.json"
FIELD = "names"  # of an entry: what readers call what it is about
WEIGHT = {"boost": 1000.0}  # as much as the theme gives a title


def said(file: Path = FILE) -> dict[str, list[str]]:
    """The words that readers type, by the address of the entry that they should find."""
    found: dict[str, list[str]] = {}
    for group in sources.data(file, "search") if file.is_file() else ():
        for lead in group["leads"]:
            page, anchor, place = lead.partition("#")
            found.setdefault(languages.url(page) + anchor + place, []).extend(group["words"])
    return found


def published() -> dict[str, list[str]]:
    """The names under which each model is published, by the address of its page."""
    return {f"models/{m.id}.html": [m.hf, *m.aliases] for m in answers.catalog().models.values()}


def named(index: Mapping[str, Any], names: Mapping[str, list[str]]) -> dict[str, Any]:
    """An index with the names in a field of their own."""
    entries = [e | ({FIELD: " ".join(names[e["location"]])} if e["location"] in names else {}) for e in index["docs"]]
    config = index["config"]
    return {"config": config | {"fields": config["fields"] | {FIELD: WEIGHT}}, "docs": entries}


def lost(site: Path) -> Iterator[str]:
    """One line for each entry that readers should find and that a built site does not have."""
    known = {entry["location"] for entry in json.loads((site / WHOLE).read_text("utf-8"))["docs"]}
    for place in sorted(said().keys() - known):
        yield f"{short(FILE)}: leads: given {place}, allowed: a page, or a heading of one"


def set_aside(site: Path) -> None:
    """Moves the index of a fresh site, with all names, to where nothing loads it yet; its settings stay."""
    index, names = json.loads((site / LIGHT).read_text("utf-8")), published()
    for place, words in said().items():
        names.setdefault(place, []).extend(words)
    whole = named(index, names)
    for name, data in ((WHOLE, whole), (LIGHT, {**whole, "docs": []})):
        (site / name).write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")), "utf-8")
