"""DeepSpeed ZeRO: what each stage keeps, moment by moment, worked by hand for Llama 3 8B over 8 GPUs.

The rules are DeepSpeed's own, read in 0.13.5, 0.16.4 and 0.19.5: `runtime/zero/stage_1_and_2.py`, `stage3.py`,
`partitioned_param_coordinator.py`, `runtime/bf16_optimizer.py`. P = 8,030,261,248, so P/8 = 1,003,782,656.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jobs import (
    FORWARD,
    GATE,
    LAYER,
    OPENRLHF,
    VH,
    P,
    at,
    bottom,
    deepspeed,
    end,
    engine,
    engine_of,
    head,
    job,
    moments,
    norm,
    places,
    top,
    total,
    under,
)
from strategies import scenarios

from calc.base.ledger import Line
from calc.base.units import GiB
from calc.engines.replica import Where
from calc.engines.zero import Zero
from calc.memory import host
from calc.scenario.scenario import Scenario, ScenarioError

PART = P // 8
BUCKET = 2 * 500_000_000
# In a layer q, k, v and o end at 41,943,040 elements, gate_proj at 100,663,296, up_proj at 159,383,552, down_proj at
# 218,103,808, norms at 218,112,000. Rank 5 of 0 to 7 has the elements from 5P/8 - V·h = 4,493,576,704 of the layers on,
# 20 layers and 131,336,704, inside up_proj of layer 20, to 6P/8 - V·h = 5,497,359,360, 25 layers and 44,559,360, inside
# gate_proj of layer 25. Whole: 218,112,000 - 100,663,296 of layer 20, four layers, 100,663,296 of layer 25. No rank has
# more: it comes to five layers exactly.
KEPT = 5 * LAYER


def zero(**fields: object) -> Zero:
    """A ZeRO job's engine."""
    found = deepspeed(**fields)
    assert isinstance(found, Zero)
    return found


# --- what stays ---


@pytest.mark.parametrize(("sharding", "weights"), [("zero1", 2 * P), ("zero2", 2 * P), ("zero3", 2 * PART)])
def test_stages_1_and_2_keep_all_weights_and_every_stage_an_nth_of_twelve_bytes(sharding: str, weights: int) -> None:
    """bf16 weights 2P (stage 3: 2P/N); fp32 master 4P/N and Adam 8P/N at every stage."""
    lines = zero(sharding=sharding).resident()
    assert total(lines, "weights") == weights
    assert total(lines, "master_weights", "optimizer_states") == 12 * PART


def test_stage_3_keeps_its_bucket_its_gradients_and_small_parameters_for_ever() -> None:
    """IPG bucket 1.0e9 bytes and g·P/N of gradients, both from init (stage3.py:537-549); the 65 norms of 4,096 elements
    (<= 1e5) stay whole."""
    lines = zero(sharding="zero3").resident()
    assert at(lines, "communication#zero-bucket") == BUCKET
    assert at(lines, "communication#zero-3") == 2 * 65 * 4096
    assert total(lines, "gradients") == 2 * PART
    assert total(zero(sharding="zero3", grad_dtype="fp32").resident(), "gradients") == 4 * PART


def test_a_frozen_model_is_weights_alone() -> None:
    """DeepSpeed's eval engine has no optimizer: 2P under ZeRO-2, 2P/N under ZeRO-3, and no bucket."""
    assert total(zero(sharding="zero2", trained=False).resident()) == 2 * P
    assert total(zero(sharding="zero3", trained=False).resident()) == 2 * PART
    assert zero(sharding="zero2", trained=False).at(FORWARD) == []
    assert list(zero(sharding="zero2", trained=False).stepping()) == []


# --- loading ---


def test_the_optimizer_is_built_without_adams_moments() -> None:
    """They are `zeros_like` of the first step; while states are set up fp32 zeros of a partition exist instead
    (stage_1_and_2.py:684-699)."""
    loading = moments(zero(sharding="zero2"), "loading")
    assert list(loading) == ["weights on the GPU", "optimizer built", "ready"]
    assert total(loading["weights on the GPU"]) == 2 * P
    assert total(loading["optimizer built"]) == 2 * P + 4 * PART + 4 * PART
    assert total(loading["ready"]) == 2 * P + 4 * PART


def test_stage_3_is_built_with_zeros_of_its_largest_sub_group() -> None:
    """P/8 = 1.0038e9 elements reach 1e9 only at the end: one sub-group of all but nothing, or two. The largest here is
    the whole rank but what follows the parameter that reached 1e9."""
    e = zero(sharding="zero3")
    loading = moments(e, "loading")
    extra = total(loading["optimizer built"]) - total(loading["ready"])
    assert extra == 4 * max(e.cut.sub_groups)
    assert 4 * 10**9 <= extra <= 4 * PART + 4 * 300


# --- stage 2: backward ---


def test_the_bucket_is_full_size_whatever_is_trained() -> None:
    """`torch.empty(int(reduce_bucket_size))` (stage_1_and_2.py:2048-2061): 1.0e9 bytes for 167,772,160 adapters too."""
    full, lora = zero(sharding="zero2"), zero(sharding="zero2", method="lora", lora__rank=64)
    assert lora.replica.trainable == 167_772_160
    assert at(full.at(bottom(0)), "communication#zero-bucket") == BUCKET
    assert at(lora.at(Where("layer", 0, True, making=0)), "communication#zero-bucket") == BUCKET


@pytest.mark.parametrize(("deepspeed_version", "expected"), [("0.13.5", BUCKET), ("0.18.2", BUCKET), ("0.18.3", 0)])
def test_the_bucket_is_there_at_the_loss_up_to_0_18_2(deepspeed_version: str, expected: int) -> None:
    """Allocated as backward starts; from 0.18.3 on at the first gradient (`process_gradients` -> `setup_buckets`)."""
    e = zero(sharding="zero2", versions={"deepspeed": deepspeed_version})
    assert at(e.at(Where("loss", 32, True)), "communication#zero-bucket") == expected
    assert at(e.at(head()), "communication#zero-bucket") == BUCKET
    assert at(e.at(FORWARD), "communication#zero-bucket") == 0


