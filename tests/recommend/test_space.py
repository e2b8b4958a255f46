from __future__ import annotations

from math import lcm
from typing import Any

import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.launch import launch
from calc.recommend import space
from calc.recommend.answer import fitting
from calc.recommend.problem import Problem
from calc.recommend.space import whole_rollout
from calc.resolve.parse import parse, vary
from calc.scenario.scenario import ScenarioError
from calc.throughput import node_of, throughput

SFT: dict[str, Any] = {"model": "llama-3.2-1b", "task": "sft", "gpu": "a100-80-sxm", "gpus": 8}
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "micro_batch": st.sampled_from((1, 2, 3, 8)),
    "checkpointing": st.sampled_from(("none", "full")),
    "loss": st.sampled_from(("full", "fused")),
    "logprob": st.sampled_from(("selective", "logsumexp")),
    "offload.optimizer": st.booleans(),
    "offload.parameters": st.booleans(),
}
ROLLOUT: dict[str, st.SearchStrategy[Any]] = {
    "rollout.tensor_parallel": st.sampled_from((1, 2, 3, 8)),
    "rollout.gpu_memory_utilization": st.sampled_from((0.3, 0.9)),
    "rollout.sleep": st.booleans(),
}


@settings(max_examples=200)
@given(st.one_of(strategies.fields(), strategies.rl_fields()), st.data())
def test_a_varied_scenario_is_the_one_that_parse_makes_of_the_same_fields(
    fields: dict[str, Any], data: st.DataObject
) -> None:
    try:
        s = parse(fields)
    except ScenarioError:
        return
    possible = CHANGES | (ROLLOUT if s.rollout else {})
    names = data.draw(st.lists(st.sampled_from(sorted(possible)), min_size=1, max_size=4, unique=True))
    changes = {name: data.draw(possible[name]) for name in names}
    whole = {**fields, "global_batch": s.global_batch, **changes}
    if s.rollout:
        whole["rollout.batch"] = s.rollout.batch
    try:
        parsed: Any = parse(whole).as_dict()
    except ScenarioError as error:
        parsed = str(error)
    try:
        varied: Any = vary(s, changes).as_dict()
    except ScenarioError as error:
        varied = str(error)
    assert varied == parsed


def test_only_fields_that_nothing_follows_from_can_be_varied() -> None:
    with pytest.raises(AssertionError, match="sharding"):
        vary(parse(SFT), {"sharding": "zero3"})


@pytest.mark.parametrize("place", space.FREE)
@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen2.5-7b", "gemma-2-9b", "mixtral-8x7b"])
@pytest.mark.parametrize("micro", [1, 8])
def test_what_is_taken_without_a_search_costs_neither_memory_nor_time(place: str, model: str, micro: int) -> None:
    task = {"loss": "sft", "logprob": "dpo", "optimizer_impl": "sft"}[place]
    made = [
        parse(SFT | {"model": model, "task": task, "micro_batch": micro, "global_batch": 64, place: value})
        for value in space.FREE[place]
    ]
    catalog = load()
    peaks = [estimate(s, catalog).groups[0].peak.moment.device_bytes for s in made]
    times = [throughput(s, catalog.gpu(s.gpu), node_of(s, catalog)).step_seconds for s in made]
    assert peaks[-1] == min(peaks)
    assert times[-1] == min(times)


def test_rungs_are_those_that_contradict_nothing_given() -> None:
    bf16 = [rung for rung in space.RUNGS if "precision" in rung]
    stepping = [rung for rung in space.RUNGS if "optimizer_in_backward" in rung]
    narrow = [rung for rung in space.RUNGS if "lora.dtype" in rung]
    usual = [rung for rung in space.RUNGS if rung not in narrow]
    assert list(space.rungs({})) == [rung for rung in space.RUNGS if rung not in (*bf16, *stepping)]
    assert list(space.rungs({"framework": "trl", "task": "sft"})) == usual
    assert list(space.rungs({"framework": "trl", "task": "dpo"})) == [r for r in usual if r not in stepping]
    assert stepping[0] not in list(space.rungs({"task": "sft", "optimizer_in_backward": False}))
    assert bf16[0] not in list(space.rungs({"framework": "trl", "precision": "autocast"}))
    assert [r["method"] for r in space.rungs({"lora.rank": 8})] == ["lora", "lora", "qlora", "qlora"]
    assert not set(map(str, narrow)) & set(map(str, space.rungs({"lora.dtype": "fp32"})))
    swift = {"trainer": "ms-swift", "method": "qlora", "loss": "full"}
    assert [r.get("lora.dtype") for r in space.rungs(swift)] == [None, "bf16"]
    assert [r.get("lora.dtype") for r in space.rungs({**swift, "trainer": "llamafactory"})] == [None]
    assert list(space.rungs({"method": "full", "optimizer": "lion"})) == [{"method": "full", "optimizer": "lion"}]
    assert list(space.rungs({"method": "full", "lora.rank": 8})) == []


