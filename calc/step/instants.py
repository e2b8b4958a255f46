"""The instants of a training step that can be its peak, and the tensors alive at each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from calc.autograd.polynomial import NO_BYTES, Amount, Segment, Shot, maxima, whole_chunks
from calc.base.ledger import Line
from calc.base.plan import Held, Lasting, Path, Streams
from calc.engines.replica import Place, Where
from calc.memory.linears import OUTPUTS
from calc.memory.loss import AFTER
from calc.memory.run import Run
from calc.scenario.words import Checkpointing
from calc.step.compiled_model import Stack, Stop, stack


class Batch(NamedTuple):
    """One micro batch on one GPU: T tokens in sequences of length S."""

    tokens: int
    length: int


class Part(NamedTuple):
    """One component's bytes alive at an instant, `times` × `amount`, and the section of the guide that derives them."""

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
    columns = zip(*[[part.times * c for c in part.amount[:5]] for part in parts], strict=True)
    tokens, pairs, fixed, row, chunked = [sum(column) for column in columns] or (0, 0, 0, 0, 0)
    return Instant(name, where, parts, Amount(tokens, pairs, fixed, row, chunked, ""))


# The code that runs while checkpoints lie on the GPU: a layer's forward, the head with the loss, a layer again, its
# backward.
Running = Literal["forward", "head", "again", "backward"]
STASH = 5  # tensors in flight to the host (torchtune 0.6.1, trl 1.16 `OffloadActivations`: max_fwd_stash_size)
# The inputs of layers that are on the GPU meanwhile. A stash is dropped as backward begins; then one comes back while
# the one before is in use. Buffers are two, and the last layer's input does not leave (unsloth_zoo 2026.10.9
# `gradient_checkpointing.py:1408`).
ON_GPU: Mapping[Streams, Mapping[Running, int]] = {
    "each": {"forward": 1, "head": 0, "again": 1, "backward": 1},
    "stash": {"forward": STASH, "head": STASH, "again": 2, "backward": 1},
    "buffers": {"forward": 3, "head": 3, "again": 2, "backward": 2},
}
During = Literal["step", "next"]
# by `Path.held`: during which of the `step` and the `next` forward a caller still references the outputs
LASTING: Mapping[Lasting, tuple[During, ...]] = {"step": ("step",), "next": ("step", "next"), "turn": ("next",)}


