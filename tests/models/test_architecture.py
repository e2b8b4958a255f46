"""Tensor counts: published totals, one hand-worked model a family, LoRA, and configs that cannot be.

The hand-worked models have hidden h = 8, two layers, 4 heads, MLP width 12 and a vocabulary of 10, so that embedding,
lm_head and the final norm are 80 + 80 + 8 = 168 wherever the head is not tied.
"""

from __future__ import annotations

import pickle
import reprlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from architectures import DEEPSEEK, FALCON, MLA, MODELS, TINY, architectures, published, record, tiny
from hypothesis import given
from hypothesis import strategies as st

from calc.catalog.catalog import load
from calc.memory.kv_cache import cached
from calc.models import architecture as A
from calc.models.architecture import Architecture, ConfigError
from calc.models.families import FAMILIES
from calc.models.hf_config import from_config


def shapes(arch: Architecture) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {t.name.removeprefix("model.layers.*."): (t.count, t.shape) for t in A.tensors(arch)}


# --- published counts ---


@pytest.mark.parametrize("model", [m for path in MODELS if record(m := path.stem)["published_parameters"]])
def test_the_count_is_the_published_one(model: str) -> None:
    assert A.parameters(published(model)) == record(model)["published_parameters"]


@pytest.mark.parametrize(
    ("model", "total"),
    [
        ("llama-2-7b", 6738415616), ("llama-3-8b", 8030261248), ("llama-3.1-405b", 405853388800),
        ("llama-3.2-1b", 1235814400), ("qwen1.5-7b", 7721324544), ("qwen2.5-0.5b", 494032768),
        ("qwen2.5-72b", 72706203648), ("qwen3-4b", 4022468096), ("qwen3-235b-a22b", 235093634560),
        ("mistral-7b", 7248023552), ("mistral-7b-v0.1", 7241732096), ("mixtral-8x7b", 46702792704),
        ("gemma-2-27b", 27227128320), ("phi-3-mini", 3821079552), ("gpt-oss-20b", 20914757184),
        ("deepseek-v3", 671026419200 - 58 * 256),  # the checkpoint's 58 e_score_correction_bias are buffers
    ],
)  # fmt: skip
def test_the_counts_that_readers_know(model: str, total: int) -> None:
    assert A.parameters(published(model)) == total


def test_a_model_without_its_lm_head() -> None:
    """Llama 3 8B: 8 030 261 248 - 128 256 · 4 096 = 7 504 924 672; a scalar head adds 4 096.

    Gemma 2's head is tied: there is nothing to remove.
    """
    llama, gemma = published("llama-3-8b"), published("gemma-2-9b")
    assert A.parameters(llama, head="none") == 7504924672
    assert A.parameters(llama, head="scalar") == 7504924672 + 4096
    assert A.tensors(llama, head="scalar")[-1] == ("score.weight", (1, 4096), 1, "head", "head")
    assert A.parameters(gemma, head="none") == A.parameters(gemma)
    assert A.parameters(gemma, head="scalar") == 9241705984 + 3584


@pytest.mark.parametrize(
    ("model", "active"),
    [
        ("mixtral-8x7b", 12879925248), ("qwen3-235b-a22b", 22190763520), ("deepseek-v3", 37552282624),
        ("llama-3-8b", 8030261248),
    ],
)  # fmt: skip
def test_active_parameters(model: str, active: int) -> None:
    assert A.active_parameters(published(model)) == active


def test_what_a_published_config_says_besides_sizes() -> None:
    gemma, oss, phi, qwen = (published(m) for m in ("gemma-2-9b", "gpt-oss-20b", "phi-3-mini", "qwen2.5-7b"))
    assert (gemma.sliding_window, len(gemma.sliding_layers)) == (4096, 21)
    assert (gemma.softcap_attn, gemma.softcap_logits) == (True, True)
    assert (gemma.tied, len(list(filter(None, gemma.norms))), gemma.activation) == (True, 4, "gelu_pytorch_tanh")
    assert (oss.sliding_window, len(oss.sliding_layers), oss.attention_sinks, oss.o_bias) == (128, 12, True, True)
    assert (phi.sliding_window, len(phi.sliding_layers), phi.fused_qkv, phi.fused_gate_up) == (2047, 32, "sliced", True)
    assert (qwen.sliding_window, qwen.sliding_layers, qwen.qkv_bias, qwen.o_bias) == (None, (), True, False)
    assert published("mistral-7b").sliding_layers == ()
    assert published("mistral-7b-v0.1").sliding_layers == tuple(range(32))
    assert published("gemma-2b").activation == "gelu_pytorch_tanh"  # its file says gelu
    assert published("llama-3.1-8b").max_positions == 131072


# --- one family at a time, by hand ---


