"""A model as the allocator sees it: its tensors one by one, and its pieces as scripts of allocations and frees.

The order is that of the modules (`torch.nn.Module.parameters`), and of forward and backward through them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import starmap
from typing import NamedTuple

from calc.autograd.alloc_trace import Script, Writer
from calc.autograd.tape import Tape
from calc.engines.replica import Replica
from calc.engines.zero_partition import part_of
from calc.memory.activations import Program, kinds, program
from calc.memory.loss import head_dimensions, written
from calc.memory.optimizer import BLOCK, in_32_bits, state_bytes_per_parameter, temporaries
from calc.memory.run import dimensions
from calc.memory.weights import NF4, quantised_kinds
from calc.models.architecture import Architecture, Head, LayerSpec, Tensor, layer_tensors, tensors
from calc.models.lora import adapter_matrices
from calc.step.compiled_model import SORTING
from calc.step.instants import LASTING, SORTED_TOKENS, Batch


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
    `reduced`; both are 0 where nothing is trained.
    """

    whole: tuple[int, ...]
    shards: tuple[int, ...]
    cast: int
    buffer: int
    gathered: tuple[int, ...]
    reducing: int
    reduced: int


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A role's model on one micro-batch, all in bytes; compared by identity, since `blocks` makes each only once.

    `weights` has every tensor that is held whole; where FSDP 2 shards them all, `units` has the layers and, last, the
    root. `states` has the optimizer states of each trained tensor, `passing` what the optimizer's step allocates for
    each, either all `at_once` or one by one. `stream` is the embedding's output, `tables` are cosines and sines.
    `embedding` is the embedding's gradient, 0 where it gets none, `sorting` the scratch memory of that gradient; `tied`
    says how a tied head's gradient is added to it: "in place" or "apart". `held`: how long outputs stay, a word of
    `calc.base.plan.Path`. `inside`: the loss runs inside the model's own forward. `wrapped`: an autocast begins and
    ends with each forward.
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
    tied: str
    held: str
    inside: bool
    wrapped: bool


@lru_cache(maxsize=256)
def blocks(r: Replica, batch: Batch, masked: bool, checkpointing: str, sharded: bool = False) -> Blocks:
    """The blocks of a replica on a micro-batch, `sharded` by FSDP 2; `masked` as in `calc.step.compiled_model`."""
    arch, run = r.arch, r.run
    optimizer, changed = r.optimizer, [*_trained(r)]
    own = [_weight(r, t) for t in _in_order(arch, r.head)]
    adapters = [t.elements * r.adapter_bytes for t in changed] if run.adapter else []
    if sharded:
        changed = [part_of(t, r.ranks) for t in changed]
        r = replace(r, grad_bytes=run.compute)  # bytes of a whole gradient's element, until it is reduced
    each = temporaries(optimizer) * r.step_bytes if optimizer else 0
    return Blocks(
        weights=() if sharded else (*own, *adapters),
        units=_units(r) if sharded else (),
        states=tuple([_states(r, t) for t in changed]),
        passing=tuple([t.elements * each for t in changed]),
        at_once=optimizer is not None and optimizer.impl == "foreach",
        stream=batch.tokens * arch.hidden * run.residual,
        tables=(batch.length * arch.head_dim * run.residual,) * 2 if any(spec.rotated for spec in arch.specs) else (),
        layers=_layers(r, batch, masked, checkpointing if optimizer else "none"),
        norm=_piece(r, batch, Program(run).final_norm()),
        head=_head(r, batch),
        embedding=r.embedding * r.grad_bytes if run.trained else 0,
        sorting=int(SORTING * arch.hidden * batch.tokens) if batch.tokens > SORTED_TOKENS else 0,
        tied=("in place" if r.ties_in_place else "apart") if r.ties_gradients else "",
        held=r.path.held,
        inside=r.path.inside,
        wrapped=run.wrapped,
    )


def _units(r: Replica) -> tuple[Unit, ...]:
    """The units of the layers, and last of the root, which has all tensors outside the layers."""
    arch, own = r.arch, [*_in_order(r.arch, r.head)]
    layers = [layer_tensors(arch, spec) for spec in arch.specs]
    inside = {t.name for layer in layers for t in layer}
    adapters = [[*_adapters(r, spec)] for spec in arch.specs]
    root = [t for t in own if t.name not in inside]
    return tuple(starmap(partial(_unit, r), [*zip(layers, adapters, strict=True), (root, [])]))


