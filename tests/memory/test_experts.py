"""Routed and shared experts and their routers on a tape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from formulas import form, terms
from tapes import arch, backward_of, check, forward_of, frozen, of_kind, passing, small, tape, without_grad_of

from calc.memory import activations
from calc.memory.activations import Program
from calc.memory.run import Adapter, Run, dimensions


@pytest.mark.parametrize(
    ("model", "run", "closed_form", "bytes_at_2048"),
    [
        # routing 4E + 40k + 4: probabilities; the best 4k and their index 8k, two orders 16k, weights 4k, inverse 8k;
        # the sum that normalises. Then k copies of the input, 2kh, gate and up 4kj, act(gate) 2kj, product 2kj, output
        ("mixtral-8x7b", {}, "16h + 4q + 4kv + 4H + 4E + 40k + 4k·h + 8k·j + 12", 348_412),
        # weights in bf16 once normalised: 2k less
        ("qwen3-30b-a3b", {}, "16h + 10q + 10kv + 8H + 4K + 4E + 38k + 4k·h + 8k·j + 12", 194_636),
        # frozen experts: neither their inputs, 2kh, nor products, 2kj
        ("mixtral-8x7b", frozen(Adapter(16, "all-linear", False, 2)),
         "10h + 4q + 4kv + 4H + 4E + 40k + 2k·h + 6k·j + 12 + 8r", 250_236),
        ("qwen3-30b-a3b", frozen(Adapter(16, "all-linear", False, 2)),
         "10h + 8q + 8kv + 8H + 4K + 4E + 38k + 2k·h + 6k·j + 12 + 8r", 128_204),
        # norms keep an fp32 product each, 4h more than 16h; routing in bf16 after the choice; seven tensors of kj
        ("gpt-oss-20b", {}, "20h + 6q + 4kv + 4H + 44k + 4k·h + 14k·j + 8", 292_024),
        # the sink is a column more: 2H·(S + 1), its maximum an index of 8 bytes
        ("gpt-oss-20b", {"kernel": "eager"}, "20h + 8q + 10H + 2H·S + 44k + 4k·h + 14k·j + 8", 560_696),
        ("deepseek-v3", {}, "20h + 8c_q + 8c_kv + 8q + 2o + 4H + 4E + 40k + 4k·h + 8k·j + 8s + 20 | 4W_gate",
         771_412),
        ("deepseek-v3", {"kernel": "efficient"},
         "20h + 8c_q + 8c_kv + 4q + 2kvb + 2o + 4H + 4E + 40k + 4k·h + 8k·j + 8s + 20 | 4W_gate", 738_644),
        ("deepseek-v3", {"kernel": "eager"},
         "20h + 8c_q + 8c_kv + 4q + 2kvb + 2o + 6H·S + 4E + 40k + 4k·h + 8k·j + 8s + 20 | 4W_gate", 2_310_996),
    ],
)  # fmt: skip
def test_a_layer_with_routed_experts_keeps_the_bytes_that_were_traced(
    model: str, run: dict[str, Any], closed_form: str, bytes_at_2048: int
) -> None:
    """Protects the experts' and routers' tensors: own traces of transformers 5.23 at 2048 tokens, bytes a token.

    The traces hold a byte a token more, for counters that do not grow with the tokens.
    """
    kept = activations.layer(Run(arch(model), **run), of_kind(arch(model), True)).saved
    assert terms(tape(model, moe=True, **run).saved(), arch(model)) == form(closed_form)
    assert kept.bytes(2048, 2048) == bytes_at_2048 * 2048


def test_qwen2_moe_keeps_what_its_shared_experts_gate_multiplies() -> None:
    """`sigmoid(gate(x)) · shared(x)`: both factors are kept, 2 + 2h, beside the shared MLP's 8s."""
    kept = terms(tape("qwen1.5-moe-a2.7b", moe=True).saved(), arch("qwen1.5-moe-a2.7b"))
    assert kept == form("18h + 4q + 4kv + 4H + 4E + 38k + 4k·h + 8k·j + 8s + 14")


def test_autocast_leaves_routed_experts_in_fp32() -> None:
    """`grouped_mm` follows its fp32 weights (transformers integrations/moe.py): 4 bytes where bf16 has 2, no casts."""
    kept = terms(tape("mixtral-8x7b", moe=True, precision="autocast").saved(), arch("mixtral-8x7b"))
    assert kept[0]["k·h"] == 8
    assert kept[0]["k·j"] == 16
    assert kept[1] == form("0 | 2W_q_proj + 2W_k_proj + 2W_v_proj + 2W_o_proj")[1]


