"""Linears, their adapters, four-bit weights and norms on a tape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from formulas import form, terms
from tapes import (
    BF16_LORA,
    FP32_LORA,
    arch,
    backward_of,
    check,
    forward_of,
    frozen,
    of_kind,
    passing,
    per_token,
    small,
    tape,
)

from calc.autograd.polynomial import amount
from calc.autograd.tape import Size, Tape, Tensor
from calc.base.plan import Path
from calc.catalog.catalog import load
from calc.memory.activations import Program
from calc.memory.linears import Linears
from calc.memory.loss import Head
from calc.memory.run import Adapter, Run, dimensions
from calc.models.architecture import Architecture, layer_kinds
from calc.models.lora import bypassed_parameters, lora_parameters, passed_parameters
from calc.models.slices import part


@pytest.mark.parametrize(
    ("adapter", "closed_form", "llama_3_8b"),
    [
        # 16h less the two norms' 2h each that only trained norm weights read; each A keeps no more than its linear did
        # in bf16, and all seven keep A's output, 2r
        (BF16_LORA, "12h + 4q + 4kv + 8i + 4H + 8 + 14r", 185_352),  # 16·4096 + 4·1024 + 8·14336 + 128 + 8 + 14·64
        # each of the seven keeps an fp32 copy of its input, 4, a byte of mask, 1, and A's output, 4r
        (FP32_LORA, "33h + 9q + 4kv + 11i + 4H + 8 + 28r", 335_752),  # 42·4096 + 4·1024 + 11·14336 + 136 + 28·64
        # without dropout q, k and v each cast the same input anew: 4h + 4h + 4h, gate and up 4h + 4h
        (Adapter(64, "all-linear", False, 4), "28h + 8q + 4kv + 10i + 4H + 8 + 28r", 296_840),
    ],
)
def test_a_llama_layer_with_lora_on_all_linears_keeps_what_was_traced(
    adapter: Adapter, closed_form: str, llama_3_8b: int
) -> None:
    """Protects what adapters keep beside frozen weights; r = 64. The first two forms are traced (peft 0.21)."""
    run = frozen(adapter)
    assert terms(tape("llama-3-8b", **run).saved(), arch("llama-3-8b")) == form(closed_form)
    assert per_token("llama-3-8b", **run) == llama_3_8b


def test_only_the_targets_of_lora_keep_their_inputs() -> None:
    """Adapting o_proj alone: 2q more than nothing, A's output 2r; of the norms only x and the scale, 4h + 4 each.

    The MLP keeps gate, act(gate) and up, 6i, but not their product, which only down_proj's adapter would read.
    """
    kept = tape("llama-3-8b", **frozen(Adapter(64, ("o_proj",), False, 2))).saved()
    assert terms(kept, arch("llama-3-8b")) == form("8h + 4q + 4kv + 6i + 4H + 8 + 2r")


def test_an_adapter_in_a_frozen_first_layer_finds_nothing_to_differentiate_before_it() -> None:
    """Below the first adapter nothing needs a gradient: the first norm keeps neither x nor scale, 4h + 4 less."""
    every = terms(tape("llama-3-8b", **frozen(BF16_LORA)).saved(), arch("llama-3-8b"))
    first = terms(tape("llama-3-8b", first=True, **frozen(BF16_LORA)).saved(), arch("llama-3-8b"))
    assert every == form("12h + 4q + 4kv + 8i + 4H + 8 + 14r")
    assert first == form("8h + 4q + 4kv + 8i + 4H + 4 + 14r")


def test_lora_under_autocast_runs_in_bf16_and_keeps_the_frozen_weights_casts() -> None:
    """fp32 adapters and residual, but bf16 multiplications: A reads a bf16 input and puts out 2r.

    Norms keep x and the scale, 4h + 4 each. The five linears that read the norms' outputs keep a bf16 cast each, 10h;
    o and down cast their inputs to fp32 and back, 2q + 2i more than the 2q that attention keeps of its output.
    """
    kept = terms(tape("llama-3-8b", **frozen(BF16_LORA, precision="autocast")).saved(), arch("llama-3-8b"))
    weights = "2W_q_proj + 2W_k_proj + 2W_v_proj + 2W_o_proj + 2W_gate_proj + 2W_up_proj + 2W_down_proj"
    assert kept[1] == form(f"0 | {weights}")[1]
    assert kept[0] == form("18h + 4q + 4kv + 8i + 4H + 8 + 14r")[0]


def test_lora_with_dropout_under_autocast_keeps_a_mask_beside_the_bf16_input() -> None:
    """o_proj alone, fp32 adapter: output 2q, mask q, the dropped-out input cast to bf16 2q, in bf16 A's output 2r."""
    kept = terms(tape("llama-3-8b", **frozen(Adapter(64, ("o_proj",), True, 4), precision="autocast")).saved(),
                 arch("llama-3-8b"))  # fmt: skip
    assert kept[0] == form("8h + 7q + 4kv + 6i + 4H + 8 + 2r")[0]


