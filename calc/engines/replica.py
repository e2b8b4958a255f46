"""The model that an engine spreads over GPUs, a place in a step, and the questions that every engine answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, Protocol

from calc.base.ledger import Line
from calc.base.plan import Ends, Handed, Leaves, Loads, Path, Paused, Streams
from calc.memory import gradients, host, optimizer, weights
from calc.memory.host import ROUNDED, HostAllocator
from calc.memory.optimizer import Optimizer
from calc.memory.run import Run
from calc.models.architecture import Architecture, Head, Tensor, embedding_parameters
from calc.models.lora import SAVED
from calc.models.sound import Whisper


class Part(NamedTuple):
    """Trained `elements`, with bytes of a gradient and of what the optimizer steps in, and their `tensors`."""

    elements: int
    grad: int
    step: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Replica:
    """One role's model before an engine spreads it: its parameters and the number formats they are kept in.

    Bytes are per parameter: `weight_bytes` of the model's own weights, `adapter_bytes` of LoRA's, `grad_bytes` of
    the gradients that backward leaves behind, `master_bytes` of an fp32 copy beside 16-bit weights, `step_bytes` of
    what the optimizer steps in. `ranks` share what is sharded; a step has `micro_batches`. FSDP's ranks reduce
    gradients of `reduce_bytes`, with `defers` once a step. `leaves` names what moves to the host while other roles
    run, `weights` or the optimizer's `states`; for `backups`, `paused` and `loads` see `calc.base.plan.Role`.
    `copied`: a process that loads weights on the host has a copy of them, and does not leave them in the files.
    `recast`: bytes of an element as published, where loading casts each tensor once it is on the card.
    `casts_table`: once all are there, each is cast to another type of 16 bits, the table of tokens, too.
    `stays`: weights that FSDP gathers for the first micro batch of a step stay until the last, as do whole
    gradients. `pins`: the allocator of pinned host memory. `in_backward`: each parameter steps as soon as its
    gradient is there, which then goes. `streams` and `ends`: see `calc.base.plan.Role`. `gathers`: bytes of an
    element that FSDP gathers of a layer, 0 for the compute type's. `saved`: elements trained whole beside adapters.
    `untrained`: matrices of adapters that get no gradients.
    `groups`: see `calc.base.plan.Role`.
    `init`: the decomposition from which adapters start on the card, if any. `ref_bytes`: bytes of an element of the
    adapters' frozen copy, 0 without one. `keeps_gathered`: what FSDP 2 gathers for
    a forward stays until its own backward. `keeps_last`: that of the last layer alone.
    """

    role: str
    arch: Architecture
    head: Head
    run: Run
    path: Path
    parameters: int
    weight_bytes: int
    quantised: bool
    adapter: int
    adapter_bytes: int
    trainable: int
    trained_tensors: tuple[Tensor, ...]
    grad_bytes: int
    master_bytes: int
    step_bytes: int
    optimizer: Optimizer | None
    ranks: int
    micro_batches: int
    leaves: frozenset[Leaves] = frozenset()
    backups: int = 0
    paused: Paused = ""
    loads: Loads = ""
    copied: bool = True
    recast: int = 0
    casts_table: bool = False
    reduce_bytes: int = 0
    defers: bool = False
    stays: bool = False
    pins: HostAllocator = ROUNDED
    in_backward: bool = False
    streams: Streams = ""
    vision_adapter: int = 0  # adapter elements beside a vision tower's linears
    gathers: int = 0
    cut_scales: bool = False
    ends: Ends = ""
    saved: int = 0
    untrained: tuple[Tensor, ...] = ()
    init: Literal["", "pissa", "olora"] = ""
    ref_bytes: int = 0
    mask_positions: int = 0
    keeps_gathered: bool = False
    keeps_last: bool = False
    groups: int = 1

    def built(self, ranks: int) -> list[Line]:
        """Host memory of a node's `ranks` while they load; 4-bit weights go to the card one by one."""
        if not self.loads or self.quantised or not self.copied:
            return []
        whole = host.loading(self.role, self.parameters, self.weight_bytes, streamed=False)
        return times([whole], ranks if self.loads == "every" else 1)

    @property
    def accumulates(self) -> bool:
        """True if gradients are accumulated over several micro batches."""
        return self.micro_batches > 1

    @property
    def keeps_all(self) -> bool:
        """True if all gradients of a backward stay until the step, and none is added to an earlier micro batch's."""
        return not (self.accumulates or self.in_backward)

    @cached_property
    def adds_singly(self) -> bool:
        """True if FSDP 2 adds deferred gradients one by one, as they are made in the type in which it keeps them."""
        return self.defers and self.accumulates and self.reduce_bytes == self.run.compute

    def starting(self) -> list[Line]:
        """The largest decomposition of a weight from which an adapter starts, where the weight is on the card then."""
        if not self.init or self.loads:
            return []
        pairs = self.parts[0].tensors
        m, n = max([(b.shape[0], a.shape[1]) for a, b in zip(pairs[::2], pairs[1::2], strict=True)], key=prod)
        return [weights.decomposed(self.role, self.init, m, n)]

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of an element of what is trained whole beside adapters."""
        return self.run.adapter.saved_b if self.run.adapter else 0

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The tensors that are trained, by the bytes of their elements: adapters, or all weights, and `saved` ones."""
        copies = tuple([t for t in self.trained_tensors if t.name.endswith(SAVED)])
        own = tuple([t for t in self.trained_tensors if not t.name.endswith(SAVED)])
        first = Part(self.trainable - self.saved, self.grad_bytes, self.step_bytes, own)
        b = self.saved_bytes
        return (first, Part(self.saved, b, b, copies)) if self.saved else (first,)

    def packed(self, shards: int = 1) -> Line:
        """The model in four bits, over `shards` GPUs, or in eight, whole."""
        experts, nested = self.run.four_bit_experts, self.run.nested
        if self.run.int8:
            return weights.int8(self.role, self.arch, self.parameters, self.weight_bytes, experts=experts)
        return weights.quantised(self.role, self.arch, self.parameters, self.weight_bytes, shards, experts=experts,
                                 nested=nested, cut_scales=self.cut_scales, wide=self.run.wide)  # fmt: skip

    def stored_as(self, own: Sequence[Tensor]) -> Iterator[tuple[float, Sequence[Tensor]]]:
        """Its `own` tensors by the bytes of an element: those in four bits, without their scales, and the others."""
        found: dict[bool, list[Tensor]] = {True: [], False: []}
        for t in own:
            found[self.quantised and weights.is_quantised(self.arch, t, self.run.four_bit_experts)].append(t)
        if self.quantised:
            yield weights.PACKED, found[True]
        yield self.weight_bytes, found[False]

    def scales(self) -> Line:
        """The scales of the model in four bits."""
        experts, nested = self.run.four_bit_experts, self.run.nested
        return weights.scales(self.role, self.arch, experts=experts, nested=nested)

    @cached_property
    def ties_gradients(self) -> bool:
        """True if the embedding's gradient has two contributions, the head's and the input's."""
        return self.arch.tied and self.head == "lm" and self.run.trained

    @cached_property
    def ties_in_place(self) -> bool:
        """True if the head's gradient is contiguous, so that autograd adds the input's in place.

        Autocast's cast has written it anew, or the loss makes it itself; else it is a view of a transposed product.
        """
        return self.run.precision == "autocast" or self.path.kind in (
            "fused",
            "fused-rows",
            "cut",
            "tiled",
            "vocab-chunked",
        )

    @cached_property
    def embedding(self) -> int:
        """Elements of the embedding, V·h or a tensor-parallel rank's part of it: the model's largest tensor."""
        return embedding_parameters(self.arch)

    @cached_property
    def embedding_beyond(self) -> int:
        """Elements of the embedding that other tensor-parallel ranks hold: their gradient is made here all the same.

        Its backward sums over the tokens of every rank alike (DTensor, `embedding_dense_backward`: replicated).
        """
        here = self.run.trained and self.arch.embeds
        whole = (self.arch.vocab + self.arch.beyond) * self.arch.outer
        return whole - self.embedding if here else 0

    @cached_property
    def embedding_kept(self) -> int:
        """Elements of `embedding_beyond` whose gradient stays until the step: none if the head is the embedding.

        A tied gradient is added to this rank's own rows alone.
        """
        return 0 if self.ties_gradients else self.embedding_beyond

    @cached_property
    def largest(self) -> int:
        """Elements of the largest trained tensor."""
        return largest(self.trained_tensors)


