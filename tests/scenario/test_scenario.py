from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fields

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.frameworks.registry import framework
from calc.resolve.parse import parse, vary
from calc.scenario.scenario import SCHEMA, Scenario, ScenarioError

SFT = {"model": "llama-3-8b", "task": "sft", "gpu": "a100-80-sxm"}


def error(**changes: Any) -> str:
    """The one line that refuses SFT with these changes; `__` in a name is a dot, None takes a field away."""
    data = SFT | {name.replace("__", "."): value for name, value in changes.items()}
    with pytest.raises(ScenarioError) as caught:
        parse({name: value for name, value in data.items() if value is not None}, where="job.yaml")
    line = str(caught.value)
    assert line.startswith("job.yaml: ")
    assert line.isprintable()
    return line


# --- what is filled in ---


def test_a_scenario_needs_a_model_a_task_and_a_gpu_and_has_a_default_for_the_rest() -> None:
    s = parse(SFT)
    assert (s.framework, s.gpus, s.gpus_per_node, s.method, s.lora, s.sharding) == ("torch", 1, 1, "full", None, "none")
    assert s.framework_version == framework("torch").KNOWN[-1]


@pytest.mark.parametrize("name", SCHEMA["required"])
def test_a_missing_required_field_is_named(name: str) -> None:
    assert repr(name) in error(**{name: None})


def test_a_misspelt_required_field_is_an_unknown_field() -> None:
    assert "did you mean 'model'" in error(model=None, modle="llama-3-8b")


def test_the_mean_length_is_the_cap_unless_given() -> None:
    assert parse(SFT | {"seq_len": 4096}).expected_len == 4096
    assert parse(SFT | {"seq_len": 4096, "expected_len": 600}).expected_len == 600


def test_nodes_hold_eight_gpus_unless_said_otherwise() -> None:
    many = SFT | {"sharding": "fsdp2"}
    assert parse(many | {"gpus": 4}).gpus_per_node == 4
    assert parse(many | {"gpus": 16}).gpus_per_node == 8
    assert parse(many | {"gpus": 16}).nodes == 2
    assert parse(many | {"gpus": 16, "gpus_per_node": 4}).nodes == 4


def test_a_default_batch_is_a_whole_number_of_steps_on_any_number_of_gpus() -> None:
    s = parse(SFT | {"framework": "openrlhf", "gpus": 6, "micro_batch": 1})
    assert s.global_batch % 6 == 0
    assert s.accumulation * s.micro_batch * s.data_parallel == s.global_batch


def test_accumulation_counts_micro_batches_of_one_gpu() -> None:
    # The reward model of OpenRLHF issue 354: 126 pairs over 6 GPUs, one pair each.
    s = parse(SFT | {"task": "rm", "framework": "openrlhf==0.3", "gpus": 6, "micro_batch": 1, "global_batch": 126})
    assert s.accumulation == 21


@pytest.mark.parametrize("name", ["torch", "openrlhf"])
@pytest.mark.parametrize("task", ["pretrain", "sft", "rm", "dpo"])
def test_every_known_version_of_a_framework_has_every_default(name: str, task: str) -> None:
    for version in framework(name).KNOWN:
        for method in ("full", "lora"):
            s = parse(SFT | {"task": task, "framework": f"{name}=={version}", "method": method})
            assert s.framework_version == version
            assert set(s.as_dict()) == set(SCHEMA["properties"])


def test_a_hugging_face_name_becomes_the_id_of_the_catalog() -> None:
    model = load().models["llama-3-8b"]
    assert parse(SFT | {"model": model.hf}) == parse(SFT)


# --- two spellings ---


def test_dotted_and_nested_fields_are_the_same() -> None:
    nested = parse(SFT | {"method": "lora", "lora": {"rank": 64, "targets": ["q_proj"]}, "versions": {"torch": "2.4"}})
    dotted = parse(SFT | {"method": "lora", "lora.rank": 64, "lora.targets": ["q_proj"], "versions.torch": "2.4"})
    mixed = parse(SFT | {"method": "lora", "lora.rank": 64, "lora": {"targets": ["q_proj"]}, "versions.torch": "2.4"})
    assert nested == dotted == mixed
    assert nested.lora is not None
    assert (nested.lora.rank, nested.lora.targets) == (64, ("q_proj",))