@pytest.mark.parametrize("model", sorted(load().models))
def test_backward_makes_the_gradient_of_every_adapter_once(model: str) -> None:
    """LoRA's parameters over all layers, as the architecture counts them from PEFT's rules; rank 16."""
    a = arch(model)
    for targets in ("all-linear", (a.names.output,))[: 1 + (a.attending > 0)]:
        run = Run(a, **frozen(Adapter(16, targets, False, 2)))
        made = sum(backward_of(Program(run, spec).layer())[-1].gradients * n for spec, n in layer_kinds(a))
        idle = passed_parameters(a, 16, targets) + bypassed_parameters(a, 16, targets, whole=False)
        assert made == lora_parameters(a, 16, targets) - idle, targets


def test_a_selective_scan_multiplies_past_some_adapters() -> None:
    """Mamba 130M: 24 layers, 768 to 1,536 channels, steps of rank 48, 16 states; PEFT leaves its out_proj alone."""
    a, every = arch("mamba-130m"), "all-linear"
    steps = 24 * 16 * (48 + 1536)
    assert bypassed_parameters(a, 16, every, whole=False) == steps
    others = 24 * 16 * (1536 + 80)
    assert bypassed_parameters(a, 16, every, whole=True) == steps + others
    assert bypassed_parameters(a, 16, ("in_proj",), whole=True) == 0
    assert bypassed_parameters(arch("llama-3-8b"), 16, every, whole=True) == 0


def test_a_late_norm_multiplies_its_weight_in_fp32() -> None:
    """Gemma and GPT-OSS: the weight's gradient makes a product of 4h, the bf16 cast comes after it."""
    made = tape("gemma-2-2b")
    check(passing("gemma-2-2b", forward_of(made)), """
        input_layernorm: weight = 6h
        input_layernorm: to bf16 = 8h
    """)  # fmt: skip
    check(passing("gemma-2-2b", backward_of(made)), """
        post_feedforward_layernorm: to bf16 = 6h
        post_feedforward_layernorm: weight = 14h
    """)  # fmt: skip
    oss = terms(tape("gpt-oss-20b", moe=True).saved(), arch("gpt-oss-20b"))[0]
    assert oss["h"] == 20  # two norms of 4h + 4h + 2h, where an early norm has 8h


def test_a_frozen_norm_makes_no_gradient_of_its_weight() -> None:
    """2h less in its own backward than where the weight's product is made: 6h, not 8h."""
    run = frozen(BF16_LORA)
    check(passing("llama-3-8b", backward_of(tape("llama-3-8b", **run))), "input_layernorm: weight = 6h")


def test_an_fp32_adapter_beside_a_bf16_linear_works_in_fp32() -> None:
    """o_proj: y 2h, the residual 2h and the norm's output 2h wait; the input is cast, 4q, and named by PEFT's variable
    to the end, and dropped out, 4q; B puts out 4h, scaled 4h.
    """
    made = tape("llama-3-8b", **frozen(Adapter(64, ("o_proj",), True, 4)))
    check(passing("llama-3-8b", forward_of(made)), """
        o_proj: LoRA: to fp32 = 6h + 4q
        o_proj: LoRA dropout = 6h + 8q
        o_proj: LoRA A = 6h + 4r + 4q
        o_proj: LoRA B = 10h + 4q
        o_proj: LoRA scale = 14h + 4q
        o_proj: LoRA add = 14h + 4q
        o_proj: LoRA: to bf16 = 10h
    """)  # fmt: skip
    check(passing("llama-3-8b", backward_of(made)), """
        o_proj: LoRA: to bf16 = 6h
        o_proj: LoRA add = 8h
        o_proj: LoRA scale = 12h
        o_proj: LoRA B = 8h + 4r
        o_proj: LoRA A = 4h + 4r + 4q
        o_proj: LoRA dropout = 4h + 8q
        o_proj: LoRA: to fp32 = 4h + 6q
        o_proj = 4h + 4q
    """)  # fmt: skip


