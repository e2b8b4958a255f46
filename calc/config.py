"""A model's architecture, read from its published Hugging Face `config.json`.

A field that the config leaves out takes the default of the family's `configuration_*.py` in Transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calc.architecture import Architecture, ConfigError, Mla


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family's modeling class fixes, and its config class's defaults for the fields that may be absent."""

    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of Architecture
    biases: tuple[str, str] = ("", "")  # config fields that give q, k, v and o their biases
    window: str = ""  # which layers slide: all, even, late, even-early
    experts: str = ""  # config field with the number of routed experts
    expert_size: str = "moe_intermediate_size"  # config field with a routed expert's width
    mla: bool = False


_BIASES = ("attention_bias", "attention_bias")
_LATE = dict(use_sliding_window=False, sliding_window=4096, max_window_layers=28)
_SPARSE = dict(num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=None)
_GEMMA = dict(head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True, attention_bias=False)
_MLA = dict(attention_bias=False, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
_FAMILIES: dict[str, _Family] = {
    "llama": _Family(dict(max_position_embeddings=2048, attention_bias=False, mlp_bias=False), biases=_BIASES),
    "mistral": _Family(
        dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
        window="all",
    ),
    "mixtral": _Family(
        dict(num_key_value_heads=8, max_position_embeddings=131072, num_local_experts=8, num_experts_per_tok=2),
        window="all", experts="num_local_experts", expert_size="intermediate_size",
    ),
    "qwen2": _Family(dict(num_key_value_heads=32, **_LATE), dict(qkv_bias=True), window="late"),
    "qwen2_moe": _Family(
        dict(num_key_value_heads=16, qkv_bias=True, num_experts=60, moe_intermediate_size=1408,
             shared_expert_intermediate_size=5632, **_LATE, **_SPARSE | dict(num_experts_per_tok=4)),
        dict(shared_experts=1), biases=("qkv_bias", ""), window="even-early", experts="num_experts",
    ),
    "qwen3": _Family(
        dict(num_key_value_heads=32, head_dim=128, attention_bias=False, **_LATE),
        dict(qk_norm=True), biases=_BIASES, window="late",
    ),
    "qwen3_moe": _Family(
        dict(num_key_value_heads=4, attention_bias=False, num_experts=128, moe_intermediate_size=768,
             **_LATE, **_SPARSE),
        dict(qk_norm=True), biases=_BIASES, window="all", experts="num_experts",
    ),
    "gemma": _Family(dict(num_key_value_heads=16, hidden_act="gelu_pytorch_tanh", **_GEMMA), biases=_BIASES),
    "gemma2": _Family(
        dict(num_key_value_heads=4, hidden_activation="gelu_pytorch_tanh", sliding_window=4096,
             attn_logit_softcapping=50.0, final_logit_softcapping=30.0, **_GEMMA),
        dict(norms_per_layer=4), biases=_BIASES, window="even",
    ),
    "phi3": _Family(dict(max_position_embeddings=4096), dict(fused_qkv=True, fused_gate_up=True), window="all"),
    "deepseek_v2": _Family(
        dict(max_position_embeddings=2048, mlp_bias=False, n_routed_experts=64, moe_intermediate_size=1407,
             n_shared_experts=2, first_k_dense_replace=0, v_head_dim=128, **_MLA),
        biases=_BIASES, experts="n_routed_experts", mla=True,
    ),
    "deepseek_v3": _Family(
        dict(max_position_embeddings=4096, num_key_value_heads=128, n_routed_experts=256, num_experts_per_tok=8,
             moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3, v_head_dim=128, **_MLA),
        biases=_BIASES, experts="n_routed_experts", mla=True,
    ),
    "gpt_oss": _Family(
        dict(num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, attention_bias=True,
             sliding_window=128, num_local_experts=128, num_experts_per_tok=4),
        dict(attention_sinks=True, expert_bias=True, router_bias=True),
        biases=_BIASES, window="even", experts="num_local_experts", expert_size="intermediate_size",
    ),
}  # fmt: skip
FAMILIES = tuple(_FAMILIES)


# beyond this no model can be meant; lists of layers are built one by one
MOST = {"num_hidden_layers": 10_000}


class _Reader:
    """Typed access to a config under its family's defaults; every refusal is a ConfigError."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults

    def value(self, name: str) -> Any:
        return self.config[name] if name in self.config else self.defaults.get(name)

    def integer(self, name: str, least: int = 1) -> int:
        value = self.value(name)
        most = MOST.get(name, 10**9)
        if type(value) is not int or value < least:  # a bool is an int to isinstance
            raise ConfigError(name, value, "a positive integer" if least else "an integer, 0 or more")
        if value > most:
            raise ConfigError(name, value, f"at most {most}")
        return value

    def optional(self, name: str) -> int | None:
        return None if self.value(name) is None else self.integer(name)

    def boolean(self, name: str) -> bool:
        value = self.value(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ConfigError(name, value, "true or false")
        return value

    def positive(self, name: str) -> bool:
        """Whether a number that may be null is set (a soft cap)."""
        value = self.value(name)
        if value is None:
            return False
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(name, value, "a number, 0 or more, or null")
        return value > 0


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a Hugging Face `config.json` of a known family describes.

    The five sizes (hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size) must be
    given; other fields default as in the family's config class; fields that change no tensor are ignored.
    Raises ConfigError for an unknown family, a missing field, or a value that no model can have.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("config", config, "a mapping, the content of a config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ConfigError("model_type", model_type, ", ".join(FAMILIES), near=FAMILIES)
    family = _FAMILIES[model_type]
    common = {"max_position_embeddings": 32768, "hidden_act": "silu", "tie_word_embeddings": False}
    read = _Reader(config, {**common, **family.defaults})
    hidden, layers, heads = map(read.integer, ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = read.optional("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    mla = _mla(read) if family.mla else None
    qkv_bias, o_bias = (bool(name) and read.boolean(name) for name in family.biases)
    window = read.optional("sliding_window") if family.window else None
    sliding = _sliding_layers(family.window, read, layers) if window else 0
    facts = {
        "qkv_bias": qkv_bias,
        "o_bias": o_bias,
        "mlp_bias": "mlp_bias" in family.defaults and read.boolean("mlp_bias"),
        "softcap_attn": "attn_logit_softcapping" in family.defaults and read.positive("attn_logit_softcapping"),
        "softcap_logits": "final_logit_softcapping" in family.defaults and read.positive("final_logit_softcapping"),
        "sliding_window": window if sliding else None,
        "sliding_layers": sliding,
        **(_moe(family, read, layers) if family.experts else {"dense_layers": layers}),
        **family.fixed,
    }
    return Architecture(
        family=model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else _head_dim(read, hidden, heads),
        intermediate=read.integer("intermediate_size"),
        vocab=read.integer("vocab_size"),
        tied=read.boolean("tie_word_embeddings"),
        max_positions=read.integer("max_position_embeddings"),
        mla=mla,
        activation=_activation(read),
        **facts,
    )


def _head_dim(read: _Reader, hidden: int, heads: int) -> int:
    given = read.optional("head_dim")
    if given is None and hidden % heads:
        raise ConfigError("num_attention_heads", heads, f"a divisor of hidden_size = {hidden}, as there is no head_dim")
    return given or hidden // heads


def _activation(read: _Reader) -> str:
    name = "hidden_activation" if "hidden_activation" in read.defaults else "hidden_act"
    value = read.value(name)
    if not isinstance(value, str):
        raise ConfigError(name, value, "the name of an activation, such as silu")
    # Gemma's first configs say gelu and mean its tanh approximation
    return "gelu_pytorch_tanh" if value == "gelu" and read.defaults["hidden_act"] != "silu" else value


def _mla(read: _Reader) -> Mla:
    ranks = (read.integer(n) for n in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return Mla(read.optional("q_lora_rank"), *ranks)


def _sliding_layers(rule: str, read: _Reader, layers: int) -> int:
    """How many layers look back only `sliding_window` tokens."""
    if "use_sliding_window" in read.defaults and not read.boolean("use_sliding_window"):
        return 0
    types = read.value("layer_types")
    if types is not None and rule != "all":
        if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != layers:
            raise ConfigError("layer_types", types, f"a list of num_hidden_layers = {layers} names")
        return sum(kind == "sliding_attention" for kind in types)
    early = min(layers, read.integer("max_window_layers", 0)) if "max_window_layers" in read.defaults else layers
    return {"all": layers, "even": (layers + 1) // 2, "late": layers - early, "even-early": (early + 1) // 2}[rule]


def _moe(family: _Family, read: _Reader, layers: int) -> dict[str, int]:
    """The Mixture-of-Experts fields of Architecture."""
    # Qwen3-MoE's attribute_map lets num_local_experts stand for num_experts
    alias = family.experts not in read.config and "num_local_experts" in read.config
    name = "num_local_experts" if alias else family.experts
    experts = read.integer(name, 0)
    if not experts:
        return {"dense_layers": layers}
    active = read.integer("num_experts_per_tok")
    if active > experts:
        raise ConfigError("num_experts_per_tok", active, f"at most {name} = {experts}")
    moe_intermediate = read.integer(family.expert_size)
    shared = read.integer("n_shared_experts", 0) if "n_shared_experts" in read.defaults else 0
    if "shared_expert_intermediate_size" in read.defaults:
        shared_intermediate = read.integer("shared_expert_intermediate_size")
    else:
        shared_intermediate = shared * moe_intermediate
    return {
        "experts": experts,
        "experts_per_token": active,
        "moe_intermediate": moe_intermediate,
        "shared_experts": shared,
        "shared_intermediate": shared_intermediate,
        "dense_layers": _dense_layers(read, layers),
    }


def _dense_layers(read: _Reader, layers: int) -> int:
    if "first_k_dense_replace" in read.defaults:
        return min(layers, read.integer("first_k_dense_replace", 0))
    if "decoder_sparse_step" not in read.defaults:
        return 0
    step, dense = read.integer("decoder_sparse_step"), read.value("mlp_only_layers") or ()
    if not isinstance(dense, Sequence) or not all(type(i) is int for i in dense):
        raise ConfigError("mlp_only_layers", dense, "a list of layer indices")
    return layers - layers // step + len([i for i in {*dense} if 0 <= i < layers and (i + 1) % step == 0])
