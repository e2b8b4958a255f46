"""The constants of step times that rest on this project's own measurements are what the records say."""

from __future__ import annotations

from statistics import median

import pytest

from calc.accuracy import timing
from calc.accuracy.megatron_golden import dispatched, records
from calc.catalog.catalog import Catalog, load
from calc.throughput import rollout
from calc.throughput.rates import EAGER, FLASH, MASKED, MATRIX, MEMORY, PCIE_COPY
from calc.throughput.training import EIGHT_BIT_STEP
from calc.throughput.work import LAUNCH, MEGATRON_LAUNCH, POLICY, START, UNIT


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load()


def test_the_rates_are_those_of_the_records(catalog: Catalog) -> None:
    """Who adds a record brings the constants up to date: this prints them."""
    found = {name: getattr(timing, name)(catalog) for name in ("matrix", "pcie", "start", "memory")}
    print(found)
    assert found["matrix"] == pytest.approx(MATRIX["Hopper"], abs=1e-3)
    assert found["pcie"] == pytest.approx(PCIE_COPY, abs=1e-3)
    assert found["start"] == pytest.approx(START, rel=5e-3)
    assert found["memory"] == pytest.approx(MEMORY, rel=0.01)  # published, and met


def test_what_steps_set_is_what_the_records_say(catalog: Catalog) -> None:
    launches = timing.launches(catalog)
    print(timing.flash(catalog), timing.eager(catalog), launches)
    assert timing.flash(catalog) == pytest.approx(FLASH["Hopper"], abs=2e-3)
    assert timing.eager(catalog) == pytest.approx(EAGER["Hopper"], rel=5e-3)
    assert sorted(launches.values())[1] == pytest.approx(LAUNCH, rel=5e-3)
    assert timing.policy(catalog) == pytest.approx(POLICY, rel=5e-3)
    assert timing.masked(catalog) == pytest.approx(MASKED, rel=5e-3)
    assert timing.megatron_launch() == pytest.approx(MEGATRON_LAUNCH, rel=5e-3)
    assert timing.sequence(catalog) == pytest.approx(rollout.SEQUENCE, rel=5e-3)
    assert timing.ahead_step(catalog) == pytest.approx(rollout.AHEAD_STEP, rel=5e-3)
    assert timing.ahead_sequence(catalog) == pytest.approx(rollout.AHEAD_SEQUENCE, rel=5e-3)
    assert timing.eight_bit_step(catalog) == pytest.approx(EIGHT_BIT_STEP, rel=5e-3)
    assert timing.unit(catalog) == pytest.approx(UNIT, rel=5e-3)
    assert timing.eager_layer(catalog) == pytest.approx(rollout.EAGER, rel=5e-3)
    assert 1.5 < max(launches.values()) / min(launches.values()) < 2


def test_measured_steps_of_vllm_are_met_by_what_one_takes_and_each_sequence_more(catalog: Catalog) -> None:
    """Bytes, products and kernels say the step of one sequence within 5 %, the sampler is the rest."""
    steps = {
        row["batch"]: row["seconds"] for _, _, row in timing.rates(catalog, "vllm step") if row["op"] == "vllm step"
    }
    left = dict(timing.steps_ahead(catalog))
    assert steps.keys() == left.keys() == {1, 32, 128, 256, 512}
    errors = {n: (n > 1) * n * rollout.AHEAD_SEQUENCE / steps[n] - left[n] / steps[n] for n in steps}
    print(errors)
    assert (
        0.05 * steps[1] > rollout.AHEAD_STEP
        and abs(errors[1]) < 0.005
        and max(abs(error) for error in errors.values()) < 0.08
    )


def test_steps_of_megatron_that_wait_for_the_host_are_met_within_the_spread_of_hosts() -> None:
    """The constant is a median of runs between two thirds and twice of it; wide layers keep their card busy longer.

    Megatron-FSDP's hooks and collectives take more of the host, and so does Muon's step. A hybrid model's layers of one
    block each dispatch about half of what is counted for them.
    """
    each = {True: [], False: []}
    for run in records():
        if {"use-megatron-fsdp", "optimizer", "hybrid-layer-pattern"} & run["arguments"].keys():
            continue
        each[run["arguments"]["hidden-size"] <= timing.NARROW].append(run["iteration_seconds"] / dispatched(run))
    narrow, wide = each[True], each[False]
    assert len(narrow) >= 25 and min(narrow) > 0.6 * MEGATRON_LAUNCH and max(narrow) < 2.3 * MEGATRON_LAUNCH
    assert min(wide) > 2 * MEGATRON_LAUNCH


def test_products_share_is_their_arithmetic_over_their_time(catalog: Catalog) -> None:
    """Two products of 2 · 10 · 5 · 1e12 operations in one second each, on a card of 989 TFLOPS."""
    row = {"tokens": 10, "inputs": 5, "outputs": 1e12, "seconds": 1.0}
    one = timing.Rate(catalog.gpu("h200"), "x", row)
    assert timing.share([one, one]) == pytest.approx(100 / 989)


def test_decoding_steps_take_what_their_bytes_and_kernels_do(catalog: Catalog) -> None:
    """With 512 tokens in each cache. Of many sequences attention and products take more, which is not counted."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for r in timing.rates(catalog, "decode"):
        if r.row["kv_len"] == timing.SHORT:
            error = timing.decoding(catalog, r.gpu, r.model, r.row, START) / r.row["seconds"] - 1
            errors[r.row["batch"] <= 32].append(abs(error))
    few, many = errors[True], errors[False]
    print(len(few), median(few), max(few), len(many), median(many), max(many))
    assert len(few) >= 30 and median(few) <= 0.08 and max(few) <= 0.25
    assert max(many) <= 0.40


def test_every_record_that_sets_a_constant_is_there(catalog: Catalog) -> None:
    known = {r["id"] for r in catalog.measurements}
    assert all(ids <= known for ids in timing.SET.values())
    assert timing.SET.keys() == {"FLASH", "EAGER", "LAUNCH", "POLICY", "MASKED", "EIGHT_BIT_STEP"}


def test_4_bit_linears_dispatch_what_was_counted(catalog: Catalog) -> None:
    """Steps of a 1.5B that wait for their host: no record has set the operations of bitsandbytes' linears."""
    whole = "measured/h200-2026-11-22/qwen2.5-1.5b/sft/s2048/mb1/method=qlora/lora.rank=16/lora.targets=all-linear/"
    for again in ("none", "full"):
        step = timing.ran(catalog, f"{whole}lora.dtype=bf16/checkpointing={again}")
        assert sum([t.seconds for t in step.terms.values()]) == pytest.approx(step.seconds, rel=0.02)
