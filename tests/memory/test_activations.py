"""A whole layer: the bytes it keeps as they were traced, the instants of its passes, and what checkpointing leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from architectures import FALCON
from formulas import form, terms
from tapes import (
    BF16_LORA,
    arch,
    backward_of,
    check,
    forward_of,
    frozen,
    of_kind,
    passing,
    per_token,
    small,
    table,
    tape,
)

from calc.autograd.polynomial import amount
from calc.autograd.tape import Tensor, of
from calc.catalog.catalog import load
from calc.memory import activations
from calc.memory.activations import Program
from calc.memory.run import Adapter, Run, dimensions
from calc.models.architecture import Architecture, layer_parameters, layer_tensors
from calc.models.hf_config import from_config
from calc.models.releases import with_scores
from calc.models.slices import stage


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


def test_a_frozen_layer_without_adapters_keeps_only_what_leads_to_its_input() -> None:
    """A layer between adapters elsewhere: norms 4h + 4, attention as ever, the MLP's 6i."""
    kept = terms(tape("llama-3-8b", **frozen()).saved(), arch("llama-3-8b"))
    assert kept == form("8h + 4q + 4kv + 6i + 4H + 8")


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [("phi-3-mini", 133_380), ("qwen3-30b-a3b", 120_008), ("mixtral-8x7b", 233_848)],
)
def test_the_first_layer_above_a_frozen_embedding_keeps_the_traced_bytes(model: str, bytes_per_token: int) -> None:
    """Own traces, LoRA of rank 16 in bf16: the first layer's input needs no gradient."""
    run = frozen(Adapter(16, "all-linear", False, 2))
    assert per_token(model, moe=model != "phi-3-mini", first=True, **run) == bytes_per_token


@pytest.mark.parametrize("model", sorted(load().models))
def test_backward_makes_the_gradient_of_every_parameter_of_a_layer_once(model: str) -> None:
    """For every model of the catalog the tape's weights are the layer's parameters, in bf16 and under autocast."""
    a = arch(model)
    for moe in {index >= a.dense_layers for index in (0, a.layers - 1)}:
        for precision in ("bf16", "autocast"):
            shots = backward_of(tape(model, moe=moe, precision=precision))
            spec = a.specs[-1 if moe else 0]
            unmade = sum(t.elements for t in layer_tensors(a, spec) if ".indexer." in t.name)  # it has no backward
            assert shots[-1].gradients == layer_parameters(a, spec) - unmade
            assert sum(shot.making for shot in shots) == shots[-1].gradients


