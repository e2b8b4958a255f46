"""Citations of tables and pages: by id, versions and address, and where the project's code is.

Where the address of the site is not known to its build, citations hold an address relative to the site's top, which
`docs/assets/cite.js` makes whole from the page's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from typing import Any

from calc.answers import answers
from calc.site.formats.typeset import tex
from calc.site.i18n import speech
from calc.site.tables.tables import Table

AUTHORS = "The Headroom authors"
YEAR = "2026"
LICENCE = "CC BY 4.0"


def site() -> str:
    """The address of this build: HEADROOM_SITE_URL with the version HEADROOM_VERSION appended; empty if not known."""
    base, version = os.environ.get("HEADROOM_SITE_URL", ""), os.environ.get("HEADROOM_VERSION", "")
    base += "/" if base and not base.endswith("/") else ""
    return f"{base}{version}/" if base and version else base


def repository() -> str:
    """The address of the project's code, HEADROOM_REPOSITORY_URL; empty if it is not set."""
    return os.environ.get("HEADROOM_REPOSITORY_URL", "")


def permalink(table: Table, page: str) -> str:
    """The address of a table in this very version; relative to the site's top if the site's address is not known."""
    return f"{site()}{page}#{table.id}"


def edition(versions: Mapping[str, str]) -> str:
    """The versions that the numbers rest on, with the guide's own if it has one."""
    version = os.environ.get("HEADROOM_VERSION", "")
    guide = f"guide {version}, " if version else ""
    return f"{guide}catalog {versions['catalog']}, calc {versions['calc']}"


def line(table: Table, address: str) -> str:
    """One line for a reference list, in the APA manual's form for a data set."""
    about = f"table {table.id}, {edition(table.versions)}; {LICENCE}"
    return f"{AUTHORS}. ({YEAR}). {table.caption} ({about}) [Data set]. Headroom. {address}"


def bibtex(table: Table, address: str, title: str = "") -> str:
    """The citation as BibTeX, under the caption or `title`, its translation.

    Braces inside the quotes keep its capitals.
    """
    fields = {
        "author": f"{{{AUTHORS}}}",
        "title": f"{{{tex(title or table.caption)}}}",
        "year": YEAR,
        "howpublished": f"Headroom, table {tex(table.id)}",
        "version": tex(edition(table.versions)),
        "note": LICENCE,
        "url": address,
    }
    body = "".join(f'  {name} = "{value}",\n' for name, value in fields.items())
    return f"@misc{{headroom-{table.id},\n{body}}}\n"


def page(title: str, url: str) -> str:
    """One line about a page, as HTML and in its language, for the foot of its printed form."""
    said = f"{AUTHORS}. ({YEAR}). {title} ({edition(answers.versions())}; {LICENCE}). Headroom. {site()}{url}"
    return f"<span{relative(url)}>{escape(speech.say(said, url.partition('/')[0]))}</span>"


def relative(address: str) -> str:
    """The attribute of an element whose text has an address that is not whole yet; none if the site's is known."""
    return "" if "://" in site() else f' data-address="{escape(address)}"'


# ---- a hook that the site engine calls -----------------------------------------------------------------------------


def on_env(env: Any, **others: Any) -> None:
    """Gives templates the citation of a page, and the address of the project's code."""
    env.globals.update(cited=page, repository=repository)