def test_roles_may_be_dotted_to_any_depth() -> None:
    dpo = SFT | {"task": "dpo", "gpus": 2, "sharding": "fsdp2"}
    nested = parse(dpo | {"roles": {"reference": {"offload": {"parameters": True}}}})
    assert nested == parse(dpo | {"roles.reference.offload.parameters": True})
    assert nested == parse(dpo | {"roles": {"reference.offload": {"parameters": True}}})


def test_a_field_spelled_twice_is_refused() -> None:
    assert "lora.rank: given twice" in error(method="lora", lora={"rank": 8}, lora__rank=16)
    assert "lora: given twice" in error(method="lora", lora=3, lora__rank=16)


def test_a_whole_number_may_be_written_as_a_float() -> None:
    s = parse(SFT | {"seq_len": 4096.0})
    assert type(s.seq_len) is int


# --- one field at a time ---


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("seqlen", 2048, "did you mean 'seq_len'"),
        ("lora.rnk", 8, "did you mean 'lora.rank'"),
        ("versions.transformer", "4.44", "did you mean 'versions.transformers'"),
        ("model", "llama-3-8", "did you mean"),
        ("model", 8, "given 8"),
        ("gpu", "a100-80-sxn", "did you mean 'a100-80-sxm'"),
        ("task", "stf", "did you mean 'sft'"),
        ("framework", "openrhlf", "did you mean 'openrlhf'"),
        ("framework", "openrlhf==banana", "a version of numbers"),
        ("framework", "openrlhf==", "a version of numbers"),
        ("framework", "openrlhf=0.6", "allowed: torch, openrlhf"),
        ("precision", "bf-16", "did you mean 'bf16'"),
        ("gpus", 0, "at least 1"),
        ("gpus", -4, "at least 1"),
        ("gpus", 10**9, "at most"),
        ("gpus", True, "given true"),
        ("gpus", "8", "an integer"),
        ("gpus", None, "given null"),
        ("gpus_per_node", 0, "at least 1"),
        ("micro_batch", -1, "at least 1"),
        ("micro_batch", 1.5, "an integer"),
        ("micro_batch", 10**7, "at most"),
        ("global_batch", 0, "at least 1"),
        ("seq_len", 0, "at least 1"),
        ("seq_len", 10**12, "at most"),
        ("seq_len", float("inf"), "seq_len: given"),
        ("seq_len", float("nan"), "seq_len: given"),
        ("lora.rank", 0, "at least 1"),
        ("lora.rank", 10**6, "at most 65536"),
        ("lora.dropout", 1, "below 1"),
        ("lora.dropout", -0.1, "at least 0"),
        ("lora.dropout", float("nan"), "finite"),
        ("lora.targets", "q_proj", "all-linear"),
        ("lora.targets", [], "a list"),
        ("lora.targets", [3], "given 3"),
        ("rollout.gpu_memory_utilization", 0, "above 0"),
        ("rollout.gpu_memory_utilization", 1.01, "at most 1"),
        ("packing", "yes", "true or false"),
        ("offload", True, "a mapping"),
        ("versions.torch", 2.4, "text such as '2.4'"),
        ("roles.reference", "nun", "'none'"),
        ("tensor_parallel", 0, "at least 1"),
    ],
)
def test_a_value_that_a_field_does_not_take_is_refused_with_what_it_takes(field: str, value: Any, told: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse(SFT | {field: value}, where="job.yaml")
    line = str(caught.value)
    assert line.startswith("job.yaml: ")
    assert line.isprintable()
    assert field.partition(".")[0].rstrip("s")[:4] in line
    assert told in line


@pytest.mark.parametrize("data", [None, [], [SFT], "sft", 3, True, {1: 2}, SFT | {None: 1}, SFT | {"lora": {1: 2}}])
def test_what_is_no_mapping_of_named_fields_is_refused(data: Any) -> None:
    with pytest.raises(ScenarioError, match=r"^job\.yaml: "):
        parse(data, where="job.yaml")


def test_an_error_stays_on_one_line_whatever_is_given() -> None:
    assert "\\n" in error(model="llama\nTraceback")
    assert len(error(model="x" * 4000)) < 1000


# --- words that are valid and not computed yet ---


@pytest.mark.parametrize(
    ("name", "task", "allowed"),
    [
        ("verl==0.5", "sft", "ppo, grpo, reinforce++; sft from 0.7.1 on"),
        ("verl", "dpo", "ppo, grpo, reinforce++, sft"),
        ("trl", "ppo", "sft, rm, dpo, kto, orpo, simpo, gkd, grpo"),
        ("openrlhf==0.5.0", "grpo", "ppo"),
    ],
)
def test_a_task_that_a_framework_lacks_is_refused_with_those_it_has(name: str, task: str, allowed: str) -> None:
    line = error(framework=name, task=task)
    assert f"task: given '{task}', allowed with" in line
    assert f": {allowed}" in line


def test_linear_attention_runs_in_kernels_unless_nothing_asks_for_them() -> None:
    """Plain PyTorch has none; a trainer's users install them, and packed sequences need them."""
    hybrid = SFT | {"model": "qwen3.5-4b"}
    assert parse(hybrid).linear_attention == "torch"
    assert parse(hybrid | {"trainer": "transformers"}).linear_attention == "fla"
    assert parse(hybrid | {"framework": "trl"}).linear_attention == "fla"
    notes = estimate(parse(hybrid)).notes
    assert any("linear_attention fla says how much" in note for note in notes)
    assert not any("linear attention" in note for note in estimate(parse(SFT)).notes)
    kernels, operations = (
        estimate(parse(hybrid | {"linear_attention": by, "checkpointing": "none"})) for by in ("fla", "torch")
    )
    assert kernels.groups[0].peak.moment.allocated_bytes < operations.groups[0].peak.moment.allocated_bytes
    packed = error(model="qwen3.5-4b", packing=True, attention="flash", linear_attention="torch")
    assert "linear_attention: given 'torch' with packing, allowed: fla; only its kernels keep" in packed


@pytest.mark.parametrize(
    ("model", "reason", "left_out"),
    [
        # PEFT 0.21 turns Qwen3-Next's gate_proj, up_proj and down_proj into its fused experts
        ("glm-4.5-air", "PEFT would adapt routed experts, too", {"gate_proj", "up_proj", "down_proj"}),
        ("qwen3-next-80b-a3b", "PEFT would adapt routed experts, too", {"gate_proj", "up_proj", "down_proj"}),
        # "Module 'out_proj' is incompatible with Mamba-based models": PEFT 0.21.2 on an H200, 2026-11-26
        ("falcon-h1-7b", "PEFT refuses the out_proj of these state spaces", {"out_proj"}),
        ("nemotron-h-8b", "PEFT refuses the out_proj of these state spaces", {"out_proj"}),
        # "'tuple' object has no attribute 'dtype'": small ones by PEFT 0.21.2 with Transformers 5.23
        ("phi-3.5-moe", "PEFT would wrap the router, too, and fail on what it returns", {"router"}),
        ("llama-4-scout", "PEFT would wrap the router, too, and fail on what it returns", {"router"}),
    ],
)
def test_where_all_linear_does_not_serve_the_linears_are_named(model: str, reason: str, left_out: set[str]) -> None:
    told = error(model=model, method="lora", **{"lora.targets": "all-linear"})
    assert "lora.targets: given 'all-linear', allowed: [" in told and told.endswith(reason)
    usual = parse(SFT | {"model": model, "method": "lora"})
    assert usual.lora and {"q_proj", "k_proj", "v_proj", "o_proj"} <= {*usual.lora.targets}
    assert not left_out & {*usual.lora.targets}
    assert any(reason in note for note in estimate(usual).notes)
    named = parse(SFT | {"model": model, "method": "lora", "lora.targets": ["q_proj"]})
    assert not any(reason in note for note in estimate(named).notes)


def test_adapters_on_all_linears_are_said_so_where_peft_takes_them() -> None:
    for model in ("qwen3.5-35b-a3b", "granite-4-h-tiny", "llama-3.2-1b"):
        told = parse(SFT | {"model": model, "method": "lora"})
        assert told.lora and told.lora.targets == "all-linear"


def test_selective_checkpointing_is_never_reentrant() -> None:
    """torch `utils/checkpoint.py`: `context_fn` goes with use_reentrant=False alone, whatever a library's default."""
    assert "reentrant: given true with checkpointing selective" in error(checkpointing="selective", reentrant=True)
    old = SFT | {"versions.transformers": "4.57"}
    full, selective = (parse(old | {"checkpointing": name}) for name in ("full", "selective"))
    assert (full.reentrant, selective.reentrant) == (True, False)
    assert parse(selective.as_dict()) == selective == vary(full, {"checkpointing": "selective"})


@pytest.mark.parametrize("name", ["expert_parallel", "expert_tensor_parallel"])
@pytest.mark.parametrize("framework", ["openrlhf", "trl", "torch"])
def test_megatron_core_alone_spreads_experts(framework: str, name: str) -> None:
    line = error(model="qwen3-30b-a3b", gpus=8, framework=framework, **{name: 4})
    assert f"{name}: given 4 with sharding" in line


def test_an_expert_cut_over_more_gpus_than_a_node_has_finds_no_other_in_its_node() -> None:
    megatron = {"model": "qwen3-30b-a3b", "sharding": "megatron", "trainer": "megatron"}
    assert parse(SFT | megatron | {"gpus": 8, "gpus_per_node": 2, "expert_tensor_parallel": 4}).peers == 0


def test_a_parallelism_that_is_not_modelled_is_refused() -> None:
    line = error(gpus=2, sharding="fsdp2", expert_parallel=2, model="mixtral-8x7b")
    assert "given 2 with sharding fsdp2, allowed: 1, or with experts_implementation torchtitan, automodel" in line
    line = error(gpus=2, sharding="zero3", expert_parallel=2, model="mixtral-8x7b")
    assert "expert_parallel: given 2 with sharding zero3, allowed: 1, or with sharding megatron" in line


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpu": "ascend910b"}, "on ascend910b, allowed: null; PyTorch's setting is for CUDA"),
        ({"versions.torch": "2.12"}, "with torch 2.12, allowed: null, or with torch 2.13 or later"),
        ({"versions.torch": "2.13.0"}, ""),
        ({"framework": "verl", "task": "sft"}, "with torch 2.11.0, allowed: null, or with torch 2.13 or later"),
        (
            {"framework": "openrlhf==0.10.4", "task": "ppo"},
            "with vllm 0.22.1, allowed: null, or with vllm 0.27 or later",
        ),
        ({"framework": "openrlhf==0.11.0", "task": "ppo"}, ""),
        ({"framework": "openrlhf==0.10.4"}, ""),
    ],
)
def test_pinned_memory_is_rounded_unless_pytorch_knows_the_threshold(fields: dict[str, Any], said: str) -> None:
    """OpenRLHF pins no torch, but a vLLM that needs one: METADATA of vLLM 0.26.0 has 2.11.0, of 0.27.0 2.13.0."""
    given = SFT | fields | {"pinned_max_round_threshold_mb": 64}
    given |= {"prompt_len": 64, "response_len": 64} if given["task"] == "ppo" else {}
    if said:
        with pytest.raises(ScenarioError, match=r"^scenario: pinned_max_round_threshold_mb: given 64 ") as caught:
            parse(given)
        assert str(caught.value).endswith(f"given 64 {said}")
    else:
        assert parse(given).pinned_max_round_threshold_mb == 64
    assert parse(given | {"pinned_max_round_threshold_mb": None}).pinned_max_round_threshold_mb is None


