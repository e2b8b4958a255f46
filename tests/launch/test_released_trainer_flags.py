"""Every flag and key of a trainer's command exists in its release, with a legal value, and says what the scenario says.

As `test_released_flags.py` does for the frameworks, by fields of dataclasses and pydantic models, read as text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import grid
import pytest
import yaml
from frameworks.released import LOADER, Release
from packages import Packages, check_deepspeed, fields, members

from calc.catalog.catalog import load
from calc.launch import TRAINERS, LaunchError, launch
from calc.launch.hugging_face import DEEPSPEED
from calc.launch.shell import Launch
from calc.models.slices import megatron_layers
from calc.scenario.scenario import Scenario

STRIDES = {"llamafactory": 101, "axolotl": 101, "ms-swift": 101, "torchtune": 1, "torchtitan": 1, "unsloth": 1,
           "megatron-swift": 7}  # fmt: skip
OPTIMIZERS = {
    "adamw_torch_fused": ("adamw", "fused"), "adamw_torch": ("adamw", "foreach"),
    "adamw_bnb_8bit": ("adamw-8bit", None), "paged_adamw_8bit": ("adamw-paged-8bit", None),
    "lion_32bit": ("lion", None),
}  # fmt: skip
TORCHRUN = {"--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint"}  # torch/distributed/run.py


@pytest.mark.parametrize("name", TRAINERS)
def test_commands_say_the_scenario_in_words_of_the_release(packages: Packages, name: str) -> None:
    check: Callable[[Packages, Scenario, Launch], dict[str, Any]]
    check = {
        "llamafactory": check_llamafactory, "axolotl": check_axolotl, "ms-swift": check_ms_swift,
        "torchtune": check_torchtune, "torchtitan": check_torchtitan, "unsloth": check_unsloth,
        "megatron-swift": check_megatron_swift,
    }[name]  # fmt: skip
    count = 0
    for s in grid.accepted(grid.trainer(name), STRIDES[name]):
        try:
            found = launch(s)
        except LaunchError as refusal:
            assert "allowed" in str(refusal)
            continue
        count += 1
        try:
            grid.same(check(packages, s, found), s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{s.as_dict()}\n{found.command}\n{found.files}") from None
    assert count > 100


# ---- what a release knows ------------------------------------------------------------------------------------------


@cache
def known(release: Release, *paths: str) -> dict[str, str]:
    """The fields of all classes of these modules, with their annotations."""
    found: dict[str, str] = {}
    for path in paths:
        names = [node.name for node in release.tree(path).body if isinstance(node, ast.ClassDef)]
        found |= {name: annotation for name, annotation, _ in fields(release, path, *names)}
    return found


@cache
def training(packages: Packages) -> dict[str, str]:
    """The fields of Transformers' TrainingArguments."""
    return known(packages.release("transformers"), "transformers/training_args.py")


def legal(name: str, value: Any, of: Mapping[str, str]) -> None:
    """A value of a field that exists, and of its type."""
    assert name in of, f"no field {name}"
    annotation = of[name]
    words = re.findall(r"Literal\[(.*?)\]", annotation)
    if isinstance(value, str) and words:
        assert value in ast.literal_eval(f"({','.join(words)},)"), f"{name}: {value!r} is none of {annotation}"
        return
    kinds = {"bool": bool, "int": int, "float": (int, float), "str": str}
    named = [kind for word, kind in kinds.items() if re.search(rf"\b{word}\b", annotation)]
    if named and "dict" not in annotation and "list" not in annotation.lower():
        assert any(isinstance(value, kind) and (kind is not int or value is not True) for kind in named), (
            f"{name}: {value!r} is no {annotation}"
        )


def optimizer(packages: Packages, word: str, args: str | None) -> dict[str, Any]:
    """The optimizer that a word of Transformers' names."""
    assert word in members(packages.release("transformers"), "transformers/training_args.py", "OptimizerNames")
    name, impl = OPTIMIZERS.get(word, (word, None))
    found = {"optimizer": "sgd-momentum" if args == "momentum=0.9" else name}
    return found | ({"optimizer_impl": impl} if impl else {})


