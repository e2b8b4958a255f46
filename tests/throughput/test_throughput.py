"""Step times: arithmetic and bytes worked by hand, what must hold for any job, and what an estimate shows of it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from strategies import scenarios

from calc.catalog.catalog import GPU, Node, load
from calc.estimate.estimate import as_dict, estimate, speed
from calc.estimate.report import text
from calc.memory.activations import traffic as layer_traffic
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture, LayerSpec, parameters, tensors
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.throughput import Term, Throughput, Unrated, node_of, throughput, traffic, work
from calc.throughput.rates import BUS, MASKED, MEMORY, THROUGH_HOST, Rates, rated
from calc.throughput.rollout import (
    AHEAD_SEQUENCE,
    AHEAD_STEP,
    DECODED,
    ENGINE_STEP,
    HANDED,
    SEQUENCE,
    Engine,
    decode,
    handed,
    read,
    waits,
)
from calc.throughput.training import FLAT, Load, optimizer_bytes, update

PAGE = (Path(__file__).parents[2] / "docs/method/throughput.md").read_text("utf-8")
# q 64, k and v 32 each, o 64, gate, up and down 128 each: 576 in a layer; the head is 32 · 8
TINY = Architecture("llama", 8, (LayerSpec(),) * 2, 2, 1, 4, 16, 32, False, 64)
UNIT = Rates(
    matrix=1.0,
    narrow=2.0,
    grouped=1.0,
    fp32=1.0,
    flash=1.0,
    masked=1.0,
    memory=1.0,
    eager=1.0,
    bus=1.0,
    network=1.0,
    pcie=1.0,
    per_node=8,
    cores=48,
)
SFT = {"model": "llama-3-8b", "task": "sft", "gpu": "a100-80-sxm", "seq_len": 2048, "global_batch": 64}
ZERO3 = {**SFT, "framework": "openrlhf", "gpus": 8, "sharding": "zero3", "checkpointing": "full", "micro_batch": 1}
PLAIN = {**ZERO3, "framework": "torch", "precision": "mixed"}
PPO = {"model": "llama-3-8b", "task": "ppo", "gpu": "h100-sxm", "gpus": 8, "framework": "openrlhf"}
APART = {
    **PPO,
    "gpus": 16,
    "placement": "separate",
    "roles.actor.gpus": 8,
    "roles.critic.gpus": 4,
    "rollout.gpus": 4,
}
JOBS: dict[str, dict[str, Any]] = {
    "sft": SFT,
    "lora": {**SFT, "method": "lora"},
    "qlora": {**SFT, "method": "qlora"},
    "eager": {**SFT, "attention": "eager", "checkpointing": "selective"},
    "autocast": {**SFT, "precision": "autocast", "gpus": 8, "sharding": "fsdp1"},
    "zero2": {**ZERO3, "sharding": "zero2"},
    "zero3": ZERO3,
    "offloaded": {**PLAIN, "offload.optimizer": True, "offload.parameters": True},
    "fsdp": {**SFT, "gpus": 16, "sharding": "fsdp2", "checkpointing": "full"},
    "ddp": {**SFT, "gpus": 2, "sharding": "ddp", "optimizer": "adamw-8bit"},
    "rm": {**ZERO3, "task": "rm"},
    "dpo": {**ZERO3, "task": "dpo"},
    "moe": {**SFT, "model": "mixtral-8x7b", "gpus": 8, "sharding": "fsdp2"},
    "sliding": {**SFT, "model": "gemma-2-9b", "seq_len": 8192},
    "ppo": PPO,
    "ppo, separate": APART,
    "grpo, verl": {**PPO, "task": "grpo", "framework": "verl"},
    "grpo, trl": {**PPO, "task": "grpo", "framework": "trl"},
    "update alone": {**PPO, "framework": "torch", "gpus": 1, "rollout.engine": "none",
                     "roles": dict.fromkeys(("critic", "reference", "reward"), "none")},
}  # fmt: skip


def scenario(**fields: Any) -> Scenario:
    return parse(fields)


def answer(fields: dict[str, Any], card: GPU | None = None, node: Node | None = None) -> Throughput:
    s = parse(fields)
    catalog = load()
    return throughput(s, card or catalog.gpu(s.gpu), node or node_of(s, catalog))


def terms_of(s: Scenario) -> list[Term]:
    """The terms of one micro batch of ten tokens, on a card that does one of everything in a second."""
    return list(update(s, s.keeps.roles[0], UNIT, Load(1, 10, 1, 1), "lm"))


def rising(steps: list[float]) -> bool:
    """True if no step is quicker than the one before it, but for the last bit of a float."""
    return all(b >= a * (1 - 1e-12) for a, b in pairwise(steps))


def seconds(t: Throughput, name: str) -> float:
    return sum(x.seconds for x in t.terms if x.name == name)


# ---- worked by hand -----------------------------------------------------------------------------------------------


def test_the_matrices_of_a_tiny_model_are_counted_without_its_embedding_and_with_its_head() -> None:
    c = work.counts(TINY, "lm")
    assert (c.layers, c.head) == (2 * 576, 32 * 8)
    assert work.counts(replace(TINY, tied=True), "lm").head == 32 * 8
    assert work.counts(TINY, "scalar").head == 8


def test_full_training_with_checkpointing_multiplies_four_times_in_layers_and_three_times_in_the_head() -> None:
    """Ten tokens: 2 · 10 · (4 · 1152 + 3 · 256) operations; without checkpointing 3 · (1152 + 256)."""
    c = work.counts(TINY, "lm")
    again = work.matrix(10, c, work.NO_ADAPTERS, work.Passes(1, 1, 1, 1), 1, 1.0)
    assert again.seconds == 2 * 10 * (4 * 1152 + 3 * 256)
    assert work.matrix(10, c, work.NO_ADAPTERS, work.Passes(1, 0, 1, 1), 1, 1.0).seconds == 60 * (1152 + 256)


def test_products_in_8_bits_take_their_own_rate_and_the_casts_of_what_they_multiply() -> None:
    """Ten tokens, forward and both gradients, 1152 elements in two layers, at 2 operations a second: 30 · 1152.

    Inputs of q, k, v, o, gate, up and down: 8·5 + 8 + 16; outputs 8 + 4 + 4 + 8 + 16 + 16 + 8, in each of two layers.
    """
    p = work.Passes(1, 0, 1, 1)
    assert work.widths(TINY) == (2 * 64, 2 * 64)
    tensorwise = work.narrowed(10, 1, TINY, p, 1, "tensorwise", 0, UNIT)
    assert tensorwise.seconds == 2 * 10 * 1152 * 3 / 2 + 10 * (6 * 128 + 6 * 128) + 1152 * (5 + 3)
    mixed = work.narrowed(10, 1, TINY, p, 1, "rowwise_with_gw_hp", 0, UNIT)
    assert mixed.seconds == 2 * 10 * 1152 * (2 / 2 + 1) + 10 * (3 * 128 + 3 * 128) + 1152 * (3 + 3)
    half = work.narrowed(10, 1, TINY, p, 1, "tensorwise", 1, UNIT)
    assert half.seconds == tensorwise.seconds / 2


def test_lora_leaves_out_the_frozen_weights_own_gradients() -> None:
    """Rank 2 on q_proj: 2 · (8 + 8) elements in each of two layers, with both gradients; the rest has one."""
    a = work.adapters(TINY, 2, ("q_proj",))
    assert a == work.Adapters(elements=64, linears=2)
    made = work.matrix(10, work.counts(TINY, "lm"), a, work.Passes(1, 0, 1, 0), 1, 1.0)
    assert made.seconds == 2 * 10 * (2 * (1152 + 256) + 3 * 64)


def test_every_linear_of_a_layer_is_adapted_where_all_are_asked_for() -> None:
    """Inputs 8 · 6 + 16, outputs 8 + 4 + 4 + 8 + 16 + 16 + 8, seven linears, two layers."""
    assert work.adapters(TINY, 1, "all-linear") == work.Adapters(2 * (64 + 64), 14)


def test_causal_attention_sees_half_of_the_keys_and_backward_costs_two_and_a_half_forwards() -> None:
    """Queries and values are 8 wide each, in two layers: 32 a pair; five keys are seen in the mean."""
    c = work.counts(TINY, "lm")
    forward = work.attention(10, 10, c, work.Passes(), True, 1, 1.0)
    assert forward.seconds == 2 * 10 * 32 * 5
    assert work.attention(10, 10, c, work.Passes(1, 1, 1, 1), True, 1, 1.0).seconds == forward.seconds * 4.5
    assert work.attention(10, 10, c, work.Passes(), False, 1, 1.0).seconds == 2 * forward.seconds


def test_a_window_bounds_the_keys() -> None:
    """Of eight tokens with a window of four: 1 + 2 + 3 + 4 · 5 keys are 26 by the piece, 24 as an integral."""
    assert work.keys(8, 4) * 8 == 24
    assert work.keys(4, 4) == work.keys(4, 0) == 2


def test_only_experts_that_a_token_is_sent_to_are_multiplied() -> None:
    """Mixtral routes to two of eight; active parameters less embedding, norms and head are what is left."""
    arch = load().model("mixtral-8x7b").architecture
    h, layers = arch.hidden, arch.layers
    attention = 2 * h * h + 2 * h * arch.kv_heads * arch.head_dim
    assert work.counts(arch, "lm").layers == layers * (attention + 8 * h + 2 * 3 * h * arch.moe_intermediate)


def test_experts_are_multiplied_apart_from_all_else() -> None:
    """Mixtral: two of eight experts of three matrices a layer; each row is read and written by two products."""
    arch = load().model("mixtral-8x7b").architecture
    c, expert = work.counts(arch, "lm"), 3 * arch.hidden * arch.moe_intermediate * arch.layers
    assert (c.routed, c.experts) == (2 * expert, 8 * expert)
    assert c.grouped == 2 * arch.layers * (4 * arch.hidden + 6 * arch.moe_intermediate)
    one = work.experts(10, 1, c, work.Passes(1, 0, 1, 1), 2, 1, 1.0, inf)
    assert one.seconds == 3 * 2 * 10 * c.routed / 2
    moved = work.experts(10, 3, c, work.Passes(), 1, 1, inf, 1.0)
    assert moved.seconds == 10 * c.grouped + 3 * 2 * c.experts
    dense = work.counts(load().model("llama-3-8b").architecture, "lm")
    assert work.experts(10, 1, dense, work.Passes(), 1, 1, 1.0, 1.0).seconds == 0
    plain = work.matrix(10, c, work.NO_ADAPTERS, work.Passes(), 1, 1.0)
    assert plain.seconds == 2 * 10 * (c.layers - c.routed + c.head)


def test_tokens_for_experts_of_other_nodes_go_through_one_gpus_share_of_the_network() -> None:
    """16 ranks, 8 a node: a rank sends each other a sixteenth, 7 of them over NVLink, 8 over its own network share."""
    near = traffic.exchanged("x", 16.0, 2, 3, 8, 8, 7.0, 1.0)
    assert near.seconds == 3 * 2 * 16 / 8 * 7 / 7
    far = traffic.exchanged("x", 16.0, 2, 3, 16, 8, 7.0, 4.0)
    assert far.seconds == 3 * 2 * 16 / 16 * max(7 / 7, 8 / 4)


def test_a_decoding_step_waits_for_two_all_reduces_a_layer_longer_between_nodes() -> None:
    """80 layers: 160 all-reduces of 9.2 µs within a node, of 19.1 µs between nodes; one GPU has none."""
    arch = load().model("qwen2.5-72b").architecture
    alone, near, far = [waits(arch, ranks, UNIT, Engine(1, 1)) for ranks in (1, 8, 16)]
    assert (near - alone, far - alone) == (pytest.approx(160 * 9.2e-6), pytest.approx(160 * 19.1e-6))


def test_a_ring_between_nodes_has_the_network_of_those_of_its_gpus_that_are_in_a_node() -> None:
    """Eight GPUs of 50 GB/s each a node: a group of every second one has half of the node's 400."""
    r = replace(UNIT, bus=1000.0, network=50.0)
    assert (r.link(8), r.link(16), r.link(4, 2), r.link(8, 2), r.link(2, 8)) == (1000, 400, 1000, 200, 50)