def test_a_bf16_adapter_shares_the_gradient_of_its_sum() -> None:
    """No casts: the sum's gradient is y's and the scaled product's, one tensor of 2h."""
    made = tape("llama-3-8b", **frozen(Adapter(64, ("o_proj",), False, 2)))
    check(passing("llama-3-8b", backward_of(made)), """
        o_proj: LoRA add = 2h
        o_proj: LoRA scale = 4h
        o_proj: LoRA B = 4h + 2r
        o_proj: LoRA A = 2h + 2r + 2q
        o_proj = 2h + 4q
    """)  # fmt: skip


def test_a_quantised_linear_is_dequantised_whole_in_forward_and_backward() -> None:
    """NF4 weights become bf16 for each multiplication, 2 bytes an element, beside an fp32 scale of 64 while forward."""
    made = tape("llama-3-8b", **frozen(BF16_LORA, quantised=True))
    for shots, scale in ((forward_of(made), 4 / 64), (backward_of(made), 0)):
        found = passing("llama-3-8b", shots)
        assert found["down_proj"][1] == {"W_down_proj": 2 + scale}
        assert found["q_proj"][1] == {"W_q_proj": 2 + scale}
        assert found["mlp: product"][1] == {}


def test_a_buffer_takes_the_place_of_each_dequantised_weight_but_in_backward_of_all_but_the_last_linear() -> None:
    """unsloth 2025.2.2 `fast_lora.py`: `LoRA_MLP.backward` multiplies by `down` in `matmul_lora`, which has the buffer;
    it dequantises `up` and `gate`, as `LoRA_QKV` and `LoRA_W` do theirs, into new tensors of 2 bytes an element.
    """
    made = tape("llama-3-8b", **frozen(BF16_LORA, quantised=True, buffer=14_336 * 4096))
    forward, backward = (passing("llama-3-8b", shots) for shots in (forward_of(made), backward_of(made)))
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert [forward[name][1] for name in linears] == [{}] * 7
    assert [backward[name][1] for name in linears] == [{f"W_{name}": 2} for name in linears[:-1]] + [{}]


def test_scales_that_were_not_quantised_need_not_come_back() -> None:
    """`_dequant_linear_fallback`: an fp32 copy where `absmax_8bit` is given."""
    made = tape("llama-3-8b", **frozen(BF16_LORA, quantised=True, nested=False))
    assert passing("llama-3-8b", forward_of(made))["q_proj"][1] == {"W_q_proj": 2}


def test_scales_come_back_in_a_block_of_their_own_before_the_weight() -> None:
    """The order in which the allocator is asked: 4 / 64 and 2 bytes an element, then the product's output."""
    made = tape("llama-3-8b", **frozen(BF16_LORA, quantised=True))
    (product,) = (op for op in made.ops if op.name == "q_proj")
    assert [size.fixed for size in product.course if isinstance(size, Size)] == [{"W_q_proj": 4 / 64}, {"W_q_proj": 2}]
    assert (product.course[-1], product.backward_course) == (None, ())


def test_old_bitsandbytes_keeps_the_input_of_every_four_bit_product() -> None:
    """MatMul4Bit up to 0.43.1 stores (A, B), so that a frozen layer keeps what a trained one's linears do: the
    norms' outputs that q, k, v and gate, up share, 2h each, and the MLP's product, 2i. Flash keeps its output anyway.
    """
    new, old = (per_token("llama-3-8b", **frozen(quantised=True, keeps_inputs=kept)) for kept in (False, True))
    assert old - new == 4 * 4096 + 2 * 14336


@pytest.mark.parametrize(("trained", "made"), [(False, 0), (True, 125_696 * 4096)])
def test_a_head_whose_rows_are_normed_keeps_the_quotient(trained: bool, made: int) -> None:
    """Baichuan 2's `NormHead`: `F.linear(hidden_states, F.normalize(self.weight))`; a trained one's gradient is its."""
    a = arch("baichuan2-7b")
    program = Head(Run(a, trained=trained))
    program.elements = {"lm_head": a.vocab * a.hidden}
    written = program.write(Path("cross-entropy", uncast=True))
    norm, product = (op for op in written.ops if op.name in ("lm_head: normalise", "lm_head"))
    assert norm.outs[0].size.fixed == {"W_lm_head": 2} and norm.outs[0] in product.saves
    assert (norm.weight, product.weight) == (made, 0)
    plain = Head(Run(arch("llama-3-8b"), trained=trained)).write(Path("cross-entropy", uncast=True))
    assert not [op for op in plain.ops if op.name == "lm_head: normalise"]


