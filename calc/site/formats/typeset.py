"""A table as text for other documents: Markdown and LaTeX, with the words that the page shows."""

from __future__ import annotations

import re
from functools import cache
from itertools import cycle

from pylatexenc.latexencode import UnicodeToLatexEncoder

from calc.site.tables.tables import LONG, Cell, Column, Table, shown

_ENCODER = UnicodeToLatexEncoder(replacement_latex_protection="braces-after-macro", unknown_char_warning=False)
MARKS = re.compile(r"([\\`*_\[\]<>|~])")


def markdown(text: str) -> str:
    """Text on one line, with Markdown's special characters escaped."""
    return MARKS.sub(r"\\\1", " ".join(text.splitlines()))


@cache
def tex(text: str) -> str:
    """Text as LaTeX, quotes in pairs; an initial [ or * is braced, or the row end before it would take it."""
    parts = [str(_ENCODER.unicode_to_latex(part)) for part in text.split('"')]
    parts = [part.replace("--", "-{}-") for part in parts]  # keeps -- from becoming a dash
    latex = parts[0] + "".join(f"{mark}{part}" for mark, part in zip(cycle(("``", "''")), parts[1:], strict=False))
    return f"{{{latex[0]}}}{latex[1:]}" if latex[:1] in ("[", "*") else latex


def _rows(table: Table) -> list[list[tuple[Column, Cell]]]:
    return [[(c, cell) for c, cell in zip(table.columns, row, strict=True) if c.kind != "bar"] for row in table.rows]


def _columns(table: Table) -> list[Column]:
    return [c for c in table.columns if c.kind != "bar"]


def to_markdown(table: Table, source: str) -> str:
    """A GitHub-flavoured Markdown table under its caption; below it the assumptions and the `source`."""
    lines = [
        " | ".join(markdown(c.heading) for c in _columns(table)),
        " | ".join("---:" if c.kind == "number" else "---" for c in _columns(table)),
        *(" | ".join(markdown(shown(c, cell)) for c, cell in row) for row in _rows(table)),
    ]
    body = "".join(f"| {line} |\n" for line in lines)
    rests_on = f"{markdown(table.assumptions)}\n\n" if table.assumptions else ""
    return f"**{markdown(table.caption)}**\n\n{body}\n{rests_on}Source: {markdown(source)}\n"


def to_latex(table: Table, source: str) -> str:
    """A `table` in the style of booktabs, numbers to the right; below it the assumptions and the `source`."""
    columns, rows = _columns(table), _rows(table)
    long = {c.key for row in rows for c, cell in row if len(shown(c, cell)) > LONG}
    spec = "".join("r" if c.kind == "number" else "p{6cm}" if c.key in long else "l" for c in columns)
    head = " & ".join(tex(c.heading) for c in columns)
    body = "".join(f"    {' & '.join(tex(shown(c, cell)) for c, cell in row)} \\\\\n" for row in rows)
    rests_on = " ".join([*([table.assumptions] if table.assumptions else []), f"Source: {source}"])
    return (
        "% needs \\usepackage{booktabs}\n"
        "\\begin{table}\n"
        "  \\centering\n"
        f"  \\caption{{{tex(table.caption)}}}\n"
        f"  \\label{{tab:{table.id}}}\n"
        f"  \\begin{{tabular}}{{{spec}}}\n"
        "    \\toprule\n"
        f"    {head} \\\\\n"
        "    \\midrule\n"
        f"{body}"
        "    \\bottomrule\n"
        "  \\end{tabular}\n"
        f"  \\par\\smallskip\\footnotesize {tex(rests_on)}\n"
        "\\end{table}\n"
    )
