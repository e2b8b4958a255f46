"""Launch commands by hand, in a shell, and field by field."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import grid
import pytest
import yaml

from calc.base.optimizers import OPTIMIZERS
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.launch import SPELLERS, LaunchError, launch
from calc.launch.shell import Launch, Placeholder, nodes_of
from calc.resolve.parse import parse
from calc.scenario.rules import flatten
from calc.scenario.scenario import SCHEMA, ScenarioError

HYBRID = """\
python3 \\
  -m openrlhf.cli.train_ppo_ray \\
  --actor.num_nodes 1 \\
  --actor.num_gpus_per_node 8 \\
  --critic.num_nodes 1 \\
  --critic.num_gpus_per_node 8 \\
  --ref.num_nodes 1 \\
  --ref.num_gpus_per_node 8 \\
  --reward.num_nodes 1 \\
  --reward.num_gpus_per_node 8 \\
  --train.colocate_all \\
  --actor.model_name_or_path meta-llama/Meta-Llama-3-8B \\
  --critic.model_name_or_path "${REWARD_MODEL:?a reward model made of meta-llama/Meta-Llama-3-8B}" \\
  --reward.model_name_or_path "${REWARD_MODEL:?a reward model made of meta-llama/Meta-Llama-3-8B}" \\
  --algo.kl.init_coef 0.01 \\
  --data.prompt_dataset "${DATASET:?name or path of the prompts}" \\
  --data.max_len 2048 \\
  --rollout.max_new_tokens 1024 \\
  --rollout.batch_size 1024 \\
  --rollout.n_samples_per_prompt 1 \\
  --rollout.micro_batch_size 1 \\
  --algo.advantage.estimator gae \\
  --train.micro_batch_size 1 \\
  --train.batch_size 128 \\
  --ds.zero_stage 3 \\
  --ds.param_dtype bf16 \\
  --ds.grad_accum_dtype bf16 \\
  --ds.attn_implementation flash_attention_2 \\
  --ds.packing_samples \\
  --ds.lora.rank 0 \\
  --actor.gradient_checkpointing_enable \\
  --actor.optim adam \\
  --critic.optim adam \\
  --vllm.num_engines 4 \\
  --vllm.tensor_parallel_size 2 \\
  --vllm.gpu_memory_utilization 0.5 \\
  --vllm.enable_sleep \\
  --ds.enable_sleep"""

SFT = """\
deepspeed \\
  --num_nodes 1 \\
  --num_gpus 8 \\
  --module openrlhf.cli.train_sft \\
  --model.model_name_or_path meta-llama/Meta-Llama-3-8B \\
  --data.dataset "${DATASET:?name or path of the training data}" \\
  --data.max_len 4096 \\
  --train.micro_batch_size 2 \\
  --train.batch_size 256 \\
  --ds.zero_stage 2 \\
  --ds.param_dtype bf16 \\
  --ds.grad_accum_dtype bf16 \\
  --ds.attn_implementation flash_attention_2 \\
  --ds.packing_samples \\
  --ds.lora.rank 0 \\
  --model.gradient_checkpointing_enable \\
  --optim adam"""


def command(**fields: Any) -> Launch:
    """The command for Llama 3 8B on A100s with these fields; `__` in a name is a dot."""
    given = {name.replace("__", "."): value for name, value in fields.items()}
    return launch(parse({**grid.BASE, "gpus": 8} | given))


def test_openrlhf_writes_the_readme_of_0_11_2() -> None:
    """The sft example and the hybrid-engine template of its README, but for what decides no memory.

    Where the README's words are those of older releases (--actor.model_name_or_path for sft, --prompt_max_len), the
    command has what train_sft.py and train_ppo_ray.py of 0.11.2 take. Of dynamic batches no scenario knows.
    """
    packed = {"packing": True, "checkpointing": "full"}
    s = command(framework="openrlhf", task="sft", seq_len=4096, micro_batch=2, global_batch=256, **packed)
    assert s.command == SFT
    rollout = {"tensor_parallel": 2, "gpu_memory_utilization": 0.5, "sleep": True}
    s = command(framework="openrlhf", task="ppo", sharding="zero3", rollout=rollout, **packed)
    assert s.command == HYBRID


def test_verl_counts_prompts_of_a_mini_batch() -> None:
    """256 sequences of 4 for each prompt are a mini batch of 64; a batch that cuts a group has no command."""
    batch = {"rollout__batch": 128, "rollout__n": 4, "micro_batch": 2}
    words = command(framework="verl", task="grpo", global_batch=256, **batch).command.split()
    assert "actor_rollout_ref.actor.ppo_mini_batch_size=64" in words
    assert "data.train_batch_size=128" in words
    with pytest.raises(LaunchError, match=r"^global_batch: given 48, allowed with verl: a multiple of rollout.n = 5"):
        command(framework="verl", task="grpo", global_batch=48, rollout__n=5, rollout__batch=128, micro_batch=1)


def test_trl_writes_the_accelerate_file_of_the_package() -> None:
    """Beside trl/accelerate_configs/zero3.yaml and fsdp2.yaml of 1.16.0: what is left out there has no effect here."""
    zero3 = yaml.safe_load(command(framework="trl", task="sft", sharding="zero3").files["accelerate.yaml"])
    assert zero3["deepspeed_config"] == {
        "deepspeed_multinode_launcher": "standard",
        "gradient_accumulation_steps": 1,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    }
    fsdp2 = yaml.safe_load(command(framework="trl", task="sft", sharding="fsdp2").files["accelerate.yaml"])
    assert fsdp2 == {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_activation_checkpointing": False,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": False,
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_version": 2,
        },
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def test_trl_says_gradients_in_fp32_in_a_file_of_deepspeed() -> None:
    found = command(framework="trl", task="sft", sharding="zero2", grad_dtype="fp32", micro_batch=2, global_batch=32)
    own = json.loads(found.files["deepspeed.json"])
    assert own["data_types"] == {"grad_accum_dtype": "fp32"}
    assert (own["train_micro_batch_size_per_gpu"], own["gradient_accumulation_steps"]) == (2, 2)
    settings = yaml.safe_load(found.files["accelerate.yaml"])
    assert settings["deepspeed_config"]["deepspeed_config_file"] == "deepspeed.json"


def test_sizes_of_deepspeeds_configuration_are_in_its_file() -> None:
    sizes = {"max_live_parameters": 10**8, "sub_group_size": 10**7}
    given = {"framework": "torch", "trainer": "llamafactory", "task": "sft", "sharding": "zero3", **sizes}
    own = json.loads(command(**given).files["deepspeed.json"])["zero_optimization"]
    assert (own["stage3_max_live_parameters"], own["sub_group_size"]) == (10**8, 10**7)


def test_sizes_of_buckets_are_in_the_file_of_deepspeed() -> None:
    """`auto` of Llama 3.1 8B, whose width is 4096: its square, nine tenths of that, and ten times the width."""
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    given = {"framework": "trl", "task": "sft", "sharding": "zero3", **dict.fromkeys(names, "auto")}
    own = json.loads(command(**given).files["deepspeed.json"])["zero_optimization"]
    assert [own[name] for name in names] == [4096 * 4096, int(0.9 * 4096 * 4096), 40_960]


def test_a_vllm_server_of_trl_has_the_last_gpus_of_the_node_or_another_node() -> None:
    apart: dict[str, Any] = {"framework": "trl", "task": "grpo", "placement": "separate", "micro_batch": 4}
    found = command(**apart, rollout__gpus=2, rollout__tensor_parallel=2, global_batch=24).command
    server, trainer = found.split(" &\n")
    assert server.startswith("CUDA_VISIBLE_DEVICES=6,7 trl vllm-serve \\\n")
    assert trainer.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 trl grpo \\\n")
    two = command(**apart, gpus=16, gpus_per_node=8, rollout__gpus=8, rollout__tensor_parallel=8, global_batch=32)
    assert two.command.startswith("trl grpo \\\n")
    assert two.files["vllm_server.sh"].startswith("trl vllm-serve \\\n")
    assert any("vllm_server.sh" in note for note in two.notes)
    for gpus, served, tp in ((16, 4, 4), (32, 16, 16)):  # no node is free of the trainer; one node is not enough
        with pytest.raises(LaunchError, match=rf"^rollout.gpus: given {served} beside a trainer on 2 of "):
            fields = {"gpus": gpus, "gpus_per_node": 8, "rollout__gpus": served, "rollout__tensor_parallel": tp}
            command(**apart, **fields, global_batch=4 * (gpus - served) * 2)
    with pytest.raises(LaunchError, match=r"^rollout.tensor_parallel: given 1 on 2 GPUs"):
        command(**apart, rollout__gpus=2, rollout__tensor_parallel=1, global_batch=24)


@pytest.mark.parametrize(
    ("gpus", "per_node", "nodes"), [(8, 8, (1, 8)), (12, 8, (2, 6)), (9, 8, (3, 3)), (7, 4, (7, 1))]
)
def test_a_group_of_gpus_lies_evenly_on_as_few_nodes_as_can_hold_it(
    gpus: int, per_node: int, nodes: tuple[int, int]
) -> None:
    assert nodes_of(gpus, per_node) == nodes


# ---------------------------------------------------------------------------------------------------------- the shell

ECHO = """\
deepspeed() { printf '%s\\n' "$@"; }
python3() { deepspeed "$@"; }
trl() { deepspeed "$@"; }
"""
TWO_NODES = {"gpus": 16, "gpus_per_node": 8}
RL = {"micro_batch": 2, "global_batch": 64, "rollout__batch": 64, "rollout__n": 4}
SHELLS = [path for path in map(shutil.which, ("bash", "dash")) if path]
JOBS: tuple[dict[str, Any], ...] = (
    {"framework": "openrlhf", "task": "sft", "method": "lora", "lora__targets": ["q_proj", "v_proj"], **TWO_NODES},
    {"framework": "openrlhf", "task": "ppo", **RL},
    {
        "framework": "verl",
        "task": "ppo",
        "method": "lora",
        "lora__targets": ["q_proj"],
        "optimizer_impl": "fused",
        **RL,
    },
    {"framework": "trl", "task": "grpo", "rollout__engine": "vllm", **TWO_NODES, **RL},
)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("fields", JOBS, ids=lambda fields: f"{fields['framework']}-{fields['task']}")
def test_a_shell_takes_the_command_and_stops_where_a_variable_is_not_set(shell: str, fields: dict[str, Any]) -> None:
    """With every variable set the program gets the words that the other tests read; with one missing, nothing runs."""
    text = command(**fields).command
    [words] = grid.processes(text)
    names = sorted({word.partition("${")[2].partition("}")[0] for word in words if "${" in word})
    assert names
    for missing in ["", *names]:
        given = {name: f"a value of {name}" for name in names if name != missing}
        done = subprocess.run([shell, "-c", ECHO + text], capture_output=True, text=True, env={"PATH": "", **given})
        if missing:
            assert done.returncode and not done.stdout
            assert missing in done.stderr
        else:
            expected = [word.replace("${", "a value of ").replace("}", "") if "${" in word else word for word in words]
            assert done.stdout.splitlines() == expected[1:]


def test_a_message_cannot_end_its_placeholder() -> None:
    assert Placeholder("X", 'it\'s "$(rm)" `x` \\ }{') == '"${X:?its (rm) x  }"'


# ------------------------------------------------------------------------------------------------------ field by field

# What each field becomes; jobs are the first of its framework that can have it. Roles are described by the same fields.
CHANGES: dict[str, Any] = {
    "model": "qwen2.5-7b", "gpus": 4, "method": "lora", "double_quantization": "other", "lora.rank": 8,
    "load_in_8bit": {"method": "qlora", "load_in_8bit": True},
    "no_sync": False, "lora.targets": ["o_proj"], "lora.dropout": 0.25,
    "lora.modules_to_save": ["lm_head"], "lora.init": "olora", "lora.dora": True, "lora.dtype": "other",
    "precision": "bf16",
    "optimizer": "sgd", "optimizer_impl": "other", "sharding": "other", "offload.optimizer": True,
    "offload.parameters": True, "offload.activations": True, "grad_dtype": "fp32",
    "checkpointing": "other", "reentrant": {"checkpointing": "full", "reentrant": True},
    "attention": "sdpa", "kernels": "liger", "logprob": "selective", "micro_batch": 4,
    "global_batch": 128, "seq_len": 777, "prompt_len": 777, "response_len": 777, "expected_len": 99, "packing": True,
    "padding_free": {"padding_free": True, "attention": "flash"}, "group_by_length": True,
    "rollout.engine": "hf", "rollout.tensor_parallel": 4, "rollout.gpu_memory_utilization": 0.4, "rollout.n": 8,
    "rollout.sleep": "other", "rollout.layered_summon": True, "rollout.enforce_eager": True,
    "rollout.micro_batch": 8, "rollout.batch": 128,
    "max_tokens_per_gpu": 16_384, "entropy_coeff": 0.01, "entropy_from_logits_with_chunking": True,
    "on_policy": 0.25, "sft_alpha": 0.1,
    "rollout.max_model_len": 4096, "rollout.max_num_seqs": 512, "rollout.max_num_batched_tokens": 4096,
    "rollout.max_tokens_per_gpu": {"max_tokens_per_gpu": 16_384, "rollout.max_tokens_per_gpu": 32_768},
    "rollout.gpus": 6, "gpus_per_node": 4, "rollout.expected_len": 99,
    "rollout.offload_model": True, "rollout.offload_optimizer": True, "rollout.move_model_batches": 8,
    "rollout.fullest_len": {"expected_len": 99, "rollout.fullest_len": 199},
    "cpu_threads": 7, "expandable_segments": "other", "pinned_max_round_threshold_mb": 64,
    "placement": {"placement": "separate", "rollout.gpus": 4},
    "context_parallel": {"context_parallel": 2, "packing": True, "attention": "flash"},
    "roles.reference": "none", "roles.reward": "none", "roles.reference.precision": "bf16",
    "roles.reference.micro_batch": 1, "roles.reference.offload.parameters": True, "roles.reward.model": "llama-3.2-1b",
    "roles.critic.model": "llama-3.2-1b", "roles.critic.gpus": 2, "roles.critic.micro_batch": 1,
    "roles.critic.sharding": "fsdp2", "roles.critic.global_batch": 32, "versions.transformers": "5.0",
    "roles.reference.model": "llama-3.2-1b", "roles.reference.attention": "eager", "roles.reference.sharding": "fsdp2",
}  # fmt: skip
OTHERS = {
    "sharding": ("zero1", "zero2", "zero3", "fsdp1", "fsdp2"), "checkpointing": ("none", "full"),
    "optimizer_impl": ("fused", "foreach", "single"), "lora.dtype": ("fp32", "bf16"), "rollout.sleep": (True, False),
    "expandable_segments": (True, False), "double_quantization": (True, False),
}  # fmt: skip
# The machine itself and the kernels installed on it, the data's lengths, the framework, parallelism that is not
# modelled, losses, in which nobody here has a choice, an engine that the vLLM of these releases has not, and images,
# which none of these models reads: `tests/scenario/test_images.py`
NOT_CHANGED = {
    "gpu", "framework", "trainer", "task", "tensor_parallel", "pipeline_parallel", "pipeline_layers",
    "virtual_pipeline", "sequence_parallel", "expert_parallel", "expert_tensor_parallel", "expert_imbalance",
    "expert_capacity", "expert_padding", "loss_chunk_size", "output_hidden_states", "checkpointed_layers",
    "host_memory", "offload.fraction", "offload.masters",
    "use_precision_aware_optimizer", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "loss", "lora.units", "lora.count", "lora.ia3", "qat_scheme", "quantize_moe_experts", "checkpoint_gb",
    "lora.ref_adapter",
    "vision_tower",
    "apply_rope_fusion",
    "cp_comm_type", "cross_entropy_fusion_impl",
    "create_attention_mask_in_dataloader", "data_parallel_sharding_strategy",
    "async_tensor_parallel", "memory_efficient_linear", "zero_init", "max_live_parameters", "sub_group_size",
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "optimizer_in_backward",
    "recompute_modules", "recompute_num_layers", "mtp_num_layers", "compile", "float8", "float8_all_gather",
    "fp8_param_gather",
    "bf16_layers_at_end", "linear_attention", "outputs_kept", "outputs_fp32", "loss_fp32",
    "experts_implementation", "outer_units", "reshard_after_forward", "data_parallel_replicate", "device_map",
    "device_map_gpus", "galore_rank",
    "rollout.v0", "lengths.mean", "lengths.longest", "lengths.samples", "lengths.counts",
    "lengths.data", "lengths.deviation", "lengths.shortest", "lengths.prompt",
    "images.count", "images.width", "images.height", "images.min_pixels", "images.max_pixels", "images.frames",
    "images.freeze", "images.checkpointing", "images.train_whole",
}  # fmt: skip
STARTS: tuple[dict[str, Any], ...] = (
    {"framework": "openrlhf", "task": "sft", "micro_batch": 2, "global_batch": 64},
    {"framework": "openrlhf", "task": "dpo", "micro_batch": 2, "global_batch": 64, "method": "lora"},
    {"framework": "openrlhf", "task": "ppo", **RL},
    {"framework": "openrlhf", "task": "ppo", "placement": "separate", "rollout__gpus": 4, **RL},
    {"framework": "verl", "task": "ppo", "roles__reference": {}, **RL},
    {"framework": "verl", "task": "ppo", "method": "lora", **RL},
    {"framework": "trl", "task": "sft", "sharding": "zero2", "micro_batch": 2, "global_batch": 64},
    {"framework": "trl", "task": "sft", "sharding": "fsdp2", "method": "lora", "micro_batch": 2, "global_batch": 64},
    {"framework": "trl", "task": "sft", "method": "qlora", "micro_batch": 2, "global_batch": 64},
    {"framework": "trl", "task": "dpo", "sharding": "zero3", "micro_batch": 2, "global_batch": 64},
    {"framework": "trl", "task": "grpo", "rollout__engine": "vllm", "roles__reference": {}, **RL},
    {"framework": "torch", "trainer": "ms-swift", "task": "gkd", "micro_batch": 2, "global_batch": 64},
    {"framework": "torch", "trainer": "ms-swift", "task": "grpo", "sharding": "zero3", "rollout__engine": "vllm", **RL},
)


def leaves(schema: dict[str, Any], above: str = "") -> set[str]:
    """The dotted fields of the scenario's schema, but those of roles and versions."""
    found = set()
    for name, inner in schema["properties"].items():
        if name not in ("roles", "versions"):
            found |= leaves(inner, f"{above}{name}.") if "properties" in inner else {above + name}
    return found


