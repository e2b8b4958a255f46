"""A model as the allocator sees it: its tensors one by one, and its pieces as scripts of allocations and frees.

The order is that of the modules (`torch.nn.Module.parameters`), and of forward and backward through them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from calc.autograd.alloc_trace import REPLACED, Script, Writer
from calc.autograd.lifetimes import Lifetimes
from calc.base.plan import Ends, Held, Streams
from calc.base.units import MiB
from calc.engines.fsdp import Fsdp
from calc.engines.fsdp1 import Fsdp1
from calc.engines.plain import Plain
from calc.engines.replica import Replica, TrainingEngine
from calc.engines.zero import FLATTENS_ON_GPU, LAZY_BUCKET, B, Zero
from calc.engines.zero_partition import part_of
from calc.memory.activations import Program, final_norm, kinds, lifetimes
from calc.memory.loss import AFTER, written
from calc.memory.optimizer import (
    decomposition,
    galore_states,
    in_32_bits,
    passing,
    projected,
    scratch,
    single_step,
    state_bytes_per_parameter,
)
from calc.memory.run import dimensions
from calc.memory.weights import NF4, PACKED, ROW, is_quantised
from calc.models.architecture import (
    Architecture,
    Head,
    LayerSpec,
    Tensor,
    layer_parameters,
    layer_tensors,
    tensors,
)
from calc.models.lora import SAVED, adapter_matrices, embedding_matrices, head_matrices
from calc.replay.zero3_partitions import NORM, Partitioned, Stored, partitioned
from calc.step.compiled_model import SORTING
from calc.step.instants import LASTING, SORTED_TOKENS, Batch, stashed_at_head

# DDP's buckets of gradients, and the one that is full first (torch 2.13 `nn/parallel/distributed.py`,
# `_DEFAULT_BUCKET_CAP_MB`; `csrc/distributed/c10d/reducer.hpp`, `kDefaultFirstBucketBytes`); what it broadcasts at once
BUCKET, FIRST_BUCKET, BROADCAST = 25 * MiB, MiB, 250 * MiB
GATHERED = 30  # events that take as long as gathering a unit and reducing its gradients do


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece's forward, its backward if it is trained, and the slot of an output that outlives both, if any."""

    forward: Script
    backward: Script | None
    late: int | None = None


class Unit(NamedTuple):
    """The parameters of an FSDP 2 unit, a layer or the root, which are gathered together; all sizes in bytes.

    `whole` has the sizes of the unsharded tensors, `shards` those of this rank's shards as they are stored. Where the
    compute type is another, the shards are first `cast` into one tensor of that type; a gather fills a `buffer`, out of
    which the `gathered` tensors are copied. Gradients are joined in `reducing`, of which this rank's part becomes
    `reduced`; both are 0 where nothing is trained. `kept` is that part in the type of gradients, 0 if it has that.
    """

    whole: tuple[int, ...]
    shards: tuple[int, ...]
    cast: int
    buffer: int
    gathered: tuple[int, ...]
    reducing: int
    reduced: int
    kept: int = 0


class Flat(NamedTuple):
    """A flat parameter of FSDP 1; all sizes in bytes.

    `whole` has the tensors that it is made of, where they are on the GPU before; `shard` is this rank's part as it is
    stored, `cast` that part in the compute type, 0 if that is the stored one, and `gathered` all parts. Its gradient is
    `joined` of the gradients of its tensors, 0 where nothing is trained; `reducing` is the gradient in the type in
    which it is reduced, 0 if that is the compute type, `reduced` this rank's part of it, and `kept` that part in the
    type in which it stays, 0 if that is no other.
    """

    whole: tuple[int, ...]
    shard: int
    cast: int
    gathered: int
    joined: int
    reducing: int
    reduced: int
    kept: int


class Flats(NamedTuple):
    """A model's flat parameters: of each layer, of the adapters in each that are units of their own, and of the root.

    `offload`: shards lie on the host. `ahead`: a layer's backward gathers the next layer; reentrant checkpointing
    gathers each layer twice instead, to run it again and to differentiate it.
    """

    layers: tuple[Flat, ...]
    adapters: tuple[tuple[Flat, ...], ...]
    root: Flat
    offload: bool
    ahead: bool


