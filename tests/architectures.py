"""Architectures for tests: of a few dimensions, as published, and drawn at random."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from calc.base.reading import parse_mapping
from calc.models.architecture import Architecture
from calc.models.families import FAMILIES
from calc.models.hf_config import from_config

MODELS = sorted((Path(__file__).parent.parent / "models").glob("*.yaml"))
TINY = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 12, "vocab_size": 10,
}  # fmt: skip
MLA = {"q_lora_rank": 6, "kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 3, "v_head_dim": 5}
DEEPSEEK = {
    **MLA, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 6,
}  # fmt: skip
FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 12}


def tiny(family: str, **fields: Any) -> Architecture:
    return from_config({"model_type": family, **TINY, **fields})


@cache
def record(model: str) -> dict[str, Any]:
    return parse_mapping((MODELS[0].parent / f"{model}.yaml").read_bytes(), f"{model}.yaml")


def published(model: str) -> Architecture:
    return from_config(record(model)["config"])


# DeepSeek-V4's fields bind each other
DRAWN = sorted(name for name, family in FAMILIES.items() if "compress_rates" not in family.defaults)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    small = st.integers(1, 6)
    kv_heads, head_dim = draw(small), 2 * draw(small)
    heads = kv_heads * draw(small)
    experts = draw(small)
    config = {
        "model_type": draw(st.sampled_from(DRAWN)),
        "hidden_size": heads * head_dim, "num_hidden_layers": draw(small),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(small), "rotary_dim": 2,
        "intermediate_size": draw(small), "moe_intermediate_size": draw(small), "vocab_size": draw(small),
        "tie_word_embeddings": draw(st.booleans()), "attention_bias": draw(st.booleans()),
        "num_experts": experts, "num_local_experts": experts, "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)), "first_k_dense_replace": draw(small),
        "new_decoder_architecture": True, "num_kv_heads": kv_heads,
        "moe_num_experts": experts, "moe_k": draw(st.integers(1, experts)),
        "moe_topk": draw(st.integers(1, experts)), "moe_layer_start_index": draw(small),
        "decoder_sparse_step": draw(small), "n_shared_experts": draw(st.integers(0, 2)), "anything_else": None,
        "num_kv_shared_layers": 0, "swa_num_key_value_heads": kv_heads,
    }  # fmt: skip
    config |= dict.fromkeys(FAMILIES[config["model_type"]].needed, True)
    config |= {name: False for name in FAMILIES[config["model_type"]].refused if name in config}
    if FAMILIES[config["model_type"]].ssm:
        own = FAMILIES[config["model_type"]]
        others = ["attention"] if own.ssm == "instead" else ["mlp", "moe"] if own.experts else []
        kinds = ["mamba", *others]
        layers = config["num_hidden_layers"]
        config |= {"layer_types": draw(st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers))}
    if "block_configs" in FAMILIES[config["model_type"]].defaults:
        block = st.fixed_dictionaries({
            "attention": st.just({"n_heads_in_group": heads // kv_heads}),
            "ffn": st.sampled_from([{"ffn_mult": 1.0}, {"ffn_mult": 300.0}, {"no_op": True}]),
        })  # fmt: skip
        layers = config["num_hidden_layers"]
        config |= {"block_configs": draw(st.lists(block, min_size=layers, max_size=layers))}
    spelled = FAMILIES[config["model_type"]].spelled
    return from_config({spelled.get(name, name): value for name, value in config.items()})
