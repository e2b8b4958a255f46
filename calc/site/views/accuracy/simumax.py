"""Peaks that SimuMax publishes beside estimates of the same jobs, as a table and as numbers."""

from __future__ import annotations

from statistics import mean

from calc.accuracy.simumax import Peak, data, peaks
from calc.answers import answers
from calc.base.units import GiB
from calc.site.tables.tables import Cell, Column, Table

DEGREES = (
    ("TP", "tensor_parallel"), ("PP", "pipeline_parallel"), ("EP", "expert_parallel"), ("CP", "context_parallel"),
)  # fmt: skip


def each() -> Table:
    """Every case, the one furthest off first."""
    columns = (
        Column("model", "Model, first layers"),
        Column("degrees", "Parallelism"),
        Column("length", "Tokens", "", "number"),
        Column("published", "Published peak", "GiB", "number", 2),
        Column("estimated", "Estimate", "GiB", "number", 2),
        Column("error", "Error", "%", "number", 2),
    )
    found = sorted(zip(data()["cases"], peaks(), strict=True), key=lambda each: -abs(each[1].error))
    rows = tuple(
        (
            Cell(f"{case['model']}, {peak.scenario.architecture.layers}"),
            Cell(_degrees(peak)),
            Cell(peak.scenario.seq_len),
            Cell(peak.published / GiB),
            Cell(peak.estimated / GiB),
            Cell(100 * peak.error),
        )
        for case, peak in found
    )
    caption = "Peaks of Megatron-LM on eight B200 as SimuMax publishes them, beside estimates"
    told = data()
    note = (
        f"What PyTorch counts as allocated on the rank that needs most. {told['source']}; of its "
        f"{told['published']} cases, those that differ only in the number of micro batches peak alike and have one row."
    )
    return Table("peers-simumax", caption, columns, rows, note, versions=answers.versions())


def _degrees(peak: Peak) -> str:
    degrees = [(short, getattr(peak.scenario, field)) for short, field in DEGREES]
    return ", ".join(f"{short} {degree}" for short, degree in degrees if degree > 1)


def error(what: str) -> float:
    """In per cent, the `mean` or the `worst` error whatever its sign; `own_` and `first_` in front: see the file."""
    errors = [100 * abs(peak.error) for peak in peaks()]
    known = {"mean": mean(errors), "worst": max(errors)}
    for whose in ("own", "first"):
        known |= {f"{whose}_{name}": value for name, value in data()[whose].items()}
    if what not in known:
        raise ValueError(f"no {what!r}; there is {', '.join(known)}")
    return known[what]
