"""The search for the largest size that runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measurements.bench.edge import TOLERANCE, Found, largest


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
