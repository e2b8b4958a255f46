"""Attention on a tape, kernel by kernel: what it keeps for backward, and what passes while it runs."""

from __future__ import annotations

from typing import Any

import pytest
from formulas import form, terms
from tapes import arch, backward_of, check, forward_of, frozen, of_kind, passing, small, tape

from calc.autograd.alloc_trace import GIVEN, INPUT, PASSING, Script, Writer
from calc.autograd.lifetimes import Lifetimes
from calc.autograd.tape import NOTHING, Op, Tape, Tensor, of
from calc.memory import activations
from calc.memory.activations import Program
from calc.memory.run import Run
from calc.models.architecture import layer_parameters
from calc.models.releases import with_heads


def attends(made: Tape) -> Op:
    """The operation that attends."""
    return next(op for op in made.ops if op.name == "attention")


@pytest.mark.parametrize(
    ("run", "closed_form"),
    [
        # probabilities in fp32 (4) and bf16 (2) for each pair of tokens and head, keys and values of every head
        ({"kernel": "eager"}, "16h + 8q + 8i + 6H·S + 8"),
        # keys and values repeated for every head, and the mask in the compute type
        ({"kernel": "masked"}, "16h + 8q + 8i + 4H + 2S + 8"),
        ({"kernel": "efficient"}, "16h + 8q + 8i + 4H + 8"),
        # norms keep fp32 products, q, k and v each their own bf16 cast of the input, as do gate and up: 10h more
        (
            {"precision": "autocast"},
            "26h + 4q + 4kv + 8i + 4H + 8 | 2W_q_proj + 2W_k_proj + 2W_v_proj + 2W_o_proj + 2W_gate_proj"
            " + 2W_up_proj + 2W_down_proj",
        ),
        # fp32 throughout: no casts in the norms (12h each, of which 4h the linears read too), twice the rest
        ({"precision": "fp32"}, "24h + 8q + 8kv + 16i + 4H + 8"),
        ({"precision": "fp32", "kernel": "efficient"}, "24h + 16q + 16i + 4H + 8"),
        # in fp32 the mask is fp32 too, and probabilities need no cast
        ({"precision": "fp32", "kernel": "masked"}, "24h + 16q + 16i + 4H + 4S + 8"),
        ({"precision": "fp32", "kernel": "eager"}, "24h + 16q + 16i + 4H·S + 8"),
    ],
)
def test_a_llama_layer_keeps_by_kernel_and_number_format(run: dict[str, Any], closed_form: str) -> None:
    """Protects the variants of the Llama form; bf16 and autocast traced, fp32 counted tensor by tensor."""
    assert terms(tape("llama-3-8b", **run).saved(), arch("llama-3-8b")) == form(closed_form)


def test_attention_without_grouped_queries_repeats_nothing() -> None:
    """Llama 2 7B has a key head for every query head: k and v are kept as they are under every kernel."""
    for kernel, scores in (("flash", "4H"), ("efficient", "4H"), ("masked", "4H + 2S"), ("eager", "6H·S")):
        kept = terms(tape("llama-2-7b", kernel=kernel).saved(), arch("llama-2-7b"))
        assert kept == form(f"16h + 4q + 4kv + 8i + 8 + {scores}")


@pytest.mark.parametrize(
    ("transformers", "torch", "kept"),
    [("4.53.3", "2.7", "8q"), ("4.54", "2.4", "8q"), ("4.54", "2.5", "4q + 4kv")],
)
def test_keys_and_values_are_copied_for_every_query_head_before_sdpa_takes_them_as_they_are(
    transformers: str, torch: str, kept: str
) -> None:
    """`integrations/sdpa_attention.py` of 4.53.3 and 4.54.0: `repeat_kv`, unless `use_gqa_in_sdpa`."""
    made = Program(Run(with_heads(arch("llama-3-8b"), transformers, torch)), arch("llama-3-8b").specs[0]).layer()
    assert terms(made.saved(), arch("llama-3-8b")) == form(f"16h + {kept} + 8i + 4H + 8")


@pytest.mark.parametrize("model", ["llama-2-7b", "gemma-2b"])
def test_a_head_of_its_own_or_one_for_all_is_not_copied(model: str) -> None:
    assert not with_heads(arch(model), "4.53.3", "2.7").repeated