@pytest.mark.parametrize("degree", ["tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"])
def test_nothing_is_shared_by_default(degree: str) -> None:
    assert parse(SFT | {degree: 1}) == parse(SFT)


def test_a_gpu_has_a_communicator_for_its_shards_and_for_each_kind_of_work_that_it_shares() -> None:
    """Eight GPUs that share one sequence gather weights in a group of their own beside the ring's."""
    given = {**SFT, "gpus": 8, "sharding": "fsdp2", "attention": "sdpa", "seq_len": 2048}
    assert parse(given).communicators == 1
    assert parse(given | {"context_parallel": 8}).communicators == 2
    assert parse(given | {"context_parallel": 2, "tensor_parallel": 2}).communicators == 3


def test_deepspeed_has_a_group_of_all_gpus_beside_pytorch_s() -> None:
    given = {**SFT, "gpus": 8, "sharding": "zero3", "seq_len": 2048}
    assert parse(given).communicators == 2
    assert parse(given | {"gpus": 1}).communicators == 0


def test_megatron_has_groups_of_all_gpus_of_a_model_s_parts_and_of_experts_besides() -> None:
    """Two of all GPUs, one for tensor and pipeline parallelism; with experts one for their tokens' counts, and one of
    the GPUs that have the same experts."""
    given = {**SFT, "model": "qwen3-30b-a3b", "trainer": "megatron", "gpus": 8, "seq_len": 2048, "micro_batch": 1}
    assert parse(given).communicators == 1 + 2  # data parallelism
    assert parse(given | {"gpus": 4, "tensor_parallel": 4}).communicators == 1 + 2 + 1
    assert parse(given | {"tensor_parallel": 2, "pipeline_parallel": 2}).communicators == 3 + 2 + 1
    assert parse(given | {"expert_parallel": 4}).communicators == 2 + 2 + 2  # two GPUs have the same experts
    assert parse(given | {"expert_parallel": 8}).communicators == 2 + 2 + 1


