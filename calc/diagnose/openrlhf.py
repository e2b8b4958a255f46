"""OpenRLHF's commands read back as fields of a scenario: the dotted flags of 0.11, and what they were called before.

The inverse of `calc/launch/openrlhf.py`, whose tables of words it uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.diagnose.flags import Flags, listed, without_none
from calc.launch.openrlhf import ESTIMATORS, SCRIPTS
from calc.launch.shell import ATTENTION

# The names until 0.10 (`openrlhf/cli/train_{sft,rm,dpo,ppo_ray}.py`).
OLDER: Mapping[str, str] = {
    "model.model_name_or_path": "pretrain",
    "actor.model_name_or_path": "pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "ref.model_name_or_path": "ref_pretrain",
    "ref.offload": "ref_offload",
    "model.pretrain_mode_enable": "pretrain_mode",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "model.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "actor.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "data.max_len": "max_len",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.batch_size": "train_batch_size",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.colocate_all": "colocate_all_models",
    "train.colocate_actor_ref": "colocate_actor_ref",
    "train.colocate_critic_reward": "colocate_critic_reward",
    "train.async_enable": "async_train",
    "ds.zero_stage": "zero_stage",
    "ds.param_dtype": "param_dtype",
    "ds.grad_accum_dtype": "grad_accum_dtype",
    "ds.adam_offload": "adam_offload",
    "ds.attn_implementation": "attn_implementation",
    "ds.packing_samples": "packing_samples",
    "ds.use_liger_kernel": "use_liger_kernel",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.load_in_4bit": "load_in_4bit",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.lora.rank": "lora_rank",
    "ds.lora.target_modules": "target_modules",
    "ds.lora.dropout": "lora_dropout",
    "rollout.max_new_tokens": "generate_max_len",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.kl.init_coef": "init_kl_coef",
    "actor.entropy_coef": "entropy_loss_coef",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.enforce_eager": "enforce_eager",
    **{f"{role}.{what}": f"{role}_{what}" for role in ("actor", "critic", "ref", "reward")
       for what in ("num_nodes", "num_gpus_per_node")},
}  # fmt: skip
# The last release that has a flag or a program, where a command of that age gives it away (`calc/frameworks/openrlhf`).
AGES: tuple[tuple[str, str], ...] = (
    (r"examples/train_|openllama2|--flash_attn.*examples/", "0.3"),
    (r"openrlhf\.cli\.train_ppo(?!_ray)", "0.5"),
    (r"--flash_attn\b", "0.8"),
    (r"--bf16\b", "0.9"),
)
# And the programs of tasks that are not modelled with OpenRLHF: their jobs are refused for the task.
TASKS = {script: task for task, script in SCRIPTS.items() if task != "pretrain"} | {"kd": "gkd", "kto": "kto"}
REENTRANT = (
    "model.gradient_checkpointing_reentrant", "actor.gradient_checkpointing_reentrant",
    "gradient_checkpointing_use_reentrant",
)  # fmt: skip
METHODS = {estimator: task for task, estimator in ESTIMATORS.items()} | {
    "reinforce_baseline": "reinforce++",
    "rloo": "grpo",
    "dr_grpo": "grpo",
}
_SCRIPT = re.compile(r"train_(sft|rm|dpo|kd|kto|ppo_ray|ppo)\b")
IGNORED = re.compile(
    r"learning_rate|\blr|warmup|betas|l2|save|ckpt|checkpoint|logging|eval|wandb|tensorboard|dataset|prompt_data|_key|"
    r"template|max_samples|epoch|episode|temperature|top_p|seed|probs|normalize|gamma|lambd|clip|address|runtime_env|"
    r"working_dir|local_rank|master_|hostfile|num_workers|scheduler|beta|label|no_wait|bf16|sync_backend|module|^m$|"
    r"reward_func|kl_estimator|kl_loss|kl_target|kl_horizon|kl\.|disable_fast|init_on_gpu|overlap_comm|max_norm|"
    r"zpg|prefix_caching|remote|agent|max_ckpt|load_"
)


def recognised(flags: Flags) -> bool:
    """True for a command of OpenRLHF."""
    program = flags.program
    if "openrlhf" in program or "train_ppo_ray.py" in program:
        return True
    return bool(_SCRIPT.search(program)) and any(
        name in flags.values for name in ("pretrain", "micro_train_batch_size")
    )


def older(flags: Flags) -> bool:
    """True if a command has the names of before 0.11."""
    given = {*flags.values, *flags.variables}
    return bool(given & set(OLDER.values())) and not given & set(OLDER)


def fields(flags: Flags) -> dict[str, Any]:
    """The fields that a command states."""
    script = _SCRIPT.search(flags.program)
    name = script[1] if script else ""
    found = {"framework": f"openrlhf=={_age(flags.program)}" if older(flags) else "openrlhf", **_shared(flags)}
    if name in TASKS:
        found |= _supervised(flags, TASKS[name])
    else:
        found |= _rl(flags, on_ray=name != "ppo")
    if found["sharding"] == "ddp" and found.get("gpus") == 1:
        found["sharding"] = "none"
    return without_none(found)


def _age(program: str) -> str:
    return next((release for pattern, release in AGES if re.search(pattern, program)), "0.10")


def _ask(name: str) -> tuple[str, ...]:
    """A flag's names, the newer first."""
    return (name, OLDER[name]) if name in OLDER else (name,)


