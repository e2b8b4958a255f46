"""Every family that a config.json may name: its tensors are Transformers' own, and its steps take what a trace says."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from calc.accuracy.residuals import peak_allocated
from calc.estimate.estimate import estimate
from calc.models.architecture import Tensor, tensors
from calc.models.families import FAMILIES, SEEING
from calc.models.hf_config import from_config
from calc.models.sound_config import HEARING
from calc.resolve.parse import parse
from tests.trace.test_trace import HERE, answers

SIZES = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2816, "vocab_size": 16384, "max_position_embeddings": 4096, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
LATENT = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
DEEPSEEK = {
    **ROUTED, **LATENT, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "num_key_value_heads": 16, "head_dim": 32,
}  # fmt: skip
INDEXED = DEEPSEEK | {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 256}
TWISTED = {
    "n_embd": 1024, "n_layer": 4, "n_head": 16, "n_inner": 2816, "n_positions": 4096, "rotary_dim": 32,
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "num_key_value_heads", "head_dim", "max_position_embeddings")),
}  # fmt: skip
SELECTIVE = {"state_size": 8, **dict.fromkeys((
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "max_position_embeddings"))}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 512,
                    "intermediate_size_mlp": 2816, "interleave_moe_layer_step": 2},
    "mllama_text_model": {"head_dim": None, "cross_attention_layers": [1]},
    "qwen2_moe": {**ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 768, "decoder_sparse_step": 1},
    "qwen3_moe": {**ROUTED, "num_experts": 8, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma3_text": {"sliding_window": 512},
    "gemma3n_text": {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 16384, "num_kv_shared_layers": 2,
                     "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "gemma4_text": {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "global_head_dim": 128, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
                    "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 16384, "num_kv_shared_layers": 2,
                    "use_double_wide_mlp": True, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
                    "moe_intermediate_size": 512},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "head_dim": None},
    "lfm2_moe": {**ROUTED, "num_experts": 8, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2,
                 "head_dim": None},
    "ministral3": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
                                       "original_max_position_embeddings": 1024, "llama_4_scaling_beta": 0.1}},
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {**ROUTED, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": [2, 2, 2, 2]},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 512, "moe_num_shared_experts": 1,
                     "moe_layer_end_index": 3},
    "dots1": {**ROUTED, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": DEEPSEEK,
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": INDEXED | {"indexer_types": ["full", "full", "shared", "shared"]},
    "hy_v3": {**ROUTED, "num_experts": 8},
    "deepseek_v4": {**ROUTED, "n_routed_experts": 8, "q_lora_rank": 256, "o_groups": 4, "o_lora_rank": 128,
                    "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "index_n_heads": 4, "index_head_dim": 64,
                    "index_topk": 64, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 4],
                    "intermediate_size": None},
    "youtu": LATENT | {"num_key_value_heads": 16, "head_dim": 32},
    "minicpm3": LATENT | {"num_key_value_heads": 16, "head_dim": None, "scale_depth": 1.4, "scale_emb": 12},
    "minimax": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32,
                "layer_types": ["linear_attention", "full_attention"] * 2},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "exaone_moe": {**ROUTED, "num_experts": 8, "sliding_window": 512},
    "kimi_linear": {**LATENT, "moe_intermediate_size": 512, "num_experts_per_token": 2, "q_lora_rank": None,
                    "num_experts": 8, "num_key_value_heads": 16, "linear_head_dim": 32, "linear_num_heads": 8,
                    "layer_types": ["linear_attention", "full_attention"] * 2},
    "mimo_v2_flash": {**ROUTED, "n_routed_experts": 8, "v_head_dim": 32, "sliding_window": 512, "n_group": 1,
                      "topk_group": 1, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
    "laguna": {**ROUTED, "num_experts": 8, "sliding_window": 512, "num_attention_heads_per_layer": [8, 16] * 2,
               "layer_types": ["full_attention", "sliding_attention"] * 2, "shared_expert_intermediate_size": 768},
    "afmoe": {**ROUTED, "num_experts": 8, "num_shared_experts": 1, "sliding_window": 512, "mup_enabled": True},
    "nemotron": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "nemotron_h": {**ROUTED, "hybrid_override_pattern": "ME*-", "mamba_num_heads": 16, "mamba_head_dim": 64,
                   "n_groups": 4, "ssm_state_size": 64, "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
                   "moe_shared_expert_intermediate_size": 768},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 8, "num_experts_per_tok": 2,
                         "intermediate_size": 512, "shared_intermediate_size": 768, "mamba_n_heads": 32,
                         "mamba_d_head": 64, "mamba_d_state": 64, "head_dim": None},
    "falcon_h1": {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_ssm": 1024, "mamba_d_state": 64},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1},
    "stablelm": {"qk_layernorm": True, "use_parallel_residual": True},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {"n_embd": 1024, "n_layer": 4, "n_head": 16, "n_inner": 2816, "n_positions": 4096, "attn_pdrop": 0.0,
             "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None, "intermediate_size": None,
             "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": None},
    "gpt_neo": {"num_layers": 4, "num_heads": 16, "attention_types": [[["global", "local"], 2]], **dict.fromkeys((
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"))},
    "gptj": TWISTED,
    "codegen": TWISTED,
    "gpt_bigcode": {"n_embd": 1024, "n_layer": 4, "n_head": 16, "n_inner": 2816, "n_positions": 4096, **dict.fromkeys((
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads",
        "head_dim", "max_position_embeddings"))},
    "opt": {"ffn_dim": 2816, "word_embed_proj_dim": 1024, "intermediate_size": None, "num_key_value_heads": None,
            "head_dim": None},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4, "ffn_hidden_size": 2816,
               **dict.fromkeys(("num_key_value_heads", "intermediate_size", "head_dim"))},
    "bloom": {"n_layer": 4, "n_head": 16, **dict.fromkeys((
        "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads", "head_dim",
        "max_position_embeddings"))},
    "mpt": {"d_model": 1024, "n_layers": 4, "n_heads": 16, "max_seq_len": 4096, **dict.fromkeys((
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads",
        "head_dim", "max_position_embeddings"))},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mamba": SELECTIVE,
    "falcon_mamba": SELECTIVE,
    "jamba": {"num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, "head_dim": None},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 64},
}  # fmt: skip
# those that AutoModelForCausalLM runs; Ling's and Baichuan's code lies beside their weights, Mistral 4's is a part of
# Mistral 3's class
APART = (
    "baichuan",
    "bailing_moe",
    "bailing_moe_lite",
    "deepseek",
    "minicpm",
    "mistral4",
    "nemotron-nas",
    "kimi_vl",
    "phi3_v",
    "minicpmv",
    "minicpmv4_5",
)
# families that came since; each way of running is that of a place in the list
LATE = ("mllama_text_model", "deepseek_v4", *HEARING, "codegen", "jamba", "mamba", "falcon_mamba", "laguna")
RUN = (*(family for family in FAMILIES if family not in (*APART, *LATE)), *LATE)
TOWERED = tuple(family for family in SEEING if family not in APART)


def config(family: str) -> dict[str, Any]:
    if family in HEARING:
        sizes = {"d_model": 80, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 160}
        return {"model_type": family, "text_config": config(HEARING[family].text), "audio_config": sizes}
    fields = {"model_type": family, **SIZES, **OWN.get(family, {})}
    return {name: value for name, value in fields.items() if value is not None}


EYES = {"depth": 3, "hidden_size": 320, "num_heads": 4, "out_hidden_size": 1024, "intermediate_size": 640}
SQUARE = {
    "num_hidden_layers": 3, "hidden_size": 320, "num_attention_heads": 4, "intermediate_size": 640, "image_size": 224,
    "patch_size": 14,
}  # fmt: skip
HEARS = {"d_model": 80, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 160, "output_dim": 1024}
HEARD = {
    "qwen2_5_omni_thinker": HEARS,
    "qwen3_omni_moe_thinker": {**HEARS, "downsample_hidden_size": 16},
}
SEEN: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 3, "embed_dim": 320, "num_heads": 4, "mlp_ratio": 2, "hidden_size": 1024},
    "qwen2_5_vl": EYES,
    "qwen2_5_omni_thinker": EYES,
    "qwen3_vl": {**EYES, "deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": {**EYES, "deepstack_visual_indexes": [0, 1]},
    "qwen3_omni_moe_thinker": {**EYES, "deepstack_visual_indexes": [0, 1]},
    "qwen3_5": EYES,
    "qwen3_5_moe": EYES,
    "gemma3": {
        "num_hidden_layers": 3, "hidden_size": 320, "num_attention_heads": 4, "intermediate_size": 640,
        "image_size": 448, "patch_size": 14, "vision_use_head": False,
    },
    "gemma4": {
        "num_hidden_layers": 3, "hidden_size": 320, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 80,
        "intermediate_size": 640, "position_embedding_size": 128, "use_clipped_linears": True,
    },
    "paligemma": {
        "num_hidden_layers": 3, "hidden_size": 320, "num_attention_heads": 4, "intermediate_size": 640,
        "image_size": 448, "patch_size": 28, "vision_use_head": False, "projection_dim": 1024,
    },
    "llava": {
        "model_type": "clip_vision_model", **SQUARE, "image_size": 448, "patch_size": 28, "hidden_act": "quick_gelu",
    },
    "llava_next": {
        "model_type": "clip_vision_model", **SQUARE, "image_size": 448, "patch_size": 56, "hidden_act": "quick_gelu",
    },
    "granitevision": {"model_type": "siglip_vision_model", **SQUARE, "image_size": 448, "patch_size": 56},
    "llava_onevision": {
        "model_type": "siglip_vision_model", **SQUARE, "image_size": 448, "patch_size": 28, "vision_use_head": False,
    },
    "aya_vision": {
        "model_type": "siglip_vision_model", **SQUARE, "image_size": 448, "patch_size": 28, "vision_use_head": False,
    },
    "llama4": {**SQUARE, "projector_input_dim": 512, "projector_output_dim": 512, "vision_output_dim": 512,
               "intermediate_size": 1280, "image_size": 448},
    "mistral3": {name: size for name, size in SQUARE.items() if name != "image_size"},
    "lighton_ocr": {"model_type": "pixtral", **{name: size for name, size in SQUARE.items() if name != "image_size"}},
    "pixtral": {
        "model_type": "pixtral", "num_hidden_layers": 3, "hidden_size": 320, "num_attention_heads": 4,
        "intermediate_size": 640, "patch_size": 28,
    },
    "mllama": {
        "num_hidden_layers": 3, "num_global_layers": 2, "hidden_size": 320, "attention_heads": 4,
        "intermediate_size": 640, "image_size": 448, "patch_size": 28, "vision_output_dim": 960,
        "intermediate_layers_indices": [0, 1],
    },
    "idefics3": SQUARE,
    "smolvlm": SQUARE,
    "glm4v": {**EYES, "image_size": 336},
    "glm4v_moe": {**EYES, "image_size": 336},
    "glm_ocr": EYES,
    "paddleocr_vl": {**SQUARE, "image_size": 448},
    "internvl": {
        "num_hidden_layers": 3, "hidden_size": 320, "num_attention_heads": 4, "intermediate_size": 640,
        "attention_bias": True,
    },
}  # fmt: skip


def seeing(family: str) -> dict[str, Any]:
    """The config of a small model with a vision tower; of Gemma 3 with 64 tokens an image."""
    text = config(SEEING[family].text)
    inner = {name: value for name, value in text.items() if name not in ("model_type", "bos_token_id", "eos_token_id")}
    if family == "gemma3":
        outer = {"mm_tokens_per_image": 64, "image_token_index": 16383}
    elif family == "gemma4":
        outer = {"image_token_id": 16383, "tie_word_embeddings": True}
        inner |= {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}
    elif family == "paligemma":
        outer = {"image_token_index": 16383, "tie_word_embeddings": True, "projection_dim": 1024}
        inner["model_type"] = "gemma"
    elif family in ("idefics3", "smolvlm"):
        outer = {"image_token_id": 16383, "tie_word_embeddings": False, "scale_factor": 4}
        inner["model_type"] = "llama"
    elif family == "llava":
        outer = {"image_token_index": 16383, "tie_word_embeddings": False, "image_seq_length": 256}
        inner["model_type"] = "llama"
    elif family in ("llava_next", "granitevision", "llava_onevision"):
        kind = "llava_next" if family == "granitevision" else family
        outer = {"model_type": kind, "image_token_index": 16383, "tie_word_embeddings": False,
                 "image_grid_pinpoints": [[448, 448], [448, 896]]}  # fmt: skip
        outer |= {"vision_feature_layer": [1, -1], "vision_feature_select_strategy": "full"} if kind != family else {}
        inner["model_type"] = SEEING[family].text
    elif family == "aya_vision":
        outer = {"image_token_index": 16383, "alignment_intermediate_size": 2048}
        inner["model_type"] = "cohere2"
    elif family == "pixtral":
        outer = {"model_type": "llava", "image_token_index": 16383, "tie_word_embeddings": False,
                 "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}  # fmt: skip
        inner["model_type"] = "mistral"
    elif family == "llama4":
        outer = {"image_token_index": 16383}
        inner["model_type"] = "llama4_text"
    elif family == "mllama":
        outer = {"image_token_index": 16383}
        inner["model_type"] = "mllama_text_model"
    elif family == "mistral3":
        outer = {"image_token_index": 16383, "tie_word_embeddings": False, "spatial_merge_size": 2}
        inner["model_type"] = "mistral"
    elif family == "lighton_ocr":
        outer = {"image_token_id": 16383, "tie_word_embeddings": False}
        inner["model_type"] = "qwen3"
    elif family == "internvl":
        outer = {"image_token_id": 16383, "tie_word_embeddings": False}
        inner["model_type"] = "qwen2"
    else:
        outer = {"tie_word_embeddings": False}
        inner["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
        if family in ("glm4v", "glm4v_moe"):
            inner |= {"use_qk_norm": False, "attention_bias": True}
            inner["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]}
        if family == "glm_ocr":
            inner["rope_parameters"]["partial_rotary_factor"] = 1.0
        if family == "paddleocr_vl":  # whose text's config ties a head that the outer one leaves to its own
            outer["image_token_id"], inner["tie_word_embeddings"] = 16383, False
        if family in HEARD:
            outer["audio_config"] = HEARD[family]
    return {"model_type": family, "text_config": inner, "vision_config": SEEN[family], **outer}


def lines(items: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


def shaped(ours: Iterable[Tensor]) -> Counter[tuple[str, tuple[int, ...]]]:
    """The number of tensors of each name and shape."""
    found = Counter[tuple[str, tuple[int, ...]]]()
    for t in ours:
        found[t.name, t.shape] += t.count
    return found


def test_tensors_are_those_of_transformers_by_name_and_shape() -> None:
    found = answers(HERE / "modules.py", given=lines([config(family) for family in RUN]))
    for family, theirs in zip(RUN, found, strict=True):
        numbered = r"\.(layers|h|blocks|altup_projections|altup_unembed_projections)\.\d+\."
        named = Counter((re.sub(numbered, r".\1.*.", name), tuple(s)) for name, s in theirs.items())
        assert shaped(tensors(from_config(config(family)))) == named, family


def test_tensors_of_towers_are_those_of_transformers_by_name_and_shape() -> None:
    found = answers(HERE / "modules.py", given=lines([seeing(family) for family in TOWERED]))
    for family, theirs in zip(TOWERED, found, strict=True):
        numbered = r"\.(layers?|blocks|deepstack_merger_list|merger_list)\.\d+\."
        named = Counter((re.sub(numbered, r".\1.*.", name), tuple(s)) for name, s in theirs.items())
        assert shaped(tensors(from_config(seeing(family), images=True))) == named, family


ALONE = ("mamba", "falcon_mamba")  # none of whose layers attends
SCANNED = ("jamba", *ALONE)
FLASH = {"attention": "flash", "micro_batch": 2}
SDPA = {"attention": "sdpa", "checkpointing": "full", "micro_batch": 2}
EAGER = {"attention": "eager", "method": "lora", "lora": {"rank": 16, "dtype": "bf16", "targets": ["q_proj", "v_proj"]}}


def way(family: str, turn: int) -> dict[str, Any]:
    """One of three ways of running a family, in turn; flash where it has no other."""
    if family in ("deepseek_v32", "glm_moe_dsa"):  # whose mask of chosen keys only these see
        return SDPA
    # which slope scores, have sinks beside narrow values or entries beside keys, or no code for SDPA
    if family in ("bloom", "mpt", "mimo_v2_flash", "gptj", "codegen", "gpt_neo", "deepseek_v4", *ALONE):
        return {**FLASH, "attention": "eager"}
    fields = SDPA if family == "mllama_text_model" else (FLASH, SDPA, EAGER)[turn % 3]
    without_q_proj = family in ("phi3", "gpt_neox", "gpt2", "gpt_bigcode", "falcon") or bool(
        OWN.get(family, {}).get("q_lora_rank")
    )
    if fields is EAGER and without_q_proj:
        return FLASH
    return FLASH if fields is SDPA and family in ("gemma2", "gpt_oss") else fields  # soft caps and sinks


def test_steps_take_what_their_traces_say(tmp_path: Path) -> None:
    """Small models, whose cos, sin and masks are a larger share than real ones': within half a percent."""
    scenarios = []
    for turn, family in enumerate(RUN):
        path = tmp_path / f"{family}.json"
        path.write_text(json.dumps(config(family)))
        job = {"gpu": "h200", "model": str(path), "task": "sft", "framework": "torch", "seq_len": 1024}
        job |= {"seq_len": 128} if family in SCANNED else {}  # position by position, which takes its time
        scenarios.append(job | {"precision": "bf16", "optimizer": "sgd", "optimizer_impl": "fused"} | way(family, turn))
    traced = answers("-m", "measurements.trace", "--batch", "-", given=lines(scenarios))
    for scenario, record in zip(scenarios, traced, strict=True):
        assert "error" not in record, (scenario["model"], record)
        found = peak_allocated(estimate(parse(scenario)), traced=True)
        assert found == pytest.approx(record["total_peak_bytes"], rel=0.005), Path(scenario["model"]).stem


