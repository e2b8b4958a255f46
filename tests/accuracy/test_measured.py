"""Estimates against what was measured on real GPUs: the bars that hold, and what is read from a record."""

from __future__ import annotations

from typing import Any

import pytest

from calc.accuracy import calibration, largest_size
from calc.accuracy.residuals import Allocator, Residual, as_run, loads, reach, residual, summary, summed
from calc.catalog.catalog import Catalog, load
from calc.estimate.estimate import estimate
from calc.memory import runtime
from calc.memory.runtime import CONTEXT_HOPPER, WORKSPACE, WORKSPACE_HOPPER, WORKSPACES
from calc.replay import replay
from calc.resolve.parse import parse
from calc.step.roles import Roles


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load()


@pytest.fixture(scope="module")
def residuals(residuals: tuple[Residual, ...]) -> list[Residual]:
    """Of the jobs that ran."""
    found = [r for r in residuals if r.kind == "measured" and r.measured]
    assert len(found) >= 170
    return found


def test_half_of_the_measured_peaks_are_met_within_a_percent_and_all_within_five(residuals: list[Residual]) -> None:
    """What PyTorch's allocator counted on real cards, workspaces, rounding and all."""
    errors = summary(residuals)
    print(errors, sorted(((r.error, r.id) for r in residuals), key=lambda e: -abs(e[0]))[:8])
    assert errors.median <= 0.01
    assert errors.p95 <= 0.02
    assert errors.worst <= 0.05


def test_what_a_job_asks_for_is_met_more_closely_than_what_it_is_handed(residuals: list[Residual]) -> None:
    """The allocator's rounding is no tensor's: without it half of the errors are below 0.02 %."""
    asked = summed([r.asked_error for r in residuals if r.asked_error is not None])
    print(asked)
    assert asked.count == len(residuals)
    assert asked.median <= min(0.0002, summary(residuals).median)


def test_expandable_segments_hand_out_what_is_asked_for(residuals: list[Residual]) -> None:
    """A block is split whatever is left of it; alone the rounding to 512 bytes remains."""
    fixed, expandable = (
        [r.measured / r.allocator.requested - 1 for r in residuals if r.allocator and r.allocator.expandable is word]
        for word in (False, True)
    )
    assert len(expandable) >= 7
    assert 0 <= max(expandable) <= 1e-4 < max(fixed)


def test_nineteen_in_twenty_reserve_what_the_range_holds(residuals: list[Residual]) -> None:
    """Of one length each: the printed range without the context."""
    inside = [r.id for r in residuals if r.allocator and r.allocator.inside]
    print([r.id for r in residuals if r.id not in inside])
    assert len(inside) >= 0.95 * len(residuals)


def test_no_measured_job_that_ran_is_called_out_of_memory(residuals: list[Residual]) -> None:
    """But one at its edge, half of whose tokens were prompts, which a scenario of DPO does not say."""
    assert {r.id for r in residuals if r.verdict == "oom"} <= {
        "measured/h100-2026-11-22/llama-3.2-1b/dpo/mb30/framework=trl/gpu=a100-40-sxm"
    }


# ---- by hand ------------------------------------------------------------------------------------------------------

SCENARIO = {"model": "qwen2.5-0.5b", "task": "sft", "gpu": "rtx4090", "seq_len": 1024, "versions": {"torch": "2.11.0"}}
RECORD: dict[str, Any] = {
    "id": "measured/here/x",
    "class": "measured",
    "metric": "allocated",
    "measured_bytes": 4000,
    "verdict": "fits",
    "scenario": SCENARIO,
    "machine": {"gpu": "h200"},
    "observed": {
        "reserved_bytes": 5000,
        "context_bytes": 804061184,
        "context_at_start_bytes": 552402944,
        "expandable_segments": False,
        "allocator": {"requested_bytes": 3900},
        "limit_bytes": 1,
    },
}


def test_a_card_that_another_stood_in_for_has_its_memory_and_the_others_kernels(catalog: Catalog) -> None:
    """Each of two cuBLAS workspaces has 32 MiB on an H200 and 8320 KiB on an RTX 4090 (CublasHandlePool.cpp)."""
    here, there = residual(RECORD, catalog), residual({**RECORD, "machine": {"gpu": "rtx4090"}}, catalog)
    assert here.predicted - there.predicted == WORKSPACES * (WORKSPACE_HOPPER - WORKSPACE)
    card = as_run(RECORD, catalog).gpu("rtx4090")
    assert (card.id, card.architecture) == ("rtx4090", "Hopper")
    assert card.usable_bytes == catalog.gpu("rtx4090").usable_bytes < catalog.gpu("h200").usable_bytes
    assert as_run({**RECORD, "machine": {"gpu": "rtx4090"}}, catalog) is catalog
    assert as_run({"scenario": SCENARIO}, catalog) is catalog


