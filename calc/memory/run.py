"""The settings with which a model's layers run, and the numbers behind the symbols of the activations' formulas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, assert_never

from calc.base.plan import Exchange, Forced, Recomputed
from calc.memory.weights import Experts
from calc.models.architecture import PROJECTIONS, Architecture, LayerSpec, layer_kinds, layer_tensors
from calc.models.kernels import SDPA_FLASH_HEAD, Replaced
from calc.models.lora import EMBEDDING

# bf16: every tensor; autocast: fp32 weights and residual stream; autocast-narrow: a residual stream in bf16, where the
# first operation is a product; autocast-bf16: both in bf16; autocast-wide: weights in bf16 below an embedding
# in fp32; wide-stream: a residual stream in fp32 around others in 16 bits; fp32: every tensor
Format = Literal["bf16", "autocast", "autocast-narrow", "autocast-bf16", "autocast-wide", "wide-stream", "fp32"]
# efficient is what SDPA takes for fp32 or unequal head sizes, math its plain mathematics
Kernel = Literal["flash", "efficient", "masked", "eager", "math"]
# "": products of 16 or 32 bits
Narrow = Literal["", "float8", "mxfp8", "nvfp4"]
# Transformer Engine's recipes for products in 8 bits
Recipe = Literal["", "delayed", "tensorwise", "blockwise", "mxfp8"]


class Widths(NamedTuple):
    """Bytes of an element in a matrix product, in the residual stream and of a weight, and whether autocast is on."""

    compute: int
    residual: int
    weight: int
    autocast: bool


WIDTHS: Mapping[Format, Widths] = {
    "bf16": Widths(2, 2, 2, False),
    "autocast": Widths(2, 4, 4, True),
    "autocast-narrow": Widths(2, 2, 4, True),
    "autocast-bf16": Widths(2, 2, 2, True),
    "autocast-wide": Widths(2, 4, 2, True),
    "wide-stream": Widths(2, 4, 2, False),
    "fp32": Widths(4, 4, 4, False),
}
# activations with an operation that autocast runs in fp32: a power, an exponential
WIDENING = ("relu2", "gelu_new", "xielu")
# the linears at the end of a block, which tensor parallelism cuts by inputs
ROWWISE = frozenset({"o_proj", "o_b_proj", "down_proj", "dense", "c_proj", "fc2"})


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA beside the linears that `targets` names: its rank, dropout of its inputs, and `b`, bytes of a weight.

    `reads`: bytes of an element to which inputs are cast, those of a weight where it is 0. `joined`: under FSDP 1
    adapters are parts of their layer's flat parameter, so that its other weights get gradients, too. `saved`: modules
    trained whole beside them, in `saved_b` bytes. `dora`: each row of an adapted weight has a magnitude,
    and the frozen weight multiplies once or, whether anything is dropped out or not, twice. `count`: adapters beside
    each linear, of which every token has one. `ia3`: see `calc.scenario.scenario.Lora`.
    """

    rank: int
    targets: str | tuple[str, ...]
    dropout: bool
    b: int
    reads: int = 0
    joined: bool = False
    saved: tuple[str, ...] = ()
    saved_b: int = 2
    dora: Literal["", "once", "twice"] = ""
    count: int = 1
    ia3: bool = False

    @property
    def widens(self) -> bool:
        """True if, beside 4-bit weights under autocast, what a block adds to the stream is as wide as its magnitudes.

        No cast follows there (peft 0.21 `tuners/lora/bnb.py`, `Linear4bit.forward`).
        """
        ends = isinstance(self.targets, str) or any(target in ROWWISE for target in self.targets)
        return bool(self.dora) and self.b == 4 and ends


class Crossing(NamedTuple):
    """The patches to which layers of the language model attend: `tokens` of them in a sequence.

    `share`: patches for each of the text's tokens. `differentiable`: gradients reach what made them.
    """

    tokens: int
    share: float
    differentiable: bool


