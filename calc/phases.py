"""The moments of a training step that can be its peak, and what is alive at each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import le
from typing import NamedTuple

from calc.amounts import NO_BYTES, Amount, Segment, Shot, amount
from calc.architecture import Architecture, embedding_parameters, layer_parameters, tensors
from calc.engines.replica import Where
from calc.keeps import Path
from calc.ledger import Line
from calc.memory import activations
from calc.memory.loss import OUTPUTS, head
from calc.memory.run import Run, dimensions
from calc.tape import NOTHING, of


class Batch(NamedTuple):
    """One micro-batch on one GPU: T tokens in sequences of S."""

    tokens: int
    length: int


class Part(NamedTuple):
    """What one component has alive at an instant: `times` an amount, and where the guide derives it."""

    component: str
    amount: Amount
    source: str
    times: int = 1


class Instant(NamedTuple):
    """A candidate for a phase's peak: where in the model it lies, the activations alive there, and their sum."""

    name: str
    where: Where
    parts: tuple[Part, ...]
    total: Amount


def instant(name: str, where: Where, parts: Iterable[Part]) -> Instant:
    """An instant with its parts added up."""
    parts = tuple(part for part in parts if part.amount.formula != "0")
    columns = zip(*[[part.times * c for c in part.amount[:4]] for part in parts], strict=True)
    tokens, pairs, fixed, row = [sum(column) for column in columns] or (0, 0, 0, 0)
    return Instant(name, where, parts, Amount(tokens, pairs, fixed, row, ""))


class Block(NamedTuple):
    """Layers of one kind."""

    segment: Segment
    trained: int  # elements a layer trains
    number: int


class Stop(NamedTuple):
    """A layer whose instants can be the largest: its kind, and how many layers of each kind lie below it."""

    layer: int
    kind: int
    below: tuple[int, ...]
    above: int  # trained elements of the layers above it


class Stack(NamedTuple):
    """A model's segments, compiled once for a way of running it."""

    blocks: tuple[Block, ...]
    stops: tuple[Stop, ...]
    norm: Segment
    head: Segment
    head_trained: int
    root_trained: int  # head and final norm
    held: Amount
    layers_trained: int
    embedding_trained: int
    cached_casts: Amount  # autocast's bf16 copies of the layers' weights, until forward ends
    embedding_own: int  # 0 where the head, whose tensor it is, has been counted already
    layers: int
    bottom: Amount  # what is kept below the first layer
    loss_inside: bool  # Transformers' own loss runs inside the model's forward, log-probabilities outside
    inner: bool
    residual: Amount  # one tensor of the residual stream
    embedding_passing: Amount
    embedding_scratch: Amount
    dims: dict[str, int]