def test_tokens_for_experts_go_to_the_other_gpus_of_the_node() -> None:
    """Beyond the node they take the network, whose connections share their buffers."""
    given = {**SFT, "model": "qwen3-30b-a3b", "trainer": "megatron", "gpus": 16, "seq_len": 2048, "micro_batch": 1}
    assert [parse(given | {"expert_parallel": n}).peers for n in (1, 2, 8, 16)] == [0, 1, 7, 7]


def test_whose_fused_loss_runs_is_megatron_core_s_choice_alone() -> None:
    job = {**SFT, "gpus": 8, "seq_len": 2048, "trainer": "megatron", "cross_entropy_fusion_impl": "te"}
    assert parse(job | {"loss": "fused"}).cross_entropy_fusion_impl == "te"
    for other in ({"loss": "full"}, {"loss": "fused", "trainer": "own", "sharding": "fsdp2"}):
        with pytest.raises(ScenarioError, match="cross_entropy_fusion_impl: given 'te', allowed: native, or with loss"):
            parse(job | other)


# --- fields together ---


def test_gpus_fill_whole_nodes() -> None:
    line = error(gpus=12, gpus_per_node=8, sharding="fsdp2")
    assert "gpus: given 12" in line
    assert "8 or 16" in line
    assert parse(SFT | {"gpus": 4, "gpus_per_node": 8, "sharding": "ddp"}).nodes == 1