EXPERTS_FORWARD = """
router = 4h + 2E
router: to fp32 = 4h + 6E
router: softmax = 4h + 4E
router: top k = 4h + 4k
router: normalise = 4h + 4k
experts: sort = 4h + 2k·h
experts: gate_up = 4h + 4k·j
experts: gate, up = 4h + 4k·j
experts: activation = 4h + 2k·j
experts: product = 4h + 2k·j
experts: down = 4h + 2k·h
experts: sort weights = 4h + 4k + 2k·h
experts: weigh = 4h + 4k·h
experts: unsort = 4h + 8k·h
experts: sum = 8h + 4k·h
experts: to bf16 = 10h
"""
EXPERTS_BACKWARD = """
experts: to bf16 = 6h
experts: sum = 6h + 4k·h
experts: unsort = 2h + 8k·h
experts: weigh = 2h + 12k·h + 4k
experts: sort weights = 2h + 2k·h + 8k
experts: down = 2h + 4k + 2k·h + 2k·j
experts: product = 2h + 4k + 6k·j
experts: activation = 2h + 4k + 6k·j
experts: gate, up = 2h + 4k + 8k·j
experts: gate_up = 2h + 4k + 2k·h + 4k·j
experts: sort = 6h + 4k + 2k·h
router: normalise = 4h + 8k
router: top k = 4h + 4k + 4E
router: softmax = 4h + 8E
router: to fp32 = 4h + 6E
router = 6h + 2E
"""


def test_every_instant_of_mixtrals_experts_passes_what_its_copies_of_tokens_need() -> None:
    """Weights are fp32, so weighing widens to 4kh; backward of it holds 4kh in and two products of 4kh each.

    Sorting backward sums k rows into one: 2kh in, 2h out and 2h of scratch beside the residual's 2h.
    """
    made = tape("mixtral-8x7b", moe=True)
    check(passing("mixtral-8x7b", forward_of(made)), EXPERTS_FORWARD)
    check(passing("mixtral-8x7b", backward_of(made)), EXPERTS_BACKWARD)
    # where nothing is kept, two variables hold the sorted rows and what the second product made of them
    before = passing("mixtral-8x7b", without_grad_of(made))["experts: unsort"]
    assert before == form("6h + 12k·h")


def test_a_router_with_bf16_weights_leaves_the_experts_narrow() -> None:
    """Qwen3-MoE casts its weights, 2k: weighing makes 2kh, not 4kh, and no cast follows."""
    made = tape("qwen3-30b-a3b", moe=True)
    check(passing("qwen3-30b-a3b", forward_of(made)), """
        router: to bf16 = 4h + 2k
        experts: weigh = 4h + 2k·h
        experts: sum = 6h + 2k·h
    """)  # fmt: skip
    check(passing("qwen3-30b-a3b", backward_of(made)), """
        experts: weigh = 2h + 2k + 6k·h
        router: to bf16 = 4h + 6k
    """)  # fmt: skip


def test_gpt_oss_clamps_strided_halves_of_one_product() -> None:
    """The halves are views; clamping makes each contiguous, 2kj. The sigmoid reads a scaled gate, 2kj more."""
    made = tape("gpt-oss-20b", moe=True)
    check(passing("gpt-oss-20b", forward_of(made)), """
        router: top k = 4h + 2E + 2k
        router: softmax = 4h + 2k
        experts: up = 4h + 4k·j
        experts: clamp gate = 4h + 2k·j
        experts: clamp up = 4h + 4k·j
        experts: scale gate = 4h + 6k·j
        experts: sigmoid = 4h + 6k·j
        experts: glu = 4h + 4k·j
        experts: up + 1 = 4h + 6k·j
        experts: product = 4h + 2k·j
    """)  # fmt: skip
    check(passing("gpt-oss-20b", backward_of(made)), """
        experts: product = 2h + 2k + 6k·j
        experts: up + 1 = 2h + 2k + 4k·j
        experts: glu = 2h + 2k + 8k·j
        experts: sigmoid = 2h + 2k + 8k·j
        experts: scale gate = 2h + 2k + 8k·j
        experts: clamp up = 2h + 2k + 6k·j
        experts: clamp gate = 2h + 2k + 6k·j
        experts: up = 2h + 2k + 8k·j
        experts: gate = 2h + 2k + 10k·j
        router: softmax = 4h + 4k
    """)  # fmt: skip