@dataclass(frozen=True, slots=True)
class Run:
    """The settings with which a model's layers run: number format, what is trained, and which kernel attends."""

    arch: Architecture
    precision: Format = "bf16"
    half: bool = False  # 16-bit tensors are fp16
    trained: bool = True  # the model's own weights get gradients
    training: bool = False  # dropout is on
    differentiable: bool = False  # the model's own weights require gradients, though nothing makes any
    wrapped: bool = False  # autocast spans the model's forward alone, not all of the loss
    adapter: Adapter | None = None
    packaged: bool = False  # attention is the flash-attn package's operator, not PyTorch's
    kernel: Kernel = "flash"
    quantised: bool = False  # linears in four bits, dequantised for each multiplication, or in eight
    int8: bool = False  # they are in 8 bits, and so are the inputs that they multiply
    nested: bool = True  # the scales of 4-bit weights are quantised themselves
    wide: int = 0  # elements of linears that a checkpoint in four bits leaves in 16
    unpacked: int = 0  # bytes of an element of a 4-bit weight while it multiplies; 0: those of `compute`
    buffer: int = 0  # elements of the buffer into which 4-bit weights are dequantised; 0: each into a tensor of its own
    four_bit_experts: Experts = ""  # routed experts that are in four bits, too
    frees_inputs: bool = False  # of layers that run again, with their gradients, whatever refers to them
    caches_experts: bool = False  # once made 16 bits wide, these stay so from step to step
    keeps_inputs: bool = False  # 4-bit linears keep inputs that a frozen weight does not need: bitsandbytes < 0.43.2
    keeps_columns: bool = False  # 8-bit linears keep their input in 8 bits, too: bitsandbytes < 0.45
    sequences: bool = False  # tensor-parallel ranks have parts of the residual stream, each some of the positions
    within: bool = False  # products gather and scatter these parts themselves, piece by piece
    reentrant: bool = False  # PyTorch's reentrant checkpointing runs layers again
    flat: bool = False  # FSDP 1 around layers
    context: int = 1  # context-parallel ranks, each with some of the positions in all layers
    replaced: frozenset[Replaced] = frozenset()  # operations that a library's kernels run
    compiled: bool = False  # each layer is compiled, by torch.compile
    narrow: Narrow = ""  # the format to which compiled linears cast what their three products read
    recipe: Recipe = ""  # with which Megatron-core's linears cast what they multiply to 8 bits
    at_once: int = 1  # the number of layers that run again together, from one checkpoint
    kept_end: int = 0  # the number of last layers that keep what they make, though those below run again
    wide_end: int = 0  # the number of last layers whose linears cast nothing
    looped: bool = False  # routed experts run one after another: Transformers before 5
    padded: bool = False  # they are grouped products of padded rows, as in torchtitan of August 2025
    dispatched: bool = False  # kernels bring each expert's rows and take them back, as in NeMo Automodel
    imbalance: float = 1  # tokens that this rank's experts get, over those that an average rank's router picks
    sent: float = 1  # tokens that this rank sends to experts, over those that its router picks
    capacity: float = 0  # tokens that an expert gets of this rank at most, over an even share; 0: no token is dropped
    linear_kernels: bool = False  # linear attention and its convolution run in fla's and causal-conv1d's kernels
    rotates: bool = False  # Megatron-core's layers without fusions rotate in one kernel all the same
    again: frozenset[Recomputed] = frozenset()  # parts of Megatron-core's layers that are run again for backward
    single: bool = False  # one sequence at a time, where attention reads that in place (`Architecture.views_one`)
    sees: bool = False  # tokens of images take the places that are theirs in a copy of the embedded ones
    crossing: Crossing | None = None  # the patches to which layers attend, where the job reads images so
    fed: bool = False  # the embedded tokens need a gradient, for what is trained before the first layer
    hooked: bool = True  # a hook from before PEFT makes the embedding's rows require a gradient with checkpointing
    deterministic: bool = False  # PyTorch's deterministic algorithms, with which experts' outputs are summed otherwise
    keeps_wide: bool = False  # tensors that Transformers loads in fp32 beside others in 16 bits stay so
    forced: Forced = ""  # tensors between products that Unsloth has in fp32, a word of `calc.base.plan.Role`
    rounded: bool = False  # linears multiply with copies of their weights that were rounded to four bits and back
    exchange: Exchange = ""  # the way attention sees other ranks' positions, a word of `calc.base.plan.Role`

    def at(self, spec: LayerSpec) -> Run:
        """The settings of a layer of the kind `spec`, which may have heads of its own.

        SDPA's memory-efficient kernel takes heads that are too large for flash.
        """
        arch = self.arch.at(spec)
        if arch is self.arch:
            return self
        large = self.kernel in ("flash", "math") and arch.head_dim > SDPA_FLASH_HEAD and not arch.megatron
        return replace(self, arch=arch, kernel="efficient" if large else self.kernel)

    def alone(self, spec: LayerSpec) -> Run:
        """The settings on which a layer of the kind `spec` depends, whatever other layers there are.

        Where kinds differ in widths, their symbols have names that tell them apart: these depend on the others.
        """
        return replace(self, arch=self.arch.alone(spec)) if self.arch.at(spec) is self.arch else self

    @property
    def compute(self) -> int:
        """Bytes of an element that a matrix multiplication reads and writes."""
        return WIDTHS[self.precision].compute

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream."""
        return WIDTHS[self.precision].residual

    @property
    def weight(self) -> int:
        """Bytes of an element of the model's own weights."""
        return WIDTHS[self.precision].weight

    @property
    def copies(self) -> bool:
        """True if autocast copies fp32 weights for the products that read them."""
        return self.autocast and self.weight == 4

    @property
    def autocast(self) -> bool:
        """True if products run in bf16 whatever their operands are."""
        return WIDTHS[self.precision].autocast

    @property
    def caches(self) -> bool:
        """True if autocast keeps the bf16 copies that it makes of the model's own weights until it ends.

        These are copies of fp32 tensors that require gradients, even if none are made (torch 2.13
        `aten/src/ATen/autocast_mode.cpp`, `cached_cast`).
        """
        return self.copies and (self.trained or self.differentiable)

    def saves(self, module: str) -> bool:
        """True if a copy of the module is trained whole beside adapters: PEFT's modules_to_save."""
        return self.adapter is not None and module in self.adapter.saved

    @property
    def adapts_embedding(self) -> bool:
        """True if an adapter is beside the embedding, whose output then needs a gradient."""
        targets = self.adapter.targets if self.adapter else ""
        return not isinstance(targets, str) and EMBEDDING in targets

    @property
    def head(self) -> Run:
        """The settings with which the head runs: those of a trained one, where it is trained beside adapters.

        Where norms return 16 bits below a stream in fp32, so does the last one, which the head reads.
        """
        usual: Format = "bf16" if self.forced and self.forced != "norms" else self.precision
        if not self.saves("lm_head") or self.adapter is None:
            return self if usual == self.precision else replace(self, precision=usual)
        wide = self.autocast and self.adapter.saved_b == 4
        fp32: Format = "autocast" if self.residual == 4 else "autocast-narrow"
        return replace(self, trained=True, precision=fp32 if wide else usual)

    @property
    def retains(self) -> bool:
        """True if the input of a layer that runs again stays, with its gradient, until backward ends, or longer.

        Checkpointing makes them leaves (`detach_variable`), which something refers to by then. Megatron-core's
        dispatcher keeps the router's probabilities, and so their graph down to these, until its layer's next forward
        (0.16.1 `core/transformer/moe/token_dispatcher.py:610`; `tensor_parallel/random.py`, `CheckpointFunction`). The
        hook that reshards a frozen unit refers to its inputs (torch 2.13 `distributed/fsdp/_runtime_utils.py`,
        `_register_post_backward_reshard_only_hook`).
        """
        routes = self.arch.megatron and self.arch.experts > 0 and not self.frees_inputs
        return self.reentrant and (routes or (self.flat and self.adapter is not None))

    @property
    def whole_scores(self) -> bool:
        """True if attention scores are tensors of their own: eager attention, or SDPA's plain mathematics."""
        if self.arch.compressed:
            return True
        match self.kernel:
            case "eager" | "math":
                return True
            case "flash" | "efficient" | "masked":
                return False
            case other:
                assert_never(other)

    @property
    def share(self) -> float:
        """The share of the positions for which a rank has the residual stream."""
        return 1 / self.arch.ranks if self.sequences else 1