def hf(s: Scenario) -> str:
    """The name of the model that is trained."""
    return load().models[s.model].hf


def of_trainer(packages: Packages, s: Scenario, said: Mapping[str, Any], found: Launch, batch: str) -> dict[str, Any]:
    """What the arguments of Transformers' Trainer say, however they are told."""
    assert said["gradient_accumulation_steps"] == s.accumulation
    told = {"micro_batch": said[batch]} | optimizer(packages, said["optim"], said.get("optim_args"))
    if "deepspeed" in said:
        own = json.loads(found.files[said["deepspeed"]])
        check_deepspeed(packages, own)
        optimization = own["zero_optimization"]
        told |= {
            "sharding": f"zero{optimization['stage']}",
            "offload.optimizer": optimization["offload_optimizer"]["device"] == "cpu",
            "offload.parameters": optimization["offload_param"]["device"] == "cpu",
            "grad_dtype": own["data_types"]["grad_accum_dtype"],
        }
    else:
        assert DEEPSPEED not in found.files
    if "gradient_checkpointing_kwargs" in said:
        told["reentrant"] = said["gradient_checkpointing_kwargs"]["use_reentrant"]
    if s.sharded.family == "fsdp":
        accelerator = said.get("accelerator_config", {}).get("gradient_accumulation_kwargs", {})
        told["no_sync"] = not accelerator.get("sync_each_batch", False)
    return told


def nodes(words: list[str], s: Scenario) -> None:
    """The flags of torchrun."""
    told = dict(zip(words[::2], words[1::2], strict=True))
    assert set(told) <= TORCHRUN
    assert int(told["--nproc_per_node"]) * int(told.get("--nnodes", 1)) == s.gpus
    assert ("--rdzv_endpoint" in told) == (s.nodes > 1)


def environment(words: list[str], s: Scenario) -> list[str]:
    """The words behind the environment variables of a command, which say how many GPUs it runs on."""
    told: dict[str, str] = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        told[name] = value
    assert int(told.get("NPROC_PER_NODE", 1)) * int(told.get("NNODES", 1)) == s.gpus
    assert ("MASTER_ADDR" in told) == ("NODE_RANK" in told) == (s.nodes > 1)
    assert ("PYTORCH_CUDA_ALLOC_CONF" in told) == s.expandable_segments
    return words


