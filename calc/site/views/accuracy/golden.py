"""Peaks that Megatron-LM's own tests store beside estimates of the same jobs, as a table and as numbers."""

from __future__ import annotations

from statistics import median

from calc.accuracy.megatron_golden import Golden, all_golden
from calc.answers import answers
from calc.base.units import GiB
from calc.site.tables.tables import Cell, Column, Table


def each(*, experts: bool = False) -> Table:
    """Every run of a model without routed experts, or with them; the one furthest off first."""
    columns = (
        Column("run", "Functional test of Megatron-LM"),
        Column("measured", "Stored peak", "GiB", "number", 2),
        Column("estimated", "Estimate", "GiB", "number", 2),
        Column("error", "Error", "%", "number", 2),
    )
    found = sorted(_of(experts), key=lambda g: -abs(g.error))
    rows = tuple(
        (Cell(g.id), Cell(g.measured / GiB), Cell(g.predicted / GiB), Cell(100 * g.error)) for g in found
    )  # fmt: skip
    commit = found[0].source.partition(" ")[0]
    caption = f"Decoders {'with' if experts else 'without'} experts among Megatron-LM's functional tests, on H100"
    note = f"Bytes in use at most on the last rank (mem-max-allocated-bytes), golden values of {commit}."
    table_id = "validation-megatron" + "-experts" * experts
    return Table(table_id, caption, columns, rows, note, versions=answers.versions())


def _of(experts: bool) -> list[Golden]:
    return [g for g in all_golden() if g.experts is experts]


def error(what: str, *, experts: bool = False) -> float:
    """The `count` of runs, or in per cent the `median` error or the `worst`, whatever their signs."""
    errors = [abs(g.error) for g in _of(experts)]
    return {"count": float(len(errors)), "median": 100 * median(errors), "worst": 100 * max(errors)}[what]
