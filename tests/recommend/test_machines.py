from __future__ import annotations

from typing import Any

import pytest

from calc.catalog.catalog import load
from calc.recommend import smallest
from calc.recommend.machines import machines
from calc.recommend.problem import COUNTS, SENSIBLE, Problem
from calc.recommend.text import text
from calc.resolve.parse import given
from calc.scenario.scenario import ScenarioError
from calc.site.i18n.speech import say

SFT: dict[str, Any] = {"model": "llama-3-8b", "task": "sft", "framework": "openrlhf", "method": "full"}


def test_machines_stand_from_little_memory_in_all_to_much_and_in_whole_nodes() -> None:
    catalog = load()
    found = machines(catalog)
    assert [m.bytes for m in found] == sorted(m.bytes for m in found)
    assert {m.gpu.id for m in found} == {g.id for g in catalog.gpus.values() if not g.lacks_bf16}
    assert all(m.gpus % m.per_node == 0 for m in found)
    assert [m.gpus for m in machines(catalog, gpu="h100-sxm")] == list(COUNTS)
    assert {m.gpus for m in machines(catalog, gpus=6)} == {6}
    assert next(m for m in machines(catalog, "rtx5090", 8)).per_node == 4


@pytest.mark.parametrize("job", [SFT, SFT | {"gpus": 4}, SFT | {"gpu": "rtx4090", "offload.optimizer": False}])
def test_nothing_smaller_fits(job: dict[str, Any]) -> None:
    catalog = load()
    found = smallest(job, catalog)
    assert found.machine
    assert found.recommendation.recommended
    s = found.recommendation.recommended.scenario
    assert (s.gpu, s.gpus) == (found.machine.gpu.id, found.machine.gpus)
    smaller = slower = 0
    for machine in machines(catalog, job.get("gpu"), job.get("gpus")):
        if machine == found.machine:
            break
        first = Problem({**job, **machine.fields}, catalog).first()
        smaller, slower = smaller + (first is None), slower + (first is not None)
    assert (smaller, slower) == (found.smaller, found.slower)


def test_the_machine_is_that_for_full_fine_tuning_where_the_method_is_open() -> None:
    job = {name: value for name, value in SFT.items() if name != "method"} | {"gpu": "a100-80-sxm"}
    full, lora = smallest(job), smallest(job | {"lora.rank": 16})
    assert full.recommendation.recommended
    assert lora.recommendation.recommended
    assert full.recommendation.recommended.scenario.method == "full"
    assert lora.recommendation.recommended.scenario.method == "lora"


def test_full_fine_tuning_and_the_open_method_share_their_searches_and_what_these_note() -> None:
    """So that the machine's search and its answer are one: a card's missing kernels are told of, too."""
    open_ = Problem({"model": "qwen3-0.6b", "task": "grpo", "gpu": "v100-32", "framework": "trl"}, load())
    full = open_.full()
    assert {rung["method"] for rung in full.rungs} == {"full"} < {rung["method"] for rung in open_.rungs}
    assert full.first()
    assert not open_.misses and any("no kernels" in note for note in open_.notes)
    searched = len(open_.searches)
    assert all(open_.asked(rung) is full.asked(rung) for rung in full.rungs[:1]) and len(open_.searches) == searched
    adapters = Problem({**open_.job, "lora.rank": 8}, load())
    assert adapters.full().rungs == adapters.rungs


def test_a_job_for_which_every_machine_is_too_small_gets_what_the_largest_lacks() -> None:
    found = smallest(SFT | {"model": "deepseek-v3", "gpu": "l4", "gpus": 2})
    assert found.machine is None
    assert found.recommendation.recommended is None
    assert found.recommendation.fails
    assert found.smaller == 1


def test_a_job_that_no_machine_can_run_is_an_error() -> None:
    with pytest.raises(ScenarioError, match=r"^job: task: given 'rm'"):
        smallest(SFT | {"framework": "verl", "task": "rm"}, where="job")


