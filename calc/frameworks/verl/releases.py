"""verl's releases: what each runs on, and its defaults. A release that changes one adds a row.

Files are named as in `calc.frameworks.verl.verl`; keys are those of `trainer/config/ppo_trainer.yaml`, for SFT of
`trainer/config/sft_trainer_engine.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from calc.base.versions import at_least
from calc.frameworks.releases import GONE, Default, Table

FORK = "tinyzero"  # has no numbers, so it sorts before every release
# Forks with releases of their own, such as easyr1-0.3.2: the release of verl whose code each shares where nothing else
# is said. EasyR1 has reference and entropy by flag, backward in place, and vLLM's sleep level 1.
FORKS: Mapping[str, str] = {"easyr1": "0.4.0"}


class Pins(NamedTuple):
    """The libraries that a release runs on: its own pins, else the newest vLLM that it allows and what vLLM needs."""

    vllm: str
    transformers: str
    torch: str


def forked(version: str) -> str:
    """The fork of which `version` is a release; empty if it is one of verl's own."""
    name = version.partition("-")[0]
    return name if name in FORKS else ""


def shared(version: str) -> str:
    """The release of verl whose code `version` shares where nothing else is said."""
    return FORKS.get(forked(version), version)


@lru_cache(maxsize=4096)
def reached(version: str, first: str) -> bool:
    """True if the release of verl whose code `version` shares is `first` or later."""
    return at_least(shared(version), first)


RELEASES: Mapping[str, Pins] = {
    FORK: Pins("0.6.3", "4.47.1", "2.4.0"),  # requirements.txt: transformers<4.48, vllm==0.6.3
    "0.2": Pins("0.6.3", "4.47.1", "2.4.0"),  # micro batches a GPU; the reference always on the host
    # vllm<=0.8.2, whose worker verl does not patch; its own is for 0.6.3
    "0.3.0": Pins("0.6.3", "4.47.1", "2.4.0"),
    "0.4.0": Pins("0.8.5", "4.51.3", "2.6.0"),  # reference by flag, entropy by flag, backward in place, fsdp2, LoRA
    "0.5.0": Pins("0.8.5", "4.51.3", "2.6.0"),  # fused kernels and mbridge with Megatron
    "0.6.0": Pins("0.9.1", "4.56.1", "2.7.0"),  # CUDA graphs, sleep level 2, a reference in fp32
    "0.6.1": Pins("0.11.0", "4.56.1", "2.8.0"),
    "0.7.0": Pins("0.12.0", "4.57.1", "2.9.0"),  # the actor's padding removed by default
    "0.7.1": Pins("0.12.0", "4.57.1", "2.9.0"),  # vLLM in processes of its own, weights sent in buckets
    "0.8.0": Pins("0.12.0", "4.57.6", "2.9.0"),  # engines alone: the root unit stays gathered after an evaluation
    "0.9.0": Pins("0.24.0", "5.9.0", "2.11.0"),  # 256 sequences; allows vllm>=0.18 and transformers 5.5.3 to 5.10
    "0.9.1": Pins("0.24.0", "5.9.0", "2.11.0"),  # logits are not divided by a temperature of 1
}