def test_a_batch_divides_over_its_gpus() -> None:
    line = error(gpus=4, sharding="fsdp2", micro_batch=2, global_batch=12)
    assert "global_batch: given 12" in line
    assert "2 x 4 = 8, as 8 or 16" in line
    assert "as 8" in error(gpus=4, sharding="fsdp2", micro_batch=2, global_batch=4)


def test_several_gpus_need_a_way_to_share_the_work() -> None:
    assert "sharding: given 'none' with gpus = 4, allowed: ddp" in error(gpus=4, sharding="none")
    assert parse(SFT | {"gpus": 1, "sharding": "fsdp2"}).sharding == "fsdp2"


def test_a_mean_length_is_at_most_the_cap() -> None:
    assert "expected_len: given 4096, allowed: at most seq_len = 2048" in error(seq_len=2048, expected_len=4096)


def test_adapters_need_a_method_that_has_them() -> None:
    assert "lora.rank: given with method full" in error(lora__rank=8)
    assert "lora.rank: given with method full" in error(method="full", lora={"rank": 8})
    assert parse(SFT | {"lora": None}) == parse(SFT)


def test_adapter_targets_are_layers_of_the_model() -> None:
    assert "did you mean 'q_proj'" in error(method="lora", lora__targets=["q_prj"])
    assert "lora.targets" in error(model="phi-3-mini", method="lora", lora__targets=["q_proj"])
    s = parse(SFT | {"model": "phi-3-mini", "method": "lora", "lora.targets": ["qkv_proj"]})
    assert s.lora is not None


@pytest.mark.parametrize("field", ["prompt_len", "response_len", "rollout.n"])
def test_fields_of_rl_are_for_rl(field: str) -> None:
    assert f"{field}: given for sft, allowed: for RL tasks" in error(**{field.replace(".", "__"): 8})


def test_roles_of_a_supervised_job_share_its_gpus() -> None:
    assert "placement: given 'separate'" in error(task="dpo", placement="separate")
    dpo = {"task": "dpo", "gpus": 2, "sharding": "ddp"}
    assert "roles.reference.gpus: given 1, allowed: 2" in error(**dpo, roles__reference__gpus=1)


def test_a_framework_refuses_what_it_cannot_run() -> None:
    line = error(framework="openrlhf", method="qlora", sharding="zero3", gpus=2)
    assert "qlora" in line
    assert "zero3" in line