def test_llama() -> None:
    """Attention 64 + 2 · 32 + 64 = 192 with two KV heads of four, MLP 3 · 96 = 288, norms 16: 496 a layer."""
    arch = tiny("llama", num_key_value_heads=2)
    assert A.layer_parameters(arch, arch.specs[-1]) == 496
    assert A.parameters(arch) == 2 * 496 + 168
    assert A.parameters(arch, head="none") == 2 * 496 + 88
    assert A.parameters(tiny("llama", num_key_value_heads=2, tie_word_embeddings=True)) == 2 * 496 + 88
    assert shapes(arch) == {
        "model.embed_tokens.weight": (1, (10, 8)), "self_attn.q_proj.weight": (2, (8, 8)),
        "self_attn.k_proj.weight": (2, (4, 8)), "self_attn.v_proj.weight": (2, (4, 8)),
        "self_attn.o_proj.weight": (2, (8, 8)), "mlp.gate_proj.weight": (2, (12, 8)),
        "mlp.up_proj.weight": (2, (12, 8)), "mlp.down_proj.weight": (2, (8, 12)),
        "input_layernorm.weight": (2, (8,)), "post_attention_layernorm.weight": (2, (8,)),
        "model.norm.weight": (1, (8,)), "lm_head.weight": (1, (10, 8)),
    }  # fmt: skip


def test_llama_defaults_to_one_kv_head_a_head() -> None:
    """Two KV heads more are 2 · 2 · 2 · 8 = 64 parameters a layer more."""
    assert A.parameters(tiny("llama")) == A.parameters(tiny("llama", num_key_value_heads=None)) == 2 * (496 + 64) + 168


