"""TRL's releases: what each runs on, and the defaults of its configurations. A release that changes one adds a row.

Files are named as in `calc.frameworks.trl.trl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from calc.frameworks.releases import Default, Table
from calc.scenario.words import PREFERENCE


class Pins(NamedTuple):
    """The libraries that a release runs on.

    None is pinned: the newest releases, vLLM as new as METADATA allows (>=0.22.0, <=0.31.0).
    """

    deepspeed: str
    torch: str
    transformers: str
    vllm: str


FIRST = "1.16.0"
RELEASES: Mapping[str, Pins] = {
    FIRST: Pins("0.19.8", "2.13.0", "5.23.0", "0.31.0"),
}

DEFAULTS = Table(
    Default("trainer", FIRST, "transformers", "its trainers are built on Transformers' Trainer"),
    Default("micro_batch", FIRST, 8, "per_device_train_batch_size 8, no accumulation (transformers training_args.py)"),
    Default("optimizer", FIRST, "adamw", "adamw_torch_fused (transformers training_args.py:796-803)"),
    Default("offload.optimizer", FIRST, False, "accelerate_configs/zero*.yaml: offload_optimizer_device none"),
    Default("offload.parameters", FIRST, False, "accelerate_configs/zero*.yaml: offload_param_device none"),
    Default("checkpointing", FIRST, "full", "gradient_checkpointing true (trainer/base_config.py:62)"),
    Default("attention", FIRST, "sdpa", "transformers modeling_utils.py: sdpa where nothing else is asked"),
    Default("loss", FIRST, "fused", "add_fused_lm_head (trainer/utils.py:1548)"),
    Default("loss", FIRST, "full", "a scalar head has no logits to fold", ("rm",)),
    Default("loss", FIRST, "full", "outputs.logits (experimental/orpo/orpo_trainer.py:777)", ("orpo", "simpo")),
    Default("loss", FIRST, "full", "outputs.logits (experimental/gkd/gkd_trainer.py:347)", ("gkd",)),
    Default("logprob", FIRST, "logsumexp", "an online logsumexp over the tiles (kernels/chunked_logprob.py)"),
    Default("logprob", FIRST, "selective", "selective_log_softmax (orpo_trainer.py:738)", ("orpo", "simpo")),
    Default("packing", FIRST, False, "packing false (trainer/sft_config.py)"),
    Default("on_policy", FIRST, 0, "nothing is generated, but in GKD and RL"),
    Default("on_policy", FIRST, 0.5, "lmbda (experimental/gkd/gkd_config.py:59)", ("gkd",)),
)

SUPERVISED = Table(
    Default(
        "seq_len", FIRST, 1024,
        "max_length 1024 (trainer/sft_config.py:203, dpo_config.py:196, kto_config.py:166, reward_config.py:145)",
    ),
)  # fmt: skip

# Where completions are generated.
GENERATING = Table(
    Default("prompt_len", FIRST, 512, "no field: prompts are not cut"),
    Default("response_len", FIRST, 512, "max_completion_length (trainer/grpo_config.py:494)"),
    Default("rollout.engine", FIRST, "hf", "use_vllm false (trainer/grpo_config.py:587)"),
    Default("rollout.tensor_parallel", FIRST, 1, "vllm_tensor_parallel_size (:671), scripts/vllm_serve.py"),
    Default("rollout.gpu_memory_utilization", FIRST, 0.3, "vllm_gpu_memory_utilization (:656)"),
    Default("rollout.n", FIRST, 8, "num_generations (trainer/grpo_config.py:480)"),
    Default("rollout.sleep", FIRST, False, "vllm_enable_sleep_mode (:612)"),
    Default("roles.reference", FIRST, "none", "beta 0.0 (:681); RLOO's 0.05 loads one"),
    Default("roles.reward", FIRST, "none", "functions score, unless a model is named"),
)

# With a vLLM server on GPUs of its own.
SERVER = Table(
    Default("rollout.engine", FIRST, "vllm", "vllm_mode server"),
    Default("rollout.gpu_memory_utilization", FIRST, 0.9, "of a server, scripts/vllm_serve.py:111"),
)

ADAPTERS = Table(
    Default("lora.rank", FIRST, 16, "trainer/model_config.py:107"),
    Default(
        "lora.targets", FIRST, "all-linear",
        "lora_target_modules None: peft would take q_proj and v_proj of a Llama",
    ),
    Default("lora.dropout", FIRST, 0.05, "trainer/model_config.py:115"),
    Default(
        "lora.dropout", FIRST, 0,
        "`disable_dropout` is true (reward_config.py:128, dpo_config.py:185, kto_config.py:156, orpo_config.py:97)",
        ("rm", "gkd", *PREFERENCE),
    ),
    Default("lora.units", FIRST, "own", "peft/utils/other.py: fsdp_auto_wrap_policy"),
)  # fmt: skip