LLAMA_FORWARD = """
input_layernorm: to fp32 = 6h
input_layernorm: square = 6h
input_layernorm: mean = 6h + 4
input_layernorm: rsqrt = 2h + 4
input_layernorm: scale = 6h
input_layernorm: to bf16 = 8h
input_layernorm: weight = 8h
q_proj = 2h + 2q
q: heads = 2h + 2q
k_proj = 2h + 2q + 2kv
k: heads = 2h + 2q + 2kv
v_proj = 2h + 2q + 4kv
q: rotate = 2h + 10q + 4kv
k: rotate = 2h + 4q + 12kv
attention = 2h
o_proj = 4h
attention: add = 6h
post_attention_layernorm: to fp32 = 8h
post_attention_layernorm: square = 8h
post_attention_layernorm: mean = 8h + 4
post_attention_layernorm: rsqrt = 4h + 4
post_attention_layernorm: scale = 8h
post_attention_layernorm: to bf16 = 10h
post_attention_layernorm: weight = 10h
gate_proj = 4h + 2i
mlp: activation = 4h + 2i
up_proj = 4h + 4i
mlp: product = 4h + 2i
down_proj = 6h
mlp: add = 8h
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
k: heads = 4h + 2q + 4kv
k_proj = 6h + 2q + 2kv
q: heads = 4h + 4q
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
    """The residual, 2h, is there all along, and the layer's input, 2h, which the model's loop names, beside it once
    attention is added. In the norm x is cast (4h) and squared (4h) before x32 counts as saved.

    What a norm scales in fp32, 4h, has a name until it returns, and so has q, 2q, until k is rotated, too.

    q, k and v pass until attention saves them; `rotate_half` has three temporaries of its input beside input and
    output: 2q + 2q + 6q. The MLP's pair is gate and act(gate), or act(gate), up and what is not saved of them yet.
    """
    found = passing("llama-3-8b", forward_of(tape("llama-3-8b")))
    assert list(found) == list(table(LLAMA_FORWARD))
    check(found, LLAMA_FORWARD)


def test_every_instant_of_a_llama_layers_backward_passes_its_gradients() -> None:
    """The residual's gradient, 2h, is there all along; each operation adds what it receives and what it makes.

    `product`: 2i arrives, 2i for act(gate) and 2i for up are made. `scale`: the bf16 gradient is fp32 by now, 4h, makes
    4h for x and a product of 4h on the way to the row's scale, 4. `square`: 4h of x from before, 4h arrives, 4h is
    made, and `grad·(2·x)` has two more temporaries, 8h: 2 + 20. Flash: output's gradient 2q, dq 2q, dk and dv 4kv, an
    fp32 accumulator of dq 4q + 4H, and dk and dv for every query head before they are summed, 4q. `heads`: what lies
    head by head is copied, to be seen as a matrix of tokens.
    """
    found = passing("llama-3-8b", backward_of(tape("llama-3-8b")))
    assert list(found) == list(table(LLAMA_BACKWARD))
    check(found, LLAMA_BACKWARD)


def test_the_largest_instant_of_a_llama_layers_backward_is_that_of_the_mlps_product() -> None:
    """Closed form, checked against traces of six models: T·(form + 4i + 2h) and down_proj's gradient."""
    shots = backward_of(tape("llama-3-8b"))
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
    shots = {s.name: s for s in backward_of(tape(model, moe=moe, **run))}
    both = amount(shots[op].saved + shots[op].passing, dims)
    assert (both.bytes(2048, 2048) + 2 * shots[op].making) / 2048 == pytest.approx(traced, abs=1)


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
        # one input of both norms, their outputs, 4h; k and v written for every query: q, k, v and what comes out, 8q
        ("falcon", FALCON, "6h + 8q + 4i + 4H + 16"),
        # Falcon 7B: one norm, and one key and one value
        ("falcon", {"num_kv_heads": 4, "ffn_hidden_size": 2816}, "4h + 4q + 4kv + 4i + 4H + 8"),
        # the difference from the mean twice and their product, in fp32, 12h + 4; attention and MLP read one output, 2h
        ("cohere2", {}, "14h + 4q + 4kv + 8i + 4H + 4"),
        # norms of queries and keys: 6(q + kv) + 4(H + K); of a first half the input, times its slope, of the other an
        # exponential, less the input, a byte for which it is, and what comes out: 11i
        ("apertus", {}, "16h + 10q + 10kv + 11i + 8H + 4K + 8"),
        # the same norms behind the rotation
        ("hunyuan_v1_dense", {}, "16h + 10q + 10kv + 8i + 8H + 4K + 8"),
        # no weight: an fp32 copy of the input, its mean and scale, and what comes out
        ("olmo", {}, "12h + 4q + 4kv + 8i + 4H + 16"),
        ("nemotron", {}, "8h + 6q + 4kv + 4i + 4H + 16"),
        # ReLU keeps its output, and its square is what the next linear keeps
        ("arcee", {}, "16h + 4q + 4kv + 4i + 4H + 8"),
    ],
)  # fmt: skip
def test_a_layer_of_other_blocks_keeps_what_was_counted(family: str, fields: dict[str, Any], closed_form: str) -> None:
    """Protects each family's saved tensors; bf16, flash attention, full training; all were traced."""
    a = small(family, **fields)
    assert terms(Program(Run(a)).layer().saved(), a) == form(closed_form)


