"""A model's architecture, read from its published Hugging Face `config.json`.

A field that the config leaves out takes the default of the family's `configuration_*.py` in Transformers 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any, Literal

from calc.models.architecture import BEFORE, CROSSING, Architecture, ConfigError, LayerSpec, Names, Norms
from calc.models.compressed_config import POOLS, compressed, pools
from calc.models.config_keys import MODELLED
from calc.models.families import (
    ALIKE,
    CONVERTED,
    EARLIER,
    FAMILIES,
    NESTED,
    SEEING,
    THINKERS,
    TOWERS,
    UNADAPTED_OUTPUT,
    Family,
    Sight,
)
from calc.models.mixers import AltUp, Broad, Delta, Hyper, Indexer, LayerInputs, Mla, Pools, ShortConv, Ssm
from calc.models.reader import MOST, Reader
from calc.models.sound_config import HEARING, hearing, sound
from calc.models.vision import Tower

# fields of Architecture that a number in the config switches on
_POSITIVE = {
    "softcap_attn": "attn_logit_softcapping",
    "softcap_logits": "final_logit_softcapping",
}
# Transformers' names in `layer_types` for the kinds of layers that are modelled
KINDS = ("full_attention", "sliding_attention")
MLP_KINDS = ("dense", "sparse")  # in `mlp_layer_types`
CONV_KINDS = ("full_attention", "conv")  # of families with short convolutions
DELTA_KINDS = ("full_attention", "linear_attention")  # of families with gated delta rules
Merging = Callable[[int, Mapping[str, Any]], int]
Mixer = Literal["attention", "latent", "compressed", "cross", "delta", "lightning", "ssm", "both", "conv", "none"]
# the kinds of a family's layers with state spaces, by the names that configs have for them
SSM_KINDS: Mapping[str, tuple[Mixer, Literal["dense", "experts", "none"]]] = {
    "mamba": ("ssm", "none"), "linear_attention": ("ssm", "none"), "attention": ("attention", "none"),
    "full_attention": ("attention", "none"), "mlp": ("none", "dense"), "moe": ("none", "experts"),
}  # fmt: skip
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # Nemotron-H's letters for them
# norms of time steps, B and C, by family
PARTS_NORMED: Mapping[str, Literal["", "weighed", "bare"]] = {"jamba": "weighed", "falcon_mamba": "bare"}
SCANNED = 2048  # positions of which mamba-ssm keeps a state (csrc/selective_scan/selective_scan.cpp, `n_chunks`)
STATES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes of a state's element, by its type's name
_SHOWN = 12  # fields that a line lists
ROUNDED = 256  # a searched MLP's width is a multiple of it


def from_config(config: Mapping[str, Any], *, images: bool = False) -> Architecture:
    """The architecture that a Hugging Face `config.json` of a known family describes.

    The five sizes (hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size) must be given,
    except those that Gemma 3's published configs leave out; other fields default as in the family's config class;
    fields that change no tensor are ignored. A model that reads images has its vision tower if its family is
    in `SEEING`, and one whose language model has a class of its own if the job reads `images`; one in `HEARING` has the
    part that hears; of the others, in `NESTED`, the language model alone is described; of those in `THINKERS` the
    thinker.
    Raises ConfigError for an unknown family (and says what else of the config is not modelled), a missing field, or a
    value that no model can have.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("config", config, "a mapping, the content of a config.json")
    config = thinker(config)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in SEEING and (images or not SEEING[model_type].apart):
        return _seeing(config)
    if isinstance(model_type, str) and model_type in HEARING:
        return _hearing(config)
    if isinstance(model_type, str) and model_type in NESTED:
        inner = config.get("text_config")
        if not isinstance(inner, Mapping):
            raise ConfigError("text_config", inner, f"a mapping, the language model of {model_type}")
        config = {"model_type": NESTED[model_type], **inner}
        model_type = config["model_type"]
    model_type = ALIKE.get(model_type, model_type) if isinstance(model_type, str) else model_type
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = [*dict.fromkeys((*FAMILIES, *ALIKE, *NESTED, *SEEING, *HEARING, *THINKERS))]
        strange = _unmodelled(config)
        told = f"not modelled of this config: {strange}" if strange else "each field of this config is one of theirs"
        raise ConfigError("model_type", model_type, f"{', '.join(known)}; {told}", near=() if strange else known)
    lacked, earlier = EARLIER.get(model_type, ("model_type", ""))
    model_type = model_type if lacked in config else earlier
    family = FAMILIES[model_type]
    common = {
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    }
    read = Reader(config, {**common, **family.defaults}, family.spelled)
    hidden, layers, heads = read.integer("hidden_size"), _layers(read), read.integer("num_attention_heads")
    kinds = tuple(SSM_KINDS) if family.ssm else DELTA_KINDS if family.delta else KINDS
    kinds = CONV_KINDS if read.known("conv_L_cache") else kinds
    kinds = tuple(POOLS) if read.known("compress_rates") else kinds
    if family.window == "rotated":
        kinds = (*KINDS, "chunked_attention")
    for index, kind in enumerate(_listed(read.value("layer_types"))):
        if kind not in kinds:
            raise ConfigError(f"layer_types[{index}]", kind, f"{', '.join(kinds)}; other kinds are not modelled", kinds)
    kv_heads = read.optional("num_key_value_heads") or _grouped_heads(read, heads)
    if heads % kv_heads:
        raise read.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    mla = _mla(read) if family.mla else None
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else _head_dim(read, hidden, heads)
    qkv_bias, o_bias, mlp_bias = (bool(name) and read.boolean(name) for name in family.biases)
    window = read.optional("sliding_window") if family.window else None
    sliding = _sliding_layers(family.window, read, layers) if window else ()
    unrotated: tuple[int, ...] = ()
    if family.unrotated == "listed":
        unrotated = _no_rope(read, layers)
    elif family.positions is not None or family.unrotated == "all":
        unrotated = tuple(range(layers))
    elif family.unrotated == "unless-rope":
        unrotated = () if read.value("position_embedding_type") == "rope" else tuple(range(layers))
    elif family.unrotated and window:
        unrotated = tuple(layer for layer in range(layers) if layer not in sliding)
    for names, wanted in ((family.refused, False), (family.needed, True)):
        for name in names:
            if read.on(name) != wanted:
                allowed = "true" if wanted else "false" if read.value(name) is True else "0"
                raise ConfigError(name, read.value(name), f"{allowed} for the family {model_type}; not modelled")
    ssm = _ssm(read) if family.ssm else None
    facts: dict[str, Any] = {
        "qkv_bias": qkv_bias,
        "o_bias": o_bias,
        "mlp_bias": mlp_bias,
        "parallel": bool(family.parallel) and read.boolean(family.parallel),
        "residual_dropout": bool(family.dropout) and read.positive(family.dropout),
        "embedding_dropout": bool(family.embedding_dropout) and read.positive(family.embedding_dropout),
        "attention_dropout": read.positive("attention_dropout"),
        **{field: name in family.defaults and read.positive(name) for field, name in _POSITIVE.items()},
        "sliding_window": window if sliding else None,
        "rotary_dim": int(head_dim * _rotated_share(read))
        if read.known("partial_rotary_factor") and not family.interleaved
        else 0,
        "rotary_tables": 2 * int(head_dim * _rotated_share(read)) if family.interleaved else 0,
        **(_moe(family, read) if family.experts else {}),
        "experts_converted": model_type in CONVERTED,
        **family.fixed,
    }
    if read.known("compress_rates"):
        keys = compressed(read, heads, head_dim)
        # cos and sin are repeated for both of a pair, at each rotation (`apply_rotary_pos_emb`)
        hyper = Hyper(read.integer("hc_mult"), read.integer("hc_sinkhorn_iters"))
        kv_heads, facts = 1, {**facts, "compressed": keys, "hyper": hyper}
        facts |= {"rotary_dim": keys.rope % head_dim, "rotary_tables": 2 * keys.rope}
    if family.own_tables:
        facts |= {"rotary_tables": 2 * head_dim, "cached_positions": read.integer("max_position_embeddings")}
    if "use_post_norm" in family.defaults and not read.boolean("use_post_norm"):
        facts["norms"] = BEFORE
    if "do_layer_norm_before" in family.defaults:
        facts |= _outside(read, hidden, facts["names"])
    if "num_ln_in_parallel_attn" in family.defaults:
        grouped = read.boolean("new_decoder_architecture")
        one = not grouped or read.optional("num_ln_in_parallel_attn") == 1
        facts["norms"] = Norms(mlp="") if one else Norms("ln_attn", mlp="ln_mlp")
        if not grouped:  # the first Falcons, whatever `num_kv_heads` says (`FalconAttention`)
            kv_heads, facts["fused_qkv"] = 1, "picked"
    if "use_qk_norm" in family.defaults and read.boolean("use_qk_norm"):
        weighed = "each" if family.fixed.get("norm") == "centred" else "heads"
        facts["qk_norm"] = "bare" if family.fixed.get("qk_norm_late") else weighed
    if "qk_layernorm" in family.defaults:
        facts["qk_norm"] = "apart" if read.boolean("qk_layernorm") else ""
        facts["norms"] = Norms(mlp="") if facts["parallel"] else BEFORE
    if "rotary_dim" in family.defaults:
        rotated = read.integer("rotary_dim")
        if rotated > head_dim or rotated % 2:
            raise read.error("rotary_dim", rotated, f"an even number, at most {head_dim}, a head's width")
        # cos and sin are repeated for both of a pair, for queries and for keys (`apply_rotary_pos_emb` of GPT-J)
        facts |= {"rotary_dim": rotated % head_dim, "rotary_tables": 4 * rotated}
    if "enable_moe_fp32_combine" in family.defaults:
        facts["shared_fp32"] = read.boolean("enable_moe_fp32_combine")
    if "mup_enabled" in family.defaults:
        facts["embedding_scaled"] = read.boolean("mup_enabled")
    if read.known("use_bidirectional_attention") and read.boolean("use_bidirectional_attention"):
        # a mask of the window is made however short sequences are
        facts["windows_masked"] = True
    if "lm_head_bias" in family.defaults:
        facts["head_bias"] = read.boolean("lm_head_bias")
    if "input_jitter_noise" in family.defaults:
        facts["jittered"] = read.positive("input_jitter_noise")
    if "moe_latent_size" in family.defaults:
        facts["latent_experts"] = read.optional("moe_latent_size") or 0
    if "norm_topk_prob" in family.defaults:
        facts["routing_normed"] = read.boolean("norm_topk_prob")
    dense = _dense_layers(read, layers) if facts.get("experts") else range(layers)
    lightning = family.delta == "lightning"
    delta = _delta(family, read) if family.delta and not lightning else None
    mixers = _mixers(family, read, layers, mla is not None)
    pooling: Sequence[Pools] = pools(read, layers) if read.known("compress_rates") else [""] * layers
    broad = _broad(read, heads, kv_heads) if read.known("global_head_dim") else None
    if read.known("swa_num_key_value_heads"):
        broad, kv_heads = _narrow(read, heads, kv_heads, head_dim)
        facts["value_dim"] = read.integer("v_head_dim")
    if read.known("num_attention_heads_per_layer"):
        broad, heads = _headed(read, layers, sliding, kv_heads, head_dim)
        # halves are joined where all of a head rotates, too (`apply_rotary_pos_emb`)
        facts["rotary_dim"] = int(head_dim * _own_share(read, "sliding_attention", 1.0))
    own = layers - _borrowing(read, layers)
    sparse = _sparse(read, layers) if read.known("activation_sparsity_pattern") else ()
    choosing = _choosing(read, layers) if read.known("index_topk_freq") else range(layers)
    specs = (
        _blocks(read, layers)
        if family.ssm == "blocks"
        else _searched(read, layers, hidden)
        if read.known("block_configs")
        else tuple(
            LayerSpec(
                mixers[n],
                "dense" if n in dense else "experts",
                slides=n in sliding,
                rotated=n not in unrotated,
                broad=broad is not None and n not in sliding,
                borrows=n >= own,
                sparse=n in sparse,
                chooses=n in choosing,
                pools=pooling[n],
            )
            for n in range(layers)
        )
    )
    passed = _passed(read, layers) if read.known("cross_attention_layers") else ()
    if images:
        specs, passed = tuple([CROSSING if n in passed else spec for n, spec in enumerate(specs)]), ()
    specs = tuple([spec for n, spec in enumerate(specs) if n not in passed])
    if not facts.get("experts") and any(spec.mlp == "experts" for spec in specs):
        raise ConfigError(family.experts, 0, "an integer from 1, as there are layers of experts")
    return Architecture(
        half="float16" in (config.get("torch_dtype"), config.get("dtype")),
        family=model_type,
        hidden=hidden,
        specs=specs,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=max([spec.width for spec in specs]) or _intermediate(family, read, hidden),
        vocab=read.integer("vocab_size"),
        tied=read.boolean("tie_word_embeddings"),
        max_positions=read.integer("max_position_embeddings"),
        positions=0 if family.positions is None else read.integer("max_position_embeddings") + family.positions,
        mla=mla,
        indexer=_indexer(read) if read.known("index_topk") and mla else None,
        delta=delta,
        lightning=read.integer("block_size") if lightning else 0,
        ssm=ssm,
        conv=ShortConv(read.integer("conv_L_cache"), read.boolean("conv_bias")) if read.known("conv_L_cache") else None,
        broad=broad,
        passed=len(passed),
        layer_inputs=_layer_inputs(read, layers),
        altup=AltUp(read.integer("altup_num_inputs"), read.integer("laurel_rank"))
        if read.known("altup_num_inputs")
        else None,
        doubled=own < layers and read.known("use_double_wide_mlp") and read.boolean("use_double_wide_mlp"),
        activation=_activation(read),
        **facts,
    )


