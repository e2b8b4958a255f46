"""How far estimated step times lie from published ones: a residual for each record with a rate, and rank order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calc.catalog import Catalog
from calc.scenario import Scenario, parse
from calc.throughput import Unrated, node_of, throughput


@dataclass(frozen=True, slots=True)
class Pace:
    """A record's seconds for one optimizer step, as estimated and as measured, and the largest term of the estimate.

    `calibrates` names the constant that was set by it, where one was; such a record judges nothing.
    """

    id: str
    group: str
    predicted: float
    measured: float
    bound_by: str
    calibrates: str

    @property
    def error(self) -> float:
        """The relative error, positive where the estimate is too slow."""
        return self.predicted / self.measured - 1


def paces(catalog: Catalog) -> list[Pace]:
    """One for each record that says how fast its job ran, where the catalog has the rates to estimate it."""
    return [found for r in catalog.measurements if "measured_rate" in r and (found := pace(r, catalog))]


def pace(record: Mapping[str, Any], catalog: Catalog) -> Pace | None:
    """The residual of a record with a rate; None where the estimate lacks one."""
    s = parse(record["scenario"], where=record["id"], catalog=catalog)
    rate = record["measured_rate"]
    try:
        t = throughput(s, catalog.gpu(s.gpu), node_of(s, catalog))
    except Unrated:
        return None
    seconds = step_seconds(s, rate["unit"], rate["value"])
    return Pace(record["id"], record.get("group", ""), t.step_seconds, seconds, t.bound_by, rate.get("calibrates", ""))


def step_seconds(s: Scenario, unit: str, value: float) -> float:
    """A rate as seconds of one optimizer step."""
    return {
        "step_seconds": value,
        "sequences_per_second": s.sequences / value,
        "tokens_per_second": s.sequences * s.expected_len / value,
    }[unit]


def judging(found: Iterable[Pace]) -> list[Pace]:
    """Those that no constant was set by."""
    return [p for p in found if not p.calibrates]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rho of pairs: the correlation of their ranks, equal values sharing the mean of theirs.

    Raises ZeroDivisionError where all values of a side are equal.
    """
    left, right = _ranks([a for a, _ in pairs]), _ranks([b for _, b in pairs])
    middle = (len(pairs) + 1) / 2
    products = sum((a - middle) * (b - middle) for a, b in zip(left, right, strict=True))
    squares = sum((a - middle) ** 2 for a in left) * sum((b - middle) ** 2 for b in right)
    return float(products / squares**0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 1, equal ones at their mean."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]
