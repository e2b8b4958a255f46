"""Host memory: pinned blocks, what loading takes, and Llama 2 70B's optimizer to the gigabyte."""

from __future__ import annotations

from typing import Any

import pytest
from formulas import evaluate
from hypothesis import given
from hypothesis import strategies as st
from jobs import engine, moments

from calc.base.units import GB, GiB
from calc.estimate.estimate import estimate
from calc.memory import host
from calc.models.architecture import Tensor
from calc.resolve.parse import parse
from calc.step import placement

LLAMA_70B = 68_976_648_192


@given(st.integers(1, 10**13))
def test_pinned_memory_is_the_next_power_of_two(n: int) -> None:
    """Never less than asked for, less than twice as much, and a block of it stays what it is."""
    assert n <= host.pinned(n) < 2 * n
    assert host.pinned(host.pinned(n)) == host.pinned(n)
    assert host.pinned(n).bit_count() == 1


def test_nothing_pinned_takes_nothing() -> None:
    """An empty tensor has no block; one byte has one."""
    assert host.pinned(0) == 0
    assert host.pinned(1) == 1
    assert host.pinned(4 * GiB) == 4 * GiB
    assert host.pinned(4 * GiB + 1) == 8 * GiB


@given(st.integers(1, 10**13), st.integers(1, 10**13))
def test_blocks_above_the_threshold_take_what_is_asked_for(n: int, threshold: int) -> None:
    """`size <= pinned_max_round_threshold()` is rounded (ATen/core/CachingHostAllocator.h:303 of torch 2.13)."""
    assert host.pinned(n, threshold) == (host.pinned(n) if n <= threshold else n)
    assert host.HostAllocator(threshold).block(n) == host.pinned(n, threshold)
    assert host.HostAllocator().block(n) == host.pinned(n)


def test_each_rank_loads_the_whole_model_or_a_shard_of_the_checkpoint() -> None:
    """2P, or at most the 5 GB that `save_pretrained` cuts files at."""
    assert host.loading("actor", LLAMA_70B, 2, streamed=False).bytes == 2 * LLAMA_70B
    assert host.loading("actor", LLAMA_70B, 2, streamed=True).bytes == 5 * GB
    assert host.loading("actor", 10**9, 2, streamed=True).bytes == 2 * 10**9


def test_tensors_pinned_one_by_one_are_rounded_one_by_one() -> None:
    """Two layers of 600 elements over 2 ranks, 600 bytes each: 1,024 twice; 1,000 elements of a head: 1,024."""
    tensors = (Tensor("w", (30, 20), 2, "linear", "mlp"), Tensor("head", (100, 10), 1, "head", "head"))
    assert host.frozen_parameters("reference", tensors, 2).bytes == 2 * 1024 + 1024
    assert host.fsdp("actor", "gradients", tensors, 2, 4).bytes == 2 * 2048 + 2048
    assert host.parameters("actor", 2200, 2).bytes == 4096
    assert host.accumulated_gradients("actor", (600, 1000)).bytes == 2048 + 2048


def test_what_a_framework_moves_is_pinned_flat_group_by_group_or_whole() -> None:
    """Two groups of 600 and 1,000 elements in fp32: 2,400 in 4,096 and 4,000 in 4,096, twice for two moments; DeepSpeed
    pins a rank's whole share."""
    assert host.units("actor", "weights", (600, 1000), 4).bytes == 2 * 4096
    assert host.units("actor", "optimizer_states", (600, 1000), 4, 2).bytes == 4 * 4096
    assert host.asleep("actor", "optimizer_states", 1600, 4, 2).bytes == 2 * 8192
    assert host.saved("actor", 1600, 2).bytes == 3200


def llama_70b(ranks: int, g: str, version: str = "0.3") -> dict[str, float]:
    """Host memory of a node that trains Llama 2 70B with OpenRLHF, in GB, moment by moment."""
    fields = {
        "model": "llama-2-70b",
        "task": "sft",
        "framework": f"openrlhf=={version}",
        "gpu": "a800-80",
        "gpus": ranks,
        "gpus_per_node": ranks,
        "sharding": "zero3",
        "offload.optimizer": True,
        "grad_dtype": g,
        "micro_batch": 1,
    }
    return {phase.name: phase.moment.device_bytes / GB for phase in estimate(parse(fields)).host_phases}


@pytest.mark.parametrize(
    ("ranks", "g", "built", "before", "after"),
    [
        (4, "fp32", 1394, 1118, 1670),
        (8, "fp32", 1394, 1118, 1670),
        (4, "bf16", 981, 843, 1395),
        (8, "bf16", 981, 843, 1395),
        (16, "fp32", 1411, 1135, 1687),
        (16, "bf16", 998, 860, 1412),
    ],
)
def test_llama_2_70b_dies_at_its_first_step(ranks: int, g: str, built: int, before: int, after: int) -> None:
    """OpenRLHF issue 332: a 1,600 GB node passed 31 micro-batches and died at the 32nd, which steps.

    By hand for 4 ranks, 17,244,162,048 elements each: master 4 bytes, pageable (275.9 GB in all); fp32 gradients in 17
    sub-groups of 3.65 to 3.84 GiB, each pinned in 4 (292.1); the accumulation buffer, 64.2 GiB of fp32 in one block of
    128 (549.8), or 32.1 of bf16 in 64 (274.9): 1,118 or 843. Adam's moments, 8 bytes (551.8), come with the first step.
    While the last buffer is pinned its source exists too (275.9 or 138.0). Ranks and blocks change with N: from 16 on
    a rank's last sub-group of 1.11 GiB takes 2.
    """
    found = llama_70b(ranks, g)
    assert round(found["optimizer built"]) == pytest.approx(built, abs=1)
    assert round(found["before the first step"]) == before
    assert round(found["after the first step"]) == pytest.approx(after, abs=1)


