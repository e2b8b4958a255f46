from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from formulas import form, terms

from calc.amounts import amount
from calc.architecture import Architecture, layer_parameters
from calc.catalog import load
from calc.config import from_config
from calc.lora import lora_parameters
from calc.memory import activations
from calc.memory.activations import Program
from calc.memory.run import Adapter, Run, dimensions
from calc.tape import Snapshot, Tape

# --- what the tests read off a tape ---

BF16_LORA = Adapter(64, "all-linear", False, 2)
FP32_LORA = Adapter(64, "all-linear", True, 4)


def arch(model: str) -> Architecture:
    return load().model(model).architecture


def tape(model: str, *, moe: bool = False, first: bool = False, **run: Any) -> Tape:
    """One layer of `model` on a tape; `run` are fields of Run."""
    a = arch(model)
    return Program(Run(a, **run), -1 if moe else 0, first=first).layer(moe=moe)


def frozen(adapter: Adapter | None = None, **run: Any) -> dict[str, Any]:
    return {"trained": False, "adapter": adapter, **run}


def per_token(model: str, *, moe: bool = False, first: bool = False, **run: Any) -> float:
    """Bytes that a layer keeps for backward, a token."""
    return activations.layer(Run(arch(model), **run), moe=moe, first=first).saved.tokens


def passing(model: str, shots: list[Snapshot], prefix: str = "") -> dict[str, tuple[dict[str, float], ...]]:
    """What passes at each instant whose name starts with `prefix`, in order."""
    return {shot.name: terms(shot.passing, arch(model)) for shot in shots if shot.name.startswith(prefix)}


def table(text: str) -> dict[str, tuple[dict[str, float], ...]]:
    """`name = form` on each line, as `passing` gives it."""
    lines = (line.partition(" = ") for line in text.strip().splitlines())
    return {name.strip(): form(sizes) for name, _, sizes in lines}


def check(found: dict[str, tuple[dict[str, float], ...]], text: str) -> None:
    """Every row of the table as found; rows that the table leaves out are checked elsewhere."""
    for name, sizes in table(text).items():
        assert found[name] == sizes, name


# --- bytes that a layer keeps for backward ---


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [
        # 16h + 4q + 4kv + 8i + 4H + 8
        ("llama-3-8b", 200_840),  # 16·4096 + 4·4096 + 4·1024 + 8·14336 + 4·32 + 8
        ("mistral-7b", 200_840),  # the same sizes
        ("qwen2.5-0.5b", 57_408),  # 16·896 + 4·896 + 4·128 + 8·4864 + 4·14 + 8
        ("qwen2.5-1.5b", 103_480),  # 16·1536 + 4·1536 + 4·256 + 8·8960 + 4·12 + 8
        ("qwen2.5-7b", 225_400),  # 16·3584 + 4·3584 + 4·512 + 8·18944 + 4·28 + 8
        ("llama-2-7b", 186_504),  # 24·4096 + 8·11008 + 4·32 + 8
        ("llama-2-70b", 397_576),  # 16·8192 + 4·8192 + 4·1024 + 8·28672 + 4·64 + 8
        # and 6(q + kv) + 4(H + K) for the norms of queries and keys
        ("qwen3-8b", 215_336),  # 20·4096 + 4·1024 + 8·12288 + 128 + 8 + 6·5120 + 4·40
        # 36h + 4q + 4kv + 8i + 4H + 16: four norms, each with its fp32 product
        ("gemma-2-9b", 268_368),  # 36·3584 + 4·4096 + 4·2048 + 8·14336 + 4·16 + 16
        ("gemma-2-2b", 169_008),  # 36·2304 + 4·2048 + 4·1024 + 8·9216 + 4·8 + 16
        # 16h + 8q + 6kv + 8i + 4H + 8: the whole product of q, k and v, and attention's output twice
        ("phi-3-mini", 157_832),  # 16·3072 + 8·3072 + 6·3072 + 8·8192 + 4·32 + 8
    ],
)
def test_a_dense_layer_keeps_the_bytes_that_were_traced(model: str, bytes_per_token: int) -> None:
    """Protects every saved tensor of the dense families; bf16, flash attention, full training.

    Traced with torch 2.13, transformers 5.23; the arithmetic beside each number is the closed form put in.
    """
    assert per_token(model) == bytes_per_token