def test_a_gradient_larger_than_the_bucket_waits_for_the_next_parameter() -> None:
    """The head's 525M elements do not fit 500M: nothing else is reduced as it is made; it lives on (2·V·h) in the final
    norm's hook, where the kept gradients are allocated all at once. V·h < P/8, so on 8 ranks it lies in one partition
    and is reduced in place."""
    e = zero(sharding="zero2")
    assert at(e.at(head()), "gradients#accumulation") == 2 * VH
    assert at(e.at(head()), "gradients#zero") == 0
    waiting = e.at(norm())
    assert at(waiting, "gradients#accumulation") == 2 * (VH + 4096)
    assert at(waiting, "gradients#zero") == 2 * KEPT
    assert at(waiting, "communication#zero-bucket") == BUCKET
    assert at(e.at(norm()._replace(making=0)), "gradients#accumulation") == 0


def test_a_large_gradient_that_spans_partitions_is_copied_for_its_reduction() -> None:
    """On 32 ranks a partition is 251M elements, so the head's 525M span three: cat makes 2·V·h more."""
    e = zero(sharding="zero2", gpus=32, global_batch=32)
    assert at(e.at(norm()), "communication#zero-bucket") == BUCKET + 2 * VH
    assert at(e.at(end()), "communication#zero-bucket") == BUCKET + 2 * VH


def test_a_full_bucket_is_copied_where_there_are_several_ranks() -> None:
    """1.0e9 bytes beside the bucket in the layers; nothing on one GPU; nothing where all gradients fit the bucket."""
    assert at(zero(sharding="zero2").at(bottom()), "communication#zero-bucket") == 2 * BUCKET
    alone = zero(sharding="zero2", gpus=1, global_batch=1)
    assert at(alone.at(bottom()), "communication#zero-bucket") == BUCKET
    lora = zero(sharding="zero2", method="lora")
    made = Where("layer", 0, True, above=31 * 5_242_880, here=5_242_880, making=65_536)
    assert at(lora.at(made), "communication#zero-bucket") == BUCKET


def test_kept_gradients_are_of_whole_parameters_and_accumulate_twice() -> None:
    """2K, K worked above; from the second micro-batch on the sum so far exists in
    forward too, and a second 2K in backward until it is added."""
    once, more = zero(sharding="zero2"), zero(sharding="zero2", global_batch=64)
    assert sum(once.cut.touched) == KEPT
    assert at(once.at(bottom()), "gradients#zero") == 2 * KEPT
    assert at(once.at(FORWARD), "gradients#zero") == 0
    assert at(more.at(FORWARD), "gradients#zero") == 2 * KEPT
    assert at(more.at(head()), "gradients#zero") == 2 * KEPT
    assert at(more.at(bottom()), "gradients#zero") == 4 * KEPT


def test_fp32_accumulation_changes_nothing_in_stage_2() -> None:
    """`use_grad_accum_attribute` only where gradients are not partitioned (stage_1_and_2.py:291)."""
    a, b = (zero(sharding="zero2", global_batch=64, grad_dtype=g) for g in ("bf16", "fp32"))
    for where in (FORWARD, head(), norm(), top(), bottom(), end()):
        assert a.at(where) == b.at(where)
    assert list(a.stepping()) == list(b.stepping())


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_a_tied_heads_gradient_waits_in_autograd_for_the_embeddings(sharding: str) -> None:
    """One parameter, one hook, which runs when both contributions are there: 2·V·h through all layers, at the end both
    beside their sum. Gemma 2 2B: V·h = 256,000 · 2,304 = 589,824,000, more than the bucket, and no head that waits."""
    e = zero(model="gemma-2-2b", sharding=sharding)
    v_h = 256_000 * 2304
    final = e.at(Where("norm", 26, True, root=v_h + 2304, making=2304))
    assert at(final, "gradients#accumulation") == 2 * (v_h + 2304)
    assert at(final, "gradients#zero") == 0
    assert at(e.at(Where("layer", 0, True, v_h + 2304)), "gradients#accumulation") == 2 * v_h
    last = e.at(Where("end", 0, True, v_h + 2304, e.replica.trainable - v_h - 2304, 0, v_h))
    assert at(last, "gradients#tied") == 2 * 2 * v_h
    assert at(last, "gradients#accumulation") == 2 * v_h


# --- stage 1 ---


def test_stage_1_keeps_whole_gradients_until_backward_has_ended() -> None:
    """Its hooks reduce under overlap_comm alone (`process_gradients`: stage_1_and_2.py:516 of 0.13.5, :2290 of 0.19.8),
    so that gradients grow to 2P as in plain PyTorch; `reduce_gradients` then copies the own ones to a buffer of 2P/N,
    the embedding past the empty bucket. Traced with DeepSpeed 0.19.8: 44.04 GiB, for which 43.93 are computed."""
    e = zero(sharding="zero1")
    assert total(e.at(FORWARD)) == 0
    assert total(e.at(norm()), "gradients") == 2 * (VH + 4096)
    assert total(e.at(bottom())) == BUCKET + 2 * bottom().done
    assert total(e.at(end())) == BUCKET + 2 * P
    name, lines = next(iter(e.stepping()))
    assert name == "reduction of all gradients"
    assert total(lines) == 2 * P + 2 * e.cut.share + BUCKET


def test_stage_1_reduces_through_its_bucket_where_no_parameter_is_larger() -> None:
    """Llama 2 7B's embedding has 131,072,000 elements: buffer or bucket, whichever is larger, stands beside 2P."""
    e = zero(model="llama-2-7b", sharding="zero1")
    _, lines = next(iter(e.stepping()))
    assert total(lines) == 2 * e.replica.trainable + max(BUCKET, 2 * e.cut.share)


