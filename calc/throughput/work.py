"""The work of one GPU: matrix products, attention, element-wise kernels, the loss, and launching all of it.

Counted from Transformers' eager code as `calc.memory.activations` reads it. Every function gives the time of one GPU
for one optimizer step, in which the GPU processes T tokens in m micro batches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, assert_never

from calc.autograd.tape import CHUNK
from calc.base.plan import Recomputed
from calc.models.architecture import (
    Architecture,
    Delta,
    Head,
    LayerSpec,
    Ssm,
    language,
    layer_kinds,
    layer_tensors,
    tensors,
)
from calc.models.lora import adaptable
from calc.throughput.terms import Constant, Term


class Bytes(NamedTuple):
    """Bytes that eager kernels read and write outside multiplications, in bf16, for each element of that kind."""

    norm: int
    residual: int
    rope: int
    gated: int
    routed: int
    joined: int
    values: int
    keys: int
    channels: int
    states: int


class Operations(NamedTuple):
    """The number of operations of a layer, of each norm beyond its two, and of each adapter."""

    layer: int
    norm: int
    adapter: int


# Counted by `TorchDispatchMode` in a layer of Llama (Transformers 5.23); tests/trace/test_operations.py counts again.
# Forward, RMSNorm in fp32: casts 6 and 6, square 8, mean 4, product 8, weight 4. RoPE: two products, a rotated copy, a
# sum. Backward, RMSNorm: products 4, 6, 12, 8, 8 and 12, sums 2 and 4, a mean's 4, a square's 8, a sum 12, casts 6 and
# 6; where a norm's output has several readers their gradients are added, as a residual's are.
# Tokens for experts, a copy for each, every element of which counts (integrations/moe.py): gathered in the experts'
# order 4, weighted 4, put back 4, added up 2; backward spreads 2, scatters into zeros 12, multiplies by weights and by
# outputs 10, adds up 2, scatters again 2. Gradients of gate and up, which are one product, are joined 8.
# Gated delta rule in fla's kernels (fla-core 0.6.0), by what each reads and writes. Forward: the convolution 4 a
# channel, contiguous copies 4; queries and keys normed, then read and written by the transform, the states and the
# output 14 a key, 14 a value, 8 an element of each chunk's state; the gated norm, eager, 62 a value. Backward computes
# transform and states again, and has gradients of each.
FORWARD = Bytes(norm=36, residual=6, rope=20, gated=10, routed=14, joined=0, values=76, keys=14, channels=8, states=8)
BACKWARD = Bytes(
    norm=92, residual=15, rope=32, gated=18, routed=28, joined=8, values=152, keys=38, channels=14, states=20
)
# Counted in the same way: kernels, and all operations that the host dispatches, views too, in forward, recomputation
# and backward. Checkpointing calls a Python hook three times for each tensor that a layer keeps, and each call counts
# as an operation. Reentrant checkpointing, Transformers' own before 5 (its pull request 43203), runs a layer again
# without hooks.
KERNELS = Operations(38, 8, 6), Operations(36, 8, 6), Operations(71, 16, 7)
DISPATCHED = Operations(77, 9, 12), Operations(131 + 3 * 38, 19 + 3 * 6, 14 + 3 * 3), Operations(142, 20, 17)
REENTRANT = DISPATCHED[0], DISPATCHED[0], DISPATCHED[2]
# LoRA's bytes for each input and each output element, forward and backward, by the bytes of its type (PEFT
# tuners/lora/layer.py). In fp32 the input is cast, and the output scaled, added to the layer's own and cast back;
# gradients of the inputs are added up. Dropout reads, writes, and keeps a mask.
ADAPTED = {2: ((0, 10), (6, 4)), 4: ((6, 24), (12, 20))}
DROPPED = {2: 5, 4: 9}
# Bytes of eager attention for each query, key and head: scores written, scaled, masked, softmax in fp32, cast, read.
SCORES = 2 + 4 + 4 + 8 + 6 + 2
LAUNCH = Constant(
    11.6e-6, "seconds of the host for each operation that it dispatches, Python and autograd included", "calibrated",
    "the middle of three hosts, of which the slowest takes almost twice as long as the quickest: "
    "timing.launches",
)  # fmt: skip
START = Constant(
    3.37e-6, "seconds that a kernel takes beyond its bytes", "measured",
    "decoding steps of six models on an H200 and an H100, from CUDA graphs: timing.start",
)  # fmt: skip
HOOK = Constant(
    (0.270 - 0.060 - 0.038) / (64 * 8), "seconds that ZeRO-3's hooks take to fetch and release a module", "published",
    "https://github.com/deepspeedai/DeepSpeed/pull/1188: the forward of a BERT of 64 layers, 8 modules with parameters "
    "in each, takes 270 ms, 60 ms under ZeRO-2 (issue 1174); 38 ms of it are its gathers",
)  # fmt: skip


class Counts(NamedTuple):
    """The sizes of a model that decide its arithmetic, for one token.

    `layers`: elements of the matrices that a token is multiplied with in all layers, of which `routed` belong to
    experts; `experts`: elements of all experts; `grouped`: bytes that a token's products with its experts read and
    write. `head`: elements of the output head. `attention`: elements that a query and a key of all heads multiply, QKᵀ
    and PV together, over the layers that see all keys; `windowed` over those with a sliding window of `window`.
    `elementwise`: bytes of the forward's other kernels, and `backward` of backward's. `modules`: modules with weights,
    in all layers. `norms`: norms of queries and keys in a layer.
    """

    layers: int
    routed: int
    experts: int
    grouped: int
    head: int
    attention: int
    windowed: int
    window: int
    elementwise: int
    backward: int
    modules: int
    norms: int


@lru_cache(maxsize=4096)
def counts(arch: Architecture, head: Head) -> Counts:
    """The counts of a model. An embedding is looked up, never multiplied; a tied head is multiplied all the same."""
    layers = routed = experts = modules = 0
    for t in tensors(language(arch), head="none"):
        modules += t.count * t.name.endswith("weight")
        if len(t.shape) == 1 or t.kind == "embedding" or t.name.endswith("_bias"):
            continue
        used = arch.experts_per_token / arch.experts if t.kind == "expert" else 1
        layers += int(t.elements * t.count * used)
        if t.kind == "expert":
            experts += t.elements * t.count
            routed += int(t.elements * t.count * used)
    h, q, kv = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    layers += arch.recurrent * scanned(arch.delta or arch.ssm)
    sparse = arch.sparse_layers
    wide = arch.dense_layers * arch.intermediate
    wide += sparse * (arch.experts_per_token * arch.moe_intermediate + arch.shared_intermediate)

    copies = sparse * arch.experts_per_token
    blocks = sum((spec.mixer != "none") + (spec.mlp != "none") for spec in arch.specs)

    def touched(b: Bytes) -> int:
        heads = (b.rope + b.norm * bool(arch.qk_norm)) * (q + kv) * arch.attending
        sent = copies * (b.routed * h + b.joined * arch.moe_intermediate)
        ruled = arch.recurrent * ruling(arch.delta or arch.ssm, b)
        return blocks * (b.norm + b.residual) * h + heads + ruled + b.gated * wide + sent

    return Counts(
        layers=layers,
        routed=routed,
        experts=experts,
        grouped=copies * (4 * h + 6 * arch.moe_intermediate),  # rows in and out of both products, in bf16
        head=arch.vocab * h if head == "lm" else h if head == "scalar" else 0,
        attention=sum(attended(arch, spec) for spec in arch.specs if not spec.slides),
        windowed=sum(attended(arch, spec) for spec in arch.specs if spec.slides),
        window=arch.sliding_window or 0,
        elementwise=touched(FORWARD),
        backward=touched(BACKWARD),
        modules=modules,
        norms=2 * bool(arch.qk_norm),
    )


def ruling(delta: Delta | Ssm | None, b: Bytes) -> int:
    """Bytes of a gated delta rule's kernels for each token; a state space's are taken to move as many an element."""
    if delta is None:
        return 0
    if isinstance(delta, Ssm):
        states = delta.state // delta.chunk
        return b.values * delta.inner + b.keys * delta.grouped + b.channels * delta.convolved + b.states * states
    keys, states = delta.value_heads * delta.key_dim, delta.state // CHUNK
    return b.values * delta.values + b.keys * keys + b.channels * delta.convolved + b.states * states


def scanned(delta: Delta | Ssm | None) -> int:
    """Multiplications of a gated delta rule for each token: within chunks, and with a chunk's state three times.

    A state space's: C to B in each group and with the input, and the state made and read.
    """
    if delta is None:
        return 0
    if isinstance(delta, Ssm):
        return delta.chunk * (delta.grouped + delta.inner) + 2 * delta.state
    keys = delta.value_heads * delta.key_dim
    return CHUNK * (3 * keys + 2 * delta.values) + 3 * delta.state


def attended(arch: Architecture, spec: LayerSpec) -> int:
    """Elements that a query and a key of all heads multiply in a layer of the kind `spec`."""
    queries = arch.heads * arch.head_dim
    match spec.mixer:
        case "attention" | "both":
            return 2 * queries
        case "latent":
            assert arch.mla
            return queries + arch.heads * arch.mla.v_head_dim
        case "delta" | "ssm" | "none":
            return 0
        case other:
            assert_never(other)


@lru_cache(maxsize=4096)
def recomputed(arch: Architecture, parts: frozenset[Recomputed]) -> int:
    """Elements, over all layers, of the matrices that a token meets a second time as these parts run again."""
    found = 0.0
    for spec, layers in layer_kinds(arch):
        for t in layer_tensors(arch, spec):
            if spec.mlp == "dense":
                own = {"mlp"} if t.module == "mlp" else set()
            else:
                shared = {"moe", "shared_experts"} if ".shared_" in t.name else set()
                own = {"moe"} if t.kind in ("expert", "router") else shared
            met = arch.experts_per_token / arch.experts if t.kind == "expert" else 1
            found += layers * t.elements * met * bool(own & parts)
    return round(found)


class Adapters(NamedTuple):
    """LoRA adapters: elements of all, widths of the inputs and outputs of their linears, and the number of linears.

    Widths are those of one token, which comes to some of the experts; `idle` are the elements of the others' adapters.
    """

    elements: int
    inputs: int
    outputs: int
    linears: int
    idle: int = 0


NO_ADAPTERS = Adapters(0, 0, 0, 0)


@lru_cache(maxsize=4096)
def adapters(arch: Architecture, rank: int, targets: str | tuple[str, ...]) -> Adapters:
    """The adapters of rank `rank` on `targets` (`all-linear`, or the last part of module names), over all layers."""
    inputs = outputs = found = idle = 0
    for spec, layers in layer_kinds(arch):
        for linear in adaptable(arch, spec):
            if targets == "all-linear" or linear.name.rpartition(".")[2] in targets:
                times = layers * (arch.experts_per_token if linear.experts else 1)
                inputs += times * linear.inputs
                outputs += times * linear.outputs
                found += layers
                idle += max(0, layers * linear.experts - times) * (linear.inputs + linear.outputs)
    return Adapters(rank * (inputs + outputs + idle), inputs, outputs, found, rank * idle)


class Passes(NamedTuple):
    """The passes of a step through a model: forwards, recomputations, and backward's multiplications.

    `inputs` and `weights` are backward's products for the gradients of inputs and of weights. Checkpointing runs the
    layers' forward again, but not the head's.
    """

    forward: int = 1
    again: float = 0
    inputs: int = 0
    weights: int = 0

    @property
    def layers(self) -> float:
        """Multiplications with each matrix of a layer."""
        return self.forward + self.again + self.inputs + self.weights

    @property
    def head(self) -> int:
        """Multiplications with the head."""
        return self.forward + self.inputs + self.weights

    @property
    def adapters(self) -> float:
        """Multiplications with an adapter, which is always trained if there is a backward."""
        return self.forward + self.again + 2 * self.inputs


def matrix(
    tokens: float, c: Counts, a: Adapters, p: Passes, shards: int, rate: float, adapted: float | None = None
) -> Term:
    """Matrix multiplications: two operations for each token, element and pass; adapters have a rate of their own."""
    own, met = adapted or rate, a.elements - a.idle
    values = {"T": tokens, "M": c.layers - c.routed, "n_M": p.layers, "H": c.head, "n_H": p.head, "A": met,
              "n_A": p.adapters, "N": shards, "F": rate, "f": own}  # fmt: skip
    plain = (c.layers - c.routed) * p.layers + c.head * p.head
    seconds = 2 * tokens * (plain / rate + met * p.adapters / own) / shards
    return Term("matrix work", seconds, "2·T·((M·n_M + H·n_H)/F + A·n_A/f)/N", values, "throughput#matrix")


def experts(tokens: float, micro: int, c: Counts, p: Passes, shards: int, rate: float, bandwidth: float) -> Term:
    """The grouped products of routed experts: they wait for their rows and for the weights of all experts."""
    values = {"T": tokens, "E": c.routed, "F": rate, "o": c.grouped, "m": micro, "W": 2 * c.experts, "n": p.layers,
              "N": shards, "B": bandwidth}  # fmt: skip
    moved = tokens * c.grouped + micro * 2 * c.experts
    seconds = p.layers * (2 * tokens * c.routed / rate + moved / bandwidth) / shards
    return Term("experts", seconds, "n·(2·T·E/F + (T·o + m·W)/B)/N", values, "throughput#experts")


def keys(length: float, window: float) -> float:
    """The mean number of keys that a causal query sees over a sequence."""
    return length / 2 if not window or length <= window else window - window * window / (2 * length)


def attention(tokens: float, length: float, c: Counts, p: Passes, causal: bool, shards: int, rate: float) -> Term:
    """QKᵀ and PV: two operations for each of the keys that a query sees.

    Backward multiplies five times where forward does twice. Without a fused kernel every key is computed, seen or not.
    """
    full = keys(length, 0) if causal else length
    near = keys(length, c.window) if causal else length
    passes = p.forward + p.again + 2.5 * p.inputs
    pairs = c.attention * full + c.windowed * near
    values = {"T": tokens, "a": c.attention, "S": full, "w": c.windowed, "W": near, "n": passes, "N": shards, "F": rate}
    return Term("attention", 2 * tokens * pairs * passes / (shards * rate), "2·T·(a·S + w·W)·n/(N·F)", values,
                "throughput#attention")  # fmt: skip


def elementwise(
    tokens: float, c: Counts, a: Adapters, p: Passes, shards: int, bandwidth: float, b: int = 2, dropout: bool = False
) -> Term:
    """Norms, RoPE, activations, residuals, and what adapters of `b` bytes add: bytes through the card's memory."""
    drop = DROPPED[b] * a.inputs if dropout else 0
    forward, back = (drop + taken * a.inputs + given * a.outputs for taken, given in ADAPTED[b])
    values = {"T": tokens, "e": c.elementwise + forward, "n": p.forward + p.again, "g": c.backward + back,
              "n_g": p.inputs, "N": shards, "B": bandwidth}  # fmt: skip
    touched = (c.elementwise + forward) * (p.forward + p.again) + (c.backward + back) * p.inputs
    return Term("element-wise", tokens * touched / (shards * bandwidth), "T·(e·n + g·n_g)/(N·B)", values,
                "throughput#elementwise")  # fmt: skip