def _shared(flags: Flags) -> dict[str, Any]:
    """The fields that every script has."""
    stage, attention = flags.integer(*_ask("ds.zero_stage")), flags.text(*_ask("ds.attn_implementation"))
    if flags.text(*_ask("ds.zero_stage")) == "0":
        stage = 0
    rank = flags.integer(*_ask("ds.lora.rank"))
    four = flags.on(*_ask("ds.load_in_4bit"))
    dtype = flags.text(*_ask("ds.param_dtype"))
    optimizer = flags.text("optim", "actor.optim", "model.optim")
    flags.has("critic.optim")
    return {
        "micro_batch": flags.integer(*_ask("train.micro_batch_size")) if not _dynamic(flags) else None,
        "max_tokens_per_gpu": _dynamic(flags),
        "global_batch": flags.integer(*_ask("train.batch_size")),
        "sharding": None if stage is None else f"zero{stage}" if stage else "ddp",
        "precision": {"bf16": "mixed", "fp16": "fp16"}.get(dtype or ""),
        "grad_dtype": flags.text(*_ask("ds.grad_accum_dtype")),
        "offload.optimizer": flags.on(*_ask("ds.adam_offload")),
        "attention": _attention(attention, flash=flags.on("flash_attn")),
        "kernels": "liger" if flags.on(*_ask("ds.use_liger_kernel")) else None,
        "packing": flags.on(*_ask("ds.packing_samples")),
        "context_parallel": flags.integer(*_ask("ds.ring_attn_size")),
        "checkpointing": "full" if _checkpoints(flags) else "none",
        "reentrant": flags.on(*REENTRANT) or None,
        "method": ("qlora" if four else "lora") if rank else None,
        "lora.rank": rank,
        "lora.targets": _targets(flags) if rank else None,
        "lora.dropout": flags.number(*_ask("ds.lora.dropout")) if rank else None,
        "optimizer": next((name for name, facts in OPTIMIZERS.items() if facts.spelled.openrlhf == optimizer), None)
        if optimizer
        else None,
    }


def _checkpoints(flags: Flags) -> bool:
    names = ("model.gradient_checkpointing_enable", "actor.gradient_checkpointing_enable", "gradient_checkpointing")
    return flags.on(*names)


def _dynamic(flags: Flags) -> int | None:
    on, tokens = flags.on(*_ask("train.dynamic_batch_enable")), flags.integer(*_ask("train.max_tokens_per_gpu"))
    return tokens if on else None


def _attention(named: str | None, *, flash: bool) -> str | None:
    spelled = {word: name for name, word in ATTENTION.items()}
    return spelled.get(named or "", "flash" if flash else None)


def _targets(flags: Flags) -> str | list[str] | None:
    value = flags.text(*_ask("ds.lora.target_modules"))
    if value is None:
        return None
    return value if value == "all-linear" else listed(value)


def _supervised(flags: Flags, task: str) -> dict[str, Any]:
    pretrains = flags.on(*_ask("model.pretrain_mode_enable"))
    nodes, gpus = flags.integer("num_nodes", "nnodes") or 1, flags.integer("num_gpus", "nproc_per_node")
    found = {
        "task": "pretrain" if pretrains else task,
        "model": flags.text(*_ask("model.model_name_or_path")),
        "seq_len": flags.integer(*_ask("data.max_len")),
        "gpus": gpus and gpus * nodes,
        "gpus_per_node": gpus if gpus and nodes > 1 else None,
    }
    if task == "dpo":
        found["roles.reference.model"] = flags.text(*_ask("ref.model_name_or_path"))
        found["roles.reference.offload.parameters"] = flags.on(*_ask("ref.offload")) or None
    if task == "gkd":
        found["roles.teacher.model"] = flags.text("teacher_model")
    return found