def stashed_at_head(norm: Segment) -> int:
    """The checkpoints of a stash that are on the GPU at the head.

    It holds as many tensors of the final norm as that has saved, its weight among them, in place of inputs.
    """
    return max(0, STASH - norm.saves - 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that can be alive in a step, before the size of its micro batch is known.

    `recompute`: activation checkpointing is on, so that layers keep only their input and what selective checkpointing
    keeps of them. `held`: how long the outputs of a micro batch stay referenced, and `outside`, see
    `calc.base.plan.Path`. `streams`: how checkpoints leave for the host, see `calc.base.plan.Role`.
    """

    stack: Stack
    recompute: bool
    held: Held
    streams: Streams = ""
    outside: bool = False

    def over(self, during: During) -> list[Part]:
        """Logits of the previous micro batch that are still referenced during the `step` or the `next` forward."""
        if self.held == "forward" or self.held == "inside" or self.held == "backward":
            return []
        if during not in LASTING[self.held]:
            return []
        return [Part("logits", self.stack.held, "loss#held"), *self.states(self.stack.layers + 1)]

    def states(self, number: int) -> list[Part]:
        """The bytes of `number` of the layers' inputs that the outputs have."""
        kept = self.stack.states
        return [Part("activations", kept, "loss#held", number)] if number and kept.formula != "0" else []

    def returned(self, *, grad: bool, inside: bool) -> list[Part]:
        """The layers' inputs that the outputs have, at the head; `inside`: the model has not returned yet.

        Those of checkpointed layers are what checkpointing keeps, unless they are cast to fp32 as they are returned.
        """
        stack = self.stack
        if not grad:
            return self.states(stack.layers + 1)
        return self.states(stack.layers + 1) if stack.converted and not inside else []

    def lasting(self, checkpoints: int) -> list[Part]:
        """The layers' inputs that variables keep in backward, beside so many `checkpoints`."""
        if self.held == "forward" or self.held == "inside":
            return []
        return self.states(self.stack.layers + 1 - (0 if self.stack.converted else checkpoints))

    def bottom(self) -> list[Part]:
        """Activations kept below the first layer."""
        kept = self.stack.bottom
        return [Part("activations", kept, "activations#embedding")] if kept.tokens or kept.pairs else []

    def casts(self, amount: Amount, *, grad: bool = True) -> list[Part]:
        """Autocast's cache of bf16 weights; empty in a forward whose layers keep these copies themselves."""
        kept = grad and not self.recompute
        return [Part("temporary", amount, "activations#autocast")] if amount.fixed and not kept else []

    def checkpoints(self, layers: int, running: Running) -> list[Part]:
        """The inputs of the lowest `layers`, less the one that a later pipeline stage receives in a buffer.

        Of layers that run again together the first one's alone is kept; the input of the one that runs is there, too,
        and the inputs of those before it once they have run again. Of those that wait on the host only a few are here;
        see `stashed_at_head`.
        """
        n = self.stack.at_once
        within = {"forward": min(1, (layers - 1) % n), "head": 0}.get(running, (layers - 1) % n)
        number = -(-min(layers, self.stack.again) // n) + within - (not self.stack.embeds)
        if self.streams:
            there = ON_GPU[self.streams][running]
            if self.streams == "stash" and running == "head":
                there = stashed_at_head(self.stack.norm)
            number = min(self.stack.layers, there)
        return [Part("checkpoints", self.stack.residual, "activations#checkpoints", number)] if number else []

    def lowest(self, numbers: Sequence[int], inputs: int, running: Running) -> list[Part]:
        """The tensors that the lowest layers keep, `numbers` of each kind, and those kept below the first layer.

        With recomputation layers keep their inputs, `inputs` of them, and what selective checkpointing keeps, but the
        last ones all that they make where they do not run again.
        """
        counted = [(block, number) for block, number in zip(self.stack.blocks, numbers, strict=True) if number]
        if not self.recompute:
            return self.bottom() + [Part("activations", b.segment.saved, "activations#saved", n) for b, n in counted]
        kept = [Part("activations", b.segment.saved, "activations#saved", n) for b, n in counted if not b.again]
        kept += [Part("checkpoints", b.segment.kept, "activations#selective", n) for b, n in counted if b.again]
        kept += [Part("checkpoints", b.handed, "activations#checkpoints", min(n, b.hands)) for b, n in counted]
        return [*self.bottom(), *self.checkpoints(inputs, running), *[p for p in kept if p.amount.formula != "0"]]

    def below(self, stop: Stop, running: Running) -> list[Part]:
        """The tensors that the layers below `stop` keep and, with recomputation, the input of the layer itself."""
        found = self.lowest(stop.below, stop.layer + 1, running)
        return found if running == "forward" else [*found, *self.together(stop)]

    def together(self, stop: Stop) -> list[Part]:
        """The tensors that the layers keep which have run again together with that of `stop`, before it."""
        counted = zip(self.stack.blocks, stop.beside, strict=True)
        return [Part("activations", block.segment.saved, "activations#saved", n) for block, n in counted if n]

    def retained(self, stop: Stop) -> list[Part]:
        """The inputs of the layers above `stop` with their gradients, if the run retains them.

        The lowest of these gradients is the one that comes into the layer. Of layers that run again together the first
        one's stay alone, and below their last one the gradient that comes in is another.
        """
        n = self.stack.at_once
        above = self.checkpointed - stop.layer // n - 1
        inner = stop.layer < min(self.stack.layers, (stop.layer // n + 1) * n) - 1
        kept = self.stack.retains and (above or inner)
        return [Part("checkpoints", self.stack.residual, "activations#checkpoints", 2 * above + inner)] if kept else []

    @property
    def checkpointed(self) -> int:
        """The number of layers whose inputs checkpointing keeps."""
        return -(-self.stack.layers // self.stack.at_once)

    def remaining(self, *, arriving: bool = False) -> list[Part]:
        """The inputs of all layers with their gradients once backward has passed them, if the run retains them.

        `arriving`: without the lowest gradient, which the embedding's backward reads.
        """
        times = 2 * self.checkpointed - arriving
        return [Part("checkpoints", self.stack.residual, "activations#checkpoints", times)] * self.stack.retains

    def layers(self) -> list[Part]:
        """The tensors that all layers keep once forward has passed them."""
        return self.lowest([block.number for block in self.stack.blocks], self.stack.layers, "head")

    def waiting(self, *, spanned: bool | None = None) -> list[Part]:
        """Everything alive while another model's forward runs.

        That is what backward needs, and the cache of an autocast that spans both forwards; `spanned` says whether one
        does, where the model's own may not be all.
        """
        spans = not self.stack.wrapped if spanned is None else spanned
        cache = self.casts(self.stack.casts) if spans else []
        norm = Part("activations", self.stack.norm.saved, "activations#final-norm")
        held = [Part("logits", self.stack.held, "loss#held")] if self.held == "inside" else []
        return [*self.layers(), norm, Part("logits", self.stack.head_waiting, "loss#kept"), *held, *cache]

    @property
    def outputs(self) -> Amount:
        """The outputs that are still referenced during backward."""
        return NO_BYTES if self.held == "inside" else self.stack.held

    def place(self, shot: Shot) -> Place:
        """The segment in which an instant lies: the head, a loss inside the model's forward, or a loss outside."""
        if shot.name in OUTPUTS:
            return "head"
        if shot.name in CAPPED:
            return "loss"
        if shot.name in AFTER:
            return "outside"
        return "loss" if self.stack.loss_inside else "outside"

    def forward(self, *, grad: bool = True) -> Iterator[Instant]:
        """The instants of a forward pass: the last layer's of each kind and the head's.

        Without `grad` nothing is kept below.
        """
        stack = self.stack
        before = self.over("next") if grad else []
        cast, cached = (self.casts(amount, grad=grad) for amount in (stack.casts_below, stack.casts))
        if stack.fsdp:
            last = max(stack.stops)
            below = [*(self.below(last, "forward") if grad else []), *before, *cast]
            stream = Part("temporary", stack.residual, "activations#passing")
            yield instant("first layer: gather", Where("gather", 0, False), [*before, stream])
            yield instant("layer: gather", Where("gather", last.layer, False), [*below, stream])
        for stop in {stop.kind: stop for stop in sorted(stack.stops)}.values():
            segment = stack.blocks[stop.kind].segment
            again = stack.blocks[stop.kind].again
            shots = (segment.once if again else segment.forward) if grad else segment.without_grad
            kept = [*(self.below(stop, "forward") if grad else self.states(stop.layer)), *before, *cast]
            for shot in shots:
                yield instant(f"layer: {shot.name}", Where("layer", stop.layer, False), [*kept, *alive(shot)])
        if not stack.ends:
            return
        norm = Part("activations", stack.norm.saved, "activations#final-norm")
        for shot in stack.head.forward if grad else stack.head.without_grad:
            where = Where(self.place(shot), stack.layers, False)
            # a loss that is computed once the model has returned: new outputs have replaced the old ones by then
            over = [] if (self.held == "turn" or self.outside) and where.segment == "outside" else before
            # an autocast of the model's own ends with its forward, and drops its copies
            outside = where.segment == "outside"
            copies = [] if stack.wrapped and outside else cached
            there = self.returned(grad=grad, inside=not outside)
            everything = [*(self.layers() if grad else []), *there, *over, *copies, *([norm] if grad else [])]
            yield instant(f"logits: {shot.name}", where, [*everything, *alive(shot, "logits", "logits")])

    def backward(self) -> Iterator[Instant]:
        """The instants of a backward pass: the loss, the final norm, layers, and the end of the network."""
        stack = self.stack
        layers, held = self.layers(), Part("logits", self.outputs, "loss#held")
        norm = Part("activations", stack.norm.saved, "activations#final-norm")
        layers += self.lasting(stack.layers)
        for shot in stack.head.backward if stack.ends else ():
            where = Where(self.place(shot), stack.layers, True, root=shot.gradients, making=shot.making)
            yield instant(f"loss: {shot.name}", where, [*layers, norm, *alive(shot, "logits", "logits")])
        for shot in stack.norm.backward if stack.ends else ():
            where = Where("norm", stack.layers, True, root=stack.head_trained + shot.gradients, making=shot.making)
            yield instant(f"final {shot.name}", where, [*layers, held, *alive(shot)])
        if stack.head_unit:
            where = Where("reduce", stack.layers, True, root=stack.root_trained)
            stream = Part("temporary", stack.residual, "activations#passing")
            yield instant("reduction of the head's gradients", where, [*layers, held, stream])
        last = stack.layers - 1
        for stop in stack.stops:
            segment = stack.blocks[stop.kind].segment
            lasting = self.lasting(stop.layer + 1)
            sums = [Part("temporary", stack.layer_inputs, "activations#embedding")] if stop.layer < last else []
            sums += [Part("temporary", made, "activations#passing") for n, made in stack.lent if stop.layer < n]
            below = [*self.below(stop, "backward"), *self.retained(stop), *lasting, held, *sums]
            if stack.blocks[stop.kind].again:
                gradient = Part("temporary", segment.waiting, "activations#passing")
                again = [*self.below(stop, "again"), *self.retained(stop), *lasting, held, *sums]
                for shot in segment.again:
                    where = Where("layer", stop.layer, True, stack.root_trained, stop.above)
                    yield instant(f"recompute: {shot.name}", where, [*again, *alive(shot), gradient])
            for shot in segment.backward:
                where = Where("layer", stop.layer, True, stack.root_trained, stop.above, shot.gradients, shot.making)
                yield instant(f"layer: {shot.name}", where, [*below, *alive(shot)])
            if stack.fsdp == 1:
                trained = stack.blocks[stop.kind].trained
                where = Where("join", stop.layer, True, stack.root_trained, stop.above, trained)
                stream = Part("temporary", stack.residual, "activations#passing")
                yield instant("layer: gradients joined", where, [*below, stream])
        if stack.embedding_trained:
            yield self.embedding(stack.embedding_passing, sorting=False)
        if stack.fsdp or stack.bucket:
            where = Where("reduce", 0, True, stack.root_trained, stack.layers_trained, stack.embedding_own)
            yield instant("reduction of the last gradients", where, [held, *self.lasting(0)])

    def embedding(self, scratch: Amount, *, sorting: bool) -> Instant:
        """The end of backward: all gradients exist, and the embedding's is being made or, if tied, summed."""
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
            relaid=stack.relaid,
        )
        parts = [Part("logits", self.outputs, "loss#held"), Part("temporary", scratch, "activations#embedding")]
        return instant("embedding", where, [*parts, *self.lasting(0), *self.remaining(arriving=True)])


def alive(shot: Shot, saved: str = "activations", passing: str = "temporary") -> list[Part]:
    """The parts of one instant of one segment: the bytes saved for backward, and the temporaries."""
    source = "loss#kept" if saved == "logits" else "activations#activations"
    return [Part(saved, shot.saved, source), Part(passing, shot.passing, "activations#passing")]


# the operations of a model's own forward after its head
CAPPED = ("logits: gather", "logits: scale", "logits: over cap", "logits: tanh", "logits: times cap")
# torch `native/cuda/Embedding.cu`: above this many tokens the gradient is summed by sorted segments, which takes a
# row in fp32 for every token and for every ten of them
SORTED_TOKENS = 3072


def uncovered(instants: Iterable[Instant], *, grouped: bool) -> Iterator[Instant]:
    """The instants that no other instant at the same layer exceeds both in memory and in gradients.

    `grouped`: the engine keeps gradients until their group is reduced, or all of them, and never asks which one is
    being made, unless that is copied.
    """
    places: dict[Where, list[tuple[Instant, tuple[float, ...]]]] = {}
    for i in instants:
        where = i.where._replace(making=0) if grouped and not i.where.relaid else i.where
        size = (*i.total[:5], where.here, where.making)
        places.setdefault(where._replace(here=0, making=0), []).append((i._replace(where=where), size))
    for found in places.values():
        yield from [found[n][0] for n in maxima([size for _, size in found])]


class Plan:
    """A layout's instants, worked out when they are first asked for."""

    def __init__(self, layout: Layout, grouped: bool) -> None:
        """See `uncovered` for `grouped`."""
        self.layout, self._grouped = layout, grouped

    @cached_property
    def forward(self) -> tuple[Instant, ...]:
        """The instants of a forward that is followed by a backward."""
        return tuple(self.layout.forward())

    @cached_property
    def scoring(self) -> tuple[Instant, ...]:
        """The instants of a forward that keeps nothing."""
        return tuple(self.layout.forward(grad=False))

    @cached_property
    def backward(self) -> tuple[Instant, ...]:
        """The instants of a backward."""
        return tuple(uncovered(self.layout.backward(), grouped=self._grouped))

    @cached_property
    def crowded(self) -> Instant:
        """The end of a backward of more than `SORTED_TOKENS` tokens."""
        return self.layout.embedding(self.layout.stack.embedding_scratch, sorting=True)


# Entries take 0.2 MB each; neither a search nor the records of a model ask again for one so many others later.
@lru_cache(maxsize=1024)
def plan(
    run: Run,
    path: Path,
    trained: int,
    masked: bool,
    checkpointing: Checkpointing,
    fsdp: int,
    grouped: bool,
    bucket: int = 0,
    streams: Streams = "",
    head_unit: bool = False,
) -> Plan:
    """The instants of a model run in one way; see `stack` for `masked`, `fsdp`, `bucket`, `uncovered` for `grouped`."""
    compiled = stack(run, path, masked, trained, fsdp, checkpointing, bucket, head_unit)
    return Plan(Layout(compiled, checkpointing != "none", path.held, streams, path.outside), grouped)


class Step(NamedTuple):
    """A plan for a micro batch of a given size: `values` are the numbers behind the symbols of its formulas.

    In `read`, of the head, h is the width of what it reads.
    """

    role: str
    plan: Plan
    batch: Batch
    values: Mapping[str, float]
    read: Mapping[str, float]

    def line(self, part: Part) -> Line:
        """The ledger line of one part."""
        component, amount, source, times = part
        formula = amount.formula if times == 1 else f"{times}·({amount.formula})"
        values = self.read if component == "logits" else self.values
        return Line(component, self.role, times * amount.bytes(*self.batch), formula, values, source)

    def lines(self, parts: Iterable[Part]) -> list[Line]:
        """The ledger lines of several parts."""
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
    checkpointing: Checkpointing,
    fsdp: int = 0,
    grouped: bool = False,
    bucket: int = 0,
    streams: Streams = "",
    head_unit: bool = False,
) -> Step:
    """The step of one role on one micro batch; see `plan`."""
    made = plan(run, path, trained, masked, checkpointing, fsdp, grouped, bucket, streams, head_unit)
    values: dict[str, float] = {**made.layout.stack.dims, "T": batch.tokens, "S": batch.length}
    if run.arch.delta:
        values["C"] = whole_chunks(batch.length)
    return Step(role, made, batch, values, {**values, "h": run.arch.outer} if run.arch.narrow else values)
