"""EasyR1, hiyouga's fork of verl for vision-language models: what it shares with verl, and where its releases differ.

Read at the tags v0.3.0, v0.3.1 and v0.3.2: `fsdp_workers.py`, `actor/dp_actor.py`, `sharding_manager/fsdp_vllm.py` and
`rollout/vllm_rollout_spmd.py` of `verl/workers`, `verl/utils/torch_functional.py`, and `examples/config.yaml`, which
every command of its README starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calc.base.optimizers import OPTIMIZERS, USUAL
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.base.versions import nearest as _nearest
from calc.frameworks.releases import Default, Table, pinned, stated
from calc.frameworks.verl.releases import Pins, forked
from calc.scenario.scenario import Scenario

NAME = "easyr1"
FIRST = "0.3.0"
# By tag: the images of its Dockerfile, and the newest transformers that requirements.txt allowed on the tag's day.
RELEASES: Mapping[str, Pins] = {
    FIRST: Pins("0.8.3", "4.51.3", "2.6.0"),
    "0.3.1": Pins("0.9.1", "4.52.4", "2.7.0"),  # vLLM's weights wake before the state dict is made
    "0.3.2": Pins("0.10.0", "4.56.2", "2.7.1"),  # batches filled by tokens
}
KNOWN: tuple[str, ...] = tuple(f"{NAME}-{release}" for release in RELEASES)

DEFAULTS = Table(
    Default("prompt_len", FIRST, 2048, "data.max_prompt_length"),
    Default("response_len", FIRST, 2048, "data.max_response_length"),
    Default("images.min_pixels", FIRST, 262144, "data.min_pixels"),
    Default("images.max_pixels", FIRST, 4194304, "data.max_pixels"),
    Default("rollout.batch", FIRST, 512, "data.rollout_batch_size"),
    Default("rollout.n", FIRST, 5, "rollout.n"),
    Default("rollout.n", FIRST, 1, "a group has no use for a critic", ("ppo",)),
    Default("global_batch", FIRST, 128, "actor.global_batch_size, in prompts: times n (fsdp_workers.py:142 of 0.3.2)"),
    Default("micro_batch", FIRST, 4, "actor.micro_batch_size_per_device_for_update"),
    Default("micro_batch", "0.3.2", 1, "actor.micro_batch_size_per_device_for_update, now filled with its tokens"),
    Default("rollout.micro_batch", FIRST, 16, "actor.micro_batch_size_per_device_for_experience"),
    Default("rollout.micro_batch", "0.3.2", 2, "actor.micro_batch_size_per_device_for_experience"),
    Default("precision", FIRST, "fsdp-mixed", "fp32 where fsdp.torch_dtype is null, MixedPrecision(bf16, reduce fp32)"),
    Default("sharding", FIRST, "fsdp1", "FullyShardedDataParallel, FULL_SHARD"),
    Default("optimizer", FIRST, "adamw", "optim.strategy"),
    Default("offload.optimizer", FIRST, True, "offload.offload_optimizer"),
    Default("offload.parameters", FIRST, True, "offload.offload_params"),
    Default("no_sync", FIRST, False, "every micro batch reduces"),
    Default("checkpointing", FIRST, "full", "model.enable_gradient_checkpointing"),
    Default("attention", FIRST, "flash", "attn_implementation='flash_attention_2'"),
    Default("loss", FIRST, "full", "the model's own logits"),
    Default("logprob", FIRST, "logsumexp", "flash-attn's cross entropy (torch_functional.py:39)"),
    Default("entropy_coeff", FIRST, 0, "no entropy is computed (dp_actor.py)"),
    Default("packing", FIRST, True, "actor.padding_free"),
    Default("max_tokens_per_gpu", FIRST, None, "dynamic batches have a micro batch's tokens, as packed ones have"),
    Default("rollout.max_tokens_per_gpu", FIRST, None, "the same"),
    Default("rollout.engine", FIRST, "vllm", "rollout.name"),
    Default("rollout.tensor_parallel", FIRST, 2, "rollout.tensor_parallel_size, which one GPU cannot do"),
    Default("rollout.gpu_memory_utilization", FIRST, 0.6, "rollout.gpu_memory_utilization"),
    Default("rollout.sleep", FIRST, True, "enable_sleep_mode"),
    Default("rollout.max_num_batched_tokens", FIRST, 8192, "rollout.max_num_batched_tokens (rollout/config.py:38)"),
    Default("rollout.layered_summon", FIRST, False, "no adapters"),
    Default("rollout.enforce_eager", FIRST, False, "rollout.enforce_eager of config.yaml"),
    Default("expandable_segments", FIRST, False, "PYTORCH_CUDA_ALLOC_CONF (trainer/main.py:117)"),
    Default("counts_prompts", FIRST, False, "micro batches a GPU"),
    Default("roles.reward", FIRST, "none", "a function scores"),
    Default("roles.reference.precision", FIRST, "bf16", "torch_dtype of a frozen model (fsdp_workers.py:189 of 0.3.2)"),
    Default("roles.reference.offload.parameters", FIRST, True, "ref.fsdp.enable_cpu_offload"),
    Default("roles.critic.micro_batch", FIRST, 4, "critic/config.py: it is not in config.yaml", ("ppo",)),
    Default("roles.critic.packing", FIRST, False, "padding_free of critic/config.py", ("ppo",)),
    Default("roles.critic.offload.parameters", FIRST, False, "OffloadConfig", ("ppo",)),
    Default("roles.critic.offload.optimizer", FIRST, False, "OffloadConfig", ("ppo",)),
)  # fmt: skip


# optim.strategy, by optimizer
STRATEGIES: Mapping[str, str] = {
    USUAL: "adamw",
    **{name: "adamw_bf16" for name, facts in OPTIMIZERS.items() if facts.narrow},
}


def nearest(version: str) -> str:
    """The known release that `version`, such as easyr1-0.3 or easyr1 alone, is computed as."""
    return f"{NAME}-{_nearest(release(version), tuple(RELEASES))}"


def release(version: str) -> str:
    """The number in `version`; without one, that of the newest release."""
    return version.partition("-")[2] or [*RELEASES][-1]


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The release's own defaults, by dotted key; `given` is what the user set.

    The reference, which runs unless it is left out, scores with the actor's micro batch (`WorkerConfig.post_init`).
    """
    own = release(version)
    values = stated(task, own, DEFAULTS) | pinned(RELEASES[own])
    values["optimizer_impl"] = _stepped(str(given.get("optimizer", USUAL)))
    values["roles.reference.micro_batch"] = given.get("rollout.micro_batch", values["rollout.micro_batch"])
    return values