@lru_cache(maxsize=4096)
def marks(arch: Architecture, spec: LayerSpec) -> Mapping[str, str]:
    """The symbols of formulas that have another value in layers of the kind `spec` than in the first, with their names.

    Those of layers that attend to all positions end in g, of wider ones that borrow keys in w (Gemma 4), and of layers
    with an MLP of their own width in that.
    """
    first = arch.specs[0].shapes
    if arch.at(spec) is arch or spec.shapes == first:
        return {}
    usual, own = dimensions(arch.at(first)), dimensions(arch.at(spec))
    end = "_" + "g" * spec.broad + "w" * spec.borrows + str(spec.width or "")
    end = end if end != "_" else "_o"
    return {symbol: symbol + end for symbol, value in own.items() if usual.get(symbol) != value}


@lru_cache(maxsize=4096)
def dimensions(arch: Architecture, rank: int = 0) -> Mapping[str, int]:
    """The numbers behind the symbols of the formulas, all counts of elements."""
    if arch.specs and (usual := arch.at(arch.specs[0])) is not arch:
        found = dict(dimensions(usual, rank))
        for spec, _ in layer_kinds(arch):
            here = dimensions(arch.at(spec), rank)
            found |= {name: here[symbol] for symbol, name in marks(arch, spec).items()}
        return found
    mla, delta, ssm = arch.mla, arch.delta, arch.ssm
    return {
        "h": arch.hidden,
        "q": arch.heads * arch.head_dim,
        "kv": arch.kv_heads * arch.head_dim,
        "o": arch.heads * arch.v_dim,
        **({"v": arch.kv_heads * arch.v_dim} if arch.value_dim else {}),
        "i": arch.intermediate,
        "H": arch.heads,
        "K": arch.kv_heads,
        "D": arch.head_dim,
        **({"y_p": arch.heads * arch.lightning, "y_s": arch.heads * arch.head_dim**2} if arch.lightning else {}),
        "tables": arch.rotary_tables,
        "V": arch.vocab,
        "E": arch.experts,
        "k": arch.experts_per_token,
        "E·h": arch.experts * arch.hidden,
        "E·j": arch.experts * arch.moe_intermediate,
        routed(arch): arch.experts_per_token * arch.expert_width,
        "k·j": arch.experts_per_token * arch.moe_intermediate,
        "j": arch.moe_intermediate,
        "l": arch.latent_experts,
        "s": arch.shared_intermediate,
        "r": rank,
        **(
            {
                symbol(f"altup_{way}projections.{n}"): arch.hidden**2
                for way in ("", "unembed_")
                for n in range(1, up.streams)
            }
            if (up := arch.altup)
            else {}
        ),
        **(
            {
                "p": own.width,
                "L": own.layers,
                "Lp": own.columns,
                "W_per_layer_model_projection": own.columns * arch.hidden,
            }
            if (own := arch.layer_inputs)
            else {}
        ),
        **(dict.fromkeys(map(symbol, PROJECTIONS), arch.hidden * arch.narrow) if arch.narrow else {}),
        **({"e": arch.narrow} if arch.narrow else {}),
        "k·r": arch.experts_per_token * rank,
        **(
            {
                "c_q": mla.q_lora_rank or 0,
                "c_kv": mla.kv_lora_rank,
                "rope": mla.qk_rope_head_dim,
                "H·rope": arch.heads * mla.qk_rope_head_dim,
                "x": arch.indexer.heads if arch.indexer else 0,
                "x_d": arch.indexer.head_dim if arch.indexer else 0,
                "x_q": arch.indexer.heads * arch.indexer.head_dim if arch.indexer else 0,
                "kvb": arch.heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            }
            if mla
            else {}
        ),
        **(
            {
                "c_q": own_keys.low,
                "rope": own_keys.rope,
                "H·rope": arch.heads * own_keys.rope,
                "o_r": own_keys.groups * own_keys.out,
                "x": own_keys.indexer.heads,
                "x_d": own_keys.indexer.head_dim,
                "x_q": own_keys.indexer.heads * own_keys.indexer.head_dim,
            }
            if (own_keys := arch.compressed)
            else {}
        ),
        **({symbol(HYPER_HEAD): arch.hyper.streams**2 * arch.hidden} if arch.hyper else {}),
        **(
            {
                "d_k": delta.keys,
                "d_v": delta.values,
                "d_e": delta.value_heads * delta.key_dim,
                "d_c": delta.convolved,
                "d_s": delta.state,
                "d_f": delta.low,
                "n_k": delta.key_heads,
                "n_v": delta.value_heads,
            }
            if delta
            else {}
        ),
        **(
            {
                "s_i": ssm.inner,
                "s_c": ssm.convolved,
                "s_g": ssm.grouped,
                "s_e": ssm.heads * ssm.state_dim,
                "s_n": ssm.heads,
                "s_p": ssm.heads * ssm.chunk,
                "s_q": ssm.groups * ssm.chunk,
                "s_s": ssm.state,
                **({"s_r": ssm.rank, "s_d": ssm.state_dim} if ssm.rank else {}),
            }
            if ssm
            else {}
        ),
        "W_lm_head": arch.vocab_part * arch.outer,
        "W_score": arch.outer,
        "W_qkv": (arch.heads + 2 * arch.kv_heads) * arch.head_dim * arch.hidden,
        **{symbol(short(t.name, spec)): t.elements for spec, _ in layer_kinds(arch) for t in layer_tensors(arch, spec)},
    }


