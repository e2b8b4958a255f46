"""The work of one GPU: matrix products, attention, element-wise kernels, the loss, and launching all of it.

The number of kernels and the bytes they move follow from the tapes of `calc.memory`. Every function gives the time of
one GPU for one optimizer step, in which the GPU processes T tokens in m micro batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, assert_never

from calc.autograd.tape import CHUNK
from calc.base.plan import Recomputed
from calc.memory.activations import Traffic, kinds, traffic
from calc.memory.run import Run
from calc.models.architecture import (
    RECURRENT,
    Architecture,
    Head,
    LayerSpec,
    language,
    layer_kinds,
    layer_tensors,
    linears,
    tensors,
)
from calc.models.lora import adapted
from calc.models.mixers import Delta, Ssm
from calc.scenario.words import Float8
from calc.throughput.rates import Rates
from calc.throughput.terms import Constant, Term


class Views(NamedTuple):
    """Operations that the host dispatches beside kernels, most of them views, forward and backward."""

    forward: int
    backward: int


# Counted by `TorchDispatchMode` in layers of two dozen families (Transformers 5.23, PEFT 0.21), tests/trace/
# test_operations.py counts again: in a layer, more in one whose state space or linear attention PyTorch's operations
# run, and for each adapter.
LAYER, BY_OPERATIONS, ADAPTER = Views(39, 71), Views(95, 100), Views(6, 10)
# More for each 4-bit linear (bitsandbytes 0.50.2, its kernels' own calls included): two views, its operator, room for
# the weights and their kernel (nn/modules.py, autograd/_functions.py `MatMul4Bit`, backends/cuda/ops.py
# `_dequant_linear_fallback`), in backward an operator, room and a kernel but no view; and for scales that are quantised
# themselves room, a kernel and a sum, in backward an operator, too.
FOUR_BIT, NESTED = Views(5, 2), Views(3, 4)
# Bytes that move where a 4-bit weight becomes bf16: half a byte is read and two are written, by one kernel; four more
# are written and read where it becomes fp32 first.
UNPACKED, UNPACKED_IN_FP32 = 2.5, 10.5
# By PyTorch's operations (torchao 0.14.1 dtypes/nf4tensor.py, `get_original_weight`): 2 to cut half a byte out, 9 to
# make it an int64, 10 to look it up, 2 for its scale and 6 to multiply them; 4 to put the halves together.
UNPACKED_EAGERLY = 2 + 9 + 10 + 2 + 6 + 4
# Checkpointing calls a Python hook three times for each tensor that a layer keeps, each of which counts as an
# operation, and dispatches 1.4 more for it. Reentrant checkpointing, Transformers' own before 5 (its pull request
# 43203), runs a layer again without hooks.
HOOKED = 4.4
LAUNCH = Constant(
    11.6e-6, "seconds of the host for each operation that it dispatches, Python and autograd included", "calibrated",
    "the middle of three hosts, of which the slowest takes almost twice as long as the quickest: "
    "timing.launches",
)  # fmt: skip
MEGATRON_LAUNCH = Constant(
    45.4e-6, "the same for Megatron-core, whose layers call more Python", "calibrated",
    "steps of small models on eight H100, which Megatron-LM's tests store, from 28 to 101: timing.megatron_launch",
)  # fmt: skip
SELECTION = "selection"  # the term that makes selective checkpointing slower than full, where a GPU waits for it
POLICY = Constant(
    40.4e-6, "seconds more of the host for each operation of which selective checkpointing decides if it is kept",
    "calibrated", "steps of six models on an H200: timing.policy",
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

UNIT = Constant(
    0.863e-3, "seconds that a pass takes longer for each adapter that is an FSDP 1 unit of its own", "calibrated",
    "scoring and updates of three models on eight H100, which verl's published logs time: timing.unit",
)  # fmt: skip


class Counts(NamedTuple):
    """The sizes of a model that decide its arithmetic, for one token.

    `layers`: elements of the matrices that a token is multiplied with in all layers, of which `routed` belong to
    experts; `experts`: elements of all experts; `grouped`: bytes that a token's products with its experts read and
    write. `scanned`: multiplications with what state spaces or linear attention pass on, in their kernels, and
    `unfused` in PyTorch's operations. `head`: elements of the output head. `attention`: elements that a query and a key
    of all heads multiply, QKᵀ and PV together, over the layers that see all keys; `windowed` over those with a sliding
    window of `window`. `modules`: modules with weights, in all layers.
    """

    layers: int
    routed: int
    experts: int
    grouped: int
    scanned: int
    unfused: int
    head: int
    attention: int
    windowed: int
    window: int
    modules: int


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
    every = (*arch.specs, *arch.depths)
    copies = sum(spec.mlp == "experts" for spec in every) * arch.experts_per_token
    mixer = arch if arch.lightning else arch.delta or arch.ssm
    heads = {"lm": arch.vocab * arch.outer * (1 + len(arch.depths)), "scalar": arch.outer, "none": 0}
    return Counts(
        layers=layers,
        routed=routed,
        experts=experts,
        grouped=copies
        * (4 * arch.expert_width + 6 * arch.moe_intermediate),  # rows in and out of both products, in bf16
        scanned=arch.recurrent * scanned(mixer),
        unfused=arch.recurrent * scanned(mixer, by_kernels=False),
        head=heads[head],
        attention=sum(attended(arch, spec) for spec in every if not spec.slides),
        windowed=sum(attended(arch, spec) for spec in every if spec.slides),
        window=arch.sliding_window or 0,
        modules=modules,
    )


def scanned(mixer: Architecture | Delta | Ssm | None, *, by_kernels: bool = True) -> int:
    """Multiplications of a gated delta rule for each token: within chunks, and with a chunk's state three times.

    A state space's: C to B and with the input, and the state made and read; PyTorch's operations compare C to B for
    each head, kernels for each group; Mamba-1 has no chunks. Lightning attention's, all heads': two within a block, two
    with the state.
    """
    if mixer is None:
        return 0
    if isinstance(mixer, Architecture):
        return 2 * mixer.heads * mixer.head_dim * (mixer.lightning + mixer.head_dim)
    if isinstance(mixer, Ssm):
        if mixer.rank:  # each position's decays, inputs, state and output
            return 4 * mixer.state
        compared = mixer.grouped if by_kernels else mixer.heads * mixer.state_dim
        return mixer.chunk * (compared + mixer.inner) + 2 * mixer.state
    keys = mixer.value_heads * mixer.key_dim
    return CHUNK * (3 * keys + 2 * mixer.values) + 3 * mixer.state


def attended(arch: Architecture, spec: LayerSpec) -> int:
    """Elements that a query and a key of all heads multiply in a layer of the kind `spec`."""
    arch = arch.at(spec)
    match spec.mixer:
        case "attention" | "both":
            return arch.heads * (arch.head_dim + (arch.value_dim or arch.head_dim))
        case "latent":
            return arch.heads * (arch.head_dim + arch.v_dim)
        case "compressed":  # eager attention compares all pairs, and masks those beyond the window
            assert arch.compressed
            entries = 1 / arch.compressed.rate(spec.pools) if spec.pools else 0
            return round(2 * arch.heads * arch.head_dim * (1 + entries))
        case "cross":  # what reads images is left out, as the tower is
            return 0
        case "delta" | "lightning" | "ssm" | "conv" | "none":
            return 0
        case other:
            assert_never(other)


UP = (".q_b_proj.weight", ".kv_b_proj.weight", ".q_proj.weight")  # latent attention's products up to the heads


@lru_cache(maxsize=4096)
def recomputed(arch: Architecture, parts: frozenset[Recomputed]) -> int:
    """Elements, over all layers, of the matrices that a token meets a second time as these parts run again."""
    found = 0.0
    for spec, layers in layer_kinds(arch):
        for t in layer_tensors(arch, spec):
            if t.module == "attn":
                own = {"self_attn", *(("mla_up_proj",) if spec.mixer == "latent" and t.name.endswith(UP) else ())}
            elif spec.mlp == "dense":
                own = {"mlp"} if t.module == "mlp" else set()
            else:
                shared = {"moe", "shared_experts"} if ".shared_" in t.name else set()
                own = {"moe"} if t.kind in ("expert", "router") else shared
            met = arch.experts_per_token / arch.experts if t.kind == "expert" else 1
            found += layers * t.elements * met * bool(own & parts)
    return round(found)


class Adapters(NamedTuple):
    """LoRA adapters: elements of all, and the number of their linears.

    A token comes to some of the experts; `idle` are the elements of the others' adapters.
    """

    elements: int
    linears: int
    idle: int = 0


NO_ADAPTERS = Adapters(0, 0)


@lru_cache(maxsize=4096)
def adapters(arch: Architecture, rank: int, targets: str | tuple[str, ...]) -> Adapters:
    """The adapters of rank `rank` on `targets` (`all-linear`, or the last part of module names), over all layers."""
    width = found = idle = 0
    for spec, layers in layer_kinds(arch):
        for linear in adapted(arch, spec, targets):
            times = layers * (arch.experts_per_token if linear.experts else 1)
            width += times * (linear.inputs + linear.outputs)
            found += layers
            idle += max(0, layers * linear.experts - times) * (linear.inputs + linear.outputs)
    return Adapters(rank * (width + idle), found, rank * idle)


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


class Casts(NamedTuple):
    """Bytes that are read and written to make a product's operands narrow, for each of their elements.

    `inputs` of every forward, `gradients` of every backward, weights there and `back`.
    """

    inputs: float
    gradients: float
    there: float
    back: float


# torchao 0.18 testing/training/roofline_utils.py, get_tensor_memory_traffic_ovhd_s, nothing fused with what is before
CASTS: Mapping[Float8, Casts] = {
    "tensorwise": Casts(6, 6, 5, 3),
    "rowwise": Casts(8, 8, 3, 7),
    "rowwise_with_gw_hp": Casts(3, 3, 3, 3),
    "mxfp8": Casts(6, 6, 3, 3),
    # Transformer Engine's: two bytes read, one written for each of two layouts
    "delayed": Casts(4, 4, 4, 0),
    "blockwise": Casts(4, 4, 4, 0),
    "nvfp4": Casts(5, 5, 2.5, 2.5),
}


@lru_cache(maxsize=1024)
def widths(arch: Architecture) -> tuple[int, int]:
    """Elements of the inputs and of the outputs of all linears of the layers, for one token."""
    found = [(count, linear) for spec, count in layer_kinds(arch) for linear in linears(arch, spec)]
    return sum(n * each.inputs for n, each in found), sum(n * each.outputs for n, each in found)


def narrowed(
    tokens: float, micro: int, arch: Architecture, p: Passes, shards: int, recipe: Float8, wide_end: int, r: Rates
) -> Term:
    """The products of layers whose linears multiply in 8 bits, with the casts of what they multiply.

    With rowwise_with_gw_hp the weights' gradients are products in 16 bits (torchao `float8/config.py`), and so are
    those of the last `wide_end` layers. NVFP4 is taken for as quick as 8 bits: the catalog has no rate in four.
    """
    share = 1 - wide_end / arch.layers
    c, (inputs, outputs), b = counts(arch, "none"), widths(arch), CASTS[recipe]
    elements = share * (c.layers - c.routed)
    wide = p.weights if recipe == "rowwise_with_gw_hp" else 0
    again, back = p.forward + p.again, min(p.inputs, 1)
    moved = share * tokens * (b.inputs * inputs * again + b.gradients * outputs * back)
    moved += micro * elements * (b.there * again + b.back * back)
    values = {"T": tokens, "M": elements, "n_8": p.layers - wide, "n_M": wide, "N": shards, "F_8": r.narrow,
              "F": r.matrix, "b": moved, "B": r.memory}  # fmt: skip
    seconds = (2 * tokens * elements * ((p.layers - wide) / r.narrow + wide / r.matrix) + moved / r.memory) / shards
    return Term("narrow products", seconds, "(2·T·M·(n_8/F_8 + n_M/F) + b/B)/N", values, "throughput#matrix")


def experts(
    tokens: float, micro: int, c: Counts, p: Passes, shards: int, held: int, rate: float, bandwidth: float
) -> Term:
    """The grouped products of routed experts: they wait for their rows and for the weights of the experts on a GPU.

    `shards` GPUs share the tokens, `held` the experts. Where a router calls experts unevenly, all wait for the GPU that
    receives most: `tokens` then counts as if each received as many.
    """
    values = {"T": tokens, "E": c.routed, "F": rate, "o": c.grouped, "m": micro, "W": 2 * c.experts, "n": p.layers,
              "N": shards, "H": held, "B": bandwidth}  # fmt: skip
    rows = tokens / shards * (2 * c.routed / rate + c.grouped / bandwidth)
    seconds = p.layers * (rows + micro * 2 * c.experts / held / bandwidth)
    return Term("experts", seconds, "n·(T/N·(2·E/F + o/B) + m·W/(H·B))", values, "throughput#experts")


def keys(length: float, window: float) -> float:
    """The mean number of keys that a causal query sees over a sequence."""
    return length / 2 if not window or length <= window else window - window * window / (2 * length)


def attention(tokens: float, length: float, c: Counts, p: Passes, causal: bool, shards: int, rate: float) -> Term:
    """QKᵀ and PV: two operations for each of the keys that a query sees.

    Backward multiplies five times where forward does twice. Without a fused kernel every key is computed, seen or not,
    and so it is by the kernel that takes a mask.
    """
    full = keys(length, 0) if causal else length
    near = keys(length, c.window) if causal else length
    passes = p.forward + p.again + 2.5 * p.inputs
    pairs = c.attention * full + c.windowed * near
    values = {"T": tokens, "a": c.attention, "S": full, "w": c.windowed, "W": near, "n": passes, "N": shards, "F": rate}
    return Term("attention", 2 * tokens * pairs * passes / (shards * rate), "2·T·(a·S + w·W)·n/(N·F)", values,
                "throughput#attention")  # fmt: skip


class Layers(NamedTuple):
    """The work of one GPU's layers for one micro batch besides matrix products.

    `forward` and `backward`: bytes that their kernels read and write. `kernels`: their number in each.
    `dispatched`: operations of the host in forward, as layers run again, and in backward.
    """

    forward: int
    backward: int
    kernels: tuple[int, int]
    dispatched: tuple[float, float, float]


@lru_cache(maxsize=4096)
def kernels(run: Run, masked: bool) -> tuple[tuple[tuple[int, Traffic], ...], Layers]:
    """The layers of `run` by kind: their number and the traffic of each; and `Layers` without the bytes."""
    moved: list[tuple[int, Traffic]] = []
    there = back = 0
    dispatched = [0.0, 0.0, 0.0]
    for kind, number in Counter(kinds(run, masked, True)).items():
        t = traffic(kind.run(run), kind.spec)
        moved.append((number, t))
        there += number * t.kernels[0]
        back += number * t.kernels[1]
        views = [LAYER, BY_OPERATIONS] if kind.spec.mixer in RECURRENT and not run.linear_kernels else [LAYER]
        views += [ADAPTER] * len(adapted(run.arch, kind.spec, run.adapter.targets) if run.adapter else ())
        if run.quantised:
            views += [FOUR_BIT, *([NESTED] if run.nested else [])] * len(linears(run.arch, kind.spec))
        host = t.kernels[0] + sum([v.forward for v in views])
        again = host if run.reentrant else host + HOOKED * t.kept
        each = (host, again, t.kernels[1] + sum([v.backward for v in views]))
        dispatched = [known + number * more for known, more in zip(dispatched, each, strict=True)]
    return tuple(moved), Layers(0, 0, (there, back), (dispatched[0], dispatched[1], dispatched[2]))


def layers(run: Run, masked: bool, tokens: int, length: int) -> Layers:
    """The layers of `run` on so many tokens in sequences of `length`; `masked`: see `calc.memory.activations.kinds`."""
    moved, whole = kernels(run, masked)
    return whole._replace(
        forward=sum([number * t.forward.bytes(tokens, length) for number, t in moved]),
        backward=sum([number * t.backward.bytes(tokens, length) for number, t in moved]),
    )


def elementwise(micro: int, of: Layers, p: Passes, bandwidth: float) -> Term:
    """Norms, RoPE, activations, residuals, adapters, scores that no kernel fuses: bytes through the card's memory."""
    values = {"m": micro, "e": of.forward, "n": p.forward + p.again, "g": of.backward, "n_g": p.inputs, "B": bandwidth}
    touched = of.forward * (p.forward + p.again) + of.backward * p.inputs
    return Term("element-wise", micro * touched / bandwidth, "m·(e·n + g·n_g)/B", values, "throughput#elementwise")