def test_llama_biases() -> None:
    """Attention 8 + 4 + 4 + 8 = 24, MLP 12 + 12 + 8 = 32."""
    arch = tiny("llama", num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    assert A.layer_parameters(arch, arch.specs[-1]) == 496 + 24 + 32
    assert {t.kind for t in A.layer_tensors(arch, arch.specs[-1]) if t.name.endswith(".bias")} == {"bias"}


def test_mistral() -> None:
    """Llama's tensors; without a word about it every layer slides over 4 096 tokens, with null none does."""
    arch = tiny("mistral", num_key_value_heads=2)
    assert A.parameters(arch) == A.parameters(tiny("llama", num_key_value_heads=2))
    assert (arch.sliding_window, arch.sliding_layers) == (4096, (0, 1))
    assert tiny("mistral", num_key_value_heads=2, sliding_window=None).sliding_window is None


def test_qwen2() -> None:
    """Llama's 496 and biases of q, k and v, 8 + 4 + 4 = 16; the layers from max_window_layers on slide, if any do."""
    assert A.layer_parameters(tiny("qwen2", num_key_value_heads=2), A.LayerSpec()) == 496 + 16
    used = tiny("qwen2", num_key_value_heads=2, use_sliding_window=True, sliding_window=32, max_window_layers=1)
    assert (used.sliding_window, used.sliding_layers) == (32, (1,))
    assert tiny("qwen2", num_key_value_heads=2, sliding_window=32, max_window_layers=1).sliding_layers == ()


def test_qwen3() -> None:
    """Heads of 4 in a hidden size of 8: 128 + 2 · 64 + 128 = 384, QK norm 2 · 4, MLP 288, norms 16: 696."""
    arch = tiny("qwen3", num_key_value_heads=2, head_dim=4)
    assert A.layer_parameters(arch, arch.specs[-1]) == 696
    assert A.parameters(arch) == 2 * 696 + 168
    assert shapes(arch)["self_attn.q_norm.weight"] == (2, (4,))


def test_qwen3_moe_with_a_dense_layer() -> None:
    """Attention 192 + 4; layer 0 dense with 288, layer 1 a router of 32 and 4 experts of 3 · 48; norms 16 each."""
    arch = tiny(
        "qwen3_moe", num_key_value_heads=2, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=6,
        mlp_only_layers=[0],
    )  # fmt: skip
    assert [A.layer_parameters(arch, arch.specs[i]) for i in (0, 1, -1)] == [500, 820, 820]
    assert A.parameters(arch) == 500 + 820 + 168
    assert A.active_parameters(arch) == 500 + 820 + 168 - 3 * 144
    assert shapes(arch)["mlp.experts.gate_up_proj"] == (1, (4, 12, 8))
    assert shapes(arch)["mlp.gate_proj.weight"] == (1, (12, 8))
    assert shapes(arch)["self_attn.q_proj.weight"] == (2, (8, 8))


@pytest.mark.parametrize(
    ("step", "mlp_only", "layers", "dense"),
    [(1, [], 5, []), (2, [], 5, [0, 2, 4]), (2, [1, 2, 9], 5, [0, 1, 2, 4]), (1, None, 5, [])],
)
def test_which_layers_are_dense(step: int, mlp_only: list[int] | None, layers: int, dense: list[int]) -> None:
    """Layer i is sparse when step divides i + 1 and it is not named: with step 2 of five layers 1 and 3."""
    arch = tiny("qwen3_moe", num_hidden_layers=layers, decoder_sparse_step=step, mlp_only_layers=mlp_only)
    assert [n for n, spec in enumerate(arch.specs) if spec.mlp == "dense"] == dense
    assert arch.dense_layers == len(dense)


def test_qwen2_moe() -> None:
    """Attention 192 + 16, router 32, experts 4 · 144, a shared expert of 3 · 40 with a gate of 8, norms 16: 960."""
    arch = tiny(
        "qwen2_moe", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
        shared_expert_intermediate_size=5,
    )  # fmt: skip
    assert A.layer_parameters(arch, arch.specs[-1]) == 960
    assert "mlp.shared_expert_gate" in {linear.name for linear in A.linears(arch, arch.specs[-1])}


def test_mixtral() -> None:
    """Attention 192, router 32, four experts of 288, norms 16: 1 392; two of the four idle for each token."""
    arch = tiny("mixtral", num_key_value_heads=2, num_local_experts=4)
    assert A.layer_parameters(arch, arch.specs[-1]) == 1392
    assert A.parameters(arch) == 2 * 1392 + 168
    assert A.active_parameters(arch) == 2 * (1392 - 2 * 288) + 168
    # experts and router are bare parameters
    assert {linear.kind for linear in A.linears(arch, arch.specs[-1])} == {"attn"}


def test_gemma() -> None:
    """Four query heads and one KV head of 4: 128 + 2 · 32 + 128 = 320, MLP 288, norms 16: 624; tied by default."""
    arch = tiny("gemma", num_key_value_heads=1, head_dim=4)
    assert A.parameters(arch) == 2 * 624 + 88


def test_gemma2() -> None:
    """Attention 384, MLP 288, four norms 32: 704; tied by default; every other layer slides, the first one included."""
    arch = tiny("gemma2", num_key_value_heads=2, head_dim=4)
    assert A.parameters(arch) == 2 * 704 + 88
    assert (arch.sliding_window, arch.sliding_layers) == (4096, (0,))
    assert tiny("gemma2", num_hidden_layers=3).sliding_layers == (0, 2)
    assert tiny("gemma2", layer_types=["full_attention"] * 2).sliding_window is None
    assert not tiny("gemma2", attn_logit_softcapping=None).softcap_attn


def test_phi3() -> None:
    """One matrix of (8 + 8 + 8) · 8 for q, k and v, one of 24 · 8 for gate and up: Llama's sum with 4 KV heads."""
    arch = tiny("phi3")
    assert A.parameters(arch) == A.parameters(tiny("llama")) == 2 * 560 + 168
    assert shapes(arch)["self_attn.qkv_proj.weight"] == (2, (24, 8))
    assert shapes(arch)["mlp.gate_up_proj.weight"] == (2, (24, 8))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_multi_head_latent_attention(family: str) -> None:
    """Queries 48 + 6 + 6·4·5 = 174, keys and values 8·6 + 4 + 4·4·8 = 180, output 4·5·8 = 160: 514.

    Layer 0: 514 + MLP 288 + norms 16 = 818. Layer 1: 514 + router 32 + experts 4·144 + shared 144 + 16 = 1 282.
    Without the query's low rank 8·4·5 = 160 takes the place of 174.
    """
    arch = tiny(family, **DEEPSEEK)
    assert [A.layer_parameters(arch, arch.specs[i]) for i in (0, 1)] == [818, 1282]
    assert A.parameters(arch) == 818 + 1282 + 168
    assert A.parameters(tiny(family, **DEEPSEEK | {"q_lora_rank": None})) == 818 + 1282 + 168 - 2 * 14
    assert arch.head_dim == 5
    assert shapes(arch)["self_attn.kv_a_proj_with_mqa.weight"] == (2, (6, 8))


def test_minicpm3_is_dense_with_latent_attention() -> None:
    """The sum of `test_multi_head_latent_attention`: 818 a layer, an embedding that is the head, 80, and a norm, 8."""
    latent = {name: DEEPSEEK[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}
    arch = tiny("minicpm3", **latent, v_head_dim=DEEPSEEK["v_head_dim"], num_key_value_heads=4)
    assert A.parameters(arch) == 2 * 818 + 88
    assert arch.residual_scaled and not arch.embedding_scaled


def test_gpt_oss() -> None:
    """Attention 384 + biases 40 + sinks 4, router 32 + 4, experts 4 · (192 + 24 + 96 + 8) = 1 280, norms 16: 1 760."""
    arch = tiny("gpt_oss", num_key_value_heads=2, head_dim=4, num_local_experts=4)
    assert A.parameters(arch) == 2 * 1760 + 168
    assert shapes(arch)["mlp.experts.gate_up_proj"] == (2, (4, 8, 24))  # input first
    assert shapes(arch)["mlp.router.bias"] == (2, (4,))
    assert shapes(arch)["self_attn.sinks"] == (2, (4,))


def test_gemma3() -> None:
    """Gemma 2's 704 and norms of queries and keys, 2 · 4; tied; all layers slide but every sixth."""
    arch = tiny("gemma3_text", num_key_value_heads=2, head_dim=4)
    assert A.parameters(arch) == 2 * 712 + 88
    assert (arch.softcap_attn, arch.softcap_logits) == (False, False)
    layers = tiny("gemma3_text", num_key_value_heads=2, num_hidden_layers=13).sliding_layers
    assert layers == (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12)


def test_the_language_model_of_one_that_reads_images() -> None:
    """What Gemma 3's and Mistral 3's files nest; 4B's leaves out its heads, 8 and 4, and its vocabulary of 262 208."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    gemma = from_config({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert A.parameters(gemma) == A.parameters(published("gemma-3-4b")) == 3880263168
    mistral = from_config({"model_type": "mistral3", "text_config": {**TINY, "num_key_value_heads": 2}})
    assert mistral.family == "mistral"
    with pytest.raises(ConfigError, match=r"^text_config: nothing given, allowed: a mapping"):
        from_config({"model_type": "gemma3", **TINY})
    with pytest.raises(ConfigError, match=r"^model_type: given 'siglip'"):
        from_config({"model_type": "gemma3", "text_config": {"model_type": "siglip"}})


@pytest.mark.parametrize(
    ("family", "fields", "layer"),
    [
        # Llama's 496 with norms of all queries, 8, and all keys, 4, and two norms after the blocks
        ("olmo2", {}, 508), ("olmo3", {}, 508),
        ("granite", {}, 496),
        # four norms, 16 more
        ("hyperclovax", {}, 512), ("hyperclovax", {"use_post_norm": False}, 496),
        # 40 for q, k and v: 128 + 2 · 64 + 128 of heads of 4, their biases 16 + 8 + 8, MLP 288, norms 16 or 32
        ("glm", {"head_dim": 4}, 720), ("glm4", {"head_dim": 4}, 736),
        ("glm4", {"head_dim": 4, "attention_bias": False}, 704),
        ("smollm3", {}, 496),
        ("seed_oss", {"head_dim": 2}, 512), ("seed_oss", {"head_dim": 2, "attention_out_bias": True}, 520),
        # norms of queries and keys of a head, 2 · 2
        ("exaone4", {}, 500),
        ("ministral", {}, 496), ("ministral3", {"head_dim": 2}, 496), ("cwm", {"head_dim": 2}, 496),
        ("internlm3", {"head_dim": 2}, 496), ("iquestcoder", {"head_dim": 2}, 496),
        ("helium", {"head_dim": 2}, 496), ("ernie4_5", {"head_dim": 2}, 496),
        ("ernie4_5", {"head_dim": 2, "use_bias": True}, 552),
        # MLP 2 · 96
        ("arcee", {}, 400),
        # and biases 8 + 4 + 4 + 8, 12 + 8; norms have 8 more each
        ("starcoder2", {}, 400 + 24 + 20 + 16), ("starcoder2", {"use_bias": False}, 416),
        ("stablelm", {}, 512), ("stablelm", {"use_qkv_bias": True}, 528),
        # a norm of each head of queries and keys, and one of the stream less
        ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}, 512 + 8 + 4 - 16),
        # norms of queries and keys, and both slopes of an activation
        ("apertus", {}, 400 + 4 + 2), ("hunyuan_v1_dense", {"head_dim": 2}, 500),
        # norms have no weight, or a bias
        ("olmo", {}, 480), ("nemotron", {"head_dim": 2}, 416),
        # one norm
        ("phi", {}, 400 + 24 + 20 + 0), ("cohere", {}, 488), ("cohere2", {}, 488),
        # and a weight for each head of queries and keys
        ("cohere", {"use_qk_norm": True}, 488 + 8 + 4),
        # 3 · 64 + 24 for q, k and v
        ("gpt_neox", {"num_key_value_heads": None}, 216 + 72 + 212 + 32),
        # (4 + 2·2)·2·8 for queries and two keys and values, 64 back, and an MLP of two linears; one norm or two
        ("falcon", {**FALCON, "num_ln_in_parallel_attn": 1}, 128 + 64 + 192 + 16),
        ("falcon", FALCON, 128 + 64 + 192 + 32),
        # (4 + 2)·2·8 for queries, one key and one value, whatever num_kv_heads says; 64 back, the MLP, one norm
        ("falcon", {"num_kv_heads": 4, "ffn_hidden_size": 12}, 96 + 64 + 192 + 16),
        ("falcon", {**FALCON, "bias": True}, 128 + 64 + 192 + 32 + 16 + 8 + 12 + 8),
        # router 32 and four experts of 288 in place of the MLP
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, 192 + 12 + 32 + 1152 + 16),
        ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}, 192 + 12 + 32 + 1152 + 16),
        ("granitemoe", {"num_local_experts": 4}, 192 + 32 + 1152 + 16),
        ("minimax_m2", {"head_dim": 2, "num_local_experts": 4, "num_experts_per_tok": 2}, 192 + 12 + 32 + 1152 + 16),
        # shared experts of one MLP's width beside four; the number of a token's is said layer by layer
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [2, 2]}, 192 + 4 + 32 + 1152 + 288 + 16),
        ("ernie4_5_moe", {"head_dim": 2, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 6,
                          "moe_num_shared_experts": 1, "moe_layer_start_index": 0}, 192 + 32 + 576 + 144 + 16),
        ("dots1", {"head_dim": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
                   "n_shared_experts": 1}, 192 + 4 + 32 + 576 + 144 + 16),
    ],
)  # fmt: skip
def test_a_layer_of_another_family(family: str, fields: dict[str, Any], layer: int) -> None:
    """Llama's attention 192, MLP 288 and norms 16, and what differs; two KV heads of four."""
    arch = tiny(family, **{"num_key_value_heads": 2, "tie_word_embeddings": False, **fields})
    assert A.layer_parameters(arch, arch.specs[-1]) == layer
    ends = 160 + (10 if family == "phi" else 0) + arch.norm_elements
    assert A.parameters(arch) == 2 * layer + ends


def test_glm_4_5() -> None:
    """Attention 192 + 16; layer 0 dense with 288, layer 1 a router of 32, experts 4 · 144 and a shared one of 144."""
    fields = {k: v for k, v in DEEPSEEK.items() if k not in MLA} | {"num_key_value_heads": 2, "attention_bias": True}
    arch = tiny("glm4_moe", **fields)
    assert [A.layer_parameters(arch, arch.specs[i]) for i in (0, 1)] == [208 + 288 + 16, 208 + 32 + 576 + 144 + 16]
    assert arch.qk_norm == ""
    assert tiny("glm4_moe", **fields, use_qk_norm=True).qk_norm == "heads"


def test_starcoder_has_one_key_and_value_for_all_heads() -> None:
    """Queries 8·8, a key and a value of 2 each, 96 with their biases 12, 64 + 8 back; an MLP of 2·96 and biases 20.

    Two norms with biases; 32 positions beside the vocabulary, which is the head, too.
    """
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 4, "n_inner": 12, "n_positions": 32, "vocab_size": 10}
    arch = from_config({"model_type": "gpt_bigcode", **sizes})
    assert (arch.heads, arch.kv_heads, arch.tied, arch.grouped) == (4, 1, True, True)
    layer = 8 * 12 + 12 + 64 + 8 + 192 + 20 + 32
    assert A.layer_parameters(arch, arch.specs[0]) == layer
    assert A.parameters(arch) == 2 * layer + 80 + 32 * 8 + 16
    with pytest.raises(A.ConfigError, match=r"^multi_query: given False, allowed: true"):
        from_config({"model_type": "gpt_bigcode", **sizes, "multi_query": False})


def test_gpt_neo() -> None:
    """Layers 8 wide: 4 · 64 of attention with one bias, an MLP of 32 with two, two norms; 4 positions; a tied head."""
    sizes = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 10, "max_position_embeddings": 4}
    arch = from_config({"model_type": "gpt_neo", **sizes, "attention_types": [[["global", "local"], 1]]})
    assert A.layer_parameters(arch, arch.specs[0]) == 4 * 64 + 8 + 2 * 256 + 32 + 8 + 32
    assert A.parameters(arch) == 2 * 848 + 80 + 32 + 16
    assert shapes(arch)["transformer.h.*.attn.attention.out_proj.bias"] == (2, (8,))


