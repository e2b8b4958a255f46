"""The tables of a page as schema.org data sets, for search engines; the theme puts them into the page's head."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from calc.site.formats import cite
from calc.site.tables.tables import Table

KEY = "datasets"  # in a page's metadata, where overrides/partials/datasets.html finds them
LICENCE = "https://creativecommons.org/licenses/by/4.0/"
FILES = {"csv": "text/csv", "json": "application/json"}


def note(meta: MutableMapping[str, Any], table: Table, page: str, root: str) -> None:
    """Adds a table to its page's data sets; `root` is the relative address of the site's top from the page."""
    authors = {"@id": "#authors", "@type": "Organization", "name": cite.AUTHORS}
    known = meta.setdefault(KEY, {"@context": "https://schema.org", "@graph": [authors]})
    known["@graph"].append(described(table, page, root))


def described(table: Table, page: str, root: str) -> dict[str, Any]:
    """A table as a Dataset; the authors are named once per page."""
    top = cite.site() if "://" in cite.site() else root
    address = cite.permalink(table, page)
    rests_on = table.assumptions.partition(". ")[0].rstrip(".")
    return {
        "@type": "Dataset",
        "identifier": table.id,
        "name": table.caption,
        "description": f"{table.caption}. {rests_on or 'Computed by Headroom, each value with its source'}.",
        "url": address if "://" in address else f"#{table.id}",
        "version": cite.edition(table.versions),
        "license": LICENCE,
        "creator": {"@id": "#authors"},
        "distribution": [
            {"@type": "DataDownload", "encodingFormat": kind, "contentUrl": f"{top}data/tables/{table.id}.{end}"}
            for end, kind in FILES.items()
        ],
    }
