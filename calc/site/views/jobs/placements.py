"""The roles of a job on its GPUs: a card for each GPU, filled by role to the peak of its group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from calc.answers import answers
from calc.answers.answers import Answer
from calc.answers.workings import Working, of_phase
from calc.base.units import GiB
from calc.estimate.result import Group
from calc.site.tables import charts
from calc.site.tables.pictures import LINE, Picture, box, line, text
from calc.site.tables.tables import Cell, Column, Table
from calc.site.views.jobs import ledgers
from calc.site.views.jobs.strategies import SHOWN

# of the drawing, in its units
CARD, GAP, DEEP, HEAD, BETWEEN = 30, 5, 170, 58, 20
NAMES = 130  # the width of the names beside a group's cards
DRAWN = 8  # cards of a job, of a group at least one; of more than that a group's share stands for all of it
ROLES = {"rollout": "vLLM", "process": "process", "": "process"}  # the rest are called as they are


class Panel(NamedTuple):
    """A job of the picture: its name and its answer."""

    label: str
    answer: Answer

    @property
    def width(self) -> float:
        """The units that its groups take side by side."""
        return sum(self.cards(group) * (CARD + GAP) + NAMES for group in self.answer.estimate.groups)

    def cards(self, group: Group) -> int:
        """The cards of a group that are drawn; all are alike."""
        every = sum(other.gpus for other in self.answer.estimate.groups)
        return group.gpus if every <= DRAWN else max(1, DRAWN * group.gpus // every)


def by_role(group: Group) -> dict[str, Working]:
    """The lines of a group's peak, by the role that they belong to, largest first; they add up to that peak."""
    whole = of_phase(group.peak)
    roles = dict.fromkeys(ROLES.get(x.role, x.role) for x in whole.lines)
    found = {r: Working(whole.at, tuple(x for x in whole.lines if ROLES.get(x.role, x.role) == r)) for r in roles}
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def placements(answered: Mapping[str, Answer], table_id: str, caption: str) -> Table:
    """One row per role of each group of GPUs, under the cards that they fill."""
    columns = (
        Column("job", "Job"),
        Column("group", "GPUs of"),
        Column("gpus", "GPUs", "", "number"),
        Column("peak", "Peak in"),
        Column("role", "Role"),
        Column("held", "On each of them", "GiB", "number", 2),
        Column("usable", "Usable", "GiB", "number", 2, "What the card lets a process use"),
    )
    rows = tuple(
        (
            Cell(label),
            Cell(group.name.replace("+", ", ")),
            Cell(group.gpus),
            Cell(group.peak.name),
            Cell(role),
            ledgers.held(working, answer),
            ledgers.in_gib(group.usable_bytes),
        )
        for label, answer in answered.items()
        for group in answer.estimate.groups
        for role, working in by_role(group).items()
    )
    return Table(
        table_id,
        caption,
        columns,
        rows,
        ledgers.shared([*answered.values()]),
        "Each card at the fullest instant of its group; roles that sleep then have left it.",
        versions=answers.versions(),
        folded="The roles as a table",
        picture=picture([Panel(*item) for item in answered.items()]),
    )


def picture(panels: Sequence[Panel]) -> Picture:
    """The jobs below each other, the groups of each side by side."""
    groups = [(panel, group) for panel in panels for group in panel.answer.estimate.groups]
    top = 1.02 * max(max(group.peak.moment.device_bytes, group.usable_bytes) for _, group in groups)
    body, said = "", []
    for n, panel in enumerate(panels):
        above = n * (HEAD + DEEP + BETWEEN)
        body += text(0, above + 14, f"{panel.label}: {ledgers.verdict_text(panel.answer.estimate)}", style="heading")
        x = 0.0
        for group in panel.answer.estimate.groups:
            body += "".join(_group(group, panel.cards(group), x, above + HEAD, top))
            x += panel.cards(group) * (CARD + GAP) + NAMES
            held = ", ".join(f"{role} {working.bytes / GiB:.1f}" for role, working in by_role(group).items())
            said.append(
                f"{panel.label}, {group.gpus} GPUs: {held} GiB, together {group.peak.moment.device_bytes / GiB:.1f}"
            )
    components = [x.component for _, group in groups for x in group.peak.moment.lines]
    limit = "what a process can use"
    return Picture(
        max(panel.width for panel in panels),
        len(panels) * (HEAD + DEEP + BETWEEN),
        body,
        "; ".join(said),
        charts.keys(components, limit),
    )


def _group(group: Group, cards: int, left: float, above: float, top: float) -> Iterator[str]:
    """Cards of a group, all alike, under their number and the phase of their peak."""
    count = f"{group.gpus} GPU{'s' if group.gpus > 1 else ''}" + (f" ({cards} drawn)" if cards < group.gpus else "")
    yield text(left, above - 12 - LINE, count)
    yield text(left, above - 12, f"{group.peak.name}: {group.peak.moment.device_bytes / GiB:.1f} GiB")
    parts, high = [*_stack(group)], DEEP / top
    limit = above + DEEP - group.usable_bytes * high
    for n in range(cards):
        x = left + n * (CARD + GAP)
        base = above + DEEP
        for _, component, size in parts:
            base -= size * high
            yield box(x, base, CARD, size * high, f"c-{component}")
        yield box(x, limit, CARD, above + DEEP - limit, "card")
    yield line(left - 2, limit, cards * (CARD + GAP), 0, "limit")
    yield from _names(group, left + cards * (CARD + GAP), above + DEEP, high)


def _stack(group: Group) -> Iterator[tuple[str, str, int]]:
    """The role, the component and the bytes of each part of a card, from the bottom."""
    for role, working in by_role(group).items():
        parts = ledgers.by_component(working.lines)
        yield from ((role, c, parts[c]) for c in charts.ordered([c for c, n in parts.items() if n > 0]))


def _names(group: Group, left: float, floor: float, high: float) -> Iterator[str]:
    """The roles beside the cards, each at its part, or as near above the one below as letters allow."""
    base, last = floor, floor + LINE
    for role, working in [(r, w) for r, w in by_role(group).items() if w.bytes >= SHOWN]:
        middle = base - working.bytes * high / 2 + 4
        y = min(middle, last - LINE)
        yield line(left, middle - 4, 8, y - middle, "slot")
        yield text(left + 11, y, f"{role} {working.bytes / GiB:.1f}")
        base, last = base - working.bytes * high, y