def test_stage_1_accumulates_whole_gradients_and_keeps_its_bucket_between_micro_batches() -> None:
    """2P as in plain PyTorch (hooks reduce only at the boundary, :1425), each new gradient beside the one it is added
    to; the bucket stays until the boundary's epilogue (:676). A bucket's copy is no more than has moved into it."""
    e = zero(sharding="zero1", global_batch=64)
    assert total(e.at(FORWARD), "gradients") == 2 * P
    assert at(e.at(FORWARD), "communication#zero-bucket") == BUCKET
    assert total(e.at(bottom())) == 2 * P + BUCKET + 2 * GATE
    # the head's waiting gradient is one of those that are kept whole
    assert total(e.at(norm())) == 2 * P + BUCKET + 2 * 4096


def test_stage_1_with_fp32_accumulation_is_the_bf16_optimizer() -> None:
    """OpenRLHF before 0.5.4: `BF16_Optimizer` (engine.py:1316-1318): 4P of fp32 gradients from init, no bucket; bf16
    gradients grow to 2P and are dropped when the next backward starts, so that forward has them; the reduction casts
    all fp32 gradients to bf16 (2P)."""
    e = zero(framework="openrlhf==0.3.8", sharding="zero1")
    assert total(e.resident(), "gradients") == 4 * P
    assert total(e.at(FORWARD)) == 2 * P
    assert total(e.at(Where("loss", 32, True))) == 0
    assert total(e.at(head())) == 2 * VH
    assert total(e.at(end())) == 2 * P
    assert total(moments(e, "stepping")["reduction of all gradients"]) == 4 * P
    loading = moments(e, "loading")
    assert total(loading["weights flattened"]) == 4 * P
    assert total(loading["ready"]) == 2 * P + 4 * PART + 4 * P


def test_openrlhf_without_zero_is_the_bf16_optimizer_too() -> None:
    """zero_stage 0 with bf16 accumulates in fp32 and partitions fp32 states (engine.py:1347)."""
    assert zero(sharding="ddp").plain_bf16


# --- the step ---


def test_stage_2_flattens_gradients_beside_those_it_keeps() -> None:
    """2K kept, 2P/N flat and 4P/N in fp32 at once (:1889-1917); before, the norm takes 8 bytes an element of the
    largest slice, here the whole embedding (:1698-1700)."""
    stepping = moments(zero(sharding="zero2"), "stepping")
    assert total(stepping["gradients flattened"]) == 2 * KEPT + 6 * PART
    assert total(stepping["gradient norm"]) == 2 * KEPT + 8 * VH
    assert total(stepping["optimizer step"]) == 4 * PART


@pytest.mark.parametrize(("g", "per"), [("bf16", 6), ("fp32", 4)])
def test_stage_3_steps_a_sub_group_at_a_time(g: str, per: int) -> None:
    """A flat copy and an fp32 one, 2 + 4 bytes; of fp32 gradients the one is the other (stage3.py:1895-1916)."""
    e = zero(sharding="zero3", grad_dtype=g)
    stepping = moments(e, "stepping")
    assert total(stepping["gradients of a sub-group flattened"]) == per * max(e.cut.sub_groups)
    assert total(stepping["optimizer step of a sub-group"]) == 4 * max(e.cut.sub_groups)
    assert total(stepping["gradient norm"]) == 8 * VH // 8


# --- ZeRO-Offload ---


def test_offload_checks_a_whole_gradient_for_overflow_where_it_is_reduced() -> None:
    """About 11 bytes an element (`x.float()`, isnan, isinf): the head's in the final norm's hook as it is larger than
    the bucket, not at the loss. In the layers 11 · 58.7M is less than the copy of the full bucket before it."""
    e = zero(sharding="zero2", offload__optimizer=True)
    assert at(e.at(head()), "gradients#zero-offload") == 0
    assert at(e.at(norm()), "gradients#zero-offload") == 11 * VH
    for where in (top(), bottom()):
        assert at(e.at(where), "gradients#zero-offload") == 0
    assert at(e.at(bottom()), "communication#zero-bucket") == 2 * BUCKET
    assert total(e.at(bottom()), "gradients") == 0


def test_the_first_bucket_to_leave_may_hold_the_head() -> None:
    """Llama 2 7B's head (131M) fits the bucket, so its check comes with the first full bucket of the layers."""
    e = zero(model="llama-2-7b", sharding="zero2", offload__optimizer=True)
    v_h, layer, gate = 32_000 * 4096, 202_383_360, 11_008 * 4096
    assert at(e.at(Where("norm", 32, True, root=v_h + 4096, making=4096)), "gradients#zero-offload") == 0
    assert at(e.at(Where("layer", 31, True, v_h + 4096, 0, layer, gate)), "gradients#zero-offload") == 0
    assert at(e.at(Where("layer", 30, True, v_h + 4096, layer, layer, gate)), "gradients#zero-offload") == 11 * v_h
    assert at(e.at(Where("layer", 0, True, v_h + 4096, 31 * layer, layer, gate)), "gradients#zero-offload") == 0
    # there the copy of the full bucket, 1.0e9 bytes, is more than 11 bytes of gate_proj's 45M elements
    assert 11 * gate < BUCKET


def test_offload_leaves_weights_and_a_staging_buffer_on_the_gpu() -> None:
    """2P and 2 bytes of the largest trained tensor, from init (:483-485); with LoRA that is the largest adapter."""
    assert total(zero(sharding="zero2", offload__optimizer=True).resident()) == 2 * P + 2 * VH
    lora = zero(sharding="zero2", method="lora", lora__rank=64, offload__optimizer=True)
    assert at(lora.resident(), "communication#zero-offload") == 2 * 64 * 14_336


@pytest.mark.parametrize(
    ("version", "copied"),
    [("0.13.5", 0), ("0.14.0", 0), ("0.14.1", 4), ("0.16.9", 4), ("0.17.0", 0), ("0.19.5", 0)],
)
def test_offload_copies_the_fp32_partition_to_the_gpu_from_0_14_1_to_0_16_9(version: str, copied: int) -> None:
    """`fp32_partition.to(gpu)` (:1881-1882): 4P/N in the step of these versions alone, and never in stage 3."""
    for sharding, expected in (("zero2", copied * PART), ("zero3", 0)):
        e = zero(sharding=sharding, offload__optimizer=True, versions={"deepspeed": version})
        assert total(moments(e, "stepping")["optimizer step on the host"]) == expected


