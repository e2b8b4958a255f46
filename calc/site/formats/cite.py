"""Citations of a table: by id, versions and address."""

from __future__ import annotations

import os

from calc.site.formats.typeset import tex
from calc.site.tables.tables import Table

AUTHORS = "The Headroom authors"
YEAR = "2026"
LICENCE = "CC BY 4.0"


def site() -> str:
    """The address of this build: HEADROOM_SITE_URL with the version HEADROOM_VERSION appended, if they are set."""
    base, version = os.environ.get("HEADROOM_SITE_URL", ""), os.environ.get("HEADROOM_VERSION", "")
    base += "/" if base and not base.endswith("/") else ""
    return f"{base}{version}/" if version else base


def permalink(table: Table, page: str) -> str:
    """The address of a table in this very version; relative to the site's top if the site's address is not known."""
    return f"{site()}{page}#{table.id}"


def edition(table: Table) -> str:
    """The versions that the numbers rest on, with the guide's own if it has one."""
    version = os.environ.get("HEADROOM_VERSION", "")
    guide = f"guide {version}, " if version else ""
    return f"{guide}catalog {table.versions['catalog']}, calc {table.versions['calc']}"


def line(table: Table, address: str) -> str:
    """One line for a reference list, in the APA manual's form for a data set."""
    about = f"table {table.id}, {edition(table)}; {LICENCE}"
    return f"{AUTHORS}. ({YEAR}). {table.caption} ({about}) [Data set]. Headroom. {address}"


def bibtex(table: Table, address: str) -> str:
    """The citation as BibTeX; braces inside the quotes keep the caption's capitals."""
    fields = {
        "author": f"{{{AUTHORS}}}",
        "title": f"{{{tex(table.caption)}}}",
        "year": YEAR,
        "howpublished": f"Headroom, table {tex(table.id)}",
        "version": tex(edition(table)),
        "note": LICENCE,
        "url": address,
    }
    body = "".join(f'  {name} = "{value}",\n' for name, value in fields.items())
    return f"@misc{{headroom-{table.id},\n{body}}}\n"