def test_sdpas_plain_mathematics_keeps_fp32_probabilities_of_each_pair() -> None:
    """Falcon 7B: a product reads the lone key and value of one sequence again for each head, and copies several."""
    a = small("falcon", num_kv_heads=4, ffn_hidden_size=2816)
    kept = {on: Program(Run(a, kernel="math", single=on)).layer().saved() for on in (True, False)}
    assert terms(kept[True], a) == form("4h + 6q + 8kv + 4i + 4H·S + 8")
    assert terms(kept[False], a) == form("4h + 14q + 4i + 4H·S + 8")


def test_gpt_js_scores_are_fp32() -> None:
    """Queries, keys and scores in fp32, the latter's softmax too, and its copy in 16 bits; one norm, and a GELU of many
    operations. Cos and sin of 8 dimensions for queries and for keys: 4 · 8 numbers a position.
    """
    fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 10, "rotary_dim": 8, "model_type": "gptj"}
    a = from_config(fields)
    kept = Program(Run(a, kernel="eager", single=True)).layer().saved()
    assert kept.tokens["H·S"] == 4 + 2
    assert [kept.tokens[name] for name in ("q", "kv", "o")] == [4, 4 + 2, 2]
    assert a.rotary_tables == 32


def test_codegens_queries_keys_and_tables_are_fp32_from_the_rotation_on() -> None:
    """GPT-J casts what its table of sines gives, CodeGen does not, so that its products read fp32 without a cast; it
    keeps as much but for the tables, and the copies that it makes of queries, keys and values are gone by then.
    """
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 10, "rotary_dim": 8}
    gptj, codegen = (
        Program(Run(from_config({"model_type": family, **sizes}), kernel="eager", single=True)).layer().saved()
        for family in ("gptj", "codegen")
    )
    assert gptj.tokens == codegen.tokens
    assert [kept.fixed["tables·S"] for kept in (gptj, codegen)] == [2, 4]


def test_dropout_keeps_a_byte_an_element_where_a_model_trains() -> None:
    """Seed-OSS: masks of both blocks' outputs, h each; eager attention's of the probabilities, H·S."""
    a = small("seed_oss", head_dim=16)

    def kept(**run: Any) -> Any:
        return terms(Program(Run(a, **run)).layer().saved(), a)

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


@pytest.mark.parametrize(("precision", "b", "per_token"), [("bf16", 2, "2r"), ("bf16", 4, "4r"), ("autocast", 4, "2r")])
def test_an_adapter_beside_the_embedding_keeps_its_rows(precision: Any, b: int, per_token: str) -> None:
    """The second matrix's input, r a token in the type of the adapter or, under autocast, in bf16 beside the matrix's
    bf16 copy; with checkpointing the frozen rows are a leaf where a hook was there first. peft 0.21.2
    `tuners/lora/layer.py`, `Embedding.forward`; traced.
    """
    a = small("llama")
    run = Run(a, precision, trained=False, adapter=Adapter(4, ("embed_tokens",), False, b))
    saved = activations.below_layers(run, False)
    assert saved.tokens == {"r": float(per_token.removesuffix("r"))}
    assert amount(saved, dimensions(a, 4)).fixed == (2 * 4 * a.hidden if precision == "autocast" else 0)
    leaf = activations.below_layers(run, True).tokens["h"]
    assert leaf == run.residual
    assert "h" not in activations.below_layers(replace(run, hooked=False), True).tokens
    assert "r" not in activations.below_layers(Run(a, **frozen(BF16_LORA)), True).tokens


def test_tokens_of_images_are_put_in_a_copy_of_a_leaf() -> None:
    """Beside adapters with checkpointing the embedding's output is a leaf, 2h, and the copy the first checkpoint."""
    a = small("llama")
    run = Run(a, sees=True, **frozen(BF16_LORA))
    assert terms(activations.below_layers(run, True), a) == form("2h")
    assert terms(activations.below_layers(run, False), a) == form("0")
    assert terms(activations.below_layers(Run(a, sees=True), True), a) == form("0")