def test_eight_bit_linears_keep_their_inputs_and_before_045_these_in_eight_bits_too() -> None:
    """MatMul8bitLt's ctx.tensors, (CAt, subA, A) in 0.43.3: inputs as of the test above, and a byte an element for each
    of the seven linears: five of h, one of q = h, one of i."""
    four = per_token("llama-3-8b", **frozen(quantised=True))
    new, old = (per_token("llama-3-8b", **frozen(quantised=True, int8=True, keeps_columns=n)) for n in (False, True))
    assert new - four == 4 * 4096 + 2 * 14336
    assert old - new == 6 * 4096 + 14336


@pytest.mark.parametrize(
    ("half", "cast", "product"),
    [
        # bf16: the input in fp16, in 8 bits, its magnitudes, their mask; the product in 32 and in 16 bits, then in bf16
        (False, [{"h": 2}, None, {"h": 2}, {"h": 1}, 1], [{"q": 4}, {"q": 2}, None]),
        # what is fp16 already is not cast, nor is what comes out in it
        (True, [None, {"h": 2}, {"h": 1}, 0], [{"q": 4}, None]),
    ],
)
def test_eight_bit_products_are_made_in_32_bits_out_of_8(half: bool, cast: list[Any], product: list[Any]) -> None:
    """bitsandbytes 0.50.2 `backends/cuda/ops.py`: int8_vectorwise_quant, int8_scaled_mm, int8_mm_dequant."""
    made = tape("llama-3-8b", **frozen(quantised=True, int8=True, half=half))
    first, second = (op for op in made.ops if op.name in ("q_proj: to 8 bits", "q_proj"))
    for op, expected in ((first, cast), (second, product)):
        assert [dict(step.tokens) if isinstance(step, Size) else step for step in op.course] == expected
    assert second.backward_scratch.fixed == {"W_q_proj": 2}
    assert [t.b for t in first.outs] == [1] and not first.outs[0].differentiable


@pytest.mark.parametrize(("reentrant", "kept"), [(False, 6 * 4096 + 2 * 14336), (True, 0)])
def test_what_contexts_name_outlives_checkpointing_that_is_not_reentrant(reentrant: bool, kept: int) -> None:
    """The inputs of q, k, v, of o, of gate, up, and of down: seen with `Linear8bitLt` on a processor (torch 2.13)."""
    for run in ({"int8": True}, {"keeps_inputs": True}):
        settings = Run(arch("llama-3-8b"), **frozen(quantised=True, **run))
        made = Program(settings, arch("llama-3-8b").specs[0], reentrant=reentrant).layer()
        assert amount(made.kept(), dimensions(arch("llama-3-8b"))).tokens == kept


def test_a_quantised_model_of_fp32_dequantises_to_fp32() -> None:
    """The copy has the type that the multiplication runs in."""
    found = passing("llama-3-8b", forward_of(tape("llama-3-8b", **frozen(quantised=True, precision="fp32"))))
    assert found["q_proj"][1] == {"W_q_proj": 4 + 4 / 64}


@pytest.mark.parametrize(
    ("precision", "closed_form", "llama_3_8b"),
    [
        # the residual stream and what norms make are bf16: adapters keep the outputs that four bits were given
        ("autocast-bf16", "12h + 4q + 4kv + 8i + 4H + 8 + 14r", 185_352),
        # `Linear4bit` gives back its input's type: gate, its activation and up are fp32, and every adapter's input is
        # cast for it alone, all but that of o_proj: 8h of the norms' inputs, 2h each for q, k, v, gate, up
        ("autocast", "18h + 4q + 4kv + 14i + 4H + 8 + 14r", 295_944),
    ],
)
def test_autocast_does_not_cast_four_bits_and_adapters_beside_them_cast_no_input_to_fp32(
    precision: str, closed_form: str, llama_3_8b: int
) -> None:
    """As traced with bitsandbytes 0.50.2 and peft 0.21.2 (`tuners/lora/bnb.py`), adapters of fp32 on all linears.

    18·4096 + 4·4096 + 4·1024 + 14·14336 + 4·32 + 8 + 14·64; of 16-bit weights as many as without autocast, in bf16.
    """
    run = frozen(Adapter(64, "all-linear", False, 4), precision=precision, quantised=True)
    assert terms(tape("llama-3-8b", **run).saved(), arch("llama-3-8b"))[0] == form(closed_form)[0]
    assert per_token("llama-3-8b", **run) == llama_3_8b


