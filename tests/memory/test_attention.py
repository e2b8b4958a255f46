"""Attention on a tape, kernel by kernel: what it keeps for backward, and what passes while it runs."""

from __future__ import annotations

from typing import Any

import pytest
from formulas import form, terms
from tapes import arch, check, passing, tape

from calc.architecture import layer_parameters
from calc.memory import activations
from calc.memory.run import Run


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
    kept = activations.layer(Run(arch("phi-3-mini"), kernel="masked"), moe=False).saved
    assert kept.bytes(4096, 4096) == 159_880 * 4096


@pytest.mark.parametrize(
    ("kernel", "closed_form", "bytes_at_2048"),
    [
        # q and k joined from two parts, 4q; values inside kv_b_proj's product, 2kvb; norms of two low ranks, 8 each
        ("flash", "16h + 8c_q + 8c_kv + 4q + 2kvb + 4o + 4H + 8i + 16", 508_432),
        ("efficient", "16h + 8c_q + 8c_kv + 4q + 2kvb + 2o + 4H + 8i + 16", 475_664),
        ("eager", "16h + 8c_q + 8c_kv + 4q + 2kvb + 2o + 6H·S + 8i + 16", 2_048_016),
    ],
)
def test_latent_attention_keeps_the_bytes_that_were_traced(kernel: str, closed_form: str, bytes_at_2048: int) -> None:
    """Own traces of DeepSeek-V3's dense layers at 2048 tokens."""
    kept = activations.layer(Run(arch("deepseek-v3"), kernel=kernel), moe=False).saved
    assert terms(tape("deepseek-v3", kernel=kernel).saved()) == form(closed_form)
    assert kept.bytes(2048, 2048) == bytes_at_2048 * 2048


def test_without_a_low_rank_for_queries_one_projection_makes_them() -> None:
    """DeepSeek-V2-Lite has no q_lora_rank: neither 8c_q nor a norm's scale, 4; no sum divides weights: 2k + 4."""
    kept = terms(tape("deepseek-v2-lite", moe=True).saved())
    assert kept == form("20h + 8c_kv + 4q + 2kvb + 4o + 4H + 4E + 36k + 4k·h + 8k·j + 8s + 12 | 4W_gate")


def test_flash_sums_keys_and_values_gradients_only_where_heads_share_them() -> None:
    """Llama 2 7B: output's gradient 2q, dq 2q, dk and dv 4kv, dq's accumulator 4q + 4H."""
    check(passing("llama-2-7b", tape("llama-2-7b").backward()), "attention = 2h + 8q + 4kv + 4H")


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
    check(passing("llama-3-8b", made.forward()), EAGER_FORWARD)
    check(passing("llama-3-8b", made.backward()), EAGER_BACKWARD)


def test_gemma_2_caps_its_scores_in_three_more_operations() -> None:
    """Divide, tanh, multiply: each a new tensor of 2; tanh's own is kept from then on."""
    made = tape("gemma-2-2b", kernel="eager")
    check(passing("gemma-2-2b", made.forward()), """
        scores: over cap = 2h + 2q + 4H·S + 4kv
        scores: tanh = 2h + 2q + 2H·S + 4kv
        scores: times cap = 2h + 2q + 2H·S + 4kv
        scores: mask = 2h + 2q + 4H·S + 4kv
    """)  # fmt: skip
    check(passing("gemma-2-2b", made.backward()), """
        scores: times cap = 2h + 2q + 4H·S
        scores: tanh = 2h + 2q + 4H·S
        scores: over cap = 2h + 2q + 4H·S
    """)  # fmt: skip