def test_experts_on_other_gpus_are_neither_read_nor_waited_for_unless_the_router_is_uneven() -> None:
    """Eight ranks of experts read an eighth of the weights each; twice the tokens on one take all twice as long."""
    job = {"model": "mixtral-8x7b", "task": "pretrain", "trainer": "megatron", "gpu": "h100-sxm", "gpus": 64}
    job |= {"seq_len": 4096, "micro_batch": 1, "global_batch": 64, "tensor_parallel": 1}
    spread: dict[str, Any] = {"expert_parallel": 8}
    jobs = (job, job | spread, job | spread | {"expert_imbalance": 2})
    whole, even, uneven = [next(t for t in answer(each).terms if t.name == "experts") for each in jobs]
    padded = next(
        t for t in answer(job | spread | {"expert_capacity": 2, "expert_padding": True}).terms if t.name == "experts"
    )
    assert padded.seconds == uneven.seconds
    assert (whole.values["H"], even.values["H"]) == (1, 8)
    assert uneven.values["T"] == 2 * even.values["T"]
    assert even.seconds < whole.seconds and even.seconds < uneven.seconds < 2 * even.seconds


def test_megatron_core_adds_to_its_gradients_in_every_micro_batch() -> None:
    """8B parameters on one of 8 pipeline stages' worth of tensor ranks: eight bytes each, read and written in fp32."""
    job = {"model": "llama-3-8b", "task": "pretrain", "trainer": "megatron", "gpu": "h100-sxm", "gpus": 8}
    t = answer(job | {"tensor_parallel": 8, "micro_batch": 1, "global_batch": 4, "seq_len": 4096})
    added = next(term for term in t.terms if term.name == "accumulation")
    elements = parameters(load().model("llama-3-8b").architecture) / 8
    assert added.seconds == pytest.approx(4 * 8 * elements / (3350e9 * MEMORY), rel=0.01)


def test_a_layer_of_experts_takes_what_was_published() -> None:
    """32,768 tokens through the experts of a layer of Qwen3 30B-A3B by torch._grouped_mm on an H100, sorted and added
    up: 10.218 ms (ByteDance-Seed/VeOmni, pull request 460). No constant was set by it."""
    arch, tokens = load().model("qwen3-30b-a3b").architecture, 32_768
    r = rated(load().gpu("h100-sxm"), None, 8, "bf16")
    products = work.experts(tokens, 1, work.counts(arch, "lm"), work.Passes(), 1, 1, r.grouped, r.memory).seconds
    block = layer_traffic(Run(arch, trained=False), LayerSpec("none", "experts")).forward.bytes(tokens, tokens)
    norm_and_sum = tokens * (36 * arch.hidden + 16 + 6 * arch.hidden)
    seconds = products / arch.layers + (block - norm_and_sum) / r.eager
    assert seconds == pytest.approx(10.218e-3, rel=0.10)


def test_the_kernels_of_a_tiny_layer_move_what_its_tape_says() -> None:
    """Forward, a token: two norms of 36 bytes for each of 8 elements and 16 for their rows, RoPE 18 for 12, MLP 10 for
    16, two sums of 6 for 8. Backward: norms 96 and 24, RoPE 26, MLP 16, and gradients that are added up, 30 for 8."""
    forward = 2 * (36 * 8 + 16) + 18 * 12 + 10 * 16 + 2 * 6 * 8
    backward = 2 * (96 * 8 + 24) + 26 * 12 + 16 * 16 + 30 * 8
    found = work.layers(Run(TINY), False, 10, 10)
    assert (found.forward, found.backward) == (2 * 10 * forward, 2 * 10 * backward)
    term = work.elementwise(3, found, work.Passes(1, 1, 1, 1), 1.0)
    assert term.seconds == 3 * (2 * found.forward + found.backward)