@pytest.mark.parametrize(
    ("run", "closed_form", "llama_3_8b"),
    [
        # no autocast: as beside 16 bits each of the seven keeps an fp32 copy of its input
        ({"precision": "bf16", "quantised": True}, "28h + 8q + 4kv + 10i + 4H + 8 + 28r", 296_840),
        # autocast beside 16 bits: the fp32 copy is cast again, and the second copy kept, 2h or 2q or 2i each
        ({"precision": "autocast-bf16"}, "18h + 6q + 4kv + 8i + 4H + 8 + 14r", 218_120),
        # below an embedding in fp32 the norms' inputs need no copy, but are fp32 themselves: as many bytes
        ({"precision": "autocast-wide"}, "18h + 6q + 4kv + 8i + 4H + 8 + 14r", 218_120),
    ],
)
def test_fp32_adapters_cast_inputs_but_under_autocast_beside_four_bits(
    run: dict[str, Any], closed_form: str, llama_3_8b: int
) -> None:
    """Traced, all: 28·4096 + 8·4096 + 4·1024 + 10·14336 + 136 + 28·64; 18·4096 + 6·4096 + 4·1024 + 8·14336 + …"""
    fields = frozen(Adapter(64, "all-linear", False, 4), **run)
    assert terms(tape("llama-3-8b", **fields).saved(), arch("llama-3-8b"))[0] == form(closed_form)[0]
    assert per_token("llama-3-8b", **fields) == llama_3_8b


def test_a_product_in_four_bits_without_an_adapter_is_that_product_alone() -> None:
    """Adapters on o_proj; the product sees a matrix, whatever the input's shape, as any linear's does."""
    made = tape("llama-3-8b", **frozen(Adapter(64, ("o_proj",), False, 2), quantised=True))
    assert {op.name.partition(":")[0] for op in made.ops if ": LoRA" in op.name} == {"o_proj"}
    (product,) = (op for op in made.ops if op.name == "q_proj")
    assert product.flat and product.product


def test_four_bits_that_were_fp32_come_back_as_fp32_before_autocast_casts_them() -> None:
    """TRL's own loading: 4 bytes an element, and 2 of the copy that multiplies; the head is cast as any is."""
    made = tape("llama-3-8b", **frozen(BF16_LORA, precision="autocast", quantised=True, unpacked=6))
    for shots, scale in ((forward_of(made), 4 / 64), (backward_of(made), 0)):
        assert passing("llama-3-8b", shots)["q_proj"][1] == {"W_q_proj": 6 + scale}


AUTOCAST_FORWARD = """
input_layernorm: square = 4h
input_layernorm: weight = 4h
q_proj: weight to bf16 = 4h | 2W_q_proj
q_proj: to bf16 = 6h | 2W_q_proj
q_proj = 4h + 2q
v_proj = 4h + 2q + 4kv
q: rotate = 18q + 4kv + 4h
k: rotate = 6q + 20kv + 4h
q: to bf16 = 6q + 6kv + 4h
k: to bf16 = 6q + 8kv + 4h
o_proj: weight to bf16 = 4h + 4q + 4kv | 2W_o_proj
o_proj = 6h + 4q + 4kv
"""
AUTOCAST_BACKWARD = """
mlp: add = 6h
down_proj = 6h + 2i | 2W_down_proj
down_proj: weight to bf16 = 4h + 2i | 2W_down_proj
mlp: product = 4h + 6i
gate_proj: to bf16 = 14h | 2W_gate_proj
post_attention_layernorm: weight = 16h
post_attention_layernorm: square = 20h
attention: add = 6h
attention = 4h + 12q + 4kv + 4H
k: to bf16 = 4h + 2q + 8kv
q: to bf16 = 4h + 6q + 6kv
k: rotate = 4h + 4q + 20kv
q: rotate = 4h + 18q + 4kv
v_proj: to bf16 = 10h + 2q + 2kv | 2W_v_proj
q_proj = 10h + 2q | 2W_q_proj
q_proj: to bf16 = 14h | 2W_q_proj
"""


def test_autocast_casts_inputs_and_weights_of_every_linear() -> None:
    """The residual stream is fp32 and saved by the norm as it is; cos and sin are fp32, so rotation widens: 4q + 12q.

    The block's variables name rotated queries and keys, 4q + 4kv, until it returns, beside the casts the kernel keeps.

    A weight's bf16 gradient, 2 bytes an element, passes until it is cast to fp32, after the input's, since the weight
    was cast first; an input's gradient is bf16 and fp32 at once in its cast, beside the sum of those before:
    4h + 4h + 2h + 4h. Seen on an H100, event by event.
    """
    made = tape("llama-3-8b", precision="autocast")
    check(passing("llama-3-8b", forward_of(made)), AUTOCAST_FORWARD)
    check(passing("llama-3-8b", backward_of(made)), AUTOCAST_BACKWARD)
    making = {s.name: s.making for s in backward_of(made)}
    assert making["q_proj: weight to bf16"] == 4096 * 4096
    assert making["q_proj"] == 0