def test_deepseeks_router_multiplies_in_fp32() -> None:
    """A cast of the input, 4h, and of the router's weight, 4 bytes an element, both kept for backward."""
    shots = backward_of(tape("deepseek-v3", moe=True))
    router = next(s for s in shots if s.name == "router")
    assert terms(router.passing) == form("8h + 4E | 4W_gate")
    assert terms(router.saved)[1] == form("0 | 4W_gate")[1]


def test_granites_router_weighs_the_best_in_fp32_and_casts_back() -> None:
    """Granite MoE: the best logits are taken in fp32, and their softmax is cast to the stream's type (traced)."""
    tape = Program(
        Run(small("granitemoe", num_local_experts=4)), of_kind(small("granitemoe", num_local_experts=4), True)
    ).layer()
    found = [(op.name, op.outs[0].b) for op in tape.ops if op.name.startswith("router")]
    assert [b for _, b in found] == [2, 4, 4, 4, 2]
    assert [name for name, _ in found if "top k" in name or "softmax" in name] == ["router: top k", "router: softmax"]


def test_shared_experts_run_beside_the_routed_ones() -> None:
    """The input and the routed experts' sum wait, 2h each, beside the residual; backward they share a gradient."""
    made = tape("deepseek-v3", moe=True)
    check(passing("deepseek-v3", forward_of(made)), """
        shared_up_proj = 6h + 4s
        shared_down_proj = 8h
        experts: add shared = 10h
    """)  # fmt: skip
    check(passing("deepseek-v3", backward_of(made)), """
        experts: add shared = 2h
        shared_down_proj = 2h + 2s
        shared_gate_proj = 6h + 2s
    """)  # fmt: skip


def test_qwen2_moe_weighs_its_shared_expert() -> None:
    """Backward of the weighing: 2h for the expert, and a product of 2h that is summed to one number a row."""
    made = tape("qwen1.5-moe-a2.7b", moe=True)
    check(passing("qwen1.5-moe-a2.7b", forward_of(made)), """
        shared_expert_gate = 8h + 2
        shared: sigmoid = 8h + 2
        shared: weigh = 8h
    """)  # fmt: skip
    check(passing("qwen1.5-moe-a2.7b", backward_of(made)), """
        shared: weigh = 6h + 2
        shared: sigmoid = 4h + 4
    """)  # fmt: skip


def test_experts_in_the_last_layer_alone_are_found() -> None:
    """DeepSeek V2 Lite with 26 dense layers of 27: sizes and gradients of the last are those of its 64 experts."""
    lite = arch("deepseek-v2-lite")
    odd = replace(lite, specs=(lite.specs[0],) * 26 + lite.specs[-1:])
    gate_up = 64 * 2 * 1408 * 2048
    assert dimensions(odd)["W_experts_gate_up_proj"] == gate_up
    assert Program(Run(odd)).elements["experts_gate_up_proj"] == gate_up
    assert max(shot.making for shot in activations.layer(Run(odd), of_kind(odd, True)).backward) == gate_up


def test_experts_in_four_bits_are_kept_in_sixteen_until_backward() -> None:
    """`_grouped_mm` saves its dequantised weight for the input's gradient; three traces agree within 0.03 %.

    OLMoE: 64 experts of 3 · 2048 · 1024 elements, two bytes each, beside what frozen experts keep.
    """
    own = arch("olmoe-1b-7b")
    adapters = frozen(Adapter(16, "all-linear", False, 2))
    sixteen, four = (
        activations.layer(Run(own, **adapters, quantised=True, four_bit_experts=experts), own.specs[0].shapes).saved
        for experts in ("", "whole")
    )
    assert four.fixed - sixteen.fixed == 2 * 64 * 3 * 2048 * 1024
    assert four.tokens == sixteen.tokens


@pytest.mark.parametrize(("precision", "shares"), [("bf16", 2), ("autocast", 4)])
def test_mistral_small_4_routes_in_the_type_of_its_logits(precision: str, shares: int) -> None:
    """Its softmax names no type: of 2 bytes an expert is what it keeps, but for autocast, which takes it in fp32."""
    assert tape("mistral-small-4-119b", moe=True, precision=precision).saved().tokens["E"] == shares
