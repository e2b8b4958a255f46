"""A model's tensors, counted exactly.

The names and shapes are those of Transformers 5 (routed experts fused into two parameters a layer), read from the
family's `modeling_*.py`. `calc.config` reads an Architecture from a published `config.json`.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

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
    # what one GPU holds where several share a model, see `calc.parts`
    ranks: int = 1  # tensor-parallel ranks: heads and widths are the part of one of them
    embeds: bool = True  # the embedding is here, and not on another pipeline stage
    ends: bool = True  # so are the final norm and the head

    @property
    def vocab_part(self) -> int:
        """Rows of embedding and head that one rank holds."""
        return -(-self.vocab // self.ranks)


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
    embedding = Tensor("model.embed_tokens.weight", (arch.vocab_part, arch.hidden), 1, "embedding", "embed")
    norm = Tensor("model.norm.weight", (arch.hidden,), 1, "norm", "norm")
    heads = {
        "lm": () if arch.tied else (Tensor("lm_head.weight", (arch.vocab_part, arch.hidden), 1, "head", "head"),),
        "scalar": (Tensor("score.weight", (1, arch.hidden), 1, "head", "head"),),
        "none": (),
    }
    begins, ends = (embedding,) * arch.embeds, (norm, *heads[head]) * arch.ends
    return (*begins, *layers.values(), *ends)


@lru_cache(maxsize=4096)
def parameters(arch: Architecture, *, head: Head = "lm") -> int:
    """All parameters, exactly; a tied head is counted once."""
    return sum(t.elements * t.count for t in tensors(arch, head=head))


@lru_cache(maxsize=4096)
def layer_parameters(arch: Architecture, index: int = -1) -> int:
    """The parameters of layer `index`."""
    return sum(t.elements for t in layer_tensors(arch, index))


def embedding_parameters(arch: Architecture) -> int:
    """Elements of the embedding table, V·H, or of a rank's part of it."""
    return arch.vocab_part * arch.hidden


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