IMAGE = {"width": 448, "height": 448}
ADAPTED = {"images": {**IMAGE, "count": 2, "freeze": "none"}, "method": "lora", "lora": {"rank": 16, "dtype": "bf16"}}
WAYS: tuple[dict[str, Any], ...] = (
    {"images": IMAGE},
    {"images": {**IMAGE, "freeze": "tower"}, "checkpointing": "full"},
    ADAPTED,
)


# PEFT would adapt experts or a router beside all linears; beside linears by name the tower has no adapters
TOWARDS_TEXT = {
    "images": {**IMAGE, "count": 2, "freeze": "vision"},
    "method": "lora",
    "lora": {"rank": 16, "dtype": "bf16", "targets": ["q_proj", "v_proj"]},
}
SIZED = {"gemma4": {"width": 768, "height": 768}}  # whose images are enlarged to that
NAMED: dict[str, dict[str, Any]] = {"glm4v_moe": TOWARDS_TEXT, "llama4": TOWARDS_TEXT}


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_steps_with_images_take_what_their_traces_say(way: int, tmp_path: Path) -> None:
    scenarios = []
    for family in TOWERED:
        path = tmp_path / f"{family}.json"
        path.write_text(json.dumps(seeing(family)))
        job = {"gpu": "h200", "model": str(path), "task": "sft", "framework": "torch", "seq_len": 1024}
        job |= {"precision": "bf16", "optimizer": "sgd", "optimizer_impl": "fused", "attention": "sdpa"}
        own = NAMED.get(family, ADAPTED) if WAYS[way] is ADAPTED else WAYS[way]
        scenarios.append(job | own | {"images": own["images"] | SIZED.get(family, {})})
    traced = answers("-m", "measurements.trace", "--batch", "-", given=lines(scenarios))
    for scenario, record in zip(scenarios, traced, strict=True):
        assert "error" not in record, (scenario["model"], record)
        found = peak_allocated(estimate(parse(scenario)), traced=True)
        assert found == pytest.approx(record["total_peak_bytes"], rel=0.01), (scenario, record["peak_phase"])
