"""Step times against those that this project measured on an H200 and an H100: the bars that hold."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from calc.accuracy.step_time_errors import Pace, judging, rank_correlation, step, steps
from calc.accuracy.timing import SET
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate, speed
from calc.resolve.parse import parse

HOST = "launch"
# What the model lacks, or a host that was slower than the constant: groups whose median is further off.
FURTHER = {
    "one rank of ZeRO": 0.43, "H100 SXM 80GB HBM3: QLoRA": 0.37, "TRL, with generation": 0.31,
    "torchtune": 0.17,  # paged optimizers that step in backward
}  # fmt: skip

LOOSER = {"generation": 0.5}  # the order of their steps, where parts are not counted


@pytest.fixture(scope="module")
def every() -> list[Pace]:
    return judging(steps(load()))


@pytest.fixture(scope="module")
def found(every: list[Pace]) -> list[Pace]:
    """Without ZeRO, TRL and torchtune, whose own work, between the steps of a Trainer too, is not all counted."""
    return [p for p in every if not any(own in p.group for own in ("ZeRO", "TRL", "torchtune"))]


def sizes(members: list[Pace]) -> list[float]:
    return [abs(p.error) for p in members]


def test_the_median_step_is_within_a_tenth_and_three_of_four_within_a_fifth(found: list[Pace]) -> None:
    errors = sizes(found)
    print(f"{len(errors)} steps: median {median(errors):.3f}, worst {max(errors):.3f}")
    print(f"within a fifth: {sum(e <= 0.2 for e in errors)}")
    assert len(errors) >= 190
    assert median(errors) <= 0.10
    assert sum(e <= 0.20 for e in errors) >= 0.75 * len(errors)
    assert max(errors) <= 0.55


def test_seven_in_ten_long_steps_are_within_an_eighth(found: list[Pace]) -> None:
    """What takes four tenths of a second waits for no host, but for some with adapters, shards or a policy.

    Products in float8 whose rows have scales of their own, a fifth slower than estimated, have one record; tensor
    parallelism waits for its host.
    """
    apart = ("float8=rowwise", "tensor_parallel=")
    long = [p for p in found if p.measured >= 0.4 and not any(kind in p.id for kind in apart)]
    for machine in ("H200", "H100"):
        errors = sorted(sizes([p for p in long if p.group.startswith(machine)]))
        print(machine, len(errors), errors[-4:])
        assert len(errors) >= 18
        assert sum(e <= 0.125 for e in errors) >= 0.7 * len(errors)
        assert sum(e <= 0.20 for e in errors) >= 0.85 * len(errors)


def test_products_in_float8_are_met_within_a_twelfth(found: list[Pace]) -> None:
    """Once a third too slow, timed as if they were in bf16; no record of them has set a constant."""
    errors = sizes([p for p in found if "float8=tensorwise" in p.id])
    print(errors)
    assert len(errors) >= 3
    assert max(errors) <= 1 / 12


def test_families_that_no_constant_has_seen_are_met_as_well(every: list[Pace]) -> None:
    """Of two dozen families, measured after the operations of their layers had been written on tapes for memory."""
    new = [p for p in every if p.id.startswith("measured/h200-2026-11-26/")]
    print(len(new), median(sizes(new)), max(sizes(new)), median([p.error for p in new]))
    assert len(new) >= 100
    assert median(sizes(new)) <= 0.11
    assert abs(median([p.error for p in new])) <= 0.03
    hybrids = [p for p in new if any(name in p.id for name in ("falcon-h1", "granite-4-h", "nemotron-h"))]
    assert len(hybrids) >= 18 and median(sizes(hybrids)) <= 0.19


def test_the_median_of_every_kind_is_within_a_fifth_and_in_order(every: list[Pace]) -> None:
    for name in sorted({p.group for p in every}):
        members = [p for p in every if p.group == name]
        rho = rank_correlation([(p.predicted, p.measured) for p in members]) if len(members) > 1 else 1.0
        print(name, len(members), round(median(sizes(members)), 3), round(rho, 3))
        assert median(sizes(members)) <= next((bar for end, bar in FURTHER.items() if name.endswith(end)), 0.20)
        # of generation the host's part, token by token and adapter by adapter, is not counted: no order to speak of
        assert rho >= next((bar for end, bar in LOOSER.items() if name.endswith(end)), 0.88)


def test_those_that_wait_for_the_host_are_further_off(found: list[Pace]) -> None:
    """One host is a quarter slower than the constant, and runs differ; more shows a mechanism that is not counted."""
    host = sizes([p for p in found if p.bound_by.endswith(HOST)])
    card = sizes([p for p in found if not p.bound_by.endswith(HOST)])
    print(len(host), median(host), len(card), median(card))
    assert median(card) <= 0.07 < median(host) <= 0.25


def test_steps_that_set_a_constant_judge_nothing(every: list[Pace]) -> None:
    known = {p.id: p.calibrates for p in steps(load())}
    ours = {name for ids in SET.values() for name in ids if name.startswith("measured/")}
    assert {name for name, sets in known.items() if sets} == ours
    assert len(every) == len(known) - len(ours)


@pytest.mark.parametrize(("name", "value"), [("step_seconds", None), ("limit_bytes", 2**34)])
def test_a_record_without_a_step_or_of_another_card_is_left_out(name: str, value: Any) -> None:
    record: dict[str, Any] = next(r for r in load().measurements if r["id"] == next(iter(SET["EAGER"])))
    assert step(record, load())
    assert step({**record, "observed": {**record["observed"], name: value}}, load()) is None


def test_the_fake_ranks_collectives_take_no_time() -> None:
    """Llama 3 8B on one rank of eight: the estimate of the whole job has its gathers and its reduction beside it."""
    catalog = load()
    record = next(
        r
        for r in catalog.measurements
        if r["id"].endswith("precision=bf16/optimizer_impl=fused/checkpointing=full/gpus=8")
    )
    alone = step(record, catalog)
    assert alone and alone.group.endswith("one rank of FSDP2")
    whole = speed(estimate(parse(record["scenario"], catalog=catalog), catalog), catalog)
    moved = [t for t in whole.terms if t.name in ("gather", "reduce", "overlap")]
    assert len(moved) == 3
    assert alone.predicted == pytest.approx(whole.step_seconds - sum(t.seconds for t in moved))