@pytest.mark.parametrize(
    ("model", "kernel", "closed_form"),
    [
        # tanh's result stays too: 2 for each pair
        ("gemma-2-2b", "eager", "36h + 8q + 8i + 8H·S + 16"),
        # rotated q and k are new tensors; v is a view, so the whole product of q, k and v stays: 2q + 4kv
        ("phi-3-mini", "masked", "16h + 6q + 6kv + 8i + 4H + 2S + 8"),
    ],
)
def test_other_families_attention_keeps_by_kernel(model: str, kernel: str, closed_form: str) -> None:
    """Protects soft-capped scores and fused projections; Phi-3 at 4096 tokens traced at 159,880 a token."""
    assert terms(tape(model, kernel=kernel).saved(), arch(model)) == form(closed_form)


def test_phi_3_beyond_its_window_keeps_the_traced_bytes() -> None:
    """Own trace, 4096 tokens: 159,880 a token; 16·3072 + 6·3072 + 6·3072 + 8·8192 + 4·32 + 2·4096 + 8."""
    kept = activations.layer(Run(arch("phi-3-mini"), kernel="masked"), of_kind(arch("phi-3-mini"), False)).saved
    assert kept.bytes(4096, 4096) == 159_880 * 4096


@pytest.mark.parametrize(
    ("kernel", "closed_form", "bytes_at_2048"),
    [
        # q and k joined from two parts, 4q; norms of two low ranks, 8 each; for flash values filled up to q's width and
        # an output as wide, 4q, and what is left of that; for others values inside kv_b_proj's product, 2kvb
        ("flash", "16h + 8c_q + 8c_kv + 8q + 2o + 4H + 8i + 16", 508_432),
        ("efficient", "16h + 8c_q + 8c_kv + 4q + 2kvb + 2o + 4H + 8i + 16", 475_664),
        ("eager", "16h + 8c_q + 8c_kv + 4q + 2kvb + 2o + 6H·S + 8i + 16", 2_048_016),
    ],
)
def test_latent_attention_keeps_the_bytes_that_were_traced(kernel: str, closed_form: str, bytes_at_2048: int) -> None:
    """Own traces of DeepSeek-V3's dense layers at 2048 tokens."""
    kept = activations.layer(Run(arch("deepseek-v3"), kernel=kernel), of_kind(arch("deepseek-v3"), False)).saved
    assert terms(tape("deepseek-v3", kernel=kernel).saved()) == form(closed_form)
    assert kept.bytes(2048, 2048) == bytes_at_2048 * 2048


def test_without_a_low_rank_for_queries_one_projection_makes_them() -> None:
    """DeepSeek-V2-Lite has no q_lora_rank: neither 8c_q nor a norm's scale, 4; no sum divides weights: 2k + 4."""
    kept = terms(tape("deepseek-v2-lite", moe=True).saved())
    assert kept == form("20h + 8c_kv + 8q + 2o + 4H + 4E + 36k + 4k·h + 8k·j + 8s + 12 | 4W_gate")


def test_flash_sums_keys_and_values_gradients_only_where_heads_share_them() -> None:
    """Llama 2 7B: output's gradient 2q, dq 2q, dk and dv 4kv, dq's accumulator 4q + 4H. Llama 3 8B has four query
    heads to a key head: dk and dv of every query head, 2q each, beside them.
    """
    check(passing("llama-2-7b", backward_of(tape("llama-2-7b"))), "attention = 2h + 8q + 4kv + 4H")
    check(passing("llama-3-8b", backward_of(tape("llama-3-8b"))), "attention = 2h + 12q + 4kv + 4H")


# --- rotation ---