def largest(tensors: Iterable[Tensor]) -> int:
    """Elements of the largest of these tensors, 0 of none."""
    return max([t.elements for t in tensors], default=0)


WEIGHTS = frozenset({"weights", "adapter"})
Place = Literal[
    "gather", "layer", "join", "norm", "head", "loss", "outside", "waiting", "tower", "end", "reduce"
]  # fmt: skip


class Where(NamedTuple):
    """A place in the step, as an engine needs to know it.

    `segment`: gather (a layer's weights come together), layer, join (FSDP 1 joins a layer's gradients), norm, head,
    loss (in the model's own forward), outside (a loss that is no part of the model), waiting (another model runs),
    tower (the vision tower runs), end (the embedding's backward), reduce (the last gradients leave).
    `layer` counts from 0. In backward, `root` trained elements of head and final norm and `above` of the layers above
    have their gradient, and `here` of this layer; `making` is what the operation that runs makes. `sorting`: the
    embedding's gradient is still being made, and not added to a tied head's yet. `seen`: the trained blocks of a vision
    tower have theirs, the last before the embedding's. `relaid`: what is made lies otherwise than its parameter.
    """

    segment: Place
    layer: int
    backward: bool
    root: int = 0
    above: int = 0
    here: int = 0
    making: int = 0
    sorting: bool = False
    seen: bool = False
    relaid: bool = False

    @property
    def done(self) -> int:
        """All trained elements that have their gradient."""
        return self.root + self.above + self.here


