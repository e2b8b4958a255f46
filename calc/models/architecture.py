"""A model's tensors, counted exactly.

The names and shapes are those of Transformers 5 (routed experts fused into two parameters a layer), read from the
family's `modeling_*.py`. `calc.models.hf_config` reads an Architecture from a published `config.json`.
"""

from __future__ import annotations

import difflib
import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal, NamedTuple, assert_never

from calc.base.refusal import Refusal
from calc.models.mixers import (
    AltUp,
    Broad,
    Compressed,
    Delta,
    Hyper,
    Indexer,
    LayerInputs,
    Mla,
    Pools,
    ShortConv,
    Ssm,
)
from calc.models.sound import Sound
from calc.models.vision import Tower

Head = Literal["lm", "scalar", "none"]
# parts for images; linears: of the tower, outside its blocks; unread: without gradients, as nothing reads its output
Seeing = Literal["all", "linears", "blocks", "projector", "unread"]
TOWER: tuple[Seeing, ...] = ("linears", "blocks")  # what is frozen, or gets adapters, with a tower


class Norms(NamedTuple):
    """The names of a layer's norms before and after attention and MLP; empty where the layer has none."""

    attention: str = "input_layernorm"
    attention_output: str = ""
    mlp: str = "post_attention_layernorm"
    mlp_output: str = ""


# the norms of a dense MLP's output, and before and after the experts, where both run
BESIDE = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
LATENT = ("fc1_latent_proj", "fc2_latent_proj")  # the linears before and after routed experts of their own width
SCALES = {"attention": "lambda_1", "mlp": "lambda_2"}  # of both blocks' outputs
# the numbers whose tanh multiplies these, in a layer that attends to images, and in a block of a tower
GATES = {"attention": ("cross_attn_attn_gate", "gate_attn"), "mlp": ("cross_attn_mlp_gate", "gate_ffn")}
PROJECTIONS = ("project_in", "project_out")  # of a narrower embedding to the layers, and from these to the head
BLOCKS = ("attn_hc", "ffn_hc")  # the modules of both blocks' hyper-connections
BEFORE = Norms()  # one before attention, one before the MLP


class Names(NamedTuple):
    """A family's names of the modules that most families name alike."""

    model: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    attention: str = "self_attn"
    qkv: str = "qkv_proj"
    output: str = "o_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    layers: str = "layers"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    mlp: str = "mlp"
    positions: str = "embed_positions"
    gate_up: str = "gate_up_proj"
    ssm: str = "mamba"
    gate: str = "gate_proj"
    head: str = "lm_head"
    embedding_norm: str = ""  # of the embedding's output, where the family has one (BLOOM)
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"


NAMES = Names()
DELTA = "linear_attn"  # the module of a gated delta rule
CROSS = "cross_attn"  # the module of attention to images


class ConfigError(ValueError):
    """A config value that cannot be used, in one line, and its parts: the `refusal` of a `field`."""

    def __init__(self, field: str, given: object, allowed: str, near: Sequence[str] = ()) -> None:
        """`near`: valid names, of which the one closest to what was given is suggested."""
        close = difflib.get_close_matches(str(given).casefold(), near, n=1)
        self.field, self.refusal = field, Refusal(field, reprlib.repr(given), allowed)
        what = "nothing given" if given is None else f"given {self.refusal.given}"
        super().__init__(f"{field}: {what}, allowed: {allowed}" + (f"; did you mean {close[0]!r}?" if close else ""))


ATTENDING = ("attention", "latent", "compressed", "both")  # mixers with keys and values, or latent ones
RECURRENT = ("delta", "lightning", "ssm", "both", "conv")  # mixers that pass a state on from position to position


class LayerSpec(NamedTuple):
    """The kind of one decoder layer: how positions see each other, and what follows.

    `mixer`: `attention` over the keys and values of all heads, over `latent` ones (MLA), or over a window and
    `compressed` ones before it; `cross` attention to the keys and values of images' patches; a gated `delta` rule,
    `lightning` attention, a state space, `ssm`, or a short convolution, `conv`, which pass a state on from position to
    position; `both` attention and a state space, beside each other; or `none`. `mlp`: `dense`, or routed `experts`, or
    `none`.

    `slides`: attention sees the last `sliding_window` tokens alone. `rotated`: positions are rotary. `broad`: its heads
    are the architecture's `Broad` ones. `borrows`: keys and values are those of a lower layer. `sparse`: of the MLP's
    gates only those far above their mean pass (Gemma 3n). `chooses`: where attention is sparse, the layer chooses the
    keys that its queries see, and not one below it. `width`: of a dense MLP where layers differ; 0: the architecture's.
    `pools`: where attention is compressed, the way in which positions become entries; empty: it has its window alone.
    `weighed`: the tanh of a number multiplies the output of either block (Llama 3.2 Vision).
    """

    mixer: Literal[
        "attention", "latent", "compressed", "cross", "delta", "lightning", "ssm", "both", "conv", "none"
    ] = "attention"
    mlp: Literal["dense", "experts", "none"] = "dense"
    slides: bool = False
    rotated: bool = True
    broad: bool = False
    borrows: bool = False
    sparse: bool = False
    chooses: bool = True
    width: int = 0
    pools: Pools = ""
    weighed: bool = False

    @property
    def shapes(self) -> LayerSpec:
        """The parts of the kind that decide its tensors."""
        return LayerSpec(
            self.mixer,
            self.mlp,
            broad=self.broad,
            borrows=self.borrows,
            chooses=self.chooses,
            width=self.width,
            pools=self.pools,
            weighed=self.weighed,
        )


# a layer that attends to images alone (Llama 3.2 Vision)
CROSSING = LayerSpec("cross", rotated=False, weighed=True)