def test_kernels_are_counted_and_what_the_host_dispatches_beside_them() -> None:
    """Forward: two norms of 7, seven products, rotations of 5, attention, two sums, two of the MLP. Backward: norms of
    15, 7 sums of gradients, 14 products, rotations of 9, attention and its accumulators, 3 of the MLP. 34 are kept."""
    forward = 2 * 7 + 7 + 2 * 5 + 1 + 2 + 2
    backward = 2 * 15 + 7 + 14 + 2 * 9 + 2 + 3
    found = work.layers(Run(TINY), False, 10, 10)
    assert found.kernels == (2 * forward, 2 * backward)
    assert found.dispatched == pytest.approx(
        (2 * (forward + 39), 2 * (forward + 39 + 34 * work.HOOKED), 2 * (backward + 71))
    )
    assert work.layers(Run(TINY, reentrant=True), False, 10, 10).dispatched[1] == 2 * (forward + 39)
    assert work.operations((1, 10, 100), work.Passes(1, 1, 1, 1)) == 111
    adapted = work.layers(Run(TINY, trained=False, adapter=Adapter(1, "all-linear", False, 2)), False, 10, 10)
    assert adapted.kernels[0] == 2 * (forward + 7 * 4)  # two products, a scale, a sum
    assert adapted.dispatched[0] == 2 * (forward + 7 * 4 + 39 + 7 * 6)


def test_fused_kernels_move_less() -> None:
    """Liger's, compiled layers, and Megatron-core's own."""
    plain = work.layers(Run(TINY), False, 10, 10)
    megatron = Run(replace(TINY, modeling="megatron"))
    for run in (Run(TINY, replaced=frozenset({"norm", "gate"})), Run(TINY, compiled=True), megatron):
        fused = work.layers(run, False, 10, 10)
        assert fused.forward < plain.forward and fused.backward < plain.backward
        assert fused.kernels < plain.kernels


def test_a_token_meets_the_adapters_of_its_experts_alone() -> None:
    """Qwen3 30B-A3B's 48 layers: of 128 experts with 2,048 inputs and 1,536 outputs a token goes to 8."""
    arch = replace(load().model("qwen3-30b-a3b").architecture, modeling="megatron")
    found, width = work.adapters(arch, 2, ("linear_fc1",)), 2048 + 1536
    assert found == work.Adapters(2 * 48 * 128 * width, 48, 2 * 48 * 120 * width)
    nothing = work.counts(arch, "lm")._replace(layers=0, routed=0, head=0)
    assert work.matrix(10, nothing, found, work.Passes(), 1, 1.0).seconds == 2 * 10 * 2 * 48 * 8 * width


def test_adapters_in_fp32_are_multiplied_at_a_rate_of_their_own() -> None:
    """64 elements three times, at half the rate of the rest; under autocast all are 16 bits."""
    a = work.adapters(TINY, 2, ("q_proj",))
    made = work.matrix(10, work.counts(TINY, "lm"), a, work.Passes(1, 0, 1, 0), 1, 1.0, 0.5)
    assert made.seconds == 2 * 10 * (2 * (1152 + 256) + 3 * 64 / 0.5)
    job = {**SFT, "gpu": "h100-sxm", "method": "lora", "precision": "bf16"}
    slow, fast = (answer({**job, "lora.dtype": t}) for t in ("fp32", "bf16"))
    assert seconds(slow, "matrix work") > seconds(fast, "matrix work")
    term = next(x for x in answer({**job, "precision": "autocast"}).terms if x.name == "matrix work")
    assert term.values["f"] == term.values["F"]


@pytest.mark.parametrize(("framework", "transformers", "times"), [
    ("torch", "4.57", 75), ("torch", "5.0", 224.6), ("trl", "4.57", 224.6), ("openrlhf", "4.57", 224.6),
])  # fmt: skip
def test_checkpointing_has_hooks_unless_transformers_chose_it_before_5(
    framework: str, transformers: str, times: float
) -> None:
    """A forward more of 32 layers, and 4.4 operations more for each of 34 tensors.

    TRL's own trainers ask for the kind with hooks, whatever Transformers would do.
    """
    job = {
        **SFT,
        "framework": framework,
        "versions": {"transformers": transformers},
        "gpus": 8,
        "sharding": "zero2",
        "precision": "mixed",
    }
    none, full = (
        next(t for t in terms_of(scenario(**job, checkpointing=c)) if t.name == "launch") for c in ("none", "full")
    )
    assert full.values["k"] - none.values["k"] == pytest.approx(32 * times)


def test_a_card_waits_only_for_what_its_work_does_not_hide() -> None:
    """Three micro-batches of 100 operations, of which a card hides ten seconds, or all."""
    waits = work.launched(100, 3, work.Passes(), 0, 0.0)
    assert waits.seconds == pytest.approx(300 * work.LAUNCH)
    assert work.launched(100, 3, work.Passes(), 0, 10.0).seconds == 0
    assert work.starts(100, 3).seconds == pytest.approx(300 * work.START)


@pytest.mark.parametrize(("sharding", "precision", "each"), [
    ("fsdp2", "fsdp-mixed", 2 * 4 + 2 + 4), ("fsdp2", "bf16", 2 * 4 + 2 + 2),
    ("fsdp1", "bf16", 2 * 4 + 2 + 2), ("zero3", "mixed", 4), ("zero2", "mixed", 4),
    ("ddp", "bf16", 0),
])  # fmt: skip
def test_what_is_copied_beside_collectives(sharding: str, precision: str, each: float) -> None:
    """One micro-batch. FSDP: two gathers, read and written; gradients read, and written as they are reduced. DeepSpeed:
    gradients into a bucket."""
    job = {**SFT, "gpus": 8, "global_batch": 8, "micro_batch": 1, "sharding": sharding, "precision": precision}
    p = parameters(load().model("llama-3-8b").architecture)
    t = answer(job)
    rate = rated(load().gpu(SFT["gpu"]), None, 8, precision).eager
    assert seconds(t, "repacking") == pytest.approx(each * p / rate)


def test_a_ring_brings_every_rank_what_the_others_have() -> None:
    """Six ranks, 1200 elements of 2 bytes, gathered twice: 2 · 2400 · 5/6 bytes at 10 a second."""
    assert traffic.collective("gather", 1200, 2, 2, 6, 10.0).seconds == pytest.approx(2 * 2400 * 5 / 6 / 10)


def test_zero3_gathers_everything_forward_and_backward_of_every_micro_batch() -> None:
    """64 sequences on eight cards one by one are eight micro-batches: 16 gathers of 16 GB, 7/8 of each, at 235 GB/s."""
    p = parameters(load().model("llama-3-8b").architecture)
    t = answer(ZERO3)
    assert seconds(t, "gather") == pytest.approx(16 * 2 * p * 7 / 8 / 235e9)
    assert seconds(t, "reduce") == pytest.approx(8 * 2 * p * 7 / 8 / 235e9)


def test_ddp_reduces_once_a_step_and_zero2_every_micro_batch() -> None:
    """An all-reduce is a reduce-scatter and a gather; ZeRO-2 gathers new weights once."""
    p = parameters(load().model("llama-3-8b").architecture)
    once = 2 * p * 7 / 8 / 235e9
    job = {**ZERO3, "framework": "torch", "precision": "mixed"}
    ddp, two = answer({**job, "sharding": "ddp", "precision": "bf16"}), answer({**job, "sharding": "zero2"})
    assert seconds(ddp, "all-reduce") == pytest.approx(2 * once)
    assert (seconds(two, "reduce"), seconds(two, "gather")) == pytest.approx((8 * once, once))


def test_under_no_sync_fsdp_reduces_once_a_step() -> None:
    """Eight micro-batches gather sixteen times whatever they reduce."""
    job = {**ZERO3, "framework": "torch", "sharding": "fsdp2", "precision": "bf16"}
    often, once = answer(job), answer({**job, "no_sync": True})
    assert seconds(often, "reduce") == pytest.approx(8 * seconds(once, "reduce"))
    assert seconds(often, "gather") == seconds(once, "gather")


