"""A table as a spreadsheet workbook: numbers as numbers, and a second sheet that says what they are."""

from __future__ import annotations

import datetime
import io

from xlsxwriter import Workbook

from calc.site.formats import cite
from calc.site.tables.tables import Table, field_name

MADE = datetime.datetime(2026, 1, 1)  # in every workbook, so that the same table gives the same bytes
WIDEST = 60  # characters


def to_xlsx(table: Table, source: str) -> bytes:
    """The bytes of the workbook; the same table gives the same bytes."""
    out = io.BytesIO()
    book = Workbook(out, {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False})
    book.set_properties({"title": table.caption, "author": cite.AUTHORS, "created": MADE})
    bold = book.add_format({"bold": True, "text_wrap": True, "valign": "top"})
    sheet = book.add_worksheet("Table")
    places = [c.digits if c.kind in ("number", "verdict") else 0 for c in table.columns for _ in c.fields]
    formats = [book.add_format({"num_format": f"#,##0.{'0' * n}" if n else "#,##0"}) for n in places]
    records = list(table.records())
    for column, (name, kind, unit) in enumerate(table.fields):
        sheet.write_string(0, column, field_name(name, unit), bold)
        longest = max([len(str(r[column])) for r in records if r[column] is not None], default=0)
        sheet.set_column(
            column, column, min(WIDEST, max(12, longest + 1)), formats[column] if kind == "number" else None
        )
    for row, record in enumerate(records, 1):
        for column, value in enumerate(record):
            if value is not None:
                sheet.write(row, column, value)
    sheet.freeze_panes(1, 1)
    if records:
        sheet.autofilter(0, 0, len(records), len(table.fields) - 1)
    about = book.add_worksheet("About")
    about.set_column(0, 0, 14, bold)
    about.set_column(1, 1, 100, book.add_format({"text_wrap": True, "valign": "top"}))
    said = {"Table": table.caption, "Rests on": table.assumptions, "Source": source, "Licence": cite.LICENCE}
    for row, (what, words) in enumerate(said.items()):
        about.write_string(row, 0, what)
        about.write_string(row, 1, words)
    book.close()
    return out.getvalue()