def test_every_field_of_a_scenario_is_tried() -> None:
    told = {place for place in CHANGES if not place.startswith(("roles.", "versions."))}
    assert told == leaves(SCHEMA) - NOT_CHANGED


# What only a note says, whatever the framework
NOTED = {
    "expected_len", "rollout.expected_len", "rollout.fullest_len", "logprob", "lora.dtype", "lora.init",
    "versions.transformers", "roles.reference.attention",
}  # fmt: skip


def altered(start: dict[str, Any]) -> set[str]:
    """The fields whose other values make another command or file; the others must have a note that names them."""
    given = {**grid.BASE, "gpus": 8} | {name.replace("__", "."): value for name, value in start.items()}
    before = parse(given)
    plain, now, found = launch(before), flatten(before.as_dict()), set()
    for place, value in CHANGES.items():
        values = [other for other in OTHERS[place] if other != now.get(place)] if value == "other" else [value]
        data = dict(given)
        if place.startswith("roles.") and place.count(".") > 1:
            data.pop(".".join(place.split(".")[:2]), None)  # {} and a field in it are one
        for other in values:
            try:
                after = parse(data | (other if isinstance(other, dict) else {place: other}))
                changed = launch(after)
            except (ScenarioError, LaunchError):
                continue
            if after == before:
                continue
            if (changed.command, changed.files) != (plain.command, plain.files):
                found.add(place)
            else:
                notes = "".join(note for note in changed.notes if note not in plain.notes)
                assert place.rpartition(".")[2] in notes, f"{place}: {other!r}"
    return found


