"""verl on Megatron-core: what its roles keep, what leaves for the host, what adapters are, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.ledger import total
from calc.base.plan import Path
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.frameworks.verl import megatron
from calc.resolve.parse import ScenarioError, parse
from calc.scenario.scenario import Scenario
from calc.step import placement
from calc.step.placement import Placed
from calc.throughput import throughput

JOB = {
    "model": "qwen2.5-7b", "task": "grpo", "framework": "verl==0.9.1", "gpu": "h100-sxm", "gpus": 8,
    "sharding": "megatron", "tensor_parallel": 4, "prompt_len": 1024, "response_len": 1024, "micro_batch": 1,
    "rollout": {"n": 4, "batch": 64, "tensor_parallel": 1}, "roles": {"reference": {}},
}  # fmt: skip
OFFLOAD = {"offload": {"parameters": True, "optimizer": True}}


def job(**fields: Any) -> Scenario:
    return parse(JOB | fields)


def placed(s: Scenario) -> dict[str, Placed]:
    return {role.name: placement.place(s, role, s.keeps) for role in s.keeps.roles}


def test_gradients_leave_with_the_weights_and_masters_with_the_moments() -> None:
    """`offload_megatron_model_to_cpu` frees the buffers of both, `offload_megatron_optimizer` masters and moments.

    What products give autograd in place of gradients is nobody's to free.
    """
    for offload, left in (
        ({}, {"gradients", "master_weights", "optimizer_states"}),
        ({"parameters": True}, {"master_weights", "optimizer_states"}),
        ({"optimizer": True}, {"gradients"}),
        ({"parameters": True, "optimizer": True}, set()),
    ):
        engine = placed(job(offload=offload))["actor"].engine
        there = [line for line in engine.staying() if line.formula != "g·W_s"]
        assert {line.component for line in there} == left
        assert len(engine.staying()) == len(there) + 1
        assert total(engine.states()) > 0  # all are back while it trains


def test_a_rank_has_a_part_of_the_model_and_shares_states_over_data_parallel_ranks() -> None:
    """P/4 parameters of 2 B, gradients of 4 B, and 12 B of masters and moments over two ranks: 12 B in all."""
    engine = placed(job())["actor"].engine
    parameters = engine.replica.parameters
    assert total([*engine.weights(), *engine.states()]) == pytest.approx(12 * parameters, rel=1e-4)
    reference = placed(job())["reference"].engine
    assert total(reference.resident()) == pytest.approx(2 * parameters, rel=1e-4)


def test_each_pipeline_stage_has_a_group_with_all_roles_and_vllm() -> None:
    s = job(gpus=16, pipeline_parallel=2)
    names = [names for names, _ in placement.groups(s, s.keeps)]
    assert names == [
        ("reference, stage 1", "actor, stage 1", "rollout"),
        ("reference, stage 2", "actor, stage 2", "rollout"),
    ]
    assert [gpus for _, gpus in placement.groups(s, s.keeps)] == [8, 8]
    found = estimate(s)
    assert [g.name.split("+")[-1] for g in found.groups] == ["rollout", "rollout"]


def test_stages_that_do_not_divide_leave_fewer_layers_to_the_last() -> None:
    """94 layers in 8 stages: 12 in seven of them, 10 in the last."""
    s = job(model="qwen3-235b-a22b", gpus=256, pipeline_parallel=8, expert_parallel=32, rollout={"n": 16, "batch": 256})
    layers = [own.engine.replica.arch.layers for name, own in placed(s).items() if name.startswith("actor")]
    assert layers == [12] * 7 + [10]


def test_more_ranks_of_any_kind_never_need_more_memory_to_train() -> None:
    def training(**fields: Any) -> int:
        found = estimate(job(gpus=32, **OFFLOAD, **fields))
        return max(p.moment.allocated_bytes for g in found.groups for p in g.phases if p.name == "backward")

    one = training()
    assert training(tensor_parallel=2) > one
    assert training(context_parallel=2) < one
    assert training(pipeline_parallel=2) < one


def test_old_log_probabilities_come_with_an_entropy_and_the_references_without() -> None:
    scoring = {role.name: role.scoring for role in job().keeps.roles}
    whole = Path("vocab-parallel", head_fp32=True, scaled="in-place")
    assert scoring["reference"] == whole
    assert scoring["actor"].entropy == "vocab-parallel" and scoring["actor"].copied
    early = megatron.loss_path(job(framework="verl==0.5.0"), entropy=True)
    assert not early.copied and early.scaled == ""
    assert {role.path.kind for role in job(loss="fused").keeps.roles} == {"linear-entropy"}


def test_fusions_come_with_megatron_bridge() -> None:
    assert job(framework="verl==0.8.0").architecture.modeling == "megatron-plain"
    assert job(framework="verl==0.9.0").architecture.modeling == "megatron"


def test_gradients_come_back_for_a_checkpoint_and_until_0_5_for_a_sync() -> None:
    def held(version: str, does: str, **fields: Any) -> tuple[str, ...]:
        stages = job(framework=f"verl=={version}", **fields).keeps.stages
        return next(stage.holds for stage in stages if stage.does == does)

    assert held("0.9.1", "save", **OFFLOAD) == ("gradients",)
    assert held("0.9.1", "save") == ()
    assert held("0.5.0", "sync", **OFFLOAD) == ("parameter", "gradients")
    assert held("0.6.0", "sync", **OFFLOAD) == ("parameter",)
    assert held("0.9.1", "sync", **OFFLOAD) == ("parameter", "bucket")


def test_a_host_keeps_what_left_pinned_and_states_only_where_they_leave() -> None:
    moments = dict(placed(job(**OFFLOAD))["actor"].engine.host(8))
    before = {line.component for line in moments["before the first step"]}
    after = {line.component for line in moments["after the first step"]}
    assert before == {"weights", "master_weights"} and after - before == {"optimizer_states"}
    assert not any(lines for lines in dict(placed(job())["actor"].engine.host(8)).values())


def test_adam_steps_a_share_of_the_parameters_on_the_host() -> None:
    """Megatron-core 0.16.1 `HybridDeviceOptimizer`: 12 B of masters and moments go, and fp32 gradients are copied.

    What is left on the GPU steps there; its moments leave it between the actor's phases, its masters do not.
    """
    engine = placed(job())["actor"].engine
    held = total(engine.states()) - total(placed(job(offload={"fraction": 1}))["actor"].engine.states())
    states = {"master_weights", "optimizer_states"}
    assert held == sum(line.bytes for line in engine.states() if line.component in states)
    half = placed(job(offload={"fraction": 0.5, "optimizer": True}))["actor"].engine
    assert total(half.states()) == pytest.approx(total(engine.states()) - held / 2, rel=1e-6)
    assert sum(line.bytes for line in half.staying() if line.component == "master_weights") == held // 6
    moments = dict(placed(job(offload={"fraction": 1}))["actor"].engine.host(1))
    after = {line.component: line.bytes for line in moments["after the first step"]}
    assert {"master_weights", "gradients", "optimizer_states"} == set(after)
    assert after["master_weights"] + after["optimizer_states"] == pytest.approx(held, rel=1e-6)


def test_a_share_on_the_host_takes_longer_the_larger_it_is() -> None:
    def took(share: float) -> float:
        return throughput(job(offload={"fraction": share}), load().gpu("h100-sxm"), None).step_seconds

    assert took(0) < took(0.5) < took(1)


@pytest.mark.parametrize("fields", [{"framework": "verl==0.5.0"}, {"sharding": "fsdp2", "tensor_parallel": 1}])
def test_a_share_on_the_host_is_refused_where_no_hybrid_optimizer_was_read(fields: dict[str, Any]) -> None:
    with pytest.raises(ScenarioError, match=r"offload\.fraction: given 1.*, allowed.*: 0"):
        parse(JOB | fields | {"offload.fraction": 1})


def test_a_critic_has_what_an_actor_has_but_a_head_of_one_number() -> None:
    """Weights, gradients and states of as many parameters less the head's and the tied embedding's; no vocabulary."""
    s = job(task="ppo", rollout={"n": 1, "batch": 64, "tensor_parallel": 1}, roles={"critic": {}})
    own = placed(s)
    actor, critic = own["actor"].engine.replica, own["critic"].engine.replica
    assert actor.parameters - critic.parameters == (actor.arch.vocab_part - 1) * actor.arch.hidden
    assert critic.optimizer and critic.path == Path("scalar")
    does = [(stage.does, stage.role) for stage in s.keeps.stages]
    assert does[1:] == [("score", "actor"), ("score", "critic"), ("train", "critic"), ("train", "actor"),
                        ("save", "actor"), ("save", "critic"), ("sync", "actor")]  # fmt: skip
    moved = job(task="ppo", rollout={"n": 1, "batch": 64}, roles={"critic": OFFLOAD})
    held = {stage.role: stage.holds for stage in moved.keeps.stages if stage.does == "save"}
    assert held == {"actor": (), "critic": ("gradients",)}
    assert not [line for line in placed(moved)["critic"].engine.staying() if line.formula != "g·W_s"]


def test_a_reward_model_scores_as_a_reference_does() -> None:
    s = job(task="ppo", framework="verl==0.6.0", rollout={"n": 1, "batch": 64}, roles={"reward": {}})
    reward = placed(s)["reward"].engine
    assert reward.replica.optimizer is None and reward.replica.path == Path("scalar")
    assert total(reward.resident()) == 2 * reward.replica.parameters


def test_sft_trains_one_model_on_the_same_engine() -> None:
    """As an actor's update without entropy; with its weights offloaded a checkpoint takes the gradients along."""
    rl = ("roles", "rollout", "prompt_len", "response_len", "micro_batch")
    s = parse({name: value for name, value in JOB.items() if name not in rl} | {"task": "sft", **OFFLOAD})
    assert [(stage.does, stage.holds) for stage in s.keeps.stages] == [("train", ()), ("save", ("gradients",))]
    [role] = s.keeps.roles
    assert role.path == Path("vocab-parallel", head_fp32=True, scaled="in-place")
    assert role.leaves == {"weights", "states"}