def _unit(r: Replica, own: Sequence[Tensor], adapters: Sequence[Tensor]) -> Unit:
    """The FSDP unit of `own` tensors and their `adapters`."""
    ranks, compute = r.ranks, r.run.compute
    stored = [*[(t, r.weight_bytes) for t in own], *[(t, r.adapter_bytes) for t in adapters]]
    parts = [part_of(t, ranks).elements for t, _ in stored]
    trained = sum(parts[len(own) :] if r.run.adapter else parts) if r.optimizer else 0
    return Unit(
        whole=tuple([t.elements * b for t, b in stored]),
        shards=tuple([part * b for part, (_, b) in zip(parts, stored, strict=True)]),
        cast=sum(parts) * compute if r.weight_bytes != compute else 0,
        buffer=sum(parts) * ranks * compute,
        gathered=tuple([part * ranks * compute for part in parts]),
        reducing=trained * ranks * r.reduce_bytes,
        reduced=trained * r.reduce_bytes,
    )


def _in_order(arch: Architecture, head: Head) -> Iterator[Tensor]:
    """Every parameter tensor of a model, in the order of its modules."""
    inside = {t.name for spec in arch.specs for t in layer_tensors(arch, spec)}
    outside = [t for t in tensors(arch, head=head) if t.name not in inside]
    yield from [t for t in outside if t.kind == "embedding"]
    for spec in arch.specs:
        yield from layer_tensors(arch, spec)
    yield from [t for t in outside if t.kind != "embedding"]


def _trained(r: Replica) -> Iterator[Tensor]:
    """The tensors that the optimizer steps: LoRA's two matrices for each adapted linear, or the whole model."""
    if r.optimizer and not r.run.adapter:
        yield from _in_order(r.arch, r.head)
    for spec in r.arch.specs if r.optimizer else ():
        yield from _adapters(r, spec)


def _adapters(r: Replica, spec: LayerSpec) -> Iterator[Tensor]:
    if r.run.adapter:
        yield from adapter_matrices(r.arch, spec, r.run.adapter.rank, r.run.adapter.targets)


def _weight(r: Replica, t: Tensor) -> int:
    """The bytes of a stored tensor, in four bits or unquantised."""
    four = r.quantised and t.kind in quantised_kinds(r.arch, r.run.linear_experts) and len(t.shape) > 1
    return int(t.elements * (NF4[r.run.nested] if four else r.weight_bytes))


def _states(r: Replica, t: Tensor) -> tuple[int, ...]:
    """The blocks of a trained tensor's states; bitsandbytes leaves some in 32 bits, and keeps scales for the others.

    bitsandbytes 0.50 `optim/optimizer.py`, `init_state`: both moments, then both scales. A row and a column in place of
    a moment are small, and left out.
    """
    assert r.optimizer
    facts = r.optimizer.facts
    n = 0 if facts.paged or facts.factored else facts.moments
    if n and facts.eight_bit:
        if in_32_bits(r.optimizer, t):
            return (4 * t.elements,) * n
        return (t.elements,) * n + (4 * -(-t.elements // BLOCK),) * n
    return (int(t.elements * state_bytes_per_parameter(r.optimizer, r.step_bytes) / n),) * n if n else ()


def _piece(r: Replica, batch: Batch, tape: Tape, checkpointing: str = "none") -> Piece:
    """A piece as scripts of its tape, trained or not."""
    writer = _writer(r, batch, tape)
    if not r.optimizer:
        return Piece(writer.without_grad(), None)
    if checkpointing == "none":
        return Piece(writer.forward(), writer.backward())
    return Piece(writer.once(), writer.again())


def _writer(r: Replica, batch: Batch, tape: Tape) -> Writer:
    rank = r.run.adapter.rank if r.run.adapter else 0
    return Writer(tape, {**dimensions(r.arch, rank), **head_dimensions(r.run)}, *batch, r.grad_bytes)


def _layers(r: Replica, batch: Batch, masked: bool, checkpointing: str) -> tuple[Piece, ...]:
    """The pieces of all layers; each kind of layer is written once."""
    found = kinds(r.run, masked, checkpointing != "none")
    pieces = {}
    for kind in set(found):
        writer = program(kind.run(r.run), kind.spec, first=kind.first, selective=checkpointing == "selective")
        pieces[kind] = _piece(r, batch, writer.layer(), checkpointing)
    return tuple([pieces[kind] for kind in found])


def _head(r: Replica, batch: Batch) -> Piece:
    """The piece of the head, with its loss."""
    program = written(r.run, r.path, grad=r.optimizer is not None or r.path.kind != "selective")
    writer = _writer(r, batch, program.tape)
    if not r.optimizer:
        return Piece(writer.without_grad(), None)
    late = program.held if r.path.held in LASTING else None
    return Piece(writer.forward(), writer.backward(), writer.slots[late.storage] if late else None)