Moments = Iterator[tuple[str, list[Line]]]


class Holder:
    """The answers that are the same for every engine."""

    __slots__ = ()

    def tables(self: TrainingEngine) -> list[Line]:
        """The buffers: rotary tables of each layer, decays of lightning attention, a mask, positions of what hears."""
        r = self.replica
        positions, b = r.arch.cached_positions, r.arch.cached_bytes or self.table_bytes()
        found = [weights.tables(r.role, r.arch, positions, b)] if positions else []
        own = weights.triangles if r.arch.positions else weights.sinusoids  # of GPT-Neo, and of GPT-J
        found += [own(r.role, r.arch)] if r.arch.wide_scores else []
        found += [weights.decays(r.role, r.arch, self.table_bytes())] if r.arch.lightning else []
        found += [weights.triangle(r.role, r.arch.max_positions)] if r.arch.masks_positions else []
        sound = r.arch.sound
        return [*found, weights.sines(r.role, sound)] if isinstance(sound, Whisper) and not sound.tabled else found

    def left(self: TrainingEngine) -> list[Line]:
        """What the first step leaves: a buffer for dequantised weights, cached experts, masks of all positions."""
        r = self.replica
        found = [weights.dequantised(r.role, r.run.buffer, r.run.compute)] if r.run.buffer else []
        found += [weights.opened_experts(r.role, r.arch, r.run.compute)] if r.run.caches_experts else []
        return [*found, *([weights.masks(r.role, r.mask_positions, r.run.residual)] if r.mask_positions else [])]

    def table_bytes(self: TrainingEngine) -> int:
        """Bytes of an element of a rotary table: those of a weight."""
        return self.replica.weight_bytes

    def resident(self: TrainingEngine) -> list[Line]:
        """Weights and what training keeps beside them."""
        return [*self.weights(), *self.states()]

    def goes(self: TrainingEngine, line: Line) -> Leaves:
        """The part of the role with which a line leaves for the host, where that part leaves."""
        return "weights" if line.component in WEIGHTS else "states"

    def staying(self: TrainingEngine) -> list[Line]:
        """The states that stay on the GPU while the role does not train."""
        return [line for line in self.states() if self.goes(line) not in self.replica.leaves]

    def finishing(self: TrainingEngine) -> list[Line]:
        """The tensors alive while deferred gradients of all micro batches are reduced; none if nothing was deferred."""
        return []

    def copying(self: TrainingEngine) -> list[Line]:
        """The tensors alive while the embedding's first gradient is copied to the type of reductions; none if not."""
        return []

    def waiting_head(self: TrainingEngine, where: Where, b: int) -> list[Line]:
        """A tied head's gradient, waiting in autograd for the embedding's, beside those of earlier micro batches."""
        r = self.replica
        waits = where.backward and r.ties_gradients and where.segment in ("norm", "layer", "tower")
        return [gradients.new(r.role, r.embedding, b)] if waits else []

    def tied(self: TrainingEngine, where: Where, b: int) -> list[Line]:
        """The two contributions to a tied embedding's gradient, as they are summed."""
        r = self.replica
        if where.segment != "end" or not r.ties_gradients:
            return []
        return [gradients.tied_embedding(r.role, r.embedding, b, contiguous=r.ties_in_place or where.sorting)]

    def laid_anew(self: TrainingEngine, where: Where, b: int) -> list[Line]:
        """The gradient of the rows beside an embedding as it is made, while autograd copies it for its parameter.

        PEFT looks rows up in the transposed matrix, whose gradient has other strides than the parameter (torch 2.13
        `csrc/autograd/utils/grad_layout_contract.h`, `clone_obey_contract`); it is added in place to an earlier one.
        """
        copied = where.relaid and not where.sorting
        return [gradients.new(self.replica.role, where.making, b)] if copied else []

    def stepped_at_once(self: TrainingEngine, where: Where, *, part: bool = False) -> list[Line]:
        """The one gradient in memory where parameters step in backward, and the temporaries of its step.

        An untied head steps once its backward has let go of the logits' gradient, before the final norm's begins.
        `part`: each rank steps its own part of a parameter alone.
        """
        r = self.replica
        if not where.backward or r.optimizer is None:
            return []
        untied = r.run.trained and r.head == "lm" and not r.ties_gradients
        stepped = r.embedding if where.segment == "norm" and untied else where.making
        made = where.making if r.optimizer.facts.widens else stepped
        lines = [gradients.new(r.role, made, r.grad_bytes)]
        if where.segment in ("norm", "layer"):
            lines.append(optimizer.single_step(r.optimizer, r.role, stepped, r.grad_bytes, r.step_bytes, part=part))
        return lines

    def last_step(self: TrainingEngine, *, part: bool = False) -> Moments:
        """The step of the parameter that gets its gradient last, the embedding, after which none is left."""
        r = self.replica
        assert r.optimizer
        made = 0 if r.optimizer.facts.widens else r.embedding
        scratch = optimizer.single_step(r.optimizer, r.role, r.embedding, r.grad_bytes, r.step_bytes, part=part)
        yield "optimizer step of the embedding", [gradients.new(r.role, made, r.grad_bytes), scratch]

    def whole_embedding(self: TrainingEngine, where: Where, b: int) -> list[Line]:
        """The rows of the embedding's gradient that belong to other tensor-parallel ranks: backward makes all rows.

        A tied head's gradient has this rank's rows alone, which are cut out of the embedding's to be added.
        """
        r = self.replica
        if where.segment != "end" or not r.embedding_beyond:
            return []
        whole = gradients.whole_embedding(r.role, r.embedding_beyond, b)
        return [whole, gradients.new(r.role, r.embedding, b)] if r.ties_gradients else [whole]


