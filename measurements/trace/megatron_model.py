"""The settings of Megatron-core for a model of the catalog: what its converters read in a config.json.

Fusions and precisions are those that Megatron-LM's arguments have where no flag is given (`megatron/training/
arguments.py`).
"""

from typing import Any

import torch

from .case import Case
from .reading import CaseError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe")
ROWS = 128  # --make-vocab-size-divisible-by, for each tensor-parallel rank


def fields(case: Case) -> dict[str, Any]:
    """The model's fields in its config.json; raises CaseError for a family that is not spelled out here."""
    c = dict(case.config.get("text_config", case.config))
    if c["model_type"] not in FAMILIES:
        raise CaseError(f"model: family {c['model_type']!r} cannot be traced here; allowed: {', '.join(FAMILIES)}")
    return c


def settings(case: Case) -> dict[str, Any]:
    """The arguments of `TransformerConfig`, or of `MLATransformerConfig`."""
    c = fields(case)
    qwen = c["model_type"].startswith("qwen2")
    found = {
        "num_layers": case.layers or c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "num_attention_heads": c["num_attention_heads"],
        "num_query_groups": c.get("num_key_value_heads", c["num_attention_heads"]),
        "kv_channels": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        "ffn_hidden_size": c["intermediate_size"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": bool(c.get("attention_bias", qwen)),
        "qk_layernorm": c["model_type"].startswith("qwen3") or bool(c.get("use_qk_norm")),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "perform_initialization": False,
        "gradient_accumulation_fusion": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": True,
        "tensor_model_parallel_size": case.tp,
        "sequence_parallel": case.sequence_parallel,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        **_recomputed(case),
    }
    if c.get("kv_lora_rank"):
        found.update(_latent(c))
    if _experts(c):
        found.update(_routed(c, found["num_layers"]))
    return found


def _recomputed(case: Case) -> dict[str, Any]:
    """Full recomputation is uniform, a layer at a time."""
    if case.ckpt == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if case.ckpt == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": case.again.split("+")}
    return {}


def _latent(c: dict[str, Any]) -> dict[str, Any]:
    """Multi-head latent attention, whose rotation is fused for YaRN alone (`MLATransformerConfig.__post_init__`)."""
    return {
        "multi_latent_attention": True,
        "q_lora_rank": c.get("q_lora_rank"),
        "kv_lora_rank": c["kv_lora_rank"],
        "qk_head_dim": c["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": c["qk_rope_head_dim"],
        "v_head_dim": c["v_head_dim"],
        "qk_layernorm": True,
        "rope_type": "rope",
        "apply_rope_fusion": False,
    }


def _experts(c: dict[str, Any]) -> int:
    return int(c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts") or 0)


def _routed(c: dict[str, Any], layers: int) -> dict[str, Any]:
    """Routed experts, sent by all-to-all and multiplied as groups, with a load-balancing loss."""
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    first = c.get("first_k_dense_replace", 0)
    biased = c["model_type"] in ("deepseek_v3", "glm4_moe")
    groups = c.get("n_group") if (c.get("n_group") or 1) > 1 else None
    return {
        "num_moe_experts": _experts(c),
        "moe_router_topk": c["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": (c.get("n_shared_experts") or 0) * width or None,
        "moe_layer_freq": [0] * first + [1] * (layers - first),
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
        "moe_router_pre_softmax": c["model_type"] == "deepseek_v2",
        "moe_router_score_function": "sigmoid" if biased else "softmax",
        "moe_router_enable_expert_bias": biased,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": c.get("topk_group") if groups else None,
    }


def vocabulary(case: Case) -> int:
    """Rows of the embedding, padded so that each rank has a multiple of 128."""
    rows = ROWS * case.tp
    return int(-(-fields(case)["vocab_size"] // rows) * rows)