def test_rotation_takes_and_gives_back_its_temporaries_one_after_another() -> None:
    """`(q * cos) + (rotate_half(q) * sin)` of 100 bytes, `rotate_half` being `torch.cat((-x2, x1))`.

    Forward: q·cos, half of q negated, both joined, which frees the half, the joined times sin, which frees the joined,
    the sum. Backward, the last made first: times sin, negated half of it, zeros around that half, which goes, zeros
    around the other, after which neither the product with sin nor the second of the two is needed, times cos.
    """
    program = Program(Run(small("llama")))
    program.rotate(Tensor(of(h=1), 2), "q: rotate")
    writer = Writer(Lifetimes(program.tape), {"h": 50}, 1, 1, 2)
    a, b, c, d = (PASSING - n for n in range(4))
    forward = ((a, 100), (b, 50), (c, 100), (b, 0), (d, 100), (c, 0), (0, 100), (a, 0), (d, 0), (INPUT, 0))
    assert writer.forward() == Script(forward, 0)
    backward = ((a, 100), (b, 50), (c, 100), (b, 0), (d, 100), (a, 0), (d, 0), (1, 100), (c, 0), (GIVEN, 0))
    assert writer.backward() == Script(backward, 1)


def test_cosines_in_fp32_make_rotation_fp32_and_its_result_is_cast_back() -> None:
    """OLMo 2, `apply_rotary_pos_emb`: `q_embed.to(q_type), k_embed.to(k_type)`; in fp32 nothing is cast."""

    def rotated(precision: str) -> list[tuple[str, float]]:
        ops = tape("olmo-2-7b", precision=precision).ops
        return [(op.name, op.outs[0].b) for op in ops if "rotate" in op.name]

    assert rotated("bf16") == [
        ("q: rotate", 4), ("q: rotate: to bf16", 2), ("k: rotate", 4), ("k: rotate: to bf16", 2),
    ]  # fmt: skip
    assert rotated("fp32") == [("q: rotate", 4), ("k: rotate", 4)]


@pytest.mark.parametrize(
    ("family", "precision", "tables"),
    [
        ("helium", "bf16", "2tables·S"),
        ("glm4", "bf16", "2tables·S"),
        ("glm4", "autocast", "4tables·S"),
        # `Ernie4_5RotaryEmbedding` leaves cos and sin in fp32
        ("ernie4_5", "bf16", "4tables·S"),
        ("llama", "bf16", "0"),
    ],
)
def test_a_layer_that_repeats_cos_and_sin_keeps_them_once(family: str, precision: str, tables: str) -> None:
    """`cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)`, in the type of the stream; q and k share them."""
    saved = Program(Run(small(family, head_dim=16), precision=precision)).layer().saved()
    wanted = form(f"0 | {tables}")[1]
    assert {symbol: c for symbol, c in saved.fixed.items() if "S" in symbol} == wanted


def test_a_layer_without_positions_neither_rotates_nor_copies_gradients_head_by_head() -> None:
    """SmolLM3's every fourth layer: gradients of q and k lie as flash writes them, by token, and are not copied."""
    made = Program(Run(arch("smollm3-3b")), arch("smollm3-3b").specs[3]).layer()
    names = [op.name for op in made.ops if op.name]
    assert names[names.index("q_proj") : names.index("o_proj")] == ["q_proj", "k_proj", "v_proj", "attention"]
    check(passing("smollm3-3b", backward_of(made)), """
        v_proj = 4h + 2q + 4kv
        k_proj = 6h + 2q + 2kv
        q_proj = 6h + 2q
    """)  # fmt: skip
    rotated = tape("smollm3-3b")
    check(passing("smollm3-3b", forward_of(rotated)), """
        q: heads = 2h + 2q
        k: heads = 2h + 2q + 2kv
    """)  # fmt: skip
    check(passing("smollm3-3b", backward_of(rotated)), """
        k: heads = 4h + 2q + 4kv
        q: heads = 4h + 4q
    """)  # fmt: skip


# --- kernels ---


def test_sinks_are_trained_with_the_model_alone() -> None:
    """GPT-OSS: a number for each of 64 heads, under flash as under eager attention; other models have none."""
    assert attends(tape("gpt-oss-20b", moe=True)).weight == 64
    assert attends(tape("gpt-oss-20b", moe=True, **frozen())).weight == 0
    assert attends(tape("llama-3-8b")).weight == 0


@pytest.mark.parametrize(("packaged", "closed_form"), [(False, "2q + 4H"), (True, "0")])
def test_selective_checkpointing_keeps_what_sdpa_made_but_knows_no_package(packaged: bool, closed_form: str) -> None:
    """torchtitan's list has `aten._scaled_dot_product_flash_attention`: output and log-sum-exp. Not flash-attn's."""
    made = Program(Run(arch("llama-3-8b"), packaged=packaged), selective=True).layer()
    kept = sum((t.size for t in attends(made).kept), NOTHING)
    assert terms(kept, arch("llama-3-8b")) == form(closed_form)