def routed(arch: Architecture) -> str:
    """The symbol of the width that a token's experts read: `k·h`, or `k·l` where that is not the residual stream's."""
    return "k·l" if arch.latent_experts else "k·h"


def symbol(module: str) -> str:
    """The symbol of the elements of a module's weight: a letter, digits and underscores, also where a list has it."""
    return f"W_{module.replace('.', '_')}"


HYPER_HEAD = "hc_head_fn"  # the weight that makes one of several residual streams after the last layer
# of the short names of what lies in these modules
PREFIXES = {
    "attn_hc": "attn_hc_", "ffn_hc": "ffn_hc_",
    "conv": "conv_", "experts": "experts_", "indexer": "indexer_", "linear_attn": "delta_", "mamba": "ssm_",
    **dict.fromkeys(("shared_expert", "shared_experts", "shared_mlp"), "shared_"),
}  # fmt: skip
# linears of attention whose names are those of an MLP's, too (GPT-2, AFMoE)
SHARED = {("attn", "c_proj"), ("self_attn", "gate_proj")}
# of a state space where every block has the same name (Nemotron-H, Mamba)
STATE_SPACE = frozenset({"dt_bias", "A_log", "D", "conv1d", "in_proj", "x_proj", "dt_proj", "norm", "out_proj"})


