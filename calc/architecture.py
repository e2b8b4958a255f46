"""A model's tensors, counted exactly from its published Hugging Face `config.json`.

The names and shapes are those of Transformers 5 (routed experts fused into two parameters a layer), read from the
family's `modeling_*.py`; a field the config leaves out takes the default of the family's `configuration_*.py`.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

Head = Literal["lm", "scalar", "none"]


class ConfigError(ValueError):
    """One line that names the `field`, what was `given` and what is `allowed`."""

    def __init__(self, field: str, given: object, allowed: str, near: Sequence[str] = ()) -> None:
        """`near`: the valid names among which a near miss is looked for."""
        self.field, self.given, self.allowed = field, given, allowed
        close = difflib.get_close_matches(str(given).casefold(), near, n=1)
        what = "nothing given" if given is None else f"given {reprlib.repr(given)}"
        super().__init__(f"{field}: {what}, allowed: {allowed}" + (f"; did you mean {close[0]!r}?" if close else ""))


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (DeepSeek): queries and keys/values pass through low ranks."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """The few dozen integers of a decoder that decide its memory. Sizes are counts of elements."""

    family: str  # Hugging Face `model_type`
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys; with MLA qk_nope_head_dim + qk_rope_head_dim
    intermediate: int  # of a dense layer's MLP
    vocab: int
    tied: bool  # lm_head shares the embedding
    max_positions: int
    qkv_bias: bool = False  # with MLA: of the two down projections
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    fused_qkv: bool = False
    fused_gate_up: bool = False
    softcap_attn: bool = False
    softcap_logits: bool = False
    sliding_window: int | None = None  # None where no layer uses one
    sliding_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_experts: int = 0
    shared_intermediate: int = 0  # of all shared experts together: they are one MLP
    dense_layers: int = 0  # all layers where there are no experts; taken to be the first ones
    attention_sinks: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    mla: Mla | None = None
    activation: str = "silu"


class Tensor(NamedTuple):
    """A parameter tensor; `*` in its name stands for the layer, `count` says how many layers have it.

    `kind`: embedding, norm, linear, bias, sink, expert (everything with one slice per routed expert, its biases too),
    router, head. `module`: embed, attn, mlp, norm, head.
    """

    name: str
    shape: tuple[int, ...]
    count: int  # type: ignore[assignment]  # hides tuple.count, which a tensor has no use for
    kind: str
    module: str

    @property
    def elements(self) -> int:
        """Elements of one such tensor."""
        return prod(self.shape)


class Linear(NamedTuple):
    """An `nn.Linear` inside a layer: its name below the layer, input and output features, and attn or mlp."""

    name: str
    inputs: int
    outputs: int
    kind: str


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


_LAYER = "model.layers.*."


def _layer(arch: Architecture, moe: bool) -> Iterable[Tensor]:
    """The tensors of a decoder layer, in the order of its modules."""

    def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Iterable[Tensor]:
        module = "attn" if name.startswith("self_attn") else "mlp"
        yield tensor(f"{name}.weight", (outputs, inputs), "linear", module)
        if bias:
            yield tensor(f"{name}.bias", (outputs,), "bias", module)

    def norm(name: str, size: int, module: str = "norm") -> Tensor:
        return tensor(f"{name}.weight", (size,), "norm", module)

    def tensor(name: str, shape: tuple[int, ...], kind: str, module: str) -> Tensor:
        return Tensor(f"{_LAYER}{name}", shape, 1, kind, module)

    def mlp(name: str, width: int, bias: bool) -> Iterable[Tensor]:
        if arch.fused_gate_up:
            yield from linear(f"{name}.gate_up_proj", h, 2 * width, bias)
        else:
            yield from linear(f"{name}.gate_proj", h, width, bias)
            yield from linear(f"{name}.up_proj", h, width, bias)
        yield from linear(f"{name}.down_proj", width, h, bias)

    h, heads, queries, keys = arch.hidden, arch.heads, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    if arch.attention_sinks:
        yield tensor("self_attn.sinks", (heads,), "sink", "attn")
    if arch.mla:
        m = arch.mla
        if m.q_lora_rank:
            yield from linear("self_attn.q_a_proj", h, m.q_lora_rank, arch.qkv_bias)
            yield norm("self_attn.q_a_layernorm", m.q_lora_rank, "attn")
            yield from linear("self_attn.q_b_proj", m.q_lora_rank, queries)
        else:
            yield from linear("self_attn.q_proj", h, queries)
        yield from linear("self_attn.kv_a_proj_with_mqa", h, m.kv_lora_rank + m.qk_rope_head_dim, arch.qkv_bias)
        yield norm("self_attn.kv_a_layernorm", m.kv_lora_rank, "attn")
        yield from linear("self_attn.kv_b_proj", m.kv_lora_rank, heads * (m.qk_nope_head_dim + m.v_head_dim))
    elif arch.fused_qkv:
        yield from linear("self_attn.qkv_proj", h, queries + 2 * keys, arch.qkv_bias)
    else:
        yield from linear("self_attn.q_proj", h, queries, arch.qkv_bias)
        yield from linear("self_attn.k_proj", h, keys, arch.qkv_bias)
        yield from linear("self_attn.v_proj", h, keys, arch.qkv_bias)
    yield from linear("self_attn.o_proj", heads * arch.mla.v_head_dim if arch.mla else queries, h, arch.o_bias)
    if arch.qk_norm:
        yield norm("self_attn.q_norm", arch.head_dim, "attn")
        yield norm("self_attn.k_norm", arch.head_dim, "attn")

    if moe:
        e, i = arch.experts, arch.moe_intermediate
        router = "mlp.router" if arch.family == "gpt_oss" else "mlp.gate"
        yield tensor(f"{router}.weight", (e, h), "router", "mlp")
        if arch.router_bias:
            yield tensor(f"{router}.bias", (e,), "router", "mlp")
        # GPT-OSS stores its experts input first
        up, down = ((e, h, 2 * i), (e, i, h)) if arch.family == "gpt_oss" else ((e, 2 * i, h), (e, h, i))
        yield tensor("mlp.experts.gate_up_proj", up, "expert", "mlp")
        yield tensor("mlp.experts.down_proj", down, "expert", "mlp")
        if arch.expert_bias:
            yield tensor("mlp.experts.gate_up_proj_bias", (e, 2 * i), "expert", "mlp")
            yield tensor("mlp.experts.down_proj_bias", (e, h), "expert", "mlp")
        if arch.shared_experts:
            shared = "mlp.shared_expert" if arch.family == "qwen2_moe" else "mlp.shared_experts"
            yield from mlp(shared, arch.shared_intermediate, arch.mlp_bias)
            if arch.family == "qwen2_moe":
                yield from linear("mlp.shared_expert_gate", h, 1)
    else:
        yield from mlp("mlp", arch.intermediate, arch.mlp_bias)

    yield norm("input_layernorm", h)
    yield norm("post_attention_layernorm", h)
    if arch.norms_per_layer == 4:
        yield norm("pre_feedforward_layernorm", h)
        yield norm("post_feedforward_layernorm", h)


@lru_cache(maxsize=4096)
def layer_tensors(arch: Architecture, index: int = -1) -> tuple[Tensor, ...]:
    """The tensors of layer `index` (from the end where negative), each with count 1. IndexError where there is none."""
    return tuple(_layer(arch, moe=range(arch.layers)[index] >= arch.dense_layers))


@lru_cache(maxsize=4096)
def tensors(arch: Architecture, *, head: Head = "lm") -> tuple[Tensor, ...]:
    """Every parameter tensor, a tied head once.

    `head`: "lm" is the causal LM; "scalar" a reward model or critic, whose lm_head gives way to a Linear(hidden, 1)
    without bias; "none" the bare decoder.
    """
    layers: dict[str, Tensor] = {}
    for count, is_moe in ((arch.dense_layers, False), (arch.layers - arch.dense_layers, True)):
        for tensor in _layer(arch, is_moe) if count else ():
            seen = layers[tensor.name].count if tensor.name in layers else 0
            layers[tensor.name] = tensor._replace(count=count + seen)
    embedding = Tensor("model.embed_tokens.weight", (arch.vocab, arch.hidden), 1, "embedding", "embed")
    norm = Tensor("model.norm.weight", (arch.hidden,), 1, "norm", "norm")
    heads = {
        "lm": () if arch.tied else (Tensor("lm_head.weight", (arch.vocab, arch.hidden), 1, "head", "head"),),
        "scalar": (Tensor("score.weight", (1, arch.hidden), 1, "head", "head"),),
        "none": (),
    }
    return (embedding, *layers.values(), norm, *heads[head])


@lru_cache(maxsize=4096)
def parameters(arch: Architecture, *, head: Head = "lm") -> int:
    """All parameters, exactly; a tied head is counted once."""
    return sum(t.elements * t.count for t in tensors(arch, head=head))


@lru_cache(maxsize=4096)
def layer_parameters(arch: Architecture, index: int = -1) -> int:
    """The parameters of layer `index`."""
    return sum(t.elements for t in layer_tensors(arch, index))


def embedding_parameters(arch: Architecture) -> int:
    """Elements of the embedding table, V·H."""
    return arch.vocab * arch.hidden


@lru_cache(maxsize=4096)
def active_parameters(arch: Architecture, *, head: Head = "lm") -> int:
    """The parameters one token meets: all of them but the routed experts it is not sent to."""
    idle = arch.experts - arch.experts_per_token
    experts = sum(t.elements * t.count for t in tensors(arch, head=head) if t.kind == "expert")
    return parameters(arch, head=head) - (experts // arch.experts * idle if arch.experts else 0)


@lru_cache(maxsize=4096)
def largest_tensor(arch: Architecture, head: Head = "lm") -> Tensor:
    """The parameter tensor with most elements, the first of equals."""
    return max(tensors(arch, head=head), key=lambda t: t.elements)


@lru_cache(maxsize=4096)
def largest_in_layer(arch: Architecture, index: int = -1) -> int:
    """Elements of the largest tensor of layer `index`."""
    return max(t.elements for t in layer_tensors(arch, index))


@lru_cache(maxsize=4096)
def linears(arch: Architecture, index: int = -1) -> tuple[Linear, ...]:
    """The `nn.Linear` modules of layer `index`, as PEFT finds them.

    Routers and routed experts are bare parameters in Transformers 5, hence not among them.
    """
    return tuple(
        Linear(t.name.removeprefix(_LAYER).removesuffix(".weight"), t.shape[1], t.shape[0], t.module)
        for t in layer_tensors(arch, index)
        if t.kind == "linear"
    )


def lora_parameters(
    arch: Architecture, rank: int, targets: Literal["all-linear"] | Sequence[str], *, fused_experts: bool = False
) -> int:
    """The adapter parameters PEFT adds: rank · (inputs + outputs) for each adapted Linear.

    `targets` is `all-linear` (every Linear but the head) or names matched as PEFT matches them: a module's whole name
    or its end after a dot. `fused_experts`: count `all-linear` as PEFT 0.21's `get_peft_model` applies it to the
    families whose experts Transformers 5 fused (see `_fused_width`), instead of to Linear modules alone.
    Raises ConfigError for a name that matches no Linear, and for a rank below 1.
    """
    if type(rank) is not int or rank < 1:
        raise ConfigError("lora.rank", rank, "a positive integer")
    if fused_experts and targets == "all-linear" and arch.family in _PEFT_FUSED:
        return rank * _fused_width(arch)
    return rank * _lora_width(arch, targets if isinstance(targets, str) else tuple(targets))


# peft/utils/transformers_weight_conversion.py, PEFT 0.21.2
_PEFT_FUSED = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def _fused_width(arch: Architecture) -> int:
    """Inputs plus outputs as PEFT rewrites `all-linear` for fused experts: routers and routed experts are adapted.

    gate_up_proj gets twice the rank, for the two projections it fuses; Linear modules named like the experts'
    projections (DeepSeek's shared experts and dense MLPs) are left out.
    """
    attention = sum(i + o for _, i, o, kind in linears(arch, 0) if kind == "attn")
    h, i, e = arch.hidden, arch.moe_intermediate, arch.experts
    expert = 2 * (h + 2 * i) + (i + h)
    return arch.layers * attention + (arch.layers - arch.dense_layers) * (e * expert + (h + e))


@lru_cache(maxsize=4096)
def _lora_width(arch: Architecture, targets: str | tuple[str, ...]) -> int:
    """Inputs plus outputs, over every Linear that `targets` names."""
    groups = ((arch.dense_layers, 0), (arch.layers - arch.dense_layers, -1))  # how many layers, one of them
    found = [(count, linear) for count, index in groups if count for linear in linears(arch, index)]
    names = sorted({linear.name.rpartition(".")[2] for _, linear in found})
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError("lora.targets", targets, f"all-linear or a list of {', '.join(names)}", near=["all-linear"])
    wanted = names if isinstance(targets, str) else targets

    def matches(linear: Linear, target: object) -> bool:
        return f".{linear.name}".endswith(f".{target}")

    for target in wanted:
        if not any(matches(linear, target) for _, linear in found):
            raise ConfigError("lora.targets", target, ", ".join(names), near=names)
    adapted = [(count, linear) for count, linear in found if any(matches(linear, target) for target in wanted)]
    return sum(count * (linear.inputs + linear.outputs) for count, linear in adapted)