def test_gpt_oss_attends_with_a_column_for_its_sink_in_the_compute_type() -> None:
    """A column more: 2H beside each 2H·S from the join on. `less maximum` has a product more in backward."""
    made = tape("gpt-oss-20b", moe=True, kernel="eager")
    check(passing("gpt-oss-20b", made.forward()), """
        scores: join sink = 2h + 2q + 4H·S + 2H + 4kv
        scores: less maximum = 2h + 2q + 6H·S + 4H + 4kv
        softmax = 2h + 2q + 4H·S + 2H + 4kv
        probabilities: drop sink = 2h + 2q + 4H·S + 2H + 4kv
    """)  # fmt: skip
    check(passing("gpt-oss-20b", made.backward()), """
        values = 2h + 4q + 2H·S + 2H
        probabilities: drop sink = 2h + 2q + 4H·S + 4H
        softmax = 2h + 2q + 4H·S + 4H
        scores: less maximum = 2h + 2q + 4H·S + 4H
        scores: join sink = 2h + 2q + 4H·S + 2H
    """)  # fmt: skip
    assert made.backward()[-1].gradients == layer_parameters(arch("gpt-oss-20b"))  # the sinks' own, 64, among them


def test_the_memory_efficient_kernel_accumulates_dq_in_fp32_only_from_16_bits() -> None:
    """Repeated k and v: gradients 2q each; dq 2q, output's 2q, accumulator 4q + 4H. In fp32 all are 4q, without it."""
    check(passing("llama-3-8b", tape("llama-3-8b", kernel="masked").backward()), """
        attention = 2h + 12q + 4H
        v: repeat = 2h + 6q + 2kv
        k: repeat = 2h + 4q + 4kv
    """)  # fmt: skip
    single = tape("llama-2-7b", kernel="efficient", precision="fp32").backward()
    check(passing("llama-2-7b", single), "attention = 4h + 8q + 8kv + 4H")


def test_qk_norms_work_on_each_heads_rows() -> None:
    """As any norm, on q instead of h, with a scale for every head: 4H. k and v, 4kv, wait beside."""
    made = tape("qwen3-8b")
    check(passing("qwen3-8b", made.forward()), """
        q_norm: to fp32 = 2h + 4kv + 6q
        q_norm: mean = 2h + 4kv + 4q + 4H
        k_norm: mean = 2h + 2q + 6kv + 4K
    """)  # fmt: skip
    check(passing("qwen3-8b", made.backward()), """
        q_norm: scale = 2h + 4kv + 12q + 4H
        q_norm: square = 2h + 4kv + 20q
    """)  # fmt: skip


def test_phi_3_slices_one_product_and_joins_the_gradients_again() -> None:
    """Views are free forward; backward each slice writes a gradient of the whole product, 2q + 4kv, zero elsewhere."""
    made = tape("phi-3-mini")
    check(passing("phi-3-mini", made.forward()), """
        q: slice = 2h + 2q + 4kv
        q: rotate = 2h + 10q + 4kv
        k: rotate = 2h + 4q + 12kv
        attention: contiguous = 2h + 2q
        gate, up = 4h + 4i
    """)  # fmt: skip
    check(passing("phi-3-mini", made.backward()), """
        gate, up = 2h + 8i
        attention: contiguous = 2h + 4q
        attention = 2h + 8q + 4kv + 4H
        v: slice = 2h + 4q + 8kv
        k: slice = 2h + 6q + 10kv
        q: slice = 2h + 6q + 8kv
    """)  # fmt: skip


def test_latent_attention_splits_rotates_and_joins() -> None:
    """q: q_pass and q_rot are views; rotating makes 2·H·rope, with three temporaries; joining 2q.

    Backward, `k: split` concatenates the gradients of k_pass and v, 2kvb, beside them.
    """
    made = tape("deepseek-v3")
    check(passing("deepseek-v3", made.forward()), """
        q: split = 2h + 2q
        kv_a_layernorm: mean = 2h + 2q + 6c_kv + 2rope + 4
        q: rotate = 2h + 2q + 4c_kv + 2rope + 8H·rope
        k: rotate = 2h + 2q + 4c_kv + 10rope + 2H·rope
        q: join = 2h + 4q + 2c_kv + 2rope + 2H·rope
        kv_b_proj = 2h + 2q + 2rope + 2kvb
        k: join = 2h + 4q + 2rope + 2kvb
        attention: contiguous = 2h + 2o
    """)  # fmt: skip
    check(passing("deepseek-v3", made.backward()), """
        attention: contiguous = 2h + 4o
        attention = 2h + 8q + 4o + 4H
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
