"""The search for the largest size that runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.catalog import load
from calc.estimate import estimate
from calc.scenario import parse
from calc.verdict import FITS
from measurements.bench.edge import TOLERANCE, Found, largest, predicted


@given(highest=st.integers(1, 5000), share=st.floats(0, 1), start=st.integers(0, 6000))
def test_the_edge_is_found_from_any_start(highest: int, share: float, start: int) -> None:
    edge, asked = round(share * highest), []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= edge

    found = largest(fits, start, highest)
    assert len(asked) == len(set(asked)) == found.probes
    assert all(1 <= size <= highest for size in asked)
    assert found.runs <= edge
    assert edge - found.runs <= TOLERANCE * found.runs
    assert (found.fails is None) == (found.runs == highest)
    assert found.fails is None or edge < found.fails <= found.runs + max(1, int(TOLERANCE * found.runs))


@pytest.mark.parametrize("edge", [1, 2, 7, 20, 45])
def test_a_right_prediction_costs_two_probes(edge: int) -> None:
    assert largest(lambda size: size <= edge, edge, 1000) == Found(edge, edge + 1, 2)


@pytest.mark.parametrize(("start", "probes"), [(8, 4), (12, 4), (5, 6), (20, 8)])
def test_a_near_miss_costs_few(start: int, probes: int) -> None:
    found = largest(lambda size: size <= 10, start, 1000)
    assert (found.runs, found.fails) == (10, 11)
    assert found.probes <= probes


def test_nothing_fits_and_everything_fits() -> None:
    assert largest(lambda size: False, 3, 100) == Found(0, 1, 3)
    assert largest(lambda size: True, 90, 100).fails is None


@pytest.mark.parametrize("least", [0.5, FITS])
@pytest.mark.parametrize("field", ["micro_batch", "seq_len"])
def test_the_prediction_is_the_last_size_before_the_estimate_turns(field: str, least: float) -> None:
    given = {"model": "llama-3.2-1b", "task": "sft", "gpu": "rtx4090", "seq_len": 1024, "checkpointing": "full"}
    s, step = parse(given), 1 if field == "micro_batch" else 512
    size = predicted(s, field, step, 200, load(), least)

    def probability(value: int) -> float:
        more = {"global_batch": value} if field == "micro_batch" else {"expected_len": value}
        return estimate(replace(s, **{field: value, **more})).fit_probability

    assert 0 < size < 200
    assert probability(size * step) >= least > probability((size + 1) * step)