def activated(family: str, precision: str = "bf16") -> tuple[Any, list[Any], list[Any]]:
    """Of a small model's activation: what it keeps, each output's bytes an element, each backward's scratch."""
    a = small(family)
    program = Program(Run(a, precision=precision))
    program.activated(Tensor(of(i=1), 2))
    ops = program.tape.ops
    return terms(program.tape.saved(), a), [op.outs[0].b for op in ops], [terms(op.backward_scratch, a) for op in ops]


def test_a_squared_relu_keeps_its_output_once_and_two_more_while_it_squares() -> None:
    """`ReLUSquaredActivation`: ReLU keeps what it puts out, which the square reads."""
    assert activated("arcee") == (form("2i"), [2, 2], [form("0"), form("4i")])


def test_autocast_squares_a_relu_in_fp32() -> None:
    """`pow` is on autocast's list for fp32: ReLU keeps its output, 2i, and the square its copy, 4i."""
    kept, each, _ = activated("arcee", "autocast")
    assert (kept, each) == (form("6i"), [2, 4, 4])


def test_gpt_neoxs_gelu_keeps_seven_tensors() -> None:
    """`FastGELUActivation`: x and its part, x scaled and its square + 1, tanh, half of x, and tanh + 1: 14i."""
    a = replace(small("gpt_neox", num_key_value_heads=None), activation="gelu_fast")
    program = Program(Run(a))
    program.activated(Tensor(of(i=1), 2))
    assert terms(program.tape.saved(), a) == form("14i")


def test_both_sides_of_xielu_have_a_slope_that_is_trained() -> None:
    """The input, times the slope, the exponential and it less the input, 8i, and a byte for the side; frozen 7i."""
    a = small("apertus")
    for trained, kept in ((True, "9i"), (False, "7i")):
        program = Program(Run(a, trained=trained))
        program.activated(Tensor(of(i=1), 2))
        assert terms(program.tape.saved(), a) == form(kept)
        assert sum(op.weight for op in program.tape.ops) == 2 * trained


@pytest.mark.parametrize("kind", ["relu", "gelu", "silu"])
def test_other_activations_are_one_operation(kind: str) -> None:
    a = replace(small("arcee"), activation=kind)
    program = Program(Run(a))
    program.activated(Tensor(of(i=1), 2))
    assert terms(program.tape.saved(), a) == form("2i")
    assert len(program.tape.ops) == 1


def test_the_first_gpts_gelu_keeps_four_tensors_and_under_autocast_cubes_in_fp32() -> None:
    """`NewGELUActivation`: x, tanh, half of x, tanh + 1; under autocast `pow` and what follows it run in fp32."""
    nothing = form("0")
    assert activated("phi") == (form("8i"), [2] * 8, [nothing, form("4i"), *[nothing] * 6])
    kept, each, scratch = activated("phi", "autocast")
    assert kept == form("14i")
    assert each == [2, 4, 4, 4, 4, 4, 4, 4, 4]
    assert scratch == [nothing, nothing, form("8i"), *[nothing] * 6]


@pytest.mark.parametrize(("precision", "own"), [("bf16", [2, 2]), ("autocast", [4])])
def test_a_sums_gradient_is_an_inputs_own_where_both_are_as_wide(precision: str, own: list[int]) -> None:
    program = Program(Run(small("phi"), precision=precision))
    program.activated(Tensor(of(i=1), 2))
    (add,) = [op for op in program.tape.ops if op.name == "mlp: add cube"]
    assert [t.b for t in add.aliases] == own


