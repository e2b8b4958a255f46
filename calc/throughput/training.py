"""The time of one model's update, or of a forward without gradients, on the GPUs that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, assert_never

from calc.base.optimizers import OPTIMIZERS, USUAL
from calc.base.plan import Role
from calc.memory.activations import kept_products
from calc.memory.run import Adapter, Run
from calc.memory.weights import PACKED
from calc.models.architecture import Head, layer_kinds, parameters, routed_parameters
from calc.models.lora import adapted, megatron_linears
from calc.models.slices import part
from calc.scenario.scenario import Scenario
from calc.scenario.words import TRAINED_ROLES, Loss, Sharding
from calc.step.placement import architecture, four_bit_elements, masked, precision_aware, run_of
from calc.throughput import traffic, work
from calc.throughput.rates import CPU_ADAM, CPU_CORES, Rates
from calc.throughput.terms import Constant, Term

# Bytes read and written for each logit, forward and backward, counted in the code of each path: a copy to fp32 (6),
# log-softmax (8), its backward (12), the cast back (6) and the head's own reads (4); a fused kernel writes a gradient
# over the logits, one that cuts none; chunks cost what the full loss does, without the copies of all logits. Chunks of
# the vocabulary: casts of a product made twice (12), nine numbers in fp32 that forward reads or writes (36), and
# fifteen of backward (60).
PER_LOGIT: Mapping[Loss, float] = {"full": 44.0, "chunked": 36.0, "fused": 12.0, "cut": 0.0, "vocab-chunked": 108.0}
# verl's head in PyTorch's operations: forward, and backward which makes the logits again (`FusedLinearForPPO`), in the
# order of their statements: product and division 6, cast 6, softmax 12, log-softmax 12, logsumexp 24, entropy 16; then
# 6, 6, 12, labels' ones 4, their difference 12, its product 8, a copy 8, a cast 6, a division 4, and two products 4.
IN_TURNS = 76 + 70
SCORED = 18.0  # log-probabilities without gradient: cast, log-softmax, gather
_HIDES = "share of its collectives that it can hide behind computation"
_PREFETCH = "it gathers ahead, as far as buckets of modules allow"
OVERLAP: Mapping[Sharding, Constant] = {
    "zero3": Constant(0.5, _HIDES, "assumed", _PREFETCH),
    "fsdp1": Constant(0.9, _HIDES, "assumed", "a layer is gathered while the one before runs"),
    "fsdp2": Constant(0.9, _HIDES, "assumed", "a layer is gathered while the one before runs"),
    "ddp": Constant(0.7, _HIDES, "assumed", "buckets are reduced while backward goes on"),
    "zero1": Constant(0.0, _HIDES, "assumed", "DeepSpeed's overlap_comm is off by default"),
    "zero2": Constant(0.0, _HIDES, "assumed", "DeepSpeed's overlap_comm is off by default"),
    "megatron": Constant(0.0, _HIDES, "assumed", "overlap-grad-reduce and overlap-param-gather are off by default"),
}
CLIPPED = 3  # numbers for each parameter: clipping by the norm reads the gradient, then reads and writes it
EIGHT_BIT = 2  # bytes: a moment of one, read and written
EIGHT_BIT_STEP = Constant(
    33.9e-12, "seconds more for each parameter where moments are unpacked from 8 bits and packed again, block by block",
    "measured", "steps of two models with bitsandbytes' AdamW8bit on an H200: timing.eight_bit_step",
)  # fmt: skip
# DeepSpeed's flat partitions, but for its fused kernel, in order: cast bf16 gradients to fp32, norm, unscale, cast
# weights to bf16
FLAT = 6 + 4 + 8 + 6
ON_HOST = OPTIMIZERS[USUAL].steps["fused"].moved  # CPU_ADAM is DeepSpeed's Adam's
# Bytes of each parameter that the CPU moves for DeepSpeed besides Adam: gradients are scaled in place, and weights cast
# to 16 bits (deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py:3216`, `:3094`; `stage3.py:2988`, `:2858`).
AROUND_HOST = 8 + 6


class Load(NamedTuple):
    """The work of one GPU: `micro` forwards of `rows` sequences of `length` tokens, and `steps` optimizer steps."""

    rows: int
    length: float
    micro: int
    steps: int

    @property
    def tokens(self) -> float:
        """The tokens that one GPU processes."""
        return self.rows * self.length * self.micro


def passes(s: Scenario, trained: bool) -> work.Passes:
    """The passes of a step through the model: LoRA needs gradients of inputs, not of the frozen weights.

    Frozen weights in one flat parameter with adapters (`lora.units: layer`) get gradients all the same.
    """
    if not trained:
        return work.Passes()
    again = 1.0 if s.checkpointed_layers is None else s.checkpointed_layers / s.architecture.layers
    return work.Passes(1, again * (s.checkpointing != "none"), 1, 0 if s.lora and s.lora.units == "own" else 1)


def wrapped(s: Scenario) -> bool:
    """True if each forward runs under an autocast of its own, whatever the type of the weights."""
    return any(role.wrapped for role in s.keeps.roles)


def spared(s: Scenario, c: work.Counts, a: work.Adapters, p: work.Passes) -> tuple[work.Passes, work.Passes]:
    """The passes of matrix work and of attention: selective checkpointing recomputes only a part of each."""
    if s.checkpointing != "selective" or not p.again:
        return p, p
    if s.recomputed:
        share = work.recomputed(s.architecture, s.recomputed) / (c.layers + a.elements)
        return p._replace(again=share), p._replace(again=float(bool({"core_attn", "self_attn"} & s.recomputed)))
    adapter = None
    if s.lora:
        adapter = Adapter(s.lora.rank, s.lora.modules, s.lora.dropout > 0, 2)
    kept = kept_products(Run(s.architecture, trained=not s.lora, adapter=adapter))
    return p._replace(again=1 - kept / (c.layers + a.elements)), p._replace(again=float(s.attention != "sdpa"))


def update(s: Scenario, role: Role, r: Rates, load: Load, head: Head, *, trained: bool = True) -> Iterator[Term]:
    """The terms of a model's update, or of its forward alone if it is not trained; `s` is the scenario of its role."""
    trained = trained and s.optimizer != "none"
    c, p = work.counts(s.architecture, head), passes(s, trained)
    a = work.adapters(s.architecture, s.lora.rank, s.lora.modules) if trained and s.lora else work.NO_ADAPTERS
    n = s.tensor_parallel * s.context_parallel * s.pipeline_parallel
    tokens, wide = load.tokens, 4 if s.lora and s.lora.dtype == "fp32" else 2
    # without autocast fp32 is multiplied in fp32
    narrow = r.fp32 if wide == 4 and s.precision == "bf16" and not wrapped(s) else r.matrix
    products, core = spared(s, c, a, p)
    p = products if s.recomputed else p  # of parts of a layer all operations run again
    layers = ran(s, role, load, trained)
    eight, met = trained and s.float8 != "none", c
    if eight:
        wide = s.bf16_layers_at_end or 0
        met = c._replace(layers=c.routed + (c.layers - c.routed) * wide // s.architecture.layers)
    computed = [
        work.matrix(tokens, met, a, products, n, r.matrix, narrow),
        *([work.narrowed(tokens, load.micro, s.architecture, products, n, s.float8, wide, r)] if eight else []),
        work.experts(tokens * s.expert_received, load.micro, c, products, n, spread(s, n), r.grouped, r.memory),
        *attending(s, r, load, c, core, n),
        work.elementwise(load.micro, layers, p, r.eager),
    ]
    if c.scanned:
        fused = s.linear_attention == "fla"
        rate = r.matrix if fused or s.layout == "autocast" else r.fp32
        computed.append(work.scan(tokens, c.scanned if fused else c.unfused, p, n, rate))
    if s.layout == "autocast":
        cast = c.head if s.method == "qlora" else c.layers + c.head
        computed.append(work.cast(cast / n, load.micro, p, r.memory))
    if head == "lm":
        # chunks of PyTorch's operations make each product once, as a loss over all tokens does
        usual = IN_TURNS if role.path.kind == "chunked-entropy" else PER_LOGIT["full" if s.loss_chunk_size else s.loss]
        per_logit = usual if trained else SCORED
        read = tokens * (1 + len(s.architecture.depths))
        computed.append(work.vocabulary(read, s.architecture.vocab, per_logit, n, r.memory))
    if s.method == "qlora":
        packed = four_bit_elements(s, s.architecture)
        computed.append(work.dequantised(packed / n, load.micro, p, *unpacking(s, r)))
    there, back = layers.kernels
    computed.append(work.starts(work.operations((there, there, back), p), load.micro))
    beside = a.elements * s.lora.count if s.lora else 0
    elements = parameters(s.architecture, head=head) + beside
    four = four_bit_elements(s, s.architecture) / elements
    changed = beside if s.lora else elements
    given = c.layers + beside if s.lora and s.lora.units == "layer" else changed  # elements with a gradient
    if s.shards > 1 and s.sharding not in ("ddp", "megatron"):  # these reduce buckets in place, once a step
        computed.append(repacked(s, r, load, elements / n, given / n, four, p))
    here = held(s, n)
    if s.sharded.family == "megatron" and p.inputs:
        computed.append(accumulated(s, r, load, given * here))
    busy = sum([t.seconds for t in computed])
    dispatched = work.operations(layers.dispatched, p)
    hooked = work.modules(c, a) if s.sharding == "zero3" else 0
    each = work.MEGATRON_LAUNCH if s.sharded.family == "megatron" else work.LAUNCH
    computed.append(work.launched(dispatched, load.micro, p, hooked, busy, each))
    if s.checkpointing == "selective" and not s.recomputed and p.again:
        yield work.selected((p.forward + p.again) * layers.dispatched[0], load.micro, dispatched, busy)
    busy += computed[-1].seconds
    # a reference is the policy whose adapters are switched off
    adapts = trained or (role.model or role.name) in TRAINED_ROLES
    if adapts and s.sharding == "fsdp1" and s.shards > 1 and s.lora and s.lora.units == "own":
        adapted = work.adapters(s.architecture, s.lora.rank, s.lora.modules)
        yield work.united(2 * adapted.linears, load.micro, p)
    if s.pipeline_parallel > 1:
        flushed = load.micro / load.steps  # the pipeline drains for each optimizer step
        computed.append(traffic.bubble(s.pipeline_parallel, s.virtual_pipeline, flushed, busy))
    moved = list(sharded(s, r, load, elements * here, given * here, four, p))
    exchanged = sum([t.seconds for t in moved])
    if exchanged:
        moved.append(traffic.hidden(exchanged, OVERLAP[s.sharding], busy))
    yield from computed
    yield from moved
    yield from split(s, r, load, p)
    if trained:
        yield from stepping(s, r, load, changed / n)
    if trained and OPTIMIZERS[s.optimizer].orthogonal:
        yield orthogonalized(s, r, load)
    if s.offload.parameters and s.sharded.gathers:
        # for frozen models too: every pass of every micro batch copies the weights up, as they are stored
        up = traffic.copied(elements / n, stored(2, four) * load.micro * (1 + p.inputs), s.shards, r.pcie)
        yield up._replace(name="parameters")


def stored(b: float, four: float) -> float:
    """The mean bytes of a model's elements, of which a share of `four` is in four bits and the rest in `b` bytes."""
    return b - (b - PACKED) * four


def unpacking(s: Scenario, r: Rates) -> tuple[float, float]:
    """The bandwidth at which 4-bit weights are unpacked, and the bytes that move for an element."""
    if any(role.cut_scales for role in s.keeps.roles):
        return r.eager, work.UNPACKED_EAGERLY
    in_fp32 = any(role.unpacks for role in s.keeps.roles)
    return r.memory, work.UNPACKED_IN_FP32 if in_fp32 else work.UNPACKED


def attending(s: Scenario, r: Rates, load: Load, c: work.Counts, p: work.Passes, n: int) -> Iterator[Term]:
    """Attention, by the kernel that takes a mask in layers where SDPA gets one: windows, or all layers."""
    fused = s.attention != "eager"
    if not masked(s, s.architecture, max(1, round(load.length))):
        yield work.attention(load.tokens, load.length, c, p, fused, n, r.flash)
        return
    near = c if s.architecture.masked else c._replace(attention=0)
    seen = load.rows * load.length if s.architecture.end_to_end else load.length
    plain = c._replace(attention=c.attention - near.attention, windowed=0)
    yield work.attention(load.tokens, load.length, plain, p, fused, n, r.flash)
    yield work.attention(load.tokens, seen, near, p, False, n, r.masked)._replace(name="masked attention")


def ran(s: Scenario, role: Role, load: Load, trained: bool) -> work.Layers:
    """The work of one GPU's layers besides matrix products; parts of a layer that run again are passes of their own."""
    arch = architecture(s, role)
    if arch.depths:
        arch = replace(arch, specs=(*arch.specs, *arch.depths), depths=())
    run = run_of(s, role, arch, trained=trained)
    if run.again:
        run = replace(run, again=frozenset())
    length = max(1, round(load.length))
    tokens = -(-load.rows * length // s.context_parallel)
    return work.layers(run, masked(s, arch, length), tokens, length)


def spread(s: Scenario, n: int) -> int:
    """The GPUs over which routed experts lie: ranks of their own, or the `n` GPUs on the same sequences."""
    if s.expert_parallel == s.expert_tensor_parallel == 1:
        return n
    return s.expert_parallel * s.expert_tensor_parallel * s.pipeline_parallel


def held(s: Scenario, n: int) -> float:
    """The share of the parameters that one of `n` GPUs on the same sequences holds; routed experts have ranks apart."""
    arch = s.architecture
    share = routed_parameters(arch) / parameters(arch)
    return (1 - share) / n + share / spread(s, n)


def sharded(
    s: Scenario, r: Rates, load: Load, elements: float, given: float, four: float, p: work.Passes
) -> Iterator[Term]:
    """The collectives of sharding, by ZeRO stage: in 16 bits, or in fp32 under autocast, but a share of `four` in four.

    Stage 3 and FSDP gather all weights, frozen or not, for forward and for backward of every micro batch, whatever its
    length; a layer recomputed for its backward stays gathered (DeepSpeed's `max_reuse_distance`). Stages of a pipeline
    gather and reduce once a step; under `no_sync` FSDP also reduces once a step.
    """
    ranks = s.shards
    if ranks == 1:
        return
    bus, b = r.link(ranks, s.tensor_parallel), 4 if s.layout == "autocast" else 2
    staged = s.pipeline_parallel > 1
    if s.gathers:
        again = 0 if s.reshard_after_forward == "never" else p.inputs
        often = load.steps if staged else load.micro * (1 + again)
        yield traffic.collective("gather", elements, stored(b, four), often, ranks, bus)
    if not p.inputs:
        return
    reduced = 4 if s.grad_dtype == "fp32" and s.sharded.family in ("fsdp", "megatron") else b
    match s.sharding:
        case "zero2" | "zero3" | "fsdp1" | "fsdp2":
            often = load.steps if staged or s.no_sync else load.micro
            yield traffic.collective("reduce", given, reduced, often, ranks, bus)
        case "zero1" | "megatron":
            often = load.micro if s.data_parallel_sharding_strategy.startswith("optim_grads") else load.steps
            yield traffic.collective("reduce", given, reduced, often, ranks, bus)
        case "none" | "ddp":
            yield traffic.collective("all-reduce", given, reduced, 2 * load.steps, ranks, bus)
        case other:
            assert_never(other)
    if (copies := s.data_parallel_replicate) > 1:
        # each rank sums up the gradients of its shard with those of the other groups (HSDP)
        often, apart = load.steps if s.no_sync else load.micro, ranks * s.tensor_parallel
        yield traffic.collective("all-reduce", given / ranks, reduced, 2 * often, copies, r.link(copies, apart))
    if s.sharding in ("zero1", "zero2", "megatron") and not s.gathers:
        yield traffic.collective("gather", given, b, load.steps, ranks, bus)


def repacked(s: Scenario, r: Rates, load: Load, elements: float, changed: float, four: float, p: work.Passes) -> Term:
    """Copies on the GPU into and out of the buffers of collectives, each time these run.

    FSDP2 copies every gather out of its buffer and gradients into theirs, which casts them
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). FSDP1 gathers in place, but joins gradients, casts and
    divides them (torch/distributed/fsdp/_runtime_utils.py); it is no quicker (torchtitan, docs/fsdp.md), and counted
    the same. DeepSpeed copies gradients into a bucket (`new_grad_tensor` in runtime/zero/stage_1_and_2.py, stage3.py).
    """
    b = 4 if s.layout == "autocast" else 2
    gathered, given = 0.0, 2 * b
    if s.sharded.family == "fsdp":
        gathered = 2 * stored(b, four)
        given = b + (4 if s.grad_dtype == "fp32" else b)
    often = load.steps if s.pipeline_parallel > 1 else load.micro
    gathers = 1 if s.reshard_after_forward == "never" else 1 + p.inputs
    values = {"m": often, "n": gathers, "g": gathered, "P": elements, "r": given * p.inputs, "Q": changed,
              "B": r.eager}  # fmt: skip
    seconds = often * (gathers * gathered * elements + given * p.inputs * changed) / r.eager
    return Term("repacking", seconds, "m·(n·g·P + r·Q)/B", values, "throughput#communication")


def accumulated(s: Scenario, r: Rates, load: Load, changed: float) -> Term:
    """Every micro batch adds its gradients to those in Megatron-core's buffers, which are read and written.

    They are of `grad_dtype`, fp32 by default (megatron/core/tensor_parallel/layers.py, `gradient_accumulation_fusion`).
    """
    b = 8 if s.grad_dtype == "fp32" else 4
    values = {"m": load.micro, "b": b, "P": changed, "B": r.memory}
    return Term("accumulation", load.micro * b * changed / r.memory, "m·b·P/B", values, "throughput#communication")


def split(s: Scenario, r: Rates, load: Load, p: work.Passes) -> Iterator[Term]:
    """The collectives of GPUs that share a sequence, which are not hidden behind computation.

    Tensor parallelism takes two all-reduces a layer and pass; context parallelism passes keys and values on, and swaps
    heads of linear attention for positions; expert parallelism takes two all-to-all exchanges a layer and pass.
    """
    arch, rows = s.architecture, p.forward + p.again + p.inputs
    if s.tensor_parallel > 1:
        width = load.tokens / s.context_parallel * arch.hidden * arch.layers / s.pipeline_parallel
        yield traffic.collective("tensor parallel", width, 2, 4 * rows, s.tensor_parallel, r.link(s.tensor_parallel))
    if s.expert_parallel > 1:
        # each token goes to its experts and comes back, and so do the gradients
        routed = s.architecture.sparse_layers
        sent = load.tokens / (s.tensor_parallel * s.context_parallel) * arch.experts_per_token * arch.hidden
        width = sent * s.expert_received * routed / s.pipeline_parallel
        ranks, own, cut = s.expert_parallel, r.neighbours(s.expert_tensor_parallel), s.expert_tensor_parallel
        yield traffic.exchanged("expert parallel", width, 2, 2 * rows, ranks, own, r.bus, r.network)
        if cut > 1:  # ranks that share an expert gather their tokens, and scatter the sums of their parts
            yield traffic.collective("expert tensor parallel", width * cut, 2, 2 * rows, cut, r.link(cut))
    if s.context_parallel > 1:
        width = load.tokens * 2 * arch.kv_heads * arch.head_dim * arch.attending / s.pipeline_parallel
        bus = r.link(s.context_parallel, s.tensor_parallel)
        yield traffic.collective("context parallel", width, 2, rows, s.context_parallel, bus)
        if arch.megatron and (d := arch.delta):
            # heads of linear attention go to other ranks for all positions, and their output comes back
            each = d.convolved + 2 * d.values + 2 * d.value_heads
            width = load.tokens / (s.tensor_parallel * s.context_parallel) * each * arch.recurrent / s.pipeline_parallel
            own = r.neighbours(s.tensor_parallel)
            yield traffic.exchanged("swapped heads", width, 2, rows, s.context_parallel, own, r.bus, r.network)


def stepping(s: Scenario, r: Rates, load: Load, changed: float) -> Iterator[Term]:
    """The optimizer step, on the GPU or on the host, and the copies that offload needs."""
    ranks = 1 if s.sharding in ("none", "ddp") else s.shards
    hosted = 1.0 if s.offload.optimizer else s.offload.fraction
    if hosted:
        on_node = min(s.gpus_per_node, s.gpus) // s.devices
        wide = 2 if s.precision == "bf16" and s.sharded.family != "zero" else 4
        busy = min(r.cores, s.cpu_threads * on_node) if s.cpu_threads else r.cores
        rate = CPU_ADAM * min(1, busy / CPU_CORES)
        moved = ON_HOST * wide + (AROUND_HOST if s.sharded.family == "zero" else 0)
        yield traffic.stepped_on_host(hosted * changed * load.steps, moved, ranks, on_node, rate)
        yield traffic.copied(hosted * changed, travelling(s, load), ranks, r.pcie)
    if hosted < 1:
        stepped = (1 - hosted) * changed * load.steps
        yield traffic.stepped(stepped, optimizer_bytes(s), ranks, r.memory)
        if OPTIMIZERS[s.optimizer].eight_bit:
            yield packed(stepped, ranks)


def travelling(s: Scenario, load: Load) -> float:
    """Bytes of each parameter that steps on the host which travel: gradients come down, new weights go up.

    FSDP sends the gradients of every micro batch, Megatron-core those of the step, in fp32, as DeepSpeed does, which
    adds them up on the GPU before: their sum comes up and goes down again, with every micro batch or, in stage 1, once
    (deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py:1809`, `:1888`; `stage3.py:2024`, `:1456`).
    """
    if s.sharded.family == "fsdp":
        return 2 * load.micro + 2 * load.steps
    added = 0.0
    if s.sharded.family == "zero" and (load.micro > load.steps or s.sharding == "zero3"):
        down = load.steps if s.sharding == "zero1" else load.micro
        up = down if s.sharding == "zero1" else max(load.micro - load.steps, load.steps)
        added = (4 if s.grad_dtype == "fp32" and s.sharding == "zero3" else 2) * (down + up)
    return added + (4 + 2) * load.steps


def packed(elements: float, ranks: int) -> Term:
    """An optimizer's moments of 8 bits, whose kernel computes for longer than it moves bytes."""
    values = {"P": elements, "e": EIGHT_BIT_STEP, "N": ranks}
    return Term("8-bit states", elements * EIGHT_BIT_STEP / ranks, "P·e/N", values, "throughput#optimizer")


def orthogonalized(s: Scenario, r: Rates, load: Load) -> Term:
    """Muon's five steps for each matrix: two products with it, a and b wide, and one of its smaller side.

    2·(2·a·a·b + a·a·a) operations each, for a up to b. Tensor-parallel ranks each do all of it, or for blocks their
    own part's; data-parallel ones share the matrices (Emerging-Optimizers `muon_utils.py`, `newton_schulz_step`).
    """
    work_of: dict[bool, float] = {False: 0.0, True: 0.0}
    arch = s.architecture
    if any(role.blockwise for role in s.keeps.roles):
        arch = part(arch, s.tensor_parallel, 1, s.expert_tensor_parallel)
    for spec, count in layer_kinds(arch):
        beside = s.lora.modules if s.lora else ()
        for x in adapted(arch, spec, beside) if s.lora else megatron_linears(arch, spec):
            sides = ((x.inputs, s.lora.rank), (x.outputs, s.lora.rank)) if s.lora else ((x.inputs, x.outputs),)
            for small, large in map(sorted, sides):
                work_of[x.experts > 0] += count * max(1, x.experts) * 2 * small * small * (2 * large + small)
    ranks = s.gpus // s.pipeline_parallel
    own = work_of[False] / s.shards + work_of[True] * s.expert_tensor_parallel / ranks
    values = {"u": load.steps, "O": own, "S": s.pipeline_parallel, "F": r.matrix}
    seconds = 5 * load.steps * own / (s.pipeline_parallel * r.matrix)
    return Term("orthogonalization", seconds, "5·u·O/(S·F)", values, "throughput#optimizer")


def optimizer_bytes(s: Scenario) -> float:
    """Bytes that the optimizer on the GPU reads and writes for each trained parameter.

    The numbers that each implementation's step moves are those of `calc.base.optimizers`.
    """
    facts, b = OPTIMIZERS[s.optimizer], 2 if s.precision == "bf16" else 4
    if aware := precision_aware(s):
        # gradients, read once more than by clipping; weights, masters and moments, read and written
        kept = 2 * (2 + aware.master_bytes + aware.moment_bytes)
        return float((1 + CLIPPED) * (4 if s.grad_dtype == "fp32" else 2) + kept)
    if s.sharded.family == "zero" and facts.deepspeed:
        return float(FLAT + 4 * facts.steps["fused"].moved)
    moments = EIGHT_BIT * facts.moments if facts.eight_bit else 0
    return float((facts.steps[s.optimizer_impl].moved + CLIPPED) * b + moments)