def vocabulary(tokens: float, vocab: int, per_logit: float, shards: int, bandwidth: float) -> Term:
    """The loss, or log-probabilities: the bytes read and written for each logit."""
    values = {"T": tokens, "V": vocab, "l": per_logit, "N": shards, "B": bandwidth}
    return Term("loss", tokens * vocab * per_logit / (shards * bandwidth), "T·V·l/(N·B)", values, "throughput#loss")


def dequantised(elements: float, micro: int, p: Passes, bandwidth: float, *, in_fp32: bool = False) -> Term:
    """4-bit weights, made bf16 for each pass of each micro batch: half a byte read, two written.

    `in_fp32`: they become fp32 first, four bytes that are written and read.
    """
    passes, each = p.forward + p.again + p.inputs, 10.5 if in_fp32 else 2.5
    values = {"b": each, "m": micro, "Q": elements, "n": passes, "B": bandwidth}
    return Term("dequantise", each * micro * elements * passes / bandwidth, "b·m·Q·n/B", values, "throughput#matrix")


def scores(tokens: float, length: float, heads: int, p: Passes, shards: int, bandwidth: float) -> Term:
    """The score matrix of eager attention, over the `heads` of all layers, through the card's memory."""
    passes = p.forward + p.again + 2 * p.inputs  # backward reads what was kept, and a gradient for each
    values = {"T": tokens, "S": length, "H": heads, "s": SCORES, "n": passes, "N": shards, "B": bandwidth}
    seconds = tokens * length * heads * SCORES * passes / (shards * bandwidth)
    return Term("scores", seconds, "T·S·H·s·n/(N·B)", values, "throughput#attention")


