"""What an estimate is compared with: PyTorch's counters, which a sleeping vLLM stays on."""

from __future__ import annotations

from typing import Any

from calc.accuracy.residuals import counted, peak_allocated, reach
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.estimate.result import Estimate
from calc.resolve.parse import parse

# the prompts and the answers are long, so that training takes more beside weights and cache than vLLM's own steps do
JOB: dict[str, Any] = {
    "model": "qwen2.5-0.5b",
    "task": "grpo",
    "framework": "verl==0.4.0",
    "gpu": "h100-sxm",
    "gpus": 8,
    "micro_batch": 4,
    "prompt_len": 1024,
    "response_len": 3072,
    "rollout": {"n": 2, "batch": 256, "tensor_parallel": 1, "gpu_memory_utilization": 0.6},
}


def of(changes: dict[str, Any]) -> Estimate:
    """The estimate of `JOB` with other fields."""
    return estimate(parse(JOB | changes), load())


def training(e: Estimate) -> int:
    """The most tensors that lie on the GPU while vLLM sleeps, in bytes."""
    return max(phase.moment.allocated_bytes for phase in e.groups[0].phases if phase.name in ("score", "backward"))


def test_counters_keep_the_pool_of_a_vllm_that_sleeps_in_the_same_process() -> None:
    e = of({})
    (serving,) = (phase for phase in e.groups[0].phases if phase.name == "rollout")
    pool = sum(line.bytes for line in serving.moment.lines if line.role == "rollout" and line.component == "kv_cache")
    weights = sum(line.bytes for line in serving.moment.lines if line.role == "rollout" and line.component == "weights")
    assert peak_allocated(e) == training(e) + pool + weights
    low, high = reach(e, "reserved")
    assert low <= counted(e, "reserved", load()) <= high
    assert peak_allocated(e) <= counted(e, "reserved", load())


def test_the_counter_of_reserved_memory_has_what_micro_batches_of_other_lengths_leave_cached() -> None:
    """Four tensors of the shortest micro batch's logits at least, of 151,936 entries in 16 bits."""
    known = {"packing": True, "expected_len": 1600, "global_batch": 512, "rollout": JOB["rollout"] | {"micro_batch": 4}}
    e = of(known)
    assert counted(e, "reserved", load()) - peak_allocated(e) > 4 * 4 * 800 * 151936 * 2


def test_a_trainers_counter_does_not_see_a_vllm_in_a_process_of_its_own() -> None:
    """An engine's weights, KV cache and graphs are most of the card; the actor's own peak is in its backward."""
    e = of({"framework": "verl==0.7.1"})
    (serving,) = (phase for phase in e.groups[0].phases if phase.name == "rollout")
    (backward,) = (phase for phase in e.groups[0].phases if phase.name == "backward")
    own = sum(line.bytes for line in backward.moment.lines if line.allocated and line.role != "rollout")
    assert peak_allocated(e) == own < serving.moment.allocated_bytes


def test_counters_of_a_vllm_without_such_a_pool_are_those_of_its_phases() -> None:
    """verl's own worker for vLLM 0.6.3."""
    e = of({"framework": "verl==0.3.0"})
    assert peak_allocated(e) == max(phase.moment.allocated_bytes for phase in e.groups[0].phases)
