"""Step times against what others published: the bars that hold, the one that does not, and how ranks are compared."""

from __future__ import annotations

from statistics import median

import pytest

from calc.accuracy.rl_stages import logged, stage_of
from calc.accuracy.step_time_errors import (
    Pace,
    iterations,
    judging,
    pace,
    paces,
    rank_correlation,
    stages,
    step_seconds,
)
from calc.catalog.catalog import load
from calc.memory.kv_cache import token_bytes
from calc.recommend.clock import TOLERANCE
from calc.resolve.parse import parse
from calc.throughput.rates import rated
from calc.throughput.rollout import Engine, decode, read, waits

# DeepSpeed's CPU Adam took several times the published rate there: out of order with the jobs that step on the card
OFFLOADED = "llama7b-8a800"


@pytest.fixture(scope="module")
def found() -> list[Pace]:
    return judging(paces(load()))


def pairs(members: list[Pace]) -> list[tuple[float, float]]:
    return [(p.predicted, p.measured) for p in members]


def test_the_median_error_over_all_sources_is_within_a_fifth(found: list[Pace]) -> None:
    errors = [abs(p.error) for p in found]
    print(f"{len(errors)} rates: median {median(errors):.3f}, worst {max(errors):.3f}")
    assert len(errors) >= 39
    assert median(errors) <= 0.20


def test_the_median_error_of_every_source(found: list[Pace]) -> None:
    """PEFT does not state how far batches are padded; the gist's optimizer on the host is slower than published;
    Megatron-LM's experts get uneven numbers of tokens, which it does not store."""
    sources = {p.group for p in found}
    medians = {name: median(abs(p.error) for p in found if p.group == name) for name in sources}
    print({name: round(value, 3) for name, value in sorted(medians.items())})
    within = {"qwen1-readme": 0.20, "qwen1-readme-full": 0.20, "torchtune-readme": 0.20}
    assert medians.keys() == within.keys() | {"peft-metamath", "megatron-lm-tests", OFFLOADED}
    assert all(medians[name] <= bar for name, bar in within.items())
    assert max(medians.values()) <= 0.25


def test_what_two_times_must_differ_by_is_the_median_error(found: list[Pace]) -> None:
    """A recommendation calls no configuration faster than another by less."""
    assert round(median(abs(p.error) for p in found), 2) == TOLERANCE


def test_jobs_of_one_table_stand_in_the_order_that_was_measured(found: list[Pace]) -> None:
    for name in {p.group for p in found}:
        rho = rank_correlation(pairs([p for p in found if p.group == name]))
        print(name, round(rho, 3))
        assert rho >= 0.9


def test_adam_on_the_host_takes_most_of_the_time_that_was_measured(found: list[Pace]) -> None:
    """Eight A800 whose launcher left each rank one thread: of 16 to 20 s more a step 15 to 17 are counted."""
    members = [p for p in found if p.group == OFFLOADED]
    assert len(members) == 10
    assert max(abs(p.error) for p in members) < 0.3
    assert all(-0.15 < p.error < 0 for p in members if "-oo1-" in p.id)


def test_a_token_of_a_72b_on_two_h100_takes_what_was_published() -> None:
    """Qwen2.5 72B, tensor parallel over two H100, alone: 30.9 ms (tenstorrent/tt-inference-server issue 143)."""
    arch = load().model("qwen2.5-72b").architecture
    r = rated(load().gpu("h100-sxm"), None, 2, "bf16")
    one = decode(
        1, 1000, 1000, 640, 1, read(arch, 1, 2), token_bytes(arch, 2), r.memory, waits(arch, 2, r, Engine(1, 1))
    )
    assert one.seconds / 1000 == pytest.approx(30.9e-3, rel=0.05)