EAGER_FORWARD = """
k: repeat = 2h + 4q + 4kv
v: repeat = 2h + 6q + 4kv
scores = 2h + 2q + 2H·S + 4kv
scores: scale = 2h + 2q + 4H·S + 4kv
scores: mask = 2h + 2q + 4H·S + 4kv
softmax: to fp32 = 2h + 2q + 6H·S + 4kv
softmax = 2h + 2q + 6H·S + 4kv
probabilities: to bf16 = 2h + 2q + 4H·S + 4kv
values = 2h + 2q + 4kv
attention: contiguous = 2h + 4q + 4kv
"""
EAGER_BACKWARD = """
attention: contiguous = 2h + 4q
values = 2h + 4q + 2H·S
probabilities: to bf16 = 2h + 2q + 6H·S
softmax = 2h + 2q + 8H·S
softmax: to fp32 = 2h + 2q + 6H·S
scores: mask = 2h + 2q + 2H·S
scores: scale = 2h + 2q + 4H·S
scores = 2h + 6q + 2H·S
v: repeat = 2h + 6q + 2kv
k: repeat = 2h + 4q + 4kv
"""


def test_eager_attention_passes_its_scores_two_or_three_at_a_time() -> None:
    """A pair of 16-bit scores is 4, a 16-bit and an fp32 one 6, two fp32 gradients in softmax's backward 8. The masked
    scores keep the name `attn_weights` until the probabilities take it over.

    The keys and values that heads share, 4kv, are named by variables until the block returns.
    """
    made = tape("llama-3-8b", kernel="eager")
    check(passing("llama-3-8b", forward_of(made)), EAGER_FORWARD)
    check(passing("llama-3-8b", backward_of(made)), EAGER_BACKWARD)


def test_gemma_2_caps_its_scores_in_three_more_operations() -> None:
    """Divide, tanh, multiply: each a new tensor of 2; tanh's own is kept from then on."""
    made = tape("gemma-2-2b", kernel="eager")
    check(passing("gemma-2-2b", forward_of(made)), """
        scores: over cap = 2h + 2q + 4H·S + 4kv
        scores: tanh = 2h + 2q + 2H·S + 4kv
        scores: times cap = 2h + 2q + 2H·S + 4kv
        scores: mask = 2h + 2q + 4H·S + 4kv
    """)  # fmt: skip
    check(passing("gemma-2-2b", backward_of(made)), """
        scores: times cap = 2h + 2q + 4H·S
        scores: tanh = 2h + 2q + 4H·S
        scores: over cap = 2h + 2q + 4H·S
    """)  # fmt: skip


def test_gpt_oss_attends_with_a_column_for_its_sink_in_the_compute_type() -> None:
    """A column more: 2H beside each 2H·S from the join on. `less maximum` has a product more in backward."""
    oss = arch("gpt-oss-20b")
    made = tape("gpt-oss-20b", moe=True, kernel="eager")
    check(passing("gpt-oss-20b", forward_of(made)), """
        scores: join sink = 2h + 2q + 4H·S + 2H + 4kv
        scores: less maximum = 2h + 2q + 6H·S + 4H + 4kv
        softmax = 2h + 2q + 4H·S + 2H + 4kv
        probabilities: drop sink = 2h + 2q + 4H·S + 2H + 4kv
    """)  # fmt: skip
    check(passing("gpt-oss-20b", backward_of(made)), """
        values = 2h + 4q + 2H·S + 2H
        probabilities: drop sink = 2h + 2q + 4H·S + 4H
        softmax = 2h + 2q + 4H·S + 4H
        scores: less maximum = 2h + 2q + 4H·S + 4H
        scores: join sink = 2h + 2q + 4H·S + 2H
    """)  # fmt: skip
    assert backward_of(made)[-1].gradients == layer_parameters(oss, oss.specs[-1])  # the sinks' own, 64, among them