LORA = {"method": "lora", "roles": {}}


def test_megatron_bridges_adapters_are_cut_over_tensor_parallel_ranks() -> None:
    """Of 28 layers, h 3584, kv 512, i 18944, over four ranks: both matrices beside linears cut by their outputs.

    Beside those cut by their inputs the second is cut by what it makes: (in + out)·r/4 in all. Experts share one.
    """
    engine = placed(job(**LORA, **{"lora.rank": 16}))["actor"].engine
    h, kv, i = 3584, 512, 18944
    wide = (h + h + 2 * kv) + (h + h) + (h + 2 * i) + (i + h)
    assert engine.replica.adapter == 28 * 16 * wide // 4
    moe = {"model": "qwen3-30b-a3b", "expert_parallel": 8, "lora.targets": ["linear_fc1"]}
    shared = placed(job(**LORA, **moe))["actor"].engine.replica
    assert shared.adapter == 48 * 64 * (2048 + 2 * 768)


def test_a_reference_of_adapters_is_the_actor_without_them_and_vllm_gets_no_others() -> None:
    s = job(**LORA | {"roles": {"reference": {}}}, **OFFLOAD)
    assert next(role for role in s.keeps.roles if role.name == "reference").shares
    sync = s.keeps.stages[-1]
    assert (sync.holds, sync.back) == (("bucket",), "none")


