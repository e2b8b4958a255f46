"""The parts that commands for Transformers' Trainer share: its arguments, a file for DeepSpeed, and YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from calc.base.optimizers import OPTIMIZERS, Optim
from calc.base.plan import DeepSpeed
from calc.base.versions import at_least
from calc.launch.shell import LaunchError, runner
from calc.scenario.scenario import Scenario
from calc.scenario.words import ROLES

DEEPSPEED = "deepspeed.json"
NOTHING: Mapping[str, Any] = {}
# the fields that `use_liger_kernel` decides together
LIGER = ("kernels", "loss")


def optim(s: Scenario) -> Optim:
    """The optimizer as TrainingArguments name it; LaunchError if they have no word for it."""
    facts = OPTIMIZERS[s.optimizer]
    if not facts.spelled.trl:
        allowed = ", ".join(name for name, facts in OPTIMIZERS.items() if facts.spelled.trl)
        raise LaunchError(f"optimizer: given {s.optimizer!r}, allowed for a command of {runner(s)[0]}: {allowed}")
    return facts.spelled.trl.get(s.optimizer_impl) or facts.spelled.trl[facts.usual]


def synchronised() -> dict[str, Any]:
    """The `accelerator_config` with which FSDP reduces the gradients of every micro batch."""
    return {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def reentrant(s: Scenario) -> dict[str, Any]:
    """The `gradient_checkpointing_kwargs` that say which kind of checkpointing runs."""
    return {"use_reentrant": s.reentrant}


def mixed(s: Scenario) -> str:
    """The mixed precision as Accelerate names it; with it, FSDP makes everything that is trained fp32."""
    pure = s.precision == "fp32" or (s.precision == "bf16" and s.sharded.family == "fsdp")
    return "no" if pure else "fp16" if s.precision == "fp16" else "bf16"


def device(offloaded: bool) -> str:
    """DeepSpeed's name for the device that holds offloaded parameters or states."""
    return "cpu" if offloaded else "none"


def sizes(s: Scenario) -> dict[str, Any]:
    """The sizes of DeepSpeed's configuration in which the trainer's own file differs from DeepSpeed's defaults."""
    config = s.keeps.deepspeed
    assert config
    usual = DeepSpeed(config.version)
    named = {
        "reduce_bucket_size": (config.reduce_bucket, usual.reduce_bucket),
        "stage3_param_persistence_threshold": (config.persistence_threshold, usual.persistence_threshold),
        "stage3_prefetch_bucket_size": (config.prefetch, usual.prefetch),
        "overlap_comm": (config.overlap_comm, usual.overlap_comm),
        "stage3_max_live_parameters": (config.max_live, usual.max_live),
        "sub_group_size": (config.sub_group, usual.sub_group),
    }
    return {name: own for name, (own, other) in named.items() if own != other}


def deepspeed(s: Scenario) -> dict[str, Any]:
    """DeepSpeed's own configuration; `auto` stands for the values of the trainer's flags."""
    return {
        "zero_optimization": {
            "stage": s.sharded.stage,
            "offload_optimizer": {"device": device(s.offload.optimizer)},
            "offload_param": {"device": device(s.offload.parameters)},
            **({"stage3_gather_16bit_weights_on_model_save": True} if s.sharding == "zero3" else {}),
            **sizes(s),
            **({} if s.memory_efficient_linear else {"memory_efficient_linear": False}),
        },
        mixed(s): {"enabled": True},
        "data_types": {"grad_accum_dtype": s.grad_dtype},
        "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": s.accumulation,
        "gradient_clipping": "auto",
    }


def yaml(settings: Mapping[str, Any]) -> str:
    """Keys and scalars as YAML, nested one mapping deep; scalars are written as JSON, which YAML reads."""
    lines = []
    for name, value in sorted(settings.items()):
        if isinstance(value, Mapping):
            lines.append(f"{name}:")
            lines += [f"  {inner}: {json.dumps(item)}" for inner, item in sorted(value.items())]
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def arguments(s: Scenario, own: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """The TrainingArguments that every trainer on it has under their own names: optimizer, accumulation, sharding.

    `own`: the trainer's arguments for an optimizer that it has beside Transformers'.
    """
    found = None if own else optim(s)
    told: dict[str, Any] = {
        "gradient_accumulation_steps": s.accumulation,
        "gradient_checkpointing": s.checkpointing == "full",
        **({"optim": found.optim} if found else own),
    }
    if s.checkpointing == "full":
        told["gradient_checkpointing_kwargs"] = reentrant(s)
    if found and found.optim_args:
        told["optim_args"] = found.optim_args
    if s.sharded.family == "zero":
        told["deepspeed"] = DEEPSPEED
    if s.sharded.family == "fsdp" and not s.no_sync:
        told["accelerator_config"] = synchronised()
    return told


def grouping(s: Scenario) -> dict[str, Any]:
    """TrainingArguments for batches of like length; a strategy among others since 5.2 (`training_args.py`)."""
    if not s.group_by_length:
        return {}
    if at_least(s.versions["transformers"], "5.2"):
        return {"train_sampling_strategy": "group_by_length"}
    return {"group_by_length": True}


def fsdp(s: Scenario) -> dict[str, Any]:
    """`fsdp` and `fsdp_config` of TrainingArguments; they offload parameters and states together.

    Unless told otherwise every rank of a node builds the whole model in host memory (`training_args.py:2805` of 5.19).
    """
    offload = " offload" if s.offload.parameters or s.offload.optimizer else ""
    return {
        "fsdp": f"full_shard auto_wrap{offload}",
        "fsdp_config": {
            "fsdp_version": s.sharded.stage,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
        },
    }


def sharding_files(s: Scenario) -> dict[str, str]:
    """The file for DeepSpeed, if it shards."""
    return {DEEPSPEED: json.dumps(deepspeed(s), indent=2) + "\n"} if s.sharded.family == "zero" else {}


def reference(s: Scenario) -> None:
    """Raises LaunchError for DPO or KTO without a reference, which every trainer here loads."""
    if "reference" in ROLES.get(s.task, ()) and not s.has("reference"):
        given = f"roles.reference: given 'none' for {s.task}, allowed: a reference"
        raise LaunchError(f"{given}, which a command of {runner(s)[0]} always loads")


def unsaid(s: Scenario) -> tuple[str, ...]:
    """The fields that no argument of the Trainer sets, whatever is made of it."""
    places = ["lora.units", "logprob"]
    if s.sharded.family != "zero":
        places.append("grad_dtype")
    if s.optimizer_impl not in OPTIMIZERS[s.optimizer].spelled.trl:
        places.append("optimizer_impl")
    return tuple(places)
