"""Every flag and configuration key that a command has exists in the released package, with a legal value, and says
what the scenario says.

Skipped where the registry cannot be reached. What a package does not hold, or with other values, fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import grid
import pytest
import yaml
from frameworks.released import LOADER
from packages import (
    VERSIONS,
    Hydra,
    Packages,
    accelerate,
    check_accelerate,
    check_deepspeed,
    deepspeed_launcher,
    grad_dtypes,
    openrlhf,
    trl,
    vllm_serve,
)

from calc.catalog.catalog import load
from calc.launch import LaunchError, launch
from calc.launch.shell import Launch
from calc.launch.trl import ACCELERATE, BETA, DEEPSPEED, SERVER
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError

ATTENTION = {"flash_attention_2": "flash", "sdpa": "sdpa", "eager": "eager"}


# Strides without a common divisor with any axis of the grid, so that every value meets every other.
PARTS = [(name, part) for name in ("openrlhf", "verl", "trl") for part in range(2)]
STRIDES = {"openrlhf": 17, "verl": 31, "trl": 31}


def jobs(name: str, part: int) -> Iterator[tuple[Scenario, Launch]]:
    """Every so many jobs of a framework's grid, each with its command where there is one."""
    for i, s in enumerate(grid.accepted(getattr(grid, name)(), STRIDES[name])):
        if i % 2 == part:
            try:
                yield s, launch(s)
            except LaunchError as refusal:
                assert "allowed" in str(refusal)


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_commands_say_the_scenario_in_words_of_the_release(packages: Packages, name: str, part: int) -> None:
    check: Callable[[Packages, Scenario, Launch], dict[str, Any]]
    check = {"openrlhf": check_openrlhf, "verl": check_verl, "trl": check_trl}[name]
    count = 0
    for s, found in jobs(name, part):
        count += 1
        try:
            grid.same(check(packages, s, found), s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{s.as_dict()}\n{found.command}") from None
    assert count > 200


@pytest.mark.parametrize("version", ["0.19.0", "0.24.0", "1.0.0"])
def test_commands_of_earlier_releases_of_trl_are_in_their_words(packages: Packages, version: str) -> None:
    """`--torch_dtype` until 0.22, no `trl reward` until 0.23, no sleep until 0.22."""
    count = 0
    for data in itertools.islice(grid.trl(), 0, None, 97):
        try:
            s = parse({**data, "framework": f"trl=={version}"})
            found = launch(s)
        except (ScenarioError, LaunchError):
            continue
        count += 1
        grid.same(check_trl(packages, s, found), s)
    assert count > 50


def hf(s: Scenario, name: str = "") -> str:
    """The name of the model that the job trains, or of a role's."""
    role = s.role(name) if name else s
    assert role
    return load().models[role.model].hf


# ----------------------------------------------------------------------------------------------------------- OpenRLHF


def check_openrlhf(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a command of OpenRLHF says; both releases of 0.11 must take it."""
    [words] = grid.processes(found.command)
    start = words.index("--module" if words[0] == "deepspeed" else "-m")
    assert words[start + 1].startswith("openrlhf.cli.")
    script, own = words[start + 1].rpartition(".")[2], words[start + 2 :]
    args = [vars(openrlhf(packages.release("openrlhf", v), script).parse_args(own)) for v in VERSIONS["openrlhf"]]
    said = args[-1]
    assert said["data.prompt_dataset" if s.rollout else "data.dataset"] == "${DATASET}"
    assert said["ds.grad_accum_dtype"] in grad_dtypes(packages)
    assert said["ds.lora.target_modules"] == "all-linear" or (s.lora and s.lora.targets != "all-linear")
    dynamic = said.get("train.dynamic_batch_enable", False)
    fields = {
        "max_tokens_per_gpu": said["train.max_tokens_per_gpu"] if dynamic else None,
        "global_batch": said["train.batch_size"],
        "offload.optimizer": said["ds.adam_offload"],
        "grad_dtype": said["ds.grad_accum_dtype"],
        "attention": ATTENTION[said["ds.attn_implementation"]],
        "packing": said["ds.packing_samples"],
        "kernels": "liger" if said.get("ds.use_liger_kernel") else "eager",  # train_rm has none
        "context_parallel": said["ds.ring_attn_size"],
        "seq_len": said["data.max_len"],
        "precision": {"bf16": "mixed"}[said["ds.param_dtype"]],
        "method": "qlora" if said["ds.load_in_4bit"] else "lora" if said["ds.lora.rank"] else "full",
    }
    if not dynamic:
        fields["micro_batch"] = said["train.micro_batch_size"]
    stage = said["ds.zero_stage"]
    assert f"zero{stage}" == s.sharding or (stage == 0 and s.sharding in ("none", "ddp"))
    if s.lora:
        fields |= {
            "lora.rank": said["ds.lora.rank"],
            "lora.targets": said["ds.lora.target_modules"],
            "lora.dropout": said["ds.lora.dropout"],
        }
    return fields | (ray(s, said) if s.rollout else deepspeed(packages, s, said, words[1:start], script))


def deepspeed(
    packages: Packages, s: Scenario, said: Mapping[str, Any], launcher: list[str], script: str
) -> dict[str, Any]:
    """What the launcher and the scripts for one trained model say."""
    options = deepspeed_launcher(packages).parse_args([*launcher, "--module"])
    assert options.module
    assert (options.num_nodes, options.num_gpus * options.num_nodes) == (s.nodes, s.gpus)
    assert script == {"pretrain": "train_sft"}.get(s.task, f"train_{s.task}")
    assert said.get("model.pretrain_mode_enable", False) == (s.task == "pretrain")
    assert (said["model.model_name_or_path"], said["optim"]) == (hf(s), "adam")
    checkpointing = "full" if said["model.gradient_checkpointing_enable"] else "none"
    reference = {}
    if s.task == "dpo":
        assert said["ref.model_name_or_path"] == hf(s, "reference")
        reference = {"roles.reference.offload.parameters": said["ref.offload"]}
    return {"checkpointing": checkpointing, **reference}


def ray(s: Scenario, said: Mapping[str, Any]) -> dict[str, Any]:
    """What train_ppo_ray.py is told."""
    assert s.rollout
    assert said["algo.advantage.estimator"] == {"ppo": "gae", "grpo": "group_norm"}.get(s.task, "reinforce")
    assert said["actor.model_name_or_path"] == hf(s, "actor")
    assert (said["reward.model_name_or_path"] is not None) == s.has("reward") != (said["reward.remote_url"] is not None)
    assert (said["critic.model_name_or_path"] is not None) == s.has("critic")
    assert (said["algo.kl.init_coef"] > 0) == s.has("reference")
    assert said["train.dynamic_batch_enable"] == (s.max_tokens_per_gpu is not None)
    for name in ("actor", "critic", "reference", "reward"):
        if s.has(name):
            flag = "ref" if name == "reference" else name
            assert said[f"{flag}.num_nodes"] * said[f"{flag}.num_gpus_per_node"] == s.gpus_of(s.group(name))
            assert said[f"{flag}.num_gpus_per_node"] <= s.gpus_per_node
    # who lives with whom, as train_ppo_ray.py joins them
    homes = {name: s.group(name) for name in ("critic", "reference", "reward") if s.has(name)}
    every, asynchronous = said["train.colocate_all"], said["train.async_enable"]
    told = dict.fromkeys(homes, "actor") if every else {name: name for name in homes}
    if said["train.colocate_actor_ref"]:
        told["reference"] = "actor"
    if said["train.colocate_critic_reward"]:
        told["reward"] = "critic"
    if s.placement == "separate":
        assert told == homes
        assert not every or asynchronous
    else:
        assert every and not asynchronous
    fields = {
        "checkpointing": "full" if said["actor.gradient_checkpointing_enable"] else "none",
        "response_len": said["rollout.max_new_tokens"],
        "rollout.batch": said["rollout.batch_size"],
        "rollout.n": said["rollout.n_samples_per_prompt"],
        "rollout.tensor_parallel": said["vllm.tensor_parallel_size"],
        "rollout.gpu_memory_utilization": said["vllm.gpu_memory_utilization"],
        "rollout.sleep": said["vllm.enable_sleep"],
        "rollout.enforce_eager": said["vllm.enforce_eager"],
        "rollout.gpus": said["vllm.num_engines"] * said["vllm.tensor_parallel_size"],
    }
    assert (said["actor.entropy_coef"] or 0) == s.entropy_coeff
    if s.max_tokens_per_gpu:
        assert said["rollout.max_tokens_per_gpu"] == (s.rollout.max_tokens_per_gpu or s.max_tokens_per_gpu)
    else:
        assert said["rollout.micro_batch_size"] == s.rollout.micro_batch
    for name, flag in (("reference", "ref"), ("reward", "reward")):
        if s.has(name):
            fields[f"roles.{name}.offload.parameters"] = said[f"{flag}.offload"]
    return fields


# --------------------------------------------------------------------------------------------------------------- verl


def check_verl(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a command of verl says; both releases of 0.9 must take it."""
    if not s.rollout:
        return check_verl_sft(packages, s, found)
    [[python, module_flag, module, *overrides]] = grid.processes(found.command)
    assert (python, module_flag) == ("python3", "-m")
    said: dict[str, Any] = {}
    for version in VERSIONS["verl"]:
        release = packages.release("verl", version)
        assert f"{module.replace('.', '/')}.py" in release.members
        hydra = configuration(release)
        said = dict(map(hydra.check, overrides))
        assert len(said) == len(overrides)
        estimators = hydra.words("verl/trainer/ppo/core_algos.py")
        assert said["algorithm.adv_estimator"] in estimators
        assert said["actor_rollout_ref.rollout.name"] in hydra.words("verl/workers/rollout/replica.py")
        strategies = hydra.words("verl/workers/config/engine.py")
        dtypes = hydra.words("verl/utils/torch_dtypes.py")
        for name, value in said.items():
            if name.endswith(".strategy"):
                assert value in strategies
            elif name.endswith(".model_dtype"):
                assert value in dtypes
    actor, rollout, model = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
    assert said["trainer.nnodes"] * said["trainer.n_gpus_per_node"] == s.gpus
    assert said["algorithm.adv_estimator"].replace("gae", "ppo").replace("_plus_plus", "++") == s.task
    assert (said["data.train_files"], said["data.val_files"]) == ("${TRAIN_FILES}", "${VAL_FILES}")
    assert said["data.filter_overlong_prompts"]  # else a long prompt is an error (data.truncation)
    asked = said[f"{actor}.use_kl_loss"] or said["algorithm.use_kl_in_reward"]
    assert asked == s.has("reference")
    fields = {
        "gpus_per_node": s.gpus_per_node if s.nodes == 1 else said["trainer.n_gpus_per_node"],
        "prompt_len": said["data.max_prompt_length"],
        "response_len": said["data.max_response_length"],
        "rollout.batch": said["data.train_batch_size"],
        "kernels": "liger" if said[f"{model}.use_liger"] else "eager",
        "loss": "fused" if said[f"{model}.use_fused_kernels"] else "full",
        "rollout.engine": said[f"{rollout}.name"],
        "rollout.n": said[f"{rollout}.n"],
        "rollout.tensor_parallel": said[f"{rollout}.tensor_model_parallel_size"],
        "rollout.gpu_memory_utilization": said[f"{rollout}.gpu_memory_utilization"],
        "rollout.sleep": said[f"{rollout}.free_cache_engine"],
        "entropy_coeff": said[f"{actor}.entropy_coeff"],
        "entropy_from_logits_with_chunking": said[f"{actor}.entropy_from_logits_with_chunking"],
        "rollout.max_model_len": said.get(f"{rollout}.max_model_len"),
        "rollout.max_num_seqs": said[f"{rollout}.max_num_seqs"],
        "rollout.max_num_batched_tokens": said[f"{rollout}.max_num_batched_tokens"],
        "rollout.layered_summon": said.get(f"{rollout}.layered_summon", False),
        "rollout.enforce_eager": said[f"{rollout}.enforce_eager"],
    }
    assert s.rollout
    fields |= trained(s, "actor", said, model, actor, "fsdp_config")
    fields |= scored(
        said, rollout, "rollout" if s.rollout.micro_batch or s.rollout.max_tokens_per_gpu else "roles.actor"
    )
    if (size := said.get(f"{actor}.fsdp_config.fsdp_size", -1)) > 0:
        fields["data_parallel_replicate"] = s.gpus // size
    if s.has("critic"):
        fields |= trained(s, "critic", said, "critic.model", "critic", "fsdp")
    if s.has("reference"):
        fields |= scored(said, "actor_rollout_ref.ref", "roles.reference")
        if not s.lora:
            dtype = said["actor_rollout_ref.ref.fsdp_config.model_dtype"]
            fields["roles.reference.precision"] = {"fp32": "fsdp-mixed", "bf16": "bf16"}[dtype]
            fields["roles.reference.sharding"] = SHARDING[said["actor_rollout_ref.ref.strategy"]]
    return fields


def test_commands_for_verls_megatron_engine_say_the_scenario(packages: Packages) -> None:
    """Its configuration is the one that verl itself composes for `model_engine=megatron`, or Hydra for SFT's groups."""
    count = 0
    for s in grid.accepted(grid.verl_megatron(), 7):
        [[_, _, module, *overrides]] = grid.processes(launch(s).command)
        chosen = {"model_engine=megatron"} if s.rollout else {"engine=megatron", "optim=megatron"}
        free = ("num_layers_in_last_pipeline_stage", "account_for_")
        assert chosen <= set(overrides) and module.endswith("main_ppo" if s.rollout else "sft_trainer_ray")
        for version in VERSIONS["verl"]:
            release = packages.release("verl", version)
            hydra = configuration(release, Hydra.MEGATRON) if s.rollout else configuration(
                release, Hydra.SFT, engine="megatron", optim="megatron"
            )  # fmt: skip
            said = dict(hydra.check(each) for each in overrides
                        if each not in chosen and not any(name in each for name in free))  # fmt: skip
        if s.rollout:
            grid.same(megatron_roles(s, said), s)
        else:
            tokens = said["data.max_token_len_per_gpu"] if said["data.use_dynamic_bsz"] else None
            grid.same(on_megatron(s, said, "model", "engine", "optim") | {"max_tokens_per_gpu": tokens}, s)
        count += 1
    assert count > 100


def megatron_roles(s: Scenario, said: Mapping[str, Any]) -> dict[str, Any]:
    """What verl is told of the roles that run on its Megatron engine, and of vLLM."""
    actor = "actor_rollout_ref.actor"
    fields = on_megatron(s, said, "actor_rollout_ref.model", f"{actor}.megatron", f"{actor}.optim")
    fields["rollout.tensor_parallel"] = said["actor_rollout_ref.rollout.tensor_model_parallel_size"]
    if s.has("reference") and not s.lora:
        fields["roles.reference.offload.parameters"] = said["actor_rollout_ref.ref.megatron.param_offload"]
    if s.has("critic"):
        own = on_megatron(s, said, "critic.model", "critic.megatron", "critic.optim")
        fields |= {f"roles.critic.{place}": value for place, value in own.items() if place != "loss"}
        if not said["critic.use_dynamic_bsz"]:
            fields["roles.critic.micro_batch"] = said["critic.ppo_micro_batch_size_per_gpu"]
    return fields


def on_megatron(s: Scenario, said: Mapping[str, Any], model: str, own: str, optim: str) -> dict[str, Any]:
    """What verl is told of a model that trains on its Megatron engine."""
    assert said[f"{model}.path"] == hf(s)
    adam = f"{optim}.override_optimizer_config"
    assert said.get(f"{adam}.optimizer_cpu_offload", False) == (f"{adam}.optimizer_offload_fraction" in said)
    fields = {
        "tensor_parallel": said[f"{own}.tensor_model_parallel_size"],
        "pipeline_parallel": said[f"{own}.pipeline_model_parallel_size"],
        "virtual_pipeline": said.get(f"{own}.virtual_pipeline_model_parallel_size", 1),
        "context_parallel": said[f"{own}.context_parallel_size"],
        "expert_parallel": said[f"{own}.expert_model_parallel_size"],
        "expert_tensor_parallel": said[f"{own}.expert_tensor_parallel_size"],
        "offload.parameters": said[f"{own}.param_offload"],
        "offload.optimizer": said[f"{own}.optimizer_offload"],
        "offload.fraction": said.get(f"{adam}.optimizer_offload_fraction", 0),
        "checkpointing": said.get(f"{own}.override_transformer_config.recompute_granularity", "none"),
        "recompute_modules": said.get(f"{own}.override_transformer_config.recompute_modules"),
        "loss": "fused" if said.get(f"{model}.use_fused_kernels") else "full",
        "method": "lora" if f"{model}.lora.rank" in said else "full",
    }
    if s.lora:
        places = {"rank": "rank", "targets": "target_modules", "dropout": "dropout"}
        fields |= {f"lora.{place}": said[f"{model}.lora.{called}"] for place, called in places.items()}
    return fields


def scored(said: Mapping[str, Any], where: str, place: str) -> dict[str, Any]:
    """What verl is told of the batches that a role scores."""
    if said[f"{where}.log_prob_use_dynamic_bsz"]:
        return {f"{place}.max_tokens_per_gpu": said[f"{where}.log_prob_max_token_len_per_gpu"]}
    return {f"{place}.micro_batch": said[f"{where}.log_prob_micro_batch_size_per_gpu"]}


def check_verl_sft(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a command of verl's SFT trainer says."""
    [[python, module_flag, module, *overrides]] = grid.processes(found.command)
    assert (python, module_flag, module) == ("python3", "-m", "verl.trainer.sft_trainer_ray")
    said: dict[str, Any] = {}
    for version in VERSIONS["verl"]:
        release = packages.release("verl", version)
        assert 'config_name="sft_trainer_engine"' in release.text("verl/trainer/sft_trainer_ray.py")
        said = dict(map(configuration(release, Hydra.SFT).check, overrides))
        assert len(said) == len(overrides)
    assert said["trainer.nnodes"] * said["trainer.n_gpus_per_node"] == s.gpus
    assert said["model.path"] == hf(s)
    assert said["data.train_files"] == "${TRAIN_FILES}"
    dynamic = said["data.use_dynamic_bsz"]
    fields = {
        "seq_len": said["data.max_length"],
        "global_batch": said["data.train_batch_size"],
        "max_tokens_per_gpu": said["data.max_token_len_per_gpu"] if dynamic else None,
        "context_parallel": said["engine.ulysses_sequence_parallel_size"],
        "packing": said["model.use_remove_padding"],
        "kernels": "liger" if said["model.use_liger"] else "eager",
        "loss": "fused" if said["model.use_fused_kernels"] else "full",
    }
    if not dynamic:
        fields["micro_batch"] = said["data.micro_batch_size_per_gpu"]
    return fields | engine(s, said, "model", "engine", "optim")


configuration = cache(Hydra)
SHARDING = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}


def trained(s: Scenario, name: str, said: Mapping[str, Any], model: str, where: str, config: str) -> dict[str, Any]:
    """What verl is told of a trained role."""
    assert s.rollout
    role = s.role(name)
    assert role
    assert said[f"{model}.path"] == hf(s, name)
    dynamic = said[f"{where}.use_dynamic_bsz"]
    fields = engine(role, said, model, f"{where}.{config}", f"{where}.optim", f"{where}.strategy") | {
        "max_tokens_per_gpu": said[f"{where}.ppo_max_token_len_per_gpu"] if dynamic else None,
        "global_batch": said[f"{where}.ppo_mini_batch_size"] * s.rollout.n,
        "packing": said[f"{model}.use_remove_padding"],
        "context_parallel": said.get(f"{where}.ulysses_sequence_parallel_size", 1),
    }
    if not dynamic:
        fields["micro_batch"] = said[f"{where}.ppo_micro_batch_size_per_gpu"]
    return {f"roles.{name}.{place}": value for place, value in fields.items()}


def engine(
    s: Scenario, said: Mapping[str, Any], model: str, config: str, optim: str, strategy: str = "engine.strategy"
) -> dict[str, Any]:
    """What verl is told of a model that FSDP trains, and of its optimizer."""
    assert said[f"{optim}.optimizer"] == "AdamW"
    assert said[f"{config}.model_dtype"] == ("bf16" if s.precision == "bf16" else "fp32")
    told = said[f"{optim}.override_optimizer_config"]
    fields = {
        "sharding": SHARDING[said[strategy]],
        "offload.parameters": said[f"{config}.param_offload"],
        "offload.optimizer": said[f"{config}.optimizer_offload"],
        "checkpointing": "full" if said[f"{model}.enable_gradient_checkpointing"] else "none",
        "attention": ATTENTION[said[f"{model}.override_config.attn_implementation"]],
        "method": "lora" if said[f"{model}.lora_rank"] else "full",
        "optimizer_impl": "foreach" if told is None else "fused" if told.get("fused") else "single",
    }
    if s.lora:
        fields |= {"lora.rank": said[f"{model}.lora_rank"], "lora.targets": said[f"{model}.target_modules"]}
    return fields


# ---------------------------------------------------------------------------------------------------------------- TRL


def check_trl(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a command of TRL and its files say."""
    *servers, [program, command, *words] = grid.processes(found.command)
    if SERVER in found.files:
        servers += grid.processes(found.files[SERVER].rstrip())
    assert program == "trl"
    assert command == {"rm": "reward"}.get(s.task, s.task)
    args, left = trl(packages, command, s.framework_version).parse_known_args(words)
    assert left[0] == "--accelerate_config"
    release = packages.release("trl", s.framework_version)
    reads = ("trl/cli/accelerate_config.py", "trl/cli.py")  # the older one does
    assert '"--accelerate_config"' in release.text(next(path for path in reads if path in release.members))
    node = accelerate(packages).parse_args([word.replace("${NODE_RANK}", "1") for word in left[2:]])
    said, files = vars(args), {name: yaml.load(text, Loader=LOADER) for name, text in found.files.items()}
    settings = files[left[1]]
    check_accelerate(packages, settings)
    trainer = s.role("actor") if s.rollout else s
    assert trainer
    assert settings["num_processes"] == trainer.gpus
    assert settings["num_processes"] % settings["num_machines"] == 0
    assert settings["num_processes"] / settings["num_machines"] <= s.gpus_per_node
    assert (settings["num_machines"] > 1) == (node.main_process_ip is not None) == (node.machine_rank is not None)
    fields = sharded(settings) if settings["distributed_type"] != "DEEPSPEED" else zero(packages, settings, found)
    accumulation = fields.pop("accumulation", said["gradient_accumulation_steps"])
    assert accumulation == said["gradient_accumulation_steps"] == trainer.accumulation
    if "fsdp_offload" in fields:
        assert fields.pop("fsdp_offload") == (s.offload.parameters or s.offload.optimizer)
    fields |= {
        "micro_batch": said["per_device_train_batch_size"],
        "checkpointing": "full" if said["gradient_checkpointing"] else "none",
        "attention": ATTENTION[said["attn_implementation"]],
        "precision": precision(settings, said),
        "method": "qlora" if said["load_in_4bit"] else "lora" if said["use_peft"] else "full",
        "optimizer": optimizer(said),
    }
    if s.optimizer == "adamw" and s.optimizer_impl != "single":
        fields["optimizer_impl"] = {"adamw_torch_fused": "fused", "adamw_torch": "foreach"}[said["optim"]]
    if s.lora:
        [*targets] = said["lora_target_modules"]
        fields |= {"lora.rank": said["lora_r"], "lora.dropout": said["lora_dropout"]}
        fields["lora.targets"] = "all-linear" if targets == ["all-linear"] else targets
        assert (said.get("lora_task_type") == "SEQ_CLS") == (s.task == "rm")
    if s.checkpointing == "full":
        fields["reentrant"] = json.loads(said["gradient_checkpointing_kwargs"])["use_reentrant"]
    assert said["model_name_or_path"] == hf(s, "actor" if s.rollout else "")
    assert said["dataset_name"] == "${DATASET}"
    if not s.rollout:
        fields["seq_len"] = said["max_length"]
        assert said.get("packing", False) == s.packing
        assert s.task not in ("dpo", "kto") or said["precompute_ref_log_probs"] != s.has("reference")
        return fields
    return fields | generation(packages, s, said, servers)


def loads(said: Mapping[str, Any]) -> str:
    """The type that weights load in, a flag of another name before 0.23."""
    return str(said.get("dtype", said.get("torch_dtype")))


def precision(settings: Mapping[str, Any], said: Mapping[str, Any]) -> str:
    """Number formats from the type that weights load in, autocast, and who shards them."""
    if not said["bf16"]:
        assert settings["mixed_precision"] == "no"
        return {"bfloat16": "bf16", "float32": "fp32"}[loads(said)]
    assert settings.get("mixed_precision", "bf16") == "bf16"
    placed = settings["distributed_type"]
    # four bits are multiplied in the type that was loaded, which DeepSpeed casts anyway
    narrow = loads(said) == "bfloat16"
    assert not narrow or placed in ("NO", "MULTI_GPU") or (placed == "DEEPSPEED" and said.get("load_in_4bit"))
    return {"DEEPSPEED": "mixed", "FSDP": "fsdp-mixed"}.get(placed, "bf16" if narrow else "autocast")


def optimizer(said: Mapping[str, Any]) -> str:
    """The optimizer that Transformers' Trainer builds."""
    names = {"adamw_torch_fused": "adamw", "adamw_torch": "adamw", "adamw_bnb_8bit": "adamw-8bit"}
    names |= {"paged_adamw_8bit": "adamw-paged-8bit", "paged_adamw_32bit": "adamw-paged", "lion_32bit": "lion"}
    names |= {"adamw_torch_8bit": "adamw-torchao-8bit"}
    found = names.get(said["optim"], said["optim"])
    return "sgd-momentum" if said.get("optim_args") == "momentum=0.9" else str(found)


def sharded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the accelerate file says without DeepSpeed."""
    plugin = settings.get("fsdp_config")
    if plugin is None:
        return {"sharding": {"NO": "none", "MULTI_GPU": "ddp"}[settings["distributed_type"]]}
    assert settings["distributed_type"] == "FSDP"
    version = plugin["fsdp_version"]
    assert plugin["fsdp_reshard_after_forward"] == {1: "FULL_SHARD", 2: True}[version]
    return {"sharding": f"fsdp{version}", "fsdp_offload": plugin["fsdp_offload_params"]}


def zero(packages: Packages, settings: Mapping[str, Any], found: Launch) -> dict[str, Any]:
    """What the accelerate file says of DeepSpeed, or DeepSpeed's own."""
    plugin = settings["deepspeed_config"]
    if "deepspeed_config_file" not in plugin:
        return {
            "sharding": f"zero{plugin['zero_stage']}",
            "offload.optimizer": plugin["offload_optimizer_device"] == "cpu",
            "offload.parameters": plugin["offload_param_device"] == "cpu",
            "accumulation": plugin["gradient_accumulation_steps"],
            "grad_dtype": "bf16",  # DeepSpeed's own choice beside bf16 weights (calc/frameworks/trl/trl.py)
        }
    # Accelerate refuses beside a file what stands in it (accelerate/accelerator.py)
    assert not {"zero_stage", "gradient_accumulation_steps", "offload_optimizer_device"} & set(plugin)
    assert "mixed_precision" not in settings
    own = json.loads(found.files[plugin["deepspeed_config_file"]])
    check_deepspeed(packages, own)
    assert own["bf16"]["enabled"]
    optimization = own["zero_optimization"]
    return {
        "sharding": f"zero{optimization['stage']}",
        "offload.optimizer": optimization["offload_optimizer"]["device"] == "cpu",
        "offload.parameters": optimization["offload_param"]["device"] == "cpu",
        "grad_dtype": own["data_types"]["grad_accum_dtype"],
        "micro_batch": own["train_micro_batch_size_per_gpu"],
        "accumulation": own["gradient_accumulation_steps"],
    }


def generation(packages: Packages, s: Scenario, said: Mapping[str, Any], servers: list[list[str]]) -> dict[str, Any]:
    """What GRPO is told, and the vLLM server beside it."""
    assert s.rollout
    assert said["beta"] == (BETA if s.has("reference") else 0)
    assert ("reward_model_name_or_path" in said) == s.has("reward") != ("reward_funcs" in said)
    assert said["generation_batch_size"] == s.rollout.batch * s.rollout.n
    fields = {
        "response_len": said["max_completion_length"],
        "rollout.n": said["num_generations"],
        "rollout.engine": "vllm" if said["use_vllm"] else "hf",
    }
    if not said["use_vllm"]:
        assert not servers
        return fields
    assert said["vllm_mode"] == {"colocated": "colocate", "separate": "server"}[s.placement]
    if s.placement == "colocated":
        assert not servers
        return fields | {
            "rollout.tensor_parallel": said["vllm_tensor_parallel_size"],
            "rollout.gpu_memory_utilization": said["vllm_gpu_memory_utilization"],
            "rollout.sleep": said.get("vllm_enable_sleep_mode", False),
            "rollout.max_model_len": said.get("vllm_max_model_length"),
        }
    [[program, command, *words]] = servers
    assert (program, command) == ("trl", "vllm-serve")
    args: argparse.Namespace = vllm_serve(packages, s.framework_version).parse_args(words)
    assert args.model == said["model_name_or_path"]
    assert ("vllm_server_host" in said) == (s.gpus > s.gpus_per_node)
    return fields | {
        "rollout.tensor_parallel": args.tensor_parallel_size,
        "rollout.gpu_memory_utilization": args.gpu_memory_utilization,
        "rollout.gpus": args.tensor_parallel_size * args.data_parallel_size,
        "rollout.max_model_len": vars(args).get("max_model_len"),
    }


def test_a_wrong_flag_is_found(packages: Packages) -> None:
    """The checks can fail: a name that is no flag, one cut short, another type, a choice that is none, no key."""
    script = openrlhf(packages.release("openrlhf"), "train_ppo_ray")
    # README.md of 0.11.2 has --prompt_max_len, which no script of that release takes
    for words in (
        ["--prompt_max_len", "1024"],
        ["--ds.zero", "3"],
        ["--data.max_len", "2k"],
        ["--ds.param_dtype", "x"],
    ):
        with pytest.raises(AssertionError):
            script.parse_args(words)
    hydra = Hydra(packages.release("verl"))
    for override in ("data.max_prompt=1", "data.max_prompt_length=no", "+data.max_prompt_length=1", "+data.x=1"):
        with pytest.raises(AssertionError):
            hydra.check(override)
    for words in (["--optim", "adam"], ["--bf16", "perhaps"], ["--max_length"], ["--dtype", "bf16"]):
        with pytest.raises(AssertionError):
            trl(packages, "sft").parse_args(words)
    for settings in ({"fsdp_config": {"fsdp_version": 3}}, {"fsdp_config": {"fsdp_offload": True}}, {"zero_stage": 1}):
        with pytest.raises(AssertionError):
            check_accelerate(packages, {"distributed_type": "FSDP"} | settings)
    with pytest.raises(AssertionError):
        check_deepspeed(packages, {"data_types": {"grad_accum_dtype": "fp64"}})


def test_files_have_the_names_that_the_command_reads() -> None:
    assert (ACCELERATE, DEEPSPEED) == ("accelerate.yaml", "deepspeed.json")