def test_a_role_of_an_unknown_model_is_refused_before_any_machine_is_tried() -> None:
    """Once after 420 searches through all names for one that may have been meant, in 16 seconds."""
    said: list[str] = []
    job = {"model": "gemma-2-2b", "task": "grpo", "gpu": "rtx4090", "roles.reference.model": "nobodys-model"}
    with pytest.raises(ScenarioError, match=r"^scenario: roles\.reference\.model: given 'nobodys-model', allowed: "):
        smallest(job, progress=said.append)
    assert not said


@pytest.mark.parametrize(
    ("model", "machine", "method"),
    [
        # DeepSpeed on one card keeps GPT-J's streams in 16 bits: the pace of that is no measure for a card without it
        ("gpt-j-6b", {"gpu": "rtx4090", "gpus": 1}, "qlora"),
        # FSDP 2 takes a tenth longer than the fastest there, and is simpler
        ("gpt-j-6b", {"gpu": "rtx5070ti", "gpus": 2}, "lora"),
        ("gemma-2-9b", {"gpu": "a100-40-sxm", "gpus": 2}, "lora"),
    ],
)
def test_adapters_that_only_recompute_make_no_machine_slow(model: str, machine: dict[str, Any], method: str) -> None:
    """By their arithmetic they take half as long again: forward once more, beside forward and one half of backward."""
    job = {"model": model, "task": "sft", "framework": "trl", "method": method, "seq_len": 2048, "global_batch": 128}
    problem = Problem(given(job | machine, where="scenario"), load())
    first = problem.first()
    assert first
    assert not first[1].chosen(first[2]).scenario.offload.trained
    assert 1.3 < problem.slowed(first) < SENSIBLE


def test_every_machine_that_is_tried_is_named() -> None:
    said: list[str] = []
    smallest(SFT | {"gpu": "rtx4090", "offload.optimizer": False}, progress=said.append)
    # over PCIe all that are large enough are slow, so that the least is the answer
    assert len(said) == len(machines(load(), "rtx4090"))
    assert "RTX 4090" in said[0]


def test_cards_without_bf16_are_none_that_a_reader_is_sent_to() -> None:
    """The V100s, which FlashAttention-2 does not know either; who names one gets an answer."""
    catalog = load()
    assert not any(machine.gpu.lacks_bf16 for machine in machines(catalog))
    assert {machine.gpu.id for machine in machines(catalog, "v100-16")} == {"v100-16"}


def test_the_smallest_machine_is_one_that_somebody_would_use_and_the_least_says_what_it_costs() -> None:
    """Once a 70B on four H100 with weights and Adam on the host, at 2.2 times the step of cards with enough memory."""
    found = smallest(SFT | {"model": "llama-3.1-70b", "gpu": "h100-sxm", "framework": "trl", "seq_len": 2048})
    assert found.machine and found.recommendation.recommended and found.least
    assert not found.recommendation.recommended.scenario.offload.states
    assert found.least.machine.gpus < found.machine.gpus
    assert found.least.times > SENSIBLE and found.least.configuration.scenario.offload.states
    assert found.slower >= 1
    told = text(found.recommendation, load(), found)
    assert f"the least that holds it: {found.least.machine.gpus} x H100" in told
    line = f"The least that holds it is 4 x H100, where a step takes {found.least.times:.1f} times what it would if"
    assert say(f"{line} memory did not count.", "zh") != f"{line} memory did not count."
    only = smallest(SFT | {"model": "llama-3.1-70b", "gpu": "h100-sxm", "gpus": 4, "framework": "trl", "seq_len": 2048})
    assert only.machine and only.machine.gpus == 4 and only.least is None


def test_a_machine_that_is_surely_slow_is_slow() -> None:
    """The bound spares whole searches, and changes no answer; it tells something of one machine at least."""
    job, told = {"model": "qwen3-0.6b", "task": "ppo", "framework": "torch", "method": "full"}, 0
    for machine in machines(load(), gpus=2)[:6]:
        problem = Problem({**job, **machine.fields}, load())
        if problem.surely_slow() and (first := problem.first()):
            told += 1
            assert problem.slowed(first) > SENSIBLE
    assert told