def modules(c: Counts, a: Adapters) -> int:
    """Modules with parameters of their own, which ZeRO-3 fetches one by one: an adapter has two."""
    return c.modules + 2 * a.linears


def cast(elements: float, micro: int, p: Passes, bandwidth: float) -> Term:
    """fp32 weights become bf16 under autocast, in every forward of every micro batch: four bytes read, two written."""
    passes = p.forward + p.again
    values = {"m": micro, "M": elements, "n": passes, "B": bandwidth}
    return Term("casts", 6 * micro * elements * passes / bandwidth, "6·m·M·n/B", values, "throughput#matrix")


def operations(of: tuple[Operations, Operations, Operations], layers: int, c: Counts, a: Adapters, p: Passes) -> float:
    """Operations in the layers for one micro batch: `KERNELS`, or all that are `DISPATCHED`."""
    times = (p.forward, p.again, p.inputs)
    each = [o.layer * layers + o.norm * c.norms * layers + o.adapter * a.linears for o in of]
    return sum([n * k for n, k in zip(times, each, strict=True)])


def starts(kernels: float, micro: int) -> Term:
    """Start-up time of kernels, beyond their bytes and their arithmetic, one after the other."""
    values = {"m": micro, "k": kernels, "t": START}
    return Term("kernel starts", micro * kernels * START, "m·k·t", values, "throughput#launch")


def launched(dispatched: float, micro: int, p: Passes, hooked: int, busy: float) -> Term:
    """Time that the GPU waits for the host, if the host dispatches operations more slowly than the GPU computes them.

    Under ZeRO-3, `hooked` modules stop for a hook in every pass.
    """
    stops = p.forward + p.again + p.inputs
    values = {"m": micro, "k": dispatched, "t": LAUNCH, "M": hooked, "s": stops, "h": HOOK, "G": busy}
    host = micro * (dispatched * LAUNCH + hooked * stops * HOOK)
    return Term("launch", max(0.0, host - busy), "max(0, m·(k·t + M·s·h) - G)", values, "throughput#launch")
