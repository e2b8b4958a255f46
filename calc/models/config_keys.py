"""The fields of a family's `config.json` files: those that `calc.models.hf_config` reads, those that change no tensor.

The latter are taken from the configuration classes of Transformers 5.23 (`configuration_*.py`, with what they pop from
older files) and, where those no longer know a field, from the files that the models' publishers put on the Hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from calc.models.families import ALIKE, FAMILIES, NESTED, SEEING
from calc.models.sound_config import HEARING

# PreTrainedConfig's own, and what nearly all families share.
COMMON = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "quantization_config", "return_dict", "rope_parameters", "rope_scaling", "rope_theta",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "unsloth_version", "use_cache",
})  # fmt: skip
# The fields that `calc.models.hf_config` reads for every family, unless the family spells them otherwise.
_READ = frozenset({
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size",
})  # fmt: skip
_ROUTER = ("norm_topk_prob", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
_GROUPS = ("n_group", "topk_group", "routed_scaling_factor", "num_nextn_predict_layers", "num_mtp_layers")
_DEEPSEEK = (
    *_ROUTER, *_GROUPS, "aux_loss_alpha", "ep_size", "moe_layer_freq", "pretraining_tp", "rope_interleave",
    "scoring_func", "seq_aux", "topk_method",
)  # fmt: skip
_GRANITE = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
_GEMMA = ("cache_implementation", "query_pre_attn_scalar", "use_bidirectional_attention")
_QWEN = ("dual_chunk_attention_config", "use_mrope")
_HYBRID = (
    "attn_output_gate", "mamba_ssm_dtype", "mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "output_gate_type",
)  # fmt: skip
_MAMBA = ("mamba_expand", "mamba_ssm_cache_dtype", "ssm_cfg", "use_mamba_kernels")
_LAYER_NORM = ("layer_norm_eps", "partial_rotary_factor", "rotary_pct")
_RMS = ("rms_norm_eps",)
_LFM2 = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "norm_eps", "num_heads",
    "theta", "use_pos_enc",
)  # fmt: skip
_HUNYUAN = (
    "add_classification_head", "attention_head_dim", "cla_share_factor", "class_num", "dense_list",
    "enable_lm_head_fp32", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "mlp_bias",
    "norm_type", "org_vocab_size", "pool_type", "pretraining_tp", "qk_norm", "rotary_pct", "sep_token_id",
    "text_end_id",
    "text_start_id", "use_cla", "use_qk_norm", "use_rotary_pos_emb",
)  # fmt: skip
_HUNYUAN_MOE = (
    "capacity_factor", "group_limited_greedy", "moe_drop_tokens", "moe_intermediate_size", "moe_layer_num_skipped",
    "moe_random_routing_dropped_token", "n_group", "num_media_embeds", "routed_scaling_factor", "topk_group",
    "use_mixed_mlp_moe",
)  # fmt: skip
_IMAGES = ("image_token_index", "image_token_id", "text_config", "vision_config")
_GPTJ = (
    "gradient_checkpointing", "layer_norm_epsilon", "rotary", "scale_attn_weights", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class",
)  # fmt: skip
CARRIED: Mapping[str, tuple[str, ...]] = {
    "llama": ("pretraining_tp",),
    "nemotron-nas": ("pretraining_tp",),
    "llama4_text": (*_ROUTER, "attn_scale", "cache_implementation", "floor_scale", "for_llm_compressor"),
    "llama4": (*_IMAGES, "boi_token_index", "eoi_token_index"),
    "mixtral": _ROUTER,
    "qwen2": _QWEN,
    "qwen2_moe": (*_ROUTER, *_QWEN),
    "qwen3_moe": (*_ROUTER, "qkv_bias", "shared_expert_intermediate_size", "use_qk_norm"),
    "qwen3_next": (*_ROUTER, *_HYBRID, "rope_interleaved"),
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": (*_ROUTER, *_HYBRID),
    "gemma": (*_GEMMA, "hidden_activation"),
    "gemma2": (*_GEMMA, "hidden_act"),
    "gemma3_text": (*_GEMMA, "hidden_act", "rope_local_base_freq", "_sliding_window_pattern"),
    "gemma3n_text": (*_GEMMA, "altup_coef_clip", "altup_lr_multiplier", "hidden_act", "rope_local_base_freq"),
    "gemma4_text": (
        "cache_implementation", "expert_intermediate_size", "hidden_act", "use_bidirectional_attention",
    ),
    "lfm2": _LFM2,
    "lfm2_moe": (*_ROUTER, *_LFM2, "routed_scaling_factor", "use_expert_bias"),
    "phi3": (
        "attention_bias", "embd_pdrop", "original_max_position_embeddings", "partial_rotary_factor", "resid_pdrop",
    ),
    "deepseek": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": (*_DEEPSEEK, "mlp_layer_types"),
    "deepseek_v4": (
        *_DEEPSEEK, "compress_rope_theta", "expert_dtype", "hc_eps", "mlp_layer_types", "num_hash_layers",
        "swiglu_limit",
    ),
    "glm_moe_dsa": (
        *_DEEPSEEK, "indexer_rope_interleave", "index_share_for_mtp_iteration", "mlp_layer_types", "moe_router_dtype",
        "qk_head_dim", "head_dim",
    ),
    "gpt_oss": (*_ROUTER, "experts_per_token", "initial_context_length", "swiglu_alpha", "swiglu_limit"),
    "granite": _GRANITE,
    "granitemoe": (*_GRANITE, *_ROUTER),
    "hyperclovax": _GRANITE,
    "smollm3": ("max_window_layers", "pretraining_tp"),
    "seed_oss": ("pretraining_tp",),
    "cwm": ("pretraining_tp",),
    "glm4_moe": (*_ROUTER, *_GROUPS, "moe_router_dtype", "partial_rotary_factor", "topk_method"),
    "solar_open": (
        *_ROUTER, *_GROUPS, "attention_bias", "first_k_dense_replace", "partial_rotary_factor", "use_qk_norm",
    ),
    "olmoe": (*_ROUTER, "clip_qkv"),
    "dots1": (*_ROUTER, *_GROUPS, "moe_layer_freq", "pretraining_tp", "scoring_func", "topk_method"),
    "glm4_moe_lite": (*_DEEPSEEK, "mlp_layer_types", "partial_rotary_factor"),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": (*_ROUTER, *_HUNYUAN, *_HUNYUAN_MOE),
    "ernie4_5_moe": (
        *_ROUTER, "compression_ratio", "fuse_rope", "moe_capacity", "moe_gate", "moe_layer_end_index",
        "moe_layer_interval", "moe_norm_min", "moe_use_aux_free", "num_nextn_predict_layers", "use_aux_loss",
    ),
    "hy_v3": (
        *_ROUTER, "enable_attention_fp32_softmax", "enable_lm_head_fp32", "expert_hidden_dim", "mlp_bias",
        "mlp_layer_types", "moe_router_enable_expert_bias", "moe_router_use_sigmoid", "num_nextn_predict_layers",
        "qk_norm", "route_norm", "router_scaling_factor",
    ),
    "youtu": ("embedding_initializer_range", "head_dim", "mlp_bias", "qk_head_dim", "rope_interleave"),
    "minicpm": ("dim_model_base", "mup_denominator", "pretraining_tp", "scale_depth", "scale_emb"),
    "minicpm3": ("dim_model_base", "head_dim", "pretraining_tp", "scale_depth", "scale_emb"),
    "mistral4": (*_DEEPSEEK, "head_dim", "qk_head_dim"),
    "minimax": (
        *_ROUTER, "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor",
        "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor",
    ),
    "minimax_m2": (
        *_ROUTER, "attn_type_list", "attention_bias", "layernorm_full_attention_beta", "mlp_intermediate_size",
        "mtp_transformer_layers", "num_mtp_modules", "qk_norm_type", "rotary_dim", "scoring_func",
        "shared_intermediate_size", "use_mtp", "use_qk_norm", "use_routing_bias",
    ),
    "nemotron_h": (
        *_ROUTER, *_GROUPS, *_MAMBA, "hidden_dropout", "layer_norm_epsilon", "mamba_hidden_act", "mamba_proj_bias",
        "mtp_hybrid_override_pattern", "mtp_layers_block_type", "norm_eps", "num_logits_to_keep",
        "partial_rotary_factor", "rescale_prenorm_residual", "residual_in_fp32", "sliding_window", "time_step_floor",
        "time_step_limit", "time_step_max", "time_step_min", "time_step_rank", "expand", "head_dim",
        "n_shared_experts", "moe_shared_expert_overlap",
    ),
    "granitemoehybrid": (
        *_ROUTER, *_GRANITE, *_MAMBA, "init_method", "logits_to_keep", "mlp_bias", "normalization_function",
        "layers_block_type", "head_dim", "time_step_limit", "time_step_max", "time_step_min",
    ),
    "falcon_h1": (
        *_MAMBA, "attention_in_multiplier", "attention_out_multiplier", "attn_layer_indices", "embedding_multiplier",
        "key_multiplier", "lm_head_multiplier", "mamba_d_ssm", "mamba_norm_before_gate", "mamba_use_mlp",
        "mlp_expansion_factor", "mlp_multipliers", "num_logits_to_keep", "projectors_bias", "ssm_in_multiplier",
        "ssm_multipliers", "ssm_out_multiplier", "time_step_floor", "time_step_limit", "time_step_max",
        "time_step_min", "time_step_rank",
    ),
    "bloom": (
        "attention_softmax_in_fp32", "bias_dropout_fusion", "layer_norm_epsilon", "masked_softmax_fusion", "n_embed",
        "offset_alibi", "pretraining_tp", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id",
    ),
    "mpt": (
        "attn_config", "emb_pdrop", "embedding_fraction", "expansion_ratio", "init_config", "init_device",
        "layer_norm_epsilon", "learned_pos_emb", "logit_scale", "no_bias", "norm_type", "resid_pdrop",
        "tokenizer_name", "verbose",
    ),
    "bailing_moe": (
        *_ROUTER, *_GROUPS, "attention_bias", "max_window_layers", "moe_router_enable_expert_bias", "pretraining_tp",
        "moe_shared_expert_intermediate_size", "mtp_loss_scaling_factor", "norm_head", "norm_softmax",
        "partial_rotary_factor", "rotary_dim", "router_dtype", "score_function", "use_rmsnorm", "use_sliding_window",
    ),
    "bailing_moe_lite": (*_ROUTER, "norm_softmax", "pretraining_tp"),
    "phimoe": (*_ROUTER, "hidden_dropout", "original_max_position_embeddings", "rms_norm_eps"),
    "bamba": (
        *_MAMBA, "attn_rotary_emb", "layers_block_type", "num_logits_to_keep", "partial_rotary_factor",
        "time_step_limit", "z_loss_coefficient",
    ),
    **dict.fromkeys(("mamba", "falcon_mamba"), (
        "d_inner", "d_model", "fused_add_norm", "layer_norm_epsilon", "layers_block_type", "mixer_rms_eps", "n_layer",
        "pad_vocab_size_multiple", "rescale_prenorm_residual", "rms_norm", "ssm_cfg", "time_step_floor",
        "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale", "use_associative_scan",
        "use_falcon_mamba", "use_mambapy",
    )),
    "jamba": (
        *_ROUTER, *_MAMBA, "calc_logits_for_entire_prompt", "layers_block_type", "mamba_inner_layernorms",
        "num_logits_to_keep", "sliding_window", "use_associative_scan", "use_mambapy",
    ),
    "exaone_moe": (
        *_ROUTER, *_GROUPS, "first_last_k_dense_replace", "is_moe_layer", "mlp_layer_types", "mtp_loss_type",
        "mtp_share_layers", "scoring_func", "tokenizer_class", "topk_method",
    ),
    "laguna": (*_ROUTER, "decoder_sparse_step", "gating_types", "mlp_only_layers", "moe_routed_scaling_factor"),
    "afmoe": (
        *_ROUTER, "n_group", "num_expert_groups", "num_limited_groups", "route_norm", "route_scale", "score_func",
        "topk_group", "use_grouped_mm",
    ),
    "kimi_linear": (
        *_DEEPSEEK, "head_dim", "mla_use_nope", "mlp_layer_types", "moe_router_activation_func", "num_expert_group",
        "use_grouped_topk",
    ),
    "mimo_v2_flash": (
        *_ROUTER, *_GROUPS, "attention_chunk_size", "attention_projection_layout", "attention_value_scale",
        "hybrid_block_size", "layernorm_epsilon", "mlp_layer_types", "n_shared_experts", "scoring_func",
        "sliding_window_size", "swa_head_dim", "swa_num_attention_heads", "swa_rope_theta", "swa_v_head_dim",
        "topk_method", "use_qk_norm",
    ),
    "apertus": ("mlp_bias", "post_norm", "qk_norm"),
    "nemotron": ("hidden_dropout", "norm_eps", "partial_rotary_factor", "rope_percent"),
    "flex_olmo": _ROUTER,
    "starcoder2": (
        "activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "mlp_type", "norm_epsilon",
        "norm_type", "scale_attention_softmax_in_fp32", "scale_attn_weights",
    ),
    "stablelm": (*_LAYER_NORM, "hidden_dropout", "rope_pct"),
    "phi": _LAYER_NORM,
    "gpt_neox": (*_LAYER_NORM, "classifier_dropout", "rotary_emb_base"),
    "gpt2": (
        "layer_norm_epsilon", "n_ctx", "n_special", "predict_special_tokens", "scale_attn_weights",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj", "task_specific_params",
    ),
    "gpt_neo": (
        "attention_layers", "attention_types", "classifier_dropout", "gradient_checkpointing", "layer_norm_epsilon",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "window_size",
    ),
    "gptj": _GPTJ,
    "codegen": (*_GPTJ, "n_ctx"),
    "gpt_bigcode": (
        "attention_softmax_in_fp32", "inference_runner", "layer_norm_epsilon", "max_batch_size", "max_sequence_length",
        "pad_key_length", "pre_allocate_kv_cache", "scale_attention_softmax_in_fp32", "scale_attn_weights",
        "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "validate_runner_input",
    ),
    "opt": (
        "init_std", "layer_norm_elementwise_affine", "prefix",
    ),
    "falcon": ("apply_residual_connection_post_layernorm", "layer_norm_epsilon"),
    "cohere": (*_LAYER_NORM, "logit_scale"),
    "cohere2": (
        *_LAYER_NORM, "cache_implementation", "layer_switch", "logit_scale", "order_of_interleaved_layers",
        "position_embedding_type", "use_embedding_sharing", "use_gated_activation", "use_parallel_block",
        "use_parallel_embedding",
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), (
        *_IMAGES, "language_model_only", "video_token_id", "vision_end_token_id", "vision_start_token_id",
    )),
    **dict.fromkeys(("gemma3n", "gemma4", "gemma4_unified"), (
        *_IMAGES, "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index",
        "eoi_token_id", "video_token_id", "vision_soft_tokens_per_image", "audio_soft_tokens_per_image",
    )),
    "gemma3": (*_IMAGES, "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "mm_tokens_per_image"),
    "mllama": _IMAGES,
    "mistral3": (
        *_IMAGES, "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer",
    ),
}  # fmt: skip


@cache
def known(family: str) -> frozenset[str]:
    """The fields of a family of language models."""
    family = ALIKE.get(family, family)
    f = FAMILIES[family]
    read = {
        *_READ,
        *f.defaults,
        *f.biases,
        *f.refused,
        *f.needed,
        f.dense_size,
        f.dropout,
        f.embedding_dropout,
        f.parallel,
    }
    if f.window:
        read |= {"sliding_window"}
    if f.experts:
        read |= {f.experts, f.expert_size, "num_experts_per_tok", "num_local_experts"}
    if f.interleaved:
        read |= {"partial_rotary_factor"}
    read = (read - f.spelled.keys()) | set(f.spelled.values())
    norm = () if "layer" in str(f.fixed.get("norm", "")) or f.fixed.get("norm") == "centred" else _RMS
    return COMMON | (read - {""}) | {*norm, *CARRIED.get(family, ())}


# The fields that a family of language models has here, whichever it is.
MODELLED = frozenset[str]().union(*map(known, FAMILIES))


# Fields of a config with a vision tower, or a part that hears, around those of its language model.
_SEEN = frozenset({
    "vision_config", "text_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "vision_token_id", "downsample_ratio", "image_seq_length", "projector_hidden_act", "vision_feature_layer",
    "vision_feature_select_strategy", "scale_factor", "ignore_index", "num_image_tokens", "projection_dim",
    "multimodal_projector_bias", "audio_config", "image_grid_pinpoints", "use_image_newline_parameter",
    "vision_aspect_ratio", "image_token_index", "video_token_index", "downsample_factor", "audio_token_id",
    "audio_token_index",
    "batch_vision_input", "drop_vision_last_layer", "query_num", "slice_config", "slice_mode", "use_image_id",
    "version", "vision_batch_size",
    "alignment_intermediate_size", "adapter_layer_norm_eps", "alignment_activation_fn", "max_splits_per_img",
    "spatial_merge_size",
})  # fmt: skip


def known_around(family: str) -> frozenset[str]:
    """The fields of a config of this `model_type`; of a model with a part for images, those around `text_config`."""
    if family in SEEING and not SEEING[family].apart:
        return known(SEEING[family].text) | _SEEN
    if family in HEARING:
        return known(HEARING[family].text) | _SEEN
    return COMMON | {*CARRIED[family]} if family in NESTED else known(family)