def test_the_memory_efficient_kernel_accumulates_dq_in_fp32_only_from_16_bits() -> None:
    """Repeated k and v: gradients 2q each; dq 2q, output's 2q, accumulator 4q + 4H. In fp32 all are 4q, without it."""
    check(passing("llama-3-8b", backward_of(tape("llama-3-8b", kernel="masked"))), """
        attention = 2h + 12q + 4H
        v: repeat = 2h + 6q + 2kv
        k: repeat = 2h + 4q + 4kv
    """)  # fmt: skip
    single = backward_of(tape("llama-2-7b", kernel="efficient", precision="fp32"))
    check(passing("llama-2-7b", single), "attention = 4h + 8q + 8kv + 4H")


def test_qk_norms_work_on_each_heads_rows() -> None:
    """As any norm, on q instead of h, with a scale for every head: 4H. k and v, 4kv, wait beside."""
    made = tape("qwen3-8b")
    check(passing("qwen3-8b", forward_of(made)), """
        q_norm: to fp32 = 2h + 4kv + 6q
        q_norm: mean = 2h + 4kv + 4q + 4H
        k_norm: mean = 2h + 2q + 6kv + 4K
    """)  # fmt: skip
    check(passing("qwen3-8b", backward_of(made)), """
        q_norm: scale = 2h + 4kv + 12q + 4H
        q_norm: square = 2h + 4kv + 20q
    """)  # fmt: skip


def test_a_norm_of_each_head_joins_what_the_heads_made() -> None:
    """StableLM 2 12B's: beside the join, 2q, lie the outputs of all heads' norms, 2q; k and v, 4kv, wait beside.

    Each keeps its input, and a mean and a scale for every head, 8H. In backward the gradients of all heads' inputs lie
    beside those they are made of and what joins them; those of the stream and of the MLP's input, 4h, wait.
    """
    made = tape("stablelm-2-12b")
    kept = [(t.width.tokens, t.b) for op in made.ops if op.name == "q_layernorm" for t in op.saves]
    assert kept == [({"q": 1}, 2), ({"H": 1}, 8)]
    check(passing("stablelm-2-12b", forward_of(made)), """
        q_layernorm = 4q + 4kv
        k_layernorm = 2q + 6kv
    """)  # fmt: skip
    check(passing("stablelm-2-12b", backward_of(made)), """
        k_layernorm = 4h + 2q + 8kv
        q_layernorm = 4h + 6q + 4kv
    """)  # fmt: skip


def test_olmo_2_norms_all_heads_of_a_token_as_one_row() -> None:
    """One mean a token, 4, beside the square, 4q, and k and v, 4kv; the block's input, 2h, is kept by its linears."""
    made = tape("olmo-2-7b")
    check(passing("olmo-2-7b", forward_of(made)), """
        q_norm: mean = 4q + 4kv + 4
        k_norm: mean = 2q + 6kv + 4
    """)  # fmt: skip
    assert terms(made.saved(), arch("olmo-2-7b")) == form("20h + 12q + 12kv + 8i + 4H + 16")


def test_phi_3_slices_one_product_and_joins_the_gradients_again() -> None:
    """Views are free forward; backward each slice writes a gradient of the whole product, 2q + 4kv, zero elsewhere."""
    made = tape("phi-3-mini")
    check(passing("phi-3-mini", forward_of(made)), """
        q: slice = 2h + 2q + 4kv
        q: rotate = 2h + 10q + 4kv
        k: rotate = 2h + 4q + 12kv
        attention: contiguous = 2h + 2q
        gate, up = 4h + 4i
    """)  # fmt: skip
    check(passing("phi-3-mini", backward_of(made)), """
        gate, up = 2h + 8i
        attention: contiguous = 2h + 4q
        attention = 2h + 8q + 4kv + 4H
        v: slice = 2h + 4q + 8kv
        k: slice = 2h + 6q + 10kv
        q: slice = 2h + 6q + 8kv
    """)  # fmt: skip


def test_gpt_neox_chunks_one_product_whose_gradient_is_joined_once() -> None:
    """`qkv.chunk(3, dim=-1)`: three gradients, 2q + 4kv, and what they are concatenated to, 2q + 4kv."""
    a = small("gpt_neox", num_key_value_heads=None)
    made = Program(Run(a)).layer()
    forward, backward = (
        {s.name: terms(s.passing, a) for s in shots} for shots in (forward_of(made), backward_of(made))
    )
    check(forward, "q, k, v = 2q + 4kv")
    check(
        backward,
        """
        q, k, v = 2h + 4q + 8kv
        query_key_value = 4h + 2q + 4kv
    """,
    )