def test_a_flat_parameter_with_adapters_computes_and_reduces_gradients_of_all_of_it() -> None:
    """A third more matrix work than forward, forward again and the gradients of inputs take; whole layers travel."""
    job = {**ZERO3, "framework": "torch", "sharding": "fsdp1", "precision": "bf16", "checkpointing": "full"}
    adapted = {**job, "method": "lora", "lora.rank": 8, "lora.dtype": "bf16"}
    full, own, layer = answer(job), answer(adapted), answer({**adapted, "lora.units": "layer"})
    assert seconds(layer, "matrix work") == pytest.approx(4 / 3 * seconds(own, "matrix work"), rel=0.05)
    assert seconds(layer, "reduce") == pytest.approx(seconds(full, "reduce"), rel=0.15)  # but for embedding and head
    assert seconds(own, "reduce") < 0.01 * seconds(layer, "reduce")


def test_frozen_weights_are_gathered_but_only_adapters_are_reduced() -> None:
    full, lora = answer(ZERO3), answer({**ZERO3, "method": "lora", "lora.rank": 8})
    assert seconds(lora, "gather") == pytest.approx(seconds(full, "gather"), rel=0.01)
    assert seconds(lora, "reduce") < 0.01 * seconds(full, "reduce")


def test_a_fused_step_in_bf16_passes_once_and_a_flat_partition_counts_its_casts() -> None:
    """AdamW: gradient read, weight and two moments read and written, 7; clipping 3; two bytes each."""
    assert optimizer_bytes(scenario(**SFT, optimizer_impl="fused", precision="bf16")) == (7 + 3) * 2
    assert optimizer_bytes(scenario(**SFT, optimizer_impl="foreach", precision="bf16")) == (20 + 3) * 2
    assert optimizer_bytes(scenario(**ZERO3)) == FLAT + 7 * 4 == 52


def test_decoding_reads_the_weights_once_a_step_and_the_cache_of_all_it_advances() -> None:
    """Eight sequences of five tokens, four at once: ten steps, 100 bytes of weights each, 480 of cache in all."""
    assert decode(8, 5, 5, 6, 4, 100.0, 2, 10.0, 1.0).seconds == 10 * (100 / 10 + 1) + 480 / 10


def test_the_longest_response_is_waited_for() -> None:
    """All eight at once, five tokens in the mean and nine at most: nine steps, and the same cache is read."""
    assert decode(8, 5, 9, 6, 8, 100.0, 2, 10.0, 1.0).seconds == 9 * (100 / 10 + 1) + 480 / 10


def test_an_engine_takes_time_for_each_sequence_in_each_of_its_steps() -> None:
    """Forty tokens in all, half a second each."""
    more = decode(8, 5, 5, 6, 4, 100.0, 2, 10.0, 1.0, 0.5).seconds - decode(8, 5, 5, 6, 4, 100.0, 2, 10.0, 1.0).seconds
    assert more == 40 * 0.5


def test_many_sequences_at_once_are_bound_by_arithmetic_as_long_as_there_are_many() -> None:
    """Two steps of eight sequences, 8 · 5 / 2 = 20 s each where reading takes 10; three steps of the longest alone."""
    assert decode(8, 2, 5, 6, 8, 100.0, 0, 10.0, 0, operations=5.0, matrix=2.0).seconds == 2 * 20 + 3 * 10


def test_without_cuda_graphs_a_step_takes_the_host_a_layer_at_a_time_unless_it_reads_for_longer() -> None:
    """28 layers of 2.07 ms, of which 10 ms are those of reading; after a second of reading, kernels' starts alone."""
    arch = load().model("qwen2.5-7b").architecture
    captured, launched = Engine(1, 1), Engine(1, 1, graphs=False)
    graphs = waits(arch, 1, UNIT, captured)
    assert waits(arch, 1, UNIT, launched, 0.01) == pytest.approx(ENGINE_STEP + 28 * 1.99e-3 - 0.01)
    assert waits(arch, 1, UNIT, launched, 1.0) == graphs == waits(arch, 1, UNIT, captured, 0.01)


def test_a_step_prepared_while_the_last_one_runs_waits_for_its_kernels_and_sampler_alone() -> None:
    """Ten kernels in each of 28 layers."""
    arch = load().model("qwen2.5-7b").architecture
    ahead, behind = (waits(arch, 1, UNIT, Engine(1, 1, ahead=ahead)) for ahead in (True, False))
    assert ahead == pytest.approx(28 * DECODED * work.START + AHEAD_STEP)
    assert behind - ahead == pytest.approx(ENGINE_STEP - AHEAD_STEP)


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-vl-7b", "llama-3.2-1b"])
def test_a_decoding_step_reads_layers_and_head_but_looks_embeddings_up(model: str) -> None:
    """A tied head, Llama 3.2 1B's, is read; images of a prompt are long past their tower."""
    arch = load().model(model).architecture
    c = work.counts(arch, "lm")
    assert read(arch, 1, 1) == pytest.approx(2 * (c.layers + c.head), rel=1e-3)


@pytest.mark.parametrize(
    ("framework", "changes", "each"),
    [
        ("verl", {}, AHEAD_SEQUENCE),
        ("verl", {"versions": {"vllm": "0.13.0"}}, SEQUENCE),
        ("openrlhf==0.11.2", {"rollout": {"tensor_parallel": 1}}, AHEAD_SEQUENCE),
        # its engines of several GPUs run under Ray
        ("openrlhf==0.11.2", {"rollout": {"tensor_parallel": 2}}, SEQUENCE),
        ("slime", {"sharding": "megatron"}, AHEAD_SEQUENCE),  # SGLang
    ],
)
def test_the_release_and_what_runs_it_say_if_an_engine_prepares_steps_ahead(
    framework: str, changes: dict[str, Any], each: float
) -> None:
    given = {"framework": framework, "task": "grpo", "model": "qwen3-8b", "gpu": "h100-sxm", "gpus": 8,
             "prompt_len": 512, "response_len": 512, **changes}  # fmt: skip
    found = {t.name: t for t in answer(given).terms}
    assert found["rollout: decode"].values["q"] == each


def test_adapters_in_fsdp_1_units_of_their_own_stop_every_pass() -> None:
    """Qwen2.5 7B: seven linears in 28 layers, two units each; one micro batch forward, again and backward."""
    lora = {**SFT, "model": "qwen2.5-7b", "method": "lora", "framework": "trl", "gpus": 8, "checkpointing": "full"}
    units = [x for x in answer({**lora, "sharding": "fsdp1"}).terms if x.name == "units"]
    assert [x.seconds for x in units] == [pytest.approx(2 * 7 * 28 * 3 * work.UNIT)]
    for other in ({"sharding": "fsdp2"}, {"sharding": "ddp"}, {"sharding": "fsdp1", "method": "full"}):
        assert not [x for x in answer({**lora, **other}).terms if x.name == "units"]
    ppo = {"task": "grpo", "framework": "verl==0.4", "sharding": "fsdp1", "roles.reference": {}}
    named = {
        x.name for x in answer({"gpu": "h100-sxm", "gpus": 8, "model": "qwen2.5-7b", "method": "lora", **ppo}).terms
    }
    assert "actor, scoring: units" in named and "reference, scoring: units" not in named  # it runs without adapters


def test_weights_go_to_the_engine_tensor_by_tensor() -> None:
    """Llama 3.1 8B has nine tensors a layer and three more; Qwen3 30B-A3B three for each of 128 experts."""
    count = {name: handed(load().model(name).architecture) for name in ("llama-3.1-8b", "qwen3-30b-a3b")}
    assert count == {"llama-3.1-8b": 32 * 9 + 3, "qwen3-30b-a3b": 48 * (9 + 3 * 128) + 3}
    # the profile is of DeepSeek-V3, whose tensors are counted in the same way
    assert pytest.approx(33.5) == HANDED * handed(load().model("deepseek-v3").architecture)
    t = answer({**PPO, "framework": "verl"})
    assert seconds(t, "weight sync: tensors") == pytest.approx(HANDED * handed(scenario(**PPO).architecture))