def test_another_value_of_a_field_is_another_command() -> None:
    """Where the framework refuses a value there is no command; somewhere every field has one, but those of `NOTED`."""
    assert set().union(*map(altered, STARTS)) == set(CHANGES) - NOTED


VARIABLE = "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64 "
NEWER = {"versions.torch": "2.13", "versions.vllm": "0.27"}  # verl's own are older


@pytest.mark.parametrize(
    "fields",
    [
        {"framework": "openrlhf", "task": "sft"},
        {"framework": "trl", "task": "dpo"},
        {"framework": "verl", "task": "grpo", **RL, **NEWER},
        {"framework": "torch", "trainer": "llamafactory", "task": "sft"},
        {"framework": "torch", "trainer": "axolotl", "task": "sft", "expandable_segments": False},
    ],
)
def test_blocks_that_are_not_rounded_are_not_cached_either(fields: dict[str, Any]) -> None:
    """One size for both: torch 2.13 hands out any block of the same power of two (pytorch/pytorch#192722)."""
    made = command(**fields, pinned_max_round_threshold_mb=64)
    assert VARIABLE in made.command
    assert not any("set PYTORCH_ALLOC_CONF yourself" in note for note in made.notes)
    assert any(note.startswith("pinned_max_cached_size_mb stands beside") for note in made.notes)
    assert VARIABLE not in command(**fields).command


