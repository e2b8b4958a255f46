"""Estimates against peaks traced from the real implementation: the bars that no change of a formula may break."""

from __future__ import annotations

import pytest

from calc.catalog import load
from calc.residuals import Residual, residual, summary


@pytest.fixture(scope="module")
def residuals() -> list[Residual]:
    catalog = load()
    return [residual(r, catalog) for r in catalog.measurements if r["class"] == "traced" and r["metric"] == "allocated"]


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_half_of_the_traced_peaks_are_met_within_a_tenth_of_a_percent(residuals: list[Residual], sharding: str) -> None:
    """Mechanisms, not fits: the ledger follows the same tensors as the trace, so errors are small buffers."""
    errors = summary(r for r in residuals if r.sharding == sharding)
    print(f"{sharding}: {errors}")
    assert errors.count >= 25
    assert errors.median <= 0.001
    assert errors.p95 <= 0.005
    assert errors.worst <= 0.02


def test_every_task_and_method_is_among_the_traced(residuals: list[Residual]) -> None:
    """The bars above mean little if a task has no record."""
    assert {(r.task, r.method) for r in residuals} >= {
        ("sft", "full"),
        ("sft", "lora"),
        ("rm", "full"),
        ("rm", "lora"),
        ("dpo", "full"),
        ("dpo", "lora"),
    }


def test_no_estimate_lies_a_percent_under_a_traced_peak(residuals: list[Residual]) -> None:
    """Too low costs a reader a rented card; too high only a larger one."""
    assert [r.id for r in residuals if r.error < -0.01] == []