@pytest.mark.parametrize(
    ("model", "closed_form"),
    [
        ("llama-3-8b", "16h + 4q + 4kv + 8i + 4H + 8"),
        ("qwen3-8b", "16h + 10q + 10kv + 8i + 8H + 4K + 8"),
        ("gemma-2-9b", "36h + 4q + 4kv + 8i + 4H + 16"),
        ("phi-3-mini", "16h + 8q + 6kv + 8i + 4H + 8"),
    ],
)
def test_the_closed_form_of_a_dense_layer_is_read_off_its_tape(model: str, closed_form: str) -> None:
    """Two coefficients that err against each other for one model's sizes do not for the symbols."""
    assert terms(tape(model).saved(), arch(model)) == form(closed_form)


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


def test_a_frozen_layer_without_adapters_keeps_only_what_leads_to_its_input() -> None:
    """A layer between adapters elsewhere: norms 4h + 4, attention as ever, the MLP's 6i."""
    kept = terms(tape("llama-3-8b", **frozen()).saved(), arch("llama-3-8b"))
    assert kept == form("8h + 4q + 4kv + 6i + 4H + 8")


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
        ("deepseek-v3", {}, "20h + 8c_q + 8c_kv + 4q + 2kvb + 4o + 4H + 4E + 40k + 4k·h + 8k·j + 8s + 20 | 4W_gate",
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
    kept = activations.layer(Run(arch(model), **run), moe=True).saved
    assert terms(tape(model, moe=True, **run).saved(), arch(model)) == form(closed_form)
    assert kept.bytes(2048, 2048) == bytes_at_2048 * 2048


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [("phi-3-mini", 133_380), ("qwen3-30b-a3b", 120_008), ("mixtral-8x7b", 233_848)],
)
def test_the_first_layer_above_a_frozen_embedding_keeps_the_traced_bytes(model: str, bytes_per_token: int) -> None:
    """Own traces, LoRA of rank 16 in bf16: the first layer's input needs no gradient."""
    run = frozen(Adapter(16, "all-linear", False, 2))
    assert per_token(model, moe=model != "phi-3-mini", first=True, **run) == bytes_per_token


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


# --- gradients ---


@pytest.mark.parametrize("model", sorted(load().models))
def test_backward_makes_the_gradient_of_every_parameter_of_a_layer_once(model: str) -> None:
    """For every model of the catalog the tape's weights are the layer's parameters, in bf16 and under autocast."""
    a = arch(model)
    for moe in {index >= a.dense_layers for index in (0, a.layers - 1)}:
        for precision in ("bf16", "autocast"):
            shots = tape(model, moe=moe, precision=precision).backward()
            assert shots[-1].gradients == layer_parameters(a, -1 if moe else 0)
            assert sum(shot.making for shot in shots) == shots[-1].gradients


@pytest.mark.parametrize("model", sorted(load().models))
@pytest.mark.parametrize("targets", ["all-linear", ("o_proj",)])
def test_backward_makes_the_gradient_of_every_adapter_once(model: str, targets: str | tuple[str, ...]) -> None:
    """LoRA's parameters over all layers, as the architecture counts them from PEFT's rules; rank 16."""
    a = arch(model)
    adapter = Adapter(16, targets, False, 2)
    layers = [(False, a.dense_layers)] if a.dense_layers else []
    layers += [(True, a.layers - a.dense_layers)] if a.dense_layers < a.layers else []
    made = sum(tape(model, moe=moe, **frozen(adapter)).backward()[-1].gradients * n for moe, n in layers)
    assert made == lora_parameters(a, 16, targets)


# --- instants: what passes at each operation ---

LLAMA_FORWARD = """
input_layernorm: to fp32 = 6h
input_layernorm: square = 6h
input_layernorm: mean = 6h + 4
input_layernorm: rsqrt = 2h + 4
input_layernorm: scale = 6h
input_layernorm: to bf16 = 8h
input_layernorm: weight = 4h
q_proj = 2h + 2q
k_proj = 2h + 2q + 2kv
v_proj = 2h + 2q + 4kv
q: rotate = 2h + 10q + 4kv
k: rotate = 2h + 2q + 12kv
attention = 2h
o_proj = 4h
attention: add = 6h
post_attention_layernorm: to fp32 = 6h
post_attention_layernorm: square = 6h
post_attention_layernorm: mean = 6h + 4
post_attention_layernorm: rsqrt = 2h + 4
post_attention_layernorm: scale = 6h
post_attention_layernorm: to bf16 = 8h
post_attention_layernorm: weight = 4h
gate_proj = 2h + 2i
mlp: activation = 2h + 2i
up_proj = 2h + 4i
mlp: product = 2h + 2i
down_proj = 4h
mlp: add = 6h
"""
LLAMA_BACKWARD = """
mlp: add = 2h
down_proj = 2h + 2i
mlp: product = 2h + 6i
up_proj = 4h + 4i
mlp: activation = 4h + 4i
gate_proj = 6h + 2i
post_attention_layernorm: weight = 8h
post_attention_layernorm: to bf16 = 8h
post_attention_layernorm: scale = 14h + 4
post_attention_layernorm: rsqrt = 6h + 8
post_attention_layernorm: mean = 10h + 4
post_attention_layernorm: square = 22h
post_attention_layernorm: to fp32 = 8h
attention: add = 2h
o_proj = 2h + 2q
attention = 2h + 12q + 4kv + 4H
k: rotate = 2h + 2q + 12kv
q: rotate = 2h + 10q + 4kv
v_proj = 4h + 2q + 4kv
k_proj = 6h + 2q + 2kv
q_proj = 6h + 2q
input_layernorm: weight = 8h
input_layernorm: to bf16 = 8h
input_layernorm: scale = 14h + 4
input_layernorm: rsqrt = 6h + 8
input_layernorm: mean = 10h + 4
input_layernorm: square = 22h
input_layernorm: to fp32 = 8h
"""