def test_on_several_nodes_the_variable_is_set_where_ray_starts() -> None:
    """Ray's workers have the environment of the raylet that starts them, and not the command's."""
    rl = {"framework": "openrlhf", "task": "ppo", "gpus": 16, "gpus_per_node": 8, **RL}
    said, silent = ("\n".join(command(**rl, **more).notes) for more in ({"pinned_max_round_threshold_mb": 64}, {}))
    assert "PYTORCH_ALLOC_CONF set there as for the command" in said
    assert "ray start" in silent and "PYTORCH_ALLOC_CONF" not in silent


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({"framework": "trl", "task": "sft", "gpus": 1}, 1),
        ({"framework": "openrlhf", "task": "sft"}, None),
        ({"framework": "openrlhf", "task": "ppo", "rollout.batch": 64}, 1),
        ({"framework": "torch", "trainer": "llamafactory", "task": "sft"}, 1),
        ({"framework": "torch", "trainer": "torchtune", "task": "sft", "sharding": "fsdp2"}, None),
        ({"framework": "torch", "trainer": "axolotl", "task": "sft"}, 1),
    ],
)
def test_threads_are_set_where_the_launcher_leaves_others(fields: dict[str, Any], own: int | None) -> None:
    """torchrun, accelerate and Ray leave a rank one, DeepSpeed's launcher and torchtune as many as there are cores."""
    assert parse({**grid.BASE, "gpus": 8} | fields).cpu_threads == own
    assert "OMP_NUM_THREADS" not in command(**fields).command
    assert command(**fields, cpu_threads=7).command.startswith("OMP_NUM_THREADS=7 ")
    if own:
        assert "OMP_NUM_THREADS" not in command(**fields, cpu_threads=own).command


