"""The log of a job that ran out of memory, as tables: its errors, and the functions that tell its phase."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from calc.answers import answers
from calc.diagnose import errors, frames
from calc.estimate.gpu_group import PHASES
from calc.site.tables.tables import Cell, Column, Table

SHORT = {"gpu": "GPU memory", "host": "host memory", "vllm": "vLLM's share"}


def messages() -> Table:
    """One row per error, those of one kind of memory together; each leads to the section that goes on with it."""
    columns = (
        Column("says", "The log says"),
        Column("short", "What is short"),
        Column("phase", "Phase"),
        Column("means", "What it means"),
    )
    rows = [
        (
            Cell(row.example, f"<code>{escape(row.example)}</code>"),
            Cell(short, f'<a href="#{kind}">{short}</a>'),
            Cell(row.phase or "see the traceback"),
            Cell(row.means),
        )
        for kind, short in SHORT.items()
        for row in errors.ROWS
        if row.kind == kind
    ]
    caption = f"{len(rows)} errors of jobs that ran out of memory, and what they mean"
    return Table("errors-messages", caption, columns, tuple(rows), versions=answers.versions())


def phases() -> Table:
    """One row per phase, with the files whose functions tell it."""
    seen = {phase: [row.seen for row in frames.ROWS if row.phase == phase] for phase in PHASES}
    columns = (Column("phase", "Phase"), Column("seen", "The traceback has a function of these files"))
    rows = [(Cell(phase), _files(files)) for phase, files in seen.items() if files]
    note = "The innermost function that is listed decides; loading, saving and weight sync come before all others."
    return Table(
        "errors-phases", "From a traceback to a phase", columns, tuple(rows), "", note, versions=answers.versions()
    )


def _files(files: Sequence[str]) -> Cell:
    """Each file once, as code."""
    once = list(dict.fromkeys(files))
    return Cell("; ".join(once), "; ".join(f"<code>{escape(file)}</code>" for file in once))
