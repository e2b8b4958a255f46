"""TRL's commands since 0.19: `trl {sft,reward,dpo,kto,grpo}` with a file for accelerate, which names DDP, ZeRO or FSDP.

Flags are fields of the trainers' configurations (`trl/trainer/*_config.py`, above Transformers' TrainingArguments),
of `trl/trainer/model_config.py` and of the scripts. The accelerate file is the package's own of that kind
(`trl/accelerate_configs/`) with the scenario's values. A flag that decides memory is written even where it has its
default; vLLM's length and sequence limits are left as they are, as in the estimate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, assert_never

from calc.base.optimizers import OPTIMIZERS
from calc.base.versions import at_least
from calc.launch import shell
from calc.launch.hugging_face import (
    DEEPSPEED,
    deepspeed,
    device,
    grouping,
    mixed,
    optim,
    reentrant,
    sizes,
    synchronised,
    yaml,
)
from calc.launch.shell import ATTENTION, Launch, LaunchError, Placeholder, Words, option, own
from calc.models.lora import module_names
from calc.scenario.scenario import Scenario

FIRST = "0.19"  # the first with grpo's --reward_funcs

COMMANDS = {"sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto", "grpo": "grpo"}
# The first release with a command, where that is not the first of all.
SINCE = {"rm": "0.24.0"}
ACCELERATE, SERVER = "accelerate.yaml", "vllm_server.sh"
BETA = 0.04  # GRPO's paper (DeepSeekMath, section 4.2); 0 leaves the reference out
PORT = 29500
EXPERIMENTAL = "0.26.0"  # trainers without a command moved there


def launch(s: Scenario) -> Launch:
    """The command for `s` with its files; raises LaunchError if a flag is missing that the job needs."""
    if s.task not in COMMANDS:
        allowed = f"allowed for a command of trl: {', '.join(COMMANDS)}"
        place = "trl.experimental" if at_least(s.framework_version, EXPERIMENTAL) else "trl.trainer"
        raise LaunchError(f"task: given {s.task!r}, {allowed}; its trainer is a class of {place}")
    if (first := SINCE.get(s.task)) and not at_least(s.framework_version, first):
        allowed = ", ".join(task for task in COMMANDS if task not in SINCE)
        given = f"task: given {s.task!r}, allowed for a command of trl {s.framework_version}: {allowed}"
        raise LaunchError(f"{given}; trl {COMMANDS[s.task]} came with {first}")
    trainer = own(s, "actor") if s.rollout else s
    optim(trainer)
    command = shell.command(f"trl {COMMANDS[s.task]}", [*files_and_nodes(trainer), *flags(s, trainer)])
    command = shell.setting(s, command)
    found = files(trainer)
    if s.rollout and s.placement == "separate":
        serves = server(s, trainer)
        if one_node(s):
            gpus = [_ids(trainer.gpus, s.rollout.gpus), _ids(0, trainer.gpus)]
            command = f"CUDA_VISIBLE_DEVICES={gpus[0]} {serves} &\nCUDA_VISIBLE_DEVICES={gpus[1]} {command}"
        else:
            found[SERVER] = f"{serves}\n"
    return Launch(command, found, tuple(notes(s, trainer, found)))


def files_and_nodes(s: Scenario) -> Iterator[Words]:
    """The flags that accelerate reads."""
    yield option("--accelerate_config", ACCELERATE)
    if nodes(s) > 1:
        yield option("--machine_rank", Placeholder("NODE_RANK", "0 on the first node, then 1, 2, ..."))
        yield option("--main_process_ip", Placeholder("MASTER_ADDR", "address of the first node"))
        yield option("--main_process_port", PORT)


def flags(s: Scenario, trainer: Scenario) -> Iterator[Words]:
    """The flags of the training script; `trainer` is the scenario of the trained model."""
    yield option("--model_name_or_path", shell.role_model(s, "actor") if s.rollout else shell.model_name(s.model))
    yield option("--dataset_name", Placeholder("DATASET", "name or path of the training data"))
    # DeepSpeed casts what was loaded, but 4-bit weights would be multiplied in the type that they were loaded in
    narrow = trainer.layout == "bf16" or (trainer.method == "qlora" and trainer.layout == "mixed")
    dtype = "--dtype" if at_least(s.framework_version, "0.23.0") else "--torch_dtype"
    yield option(dtype, {"fp16": "float16"}.get(trainer.precision, "bfloat16") if narrow else "float32")
    yield option("--bf16", mixed(trainer) == "bf16")
    if mixed(trainer) == "fp16":
        yield option("--fp16", True)
    yield option("--attn_implementation", ATTENTION[trainer.attention])
    if trainer.kernels == "liger":
        yield option("--use_liger_kernel", True)
    yield option("--per_device_train_batch_size", trainer.micro_batch)
    yield option("--gradient_accumulation_steps", trainer.accumulation)
    if trainer.sharded.family == "fsdp" and not trainer.no_sync:
        yield option("--accelerator_config", json.dumps(synchronised()))
    yield option("--gradient_checkpointing", trainer.checkpointing == "full")
    if trainer.offload.activations:
        yield option("--activation_offloading", True)
    if trainer.checkpointing == "full":
        yield option("--gradient_checkpointing_kwargs", json.dumps(reentrant(trainer)))
    found = optim(trainer)
    yield option("--optim", found.optim)
    if found.optim_args:
        yield option("--optim_args", found.optim_args)
    yield from adapters(trainer)
    if s.rollout:
        yield from grpo(s)
    else:
        yield option("--max_length", s.seq_len)
    for name, value in grouping(s).items():
        yield option(f"--{name}", value)
    if s.task == "sft":
        yield option("--packing", s.packing)
        if s.padding_free:
            yield option("--padding_free", True)
    if s.task in ("dpo", "kto"):
        yield option("--precompute_ref_log_probs", not s.has("reference"))


def adapters(s: Scenario) -> Iterator[Words]:
    """The flags of PEFT, and of a base in 4 or 8 bits."""
    four = s.method == "qlora" and not s.load_in_8bit
    yield option("--use_peft", s.lora is not None)
    yield option("--load_in_4bit", four)
    yield option("--use_bnb_nested_quant", four and s.double_quantization)
    if s.load_in_8bit:
        yield option("--load_in_8bit", True)
    if s.lora:
        yield option("--lora_r", s.lora.rank)
        yield option("--lora_dropout", s.lora.dropout)
        yield option(
            "--lora_target_modules", *([s.lora.targets] if isinstance(s.lora.targets, str) else s.lora.targets)
        )
        if s.lora.dora:
            yield option("--use_dora", True)
        if s.lora.modules_to_save:
            yield option("--lora_modules_to_save", *module_names(s.architecture, s.lora.modules_to_save))
        if s.task == "rm":
            yield option("--lora_task_type", "SEQ_CLS")


def grpo(s: Scenario) -> Iterator[Words]:
    """The flags of generation and of its reward."""
    assert s.rollout
    yield option("--max_completion_length", s.response_len)
    yield option("--num_generations", s.rollout.n)
    yield option("--generation_batch_size", s.rollout.batch * s.rollout.n)
    yield option("--beta", BETA if s.has("reference") else 0.0)
    if s.has("reward"):
        yield option("--reward_model_name_or_path", shell.role_model(s, "reward"))
    else:
        yield option("--reward_funcs", Placeholder("REWARD", "import path of a reward function"))
    yield option("--use_vllm", s.rollout.engine == "vllm")
    if s.rollout.engine != "vllm":
        return
    if s.placement == "separate":
        yield option("--vllm_mode", "server")
        if not one_node(s):
            yield option("--vllm_server_host", Placeholder("VLLM_HOST", "address of the node where vLLM serves"))
        return
    yield option("--vllm_mode", "colocate")
    yield option("--vllm_gpu_memory_utilization", s.rollout.gpu_memory_utilization)
    yield option("--vllm_tensor_parallel_size", s.rollout.tensor_parallel)
    if s.rollout.max_model_len:
        yield option("--vllm_max_model_length", s.rollout.max_model_len)
    if at_least(s.framework_version, "0.23.0"):
        yield option("--vllm_enable_sleep_mode", s.rollout.sleep)


def one_node(s: Scenario) -> bool:
    """True if the trainer and a vLLM server fit one node."""
    return s.gpus <= s.gpus_per_node


def server(s: Scenario, trainer: Scenario) -> str:
    """The command of the vLLM server that a trainer on other GPUs needs, within one node."""
    assert s.rollout
    replicas = s.rollout.gpus // s.rollout.tensor_parallel
    if replicas > 1 and not s.architecture.experts:  # trl/scripts/vllm_serve.py, data_parallel_size
        raise LaunchError(
            f"rollout.tensor_parallel: given {s.rollout.tensor_parallel} on {s.rollout.gpus} GPUs, allowed with trl: "
            f"{s.rollout.gpus}; vLLM serves no replicas of a model without experts"
        )
    if not one_node(s) and (s.rollout.gpus > s.gpus_per_node or nodes(trainer) == s.nodes):
        raise LaunchError(
            f"rollout.gpus: given {s.rollout.gpus} beside a trainer on {nodes(trainer)} of {s.nodes} nodes, allowed "
            f"for a command of trl: at most {s.gpus_per_node}, on a node without the trainer"
        )
    return shell.command(
        "trl vllm-serve",
        [
            option("--model", shell.role_model(s, "actor")),
            option("--tensor_parallel_size", s.rollout.tensor_parallel),
            option("--data_parallel_size", replicas),
            option("--gpu_memory_utilization", s.rollout.gpu_memory_utilization),
            *([option("--max_model_len", s.rollout.max_model_len)] if s.rollout.max_model_len else []),
        ],
    )


def _ids(first: int, count: int) -> str:
    return ",".join(str(first + i) for i in range(count))


def nodes(s: Scenario) -> int:
    """The number of nodes of the trainer."""
    return shell.nodes_of(s.gpus, s.gpus_per_node)[0]


# ---- files ---------------------------------------------------------------------------------------------------------


def files(s: Scenario) -> dict[str, str]:
    """The accelerate file, and one for DeepSpeed if gradients accumulate in fp32, which only that file can say."""
    in_file = s.sharded.family == "zero" and (s.grad_dtype == "fp32" or bool(sizes(s)))
    of_deepspeed = deepspeed(s) if in_file else None
    settings: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "debug": False}
    match s.sharded.family:
        case "zero":
            settings |= {"distributed_type": "DEEPSPEED", "deepspeed_config": zero(s, in_file=bool(of_deepspeed))}
        case "fsdp":
            settings |= {"distributed_type": "FSDP", "fsdp_config": fsdp(s)}
        case "ddp":
            settings |= {"distributed_type": "MULTI_GPU", "gpu_ids": "all"}
        case "none":
            settings |= {"distributed_type": "NO", "gpu_ids": "all"}
        case "megatron":
            allowed = "none, ddp, zero1, zero2, zero3, fsdp1, fsdp2"
            raise LaunchError(f"sharding: given {s.sharding!r}, allowed for a command of trl: {allowed}")
        case other:
            assert_never(other)
    if not of_deepspeed:  # Accelerate refuses the key beside a DeepSpeed file, which says it
        settings["mixed_precision"] = mixed(s)
    settings |= {
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": nodes(s),
        "num_processes": s.gpus,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    found = {ACCELERATE: yaml(settings)}
    return found | ({DEEPSPEED: json.dumps(of_deepspeed, indent=2) + "\n"} if of_deepspeed else {})


def zero(s: Scenario, *, in_file: bool) -> dict[str, Any]:
    """DeepSpeed's settings as in `zero1.yaml` to `zero3.yaml`, or only those that may stand beside its own file."""
    found: dict[str, Any] = {"deepspeed_multinode_launcher": "standard", "zero3_init_flag": s.sharding == "zero3"}
    if in_file:
        return found | {"deepspeed_config_file": DEEPSPEED}
    found |= {
        "zero_stage": s.sharded.stage,
        "gradient_accumulation_steps": s.accumulation,
        "offload_optimizer_device": device(s.offload.optimizer),
        "offload_param_device": device(s.offload.parameters),
    }
    return found | ({"zero3_save_16bit_model": True} if s.sharding == "zero3" else {})