def scan(tokens: float, elements: int, p: Passes, shards: int, rate: float) -> Term:
    """State spaces and linear attention: two operations for each of their multiplications, backward twice as many."""
    passes = p.forward + p.again + 2 * p.inputs
    values = {"T": tokens, "X": elements, "n": passes, "N": shards, "F": rate}
    return Term("scan", 2 * tokens * elements * passes / (shards * rate), "2·T·X·n/(N·F)", values, "throughput#linear")


def vocabulary(tokens: float, vocab: int, per_logit: float, shards: int, bandwidth: float) -> Term:
    """The loss, or log-probabilities: the bytes read and written for each logit."""
    values = {"T": tokens, "V": vocab, "l": per_logit, "N": shards, "B": bandwidth}
    return Term("loss", tokens * vocab * per_logit / (shards * bandwidth), "T·V·l/(N·B)", values, "throughput#loss")


def dequantised(elements: float, micro: int, p: Passes, bandwidth: float, each: float = UNPACKED) -> Term:
    """4-bit weights, made bf16 for each pass of each micro batch, which moves `each` bytes for an element."""
    passes = p.forward + p.again + p.inputs
    values = {"b": each, "m": micro, "Q": elements, "n": passes, "B": bandwidth}
    return Term("dequantise", each * micro * elements * passes / bandwidth, "b·m·Q·n/B", values, "throughput#matrix")


