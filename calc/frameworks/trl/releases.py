"""TRL's releases: what each runs on, and the defaults of its configurations. A release that changes one adds a row.

Files are named as in `calc.frameworks.trl.trl`; where a row is older than 1.16.0, in the release of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from calc.frameworks.releases import Default, Table
from calc.scenario.words import PREFERENCE


class Pins(NamedTuple):
    """The libraries that a release runs on; "" for vLLM where no trainer knows it.

    TRL pins none of them: they are the newest of its day that its METADATA allows.
    """

    deepspeed: str
    torch: str
    transformers: str
    vllm: str
    accelerate: str


FIRST = "0.7.11"
NEWEST = "1.16.0"
RELEASES: Mapping[str, Pins] = {
    FIRST: Pins("0.13.2", "2.2.0", "4.37.2", "", "0.27.2"),
    "0.8.0": Pins("0.14.0", "2.2.1", "4.38.2", "", "0.28.0"),  # kto
    "0.8.2": Pins("0.14.0", "2.2.2", "4.39.3", "", "0.29.2"),  # orpo, cpo
    "0.9.2": Pins("0.14.2", "2.3.0", "4.41.2", "", "0.30.1"),
    "0.9.6": Pins("0.14.4", "2.3.1", "4.42.3", "", "0.32.0"),  # dpo: a cross entropy of the chosen, used or not
    "0.10.1": Pins("0.15.0", "2.4.0", "4.44.2", "", "0.33.0"),
    "0.11.0": Pins("0.15.1", "2.4.1", "4.44.2", "", "0.34.2"),  # gkd
    "0.12.0": Pins("0.15.3", "2.5.1", "4.46.1", "", "1.0.1"),  # PPOTrainer; dpo keeps no logits
    "0.13.0": Pins("0.16.1", "2.5.1", "4.47.0", "", "1.2.1"),  # ppo with adapters
    "0.14.0": Pins("0.16.3", "2.5.1", "4.48.1", "0.7.0", "1.3.0"),  # grpo; lengths of 1024
    "0.15.0": Pins("0.16.3", "2.6.0", "4.48.3", "0.7.2", "1.3.0"),  # selective_log_softmax; sft gathers its logits
    "0.15.2": Pins("0.16.4", "2.6.0", "4.49.0", "0.7.2", "1.4.0"),
    "0.16.0": Pins("0.16.4", "2.6.0", "4.50.0", "0.8.1", "1.5.2"),  # trl vllm-serve; logits over a temperature
    "0.17.0": Pins("0.16.7", "2.7.0", "4.51.3", "0.8.4", "1.6.0"),  # grpo generates for all steps at once
    "0.18.0": Pins("0.16.9", "2.7.0", "4.52.3", "0.8.5", "1.7.0"),  # vLLM beside the trainer
    "0.19.0": Pins("0.17.1", "2.7.1", "4.52.4", "0.9.1", "1.8.1"),  # bf16; no reference in grpo; dpo asks for states
    "0.20.0": Pins("0.17.2", "2.7.1", "4.54.0", "0.10.0", "1.9.0"),  # entropies
    "0.22.0": Pins("0.17.5", "2.8.0", "4.55.4", "0.10.1", "1.10.1"),  # checkpointing
    "0.23.0": Pins("0.17.5", "2.8.0", "4.56.1", "0.10.1", "1.10.1"),  # vLLM sleeps; entropies of 128 tokens at a time
    "0.24.0": Pins("0.18.0", "2.8.0", "4.57.1", "0.10.2", "1.10.1"),  # rm: pairs in one forward
    "0.25.0": Pins("0.18.1", "2.9.0", "4.57.1", "0.10.2", "1.11.0"),
    "0.26.0": Pins("0.18.2", "2.9.1", "4.57.3", "0.11.2", "1.12.0"),  # weights in the checkpoint's type; no length
    "0.27.0": Pins("0.18.4", "2.9.1", "4.57.3", "0.12.0", "1.12.0"),  # weights in fp32
    "0.29.0": Pins("0.18.5", "2.10.0", "5.2.0", "0.12.0", "1.12.0"),  # dpo keeps its logits twice
    "1.0.0": Pins("0.18.8", "2.11.0", "5.4.0", "0.17.1", "1.13.0"),  # grpo divides in place
    "1.6.0": Pins("0.19.2", "2.12.0", "5.11.0", "0.19.0", "1.13.0"),  # metrics read slices
    "1.7.0": Pins("0.19.3", "2.12.0", "5.12.1", "0.23.0", "1.14.0"),  # sft in pieces of 256 tokens
    "1.10.0": Pins("0.19.5", "2.13.0", "5.15.0", "0.26.0", "1.14.0"),  # grpo: completions of 512, divided copies
    "1.13.0": Pins("0.19.6", "2.13.0", "5.16.1", "0.28.0", "1.15.0"),  # no PPOTrainer
    "1.14.0": Pins("0.19.7", "2.13.0", "5.17.0", "0.30.0", "1.15.0"),  # a kernel of log-probabilities and entropies
    "1.15.0": Pins("0.19.8", "2.13.0", "5.18.0", "0.31.0", "1.15.0"),  # a head folded into the loss
    NEWEST: Pins("0.19.8", "2.13.0", "5.23.0", "0.31.0", "1.15.0"),
}

_DISABLED = "`disable_dropout` is true (reward_config.py:128, dpo_config.py:185, kto_config.py:156, orpo_config.py:97)"

DEFAULTS = Table(
    Default("trainer", FIRST, "transformers", "its trainers are built on Transformers' Trainer"),
    Default("micro_batch", FIRST, 8, "per_device_train_batch_size 8, no accumulation (transformers training_args.py)"),
    Default("optimizer", FIRST, "adamw", "adamw_torch; since Transformers 4.54 fused (transformers training_args.py)"),
    Default("offload.optimizer", FIRST, False, "accelerate_configs/zero*.yaml: offload_optimizer_device none"),
    Default("offload.parameters", FIRST, False, "accelerate_configs/zero*.yaml: offload_param_device none"),
    Default("checkpointing", FIRST, "none", "gradient_checkpointing false (transformers training_args.py)"),
    Default("checkpointing", "0.22.0", "full", "gradient_checkpointing true (trainer/*_config.py)"),
    # PPOConfig inherits Transformers' until experimental/ppo/ppo_config.py has its own
    Default("checkpointing", FIRST, "none", "gradient_checkpointing false (transformers training_args.py)", ("ppo",)),
    Default("checkpointing", "0.27.0", "full", "gradient_checkpointing true (trainer/ppo_config.py)", ("ppo",)),
    Default("attention", FIRST, "sdpa", "transformers modeling_utils.py: sdpa where nothing else is asked"),
    Default("loss", FIRST, "full", "outputs.logits"),
    Default("loss", "1.15.0", "fused", "add_fused_lm_head (trainer/utils.py:1548 of 1.16.0)"),
    Default("loss", FIRST, "full", "the model's own (trainer/sft_trainer.py)", ("sft",)),
    Default("loss", "1.7.0", "chunked", "loss_type chunked_nll (trainer/sft_config.py:334 of 1.14.0)", ("sft",)),
    Default("loss", "1.15.0", "fused", "add_fused_lm_head (trainer/utils.py:1548 of 1.16.0)", ("sft",)),
    Default("loss", FIRST, "full", "a scalar head has no logits to fold", ("rm",)),
    Default("loss", FIRST, "full", "outputs.logits (experimental/orpo/orpo_trainer.py:777)", ("orpo", "simpo")),
    Default("loss", FIRST, "full", "outputs.logits (experimental/gkd/gkd_trainer.py:347)", ("gkd",)),
    Default("logprob", FIRST, "log-softmax-fp32", "logits.log_softmax(-1) (trainer/dpo_trainer.py)"),
    Default("logprob", "0.15.0", "selective", "selective_log_softmax (trainer/utils.py)"),
    Default("logprob", "1.15.0", "logsumexp", "an online logsumexp over the tiles (kernels/chunked_logprob.py)"),
    Default("logprob", FIRST, "log-softmax-fp32", "logits.log_softmax(-1) (orpo_trainer.py)", ("orpo", "simpo")),
    Default("logprob", "0.15.0", "selective", "selective_log_softmax (orpo_trainer.py:738)", ("orpo", "simpo")),
    Default("logprob", FIRST, "selective", "row by row (trainer/grpo_trainer.py:353 of 0.14.0)", ("grpo",)),
    Default("logprob", "1.15.0", "logsumexp", "a logsumexp over the tiles (kernels/chunked_logprob.py)", ("grpo",)),
    Default("packing", FIRST, False, "packing false (trainer/sft_config.py)"),
    Default("padding_free", "0.24.0", False, "padding_free false (trainer/sft_config.py:204)", ("sft",)),
    Default("on_policy", FIRST, 0, "nothing is generated, but in GKD and RL"),
    Default("on_policy", FIRST, 0.5, "lmbda (experimental/gkd/gkd_config.py:59)", ("gkd",)),
)  # fmt: skip

SUPERVISED = Table(
    Default("seq_len", FIRST, 512, "max_length None, which the trainer makes 512 (trainer/dpo_trainer.py:301)"),
    Default(
        "seq_len", "0.14.0", 1024,
        "max_length 1024 (trainer/sft_config.py:203, dpo_config.py:196, kto_config.py:166, reward_config.py:145)",
    ),
    Default("seq_len", FIRST, 1024, "max_seq_length None: at most 1024 (trainer/sft_trainer.py)", ("sft", "gkd")),
)  # fmt: skip

# Where completions are generated.
GENERATING = Table(
    Default("prompt_len", FIRST, 512, "max_prompt_length; since 0.26.0 no field: prompts are not cut"),
    Default("response_len", FIRST, 256, "max_completion_length (trainer/grpo_config.py)"),
    Default("response_len", "1.10.0", 512, "max_completion_length (trainer/grpo_config.py:494 of 1.16.0)"),
    Default("rollout.engine", FIRST, "hf", "use_vllm false (trainer/grpo_config.py:587)"),
    Default("rollout.tensor_parallel", FIRST, 1, "vllm_tensor_parallel_size (:671), scripts/vllm_serve.py"),
    Default("rollout.gpu_memory_utilization", FIRST, 0.9, "vllm_gpu_memory_utilization (trainer/grpo_config.py)"),
    Default("rollout.gpu_memory_utilization", "0.18.0", 0.3, "vllm_gpu_memory_utilization (:656 of 1.16.0)"),
    Default("rollout.max_model_len", "0.26.0", None, "vllm_max_model_length (trainer/grpo_config.py:664)"),
    Default("rollout.n", FIRST, 8, "num_generations (trainer/grpo_config.py:480)"),
    Default("rollout.sleep", FIRST, False, "vllm_enable_sleep_mode (:612), since 0.23.0"),
    Default("roles.reference", "0.19.0", "none", "beta 0.0 (:681), before 0.04; RLOO's 0.05 loads one"),
    Default("roles.reward", FIRST, "none", "functions score, unless a model is named"),
)

# With a vLLM server on GPUs of its own.
SERVER = Table(
    Default("rollout.engine", FIRST, "vllm", "vllm_mode server"),
    Default("rollout.gpu_memory_utilization", FIRST, 0.9, "of a server, scripts/vllm_serve.py:111"),
    Default("rollout.max_model_len", FIRST, None, "of a server, scripts/vllm_serve.py:127"),
)

# PPOTrainer, whose configuration is `OnPolicyConfig` of trainer/utils.py until 0.26.
PPO = Table(
    Default("prompt_len", FIRST, 512, "no field: prompts are as long as the data's"),
    Default("response_len", FIRST, 53, "response_length (trainer/utils.py, OnPolicyConfig)"),
    Default("rollout.engine", FIRST, "hf", "Transformers generates (trainer/utils.py:batch_generation)"),
    Default("rollout.tensor_parallel", FIRST, 1, "there is no vLLM"),
    Default("rollout.gpu_memory_utilization", FIRST, 0.9, "there is no vLLM"),
    Default("rollout.n", FIRST, 1, "one completion of each prompt"),
    Default("rollout.sleep", FIRST, False, "there is no vLLM"),
    Default("rollout.micro_batch", FIRST, 64, "local_rollout_forward_batch_size (trainer/utils.py, OnPolicyConfig)"),
)

ADAPTERS = Table(
    Default("lora.rank", FIRST, 16, "trainer/model_config.py:107"),
    Default(
        "lora.targets", FIRST, "all-linear",
        "lora_target_modules None: peft would take q_proj and v_proj of a Llama",
    ),
    Default("lora.dropout", FIRST, 0.05, "trainer/model_config.py:115"),
    Default("lora.dropout", FIRST, 0, _DISABLED, ("gkd", "ppo", *PREFERENCE)),
    Default("lora.dropout", "0.14.0", 0, _DISABLED, ("rm",)),
    Default("lora.units", FIRST, "own", "peft/utils/other.py: fsdp_auto_wrap_policy"),
)  # fmt: skip