DEFAULTS = Table(
    Default("prompt_len", FORK, 512, "data.max_prompt_length: the same in every release"),
    Default("response_len", FORK, 512, "data.max_response_length: the same in every release"),
    Default("rollout.batch", FORK, 1024, "data.train_batch_size: the same in every release"),
    Default(
        "rollout.n", FORK, 5,
        "the flag's default is 1, with which a group has no advantage: examples/grpo_trainer and "
        "examples/reinforce_plus_plus_trainer set 5",
    ),
    Default("rollout.n", FORK, 1, "the flag's default", ("ppo",)),
    Default("micro_batch", FORK, 64, "the fork: ppo_micro_batch_size 64 for the whole job"),
    Default("micro_batch", "0.2", 1, "later it has no default, and 1 is the smallest"),
    Default(
        "global_batch", FORK, 256,
        "actor.ppo_mini_batch_size 256 prompts, times n (fsdp_workers.py:97-100 of the fork, :121 of 0.2)",
    ),
    Default(
        "precision", FORK, "fsdp-mixed",
        "from_pretrained in fp32 for what is trained, MixedPrecision(bf16, reduce fp32) (fsdp_workers.py:167 of 0.2)",
    ),
    Default("sharding", FORK, "fsdp1", "actor.strategy: fsdp"),
    Default("optimizer", FORK, "adamw", "torch.optim.AdamW (fsdp_workers.py:267 of 0.2)"),
    Default("optimizer_impl", FORK, "foreach", "torch.optim.AdamW without fused (fsdp_workers.py:267 of 0.2)"),
    Default("offload.optimizer", FORK, False, "fsdp_config.optimizer_offload"),
    Default("offload.parameters", FORK, False, "fsdp_config.param_offload"),
    Default("grad_dtype", FORK, "fp32", "the shard that reduce_dtype fp32 leaves"),
    # `no_sync` for every micro batch but the last
    Default("no_sync", FORK, False, "every micro batch reduces"),
    Default("no_sync", "0.9.0", True, "Always in 0.9.0 (transformer_impl.py:676)"),
    Default("no_sync", "0.9.1", False, "a flag in 0.9.1, which is off in its YAML"),
    Default("checkpointing", FORK, "none", "model.enable_gradient_checkpointing"),
    Default("checkpointing", "0.2", "full", "model.enable_gradient_checkpointing"),
    Default("attention", FORK, "flash", "attn_implementation='flash_attention_2' (fsdp_workers.py:202 of 0.2)"),
    Default("loss", FORK, "full", "model.use_fused_kernels: False"),
    Default("logprob", FORK, "logsumexp", "flash-attn's cross entropy (utils/torch_functional.py:52-67 of 0.2)"),
    Default("packing", FORK, False, "use_remove_padding: False in ppo_trainer.yaml:21 of 0.2"),
    Default("packing", "0.7.0", True, "use_remove_padding: True in model/hf_model.yaml:40 of 0.7.0"),
    Default("rollout.engine", FORK, "vllm", "rollout.name; 0.9 wants it given"),
    Default("rollout.tensor_parallel", FORK, 2, "rollout.tensor_model_parallel_size 2, which one GPU cannot do"),
    Default("rollout.gpu_memory_utilization", FORK, 0.5, "rollout.gpu_memory_utilization"),
    Default(
        "rollout.micro_batch", FORK, None,
        "rollout.log_prob_micro_batch_size_per_gpu has no default and must be given",
    ),
    Default("max_tokens_per_gpu", FORK, None, "actor.use_dynamic_bsz is false"),
    Default(
        "rollout.max_tokens_per_gpu", FORK, None,
        "log_prob_max_token_len_per_gpu is the actor's ppo_max_token_len_per_gpu",
    ),
    Default("rollout.sleep", FORK, True, "rollout.free_cache_engine"),
    Default("rollout.enforce_eager", FORK, True, "rollout.yaml:35 of 0.5.0"),
    Default("rollout.enforce_eager", "0.6.0", False, "rollout.yaml:38 of 0.6.0"),
    Default("rollout.max_num_batched_tokens", "0.2", 8192, "passed since 0.2 (vllm_rollout.py:104)"),
    Default("rollout.max_model_len", "0.4.0", None, "ppo_trainer.yaml:118 of 0.4.0, rollout/rollout.yaml:81 of 0.9.1"),
    Default("rollout.max_num_seqs", "0.6.0", 1024, "passed since then (vllm_rollout_spmd.py:203)"),
    Default("rollout.max_num_seqs", "0.9.0", 256, "rollout.yaml:84 of 0.9.0"),
    Default(
        "rollout.layered_summon", "0.4.0", False, "ppo_trainer.yaml:115 of 0.4.0, rollout/rollout.yaml:103 of 0.9.1"
    ),
    Default("expandable_segments", FORK, False, "nothing switches them on"),
    Default(
        "expandable_segments", "0.6.0", True,
        "on once vLLM has its weights (workers/fsdp_workers.py of 0.6.0, workers/engine_workers.py:805 of 0.9.0)",
    ),
    Default("roles.reward", FORK, "none", "reward_model.enable: False, a function scores"),
    Default("roles.reward.precision", FORK, "bf16", "RewardModelWorker: bf16 (fsdp_workers.py:943 of 0.2)"),
    Default("roles.reward.offload.parameters", FORK, False, "CPUOffload as flagged in the fork"),
    Default("roles.reward.offload.parameters", "0.2", True, "CPUOffload always (fsdp_workers.py:960 of 0.2)"),
    Default(
        "roles.reference", "0.4.0", "none",
        "use_kl_loss and use_kl_in_reward are both false (main_ppo.py:130 of 0.4.0); until 0.3 main_ppo.py always maps "
        "Role.RefPolicy",
    ),
    Default(
        "counts_prompts", FORK, True,
        "fsdp_workers.py:96-101 of the fork: `//= world size`, `*= rollout.n`; `batch.split` "
        "(workers/actor/dp_actor.py) hands out what there is",
    ),
    Default("counts_prompts", "0.2", False, "micro batches a GPU"),
)  # fmt: skip