def test_llama_2_70bs_buffers_are_exact_for_four_ranks() -> None:
    """Byte by byte: 4 · (17 · 4 GiB), 4 · 128 GiB, 4 bytes and 8 bytes of every parameter."""
    e = engine(
        model="llama-2-70b", framework="openrlhf==0.3", gpus=4, sharding="zero3", offload__optimizer=True,
        micro_batch=1,
    )  # fmt: skip
    lines = moments(e, "host")["after the first step"]
    master, grads, accumulated, adam = (4 * line.bytes for line in lines)
    assert master == 4 * LLAMA_70B
    assert 4 * 17 * 4 * GiB <= grads <= 4 * 17 * 4 * GiB + 4 * 4 * 2**20
    assert accumulated == 4 * 128 * GiB
    assert adam == 8 * LLAMA_70B


@pytest.mark.parametrize(("g", "rounded", "exact"), [("fp32", 1670, 1380), ("bf16", 1395, 1242)])
def test_without_rounding_llama_2_70b_takes_its_bytes(g: str, rounded: int, exact: int) -> None:
    """68.98 billion parameters at 12 bytes of master and moments, 4 of gradients, 4 or 2 accumulated: 20 or 18 bytes.

    No block is below 64 MiB, so that nothing is rounded any more.
    """
    job = {
        "model": "llama-2-70b", "task": "sft", "framework": "openrlhf", "gpu": "a800-80", "gpus": 4,
        "sharding": "zero3", "offload.optimizer": True, "grad_dtype": g, "micro_batch": 1,
    }  # fmt: skip

    def after(**more: int) -> int:
        return next(
            p for p in estimate(parse(job | more)).host_phases if p.name == "after the first step"
        ).moment.device_bytes

    assert round(after() / GB) == rounded
    assert after(pinned_max_round_threshold_mb=64) == (20 if g == "fp32" else 18) * LLAMA_70B
    assert round(after(pinned_max_round_threshold_mb=64) / GB) == exact


ROUNDED: list[tuple[dict[str, Any], str]] = [
    ({"framework": "openrlhf", "task": "sft", "sharding": "zero2", "offload.optimizer": True}, "before the first step"),
    (
        {"framework": "torch", "task": "dpo", "sharding": "zero3", "offload.parameters": True,
         "offload.optimizer": True, "roles.reference": {"offload.parameters": True}},
        "after the first step",
    ),
    ({"framework": "torch", "task": "sft", "sharding": "fsdp2", "offload.parameters": True}, "after the first step"),
    (
        {"framework": "openrlhf", "task": "ppo", "sharding": "zero3", "rollout": {"engine": "vllm", "sleep": True},
         "prompt_len": 64, "response_len": 64},
        "before the first step",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "moment"), ROUNDED)
def test_every_pinned_block_of_a_job_keeps_to_the_threshold(fields: dict[str, Any], moment: str) -> None:
    """ZeRO-2 and 3, FSDP and a vLLM that sleeps: less with a threshold, and its lines' formulas name it as t."""
    job = {"model": "llama-3.1-8b", "gpu": "h100-sxm", "gpus": 4, "micro_batch": 1, **fields}
    rounded, exact = (
        next(p for p in estimate(parse(job | more)).host_phases if p.name == moment)
        for more in ({}, {"pinned_max_round_threshold_mb": 1})
    )
    assert exact.moment.device_bytes < rounded.moment.device_bytes
    assert not [line for line in exact.moment.lines if "pow2" in line.formula]
    told = [line for line in exact.moment.lines if "pin(" in line.formula]
    assert told
    assert {line.values["t"] for line in told} == {2**20}


def test_a_policy_that_is_its_own_reference_is_loaded_once() -> None:
    """Plain PyTorch's DPO with LoRA switches the adapter off: 2P on the host of each of 2 ranks, not 4P.

    Up to Transformers 4.50, which copies what it reads.
    """
    job = {"model": "llama-3-8b", "task": "dpo", "gpu": "a100-80-sxm", "gpus": 2, "sharding": "zero2"}
    job |= {"versions": {"transformers": "4.50"}}
    alone, copied = (
        estimate(parse(job | fields)).host_phases[0].moment.device_bytes for fields in ({"method": "lora"}, {})
    )
    assert alone == 2 * 2 * 8_030_261_248
    assert copied == 2 * alone