@dataclass(frozen=True)
class Architecture:
    """The few dozen integers of a decoder that decide its memory. Sizes are counts of elements."""

    family: str  # Hugging Face `model_type`
    hidden: int
    specs: tuple[LayerSpec, ...]  # of all layers, from the first to the last
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
    # queries and keys are normed head by head, with one head's weight or each's own (Command R+), or over all heads;
    # bare: head by head without weights, where they rotate; apart: each head by a norm of its own (StableLM 2 12B)
    qk_norm: Literal["", "heads", "each", "width", "bare", "apart"] = ""
    qk_norm_late: bool = False  # after the rotation (Hunyuan)
    norms: Norms = BEFORE
    # centred: the mean is taken off too; layer: PyTorch's own, of which bare has no weight (OLMo), and one-plus adds 1
    # to the weight (Nemotron); kernel: PyTorch's own RMS norm in one kernel (torchtitan), which autocast runs in fp32
    # where it is listed
    norm: Literal["rms", "centred", "layer", "bare", "one-plus", "kernel", "kernel-listed"] = "rms"
    norm_fp32: bool = False  # a norm's weight multiplies in fp32, before the cast (Gemma), not after it (Llama)
    norm_bias: bool = False
    norm_power: bool = False  # the scale of a row is a power of its mean square, which keeps that (Gemma 4)
    values_normed: bool = False  # head by head, without weights (Gemma 4)
    by_token: bool = False  # queries and keys are rotated before heads are put first (Gemma 4)
    output_scaled: bool = False  # a layer's output is multiplied in place (Gemma 4)
    keys_as_values: bool = False  # values are what the projection of keys makes
    value_dim: int = 0  # of a head's values, if they are no head_dim wide (MiMo-V2-Flash)
    values_scaled: bool = False  # multiplied by a number (MiMo-V2-Flash)
    doubled: bool = False  # the MLP of layers that borrow keys and values is twice as wide (Gemma 4)
    layer_inputs: LayerInputs | None = None
    altup: AltUp | None = None
    hyper: Hyper | None = None
    broad: Broad | None = None  # heads of layers that attend to all positions, if they are others
    normed_after: bool = False  # blocks read the residual stream, and the sum with their output is normed (OPT 350M)
    parallel: bool = False  # attention and MLP both read the layer's input
    joined: bool = False  # both outputs are added up before the residual stream gets them (Falcon)
    # the result is concatenated (Phi-3), or cast from fp32 (OLMo 2); pairs are complex numbers in fp32 (torchtitan), or
    # halves of fp32 that are stacked (torchtune); halves of a head rotate apart and are joined (axes: Gemma 4's tower);
    # widened: cos and sin are fp32, and so are queries and keys from there on (CodeGen)
    rotation: Literal["", "joined", "fp32", "complex", "stacked", "axes", "widened"] = ""
    rotary_picked: bool = False  # each rotation picks cos and sin of every token's position (torchtune's packs)
    # keys and values are copied for every query head, whichever kernel attends (torchtune, Transformers before 4.54)
    repeated: bool = False
    rotary_dim: int = 0  # of a head; the rest passes by and is joined again (Qwen3-Next); 0: all of it rotates
    # the sigmoid of a gate weighs attention's output: joined to the queries' projection (Qwen3-Next), or with its own;
    # heads: the softplus of one number a head does (Laguna)
    output_gate: Literal["", "joined", "apart", "heads"] = ""
    rotary_tables: int = 0  # elements of cos and sin per position, where each layer repeats them for itself (GLM)
    cached_positions: int = 0  # positions whose cos and sin every layer has in buffers (Transformers until 4.44)
    cached_bytes: int = 0  # of an element of these; 0: as many as a weight's
    embedding_scaled: bool = False  # outside the embedding's module (Granite; Gemma's module does it itself)
    embedding_dropout: bool = False
    residual_scaled: bool = False  # outputs of attention and MLP are multiplied before they are added (Granite)
    normed_stream: bool = False  # both blocks' normed inputs are the residual stream, multiplied too (MiniMax-Text-01)
    # vectors multiply both outputs (InternViT)
    layer_scaled: bool = False
    residual_dropout: bool = False  # dropout on the outputs of attention and MLP while training (Seed-OSS)
    attention_dropout: bool = False  # dropout on attention's probabilities
    # expanded: stored in groups of queries with one key and one value, which are then copied for every query (Falcon);
    # picked: all queries have one key and one value, which attention gets as they are (Falcon 7B); quartered: stored in
    # four groups of heads, out of which queries, keys and values are copied (CodeGen)
    fused_qkv: Literal["", "sliced", "split", "expanded", "picked", "quartered"] = ""
    masked: bool = False  # SDPA gets a mask even where it needs none
    windows_masked: bool = False  # so it does in layers with a window, however short sequences are (Gemma 4's images)
    end_to_end: bool = False  # the rows of a batch are joined in one, whose sequences its positions tell apart
    # positions slope attention's scores (ALiBi), in Transformers' eager attention alone: by the product that makes the
    # scores (BLOOM), or by an fp32 tensor that is added to them (MPT)
    slopes: Literal["", "within", "added"] = ""
    # eager attention takes the softmax in its input's type (Llama 4), but for fp16 (OPT of old)
    narrow_softmax: Literal["", "always", "but fp16"] = ""
    scores_bounded: bool = False  # eager attention's masked scores are the larger of them and a bound (OPT of old)
    # so it does of scores less their maximum, which are a tensor beside the scores (GPT-OSS), or take their name
    lowered: Literal["", "beside", "renamed"] = ""
    # queries are multiplied by a number of their position: those without rotary ones (Llama 4), or latent attention's
    # (Mistral Small 4)
    tuned: bool = False
    wide_scores: bool = False  # the only attention beside flash's is eager, and multiplies in fp32 (GPT-J, GPT-Neo)
    own_eager: bool = False  # eager attention scales in place and takes the softmax in its input's type (Falcon)
    gated: bool = True  # the MLP has a gate beside its up projection
    fused_gate_up: bool = False
    softcap_attn: bool = False
    softcap_logits: bool = False
    logits_scaled: bool = False  # divided or multiplied by a number
    head_normed: bool = False  # each forward divides the rows of the head's weight by their norms
    sliding_window: int | None = None  # None where no layer uses one
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    latent_experts: int = 0  # width of what routed experts read and make, if not the residual stream's (Nemotron 3)
    shared_experts: int = 0
    shared_intermediate: int = 0  # of all shared experts together: they are one MLP
    attention_sinks: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    router_linear: bool = False  # the router is an `nn.Linear`, which PEFT adapts among others (Hunyuan)
    experts_input_first: bool = False  # expert weights are stored input first, gates and ups side by side (GPT-OSS)
    experts_clamped: bool = False  # gates and ups of experts are strided halves, which are clamped (GPT-OSS)
    clamped: bool = False  # gates and ups of all MLPs are clamped before the activation (DeepSeek-V4)
    # Transformers 5 makes them of older files' separate experts, and PEFT then adapts them where it adapts such names
    experts_converted: bool = False
    # experts are modules of linears in code beside the weights, whatever Transformers has, and run in turn (Ling)
    experts_apart: bool = False
    # the linears of each routed expert, as the code that runs calls them: those that read its input, then the last;
    # none where experts are parameters, to which PEFT adds no adapters unless they are `experts_converted`
    expert_linears: tuple[str, ...] = ()
    router: str = "mlp.gate"  # the router's module name
    # a softmax over all experts (fp32: on casts; narrow: in the compute type, Mistral Small 4), or over the best alone;
    # all: every expert gets every token (Llama 4); sigmoid: of each expert's logit, in the compute type (LFM2);
    # softplus: the root of each logit's softplus (DeepSeek-V4); sampled: two of those near the best, each with a
    # softmax of its own (Phi-3.5 MoE)
    routing: Literal["softmax", "fp32", "narrow", "best", "best-fp32", "all", "sigmoid", "softplus", "sampled"] = (
        "softmax"
    )
    jittered: bool = False  # what experts and router read is multiplied by noise, once for each (Phi-3.5 MoE)
    routing_normed: bool = True  # the weights of a token's experts are divided by their sum
    routing_uncast: bool = False  # the weights of a token's experts stay in fp32
    shared_name: str = "mlp.shared_experts"
    shared_gate: bool = False  # a sigmoid weighs the shared expert (Qwen2-MoE)
    shared_first: bool = False  # shared experts run before the router (ERNIE 4.5, Hunyuan)
    shared_fp32: bool = False  # their output and that of routed experts are added in fp32 (Hy3)
    # experts' module, if it is not beside the router's; a dense MLP runs beside them, each with norms (Gemma 4)
    experts_name: str = ""
    experts_beside: bool = False
    head_bias: bool = False
    # kinds of tensors that Transformers loads in fp32 beside others in 16 bits (`_keep_in_fp32_modules_strict`)
    kept_wide: tuple[str, ...] = ()
    half: bool = False  # published in fp16: what trains in bf16 casts it as it is loaded
    # linears lie in a module of their own, which may hold their inputs and outputs within bounds (Gemma 4's tower)
    wrapped: Literal["", "plain", "clamped"] = ""
    transposed: bool = False  # linears' weights are stored input first (GPT-2's `Conv1D`)
    mla: Mla | None = None
    indexer: Indexer | None = None
    compressed: Compressed | None = None
    delta: Delta | None = None
    lightning: int = 0  # positions that lightning attention works on at once, with all heads (MiniMax-Text-01)
    ssm: Ssm | None = None
    wide_stream: bool = False  # the residual stream is in fp32 from the first layer on, and each layer reads a copy
    conv: ShortConv | None = None
    multipliers: bool = False  # projections, keys, blocks and the MLP's halves are multiplied by numbers (Falcon-H1)
    activation: str = "silu"
    names: Names = NAMES
    vision: Tower | None = None  # the part for images
    sound: Sound | None = None  # the part that hears, which is loaded and not run
    passed: int = 0  # layers that attend to images alone, and that text without images passes over (Llama 3.2 Vision)
    beyond: int = 0  # rows of the embedding beyond those of the head
    # width of the embedding and of what the head reads, where linears lead from the one to the layers and from these to
    # the other (OPT 350M); 0: the residual stream's
    narrow: int = 0
    pieces: bool = False  # attends piece by piece and joins the outputs, but in one call of the flash-attn package
    positions: int = 0  # rows of a learned embedding of positions (the first GPTs')
    masks_positions: bool = False  # a buffer of the model's own is a mask of all positions by all (StarCoder)
    # the library whose code runs the layers, if not Transformers; Megatron-core with Transformer Engine, or without it
    modeling: Literal["", "litgpt", "megatron", "megatron-plain", "megatron-local"] = ""
    # adapters beside Megatron-core's linears: one of two matrices is cut over tensor-parallel ranks, and sees with
    # sequence parallelism a rank's own positions (mcore-bridge), or all (whole: ms-swift 3); or both are cut, see all
    # positions, and a rank's routed experts share one adapter (shared: Megatron-Bridge); beside Transformers' linears
    # each row of an adapted weight may have a magnitude as well (scaled: DoRA)
    adapters: Literal["own", "whole", "shared", "scaled", "vectors"] = "own"
    # the part that one GPU holds where several share a model, see `calc.models.slices`
    ranks: int = 1  # tensor-parallel ranks: heads and widths are the part of one of them
    expert_ranks: int = 1  # ranks that share the routed experts, each with some of them
    expert_tensor: int = 1  # ranks that share each of them: its width is the part of one
    embeds: bool = True  # the embedding is here, and not on another pipeline stage
    ends: bool = True  # the final norm and the head are here
    depths: tuple[LayerSpec, ...] = ()  # layers of multi-token prediction between final norm and head

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self).values()))

    def __hash__(self) -> int:
        """Computed once: an estimate looks up hundreds of values that depend on the model alone."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """All fields, without the hash, which another process would compute otherwise."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    def megatron(self) -> bool:
        """True if Megatron-core's code runs the layers."""
        match self.modeling:
            case "megatron" | "megatron-plain" | "megatron-local":
                return True
            case "" | "litgpt":
                return False
            case other:
                assert_never(other)

    @property
    def unfused(self) -> bool:
        """True if Megatron-core's layers rotate and activate by PyTorch's own operations, as without a fusion."""
        return self.modeling == "megatron-plain"

    @property
    def quantises_head(self) -> bool:
        """True if 4-bit loading takes the head, too, as litgpt's plugin does."""
        return self.modeling == "litgpt"

    @cached_property
    def varied(self) -> bool:
        """True if the MLPs of the model's layers, or those of the whole model, are of several widths."""
        return any(spec.width for spec in self.specs)

    def at(self, spec: LayerSpec) -> Architecture:
        """The model as layers of the kind `spec` see it: their heads and widths, and them alone."""
        other = self.broad or self.doubled or self.varied
        return _seen(self, spec.shapes) if other else self

    def norms_of(self, spec: LayerSpec) -> Norms:
        """The names of the norms of a layer of the kind `spec`: of its only block alone, where others have two."""
        if not self.norms.mlp or "none" not in (spec.mixer, spec.mlp):
            return self.norms
        only = self.norms.mlp if spec.mixer == "none" else self.norms.attention
        return Norms(only, mlp="")

    def alone(self, spec: LayerSpec) -> Architecture:
        """The model with one layer, of the kind `spec`: the same for every stage of a pipeline with such layers."""
        return _alone(self, spec.shapes)

    @property
    def v_dim(self) -> int:
        """The width of a head's values."""
        return self.mla.v_head_dim if self.mla else self.value_dim or self.head_dim

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.specs)

    @property
    def streams(self) -> int:
        """Residual streams that layers hand on, side by side."""
        several = self.altup or self.hyper
        return several.streams if several else 1

    @property
    def attends(self) -> bool:
        """True if some layers have keys and values of their heads, and not latent ones alone."""
        return any(spec.mixer in ("attention", "both") for spec, _ in layer_kinds(self))

    @property
    def crosses(self) -> int:
        """The number of layers that attend to images alone, where the job reads some."""
        return sum([number for spec, number in layer_kinds(self) if spec.mixer == "cross"])

    @property
    def recurrent(self) -> int:
        """The number of layers that pass a state on from position to position."""
        return sum([number for spec, number in layer_kinds(self) if spec.mixer in RECURRENT])

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """The indices of the layers with a window."""
        return tuple([n for n, spec in enumerate(self.specs) if spec.slides])

    @property
    def unrotated_layers(self) -> tuple[int, ...]:
        """The indices of the layers without rotary positions."""
        return tuple([n for n, spec in enumerate(self.specs) if not spec.rotated])

    @property
    def dense_layers(self) -> int:
        """The number of layers without routed experts."""
        return sum([number for spec, number in layer_kinds(self) if spec.mlp == "dense"])

    @property
    def sparse_layers(self) -> int:
        """The number of layers with routed experts."""
        return sum([number for spec, number in layer_kinds(self) if spec.mlp == "experts"])

    @property
    def attending(self) -> int:
        """The number of layers with keys and values, or latent ones."""
        return sum([number for spec, number in layer_kinds(self) if spec.mixer in ATTENDING])

    @property
    def local_experts(self) -> int:
        """The number of a layer's routed experts that one rank holds."""
        return self.experts // self.expert_ranks

    @property
    def expert_width(self) -> int:
        """Features that a routed expert reads, and makes."""
        return self.latent_experts or self.hidden

    @property
    def vocab_part(self) -> int:
        """Rows of embedding and head that one rank holds."""
        return -(-self.vocab // self.ranks)

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding that one rank holds."""
        return -(-(self.vocab + self.beyond) // self.ranks)

    @property
    def outer(self) -> int:
        """The width of the embedding, and of what the head reads."""
        return self.narrow or self.hidden

    @property
    def views_one(self) -> bool:
        """True if a layer reads one sequence's queries, keys or values in place, where it copies those of several.

        Sparse, compressed, lightning, StarCoder's, GPT-J's and GPT-Neo's, and Falcon 7B's attention, by products of
        their own; and what Mamba-1's convolution lets through, whose channels lie position by position.
        """
        own = self.masks_positions or self.wide_scores or self.fused_qkv == "picked"
        return own or bool(self.indexer or self.compressed) or self.lightning > 0 or bool(self.ssm and self.ssm.rank)

    @property
    def grouped(self) -> bool:
        """True if query heads share keys and values when attention reads them, or a cache keeps them (GQA).

        Falcon in Transformers and all models in litgpt copy them for every query head before that.
        """
        return self.heads != self.kv_heads and self.fused_qkv != "expanded" and self.modeling != "litgpt"

    @property
    def norm_elements(self) -> int:
        """Elements of a norm of the residual stream."""
        return 0 if self.norm == "bare" else self.hidden * (2 if self.norm_bias else 1)

    @property
    def final_elements(self) -> int:
        """Elements between the last layer and the head: a norm, what makes one stream of several, and a projection."""
        norm = self.norm_elements * bool(self.names.final_norm)
        return norm + sum([t.elements for t in _collapse(self)]) + self.hidden * self.narrow


@lru_cache(maxsize=1024)
def _seen(arch: Architecture, spec: LayerSpec) -> Architecture:
    alike = tuple([other for other in arch.specs if other.shapes == spec])
    width = spec.width or arch.intermediate * (2 if arch.doubled and spec.borrows else 1)
    own = replace(arch, broad=None, doubled=False, intermediate=width, specs=alike)
    return replace(own, **arch.broad.fields) if arch.broad and spec.broad else own


@lru_cache(maxsize=1024)
def _alone(arch: Architecture, spec: LayerSpec) -> Architecture:
    return replace(arch, specs=(spec,), embeds=True, ends=True, depths=())


class Tensor(NamedTuple):
    """A parameter tensor; `*` in its name stands for the layer, `count` says how many layers have it.

    `kind`: embedding, norm, linear, bias, sink, decay (of a state, one a head), convolution, slope (of an activation),
    expert (everything with one slice per routed expert, its biases too), router, head, patches, stream (weights of
    residual streams), position (a bias of a position in an entry), matrix (of a product, but no plain linear's, so that
    nothing adapts or quantises it). `module`: embed, attn, mlp, norm, head, vision.
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
    """An `nn.Linear` inside a layer: its name below the layer, input and output features, and attn or mlp.

    `experts`: the number of experts that have such a one, 0 where it is not an expert's.
    """

    name: str
    inputs: int
    outputs: int
    kind: str
    experts: int = 0


def _layer(arch: Architecture, spec: LayerSpec) -> Iterable[Tensor]:
    """The tensors of a decoder layer of this kind, in the order of its modules."""

    def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Iterable[Tensor]:
        mixes = spec.mixer != "none" and name.startswith((f"{a}.", f"{DELTA}.", f"{names.ssm}.", "conv."))
        module = "attn" if mixes else "mlp"
        shape = (inputs, outputs) if arch.transposed else (outputs, inputs)
        yield tensor(f"{name}{'.linear' * bool(arch.wrapped)}.weight", shape, "linear", module)
        if bias:
            yield tensor(f"{name}.bias", (outputs,), "bias", module)

    def norm(name: str, size: int, module: str = "norm") -> Iterable[Tensor]:
        if arch.norm == "bare":
            return
        yield tensor(f"{name}.weight", (size,), "norm", module)
        if arch.norm_bias:
            yield tensor(f"{name}.bias", (size,), "norm", module)

    def tensor(name: str, shape: tuple[int, ...], kind: str, module: str) -> Tensor:
        return Tensor(f"{names.model}.{names.layers}.*.{name}", shape, 1, kind, module)

    def mlp(name: str, width: int, bias: bool) -> Iterable[Tensor]:
        name = f"{name}." if name else ""
        if arch.fused_gate_up:
            yield from linear(f"{name}{names.gate_up}", h, 2 * width, bias)
        else:
            if arch.gated:
                yield from linear(f"{name}{names.gate}", h, width, bias)
            yield from linear(f"{name}{names.up}", h, width, bias)
        yield from linear(f"{name}{names.down}", width, h, bias)
        if arch.activation == "xielu":
            for slope in ("alpha_p", "alpha_n"):
                yield tensor(f"{name}act_fn.{slope}", (1,), "slope", "mlp")

    def delta_rule(d: Delta) -> Iterable[Tensor]:
        for name in ("dt_bias", "A_log"):
            yield tensor(f"{DELTA}.{name}", (d.value_heads,), "decay", "attn")
        yield tensor(f"{DELTA}.conv1d.weight", (d.convolved, 1, d.kernel), "convolution", "attn")
        if d.joined:
            yield from linear(f"{DELTA}.in_proj_qkvz", h, d.convolved + d.values)
            yield from linear(f"{DELTA}.in_proj_ba", h, 2 * d.value_heads)
        yield from norm(f"{DELTA}.norm", d.value_dim, "attn")
        yield from linear(f"{DELTA}.out_proj", d.values, h)
        if not d.joined:
            for name, width in ("qkv", d.convolved), ("z", d.values), ("b", d.value_heads), ("a", d.value_heads):
                yield from linear(f"{DELTA}.in_proj_{name}", h, width)

    def channel_delta(d: Delta) -> Iterable[Tensor]:
        for name in "qkv":
            yield from linear(f"{a}.{name}_proj", h, d.values)
        yield tensor(f"{a}.conv1d.weight", (d.convolved, 1, d.kernel), "convolution", "attn")
        yield tensor(f"{a}.forget_gate.dt_bias", (d.keys,), "decay", "attn")
        yield tensor(f"{a}.forget_gate.A_log", (1, 1, d.value_heads, 1), "decay", "attn")
        yield from linear(f"{a}.forget_gate.f_a_proj", h, d.low)
        yield from linear(f"{a}.forget_gate.f_b_proj", d.low, d.keys)
        yield from linear(f"{a}.b_proj", h, d.value_heads)
        yield from linear(f"{a}.g_a_proj", h, d.low)
        yield from linear(f"{a}.g_b_proj", d.low, d.values)
        yield from norm(f"{a}.o_norm", d.value_dim, "attn")
        yield from linear(f"{a}.o_proj", d.values, h)

    def selective(m: Ssm) -> Iterable[Tensor]:
        yield tensor(f"{names.ssm}.A_log", (m.inner, m.state_dim), "decay", "attn")
        yield tensor(f"{names.ssm}.D", (m.inner,), "decay", "attn")
        yield tensor(f"{names.ssm}.conv1d.weight", (m.inner, 1, m.kernel), "convolution", "attn")
        if m.conv_bias:
            yield tensor(f"{names.ssm}.conv1d.bias", (m.inner,), "bias", "attn")
        yield from linear(f"{names.ssm}.in_proj", h, 2 * m.inner, m.bias)
        yield from linear(f"{names.ssm}.x_proj", m.inner, m.rank + 2 * m.state_dim)
        yield from linear(f"{names.ssm}.dt_proj", m.rank, m.inner, True)
        yield from linear(f"{names.ssm}.out_proj", m.inner, h, m.bias)
        for name, width in (("dt", m.rank), ("b", m.state_dim), ("c", m.state_dim)) if m.parts == "weighed" else ():
            yield from norm(f"{names.ssm}.{name}_layernorm", width, "attn")

    def state_space(m: Ssm) -> Iterable[Tensor]:
        if m.rank:
            yield from selective(m)
            return
        for name in ("dt_bias", "A_log", "D"):
            yield tensor(f"{names.ssm}.{name}", (m.heads,), "decay", "attn")
        yield tensor(f"{names.ssm}.conv1d.weight", (m.convolved, 1, m.kernel), "convolution", "attn")
        if m.conv_bias:
            yield tensor(f"{names.ssm}.conv1d.bias", (m.convolved,), "bias", "attn")
        yield from linear(f"{names.ssm}.in_proj", h, m.inner + m.convolved + m.heads, m.bias)
        if m.normed:
            yield tensor(f"{names.ssm}.norm.weight", (m.inner,), "norm", "attn")
        yield from linear(f"{names.ssm}.out_proj", m.inner, h, m.bias)

    def latent(m: Mla) -> Iterable[Tensor]:
        if m.q_lora_rank:
            yield from linear(f"{a}.q_a_proj", h, m.q_lora_rank, arch.qkv_bias)
            yield from norm(f"{a}.q_a_layernorm", m.q_lora_rank, "attn")
            yield from linear(f"{a}.q_b_proj", m.q_lora_rank, queries)
        else:
            yield from linear(f"{a}.q_proj", h, queries)
        yield from linear(f"{a}.kv_a_proj_with_mqa", h, m.kv_lora_rank + m.qk_rope_head_dim, arch.qkv_bias)
        yield from norm(f"{a}.kv_a_layernorm", m.kv_lora_rank, "attn")
        yield from linear(f"{a}.kv_b_proj", m.kv_lora_rank, heads * (m.qk_nope_head_dim + m.v_head_dim))
        yield from linear(f"{a}.{names.output}", heads * arch.v_dim, h, arch.o_bias)
        if (x := arch.indexer) and spec.chooses:
            assert m.q_lora_rank
            yield from linear(f"{a}.indexer.wq_b", m.q_lora_rank, x.heads * x.head_dim)
            yield from linear(f"{a}.indexer.wk", h, x.head_dim)
            for end in ("weight", "bias"):
                yield tensor(f"{a}.indexer.k_norm.{end}", (x.head_dim,), "norm", "attn")
            yield from linear(f"{a}.indexer.weights_proj", h, x.heads)

    def compressed(m: Compressed) -> Iterable[Tensor]:
        yield tensor(f"{a}.sinks", (heads,), "sink", "attn")
        yield from linear(f"{a}.q_a_proj", h, m.low)
        yield from norm(f"{a}.q_a_norm", m.low, "attn")
        yield from linear(f"{a}.q_b_proj", m.low, queries)
        yield from linear(f"{a}.kv_proj", h, arch.head_dim)
        yield from norm(f"{a}.kv_norm", arch.head_dim, "attn")
        # a group's heads at once, which no plain linear multiplies (`DeepseekV4GroupedLinear`)
        yield tensor(f"{a}.o_a_proj.weight", (m.groups * m.out, queries // m.groups), "matrix", "attn")
        yield from linear(f"{a}.{names.output}", m.groups * m.out, h)
        if spec.pools:
            yield from pooling(f"{a}.compressor", m.rate(spec.pools), arch.head_dim)
        if spec.pools == "sparse":
            x, own = m.indexer, f"{a}.compressor.indexer"
            yield from pooling(own, m.sparse, x.head_dim)
            yield from linear(f"{own}.q_b_proj", m.low, x.heads * x.head_dim)
            yield from linear(f"{own}.scorer.weights_proj", h, x.heads)

    def pooling(name: str, rate: int, width: int) -> Iterable[Tensor]:
        # an entry of a sparse layer is made of its own positions and of those of the one before
        series = width * (2 if spec.pools == "sparse" else 1)
        yield tensor(f"{name}.position_bias", (rate, series), "position", "attn")
        yield from linear(f"{name}.kv_proj", h, series)
        yield from linear(f"{name}.gate_proj", h, series)
        yield from norm(f"{name}.kv_norm", width, "attn")

    def attention() -> Iterable[Tensor]:
        width = arch.value_dim or arch.head_dim
        if arch.attention_sinks:
            yield tensor(f"{a}.sinks", (heads,), "sink", "attn")
        if arch.fused_qkv:
            yield from linear(f"{a}.{names.qkv}".removeprefix("."), h, queries + 2 * keys, arch.qkv_bias)
        else:
            yield from linear(f"{a}.{names.q}", h, queries * (2 if arch.output_gate == "joined" else 1), arch.qkv_bias)
            if not spec.borrows:
                yield from linear(f"{a}.{names.k}", h, keys, arch.qkv_bias)
            if not arch.keys_as_values and not spec.borrows:
                yield from linear(f"{a}.{names.v}", h, arch.kv_heads * width, arch.qkv_bias)
            if arch.output_gate == "apart":
                yield from linear(f"{a}.gate_proj", h, queries)
            elif arch.output_gate == "heads":
                yield from linear(f"{a}.g_proj", h, heads)
        yield from linear(f"{a}.{names.output}".removeprefix("."), heads * width, h, arch.o_bias)
        if arch.qk_norm == "apart":
            for name, number in (names.q_norm, heads), (names.k_norm, arch.kv_heads):
                for n in range(number):
                    yield tensor(f"{a}.{name}.norms.{n}.weight", (arch.head_dim,), "norm", "attn")
        elif arch.qk_norm not in ("", "bare"):
            whole = arch.qk_norm in ("each", "width")
            yield from norm(f"{a}.{names.q_norm}", queries if whole else arch.head_dim, "attn")
            if not spec.borrows:
                yield from norm(f"{a}.{names.k_norm}", keys if whole else arch.head_dim, "attn")

    arch = arch.at(spec)
    if spec.mixer == "cross":  # queries and keys are normed head by head, whatever the others are
        arch = replace(arch, qk_norm="heads", names=arch.names._replace(attention=CROSS))
    names, a = arch.names, arch.names.attention
    h, heads, queries, keys = arch.hidden, arch.heads, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    match spec.mixer:
        case "attention" | "cross":
            yield from attention()
        case "latent":
            assert arch.mla
            yield from latent(arch.mla)
        case "compressed":
            assert arch.compressed
            yield from compressed(arch.compressed)
        case "delta":
            assert arch.delta
            yield from channel_delta(arch.delta) if arch.delta.low else delta_rule(arch.delta)
        case "lightning":
            yield from norm(f"{a}.norm", queries, "attn")
            yield from linear(f"{a}.qkv_proj", h, 3 * queries)
            yield from linear(f"{a}.out_proj", queries, h)
            yield from linear(f"{a}.output_gate", h, queries)
        case "ssm":
            assert arch.ssm
            yield from state_space(arch.ssm)
        case "both":
            assert arch.ssm
            yield from state_space(arch.ssm)
            yield from attention()
        case "conv":
            assert arch.conv
            yield tensor("conv.conv.weight", (h, 1, arch.conv.kernel), "convolution", "attn")
            if arch.conv.bias:
                yield tensor("conv.conv.bias", (h,), "bias", "attn")
            yield from linear("conv.in_proj", h, 3 * h, arch.conv.bias)
            yield from linear("conv.out_proj", h, h, arch.conv.bias)
        case "none":
            pass
        case other:
            assert_never(other)

    if spec.mlp == "experts":
        e, i = arch.local_experts, arch.moe_intermediate
        first = 2 * i if arch.gated else i
        block = arch.experts_name or f"{arch.router.partition('.')[0]}.experts"
        if arch.router_linear:
            yield from linear(arch.router, h, arch.experts)
        else:
            yield tensor(f"{arch.router}.weight", (arch.experts, h), "router", "mlp")
        if arch.router_bias:
            yield tensor(f"{arch.router}.bias", (arch.experts,), "router", "mlp")
        w = arch.expert_width
        up, down = ((e, w, first), (e, i, w)) if arch.experts_input_first else ((e, first, w), (e, w, i))
        yield tensor(f"{block}.{'gate_up_proj' if arch.gated else 'up_proj'}", up, "expert", "mlp")
        yield tensor(f"{block}.down_proj", down, "expert", "mlp")
        if arch.expert_bias:
            yield tensor(f"{block}.gate_up_proj_bias", (e, first), "expert", "mlp")
            yield tensor(f"{block}.down_proj_bias", (e, h), "expert", "mlp")
        if arch.experts_beside:
            yield tensor("router.scale", (h,), "norm", "mlp")
            yield tensor("router.per_expert_scale", (arch.experts,), "norm", "mlp")
            yield from mlp(names.mlp, arch.intermediate, arch.mlp_bias)
            for name in BESIDE:
                yield from norm(name, h)
        if arch.shared_experts:
            yield from mlp(arch.shared_name, arch.shared_intermediate, arch.mlp_bias)
            if arch.shared_gate:
                yield from linear("mlp.shared_expert_gate", h, 1)
        if w := arch.latent_experts:
            yield from linear(f"{names.mlp}.{LATENT[0]}", h, w, arch.mlp_bias)
            yield from linear(f"{names.mlp}.{LATENT[1]}", w, h, arch.mlp_bias)
    elif spec.mlp == "dense":
        yield from mlp(names.mlp, arch.intermediate, arch.mlp_bias)

    for name in filter(None, arch.norms_of(spec)):
        yield from norm(name, h)
    if arch.layer_scaled:
        for name in SCALES.values():
            yield tensor(name, (h,), "norm", "norm")
    if spec.weighed:
        for gates in GATES.values():
            yield tensor(gates[spec.mixer != "cross"], (1,), "norm", "norm")
    if arch.hyper:
        for block in BLOCKS:
            yield tensor(f"{block}.fn", (arch.hyper.weights, arch.hyper.streams * h), "stream", "norm")
            yield tensor(f"{block}.base", (arch.hyper.weights,), "stream", "norm")
            yield tensor(f"{block}.scale", (3,), "stream", "norm")
    if streams := arch.altup:
        yield tensor("altup.correct_output_scale", (h,), "norm", "norm")
        yield from linear("altup.correction_coefs", streams.streams, streams.streams)
        yield from linear("altup.prediction_coefs", streams.streams, streams.streams**2)
        yield from linear("altup.modality_router", h, streams.streams)
        yield from norm("altup.router_norm", h)
        yield from linear("laurel.linear_left", h, streams.laurel)
        yield from linear("laurel.linear_right", streams.laurel, h)
        yield from norm("laurel.post_laurel_norm", h)
    if arch.layer_inputs:
        yield from linear("per_layer_input_gate", h, arch.layer_inputs.width)
        yield from linear("per_layer_projection", arch.layer_inputs.width, h)
        yield from norm("post_per_layer_input_norm", h)


@lru_cache(maxsize=4096)
def layer_tensors(arch: Architecture, spec: LayerSpec) -> tuple[Tensor, ...]:
    """The tensors of a layer of the kind `spec`, each with count 1."""
    return tuple(_layer(arch, spec))


@lru_cache(maxsize=4096)
def layer_kinds(arch: Architecture) -> tuple[tuple[LayerSpec, int], ...]:
    """The kinds of layers that the model has, by their tensors, and the number of each; the lowest first."""
    return tuple(Counter(spec.shapes for spec in arch.specs).items())


@lru_cache(maxsize=4096)
def tensors(arch: Architecture, *, head: Head = "lm") -> tuple[Tensor, ...]:
    """Every parameter tensor, a tied head once.

    `head`: "lm" is the causal LM; "scalar" a reward model or critic, whose lm_head is replaced by a Linear(hidden, 1)
    without bias; "none" the bare decoder.
    """
    layers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for spec, count in layer_kinds(arch):
        for tensor in _layer(arch, spec):
            key = tensor.name, tensor.shape
            seen = layers[key].count if key in layers else 0
            layers[key] = tensor._replace(count=count + seen)
    names, rows = arch.names, arch.vocab_part
    table = (arch.embedding_rows, arch.outer)
    embedding = Tensor(f"{names.model}.{names.embedding}.weight", table, 1, "embedding", "embed")
    endings = () if arch.norm == "bare" else ("weight", "bias") if arch.norm_bias else ("weight",)
    final = names.final_norm
    norm = [Tensor(f"{names.model}.{final}.{end}", (arch.hidden,), 1, "norm", "norm") for end in endings if final]
    norm += _collapse(arch)
    if arch.narrow:
        norm.append(Tensor(f"{names.model}.{PROJECTIONS[1]}.weight", (arch.outer, arch.hidden), 1, "linear", "head"))
    lm = [] if arch.tied else [Tensor(f"{names.head}.weight", (rows, arch.outer), 1, "head", "head")]
    if arch.head_bias:
        lm.append(Tensor("lm_head.bias", (rows,), 1, "bias", "head"))
    heads = {"lm": lm, "scalar": [Tensor("score.weight", (1, arch.outer), 1, "head", "head")], "none": []}
    begins, ends = (embedding, *_beside_embedding(arch)) * arch.embeds, (*norm, *heads[head]) * arch.ends
    again = (embedding,) if arch.depths and not arch.embeds else ()
    return (*begins, *layers.values(), *passed_tensors(arch), *again, *_depths(arch), *ends, *vision_tensors(arch))


@lru_cache(maxsize=4096)
def passed_tensors(arch: Architecture) -> tuple[Tensor, ...]:
    """The tensors of the layers that text without images passes over: they are loaded, and get no gradients.

    Transformers 5.23 `models/mllama/modeling_mllama.py`, `MllamaCrossAttentionDecoderLayer`.
    """
    return tuple([t._replace(count=arch.passed) for t in _layer(arch, CROSSING)]) if arch.passed else ()


def _depths(arch: Architecture) -> Iterable[Tensor]:
    """The tensors of multi-token prediction: of each depth two norms, what joins both, a layer, and a final norm.

    Megatron-core's names (`core/transformer/multi_token_prediction.py`, `MultiTokenPredictionLayer`).
    """
    h = arch.hidden
    for n, spec in enumerate(arch.depths):
        for name in ("enorm", "hnorm", "final_layernorm"):
            for end in ("weight", "bias") if arch.norm_bias else ("weight",):
                yield Tensor(f"mtp.layers.{n}.{name}.{end}", (h,), 1, "norm", "norm")
        yield Tensor(f"mtp.layers.{n}.eh_proj.weight", (h // arch.ranks, 2 * h), 1, "linear", "mlp")
        for t in _layer(arch, spec):
            yield t._replace(name=t.name.replace(f"{arch.names.model}.{arch.names.layers}.*", f"mtp.layers.{n}"))


def _beside_embedding(arch: Architecture) -> list[Tensor]:
    """The tensors before the first layer but the embedding's own: learned positions, a norm, and more in Gemma's."""
    name = f"{arch.names.model}.{arch.names.positions}.weight"
    learned = Tensor(name, (arch.positions, arch.hidden), 1, "embedding", "embed")
    into = Tensor(f"{arch.names.model}.{PROJECTIONS[0]}.weight", (arch.hidden, arch.outer), 1, "linear", "embed")
    own = [*[learned] * (arch.positions > 0), *[into] * (arch.narrow > 0)]
    return [*own, *_embedding_norm(arch), *_layer_inputs(arch), *_streams(arch)]


def _embedding_norm(arch: Architecture) -> list[Tensor]:
    """The tensors of the norm between the embedding and the first layer."""
    if not (name := arch.names.embedding_norm):
        return []
    ends = ("weight", "bias") if arch.norm_bias else ("weight",)
    return [Tensor(f"{arch.names.model}.{name}.{end}", (arch.hidden,), 1, "norm", "embed") for end in ends]


def _layer_inputs(arch: Architecture) -> list[Tensor]:
    """The tensors that make all layers' own embeddings."""
    if (own := arch.layer_inputs) is None:
        return []
    model = arch.names.model
    return [
        Tensor(f"{model}.embed_tokens_per_layer.weight", (own.rows, own.columns), 1, "embedding", "embed"),
        Tensor(f"{model}.per_layer_model_projection.weight", (own.columns, arch.hidden), 1, "linear", "embed"),
        Tensor(f"{model}.per_layer_projection_norm.weight", (own.width,), 1, "norm", "embed"),
    ]


def _streams(arch: Architecture) -> list[Tensor]:
    """The tensors that make the further streams of the embedding, and one of all after the last layer."""
    if (up := arch.altup) is None:
        return []
    names = (f"{arch.names.model}.altup_{way}projections.*.weight" for way in ("", "unembed_"))
    return [Tensor(name, (arch.hidden, arch.hidden), up.streams - 1, "linear", "embed") for name in names]


def _collapse(arch: Architecture) -> list[Tensor]:
    """The tensors that make one residual stream of several hyper-connected ones, before the final norm."""
    if (own := arch.hyper) is None:
        return []
    shapes = {"fn": (own.streams, own.streams * arch.hidden), "base": (own.streams,), "scale": (1,)}
    model = arch.names.model
    return [Tensor(f"{model}.hc_head.hc_{name}", shape, 1, "stream", "norm") for name, shape in shapes.items()]


def beside_embedding_parameters(arch: Architecture) -> int:
    """Elements before the first layer but the embedding's; 0 if there are none, or another stage has them."""
    return sum(t.elements * t.count for t in _beside_embedding(arch)) * arch.embeds


@lru_cache(maxsize=4096)
def vision_tensors(arch: Architecture, part: Seeing = "all") -> tuple[Tensor, ...]:
    """The parameter tensors of the vision tower, its projector, and what hears, or one part of them; none without."""
    tower = arch.vision
    if tower is None:
        return _heard(arch) if part in ("all", "unread") else ()
    blocks = tuple([
        t._replace(name=tower.placed(t.name, spec), count=count, module="vision")
        for spec, count in layer_kinds(tower.blocks)
        for t in layer_tensors(tower.blocks, spec)
    ])  # fmt: skip

    def named(tensors: Iterable[tuple[str, tuple[int, ...], str]], count: int = 1) -> tuple[Tensor, ...]:
        return tuple([Tensor(f"{tower.prefix}{name}", shape, count, kind, "vision") for name, shape, kind in tensors])

    projector = named(tower.projector(tower.merger)) + named(tower.beside)
    if tower.deep:
        projector += named(tower.projector(tower.deep_merger), len(tower.deep))
    match part:
        case "all":
            return (*named(tower.patches), *named(tower.linears), *blocks, *vision_tensors(arch, "unread"), *projector)
        case "unread":
            idle = [t._replace(count=tower.unread) for t in blocks if tower.unread]
            idle += named(tower.idle)
            return (*idle, *_heard(arch))
        case "linears":
            return named(tower.linears)
        case "blocks":
            return blocks
        case "projector":
            return projector


def _heard(arch: Architecture) -> tuple[Tensor, ...]:
    """The parameter tensors of the part that hears."""
    heard = arch.sound.tensors if arch.sound else ()
    return tuple([Tensor(f"model.{name}", *of, "vision") for name, of in heard])


def vision_block(arch: Architecture) -> int:
    """Elements of the largest block of a vision tower; 0 without one."""
    tower = arch.vision
    return max([layer_parameters(tower.blocks, spec) for spec, _ in layer_kinds(tower.blocks)]) if tower else 0


def language(arch: Architecture) -> Architecture:
    """The layers of the language model that text runs through, alone."""
    return replace(arch, vision=None, sound=None, passed=0) if arch.vision or arch.sound or arch.passed else arch


def passing(arch: Architecture) -> Architecture:
    """The model over text without images, which passes over layers that attend to these."""
    if not arch.crosses:
        return arch
    return replace(arch, specs=tuple([s for s in arch.specs if s.mixer != "cross"]), passed=arch.crosses)


@lru_cache(maxsize=4096)
def parameters(arch: Architecture, *, head: Head = "lm") -> int:
    """The exact number of parameters; a tied head is counted once."""
    return sum(t.elements * t.count for t in tensors(arch, head=head))


@lru_cache(maxsize=4096)
def layer_parameters(arch: Architecture, spec: LayerSpec) -> int:
    """The number of parameters of a layer of the kind `spec`."""
    return sum(t.elements for t in layer_tensors(arch, spec))


def embedding_parameters(arch: Architecture) -> int:
    """Elements of the embedding table, V·H, or of a rank's part of it."""
    return arch.embedding_rows * arch.outer


@lru_cache(maxsize=4096)
def active_parameters(arch: Architecture, *, head: Head = "lm") -> int:
    """The parameters active for one token: all but those of the routed experts that it is not sent to."""
    idle = arch.experts - arch.experts_per_token
    return parameters(arch, head=head) - (routed_parameters(arch) // arch.experts * idle if arch.experts else 0)


@lru_cache(maxsize=4096)
def routed_parameters(arch: Architecture) -> int:
    """The number of parameters of all routed experts."""
    return sum(t.elements * t.count for t in tensors(arch) if t.kind == "expert")


@lru_cache(maxsize=4096)
def largest_in_layer(arch: Architecture, spec: LayerSpec) -> int:
    """Elements of the largest tensor of a layer of the kind `spec`."""
    return max(t.elements for t in layer_tensors(arch, spec))


@lru_cache(maxsize=4096)
def linears(arch: Architecture, spec: LayerSpec) -> tuple[Linear, ...]:
    """The `nn.Linear` modules of a layer of the kind `spec`, as PEFT finds them.

    Routers and routed experts are bare parameters in Transformers 5, hence not among them; nor is a state space's
    output projection where PEFT leaves it, nor what chooses keys without gradients.
    """
    spared = f".{arch.names.ssm}.out_proj.weight" if arch.ssm and not arch.ssm.adapted else "none"
    into, out = (0, 1) if arch.transposed else (1, 0)
    return tuple(
        Linear(t.name.partition(".*.")[2].removesuffix(".weight"), t.shape[into], t.shape[out], t.module)
        for t in layer_tensors(arch, spec)
        if t.kind == "linear" and not t.name.endswith(spared) and ".indexer." not in t.name
    )