def test_checkpoints_keep_the_masks_of_eager_attention() -> None:
    """One in the type of the residual stream; two where some layers slide and others do not."""

    def kept(model: str, recompute: bool = True, **run: Any) -> Any:
        return terms(activations.below_layers(Run(arch(model), **run), recompute), arch(model))

    assert kept("llama-3-8b", kernel="eager") == form("2S")
    assert kept("llama-3-8b", kernel="eager", precision="autocast") == form("4S")
    assert kept("gemma-3-1b", kernel="eager") == form("4S")
    assert kept("mistral-7b-v0.1", kernel="eager") == form("2S")
    one = arch("gemma-3-1b")
    one = replace(one, specs=(one.specs[0], *[spec._replace(slides=False) for spec in one.specs[1:]]))
    assert one.sliding_layers == (0,)
    assert terms(activations.below_layers(Run(one, kernel="eager"), True), one) == form("4S")
    assert (
        kept("llama-3-8b", kernel="math")
        == kept("llama-3-8b", kernel="masked")
        == kept("llama-3-8b", False, kernel="eager")
        == form("0")
    )


def test_layers_hand_on_the_keys_that_they_choose() -> None:
    """2,048 keys of four bytes in GLM-5's 78 layers, but for the last, and in 21 of GLM-5.2's; DeepSeek's keep none."""

    def handed(model: str) -> float:
        run, dims = Run(arch(model)), dimensions(arch(model))
        return sum(amount(activations.handed_on(run, spec), dims).tokens for spec in arch(model).specs[:-1])

    assert (handed("glm-5"), handed("glm-5.2"), handed("deepseek-v3.2")) == (77 * 8192, 21 * 8192, 0)


def test_keys_are_copied_for_every_query_of_several_sequences_alone() -> None:
    """128 numbers of a key in fp32 for each pair of positions: the product of one sequence reads them as they are."""
    model = arch("deepseek-v3.2")
    one, several = (Program(Run(model, single=single), model.specs[-1]).layer() for single in (True, False))
    scratch = [next(op.scratch for op in tape.ops if op.name == "indexer") for tape in (one, several)]
    apart = [amount(size, dimensions(model)).pairs for size in scratch]
    assert apart[1] - apart[0] == 128 * 4


@pytest.mark.parametrize(
    ("model", "elements"),
    [
        # of q, k, v, o, gate, up and down the odd ones
        ("llama-3-8b", 32 * (4096 * 4096 + 4096 * 1024 + 2 * 4096 * 14_336)),
        # of q, k, v, o and the router: experts multiply in groups
        ("mixtral-8x7b", 32 * (4096 * 4096 + 4096 * 1024 + 4096 * 8)),
        # of q, kv_a, kv_b, o and then gate, up and down of the first layer, or the router and three of shared experts
        (
            "deepseek-v2-lite",
            27 * (2048 * 3072 + 512 * 4096) + 2 * 2048 * 10_944 + 26 * (2048 * 64 + 2048 * 2816),
        ),
        # of q_a, q_b, kv_a, kv_b, o and then gate, up and down of three layers, or the router and the shared three
        (
            "deepseek-v3",
            61 * 7168 * (1536 + 576 + 16_384) + 3 * 7168 * 18_432 + 58 * 2 * 7168 * 2048,
        ),
    ],
)
def test_the_matrices_that_selective_checkpointing_multiplies_with_once(model: str, elements: int) -> None:
    """Configurations of the models, counted by hand."""
    assert activations.kept_products(Run(arch(model))) == elements


def test_an_adapters_matrices_count_among_the_products() -> None:
    """Rank 2 on q_proj: q, A, B, k, v, o, gate, up, down; q, B, v, gate and down are kept."""
    run = Run(arch("llama-3-8b"), trained=False, adapter=Adapter(2, ("q_proj",), False, 2))
    kept = 4096 * 4096 + 2 * 4096 + 4096 * 1024 + 2 * 4096 * 14_336
    assert activations.kept_products(run) == 32 * kept


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
    made = Program(Run(a, **fields), of_kind(a, moe), selective=True).layer()
    assert terms(made.kept(), a) == form(closed_form)


def test_the_final_norm_keeps_its_input_in_fp32_and_what_its_weight_multiplies() -> None:
    """4h + 2h + 4 of its own; its output, 2h, the head keeps: 8h + 4 in all, as traced."""
    saved = Program(Run(arch("llama-3-8b"))).final_norm().saved()
    assert terms(saved) == form("6h + 4")
    segment = activations.final_norm(Run(arch("llama-3-8b")))
    assert segment.saved.bytes(10, 10) == 10 * (6 * 4096 + 4)
    assert max(s.passing.tokens for s in segment.backward) == 20 * 4096
    assert segment.backward[0].gradients == 4096