def thinker(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the part that is trained of a model that speaks (Qwen2.5-Omni); of any other, the config itself."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in THINKERS:
        return config
    inner = config.get("thinker_config")
    if not isinstance(inner, Mapping):
        raise ConfigError("thinker_config", inner, f"a mapping, the thinker of {model_type}")
    return {**inner, "model_type": THINKERS[model_type]}


def seeing(config: Mapping[str, Any]) -> str:
    """The family in `SEEING` of a model that reads images: its model type, or the one that it is with its tower."""
    family: str = config["model_type"]
    vision = config.get("vision_config")
    tower = vision.get("model_type") if isinstance(vision, Mapping) else None
    family = TOWERS.get((family, str(config.get("version"))), family)
    return TOWERS.get((family, tower), family) if isinstance(tower, str) else family


def _seeing(config: Mapping[str, Any]) -> Architecture:
    """A language model with its vision tower."""
    family = seeing(config)
    sight = SEEING[family]
    inner = _speaking(config, family, sight.text)
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    tied = {} if sight.ties and inner.get("tie_word_embeddings") is True else tied
    arch = from_config({**inner, **tied}, images=True)
    vision = config.get("vision_config", {} if sight.coded else None)
    if not isinstance(vision, Mapping):
        raise ConfigError("vision_config", vision, f"a mapping, the vision tower of {family}")
    names = arch.names._replace(model=sight.inner, head=sight.head)
    tower = _tower(family, vision, arch, config)
    both = inner.get("use_bidirectional_attention") == "vision"  # tokens of an image see each other (Gemma 4)
    heard = sound(config.get("audio_config"), arch.hidden, whisper=sight.whisper)
    return replace(arch, family=family, names=names, vision=tower, sound=heard, windows_masked=both, **sight.fixed)


def _hearing(config: Mapping[str, Any]) -> Architecture:
    """A language model with the part that hears."""
    family = config["model_type"]
    inner = _speaking(config, family, HEARING[family].text)
    arch = from_config({**HEARING[family].defaults, **inner})
    names = arch.names._replace(model="model.language_model")
    return replace(arch, family=family, names=names, sound=hearing(family, config.get("audio_config"), arch.hidden))


def _speaking(config: Mapping[str, Any], family: str, usual: str) -> dict[str, Any]:
    """The language model's config of a model with other parts, in `text_config` or beside theirs; `usual`: its type."""
    inner = config.get("text_config")
    if inner in (None, {}):
        parts = ("vision_config", "text_config", "audio_config")
        inner = {name: value for name, value in config.items() if name not in parts}
    if not isinstance(inner, Mapping):
        raise ConfigError("text_config", inner, f"a mapping, the language model of {family}")
    named = inner.get("model_type") if "text_config" in config else None
    return {**inner, "model_type": named if named in FAMILIES else usual}


def _tower(family: str, vision: Mapping[str, Any], arch: Architecture, config: Mapping[str, Any]) -> Tower:
    """The vision tower that the `vision_config` of a `config` describes, in front of the language model `arch`."""
    sight = SEEING[family]
    read = Reader(vision, sight.defaults, sight.spelled)
    beside = Reader(config, dict(spatial_merge_size=2), {}) if sight.tower.get("framed") else read
    resized = sight.tower.get("resized") and read.integer("init_pos_emb_height") * read.integer("init_pos_emb_width")

    def wrong(name: str, given: object, allowed: str) -> ConfigError:
        return ConfigError(f"vision_config.{sight.spelled.get(name, name)}", given, allowed)

    hidden, heads = read.integer("hidden_size"), read.integer("num_heads")
    if hidden % heads:
        raise wrong("num_heads", heads, f"a divisor of {sight.spelled.get('hidden_size', 'hidden_size')} = {hidden}")
    given = {*sight.defaults, *sight.spelled}
    out = read.integer("out_hidden_size") if "out_hidden_size" in given else arch.hidden
    if out != arch.hidden:
        raise wrong("out_hidden_size", out, f"hidden_size = {arch.hidden} of the language model")
    for name, only in ("num_key_value_heads", heads), ("head_dim", hidden // heads):
        if sight.tower.get("filled") and read.integer(name) != only:
            raise wrong(name, read.value(name), f"{only}; others are not modelled")
    if sight.kind and (kind := vision.get("model_type", sight.kind)) != sight.kind:
        raise wrong("model_type", kind, f"{sight.kind}; other towers are not modelled")
    for name, (usual, only) in sight.only.items():
        if (value := config.get(name, usual)) != only:
            raise ConfigError(name, value, f"{repr(only).casefold()}; not modelled")
    patch, side = read.same("patch_size"), read.same("image_size") if "image_size" in given else 0
    edge = 0 if any(sight.tower.get(name) for name in ("sampled", "sliced", "interpolated")) else side
    taken = _taken(config, read, sight.taken) if sight.taken else ()
    depth = max(taken) if taken else read.integer("depth")
    deep = read.value("deepstack_visual_indexes") or ()
    merged, one_each = _merging(family, read, wrong), sight.tower["merger"].one_each
    if not all(type(index) is int and 0 <= index < depth for index in _listed(deep)) or len(deep) > arch.layers:
        raise wrong("deepstack_visual_indexes", deep, f"indices of blocks, below depth = {depth}, one a layer at most")
    globals_, crossed = _globals(read, depth, hidden, wrong) if read.known("num_global_layers") else ((), {})
    blocks = Architecture(
        family=family,
        hidden=hidden,
        specs=(*(LayerSpec(rotated="rotation" in sight.blocks),) * depth, *globals_),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=read.integer("mlp_ratio") * hidden
        if "mlp_ratio" in sight.defaults
        else read.integer("intermediate_size"),
        vocab=1,
        tied=True,
        max_positions=1,
        qkv_bias="attention_bias" not in given or read.boolean("attention_bias"),
        activation=_activation(read),
        **{"o_bias": True, "mlp_bias": True, **sight.blocks, **_vision_norms(read, wrong), **_wrapped(read)},
    )
    return Tower(
        blocks,
        patch=patch,
        frames=read.integer("temporal_patch_size") if "temporal_patch_size" in given else 1,
        channels=read.integer("in_channels"),
        merge=merged(edge // patch, config) if edge or one_each else beside.same("spatial_merge_size"),
        out=out,
        positions=(side // patch) ** 2 or read.optional("num_position_embeddings") or resized or 0,
        edge=edge,
        between=_between(config, sight, read, arch.hidden),
        deep=tuple(deep),
        unread=read.integer("depth") - depth,
        head="vision_tower.head" if "vision_use_head" in given and read.boolean("vision_use_head") else "",
        standardised="standardize" in given and read.boolean("standardize"),
        **{"taken": taken, **sight.tower, **crossed, **(_cut(config, sight, edge) if "grids" in sight.tower else {})},
    )


def _globals(
    read: Reader, depth: int, hidden: int, wrong: Callable[[str, object, str], ConfigError]
) -> tuple[tuple[LayerSpec, ...], dict[str, Any]]:
    """The blocks of Llama 3.2 Vision's second transformer, and the fields of a Tower that say what is beside them."""
    number, tiles = read.integer("num_global_layers"), read.integer("max_num_tiles")
    taken = read.value("intermediate_layers_indices")
    if not all(type(index) is int and 0 <= index < depth for index in _listed(taken)) or not _listed(taken):
        raise wrong("intermediate_layers_indices", taken, f"indices of blocks, below num_hidden_layers = {depth}")
    if (out := read.integer("vision_output_dim")) != (only := hidden * (len(taken) + 1)):
        raise wrong("vision_output_dim", out, f"{only}, the outputs of so many blocks")
    shapes = _listed(read.value("supported_aspect_ratios"))
    if not shapes or not all(
        len(pair := _listed(shape)) == 2 and all(type(n) is int for n in pair) for shape in shapes
    ):
        raise wrong("supported_aspect_ratios", read.value("supported_aspect_ratios"), "a list of columns and rows")
    fields = dict(crossed=number, ratios=len(shapes) + 1, tiles=tiles, taken=(*[n + 1 for n in taken], depth + number))
    return (LayerSpec(rotated=False, weighed=True),) * number, fields


def _wrapped(read: Reader) -> dict[str, Any]:
    """The way in which a tower's linears lie in modules of their own, where they do (Gemma 4)."""
    if not read.known("use_clipped_linears"):
        return {}
    return {"wrapped": "clamped" if read.boolean("use_clipped_linears") else "plain"}


def _taken(config: Mapping[str, Any], read: Reader, usual: int) -> tuple[int, ...]:
    """The blocks, from 1 on, whose output LLaVA's kind reads; `usual`: the config class's, counted from the end."""
    given, depth = config.get("vision_feature_layer", usual), read.integer("depth")
    layers = _listed(given) or (given,)
    found = [layer + (layer < 0) * (depth + 1) for layer in layers if type(layer) is int]
    if len(found) < len(layers) or not all(0 < layer <= depth for layer in found):
        allowed = f"a number from -1 to {-depth}, or a list of such numbers; not modelled"
        raise ConfigError("vision_feature_layer", given, allowed)
    return tuple(found)


ANYRES = "anyres_max_"  # the form of `vision_aspect_ratio`: so many squares' tokens are left of an image


def _cut(config: Mapping[str, Any], sight: Sight, edge: int) -> dict[str, Any]:
    """The sizes to which a LLaVA-NeXT or LLaVA-OneVision resizes images, in squares of `edge`, and the most of them."""
    grids = config.get("image_grid_pinpoints")
    grids = sight.tower["grids"] if grids is None else grids
    pairs = [(pair[0], pair[1]) for pair in map(_listed, _listed(grids)) if len(pair) == 2]
    whole = all(type(side) is int and side > 0 and not side % edge for pair in pairs for side in pair)
    if not pairs or len(pairs) < len(_listed(grids)) or not whole:
        raise ConfigError("image_grid_pinpoints", grids, f"a list of heights and widths, in multiples of {edge}")
    if "most" not in sight.tower:
        return {"grids": tuple(pairs)}
    ratio = config.get("vision_aspect_ratio", f"{ANYRES}{sight.tower['most']}")
    number = ratio.removeprefix(ANYRES) if isinstance(ratio, str) and ratio.startswith(ANYRES) else ""
    if not number.isdecimal() or not 0 < int(number) < 10**6:
        raise ConfigError("vision_aspect_ratio", ratio, "anyres_max_N, such as anyres_max_9")
    return {"grids": tuple(pairs), "most": int(number)}


def _merging(family: str, read: Reader, wrong: Callable[[str, object, str], ConfigError]) -> Merging:
    """The rule by which a family says how many of a square's patches become a token."""
    tower = SEEING[family].tower
    if tower.get("crops"):
        return _fourfold
    if not tower.get("flattened"):
        if name := "downsample_factor" if tower["merger"].kind == "halved" else "scale_factor" * ("along" in tower):
            return _shuffled(name)
        return _single if tower["merger"].one_each else _pooled
    side = {0.5: 2, 0.25: 4, 1: 1}.get(ratio := read.value("pixel_shuffle_ratio"), 0)
    if not side:
        raise wrong("pixel_shuffle_ratio", ratio, "0.25, 0.5 or 1")
    merged, width = read.integer("hidden_size") * side**2, read.integer("between")
    for name, only in ("intermediate_size", merged), ("projector_input_dim", width), ("vision_output_dim", width):
        if read.integer(name) != only:
            raise wrong(name, read.value(name), f"{only}, which the linears around it have; others are not modelled")
    return lambda *_: side


def _vision_norms(read: Reader, wrong: Callable[[str, object, str], ConfigError]) -> dict[str, Any]:
    """The norms of InternViT, which its config names: the small one's are PyTorch's, those of 6B are RMS norms."""
    if not read.known("norm_type"):
        return {}
    kind = read.value("norm_type")
    if kind not in ("layer_norm", "rms_norm"):
        raise wrong("norm_type", kind, "layer_norm, rms_norm")
    normed: dict[str, Any] = {"norm": "rms", "norm_bias": False} if kind == "rms_norm" else {}
    if read.boolean("use_qk_norm"):
        if kind != "rms_norm":
            raise wrong("use_qk_norm", True, "false with norm_type layer_norm; not modelled")
        normed["qk_norm"] = "width"
    return normed


def _shuffled(name: str) -> Merging:
    """The side of the square of patches that become one token, of `side`² patches, as the field `name` says."""

    def merged(side: int, config: Mapping[str, Any]) -> int:
        given = config.get(name, 2)
        if type(given) is int and given > 0 and not side % given:
            return given
        raise ConfigError(name, given, f"a divisor of {side}, a square's patches in a row")

    return merged


def _between(config: Mapping[str, Any], sight: Sight, read: Reader, hidden: int) -> int:
    """The width of a projector's MLP, which Aya Vision's config has outside `vision_config`; 0: it has no own."""
    if sight.tower["merger"].kind == "convolved" and "between" not in sight.spelled:
        return read.integer("in_channels") * hidden  # `GlmOcrVisionModel`
    if sight.tower["merger"].kind != "halved":
        return read.integer("between") if "between" in sight.spelled else 0
    width = Reader(config, dict(alignment_intermediate_size=hidden), {}).integer("alignment_intermediate_size")
    if width % 2:
        raise ConfigError("alignment_intermediate_size", width, "an even number: a gate and as much that it weighs")
    return width


def _fourfold(side: int, config: Mapping[str, Any]) -> int:
    """The same where four patches become a token, whatever a config says (Phi-3 Vision)."""
    return 2


def _single(side: int, config: Mapping[str, Any]) -> int:
    """The same where a token is made of each patch."""
    return 1


def _pooled(side: int, config: Mapping[str, Any]) -> int:
    """The same where the number of an image's tokens is given."""
    tokens = config.get("mm_tokens_per_image", config.get("image_seq_length", 256))
    if type(tokens) is int and tokens > 0 and not side % max(1, isqrt(tokens)) and isqrt(tokens) ** 2 == tokens:
        return side // isqrt(tokens)
    raise ConfigError("mm_tokens_per_image", tokens, f"the square of a divisor of {side}, an image's patches in a row")


def _unmodelled(config: Mapping[str, Any]) -> str:
    """Features of a config that no family here has, in words: kinds of layers, then fields; empty if it has nothing."""
    inner = config.get("text_config")
    parts = [("", config), *([("text_config.", inner)] if isinstance(inner, Mapping) else [])]
    fields = [f"{where}{name}" for where, part in parts for name in part if name not in {*MODELLED, "text_config"}]
    kinds = sum([_strange_layers(part) for _, part in parts], Counter[str]())
    found = [f"{count} layers {kind}" for kind, count in kinds.items()]
    if fields:
        more = f" and {len(fields) - _SHOWN} more" if len(fields) > _SHOWN else ""
        found.append(f"the fields {', '.join(fields[:_SHOWN])}{more}")
    return "; ".join(found)


def _strange_layers(part: Mapping[str, Any]) -> Counter[str]:
    """The number of layers of each kind that no family here has, as `of mamba`: configs spell them in three ways.

    They name the kind of each layer (`layer_types`), number the kinds (`hybrid_layer_pattern`), or list the layers of
    each (`kda_layers`), the last in a mapping of its own.
    """
    found, layers = Counter[str](), part.get("num_hidden_layers")
    for name, value in part.items():
        for inner, own in value.items() if isinstance(value, Mapping) and name != "text_config" else ():
            if inner.endswith("_layers") and inner not in (*MODELLED, "full_attn_layers") and _listed(own):
                found[f"of {inner.removesuffix('_layers')}"] += len(own)
        own = _listed(value)
        if name == "layer_types" or (own and len(own) == layers and all(isinstance(kind, str) for kind in own)):
            found += Counter(f"of {kind}" for kind in own if kind not in (*KINDS, *MLP_KINDS))
        elif own and len(own) == layers and name not in MODELLED and all(type(kind) is int for kind in own):
            found += Counter(f"with {name} {kind}" for kind in own if kind)
    return found


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _layers(read: Reader) -> int:
    """The number of layers, which a config that lists each may leave out (Nemotron-H)."""
    listed = _listed(read.config.get("layers_block_type")) if read.known("layers_block_type") else ()
    return len(listed) if listed and "num_hidden_layers" not in read.config else read.integer("num_hidden_layers")


def _head_dim(read: Reader, hidden: int, heads: int) -> int:
    given = read.optional("head_dim")
    if given is None and hidden % heads:
        raise ConfigError("num_attention_heads", heads, f"a divisor of hidden_size = {hidden}, as there is no head_dim")
    return given or hidden // heads


def _intermediate(family: Family, read: Reader, hidden: int) -> int:
    """The width of dense layers' MLPs; 0 in a family that has none."""
    absent = family.expansion or read.known(family.dense_size)
    listed = read.known("activation_sparsity_pattern")  # Gemma 3n's files have a width for each layer
    given = read.optional(family.dense_size) if absent else (read.same if listed else read.integer)(family.dense_size)
    if read.known("block_auto_adjust_ff_dim"):
        return _adjusted(read, read.optional("block_ff_dim") or given or 0)
    if given is None and family.defaults.get(family.dense_size) is not None:
        raise read.error(family.dense_size, given, "a positive integer")
    return given or family.expansion * hidden


def _adjusted(read: Reader, width: int) -> int:
    """The width of LFM2's MLPs (`Lfm2MLP`): two thirds of the stated one, rounded up, if the config asks for that."""
    factor = read.value("block_ffn_dim_multiplier")
    if not read.boolean("block_auto_adjust_ff_dim"):
        return width
    if factor is None:
        return int(2 * width / 3)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        raise ConfigError("block_ffn_dim_multiplier", factor, "a number above 0, or null")
    multiple = read.integer("block_multiple_of")
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _rotated_share(read: Reader) -> float:
    """The share of a head that is rotated, from either of the two places where a config can state it."""
    name, inner = "partial_rotary_factor", read.value("rope_parameters")
    value = inner[name] if isinstance(inner, Mapping) and name in inner else read.value(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(name, value, "a number above 0, at most 1")
    return value


def _activation(read: Reader) -> str:
    value = read.value("hidden_act")
    if not isinstance(value, str):
        raise read.error("hidden_act", value, "the name of an activation, such as silu")
    # Gemma's first configs say gelu and mean its tanh approximation
    return "gelu_pytorch_tanh" if value == "gelu" and read.defaults["hidden_act"] != "silu" else value


def _mla(read: Reader) -> Mla:
    ranks = (read.integer(n) for n in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return Mla(read.optional("q_lora_rank"), *ranks)


def _broad(read: Reader, heads: int, kv_heads: int) -> Broad:
    """The heads of Gemma 4's layers that attend to all positions; their number differs where keys are values, too."""
    same = read.boolean("attention_k_eq_v")
    own = (read.optional("num_global_key_value_heads") if same else None) or kv_heads
    if heads % own:
        raise read.error("num_global_key_value_heads", own, f"a divisor of num_attention_heads = {heads}")
    return Broad(own, read.integer("global_head_dim"), same)


def _narrow(read: Reader, heads: int, kv_heads: int, head_dim: int) -> tuple[Broad, int]:
    """MiMo-V2-Flash's heads of layers that attend to all positions, and the key-value heads of those with a window.

    These are twice as many where the config does not say (`MiMoV2FlashAttention`), and alone have sinks.
    """
    given = read.optional("swa_num_key_value_heads") or 2 * kv_heads
    if heads % given:
        raise read.error("swa_num_key_value_heads", given, f"a divisor of num_attention_heads = {heads}")
    for name, only in ("swa_num_attention_heads", heads), ("swa_head_dim", head_dim), (
        "swa_v_head_dim", read.integer("v_head_dim"),
    ):  # fmt: skip
        if read.config.get(name, only) != only:
            raise ConfigError(name, read.config[name], f"{only}, as in layers without a window; not modelled")
    return Broad(kv_heads, head_dim), given


def _headed(
    read: Reader, layers: int, sliding: Collection[int], kv_heads: int, head_dim: int
) -> tuple[Broad | None, int]:
    """Laguna's heads of layers that attend to all positions, which rotate by half, and the number of the others."""
    if read.value("gating") not in (True, "per-head"):
        raise ConfigError("gating", read.value("gating"), "true or per-head: others are not modelled")
    usual = read.integer("num_attention_heads")
    listed = read.value("num_attention_heads_per_layer") or [usual] * layers
    if not isinstance(listed, Sequence) or len(listed) != layers or not all(type(n) is int and n > 0 for n in listed):
        allowed = f"a list of num_hidden_layers = {layers} numbers"
        raise ConfigError("num_attention_heads_per_layer", listed, allowed)
    windowed = {heads for n, heads in enumerate(listed) if n in sliding}
    whole = {heads for n, heads in enumerate(listed) if n not in sliding}
    if len(windowed) > 1 or len(whole) > 1 or any(heads % kv_heads for heads in windowed | whole):
        allowed = f"the same multiple of num_key_value_heads = {kv_heads} in all layers of a kind"
        raise ConfigError("num_attention_heads_per_layer", listed, allowed)
    heads = max(whole, default=usual)
    rotated = int(head_dim * _own_share(read, "full_attention", 0.5))
    return Broad(kv_heads, head_dim, heads=heads, rotary_dim=rotated), max(windowed, default=heads)


def _own_share(read: Reader, kind: str, usual: float) -> float:
    """The share of a head that is rotated in layers of a kind, whose rotation the config has by name."""
    own = (read.value("rope_parameters") or {}).get(kind) or {}
    value = own.get("partial_rotary_factor", usual)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"rope_parameters.{kind}.partial_rotary_factor", value, "a number above 0, at most 1")
    return value


def _borrowing(read: Reader, layers: int) -> int:
    """The number of last layers that have no keys and values of their own."""
    number = read.integer("num_kv_shared_layers", 0) if read.known("num_kv_shared_layers") else 0
    if number >= layers:
        raise ConfigError("num_kv_shared_layers", number, f"less than num_hidden_layers = {layers}")
    return number


SPARSE = 10  # first layers of Gemma 3n that are sparse where its config does not say which (`Gemma3nTextConfig`)


def _sparse(read: Reader, layers: int) -> Collection[int]:
    """The layers in whose MLPs most gates are cut off: those with a share above 0."""
    shares = read.value("activation_sparsity_pattern")
    if shares is None:
        return range(SPARSE if layers > SPARSE else 0)
    if not isinstance(shares, Sequence):
        return range(layers if read.positive("activation_sparsity_pattern") else 0)
    if len(shares) != layers or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares):
        allowed = f"a list of num_hidden_layers = {layers} numbers from 0 to below 1"
        raise ConfigError("activation_sparsity_pattern", shares, allowed)
    return [n for n, share in enumerate(shares) if share]


def _outside(read: Reader, hidden: int, names: Names) -> dict[str, Any]:
    """OPT's norms, behind each block or before it and behind all, and its embedding, which may be narrower."""
    before = read.boolean("do_layer_norm_before")
    narrow = read.optional("word_embed_proj_dim") or hidden
    last = "" if not before or read.boolean("_remove_final_layer_norm") else names.final_norm
    return {
        "normed_after": not before,
        "narrow": narrow if narrow != hidden else 0,
        "names": names._replace(final_norm=last),
    }


def _layer_inputs(read: Reader, layers: int) -> LayerInputs | None:
    """The layers' own embeddings, if they have any."""
    if not read.known("hidden_size_per_layer_input") or not read.positive("hidden_size_per_layer_input"):
        return None
    return LayerInputs(read.integer("hidden_size_per_layer_input"), layers, read.integer("vocab_size_per_layer_input"))


def _indexer(read: Reader) -> Indexer:
    if read.optional("q_lora_rank") is None:
        raise ConfigError("q_lora_rank", None, "a rank, from which the indexer makes its queries")
    heads, head_dim, keys = (read.integer(name) for name in ("index_n_heads", "index_head_dim", "index_topk"))
    return Indexer(heads, head_dim, keys, passed=read.known("index_topk_freq"))


CHOOSING = {"F": "full", "S": "shared"}  # letters of `index_topk_pattern` for the kinds in `indexer_types`


def _choosing(read: Reader, layers: int) -> Collection[int]:
    """The layers that choose keys: those listed, or one in `index_topk_freq` after the first (`GlmMoeDsaConfig`)."""
    pattern = read.value("index_topk_pattern")
    types = read.value("indexer_types") or ([CHOOSING.get(c, c) for c in pattern] if pattern else None)
    if types is None:
        every, first = read.integer("index_topk_freq"), read.integer("index_skip_topk_offset", 0)
        return [n for n in range(layers) if max(n - first + 1, 0) % every == 0]
    if not isinstance(types, Sequence) or len(types) != layers or {*types} - {*CHOOSING.values()} or types[0] != "full":
        allowed = f"a list of num_hidden_layers = {layers} times full or shared, the first of them full"
        raise ConfigError("indexer_types", types, allowed)
    return [n for n, kind in enumerate(types) if kind == "full"]


def _mixers(family: Family, read: Reader, layers: int, latent: bool) -> list[Mixer]:
    """The mixer of each layer of a family whose layers all have one."""
    usual: Mixer = "latent" if latent else "both" if family.ssm == "beside" else "attention"
    if family.delta:
        deltas = _delta_layers(read, layers)
        linear: Mixer = "lightning" if family.delta == "lightning" else "delta"
        return [linear if n in deltas else usual for n in range(layers)]
    if read.known("conv_L_cache"):
        attending = _attending(read, layers)
        return [usual if n in attending else "conv" for n in range(layers)]
    if read.known("compress_rates"):
        return ["compressed"] * layers
    if family.ssm == "instead":
        return [SSM_KINDS[kind][0] for kind in _each_layer(read, layers)]
    return [usual] * layers


def _attending(read: Reader, layers: int) -> Collection[int]:
    """The layers of LFM2 with attention: those of that type or, in its first files, those numbered."""
    types = read.value("layer_types")
    if types is not None:
        if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != layers:
            raise ConfigError("layer_types", types, f"a list of num_hidden_layers = {layers} names")
        return [n for n, kind in enumerate(types) if kind == "full_attention"]
    listed = read.value("full_attn_idxs") if read.known("full_attn_idxs") else None
    if listed is None:
        return range(layers)
    if not isinstance(listed, Sequence) or not all(type(n) is int and 0 <= n < layers for n in listed):
        raise ConfigError("full_attn_idxs", listed, f"a list of layers' numbers below num_hidden_layers = {layers}")
    return listed


def _each_layer(read: Reader, layers: int) -> Sequence[str]:
    """The kinds of all layers, as the config lists them, or as letters of Nemotron-H's pattern."""
    pattern = read.value("hybrid_override_pattern") if read.known("hybrid_override_pattern") else None
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - set(PATTERN):
            allowed = f"num_hidden_layers = {layers} letters of {', '.join(PATTERN)}"
            raise ConfigError("hybrid_override_pattern", pattern, allowed)
        return [PATTERN[letter] for letter in pattern]
    types = read.value("layer_types") or read.value("layers_block_type") or _mixers_but(read, layers)
    if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != layers:
        raise ConfigError("layer_types", types, f"a list of num_hidden_layers = {layers} names")
    for index, kind in enumerate(types):
        if kind not in SSM_KINDS:
            raise ConfigError(f"layer_types[{index}]", kind, ", ".join(SSM_KINDS), tuple(SSM_KINDS))
    return types


def _mixers_but(read: Reader, layers: int) -> Sequence[str]:
    """State spaces in all layers but one in each period (Jamba), or those whose numbers the config lists (Bamba)."""
    if read.known("attn_layer_period"):
        attending = _periodic(read, "attn_layer", layers)
        return ["attention" if n in attending else "mamba" for n in range(layers)]
    listed = (read.value("attn_layer_indices") if read.known("attn_layer_indices") else None) or ()
    if not isinstance(listed, Sequence) or not all(type(n) is int and 0 <= n < layers for n in listed):
        allowed = f"a list of layers' numbers below num_hidden_layers = {layers}"
        raise ConfigError("attn_layer_indices", listed, allowed)
    return ["attention" if n in listed else "mamba" for n in range(layers)]


def _blocks(read: Reader, layers: int) -> tuple[LayerSpec, ...]:
    """The layers of a family in which each is one block (Nemotron-H); its attention has no positions."""
    return tuple(LayerSpec(*SSM_KINDS[kind], rotated=False) for kind in _each_layer(read, layers))


def _searched(read: Reader, layers: int, hidden: int) -> tuple[LayerSpec, ...]:
    """The layers that an architecture search left, without those that do nothing (`DeciLMDecoderLayer`)."""
    found = []
    for n, parts in enumerate(_block_configs(read, layers)):
        attention, mlp = (_part(parts, name, n) for name in ("attention", "ffn"))
        width = 0 if mlp.get("no_op") else _multiplied(mlp.get("ffn_mult"), hidden, n)
        if width or not attention.get("no_op"):
            found.append(LayerSpec("none" if attention.get("no_op") else "attention", "dense" if width else "none",
                                   width=width))  # fmt: skip
    if not found:
        raise ConfigError("block_configs", "layers that all do nothing", "a layer with attention or an MLP")
    return tuple(found)


def _block_configs(read: Reader, layers: int) -> Sequence[Any]:
    listed = read.value("block_configs")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) != layers:
        allowed = f"a list of num_hidden_layers = {layers} mappings of attention and ffn"
        raise ConfigError("block_configs", listed, allowed)
    return listed


def _part(parts: object, name: str, n: int) -> Mapping[str, Any]:
    """One block of a searched layer; what takes its place, or attends otherwise, is not modelled."""
    part = parts.get(name) if isinstance(parts, Mapping) else None
    where = f"block_configs[{n}].{name}"
    if not isinstance(part, Mapping):
        raise ConfigError(where, part, "a mapping")
    for field in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens"):
        if part.get(field):
            raise ConfigError(f"{where}.{field}", part[field], "false or null: not modelled")
    return part


def _multiplied(factor: object, hidden: int, n: int) -> int:
    """The width of an MLP: two thirds of a multiple of the stream's, up to the next 256 (`_find_multiple`)."""
    if type(factor) not in (int, float) or not 0 < factor <= MOST["ffn_mult"]:  # type: ignore[operator]
        raise ConfigError(f"block_configs[{n}].ffn.ffn_mult", factor, f"a number above 0, at most {MOST['ffn_mult']}")
    return -(-int(2 * factor * hidden / 3) // ROUNDED) * ROUNDED  # type: ignore[operator]


def _grouped_heads(read: Reader, heads: int) -> int:
    """The heads of keys and values of searched layers, which state the queries of each; of others those of queries."""
    if not read.known("block_configs"):
        return heads
    listed = _block_configs(read, read.integer("num_hidden_layers"))
    own = [_part(parts, "attention", n) for n, parts in enumerate(listed)]
    groups = {part.get("n_heads_in_group") for part in own if not part.get("no_op")}
    if len(groups) != 1 or type(group := groups.pop()) is not int or group < 1 or heads % group:
        allowed = f"the same divisor of num_attention_heads = {heads} in all layers: others are not modelled"
        raise ConfigError("block_configs[].attention.n_heads_in_group", groups, allowed)
    return heads // group


def _selective(read: Reader) -> Ssm:
    """The state spaces of Mamba-1: channels are heads; mamba-ssm's kernels keep a state of each 2048 positions."""
    inner = read.integer("mamba_expand") * read.integer("hidden_size")
    auto = read.value("mamba_dt_rank") == "auto"
    rank = -(-read.integer("hidden_size") // 16) if auto else read.integer("mamba_dt_rank")
    state, kernel = read.integer("ssm_state"), read.integer("ssm_kernel")
    conv_bias, bias = (read.boolean(name) for name in ("ssm_conv_bias", "ssm_bias"))
    family = str(read.config.get("model_type"))
    parts = PARTS_NORMED.get(family, "")
    return Ssm(
        inner, 1, 0, state, kernel, SCANNED, STATES["bfloat16"], normed=False,
        adapted=family not in UNADAPTED_OUTPUT, conv_bias=conv_bias, bias=bias, rank=rank, parts=parts,
        whole=family != "jamba",
    )  # fmt: skip


def _ssm(read: Reader) -> Ssm:
    if read.known("mamba_dt_rank"):
        return _selective(read)
    sizes = ("heads", "head_dim", "groups", "state", "kernel", "chunk")
    heads, head_dim, groups, state, kernel, chunk = (read.integer(f"ssm_{size}") for size in sizes)
    if heads % groups:
        raise read.error("ssm_heads", heads, f"a multiple of {read.spelled['ssm_groups']} = {groups}")
    stored = read.value("mamba_ssm_cache_dtype") or "bfloat16"
    if not isinstance(stored, str) or stored not in STATES:
        raise ConfigError("mamba_ssm_cache_dtype", stored, ", ".join(STATES), near=tuple(STATES))
    normed = read.boolean("mamba_rms_norm") if read.known("mamba_rms_norm") else True
    adapted = read.config.get("model_type") not in UNADAPTED_OUTPUT
    conv_bias, bias = (read.boolean(name) for name in ("ssm_conv_bias", "ssm_bias"))
    return Ssm(heads, head_dim, groups, state, kernel, chunk, STATES[stored], normed, adapted, conv_bias, bias)


def _channel_delta(read: Reader) -> Delta:
    """Kimi's delta attention, whose sizes the published files have in a mapping of their own."""
    inner = read.value("linear_attn_config") or {}
    if not isinstance(inner, Mapping):
        raise ConfigError("linear_attn_config", inner, "a mapping, the sizes of linear attention")
    names = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
    names["linear_conv_kernel_dim"] = "short_conv_kernel_size"
    own = Reader({name: inner[short] for name, short in names.items() if short in inner}, read.defaults, {})
    heads, width, kernel = ((own if name in own.config else read).integer(name) for name in names)
    return Delta(heads, heads, width, width, kernel, STATES["float32"], low=width)


def _delta(family: Family, read: Reader) -> Delta:
    if family.delta == "kimi":
        return _channel_delta(read)
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    keys, values, key_dim, value_dim, kernel = (read.integer(f"linear_{size}") for size in sizes)
    stored = read.value("mamba_ssm_dtype") or "bfloat16"
    if not isinstance(stored, str) or stored not in STATES:
        raise ConfigError("mamba_ssm_dtype", stored, ", ".join(STATES), near=tuple(STATES))
    delta = Delta(keys, values, key_dim, value_dim, kernel, STATES[stored], joined=family.delta == "joined")
    if delta.value_heads % delta.key_heads:
        allowed = f"a multiple of linear_num_key_heads = {delta.key_heads}"
        raise ConfigError("linear_num_value_heads", delta.value_heads, allowed)
    return delta


def _delta_layers(read: Reader, layers: int) -> Collection[int]:
    """The layers with a gated delta rule: those listed, or all but the last of each interval."""
    types = read.value("layer_types")
    if types is None and read.known("linear_attn_config"):
        return _kimi_layers(read, layers)
    if types is None and read.known("block_size"):
        return range(1, layers, 2)
    if types is None:
        every = read.integer("full_attention_interval")
        return [layer for layer in range(layers) if (layer + 1) % every]
    if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != layers:
        raise ConfigError("layer_types", types, f"a list of num_hidden_layers = {layers} names")
    return [layer for layer, kind in enumerate(types) if kind == "linear_attention"]


def _kimi_layers(read: Reader, layers: int) -> Collection[int]:
    """The layers with Kimi's delta attention: those listed, from 1 on, or all but each fourth after the first."""
    listed = (read.value("linear_attn_config") or {}).get("kda_layers")
    if listed is None:
        return [n for n in range(layers) if not n or n % 4]
    if not isinstance(listed, Sequence) or not all(type(n) is int and 0 < n <= layers for n in listed):
        allowed = f"a list of layers' numbers from 1 to num_hidden_layers = {layers}"
        raise ConfigError("linear_attn_config.kda_layers", listed, allowed)
    return [n - 1 for n in listed]


def _sliding_layers(rule: str, read: Reader, layers: int) -> tuple[int, ...]:
    """The layers whose attention sees only the last `sliding_window` tokens."""
    if "use_sliding_window" in read.defaults and not read.boolean("use_sliding_window"):
        return ()
    if (slides := _flags(read, "hybrid_layer_pattern", layers)) is not None:
        return tuple(n for n, slide in enumerate(slides) if slide)
    types = read.value("layer_types")
    if types is not None and rule != "all":
        if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != layers:
            raise ConfigError("layer_types", types, f"a list of num_hidden_layers = {layers} names")
        return tuple(n for n, kind in enumerate(types) if kind in ("sliding_attention", "chunked_attention"))
    if rule == "unrotated":
        return _no_rope(read, layers)
    if rule == "rotated":
        return tuple(sorted({*range(layers)} - {*_no_rope(read, layers)}))
    if rule.startswith("period"):
        period, end = read.integer("sliding_window_pattern"), layers - (rule == "period-before-last")
        return tuple(layer for layer in range(rule == "period-after-first", end) if (layer + 1) % period)
    early = min(layers, read.integer("max_window_layers", 0)) if "max_window_layers" in read.defaults else layers
    found = {
        "all": range(layers),
        "each": range(layers),
        "even": range(0, layers, 2),
        "late": range(early, layers),
        "even-early": range(0, early, 2),
        "after-fourths": [layer for layer in range(layers) if layer % 4],
        "listed": (),
    }
    return tuple(found[rule])


def _flags(read: Reader, name: str, layers: int) -> Sequence[object] | None:
    """A list with 0 or 1 for each layer; None where the family has no such field, or its config gives none."""
    listed = read.value(name) if read.known(name) else None
    if listed is None:
        return None
    if not isinstance(listed, Sequence) or len(listed) != layers or any(flag not in (0, 1) for flag in listed):
        raise ConfigError(name, listed, f"a list of num_hidden_layers = {layers} times 0 or 1")
    return listed


def _passed(read: Reader, layers: int) -> Collection[int]:
    """The layers that attend to images alone (Llama 3.2 Vision); numbers beyond the last layer are of none."""
    listed = read.value("cross_attention_layers")
    numbers = isinstance(listed, Sequence) and all(type(n) is int for n in listed)
    found = {n for n in listed if 0 <= n < layers} if numbers else set()
    if not numbers or len(found) == layers:
        allowed = f"a list of layers' numbers, but not of all num_hidden_layers = {layers}"
        raise ConfigError("cross_attention_layers", listed, allowed)
    return found


def _no_rope(read: Reader, layers: int) -> tuple[int, ...]:
    """The layers without rotary positions: those with a 0 in `no_rope_layers`, else one in `no_rope_layer_interval`."""
    listed = read.value("no_rope_layers")
    if listed is None or listed == []:
        every = read.integer("no_rope_layer_interval")
        return tuple(range(every - 1, layers, every))
    if not isinstance(listed, Sequence) or len(listed) < layers or not all(type(rotates) is int for rotates in listed):
        raise ConfigError("no_rope_layers", listed, f"a list of num_hidden_layers = {layers} times 0 or 1")
    return tuple(layer for layer in range(layers) if not listed[layer])


def _moe(family: Family, read: Reader) -> dict[str, int]:
    """The Mixture-of-Experts fields of Architecture."""
    # Qwen3-MoE's attribute_map lets num_local_experts stand for num_experts
    alias = family.experts not in read.config and "num_local_experts" in read.config
    name = "num_local_experts" if alias else family.experts
    if read.known("enable_moe_block") and not read.boolean("enable_moe_block"):
        return {}
    if read.known("moe_layers") and not _moe_layers(read, read.integer("num_hidden_layers")):
        return {}
    experts = read.integer(name, 0)
    if not experts or (experts == 1 and read.known("expert_layer_period")):  # Jamba's one expert is a dense MLP
        return {}
    active = read.same("num_experts_per_tok")
    if active > experts:
        raise ConfigError("num_experts_per_tok", active, f"at most {name} = {experts}")
    moe_intermediate = read.integer(family.expert_size)
    shared = read.same("n_shared_experts", 0) if read.known("n_shared_experts") else 0
    if "shared_expert_intermediate_size" in {*read.spelled, *read.defaults}:
        shared_intermediate = read.integer("shared_expert_intermediate_size")
    else:
        shared_intermediate = shared * moe_intermediate
    return {
        "experts": experts,
        "experts_per_token": active,
        "moe_intermediate": moe_intermediate,
        "shared_experts": shared,
        "shared_intermediate": shared_intermediate,
    }


def _periodic(read: Reader, name: str, layers: int) -> Collection[int]:
    """The layers with this number in each period (`JambaConfig`)."""
    period, offset = read.integer(f"{name}_period"), read.integer(f"{name}_offset", 0)
    if offset >= period:
        raise read.error(f"{name}_offset", offset, f"below {name}_period = {period}")
    return range(offset, layers, period)


def _moe_layers(read: Reader, layers: int) -> Collection[int]:
    """The layers with experts of Llama 4: those listed, none of them in Llama Guard 4, or the last of each interval."""
    listed = read.value("moe_layers")
    if listed is None:
        every = read.integer("interleave_moe_layer_step")
        return range(every - 1, layers, every)
    if not isinstance(listed, Sequence) or not all(type(n) is int and 0 <= n < layers for n in listed):
        raise ConfigError("moe_layers", listed, f"a list of layers' numbers below num_hidden_layers = {layers}")
    return listed


def _typed_dense(read: Reader, layers: int) -> Collection[int]:
    """The layers whose MLP is `dense` in `mlp_layer_types`, the first alone where the config has no such list."""
    kinds = read.value("mlp_layer_types")
    if kinds is None:
        return (0,)
    if not isinstance(kinds, Sequence) or len(kinds) != layers or not {*kinds} <= {*MLP_KINDS}:
        raise ConfigError("mlp_layer_types", kinds, f"a list of num_hidden_layers = {layers} times dense or sparse")
    return [n for n, kind in enumerate(kinds) if kind == "dense"]


def _dense_layers(read: Reader, layers: int) -> Collection[int]:
    """The layers of a model with experts that have none."""
    if read.known("expert_layer_period"):
        return {*range(layers)} - {*_periodic(read, "expert_layer", layers)}
    if (sparse := _flags(read, "moe_layer_freq", layers)) is not None:
        return [n for n, routed in enumerate(sparse) if not routed]
    if read.known("first_k_dense_replace"):
        return range(read.integer("first_k_dense_replace", 0))
    if read.known("moe_layers"):
        return {*range(layers)} - {*_moe_layers(read, layers)}
    if read.known("mlp_layer_types"):
        return _typed_dense(read, layers)
    if "decoder_sparse_step" not in read.defaults:
        return ()
    step, dense = read.integer("decoder_sparse_step"), read.value("mlp_only_layers") or ()
    if not isinstance(dense, Sequence) or not all(type(i) is int for i in dense):
        raise ConfigError("mlp_only_layers", dense, "a list of layer indices")
    return {n for n in range(layers) if n in dense or (n + 1) % step}