def test_latent_attention_splits_rotates_and_joins() -> None:
    """q: q_pass and q_rot are views; rotating makes 2·H·rope, with three temporaries; joining 2q.

    Values are filled up to 2q for the kernel, whose output has that width, too, and is cropped. Backward, `k: split`
    concatenates the gradients of k_pass and v, 2kvb, beside them.
    """
    made = tape("deepseek-v3")
    check(passing("deepseek-v3", forward_of(made)), """
        q: split = 2h + 2q
        kv_a_layernorm: mean = 2h + 2q + 6c_kv + 2rope + 4
        q: rotate = 2h + 2q + 4c_kv + 2rope + 8H·rope
        k: rotate = 2h + 2q + 4c_kv + 10rope + 2H·rope
        q: join = 2h + 4q + 2c_kv + 2rope + 2H·rope
        kv_b_proj = 2h + 2q + 2rope + 2kvb
        k: join = 2h + 4q + 2rope + 2kvb
        v: pad = 2h + 6q + 2kvb
        attention: contiguous = 2h + 2kvb + 2o
    """)  # fmt: skip
    check(passing("deepseek-v3", backward_of(made)), """
        attention: contiguous = 2h + 4o
        attention: crop = 2h + 2o + 2q
        attention = 2h + 12q + 4H
        v: pad = 2h + 6q + 2o
        k: join = 2h + 4q + 2kvb + 2rope
        k: split = 2h + 2q + 4kvb + 2rope
        kv_b_proj = 2h + 2q + 2kvb + 2c_kv + 2rope
        q: join = 2h + 4q + 2c_kv + 2rope
        k: rotate = 2h + 2q + 2c_kv + 10rope
        q: rotate = 2h + 2q + 2c_kv + 2rope + 8H·rope
        kv: split = 2h + 2q + 4c_kv + 4rope
        kv_a_proj_with_mqa = 4h + 2q + 2c_kv + 2rope
        q: split = 4h + 4q
        q_b_proj = 4h + 2q + 2c_q
        q_a_layernorm: square = 4h + 20c_q
        q_a_proj = 6h + 2c_q
    """)  # fmt: skip


def test_one_key_head_for_all_is_repeated_as_a_view_until_autocast_writes_it_out() -> None:
    """Gemma 3 1B beyond its window: k and v stay as they are, 4kv; rotated keys are fp32 and cast at full width."""
    bf16 = tape("gemma-3-1b", kernel="masked").saved()
    assert terms(bf16, arch("gemma-3-1b")) == form("36h + 12q + 12kv + 8i + 8H + 4K + 2S + 16")
    cast = tape("gemma-3-1b", kernel="masked", precision="autocast").saved()
    flash = tape("gemma-3-1b", precision="autocast").saved()
    assert cast.tokens["q"] - flash.tokens["q"] == 2  # k, of which flash keeps 2kv
    assert cast.tokens["kv"] - flash.tokens["kv"] == -2


def test_an_fp32_softmax_of_fp32_scores_casts_nothing() -> None:
    """`softmax(dtype=torch.float32)` of eager attention."""
    names = [{op.name for op in tape("llama-3-8b", kernel="eager", precision=p).ops} for p in ("bf16", "fp32")]
    assert ["softmax: to fp32" in found for found in names] == [True, False]


# --- context parallelism ---