def test_a_pipeline_waits_for_its_first_and_last_micro_batch() -> None:
    assert traffic.bubble(4, 1, 12, 24.0).seconds == 24 * 3 / 12
    assert traffic.bubble(4, 2, 12, 24.0).seconds == 24 * 3 / 12 / 2


def test_a_pipeline_is_timed_with_its_bubble_and_gathers_its_weights_once_a_step() -> None:
    """Four stages on sixteen GPUs: of sixteen micro-batches each, three ramps of the time that they compute."""
    cut = {**SFT, "gpus": 16, "sharding": "fsdp2", "micro_batch": 1, "global_batch": 64}
    found = {p: {t.name: t for t in speed(estimate(scenario(**cut, pipeline_parallel=p))).terms} for p in (1, 4)}
    bubble = found[4]["bubble"]
    assert (bubble.values["p"], bubble.values["m"]) == (4, 16)
    assert bubble.seconds == pytest.approx(bubble.values["G"] * 3 / 16)
    assert found[4]["matrix work"].seconds == pytest.approx(found[1]["matrix work"].seconds)
    assert found[4]["gather"].values["n"] == 1
    assert found[1]["gather"].values["n"] == 4 * 2
    longer = {t.name: t for t in speed(estimate(scenario(**cut | {"global_batch": 256}, pipeline_parallel=4))).terms}
    assert longer["bubble"].seconds == pytest.approx(bubble.seconds, rel=0.01)


def test_a_pipeline_drains_for_each_optimizer_step_of_an_iteration_and_once_for_scoring() -> None:
    """1,024 responses over two replicas, one at a time: 512 micro batches in four steps of 128, or all at once."""
    job = {
        "model": "qwen3-8b",
        "task": "grpo",
        "gpu": "h100-sxm",
        "gpus": 8,
        "framework": "verl",
        "sharding": "megatron",
        "pipeline_parallel": 4,
        "prompt_len": 512,
        "response_len": 1536,
        "micro_batch": 1,
        "global_batch": 256,
        "rollout": {"batch": 128, "n": 8, "tensor_parallel": 1},
    }
    terms = {t.name: t for t in speed(estimate(scenario(**job))).terms}
    assert (terms["actor: bubble"].values["m"], terms["actor, scoring: bubble"].values["m"]) == (128, 512)
    assert terms["actor: bubble"].seconds == pytest.approx(terms["actor: bubble"].values["G"] * 3 / 128)


def test_a_reference_in_stages_takes_the_time_of_one() -> None:
    """Once a KeyError, as each of its stages has a name of its own."""
    job = {
        "model": "qwen3-8b",
        "task": "dpo",
        "gpu": "h100-sxm",
        "gpus": 8,
        "trainer": "megatron-swift",
        "global_batch": 64,
    }
    found = {p: {t.name: t for t in speed(estimate(scenario(**job, pipeline_parallel=p))).terms} for p in (1, 2)}
    whole, stage = (found[p]["reference: matrix work"].seconds for p in (1, 2))
    assert stage == pytest.approx(whole)


def test_a_ring_passes_keys_and_values_on() -> None:
    """Two tensors of 1024 numbers a token and layer in 16 bits, forward and backward, of all but the own tokens."""
    s = replace(scenario(**SFT, gpus=8, sharding="ddp"), context_parallel=4)
    terms = {t.name: t for t in terms_of(s)}
    assert terms["context parallel"].seconds == pytest.approx(10 * 2 * 1024 * 32 * 2 * 2 * 3 / 4)


def test_heads_of_linear_attention_go_to_other_ranks_and_come_back() -> None:
    """Qwen3.5 4B under Megatron-core, layers over two ranks, sequences over four: 24 of 32 layers are linear attention.

    Each rank sends what its product made for its tokens, 8192 + 4096 + 64 numbers, halved, and gets 4096/2 back; the
    eight layers that attend pass keys and values of four heads of 256 on.
    """
    cut = {"tensor_parallel": 2, "context_parallel": 4, "gpus": 8, "global_batch": 8, "micro_batch": 1}
    s = scenario(model="qwen3.5-4b", task="sft", gpu="h100-sxm", trainer="megatron", seq_len=4096, **cut)
    terms = {t.name: t for t in speed(estimate(s)).terms}
    tokens = 8 * 4096
    assert terms["swapped heads"].values["P"] == tokens / 4 * (8192 + 4096 + 64 + 4096) / 2 * 24
    assert (terms["swapped heads"].values["N"], terms["swapped heads"].values["i"]) == (4, 3)
    assert terms["context parallel"].values["P"] == tokens * 2 * 4 * 256 * 8


def test_generation_by_transformers_dispatches_adapters_too() -> None:
    """Seven adapters of two linears a layer, each with its views; and 4-bit linears."""
    job = {"model": "llama-3.2-1b", "task": "grpo", "gpu": "h100-sxm", "gpus": 1, "framework": "trl"}
    job |= {"rollout.engine": "hf", "precision": "bf16", "prompt_len": 64, "response_len": 64}
    waits = {}
    for method in ("full", "lora", "qlora"):
        more = {} if method == "full" else {"lora.targets": "all-linear"}
        terms = {t.name: t for t in speed(estimate(scenario(**job, method=method, **more))).terms}
        waits[method] = terms["rollout: decode"].values["t"] / work.LAUNCH / 16
    adapters, four = waits["lora"] - waits["full"], waits["qlora"] - waits["lora"]
    assert adapters >= 7 * (work.ADAPTER.forward + 3) and four >= 7 * work.FOUR_BIT.forward


def test_states_that_swap_are_those_of_adapters_where_adapters_are_trained() -> None:
    """Weights of 4 bytes, to the host and back, beside 8 bytes of moments for what is trained, over eight shards."""
    job = {
        "model": "llama-3-8b",
        "task": "grpo",
        "gpu": "h100-sxm",
        "gpus": 8,
        "framework": "verl",
        "sharding": "fsdp1",
    }
    job |= {"offload.parameters": True, "offload.optimizer": True}
    for lora in ({}, {"method": "lora", "lora.rank": 16}):
        s = scenario(**job, **lora)
        t = next(t for t in speed(estimate(s)).terms if t.name == "actor: swap")
        whole = parameters(s.architecture)
        trained = work.adapters(s.architecture, 16, s.lora.modules).elements if s.lora else whole
        moved = t.values["P"] * t.values["b"] / 2
        assert t.values["N"] == 8 and moved == pytest.approx(4 * whole + 8 * trained)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"actor: swap": 2, "actor, scoring: swap": 2, "weight sync: swap": 1}),
        ({"framework": "verl==0.8"}, {"actor: swap": 2, "actor, scoring: swap": 2, "weight sync: swap": 2}),
        ({"sharding": "fsdp1"}, {"actor: swap": 2, "actor, scoring: swap": 2, "weight sync: swap": 2}),
        (
            {"method": "lora", "roles.reference": {}},
            {"actor: swap": 2, "actor, scoring: swap": 2, "reference, scoring: swap": 2, "weight sync: swap": 2},
        ),
        ({"framework": "slime", "sharding": "megatron", "placement": "colocated"}, {"actor: swap": 2}),
    ],
)
def test_weights_on_the_host_come_for_each_phase_and_leave_after_it(
    changes: dict[str, Any], expected: dict[str, int]
) -> None:
    """Weights of 4 bytes in verl; what slime pauses goes and comes once, with all that lies in the same blocks."""
    job: dict[str, Any] = {"model": "llama-3-8b", "task": "grpo", "gpu": "h100-sxm", "gpus": 8, "framework": "verl"}
    job |= {"sharding": "fsdp2", "offload.parameters": True} | changes
    if job["framework"] == "slime":
        del job["offload.parameters"]
    found = {t.name: t.values["b"] for t in speed(estimate(scenario(**job))).terms if t.name.endswith(": swap")}
    assert found.keys() == expected.keys()
    if job["framework"] != "slime":
        assert found == {name: 4 * copies for name, copies in expected.items()}