@lru_cache(maxsize=4096)
def stack(run: Run, path: Path, masked: bool, trained: int, inner: bool = False, recompute: bool = False) -> Stack:
    """The compiled model; `masked`: windows shorter than the sequence force SDPA's masked kernel on sliding layers.

    `recompute`: layers start from checkpoints. `inner` adds the second layer and the last but one to the stops, where
    an engine overlaps neighbouring layers.
    """
    arch = run.arch
    # sinks leave eager attention or flash, whatever the window
    windowed = run if arch.attention_sinks else replace(run, kernel="masked")
    kinds: dict[tuple[bool, bool, bool, bool], int] = {}
    order: list[int] = []
    for layer in range(arch.layers):
        key = (
            layer >= arch.dense_layers,
            masked and layer in arch.sliding_layers,
            layer == 0 and not run.trained,
            layer not in arch.unrotated_layers,
        )
        order.append(kinds.setdefault(key, len(kinds)))
    embedding = embedding_parameters(arch) if run.trained else 0
    norm = arch.norm_elements if run.trained else 0
    head_trained = arch.hidden if path.kind == "scalar" else embedding
    blocks = []
    for (moe, window, first, rotated), kind in kinds.items():
        count = order.count(kind)
        each = layer_parameters(arch, -1 if moe else 0) if run.trained else trained // arch.layers
        own = windowed if window else run
        segment = activations.layer(own, moe=moe, first=first, recomputed=recompute, rotated=rotated)
        blocks.append(Block(segment, each, count))
    stops = []
    for kind in range(len(blocks)):
        places = [n for n, k in enumerate(order) if k == kind]
        edges = (places[-1], places[0], *places[-2:-1], *places[1:2]) if inner else (places[-1], places[0])
        for layer in dict.fromkeys(edges):
            below = tuple(order[:layer].count(k) for k in range(len(blocks)))
            above = sum(blocks[k].trained for k in order[layer + 1 :])
            stops.append(Stop(layer, kind, below, above))
    segment, held = head(run, path)
    dims = dict(dimensions(arch, run.adapter.rank if run.adapter else 0))
    stream = of(h=run.residual * run.share)
    # the embedding's backward reads all positions
    whole = of(h=run.residual) if run.sequences else NOTHING
    return Stack(
        blocks=tuple(blocks),
        stops=tuple(stops),
        norm=activations.final_norm(run),
        head=segment,
        head_trained=head_trained,
        root_trained=head_trained + norm,
        held=held,
        layers_trained=sum(block.trained * block.number for block in blocks),
        embedding_trained=embedding,
        cached_casts=_cached_casts(arch) if run.precision == "autocast" and run.trained else NO_BYTES,
        embedding_own=0 if arch.tied and path.kind != "scalar" else embedding,
        layers=arch.layers,
        bottom=amount(activations.below_layers(run, recompute), dims),
        loss_inside=path.kind in ("cross-entropy", "chunked", "fused", "tiled", "scalar"),
        inner=inner,
        residual=amount(stream, dims),
        embedding_passing=amount(stream + whole, dims),
        embedding_scratch=amount(stream + whole + of(h=4.4), dims),
        dims=dims,
    )


