"""Overrides of verl's configurations: a single key, and the keys of a model and of the engine that trains it."""

from __future__ import annotations

from collections.abc import Iterator

from calc.base.optimizers import OPTIMIZERS
from calc.launch.shell import ATTENTION, LaunchError, Placeholder, Words, word
from calc.scenario.scenario import Scenario

ESTIMATORS = {"ppo": "gae", "grpo": "grpo", "reinforce++": "reinforce_plus_plus"}
STRATEGIES = {"fsdp1": "fsdp", "fsdp2": "fsdp2"}
IMPLEMENTATIONS = {"fused": "{fused:true}", "foreach": "null", "single": "{foreach:false}"}
# fp32 shards under FSDP's mixed precision, or weights of bf16 alone
DTYPES = {"fsdp-mixed": "fp32", "bf16": "bf16"}


def key(name: str, value: object) -> Words:
    """An override of one key; booleans are spelled as in YAML."""
    if isinstance(value, Placeholder):
        return (f"{name}={value}",)
    return (word(f"{name}={str(value).lower() if isinstance(value, bool) else value}"),)


def prompts(s: Scenario, place: str, who: str) -> int:
    """The prompts of one optimizer step, in which verl and its forks count their mini batch; `place` is its field."""
    assert s.rollout
    if s.global_batch % s.rollout.n:
        allowed = f"a multiple of rollout.n = {s.rollout.n}, as {who} counts prompts"
        raise LaunchError(f"{place}: given {s.global_batch}, allowed with {who}: {allowed}")
    return s.global_batch // s.rollout.n


def model(where: str, s: Scenario, name: str) -> Iterator[Words]:
    """The keys of a trained model and its adapters."""
    yield key(f"{where}.path", name)
    yield key(f"{where}.enable_gradient_checkpointing", s.checkpointing == "full")
    yield key(f"{where}.use_remove_padding", s.packing)
    yield key(f"+{where}.override_config.attn_implementation", ATTENTION[s.attention])
    yield key(f"{where}.lora_rank", s.lora.rank if s.lora else 0)
    if s.lora:
        targets = s.lora.targets
        yield key(f"{where}.target_modules", targets if isinstance(targets, str) else f"[{','.join(targets)}]")


def unsaid(s: Scenario) -> tuple[str, ...]:
    """The fields that no key sets: FSDP's adapters have no dropout; flash-attn makes log-probabilities if it can."""
    return ("lora.dtype",) if s.sharding == "megatron" else ("lora.dtype", "lora.dropout", "logprob")


def engine(where: str, optim: str, s: Scenario) -> Iterator[Words]:
    """The keys for how FSDP keeps a trained model, and for its optimizer."""
    yield key(f"{where}.model_dtype", DTYPES[s.precision])
    if s.data_parallel_replicate > 1:
        yield key(f"{where}.fsdp_size", s.shards)
    yield key(f"{where}.param_offload", s.offload.parameters)
    yield key(f"{where}.optimizer_offload", s.offload.optimizer)
    yield key(f"{optim}.optimizer", OPTIMIZERS[s.optimizer].spelled.verl)
    yield key(f"{optim}.override_optimizer_config", IMPLEMENTATIONS[s.optimizer_impl])