class Flattened(NamedTuple):
    """A model's trained parameters under ZeRO-1 or 2, which lie in one buffer, in elements but for `whole` and `norm`.

    `whole` has the bytes of the tensors that are joined, `elements` is their sum, `share` one rank's part of it, and
    `touched` the parameters of which it has some, for the rank with most. `norm` is the copy of the largest gradient
    whose norm is taken, in bytes. `on_gpu`: the buffer is made on the GPU if a second copy has room there; `lazy`: the
    bucket is made at the first gradient, not as backward begins. `overlaps`: two buckets are reduced in another
    stream.
    """

    stage: int
    whole: tuple[int, ...]
    elements: int
    share: int
    touched: int
    bucket: int
    norm: int
    on_gpu: bool
    lazy: bool
    overlaps: bool

    @property
    def events(self) -> int:
        """About how many blocks come and go in a pass, besides gradients."""
        return 2 * (2 + self.elements // self.bucket)


class Buckets(NamedTuple):
    """DDP's buffers in bytes: weights are `broadcast` at its start; gradients are reduced in buckets.

    The `first` ones are those of the first backward, from which DDP learns the order of the gradients; then they are
    `rebuilt` in that order, or stay if there are none. `recorded`: see `calc.engines.plain.Plain`.
    """

    broadcast: tuple[int, ...]
    first: tuple[int, ...]
    rebuilt: tuple[int, ...]
    recorded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A role's model on one micro-batch, all in bytes; compared by identity, since `blocks` makes each only once.

    `weights` has every tensor that is held whole; where FSDP 2 shards them all, `units` has the layers and, last, the
    root, or with `ends` (see `calc.base.plan.Role`) the embedding and the head. `states` has the optimizer states of
    each trained tensor, `passing` what the optimizer's step allocates for each, either all `at_once` or one by one;
    `copies` are such of another type, which come after them.
    `stream` is the embedding's output, `tables` are cosines and sines, and what an adapter beside the embedding keeps.
    `embedding` is the embedding's gradient, or that of such an adapter's first matrix, of whose other `second` is; 0
    where it gets none, `sorting` the scratch memory of that gradient; `tied` says how a tied head's gradient is added
    to it: "in place" or "apart". `held`: how long outputs stay, a word of `calc.base.plan.Path`. `beside`: where
    parameters step in backward, what the step of one allocates for each byte of its gradient, which it then frees; else
    None.
    `inside`: the loss runs inside the model's own forward, `outside`: once it has returned. `wrapped`: an autocast
    begins and ends with each forward.
    `flats`: the model is in FSDP 1's flat parameters, `weights` and `units` are empty; `partitioned`: it is under ZeRO,
    `states` and `passing` are those of its sub-groups, and what it has is none of `weights`. `buckets` are DDP's.
    `retains`: see `calc.memory.run.Run`. `streams`: how checkpoints leave for the host, see `calc.base.plan.Role`.
    `beside_norm`: those on their way that are still there beside what the final norm keeps. `keeps_gathered`,
    `keeps_last`: see `calc.engines.replica.Replica`.
    """

    weights: tuple[int, ...]
    units: tuple[Unit, ...]
    states: tuple[tuple[int, ...], ...]
    passing: tuple[int, ...]
    at_once: bool
    stream: int
    tables: tuple[int, ...]
    layers: tuple[Piece, ...]
    norm: Piece
    head: Piece
    embedding: int
    sorting: int
    tied: Literal["", "in place", "apart"]
    held: Held
    inside: bool
    wrapped: bool
    outside: bool = False
    beside: float | None = None
    ends: Ends = ""
    keeps_gathered: bool = False
    keeps_last: bool = False
    flats: Flats | None = None
    buckets: Buckets | None = None
    partitioned: Partitioned | Flattened | None = None
    retains: bool = False
    streams: Streams = ""
    copies: tuple[int, ...] = ()
    beside_norm: int = 0
    second: int = 0

    @property
    def sharded(self) -> bool:
        """True if FSDP or ZeRO-3 has the model in shards."""
        return bool(self.units or self.flats or self.partitioned)

    @property
    def events(self) -> int:
        """About how many blocks come and go in a forward and, if the model is trained, its backward."""
        scripts = [script for p in (*self.layers, self.norm, self.head) for script in (p.forward, p.backward) if script]
        flats = self.flats.layers + tuple(chain.from_iterable(self.flats.adapters)) if self.flats else ()
        cut = self.partitioned.events if self.partitioned else 0
        return sum([len(script.steps) for script in scripts]) + GATHERED * len((*self.units, *flats)) + cut


class Tensors(NamedTuple):
    """What a model holds whatever its batch; see `Blocks`."""

    weights: tuple[int, ...]
    units: tuple[Unit, ...]
    states: tuple[tuple[int, ...], ...]
    passing: tuple[int, ...]
    copies: tuple[int, ...]
    flats: Flats | None
    buckets: Buckets | None
    partitioned: Partitioned | Flattened | None


@lru_cache(maxsize=64)
def _tensors(engine: TrainingEngine, checkpointing: str) -> Tensors:
    """What an engine's replica holds; cached, as a job in batches of many lengths asks for it with each."""
    r = engine.replica
    flats = _flats(engine) if isinstance(engine, Fsdp1) else None
    cut = _under_zero(engine, checkpointing) if isinstance(engine, Zero) else None
    whole = not isinstance(engine, Fsdp) and not isinstance(cut, Partitioned)
    own = [size for size, _ in _stored(r)] if not cut or r.run.adapter else []
    adapters = [t.elements * _width(r, t, r.adapter_bytes) for t in _trained(r)] if r.run.adapter and not cut else []
    adapters += [t.elements * r.adapter_bytes for t in r.untrained]
    changed = [*_stepped(engine, flats)]
    # `foreach` takes the tensors of one type together
    apart = [t for t in changed if _width(r, t, r.step_bytes) != r.step_bytes]
    alike = [t for t in changed if t not in apart] if apart else changed
    # an engine that shards makes its own
    masters = [t.elements * r.master_bytes for t in changed] if isinstance(engine, Plain) and r.master_bytes else []
    return Tensors(
        weights=(*(own if whole else _scales(r)), *(adapters if whole else ()), *masters, *_buffers(engine)),
        units=() if whole or flats or cut else _units(r),
        states=tuple([_states(r, t) for t in changed]),
        passing=() if r.in_backward else tuple([_passing(r, t) for t in alike]),
        copies=tuple([_passing(r, t) for t in apart]),
        flats=flats,
        buckets=_buckets(engine) if isinstance(engine, Plain) and engine.buckets and r.optimizer else None,
        partitioned=cut,
    )


@lru_cache(maxsize=256)
def blocks(engine: TrainingEngine, batch: Batch, masked: bool, checkpointing: str) -> Blocks:
    """The blocks of an engine's replica on a micro-batch; `masked` as in `calc.step.compiled_model`."""
    r, own = engine.replica, _tensors(engine, checkpointing)
    arch, run, optimizer = r.arch, r.run, r.optimizer
    if isinstance(engine, Fsdp | Zero):
        # bytes of a whole gradient's element, until it is reduced
        apart = own.flats and any(own.flats.adapters)
        r = replace(r, grad_bytes=run.adapter.b if run.adapter and apart else run.compute)
    if isinstance(engine, Fsdp1) and engine.joined:
        # all views of a flat parameter that holds adapters get gradients
        r = replace(r, run=replace(run, trained=True))
    embedded = run.trained or run.saves("embed_tokens")
    rows, stream = _rows(r), batch.tokens * arch.hidden * run.residual * arch.streams
    below = [batch.tokens * run.adapter.rank * run.adapter.b] if rows and run.adapter else []
    below += [stream] if rows and run.hooked and checkpointing != "none" else []
    table = rows[0].elements * r.grad_bytes if rows else r.embedding * (r.saved_bytes if r.saved else r.grad_bytes)
    sorted_bytes = SORTING * (run.adapter.rank if rows and run.adapter else arch.outer)
    return Blocks(
        **own._asdict(),
        at_once=optimizer is not None and optimizer.impl == "foreach" and not scratch(optimizer, r.step_bytes),
        beside=_beside(r),
        stream=stream,
        tables=tuple(
            2
            * [
                batch.length * size * run.residual
                for size in {arch.at(spec).head_dim for spec in arch.specs if spec.rotated}
            ]
        )
        + tuple(below),
        layers=_layers(r, batch, masked, checkpointing if optimizer else "none"),
        norm=_piece(r, batch, Lifetimes(Program(run).final_norm())),
        head=_head(replace(r, run=run, grad_bytes=r.saved_bytes if run.saves("lm_head") else r.grad_bytes), batch),
        embedding=table if embedded or rows else 0,
        second=rows[1].elements * r.grad_bytes if rows else 0,
        sorting=int(sorted_bytes * batch.tokens) if batch.tokens > SORTED_TOKENS else 0,
        tied=("in place" if r.ties_in_place else "apart") if r.ties_gradients else "",
        held=r.path.held,
        inside=r.path.inside,
        outside=r.path.outside,
        wrapped=run.wrapped,
        ends=r.ends if own.units else "",
        keeps_gathered=r.keeps_gathered,
        keeps_last=r.keeps_last,
        retains=optimizer is not None and run.retains and not r.streams,
        streams=r.streams if optimizer else "",
        beside_norm=stashed_at_head(final_norm(run)) if r.streams == "stash" else 0,
    )


def _beside(r: Replica) -> float | None:
    """See `Blocks`."""
    if not r.in_backward or r.optimizer is None:
        return None
    return single_step(r.optimizer, r.role, r.embedding, r.grad_bytes, r.step_bytes).bytes / r.embedding / r.grad_bytes


def _stepped(engine: TrainingEngine, flats: Flats | None) -> Iterator[Tensor]:
    """The tensors that the optimizer steps on this GPU: whole ones, their shards, or shards of flat parameters.

    Adapters in their layer's flat parameter are stepped as the views of it that they are (`use_orig_params`).
    """
    r = engine.replica
    if isinstance(engine, Fsdp1) and flats:
        found = (
            [-(-t.elements // r.ranks) for t in _trained(r)] if engine.joined else [*_reduced(flats, r.reduce_bytes)]
        )
        yield from [Tensor("flat parameter", (n,), 1, "linear", "") for n in found if not engine.offload]
    elif isinstance(engine, Zero):
        groups = engine.cut.sub_groups if engine.stage == 3 else (engine.cut.share,) * (engine.cut.share > 0)
        yield from [Tensor("sub-group", (n,), 1, "linear", "") for n in groups if not engine.offload_optimizer]
    elif isinstance(engine, Fsdp):
        yield from [part_of(t, r.ranks) for t in _trained(r)]
    else:
        yield from _trained(r)


def _reduced(flats: Flats, b: int) -> Iterator[int]:
    """Elements of this rank's part of each trained flat parameter, which is reduced in `b` bytes an element."""
    for flat in (*flats.layers, *chain.from_iterable(flats.adapters), flats.root):
        if flat.reduced:
            yield flat.reduced // b


def _flats(e: Fsdp1) -> Flats:
    """The flat parameters of a model under FSDP 1."""
    r = e.replica
    arch, trained, joined = r.arch, r.optimizer is not None, e.joined
    b, own = r.weight_bytes, {spec: [*layer_tensors(arch, spec)] for spec in arch.specs}
    inside = {t.name for tensors in own.values() for t in tensors}
    root = [(t, b) for t in _in_order(arch, r.head) if t.name not in inside]
    stored = {spec: [(t, b) for t in own[spec]] for spec in own}
    if joined:
        stored = {spec: [*found, *[(t, r.adapter_bytes) for t in _adapters(r, spec)]] for spec, found in stored.items()}
    layer = {
        spec: _packed(e, layer_parameters(arch, spec))
        if r.quantised
        else _flat(e, found, trained and (r.run.trained or joined))
        for spec, found in stored.items()
    }
    adapters = {
        spec: tuple([_flat(e, [(t, r.adapter_bytes)], trained) for t in _adapters(r, spec)]) if e.apart else ()
        for spec in own
    }
    return Flats(
        layers=tuple([layer[spec] for spec in arch.specs]),
        adapters=tuple([adapters[spec] for spec in arch.specs]),
        root=_flat(e, root, trained and r.run.trained),
        offload=e.offload,
        ahead=not r.run.reentrant,
    )


def _flat(e: Fsdp1, stored: Sequence[tuple[Tensor, int]], trained: bool) -> Flat:
    """The flat parameter of tensors `stored` with so many bytes an element, all of the same type."""
    r = e.replica
    b, compute = stored[0][1], r.run.compute
    if e.apart and trained and r.run.adapter:
        compute = r.run.adapter.b
    part = -(-sum([t.elements for t, _ in stored]) // r.ranks)
    whole = part * r.ranks
    casts = trained and r.reduce_bytes != compute
    return Flat(
        whole=() if r.quantised else tuple([t.elements * b for t, _ in stored]),
        shard=part * b,
        cast=part * compute if b != compute else 0,
        gathered=whole * compute,
        joined=whole * compute if trained else 0,
        reducing=whole * r.reduce_bytes if casts else 0,
        reduced=part * r.reduce_bytes if trained else 0,
        kept=part * r.grad_bytes if trained and r.grad_bytes != r.reduce_bytes else 0,
    )


def _packed(e: Fsdp1, elements: int) -> Flat:
    """The flat parameter of a layer in four bits, whose storage has the compute type, so that nothing casts it.

    Scales are in it only where they are cut with the weights.
    """
    r = e.replica
    whole = int(elements * (NF4[r.run.nested] if r.cut_scales else PACKED))
    return Flat((), whole // r.ranks, 0, whole, 0, 0, 0, 0)


def _buffers(engine: TrainingEngine) -> Iterator[int]:
    """Each layer's own cos and sin (`calc.memory.weights.tables`), and buffers that are a block, or a pair."""
    layers = engine.replica.arch.layers
    for line in engine.tables():
        parts = 2 * layers if "L" in line.values else 1
        yield from [line.bytes // parts] * parts
    for line in engine.left():
        yield from [line.bytes // 2] * 2 if line.source == "weights#tables" else [line.bytes]


def _scales(r: Replica) -> Iterator[int]:
    """The scales of 4-bit weights that every rank has whole, beside its part of the weights (`calc.memory.weights`)."""
    if r.quantised and not r.cut_scales:
        scale = NF4[r.run.nested] - PACKED
        yield from [int(scale * t.elements) for t in _in_order(r.arch, r.head) if _in_four(r, t)]


def _buckets(e: Plain) -> Buckets:
    """DDP's buckets: gradients come in the order of the parameters, the last one first.

    At first there is a single one, unless unused parameters have to be found: then parameters are put into buckets in
    their own order, and stay there (torch 2.13 `nn/parallel/distributed.py`, `compute_bucket_size_limits`;
    `csrc/distributed/c10d/reducer.cpp`, `compute_bucket_assignment_by_size`, `should_rebuild_buckets`). What is
    broadcast is copied, but for a tensor that is alone (`comm.cpp`, `broadcast_coalesced`).
    """
    r = e.replica
    stored = [*_stored(r)]
    if r.run.adapter:
        stored += [(t.elements * _width(r, t, r.adapter_bytes), False) for t in _trained(r)]
        stored += [(t.elements * r.adapter_bytes, False) for t in r.untrained]
    sent = [
        found
        for four in (False, True)
        for found in _assigned([size for size, own in stored if own is four], (BROADCAST,))
    ]
    made = [t.elements * _width(r, t, r.grad_bytes) for t in _trained(r)]
    ordered, limits = made[::-1], (FIRST_BUCKET, BUCKET)
    return Buckets(
        broadcast=tuple([sum(found) for found in sent if len(found) > 1]),
        first=tuple([sum(found) for found in _assigned(made, limits)][::-1]) if e.unused else (sum(made),),
        rebuilt=() if e.unused else tuple([sum(found) for found in _assigned(ordered, limits)]),
        recorded=e.recorded,
    )


def _assigned(sizes: Sequence[int], limits: Sequence[int]) -> Iterator[list[int]]:
    """Tensors in buckets, each closed by the tensor that fills it; the last limit holds for all further buckets."""
    found, filled, closed = list[int](), 0, 0
    for size in sizes:
        found.append(size)
        filled += size
        if filled >= limits[min(closed, len(limits) - 1)]:
            yield found
            found, filled, closed = [], 0, closed + 1
    if found:
        yield found


def _units(r: Replica) -> tuple[Unit, ...]:
    """The units of the layers, and last of what lies outside them: the root, or the embedding and the head."""
    arch = r.arch
    layers = {spec: layer_tensors(arch, spec) for spec in arch.specs}
    inside = {t.name for layer in layers.values() for t in layer}
    root = [t for t in _in_order(arch, r.head) if t.name not in inside]
    table = [t for t in root if t.kind == "embedding"] if r.ends else []
    outer = [group for group in (table, [t for t in root if t not in table]) if group]
    units = {spec: _unit(r, layer, [*_adapters(r, spec)], r.gathers) for spec, layer in layers.items()}
    return (*[units[spec] for spec in arch.specs], *[_unit(r, group, []) for group in outer])


def _unit(r: Replica, own: Sequence[Tensor], adapters: Sequence[Tensor], narrow: int = 0) -> Unit:
    """The FSDP unit of `own` tensors and their `adapters`; linears are gathered in `narrow` bytes each, unless 0.

    torchao 0.13 `float8/fsdp_utils.py`, `fsdp_pre_all_gather`: shards are cast to float8, and gathered so.
    """
    ranks, compute = r.ranks, r.run.compute
    stored = [*[(t, r.weight_bytes) for t in own], *[(t, r.adapter_bytes) for t in adapters]]
    parts = [part_of(t, ranks).elements for t, _ in stored]
    trained = sum(parts[len(own) :] if r.run.adapter else parts) if r.optimizer else 0
    sent = [
        part * (narrow if narrow and t.kind == "linear" else compute)
        for part, (t, _) in zip(parts, stored, strict=True)
    ]
    return Unit(
        whole=tuple([t.elements * b for t, b in stored]),
        shards=tuple([part * b for part, (_, b) in zip(parts, stored, strict=True)]),
        cast=sum(sent) if r.weight_bytes != compute and ranks > 1 else 0,
        # one rank copies its shards one by one (torch 2.9 `_fully_shard/_fsdp_param_group.py:357`, `wait_for_unshard`)
        buffer=sum(sent) * ranks if ranks > 1 else 0,
        gathered=tuple([part * ranks for part in sent]),
        reducing=trained * ranks * r.reduce_bytes,
        reduced=trained * r.reduce_bytes,
        kept=trained * r.grad_bytes if r.grad_bytes != r.reduce_bytes else 0,
    )


def _under_zero(e: Zero, checkpointing: str) -> Partitioned | Flattened | None:
    """The parameters of a model under ZeRO; below stage 3 those that are trained."""
    if e.stage == 3:
        return _partitioned(e, checkpointing)
    trained = [t.elements for t in _trained(e.replica)]
    if not trained:
        return None
    return Flattened(
        stage=e.stage,
        whole=tuple([n * B for n in trained]),
        elements=sum(trained),
        share=e.cut.share,
        touched=e.cut.kept,
        bucket=e.config.reduce_bucket,
        norm=e.cut.slice * NORM,
        on_gpu=e.version >= FLATTENS_ON_GPU,
        lazy=e.version >= LAZY_BUCKET,
        overlaps=e.overlaps,
    )


def _partitioned(e: Zero, checkpointing: str) -> Partitioned:
    """The parameters of a model under ZeRO-3."""
    r = e.replica
    arch, whole = r.arch, r.optimizer is not None and not r.run.adapter
    inside = {t.name for spec in arch.specs for t in layer_tensors(arch, spec)}
    outside = [Stored(t, r.weight_bytes, whole) for t in _in_order(arch, r.head) if t.name not in inside]
    layers = {
        spec: [
            *[Stored(t, r.weight_bytes, whole) for t in layer_tensors(arch, spec)],
            *[Stored(t, r.adapter_bytes, r.optimizer is not None) for t in _adapters(r, spec)],
        ]
        for spec in set(arch.specs)
    }
    before = [one for one in outside if one.tensor.kind == "embedding"]
    after = [one for one in outside if one.tensor.kind != "embedding"]
    return partitioned(e, before, [layers[spec] for spec in arch.specs], after, again=checkpointing != "none")


def _in_order(arch: Architecture, head: Head) -> Iterator[Tensor]:
    """Every parameter tensor of a model, in the order of its modules."""
    inside = {t.name for spec in arch.specs for t in layer_tensors(arch, spec)}
    outside = [t for t in tensors(arch, head=head) if t.name not in inside]
    yield from [t for t in outside if t.kind == "embedding"]
    for spec in arch.specs:
        yield from layer_tensors(arch, spec)
    yield from [t._replace(count=1) for t in outside if t.kind != "embedding" for _ in range(t.count)]


def _trained(r: Replica) -> Iterator[Tensor]:
    """The tensors that the optimizer steps: LoRA's two matrices for each adapted linear, or the whole model.

    Copies that are trained whole beside adapters lie where their modules do.
    """
    if r.optimizer and not r.run.adapter:
        yield from _in_order(r.arch, r.head)
    if r.optimizer and r.run.adapter:
        saved = r.parts[-1].tensors if r.saved else ()
        inside = [t for t in saved if ".*." in t.name]
        names = {spec: {f"{t.name}{SAVED}" for t in layer_tensors(r.arch, spec)} for spec in set(r.arch.specs)}
        layers = {spec: [*_adapters(r, spec), *[t for t in inside if t.name in own]] for spec, own in names.items()}
        yield from [t for t in saved if t.kind == "embedding"]
        yield from _rows(r)
        for spec in r.arch.specs:
            yield from layers[spec]
        yield from head_matrices(r.arch, r.run.adapter.rank, r.run.adapter.targets)
        yield from [t for t in saved if t.kind != "embedding" and t not in inside]


def _rows(r: Replica) -> tuple[Tensor, ...]:
    """The matrices of an adapter beside the embedding."""
    return embedding_matrices(r.arch, r.run.adapter.rank, r.run.adapter.targets) if r.run.adapter else ()


def _width(r: Replica, t: Tensor, usual: int) -> int:
    """Bytes of an element of a trained tensor, of its gradient or of its step: `usual`, or those of whole copies."""
    return r.saved_bytes if r.saved and t in r.parts[-1].tensors else usual


def _passing(r: Replica, t: Tensor) -> int:
    """The bytes that the optimizer's step of a tensor takes in passing."""
    if r.optimizer and r.optimizer.facts.low_rank and projected(t):
        return decomposition(t, r.step_bytes)
    return t.elements * passing(r.optimizer, _width(r, t, r.step_bytes)) if r.optimizer else 0


def _adapters(r: Replica, spec: LayerSpec) -> Iterator[Tensor]:
    if r.run.adapter:
        adapter = r.run.adapter
        for t in adapter_matrices(r.arch, spec, adapter.rank, adapter.targets, adapter.count):
            yield from [t._replace(count=1)] * t.count


def _weight(r: Replica, t: Tensor) -> int:
    """The bytes of a stored tensor, in four or eight bits or unquantised."""
    if r.run.int8 and _in_four(r, t):
        return t.elements + ROW * (t.elements // t.shape[-1])
    return int(t.elements * (NF4[r.run.nested] if _in_four(r, t) else r.weight_bytes))


def _stored(r: Replica) -> Iterator[tuple[int, bool]]:
    """The bytes of each stored tensor, and if it is in four bits.

    Linears that a checkpoint leaves in 16 are taken to be its first: which they are, its size does not say.
    """
    left = r.run.wide
    for t in _staying(r):
        four = _in_four(r, t)
        kept = min(left, t.elements) if four else 0
        left -= kept
        yield _weight(r, t) + int((r.weight_bytes - NF4[r.run.nested]) * kept), four and not kept


def _staying(r: Replica) -> Iterator[Tensor]:
    """The model's own tensors on the GPU: without those of which copies are trained, if they have left for the host."""
    own = [*_in_order(r.arch, r.head)]
    left = r.saved and sum([t.elements for t in own]) > r.parameters
    kinds = {t.kind for t in r.parts[-1].tensors} if left else set[str]()
    yield from [t for t in own if t.kind not in kinds]


def _in_four(r: Replica, t: Tensor) -> bool:
    """True if a tensor is stored in four bits."""
    return r.quantised and is_quantised(r.arch, t, r.run.four_bit_experts) and len(t.shape) > 1


def _states(r: Replica, t: Tensor) -> tuple[int, ...]:
    """The blocks of a trained tensor's states; bitsandbytes leaves some in 32 bits, and keeps scales for the others.

    bitsandbytes 0.50 `optim/optimizer.py`, `init_state`: both moments, then both scales. A row and a column in place of
    a moment are small, and left out.
    """
    assert r.optimizer
    facts, b = r.optimizer.facts, _width(r, t, r.step_bytes)
    if facts.low_rank:
        return galore_states(t, r.optimizer.rank, b)
    n = 0 if facts.paged or facts.factored else facts.moments
    if n and facts.eight_bit:
        if in_32_bits(r.optimizer, t):
            return ((4 if facts.wide else b) * t.elements,) * n
        codes = int(facts.packed * 2) * t.elements // 2
        return (codes,) * n + (int(facts.packed * t.elements) - codes,) * n
    return (int(t.elements * state_bytes_per_parameter(r.optimizer, b) / n),) * n if n else ()


def _piece(r: Replica, batch: Batch, passes: Lifetimes, checkpointing: str = "none") -> Piece:
    """A piece as scripts of its passes, trained or not."""
    writer = _writer(r, batch, passes)
    if not r.optimizer:
        return Piece(writer.without_grad(), None)
    if checkpointing == "none":
        return Piece(writer.forward(), writer.backward())
    return Piece(writer.once(), writer.again())


def _writer(r: Replica, batch: Batch, passes: Lifetimes, width: int = 0) -> Writer:
    rank = r.run.adapter.rank if r.run.adapter else 0
    values = {**dimensions(r.run.arch, rank), "h": width or r.arch.hidden}
    return Writer(passes, values, *batch, r.grad_bytes)


def _layers(r: Replica, batch: Batch, masked: bool, checkpointing: str) -> tuple[Piece, ...]:
    """The pieces of all layers; each kind of layer is written once."""
    # the gradient of a layer's output belongs to the layer above where that retains it
    top = r.arch.layers - 1
    received = [r.optimizer is not None and r.run.retains and n < top for n in range(r.arch.layers)]
    found = [*zip(kinds(r.run, masked, checkpointing != "none"), received, strict=True)]
    pieces = {}
    for kind, others in set(found):
        passes = lifetimes(kind.run(r.run), kind.spec, kind.first, others, checkpointing == "selective")
        pieces[kind, others] = _piece(r, batch, passes, checkpointing if kind.again else "none")
    return tuple([pieces[each] for each in found])


def _head(r: Replica, batch: Batch) -> Piece:
    """The piece of the head, with its loss."""
    program = written(r.run, r.path, grad=r.optimizer is not None or r.path.kind != "selective")
    writer = _writer(r, batch, Lifetimes(program.tape), r.arch.outer)
    if not r.optimizer:
        return Piece(writer.without_grad(), None)
    late = program.held if r.path.held in LASTING else None
    forward = writer.forward(AFTER if r.run.wrapped else ())
    slot = writer.slots[late.storage] if late else None
    if slot is not None and r.path.outside:
        forward = _replacing(forward, next(n for n, (own, _) in enumerate(forward.steps, 1) if own == slot))
    elif slot is not None and r.path.kind == "pieces":
        # litgpt's list is whole, and cast, before it has the name of the former one: only the log-softmax comes later
        forward = _replacing(forward, max(n for n, (_, size) in enumerate(forward.steps) if size))
    return Piece(forward, writer.backward(), slot)


def _replacing(forward: Script, there: int) -> Script:
    """The head's forward, before whose step `there` its outputs have replaced those of the micro batch before."""
    return forward._replace(steps=(*forward.steps[:there], (REPLACED, 0), *forward.steps[there:]))