def test_gpt_j() -> None:
    """Layers 8 wide: 4 · 64 of attention without biases, an MLP of 32 with them, one norm; a head with a bias."""
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 10, "rotary_dim": 2}
    arch = from_config({"model_type": "gptj", **sizes})
    assert A.layer_parameters(arch, arch.specs[0]) == 4 * 64 + 2 * 256 + 32 + 8 + 16
    assert A.parameters(arch) == 2 * 824 + 80 + 16 + 80 + 10
    assert (arch.rotary_dim, arch.rotary_tables, arch.max_positions) == (2, 8, 2048)
    assert shapes(arch)["transformer.h.*.mlp.fc_in.weight"] == (2, (32, 8))
    for rotated in (3, 6):
        with pytest.raises(A.ConfigError, match=r"^rotary_dim: given [36], allowed: an even number, at most 4"):
            from_config({"model_type": "gptj", **sizes, "rotary_dim": rotated})


def test_codegen() -> None:
    """GPT-J's layers 8 wide, but for one linear of queries, keys and values; models of 350M and 2B as named."""
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 4, "vocab_size": 10, "rotary_dim": 2}
    arch = from_config({"model_type": "codegen", **sizes})
    assert A.parameters(arch) == A.parameters(from_config({"model_type": "gptj", **sizes}))
    assert shapes(arch)["transformer.h.*.attn.qkv_proj.weight"] == (2, (24, 8))
    assert A.parameters(published("codegen-350m")) == 20 * (12 * 1024**2 + 7 * 1024) + 2 * 51200 * 1024 + 51200 + 2048
    assert round(A.parameters(published("codegen-2b")) / 1e9, 1) == 2.8


