"""slime's commands read back as fields of a scenario; the inverse of `calc/launch/slime.py`.

Scripts keep flags in arrays of the shell, `PERF_ARGS=(…)`, each of which `calc.diagnose.shell` puts where it is used.
"""

from __future__ import annotations

import re
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.diagnose.flags import Flags, listed, without_none
from calc.launch.slime import DEGREES, ESTIMATORS

METHODS = {word: task for task, word in ESTIMATORS.items()} | {
    "gspo": "grpo",
    "cispo": "grpo",
    "reinforce_plus_plus_baseline": "reinforce++",
    "ppo": "ppo",
}
OWN = ("rollout_num_gpus_per_engine", "n_samples_per_prompt", "actor_num_gpus_per_node", "rollout_batch_size")
IGNORED = re.compile(
    r"^lr|min_lr|weight_decay|adam_|clip_grad|save|load|eval|wandb|tensorboard|rm_|reward|prompt_data|input_key|"
    r"label_key|tool_key|metadata_key|chat_template|shuffle|num_rollout|num_epoch|temperature|top_p|top_k|balance|"
    r"normalize|kl_|eps_clip|tis|mismatch|attention|dropout|accumulate|rotary|rope|norm|swiglu|vocab|position|bias|"
    r"num_layers$|hidden_size|heads|query|kv_channels|untie|moe_(?!enable|token|expert|pad)|num_experts|latent|lora|mscale|"
    r"overlap|precision_aware|router|seed|debug|dynamic_sampling|over_sampling|partial|log_|runtime_env|address|"
    r"working_dir|custom|use_fault|rollout_(?:stop|seed|skip|global|function|external)|multi_turn|spec$|sglang_log|"
    r"sglang_(?:router|cuda_graph|watchdog|disable|attention|chunked)|ci_|update_weight_(?!buffer)"
)


def recognised(flags: Flags) -> bool:
    """True for a command of slime: its own flags beside SGLang's or Megatron's."""
    named = sum(name in flags.values or name in flags.variables for name in OWN)
    return named > 1 and ("train" in flags.program or "sglang" in " ".join(flags.values))


def fields(flags: Flags) -> dict[str, Any]:
    """The fields that a command states."""
    n, batch = flags.integer("n_samples_per_prompt"), flags.integer("rollout_batch_size")
    steps = flags.integer("num_steps_per_rollout")
    dynamic = flags.on("use_dynamic_batch_size")
    tokens, scored = flags.integer("max_tokens_per_gpu"), flags.integer("log_probs_max_tokens_per_gpu")
    flags.has("num_gpus_per_node", "hf_checkpoint", "ref_load", "advantage_estimator")
    optimizers = {facts.spelled.slime: name for name, facts in OPTIMIZERS.items() if facts.spelled.slime}
    prompts, whole = flags.integer("rollout_max_prompt_len"), flags.integer("rollout_max_context_len")
    answers = flags.integer("rollout_max_response_len")
    sft = flags.text("loss_type") == "sft_loss"
    stated: dict[str, Any] = {
        "framework": "slime",
        "task": "sft" if sft else METHODS.get(flags.text("advantage_estimator") or "grpo", "grpo"),
        "model": flags.text("hf_checkpoint"),
        **_machine(flags),
        "prompt_len": prompts or (whole - answers if whole and answers and whole > answers else None),
        "response_len": answers,
        "rollout.batch": None if sft else batch,
        "rollout.n": n,
        "global_batch": flags.integer("global_batch_size") or (batch * n // steps if batch and n and steps else None),
        "micro_batch": None if dynamic else flags.integer("micro_batch_size"),
        "max_tokens_per_gpu": tokens if dynamic else None,
        "rollout.max_tokens_per_gpu": scored if dynamic else None,
        "rollout.tensor_parallel": flags.integer("rollout_num_gpus_per_engine"),
        "rollout.gpu_memory_utilization": flags.number("sglang_mem_fraction_static"),
        "rollout.max_num_seqs": flags.integer("sglang_server_concurrency"),
        "entropy_coeff": flags.number("entropy_coef"),
        "roles.reference": {} if flags.on("use_kl_loss") or flags.number("kl_coef") else None,
        **{field: flags.integer(called.replace("-", "_")) for field, called in DEGREES.items()},
        "virtual_pipeline": flags.integer("num_virtual_stages_per_pipeline_rank"),
        "sequence_parallel": flags.switch("sequence_parallel"),
        "expert_capacity": flags.number("moe_expert_capacity_factor"),
        "expert_padding": flags.switch("moe_pad_expert_input_to_capacity"),
        "optimizer": optimizers.get(flags.text("optimizer") or ""),
        "offload.optimizer": flags.switch("optimizer_cpu_offload"),
        **_recomputed(flags),
    }
    return without_none(stated)


def _machine(flags: Flags) -> dict[str, Any]:
    """The GPUs of training, and of SGLang where it has its own."""
    own = flags.machine(("actor_num_gpus_per_node",), ("actor_num_nodes",))
    apart = flags.integer("rollout_num_gpus")
    if flags.on("colocate") or not (apart and own["gpus"]):
        return own
    return own | {
        "gpus": own["gpus"] + apart,
        "placement": "separate",
        "rollout.gpus": apart,
        "roles.actor.gpus": own["gpus"],
    }


def _recomputed(flags: Flags) -> dict[str, Any]:
    """The fields on layers, or parts of them, that run again for their backward."""
    granularity, modules = flags.text("recompute_granularity"), flags.text("recompute_modules")
    flags.has("recompute_method", "recompute_num_layers")
    if granularity == "selective" and modules:
        return {"checkpointing": "selective", "recompute_modules": listed(modules)}
    # attention alone is nothing, where fused
    return {"checkpointing": {"full": "full", "selective": "none"}.get(granularity or "none", "none")}