def test_every_instant_of_a_llama_layers_forward_passes_what_lies_between_saved_tensors() -> None:
    """The residual, 2h, is there all along. In the norm x is cast (4h) and squared (4h) before x32 counts as saved.

    q, k and v pass until attention saves them; `rotate_half` has three temporaries of its input beside input and
    output: 2q + 2q + 6q. The MLP's pair is gate and act(gate), or act(gate), up and what is not saved of them yet.
    """
    found = passing("llama-3-8b", tape("llama-3-8b").forward())
    assert list(found) == list(table(LLAMA_FORWARD))
    check(found, LLAMA_FORWARD)


def test_every_instant_of_a_llama_layers_backward_passes_its_gradients() -> None:
    """The residual's gradient, 2h, is there all along; each operation adds what it receives and what it makes.

    `product`: 2i arrives, 2i for act(gate) and 2i for up are made. `scale`: the bf16 gradient is fp32 by now, 4h, makes
    4h for x and a product of 4h on the way to the row's scale, 4. `square`: 4h of x from before, 4h arrives, 4h is
    made, and `grad·(2·x)` has two more temporaries, 8h: 2 + 20. Flash: output's gradient 2q, dq 2q, dk and dv 4kv, an
    fp32 accumulator of dq 4q + 4H, and dk and dv for every query head before they are summed, 4q.
    """
    found = passing("llama-3-8b", tape("llama-3-8b").backward())
    assert list(found) == list(table(LLAMA_BACKWARD))
    check(found, LLAMA_BACKWARD)


def test_the_largest_instant_of_a_llama_layers_backward_is_that_of_the_mlps_product() -> None:
    """Closed form, checked against traces of six models: T·(form + 4i + 2h) and down_proj's gradient."""
    shots = tape("llama-3-8b").backward()
    product = next(s for s in shots if s.name == "mlp: product")
    total, _ = terms(product.saved + product.passing, arch("llama-3-8b"))
    assert total == form("18h + 4q + 4kv + 12i + 4H + 8")[0]
    assert product.gradients == 4096 * 14336


@pytest.mark.parametrize(
    ("model", "run", "moe", "op", "traced"),
    [
        # less the tied head's gradient, 576,000, and 4.5 for each `1 + weight` in fp32 that is still kept
        ("gemma-2-2b", {}, False, "mlp: product", 768_058 - 576_000 - 3 * 4.5),
        ("gemma-2-2b", {}, False, "post_attention_layernorm: square", 671_273 - 576_000 - 4.5),
        ("phi-3-mini", {}, False, "post_attention_layernorm: weight", 110_731),
        ("phi-3-mini", {}, False, "post_attention_layernorm: square", 147_588),
        ("phi-3-mini", {}, False, "input_layernorm: weight", 43_015),
        ("phi-3-mini", frozen(Adapter(16, "all-linear", False, 2)), False, "post_attention_layernorm: square", 141_508),
        ("mixtral-8x7b", {}, True, "experts: gate_up", 1_159_388),
        ("mixtral-8x7b", {}, True, "post_attention_layernorm: weight", 110_732),
        ("mixtral-8x7b", {}, True, "post_attention_layernorm: square", 159_876),
        ("qwen3-30b-a3b", {}, True, "experts: gate_up", 567_244),
        ("qwen3-30b-a3b", {}, True, "post_attention_layernorm: weight", 91_418),
        ("qwen3-30b-a3b", frozen(Adapter(16, "all-linear", False, 2)), True, "experts: weigh", 230_556),
        ("gpt-oss-20b", {"kernel": "eager"}, True, "softmax", 846_468),
        ("gpt-oss-20b", {}, True, "post_attention_layernorm: square", 130_564),
        ("deepseek-v3", {}, False, "gate_proj", 569_872),
        ("deepseek-v3", {}, False, "post_attention_layernorm: weight", 403_991),
        ("deepseek-v3", {"kernel": "efficient"}, False, "attention", 547_852),
        ("deepseek-v3", {"kernel": "eager"}, False, "softmax", 3_364_876),
        ("deepseek-v3", {"kernel": "eager"}, False, "input_layernorm: weight", 100_363),
    ],
)  # fmt: skip
def test_the_highest_instants_of_backward_are_those_traced(
    model: str, run: dict[str, Any], moe: bool, op: str, traced: float
) -> None:
    """Bytes a token that a layer has at one operation: saved, in passing and the weight's gradient being made.

    Own traces of transformers 5.23 at 2048 tokens in bf16, up to a byte a token for counters.
    """
    a = arch(model)
    dims = dimensions(a, 16)
    shots = {s.name: s for s in tape(model, moe=moe, **run).backward()}
    both = amount(shots[op].saved + shots[op].passing, dims)
    assert (both.bytes(2048, 2048) + 2 * shots[op].making) / 2048 == pytest.approx(traced, abs=1)


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


