"""verl's overrides read back as fields of a scenario; the inverse of `calc/launch/verl.py`, whose words it uses."""

from __future__ import annotations

import re
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.diagnose import verl_megatron
from calc.diagnose.flags import Flags, listed, without_none
from calc.launch.shell import ATTENTION
from calc.launch.verl import ACTOR, MODEL, REF, ROLLOUT
from calc.launch.verl_keys import DTYPES, ESTIMATORS, IMPLEMENTATIONS, STRATEGIES

METHODS = {word: task for task, word in ESTIMATORS.items()} | {
    "grpo_passk": "grpo",
    "rloo": "grpo",
    "reinforce_plus_plus_baseline": "reinforce++",
    "remax": "reinforce++",
}
IGNORED = re.compile(
    r"^m$|module|train_files|val_|\.lr\b|\.lr_|warmup|logger|project_name|experiment_name|save_freq|test_freq|epoch|_key\b|shuffle|"
    r"truncation|filter_overlong|return_raw|kl_coef|kl_ctrl|kl_loss|clip|custom_reward|reward_|seed|critic_warmup|"
    r"default_|trust_remote|rollout\.(?:name|temperature|top_|do_sample|val_kwargs|swap|enforce|mode|load|enable_chunked)|"
    r"rollout_data|validation|resume|balance|grad_offload|algorithm\.|hydra|image|total_training|wrap_policy|"
    r"max_start|max_obs|data_num|num_workers|use_liger|forward_prefetch|agent|retriever|max_turns|do_search"
)


def recognised(flags: Flags) -> bool:
    """True for a command of verl, or its overrides alone."""
    names = [*flags.values, *flags.variables]
    sft = any(name.startswith("data.micro_batch_size") for name in names)
    return "verl.trainer" in flags.program or any(name.startswith("actor_rollout_ref.") for name in names) or sft


def fields(flags: Flags) -> dict[str, Any]:
    """The fields that a command states."""
    if "sft_trainer" in flags.program or flags.has("data.micro_batch_size_per_gpu", "model.partial_pretrain"):
        return without_none(_supervised(flags))
    return without_none(_rl(flags))


def _machine(flags: Flags) -> dict[str, Any]:
    return flags.machine(("trainer.n_gpus_per_node", "nproc_per_node"), ("trainer.nnodes", "nnodes"))


def _model(flags: Flags, where: str) -> dict[str, Any]:
    """The fields of a trained model and its adapters."""
    rank = flags.integer(f"{where}.lora_rank")
    targets = flags.text(f"{where}.target_modules")
    spelled = {word: name for name, word in ATTENTION.items()}
    flags.has(f"{where}.lora_alpha")
    return {
        "checkpointing": flags.recomputed(f"{where}.enable_gradient_checkpointing"),
        "packing": flags.switch(f"{where}.use_remove_padding"),
        "attention": spelled.get(flags.text(f"{where}.override_config.attn_implementation") or ""),
        "loss": "fused" if flags.on(f"{where}.use_fused_kernels") else None,
        "kernels": "liger" if flags.on(f"{where}.use_liger") else None,
        "method": "lora" if rank else None,
        "lora.rank": rank,
        "lora.targets": (targets if targets == "all-linear" else listed(targets)) if rank and targets else None,
    }


def _engine(flags: Flags, where: str, optim: str, strategy: str) -> dict[str, Any]:
    """The fields of how FSDP keeps a trained model."""
    spelled = {word: name for name, word in STRATEGIES.items()}
    steps = {word: name for name, word in IMPLEMENTATIONS.items()}
    optimizers = {facts.spelled.verl: name for name, facts in OPTIMIZERS.items() if facts.spelled.verl}
    config = (flags.text(f"{optim}.override_optimizer_config") or "").replace(" ", "")
    flags.has(f"{where}.fsdp_size")
    return {
        "precision": _precision(flags, f"{where}.model_dtype"),
        "sharding": spelled.get(flags.text(strategy) or ""),
        "offload.parameters": flags.switch(f"{where}.param_offload"),
        "offload.optimizer": flags.switch(f"{where}.optimizer_offload"),
        "optimizer": optimizers.get(flags.text(f"{optim}.optimizer") or ""),
        "optimizer_impl": steps.get(config),
    }


def _precision(flags: Flags, name: str) -> str | None:
    """The number formats by the type in which FSDP holds weights (`PrecisionType` of utils/torch_dtypes.py)."""
    spelled = {word: precision for precision, word in DTYPES.items()}
    spelled |= {"float32": spelled["fp32"], "bfloat16": spelled["bf16"]}
    return spelled.get(flags.text(name) or "")