HYBRID = {"model": "qwen3.5-4b", "gpus": 16, "tensor_parallel": 2}


def test_a_hybrid_trains_beside_vllm_which_keeps_its_states() -> None:
    """Of 32 layers every fourth has keys and values; the others have states in vLLM, gradients on Megatron."""
    s = job(**HYBRID, expected_len=2048)
    engine = placed(s)["actor"].engine
    assert [spec.mixer for spec in engine.replica.arch.specs] == ["delta", "delta", "delta", "attention"] * 8
    assert engine.replica.arch.delta and engine.replica.arch.delta.value_heads == 16
    assert any("vision tower" in note for note in estimate(s).notes)


def test_a_hybrids_ranks_of_a_ring_need_less_to_train() -> None:
    """Two more ways to share a sequence; vLLM's memory is asleep meanwhile."""

    def training(**fields: Any) -> int:
        found = estimate(job(**HYBRID, **OFFLOAD, **fields))
        return max(p.moment.allocated_bytes for g in found.groups for p in g.phases if p.name == "backward")

    assert training(context_parallel=4) < training(context_parallel=2) < training()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {**HYBRID, "framework": "verl==0.8.0"},
            "sharding: given 'megatron', allowed: fsdp1, fsdp2 for the family qwen3_5_text, or verl from 0.9.0 on",
        ),
        (
            {**HYBRID, "context_parallel": 16, "gpus": 32},
            "context_parallel: given 16, allowed: a divisor of the 8 key heads of linear attention",
        ),
        ({"framework": "verl==0.3.0"}, "sharding: given 'megatron', allowed with verl 0.3.0: fsdp1"),
        ({"framework": "verl==0.4.0", "loss": "fused"}, "loss: given 'fused' with sharding megatron"),
        (
            {**LORA, "framework": "verl==0.8.0"},
            "method: given 'lora' with sharding megatron, allowed with verl: 'full'",
        ),
        ({**LORA, "lora.rank": 6}, "lora.rank: given 6, allowed: a multiple of tensor_parallel = 4"),
        ({**LORA, "lora.dtype": "fp32"}, "lora.dtype: given 'fp32' with sharding megatron, allowed: bf16"),
        ({"packing": False}, "packing: given false with sharding megatron"),
        ({"sequence_parallel": False}, "sequence_parallel: given false with sharding megatron"),
        ({"model": "gemma-2-9b"}, "sharding: given 'megatron', allowed: fsdp1, fsdp2 for the family gemma2"),
        ({"roles": {"reference": {"precision": "bf16"}}}, "roles.reference.precision: given 'bf16'"),
        ({"roles": {"reference": {"sharding": "fsdp1"}}}, "roles.reference.sharding: given 'fsdp1'"),
        ({"task": "ppo", "roles": {"critic": {"context_parallel": 2}}}, "roles.critic.context_parallel: given 2"),
        ({"max_tokens_per_gpu": 512, "micro_batch": None}, "max_tokens_per_gpu: given 512"),
        ({"pipeline_parallel": 32, "gpus": 128}, "pipeline_parallel: given 32, allowed: such that 28 layers"),
        ({"expert_parallel": 2}, "expert_parallel: given 2, allowed: 1 for a model without experts"),
        ({"mtp_num_layers": 1}, "mtp_num_layers: given 1 with verl, allowed: null; not modelled"),
        (
            {"pipeline_parallel": 2, "virtual_pipeline": 2, "global_batch": 4, "micro_batch": 4},
            "global_batch: given 4 with virtual_pipeline = 2, allowed: a multiple of 8, so that stages take turns",
        ),
        (
            {"model": "qwen3-30b-a3b", "expert_parallel": 16, "gpus": 8},
            "expert_parallel: given 16 with sharding megatron, allowed: a divisor of a stage's 8 GPUs",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        job(**fields)
    assert said in str(error.value) and "\n" not in str(error.value)
