"""Remedies: a job before and after a change, by phase, with the memory it saves and the time it costs; one page each.

A page under docs/strategies names its pairs of jobs, and the flags that make the change:

    remedy:
      name: Activation checkpointing
      pairs:
        sft: {job: SFT on eight A100, before: none, after: full}
    switch:
      - {framework: trl, command: sft, flag: --gradient_checkpointing true}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from calc.answers import answers
from calc.answers.answers import Answer
from calc.answers.workings import difference, of_phase
from calc.base.ledger import Phase
from calc.base.project import ROOT
from calc.base.units import GB, GiB, MiB
from calc.site.tables import charts, drawn
from calc.site.tables.charts import Bar
from calc.site.tables.pictures import Picture
from calc.site.tables.tables import Cell, Column, Table
from calc.site.text.sources import front
from calc.site.views.jobs import ledgers, speed
from calc.throughput import Unrated

FOLDER = ROOT / "docs" / "strategies"
FRAMEWORKS = {"openrlhf": "OpenRLHF 0.11", "verl": "verl 0.9", "trl": "TRL 1", "slime": "slime 0.3", "torch": "PyTorch"}
# The five posts that the guide recomputes: title, month, and the case study that does so.
POSTS = {
    "sizes": ("OpenRLHF项目中模型参数量与显存占用的关系分析", "June 2025", "ppo-qwen1.5-8x4090"),
    "rm": ("OpenRLHF项目中的RM模型训练硬件配置优化实践", "June 2025", "reward-model-6x4090"),
    "host": ("OpenRLHF项目训练70B参数Llama2模型的内存需求分析", "June 2025", "ppo-llama-2-70b-16xa800"),
    "ppo": ("OpenRLHF项目中的PPO训练内存优化实践与解决方案", "June 2025", "ppo-llama-3-8b-4xa40"),
    "logic": ("Logic-RL项目中的显存优化实践与经验分享", "July 2025", "grpo-logic-rl-4xa100"),
}
# The smallest difference that a page shows, with one or two digits; anything less is no difference.
SHOWN = 0.05 * GiB


class Pair(NamedTuple):
    """A job, described in words, before a change and after it."""

    job: str
    before: Answer
    after: Answer


class Remedy(NamedTuple):
    """A remedy of the guide: its name, its page, and its pairs of jobs by key."""

    name: str
    page: str
    pairs: Mapping[str, Pair]


def pairs(meta: Mapping[str, Any]) -> dict[str, Pair]:
    """The pairs of jobs that a page's front matter names; KeyError if it names none, or a scenario that it lacks."""
    jobs = meta["scenarios"]
    return {
        str(key): Pair(
            str(told["job"]), *(answers.ask(jobs[told[end]], f"scenarios.{told[end]}") for end in ("before", "after"))
        )
        for key, told in meta["remedy"]["pairs"].items()
    }


def remedies(folder: Path = FOLDER) -> list[Remedy]:
    """Every remedy that has a page, by name."""
    found = []
    for path in sorted(folder.glob("*.md")):
        meta, _ = front(path)
        if "remedy" in meta:
            found.append(Remedy(str(meta["remedy"]["name"]), path.stem, pairs(meta)))
    return sorted(found, key=lambda r: r.name.casefold())


# --- a pair of jobs in numbers


def phases(answer: Answer) -> dict[str, Phase]:
    """The phases of a job by name; of a phase that several GPU groups go through, the fullest group's."""
    found: dict[str, Phase] = {}
    for phase in (p for g in answer.estimate.groups for p in g.phases):
        fullest = found.get(phase.name)
        if fullest is None or phase.moment.device_bytes > fullest.moment.device_bytes:
            found[phase.name] = phase
    return found


def host(answer: Answer) -> int:
    """The peak of host memory on the node that needs most, in bytes."""
    return answer.estimate.host_peak