def test_shards_are_gathered_for_the_engine_as_they_are_stored() -> None:
    """fp32 shards of FSDP, 16-bit ones of Megatron-core."""
    job: dict[str, Any] = {"model": "qwen2.5-1.5b", "task": "grpo", "gpu": "h100-sxm", "gpus": 8, "framework": "verl"}
    for sharding, size in (("fsdp2", 4), ("megatron", 2)):
        terms = speed(estimate(scenario(**job, sharding=sharding))).terms
        assert next(t for t in terms if t.name == "weight sync").values["b"] == size


def test_the_mean_length_is_divided_as_the_caps_are() -> None:
    s = scenario(**PPO, prompt_len=300, response_len=900, expected_len=800)
    assert s.prompt_and_response == (200, 600)


def test_the_mean_length_of_a_response_is_taken_as_given_and_alone_goes_with_whole_prompts() -> None:
    caps = {"prompt_len": 300, "response_len": 900}
    assert scenario(**PPO, **caps, expected_len=800, **{"rollout.expected_len": 700}).prompt_and_response == (100, 700)
    alone = scenario(**PPO, **caps, **{"rollout.expected_len": 700})
    assert (alone.expected_len, alone.prompt_and_response) == (1000, (300, 700))


def test_tensors_split_over_ranks_pay_with_all_reduces() -> None:
    """Two a layer and pass, each twice an activation of T · h elements, forward and backward."""
    s = replace(scenario(**SFT, gpus=8, sharding="ddp"), tensor_parallel=2)
    terms = {t.name: t for t in terms_of(s)}
    assert terms["tensor parallel"].seconds == pytest.approx(8 * 2 * 10 * 4096 * 32 / 2)
    assert terms["matrix work"].values["N"] == 2


def test_links_are_measured_or_a_share_of_what_they_could_be() -> None:
    catalog = load()
    a100, rtx = catalog.gpu("a100-80-sxm"), catalog.gpu("rtx4090")
    assert rated(a100, catalog.nodes["hgx-a100"], 8, "bf16").bus == 235e9
    assert rated(a100, replace(catalog.nodes["hgx-a100"], measured_gbs=None), 8, "bf16").bus == 300e9 * BUS
    assert rated(rtx, catalog.nodes["consumer-pcie"], 6, "bf16").bus == 32e9 * THROUGH_HOST
    assert rated(a100, None, 8, "bf16").bus == 300e9 * BUS
    assert rated(rtx, None, 2, "bf16").bus == 32e9 * BUS
    assert rated(a100, None, 8, "bf16").memory == 2039e9 * MEMORY


def test_between_nodes_the_network_of_all_cards_together_bounds_a_ring() -> None:
    """HGX A100: eight times 25 GB/s are less than 235."""
    r = rated(load().gpu("a100-80-sxm"), load().nodes["hgx-a100"], 8, "bf16")
    assert (r.link(8), r.link(16)) == (235e9, 200e9)


# ---- for any job --------------------------------------------------------------------------------------------------


def test_generation_fetches_weights_from_the_host_for_every_token() -> None:
    """GRPO by hand: 8 GPUs, 2 responses of each, one at a time: 2 · 512 tokens, each an eighth of 2 P over PCIe."""
    job = {"model": "llama-3-8b", "task": "grpo", "gpu": "h100-sxm", "gpus": 8, "sharding": "zero3", "micro_batch": 1,
           "prompt_len": 512, "response_len": 512, "rollout": {"engine": "hf", "n": 2, "batch": 8}}  # fmt: skip
    on, off = answer(job), answer({**job, "offload": {"parameters": True}})
    pcie = next(x for x in off.terms if x.name == "rollout: offload")
    assert pcie.values["b"] * pcie.values["P"] == pytest.approx(2 * 512 * 2 * 8_030_261_248)
    assert pcie.seconds == pytest.approx(2 * 512 * 2 * 8_030_261_248 / (8 * pcie.values["B"]))
    assert not [x for x in on.terms if x.name == "rollout: offload"]


def test_weights_in_four_bits_come_from_the_host_in_four_bits() -> None:
    """Two gathers in each micro batch: of two bytes an element with LoRA, of half a byte for the linears in four bits.

    Those of Llama 3 8B are 32 · (2·4096² + 2·4096·1024 + 3·4096·14,336) = 6,979,321,856 of 8,030,261,248 parameters,
    beside which adapters of rank 8 have 32 · 8 · (2·8192 + 2·5120 + 3·18,432) = 20,971,520 elements, in two bytes.
    """
    job = {"model": "llama-3-8b", "task": "sft", "gpu": "rtx4090", "gpus": 2, "sharding": "fsdp2", "precision": "bf16",
           "offload": {"parameters": True, "optimizer": True}, "micro_batch": 1, "global_batch": 2}  # fmt: skip
    found = {
        m: next(x for x in answer({**job, "method": m}).terms if x.name == "parameters") for m in ("lora", "qlora")
    }
    four = 6_979_321_856 / (8_030_261_248 + 20_971_520)
    assert found["lora"].values["b"] == 2 * 2 and found["qlora"].values["b"] == pytest.approx(2 * (2 - 1.5 * four))
    assert found["lora"].seconds / found["qlora"].seconds == pytest.approx(2 / (2 - 1.5 * four))


def test_experts_that_stay_in_16_bits_are_gathered_in_16_bits() -> None:
    """Transformers 5 fuses a layer's experts into parameters, which bitsandbytes leaves as they are.

    Four bits are for the attention of Qwen3 30B-A3B alone: 48 · (2·2048·4096 + 2·2048·512) = 905,969,664 elements.
    """
    job = {"model": "qwen3-30b-a3b", "task": "sft", "framework": "torch", "gpu": "h100-sxm", "gpus": 16,
           "sharding": "fsdp2", "precision": "bf16"}  # fmt: skip
    four, wide = (next(x for x in answer({**job, "method": m}).terms if x.name == "gather") for m in ("qlora", "lora"))
    assert wide.values["b"] - four.values["b"] == pytest.approx(1.5 * 905_969_664 / four.values["P"])


@pytest.mark.parametrize("name", JOBS)
def test_formulas_give_the_seconds_and_the_terms_add_up(name: str) -> None:
    t = answer(JOBS[name])
    for term in t.terms:
        formula = term.formula.replace("·", "*")
        value = eval(formula, {"__builtins__": {}, "max": max, "min": min}, dict(term.values))
        assert value == pytest.approx(term.seconds), term
    assert t.step_seconds == pytest.approx(sum(x.seconds for x in t.terms))
    assert t.step_seconds > 0
    assert t.bound_by == max(t.terms, key=lambda x: x.seconds).name
    assert len({x.name for x in t.terms}) == len(t.terms)


@given(scenarios())
@settings(max_examples=100)
def test_any_job_takes_time_or_says_what_is_not_known(s: Scenario) -> None:
    """And a job with the same settings on sequences twice as long takes at least as much of it."""
    catalog = load()
    card, node = catalog.gpu(s.gpu), node_of(s, catalog)
    try:
        t = throughput(s, card, node)
    except Unrated as reason:
        assert "\n" not in str(reason)
        return
    assert 0 < t.step_seconds < float("inf")
    assert len({x.name for x in t.terms}) == len(t.terms)
    assert all(x.seconds >= 0 or x.name.endswith("overlap") for x in t.terms)
    longer = throughput(replace(s, expected_len=2 * s.expected_len), card, node)
    assert rising([t.step_seconds, longer.step_seconds])


@pytest.mark.parametrize("name", JOBS)
def test_every_term_names_an_anchor_of_the_method_page(name: str) -> None:
    anchors = set(re.findall(r"\{#([\w-]+)\}", PAGE))
    for term in answer(JOBS[name]).terms:
        page, _, anchor = term.source.partition("#")
        assert page == "throughput" and anchor in anchors


