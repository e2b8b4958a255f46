"""The properties of each known family that its modeling and configuration classes fix, read in Transformers 5.23."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from calc.models.architecture import Names, Norms
from calc.models.vision import Merger, Pixels


@dataclass(frozen=True, slots=True)
class Family:
    """The properties that a family's modeling class fixes, and its config class's defaults for absent fields.

    `biases` names the config fields that give q, k and v, o, and the MLP their biases. `window` says which layers use
    the sliding window where `layer_types` does not: `all` (whatever `layer_types` says), `each`, `even`, `late`,
    `even-early`, `listed` (none without `layer_types`), `period` (those whose number the period does not divide),
    `period-before-last`, `period-after-first`, `after-fourths`, the `unrotated`, or the `rotated` (Llama 4, whose
    windows are chunks: counted as windows of that length). `unrotated` says which layers have no rotary positions:
    `all`, those that do `not-slide`, the `listed`, or all `unless-rope` is the config's `position_embedding_type`.
    `experts` and `expert_size` name the config fields with the number of routed experts and their width. `spelled` maps
    the usual names of fields to the family's own.
    """

    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of Architecture
    biases: tuple[str, str, str] = ("", "", "")
    window: str = ""
    unrotated: str = ""
    experts: str = ""
    expert_size: str = "moe_intermediate_size"
    mla: bool = False
    # layers but for one in `full_attention_interval` are gated delta rules: apart or joined projections, or Kimi's; or
    # all but each second attend in lightning attention
    delta: str = ""
    positions: int | None = None  # rows of a learned embedding of positions beyond their number; None: it has none
    ssm: str = (
        ""  # state spaces: each layer is one block, `blocks`, or they stand `instead` of attention or `beside` it
    )
    interleaved: bool = False  # rotary dimensions lie in pairs: every layer repeats cos and sin
    refused: tuple[str, ...] = ()  # config fields that must be false, or 0: not modelled
    needed: tuple[str, ...] = ()  # config fields that must be true: false is not modelled
    spelled: Mapping[str, str] = field(default_factory=dict)
    dense_size: str = "intermediate_size"  # config field with the width of dense layers' MLPs
    expansion: int = 0  # the MLP's width over the residual stream's, where the config does not give it
    dropout: str = ""  # config field with the probability that the output of attention or MLP is dropped
    embedding_dropout: str = ""  # config field with the probability that the embedding's output is dropped
    parallel: str = ""  # config field that says if attention and MLP both read the layer's input
    own_tables: bool = False  # every layer has cos and sin of all positions in buffers, and picks those of the tokens


# model types whose published code is that of a family
ALIKE = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "gemma4_unified_text": "gemma4_text"}
# model types of two generations: the field that files of the first lack, and the name of its family here
EARLIER = {"bailing_moe": ("use_qk_norm", "bailing_moe_lite")}
# families of whose state spaces PEFT refuses to adapt the output projection (0.21 `tuners/tuners_utils.py`,
# `_check_lora_target_modules_mamba`); the releases below: `calc.models.releases.with_outputs`
UNADAPTED_OUTPUT = ("nemotron_h", "falcon_h1", "mamba", "falcon_mamba")
# families with checkpoints in MXFP4, which Transformers does not train (quantizers/quantizer_mxfp4.py:209)
MXFP4 = ("gpt_oss",)
# Families that Transformers 5 loads from files with separate experts (`conversion_mapping.py`, "qwen2_moe"), and whose
# dense or shared MLPs have linears named as those experts': naming all linears to PEFT adapts the experts too.
CONVERTED = (
    "afmoe", "bailing_moe", "bailing_moe_lite", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5_moe", "exaone_moe",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v3", "kimi_linear", "laguna", "mimo_v2_flash",
    "qwen3_next", "solar_open",
)  # fmt: skip
# families without a class that scores sequences (transformers 5.23 `models/auto/modeling_auto.py`,
# MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
UNSCORED = (
    "afmoe", "apertus", "aya_vision", "bailing_moe", "bailing_moe_lite", "bamba", "codegen", "cohere", "cohere2",
    "deepseek", "deepseek_v32", "deepseek_v4", "dots1", "ernie4_5", "ernie4_5_moe", "exaone_moe", "falcon_h1",
    "gemma3n_text", "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "glm_moe_dsa", "glm_ocr",
    "granite", "granitemoehybrid", "granitevision", "idefics3", "kimi_linear", "kimi_vl", "laguna", "lfm2", "lfm2_moe",
    "lighton_ocr", "llama4", "llama4_text", "llava", "llava_next", "llava_onevision", "mimo_v2_flash", "minicpmv",
    "minicpmv4_5", "minimax_m2", "mistral3", "mllama_text_model", "nemotron_h", "olmoe", "paddleocr_vl", "paligemma",
    "phi3_v", "pixtral", "qwen2_audio", "qwen2_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen3_omni_moe_thinker",
    "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe_text", "smolvlm", "solar_open", "voxtral", "youtu",
)  # fmt: skip
# models with a part for images, whose `text_config` is the language model, and the family it has by default
NESTED = {
    "mllama": "mllama_text_model", "llama4": "llama4_text", "gemma3": "gemma3_text", "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text", "mistral3": "mistral",
    "gemma3n": "gemma3n_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
# models that speak, whose `thinker_config` is the part that is trained
THINKERS = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}


@dataclass(frozen=True, slots=True)
class Sight:
    """The language model of a family that reads images, and what its code fixes of the vision tower.

    `text` is the family of the language model, whose fields stand beside `vision_config`, or in a `text_config` of
    their own, which may name another. `defaults` are those of the config class for absent fields of `vision_config`,
    `spelled` maps the usual names of these fields to the family's own. `blocks` are fields of the blocks' Architecture,
    `tower` of Tower, and `fixed` of the language model's Architecture where it reads images. `apart`: Transformers has
    a class for the language model alone, which a job without images is assumed to take.
    """

    text: str
    defaults: Mapping[str, Any]
    blocks: Mapping[str, Any]
    tower: Mapping[str, Any]
    spelled: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False
    inner: str = "model.language_model"  # the module of the language model
    head: str = "lm_head"
    # it reads blocks that the config names, with no norm behind them: the config class's default, from the end
    taken: int = 0
    kind: str = ""  # the `model_type` of its tower, where its code runs those of other types, too
    ties: bool = False  # a language model that ties its head to its embedding by its own config does so here, too
    # fields around `vision_config` of which one value is modelled: the config class's default, and that value
    only: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    whisper: bool = False  # the part that hears is Whisper's encoder, and no conformer
    coded: bool = False  # the sizes of the tower stand in code, and not in a `vision_config`


_SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_SEEN = Names("model.visual", attention="attn", qkv="qkv", output="proj", layers="blocks")
_PLAIN = dict(norm="layer", norm_bias=True, gated=False)
_ROTARY = dict(norms=Norms("norm1", mlp="norm2"), fused_qkv="split", rotation="fp32", pieces=True)
_PATCHES = dict(in_channels=3, spatial_merge_size=2, temporal_patch_size=2)
# of the published `preprocessor_config.json`: 3136 is 56 x 56, 12845056 is 16384 tokens of 28 x 28
_QWEN2_PIXELS = Pixels(3136, 12845056)
# of `video_processing_qwen2_vl.py`, as in qwen_vl_utils 0.0.11 `vision_process.py`: 128 to 768 tokens of 28 x 28
_QWEN2_FRAMES = Pixels(100352, 602112)
_SEQUENTIAL = Merger("visual.merger", "ln_q", ("mlp.0", "mlp.2"))
_QWEN3_VL = Sight(
    "qwen3",
    dict(depth=27, hidden_size=1152, hidden_act="gelu_pytorch_tanh", intermediate_size=4304, num_heads=16,
         patch_size=16, out_hidden_size=3584, num_position_embeddings=2304,
         deepstack_visual_indexes=(8, 16, 24), **_PATCHES),
    dict(**_PLAIN, **_ROTARY, names=_SEEN._replace(up="linear_fc1", down="linear_fc2")),
    # 65536 is 64 tokens of 32 x 32, 16777216 is 16384 of them; videos: the published `video_preprocessor_config.json`
    dict(patch_bias=True, limits=Pixels(65536, 16777216), video_limits=Pixels(4096, 25165824), interpolated=True,
         merger=Merger("visual.merger", "norm", ("linear_fc1", "linear_fc2"))),
)  # fmt: skip
# the same tower, only whose last block passes its output on (transformers 5.23 `Qwen3_5VisionModel`)
_QWEN3_5 = replace(
    _QWEN3_VL, text="qwen3_5_text", apart=True,
    defaults={name: value for name, value in _QWEN3_VL.defaults.items() if name != "deepstack_visual_indexes"},
)  # fmt: skip
_GLM = Sight(
    "glm4",
    dict(depth=24, hidden_size=1536, hidden_act="silu", intermediate_size=13696, num_heads=12, patch_size=14,
         image_size=336, out_hidden_size=4096, attention_bias=False, **_PATCHES),
    dict(**_ROTARY, names=_SEEN, o_bias=False, mlp_bias=False),
    # of `smart_resize` in `image_processing_glm4v.py`, which counts an image as two frames: 112 x 112 and
    # 6144 tokens of 28 x 28 (`size` of the published `preprocessor_config.json`)
    dict(patch_bias=True, limits=Pixels(6272, 4816896), video_limits=Pixels(12544, 47040000), sampled=True,
         embedding="visual.patch_embed.proj", table="visual.embeddings.position_embedding",
         first_norm="visual.post_conv_layernorm", last_norm="visual.post_layernorm",
         merger=Merger("visual.merger", "post_projection_norm", ("proj", "gate_proj", "up_proj", "down_proj"),
                       kind="convolved", convolution="visual.downsample")),
    dict(intermediate_size="out_hidden_size", between="intermediate_size"),
    fixed=dict(rotary_tables=0),  # all layers share cos and sin
)  # fmt: skip
# the same without positions that are looked up, and with a block's and a projector's width of their own
_GLM_OCR = replace(
    _GLM,
    defaults={**{name: value for name, value in _GLM.defaults.items() if name != "image_size"}, "hidden_size": 1024,
              "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 1536, "attention_bias": True},
    blocks=dict(**_ROTARY, names=_SEEN, qk_norm="heads"),
    tower={name: value for name, value in _GLM.tower.items() if name not in ("sampled", "table", "first_norm")},
    spelled={}, fixed=dict(rotary_tables=0, qkv_bias=False),
)  # fmt: skip
_IDEFICS3 = Sight(
    "llama",
    dict(num_hidden_layers=12, hidden_size=1152, hidden_act="gelu_pytorch_tanh", intermediate_size=3072,
         num_attention_heads=16, num_channels=3, patch_size=32, image_size=224),
    dict(**_PLAIN, norms=Norms("layer_norm1", mlp="layer_norm2"),
         names=Names("model.vision_model", output="out_proj", up="fc1", down="fc2", layers="encoder.layers")),
    # `size` of the published `preprocessor_config.json` is four times the side of a square
    dict(hooked=True, patch_bias=True, embedding="vision_model.embeddings.patch_embedding",
         table="vision_model.embeddings.position_embedding", last_norm="vision_model.post_layernorm", ragged=True,
         along=4, limits=Pixels(1, 10**9), merger=Merger("connector", "", ("modality_projection.proj",), "flat")),
    dict(depth="num_hidden_layers", num_heads="num_attention_heads", in_channels="num_channels"),
    inner="model.text_model",
)  # fmt: skip
_GEMMA3 = Sight(
    "gemma3_text",
    dict(num_hidden_layers=12, hidden_size=768, hidden_act="gelu_pytorch_tanh", intermediate_size=3072,
         num_attention_heads=12, num_channels=3, patch_size=16, image_size=224, vision_use_head=True),
    dict(**_PLAIN, norms=Norms("layer_norm1", mlp="layer_norm2"),
         names=Names("model.vision_tower", output="out_proj", up="fc1", down="fc2", layers="encoder.layers")),
    dict(hooked=True, patch_bias=True, embedding="vision_tower.embeddings.patch_embedding",
         table="vision_tower.embeddings.position_embedding", last_norm="vision_tower.post_layernorm",
         limits=Pixels(1, 10**9),
         merger=Merger("multi_modal_projector", "mm_soft_emb_norm", ("mm_input_projection_weight",), "pooled")),
    dict(depth="num_hidden_layers", num_heads="num_attention_heads", in_channels="num_channels"),
    fixed=dict(masked=True), apart=True,
)  # fmt: skip
_QWEN2_5_VL = Sight(
    "qwen2",
    dict(depth=32, hidden_size=3584, hidden_act="silu", intermediate_size=3420, num_heads=16, patch_size=14,
         out_hidden_size=3584, **_PATCHES),
    dict(**_ROTARY, names=_SEEN),
    dict(hooked=True, windowed=True, limits=_QWEN2_PIXELS, frame_limits=_QWEN2_FRAMES, merger=_SEQUENTIAL),
)  # fmt: skip
_MISTRAL3 = Sight(
    "mistral",
    dict(num_hidden_layers=24, hidden_size=1024, hidden_act="gelu", intermediate_size=4096, num_attention_heads=16,
         num_channels=3, patch_size=16, attention_bias=False),
    dict(norms=Norms("attention_norm", mlp="ffn_norm"), rotation="", o_bias=False, mlp_bias=False,
         names=Names("model.vision_tower.transformer", attention="attention", mlp="feed_forward")),
    # of the published `preprocessor_config.json`: images are made smaller to 1540 pixels of the longer side
    dict(hooked=True, embedding="vision_tower.patch_conv", first_norm="vision_tower.ln_pre", framed=True,
         longest=1540, limits=Pixels(1, 10**9),
         merger=Merger("multi_modal_projector", "norm", ("patch_merger.merging_layer", "linear_1", "linear_2"),
                       "unfolded")),
    dict(depth="num_hidden_layers", num_heads="num_attention_heads", in_channels="num_channels"),
    apart=True, only=dict(multimodal_projector_bias=(False, False), vision_feature_layer=(-1, -1)),
)  # fmt: skip
_LLAVA_MERGER = Merger("multi_modal_projector", "", ("linear_1", "linear_2"), "linears")
_LLAVA_ONLY = dict(multimodal_projector_bias=(True, True), vision_feature_select_strategy=("default", "default"))
_LLAVA = Sight(
    "llama",
    dict(num_hidden_layers=12, hidden_size=768, hidden_act="quick_gelu", intermediate_size=3072,
         num_attention_heads=12, num_channels=3, patch_size=32, image_size=224),
    dict(**_PLAIN, norms=Norms("layer_norm1", mlp="layer_norm2"),
         names=Names("model.vision_tower", output="out_proj", up="fc1", down="fc2", layers="encoder.layers")),
    dict(hooked=True, embedding="vision_tower.embeddings.patch_embedding",
         table="vision_tower.embeddings.position_embedding", classes="vision_tower.embeddings.class_embedding",
         first_norm="vision_tower.pre_layrnorm", last_norm="vision_tower.post_layernorm", limits=Pixels(1, 10**9),
         merger=_LLAVA_MERGER),
    dict(depth="num_hidden_layers", num_heads="num_attention_heads", in_channels="num_channels"),
    taken=-2, kind="clip_vision_model", only=_LLAVA_ONLY,
)  # fmt: skip
# `supported_aspect_ratios` of `MllamaVisionConfig`: columns and rows of squares
_RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
# `image_grid_pinpoints` of `LlavaNextConfig` and of `LlavaOnevisionConfig`: heights and widths
_CUT = dict(grids=((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)), newline="image_newline")
_ONEVISION = tuple([(384 * down, 384 * right) for down in range(1, 7) for right in range(1, 7)])
_LLAVA_NEXT = replace(_LLAVA, tower={**_LLAVA.tower, **_CUT})
_LLAVA_SIGLIP = replace(
    _GEMMA3, apart=False, tower={**_GEMMA3.tower, "merger": _LLAVA_MERGER}, fixed={}, kind="siglip_vision_model",
)  # fmt: skip
# modeling_navit_siglip.py and resampler.py beside the weights of MiniCPM-V 2.6, `max_slice_nums` of its `slice_config`;
# a slice of 448 x 448 pixels has 32 x 32 patches, 4 x 4 of them to each of 64 queries
_MINICPMV = Sight(
    "qwen2",
    dict(num_hidden_layers=12, hidden_size=768, hidden_act="gelu_pytorch_tanh", intermediate_size=3072,
         num_attention_heads=12, num_channels=3, patch_size=32, image_size=224, spatial_merge_size=4),
    dict(**_PLAIN, norms=Norms("layer_norm1", mlp="layer_norm2"),
         names=Names("vpm", output="out_proj", up="fc1", down="fc2", layers="encoder.layers")),
    dict(patch_bias=True, prefix="", sliced=448, tiles=9, limits=Pixels(1, 10**9),
         embedding="vpm.embeddings.patch_embedding", table="vpm.embeddings.position_embedding",
         last_norm="vpm.post_layernorm", merger=Merger("resampler", "", ("proj",), "queries", queries=64)),
    dict(depth="num_hidden_layers", num_heads="num_attention_heads", in_channels="num_channels"),
    inner="llm.model", head="llm.lm_head",
    only=dict(query_num=(64, 64), drop_vision_last_layer=(True, False), version=(None, 2.6)),
)  # fmt: skip
SEEING: Mapping[str, Sight] = {
    "minicpmv": _MINICPMV,
    "minicpmv4_5": replace(_MINICPMV, text="qwen3", only={**_MINICPMV.only, "version": (None, 4.5)}),
    "gemma3": _GEMMA3,
    "paligemma": replace(
        _GEMMA3, text="gemma", apart=False,
        tower={**_GEMMA3.tower, "merger": Merger("multi_modal_projector", "", ("linear",), "each")},
    ),
    "llama4": Sight(
        "llama4_text",
        dict(num_hidden_layers=34, hidden_size=768, hidden_act="gelu", intermediate_size=5632, num_attention_heads=16,
             num_channels=3, patch_size=14, image_size=448, vision_output_dim=7680, pixel_shuffle_ratio=0.5,
             projector_input_dim=4096, projector_output_dim=4096, multi_modal_projector_bias=False),
        dict(**_PLAIN, rotation="complex", by_token=True,
             names=Names("vision_model.model", up="fc1", down="fc2")),
        # `max_patches` of `image_processing_llama4.py`
        dict(hooked=True, flattened=True, prefix="", tiles=16, limits=Pixels(1, 10**9),
             embedding="vision_model.patch_embedding.linear", table="vision_model.positional_embedding_vlm",
             classes="vision_model.class_embedding", first_norm="vision_model.layernorm_pre",
             last_norm="vision_model.layernorm_post",
             merger=Merger("multi_modal_projector", "", ("linear_1",), "inner",
                           inner=("vision_model.vision_adapter.mlp.fc1", "vision_model.vision_adapter.mlp.fc2"))),
        dict(depth="num_hidden_layers", num_heads="num_attention_heads", in_channels="num_channels",
             between="projector_output_dim"),
        apart=True, inner="language_model.model", head="language_model.lm_head",
    ),
    "llava": _LLAVA,
    "llava_next": _LLAVA_NEXT,
    "mllama": Sight(
        "mllama_text_model",
        dict(num_hidden_layers=32, num_global_layers=8, hidden_size=1280, hidden_act="gelu", intermediate_size=5120,
             attention_heads=16, num_channels=3, patch_size=14, image_size=448, attention_bias=False, max_num_tiles=4,
             vision_output_dim=7680, intermediate_layers_indices=(3, 7, 15, 23, 30), supported_aspect_ratios=_RATIOS),
        dict(**_PLAIN, o_bias=False, names=Names("model.vision_model.transformer", up="fc1", down="fc2")),
        dict(hooked=True, embedding="vision_model.patch_embedding", classes="vision_model.class_embedding",
             first_norm="vision_model.layernorm_pre", last_norm="vision_model.layernorm_post", limits=Pixels(1, 10**9),
             merger=Merger("multi_modal_projector", "", ("",), "stacked")),
        dict(depth="num_hidden_layers", num_heads="attention_heads", in_channels="num_channels"),
        apart=True,
    ),
    # image_embedding_phi3_v.py beside the weights of Phi-3-vision-128k-instruct, with the sizes of CLIP ViT-L/14-336;
    # `num_crops` of the published `preprocessor_config.json` of Phi-3.5-vision-instruct
    "phi3_v": replace(
        _LLAVA, text="phi3", kind="", only={}, coded=True, inner="model",
        defaults=dict(num_hidden_layers=24, hidden_size=1024, hidden_act="quick_gelu", intermediate_size=4096,
                      num_attention_heads=16, num_channels=3, patch_size=14, image_size=336),
        blocks={**_LLAVA.blocks, "names": Names(
            "model.vision_embed_tokens.img_processor.vision_model", output="out_proj", up="fc1", down="fc2",
            layers="encoder.layers")},
        tower={
            **{name: value.replace("vision_tower", "img_processor.vision_model") if isinstance(value, str) else value
               for name, value in _LLAVA.tower.items()},
            "hooked": False, "crops": 4, "prefix": "model.vision_embed_tokens.",
            "merger": Merger("img_projection", "", ("0", "2"), "linears"),
        },
    ),
    "granitevision": replace(
        _LLAVA_SIGLIP, text="granite", tower={**_LLAVA_SIGLIP.tower, **_CUT}, taken=-2,
        only={**_LLAVA_ONLY, "vision_feature_select_strategy": ("default", "full")},
    ),
    "llava_onevision": replace(
        _LLAVA_SIGLIP, text="qwen2", tower={**_LLAVA_SIGLIP.tower, **_CUT, "grids": _ONEVISION, "most": 9}, taken=-1,
        ties=True, only={**_LLAVA_ONLY, "vision_feature_select_strategy": ("full", "full")},
    ),
    # of the published `preprocessor_config.json`: images are made smaller to 1024 pixels of the longer side
    "pixtral": replace(
        _MISTRAL3, apart=False, tower={**_MISTRAL3.tower, "longest": 1024, "merger": _LLAVA_MERGER},
        only=dict(multimodal_projector_bias=(True, True), vision_feature_layer=(-2, -1),
                  vision_feature_select_strategy=("default", "full")),
    ),
    # tiles as `max_patches` of GOT-OCR2's image processor says, which Aya Vision has, too
    "aya_vision": replace(
        _LLAVA_SIGLIP, text="cohere2", taken=-1, only=dict(vision_feature_select_strategy=("full", "full")),
        tower={**_GEMMA3.tower, "tiles": 12,
               "merger": Merger("multi_modal_projector", "layernorm", ("linear_1", "linear_2"), "halved",
                                joined=True)},
    ),
    "gemma4": Sight(
        "gemma4_text",
        dict(num_hidden_layers=16, hidden_size=768, hidden_activation="gelu_pytorch_tanh", intermediate_size=3072,
             num_attention_heads=12, num_key_value_heads=12, head_dim=64, patch_size=16, pooling_kernel_size=3,
             position_embedding_size=10240, use_clipped_linears=False, standardize=False, attention_bias=False,
             in_channels=3),
        dict(norms=_SANDWICH, norm_fp32=True, norm_power=True, qk_norm="heads", values_normed=True, by_token=True,
             rotation="axes", o_bias=False, mlp_bias=False,
             names=Names("model.vision_tower", layers="encoder.layers")),
        # `max_soft_tokens` of `image_processing_gemma4.py`, 280 of 48 x 48, and of `video_processing_gemma4.py`, 70
        dict(filled=True, embedding="vision_tower.patch_embedder.input_proj",
             table="vision_tower.patch_embedder.position_embedding_table", limits=Pixels(1, 645120),
             video_limits=Pixels(1, 161280),
             merger=Merger("embed_vision", "", ("embedding_projection",), "averaged")),
        dict(depth="num_hidden_layers", num_heads="num_attention_heads", spatial_merge_size="pooling_kernel_size",
             num_position_embeddings="position_embedding_size", hidden_act="hidden_activation"),
        apart=True,
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "qwen2_vl": Sight(
        "qwen2",
        dict(depth=32, embed_dim=1280, hidden_act="quick_gelu", mlp_ratio=4, num_heads=16, patch_size=14,
             hidden_size=3584, **_PATCHES),
        dict(**_PLAIN, **_ROTARY, names=_SEEN._replace(up="fc1", down="fc2")),
        dict(hooked=True, limits=_QWEN2_PIXELS, frame_limits=_QWEN2_FRAMES, merger=_SEQUENTIAL),
        dict(hidden_size="embed_dim", out_hidden_size="hidden_size"),
    ),
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen2_5_omni_thinker": replace(
        _QWEN2_5_VL, whisper=True,
        blocks={**_QWEN2_5_VL.blocks, "fused_qkv": "", "by_token": True, "names": _SEEN._replace(q="q", k="k", v="v")},
    ),
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": replace(_QWEN3_VL, text="qwen3_moe"),
    "qwen3_omni_moe_thinker": replace(
        _QWEN3_VL, text="qwen3_moe", whisper=True,
        tower={**_QWEN3_VL.tower, "merger": _SEQUENTIAL, "deep_name": "visual.merger_list.*"},
    ),
    "glm4v": _GLM,
    "glm4v_moe": replace(_GLM, text="glm4_moe", fixed=dict(qk_norm="")),
    "glm_ocr": _GLM_OCR,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, text="qwen3_5_moe_text"),
    "mistral3": _MISTRAL3,
    "lighton_ocr": replace(
        _MISTRAL3, text="qwen3", apart=False, only={},
        blocks={**_MISTRAL3.blocks, "names": Names("model.vision_encoder.transformer", attention="attention",
                                                   mlp="feed_forward")},
        tower={**_MISTRAL3.tower, "embedding": "vision_encoder.patch_conv", "first_norm": "vision_encoder.ln_pre",
               "merger": Merger("vision_projection", "norm", ("patch_merger.merging_layer", "linear_1", "linear_2"),
                                "unfolded")},
    ),
    # modeling_kimi_vl.py beside the weights of Kimi-VL-A3B-Instruct, as vLLM 97d4c38 `models/moonvit.py` copies it
    "kimi_vl": Sight(
        "deepseek_v3",
        dict(num_hidden_layers=27, hidden_size=1152, hidden_act="gelu_pytorch_tanh", intermediate_size=4304,
             num_attention_heads=16, in_channels=3, patch_size=14, init_pos_emb_height=64, init_pos_emb_width=64,
             merge_kernel_size=(2, 2)),
        dict(**_PLAIN, norms=Norms("norm0", mlp="norm1"), fused_qkv="split", rotation="complex", by_token=True,
             names=Names("vision_tower.encoder", attention="", qkv="wqkv", output="wo", up="fc0", down="fc1",
                         layers="blocks")),
        # `in_token_limit` of the published `preprocessor_config.json`: patches of an image
        dict(patch_bias=True, resized=True, prefix="", limits=Pixels(1, 4096 * 14**2),
             embedding="vision_tower.patch_embed.proj", table="vision_tower.patch_embed.pos_emb",
             last_norm="vision_tower.encoder.final_layernorm",
             merger=Merger("multi_modal_projector", "pre_norm", ("linear_1", "linear_2"))),
        dict(depth="num_hidden_layers", num_heads="num_attention_heads", spatial_merge_size="merge_kernel_size"),
        inner="language_model.model", head="language_model.lm_head",
    ),
    "paddleocr_vl": Sight(
        "ernie4_5",
        dict(num_hidden_layers=27, hidden_size=1152, hidden_act="gelu_pytorch_tanh", intermediate_size=4304,
             num_attention_heads=16, num_channels=3, patch_size=14, image_size=384, spatial_merge_size=2),
        dict(**_PLAIN, norms=Norms("layer_norm1", mlp="layer_norm2"), rotation="fp32", pieces=True, by_token=True,
             names=Names("model.visual.vision_model", output="out_proj", up="fc1", down="fc2",
                         layers="encoder.layers")),
        # of the published `preprocessor_config.json`
        dict(patch_bias=True, interpolated=True, each_image=True, limits=Pixels(147384, 2822400),
             embedding="visual.vision_model.embeddings.patch_embedding",
             table="visual.vision_model.embeddings.position_embedding",
             last_norm="visual.vision_model.post_layernorm",
             merger=Merger("projector", "pre_norm", ("linear_1", "linear_2"))),
        dict(depth="num_hidden_layers", num_heads="num_attention_heads", in_channels="num_channels"),
        # every third of the rotation reads a position of its own, once for all layers (`PaddleOCRRotaryEmbedding`)
        fixed=dict(rotation="", rotary_tables=0),
    ),
    "internvl": Sight(
        "qwen2",
        dict(num_hidden_layers=24, hidden_size=1024, hidden_act="gelu", intermediate_size=4096, num_attention_heads=16,
             num_channels=3, patch_size=14, image_size=448, attention_bias=False, use_qk_norm=False,
             norm_type="layer_norm"),
        dict(**_PLAIN, layer_scaled=True, norms=Norms("layernorm_before", mlp="layernorm_after"),
             names=Names("model.vision_tower", attention="attention", output="projection_layer", up="fc1", down="fc2",
                         layers="encoder.layer")),
        # of the published `processor_config.json`: up to 12 tiles, and a small picture of the whole
        dict(hooked=True, patch_bias=True, embedding="vision_tower.embeddings.patch_embeddings.projection",
             table="vision_tower.embeddings.position_embeddings", classes="vision_tower.embeddings.cls_token", tiles=12,
             limits=Pixels(1, 10**9),
             merger=Merger("multi_modal_projector", "layer_norm", ("linear_1", "linear_2"), "narrow", joined=True)),
        dict(depth="num_hidden_layers", num_heads="num_attention_heads", in_channels="num_channels"),
    ),
}  # fmt: skip
# Families whose code runs other towers, too, and the name in SEEING of each pair: `LlavaForConditionalGeneration` makes
# the tower of the type that `vision_config` names, and so does LLaVA-NeXT's, of which Transformers' documentation calls
# a model with SigLIP's tower Granite Vision. The `version` of a MiniCPM-V says which language model it has.
TOWERS = {
    ("minicpmv", "4.5"): "minicpmv4_5",
    ("llava", "pixtral"): "pixtral",
    ("llava_next", "siglip_vision_model"): "granitevision",
}
_ATTENTION = ("attention_bias", "attention_bias", "")
_LLAMA = ("attention_bias", "attention_bias", "mlp_bias")
_ONE = Norms(mlp="")
_AFTER = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_LATE = dict(use_sliding_window=False, sliding_window=4096, max_window_layers=28)
_SPARSE = dict(num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=None)
_GEMMA = dict(head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True, attention_bias=False)
_GELU = dict(hidden_act="hidden_activation")
_GPT2 = dict(
    hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head", intermediate_size="n_inner",
    max_position_embeddings="n_positions", hidden_act="activation_function", attention_dropout="attn_pdrop",
)  # fmt: skip
_HYBRID = dict(
    max_position_embeddings=32768, attention_bias=False, head_dim=256, partial_rotary_factor=0.25,
    full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4,
)  # fmt: skip
_GATED = dict(norm_fp32=True, qk_norm="heads", output_gate="joined")
_SHARED = dict(shared_experts=1, shared_name="mlp.shared_expert", shared_gate=True, shared_first=True)
_SHORT = dict(
    qk_norm="heads", norms=Norms("operator_norm", mlp="ffn_norm"),
    names=Names(final_norm="embedding_norm", output="out_proj", q_norm="q_layernorm", k_norm="k_layernorm",
                mlp="feed_forward", gate="w1", up="w3", down="w2"),
)  # fmt: skip
_LATE_NORMS = dict(qk_norm="heads", qk_norm_late=True, names=Names(q_norm="query_layernorm", k_norm="key_layernorm"))
_MLA = dict(attention_bias=False, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
_MAMBA1 = dict(
    ssm_state="mamba_d_state",
    ssm_kernel="mamba_d_conv",
    ssm_conv_bias="mamba_conv_bias",
    ssm_bias="mamba_proj_bias",
)
_MAMBA1_ALONE = dict(
    ssm_state="state_size", ssm_kernel="conv_kernel", ssm_conv_bias="use_conv_bias", ssm_bias="use_bias",
    mamba_expand="expand", mamba_dt_rank="time_step_rank",
)  # fmt: skip
# no layer attends: one head as wide as the stream stands for those that the config lacks
_SELECTIVE = dict(
    num_attention_heads=1, num_key_value_heads=1, intermediate_size=1, state_size=16, conv_kernel=4, expand=2,
    time_step_rank="auto", use_conv_bias=True, residual_in_fp32=True,
)  # fmt: skip
_MAMBA = dict(
    wide_stream=True, norms=Norms("norm", mlp=""),
    names=Names(model="backbone", embedding="embeddings", final_norm="norm_f", attention="mixer", mlp="mixer",
                ssm="mixer"),
)  # fmt: skip
_MAMBA2 = dict(
    ssm_heads="mamba_n_heads", ssm_head_dim="mamba_d_head", ssm_groups="mamba_n_groups", ssm_state="mamba_d_state",
    ssm_kernel="mamba_d_conv", ssm_chunk="mamba_chunk_size", ssm_conv_bias="mamba_conv_bias",
    ssm_bias="mamba_proj_bias",
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family(dict(max_position_embeddings=2048, attention_bias=False, mlp_bias=False), biases=_LLAMA),
    # modeling_baichuan.py beside the weights of Baichuan 2 7B: the shapes of Llama, and `NormHead`
    "baichuan": Family(dict(model_max_length=4096), dict(head_normed=True),
                       spelled=dict(max_position_embeddings="model_max_length")),
    # modeling_decilm.py beside the weights of Llama-3_3-Nemotron-Super-49B: Llama's layers, of which a search left out
    # attention or MLP, or chose the MLP's width
    "nemotron-nas": Family(
        dict(max_position_embeddings=2048, attention_bias=False, mlp_bias=False, intermediate_size=None,
             block_configs=None),
        biases=_LLAMA,
    ),
    "llama4_text": Family(
        dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, attention_bias=False,
             intermediate_size_mlp=16384, num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1,
             moe_layers=None, use_qk_norm=True, no_rope_layers=None, no_rope_layer_interval=4,
             attention_chunk_size=8192, attn_temperature_tuning=True),
        dict(qk_norm_late=True, rotation="fp32", tuned=True, narrow_softmax="always", router="feed_forward.router",
             routing="all", experts_input_first=True, shared_experts=1,
             shared_name="feed_forward.shared_expert", names=Names(mlp="feed_forward")),
        biases=_ATTENTION, window="rotated", unrotated="listed", experts="num_local_experts",
        expert_size="intermediate_size", dense_size="intermediate_size_mlp", needed=("attn_temperature_tuning",),
        spelled=dict(sliding_window="attention_chunk_size", shared_expert_intermediate_size="intermediate_size"),
    ),
    # Llama 3.2 Vision: layers of Llama's between others that attend to images, and 8 tokens more than logits
    "mllama_text_model": Family(
        dict(num_key_value_heads=8, max_position_embeddings=131072,
             cross_attention_layers=(3, 8, 13, 18, 23, 28, 33, 38), dropout=0.0),
        dict(beyond=8), refused=("dropout",),
    ),
    "mistral": Family(
        dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
        window="all",
    ),
    "mixtral": Family(
        dict(num_key_value_heads=8, max_position_embeddings=131072, num_local_experts=8, num_experts_per_tok=2),
        dict(routing_uncast=True), window="all", experts="num_local_experts", expert_size="intermediate_size",
    ),
    "qwen2": Family(dict(num_key_value_heads=32, **_LATE), dict(qkv_bias=True), window="late"),
    "qwen2_moe": Family(
        dict(num_key_value_heads=16, qkv_bias=True, num_experts=60, moe_intermediate_size=1408,
             shared_expert_intermediate_size=5632, **_LATE, **_SPARSE | dict(num_experts_per_tok=4)),
        _SHARED, biases=("qkv_bias", "", ""),
        window="even-early", experts="num_experts",
    ),
    "qwen3": Family(
        dict(num_key_value_heads=32, head_dim=128, attention_bias=False, **_LATE),
        dict(qk_norm="heads"), biases=_ATTENTION, window="late",
    ),
    "qwen3_moe": Family(
        dict(num_key_value_heads=4, attention_bias=False, num_experts=128, moe_intermediate_size=768,
             **_LATE, **_SPARSE),
        dict(qk_norm="heads"), biases=_ATTENTION, window="all", experts="num_experts",
    ),
    "qwen3_next": Family(
        dict(num_key_value_heads=2, intermediate_size=5632, num_experts=512, moe_intermediate_size=512,
             shared_expert_intermediate_size=512, norm_topk_prob=True, **_HYBRID,
             **_SPARSE | dict(num_experts_per_tok=10)),
        dict(**_GATED, **_SHARED), biases=_ATTENTION, experts="num_experts", delta="joined",
    ),
    "qwen3_5_text": Family(
        dict(num_key_value_heads=4, **_HYBRID), _GATED, biases=_ATTENTION, delta="apart",
    ),
    "qwen3_5_moe_text": Family(
        dict(num_key_value_heads=2, intermediate_size=None, num_experts=256, num_experts_per_tok=8,
             moe_intermediate_size=512, shared_expert_intermediate_size=512, **_HYBRID),
        dict(**_GATED, **_SHARED), biases=_ATTENTION, experts="num_experts", delta="apart",
    ),
    "gemma": Family(
        dict(num_key_value_heads=16, hidden_act="gelu_pytorch_tanh", **_GEMMA), dict(norm_fp32=True), biases=_ATTENTION,
    ),
    "gemma2": Family(
        dict(num_key_value_heads=4, hidden_activation="gelu_pytorch_tanh", sliding_window=4096,
             attn_logit_softcapping=50.0, final_logit_softcapping=30.0, **_GEMMA),
        dict(norms=_SANDWICH, norm_fp32=True), biases=_ATTENTION, window="even", spelled=_GELU,
    ),
    "phi3": Family(
        dict(max_position_embeddings=4096),
        dict(fused_qkv="sliced", fused_gate_up=True, rotation="joined"), window="all",
    ),
    "deepseek_v2": Family(
        dict(max_position_embeddings=2048, mlp_bias=False, n_routed_experts=64, moe_intermediate_size=1407,
             n_shared_experts=2, first_k_dense_replace=0, v_head_dim=128, **_MLA),
        dict(routing="fp32", routing_normed=False, routing_uncast=True), biases=_LLAMA, experts="n_routed_experts",
        mla=True,
    ),
    "deepseek_v3": Family(
        dict(max_position_embeddings=4096, num_key_value_heads=128, n_routed_experts=256, num_experts_per_tok=8,
             moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3, v_head_dim=128, **_MLA),
        dict(routing="fp32", routing_uncast=True), biases=_ATTENTION, experts="n_routed_experts", mla=True,
    ),
    "deepseek_v32": Family(
        dict(max_position_embeddings=163840, num_key_value_heads=128, n_routed_experts=256, num_experts_per_tok=8,
             moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3, v_head_dim=128,
             index_n_heads=64, index_head_dim=128, index_topk=2048, **_MLA),
        dict(routing="fp32", routing_uncast=True, masked=True), biases=_ATTENTION, experts="n_routed_experts",
        mla=True,
    ),
    "deepseek_v4": Family(
        dict(max_position_embeddings=1048576, num_key_value_heads=1, head_dim=512, q_lora_rank=1024,
             partial_rotary_factor=None, qk_rope_head_dim=None, o_groups=8, o_lora_rank=1024, n_routed_experts=256,
             num_experts_per_tok=6, moe_intermediate_size=2048, n_shared_experts=1, scoring_func="sqrtsoftplus",
             sliding_window=128, layer_types=None, compress_ratios=None, compress_rates=None, compress_rate_csa=None,
             compress_rate_hca=None, index_n_heads=64, index_head_dim=128, index_topk=512, hc_mult=4,
             hc_sinkhorn_iters=20, attention_bias=False, mlp_bias=False),
        dict(routing="softplus", clamped=True, attention_sinks=True, lowered="beside", norm_fp32=True, rotation="fp32",
             kept_wide=("norm", "sink", "stream", "position"), names=Names(output="o_b_proj")),
        experts="n_routed_experts", dense_size="moe_intermediate_size", refused=("attention_bias", "mlp_bias"),
    ),
    "glm_moe_dsa": Family(
        dict(max_position_embeddings=202752, num_key_value_heads=64, n_routed_experts=256, num_experts_per_tok=8,
             moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3, v_head_dim=256,
             index_n_heads=32, index_head_dim=128, index_topk=2048, index_topk_freq=1, index_skip_topk_offset=2,
             index_topk_pattern=None, indexer_types=None,
             **_MLA | dict(q_lora_rank=2048, qk_nope_head_dim=192)),
        dict(routing="fp32", routing_uncast=True, masked=True), biases=_ATTENTION, experts="n_routed_experts",
        mla=True,
    ),
    "gpt_oss": Family(
        dict(num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, attention_bias=True,
             sliding_window=128, num_local_experts=128, num_experts_per_tok=4),
        dict(attention_sinks=True, lowered="beside", expert_bias=True, router_bias=True, experts_input_first=True,
             experts_clamped=True, router="mlp.router", routing="best", norm_fp32=True, rotation="joined"),
        biases=_ATTENTION, window="even", experts="num_local_experts", expert_size="intermediate_size",
    ),
    "gemma3_text": Family(
        dict(num_attention_heads=8, num_key_value_heads=4, vocab_size=262208, hidden_activation="gelu_pytorch_tanh",
             sliding_window=4096, sliding_window_pattern=6, attn_logit_softcapping=None, final_logit_softcapping=None,
             use_bidirectional_attention=False, **_GEMMA | dict(max_position_embeddings=131072)),
        dict(norms=_SANDWICH, norm_fp32=True, qk_norm="heads"), biases=_ATTENTION, window="period", spelled=_GELU,
    ),
    "gemma3n_text": Family(
        dict(num_key_value_heads=2, vocab_size=262400, hidden_activation="gelu_pytorch_tanh", sliding_window=512,
             sliding_window_pattern=5, final_logit_softcapping=30.0, hidden_size_per_layer_input=256,
             vocab_size_per_layer_input=262144, num_kv_shared_layers=15, altup_num_inputs=4, altup_active_idx=0,
             altup_correct_scale=True, laurel_rank=64, activation_sparsity_pattern=None,
             **_GEMMA | dict(max_position_embeddings=32768)),
        dict(norms=_SANDWICH, norm_fp32=True, norm_power=True, qk_norm="heads", values_normed=True, by_token=True),
        biases=_ATTENTION, window="period", spelled=_GELU, needed=("altup_correct_scale",),
        refused=("altup_active_idx",),
    ),
    "gemma4_text": Family(
        dict(num_key_value_heads=4, vocab_size=262144, hidden_activation="gelu_pytorch_tanh", sliding_window=512,
             sliding_window_pattern=6, final_logit_softcapping=None, global_head_dim=512,
             num_global_key_value_heads=None, attention_k_eq_v=False, hidden_size_per_layer_input=256,
             vocab_size_per_layer_input=262144, num_kv_shared_layers=0, use_double_wide_mlp=False,
             enable_moe_block=False, num_experts=None, top_k_experts=None, moe_intermediate_size=None,
             **_GEMMA | dict(max_position_embeddings=131072)),
        dict(norms=_SANDWICH, norm_fp32=True, norm_power=True, qk_norm="heads", values_normed=True, by_token=True,
             output_scaled=True, experts_beside=True, experts_name="experts", router="router.proj", router_linear=True,
             routing_uncast=True),
        biases=_ATTENTION, window="period-before-last", experts="num_experts",
        spelled=dict(**_GELU, num_experts_per_tok="top_k_experts"),
    ),
    "lfm2": Family(
        dict(num_key_value_heads=8, max_position_embeddings=128000, tie_embedding=True, intermediate_size=12288,
             block_ff_dim=None, block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0, block_multiple_of=256,
             conv_L_cache=3, conv_bias=False, full_attn_idxs=None),
        _SHORT, spelled=dict(tie_word_embeddings="tie_embedding"),
    ),
    "lfm2_moe": Family(
        dict(num_key_value_heads=8, max_position_embeddings=128000, tie_embedding=True, intermediate_size=7168,
             moe_intermediate_size=1792, num_experts=32, num_experts_per_tok=4, num_dense_layers=2,
             norm_topk_prob=True, conv_L_cache=3, conv_bias=False),
        dict(**_SHORT, router="feed_forward.gate", routing="sigmoid"),
        experts="num_experts",
        spelled=dict(tie_word_embeddings="tie_embedding", first_k_dense_replace="num_dense_layers"),
    ),
    "olmo2": Family(
        dict(max_position_embeddings=2048, attention_bias=False),
        dict(norms=_AFTER, norm_fp32=True, qk_norm="width", rotation="fp32"), biases=_ATTENTION,
    ),
    "olmo3": Family(
        dict(max_position_embeddings=2048, attention_bias=False, sliding_window=4096, sliding_window_pattern=4),
        dict(norms=_AFTER, norm_fp32=True, qk_norm="width", rotation="fp32"), biases=_ATTENTION, window="period",
    ),
    "granite": Family(
        dict(max_position_embeddings=2048, attention_bias=False, mlp_bias=False),
        dict(embedding_scaled=True, residual_scaled=True, logits_scaled=True), biases=_LLAMA,
    ),
    "hyperclovax": Family(
        dict(max_position_embeddings=2048, attention_bias=False, mlp_bias=False, use_post_norm=True),
        dict(embedding_scaled=True, residual_scaled=True, logits_scaled=True,
             norms=Norms(attention_output="post_norm1", mlp_output="post_norm2")),
        biases=_LLAMA,
    ),
    "glm": Family(
        dict(num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, attention_bias=True,
             partial_rotary_factor=0.5),
        dict(fused_gate_up=True, rotation="joined"), biases=("attention_bias", "", ""), interleaved=True,
    ),
    "glm4": Family(
        dict(num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, attention_bias=True,
             partial_rotary_factor=0.5),
        dict(fused_gate_up=True, rotation="joined",
             norms=Norms(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")),
        biases=("attention_bias", "", ""), interleaved=True,
    ),
    "smollm3": Family(
        dict(num_key_value_heads=4, tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
             use_sliding_window=False, no_rope_layers=None, no_rope_layer_interval=4),
        biases=_LLAMA, window="unrotated", unrotated="listed",
    ),
    "seed_oss": Family(
        dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_bias=True,
             attention_out_bias=False, mlp_bias=False, attention_dropout=0.1, residual_dropout=0.1),
        biases=("attention_bias", "attention_out_bias", "mlp_bias"), dropout="residual_dropout",
    ),
    "exaone4": Family(
        dict(num_key_value_heads=32, max_position_embeddings=2048, sliding_window=4096, sliding_window_pattern=4),
        dict(norms=_AFTER, qk_norm="heads"), window="period", unrotated="not-slide",
    ),
    "ministral": Family(
        dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096), window="each",
    ),
    "ministral3": Family(
        dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, sliding_window=None), window="all",
    ),
    "cwm": Family(
        dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, sliding_window=8192, mlp_bias=False),
        biases=("", "", "mlp_bias"), window="after-fourths",
    ),
    "helium": Family(
        dict(num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, attention_bias=False, mlp_bias=False),
        dict(norm_fp32=True), biases=("attention_bias", "", "mlp_bias"), interleaved=True,
    ),
    "ernie4_5": Family(
        dict(num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, tie_word_embeddings=True,
             use_bias=False),
        dict(rotation="fp32"), biases=("use_bias", "use_bias", "use_bias"), interleaved=True,
    ),
    "internlm3": Family(
        dict(num_key_value_heads=2, head_dim=128, attention_bias=False, mlp_bias=False), biases=_LLAMA,
    ),
    "apertus": Family(
        dict(hidden_act="xielu", max_position_embeddings=65536, attention_bias=False),
        dict(gated=False, qk_norm="heads", norms=Norms("attention_layernorm", mlp="feedforward_layernorm")),
        biases=_ATTENTION,
    ),
    "hunyuan_v1_dense": Family(
        dict(max_position_embeddings=2048, attention_bias=False), _LATE_NORMS, biases=_ATTENTION,
    ),
    "hunyuan_v1_moe": Family(
        dict(max_position_embeddings=2048, attention_bias=False, num_experts=1, moe_topk=1, num_shared_expert=1),
        dict(**_LATE_NORMS, shared_first=True, shared_name="mlp.shared_mlp", router="mlp.gate.wg", router_linear=True),
        biases=_ATTENTION,
        experts="num_experts", expert_size="intermediate_size",
        spelled=dict(num_experts_per_tok="moe_topk", n_shared_experts="num_shared_expert"),
    ),
    "ernie4_5_moe": Family(
        dict(num_key_value_heads=4, max_position_embeddings=131072, tie_word_embeddings=True, use_bias=False,
             moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2,
             moe_layer_start_index=1),
        dict(rotation="fp32", routing="fp32", shared_first=True), biases=("use_bias", "use_bias", "use_bias"),
        interleaved=True, experts="moe_num_experts",
        spelled=dict(num_experts_per_tok="moe_k", n_shared_experts="moe_num_shared_experts",
                     first_k_dense_replace="moe_layer_start_index"),
    ),
    "dots1": Family(
        dict(num_key_value_heads=32, max_position_embeddings=2048, attention_bias=False, n_routed_experts=128,
             num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=0,
             sliding_window=4096, max_window_layers=62),
        dict(qk_norm="heads", routing="fp32", routing_uncast=True), biases=_ATTENTION, window="late",
        experts="n_routed_experts",
    ),
    "glm4_moe_lite": Family(
        dict(num_key_value_heads=20, max_position_embeddings=202752, n_routed_experts=64, num_experts_per_tok=4,
             moe_intermediate_size=1536, n_shared_experts=1, first_k_dense_replace=1,
             **_MLA | dict(q_lora_rank=768, qk_nope_head_dim=192), v_head_dim=256),
        dict(routing="fp32", routing_uncast=True), biases=_ATTENTION, experts="n_routed_experts", mla=True,
    ),
    "hy_v3": Family(
        dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, attention_bias=False,
             num_experts=192, num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=1536,
             first_k_dense_replace=1, enable_moe_fp32_combine=True),
        dict(qk_norm="heads", routing="fp32", routing_uncast=True), biases=_ATTENTION, experts="num_experts",
        spelled=dict(n_shared_experts="num_shared_experts"),
    ),
    "youtu": Family(
        dict(num_key_value_heads=16, max_position_embeddings=131072, tie_word_embeddings=True, v_head_dim=128, **_MLA),
        biases=_ATTENTION, mla=True,
    ),
    # modeling_minicpm.py beside the weights of MiniCPM-2B and MiniCPM4-8B: Llama's layers of Transformers 4.36, whose
    # cos, sin and rotation are fp32; what is divided before the head is as wide as a state
    "minicpm": Family(
        dict(max_position_embeddings=2048, tie_word_embeddings=True, attention_bias=False),
        dict(residual_scaled=True, embedding_scaled=True, rotation="fp32", repeated=True, cached_bytes=4),
        biases=_ATTENTION, own_tables=True,
    ),
    "minicpm3": Family(
        dict(num_key_value_heads=40, max_position_embeddings=32768, tie_word_embeddings=True, v_head_dim=64,
             **_MLA | dict(q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32)),
        dict(residual_scaled=True), biases=_ATTENTION, mla=True,
    ),
    "mistral4": Family(
        dict(num_key_value_heads=32, max_position_embeddings=1048576, n_routed_experts=128, num_experts_per_tok=4,
             moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=0, v_head_dim=128,
             **_MLA | dict(q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64)),
        dict(routing="narrow", routing_uncast=True, tuned=True), biases=_ATTENTION, experts="n_routed_experts",
        mla=True,
    ),
    "minimax_m2": Family(
        dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=196608, num_local_experts=256,
             num_experts_per_tok=8),
        dict(qk_norm="width", rotation="joined", routing_uncast=True), experts="num_local_experts",
        expert_size="intermediate_size",
    ),
    "nemotron_h": Family(
        dict(num_key_value_heads=8, head_dim=128, mlp_hidden_act="relu2", max_position_embeddings=4096,
             attention_bias=False, mlp_bias=False, hybrid_override_pattern=None,
             layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
             mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, chunk_size=128,
             use_conv_bias=True, use_bias=False, mamba_ssm_cache_dtype=None, n_routed_experts=0, num_experts_per_tok=2,
             moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688, moe_latent_size=None),
        dict(gated=False, norm_fp32=True, norms=Norms("norm", mlp=""), router="mixer.gate",
             shared_name="mixer.shared_experts", shared_experts=1, routing="fp32", routing_uncast=True,
             names=Names(embedding="embeddings", final_norm="norm_f", attention="mixer", mlp="mixer", ssm="mixer")),
        biases=_LLAMA, ssm="blocks", experts="n_routed_experts", refused=("residual_in_fp32",),
        spelled=dict(hidden_act="mlp_hidden_act", shared_expert_intermediate_size="moe_shared_expert_intermediate_size",
                     ssm_heads="mamba_num_heads", ssm_head_dim="mamba_head_dim", ssm_groups="n_groups",
                     ssm_state="ssm_state_size", ssm_kernel="conv_kernel", ssm_chunk="chunk_size",
                     ssm_conv_bias="use_conv_bias", ssm_bias="use_bias"),
    ),
    "granitemoehybrid": Family(
        dict(max_position_embeddings=2048, attention_bias=False, num_local_experts=8, num_experts_per_tok=2,
             shared_intermediate_size=1024, position_embedding_type=None, mamba_n_heads=128, mamba_d_head=64,
             mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_chunk_size=256, mamba_conv_bias=True,
             mamba_proj_bias=False),
        dict(embedding_scaled=True, residual_scaled=True, logits_scaled=True, fused_gate_up=True,
             router="block_sparse_moe.router", routing="best-fp32", shared_name="shared_mlp", shared_experts=1,
             names=Names(mlp="shared_mlp", gate_up="input_linear", down="output_linear")),
        biases=_ATTENTION, ssm="instead", dense_size="shared_intermediate_size", unrotated="unless-rope",
        experts="num_local_experts", expert_size="intermediate_size",
        spelled=dict(shared_expert_intermediate_size="shared_intermediate_size", **_MAMBA2),
    ),
    "falcon_h1": Family(
        dict(num_key_value_heads=8, max_position_embeddings=8192, attention_bias=False, mlp_bias=False,
             mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4,
             mamba_chunk_size=256, mamba_conv_bias=True, mamba_proj_bias=False, mamba_rms_norm=False),
        dict(multipliers=True, embedding_scaled=True, logits_scaled=True,
             norms=Norms(mlp="pre_ff_layernorm"), names=Names(final_norm="final_layernorm", mlp="feed_forward")),
        biases=_LLAMA, ssm="beside",
        spelled=_MAMBA2,
    ),
    "olmo": Family(
        dict(max_position_embeddings=2048, attention_bias=False), dict(norm="bare", rotation="fp32"),
        biases=_ATTENTION, refused=("clip_qkv",),
    ),
    "nemotron": Family(
        dict(hidden_act="relu2", max_position_embeddings=4096, attention_bias=False, mlp_bias=False),
        dict(norm="one-plus", norm_bias=True, gated=False, rotation="joined"), biases=_LLAMA,
    ),
    "iquestcoder": Family(
        dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, attention_bias=False, mlp_bias=False),
        biases=_LLAMA,
    ),
    "olmoe": Family(
        dict(max_position_embeddings=4096, attention_bias=False, num_experts=64, num_experts_per_tok=8,
             norm_topk_prob=False),
        dict(qk_norm="width"), biases=_ATTENTION, experts="num_experts", expert_size="intermediate_size",
    ),
    "flex_olmo": Family(
        dict(max_position_embeddings=4096, attention_bias=False, num_experts=7, num_experts_per_tok=5,
             norm_topk_prob=False),
        dict(norms=_AFTER, norm_fp32=True, qk_norm="width", rotation="fp32"), biases=_ATTENTION, experts="num_experts",
        expert_size="intermediate_size",
    ),
    "granitemoe": Family(
        dict(max_position_embeddings=2048, attention_bias=False, num_local_experts=8, num_experts_per_tok=2),
        dict(embedding_scaled=True, residual_scaled=True, logits_scaled=True, router="block_sparse_moe.router",
             routing="best-fp32"), biases=_ATTENTION, experts="num_local_experts",
        expert_size="intermediate_size",
    ),
    "glm4_moe": Family(
        dict(num_key_value_heads=8, max_position_embeddings=131072, attention_bias=False, n_routed_experts=128,
             num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1,
             use_qk_norm=False),
        dict(rotation="joined", routing="fp32", routing_uncast=True), biases=("attention_bias", "", ""),
        experts="n_routed_experts",
    ),
    "solar_open": Family(
        dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, intermediate_size=None,
             n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1280, n_shared_experts=1),
        dict(routing="fp32", routing_uncast=True), experts="n_routed_experts",
    ),
    "arcee": Family(
        dict(hidden_act="relu2", max_position_embeddings=4096, attention_bias=False, mlp_bias=False),
        dict(gated=False), biases=_LLAMA,
    ),
    "starcoder2": Family(
        dict(num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, sliding_window=None,
             use_bias=True, tie_word_embeddings=True, residual_dropout=0.0, embedding_dropout=0.0),
        dict(norm="layer", norm_bias=True, gated=False, names=Names(up="c_fc", down="c_proj")),
        biases=("use_bias", "use_bias", "use_bias"), window="all", dropout="residual_dropout",
        embedding_dropout="embedding_dropout",
    ),
    "stablelm": Family(
        dict(num_key_value_heads=32, max_position_embeddings=4096, use_qkv_bias=False, qk_layernorm=False,
             use_parallel_residual=False),
        dict(norm="layer", norm_bias=True, rotation="joined", names=Names(q_norm="q_layernorm", k_norm="k_layernorm")),
        biases=("use_qkv_bias", "", ""), parallel="use_parallel_residual",
    ),
    "phi": Family(
        dict(hidden_act="gelu_new", max_position_embeddings=2048, resid_pdrop=0.0, embd_pdrop=0.0),
        dict(qkv_bias=True, o_bias=True, mlp_bias=True, head_bias=True, norm="layer", norm_bias=True, norms=_ONE,
             parallel=True, gated=False, rotation="joined",
             names=Names(final_norm="final_layernorm", output="dense", up="fc1", down="fc2")),
        dropout="resid_pdrop", embedding_dropout="embd_pdrop", refused=("qk_layernorm",),
    ),
    "gpt_neox": Family(
        dict(hidden_act="gelu", max_position_embeddings=2048, hidden_dropout=0.0, attention_bias=True,
             use_parallel_residual=True),
        dict(mlp_bias=True, norm="layer", norm_bias=True, gated=False, fused_qkv="split", rotation="joined",
             names=Names("gpt_neox", "embed_in", "final_layer_norm", "attention", "query_key_value", "dense",
                         "dense_h_to_4h", "dense_4h_to_h")),
        biases=_ATTENTION, dropout="hidden_dropout", embedding_dropout="hidden_dropout",
        parallel="use_parallel_residual",
    ),
    "gpt2": Family(
        dict(n_inner=None, activation_function="gelu_new", n_positions=1024, tie_word_embeddings=True, resid_pdrop=0.1,
             embd_pdrop=0.1, attn_pdrop=0.1, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False,
             add_cross_attention=False),
        dict(qkv_bias=True, o_bias=True, mlp_bias=True, norm="layer", norm_bias=True, gated=False, fused_qkv="split",
             transposed=True, norms=Norms("ln_1", mlp="ln_2"),
             names=Names("transformer", "wte", "ln_f", "attn", "c_attn", "c_proj", "c_fc", "c_proj", "h",
                         positions="wpe")),
        dropout="resid_pdrop", embedding_dropout="embd_pdrop", expansion=4, positions=0,
        refused=("reorder_and_upcast_attn", "add_cross_attention"), spelled=_GPT2,
    ),
    "gpt_neo": Family(
        dict(intermediate_size=None, activation_function="gelu_new", max_position_embeddings=2048,
             tie_word_embeddings=True, resid_dropout=0.0, embed_dropout=0.0),
        dict(o_bias=True, mlp_bias=True, norm="layer", norm_bias=True, gated=False, wide_scores=True,
             norms=Norms("ln_1", mlp="ln_2"),
             names=Names("transformer", "wte", "ln_f", "attn.attention", output="out_proj", up="c_fc", down="c_proj",
                         layers="h", positions="wpe")),
        dropout="resid_dropout", embedding_dropout="embed_dropout", expansion=4, positions=0,
        spelled=dict(num_hidden_layers="num_layers", num_attention_heads="num_heads", hidden_act="activation_function"),
    ),
    "gptj": Family(
        dict(n_inner=None, activation_function="gelu_new", n_positions=2048, rotary_dim=64, resid_pdrop=0.0,
             embd_pdrop=0.0, attn_pdrop=0.0),
        dict(mlp_bias=True, head_bias=True, norm="layer", norm_bias=True, norms=Norms("ln_1", mlp=""), parallel=True,
             gated=False, by_token=True, wide_scores=True,
             names=Names("transformer", "wte", "ln_f", "attn", output="out_proj", up="fc_in", down="fc_out",
                         layers="h")),
        dropout="resid_pdrop", embedding_dropout="embd_pdrop", expansion=4, spelled=_GPT2,
    ),
    "codegen": Family(
        dict(n_inner=None, activation_function="gelu_new", n_positions=2048, rotary_dim=64, resid_pdrop=0.0,
             embd_pdrop=0.0, attn_pdrop=0.0),
        dict(mlp_bias=True, head_bias=True, norm="layer", norm_bias=True, norms=Norms("ln_1", mlp=""), parallel=True,
             gated=False, by_token=True, wide_scores=True, fused_qkv="quartered", rotation="widened",
             names=Names("transformer", "wte", "ln_f", "attn", output="out_proj", up="fc_in", down="fc_out",
                         layers="h")),
        dropout="resid_pdrop", embedding_dropout="embd_pdrop", expansion=4, spelled=_GPT2,
    ),
    "gpt_bigcode": Family(
        dict(num_key_value_heads=1, n_inner=None, activation_function="gelu_pytorch_tanh", n_positions=1024,
             tie_word_embeddings=True, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, multi_query=True,
             add_cross_attention=False),
        dict(qkv_bias=True, o_bias=True, mlp_bias=True, norm="layer", norm_bias=True, gated=False, fused_qkv="split",
             masks_positions=True, norms=Norms("ln_1", mlp="ln_2"),
             names=Names("transformer", "wte", "ln_f", "attn", "c_attn", "c_proj", "c_fc", "c_proj", "h",
                         positions="wpe")),
        dropout="resid_pdrop", embedding_dropout="embd_pdrop", expansion=4, positions=0, needed=("multi_query",),
        refused=("add_cross_attention",), spelled=_GPT2,
    ),
    "opt": Family(
        dict(max_position_embeddings=2048, activation_function="relu", tie_word_embeddings=True, enable_bias=True,
             dropout=0.1, do_layer_norm_before=True, layerdrop=0.0, word_embed_proj_dim=None,
             _remove_final_layer_norm=False),
        dict(norm="layer", norm_bias=True, gated=False, norms=Norms("self_attn_layer_norm", mlp="final_layer_norm"),
             names=Names("model.decoder", final_norm="final_layer_norm", output="out_proj", up="fc1", down="fc2",
                         mlp="")),
        biases=("enable_bias", "enable_bias", "enable_bias"), dropout="dropout", positions=2,
        refused=("layerdrop",),
        spelled=dict(intermediate_size="ffn_dim", hidden_act="activation_function"),
    ),
    "falcon": Family(
        dict(num_kv_heads=None, ffn_hidden_size=None, activation="gelu", max_position_embeddings=2048,
             tie_word_embeddings=True, bias=False, new_decoder_architecture=False, multi_query=True,
             parallel_attn=True, num_ln_in_parallel_attn=2, hidden_dropout=0.0),
        dict(norm="layer", norm_bias=True, parallel=True, joined=True, gated=False, fused_qkv="expanded", masked=True,
             own_eager=True, names=Names("transformer", "word_embeddings", "ln_f", "self_attention", "query_key_value",
                                          "dense", "dense_h_to_4h", "dense_4h_to_h", "h")),
        biases=("bias", "bias", "bias"), refused=("alibi", "hidden_dropout", "attention_dropout"),
        needed=("multi_query", "parallel_attn"), expansion=4,
        spelled=dict(num_key_value_heads="num_kv_heads", intermediate_size="ffn_hidden_size", hidden_act="activation"),
    ),
    "cohere": Family(
        dict(max_position_embeddings=8192, tie_word_embeddings=True, attention_bias=False, use_qk_norm=False),
        dict(norm="centred", norm_fp32=True, norms=_ONE, parallel=True, rotation="fp32", logits_scaled=True),
        biases=_ATTENTION,
    ),
    "cohere2": Family(
        dict(max_position_embeddings=8192, tie_word_embeddings=True, attention_bias=False, sliding_window=4096,
             sliding_window_pattern=4),
        dict(norm="centred", norm_fp32=True, norms=_ONE, parallel=True, rotation="fp32", logits_scaled=True),
        biases=_ATTENTION, window="period", unrotated="not-slide",
    ),
    "bloom": Family(
        dict(n_inner=None, seq_length=2048, hidden_act="bloom_gelu", tie_word_embeddings=True, hidden_dropout=0.0,
             apply_residual_connection_post_layernorm=False),
        dict(qkv_bias=True, o_bias=True, mlp_bias=True, norm="layer", norm_bias=True, gated=False, fused_qkv="sliced",
             slopes="within",
             names=Names("transformer", "word_embeddings", "ln_f", "self_attention", "query_key_value", "dense",
                         "dense_h_to_4h", "dense_4h_to_h", "h", embedding_norm="word_embeddings_layernorm")),
        unrotated="all", dropout="hidden_dropout", expansion=4, refused=("apply_residual_connection_post_layernorm",),
        spelled=dict(num_hidden_layers="n_layer", num_attention_heads="n_head", intermediate_size="n_inner",
                     max_position_embeddings="seq_length"),
    ),
    "mpt": Family(
        dict(max_seq_len=2048, hidden_act="gelu", tie_word_embeddings=True, intermediate_size=None),
        dict(norm="layer", gated=False, fused_qkv="split", slopes="added", norms=Norms("norm_1", mlp="norm_2"),
             names=Names("transformer", "wte", "norm_f", "attn", "Wqkv", "out_proj", layers="blocks", mlp="ffn")),
        unrotated="all", expansion=4,
        spelled=dict(hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads",
                     max_position_embeddings="max_seq_len"),
    ),
    "bailing_moe": Family(
        dict(num_key_value_heads=4, head_dim=128, max_position_embeddings=32768, use_qkv_bias=False, use_bias=False,
             use_qk_norm=False, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
             num_shared_experts=1, first_k_dense_replace=1, embedding_dropout=0.0, output_dropout=0.0),
        dict(fused_qkv="split", rotation="joined", routing="fp32", routing_uncast=True, experts_apart=True,
             names=Names(embedding="word_embeddings", attention="attention", qkv="query_key_value", output="dense",
                         q_norm="query_layernorm", k_norm="key_layernorm")),
        biases=("use_qkv_bias", "use_bias", ""), experts="num_experts", dropout="output_dropout",
        embedding_dropout="embedding_dropout", needed=("use_qk_norm",),
        spelled=dict(n_shared_experts="num_shared_experts"),
    ),
    # modeling_deepseek.py beside the weights of deepseek-moe-16b-base, whose loop over experts Ling has taken over
    "deepseek": Family(
        dict(max_position_embeddings=2048, attention_bias=False, n_routed_experts=0, num_experts_per_tok=None,
             moe_intermediate_size=1407, n_shared_experts=0, first_k_dense_replace=0, norm_topk_prob=False),
        dict(routing_uncast=True, experts_apart=True), biases=_ATTENTION, experts="n_routed_experts", own_tables=True,
    ),
    # inclusionAI/Ring `models/modeling_bailing_moe.py` (2664f8f): Ling-lite and what was made of it
    "bailing_moe_lite": Family(
        dict(num_key_value_heads=4, head_dim=None, max_position_embeddings=16384, use_qkv_bias=False, use_bias=False,
             num_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, num_shared_experts=2,
             first_k_dense_replace=0, norm_topk_prob=True, embedding_dropout=0.0, output_dropout=0.0, norm_head=False),
        dict(fused_qkv="split", routing_uncast=True, experts_apart=True, repeated=True,
             names=Names(embedding="word_embeddings", attention="attention", qkv="query_key_value", output="dense")),
        biases=("use_qkv_bias", "use_bias", ""), experts="num_experts", dropout="output_dropout",
        embedding_dropout="embedding_dropout", refused=("norm_head",), own_tables=True,
        spelled=dict(n_shared_experts="num_shared_experts"),
    ),
    "phimoe": Family(
        dict(num_key_value_heads=8, max_position_embeddings=131072, attention_bias=False, lm_head_bias=False,
             sliding_window=None, num_local_experts=16, num_experts_per_tok=2, input_jitter_noise=0.0),
        dict(norm="layer", norm_bias=True, router="mlp.router", routing="sampled"), biases=_ATTENTION, window="all",
        experts="num_local_experts", expert_size="intermediate_size",
    ),
    "bamba": Family(
        dict(num_key_value_heads=8, max_position_embeddings=262144, attention_bias=False, mlp_bias=False,
             attn_layer_indices=None, mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=256,
             mamba_d_conv=4, mamba_chunk_size=256, mamba_conv_bias=True, mamba_proj_bias=False),
        dict(rotation="joined", norms=Norms(mlp="pre_ff_layernorm"),
             names=Names(final_norm="final_layernorm", mlp="feed_forward")),
        biases=_LLAMA, ssm="instead", spelled=_MAMBA2,
    ),
    "jamba": Family(
        dict(num_key_value_heads=8, max_position_embeddings=262144, num_experts=16, num_experts_per_tok=2,
             expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16,
             mamba_d_conv=4, mamba_expand=2, mamba_dt_rank="auto", mamba_conv_bias=True, mamba_proj_bias=False),
        dict(norms=Norms(mlp="pre_ff_layernorm"), routing="fp32", routing_normed=False, router="feed_forward.router",
             names=Names(final_norm="final_layernorm", mlp="feed_forward")),
        ssm="instead", unrotated="all", experts="num_experts", expert_size="intermediate_size", spelled=_MAMBA1,
    ),
    "mamba": Family(
        dict(tie_word_embeddings=True, use_bias=False, **_SELECTIVE), _MAMBA, ssm="blocks", unrotated="all",
        needed=("residual_in_fp32",), spelled=_MAMBA1_ALONE,
    ),
    "falcon_mamba": Family(
        dict(tie_word_embeddings=True, use_bias=False, **_SELECTIVE), _MAMBA, ssm="blocks", unrotated="all",
        needed=("residual_in_fp32",), spelled=_MAMBA1_ALONE,
    ),
    "exaone_moe": Family(
        dict(num_key_value_heads=32, max_position_embeddings=2048, sliding_window=4096, sliding_window_pattern=4,
             num_experts=64, num_experts_per_tok=8, moe_intermediate_size=1024, num_shared_experts=1,
             first_k_dense_replace=1, norm_topk_prob=True),
        dict(qk_norm="heads", routing="fp32", routing_uncast=True), window="period", unrotated="not-slide",
        experts="num_experts", spelled=dict(n_shared_experts="num_shared_experts"),
    ),
    "minimax": Family(
        dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=None, num_local_experts=8,
             num_experts_per_tok=2, block_size=256),
        dict(routing_uncast=True, normed_stream=True), window="all", experts="num_local_experts",
        expert_size="intermediate_size", delta="lightning", refused=("router_jitter_noise",),
    ),
    "kimi_linear": Family(
        dict(num_key_value_heads=32, model_max_length=1048576, attention_bias=False, kv_lora_rank=512,
             q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=256,
             num_experts_per_token=8, moe_intermediate_size=1024, num_shared_experts=1, first_k_dense_replace=1,
             moe_renormalize=True, linear_attn_config=None, linear_head_dim=128, linear_num_heads=32,
             linear_conv_kernel_dim=4),
        dict(routing="fp32", routing_uncast=True), biases=_ATTENTION, experts="num_experts", mla=True, delta="kimi",
        unrotated="all",
        spelled=dict(max_position_embeddings="model_max_length", num_experts_per_tok="num_experts_per_token",
                     n_shared_experts="num_shared_experts", norm_topk_prob="moe_renormalize"),
    ),
    "mimo_v2_flash": Family(
        dict(num_key_value_heads=4, swa_num_key_value_heads=None, head_dim=192, v_head_dim=128,
             max_position_embeddings=131072, attention_bias=False, sliding_window=129, sliding_window_pattern=6,
             hybrid_layer_pattern=None, moe_layer_freq=None, first_k_dense_replace=1, n_routed_experts=256,
             num_experts_per_tok=8, moe_intermediate_size=2048, partial_rotary_factor=0.334, norm_topk_prob=True,
             add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True),
        dict(attention_sinks=True, lowered="renamed", values_scaled=True, routing="fp32", routing_uncast=True),
        biases=("attention_bias", "", ""), window="period-after-first", experts="n_routed_experts",
        needed=("add_swa_attention_sink_bias",), refused=("add_full_attention_sink_bias",),
    ),
    "afmoe": Family(
        dict(head_dim=128, max_position_embeddings=16384, attention_bias=False, sliding_window=1024,
             global_attn_every_n_layers=4, num_dense_layers=1, num_experts=64, num_experts_per_tok=6,
             moe_intermediate_size=1408, num_shared_experts=2, mup_enabled=False),
        dict(norms=Norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
             norm_fp32=True, qk_norm="heads", output_gate="apart", router="mlp.router.gate", router_linear=True,
             routing_uncast=True, shared_first=True),
        biases=_ATTENTION, window="period", unrotated="not-slide", experts="num_experts",
        spelled=dict(n_shared_experts="num_shared_experts", first_k_dense_replace="num_dense_layers",
                     sliding_window_pattern="global_attn_every_n_layers"),
    ),
    # heads of another number, half of which rotates, in layers without a window; a number weighs each head's output
    "laguna": Family(
        dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, attention_bias=False,
             sliding_window=512, gating=True, num_attention_heads_per_layer=None, mlp_layer_types=None,
             num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
             moe_router_logit_softcapping=0.0, moe_apply_router_weight_on_input=False),
        dict(qk_norm="heads", output_gate="heads", shared_experts=1, shared_first=True),
        biases=_ATTENTION, window="listed", experts="num_experts",
        refused=("moe_router_logit_softcapping", "moe_apply_router_weight_on_input"),
    ),
}  # fmt: skip