def _supervised(flags: Flags) -> dict[str, Any]:
    dynamic = flags.on("data.use_dynamic_bsz")
    tokens = flags.integer("data.max_token_len_per_gpu")
    if flags.text("engine") == "megatron" or flags.text("engine.tensor_model_parallel_size"):
        flags.has("optim")
        own = verl_megatron.model(flags, "model") | verl_megatron.engine(flags, "engine", "optim")
    else:
        own = {
            "context_parallel": flags.integer(
                "engine.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size"
            ),
            **_model(flags, "model"),
            **_engine(flags, "engine", "optim", "engine.strategy"),
        }
    return {
        "framework": "verl",
        "task": "sft",
        "model": flags.text("model.path", "model.partial_pretrain"),
        **_machine(flags),
        "seq_len": flags.integer("data.max_length"),
        "global_batch": flags.integer("data.train_batch_size"),
        "max_tokens_per_gpu": tokens if dynamic else None,
        "micro_batch": None if dynamic else flags.integer("data.micro_batch_size_per_gpu"),
        **own,
    }


def _rl(flags: Flags) -> dict[str, Any]:
    n, megatron = flags.integer(f"{ROLLOUT}.n"), verl_megatron.chosen(flags)
    task = METHODS.get(flags.text("algorithm.adv_estimator") or "gae", "ppo")
    flags.has(f"{ROLLOUT}.name")
    machine = _machine(flags)
    mini = flags.integer(f"{ACTOR}.ppo_mini_batch_size")
    dynamic = _dynamic(flags, ACTOR)
    flags.has(f"{ROLLOUT}.log_prob_use_dynamic_bsz")
    # without a release of its own a total of micro batches is one that had them: 0.2 and 0.3
    dated = flags.has(f"{ACTOR}.ppo_micro_batch_size") and not flags.has(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    found: dict[str, Any] = {
        "framework": "verl==0.3" if dated else "verl",
        "task": task,
        "model": flags.text(f"{MODEL}.path"),
        **machine,
        "prompt_len": flags.integer("data.max_prompt_length"),
        "response_len": flags.integer("data.max_response_length"),
        "rollout.batch": flags.integer("data.train_batch_size"),
        "rollout.n": n,
        **(_on_megatron if megatron else _on_fsdp)(flags),
        "global_batch": mini * (n or 1) if mini and (n or task == "ppo") else None,
        "max_tokens_per_gpu": dynamic,
        "micro_batch": None if dynamic else _micro(flags, ACTOR, "ppo_micro_batch_size", machine["gpus"]),
        "entropy_coeff": flags.number(f"{ACTOR}.entropy_coeff"),
        "entropy_from_logits_with_chunking": flags.on(f"{ACTOR}.entropy_from_logits_with_chunking") or None,
        **_rollout(flags, machine["gpus"], dynamic=bool(dynamic)),
        **_reference(flags, machine["gpus"], dated=dated, config="megatron" if megatron else "fsdp_config"),
    }
    shards = flags.integer(f"{ACTOR}.fsdp_config.fsdp_size")
    if shards and machine["gpus"] and 0 < shards < machine["gpus"]:
        found["data_parallel_replicate"] = machine["gpus"] // shards
    for place in ("micro_batch", "max_tokens_per_gpu"):  # scoring has the update's, unless it has its own
        if found[f"rollout.{place}"] == found[place]:
            found[f"rollout.{place}"] = None
    if task == "ppo":
        found |= _critic(flags, machine["gpus"], megatron=megatron)
    return found


def _on_fsdp(flags: Flags) -> dict[str, Any]:
    """The fields of an actor on FSDP."""
    own = _model(flags, MODEL) | _engine(flags, f"{ACTOR}.fsdp_config", f"{ACTOR}.optim", f"{ACTOR}.strategy")
    return own | {"context_parallel": flags.integer(f"{ACTOR}.ulysses_sequence_parallel_size")}


def _on_megatron(flags: Flags) -> dict[str, Any]:
    """The fields of an actor on Megatron-core, whose parallelism the reference shares."""
    flags.has(*(f"{REF}.megatron.{called}" for called in verl_megatron.SHARED))
    own = verl_megatron.model(flags, MODEL)
    return own | verl_megatron.engine(flags, f"{ACTOR}.megatron", f"{ACTOR}.optim")


def _dynamic(flags: Flags, where: str) -> int | None:
    on, tokens = flags.on(f"{where}.use_dynamic_bsz"), flags.integer(f"{where}.ppo_max_token_len_per_gpu")
    return tokens if on else None


def _micro(flags: Flags, where: str, name: str, gpus: int | None) -> int | None:
    """A micro batch a GPU; before 0.2 for the whole job."""
    own, total = flags.integer(f"{where}.{name}_per_gpu"), flags.integer(f"{where}.{name}")
    return own or (max(1, total // gpus) if total and gpus else None)


def _rollout(flags: Flags, gpus: int | None, *, dynamic: bool) -> dict[str, Any]:
    tokens = flags.integer(f"{ROLLOUT}.log_prob_max_token_len_per_gpu")
    return {
        "rollout.tensor_parallel": flags.integer(f"{ROLLOUT}.tensor_model_parallel_size"),
        "rollout.gpu_memory_utilization": flags.number(f"{ROLLOUT}.gpu_memory_utilization"),
        "rollout.sleep": flags.switch(f"{ROLLOUT}.free_cache_engine"),
        "rollout.max_model_len": flags.integer(f"{ROLLOUT}.max_model_len"),
        "rollout.max_num_seqs": flags.integer(f"{ROLLOUT}.max_num_seqs"),
        "rollout.max_num_batched_tokens": flags.integer(f"{ROLLOUT}.max_num_batched_tokens"),
        "rollout.layered_summon": flags.switch(f"{ROLLOUT}.layered_summon"),
        "rollout.enforce_eager": flags.switch(f"{ROLLOUT}.enforce_eager"),
        "rollout.max_tokens_per_gpu": tokens if dynamic else None,
        "rollout.micro_batch": None if dynamic else _micro(flags, ROLLOUT, "log_prob_micro_batch_size", gpus),
    }


def _reference(flags: Flags, gpus: int | None, *, dated: bool, config: str) -> dict[str, Any]:
    """The fields of a reference: it runs for a KL loss or a KL term in the reward, until 0.3 always."""
    names = (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
    said = [flags.on(name) for name in names if flags.text(name) is not None]
    found: dict[str, Any] = {"roles.reference": None if dated or not said else {} if any(said) else "none"}
    own = {
        "roles.reference.precision": _precision(flags, f"{REF}.fsdp_config.model_dtype"),
        "roles.reference.micro_batch": _micro(flags, REF, "log_prob_micro_batch_size", gpus),
        "roles.reference.max_tokens_per_gpu": flags.integer(f"{REF}.log_prob_max_token_len_per_gpu")
        if flags.on(f"{REF}.log_prob_use_dynamic_bsz")
        else None,
        "roles.reference.offload.parameters": flags.switch(f"{REF}.{config}.param_offload"),
    }
    flags.has(f"{REF}.strategy")
    if own["roles.reference.max_tokens_per_gpu"]:
        own["roles.reference.micro_batch"] = None
    return found | (own if found["roles.reference"] == {} else {})


def _critic(flags: Flags, gpus: int | None, *, megatron: bool) -> dict[str, Any]:
    """The fields of a critic, on the actor's engine."""
    if megatron:
        own = verl_megatron.model(flags, "critic.model") | verl_megatron.engine(
            flags, "critic.megatron", "critic.optim"
        )
    else:
        own = _critic_on_fsdp(flags)
    own |= {
        "model": flags.text("critic.model.path"),
        "micro_batch": _micro(flags, "critic", "ppo_micro_batch_size", gpus),
        "max_tokens_per_gpu": _dynamic(flags, "critic"),
        "loss": None,
        "kernels": None,  # of the actor and the reference alone
    }
    if own["max_tokens_per_gpu"]:
        own["micro_batch"] = None
    flags.has("critic.ppo_mini_batch_size", "critic.forward_micro_batch_size_per_gpu")
    return {f"roles.critic.{name}": value for name, value in own.items() if value is not None}


def _critic_on_fsdp(flags: Flags) -> dict[str, Any]:
    """The fields of a critic's model and engine."""
    own = _model(flags, "critic.model") | _engine(flags, "critic.fsdp", "critic.optim", "critic.strategy")
    for name in ("param_offload", "optimizer_offload"):  # until 0.8
        place = "offload.parameters" if name == "param_offload" else "offload.optimizer"
        own[place] = own[place] if own[place] is not None else flags.switch(f"critic.model.fsdp_config.{name}")
    return own | {"context_parallel": flags.integer("critic.ulysses_sequence_parallel_size")}