def times(pair: Pair) -> float | None:
    """The factor by which the change lengthens a sequence's time; None if a rate is not known."""
    try:
        return speed.seconds_each(pair.after) / speed.seconds_each(pair.before)
    except Unrated:
        return None


def most(pair: Pair) -> tuple[str, int]:
    """The phase in which the change saves most or, if it saves in none, costs most, and the bytes saved there."""
    before, after = phases(pair.before), phases(pair.after)
    saved = {n: p.moment.device_bytes - after[n].moment.device_bytes for n, p in before.items() if n in after}
    if not saved:
        return "", 0
    name = max(saved, key=lambda n: saved[n]) if max(saved.values()) > 0 else min(saved, key=lambda n: saved[n])
    return name, saved[name]


# --- tables

COLUMNS = (
    Column("job", "Job"),
    Column("saves", "Saves", "GiB", "number", 1, "Peak before − peak after; below zero it costs memory"),
    Column("times", "Time", "×", "number", 2, "How many times as long a sequence takes after the change"),
    Column("verdict_before", "Before"),
    Column("verdict_after", "After"),
    Column("before", "Needs before", "GiB", "number", 1),
    Column("after", "Needs after", "GiB", "number", 1),
    Column("most", "Most in one phase", "GiB", "number", 1, "What the change saves in the phase that it helps most"),
    Column("phase", "In phase"),
    Column("host", "Saves in host memory", "GB", "number", 0, "Of the node that needs most"),
)
NEEDS = "Needs: peak of the most loaded GPU, context and fragmentation included."
RESTS_ON = f"{NEEDS} Time: of one sequence; a dash where the catalog has no rate."


def _row(pair: Pair) -> tuple[Cell, ...]:
    phase, saved = most(pair)
    longer = times(pair)
    before, after = pair.before, pair.after
    moved = abs(saved) >= SHOWN
    return (
        Cell(pair.job, style="changes"),
        _difference(before.peak, after.peak, after),
        Cell(longer, "" if longer else "—"),
        ledgers.verdict_cell(before.estimate, before),
        ledgers.verdict_cell(after.estimate, after),
        ledgers.held(of_phase(before.peak), before),
        ledgers.held(of_phase(after.peak), after),
        _difference(phases(before)[phase], phases(after)[phase], after) if moved else Cell(0.0),
        Cell(phase if moved else "", "" if moved else "—"),
        Cell(round((host(before) - host(after)) / GB) + 0, exact=host(before) - host(after), scenario=after.given),
    )


def _difference(was: Phase, now: Phase, answer: Answer, component: str = "") -> Cell:
    """The GiB that a phase, or a component of it, gives back; without a sign if that rounds to nothing."""
    held = [of_phase(p).of(component) if component else of_phase(p) for p in (was, now)]
    cell = ledgers.held(difference(*held), answer)
    return cell if abs(cell.exact or 0) >= SHOWN else cell._replace(value=0.0)


def summary(found: Iterable[Pair], table_id: str, caption: str) -> Table:
    """One row per pair."""
    return Table(table_id, caption, COLUMNS, tuple(_row(p) for p in found), RESTS_ON, versions=answers.versions())


def overview(found: Sequence[Remedy], root: str) -> Table:
    """One row per pair, of all remedies."""
    link = '<a href="{}strategies/{}.html">{}</a>'
    rows = [
        (Cell(r.name, link.format(root, r.page, escape(r.name))), *_row(p)) for r in found for p in r.pairs.values()
    ]
    columns = (Column("remedy", "Remedy"), *COLUMNS)
    caption = "Every remedy on two jobs or more: what it saves, where, and what it costs in time"
    return Table(
        "strategies-overview",
        caption,
        columns,
        tuple(rows),
        RESTS_ON,
        "The drawing has the first job of each remedy: before the change, and after it.",
        versions=answers.versions(),
        picture=picture(found),
    )


