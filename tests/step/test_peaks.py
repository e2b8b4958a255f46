"""The peak among the instants of a real model: what it computes with, and what its engine adds there."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job, total

from calc.base.ledger import Line
from calc.engines.replica import Where
from calc.step import peaks
from calc.step.instants import instant
from calc.step.roles import Roles

FSDP = {"sharding": "fsdp2", "gpus": 2, "micro_batch": 1}


@pytest.mark.parametrize("during", ["forward", "backward"])
@pytest.mark.parametrize(
    ("fields", "gathers"),
    [(FSDP | {"seq_len": 16}, True), (FSDP | {"seq_len": 8192}, False), ({"seq_len": 16}, False)],
)
def test_the_peak_counts_what_the_engine_adds_there(fields: dict[str, Any], gathers: bool, during: str) -> None:
    """With few tokens what FSDP gathers decides, and not the activations; of equal instants it is the first."""
    roles = Roles(job(**fields))
    placed = roles.placed["actor"]
    step = roles.step(placed.engine.replica, placed.s, roles.batch(placed.s, placed.role.rows))
    instants = step.plan.forward if during == "forward" else step.backward()
    alone = [i.total.bytes(*step.batch) for i in instants]
    sizes = [size + total(placed.engine.at(i.where)) for size, i in zip(alone, instants, strict=True)]
    most = instants[sizes.index(max(sizes))]
    again = [i._replace(name="again") for i in instants]
    nothing = [instant("nothing", i.where, []) for i in instants]
    found = peaks.peak(placed.engine, step, [*instants, *again, *nothing])
    assert found == (most.name, [*placed.engine.at(most.where), *step.lines(most.parts)])
    if gathers:
        assert sizes.index(max(sizes)) != alone.index(max(alone))


def test_of_equal_instants_at_two_places_the_first_is_the_peak() -> None:
    roles = Roles(job(seq_len=16))
    placed = roles.placed["actor"]
    step = roles.step(placed.engine.replica, placed.s, roles.batch(placed.s, 1))
    one = step.plan.forward[0]
    other = one._replace(name="other", where=Where("head", 32, False))
    assert [peaks.peak(placed.engine, step, found)[0] for found in ((one, other), (other, one))] == [one.name, "other"]


def test_of_equal_moments_the_first_is_the_largest_whatever_lies_beside_them() -> None:
    lines = [Line("weights", "actor", count, "b", {"b": count}, "weights") for count in (6, 7, 7, 5)]
    name, found = peaks.largest((name, [line]) for name, line in zip("abcd", lines, strict=True))
    assert (name, found) == ("b", [lines[1]])
    assert peaks.beside([lines[0]], (name, found)) == ("b", [lines[0], lines[1]])