def test_falcons_mlp_is_four_times_as_wide_where_nobody_says_it() -> None:
    config = {k: v for k, v in TINY.items() if k != "intermediate_size"}
    assert from_config({"model_type": "falcon", **config, "new_decoder_architecture": True}).intermediate == 32
    assert "transformer.h.*.self_attention.query_key_value.weight" in shapes(tiny("falcon", **FALCON))


def test_modules_have_their_familys_names() -> None:
    names = set(shapes(tiny("gpt_neox")))
    assert {"gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.bias", "lm_head.weight"} < names
    assert "gpt_neox.layers.*.attention.query_key_value.weight" in names
    phi = set(shapes(tiny("phi")))
    assert {"self_attn.dense.bias", "mlp.fc1.weight", "model.final_layernorm.weight", "lm_head.bias"} < phi
    assert {"mlp.c_fc.weight", "mlp.c_proj.bias"} < set(shapes(tiny("starcoder2", num_key_value_heads=2)))
    assert {linear.name for linear in A.linears(tiny("gpt_neox"), tiny("gpt_neox").specs[-1])} == {
        "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
    }  # fmt: skip


def test_which_layers_slide_and_which_have_no_positions() -> None:
    """OLMo 3 and Exaone 4: all but every fourth slide; the others of Exaone and SmolLM3 have no positions."""
    eight: dict[str, Any] = {"num_key_value_heads": 2, "num_hidden_layers": 8}
    local = (0, 1, 2, 4, 5, 6)
    assert tiny("olmo3", **eight).sliding_layers == local
    exaone = tiny("exaone4", **eight)
    assert (exaone.sliding_layers, exaone.unrotated_layers) == (local, (3, 7))
    plain = tiny("exaone4", **eight, sliding_window=None)
    assert (plain.sliding_layers, plain.unrotated_layers) == ((), ())
    assert tiny("smollm3", **eight).unrotated_layers == (3, 7)
    assert tiny("smollm3", **eight, no_rope_layers=[0, 1] * 4).unrotated_layers == (0, 2, 4, 6)
    assert tiny("smollm3", **eight, use_sliding_window=True, sliding_window=4).sliding_layers == (3, 7)
    assert tiny("cwm", **eight, head_dim=2).sliding_layers == (1, 2, 3, 5, 6, 7)
    assert tiny("ministral", **eight, layer_types=["full_attention", "sliding_attention"] * 4).sliding_layers == (
        1,
        3,
        5,
        7,
    )
    assert tiny("mistral", **eight, layer_types=["full_attention"] * 8).sliding_layers == tuple(range(8))