RL = Table(
    Default("entropy_coeff", FORK, 0.001, "actor.entropy_coeff, ppo_trainer.yaml:31 of 0.2"),
    Default("entropy_coeff", "0.4.0", 0, "actor.entropy_coeff, ppo_trainer.yaml:56 of 0.4.0"),
    Default("entropy_from_logits_with_chunking", "0.5.0", False, "actor/dp_actor.yaml:27 of 0.5.0"),
    Default("roles.critic.packing", "0.7.0", False, "critic/dp_critic.yaml:44 of 0.7.1", ("ppo",)),
    Default(
        "roles.critic.packing", "0.8.0", GONE, "critic/dp_critic.yaml, which became the actor's in 0.8.0", ("ppo",)
    ),
)

# With batches that are not dynamic.
STATIC = Table(
    Default("rollout.micro_batch", FORK, 128, "rollout.log_prob_micro_batch_size: in the fork it is 128 for all GPUs"),
    Default("rollout.micro_batch", "0.2", GONE, "rollout.log_prob_micro_batch_size_per_gpu"),
    Default("roles.reference.micro_batch", FORK, 128, "ref.log_prob_micro_batch_size"),
    Default("roles.reference.micro_batch", "0.2", GONE, "a flag for each GPU, without a default"),
)

# With dynamic batches, for the roles that are given no micro batch.
DYNAMIC = Table(
    Default(
        "roles.critic.max_tokens_per_gpu", FORK, 32768,
        "critic.ppo_max_token_len_per_gpu, which reward models use, too (ppo_trainer.yaml:120 and :145 of 0.2)",
    ),
    Default("roles.reward.max_tokens_per_gpu", FORK, 32768, "critic.ppo_max_token_len_per_gpu (:145 of 0.2)"),
)  # fmt: skip

# Asked of every release, as the task is refused only then: the trainer came with 0.7.1.
SFT = Table(
    Default("seq_len", FORK, 1024, "data.max_length"),
    Default("micro_batch", FORK, 1, "the smallest; batches are dynamic unless one is given"),
    Default(
        "max_tokens_per_gpu", FORK, 8192, "data.max_token_len_per_gpu: batches are filled up to it (use_dynamic_bsz)"
    ),
    Default("global_batch", FORK, 256, "train_batch_size"),
    Default("expandable_segments", FORK, False, "no vLLM, for which the actor switches them on"),
)

# Without adapters: the reference has weights of its own.
FULL = Table(
    Default(
        "roles.reference.precision", FORK, "bf16",
        "bf16 where fsdp_config has no model_dtype (fsdp_workers.py:167 of 0.2)",
    ),
    Default("roles.reference.precision", "0.6.0", "fsdp-mixed", "engine/fsdp.yaml has fp32 since 0.6.0"),
    Default(
        "roles.reference.offload.parameters", FORK, False,
        "by ref.fsdp_config.param_offload, False, in the fork (fsdp_workers.py:342)",
    ),
    Default(
        "roles.reference.offload.parameters", "0.2", True,
        "later CPUOffload whatever the flag says (fsdp_workers.py:248 of 0.2, engine.py:433 of 0.9.1)",
    ),
)  # fmt: skip

ADAPTERS = Table(
    Default("lora.rank", FORK, 64, "model.lora_rank 0 means none; examples set 32 to 128"),
    Default("lora.targets", FORK, "all-linear", "model.target_modules"),
    Default("lora.dropout", FORK, 0, "not passed to LoraConfig (engine.py:359-368 of 0.9.1)"),
    Default("lora.units", FORK, "own", "peft/utils/other.py: fsdp_auto_wrap_policy"),
    Default("lora.dtype", FORK, "fp32", "a flat parameter has one type, the base's fp32 (engine.py:370-381 of 0.9.1)"),
)