def test_one_variable_says_all_that_the_allocator_is_told() -> None:
    """PYTORCH_CUDA_ALLOC_CONF is not read where PYTORCH_ALLOC_CONF is set (c10/core/AllocatorConfig.h of 2.13)."""
    made = command(framework="trl", task="sft", expandable_segments=True, pinned_max_round_threshold_mb=64)
    assert VARIABLE.replace("=", "=expandable_segments:True,") in made.command
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made.command


@pytest.mark.parametrize("trainer", ["llamafactory", "ms-swift", "axolotl"])
def test_no_note_says_that_a_trainer_runs_nothing(trainer: str) -> None:
    """Once 'kernels eager: llamafactory has no flag for it, and runs None' below a plain job."""
    job = {"model": "qwen2.5-7b", "task": "sft", "gpu": "a100-80-sxm", "gpus": 4, "sharding": "zero2"}
    notes = launch(parse(job | {"trainer": trainer})).notes
    assert not any("None" in note or "kernels" in note for note in notes)


def test_what_no_flag_says_is_noted() -> None:
    def notes(**fields: Any) -> str:
        return "\n".join(command(**fields).notes)

    rl = {**RL, "framework": "openrlhf", "task": "ppo"}
    assert "optimizer_impl foreach: openrlhf has no flag for it, and runs fused" in notes(
        framework="openrlhf", task="sft", optimizer_impl="foreach"
    )
    assert "logprob selective" in notes(framework="openrlhf", task="dpo", logprob="selective")
    assert "roles.reference.micro_batch 1: openrlhf has no flag for it, and runs 2" in notes(
        **rl, roles__reference={"micro_batch": 1}
    )
    assert "roles.critic.global_batch 32" in notes(**rl, roles__critic={"global_batch": 32})
    assert "lora.dropout 0.5: verl has no flag" in notes(
        framework="verl", task="grpo", method="lora", lora__dropout=0.5, **RL
    )
    assert "one switch for offload" in notes(framework="trl", task="sft", sharding="fsdp2", offload__optimizer=True)
    dpo = {"framework": "trl", "task": "dpo", "sharding": "fsdp2", "roles__reference": "none"}
    assert "under FSDP TRL loads a reference" in notes(**dpo)
    assert "under FSDP TRL loads a reference" not in notes(**dpo, method="lora")
    assert "has no flag" not in notes(framework="openrlhf", task="sft")
    for framework, task in (("openrlhf", "ppo"), ("trl", "grpo")):
        assert "has no flag" not in notes(framework=framework, task=task, roles__reward={"model": "llama-3.2-1b"}, **RL)
    assert "expected_len 100 is the mean" in notes(framework="openrlhf", task="sft", expected_len=100)
    lengths = {"mean": 100, "longest": 300}
    assert "100 tokens on average, 300 at most: your data's" in notes(framework="openrlhf", task="sft", lengths=lengths)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"framework": "torch"},
            "framework: given torch, which has no command, allowed: openrlhf, verl, trl, slime, or a trainer: "
            "llamafactory, axolotl, ms-swift, torchtune, torchtitan, unsloth, megatron-swift",
        ),
        (
            {"framework": "torch", "trainer": "ms-swift", "versions__ms-swift": "3.9"},
            "versions.ms-swift: given ms-swift==3.9, whose flags differ, allowed: ms-swift==4",
        ),
        (
            {"framework": "torch", "trainer": "llamafactory", "task": "dpo", "roles__reference": "none"},
            "roles.reference: given 'none' for dpo, allowed: a reference, which a command of llamafactory always loads",
        ),
        (
            {"framework": "torch", "trainer": "torchtitan", "task": "pretrain", "model": "llama-3.1-8b",
             "optimizer_in_backward": True},
            "optimizer_in_backward: given true, allowed for a command of torchtitan: false",
        ),
        (
            {"framework": "torch", "trainer": "torchtitan"},
            "task: given 'sft', allowed for a command of torchtitan: pretrain; its registry has one configuration for "
            "chats, of Qwen3 8B, and another would be code of your own",
        ),
        (
            {"framework": "torch", "trainer": "torchtune", "model": "yi-6b"},
            "model: given 'yi-6b' with method full, allowed for a command of torchtune: llama-3-8b, llama-3.1-8b, "
            "llama-3.2-1b, llama-3.2-3b, qwen2-0.5b, qwen2-1.5b, qwen2-7b, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, "
            "qwen2.5-7b, llama-3-70b, llama-3.1-70b",
        ),
        (
            {"framework": "openrlhf==0.6.1"},
            "framework: given openrlhf==0.6.1, whose flags differ, allowed: openrlhf==0.11",
        ),
        (
            {"framework": "verl==0.8", "task": "grpo", **RL},
            "framework: given verl==0.8.0, whose flags differ, allowed: verl==0.9",
        ),
        (
            {"framework": "verl", "task": "grpo", "rollout__engine": "none", **RL},
            "rollout.engine: given 'none', allowed for a command of verl: vllm",
        ),
        (
            {"framework": "openrlhf", "task": "ppo", "rollout__engine": "none", **RL},
            "rollout.engine: given 'none', allowed for a command of openrlhf: vllm",
        ),
        (
            {"framework": "openrlhf", "task": "dpo", "roles__reference": "none"},
            "roles.reference: given 'none' for dpo, allowed: a reference, which train_dpo always loads",
        ),
        (
            {"framework": "openrlhf", "task": "ppo", "rollout__micro_batch": 4, "rollout__batch": 16},
            "rollout.batch: given 16, allowed with openrlhf: at least 32, a micro batch of 4 for each of the actor's 8 "
            "GPUs",
        ),
        (
            {"framework": "openrlhf", "task": "ppo", "placement": "separate", "rollout__gpus": 2, **RL,
             "roles__reward": {"gpus": 2}},
            "roles.reward.gpus: given where critic and reference shares the actor's GPUs, allowed with openrlhf: none, "
            "as one flag puts all roles there",
        ),
        (
            {"framework": "trl", "task": "sft", "optimizer": "none"},
            "optimizer: given 'none', allowed for a command of trl: adamw, adamw-8bit, adamw-paged-8bit, adamw-paged, "
            "adamw-torchao-8bit, adafactor, sgd, sgd-momentum, lion",
        ),
    ],
)  # fmt: skip
def test_a_job_without_a_command_is_refused_in_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(LaunchError) as refusal:
        command(**{"task": "sft"} | fields)
    assert str(refusal.value) == line


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("framework", SPELLERS)
def test_an_optimizer_is_spelled_as_its_row_says_or_refused(framework: str, name: str) -> None:
    """A framework that has no word for it must not run another."""
    spelled = getattr(OPTIMIZERS[name].spelled, framework)
    job = {"framework": framework, "task": "grpo" if framework == "slime" else "sft", "optimizer": name}
    if not spelled:
        with pytest.raises((ScenarioError, LaunchError), match=f"optimizer: given {name!r}.*allowed"):
            command(**job)
        return
    said = command(**job).command
    words = [spelled] if isinstance(spelled, str) else [word for word in spelled[OPTIMIZERS[name].usual] if word]
    if framework == "trl" and "fused" in spelled:  # what the Trainer does unasked
        words = [spelled["fused"].optim]
    assert [word for word in words if not re.search(rf"optim\w*[ =]{re.escape(word)}\b", said)] == []