def fsdp(s: Scenario) -> dict[str, Any]:
    """FSDP's settings as in `fsdp1.yaml` and `fsdp2.yaml`; it offloads parameters and optimizer together."""
    found: dict[str, Any] = {
        "fsdp_version": s.sharded.stage,
        "fsdp_activation_checkpointing": False,  # the trainer does it itself
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": s.offload.parameters or s.offload.optimizer,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    if s.sharding == "fsdp2":
        return found | {"fsdp_reshard_after_forward": True}
    return found | {
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": True,
        "fsdp_reshard_after_forward": "FULL_SHARD",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
    }


# ---- notes ---------------------------------------------------------------------------------------------------------


def notes(s: Scenario, trainer: Scenario, files: Iterable[str]) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no flag sets."""
    yield shell.needs("DATASET", f"a data set in TRL's format for {COMMANDS[s.task]}")
    yield f"{', '.join(files)}: put into the folder where the command runs"
    if s.rollout:
        if s.has("reward"):
            yield shell.needs("REWARD_MODEL", "a reward model of the size of the one computed")
        else:
            yield shell.needs("REWARD", "a function's import path, or the name of one of TRL's own")
        yield f"prompts are not cut: keep them within prompt_len {s.prompt_len}"
        if SERVER in files:
            yield shell.needs("VLLM_HOST", f"the node where `sh {SERVER}` serves, which starts first")
    if nodes(trainer) > 1:
        yield "run it on every node, with NODE_RANK, MASTER_ADDR and the files there"
    if trainer.sharded.family == "fsdp" and trainer.offload.parameters != trainer.offload.optimizer:
        yield "FSDP has one switch for offload: parameters and optimizer states go to host memory together"
    if s.task == "dpo" and not s.has("reference") and not s.lora and s.sharded.family == "fsdp":
        # trainer/dpo_trainer.py: `args.precompute_ref_log_probs and not self.is_fsdp_enabled`
        yield "roles.reference none: under FSDP TRL loads a reference even where its log-probabilities are precomputed"
    yield from shell.unsaid(trainer, *unsaid(trainer))
    yield from shell.unsaid_of_roles(s)
    yield from shell.common_notes(s)


def unsaid(s: Scenario) -> Iterator[str]:
    """The fields that no flag of this job sets."""
    yield from ("lora.dtype", "lora.init", "lora.ref_adapter")
    if s.sharded.family != "zero":
        yield "grad_dtype"
    if s.optimizer_impl not in OPTIMIZERS[s.optimizer].spelled.trl:
        yield "optimizer_impl"
