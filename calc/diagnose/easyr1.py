"""EasyR1's overrides read back as fields of a scenario; the inverse of `calc/launch/easyr1.py`, whose words it uses."""

from __future__ import annotations

import re
from typing import Any

from calc.diagnose.flags import Flags, without_none
from calc.frameworks.verl.easyr1 import STRATEGIES
from calc.launch.easyr1 import (
    ACTOR,
    CRITIC,
    DTYPES,
    EXPERIENCE,
    FIRST,
    REF,
    ROLLOUT,
    UPDATE,
)
from calc.launch.verl_keys import ESTIMATORS

TASKS = {word: task for task, word in ESTIMATORS.items()} | {"rloo": "grpo", "remax": "reinforce++"}
IGNORED = re.compile(
    r"^config$|^m$|_files|_key\b|format_prompt|template|shuffle|seed|filter|val_|image_dir|video|kl_|use_kl|gamma|lam\b|"
    r"clip|norm|epoch|\.lr\b|lr_|weight_decay|betas|warmup|temperature|top_|limit_images|enable_chunked|"
    r"disable_|reward|logger|project_name|experiment_name|save_|load_|resume|max_steps|max_try|find_last|trust_remote|"
    r"enable_full_shard|enable_rank0|fsdp\.enable_cpu_offload|dynamic_batching|torch_compile|loss_|tau_|mini_rollout|"
    r"online|lora\.(?:alpha|exclude)|tokenizer_path"
)


def recognised(flags: Flags) -> bool:
    """True for a command of EasyR1, or its overrides alone."""
    return any(name.startswith(("worker.actor.", "worker.rollout.")) for name in (*flags.values, *flags.variables))


def fields(flags: Flags) -> dict[str, Any]:
    """The fields that a command, or a whole configuration, states."""
    task = TASKS.get(flags.text("algorithm.adv_estimator") or "grpo", "grpo")
    n = flags.integer(f"{ROLLOUT}.n")
    found: dict[str, Any] = {
        "framework": f"verl=={FIRST}",
        "task": task,
        **flags.machine(("trainer.n_gpus_per_node",), ("trainer.nnodes",)),
        "prompt_len": flags.integer("data.max_prompt_length"),
        "response_len": flags.integer("data.max_response_length"),
        "images.min_pixels": flags.integer("data.min_pixels"),
        "images.max_pixels": flags.integer("data.max_pixels"),
        "rollout.batch": flags.integer("data.rollout_batch_size"),
        "rollout.n": n,
        "rollout.tensor_parallel": flags.integer(f"{ROLLOUT}.tensor_parallel_size"),
        "rollout.gpu_memory_utilization": flags.number(f"{ROLLOUT}.gpu_memory_utilization"),
        "rollout.enforce_eager": flags.switch(f"{ROLLOUT}.enforce_eager"),
        "rollout.max_num_batched_tokens": flags.integer(f"{ROLLOUT}.max_num_batched_tokens"),
        "rollout.micro_batch": flags.integer(f"{ACTOR}.{EXPERIENCE}"),
        "roles.reference": "none" if flags.on("algorithm.disable_kl") else None,
        **_trained(flags, ACTOR, n or 5),
    }
    offloads = flags.switch(f"{REF}.fsdp.enable_cpu_offload")
    if found["roles.reference"] is None and offloads is not None:
        found["roles.reference.offload.parameters"] = offloads
    if flags.on(f"{ACTOR}.model.freeze_vision_tower"):
        found["images.freeze"] = "vision"
    if task == "ppo":
        critic = _trained(flags, CRITIC, n or 1)
        found |= {f"roles.critic.{place}": value for place, value in critic.items() if value is not None}
    if not any(place.startswith("images.") and value for place, value in found.items() if "pixels" not in place):
        found["images.min_pixels"] = found["images.max_pixels"] = None  # bounds of images that the text may not have
    return without_none(found)


def _trained(flags: Flags, where: str, n: int) -> dict[str, Any]:
    """The fields of a trained model; EasyR1 counts its global batch in prompts, with `n` responses each."""
    prompts = flags.integer(f"{where}.global_batch_size")
    dtypes = {word: name for name, word in DTYPES.items()}
    optimizers = {word: name for name, word in STRATEGIES.items()}
    return {
        "model": flags.text(f"{where}.model.model_path"),
        "checkpointing": flags.recomputed(f"{where}.model.enable_gradient_checkpointing"),
        "packing": flags.switch(f"{where}.padding_free"),
        "context_parallel": flags.integer(f"{where}.ulysses_size", f"{where}.ulysses_sequence_parallel_size"),
        "global_batch": prompts and prompts * n,
        "micro_batch": flags.integer(f"{where}.{UPDATE}"),
        "precision": dtypes.get(flags.text(f"{where}.fsdp.torch_dtype") or ""),
        "optimizer": optimizers.get(flags.text(f"{where}.optim.strategy") or ""),
        "offload.parameters": flags.switch(f"{where}.offload.offload_params"),
        "offload.optimizer": flags.switch(f"{where}.offload.offload_optimizer"),
    }