@pytest.mark.parametrize(
    ("model", "precision", "held"),
    [
        ("llama-3.1-8b", "mixed", False),  # files in bf16 stay mapped
        ("llama-2-7b", "mixed", True),  # files in fp16 are cast
        ("llama-2-7b", "fp16", False),
        ("gpt-oss-20b", "mixed", False),  # its files have the experts joined
        ("qwen3-30b-a3b", "mixed", True),  # its files have each expert by itself
    ],
)
def test_a_process_holds_weights_that_it_casts_or_joins_as_it_loads_them(
    model: str, precision: str, held: bool
) -> None:
    s = parse(
        {"model": model, "task": "sft", "gpu": "h100-sxm", "gpus": 8, "sharding": "zero2", "precision": precision}
    )
    assert placement.copied(s, s.architecture) == held


def test_a_reference_waits_on_the_host_while_the_policy_is_flattened() -> None:
    """OpenRLHF builds both before either moves: 2P + 2P at loading, then 4P for the policy's flat copy beside 2P."""
    job = {"model": "llama-3-8b", "task": "dpo", "gpu": "a100-80-sxm", "framework": "openrlhf==0.6.1"}
    found = {phase.name: phase.moment.device_bytes for phase in estimate(parse(job)).host_phases}
    assert found["loading"] == 4 * 8_030_261_248
    assert found["weights flattened"] == 6 * 8_030_261_248


def test_the_first_openrlhf_releases_pin_four_gigabytes_more() -> None:
    """0.3.1 has DeepSpeed 0.13.5, whose CPU Adam holds 2 · 512 MiB in each of 4 ranks: 4.3 GB."""
    more = llama_70b(4, "fp32", "0.3.1")["before the first step"] - llama_70b(4, "fp32")["before the first step"]
    assert more == pytest.approx(4 * GiB / GB)


def test_a_share_that_does_not_divide_is_rounded_up_before_its_block() -> None:
    """1,025 elements over 2 ranks: 513 on the first, whose 1,026 bytes of bf16 take 2,048; 1,024 take exactly 1,024."""
    whole, odd = (Tensor("w", (n,), 1, "linear", "mlp") for n in (1024, 1025))
    assert (host.frozen_parameters("a", [whole], 2).bytes, host.frozen_parameters("a", [odd], 2).bytes) == (1024, 2048)
    assert (host.fsdp("a", "weights", [whole], 2, 2).bytes, host.fsdp("a", "weights", [odd], 2, 2).bytes) == (
        1024,
        2048,
    )
    assert (host.parameters("a", 512, 2).bytes, host.parameters("a", 513, 2).bytes) == (512, 1024)


def test_a_formula_in_words_names_the_whole_that_it_sums_over() -> None:
    """`sum of pow2(2·p/N)` cannot be evaluated: a reader finds all parameters and the ranks beside it."""
    tensors = (Tensor("w", (30, 20), 2, "linear", "mlp"), Tensor("head", (100, 10), 1, "head", "head"))
    assert host.frozen_parameters("reference", tensors, 2).values == {"P": 2200, "N": 2}
    assert host.fsdp("actor", "gradients", tensors, 2, 4).values == {"b": 4, "P": 2200, "N": 2}
    assert host.units("actor", "weights", (600, 1000), 4, 2).values == {"n": 2, "b": 4, "P": 1600}
    assert host.zero_optimizer("actor", 2100, (1000, 1100), pinned_master=True)[1].values == {"s": 1100, "groups": 2}


def test_every_buffer_takes_its_bytes_and_its_formula_says_so() -> None:
    """1,025 bf16 elements are 2,050 bytes, pinned 4,096; in fp32 4,100 and 8,192."""
    pageable, master = (host.zero_optimizer("a", 1025, (1025,), pinned_master=pin)[0] for pin in (False, True))
    for line, expected in (
        (pageable, 4100),
        (master, 8192),
        (host.parameters("a", 512, 2), 512),
        (host.flattening("a", 1025), 4100),
        (host.pinning("a", 77), 77),
        (host.accumulation_buffer("a", 1025, 2), 4096),
        (host.staging("a", 1025), 4096),
        (host.half_precision_copy("a", 1025), 4096),
        (host.moments("a", 1025), 8200),
        (host.moments("a", 1024, 2.03125), 2080),
        (host.cpu_adam_buffers("a"), 2**30),
        (host.asleep("a", "weights", 1025, 2), 4096),
        (host.asleep("a", "weights", 1025, 2, 3), 3 * 4096),
        (host.saved("a", 1025, 2), 2050),
        (host.accumulation_buffer("a", 1025, 2, host.HostAllocator(2048)), 2050),
        (host.accumulation_buffer("a", 1025, 2, host.HostAllocator(2050)), 4096),
    ):
        assert (line.bytes, type(line.bytes)) == (expected, int), line
        assert evaluate(line.formula, line.values) == expected


def test_fp32_gradients_are_pinned_sub_group_by_sub_group() -> None:
    """1,024 elements fill a block of 4,096 bytes, 1,025 take one of 8,192."""
    assert host.zero_optimizer("actor", 2049, (1024, 1025), pinned_master=True)[1].bytes == 4096 + 8192