def sharded(said: Mapping[str, Any], s: Scenario) -> dict[str, Any]:
    """What `fsdp` and `fsdp_config` of TrainingArguments say."""
    if s.sharded.family != "fsdp":
        assert not said.get("fsdp")
        return {}
    words = said["fsdp"].split()
    assert words[:2] == ["full_shard", "auto_wrap"]
    assert ("offload" in words) == (s.offload.parameters or s.offload.optimizer)
    assert said["fsdp_config"]["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert said["fsdp_config"]["cpu_ram_efficient_loading"]  # one rank of a node builds the model, not each
    return {"sharding": f"fsdp{said['fsdp_config']['fsdp_version']}"}


# ---- the trainers --------------------------------------------------------------------------------------------------

HPARAMS = tuple(f"llamafactory/hparams/{name}_args.py" for name in ("model", "data", "finetuning", "training"))


def check_llamafactory(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a file of LLaMA-Factory says."""
    release = packages.release("llamafactory")
    [words] = grid.processes(found.command)
    program, command, file, data = environment([word for word in words if word != "FORCE_TORCHRUN=1"], s)
    assert ("FORCE_TORCHRUN=1" in words) == (s.gpus > 1)
    assert 'is_env_enabled("FORCE_TORCHRUN")' in release.text("llamafactory/launcher.py")
    assert (program, command, data) == ("llamafactory-cli", "train", "dataset=${DATASET}")
    assert '"train"' in release.text("llamafactory/launcher.py")
    said = yaml.load(found.files[file], Loader=LOADER)
    of = training(packages) | known(release, *HPARAMS)
    for name, value in said.items():
        legal(name, value, of) if name != "flash_attn" else None
    kinds = members(release, "llamafactory/extras/constants.py", "AttentionFunction")
    assert said["flash_attn"] in kinds
    assert said["model_name_or_path"] == hf(s)
    if said["bf16"]:
        full = "mixed" if "deepspeed" in said else "fsdp-mixed" if "fsdp" in said else "autocast"
        frozen = "mixed" if "deepspeed" in said else "bf16"
        precision = "bf16" if said["pure_bf16"] else full if said["finetuning_type"] == "full" else frozen
    else:
        precision = "fp16" if said["fp16"] else "fp32"
    told = {
        "task": said.get("pref_loss", {"pt": "pretrain"}.get(said["stage"], said["stage"])),
        "reentrant": said["use_reentrant_gc"],
        "seq_len": said["cutoff_len"],
        "packing": said["packing"],
        "attention": {"fa2": "flash", "disabled": "eager"}.get(said["flash_attn"], said["flash_attn"]),
        "checkpointing": "none" if said["disable_gradient_checkpointing"] else "full",
        "offload.activations": said.get("use_unsloth_gc", False),
        "loss": "fused" if said["enable_liger_kernel"] else "full",
        "kernels": "liger" if said["enable_liger_kernel"] else "eager",
        "precision": precision,
        "method": "full" if said["finetuning_type"] == "full" else "qlora" if "quantization_bit" in said else "lora",
    }
    if s.lora:
        targets = said["lora_target"]
        told |= {"lora.rank": said["lora_rank"], "lora.dropout": said["lora_dropout"]}
        told["lora.targets"] = "all-linear" if targets == "all" else targets.split(",")
    return told | sharded(said, s) | of_trainer(packages, s, said, found, "per_device_train_batch_size")


SCHEMAS = tuple(
    f"axolotl/utils/schemas/{name}.py" for name in ("config", "training", "peft", "model", "deprecated", "fsdp")
)


def check_axolotl(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a file of Axolotl says."""
    release = packages.release("axolotl")
    [words] = grid.processes(found.command)
    program, command, file, *launcher = words
    assert (program, command) == ("axolotl", "train")
    if s.gpus > 1:
        assert launcher[:3] == ["--launcher", "torchrun", "--"]
        assert '"torchrun"' in release.text("axolotl/cli/main.py")
        nodes(launcher[3:], s)
    said = yaml.load(found.files[file], Loader=LOADER)
    schema = known(release, *SCHEMAS)
    plugins = (f"axolotl/integrations/{name}/args.py" for name in ("liger", "cut_cross_entropy"))
    of = {**schema, **known(release, *plugins)}
    for name, value in said.items():
        legal(name, value, of)
    for name, value in said.get("fsdp_config", {}).items():
        legal(name, value, known(release, "axolotl/utils/schemas/fsdp.py"))
    files = {"liger": "plugin", "cut_cross_entropy": "__init__"}
    for plugin in said.get("plugins", []):
        folder, _, name = plugin.removeprefix("axolotl.integrations.").rpartition(".")
        assert f"class {name}(" in release.text(f"axolotl/integrations/{folder}/{files[folder]}.py")
    assert f'"{said["attn_implementation"]}"' in release.text("axolotl/utils/schemas/enums.py")
    assert said["base_model"] == hf(s)
    assert (said.get("rl") == "dpo") == (s.task == "dpo")
    assert said.get("reward_model", False) == (s.task == "rm")
    fsdp = said.get("fsdp_config")
    if fsdp:
        assert fsdp["offload_params"] == (s.offload.parameters or s.offload.optimizer)
    sharding = {"sharding": f"fsdp{said['fsdp_version']}"} if fsdp else {}
    wide = bool(fsdp) and said["fsdp_version"] == 1 and "adapter" not in said
    attention = said["attn_implementation"]
    told = {
        "seq_len": said["sequence_len"],
        "packing": said["sample_packing"],
        "attention": "flash" if attention == "flash_attention_2" else attention,
        "checkpointing": "full" if said["gradient_checkpointing"] else "none",
        "offload.activations": said.get("activation_offloading", False),
        "loss": "cut"
        if said.get("cut_cross_entropy")
        else "fused"
        if said.get("liger_fused_linear_cross_entropy")
        else "full",
        "kernels": "liger" if said.get("liger_rms_norm") else "eager",
        "method": "qlora" if said.get("load_in_8bit") else said.get("adapter", "full"),
        "load_in_8bit": said.get("load_in_8bit", False),
        "quantize_moe_experts": said.get("quantize_moe_experts", False),
    }
    if s.precision != "bf16" or not wide:  # FSDP 1 makes fp32 of weights, and nothing says that it shall not
        kinds = "mixed" if "deepspeed" in said else "fsdp-mixed" if wide else "bf16"
        if s.precision != "fsdp-mixed":
            told["precision"] = kinds if said["bf16"] else "fp32"
    if s.lora:
        linear = said.get("lora_target_linear", False)
        told |= {"lora.rank": said["lora_r"], "lora.dropout": said["lora_dropout"]}
        told["lora.targets"] = "all-linear" if linear else said["lora_target_modules"]
        told["lora.dtype"] = "fp32" if said["peft_autocast_adapter_dtype"] else "bf16"
        assert said["load_in_4bit"] == (said["adapter"] == "qlora")
    trained = {"optim": said["optimizer"], **said}
    return told | sharding | of_trainer(packages, s, trained, found, "micro_batch_size")


BASE_ARGS = tuple(
    f"swift/arguments/base_args/{name}_args.py" for name in ("base", "model", "quant", "template", "data")
)
SWIFT = (
    *BASE_ARGS,
    *(f"swift/arguments/{name}_args.py" for name in ("sft", "tuner", "rlhf")),
    "swift/trainers/arguments.py",
    "swift/rlhf_trainers/args_mixin.py",
)
SERVERS = ("swift/arguments/deploy_args.py", "swift/rlhf_trainers/args_mixin.py")


# flags of several words
LISTS = ("target_modules", "dataset", "recompute_modules", "reward_funcs", "vllm_server_host", "vllm_server_port")


def flagged(words: list[str], of: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ms-swift's flags by name, each legal among the fields `of`."""
    said: dict[str, Any] = {}
    starts = [n for n, word in enumerate(words) if word.startswith("--")]
    for n, end in zip(starts, [*starts[1:], len(words)], strict=True):
        name, values = words[n][2:], words[n + 1 : end]
        said[name] = values if name in LISTS else yaml.load(values[0], Loader=LOADER)
        legal(name, said[name], of)
    return said


def adapters(said: Mapping[str, Any], s: Scenario) -> dict[str, Any]:
    """What ms-swift's flags say of adapters."""
    if not s.lora:
        return {}
    targets = "all-linear" if said["target_modules"] == ["all-linear"] else said["target_modules"]
    return {"lora.rank": said["lora_rank"], "lora.dropout": said["lora_dropout"], "lora.targets": targets}


def generated(release: Release, said: Mapping[str, Any], servers: list[list[str]], s: Scenario) -> dict[str, Any]:
    """What ms-swift's flags say of generation, those of a server among them."""
    assert s.rollout
    gpus = s.gpus_of("actor")
    told = {
        "response_len": said["max_completion_length"],
        "rollout.n": said["num_generations"],
        "rollout.engine": "vllm" if said["use_vllm"] else "hf",
        "rollout.batch": said["steps_per_generation"] * said["per_device_train_batch_size"] * gpus // s.rollout.n,
        "rollout.move_model_batches": said.get("move_model_batches"),
        "placement": "separate" if servers else "colocated",
    }
    assert (said["beta"] > 0) == s.has("reference")
    if not said["use_vllm"]:
        return told
    if servers:
        [[program, command, *own]] = servers
        assert (program, command) == ("swift", "rollout") and said["vllm_mode"] == "server"
        serving = flagged(own, known(release, *BASE_ARGS, *SERVERS))
        assert serving["vllm_data_parallel_size"] * serving["vllm_tensor_parallel_size"] == s.rollout.gpus
    else:
        serving = said
        told |= {f"rollout.{name}": said[name] for name in ("offload_model", "offload_optimizer")}
        told["rollout.sleep"] = said["sleep_level"] == 1
    words = {"gpu_memory_utilization": "", "tensor_parallel": "_size"}
    told |= {f"rollout.{name}": serving[f"vllm_{name}{end}"] for name, end in words.items()}
    return told | {"rollout.max_model_len": serving.get("vllm_max_model_len")}


def check_ms_swift(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a command of ms-swift says."""
    release = packages.release("ms_swift")
    *servers, words = grid.processes(found.command)
    program, command, *own = environment(words, s)
    assert program == "swift"
    assert f"'{command}': 'swift.cli.{command}'" in release.text("swift/cli/main.py")
    of = training(packages) | known(release, *SWIFT)
    said = flagged(own, of)
    assert command == {"pretrain": "pt", "sft": "sft"}.get(s.task, "rlhf")
    assert said.get("rlhf_type") == (s.task if command == "rlhf" else None)
    assert (said["model"], said["dataset"]) == (hf(s), ["${DATASET}"])
    fsdp = json.loads(found.files[said["fsdp"]]) if "fsdp" in said else {}
    frozen = said["tuner_type"] == "lora"
    told = {
        "prompt_len" if s.rollout else "seq_len": said["max_length"],
        "packing": said["packing"],
        "attention": {"flash_attn": "flash"}.get(said["attn_impl"], said["attn_impl"]),
        "checkpointing": "full" if said["gradient_checkpointing"] else "none",
        "loss": "fused" if said["use_liger_kernel"] else "full",
        "kernels": "liger" if said["use_liger_kernel"] else "eager",
        "method": "full" if not frozen else "qlora" if "quant_bits" in said else "lora",
    }
    if not fsdp:
        half = "fp16" if said["fp16"] else "mixed" if "deepspeed" in said else "bf16"
        told["precision"] = half if said["torch_dtype"] != "float32" else "autocast" if said["bf16"] else "fp32"
    told |= adapters(said, s)
    if s.rollout:
        told |= generated(release, said, servers, s)
    if s.lora and "deepspeed" not in said:
        told["lora.dtype"] = {"bfloat16": "bf16"}.get(said.get("lora_dtype", ""), "fp32")
    return told | sharded(fsdp, s) | of_trainer(packages, s, said, found, "per_device_train_batch_size")


MEGATRON = tuple(f"swift/megatron/arguments/{name}_args.py" for name in ("megatron", "megatron_base", "sft", "rlhf"))


def check_megatron_swift(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a command of Megatron-SWIFT says."""
    release = packages.release("ms_swift")
    [words] = grid.processes(found.command)
    program, command, *own = environment(words, s)
    assert program == "megatron"
    assert f"'{command}': 'swift.cli._megatron.{command}'" in release.text("swift/cli/_megatron/main.py")
    of = known(release, *SWIFT) | known(release, *MEGATRON)
    said = flagged(own, of)
    assert command == {"pretrain": "pt", "sft": "sft"}.get(s.task, "rlhf")
    assert said.get("rlhf_type") == (s.task if command == "rlhf" else None)
    assert (said["model"], said["dataset"]) == (hf(s), ["${DATASET}"])
    aware, moved = said.get("use_precision_aware_optimizer", True), said["optimizer_cpu_offload"]
    whole = aware and said.get("optimizer_offload_fraction") == 1
    stages = s.pipeline_layers or megatron_layers(s.architecture.layers, s.pipeline_parallel)
    assert layers_of_stages(said, s) == stages
    recompute = said["recompute_granularity"], said.get("recompute_method"), said.get("recompute_num_layers")
    if again := said.get("recompute_modules"):
        assert set(again) == s.recomputed
        recompute = "modules", *recompute[1:]
    return adapters(said, s) | {
        "method": said["tuner_type"],
        "seq_len": said["max_length"],
        "packing": said["packing"],
        "micro_batch": said["micro_batch_size"],
        "global_batch": said["global_batch_size"],
        "tensor_parallel": said["tensor_model_parallel_size"],
        "sequence_parallel": said["sequence_parallel"],
        "context_parallel": said["context_parallel_size"],
        "pipeline_parallel": said["pipeline_model_parallel_size"],
        "virtual_pipeline": said.get("virtual_pipeline_model_parallel_size", 1),
        "expert_parallel": said["expert_model_parallel_size"],
        "expert_tensor_parallel": said["expert_tensor_parallel_size"],
        "checkpointing": {
            ("selective", None, None): "none",
            ("modules", None, None): "selective",
            ("full", "uniform", s.recompute_num_layers or 1): "full",
        }[recompute],
        "loss": "fused" if said["cross_entropy_loss_fusion"] else "full",
        "attention": {"unfused": "eager"}.get(said.get("attention_backend", ""), "flash"),
        "mtp_num_layers": said.get("mtp_num_layers"),
        "offload.optimizer": said["optimizer_cpu_offload"] and whole,
        "offload.fraction": 0 if whole else said.get("optimizer_offload_fraction", 0),
        "offload.masters": aware,
        "float8": said["fp8_recipe"] if "fp8_format" in said else "none",
        "fp8_param_gather": said.get("fp8_param_gather", False),
        "use_precision_aware_optimizer": said.get("use_precision_aware_optimizer", False) and not moved,
        "grad_dtype": said.get("main_grads_dtype", "fp32"),
        **{name: said.get(name, "fp32") for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")},
    }


def layers_of_stages(said: Mapping[str, Any], s: Scenario) -> tuple[int, ...]:
    """The layers of the stages that Megatron-core makes of what it is told: see its `get_num_layers_to_build`."""
    first, last = ([count] if (count := said.get(f"decoder_{which}_pipeline_num_layers")) else []
                   for which in ("first", "last"))  # fmt: skip
    others = s.pipeline_parallel - len(first) - len(last)
    ends = [said.get(f"account_for_{end}_in_pipeline_split", False) for end in ("embedding", "loss")]
    each, left = divmod(s.architecture.layers + sum(ends) - sum(first) - sum(last), max(1, others))
    assert not left
    stages = [*first, *[each] * others, *last]
    stages[0], stages[-1] = stages[0] - ends[0], stages[-1] - ends[1]
    return tuple(stages)


def check_torchtune(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a command of torchtune says."""
    release = packages.release("torchtune")
    [words] = grid.processes(found.command)
    words = [word for word in words if not word.startswith("PYTORCH_CUDA_ALLOC_CONF=")]
    at = words.index("--config")
    program, run, *launcher, recipe = words[:at]
    assert (program, run) == ("tune", "run")
    if launcher:
        nodes(launcher, s)
    registry = release.text("torchtune/_recipe_registry.py")
    assert f'name="{recipe}"' in registry
    config = words[at + 1]
    assert f'"{config}"' in registry
    whole = yaml.load(release.text(f"recipes/configs/{config}.yaml"), Loader=LOADER)
    code = release.text(f"recipes/{recipe}.py")
    said: dict[str, Any] = {}
    for word in words[at + 2 :]:
        name, _, text = word.partition("=")
        *above, last = name.removeprefix("~").split(".")
        section = whole
        for part in above:
            section = section[part]
        if name.startswith("~"):
            assert last in section, f"{config}: no {name} to remove"
            continue
        asked = last in section or f'cfg.get("{last}"' in code or name == "optimizer.fused"
        assert asked, f"{config}: no key {name}"
        said[name] = yaml.load(text, Loader=LOADER)
        if last in section and not isinstance(section[last], dict) and section[last] is not None and name[0] != "c":
            assert type(said[name]) is type(section[last]), f"{name}: {said[name]!r}"
    assert said["checkpointer.checkpoint_dir"] == "${MODEL_DIR}"
    assert said["compile"] is (s.compile == "model-and-loss")
    module, _, loss = said["loss"].rpartition(".")
    assert module == "torch.nn" or loss in release.text("torchtune/modules/loss/__init__.py")
    single = recipe.endswith("single_device")
    told = {
        "micro_batch": said["batch_size"],
        "seq_len": said["tokenizer.max_seq_len"],
        "precision": said["dtype"],
        "packing": said["dataset.packed"],
        "loss": {"CrossEntropyLoss": "full", "CEWithChunkedOutputLoss": "chunked"}[loss],
        "checkpointing": "full" if said["enable_activation_checkpointing"] else "none",
        "offload.activations": said["enable_activation_offloading"],
        "sharding": "none" if single else "fsdp2",
        "method": "full" if recipe.startswith("full") else "qlora" if "qlora" in config else "lora",
        "optimizer": {
            "torch.optim.AdamW": "adamw", "bitsandbytes.optim.PagedAdamW8bit": "adamw-paged-8bit",
            "bitsandbytes.optim.AdamW8bit": "adamw-8bit", "torch.optim.SGD": "sgd",
        }[said["optimizer"]],
    }  # fmt: skip
    assert said["gradient_accumulation_steps"] == s.accumulation
    assert (said.get("optimizer.fused", False)) == (s.optimizer_impl == "fused")
    if s.lora:
        names = [name.replace("output_proj", "o_proj") for name in said["model.lora_attn_modules"]]
        names += ["gate_proj", "up_proj", "down_proj"] if said["model.apply_lora_to_mlp"] else []
        own = [*("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")]
        assert set(names) == set(own if isinstance(s.lora.targets, str) else s.lora.targets)
        told |= {"lora.rank": said["model.lora_rank"], "lora.dropout": said["model.lora_dropout"]}
    return told


def check_torchtitan(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a command of torchtitan says."""
    release = packages.release("torchtitan")
    [words] = grid.processes(found.command)
    words = [word for word in words if not word.startswith("PYTORCH_CUDA_ALLOC_CONF=")]
    at = words.index("-m")
    assert (words[0], words[at + 1], words[-1].partition(":")[0]) == (
        "torchrun",
        "torchtitan.train",
        "activation-checkpoint",
    )
    nodes(words[1:at], s)
    said: dict[str, Any] = {}
    own = words[at + 2 : -1]
    while own:
        name = own.pop(0)[2:]
        said[name] = yaml.load(own.pop(0), Loader=LOADER) if own and not own[0].startswith("--") else True
    policies = release.text("torchtitan/distributed/activation_checkpoint.py")
    policy = words[-1].partition(":")[2]
    assert f'tyro.conf.subcommand("{policy}")' in policies
    module, config = said.pop("module"), said.pop("config")
    assert f"def {config}() -> Trainer.Config:" in release.text(f"torchtitan/models/{module}/config_registry.py")
    assert said.pop("hf_assets_path") == "${ASSETS}"
    of = {
        f"{place}.{name}": annotation
        for place, path, cls in (
            ("training", "torchtitan/config/configs.py", "TrainingConfig"),
            ("parallelism", "torchtitan/config/configs.py", "ParallelismConfig"),
            ("compile", "torchtitan/config/configs.py", "CompileConfig"),
        )
        for name, annotation, _ in fields(release, path, cls)
    }
    assert '"for-loop"' in release.text("torchtitan/components/optimizer/optimizer.py")
    of["optimizer.implementation"] = "Literal['for-loop', 'foreach', 'fused']"
    sequence = said.pop("parallelism.no-enable-sequence-parallel", False)
    for name, value in said.items():
        legal(name, value, of)
    degree = {name.rpartition(".")[2]: value for name, value in said.items() if name.endswith("_degree")}
    shards, copies = degree["data_parallel_shard_degree"], degree["data_parallel_replicate_degree"]
    assert shards * copies == s.data_parallel
    stages = degree["pipeline_parallel_degree"]
    assert said["training.mixed_precision_param"] == "bfloat16"
    told = {
        "global_batch": said["training.global_batch_size"],
        "seq_len": said["training.seq_len"],
        "checkpointing": policy,
        "tensor_parallel": degree["tensor_parallel_degree"],
        "pipeline_parallel": stages,
        "context_parallel": degree["context_parallel_degree"],
        "micro_batch": said[
            "parallelism.pipeline_parallel_microbatch_size" if stages > 1 else "training.local_batch_size"
        ],
        "optimizer_impl": {"for-loop": "single"}.get(
            said["optimizer.implementation"], said["optimizer.implementation"]
        ),
    }
    if degree["tensor_parallel_degree"] > 1:
        told["sequence_parallel"] = not sequence
    if copies > 1:
        told["sharding"] = "ddp"
    if s.float8 != "none":
        assert (
            f"{s.float8.upper()}LinearConverter.Config("
            in release.text(f"torchtitan/models/{module}/config_registry.py")
            .partition(f"def {config}()")[2]
            .partition("\ndef ")[0]
        )
    return told


def check_unsloth(packages: Packages, s: Scenario, found: Launch) -> dict[str, Any]:
    """What a file of Unsloth says."""
    release = packages.release("unsloth")
    [words] = grid.processes(found.command)
    train = "unsloth_cli/commands/train.py"
    if s.gpus > 1:  # which counts the processes of a launch, and each loads on its own GPU
        assert words[:4] == ["torchrun", "--nproc_per_node", str(s.gpus // s.nodes), "--no-python"]
        assert "def _launch_rank" in release.text(train)
        assert "under torchrun / accelerate launch" in release.text("unsloth/models/loader.py")
    switched = found.command.startswith("UNSLOTH_DISABLE_AUTO_PADDING_FREE=1 ")
    assert '"UNSLOTH_DISABLE_AUTO_PADDING_FREE", ""' in release.text("unsloth/trainer.py")
    program, command, flag, file, *data = words[words.index("unsloth") :]
    assert (program, command, flag, data) == ("unsloth", "train", "--config", ["--dataset", "${DATASET}"])
    assert '"--config"' in release.text(train)
    said = yaml.load(found.files[file], Loader=LOADER)
    assert said.pop("model") == hf(s)
    path = "unsloth_cli/config.py"
    for section, cls in (("data", "DataConfig"), ("training", "TrainingConfig"), ("lora", "LoraConfig")):
        of = {name: annotation for name, annotation, _ in fields(release, path, cls)}
        for name, value in said.get(section, {}).items():
            legal(name, value, of)
    own = said["training"]
    assert own["gradient_accumulation_steps"] == s.accumulation
    assert (said["data"]["format_type"] == "raw") == (s.task == "pretrain")
    told = {
        "seq_len": own["max_seq_length"],
        "micro_batch": own["batch_size"],
        "packing": own["packing"],
        "padding_free": not switched,
        "checkpointing": {"unsloth": "full", "true": "full", "none": "none"}[own["gradient_checkpointing"]],
        "offload.activations": own["gradient_checkpointing"] == "unsloth",
        "method": "full" if own["training_type"] == "full" else "qlora" if own["load_in_4bit"] else "lora",
    }
    if s.lora:
        told |= {"lora.rank": said["lora"]["lora_r"], "lora.dropout": said["lora"]["lora_dropout"]}
        told["lora.targets"] = said["lora"]["target_modules"].split(",")
    return told


def test_a_wrong_key_is_found(packages: Packages) -> None:
    """The checks can fail: a name that is no field, another type, a word that is none."""
    of = known(packages.release("llamafactory"), *HPARAMS)
    for name, value in (("cutoff_length", 1), ("cutoff_len", "long"), ("stage", "sfft"), ("packing", 3)):
        with pytest.raises(AssertionError):
            legal(name, value, of)
