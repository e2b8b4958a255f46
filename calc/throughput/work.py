"""What one GPU computes: matrix work, attention, element-wise kernels, the loss, and launching all of it.

Counted from Transformers' eager code as `calc.memory.activations` reads it. Every function gives the time of one GPU
for one optimizer step, of which it sees T tokens in n micro-batches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from calc.architecture import Architecture, Head, layer_kinds, linears, tensors
from calc.throughput.terms import Constant, Term

# Bytes a token and layer that eager kernels read and write beside multiplications, in bf16: RMSNorm in fp32 takes
# 36·h (casts 6 and 6, square 8, mean 4, product 8, weight 4), a residual 6·h, RoPE 20 for each query and key element
# (two products, a rotated copy, a sum), SiLU 4 and its product 6 for each intermediate element.
NORM, RESIDUAL, ROPE, GATED = 36, 6, 20, 10
# LoRA, by bytes of its type: the input cast to it and dropped out with a mask; the output scaled and added to the
# layer's own (PEFT tuners/lora/layer.py).
ADAPTED_IN = {2: 5, 4: 6 + 9}
ADAPTED_OUT = {2: 4 + 6, 4: 8 + 8}
# Eager attention, for each query, key and head: scores written, scaled, masked, softmax in fp32, cast, read.
SCORES = 2 + 4 + 4 + 8 + 6 + 2
BACKWARD = 2.0  # backward reads what forward kept and a gradient for each tensor that forward read or wrote
# Kernels that the host launches for a layer's forward: 12 for two norms, 8 for RoPE, 14 for linears with their views,
# 6 for the MLP, attention and residuals; 7 for each adapter.
KERNELS, ADAPTER_KERNELS = 40, 7
LAUNCH = Constant(
    15e-6, "seconds of the host for each kernel, Python and autograd included", "calibrated",
    "published/qwen1-1.8B-LoRA-256, whose time does not change with the length up to 512 tokens",
)  # fmt: skip
HOOK = Constant(
    (0.270 - 0.060 - 0.038) / (64 * 8), "seconds that ZeRO-3's hooks take to fetch and release a module", "published",
    "https://github.com/deepspeedai/DeepSpeed/pull/1188: the forward of a BERT of 64 layers, 8 modules with parameters "
    "in each, takes 270 ms, 60 ms under ZeRO-2 (issue 1174); 38 ms of it are its gathers",
)  # fmt: skip


class Counts(NamedTuple):
    """Sizes of a model that decide its arithmetic, of one token.

    `layers`: elements of the matrices that a token is multiplied with in all layers; `head`: those of its output.
    `attention`: what a query and a key of all heads multiply, QKᵀ and PV together, over the layers that see all keys;
    `windowed` over those with a sliding window of `window`. `elementwise`: bytes of the forward's other kernels.
    `modules`: those with weights, in all layers.
    """

    layers: int
    head: int
    attention: int
    windowed: int
    window: int
    elementwise: int
    modules: int


@lru_cache(maxsize=4096)
def counts(arch: Architecture, head: Head) -> Counts:
    """The counts of a model. An embedding is looked up, never multiplied; a tied head is multiplied all the same."""
    layers = modules = 0
    for t in tensors(arch, head="none"):
        modules += t.count * t.name.endswith("weight")
        if len(t.shape) == 1 or t.kind == "embedding" or t.name.endswith("_bias"):
            continue
        used = arch.experts_per_token / arch.experts if t.kind == "expert" else 1
        layers += int(t.elements * t.count * used)
    h, q, kv = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    values = arch.heads * arch.mla.v_head_dim if arch.mla else q
    sliding = len(arch.sliding_layers)
    sparse = arch.layers - arch.dense_layers
    wide = arch.dense_layers * arch.intermediate
    wide += sparse * (arch.experts_per_token * arch.moe_intermediate + arch.shared_intermediate)
    per_layer = (NORM + RESIDUAL) * 2 * h + ROPE * (q + kv) + (NORM * (q + kv) if arch.qk_norm else 0)
    return Counts(
        layers=layers,
        head=arch.vocab * h if head == "lm" else h if head == "scalar" else 0,
        attention=(arch.layers - sliding) * (q + values),
        windowed=sliding * (q + values),
        window=arch.sliding_window or 0,
        elementwise=arch.layers * per_layer + GATED * wide,
        modules=modules,
    )


class Adapters(NamedTuple):
    """LoRA beside a model's linears: elements of all, widths of their inputs and outputs, and how many there are."""

    elements: int
    inputs: int
    outputs: int
    linears: int


NO_ADAPTERS = Adapters(0, 0, 0, 0)


@lru_cache(maxsize=4096)
def adapters(arch: Architecture, rank: int, targets: str | tuple[str, ...]) -> Adapters:
    """The adapters of rank `rank` on `targets`, `all-linear` or last names of modules, over all layers."""
    found = [0, 0, 0]
    for index, layers in layer_kinds(arch):
        for linear in linears(arch, index):
            if targets == "all-linear" or linear.name.rpartition(".")[2] in targets:
                found[0] += layers * linear.inputs
                found[1] += layers * linear.outputs
                found[2] += layers
    return Adapters(rank * (found[0] + found[1]), *found)