def picture(found: Sequence[Remedy]) -> Picture:
    """The first job of each remedy before and after it; every bar's limit, whatever the card, is at the same place."""
    shown = [(f"{r.name}: {pair.job}", pair) for r in found for pair in [*r.pairs.values()][:1]]
    ends = [a for _, pair in shown for a in (pair.before, pair.after)]
    times = 1.04 * max(1.0, *(a.device_bytes / a.group.usable_bytes for a in ends))
    rows = [
        drawn.Bars(label, [("before", _bar(p.before, times)), ("after", _bar(p.after, times))]) for label, p in shown
    ]
    return drawn.bars(rows, "what a process can use of the card")


def _bar(answer: Answer, times: float) -> Bar:
    usable = answer.group.usable_bytes
    return Bar(_parts(answer.peak), round(times * usable), usable)


def by_phase(pair: Pair, table_id: str, caption: str) -> Table:
    """One row per phase: its peak before and after, stacked by component, and the bytes that each gives back."""
    before, after = phases(pair.before), phases(pair.after)
    names = list(dict.fromkeys([*before, *after]))
    parts = {n: tuple(_parts(side.get(n)) for side in (before, after)) for n in names}
    limits = [pair.before.group.usable_bytes, pair.after.group.usable_bytes]
    scale = round(1.04 * max([*limits, *(sum(side.values()) for both in parts.values() for side in both)]))
    every = charts.ordered([c for both in parts.values() for side in both for c in side])
    moved = [c for c in every if any(abs(b.get(c, 0) - a.get(c, 0)) >= 5 * MiB for b, a in parts.values())]
    columns = (
        Column("phase", "Phase"),
        Column("before", "Before", "GiB", "number", 2),
        Column("after", "After", "GiB", "number", 2),
        Column("saves", "Saves", "GiB", "number", 2, "Below zero: costs"),
        Column("bar_before", "Before, against the limit", kind="bar"),
        Column("bar_after", "After, against the limit", kind="bar"),
        *(Column(c, f"of which {charts.name(c)}", "GiB", "number", 2, behind=True) for c in moved),
    )
    rows = []
    for n in names:
        was, now = parts[n]
        there = n in before and n in after
        rows.append(
            (
                Cell(n),
                _total(before[n], pair.before) if n in before else Cell(None, "—"),
                _total(after[n], pair.after) if n in after else Cell(None, "—"),
                _difference(before[n], after[n], pair.after) if there else Cell(None, "—"),
                Cell(bar=Bar(was, scale, limits[0])),
                Cell(bar=Bar(now, scale, limits[1])),
                *(_difference(before[n], after[n], pair.after, c) if there else Cell(None, "—") for c in moved),
            )
        )
    limit = "what a process can use: " + " and ".join(f"{n / GiB:.2f} GiB" for n in dict.fromkeys(limits))
    return Table(
        table_id,
        caption,
        columns,
        tuple(rows),
        assumptions=ledgers.shared([pair.before, pair.after]),
        note=_note(pair),
        legend=charts.legend(every, limit),
        versions=answers.versions(),
    )


def _parts(phase: Phase | None) -> dict[str, int]:
    return ledgers.by_component(phase.moment.lines) if phase else {}


def _total(phase: Phase, answer: Answer) -> Cell:
    over = "over" if phase.moment.device_bytes > answer.group.usable_bytes else ""
    return ledgers.held(of_phase(phase), answer, over)


def _note(pair: Pair) -> str:
    """The changed fields, verdicts, host memory and time, in one line."""
    changed = ledgers.changes(pair.before, pair.after)
    words = [ledgers.verdict_text(a.estimate) for a in (pair.before, pair.after)]
    held = [f"{host(a) / GB:,.0f}" for a in (pair.before, pair.after)]
    longer = times(pair)
    took = "no rate is known" if longer is None else f"{longer:.2f} times as long a sequence"
    return (
        f"Changed: <code>{escape(changed)}</code>. Verdict: {escape(words[0])} before, {escape(words[1])} after. "
        f"Host memory of a node: {held[0]} GB before, {held[1]} GB after. Time: {took}."
    )