@pytest.mark.parametrize("name", [n for n in JOBS if "ppo" not in n and "grpo" not in n and n != "update alone"])
def test_longer_sequences_are_never_quicker(name: str) -> None:
    steps = [answer({**JOBS[name], "seq_len": length}).step_seconds for length in (256, 1024, 4096, 8192)]
    assert rising(steps)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("what", ["bf16_tflops", "bandwidth_gbs"])
def test_a_card_with_more_of_anything_is_never_slower(name: str, what: str) -> None:
    gpu = load().gpu(JOBS[name]["gpu"])
    better = replace(gpu, **{what: 2 * getattr(gpu, what)})
    assert answer(JOBS[name], better).step_seconds <= answer(JOBS[name], gpu).step_seconds


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp", "ddp", "ppo", "grpo, verl"])
def test_faster_links_are_never_slower(name: str) -> None:
    s = scenario(**JOBS[name])
    node = node_of(s, load())
    assert node
    steps = [
        answer(JOBS[name], node=replace(node, measured_gbs=None, intra_gbs=link)).step_seconds
        for link in (32, 100, 300, 900)
    ]
    assert rising(steps[::-1])


def test_what_zero3_gathers_does_not_depend_on_the_length_but_on_the_micro_batches() -> None:
    short, long = answer({**ZERO3, "seq_len": 256}), answer({**ZERO3, "seq_len": 8192})
    assert seconds(short, "gather") == seconds(long, "gather")
    fewer = answer({**ZERO3, "micro_batch": 4})
    assert seconds(fewer, "gather") == pytest.approx(seconds(long, "gather") / 4)


def test_adam_on_the_host_takes_the_threads_that_its_ranks_have() -> None:
    """Of 112 cores 48 reach the published rate; eight ranks of one thread reach a sixth of it (arXiv:2101.06840)."""
    job = {**PLAIN, "gpu": "h100-sxm", "offload.optimizer": True}

    def step(**more: object) -> float:
        return next(t.seconds for t in answer({**job, **more}).terms if t.name == "optimizer")

    whole = 42 * 8_030_261_248 * 2.57 / 280e9  # Adam's 28 bytes, gradients scaled in place, weights cast
    assert parse(job).cpu_threads == 1
    assert step() == pytest.approx(6 * whole)
    assert step(cpu_threads=3) == pytest.approx(2 * whole)
    assert step(cpu_threads=14) == step(cpu_threads=6) == step(framework="openrlhf") == pytest.approx(whole)
    one = {"gpus": 1, "framework": "openrlhf", "sharding": "zero2"}
    assert step(**one) == pytest.approx(whole * 48 / 14)  # the share of one of eight GPUs
    assert step(**one, gpu="rtx4090") == pytest.approx(whole * 48 / 6)  # as small machines with several GPUs have


def test_adam_on_the_host_takes_as_long_for_a_node_s_parameters_however_its_ranks_cut_them() -> None:
    """Eight ranks of a node step all 8.03 billion at 28 bytes, whether they shard them or each has a part to itself."""
    job = {
        "model": "llama-3-8b", "task": "pretrain", "trainer": "megatron", "gpu": "h100-sxm", "gpus": 8,
        "offload.optimizer": True, "cpu_threads": 14,
    }  # fmt: skip
    whole = 28 * 8_030_261_248 * 2.57 / 280e9
    for cut in ({}, {"tensor_parallel": 8}, {"tensor_parallel": 2, "pipeline_parallel": 4}):
        assert seconds(answer({**job, **cut}), "optimizer") == pytest.approx(whole, rel=1e-3)
    assert seconds(answer({**job, "tensor_parallel": 8, "gpus": 16}), "optimizer") == pytest.approx(whole / 2, rel=1e-3)


@pytest.mark.parametrize("what", ["offload.optimizer", "offload.parameters"])
def test_offload_is_never_quicker(what: str) -> None:
    assert answer({**PLAIN, what: True}).step_seconds > answer(PLAIN).step_seconds


def test_autocast_casts_its_weights_and_moves_them_in_fp32() -> None:
    fp32, bf16 = answer(JOBS["autocast"]), answer({**JOBS["autocast"], "precision": "bf16"})
    assert seconds(fp32, "gather") == pytest.approx(2 * seconds(bf16, "gather"))
    assert seconds(fp32, "casts") > seconds(bf16, "casts") == 0


@pytest.mark.parametrize(("attention", "again"), [("sdpa", 0), ("eager", 1), ("flash", 1)])
def test_selective_checkpointing_computes_every_second_product_again(attention: str, again: float) -> None:
    """Llama's k, o and up of the seven, whatever the attention; that too, unless it is PyTorch's own kernel."""
    job = {**SFT, "model": "llama-3-8b", "framework": "torch", "attention": attention}
    none, selective, full = (answer({**job, "checkpointing": c}) for c in ("none", "selective", "full"))
    h, kv, i = 4096, 1024, 14336
    share = (h * kv + h * h + h * i) / (2 * h * h + 2 * h * kv + 3 * h * i)
    once = seconds(full, "matrix work") - seconds(none, "matrix work")
    assert seconds(selective, "matrix work") - seconds(none, "matrix work") == pytest.approx(share * once)
    assert seconds(selective, "attention") == pytest.approx(seconds(none, "attention") * (3.5 + again) / 3.5)
    assert seconds(selective, "element-wise") == seconds(full, "element-wise")


def test_selective_checkpointing_counts_adapters_among_the_products() -> None:
    """On q_proj alone: q, its A and its B, k, v, o, gate, up, down. Of the nine q, B, v, gate and down are kept."""
    job = {**SFT, "model": "llama-3-8b", "framework": "torch", "attention": "sdpa", "method": "lora", "lora.rank": 64,
           "lora.targets": ["q_proj"]}  # fmt: skip
    none, selective, full = (answer({**job, "checkpointing": c}) for c in ("none", "selective", "full"))
    h, kv, i, r = 4096, 1024, 14336, 64
    share = (h * r + h * kv + h * h + h * i) / (2 * h * h + 2 * h * kv + 3 * h * i + 2 * h * r)
    once = seconds(full, "matrix work") - seconds(none, "matrix work")
    assert seconds(selective, "matrix work") - seconds(none, "matrix work") == pytest.approx(share * once)


def test_what_overlaps_hides_no_more_than_there_is() -> None:
    for fields in (ZERO3, JOBS["fsdp"]):
        t = answer(fields)
        moved = seconds(t, "gather") + seconds(t, "reduce")
        assert 0 < -seconds(t, "overlap") <= moved


def test_checkpointing_takes_longer_and_lora_less_than_full() -> None:
    """With few adapters: on all linears their kernels eat up what is saved, as in ms-swift's runs."""
    plain = answer({**SFT, "checkpointing": "none"}).step_seconds
    assert answer({**SFT, "checkpointing": "full"}).step_seconds > plain
    few = {"method": "lora", "lora.targets": ["q_proj", "v_proj"]}
    assert answer({**SFT, "checkpointing": "none", **few}).step_seconds < plain


def test_a_short_step_is_bound_by_launching_and_zero3_adds_its_hooks() -> None:
    """A model of 24 layers on 256 tokens: the card is done long before Python is."""
    job = {**SFT, "model": "qwen1.5-1.8b", "seq_len": 256, "global_batch": 8, "micro_batch": 1, "precision": "mixed"}
    plain, hooked = answer(job), answer({**job, "sharding": "zero3"})
    assert plain.bound_by == hooked.bound_by == "launch"
    assert hooked.step_seconds > 2 * plain.step_seconds


# ---- RL -----------------------------------------------------------------------------------------------------------


def test_an_iteration_generates_scores_and_updates_every_response() -> None:
    t = answer(PPO)
    stages = {name.partition(":")[0] for name in (x.name for x in t.terms)}
    scored = {f"{name}, scoring" for name in ("actor", "critic", "reference", "reward")}
    assert stages == {"rollout", "weight sync", "actor", "critic", *scored}
    s = scenario(**PPO)
    assert s.rollout
    assert t.tokens_per_second == pytest.approx(s.rollout.batch * s.expected_len / t.step_seconds)