def test_autocast_keeps_bf16_copies_of_adapters_in_fp32() -> None:
    """o_proj of Llama 3 8B at rank 64: two matrices of 64 · 4096, of two bytes; none of an adapter in bf16."""
    fp32, bf16 = (
        tape("llama-3-8b", **frozen(Adapter(64, ("o_proj",), False, b), precision="autocast")).saved() for b in (4, 2)
    )
    assert fp32.fixed.get("", 0) - bf16.fixed.get("", 0) == 2 * 2 * 64 * 4096


def test_a_symbol_stands_for_the_weight_of_the_layer_that_has_it() -> None:
    """DeepSeek V2 Lite: down_proj is its only dense layer's, 10,944 wide; without adapters nothing has a rank."""
    dims = dimensions(arch("deepseek-v2-lite"))
    assert dims["W_down_proj"] == 10_944 * 2048
    assert dims["W_experts_down_proj"] == 64 * 1408 * 2048
    assert dims["r"] == 0


def test_a_bias_is_counted_with_its_weight() -> None:
    """Three heads of five in seven dimensions: 15 · 7 + 15, 120; sizes that are powers of two share no bit."""
    small = replace(arch("qwen2.5-0.5b"), hidden=7, heads=3, kv_heads=3, head_dim=5)
    ops = {op.name: op for op in Program(Run(small), of_kind(small, False)).layer().ops}
    assert ops["q_proj"].weight == 120
    oss = replace(arch("gpt-oss-20b"), hidden=7, moe_intermediate=3, experts=5)
    program = Program(Run(oss))
    assert program.trained_expert("down_proj") == 5 * 3 * 7 + 5 * 7
    assert program.trained_expert("gate_up_proj") == 5 * 6 * 7 + 5 * 6


def test_an_adapter_named_by_its_end_is_on_shared_experts_too() -> None:
    """PEFT matches `…mlp.shared_experts.down_proj` by `down_proj`."""
    program = Program(Run(arch("deepseek-v2-lite"), trained=False, adapter=Adapter(8, ("down_proj",), False, 2)))
    named = ("down_proj", "shared_down_proj", "up_proj", "shared_up_proj", "lm_head")
    assert [name for name in named if program.is_adapted(name)] == ["down_proj", "shared_down_proj"]


# --- norms, one by one ---

RMS = """
to fp32 = 6h
square = 4h
mean = 4h + 4
rsqrt = 4
scale = 4h
to bf16 = 6h
weight = 6h
"""
CENTRED = """
to fp32 = 6h
mean = 4h + 4
less mean = 8h + 8
square = 8h + 4
variance = 8h + 8
rsqrt = 4h + 4
scale = 4h
weight = 4h
to bf16 = 6h
"""
CENTRED_BACKWARD = """
weight = 12h
scale = 12h + 4
rsqrt = 4h + 8
variance = 8h + 8
square = 20h + 4
mean = 8h + 4
to fp32 = 6h
"""


def normed(a: Architecture, **run: Any) -> tuple[Tape, Tensor]:
    """A norm by itself, a row a token, and what it gives."""
    made = Linears(Run(a, **run))
    out = made.norm(made.input, "input_layernorm", Size({"": 1}))
    return made.tape, out


def test_an_rms_norm_keeps_its_fp32_input_the_scale_and_what_its_weight_multiplies() -> None:
    """4h, a number of 4 a row, 2h. The mean of squares, 4, passes until its root, which is kept, is taken."""
    made, out = normed(arch("llama-3-8b"))
    assert (terms(made.saved()), out.b) == (form("6h + 4"), 2)
    check({s.name.partition(": ")[2]: terms(s.passing) for s in forward_of(made)}, RMS)


def test_cohere_subtracts_the_mean_twice_and_keeps_both_differences() -> None:
    """4h each, the scale of 4, and 4h that the weight multiplies in fp32.

    Forward the fp32 input, 4h, and the mean, 4, are named beside each difference; the variance is another 4. Backward
    the square's power and product, 8h, lie beside its gradient, the square's and the other difference's, 4h each.
    """
    made, out = normed(small("cohere"))
    assert (terms(made.saved()), out.b) == (form("12h + 4"), 2)
    check({s.name.partition(": ")[2]: terms(s.passing) for s in forward_of(made)}, CENTRED)
    found = {s.name.partition(": ")[2]: terms(s.passing) for s in backward_of(made)}
    check(found, CENTRED_BACKWARD)


