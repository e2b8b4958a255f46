"""Six jobs that known calculators were run on: their answers, this guide's, and a traced reference side by side."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any

from calc.answers import answers
from calc.base.project import ROOT
from calc.base.reading import parse_mapping, read_bytes
from calc.base.units import GiB
from calc.memory import kv_cache
from calc.site.tables.tables import Cell, Column, Table

FILE = ROOT / "measurements" / "peers" / "answers.yaml"
NOTE = (
    "The reference leaves out what sharding gathers and buckets, which this guide counts: between 1.5 and 4 GiB. The "
    "guide's answer is what PyTorch's allocator holds at the peak."
)


@cache
def _data() -> dict[str, Any]:
    return parse_mapping(read_bytes(FILE, FILE.name), FILE.name)


def own(job: str) -> int:
    """This guide's answer to a job, in bytes."""
    asked = _data()["jobs"][job]
    if "cache" in asked:
        arch = answers.catalog().model(asked["cache"]["model"]).architecture
        return kv_cache.dynamic("actor", arch, asked["cache"]["tokens"], b=2).bytes
    return answers.ask(asked["scenario"], f"peers.{job}").allocated_bytes


def side_by_side() -> Table:
    """One row per calculator, one column per job."""
    data = _data()
    columns = (
        Column("calculator", "Calculator"),
        *(Column(job, f"{job}: {asked['words']}", "GiB", "number", 1) for job, asked in data["jobs"].items()),
    )
    rows = [
        (Cell("this guide"), *(Cell(own(job) / GiB, exact=own(job)) for job in data["jobs"])),
        (Cell("reference, traced"), *(Cell(asked["reference"]) for asked in data["jobs"].values())),
        *(
            (Cell(name), *(Cell(told[job]) if job in told else Cell(html="—") for job in data["jobs"]))
            for name, told in data["peers"].items()
        ),
    ]
    caption = "Six jobs, as this guide and known calculators answer them"
    return Table("peers", caption, columns, tuple(rows), note=NOTE, versions=answers.versions())


def ratios(name: str) -> dict[str, float]:
    """A calculator's answers as ratios to the reference, job by job."""
    data = _data()
    return {job: told / data["jobs"][job]["reference"] for job, told in data["peers"][name].items()}


def spread(what: str) -> float:
    """The `least` or `most` ratio of calculators' answers to the reference; of ours `own_least`, `own_most`."""
    data = _data()
    ours: list[float] = [own(job) / GiB / asked["reference"] for job, asked in data["jobs"].items()]
    theirs = [ratio for name in data["peers"] for ratio in ratios(name).values()]
    known = {"least": min(theirs), "most": max(theirs), "own_least": min(ours), "own_most": max(ours)}
    if what not in known:
        raise ValueError(f"no {what!r}; there is {', '.join(known)}")
    return known[what]


def reasons() -> Table:
    """One row per calculator: the range of its ratios to the reference, and the reason."""
    columns = (
        Column("calculator", "Calculator"),
        Column("answers", "Jobs it answers", "", "number"),
        Column("least", "Least", "× reference", "number", 2),
        Column("most", "Most", "× reference", "number", 2),
        Column("why", "What it counts otherwise"),
    )
    caption = "Known calculators: how far from the reference, and why"
    note = "Each name is a repository's, linked; the reasons were read in its code."
    return Table("peers-reasons", caption, columns, tuple(_reasons()), note=note, versions=answers.versions())


def _reasons() -> Iterator[tuple[Cell, ...]]:
    for name, why in _data()["reasons"].items():
        found = ratios(name).values()
        yield (
            Cell(name, _linked(name)),
            Cell(len(found)),
            Cell(min(found)),
            Cell(max(found)),
            Cell(why, style="settings"),
        )


def _linked(name: str) -> str:
    """A calculator's name, linked if it begins with a GitHub repository."""
    repository, _, rest = name.partition(" ")
    if "/" not in repository:
        return escape(name)
    return f'<a href="https://github.com/{escape(repository)}">{escape(repository)}</a> {escape(rest)}'.rstrip()
