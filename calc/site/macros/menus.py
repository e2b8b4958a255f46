"""The line under a computed table: its versions, how far off it may be, and its downloads and citation."""

from __future__ import annotations

from html import escape

from calc.site.formats import cite, published
from calc.site.i18n import speech
from calc.site.tables.tables import Table
from calc.site.views.accuracy import odds

# File extensions, with the names that a reader knows.
FILES = {
    "csv": "CSV", "json": "JSON", "xlsx": "XLSX", "md": "Markdown", "tex": "LaTeX", "svg": "SVG", "png": "PNG",
}  # fmt: skip


def footer(table: Table, page: str, root: str, language: str = "") -> str:
    """Versions, links to the records that verdicts rest on, downloads and citation, for a table on `page`.

    `root` is the relative address of the site's top from there; `language` is that of BibTeX's title. Functions that
    need a script are added by `docs/assets/tables.js`.
    """
    v = table.versions
    worked = " data-worked" if table.worked else ""
    return (
        f'<div class="provenance"{worked}><span>catalog <code>{v["catalog"]}</code>, calc <code>{v["calc"]}</code>'
        f"</span>{_far_off(table, root)}{_take(table, root)}{_cite(table, page, language)}</div>"
    )


def _far_off(table: Table, root: str) -> str:
    """Links from a table of computed cells to the records that its verdicts rest on."""
    links = [f'<a href="{root}validation.html#{id}">{escape(words)}</a>' for id, words in odds.rests_on(table)]
    return f"<span>How far off: {'; '.join(links)}</span>" if links else ""


def _take(table: Table, root: str) -> str:
    kinds = published.kinds(table)
    offered = {end: name for end, name in FILES.items() if end in kinds}
    files = " ".join(
        f'<a href="{root}data/tables/{table.id}.{end}" download>{name}</a>' for end, name in offered.items()
    )
    note = " The JSON has the job and the lines behind each cell." if table.worked else ""
    return f'<details class="take" name="{table.id}"><summary>Download</summary><p>{files}{note}</p></details>'


def _cite(table: Table, page: str, language: str) -> str:
    address = cite.permalink(table, page)
    there = escape(address) if "://" in address else f"#{table.id}"
    bibtex = escape(cite.bibtex(table, address, speech.say(table.caption, language))).replace("\n", "&#10;")
    return (
        f'<details class="cite" name="{table.id}"{cite.relative(address)}><summary>Cite</summary>'
        f'<p translate="no">{escape(cite.line(table, address))}</p>'
        f'<pre tabindex="0" aria-label="BibTeX">{bibtex}</pre>'
        f'<p><span>Permalink to this version</span> <a href="{there}">{escape(address)}</a></p></details>'
    )