def test_iterations_of_rl_come_within_a_factor_of_two_and_dense_models_within_a_third() -> None:
    """NeMo RL's, of Megatron-core, as verl would run them."""
    found = iterations(load())
    ratios = {p.id: p.predicted / p.measured for p in found}
    print({name: round(ratio, 2) for name, ratio in sorted(ratios.items(), key=lambda each: each[1])})
    assert len(found) >= 14 and all(0.53 < ratio < 1.11 for ratio in ratios.values())
    dense = [ratio for name, ratio in ratios.items() if name.split("-")[3] in ("8b", "32b")]
    assert len(dense) == 4 and min(dense) > 0.7
    assert rank_correlation([(p.predicted, p.measured) for p in found]) > 0.8


def test_rollouts_of_other_models_are_met_with_what_an_8b_set() -> None:
    """NeMo RL's release notes: a 32B and a mixture of experts closely, a 70B on eight GPUs each less so."""
    found = {p.id: p for p in judging(stages(load())) if p.group == "rollout"}
    errors = {name.removeprefix("published/stages-nemo-v03-"): p.error for name, p in found.items()}
    print(errors)
    assert len(errors) == 5
    assert all(abs(errors[f"qwen3-{name}-megatron: rollout"]) < 0.09 for name in ("32b", "30ba3b"))
    assert min(errors.values()) > -0.35


def test_scoring_and_updates_of_adapters_in_units_of_their_own_are_met_in_logs_that_set_nothing() -> None:
    """verl's own of a 32B and of another 72B: before units counted, they were 40 to 60 % quicker than logged."""
    found = [p for p in judging(stages(load())) if p.group in ("scoring", "update") and "verl-data" in p.id]
    print({p.id: p.error for p in found})
    assert len(found) == 4
    assert all(abs(p.error) < 0.25 for p in found)


def test_every_term_of_an_iteration_belongs_to_a_stage() -> None:
    """What makes room for the engine and brings it new weights is one stage, as frameworks log it."""
    names = {
        "rollout: decode": "rollout", "rollout: prefill, attention": "rollout", "rollout: wake": "sync",
        "rollout: sleep": "sync", "actor: swap": "update", "actor, scoring: swap": "scoring",
        "weight sync: swap": "sync", "weight sync": "sync", "weight sync: tensors": "sync",
        "reference, scoring: loss": "scoring", "actor: matrix work": "update",
    }  # fmt: skip
    assert {name: stage_of(name) for name in names} == names
    assert logged(2.5) == logged([1.0, 1.5]) == 2.5


def test_the_record_that_set_a_constant_judges_nothing(found: list[Pace]) -> None:
    every = paces(load())
    assert [p.id for p in every if p.calibrates] == ["published/qwen1-1.8B-LoRA-256"]
    assert len(found) == len(every) - 1


def test_rates_are_compared_as_seconds_of_a_step() -> None:
    s = parse({"model": "llama-3-8b", "task": "dpo", "gpu": "h100-sxm", "global_batch": 8, "seq_len": 100})
    assert step_seconds(s, "step_seconds", 3.0) == 3
    assert step_seconds(s, "sequences_per_second", 4.0) == 16 / 4
    assert step_seconds(s, "tokens_per_second", 160.0) == 16 * 100 / 160


def test_a_record_without_rates_of_its_card_is_left_out() -> None:
    record = {
        "id": "x",
        "measured_rate": {"unit": "step_seconds", "value": 1.0},
        "scenario": {"model": "llama-3.2-1b", "task": "sft", "gpu": "a100-80-sxm", "precision": "fp32"},
    }
    assert pace(record, load()) is None


def test_ranks_are_compared_as_spearman_does() -> None:
    """Two swapped of four: 1 - 6 · 2 / (4 · 15) = 0.8; ties share their mean rank."""
    assert rank_correlation([(1, 10), (2, 20), (3, 40), (4, 30)]) == pytest.approx(0.8)
    assert rank_correlation([(1, 5), (1, 5), (2, 9)]) == pytest.approx(1)
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