def _stepped(optimizer: str) -> str:
    """The implementation of an optimizer's step: `fused=True` for torch's (fsdp_workers.py:297 of 0.3.2)."""
    facts = OPTIMIZERS[optimizer]
    return facts.usual if facts.narrow else "fused"


def wakes_first(version: str) -> bool:
    """True if the state dict for vLLM is made once vLLM's weights are back (fsdp_vllm.py:124 of 0.3.1)."""
    return forked(version) == NAME and at_least(release(version), "0.3.1")


def fixed(s: Scenario) -> dict[str, tuple[Any, ...]]:
    """The values that fields may have, where they are not those of verl's engine."""
    pure = s.precision == "bf16"
    return {
        "method": ("full",),  # adapters came after 0.3.2
        "sharding": ("fsdp1",),
        "optimizer": tuple(name for name in STRATEGIES if pure or not OPTIMIZERS[name].narrow),
        "optimizer_impl": (_stepped(s.optimizer),),
        "entropy_coeff": (0,),
        "max_tokens_per_gpu": (None,),  # a micro batch's tokens fill a dynamic batch
    }


def refuse(s: Scenario) -> Refusal | None:
    """The reason why EasyR1 cannot run `s`, beside what verl's engine refuses, in one line, or None."""
    assert s.rollout
    tokens = s.rollout.max_num_batched_tokens
    if tokens and tokens < s.seq_len:  # vllm_rollout_spmd.py:97 of 0.3.2
        return Refusal("rollout.max_num_batched_tokens", tokens, f"at least {s.seq_len}", "with easyr1")
    if s.has("reward"):
        return Refusal("roles.reward", "a model", "none; a function scores", "with easyr1")
    return None