# --- roles ---


def test_dpo_has_a_reference_unless_it_is_taken_away() -> None:
    dpo = SFT | {"task": "dpo"}
    reference = parse(dpo).role("reference")
    assert reference is not None
    assert reference.model == "llama-3-8b"
    assert parse(dpo | {"roles": {"reference": "none"}}).role("reference") is None


def test_a_role_sees_the_job_with_what_differs_put_in() -> None:
    other = {"reference": {"model": "llama-3.2-1b", "offload.parameters": True}}
    s = parse(SFT | {"task": "dpo", "gpus": 2, "sharding": "fsdp2", "roles": other})
    reference = s.role("reference")
    assert reference is not None
    assert reference.architecture == load().models["llama-3.2-1b"].architecture
    assert reference.offload.parameters
    assert not s.offload.parameters
    assert reference.seq_len == s.seq_len


@pytest.mark.parametrize("role", ["actor", "critic", "reward"])
def test_a_role_that_the_task_lacks_is_refused_with_those_it_has(role: str) -> None:
    assert f"roles.{role}: not a role of dpo, allowed: reference" in error(task="dpo", roles={role: {}})
    assert f"roles.{role}: not a role of sft" in error(roles={role: {}})
    # a role that does not run is none in every job
    assert parse(SFT | {"task": "dpo", "roles": {role: "none"}}) == parse(SFT | {"task": "dpo"})


def test_a_role_that_is_not_trained_takes_no_field_of_training() -> None:
    assert "roles.reference.optimizer: given for a role" in error(task="dpo", roles={"reference": {"optimizer": "sgd"}})
    assert "fp8" in error(task="dpo", roles={"reference": {"precision": "fp8"}})
    assert "did you mean" in error(task="dpo", roles={"reference": {"model": "llama-3-8"}})


# --- warnings ---


def test_a_sequence_beyond_the_models_positions_is_said_not_refused() -> None:
    assert parse(SFT).warnings == ()
    (warning,) = parse(SFT | {"seq_len": 16_384}).warnings
    assert "16384" in warning
    assert "8192" in warning


def test_an_unknown_version_is_computed_as_the_nearest_and_said() -> None:
    for name in ("torch", "openrlhf"):
        s = parse(SFT | {"framework": f"{name}==999.9"})
        assert s.framework_version in framework(name).KNOWN
        assert "999.9" in s.warnings[0]


# --- there and back ---


@pytest.mark.parametrize(
    "given",
    [
        {"task": "grpo", "framework": "verl", "rollout.engine": "none"},
        {"task": "ppo", "framework": "verl==0.4.9"},
        {"task": "rm", "framework": "trl==1.5.3"},
        {"framework": "openrlhf==999.9"},
    ],
)
def test_a_rollout_that_is_not_there_and_a_version_in_between_come_back_as_they_were(given: dict[str, Any]) -> None:
    """The first was refused, as its default had the engine sleep; the others came back without their note."""
    s = parse(SFT | {"gpus": 8} | given)
    assert parse(s.as_dict()) == s
    assert parse(s.as_dict()).warnings == s.warnings
    assert s.as_dict()["framework"] == (
        given["framework"] if "==" in given["framework"] else f"verl=={s.framework_version}"
    )


@given(fields())
def test_what_is_given_is_never_replaced_by_a_default(data: dict[str, Any]) -> None:
    try:
        s = parse(data)
    except ScenarioError:
        return
    for name, value in data.items():
        if name not in ("framework", "roles.reference", "lengths") and not name.startswith(
            ("lora.", "offload.", "versions.")
        ):
            assert getattr(s, name) == value