def test_stage_3s_offload_squares_gradients_in_chunks() -> None:
    """`_constant_buffered_norm2`: 8 bytes of at most 2.5e8 elements; on one rank the embedding's 525M are two."""
    one = zero(sharding="zero3", offload__optimizer=True, gpus=1, global_batch=1)
    assert at(one.at(end()), "gradients#norm") == 8 * 250_000_000
    eight = zero(sharding="zero3", offload__optimizer=True)
    # 8 · V·h/8 = 0.53e9 is less than the bucket's copy
    assert at(eight.at(end()), "communication#zero-bucket") == BUCKET


# --- stage 3: gathered parameters ---


def test_gathering_fills_the_window_and_overshoots_by_the_last_tensor() -> None:
    """2·(1e9 + the tensor that comes last): gate_proj, 2.117e9 (simulated with DeepSpeed's coordinator: 2.04).

    The head is fetched ahead, and within the window: of Qwen2.5 7B's, 545M elements, 0.98e9 were there when traced.
    """
    e = zero(sharding="zero3")
    window = 10**9
    assert at(e.at(FORWARD), "communication#zero-3") == 2 * (window + GATE)
    assert at(e.at(head()), "communication#zero-3") == 2 * (window + GATE)
    # every layer has been released when the embedding's backward comes (traced, Llama 3.2 3B: its table alone)
    assert at(e.at(end()), "communication#zero-3") == 2 * VH
    assert at(e.at(Where("loss", 32, True)), "communication#zero-3") == 2 * (window + GATE)
    # while another model runs, this one's forward has ended: traced for DPO, 12.91 GiB (Llama 3 8B, 64 ranks)
    assert at(e.at(Where("waiting", 32, False)), "communication#zero-3") == 0


def test_backward_gathers_what_lies_below() -> None:
    """Llama 3 8B, layers of 218,112,000: in layer 1 two of them and the embedding, less than the window."""
    e = zero(sharding="zero3")
    assert at(e.at(Where("layer", 1, True)), "communication#zero-3") == 2 * (2 * 218_112_000 + VH)
    assert at(e.at(Where("layer", 31, True)), "communication#zero-3") == 2 * (10**9 + GATE)


@pytest.mark.parametrize(("checkpointing", "last"), [("full", 128_256 * 3072), ("none", 8192 * 3072)])
def test_a_tied_head_stays_beside_layers_that_are_run_again(checkpointing: str, last: int) -> None:
    """Llama 3.2 3B under 8 ranks, traced at the first full bucket: 1.31e9 elements with recomputation."""
    e = zero(model="llama-3.2-3b", sharding="zero3", checkpointing=checkpointing)
    assert at(e.at(Where("layer", 27, True)), "communication#zero-3") == 2 * (10**9 + last)