@pytest.mark.parametrize(
    ("ranks", "forward", "backward"),
    [
        (
            2,
            """
            k: rotate = 2h + 4q + 12kv
            q: all-to-all = 2h + 8q + 4kv
            k: all-to-all = 2h + 4q + 10kv
            v: all-to-all = 2h + 4q + 12kv
            attention = 2h + 2q + 4kv
            attention: all-to-all = 2h + 8q + 4kv
            """,
            """
            attention: all-to-all = 2h + 8q
            attention = 2h + 12q + 4kv + 4H
            v: all-to-all = 2h + 2q + 10kv
            k: all-to-all = 2h + 2q + 10kv
            q: all-to-all = 2h + 8q + 4kv
            k: rotate = 2h + 2q + 12kv
            """,
        ),
        # two copies of each key head: 4kv bytes of keys, and as many of values; two query heads share one
        (
            16,
            """
            k: repeat = 2h + 2q + 8kv
            v: repeat = 2h + 2q + 12kv
            q: all-to-all = 2h + 8q + 12kv
            k: all-to-all = 2h + 4q + 24kv
            v: all-to-all = 2h + 4q + 24kv
            """,
            """
            attention = 2h + 12q + 8kv + 4H
            v: all-to-all = 2h + 2q + 20kv
            k: all-to-all = 2h + 2q + 20kv
            q: all-to-all = 2h + 8q + 8kv
            v: repeat = 2h + 2q + 10kv
            k: repeat = 2h + 2q + 8kv
            """,
        ),
        # four copies, one for each query head, so that no head is shared
        (32, "k: all-to-all = 2h + 4q + 44kv", "attention = 2h + 8q + 16kv + 4H"),
    ],
)
def test_ulysses_sends_and_receives_pieces_of_queries_keys_values_and_output(
    ranks: int, forward: str, backward: str
) -> None:
    """Llama 3 8B, 32 heads over 8: `all_to_all_tensor` has pieces 2q, received 2q, joined 2q beside its input 2q.

    The layer's rotated q, k and v, 2q + 4kv, have names until the block returns; before the kernel keeps them, so do
    those that were exchanged. Backward an exchange of gradients does the same. Only up to 8 ranks is nothing repeated.
    """
    made = tape("llama-3-8b", context=ranks, exchange="all-to-all")
    check(passing("llama-3-8b", forward_of(made)), forward)
    check(passing("llama-3-8b", backward_of(made)), backward)
    assert ("k: repeat" in {op.name for op in made.ops}) == (ranks > 8)


@pytest.mark.parametrize(
    ("ranks", "names"), [(8, {"q: all-to-all"}), (16, {"q: all-to-all", "q: mask"}), (3, {"q: mask"})]
)
def test_ms_swift_swaps_heads_among_what_divides_the_key_heads_and_sends_the_rest_around(
    ranks: int, names: set[str]
) -> None:
    """Llama 3 8B has 8 key heads: of 16 ranks 8 swap, in pairs that are a ring; of 3 none swaps."""
    made = tape("llama-3-8b", context=ranks, exchange="zigzag")
    assert {op.name for op in made.ops} & {"q: all-to-all", "q: mask"} == names
    assert "attention: all-to-all" in {op.name for op in made.ops} or ranks == 3


def test_ms_swifts_ring_keeps_the_output_of_every_step_in_fp32_for_its_backward() -> None:
    """Qwen2.5 3B, 16 heads over 2, on 8 ranks: two swap heads, four are a ring (zigzag_ring_attn.py of ms-swift 4.6.0).

    Forward: the queries' late halves 1q; keys and values that attend 4kv, the next ones 4kv, halves of the former 2kv;
    the output so far, the next, their difference and its share 4 · 4q, and the next in 16 bits 2q. Given and exchanged
    q, k and v, 4q + 8kv, are variables. Backward: 6q for each of four steps, 4q for each one's gradient; the queries'
    gradient in fp32, as written and of a step's output 8q; the written ones of keys and values 4kv, in fp32 thrice 8kv;
    flash's 4q, and for half of the keys a gradient of each query head 2q.
    """
    made = tape("qwen2.5-3b", context=8, exchange="zigzag")
    attention = next(op for op in made.ops if op.name == "attention")
    assert attention.scratch.tokens == of(q=4 * 4 + 2 + 1, kv=10, H=16).tokens
    steps = of(q=4 * (6 + 4), H=4 * 5 * 4)
    rest = of(q=1 + 8 + 4 + 1, o=1, kv=10 + 4 + 24, H=4)
    assert attention.backward_scratch.tokens == (steps + rest).tokens
    longer = next(op for op in tape("qwen2.5-3b", context=16, exchange="zigzag").ops if op.name == "attention")
    assert longer.backward_scratch.tokens["q"] - attention.backward_scratch.tokens["q"] == 4 * 10


