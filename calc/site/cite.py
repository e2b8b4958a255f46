"""How a reader cites a table: by id, versions and address."""

from __future__ import annotations

from calc.site.tables import Table

AUTHORS = "The Headroom authors"
YEAR = "2026"


def line(table: Table, address: str) -> str:
    """One line for a reference list."""
    v = table.versions
    return (
        f"{AUTHORS} ({YEAR}). {table.caption}. Headroom, table {table.id}, "
        f"catalog {v['catalog']}, calc {v['calc']}. {address}. CC BY 4.0."
    )


def bibtex(table: Table, address: str) -> str:
    """The same as BibTeX; braces inside the quotes keep the caption's capitals."""
    v = table.versions
    fields = {
        "author": f"{{{AUTHORS}}}",
        "title": f"{{{_tex(table.caption)}}}",
        "year": YEAR,
        "howpublished": f"Headroom, table {_tex(table.id)}, catalog {v['catalog']}, calc {v['calc']}",
        "note": "CC BY 4.0",
        "url": address,
    }
    body = "".join(f'  {name} = "{value}",\n' for name, value in fields.items())
    return f"@misc{{headroom-{table.id},\n{body}}}\n"


def _tex(text: str) -> str:
    for plain, escaped in (("\\", r"\textbackslash{}"), ("&", r"\&"), ("%", r"\%"), ("#", r"\#"), ("_", r"\_")):
        text = text.replace(plain, escaped)
    return text