def test_a_late_norm_multiplies_its_weight_in_fp32() -> None:
    """Gemma and GPT-OSS: the weight's gradient makes a product of 4h, the bf16 cast comes after it."""
    made = tape("gemma-2-2b")
    check(passing("gemma-2-2b", made.forward()), """
        input_layernorm: weight = 6h
        input_layernorm: to bf16 = 8h
    """)  # fmt: skip
    check(passing("gemma-2-2b", made.backward()), """
        post_feedforward_layernorm: to bf16 = 6h
        post_feedforward_layernorm: weight = 14h
    """)  # fmt: skip
    oss = terms(tape("gpt-oss-20b", moe=True).saved(), arch("gpt-oss-20b"))[0]
    assert oss["h"] == 20  # two norms of 4h + 4h + 2h, where an early norm has 8h


def test_a_frozen_norm_makes_no_gradient_of_its_weight() -> None:
    """2h less in its own backward than where the weight's product is made: 6h, not 8h."""
    run = frozen(BF16_LORA)
    check(passing("llama-3-8b", tape("llama-3-8b", **run).backward()), "input_layernorm: weight = 6h")


def test_phi_3_slices_one_product_and_joins_the_gradients_again() -> None:
    """Views are free forward; backward each slice writes a gradient of the whole product, 2q + 4kv, zero elsewhere."""
    made = tape("phi-3-mini")
    check(passing("phi-3-mini", made.forward()), """
        q: slice = 2h + 2q + 4kv
        q: rotate = 2h + 10q + 4kv
        k: rotate = 2h + 4q + 12kv
        attention: contiguous = 2h + 2q
        gate, up = 2h + 4i
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


EXPERTS_FORWARD = """
router = 2h + 2E
router: to fp32 = 2h + 6E
router: softmax = 2h + 4E
router: top k = 2h + 4k
router: normalise = 2h + 4k
experts: sort = 2h + 2k·h
experts: gate_up = 2h + 4k·j
experts: gate, up = 2h + 4k·j
experts: activation = 2h + 2k·j
experts: product = 2h + 2k·j
experts: down = 2h + 2k·h
experts: sort weights = 2h + 4k + 2k·h
experts: weigh = 2h + 4k·h
experts: unsort = 2h + 8k·h
experts: sum = 6h + 4k·h
experts: to bf16 = 8h
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
    check(passing("mixtral-8x7b", made.forward()), EXPERTS_FORWARD)
    check(passing("mixtral-8x7b", made.backward()), EXPERTS_BACKWARD)
    # where nothing is kept, two variables hold the sorted rows and what the second product made of them
    before = passing("mixtral-8x7b", made.forward(grad=False))["experts: unsort"]
    assert before == form("4h + 12k·h")


def test_a_router_with_bf16_weights_leaves_the_experts_narrow() -> None:
    """Qwen3-MoE casts its weights, 2k: weighing makes 2kh, not 4kh, and no cast follows."""
    made = tape("qwen3-30b-a3b", moe=True)
    check(passing("qwen3-30b-a3b", made.forward()), """
        router: to bf16 = 2h + 2k
        experts: weigh = 2h + 2k·h
        experts: sum = 4h + 2k·h
    """)  # fmt: skip
    check(passing("qwen3-30b-a3b", made.backward()), """
        experts: weigh = 2h + 2k + 6k·h
        router: to bf16 = 4h + 6k
    """)  # fmt: skip


def test_gpt_oss_clamps_strided_halves_of_one_product() -> None:
    """The halves are views; clamping makes each contiguous, 2kj. The sigmoid reads a scaled gate, 2kj more."""
    made = tape("gpt-oss-20b", moe=True)
    check(passing("gpt-oss-20b", made.forward()), """
        router: top k = 2h + 2E + 2k
        router: softmax = 2h + 2k
        experts: up = 2h + 4k·j
        experts: clamp gate = 2h + 2k·j
        experts: clamp up = 2h + 4k·j
        experts: scale gate = 2h + 6k·j
        experts: sigmoid = 2h + 6k·j
        experts: glu = 2h + 4k·j
        experts: up + 1 = 2h + 6k·j
        experts: product = 2h + 2k·j
    """)  # fmt: skip
    check(passing("gpt-oss-20b", made.backward()), """
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
    shots = tape("deepseek-v3", moe=True).backward()
    router = next(s for s in shots if s.name == "router")
    assert terms(router.passing) == form("8h + 4E | 4W_gate")
    assert terms(router.saved)[1] == form("0 | 4W_gate")[1]


def test_shared_experts_run_beside_the_routed_ones() -> None:
    """The input and the routed experts' sum wait, 2h each, beside the residual; backward they share a gradient."""
    made = tape("deepseek-v3", moe=True)
    check(passing("deepseek-v3", made.forward()), """
        shared_up_proj = 4h + 4s
        shared_down_proj = 6h
        experts: add shared = 8h
    """)  # fmt: skip
    check(passing("deepseek-v3", made.backward()), """
        experts: add shared = 2h
        shared_down_proj = 2h + 2s
        shared_gate_proj = 6h + 2s
    """)  # fmt: skip


def test_qwen2_moe_weighs_its_shared_expert() -> None:
    """Backward of the weighing: 2h for the expert, and a product of 2h that is summed to one number a row."""
    made = tape("qwen1.5-moe-a2.7b", moe=True)
    check(passing("qwen1.5-moe-a2.7b", made.forward()), """
        shared_expert_gate = 6h + 2
        shared: sigmoid = 6h + 2
        shared: weigh = 6h
    """)  # fmt: skip
    check(passing("qwen1.5-moe-a2.7b", made.backward()), """
        shared: weigh = 6h + 2
        shared: sigmoid = 4h + 4
    """)  # fmt: skip


def test_an_fp32_adapter_beside_a_bf16_linear_works_in_fp32() -> None:
    """o_proj: y 2h, the residual 2h and the norm's output 2h wait; the input is cast, 4q, and named by PEFT's variable
    to the end, and dropped out, 4q; B puts out 4h, scaled 4h.
    """
    made = tape("llama-3-8b", **frozen(Adapter(64, ("o_proj",), True, 4)))
    check(passing("llama-3-8b", made.forward()), """
        o_proj: LoRA: to fp32 = 6h + 4q
        o_proj: LoRA dropout = 6h + 8q
        o_proj: LoRA A = 6h + 4r + 4q
        o_proj: LoRA B = 10h + 4q
        o_proj: LoRA scale = 14h + 4q
        o_proj: LoRA add = 14h + 4q
        o_proj: LoRA: to bf16 = 10h
    """)  # fmt: skip
    check(passing("llama-3-8b", made.backward()), """
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
    check(passing("llama-3-8b", made.backward()), """
        o_proj: LoRA add = 2h
        o_proj: LoRA scale = 4h
        o_proj: LoRA B = 4h + 2r
        o_proj: LoRA A = 2h + 2r + 2q
        o_proj = 2h + 4q
    """)  # fmt: skip


def test_a_quantised_linear_is_dequantised_whole_in_forward_and_backward() -> None:
    """NF4 weights become bf16 for each multiplication: 2 bytes an element, gone after it; the head stays bf16."""
    made = tape("llama-3-8b", **frozen(BF16_LORA, quantised=True))
    for shots in (made.forward(), made.backward()):
        found = passing("llama-3-8b", shots)
        assert found["down_proj"][1] == {"W_down_proj": 2}
        assert found["q_proj"][1] == {"W_q_proj": 2}
        assert found["mlp: product"][1] == {}


def test_old_bitsandbytes_keeps_the_input_of_every_four_bit_product() -> None:
    """MatMul4Bit up to 0.43.1 stores (A, B), so that a frozen layer keeps what a trained one's linears do: the
    norms' outputs that q, k, v and gate, up share, 2h each, and the MLP's product, 2i. Flash keeps its output anyway.
    """
    new, old = (per_token("llama-3-8b", **frozen(quantised=True, keeps_inputs=kept)) for kept in (False, True))
    assert old - new == 4 * 4096 + 2 * 14336


def test_a_quantised_model_of_fp32_dequantises_to_fp32() -> None:
    """The copy has the type that the multiplication runs in."""
    found = passing("llama-3-8b", tape("llama-3-8b", **frozen(quantised=True, precision="fp32")).forward())
    assert found["q_proj"][1] == {"W_q_proj": 4}


AUTOCAST_FORWARD = """
input_layernorm: square = 4h
input_layernorm: weight = 4h
q_proj: to bf16 = 6h
q_proj: weight to bf16 = 6h | 2W_q_proj
q_proj = 4h + 2q
v_proj = 4h + 2q + 4kv
q: rotate = 18q + 4kv + 4h
k: rotate = 4q + 20kv + 4h
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
gate_proj: to bf16 = 14h
post_attention_layernorm: weight = 16h
post_attention_layernorm: square = 20h
attention: add = 6h
attention = 4h + 12q + 4kv + 4H
k: to bf16 = 4h + 2q + 8kv
q: to bf16 = 4h + 6q + 6kv
k: rotate = 4h + 4q + 20kv
q: rotate = 4h + 18q + 4kv
v_proj: to bf16 = 10h + 2q + 2kv
q_proj = 10h + 2q | 2W_q_proj
q_proj: to bf16 = 14h
"""


def test_autocast_casts_inputs_and_weights_of_every_linear() -> None:
    """The residual stream is fp32 and saved by the norm as it is; cos and sin are fp32, so rotation widens: 4q + 12q.

    The block's variables name rotated queries and keys, 4q + 4kv, until it returns, beside the casts the kernel keeps.

    A weight's bf16 gradient, 2 bytes an element, passes until it is cast to fp32; an input's gradient is bf16 and fp32
    at once in its cast, beside the sum of those before: 4h + 4h + 2h + 4h.
    """
    made = tape("llama-3-8b", precision="autocast")
    check(passing("llama-3-8b", made.forward()), AUTOCAST_FORWARD)
    check(passing("llama-3-8b", made.backward()), AUTOCAST_BACKWARD)
    making = {s.name: s.making for s in made.backward()}
    assert making["q_proj: weight to bf16"] == 4096 * 4096
    assert making["q_proj"] == 0


# --- blocks that other families are made of ---

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 10}


def small(family: str, **fields: Any) -> Architecture:
    return from_config({"model_type": family, **SIZES, "num_key_value_heads": 2, **fields})


@pytest.mark.parametrize(
    ("family", "fields", "closed_form"),
    [
        # queries and keys normed over all heads, 8 each; no norm before a block, whose input, 2h, its linears keep
        ("olmo2", {}, "20h + 12q + 12kv + 8i + 4H + 16"),
        # Gemma 2's and norms of queries and keys with their fp32 products: 8(q + kv) + 4(H + K)
        ("gemma3_text", {}, "36h + 12q + 12kv + 8i + 8H + 4K + 16"),
        # Llama's: a multiple of a block's output keeps nothing
        ("granite", {}, "16h + 4q + 4kv + 8i + 4H + 8"),
        # four norms of 6h + 4; attention's output twice; cos and sin of half a head, 2·8 of 2 bytes a position
        ("glm4", {"head_dim": 16}, "28h + 6q + 4kv + 8i + 4H + 16 | 2tables·S"),
        # LayerNorm keeps its own input, 2h + 8, and the linears its output, 2h; the MLP is one activation, 4i
        ("starcoder2", {}, "8h + 4q + 4kv + 4i + 4H + 16"),
        # one norm for both blocks; GELU written out keeps its input, tanh, tanh + 1 and half the input: 8i
        ("phi", {}, "4h + 6q + 4kv + 10i + 4H + 8"),
        # both norms keep the same input; v is a view of the product of q, k and v: 2q + 4kv
        ("gpt_neox", {"num_key_value_heads": None}, "6h + 8q + 6kv + 4i + 4H + 16"),
        # the difference from the mean twice and their product, in fp32, 12h + 4; attention and MLP read one output, 2h
        ("cohere2", {}, "14h + 4q + 4kv + 8i + 4H + 4"),
        # ReLU keeps its output, and its square is what the next linear keeps
        ("arcee", {}, "16h + 4q + 4kv + 4i + 4H + 8"),
    ],
)  # fmt: skip
def test_a_layer_of_other_blocks_keeps_what_was_counted(family: str, fields: dict[str, Any], closed_form: str) -> None:
    """Protects each family's saved tensors; bf16, flash attention, full training; all were traced."""
    a = small(family, **fields)
    assert terms(Program(Run(a)).layer(moe=False).saved(), a) == form(closed_form)


def test_dropout_keeps_a_byte_an_element_where_a_model_trains() -> None:
    """Seed-OSS: masks of both blocks' outputs, h each; eager attention's of the probabilities, H·S."""
    a = small("seed_oss", head_dim=16)

    def kept(**run: Any) -> Any:
        return terms(Program(Run(a, **run)).layer(moe=False).saved(), a)

    assert kept() == form("16h + 4q + 4kv + 8i + 4H + 8")
    assert kept(training=True) == form("18h + 4q + 4kv + 8i + 4H + 8")
    assert kept(training=True, kernel="eager") == form("18h + 8q + 8i + 7H·S + 8")


def test_below_the_first_layer_a_dropped_out_embedding_keeps_its_mask() -> None:
    """StarCoder 2: h, where its output wants a gradient; adapters with checkpointing make it a leaf, 2h more."""
    a = small("starcoder2", embedding_dropout=0.1)
    scaled = small("granite")

    def kept(a: Architecture, recompute: bool = False, **run: Any) -> Any:
        return terms(activations.below_layers(Run(a, **run), recompute), a)

    assert kept(a, training=True) == form("h")
    assert kept(a) == form("0")
    assert kept(a, training=True, **frozen(BF16_LORA)) == form("0")
    assert kept(a, recompute=True, training=True, **frozen(BF16_LORA)) == form("3h")
    assert kept(scaled, recompute=True, **frozen(BF16_LORA)) == form("2h")
    assert kept(scaled, recompute=True) == kept(scaled, **frozen(BF16_LORA)) == form("0")


def test_checkpoints_keep_the_masks_of_eager_attention() -> None:
    """One in the type of the residual stream; two where some layers slide and others do not."""

    def kept(model: str, recompute: bool = True, **run: Any) -> Any:
        return terms(activations.below_layers(Run(arch(model), **run), recompute), arch(model))

    assert kept("llama-3-8b", kernel="eager") == form("2S")
    assert kept("llama-3-8b", kernel="eager", precision="autocast") == form("4S")
    assert kept("gemma-3-1b", kernel="eager") == form("4S")
    assert kept("mistral-7b-v0.1", kernel="eager") == form("2S")
    assert (
        kept("llama-3-8b", kernel="math")
        == kept("llama-3-8b", kernel="masked")
        == kept("llama-3-8b", False, kernel="eager")
        == form("0")
    )


@pytest.mark.parametrize(
    ("model", "run", "closed_form"),
    [
        # q, v, gate and down of the seven; SDPA's output and log-sum-exp
        ("llama-3-8b", {}, "4q + 2kv + 2i + 2h + 4H"),
        # the flash-attn package's operator is not in the list, and eager attention's products are `bmm`
        ("llama-3-8b", {"packaged": True}, "2q + 2kv + 2i + 2h"),
        ("llama-3-8b", {"kernel": "eager"}, "2q + 2kv + 2i + 2h"),
        ("llama-3-8b", {"kernel": "masked"}, "4q + 2kv + 2i + 2h + 4H"),
        ("llama-3-8b", {"precision": "fp32", "kernel": "efficient"}, "8q + 4kv + 4i + 4h + 4H"),
        # with a bias a linear is `addmm`: the first product is o
        ("qwen2.5-7b", {}, "2h + 2i + 2q + 4H"),
        ("phi-3-mini", {"packaged": True}, "2q + 4kv + 4i"),  # qkv and gate_up
        ("gpt-oss-20b", {"moe": True, "kernel": "eager"}, "0"),
        # q, v and the router, no grouped products
        ("mixtral-8x7b", {"moe": True}, "4q + 2kv + 2E + 4H"),
        # the shared expert runs first: o, its up, the router
        ("qwen1.5-moe-a2.7b", {"moe": True}, "2h + 2s + 2E + 2q + 4H"),
        # q, the latents' expansion, the router in fp32, the shared experts' up
        ("deepseek-v2-lite", {"moe": True, "kernel": "efficient"}, "2q + 2kvb + 4E + 2s + 2o + 4H"),
        # A and B follow each linear: q, its B, A of k, v, its B, A of o, gate, its B, A of up, down, its B
        ("llama-3-8b", frozen(BF16_LORA), "6q + 4kv + 4i + 4h + 6r + 4H"),
    ],
)
def test_selective_checkpointing_keeps_every_second_product(model: str, run: dict[str, Any], closed_form: str) -> None:
    """torchtitan's policy, counted by hand over the products of a layer in their order; beside the layer's input."""
    a, fields = arch(model), dict(run)
    moe = fields.pop("moe", False)
    made = Program(Run(a, **fields), -1 if moe else 0, selective=True).layer(moe=moe)
    assert terms(made.kept(), a) == form(closed_form)


def test_autocast_keeps_bf16_copies_of_adapters_in_fp32() -> None:
    """o_proj of Llama 3 8B at rank 64: two matrices of 64 · 4096, of two bytes; none of an adapter in bf16."""
    fp32, bf16 = (
        tape("llama-3-8b", **frozen(Adapter(64, ("o_proj",), False, b), precision="autocast")).saved() for b in (4, 2)
    )
    assert fp32.fixed.get("", 0) - bf16.fixed.get("", 0) == 2 * 2 * 64 * 4096


def test_one_key_head_for_all_is_repeated_as_a_view_until_autocast_writes_it_out() -> None:
    """Gemma 3 1B beyond its window: k and v stay as they are, 4kv; rotated keys are fp32 and cast at full width."""
    bf16 = tape("gemma-3-1b", kernel="masked").saved()
    assert terms(bf16, arch("gemma-3-1b")) == form("36h + 12q + 12kv + 8i + 8H + 4K + 2S + 16")
    cast = tape("gemma-3-1b", kernel="masked", precision="autocast").saved()
    flash = tape("gemma-3-1b", precision="autocast").saved()
    assert cast.tokens["q"] - flash.tokens["q"] == 2  # k, of which flash keeps 2kv
    assert cast.tokens["kv"] - flash.tokens["kv"] == -2


# --- the final norm ---


def test_the_final_norm_keeps_its_input_in_fp32_and_what_its_weight_multiplies() -> None:
    """4h + 2h + 4 of its own; its output, 2h, the head keeps: 8h + 4 in all, as traced."""
    saved = Program(Run(arch("llama-3-8b"))).final_norm().saved()
    assert terms(saved) == form("6h + 4")
    segment = activations.final_norm(Run(arch("llama-3-8b")))
    assert segment.saved.bytes(10, 10) == 10 * (6 * 4096 + 4)
    assert max(s.passing.tokens for s in segment.backward) == 20 * 4096
    assert segment.backward[0].gradients == 4096


# --- what few models tell apart ---


def test_a_symbol_stands_for_the_weight_of_the_layer_that_has_it() -> None:
    """DeepSeek V2 Lite: down_proj is its only dense layer's, 10,944 wide; without adapters nothing has a rank."""
    dims = dimensions(arch("deepseek-v2-lite"))
    assert dims["W_down_proj"] == 10_944 * 2048
    assert dims["W_experts_down_proj"] == 64 * 1408 * 2048
    assert dims["r"] == 0


def test_a_single_dense_layer_among_many_is_the_first() -> None:
    """Its own down_proj, not one of the layers of experts that follow."""
    segment = activations.layer(Run(arch("deepseek-v2-lite")), moe=False)
    assert max(shot.making for shot in segment.backward) == 10_944 * 2048


def test_a_bias_is_counted_with_its_weight() -> None:
    """Three heads of five in seven dimensions: 15 · 7 + 15, 120; sizes that are powers of two share no bit."""
    small = replace(arch("qwen2.5-0.5b"), hidden=7, heads=3, kv_heads=3, head_dim=5)
    ops = {op.name: op for op in Program(Run(small), 0).layer(moe=False).ops}
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


def test_an_fp32_softmax_of_fp32_scores_casts_nothing() -> None:
    """`softmax(dtype=torch.float32)` of eager attention."""
    names = [{op.name for op in tape("llama-3-8b", kernel="eager", precision=p).ops} for p in ("bf16", "fp32")]
    assert ["softmax: to fp32" in found for found in names] == [True, False]


def test_a_layers_input_is_its_own_unless_it_is_counted_elsewhere() -> None:
    """A checkpoint, or what a stage before has sent, is counted where it lies."""
    run = Run(arch("llama-3-8b"), precision="fp32")
    own, default, lent = (
        activations.layer(run, moe=False, **how) for how in ({"counted": False}, {}, {"counted": True})
    )
    assert own == default
    assert own.saved.tokens - lent.saved.tokens == 4 * 4096


def test_experts_in_the_last_layer_alone_are_found() -> None:
    """DeepSeek V2 Lite with 26 dense layers of 27: sizes and gradients of the last are those of its 64 experts."""
    odd = replace(arch("deepseek-v2-lite"), dense_layers=26)
    gate_up = 64 * 2 * 1408 * 2048
    assert dimensions(odd)["W_experts_gate_up_proj"] == gate_up
    assert Program(Run(odd)).elements["experts_gate_up_proj"] == gate_up
    assert max(shot.making for shot in activations.layer(Run(odd), moe=True).backward) == gate_up