def test_more_cache_is_never_slower_and_more_responses_never_quicker() -> None:
    s, catalog = scenario(**PPO), load()
    gpu, node = catalog.gpu(s.gpu), node_of(s, catalog)
    steps = [throughput(s, gpu, node, tokens).step_seconds for tokens in (4_000, 40_000, 400_000)]
    assert rising(steps[::-1])
    assert (
        answer({**PPO, "rollout": {"batch": 2048}}).step_seconds
        > answer({**PPO, "rollout": {"batch": 1024}}).step_seconds
    )


def test_roles_on_their_own_gpus_work_at_once_and_the_slowest_counts() -> None:
    """Actor and critic train at the same time: the critic, on half as many cards, is what is waited for."""
    names = {x.name.partition(":")[0] for x in answer(APART).terms}
    assert "critic" in names and "actor" not in names


def test_an_update_alone_generates_nothing() -> None:
    assert {x.name.partition(":")[0] for x in answer(JOBS["update alone"]).terms} == {"actor"}


# ---- what cannot be said, and what an estimate shows --------------------------------------------------------------


def test_a_card_without_rates_fp32_and_8_bits_are_refused_in_a_line() -> None:
    gpu = load().gpu("a100-80-sxm")
    for bare, word in (
        (replace(gpu, bf16_tflops=None, fp16_tflops=None), "16-bit matrix rate"),
        (replace(gpu, bandwidth_gbs=None), "memory bandwidth"),
    ):
        with pytest.raises(Unrated, match=rf"^gpu: no source states the {word} of the A100"):
            answer(SFT, bare)
    with pytest.raises(Unrated, match=r"^precision: given 'fp32'"):
        answer({**SFT, "precision": "fp32"})
    with pytest.raises(Unrated, match=r"^load_in_8bit: given true"):
        answer({**SFT, "framework": "torch", "method": "qlora", "load_in_8bit": True, "sharding": "none", "gpus": 1})


def test_the_node_is_the_slower_one_that_is_large_enough() -> None:
    """An A40 comes in PCIe servers and in bridged pairs."""
    catalog = load()
    found = node_of(scenario(**{**SFT, "gpu": "a40", "gpus": 2, "sharding": "ddp"}), catalog)
    assert found and found.id == "pcie-gen4-server"


def test_an_estimate_spells_throughput_as_the_contract_does() -> None:
    data = as_dict(estimate(parse(ZERO3)))["throughput"]
    assert list(data) == ["step_seconds", "tokens_per_second", "bound_by", "terms"]
    assert sum(data["terms"].values()) == pytest.approx(data["step_seconds"])
    assert data["bound_by"] in data["terms"]


def test_an_estimate_without_rates_says_null_and_why() -> None:
    data = as_dict(estimate(parse({**SFT, "precision": "fp32"})))
    assert data["throughput"] is None
    assert data["notes"][-1].startswith("throughput: precision: given 'fp32'")


def test_the_cache_of_the_estimate_decides_the_rollout() -> None:
    """vLLM with a quarter of the card holds fewer sequences than with most of it."""
    job = {**PPO, "framework": "verl", "task": "grpo"}
    small, large = (
        speed(estimate(parse({**job, "rollout": {"gpu_memory_utilization": share}}))) for share in (0.3, 0.7)
    )
    assert seconds(small, "rollout: decode") > seconds(large, "rollout: decode")


def test_an_engine_that_does_not_start_generates_nothing() -> None:
    e = estimate(parse({**PPO, "framework": "verl", "rollout": {"gpu_memory_utilization": 0.05}}))
    assert any(g.refusal for g in e.groups)
    with pytest.raises(Unrated, match=r"^rollout: "):
        speed(e)


def test_the_report_says_how_fast_and_why_not() -> None:
    shown = text(estimate(parse(ZERO3)), "A100")
    assert re.search(
        r"^speed: one step of 64 sequences in [\d.]+ s, [\d,]+ tokens a second over the whole job", shown, re.M
    )
    assert "most of it matrix work" in shown
    assert "speed: not estimated, precision" in text(estimate(parse({**SFT, "precision": "fp32"})), "A100")


def test_each_layers_mixer_says_how_wide_its_values_are() -> None:
    """DeepSeek-V2-Lite has queries of 16 heads of 192, and values of 128; with one layer of 27 as plain attention its
    values are as wide as the queries."""
    lite = load().model("deepseek-v2-lite").architecture
    mixed = replace(lite, specs=(lite.specs[0]._replace(mixer="attention"), *lite.specs[1:]))
    assert work.counts(lite, "lm").attention == 27 * 16 * (192 + 128)
    assert work.counts(mixed, "lm").attention == 26 * 16 * (192 + 128) + 16 * (192 + 192)


def test_linear_attention_multiplies_as_much_for_each_token_at_any_length() -> None:
    """Qwen3.5 4B, 24 of 32 layers: chunks of 64 with 4,096 repeated keys and values, and a state of 524,288 thrice."""
    a = load().model("qwen3.5-4b").architecture
    assert a.delta
    assert work.scanned(a.delta) == 64 * (3 * 4096 + 2 * 4096) + 3 * 524_288
    assert work.scanned(None) == 0
    c = work.counts(a, "lm")
    assert c.attention == 8 * 2 * 16 * 256  # the eight layers that attend
    matrices = sum(t.elements * t.count for t in tensors(a, head="none") if len(t.shape) > 1 and t.kind != "embedding")
    assert (c.layers, c.scanned) == (matrices, 24 * work.scanned(a.delta))
    term = work.scan(10, c.scanned, work.Passes(1, 1, 1, 1), 2, 1.0)
    assert term.seconds == 2 * 10 * c.scanned * 4 / 2
    job = {**SFT, "model": "nemotron-h-8b"}
    by_kernels, by_operations = (
        {t.name: t for t in answer({**job, "linear_attention": run_by}).terms} for run_by in ("fla", "torch")
    )
    assert by_operations["scan"].seconds > by_kernels["scan"].seconds  # in fp32, and for each head
    assert by_operations["element-wise"].seconds > 2 * by_kernels["element-wise"].seconds


def test_windows_no_longer_than_a_sequence_make_the_kernel_with_a_mask_compute_all_keys() -> None:
    """Gemma 3: a sixth of its layers see all keys, and the others a window, by SDPA's kernel that takes a mask."""
    job = {**SFT, "model": "gemma-3-12b", "gpu": "h200", "micro_batch": 1}
    short, long, flash = (
        {t.name: t for t in answer({**job, **more}).terms}
        for more in ({"seq_len": 512}, {"seq_len": 4096}, {"seq_len": 4096, "attention": "flash"})
    )
    assert "masked attention" not in short and "masked attention" not in flash
    masked = long["masked attention"].values
    assert (masked["S"], masked["W"], masked["a"]) == (4096, 4096, 0)
    assert long["attention"].values["w"] == 0
    assert masked["F"] == pytest.approx(MASKED * long["attention"].values["F"])


def test_a_policy_is_asked_of_every_operation_forward_and_again() -> None:
    job = {**SFT, "model": "qwen2.5-0.5b", "seq_len": 512, "micro_batch": 1, "gpu": "h200"}
    full, chosen = ({t.name: t for t in answer({**job, "checkpointing": c}).terms} for c in ("full", "selective"))
    assert "selection" not in full
    each = work.layers(Run(load().model("qwen2.5-0.5b").architecture), False, 512, 512).dispatched[0]
    assert chosen["selection"].values["d"] == 2 * each
    assert work.selected(10, 3, 100, 0.0).seconds == pytest.approx(30 * work.POLICY)
    assert work.selected(10, 3, 100, 300 * work.LAUNCH + 20 * work.POLICY).seconds == pytest.approx(10 * work.POLICY)