def modules(c: Counts, a: Adapters) -> int:
    """Modules with parameters of their own, which ZeRO-3 fetches one by one: an adapter has two."""
    return c.modules + 2 * a.linears


def cast(elements: float, micro: int, p: Passes, bandwidth: float) -> Term:
    """fp32 weights become bf16 under autocast, in every forward of every micro batch: four bytes read, two written."""
    passes = p.forward + p.again
    values = {"m": micro, "M": elements, "n": passes, "B": bandwidth}
    return Term("casts", 6 * micro * elements * passes / bandwidth, "6·m·M·n/B", values, "throughput#matrix")


def operations(each: tuple[float, float, float], p: Passes) -> float:
    """Operations in the layers for one micro batch, of which `each` pass has so many: forward, again, and backward."""
    return sum([n * k for n, k in zip((p.forward, p.again, p.inputs), each, strict=True)])


def starts(kernels: float, micro: int) -> Term:
    """Start-up time of kernels, beyond their bytes and their arithmetic, one after the other."""
    values = {"m": micro, "k": kernels, "t": START}
    return Term("kernel starts", micro * kernels * START, "m·k·t", values, "throughput#launch")


def launched(dispatched: float, micro: int, p: Passes, hooked: int, busy: float, each: float = LAUNCH) -> Term:
    """Time that the GPU waits for the host, if the host dispatches operations more slowly than the GPU computes them.

    Under ZeRO-3, `hooked` modules stop for a hook in every pass. `each`: the host's seconds for an operation.
    """
    stops = p.forward + p.again + p.inputs
    values = {"m": micro, "k": dispatched, "t": each, "M": hooked, "s": stops, "h": HOOK, "G": busy}
    host = micro * (dispatched * each + hooked * stops * HOOK)
    return Term("launch", max(0.0, host - busy), "max(0, m·(k·t + M·s·h) - G)", values, "throughput#launch")