def test_a_model_of_a_config_file_is_a_placeholder(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(load().models["llama-3-8b"].config)), "utf-8")
    found = command(framework="openrlhf", task="sft", model=str(path)).command
    assert f'--model.model_name_or_path "${{MODEL:?the model whose config.json is {path}}}"' in found


@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2", "minimax-m2"])
def test_a_checkpoint_in_fp8_is_named_as_one_that_trains(model: str) -> None:
    """Transformers refuses to fine-tune it as published (5.23 `trainer_utils.py:131`); once the command named it."""
    s = parse({"model": model, "task": "sft", "gpu": "h200", "gpus": 256, "framework": "trl", "sharding": "zero3"})
    made = launch(s).command
    assert " in bf16, as saved after FineGrainedFP8Config" in made
    assert f"--model_name_or_path {load().models[model].hf}" not in made
    assert any("stored as FP8" in note for note in estimate(s).notes)


def test_the_checkpoint_asked_for_is_named_where_it_has_to_be_converted() -> None:
    """DeepSeek R1 has the shapes of V3, whose name once stood in its place."""
    s = parse({"model": "deepseek-v3", "task": "sft", "gpu": "h200", "gpus": 256, "framework": "trl"})
    assert "${MODEL:?deepseek-ai/DeepSeek-R1 in bf16" in launch(s, checkpoint="deepseek-ai/DeepSeek-R1").command


def test_a_checkpoint_in_mxfp4_is_named_as_one_that_trains() -> None:
    """Transformers refuses to train what it loads of gpt-oss as published (quantizers/quantizer_mxfp4.py:209)."""
    s = parse({"model": "gpt-oss-20b", "task": "sft", "gpu": "h100-sxm", "gpus": 8, "framework": "trl"})
    made = launch(s)
    assert "${MODEL:?openai/gpt-oss-20b in bf16" in made.command
    assert "--model_name_or_path openai/gpt-oss-20b" not in made.command
    assert any("MXFP4" in note for note in estimate(s).notes)