def test_a_single_dense_layer_among_many_is_the_first() -> None:
    """Its own down_proj, not one of the layers of experts that follow."""
    segment = activations.layer(Run(arch("deepseek-v2-lite")), of_kind(arch("deepseek-v2-lite"), False))
    assert max(shot.making for shot in segment.backward) == 10_944 * 2048


def test_a_layers_input_is_its_own_unless_it_is_counted_elsewhere() -> None:
    """A checkpoint, or what a stage before has sent, is counted where it lies."""
    run = Run(arch("llama-3-8b"), precision="fp32")
    own, default, lent = (
        activations.layer(run, of_kind(run.arch, False), **how) for how in ({"counted": False}, {}, {"counted": True})
    )
    assert (own.saved, own.forward, own.backward) == (default.saved, default.forward, default.backward)
    assert own.saved.tokens - lent.saved.tokens == 4 * 4096


# --- kinds of layers ---


def test_routed_experts_begin_after_the_dense_layers() -> None:
    """DeepSeek-V3's `first_k_dense_replace` is 3 of 61 layers; Mixtral has none, Llama nothing else."""

    def moe(model: str) -> list[bool]:
        return [
            kind.spec.mlp == "experts" for kind in activations.kinds(Run(arch(model)), masked=False, recompute=False)
        ]

    assert moe("deepseek-v3") == [False] * 3 + [True] * 58
    assert moe("mixtral-8x7b") == [True] * 32
    assert moe("llama-3-8b") == [False] * 32


def test_a_window_shorter_than_the_sequence_masks_the_layers_that_slide() -> None:
    """Gemma 2's even layers slide; GPT-OSS's do, too, but SDPA knows no sinks. Elsewhere the kernel stays."""

    def kernels(model: str, masked: bool) -> list[str]:
        run = Run(arch(model))
        return [kind.run(run).kernel for kind in activations.kinds(run, masked=masked, recompute=False)]

    assert kernels("gemma-2-2b", True) == ["masked", "flash"] * 13
    assert kernels("gemma-2-2b", False) == ["flash"] * 26
    assert kernels("gpt-oss-20b", True) == ["flash"] * 24


@pytest.mark.parametrize(("run", "recompute", "spared"), [
    (frozen(BF16_LORA), False, True),
    # PEFT makes the embedding's output a leaf that wants a gradient
    (frozen(BF16_LORA), True, False),
    ({}, False, False),
    ({}, True, False),
])  # fmt: skip
def test_only_the_first_layer_lies_above_a_frozen_embedding(run: Any, recompute: bool, spared: bool) -> None:
    """Its input needs no gradient, unless checkpoints are kept or the embedding is trained."""
    kinds = activations.kinds(Run(arch("llama-3-8b"), **run), masked=False, recompute=recompute)
    assert [kind.first for kind in kinds] == [spared] + [False] * 31


def test_every_fourth_layer_of_smollm3_has_no_rotary_positions() -> None:
    """`no_rope_layer_interval` 4: layers 3, 7, … 35 are not rotated; all of Llama's are."""

    def rotated(model: str) -> list[bool]:
        return [kind.spec.rotated for kind in activations.kinds(Run(arch(model)), masked=False, recompute=False)]

    assert rotated("smollm3-3b") == [True, True, True, False] * 9
    assert rotated("llama-3-8b") == [True] * 32


def test_a_layer_is_written_once_for_all_stages_of_a_pipeline() -> None:
    """It depends on its own widths; where kinds of layers differ in widths, symbols have names that tell them apart."""
    whole = arch("deepseek-v3")
    spec = whole.specs[-1].shapes
    stages = [stage(whole, index, 4) for index in (1, 2, 3)]
    assert len({each.specs for each in stages}) > 1
    assert len({id(activations.layer(Run(each), spec)) for each in (whole, *stages)}) == 1
    assert Run(whole).alone(spec) == Run(stages[0]).alone(spec) != Run(whole)
    mixed = next(model.architecture for model in load().models.values() if model.architecture.broad)
    assert Run(mixed).alone(mixed.specs[0]).arch is mixed