def shared_over(job: dict[str, Any]) -> list[int]:
    """Over how many GPUs the rungs of a job share a sequence, rung by rung."""
    return [rung.get("context_parallel", rung.get("tensor_parallel", 1)) for rung in space.rungs(job)]


def test_below_each_rung_gpus_share_a_sequence_where_the_framework_lets_them() -> None:
    """Two, four, eight of a node's GPUs; OpenRLHF's ring attention wants packed sequences, TRL has none."""
    ring = {"framework": "openrlhf", "task": "sft", "gpus": 8, "method": "full", "optimizer": "adamw", "packing": True}
    assert shared_over(ring) == [1, 2, 4, 8]
    assert shared_over(ring | {"gpus": 12}) == [1, 2, 4]
    assert shared_over(ring | {"framework": "verl==0.9.1", "gpus_per_node": 4}) == [1, 2, 4]
    assert all(rung["micro_batch"] == 1 for rung in list(space.rungs(ring))[1:])
    for one in ({"packing": False}, {"context_parallel": 1}, {"micro_batch": 2}):
        assert shared_over(ring | one) == [1]
    assert set(shared_over(ring | {"framework": "trl"})) == {1}
    torch = ring | {"framework": "torch", "packing": False}
    assert shared_over(torch) == [1, 2, 4, 8]
    assert set(shared_over(torch | {"method": "lora"})) == {1}


MEGATRON = {"model": "qwen3-30b-a3b", "task": "sft", "trainer": "megatron-swift", "gpu": "h100-sxm", "gpus": 16}


def cuts(job: dict[str, Any], rung: dict[str, Any]) -> list[tuple[int, int, int]]:
    """The degrees of tensor, pipeline and expert parallelism of a rung's branches."""
    catalog = load()
    found = space.branches(space.seed(job, catalog, "job"), rung, catalog)
    made = dict.fromkeys((b.base.tensor_parallel, b.base.pipeline_parallel, b.base.expert_parallel) for b in found)
    return list(made)