SAVED = {"rank": 8, "targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
ADAPTED = {"framework": "torch", "trainer": "transformers", "method": "lora", "lora": SAVED, "gpus": 8}


@pytest.mark.parametrize(("sharding", "shards"), [("zero2", 1), ("zero3", 8)])
def test_copies_of_modules_are_trained_and_cut_as_adapters_are(sharding: str, shards: int) -> None:
    """Embedding and head of Llama 3 8B beside adapters of rank 8 on q: 2 bytes, and 12 over the ranks; P is frozen."""
    e = engine(**ADAPTED, model="llama-3-8b", sharding=sharding)
    trained = 32 * 8 * (4096 + 4096) + 2 * VH
    assert total(e.weights(), "adapter") == 2 * trained // shards
    assert total(e.weights(), "weights") == 2 * P // shards
    assert total(e.resident(), "master_weights", "optimizer_states") == 12 * trained // 8


def test_both_copies_of_a_tied_table_are_gathered_where_the_table_itself_does_not_run() -> None:
    """Llama 3.2 1B is smaller than the window: all of it, a second table and the adapters of 16 layers."""
    e = engine(**ADAPTED, model="llama-3.2-1b", sharding="zero3")
    elements = 1_235_814_400 + 128_256 * 2048 + 16 * 8 * (2048 + 2048)
    window = 10**9 + 2048 * 8192
    assert at(e.at(Where("layer", 15, False)), "communication#zero-3") == 2 * min(elements, window)
    assert e.copied == 128_256 * 2048  # type: ignore[attr-defined]


def test_without_deepspeeds_linear_what_was_gathered_stays_until_backward() -> None:
    """Llama 2 7B: with one layer the window and its linears, 202,375,168; with all of them the whole model.

    Traced at 512 tokens on 8 ranks: 11.243e9 bytes more than with it, of 13.477e9 for all weights.
    """
    fields = {"framework": "torch", "model": "llama-2-7b", "sharding": "zero3", "memory_efficient_linear": False}
    e = zero(**fields)
    linears = 202_375_168
    first = at(e.at(Where("layer", 0, False)), "communication#zero-3")
    assert first == 2 * (10**9 + 11_008 * 4096 + linears)
    [line] = [
        line for line in e.at(Where("layer", 0, False)) if line.source == "communication#zero-3" and line.bytes > 10**9
    ]
    assert (line.formula, line.values["K"]) == ("b·min(P, E_live + p + K)", linears)
    [plain] = [line for line in zero(sharding="zero3").at(FORWARD) if line.formula.startswith("b·min")]
    assert (plain.formula, "K" in plain.values) == ("b·min(P, E_live + p)", False)
    assert at(e.at(Where("loss", 32, False)), "communication#zero-3") == 2 * 6_738_415_616
    again = zero(**fields | {"checkpointing": "full"})
    assert at(again.at(Where("loss", 32, False)), "communication#zero-3") == 2 * (10**9 + 11_008 * 4096)


def test_a_configuration_may_keep_fewer_parameters_gathered_and_step_fewer_at_a_time() -> None:
    """A tenth of DeepSpeed's billion, as LOMO's own configuration has it (lomo/config/ds_config.json): the window and
    the last module in forward; sub-groups that end with the parameter that reaches the size."""
    e = zero(framework="torch", sharding="zero3", max_live_parameters=10**8, sub_group_size=10**8)
    [line] = [x for x in e.at(FORWARD) if x.formula.startswith("b·min")]
    assert line.values["E_live"] == 10**8
    usual = zero(framework="torch", sharding="zero3")
    assert sum(e.cut.sub_groups) == sum(usual.cut.sub_groups)
    assert 10**8 <= max(e.cut.sub_groups) < max(usual.cut.sub_groups)


def test_buckets_are_as_large_as_the_configuration_says() -> None:
    """Half a billion elements of 16 bits, or the square of the width, which Transformers puts for `auto`."""
    for sharding in ("zero2", "zero3"):
        fields = {"framework": "trl", "sharding": sharding, "gpus": 8, "global_batch": 64, "model": "llama-3.1-8b"}
        sizes = [
            job(**fields, reduce_bucket_size=size).keeps.deepspeed.reduce_bucket for size in (None, "auto", 2 * 10**8)
        ]
        assert sizes == [500_000_000, 4096 * 4096, 200_000_000]
    usual, small = (zero(**fields, reduce_bucket_size=size) for size in (None, 10**8))
    assert total(usual.states()) - total(small.states()) == 2 * (500_000_000 - 100_000_000)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"framework": "torch", "reduce_bucket_size": "auto"}, "given 'auto' with trainer own, allowed: a number"),
        ({"framework": "openrlhf", "reduce_bucket_size": 5}, "given 5 with openrlhf, allowed: null; it writes"),
        (
            {"framework": "trl", "sharding": "zero2", "stage3_prefetch_bucket_size": "auto"},
            "given 'auto' with sharding zero2",
        ),
        (
            {"framework": "torch", "sharding": "fsdp2", "reduce_bucket_size": 5},
            "given 5 with sharding fsdp2, allowed: null",
        ),
    ],
)
def test_sizes_of_buckets_are_refused_where_nothing_reads_them(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        job(**{"sharding": "zero3", "gpus": 8, "global_batch": 64} | fields)
    assert line in str(caught.value)


@pytest.mark.parametrize("field", ["max_live_parameters", "sub_group_size"])
def test_sizes_of_a_configuration_are_those_of_plain_zero_3_alone(field: str) -> None:
    with pytest.raises(ScenarioError, match=f"{field}: given 5 with trl and sharding zero3, allowed: none, or a size"):
        job(framework="trl", sharding="zero3", gpus=8, global_batch=64, **{field: 5})


@pytest.mark.parametrize("field", ["memory_efficient_linear", "zero_init"])
@pytest.mark.parametrize(("framework", "sharding"), [("torch", "zero2"), ("openrlhf", "zero3"), ("trl", "zero3")])
def test_deepspeeds_own_ways_are_left_by_plain_zero_3_alone(framework: str, sharding: str, field: str) -> None:
    """The other frameworks write DeepSpeed's configuration themselves; below stage 3 nothing is gathered."""
    with pytest.raises(ScenarioError) as caught:
        job(framework=framework, sharding=sharding, gpus=8, global_batch=64, **{field: False})
    assert str(caught.value) == (
        f"scenario: {field}: given false with {framework} and sharding {sharding}, "
        "allowed: true, or false with torch and zero3"
    )


def test_outside_zero_init_each_gpu_has_the_whole_model_before_it_is_partitioned() -> None:
    """Llama 2 7B's 6,738,415,616 parameters in bf16 (`self.module.to`, DeepSpeed 0.19.2 runtime/engine.py:1585)."""
    fields = {"framework": "torch", "model": "llama-2-7b", "sharding": "zero3"}
    whole = zero(**fields, zero_init=False)
    (at, lines), *rest = whole.loading()
    assert (at, total(lines)) == ("whole weights on the GPU", 2 * 6_738_415_616)
    assert rest == list(zero(**fields).loading())


def test_the_last_gradients_leave_together_where_they_fit_a_bucket() -> None:
    """Qwen2.5 0.5B, 494,032,768 parameters: nothing leaves before backward has ended, then all of it is copied."""
    for sharding in ("zero2", "zero3"):
        e = zero(model="qwen2.5-0.5b", sharding=sharding)
        [flush] = [line for line in e.at(Where("reduce", 0, True, 896, 357_897_088)) if line.formula == "b·E_f"]
        assert flush.bytes == 2 * 494_032_768
        assert not [
            line for line in e.at(Where("layer", 0, True, 896, 0, 9, 9)) if line.formula == "b·E_f" and line.bytes
        ]


def test_a_small_model_is_gathered_whole() -> None:
    """Qwen2.5 0.5B has 494,032,768 parameters, less than the window."""
    e = zero(model="qwen2.5-0.5b", sharding="zero3")
    assert at(e.at(FORWARD), "communication#zero-3") == 2 * 494_032_768


def test_a_reward_model_has_no_large_head_to_gather() -> None:
    """Its head is one row of 4,096."""
    e = zero(task="rm", sharding="zero3")
    assert at(e.at(Where("head", 32, False)), "communication#zero-3") == 2 * (10**9 + GATE)


def test_one_rank_gathers_nothing_unless_its_shards_are_on_the_host() -> None:
    """`_no_gather_coalesced` (partition_parameters.py:810): the parameter is its own shard."""
    common = {"framework": "torch", "gpus": 1, "sharding": "zero3", "global_batch": 1, "precision": "mixed"}
    assert at(zero(**common).at(FORWARD), "communication#zero-3") == 0
    offloaded = zero(**common, offload__parameters=True)
    assert at(offloaded.at(FORWARD), "communication#zero-3") == 2 * (10**9 + GATE)
    assert total(offloaded.resident(), "weights") == 0


def test_stage_3_reduces_a_large_gradient_in_place() -> None:
    """One parameter divisible by N needs no cat (coalesced_collectives.py:158-218); it waits in its own 2·V·h, and
    nothing has filled the bucket at the head."""
    e = zero(sharding="zero3")
    assert at(e.at(head()), "communication#zero-bucket") == 0
    assert at(e.at(norm()), "communication#zero-bucket") == 0
    assert at(e.at(norm()), "gradients#accumulation") == 2 * (VH + 4096)
    assert at(e.at(bottom()), "communication#zero-bucket") == BUCKET


# --- the host ---


@pytest.mark.parametrize(("version", "flattened"), [("0.16.4", 4 * P), ("0.18.9", 4 * P), ("0.19.0", 0)])
def test_stages_1_and_2_flatten_on_the_host_up_to_0_18(version: str, flattened: int) -> None:
    """Parameters and their flat copy, 2P + 2P in every rank (:323-365), above the 2P of loading."""
    found = moments(zero(sharding="zero2", versions={"deepspeed": version}), "host")
    assert total(found["loading"]) == 2 * P
    assert total(found.get("weights flattened", [])) == flattened


def test_stage_3_and_four_bit_models_read_a_checkpoint_shard_at_a_time() -> None:
    """zero.Init partitions as it loads; a 4-bit model goes straight to the GPU: 5 GB a rank, or all if it is less."""
    assert total(moments(zero(sharding="zero3"), "host")["loading"]) == 5 * 10**9
    assert total(moments(zero(sharding="zero2", method="qlora"), "host")["loading"]) == 5 * 10**9
    assert total(moments(zero(model="qwen2.5-0.5b", sharding="zero3"), "host")["loading"]) == 2 * 494_032_768


def test_stage_2_offloads_master_gradients_staging_and_what_accumulates() -> None:
    """Per rank of 8, from 0.14.1: master 4P/8 = 3.74 GiB pinned in 4, fp32 gradients the same, staging 2·V·h in 1 GiB,
    every touched parameter in a block of its own; Adam's 8P/8 after the first step."""
    e = zero(sharding="zero2", offload__optimizer=True, global_batch=64)
    found = moments(e, "host")
    each = sum(host.pinned(2 * n) for n in e.cut.touched)
    assert total(found["before the first step"]) == 4 * GiB + 4 * GiB + 1 * GiB + each
    assert 2 * KEPT < each < 4 * KEPT
    assert total(found["after the first step"]) - total(found["before the first step"]) == 8 * PART
    # while the fp32 gradients are being pinned their pageable source exists too
    assert total(found["optimizer built"]) == 9 * GiB + 4 * PART


@pytest.mark.parametrize(
    ("version", "extra"),
    [
        # the master pageable, CPU Adam's double buffer
        ("0.13.5", 4 * PART - 4 * GiB + GiB),
        ("0.14.0", 4 * PART - 4 * GiB + GiB),
        ("0.14.2", GiB),
        ("0.14.3", 0),
        ("0.16.9", 0),
        # a pinned bf16 copy of the partition: 2P/8 = 1.87 GiB in 2
        ("0.17.0", 2 * GiB),
        ("0.19.5", 2 * GiB),
    ],
)
def test_offloads_host_memory_changes_with_deepspeed(version: str, extra: int) -> None:
    """Against 0.16.4: the versions in which each block appears or goes (tag by tag)."""
    fields = {"sharding": "zero2", "offload__optimizer": True}
    base = total(moments(zero(**fields), "host")["before the first step"])
    found = moments(zero(**fields, versions={"deepspeed": version}), "host")
    assert total(found["before the first step"]) == base + extra


@pytest.mark.parametrize(("version", "extra"), [("0.13.5", GiB), ("0.14.2", GiB), ("0.14.3", 0)])
def test_cpu_adams_double_buffer_is_there_in_stage_3_too(version: str, extra: int) -> None:
    """Two tiles of 128 Mi floats, 1 GiB a rank, up to 0.14.2 (csrc/includes/cpu_adam.h)."""
    fields = {"sharding": "zero3", "offload__optimizer": True}
    base = total(moments(zero(**fields), "host")["before the first step"])
    found = moments(zero(**fields, versions={"deepspeed": version}), "host")
    assert total(found["before the first step"]) == base + extra


def test_a_frozen_models_offloaded_shards_are_pinned_one_by_one() -> None:
    """ref_offload under ZeRO-3: by hand for one layer's gate_proj, 2·58,720,256/8 = 14 MiB in a block of 16; below
    stage 3 the wish is ignored."""
    s = {"framework": "torch", "gpus": 8, "sharding": "zero3", "precision": "mixed", "offload__parameters": True}
    frozen = engine(**s, trained=False)
    assert total(frozen.resident()) == 0
    pinned = total(moments(frozen, "host")["before the first step"])
    assert 2 * PART < pinned < 4 * PART
    assert host.pinned(2 * GATE // 8) == 16 * 2**20
    trained = engine(**s)
    # trained ones share one block: 1.87 GiB in 2
    assert total(moments(trained, "host")["before the first step"]) == 2 * GiB


@pytest.mark.parametrize(
    ("sharding", "word", "expected"),
    [
        ("zero3", "parameter", 2 * VH),
        ("zero3", "whole", 2 * P),
        ("zero3", "clone", 2 * VH),
        ("zero2", "parameter", 0),
        ("zero2", "whole", 0),
        ("zero2", "clone", 2 * VH),
    ],
)
def test_stage_3_gathers_what_it_hands_on(sharding: str, word: str, expected: int) -> None:
    """One parameter after another, or all to merge adapters; below stage 3 weights are whole, and a clone a copy."""
    assert zero(sharding=sharding).handing(word).bytes == expected


def test_states_that_sleep_lie_pinned_on_the_host() -> None:
    """`offload_states`: the fp32 master of a share, 4·P/8 = 3.74 GiB, in 4 GiB, from the start; two moments later."""
    e = zero(sharding="zero3")
    asleep = replace(e, replica=replace(e.replica, leaves=frozenset({"states"})))
    found = moments(asleep, "host")
    assert total(found["before the first step"]) == 4 * GiB
    assert total(found["after the first step"]) == 12 * GiB


# --- for any scenario ---

STATES = ("weights", "adapter", "master_weights", "gradients", "optimizer_states")


def states(e: Zero) -> int:
    """The most of weights, gradients and optimizer states that any place sees."""
    return max(total([*e.resident(), *e.at(where)], *STATES) for where in places(e))


def split(lines: list[Line]) -> tuple[list[Line], list[Line]]:
    """All lines but the copies and checks of a reduction, and these."""
    passing = [line for line in lines if line.values.keys() & {"E_f", "G_s"} or line.source == "gradients#zero-offload"]
    return [line for line in lines if line not in passing], passing


def restaged(s: Scenario, stage: int) -> Zero:
    """The job's engine at another stage, nothing on the host."""
    offload = replace(s.offload, optimizer=False, parameters=False)
    found = engine_of(replace(under(s, f"zero{stage}"), gpus=s.gpus, offload=offload))
    assert isinstance(found, Zero)
    return found


@given(scenarios(("sft",)))
def test_a_higher_stage_never_needs_more_of_weights_gradients_and_states(s: Scenario) -> None:
    """With two exceptions, both named. While ZeRO-2 accumulates it holds its partition's gradients twice as soon as a
    bucket has been reduced (2·2K), against the 2P that ZeRO-1 accumulates: more on one rank, or a little on two. And
    ZeRO-3 alone keeps fp32 gradients where it is asked to: 4P/N instead of 2K, more than it saves only if nothing is
    sharded, or so little is trained that ZeRO-2 has all gradients in its bucket."""
    assume(s.method != "qlora" and s.optimizer != "none")
    one, two, three = (restaged(s, stage) for stage in (1, 2, 3))
    r, touched, slack = one.replica, sum(one.cut.touched), 4 * len(one.replica.trained_tensors) * 200
    if r.accumulates and not one.plain_bf16:
        twice = 2 if r.trainable > 500_000_000 else 1
        assert states(two) - states(one) == 2 * twice * touched - 2 * r.trainable
    else:
        assert states(two) <= states(one)
    saved = 2 * (r.parameters + r.adapter) * (r.ranks - 1) // r.ranks
    assert states(three) <= states(two) - saved + r.grad_bytes * r.trainable // r.ranks + slack
    if r.ranks > 1 and (r.grad_bytes == 2 or r.trainable > one.config.reduce_bucket):
        assert states(three) <= states(two) + slack


@given(scenarios(("sft", "rm", "dpo")), st.sampled_from(("zero1", "zero2", "zero3")))
def test_offload_never_needs_more_gpu_memory_for_states(drawn: Scenario, sharding: str) -> None:
    """The optimizer's states leave the GPU; what comes instead are buffers, which are no states."""
    s = under(drawn, sharding)
    on, off = (engine_of(replace(s, offload=replace(s.offload, optimizer=moved))) for moved in (True, False))
    assert total(on.resident(), "optimizer_states", "master_weights") == 0
    for where in places(on):
        assert total([*on.resident(), *on.at(where)], *STATES) <= total([*off.resident(), *off.at(where)], *STATES)


@given(scenarios(("sft", "rm")), st.sampled_from(("zero1", "zero2", "zero3")))
def test_twice_the_ranks_never_need_more_a_gpu(drawn: Scenario, sharding: str) -> None:
    """Line by line at every place and in the step, with two exceptions, both bounded. More ranks split a tensor larger
    than the bucket over partitions, so that its reduction needs a copy of it. And where a ZeRO-3 sub-group ends moves
    with the padding; it never exceeds its size by more than one parameter's part."""
    s = under(drawn, sharding)
    few = engine_of(s)
    many = engine_of(replace(s, gpus=2 * s.gpus, global_batch=2 * s.global_batch))
    assert isinstance(few, Zero) and isinstance(many, Zero)
    rounding = 8 * sum(t.count for t in few.replica.trained_tensors)
    assert total(many.resident()) <= total(few.resident()) + rounding
    for where in places(few):
        (before, passing), (after, passing_after) = (split(e.at(where)) for e in (few, many))
        assert total(after) <= total(before) + rounding
        assert total(passing_after) <= max(total(passing), 2 * max(few.replica.largest, 500_000_000)) + rounding
    for (name, before), (again, after) in zip(few.stepping(), many.stepping(), strict=True):
        assert name == again
        if "of a sub-group" in name:
            c = many.cut
            assert max(c.sub_groups) <= 10**9 + -(-c.largest // many.replica.ranks)
        else:
            assert total(after) <= total(before) + rounding


@given(scenarios(("sft", "rm")), st.sampled_from(("zero1", "zero2", "zero3")))
def test_the_shards_of_all_ranks_add_up_to_at_least_the_whole(drawn: Scenario, sharding: str) -> None:
    """Master weights and moments over N ranks hold every trained parameter; ZeRO-3's weights every parameter."""
    s = under(drawn, sharding)
    e = engine_of(replace(s, offload=replace(s.offload, optimizer=False, parameters=False)))
    r, lines = e.replica, e.resident()
    # each line is rounded down to whole bytes
    assert r.ranks * (total(lines, "master_weights") + 1) >= r.master_bytes * r.trainable
    if s.sharding == "zero3" and s.method != "qlora":
        assert r.ranks * (total(lines, "weights") + 1) >= 2 * r.parameters


def test_zero_3_cuts_four_bits_and_leaves_their_scales_whole() -> None:
    """Llama 3 8B over 8: half a byte for each of P_4 = 32 x 218,103,808 elements and 2 for the rest, cut; scales whole.

    Loaded whole first. Gathered are bf16 elements of storage, four of four bits in each: in forward all of them, with
    the adapters, unless the window of 10^9 and the largest product are less, 14,336 x 4,096 / 4.
    """
    fields = {"framework": "torch", "method": "qlora", "sharding": "zero3", "gpus": 8, "checkpointing": "full"}
    e = zero(**fields, global_batch=8)
    four, scale = 32 * 218_103_808, 1 / 64 + 4 / (64 * 256)
    whole = 0.5 * four + 2 * (P - four)
    assert total(e.resident(), "weights") == int(whole / 8 + scale * four)
    assert total(next(iter(e.loading()))[1], "weights") == int(whole + scale * four)
    forward = total([e.live(Where("layer", 0, False))])
    stored = P - four + four // 4 + e.replica.adapter
    assert forward == 2 * min(stored, 10**9 + 14_336 * 4_096 // 4)


def test_the_parts_of_a_reward_model_with_lora_on_six_gpus() -> None:
    """OpenRLHF issue 354 by hand: 7,504,928,768 weights of 2 bytes are 13.98 GiB; the bucket 0.93; adapters of 335 MB
    and an sixth of 12 bytes for each of their parameters together
    0.62."""
    fields = dict(OPENRLHF, framework="openrlhf==0.3", task="rm", gpus=6, global_batch=126, method="lora")
    e = zero(**fields, sharding="zero2", lora__rank=64)
    lines = e.resident()
    assert total(lines, "weights") == 2 * 7_504_928_768
    assert f"{total(lines, 'weights') / GiB:.2f}" == "13.98"
    assert total(lines, "adapter") == 2 * 167_772_160
    assert total(lines, "master_weights", "optimizer_states") == 12 * 167_772_160 // 6 - 1  # rounded down twice
    assert f"{at(e.at(Where('layer', 0, True)), 'communication#zero-bucket') / GiB:.2f}" == "0.93"


@pytest.mark.parametrize(
    ("sharding", "version", "looked"),
    [("zero2", "0.16.4", 11 * VH), ("zero2", "0.19.5", 11 * VH), ("zero2", "0.19.6", 0), ("zero3", "0.19.8", 3 * PART)],
)
def test_a_scaled_loss_has_each_step_look_for_overflow(sharding: str, version: str, looked: int) -> None:
    """Stage 2 in the gradients that it keeps, one by one, the embedding's the largest; stage 3 in all of its share.

    0.16.4 stage_1_and_2.py:2031: fp32 copy 4, `isnan` 1, `isinf` 4 + 1, `logical_or` 1. 0.19.6 utils.py:205: `amax`,
    `amin`. stage3.py:3013 of 0.19.8: `isinf` of fp16, 2 for absolute values and 1 for the mask.
    """
    own = {"framework": "torch", "sharding": sharding, "versions.deepspeed": version}
    e = zero(precision="fp16", **own)
    found = dict(e.stepping())["overflow check"]
    assert at(found, "gradients#zero-offload") == looked
    plain = zero(precision="mixed", **own)
    assert [line.bytes for line in e.weights()] == [line.bytes for line in plain.weights()]
    assert "overflow check" not in dict(plain.stepping())


@pytest.mark.parametrize(("version", "looked"), [("0.19.5", 11 * VH), ("0.19.6", 0)])
def test_offload_looks_for_overflow_without_a_copy_since_it_reduces_first(version: str, looked: int) -> None:
    e = zero(sharding="zero2", **{"offload.optimizer": True, "versions.deepspeed": version})
    assert at(e.at(norm()), "gradients#zero-offload") == looked


MUON: dict[str, object] = {
    "framework": "torch", "trainer": "own", "optimizer": "muon", "sharding": "zero2", "gpus": 8,
    "versions": {"deepspeed": "0.19.6"},
}  # fmt: skip


def test_deepspeeds_muon_keeps_a_momentum_of_whole_matrices_and_makes_them_orthogonal_beside_their_gradients() -> None:
    """Two groups over 8 ranks (DeepSpeed 0.19.6): four layers' matrices of 218,103,808 elements each, and of embedding,
    65 norms and head 131,367,424. One rank's part of these begins in the embedding, which is reduced whole, and has 33
    norms; the momentum is bf16, as the gradients are, AdamW's moments fp32.

    As backward ends gradients and orthogonal matrices are there, with two copies of down_proj and four squares of its
    smaller side in fp16; then a flat copy of a group in bf16 and in fp32, and for AdamW four tensors in fp32.
    """
    e = engine_of(job(**MUON))
    assert isinstance(e, Zero)
    matrices, rest, whole = 4 * 218_103_808, 131_367_424, VH + 33 * 4096
    assert [(cut.share, cut.kept) for cut in e.cuts] == [(matrices, matrices), (rest, whole)]
    states = next(line for line in e.states() if line.component == "optimizer_states")
    assert states.bytes == 2 * matrices + 8 * rest
    gram = 2 * (2 * 4096 * 14_336 + 4 * 4096 * 4096)
    step = {name: sum(line.bytes for line in lines) for name, lines in e.stepping()}
    kept = 2 * (matrices + whole)
    assert step["matrices made orthogonal"] - gram - kept - 2 * matrices == 2 * e.config.reduce_bucket * (
        1 + e.overlaps
    )
    assert step["gradients of matrices flattened"] == kept + 2 * matrices + 6 * matrices
    assert step["optimizer step of matrices"] == 2 * whole + 4 * matrices
    assert step["other gradients flattened"] == 2 * whole + 6 * rest
    assert step["optimizer step"] == (4 + 16) * rest


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"sharding": "zero3"}, "optimizer: given 'muon' with sharding zero3, allowed: with none, ddp, zero2"),
        ({"offload": {"optimizer": True}}, "optimizer: given 'muon' with sharding zero2, allowed: for method full"),
        (
            {"versions": {"deepspeed": "0.17.6"}},
            "optimizer: given 'muon' with deepspeed 0.17.6, allowed: 0.18 or later",
        ),
        ({"trainer": "ms-swift"}, "optimizer: given 'muon' with sharding zero2, allowed: with trainer own"),
    ],
)
def test_deepspeeds_muon_is_refused_where_it_is_not_modelled(fields: dict[str, object], line: str) -> None:
    with pytest.raises(ScenarioError, match=line):
        job(**MUON | fields)