class TrainingEngine(Protocol):
    """The interface of an engine that trains, or scores: its answers about its replica."""

    @property
    def replica(self) -> Replica:
        """The model that the engine spreads."""

    def __hash__(self) -> int:
        """Engines are compared by what they hold."""

    def loading(self) -> Moments:
        """The instants of loading, in order: a name and the lines of this role alive at each."""

    def weights(self) -> list[Line]:
        """The model as it lies on the GPU between forwards."""

    def tables(self) -> list[Line]:
        """The cos and sin that its layers keep for all positions, which every GPU has whole; mostly none."""

    def left(self) -> list[Line]:
        """Buffers that the first forward makes and leaves; mostly none."""

    def table_bytes(self) -> int:
        """Bytes of an element of these."""

    def states(self) -> list[Line]:
        """The tensors that training keeps beside the weights: master weights, optimizer states, permanent buffers."""

    def whole_embedding(self, where: Where, b: int) -> list[Line]:
        """The rows of the embedding's gradient that belong to other ranks' parts of the vocabulary."""

    def resident(self) -> list[Line]:
        """Weights and states: what stays through every step of the role."""

    def root(self) -> list[Line]:
        """The root FSDP unit, if a forward without gradient leaves it gathered."""

    def at(self, where: Where) -> list[Line]:
        """The lines that the engine adds at a place of forward or backward: gradients, gathered parameters, buckets."""

    def goes(self, line: Line) -> Leaves:
        """The part of the role with which a line leaves for the host, where that part leaves."""

    def staying(self) -> list[Line]:
        """The states that stay on the GPU while the role does not train."""

    def laid_anew(self, where: Where, b: int) -> list[Line]:
        """A gradient that lies otherwise than its parameter, while it is copied."""

    def finishing(self) -> list[Line]:
        """The tensors alive while gradients that waited for the last micro batch are reduced."""

    def copying(self) -> list[Line]:
        """The tensors alive while the embedding's first gradient is copied to the type in which it is reduced."""

    def stepping(self) -> Moments:
        """The instants of the optimizer step, each with the lines alive beside `resident`."""

    def handing(self, word: Handed) -> Line:
        """The memory that handing weights on takes, for one word of `calc.base.plan.Stage.handed`."""

    def host(self, ranks: int) -> Moments:
        """Host memory of the `ranks` on one node from loading to the first step."""


def times(lines: Iterable[Line], ranks: int) -> list[Line]:
    """The lines of `ranks` ranks that hold the same, added up."""
    if ranks == 1:
        return list(lines)
    return [line._replace(bytes=line.bytes * ranks, formula=f"{ranks}·({line.formula})") for line in lines]
