"""OpenRLHF's releases: what each pins, and the defaults of its command lines. A release that changes one adds a row.

Files are named as in `calc.frameworks.openrlhf.openrlhf`, those of RL as in `calc.frameworks.openrlhf.rl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from calc.frameworks.releases import GONE, Default, Table


class Pins(NamedTuple):
    """The libraries that a release pins: in requirements.txt, and vLLM in an extra of setup.py; torch is never pinned.

    Before 0.3.6 vLLM is a comment in requirements.txt.
    """

    deepspeed: str
    transformers: str
    flash_attn: str
    vllm: str


RELEASES: Mapping[str, Pins] = {
    "0.3.0": Pins("0.13.5", "4.40.0", "2.5.8", "0.4.2"),
    "0.3.1": Pins("0.13.5", "4.41.0", "2.5.8", "0.4.2"),
    "0.3.4": Pins("0.13.5", "4.41.0", "2.5.8", "0.4.2"),  # packing
    "0.3.6": Pins("0.14.4", "4.42.4", "2.6.1", "0.4.2"),  # sft 2048 tokens, rm micro batch 1
    "0.3.7": Pins("0.14.4", "4.42.4", "2.6.1", "0.4.2"),  # packing for rm and dpo
    "0.3.8": Pins("0.14.4", "4.43.1", "2.6.1", "0.4.2"),
    "0.4.0": Pins("0.14.4", "4.43.3", "2.6.1", "0.4.2"),
    "0.4.3": Pins("0.15.0", "4.44.2", "2.6.1", "0.4.2"),
    "0.4.4": Pins("0.15.0", "4.44.2", "2.6.1", "0.4.2"),  # no log-softmax thrown away
    "0.4.5": Pins("0.15.0", "4.44.2", "2.6.1", "0.4.2"),  # several samples per prompt
    "0.4.6": Pins("0.15.0", "4.46.1", "2.6.1", "0.4.2"),  # Transformers' logits stay bf16
    "0.5.1": Pins("0.15.0", "4.46.1", "2.6.1", "0.4.2"),  # reinforce
    "0.5.2": Pins("0.15.0", "4.46.3", "2.6.1", "0.4.2"),
    "0.5.3": Pins("0.15.0", "4.46.3", "2.7.0.post2", "0.6.4.post1"),
    "0.5.4": Pins("0.15.0", "4.46.3", "2.7.0.post2", "0.6.4.post1"),  # gradients accumulate in DeepSpeed's type, bf16
    "0.5.5": Pins("0.15.0", "4.47.1", "2.7.0.post2", "0.6.5"),
    "0.5.6": Pins("0.15.0", "4.46.3", "2.7.0.post2", "0.6.5"),  # logits cast to fp32 in Actor.forward
    "0.5.8": Pins("0.16.3", "4.48.2", "2.7.0.post2", "0.7.2"),  # gather minus logsumexp, row by row
    "0.5.9": Pins("0.16.3", "4.48.2", "2.7.0.post2", "0.7.2"),  # weights to vLLM by CUDA IPC
    "0.6.0": Pins("0.16.3", "4.48.3", "2.7.0.post2", "0.7.2"),  # group_norm; a reference only with a KL coefficient
    "0.6.1": Pins("0.16.4", "4.48.3", "2.7.0.post2", "0.7.2"),  # optimizer states can sleep
    "0.6.2": Pins("0.16.4", "4.48.3", "2.7.0.post2", "0.7.2"),  # flash-attn's cross entropy for log-probs
    "0.6.3": Pins("0.16.4", "4.50.0", "2.7.4.post1", "0.8.1"),
    "0.6.4": Pins("0.16.5", "4.50.0", "2.7.4.post1", "0.8.2"),  # vLLM's share 0.95
    "0.7.0": Pins("0.16.5", "4.50.0", "2.7.4.post1", "0.8.3"),  # sft by log-probs too; no slice of the logits
    "0.7.1": Pins("0.16.6", "4.51.3", "2.7.4.post1", "0.8.3"),  # no generation by Transformers
    "0.7.3": Pins("0.16.7", "4.51.3", "2.7.4.post1", "0.8.3"),  # the reward model scores first
    "0.7.5": Pins("0.16.7", "4.51.3", "2.7.4.post1", "0.8.5.post1"),  # every rank copies the weights that it saves
    "0.8.0": Pins("0.16.7", "4.51.3", "2.7.4.post1", "0.8.5.post1"),  # asynchronous training
    "0.8.1": Pins("0.16.8", "4.51.3", "2.7.4.post1", "0.8.5.post1"),
    "0.8.2": Pins("0.16.9", "4.52.3", "2.7.4.post1", "0.8.5.post1"),
    "0.8.3": Pins("0.17.0", "4.52.3", "2.7.4.post1", "0.8.5.post1"),
    "0.8.4": Pins("0.17.1", "4.52.3", "2.7.4.post1", "0.9.0.1"),
    "0.8.5": Pins("0.17.1", "4.52.4", "2.8.0.post2", "0.9.1"),
    "0.8.6": Pins("0.17.2", "4.53.1", "2.8.0.post2", "0.9.2"),
    "0.8.8": Pins("0.17.3", "4.54.1", "2.8.2", "0.10.0"),
    "0.8.9": Pins("0.17.4", "4.54.1", "2.8.2", "0.10.0"),
    "0.8.10": Pins("0.17.5", "4.55.2", "2.8.3", "0.10.1.1"),  # attn_implementation, FlashAttention-2 by default
    "0.8.11": Pins("0.17.6", "4.56.1", "2.8.3", "0.10.2"),
    "0.9.0": Pins("0.18.1", "4.57.0", "2.8.3", "0.11.0"),
    "0.9.1": Pins("0.18.3", "4.57.3", "2.8.3", "0.13.0"),  # actor and critic train at once
    "0.9.2": Pins("0.18.3", "4.57.3", "2.8.3", "0.13.0"),  # vLLM's weights alone wake for new ones
    "0.9.3": Pins("0.18.5", "4.57.6", "2.8.3", "0.15.0"),
    "0.9.5": Pins("0.18.7", "5.3.0", "2.8.3", "0.17.0"),
    "0.9.6": Pins("0.18.8", "5.3.0", "2.8.3", "0.17.1"),
    "0.9.7": Pins("0.18.8", "5.3.0", "2.8.3", "0.18.0"),
    "0.9.8": Pins("0.18.8", "5.3.0", "2.8.3", "0.18.0"),  # max_len for prompt and response together
    "0.9.10": Pins("0.18.9", "5.5.0", "2.8.3", "0.19.0"),
    "0.10.0": Pins("0.18.9", "5.5.3", "2.8.3", "0.19.0"),  # RL micro batch 1
    "0.10.2": Pins("0.18.9", "5.5.4", "2.8.3", "0.19.1"),
    "0.10.3": Pins("0.18.9", "5.7.0", "2.8.3", "0.19.1"),
    "0.10.4": Pins("0.19.1", "5.7.0", "2.8.3", "0.22.1"),
    "0.11.0": Pins("0.19.5", "5.15.0", "2.8.3", "0.27.1"),
    "0.11.2": Pins("0.19.6", "5.15.0", "2.8.3", "0.29.0"),
}
FIRST = "0.3.0"

DEFAULTS = Table(
    Default(
        "micro_batch", FIRST, 8,
        "8 in train_sft.py:147 and train_dpo.py:153 (0.3.8), train.micro_batch_size :166 and :188 (0.11.0)",
    ),
    Default("micro_batch", FIRST, 8, "8 before 0.3.6 (examples/train_rm.py:130 of 0.3.1)", ("rm",)),
    Default("micro_batch", "0.3.6", 1, "1 in train_rm.py:169 (0.3.8) and :246 (0.11.0)", ("rm",)),
    Default(
        "global_batch", FIRST, 128,
        "train_sft.py:148, train_rm.py:170, train_dpo.py:154 (0.3.8); :167, :247, :189 (0.11.0)",
    ),
    Default(
        "precision", FIRST, "mixed",
        "ds.param_dtype bf16 (train_sft.py:179-185, 0.11.0). Until 0.9.1 a flag, --bf16, off (train_sft.py:154, 0.3.8):"
        " every example script sets it, and DeepSpeed then keeps fp32 master weights beside bf16 ones.",
    ),
    Default(
        "sharding", FIRST, "zero2", "train_sft.py:153 (0.3.8), :163 (0.6.1), :178 (0.11.0), on one GPU too"
    ),
    Default(
        "optimizer", FIRST, "adamw",
        'utils/deepspeed.py:89 (0.3.8); "AdamW" in DeepSpeed\'s config, deepspeed.py:359 (0.11.0)',
    ),
    Default(
        "optimizer_impl", FIRST, "fused", "FusedAdam, or DeepSpeedCPUAdam with adam_offload: neither has temporaries"
    ),
    Default("offload.optimizer", FIRST, False, "--adam_offload, train_sft.py:156 (0.3.8), :187 (0.11.0)"),
    Default(
        "offload.parameters", FIRST, False, "never for a trained model: get_train_ds_config(offload=False)"
    ),
    Default("grad_dtype", FIRST, "fp32", "utils/deepspeed_utils.py:56 (0.3.8): None becomes fp32"),
    Default(
        "grad_dtype", "0.5.4", "bf16",
        "since 0.5.4 None reaches DeepSpeed, which takes bf16 under ZeRO (runtime/engine.py:1017-1021 of 0.16.4)",
    ),
    Default(
        "checkpointing", FIRST, "none", "--gradient_checkpointing, train_sft.py:150 (0.3.8), :168 (0.11.0)"
    ),
    Default("reentrant", FIRST, False, "--gradient_checkpointing_use_reentrant; train_sft.py:204 (0.11.0)"),
    Default("attention", FIRST, "eager", "eager unless --flash_attn (models/actor.py:45, model.py:60 of 0.3.8)"),
    Default("attention", "0.8.10", "flash", "train_sft.py:188-193 (0.11.0)"),
    Default(
        "loss", FIRST, "full",
        "Liger's fused loss is never reached: the model gets no labels (models/actor.py:265, 0.11.0)",
    ),
    Default("logprob", FIRST, "log-softmax-fp32", "trainer/dpo_trainer.py log_softmax until 0.5.7"),
    Default("logprob", "0.5.8", "logsumexp", "log_probs_from_logits (models/utils.py:91-106, 0.6.1) since"),
    Default("packing", FIRST, False, "train_sft.py:181 (0.3.8), :264 (0.11.0)"),
)  # fmt: skip

# Pretraining is train_sft.py --pretrain_mode, with the same defaults.
SUPERVISED = Table(
    Default(
        "seq_len", FIRST, 512, "train_sft.py:197, train_rm.py:192, train_dpo.py:210 (0.3.8); :284, :298, :318 (0.11.0)"
    ),
    Default("seq_len", FIRST, 512, "sft 512 before 0.3.6", ("pretrain", "sft")),
    Default("seq_len", "0.3.6", 2048, "train_sft.py:197 (0.3.8); :284 (0.11.0)", ("pretrain", "sft")),
)

RL = Table(
    Default("micro_batch", FIRST, 4, "micro_train_batch_size: ppo.py:294 (0.3.1)"),
    Default("micro_batch", "0.10.0", 1, "micro_train_batch_size: ray.py:388 (0.10.0)"),
    Default(
        "prompt_len", FIRST, 1024,
        "prompt_max_len; since 0.9.8 max_len, 2048, bounds prompt and response together",
    ),
    Default("response_len", FIRST, 1024, "generate_max_len"),
    Default(
        "rollout.engine", FIRST, "hf", "vllm_num_engines is None: Transformers generates, as long as it can"
    ),
    Default("rollout.engine", "0.6.2", "vllm", "Every example of 0.6.2 has vLLM."),
    Default("rollout.tensor_parallel", FIRST, 1, "vllm_tensor_parallel_size"),
    Default(
        "rollout.gpu_memory_utilization", FIRST, 0.9,
        "vllm_gpu_memory_utilization: since 0.5.8; before it is not passed, and vLLM's own is 0.9",
    ),
    Default("rollout.gpu_memory_utilization", "0.6.4", 0.95, "vllm_gpu_memory_utilization"),
    Default("rollout.n", FIRST, 1, "n_samples_per_prompt is 1"),
    Default(
        "rollout.n", FIRST, 8,
        "n_samples_per_prompt is 1, which ray.py refuses for group_norm; examples/scripts/train_grpo_ray_*.sh have 8",
        ("grpo",),
    ),
    Default("rollout.micro_batch", FIRST, 8, "micro_rollout_batch_size, of every role: ppo.py:280 (0.3.8)"),
    Default("rollout.micro_batch", "0.10.0", 1, "micro_rollout_batch_size, of every role: ray.py:369 (0.10.0)"),
    Default("rollout.sleep", FIRST, False, "vllm_enable_sleep"),
    Default("rollout.enforce_eager", FIRST, False, "enforce_eager, a flag since 0.4.4"),
    Default("rollout.batch", FIRST, 512, "rollout_batch_size: 512 in ray.py until 0.3.5"),
    Default("rollout.batch", "0.3.6", 1024, "rollout_batch_size of ray.py"),
    Default("entropy_coeff", "0.8.0", 0, "entropy_loss_coef: 0, later None (ray.py:352 of 0.8.0, :374 of 0.9.0)"),
    Default("max_tokens_per_gpu", "0.8.6", None, "use_dynamic_batch is off; train_max_tokens_per_gpu counts with it"),
    Default(
        "rollout.max_tokens_per_gpu", "0.8.6", None,
        "train_max_tokens_per_gpu counts for scoring, too, where rollout_max_tokens_per_gpu is None",
    ),
)  # fmt: skip

# With one group of processes, as `train_ppo.py` has it.
ONE_GROUP = Table(Default("rollout.batch", FIRST, 512, "rollout_batch_size: 512 in ppo.py"))

# Where all models share GPUs.
COLOCATED = Table(
    Default(
        "rollout.gpu_memory_utilization", "0.5.8", 0.4,
        "colocate_all_models turns 0.9 and more into it: ray.py:67-68 of 0.5.8",
    ),
    Default("rollout.gpu_memory_utilization", "0.6.1", GONE, "colocate_all_models leaves the share alone"),
)  # fmt: skip

ADAPTERS = Table(
    Default(
        "lora.rank", FIRST, 64,
        "the flag's default is 0, no adapter (train_sft.py:175); the example scripts set 64",
    ),
    Default("lora.targets", FIRST, "all-linear", "train_sft.py:177 (0.3.8), :260 (0.11.0)"),
    Default("lora.dropout", FIRST, 0, "train_sft.py:178 (0.3.8), :261 (0.11.0)"),
    Default("lora.units", FIRST, "own", "DeepSpeed has no FSDP units"),
)  # fmt: skip