def test_ms_swifts_ring_keeps_the_masked_copies_alone() -> None:
    """As much as Ulysses keeps: q, k, v, output and a log-sum-exp."""
    kept = tape("qwen2.5-3b", context=8, exchange="zigzag").saved()
    assert kept.tokens == tape("qwen2.5-3b", context=2, exchange="all-to-all").saved().tokens


def test_ulysses_without_grouped_queries_sums_no_keys_and_values() -> None:
    """Llama 2 7B on 4 ranks, 8 heads of each kind on one: as alone, output's gradient 2q, dq 2q, 4q + 4H."""
    made = tape("llama-2-7b", context=4, exchange="all-to-all")
    check(passing("llama-2-7b", backward_of(made)), "attention = 2h + 8q + 4kv + 4H")


@pytest.mark.parametrize(
    ("model", "ranks", "forward", "backward"),
    [
        # 4 query heads to a key head: 32 + 4, then 16 + 4 of gradients, dq's accumulator 16, dk and dv 64
        ("llama-3-8b", 4, 36, 136),
        ("llama-3-8b", 8, 68, 68 + 36 + 16 + 128),
        # 7 heads: dq's accumulator 28, dk and dv 2·4·7·2
        ("qwen2.5-7b", 4, 36, 36 + 20 + 28 + 112),
        # 2 heads
        ("qwen3-0.6b", 4, 36, 36 + 20 + 8 + 32),
        # none shared: no dk and dv of query heads
        ("llama-2-7b", 4, 36, 36 + 20 + 4),
    ],
)
def test_llama_3s_ring_has_buffers_of_one_key_head(model: str, ranks: int, forward: int, backward: int) -> None:
    """`llama3_flash_attn_varlen_forward`, by D a token of one rank, in bf16: `kv_buffer` and its copy, 2·2·2 bytes a
    rank, the slices sent, 2·2. Outputs of the key heads, 2q, lie in a list when `torch.cat` joins them.

    `…_backward`: these, `dkv_buffer` of 2·2 a rank and `kv_contiguous_buffer` of 2·2; flash's fp32 dq of the head's
    queries, 4 each, and dk and dv of all positions for each of them, 2·2 a rank.
    """
    made = tape(model, context=ranks, exchange="all-gather")
    found = [terms(s.passing, arch(model))[0] for shots in (forward_of(made), backward_of(made)) for s in shots
             if s.name == "attention"]  # fmt: skip
    assert [each["D"] for each in found] == [forward, backward]
    assert found[0]["q"] == 2
    assert (found[1]["q"], found[1]["kv"]) == (4, 4)  # gradients of output, q, k and v


def test_pytorchs_ring_without_grouped_queries_sums_keys_and_values_once() -> None:
    """Llama 2 7B on 4 ranks. Forward: all keys and values 4·4kv, in fp32 four outputs, 16q, and two log-sum-exps, 8H.

    Backward: gradient of the output 2q, of q, k and v 2q + 4kv, all keys and values 16kv, sums 4q + 8kv and two buffers
    16kv, what was made before 2q + 4kv and sent 4kv, the kernel's 4q + 4H, whose dk and dv are of half the positions.
    """
    made = tape("llama-2-7b", context=4, exchange="ring")
    check(passing("llama-2-7b", forward_of(made)), """
        attention = 2h + 16q + 16kv + 8H
        attention: contiguous = 2h + 2q
    """)  # fmt: skip
    check(passing("llama-2-7b", backward_of(made)), """
        attention: contiguous = 2h + 4q
        attention = 2h + 14q + 50kv + 4H
    """)  # fmt: skip
    check(passing("llama-3-8b", backward_of(tape("llama-3-8b", context=4, exchange="ring"))), """
        attention = 2h + 16q + 50kv + 4H
    """)  # fmt: skip


@pytest.mark.parametrize(("exchange", "line"), [("", "says how they exchange"), ("relay", "relay")])
def test_ranks_that_share_positions_say_how_they_exchange_them(exchange: Any, line: str) -> None:
    """In a way that is known, or the model is not run at all."""
    with pytest.raises(AssertionError, match=line):
        Program(Run(arch("llama-3-8b"), context=4, exchange=exchange)).layer()
