"""Commands read back: every command that `calc.launch` writes gives the fields of the scenario that it came from."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from launch import grid

from calc.catalog.catalog import load
from calc.diagnose.reading import read
from calc.launch import LaunchError, launch
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.scenario.words import FSDP

CATALOG = load()
# What no command states by itself: how many nodes a job has follows, and a release is that of the flags.
UNSTATED = ("framework", "gpu", "trainer")
JOBS = {"openrlhf": grid.openrlhf, "verl": grid.verl, "trl": grid.trl}


def stated(s: Scenario) -> dict[str, Any]:
    """The fields that the command of a scenario states, its files beside it."""
    found = launch(s)
    text = "\n\n".join([found.command, *found.files.values()])
    fields = {name: value for name, value in read(text, CATALOG).fields.items() if name not in UNSTATED}
    assert fields["model"] == s.model
    return fields


def one_switch(s: Scenario, place: str) -> bool:
    """True for settings of which a command says less than the scenario; `calc.launch` notes both.

    FSDP offloads weights and states together, TRL has no word for AdamW a tensor at a time, and on one GPU stage 0 of
    DeepSpeed is no sharding as well as DDP.
    """
    if place == "sharding" and s.gpus == 1:
        return s.sharding in ("none", "ddp")
    moved = place.startswith("offload.") and s.framework == "trl" and s.sharding in FSDP
    return moved or (place == "optimizer_impl" and s.optimizer_impl == "single")


@pytest.mark.parametrize("framework", JOBS)
def test_every_command_is_read_back_into_its_scenario(framework: str) -> None:
    count = 0
    for s in grid.accepted(JOBS[framework](), every=97):
        try:
            fields = stated(s)
        except LaunchError:
            continue
        for place, value in fields.items():
            if place in ("roles.reference", "roles.reward"):
                assert s.has(place.removeprefix("roles.")) == (value != "none"), place
                continue
            if not one_switch(s, place):
                grid.same({place: value}, s)
        count += 1
    assert count > 60


def test_commands_for_verls_megatron_engine_are_read_back() -> None:
    """One job in 13: 13 divides no axis of the grid, and every two of its values still meet."""
    count = 0
    for s in grid.accepted(grid.verl_megatron(), every=13):
        fields = stated(s)
        assert {"sharding", "tensor_parallel", "expert_parallel", "offload.optimizer"} <= set(fields)
        for place, value in fields.items():
            if place != "roles.reference":
                grid.same({place: value}, s)
        count += 1
    assert count > 20


def test_commands_of_slime_are_read_back() -> None:
    """One job in 7: 7 divides no axis of the grid, and every two of its values still meet."""
    count = 0
    for s in grid.accepted(grid.slime(), every=7):
        fields = stated(s)
        assert {"task", "tensor_parallel", "expert_parallel", "checkpointing", "global_batch"} <= set(fields)
        for place, value in fields.items():
            if place not in ("roles.reference", "roles.actor.gpus"):
                grid.same({place: value}, s)
        count += 1
    assert count > 50


SCRIPT = """\
source "${SCRIPT_DIR}/models/qwen3-30B-A3B.sh"
CKPT_ARGS=(
   --hf-checkpoint /models/Qwen3-30B-A3B
   #--hf-checkpoint /models/Qwen3-30B-A3B-FP8
)
ROLLOUT_ARGS=(
   --rollout-batch-size 32
   --n-samples-per-prompt 8   # a group
   --rollout-max-response-len 8192
)
PERF_ARGS=(
   --tensor-model-parallel-size 4
   --expert-model-parallel-size 8

   --recompute-granularity full
   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 20480
)
WANDB_ARGS=(
   # --use-wandb
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)
   --sglang-mem-fraction-static 0.6
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   "${ROLLOUT_ARGS[@]}" \
   ${WANDB_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${SGLANG_ARGS[@]}
"""


def test_flags_in_arrays_of_a_script_are_read_where_they_are_used() -> None:
    """Comments are none, an empty array ends no line, and one that another file sets stays unknown."""
    found = read(SCRIPT, CATALOG)
    assert found.fields == {
        "framework": "slime", "task": "grpo", "model": "qwen3-30b-a3b", "gpus": 8, "tensor_parallel": 4,
        "expert_parallel": 8, "checkpointing": "full", "max_tokens_per_gpu": 20480, "response_len": 8192,
        "rollout.batch": 32, "rollout.n": 8, "rollout.tensor_parallel": 8, "rollout.gpu_memory_utilization": 0.6,
    }  # fmt: skip
    assert found.unread == []


def test_commands_of_megatron_swift_are_read_back() -> None:
    """All but the layers of stages, which a command says of the first and the last alone."""
    count = 0
    for s in grid.accepted(grid.trainer("megatron-swift"), every=5):
        found = read(launch(s).command, CATALOG)
        of_stages = "decoder_(first|last)_pipeline_num_layers|account_for_(embedding|loss)_in_pipeline_split"
        assert all(re.fullmatch(of_stages, name) for name in found.unread)
        fields = {name: value for name, value in found.fields.items() if name not in UNSTATED}
        assert fields.keys() >= {"method", "checkpointing", "loss", "expert_parallel", "virtual_pipeline"} - {
            "virtual_pipeline" if s.virtual_pipeline == 1 else ""
        }
        assert {*fields.pop("recompute_modules", ())} == s.recomputed
        grid.same(fields, s)
        count += 1
    assert count > 100


def test_an_older_command_of_megatron_swift_has_names_of_its_own() -> None:
    text = (
        "NPROC_PER_NODE=8 NNODES=2 megatron sft --model Qwen/Qwen3-8B --train_type lora --lora_rank 32 "
        "--target_modules linear_qkv linear_proj --recompute_granularity selective --recompute_modules core_attn mlp "
        "--num_virtual_stages_per_pipeline_rank 2 --pipeline_model_parallel_size 2 --moe_permute_fusion true"
    )
    found = read(text, CATALOG)
    said = {
        "trainer": "megatron-swift", "task": "sft", "gpus": 16, "gpus_per_node": 8, "method": "lora", "lora.rank": 32,
        "lora.targets": ["linear_qkv", "linear_proj"], "checkpointing": "selective", "pipeline_parallel": 2,
        "recompute_modules": ["core_attn", "mlp"], "virtual_pipeline": 2, "model": "qwen3-8b",
    }  # fmt: skip
    assert said.items() <= found.fields.items()
    assert not found.unread


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--attention_backend unfused --padding_free false", {"attention": "eager", "padding_free": False}),
        ("--attention_backend flash", {}),
        ("--tuner_type lora --target_modules linear_qkv --mtp_num_layers 1", {"mtp_num_layers": 1}),
        (
            "--recompute_granularity full --recompute_method uniform --recompute_num_layers 2",
            {"recompute_num_layers": 2},
        ),
    ],
)
def test_attention_without_a_kernel_and_further_depths_are_read_back(flags: str, said: dict[str, Any]) -> None:
    found = read(f"megatron sft --model zai-org/GLM-4.5-Air --recompute_granularity full {flags}", CATALOG)
    assert {"model": "glm-4.5-air", "checkpointing": "full", **said}.items() <= found.fields.items()
    assert not found.unread and ("attention" in found.fields) is ("attention" in said)


def test_an_older_command_names_megatrons_configuration() -> None:
    """Until 0.8 by `--config-name`, with `grad_offload` beside, which decides nothing, and overrides behind a plus."""
    text = (
        "python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' "
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B trainer.n_gpus_per_node=8 algorithm.adv_estimator=grpo "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=16 "
        "actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.actor.megatron.grad_offload=True "
        "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full"
    )
    found = read(text, CATALOG)
    said = {"sharding": "megatron", "tensor_parallel": 2, "checkpointing": "full", "offload.parameters": True}
    assert said.items() <= found.fields.items()


def test_the_settings_that_decide_memory_are_among_those_read_back() -> None:
    needed = {"task", "model", "gpus", "sharding", "micro_batch", "checkpointing", "attention", "offload.optimizer"}
    for framework, drawn in JOBS.items():
        for s in itertools.islice(grid.accepted(drawn(), every=997), 8):
            try:
                fields = stated(s)
            except LaunchError:
                continue
            one = {"max_tokens_per_gpu"} & set(fields)
            missing = needed - set(fields) - ({"micro_batch"} if one else set()) - {"offload.optimizer"}
            if s.sharding == "none" or framework == "verl":
                missing -= {"sharding"}
            assert not missing, (framework, missing, s)


def test_the_program_that_a_launcher_starts_is_no_part_of_the_number_before_it() -> None:
    text = "torchrun --nproc_per_node 4 train.py --model_name_or_path Qwen/Qwen2.5-7B --target_modules q_proj v_proj"
    found = read(f"{text} --use_peft --lora_r 8 --per_device_train_batch_size 2", CATALOG)
    assert {"gpus": 4, "lora.targets": ["q_proj", "v_proj"], "micro_batch": 2}.items() <= found.fields.items()


def test_an_optimizer_that_is_a_switch_is_read_and_none_is_passed_over() -> None:
    """LLaMA-Factory's use_muon is one that is known, use_adam_mini one that is not."""
    yaml = (
        "model_name_or_path: Qwen/Qwen2-1.5B-Instruct\nstage: sft\nfinetuning_type: full\n{}: true\ncutoff_len: 2048\n"
    )
    known, unknown = (read(yaml.format(switch), CATALOG) for switch in ("use_muon", "use_adam_mini"))
    assert known.fields["optimizer"] == "muon" and "use_muon" not in known.unread
    assert "optimizer" not in unknown.fields and unknown.unread == ["use_adam_mini"]


def test_ms_swifts_galore_is_written_and_read() -> None:
    job = {"model": "qwen2.5-7b", "task": "sft", "framework": "torch", "trainer": "ms-swift", "gpu": "h100-sxm"}
    found = stated(parse(job | {"optimizer": "galore", "galore_rank": 64}, catalog=CATALOG))
    assert (found["optimizer"], found["galore_rank"]) == ("galore", 64)


def test_ms_swifts_gpus_that_share_sequences_are_read_with_the_chunks_of_their_loss() -> None:
    """sequence_parallel_size, and CELOSS_PARALLEL_SIZE before the command: two groups of GPUs, 4 sequences each."""
    job = {
        "model": "qwen2.5-3b", "task": "sft", "framework": "torch", "trainer": "ms-swift", "gpu": "a100-80-sxm",
        "gpus": 8, "context_parallel": 4, "attention": "flash", "padding_free": True, "micro_batch": 4,
        "loss": "chunked", "loss_chunk_size": 2048,
    }  # fmt: skip
    found = stated(parse(job, catalog=CATALOG))
    said = {"gpus": 8, "context_parallel": 4, "loss": "chunked", "loss_chunk_size": 2048, "global_batch": 8}
    assert said.items() <= found.items()
    alone = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-3B --sequence_parallel_size 1 --packing true"
    assert not {"context_parallel", "loss"} & set(read(alone, CATALOG).fields)


def test_megatron_swifts_muon_is_written_and_read() -> None:
    job = {
        "model": "qwen2.5-7b", "task": "sft", "framework": "torch", "trainer": "megatron-swift", "gpu": "h100-sxm",
        "gpus": 2, "tensor_parallel": 2, "sequence_parallel": True,
    }  # fmt: skip
    assert stated(parse(job | {"optimizer": "muon"}, catalog=CATALOG))["optimizer"] == "muon"
    assert "optimizer" not in stated(parse(job, catalog=CATALOG))
    assert read("megatron sft --model Qwen/Qwen2.5-7B --optimizer adam", CATALOG).fields["optimizer"] == "adamw"