class Passes(NamedTuple):
    """How often a step runs through a model: forwards, recomputations, and what backward multiplies with.

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
        """Multiplications with an adapter, which is always trained where there is a backward."""
        return self.forward + self.again + 2 * self.inputs


def matrix(tokens: float, c: Counts, a: Adapters, p: Passes, shards: int, rate: float) -> Term:
    """Matrix multiplications: two operations for each token, element and pass."""
    work = c.layers * p.layers + c.head * p.head + a.elements * p.adapters
    values = {"T": tokens, "M": c.layers, "n_M": p.layers, "H": c.head, "n_H": p.head, "A": a.elements,
              "n_A": p.adapters, "N": shards, "F": rate}  # fmt: skip
    return Term(
        "matrix work", 2 * tokens * work / (shards * rate), "2·T·(M·n_M + H·n_H + A·n_A)/(N·F)", values,
        "throughput#matrix",
    )  # fmt: skip


def keys(length: float, window: float) -> float:
    """Keys that a causal query sees, the mean over a sequence."""
    return length / 2 if not window or length <= window else window - window * window / (2 * length)


def attention(tokens: float, length: float, c: Counts, p: Passes, causal: bool, shards: int, rate: float) -> Term:
    """Scores and their product with the values: two operations for each of the keys that a query sees.

    Backward multiplies five times where forward does twice. Without a kernel for it every key is computed, seen or not.
    """
    full = keys(length, 0) if causal else length
    near = keys(length, c.window) if causal else length
    passes = p.forward + p.again + 2.5 * p.inputs
    pairs = c.attention * full + c.windowed * near
    values = {"T": tokens, "a": c.attention, "S": full, "w": c.windowed, "W": near, "n": passes, "N": shards, "F": rate}
    return Term("attention", 2 * tokens * pairs * passes / (shards * rate), "2·T·(a·S + w·W)·n/(N·F)", values,
                "throughput#attention")  # fmt: skip


def elementwise(tokens: float, c: Counts, a: Adapters, p: Passes, shards: int, bandwidth: float, b: int = 2) -> Term:
    """Norms, RoPE, activations, residuals and what adapters of `b` bytes add: bytes through the card's memory."""
    touched = ADAPTED_IN[b] * a.inputs + ADAPTED_OUT[b] * a.outputs
    passes = p.forward + p.again + BACKWARD * p.inputs
    values = {"T": tokens, "e": c.elementwise, "a": touched, "n": passes, "N": shards, "B": bandwidth}
    seconds = tokens * (c.elementwise + touched) * passes / (shards * bandwidth)
    return Term("element-wise", seconds, "T·(e + a)·n/(N·B)", values, "throughput#elementwise")


def vocabulary(tokens: float, vocab: int, per_logit: float, shards: int, bandwidth: float) -> Term:
    """The loss, or log-probabilities: bytes that each logit is read and written with."""
    values = {"T": tokens, "V": vocab, "l": per_logit, "N": shards, "B": bandwidth}
    return Term("loss", tokens * vocab * per_logit / (shards * bandwidth), "T·V·l/(N·B)", values, "throughput#loss")


def dequantised(elements: float, micro: int, p: Passes, bandwidth: float) -> Term:
    """4-bit weights, made bf16 for each pass of each micro-batch: half a byte read, two written."""
    passes = p.forward + p.again + p.inputs
    values = {"m": micro, "Q": elements, "n": passes, "B": bandwidth}
    return Term("dequantise", 2.5 * micro * elements * passes / bandwidth, "2.5·m·Q·n/B", values, "throughput#matrix")


def scores(tokens: float, length: float, heads: int, p: Passes, shards: int, bandwidth: float) -> Term:
    """Eager attention's matrix of scores, of `heads` in all layers, through the card's memory."""
    passes = p.forward + p.again + BACKWARD * p.inputs
    values = {"T": tokens, "S": length, "H": heads, "s": SCORES, "n": passes, "N": shards, "B": bandwidth}
    seconds = tokens * length * heads * SCORES * passes / (shards * bandwidth)
    return Term("scores", seconds, "T·S·H·s·n/(N·B)", values, "throughput#attention")


def modules(c: Counts, a: Adapters) -> int:
    """Modules with parameters of their own, which ZeRO-3 fetches one by one: an adapter is two."""
    return c.modules + 2 * a.linears


def cast(elements: float, micro: int, p: Passes, bandwidth: float) -> Term:
    """Under autocast fp32 weights become bf16 in every forward of every micro-batch: four bytes read, two written."""
    passes = p.forward + p.again
    values = {"m": micro, "M": elements, "n": passes, "B": bandwidth}
    return Term("casts", 6 * micro * elements * passes / bandwidth, "6·m·M·n/B", values, "throughput#matrix")


def launched(layers: int, a: Adapters, micro: int, p: Passes, hooked: int, busy: float) -> Term:
    """What the GPU waits for the host, where it is done sooner than the host can launch kernel after kernel.

    `hooked` modules stop for a hook in every pass, ZeRO-3's.
    """
    passes = p.forward + p.again + 2 * p.inputs
    kernels = KERNELS * layers + ADAPTER_KERNELS * a.linears
    stops = p.forward + p.again + p.inputs
    values = {"m": micro, "k": kernels, "n": passes, "t": LAUNCH, "M": hooked, "s": stops, "h": HOOK, "G": busy}
    host = micro * (kernels * passes * LAUNCH + hooked * stops * HOOK)
    return Term("launch", max(0.0, host - busy), "max(0, m·(k·n·t + M·s·h) - G)", values, "throughput#launch")