@pytest.mark.parametrize(
    ("precision", "b", "cast"), [("bf16", 2, False), ("autocast", 4, False), ("autocast-bf16", 4, True)]
)
def test_a_layer_norm_runs_in_fp32_under_autocast(precision: str, b: int, cast: bool) -> None:
    """PyTorch's kernel keeps its input and two numbers of 4 a row; a bf16 input is cast for it, 6h at once."""
    made, out = normed(arch("starcoder2-7b"), precision=precision)
    assert (terms(made.saved()), out.b) == (form(f"{b}h + 8"), b)
    first = forward_of(made)[0]
    assert (terms(first.passing) == form("6h")) == cast == first.name.endswith("to fp32")


# --- what each linear is ---


def test_linears_are_those_of_the_last_layer_alone_and_without_recomputation_unless_said() -> None:
    """DeepSeek V2 Lite's first layer has no experts, its last one has."""
    made = Linears(Run(arch("deepseek-v2-lite")))
    assert "experts_down_proj" in made.elements
    assert "experts_down_proj" not in Linears(Run(arch("deepseek-v2-lite")), arch("deepseek-v2-lite").specs[0]).elements
    assert (made.tape.received, made.tape.selective, made.spec.rotated) == (False, False, True)


def test_autocast_caches_what_requires_gradients_and_one_rank_sums_nothing() -> None:
    """Seven copies of the layer's weights, those of a frozen base not; of fp32 adapters both matrices, in products."""
    assert len(tape("llama-3-8b", precision="autocast").cached) == 7
    assert tape("llama-3-8b", precision="autocast-bf16").cached == []
    adapter = Adapter(64, ("o_proj",), False, 4)
    made = tape("llama-3-8b", **frozen(adapter, precision="autocast"))
    assert [t.size.fixed for t in made.cached] == [{"": 2 * 64 * 4096}] * 2
    products = {op.name: (op.product, op.flat) for op in made.ops if op.name.startswith("o_proj")}
    assert products["o_proj"] == products["o_proj: LoRA A"] == products["o_proj: LoRA B"] == (True, True)
    plain = {op.name: op.flat for op in tape("llama-3-8b", **frozen(BF16_LORA)).ops}
    assert plain["o_proj: LoRA A"] and plain["o_proj: LoRA B"] and not plain["o_proj: LoRA add"]
    assert not [name for name in plain if "reduce" in name or "gather" in name]


# --- over two ranks: sums of outputs, of inputs' gradients, and parts of the sequence ---

SUMMED = """
q_proj: all-reduce = 4h
q_proj = 2h + 2q
o_proj = 4h
o_proj: all-reduce = 6h
gate_proj: all-reduce = 6h
down_proj = 6h
down_proj: all-reduce = 8h
"""
SUMMED_BACKWARD = """
down_proj: all-reduce = 2h
down_proj = 2h + 2i
up_proj = 4h + 4i
up_proj: all-reduce = 6h + 2i
gate_proj: all-reduce = 8h
o_proj = 2h + 2o
q_proj = 6h + 2q
q_proj: all-reduce = 8h
"""
PIECES = """
attention: gather sequence = 6h
q_proj = h + 2q
o_proj = 3h
o_proj: reduce-scatter = 6h
down_proj: reduce-scatter = 7h
"""
PIECES_BACKWARD = """
down_proj: reduce-scatter = 5h
down_proj = 3h + 2i
up_proj = 3h + 4i
mlp: gather sequence = 6h
o_proj: reduce-scatter = 5h
q_proj = 5h + 2q
attention: gather sequence = 6h
"""


def test_ranks_sum_the_outputs_of_row_wise_linears_and_the_gradients_of_column_wise_inputs() -> None:
    """A linear's partial output and its sum, 2h each, beside the residual stream and its input's owner.

    Backward each column-wise linear makes its own part of the input's gradient, 2h, beside the sum so far.
    """
    model = part(arch("llama-3-8b"), 2)
    made = Program(Run(model)).layer()
    check({s.name: terms(s.passing) for s in forward_of(made)}, SUMMED)
    check({s.name: terms(s.passing) for s in backward_of(made)}, SUMMED_BACKWARD)
    assert terms(made.saved()) == form("16h + 2q + 4kv + 4H + 2o + 8i + 8")