words = st.sampled_from(sorted({*SCHEMA["properties"], "lora.rank", "roles.reference", "rank", "none", ""}))
garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | words | st.sampled_from(sorted(SFT.values())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@given(st.one_of(garbage, st.dictionaries(words | st.text(max_size=9), garbage, max_size=5).map(lambda d: SFT | d)))
def test_whatever_is_given_is_a_scenario_or_one_line(data: Any) -> None:
    try:
        assert isinstance(parse(data, where="job.yaml"), Scenario)
    except ScenarioError as caught:
        assert str(caught).startswith("job.yaml: ")
        assert str(caught).isprintable()


# --- the schema is the reference that readers see ---


def leaves(node: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    inner = node.get("properties", {})
    return [(path, node)] * bool(path) + [x for name, child in inner.items() for x in leaves(child, f"{path}.{name}")]


def test_every_field_is_described_and_bounded() -> None:
    for path, node in leaves(SCHEMA):
        if "$ref" in node:
            continue
        assert node["description"].endswith("."), path
        kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
        if "integer" in kinds:
            assert node["minimum"] >= 1, path
            assert "maximum" in node, path
        if "object" in kinds:
            assert node["additionalProperties"] is False, path
        if "string" in kinds:
            assert {"enum", "pattern", "maxLength"} & set(node), path


def test_the_object_has_the_fields_of_the_schema() -> None:
    own = {f.name for f in dataclasses.fields(Scenario)} - {
        "framework_version",
        "framework_asked",
        "architecture",
        "architectures",
        "warnings",
        "plan",
        "counts_prompts",
    }
    assert own == set(SCHEMA["properties"])


def test_a_card_older_than_ampere_is_told_of_bf16_and_flash_attention() -> None:
    """A V100 would get numbers for a job that it cannot run as written."""
    plain = {"model": "llama-3.2-1b", "task": "sft", "attention": "sdpa"}

    def told(**fields: str) -> tuple[str, ...]:
        return estimate(parse(plain | fields)).notes

    old = told(gpu="v100-32", attention="flash")
    assert any("no bf16" in note for note in old)
    assert any("FlashAttention-2 does not run" in note for note in old)
    assert told(gpu="v100-32", precision="fp16") == told(gpu="v100-32", precision="fp32")
    (builds,) = told(gpu="v100-32", precision="fp16")
    assert "CUDA 12.6" in builds
    assert told(gpu="a100-80-sxm", attention="flash") == ()


def test_adapters_on_routed_experts_come_with_a_word() -> None:
    """Mixtral's experts are bare parameters in Transformers 5: not quantised, and not adapted by what is computed."""
    job = {"model": "mixtral-8x7b", "task": "sft", "gpu": "h200", "method": "qlora"}
    assert any("routed experts stay in 16 bits" in warning for warning in parse(job).warnings)
    assert any("without routed experts" in warning for warning in parse({**job, "method": "lora"}).warnings)
    assert parse({**job, "method": "lora", "lora.targets": ["q_proj"]}).warnings == ()
    assert parse({**job, "model": "llama-3-8b"}).warnings == ()


@pytest.mark.parametrize(
    ("gpu", "torch", "maps"), [("mi300x", "2.11", False), ("mi300x", "2.12", True), ("h200", "2.5", True)]
)
def test_builds_for_rocm_map_no_pages_before_they_could(gpu: str, torch: str, maps: bool) -> None:
    """PyTorch 2.9 `c10/cuda/CUDAAllocatorConfig.h`: a warning, and the usual segments; pull request 177974 for 2.12."""
    s = parse({"model": "llama-3-8b", "task": "sft", "gpu": gpu, "expandable_segments": True, "versions.torch": torch})
    assert s.expandable_segments is maps
    assert any("ROCm" in note for note in estimate(s).notes) is not maps


def test_a_default_batch_is_of_whole_steps_of_every_role() -> None:
    """verl's 256 sequences are none for a critic of nine a GPU on two: 252, which the scenario in full says, too."""
    s = parse({"model": "qwen2.5-0.5b", "task": "ppo", "gpu": "h100-sxm", "gpus": 2, "framework": "verl",
               "roles.critic.micro_batch": 9})  # fmt: skip
    assert s.global_batch == 252
    assert parse(s.as_dict()) == s


@pytest.mark.parametrize(("named", "meant"), [("dapo", "grpo"), ("RLOO", "grpo"), ("pt", "pretrain"), ("sftt", "sft")])
def test_a_task_by_another_name_is_pointed_to_ours(named: str, meant: str) -> None:
    """DAPO is the nearest in spelling to dpo, and in memory to grpo."""
    with pytest.raises(ScenarioError) as refused:
        parse({"model": "qwen3-0.6b", "task": named, "gpu": "a40"})
    assert str(refused.value).endswith(f"; did you mean {meant!r}?")
    task = SCHEMA["properties"]["task"]
    assert set(task["meant"].values()) <= set(task["enum"]) and not set(task["meant"]) & set(task["enum"])
