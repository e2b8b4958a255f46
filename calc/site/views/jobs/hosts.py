"""Host memory as bars and a table: the bytes that jobs keep on a node at each moment, against the node's memory."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import NamedTuple

from calc.answers import answers
from calc.answers.answers import Answer
from calc.answers.workings import Working, of_phase
from calc.base.units import GB
from calc.site.tables import drawn
from calc.site.tables.charts import Bar
from calc.site.tables.pictures import Picture
from calc.site.tables.tables import Cell, Column, Table, verdict_html
from calc.site.views.jobs.ledgers import by_component, shared


class Node(NamedTuple):
    """A node's memory as its owner states it, and the share in use at which jobs on it are killed."""

    gb: int
    killed_at: float = 1.0

    @property
    def limit(self) -> float:
        """The bytes above which a job dies."""
        return self.gb * GB * self.killed_at

    @property
    def note(self) -> str:
        """The assumptions behind the column about this node."""
        killing = f" on which jobs are killed from {100 * self.killed_at:.0f} % on, that is {self.limit / GB:,.0f} GB"
        return (
            f"Against a node of {self.gb:,} GB{killing if self.killed_at < 1 else ''}. "
            "What the operating system and other processes take comes on top."
        )


def host(
    answered: Mapping[str, Answer], table_id: str, caption: str, said: Mapping[str, str], node: Node | None = None
) -> Table:
    """Host memory of a node, moment by moment, for jobs that keep something there; a dash for a moment a job lacks.

    With `node` each row gives the first moment at which that node runs out of memory.
    """
    quoted = any(said.get(name) for name in answered)
    names = list(dict.fromkeys(p.name for a in answered.values() for p in a.estimate.host_phases))
    columns = (
        Column("job", "Job"),
        *([Column("on_node", f"A node of {node.gb:,} GB")] if node else []),
        *(Column(n, n.capitalize(), "GB", "number") for n in names),
        *([Column("reported", "As reported")] if quoted else []),
    )
    rows = []
    for label, answer in answered.items():
        moments = {p.name: of_phase(p) for p in answer.estimate.host_phases}
        over = [n for n, there in moments.items() if node and there.bytes > node.limit]
        word = f"out of memory: {over[0]}" if over else "fits"
        quote = said.get(label, "")
        rows.append(
            (
                Cell(label),
                *([Cell(word, verdict_html("oom" if over else "fits", word), scenario=answer.given)] if node else []),
                *(
                    _in_gb(moments[n], answer, "over" if n in over else "") if n in moments else Cell(None, "—")
                    for n in names
                ),
                *([Cell(quote, f"<q>{escape(quote)}</q>" if quote else "—")] if quoted else []),
            )
        )
    rests_on, note = shared(list(answered.values())), escape(node.note) if node else ""
    picture = _stacks(answered, node)
    return Table(table_id, caption, columns, tuple(rows), rests_on, note, versions=answers.versions(), picture=picture)


def _stacks(answered: Mapping[str, Answer], node: Node | None) -> Picture | None:
    """What each job keeps on the host at each moment, stacked by component; None if no job keeps anything."""
    kept = {
        label: {p.name: by_component(p.moment.lines) for p in answer.estimate.host_phases}
        for label, answer in answered.items()
    }
    most = max([sum(parts.values()) for moments in kept.values() for parts in moments.values()], default=0)
    if not most:
        return None
    limit = round(node.limit) if node else None
    scale = round(1.25 * max(most, limit or 0))  # the names of moments find room beside the bars
    rows = [
        drawn.Bars(label, [(name, Bar(parts, scale, limit, "GB")) for name, parts in moments.items()])
        for label, moments in kept.items()
    ]
    return drawn.bars(rows, "what the node can give" if node else "")


def _in_gb(working: Working, answer: Answer, style: str) -> Cell:
    n_bytes = working.bytes
    return Cell(n_bytes / GB, exact=n_bytes, scenario=answer.given, style=style, working=working)