def test_megatron_core_cuts_a_model_in_every_way_that_its_gpus_allow() -> None:
    """Layers within a node, stages, and experts over the GPUs of a stage; a given degree stays, and a dense model has
    no experts."""
    full = {"method": "full", "optimizer": "adamw"}
    every = cuts(MEGATRON, full)
    assert len(every) > 30 and (1, 1, 1) in every and (2, 1, 8) in every and (4, 2, 8) in every
    assert all(16 % (tensor * stages) == 0 and 16 // stages % experts == 0 for tensor, stages, experts in every)
    assert {tensor for tensor, _, _ in every} == {1, 2, 4}  # its 4 key heads are no more
    assert {experts for _, _, experts in every} == {1, 2, 4, 8, 16}
    assert {experts for _, _, experts in cuts(MEGATRON | {"expert_parallel": 4}, full)} == {4}
    dense = MEGATRON | {"model": "qwen3-8b", "gpus": 4}
    assert {experts for _, _, experts in cuts(dense, full)} == {1}
    assert cuts(MEGATRON | {"trainer": "own"}, full) == [(1, 1, 1)]
    odd = {"model": "moonlight-16b-a3b", "task": "grpo", "framework": "verl", "sharding": "megatron"}
    uneven = cuts({"gpu": "h100-sxm", "gpus": 16, **odd}, full)
    assert {stages for _, stages, _ in uneven} > {1, 2}  # of 27 layers, where no stages of equal size are to be had


@pytest.mark.parametrize("task", ["grpo", "sft"])
def test_experts_may_be_trained_on_megatron_core(task: str) -> None:
    """The rung comes behind full fine-tuning under FSDP, and before any that trains less; a dense model has none."""
    job = {"framework": "verl", "task": task, "gpus": 16}
    kinds = [(rung["method"], rung.get("sharding", "")) for rung in space.rungs(job, experts=True)]
    assert list(dict.fromkeys(kinds))[:2] == [("full", ""), ("full", "megatron")]
    assert not any(rung.get("sharding") for rung in space.rungs(job))
    for one in ({"sharding": "fsdp2"}, {"framework": "openrlhf"}):
        assert not any(rung.get("sharding", "fsdp2") != "fsdp2" for rung in space.rungs(job | one, experts=True))


def test_a_sequence_too_long_for_one_gpu_is_shared_and_a_shorter_one_is_not() -> None:
    """Logits of 65,536 tokens in fp32 take 31 GiB a copy: three of them are more than a card."""
    job = {"model": "llama-3.1-8b", "task": "sft", "framework": "openrlhf==0.11", "gpu": "a100-80-sxm", "gpus": 8}
    job |= {"packing": True, "method": "full", "global_batch": 8}
    for length, several in ((4096, False), (65_536, True)):
        problem = Problem(job | {"seq_len": length}, load())
        found = problem.first()
        assert found is not None
        assert (found[1].chosen(found[2]).scenario.context_parallel > 1) == several
        assert bool(problem.misses) == several


def test_all_configurations_of_a_job_share_one_global_batch() -> None:
    catalog = load()
    for job, batch in ((SFT, 128), (SFT | {"framework": "trl"}, 64), (SFT | {"framework": "openrlhf"}, 128)):
        fields = space.seed(job, catalog, "job")
        found = space.branches(fields, {"method": "full", "optimizer": "adamw"}, catalog)
        made = [s for branch in found for place in branch.places() if (s := branch.at(place))]
        assert {s.global_batch for s in made} == {batch}
        assert {s.sharding for s in made} <= set(space.SHARDINGS)
        assert {s.micro_batch for s in made} == {2**n for n in range((batch // 8).bit_length())}


def test_what_is_given_stays() -> None:
    catalog = load()
    given = {"sharding": "zero3", "checkpointing": "none", "offload.optimizer": True, "micro_batch": 2, "loss": "full"}
    fields = space.seed(SFT | given, catalog, "job")
    for branch in space.branches(fields, {"method": "full", "optimizer": "adamw"}, catalog):
        for place in branch.places():
            s = branch.at(place)
            assert s
            assert (s.sharding, s.checkpointing, s.offload.optimizer, s.micro_batch, s.loss) == (
                "zero3", "none", True, 2, "full",
            )  # fmt: skip


@pytest.mark.parametrize("framework", ["torch", "openrlhf", "verl", "trl"])
@pytest.mark.parametrize("task", ["sft", "ppo", "grpo"])
def test_a_refusal_bars_nothing_that_would_be_accepted(
    monkeypatch: pytest.MonkeyPatch, framework: str, task: str
) -> None:
    catalog = load()
    try:
        fields = space.seed(SFT | {"task": task, "framework": framework}, catalog, "job")
    except ScenarioError:
        return
    rung = {"method": "full", "optimizer": "adamw"}
    barring = space.branches(fields, rung, catalog)
    monkeypatch.setattr(space, "BARRED", ())
    assert space.branches(fields, rung, catalog) == barring
    assert barring


def test_on_one_gpu_sharding_is_asked_where_nothing_else_fits() -> None:
    """One rank's own shards change little, but for what they move to the host; verl trains by nothing else."""

    def alone(**more: Any) -> set[str]:
        job = SFT | {"gpus": 1} | more
        fields = space.seed(job, load(), "job")
        branches = space.branches(fields, next(space.rungs(fields)), load())
        return {branch.base.sharding for branch in branches if branch.alone}

    assert alone(framework="trl") == {"zero2", "zero3", "fsdp1", "fsdp2"}
    assert (
        alone(framework="trl", gpus=2) == alone(framework="trl", sharding="fsdp2") == alone(framework="verl") == set()
    )


def test_layers_spread_over_gpus_have_a_configuration_whether_or_not_sharding_is_given() -> None:
    """Once only with `--sharding none`: over several GPUs no branch had it."""
    for gpus in (2, 8):
        job = SFT | {"model": "llama-3-8b", "framework": "torch", "gpus": gpus, "device_map": "auto"}
        fields = space.seed(job, load(), "job")
        found = space.branches(fields, next(space.rungs(fields)), load())
        assert {(branch.base.sharding, branch.base.devices) for branch in found} == {("none", gpus)}


def test_inference_serves_a_models_own_weights_or_four_bits_of_each() -> None:
    assert list(space.rungs({"task": "inference"})) == list(space.SERVED)
    assert list(space.rungs({"task": "inference", "method": "qlora"})) == [space.SERVED[1]]
    assert not list(space.rungs({"task": "inference", "optimizer": "adamw"}))
    problem = Problem({"model": "qwen2.5-32b", "task": "inference", "gpu": "rtx4090", "seq_len": 4096}, load())
    found = problem.first()
    assert found is not None
    assert found[1].chosen(found[2]).scenario.method == "qlora"  # 61 GiB in bf16 are more than the card


CARDS = ("h100-sxm", "rtx4090", "mi300x", "ascend910b")
TASKS = {
    "torch": ("pretrain", "sft", "rm", "dpo", "kto", "orpo", "simpo", "gkd", "ppo", "grpo", "reinforce++", "inference"),
    "openrlhf": ("pretrain", "sft", "rm", "dpo", "ppo", "grpo", "reinforce++"),
    "verl": ("sft", "ppo", "grpo", "reinforce++"),
    "trl": ("sft", "rm", "dpo", "kto", "orpo", "simpo", "gkd", "grpo"),
}


@pytest.mark.parametrize("framework", TASKS)
def test_any_number_of_gpus_has_configurations_where_the_framework_has_the_task(framework: str) -> None:
    """Two ranks an engine and 1,024 prompts, as verl has it, refused 3, 5, 6 and 7 GPUs, nodes of eight refused 12.

    Every number is asked of four cards in turn.
    """
    for n, task in enumerate(TASKS[framework]):
        for gpus in range(1, 17):
            gpu = CARDS[(n + gpus) % len(CARDS)]
            job = {"model": "qwen2.5-1.5b", "task": task, "framework": framework, "gpu": gpu, "gpus": gpus}
            problem = Problem(job, load())
            assert any(problem.search(rung) for rung in problem.rungs), job


def test_prompts_that_nobody_gave_are_shared_evenly_and_the_answer_says_so() -> None:
    job = {"model": "qwen2.5-1.5b", "task": "grpo", "framework": "verl", "gpu": "h100-sxm"}
    assert [whole_rollout(job | {"gpus": n}) for n in (1, 4, 5, 6, 7)] == [None, None, None, 1020, 1022]
    assert whole_rollout(job | {"gpus": 6, "rollout.n": 6}) is None
    assert whole_rollout(job | {"gpus": 6, "rollout.batch": 512}) is None
    problem = Problem(job | {"gpus": 6}, load())
    assert (problem.fields["rollout.batch"], problem.fields["global_batch"]) == (960, 1200)
    assert [*problem.notes] == ["rollout.batch 960: the framework's own number cannot be shared by 6 GPUs"]


@pytest.mark.parametrize("framework", ["verl", "openrlhf", "trl"])
@pytest.mark.parametrize("gpus", [3, 5, 6, 7, 9, 12])
def test_any_number_of_gpus_has_whole_groups_a_choice_of_micro_batches_and_a_command(framework: str, gpus: int) -> None:
    """Once 1,278 responses a step on 3 GPUs, which verl, counting prompts of 5 responses, has no setting for."""
    job = {"model": "qwen2.5-1.5b", "task": "grpo", "framework": framework, "gpu": "h100-sxm", "gpus": gpus}
    found = fitting(job, load())
    assert found
    s = found.scenario
    assert s.rollout
    assert s.global_batch % lcm(gpus, s.rollout.n) == 0
    assert s.rollout.batch * s.rollout.n % s.global_batch == 0
    assert s.global_batch // gpus % 2 == 0
    assert launch(s).command


def test_twelve_gpus_are_whole_nodes_unless_somebody_says_which() -> None:
    job = {"model": "qwen2.5-1.5b", "task": "sft", "gpu": "h100-sxm", "sharding": "zero3"}
    assert [parse(job | {"gpus": n}).gpus_per_node for n in (4, 8, 12, 14, 16, 24)] == [4, 8, 6, 7, 8, 8]
    with pytest.raises(ScenarioError, match="gpus: given 12, allowed: a multiple of gpus_per_node = 8, as 8 or 16"):
        parse(job | {"gpus": 12, "gpus_per_node": 8})


@pytest.mark.parametrize(
    ("trainer", "batch"), [("own", 128), ("transformers", 128), ("torchtune", 16), ("unsloth", 64)]
)
def test_a_trainer_with_habits_keeps_its_own_batch(trainer: str, batch: int) -> None:
    """The loop is not the user's there: neither its batch nor its loss is chosen, and a loss it lacks bars nothing."""
    job = {"model": "llama-3-8b", "task": "sft", "gpu": "h100-sxm", "gpus": 8, "trainer": trainer}
    assert space.seed(job, load(), "job")["global_batch"] == batch
    assert ("loss" in space._free(job)) is (trainer in ("own", "transformers"))
