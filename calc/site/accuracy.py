"""How far estimates lie from measured memory, as tables: by kind of job, and the worst one by one."""

from __future__ import annotations

from functools import cache
from itertools import groupby

from calc.residuals import Residual, Summary, residual, summary
from calc.site import answers
from calc.site.tables import Cell, Column, Table
from calc.units import GiB

ASSUMPTIONS = (
    "Records of measurements/ whose metric is what PyTorch's allocator counts at its peak. A trace follows tensors: "
    "the cuBLAS workspaces, which only a real card allocates, are left out on both sides."
)


@cache
def residuals() -> tuple[Residual, ...]:
    """One for each record that can be compared."""
    found = answers.catalog()
    comparable = (r for r in found.measurements if r["metric"] == "allocated" and r["measured_bytes"])
    return tuple(residual(record, found) for record in comparable)


def overall() -> Summary | None:
    """The errors of all of them; None where nothing has been measured."""
    return summary(residuals()) if residuals() else None


def by_kind() -> Table:
    """Errors by task, method and sharding, and over all."""
    columns = (
        Column("task", "Task"),
        Column("method", "Method"),
        Column("sharding", "Sharding"),
        Column("records", "Records", kind="number", digits=0),
        Column("median", "Median error", "%", "number", 3),
        Column("mean", "Mean", "%", "number", 3),
        Column("p95", "95th percentile", "%", "number", 3),
        Column("worst", "Worst", "%", "number", 3),
        Column("bias", "Mean with its sign", "%", "number", 3),
    )

    def kind(r: Residual) -> tuple[str, str, str]:
        return r.task, r.method, r.sharding

    rows = [
        tuple(Cell(word) for word in key) + _errors(summary(members))
        for key, group in groupby(sorted(residuals(), key=kind), kind)
        if (members := list(group))
    ]
    if every := overall():
        rows.append((Cell("all"), Cell(""), Cell(""), *_errors(every)))
    caption = "Estimated against traced peaks: relative error, by kind of job"
    return Table("accuracy-by-kind", caption, columns, tuple(rows), ASSUMPTIONS, versions=answers.versions())


def _errors(s: Summary) -> tuple[Cell, ...]:
    return (Cell(s.count), *(Cell(100 * value) for value in (s.median, s.mean, s.p95, s.worst, s.bias)))


def worst(count: int) -> Table:
    """The records whose estimates are furthest off."""
    columns = (
        Column("record", "Record"),
        Column("estimated", "Estimated", "GiB", "number", 2),
        Column("measured", "Measured", "GiB", "number", 2),
        Column("error", "Error", "%", "number", 3),
    )
    furthest = sorted(residuals(), key=lambda r: -abs(r.error))[:count]
    rows = tuple(
        (
            Cell(r.id),
            Cell(r.predicted / GiB, exact=r.predicted),
            Cell(r.measured / GiB, exact=r.measured),
            Cell(100 * r.error),
        )
        for r in furthest
    )
    caption = f"The {count} records whose estimates are furthest off"
    return Table("accuracy-worst", caption, columns, rows, ASSUMPTIONS, versions=answers.versions())
