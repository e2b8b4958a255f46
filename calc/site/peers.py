"""Six jobs that known calculators were run on: their answers, this guide's, and a traced reference side by side."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from calc.memory import kv_cache
from calc.site import answers
from calc.site.tables import Cell, Column, Table
from calc.units import GiB

FILE = Path(__file__).parents[2] / "measurements" / "peers" / "answers.yaml"
NOTE = (
    "The reference leaves out what sharding gathers and buckets, which this guide counts: between 1.5 and 4 GiB. The "
    "guide's answer is what PyTorch's allocator holds at the peak."
)


@cache
def _data() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text("utf-8")))


def own(job: str) -> int:
    """This guide's answer to a job, in bytes."""
    asked = _data()["jobs"][job]
    if "cache" in asked:
        arch = answers.catalog().model(asked["cache"]["model"]).architecture
        return kv_cache.dynamic("actor", arch, asked["cache"]["tokens"]).bytes
    return answers.ask(asked["scenario"], f"peers.{job}").allocated_bytes


def side_by_side() -> Table:
    """One row a calculator, one column a job."""
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