def _rl(flags: Flags, *, on_ray: bool) -> dict[str, Any]:
    estimator = flags.text(*_ask("algo.advantage.estimator"))
    task = METHODS.get(estimator or "gae", "ppo")
    response = flags.integer(*_ask("rollout.max_new_tokens"), "max_new_tokens")
    whole = flags.integer(*_ask("data.max_len"))
    prompt = flags.integer("prompt_max_len") or (whole - response if whole and response and whole > response else None)
    kl = flags.number(*_ask("algo.kl.init_coef"))
    dynamic = _dynamic(flags)
    found: dict[str, Any] = {
        "task": task,
        "model": flags.text(*_ask("actor.model_name_or_path")),
        "prompt_len": prompt,
        "response_len": response,
        "rollout.batch": flags.integer(*_ask("rollout.batch_size")),
        "rollout.n": flags.integer(*_ask("rollout.n_samples_per_prompt")),
        "rollout.micro_batch": None if dynamic else flags.integer(*_ask("rollout.micro_batch_size")),
        "rollout.max_tokens_per_gpu": flags.integer(*_ask("rollout.max_tokens_per_gpu")) if dynamic else None,
        "rollout.tensor_parallel": flags.integer(*_ask("vllm.tensor_parallel_size")),
        "rollout.gpu_memory_utilization": flags.number(*_ask("vllm.gpu_memory_utilization")),
        "rollout.sleep": flags.on(*_ask("vllm.enable_sleep")) or None,
        "rollout.enforce_eager": flags.on(*_ask("vllm.enforce_eager")) or None,
        "entropy_coeff": flags.number(*_ask("actor.entropy_coef")),
    }
    flags.has(*_ask("ds.enable_sleep"))
    if kl is not None:
        found["roles.reference"] = "none" if kl == 0 else {}
    if flags.has(*_ask("reward.remote_url")):
        found["roles.reward"] = "none"
    for name, role in (("reward", "reward"), ("critic", "critic")):
        if model := flags.text(*_ask(f"{name}.model_name_or_path")):
            found[f"roles.{role}.model"] = model
    shared = flags.on("ref_reward_offload")
    for name, role in (("ref", "reference"), ("reward", "reward")):
        if shared or (flags.on(*_ask("ref.offload")) and name == "ref") or flags.on(f"{name}.offload"):
            found[f"roles.{role}.offload.parameters"] = True
    engines = flags.integer(*_ask("vllm.num_engines"))
    if task != "ppo":
        found.pop("roles.critic.model", None)
    if on_ray:
        found |= _placed(flags, found, engines)
    else:
        found |= {"gpus": flags.integer("num_gpus", "nproc_per_node")}
    found["rollout.engine"] = "vllm" if engines else "hf" if older(flags) else None
    if not engines:
        engine = ("tensor_parallel", "gpu_memory_utilization", "sleep", "enforce_eager")
        for place in (f"rollout.{name}" for name in engine):
            found.pop(place)
    return found


def _placed(flags: Flags, roles: Mapping[str, Any], engines: int | None) -> dict[str, Any]:
    """The GPUs of all roles: shared, or of each role that does not join another's."""
    counts: dict[str, int] = {}
    widest = 1
    for name, role in (("actor", "actor"), ("critic", "critic"), ("ref", "reference"), ("reward", "reward")):
        nodes, each = flags.integer(*_ask(f"{name}.num_nodes")), flags.integer(*_ask(f"{name}.num_gpus_per_node"))
        if nodes and each:
            counts[role] = nodes * each
            widest = max(widest, each)
    if roles["task"] != "ppo":
        counts.pop("critic", None)
    for role in ("reference", "reward"):
        if roles.get(f"roles.{role}") == "none":
            counts.pop(role, None)
    if "actor" not in counts:
        return {}
    serving = (engines or 0) * (flags.integer(*_ask("vllm.tensor_parallel_size")) or 1)
    together, apart = flags.on(*_ask("train.colocate_all")), flags.on(*_ask("train.async_enable"))
    if together and not apart:
        gpus = counts["actor"]
        return {"gpus": gpus, "gpus_per_node": widest if gpus > widest else None, "placement": "colocated"}
    if together or flags.on(*_ask("train.colocate_actor_ref")):
        counts.pop("reference", None)
    if together or flags.on(*_ask("train.colocate_critic_reward")):
        counts.pop("reward", None)
    if together:
        counts.pop("critic", None)
    total = sum(counts.values()) + serving
    found: dict[str, Any] = {f"roles.{role}.gpus": count for role, count in counts.items()}
    found |= {"placement": "separate", "gpus": total, "rollout.gpus": serving or None}
    nodes = -(-total // 8)
    found["gpus_per_node"] = total // nodes if total > 8 and total % nodes == 0 else None
    return found