def test_ranks_with_parts_of_the_sequence_gather_before_and_scatter_after_a_block() -> None:
    """Two ranks: h a token of residual stream. A gather fills 2h and is joined by a copy of 2h; a scatter is cut by a
    copy, and gives h. Backward the same the other way round: norms keep 4h/2 + 2h/2 less each.
    """
    model = part(arch("llama-3-8b"), 2)
    made = Program(Run(model, sequences=True)).layer()
    check({s.name: terms(s.passing) for s in forward_of(made)}, PIECES)
    check({s.name: terms(s.passing) for s in backward_of(made)}, PIECES_BACKWARD)
    assert terms(made.saved()) == form("10h + 2q + 4kv + 4H + 2o + 8i + 4")


@pytest.mark.parametrize(
    ("adapter", "closed_form"),
    [
        # beside LoRA's 12h + 4q + 4kv + 8i + 4H + 8 + 14r both factors of two products for each of the seven linears,
        # the linear's own output and B's, 4 bytes for each of 2h + q + 2kv + 2i outputs
        (Adapter(64, "all-linear", False, 2, dora="once"), "20h + 8q + 12kv + 16i + 4H + 8 + 14r"),
        # fp32 adapters with dropout, beside 33h + 9q + 4kv + 11i + 4H + 8 + 28r: 8 bytes for each output, as the frozen
        # weight multiplies in fp32, too
        (Adapter(64, "all-linear", True, 4, dora="once"), "49h + 17q + 20kv + 27i + 4H + 8 + 28r"),
        # peft 0.13 multiplies the frozen weight twice without dropout, too: the same but for the seven masks
        (Adapter(64, "all-linear", False, 4, dora="twice"), "44h + 16q + 20kv + 26i + 4H + 8 + 28r"),
    ],
)
def test_a_llama_layer_with_dora_keeps_both_factors_of_what_scales_its_rows(adapter: Adapter, closed_form: str) -> None:
    """peft 0.21 `tuners/lora/dora.py`, `DoraLinearLayer.forward`; records of traces agree to 0.01 %."""
    kept = terms(tape("llama-3-8b", **frozen(adapter)).saved(), arch("llama-3-8b"))
    assert kept[0] == form(closed_form)[0]


def test_dora_keeps_the_frozen_weight_in_fp32_where_it_multiplies_what_is_dropped_out() -> None:
    """Seven weights of 4 bytes, and of each output the norm, the magnitude over it and that less one, 4 bytes each."""
    fixed = tape("llama-3-8b", **frozen(Adapter(64, "all-linear", True, 4, dora="once"))).saved().fixed
    outputs = 2 * 4096 + 4096 + 2 * 1024 + 2 * 14336
    assert fixed.pop("") == 12 * outputs
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert fixed == {f"W_{name}": 4 for name in linears}


def test_dora_trains_a_magnitude_for_each_row_beside_the_two_matrices() -> None:
    """Llama 3 8B, rank 1: 2·(h + q) + 2·(h + kv) + 3·(h + i) as LoRA has, and an output each more."""
    a = replace(arch("llama-3-8b"), adapters="scaled")
    rows = 32 * (2 * 4096 + 4096 + 2 * 1024 + 2 * 14336)
    assert lora_parameters(a, 1, "all-linear") == lora_parameters(arch("llama-3-8b"), 1, "all-linear") + rows
    run = Run(a, **frozen(Adapter(16, "all-linear", False, 2, dora="once")))
    made = sum(backward_of(Program(run, spec).layer())[-1].gradients * n for spec, n in layer_kinds(a))
    assert made == lora_parameters(a, 16, "all-linear")


def test_adapters_of_which_each_token_has_one_are_stacked_and_scaled_token_by_token() -> None:
    """Four adapters beside each linear keep what one keeps, 12h + 4q + 4kv + 8i + 4H + 8 + 14r, and a factor of 2 bytes
    for each of the seven linears; of weights the stacked copies of both matrices, 2 bytes for each of 4·r·(in + out).

    In forward the base's output, B's, the scaled one and their sum are there at once, 8i beside act(gate), the norm's
    output and the stream (prime-rl c330a6d4e `trainer/models/layers/lora/multi_linear.py`, `MultiLoRALinear.forward`).
    """
    four, a = frozen(Adapter(64, "all-linear", False, 2, count=4)), arch("llama-3-8b")
    made = tape("llama-3-8b", **four)
    kept = made.saved()
    assert terms(kept, a)[0] == form("12h + 4q + 4kv + 8i + 4H + 22 + 14r")[0]
    assert kept.fixed == {"": 2 * 4 * 64 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))}
    check(passing("llama-3-8b", forward_of(made)), "up_proj: LoRA add = 4h + 10i")
    trained = sum(backward_of(Program(Run(a, **four), spec).layer())[-1].gradients * n for spec, n in layer_kinds(a))
    assert trained == 4 * lora_parameters(a, 64, "all-linear")