def test_what_a_config_says_of_rotation_and_dropout() -> None:
    """GLM repeats cos and sin of half of each head; Seed-OSS drops out by default, Granite's attention as published."""
    assert tiny("glm", head_dim=16).rotary_tables == 2 * 8
    assert tiny("glm", head_dim=16, rope_parameters={"partial_rotary_factor": 1.0}).rotary_tables == 2 * 16
    assert tiny("llama").rotary_tables == 0
    seed = tiny("seed_oss", num_key_value_heads=2)
    assert (seed.residual_dropout, seed.attention_dropout, seed.embedding_dropout) == (True, True, False)
    granite, coder = published("granite-3.1-8b"), published("starcoder2-7b")
    assert (granite.attention_dropout, granite.residual_dropout) == (True, False)
    assert (coder.attention_dropout, coder.residual_dropout, coder.embedding_dropout) == (True, True, True)


# --- configs that cannot be used ---


@pytest.mark.parametrize("field", sorted(TINY))
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, 8.0, "8", True, [8], float("nan")])
def test_sizes_are_positive_integers(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny("llama", **{field: value})
    assert caught.value.field == field
    assert caught.value.refusal.given == reprlib.repr(value)
    assert str(caught.value).endswith("allowed: a positive integer")


@pytest.mark.parametrize("field", sorted(TINY))
def test_sizes_must_be_given(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: nothing given, allowed: a positive integer$"):
        from_config({"model_type": "llama", **{k: v for k, v in TINY.items() if k != field}})


@pytest.mark.parametrize(
    ("family", "fields", "field", "allowed"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads", "a divisor of num_attention_heads = 4"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads", "a positive integer"),
        ("llama", {"num_attention_heads": 3}, "num_attention_heads",
         "a divisor of hidden_size = 8, as there is no head_dim"),
        ("llama", {"head_dim": -4}, "head_dim", "a positive integer"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
        ("llama", {"mlp_bias": 1}, "mlp_bias", "true or false"),
        ("llama", {"hidden_act": 3}, "hidden_act", "the name of an activation, such as silu"),
        ("mistral", {"num_key_value_heads": 4, "sliding_window": 0}, "sliding_window", "a positive integer"),
        ("qwen2", {}, "num_key_value_heads", "a divisor of num_attention_heads = 4"),
        ("mixtral", {"num_key_value_heads": 4, "num_experts_per_tok": 9}, "num_experts_per_tok",
         "at most num_local_experts = 8"),
        ("mixtral", {"num_key_value_heads": 4, "num_local_experts": -8}, "num_local_experts", "an integer, 0 or more"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers", "a list of layer indices"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types", "a list of num_hidden_layers = 2 names"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping", "a number, 0 or more, or null"),
        ("deepseek_v3", DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank", "a positive integer"),
        ("falcon", {"multi_query": False}, "multi_query", "true for the family falcon; not modelled"),
        ("falcon", {**FALCON, "alibi": True}, "alibi", "false for the family falcon; not modelled"),
        ("falcon", {**FALCON, "hidden_dropout": 0.1}, "hidden_dropout", "0 for the family falcon; not modelled"),
        ("falcon", {**FALCON, "num_kv_heads": 3}, "num_kv_heads", "a divisor of num_attention_heads = 4"),
        ("falcon", {**FALCON, "activation": 1}, "activation", "the name of an activation, such as silu"),
        ("falcon", {**FALCON, "ffn_hidden_size": 0}, "ffn_hidden_size", "a positive integer"),
        ("glm", {"num_key_value_heads": 2, "partial_rotary_factor": 0}, "partial_rotary_factor",
         "a number above 0, at most 1"),
        ("smollm3", {"num_key_value_heads": 2, "no_rope_layers": [1]}, "no_rope_layers",
         "a list of num_hidden_layers = 2 times 0 or 1"),
        ("starcoder2", {"residual_dropout": "0.1"}, "residual_dropout", "a number, 0 or more, or null"),
    ],
)  # fmt: skip
def test_values_that_no_model_has(family: str, fields: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(family, **fields)
    assert (caught.value.field, caught.value.refusal.allowed) == (field, allowed)


@pytest.mark.parametrize(
    ("given", "meant"), [("llma", "llama"), ("gemma3-text", "gemma3_text"), ("mistral_3", "mistral3")]
)
def test_an_unknown_family_lists_the_known_ones(given: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^model_type: given '{given}', allowed: llama, .*; did you mean '{meant}'\?$"
    ):
        tiny(given)


def test_an_unknown_family_is_told_what_else_is_not_modelled() -> None:
    """Kinds of layers and fields that no family has, those inside `text_config` too, and no name that is alike."""
    hybrid = {
        "model_type": "zamba2", "hidden_size": 8, "vision_config": {}, "layer_types": ["mamba"] * 3,
        "text_config": {"hidden_size": 8, "layer_types": ["full_attention", "mamba"], "mamba_headdim": 4},
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        from_config(hybrid)
    told = "4 layers of mamba; the fields vision_config, text_config.mamba_headdim"
    assert str(caught.value).endswith(f"; not modelled of this config: {told}")
    listed = {"retention_config": {"gla_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 128}}
    told = "3 layers of gla; the fields retention_config"
    with pytest.raises(ConfigError, match=f"not modelled of this config: {told}$"):
        from_config({"model_type": "kimi_k3", "num_hidden_layers": 4, **listed})
    numbered = {"num_hidden_layers": 3, "attention_pattern": [0, 1, 1], "mlp_layer_types": ["dense", "sparse"] * 2}
    with pytest.raises(ConfigError, match=r"config: 2 layers with attention_pattern 1; the fields attention_pattern"):
        from_config({"model_type": "mimo_v3", **numbered})
    many = {f"mamba_{n}": n for n in range(14)}
    with pytest.raises(ConfigError, match=r"the fields mamba_0, .*, mamba_11 and 2 more$"):
        from_config({"model_type": "zamba2", **many})
    with pytest.raises(ConfigError, match=r"; each field of this config is one of theirs$"):
        from_config({"model_type": "xyz", "hidden_size": 8})


def test_a_model_type_whose_code_is_a_familys_is_that_family() -> None:
    """Kimi K2's config.json brings DeepSeek's code along."""
    config = dict(load().models["kimi-k2"].config)
    assert (config["model_type"], from_config(config).family) == ("kimi_k2", "deepseek_v3")
    assert from_config(config) == from_config(config | {"model_type": "deepseek_v3"})


@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama"])
def test_a_layer_of_another_kind_is_refused(family: str) -> None:
    """It would be counted as attention otherwise."""
    with pytest.raises(ConfigError, match=r"^layer_types\[1\]: given 'linear_attention', allowed: full_attention, "):
        tiny(family, num_key_value_heads=4, layer_types=["full_attention", "linear_attention"])


@pytest.mark.parametrize(
    ("config", "field"),
    [({}, "model_type"), ({"model_type": None}, "model_type"), ({"model_type": ["llama"]}, "model_type"),
     (None, "config"), ([], "config"), ("llama", "config")],
)  # fmt: skip
def test_what_is_no_config(config: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        from_config(config)


# --- what holds for every architecture ---

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@given(architectures())
def test_layers_embedding_norm_and_head_make_the_model(arch: Architecture) -> None:
    layers = sum(A.layer_parameters(arch, arch.specs[i]) for i in range(arch.layers))
    beside = A.beside_embedding_parameters(arch)
    assert beside >= arch.positions * arch.hidden + arch.norm_elements * bool(arch.names.embedding_norm)
    passed = sum(t.elements * t.count for t in A.passed_tensors(arch))
    bare = A.embedding_parameters(arch) + beside + layers + passed + arch.final_elements
    assert A.parameters(arch, head="none") == bare
    assert A.parameters(arch, head="scalar") == bare + arch.outer
    head = (0 if arch.tied else arch.vocab * arch.outer) + arch.head_bias * arch.vocab
    assert A.parameters(arch) == bare + head
    assert 0 < A.active_parameters(arch) <= A.parameters(arch)


@given(st.sampled_from(sorted(FAMILIES)), st.sampled_from(MODELS), st.data())
def test_junk_gives_an_architecture_or_one_clear_line(family: str, model: Path, data: st.DataObject) -> None:
    config = dict(record(model.stem)["config"])
    fields = data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3))
    config |= {"model_type": family} | {field: data.draw(JUNK) for field in fields}
    try:
        assert A.parameters(from_config(config)) > 0
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        assert str(error).startswith(f"{error.field}: ")


def test_a_plain_decoder_has_none_of_the_extras() -> None:
    """What is not given is not there: no biases, norms or caps beside the usual two, no window, no experts."""
    plain = Architecture(
        family="llama", hidden=8, specs=(A.LayerSpec(),) * 2, heads=2, kv_heads=1, head_dim=4, intermediate=16,
        vocab=32, tied=False, max_positions=64,
    )  # fmt: skip
    extras = asdict(plain)
    for name in (
        "family",
        "hidden",
        "specs",
        "heads",
        "kv_heads",
        "head_dim",
        "intermediate",
        "vocab",
        "max_positions",
    ):
        assert extras.pop(name)
    assert extras.pop("norms") == A.BEFORE == ("input_layernorm", "", "post_attention_layernorm", "")
    assert extras.pop("names") == A.NAMES
    assert (extras.pop("norm"), extras.pop("gated"), extras.pop("router")) == ("rms", True, "mlp.gate")
    assert (extras.pop("routing"), extras.pop("routing_normed")) == ("softmax", True)
    assert extras.pop("shared_name") == "mlp.shared_experts"
    assert [extras.pop(name) for name in ("ranks", "expert_ranks", "expert_tensor")] == [1, 1, 1]
    assert (extras.pop("embeds"), extras.pop("ends")) == (True, True)
    assert (extras.pop("activation"), extras.pop("adapters")) == ("silu", "own")
    assert extras.pop("depths") == extras.pop("expert_linears") == extras.pop("kept_wide") == ()
    assert {type(value) for value in extras.values()} == {bool, int, str, type(None)}
    assert not any(extras.values())


def test_a_latent_and_its_rotary_keys_are_rows_of_one_projection() -> None:
    """96 and 96: published models have 512 and 64, which share no bit."""
    lite = published("deepseek-v2-lite")
    assert lite.mla is not None
    odd = replace(lite, mla=replace(lite.mla, kv_lora_rank=96, qk_rope_head_dim=96))
    shapes = {t.name: t.shape for t in A.layer_tensors(odd, odd.specs[-1])}
    assert shapes["model.layers.*.self_attn.kv_a_proj_with_mqa.weight"] == (192, 2048)


@pytest.mark.parametrize(
    ("model", "name"), [("gpt-oss-20b", "router"), ("mixtral-8x7b", "gate"), ("deepseek-v3", "gate")]
)
def test_the_router_has_its_familys_name(model: str, name: str) -> None:
    """`mlp.gate` in most families, not in GPT-OSS."""
    names = {t.name for t in A.layer_tensors(published(model), published(model).specs[-1])}
    assert f"model.layers.*.mlp.{name}.weight" in names


def test_layers_are_counted_by_kind_wherever_they_lie() -> None:
    """DeepSeek V3 with experts in every second layer: 31 dense layers, 30 with experts."""
    v3 = published("deepseek-v3")
    dense, sparse = A.LayerSpec("latent"), A.LayerSpec("latent", "experts")
    odd = replace(v3, specs=(dense, sparse) * 30 + (dense,))
    assert A.layer_kinds(odd) == ((dense, 31), (sparse, 30))
    assert (odd.dense_layers, odd.layers) == (31, 61)
    counts = {t.name.rpartition(".*.")[2]: t.count for t in A.tensors(odd)}
    assert (counts["mlp.gate.weight"], counts["mlp.gate_proj.weight"], counts["input_layernorm.weight"]) == (30, 31, 61)


def test_a_layer_that_chooses_no_keys_has_no_indexer() -> None:
    """GLM-5.2 has one in layers 0 to 2, then in every fourth (its config's `indexer_types`): 21 of 78."""
    glm = published("glm-5.2")
    choosing = [n for n, spec in enumerate(glm.specs) if spec.chooses]
    assert choosing == [0, 1, *range(2, 78, 4)]
    names = {t.name.rpartition(".self_attn.")[2]: t.count for t in A.tensors(glm)}
    assert (names["indexer.wk.weight"], names["kv_b_proj.weight"]) == (21, 78)
    one, other = (cached(glm, spec) for spec in (glm.specs[2], glm.specs[3]))
    assert one - other == (128 + 4) // 2  # its keys in 8 bits, with a scale
    listed = {**load().models["glm-5.2"].config, "indexer_types": ["full", "shared"] * 39}
    assert sum(spec.chooses for spec in from_config(listed).specs) == 39
    with pytest.raises(
        A.ConfigError, match=r"^indexer_types: given .*, allowed: a list of num_hidden_layers = 78 times"
    ):
        from_config({**listed, "indexer_types": ["shared", "full"] * 39})


def test_a_config_that_lists_each_layer_may_leave_out_their_number() -> None:
    """As the published one of Nemotron 3 Ultra does."""
    config = dict(load().models["nemotron-3-ultra-550b-a55b"].config)
    kinds = {"M": "mamba", "E": "moe", "*": "attention"}
    listed = [kinds[letter] for letter in config.pop("hybrid_override_pattern")]
    assert config.pop("num_hidden_layers") == len(listed) == 108
    assert from_config({**config, "layers_block_type": listed}) == published("nemotron-3-ultra-550b-a55b")


def test_an_architecture_is_found_again_after_it_was_pickled() -> None:
    """Its hash is kept for speed, and differs from process to process: a copy computes its own."""
    v3 = published("deepseek-v3")
    hash(v3)
    copy = pickle.loads(pickle.dumps(v3))
    assert "_hash" not in vars(copy)
    assert copy == v3 and hash(copy) == hash(v3) and {v3: 1}[copy] == 1


def test_experts_are_output_first_and_shared_ones_have_their_familys_name() -> None:
    """`modeling_deepseek_v3.py`, `modeling_qwen2_moe.py`: 256 experts of 2,048 in 7,168 dimensions."""
    deepseek, qwen = (
        {t.name: t.shape for t in A.layer_tensors(published(m), published(m).specs[-1])}
        for m in ("deepseek-v3", "qwen1.5-moe-a2.7b")
    )
    assert deepseek["model.layers.*.mlp.experts.gate_up_proj"] == (256, 4096, 7168)
    assert deepseek["model.layers.*.mlp.experts.down_proj"] == (256, 7168, 2048)
    assert "model.layers.*.mlp.shared_experts.down_proj.weight" in deepseek
    assert "model.layers.*.mlp.shared_expert.down_proj.weight" in qwen


def test_active_parameters_are_whole() -> None:
    """Counts are integers, however experts divide."""
    assert type(A.active_parameters(published("mixtral-8x7b"))) is int