_HEAD = re.compile(r"\.norms\.[0-9]+$")  # one of those that norm each head of queries or of keys (StableLM 2 12B)


def short(name: str, spec: LayerSpec | None = None) -> str:
    """`…mlp.down_proj.weight` as `down_proj`, `…mlp.experts.down_proj` as `experts_down_proj`.

    In a layer of the kind `spec` whose linear attention lies where others attend, its modules are told apart (Kimi
    Linear, MiniMax-Text-01), and so are those that make entries of positions in several ways (DeepSeek-V4).
    """
    *_, inside, last = ("", *_HEAD.sub("", name.removesuffix(".weight").removesuffix(".linear")).split("."))
    if spec and spec.mixer in ("delta", "lightning") and inside in ("self_attn", "forget_gate"):
        return f"{spec.mixer}_{last}"
    if spec and inside == "compressor":
        return f"{spec.pools}_{last}"
    if inside == "mixer" and last in STATE_SPACE:
        return f"ssm_{last}"
    return f"attn_{last}" if (inside, last) in SHARED else PREFIXES.get(inside, "") + last


def output_name(arch: Architecture) -> str:
    """The short name of attention's last linear."""
    return short(f"{arch.names.attention}.{arch.names.output}")


@lru_cache(maxsize=4096)
def elements(arch: Architecture, spec: LayerSpec) -> Mapping[str, int]:
    """Elements of a layer's tensors by short name, a linear's bias counted with its weight."""
    found: dict[str, int] = {}
    for t in layer_tensors(arch, spec):
        name = short(t.name.removesuffix(".bias"), spec)
        found[name] = found.get(name, 0) + t.elements
    return found


@lru_cache(maxsize=4096)
def biased(arch: Architecture, spec: LayerSpec) -> frozenset[str]:
    """The short names of a layer's modules with a bias."""
    names = (t.name for t in layer_tensors(arch, spec) if t.name.endswith(".bias"))
    return frozenset(short(name.removesuffix(".bias")) for name in names)
