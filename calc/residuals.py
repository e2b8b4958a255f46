"""How far estimates lie from measured memory: one residual a record of `measurements/`, and their summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from calc.catalog import Catalog
from calc.estimate import estimate
from calc.ledger import Estimate
from calc.scenario import parse

# a trace follows tensors; cuBLAS takes its workspaces from the allocator too, but only on a real card
UNTRACED = frozenset({"workspace"})


@dataclass(frozen=True, slots=True)
class Residual:
    """A record's memory in bytes, as estimated and as measured."""

    id: str
    task: str
    method: str
    sharding: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """The relative error, positive where the estimate is too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of several residuals, relative; `bias` keeps their sign, the others do not."""

    count: int
    median: float
    mean: float
    p95: float
    worst: float
    bias: float


def residual(record: Mapping[str, Any], catalog: Catalog) -> Residual:
    """The residual of a record whose metric is `allocated`; raises ScenarioError for a scenario that cannot be used."""
    scenario = parse(record["scenario"], where=record["id"], catalog=catalog)
    left_out = UNTRACED if record["class"] == "traced" else frozenset()
    predicted = peak_allocated(estimate(scenario, catalog), left_out)
    return Residual(
        record["id"], scenario.task, scenario.method, scenario.sharding, predicted, record["measured_bytes"]
    )


def peak_allocated(e: Estimate, left_out: frozenset[str] = frozenset()) -> int:
    """The most that PyTorch's allocator counts at any moment, components in `left_out` aside."""
    moments = [phase.moment for group in e.groups for phase in group.phases]
    return max(
        sum(line.bytes for line in m.lines if line.allocated and line.component not in left_out) for m in moments
    )


def summary(residuals: Iterable[Residual]) -> Summary:
    """Median, mean, 95th percentile and worst of the absolute errors, and the mean signed error; needs at least one."""
    errors = [r.error for r in residuals]
    sizes = sorted(abs(error) for error in errors)
    return Summary(len(sizes), median(sizes), mean(sizes), sizes[int(0.95 * (len(sizes) - 1))], sizes[-1], mean(errors))