def _cached_casts(arch: Architecture) -> Amount:
    """Two bytes for each weight of a linear in the layers; the head keeps its own cast for backward."""
    elements = sum(t.elements * t.count for t in tensors(arch) if t.kind == "linear")
    return Amount(0, 0, 2 * elements, 0, f"2·{elements}")


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that can be alive in a step, before the size of its micro-batch is known.

    `kept` is the stack whose layers say what stays between forward and backward; it differs from `stack` where
    checkpointing recomputes a part of each layer. `recompute`: layers keep their input alone. `held`: how long the
    outputs of a micro-batch stay referenced, as `calc.keeps.Path` says it.
    """

    stack: Stack
    kept: Stack
    recompute: bool
    held: str

    def over(self, during: str) -> list[Part]:
        """Logits of the micro-batch before, while the `step` or the `next` forward runs."""
        lasting = self.held == "next" or self.held == during
        return [Part("logits", self.stack.held, "loss#held")] if lasting else []

    def bottom(self) -> list[Part]:
        """What is kept below the first layer."""
        kept = self.stack.bottom
        return [Part("activations", kept, "activations#embedding")] if kept.tokens or kept.pairs else []

    def casts(self) -> list[Part]:
        """Autocast's cache of bf16 weights in a forward whose layers keep none of their own."""
        return [Part("temporary", self.stack.cached_casts, "activations#autocast")] if self.recompute else []

    def below(self, stop: Stop) -> list[Part]:
        """What the layers below `stop` keep, and, recomputing, the input of the layer itself."""
        if self.recompute:
            return [*self.bottom(), Part("checkpoints", self.stack.residual, "activations#checkpoints", stop.layer + 1)]
        return self.bottom() + [
            Part("activations", block.segment.saved, "activations#saved", number)
            for block, number in zip(self.kept.blocks, stop.below, strict=True)
            if number
        ]

    def layers(self) -> list[Part]:
        """What all layers keep once forward has passed them."""
        if self.recompute:
            checkpoints = Part("checkpoints", self.stack.residual, "activations#checkpoints", self.stack.layers)
            return [*self.bottom(), checkpoints]
        return self.bottom() + [
            Part("activations", b.segment.saved, "activations#saved", b.number) for b in self.kept.blocks
        ]

    def waiting(self) -> list[Part]:
        """Everything alive while another model's forward runs: what backward needs, and autocast's cache."""
        norm = Part("activations", self.stack.norm.saved, "activations#final-norm")
        return [*self.layers(), norm, Part("logits", self.stack.head.saved, "loss#kept"), *self.casts()]

    def place(self, shot: Shot) -> str:
        """Whether an instant is the head's own, a loss's in the model's forward, or a loss's outside of it."""
        if shot.name in OUTPUTS:
            return "head"
        if shot.name in CAPPED:
            return "loss"
        return "loss" if self.stack.loss_inside else "outside"

    def forward(self, *, grad: bool = True) -> Iterator[Instant]:
        """The instants of a forward pass: the last layer's and the head's; without `grad` nothing is kept below."""
        stack = self.stack
        last = max(stack.stops)
        block = stack.blocks[last.kind]
        before = [*self.over("next"), *self.casts()] if grad else []
        below = [*self.below(last), *before] if grad else []
        shots = block.segment.forward if grad and not self.recompute else block.segment.without_grad
        if stack.inner:
            stream = Part("temporary", stack.residual, "activations#passing")
            yield instant("first layer: gather", Where("gather", 0, False), [*before, stream])
            yield instant("layer: gather", Where("gather", last.layer, False), [*below, stream])
        for shot in shots:
            yield instant(f"layer: {shot.name}", Where("layer", last.layer, False), [*below, *alive(shot)])
        norm = Part("activations", stack.norm.saved, "activations#final-norm")
        everything = [*self.layers(), *before, norm] if grad else []
        for shot in stack.head.forward if grad else stack.head.without_grad:
            where = Where(self.place(shot), stack.layers, False)
            yield instant(f"logits: {shot.name}", where, [*everything, *alive(shot, "logits", "logits")])

    def backward(self) -> Iterator[Instant]:
        """The instants of a backward pass: the loss, the final norm, layers, and the end of the network."""
        stack = self.stack
        layers, held = self.layers(), Part("logits", stack.held, "loss#held")
        norm = Part("activations", stack.norm.saved, "activations#final-norm")
        for shot in stack.head.backward:
            where = Where(self.place(shot), stack.layers, True, root=shot.gradients, making=shot.making)
            yield instant(f"loss: {shot.name}", where, [*layers, norm, *alive(shot, "logits", "logits")])
        for shot in stack.norm.backward:
            where = Where("norm", stack.layers, True, root=stack.head_trained + shot.gradients, making=shot.making)
            yield instant(f"final {shot.name}", where, [*layers, held, *alive(shot)])
        for stop in stack.stops:
            segment = stack.blocks[stop.kind].segment
            below = [*self.below(stop), held]
            if self.recompute:
                gradient = Part("temporary", segment.waiting, "activations#passing")
                for shot in segment.again:
                    where = Where("layer", stop.layer, True, stack.root_trained, stop.above)
                    yield instant(f"recompute: {shot.name}", where, [*below, *alive(shot), gradient])
            for shot in segment.backward:
                where = Where("layer", stop.layer, True, stack.root_trained, stop.above, shot.gradients, shot.making)
                yield instant(f"layer: {shot.name}", where, [*below, *alive(shot)])
        if stack.embedding_trained:
            yield self.embedding(stack.embedding_passing, sorting=False)
        if stack.inner:
            where = Where("reduce", 0, True, stack.root_trained, stack.layers_trained, stack.embedding_own)
            yield instant("reduction of the last gradients", where, [held])

    def embedding(self, scratch: Amount, *, sorting: bool) -> Instant:
        """The end of backward: all gradients exist, and the embedding's is being made or, tied, summed."""
        stack = self.stack
        where = Where(
            "end",
            0,
            True,
            stack.root_trained,
            stack.layers_trained,
            stack.embedding_own,
            stack.embedding_trained,
            sorting,
        )
        parts = [Part("logits", stack.held, "loss#held"), Part("temporary", scratch, "activations#embedding")]
        return instant("embedding", where, parts)