def test_the_verdict_is_of_the_named_cards_memory(catalog: Catalog) -> None:
    """Logits of 16,384 tokens and 151,936 words take 4.6 GiB in bf16, and as much again several times over."""
    large = {**SCENARIO, "micro_batch": 4, "seq_len": 4096}
    died = {**RECORD, "metric": "verdict", "measured_bytes": None, "verdict": "oom", "scenario": large}
    found = residual(died, catalog)
    assert (found.verdict, found.agrees, found.allocator) == ("oom", True, None)
    alone = residual({**died, "scenario": {**large, "gpu": "h200"}}, catalog)
    assert (alone.verdict, alone.agrees) == ("fits", False)


def test_the_allocators_own_figures_come_with_the_range_of_what_it_reserves(catalog: Catalog) -> None:
    found = residual(RECORD, catalog)
    s, on = parse(SCENARIO), as_run(RECORD, catalog)
    low, high = reach(estimate(s, on), "reserved", filled=True)
    act = replay.act(Roles(s))
    assert act
    whole = replay.Reserve(act, runtime.workspace(on.gpu(s.gpu).architecture)).undisturbed
    assert low < whole < high
    assert found.allocator == Allocator(3900, 5000, low, high, expandable=False, undisturbed=whole)
    assert found.error == found.predicted / 4000 - 1
    assert found.asked_error == found.predicted / 3900 - 1
    plain = residual({**RECORD, "observed": {}}, catalog)
    assert (plain.error, plain.allocator, plain.asked_error) == (found.error, None, None)


@pytest.mark.parametrize(("reserved", "inside"), [(9, False), (10, True), (20, True), (21, False)])
def test_a_range_holds_its_ends(reserved: int, inside: bool) -> None:
    assert Allocator(1, reserved, low=10, high=20, expandable=False, undisturbed=15).inside is inside


def test_beside_the_allocator_stands_the_context_alone(catalog: Catalog) -> None:
    """Neither what is held back nor NCCL's buffers: one process ran, and what was reserved is taken off."""
    found = residual(RECORD, catalog).outside
    assert found
    assert (found.machine, found.kind) == ("h200", "other training")
    assert (found.at_start, found.measured, found.predicted) == (552402944, 804061184, CONTEXT_HOPPER)
    sharded = {**SCENARIO, "sharding": "fsdp2", "gpus": 8}
    shared = residual({**RECORD, "scenario": sharded}, catalog).outside
    assert shared
    assert (shared.kind, shared.predicted) == ("FSDP, one process", CONTEXT_HOPPER)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, "other training"),
        ({"optimizer": "none"}, "nothing trained"),
        ({"optimizer": "adamw-8bit"}, "other training"),
        ({"optimizer": "adamw-paged-8bit"}, "paged states"),
        ({"precision": "fp32"}, "fp32, or eager attention"),
        ({"attention": "eager"}, "fp32, or eager attention"),
        ({"sharding": "fsdp2", "gpus": 2}, "FSDP, one process"),
    ],
)
def test_kinds_of_jobs_load_different_kernels(given: dict[str, Any], kind: str) -> None:
    assert loads(parse({**SCENARIO, **given})) == kind


def test_the_allocators_replay_is_the_records(residuals: list[Residual], catalog: Catalog) -> None:
    """`runtime.REPLAYED` follows from `measurements/`; half of what was reserved is met within a percent."""
    found = calibration.replayed(residuals, catalog)
    assert list(found) == pytest.approx(runtime.REPLAYED, abs=6e-5)
    errors = sorted(map(abs, found))
    assert errors[len(errors) // 2] <= 0.01
    assert errors[-1] <= 0.08


# Searches that the estimate misses by more than 5 %, by how much, and why.
MISSED = {
    "qwen2.5-1.5b/sft/mb-edge/framework=trl": (0.15, "22 sequences die as replayed, of 24 the replay just finds room"),
    "llama-3.2-1b/dpo/mb-edge/framework=trl": (-0.07, "30 sequences ran, and 29 are said to fit with 0.49"),
}


def test_the_largest_size_that_runs_is_predicted(searches: tuple[largest_size.Search, ...]) -> None:
    """Within 5 % but for those named; no size that did not run is called 'fits'."""
    far = [e for e in searches if abs(e.predicted / e.found - 1) > 0.05]
    for e in far:
        (least,) = [error for name, (error, _) in MISSED.items() if name in e.id]
        assert 0 < (e.predicted / e.found - 1) / least <= 1
    assert len(far) == len(MISSED) <= 0.11 * len(searches)
    assert all(e.predicted_fits <= e.found for e in searches)