@pytest.mark.parametrize(
    ("model", "release", "bf16", "fp16", "autocast"),
    [
        # masked scores, of which `torch.max` keeps its input, the softmax in their type, which the product reads; in
        # fp16 an fp32 softmax and its cast; under autocast the mask makes the scores fp32
        ("opt-1.3b", "4.28.1", 2 + 2, 2 + 4 + 2, 4 + 4 + 2),
        ("opt-1.3b", "4.48.3", 2 + 2, 2 + 4 + 2, 4 + 4 + 2),
        ("opt-1.3b", "4.20.1", 2, 2, 4 + 2),
        ("opt-1.3b", "4.49", 4 + 2, 4 + 2, 4 + 2),
        ("llama-2-7b", "4.28.1", 2 + 4 + 2, 2 + 4 + 2, 4 + 4 + 2),
        ("llama-2-7b", "4.30", 2 + 4 + 2, 2 + 4 + 2, 4 + 4 + 2),
        ("llama-2-7b", "4.31", 4 + 2, 4 + 2, 4 + 2),
    ],
)
def test_older_releases_keep_scores_that_they_hold_within_bounds(
    model: str, release: str, bf16: int, fp16: int, autocast: int
) -> None:
    """Bytes of a pair and head that eager attention keeps; those of 4.28.1 in 16 bits were seen by running it."""
    arch = with_scores(load().models[model].architecture, release)

    def kept(**run: Any) -> float:
        return Program(Run(arch, kernel="eager", **run), arch.specs[0]).layer().saved().tokens["H·S"]

    assert (kept(), kept(half=True), kept(precision="autocast")) == (bf16, fp16, autocast)


def test_the_softmax_reads_fp16_scores_without_a_copy() -> None:
    """A copy of bf16 scores in fp32; PyTorch's kernel itself writes fp32 for fp16 (`half_to_float`)."""
    arch = load().models["llama-2-7b"].architecture
    ops = [[op.name for op in Program(Run(arch, kernel="eager", half=on), arch.specs[0]).layer().ops] for on in (0, 1)]
    assert [name for name in ops[0] if name not in ops[1]] == ["softmax: to fp32"]


@pytest.mark.parametrize("model", ["bloom-560m", "mpt-7b"])
def test_scores_that_slope_keep_probabilities_in_both_types(model: str) -> None:
    """ALiBi leaves eager attention: fp32 from the softmax and 16 bits for the product, one each a pair and head."""
    arch = load().models[model].architecture
    tape = Program(Run(arch), arch.specs[0]).layer()
    assert tape.saved().tokens["H·S"] == 2 + 4
    assert "S" not in tape.saved().tokens  # all layers have one mask


def test_a_norm_between_embedding_and_layers_keeps_its_input() -> None:
    """BLOOM's, where the embedding is trained: its input, and the mean and the scale of each token in fp32."""
    bloom, opt = (load().models[name].architecture for name in ("bloom-560m", "opt-125m"))
    kept = activations.below_layers(Run(bloom), recompute=False)
    assert kept.tokens == {"h": 2, "": 8}
    assert not activations.below_layers(Run(opt), recompute=False)
    assert not activations.below_layers(Run(bloom, trained=False), recompute=False)


def test_noise_on_what_experts_read_is_kept_while_training() -> None:
    """Phi-3.5 MoE multiplies it twice in place, by a tensor of the same size each time."""
    arch = load().models["phi-3.5-moe"].architecture
    still, noisy = (Program(Run(arch, training=on), arch.specs[0]).layer().saved() for on in (False, True))
    assert noisy.tokens["h"] - still.tokens["h"] == 2 * 2