def alive(shot: Shot, saved: str = "activations", passing: str = "temporary") -> list[Part]:
    """What one instant of one segment keeps and lets pass."""
    source = "loss#kept" if saved == "logits" else "activations#activations"
    return [Part(saved, shot.saved, source), Part(passing, shot.passing, "activations#passing")]


# what the model's own forward does behind its head
CAPPED = ("logits: gather", "logits: scale", "logits: over cap", "logits: tanh", "logits: times cap")
# torch `native/cuda/Embedding.cu`: above this many tokens the gradient is summed by sorted segments, which takes a
# row in fp32 for every token and for every ten of them
SORTED_TOKENS = 3072


def uncovered(instants: Iterable[Instant], *, sharded: bool) -> Iterator[Instant]:
    """The instants that no other one at the same layer covers, in memory and in gradients alike.

    `sharded`: the engine keeps gradients until their group is reduced, and never asks which one is being made.
    """
    places: dict[Where, list[tuple[Instant, tuple[float, ...]]]] = {}
    for i in instants:
        where = i.where._replace(making=0) if sharded else i.where
        size = (*i.total[:4], where.here, where.making)
        places.setdefault(where._replace(here=0, making=0), []).append((i._replace(where=where), size))
    for found in places.values():
        sizes = [size for _, size in found]
        for n, (i, own) in enumerate(found):
            others = ((m, other) for m, other in enumerate(sizes) if m != n)
            if not any(all(map(le, own, other)) and (own != other or m < n) for m, other in others):
                yield i


class Plan(NamedTuple):
    """A layout's instants: `scoring` is a forward that keeps nothing, `crowded` the end of backward of many tokens."""

    layout: Layout
    forward: tuple[Instant, ...]
    scoring: tuple[Instant, ...]
    backward: tuple[Instant, ...]
    crowded: Instant


@lru_cache(maxsize=4096)
def plan(run: Run, path: Path, trained: int, masked: bool, checkpointing: str, inner: bool) -> Plan:
    """The instants of a model run in one way; see `stack` for `masked` and `inner`."""
    compiled = stack(run, path, masked, trained, inner, checkpointing == "full")
    kept = compiled
    if checkpointing == "selective" and run.whole_scores:
        # the core of attention is recomputed, so a layer keeps what a fused kernel would
        kept = stack(replace(run, kernel="flash"), path, masked, trained, inner)
    layout = Layout(compiled, kept, checkpointing == "full", path.held)
    return Plan(
        layout,
        tuple(layout.forward()),
        tuple(layout.forward(grad=False)),
        tuple(uncovered(layout.backward(), sharded=inner)),
        layout.embedding(compiled.embedding_scratch, sorting=True),
    )


class Step(NamedTuple):
    """A plan with its micro-batch put in: `values` are the numbers behind the symbols of its formulas."""

    role: str
    plan: Plan
    batch: Batch
    values: Mapping[str, float]

    def line(self, part: Part) -> Line:
        """The line of one part."""
        component, amount, source, times = part
        formula = amount.formula if times == 1 else f"{times}·({amount.formula})"
        return Line(component, self.role, times * amount.bytes(*self.batch), formula, self.values, source)

    def lines(self, parts: Iterable[Part]) -> list[Line]:
        """The lines of several parts."""
        return [self.line(part) for part in parts]

    def backward(self) -> tuple[Instant, ...]:
        """The instants of backward for this many tokens."""
        layout, crowded = self.plan.layout, self.batch.tokens > SORTED_TOKENS
        return (
            (*self.plan.backward, self.plan.crowded)
            if crowded and layout.stack.embedding_trained
            else self.plan.backward
        )


def step(
    role: str,
    run: Run,
    path: Path,
    trained: int,
    batch: Batch,
    *,
    masked: bool,
    checkpointing: str,
    inner: bool = False,
) -> Step:
    """The step of one role on one micro-batch; see `stack` for `masked` and `inner`."""
    made = plan(run, path, trained, masked, checkpointing, inner)
    return Step(role, made, batch, {**made.layout.stack.dims, "T": batch.tokens, "S": batch.length})