def united(units: int, micro: int, p: Passes) -> Term:
    """Time that passes take longer for FSDP 1 units that are small: adapters, two for each linear.

    The host gathers at most two units ahead and waits for the GPU before it goes on (torch 2.13
    `distributed/fsdp/_runtime_utils.py`, `_unshard`: `limit_all_gathers`), so that a unit's start is not hidden.
    """
    stops = p.forward + p.again + p.inputs
    values = {"m": micro, "U": units, "s": stops, "u": UNIT}
    return Term("units", micro * units * stops * UNIT, "m·U·s·u", values, "throughput#launch")


def selected(decided: float, micro: int, dispatched: float, busy: float) -> Term:
    """Time that the GPU waits for selective checkpointing, beyond what it waits for the host anyway.

    For each of the `decided` operations the host asks Python if it is kept, in forward and again (torch 2.13
    `utils/checkpoint.py`, `_CachingTorchDispatchMode`, `_CachedTorchDispatchMode`).
    """
    values = {"m": micro, "d": decided, "y": POLICY, "k": dispatched, "t": LAUNCH, "G": busy}
    spare = max(0.0, busy - micro * dispatched * LAUNCH)
    return Term(SELECTION, max(0.0, micro * decided * POLICY - spare), "max(0, m·d·y - max(0, G - m·k·t))", values,
                "throughput#launch")  # fmt: skip
