"""A model compiled for one way of running it: its layers by kind, the layers that can hold the peak, norm and head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from calc.autograd.polynomial import NO_BYTES, Amount, Segment, amount
from calc.autograd.tape import NOTHING, of
from calc.base.plan import Path
from calc.memory import activations
from calc.memory.loss import head
from calc.memory.run import Run, dimensions
from calc.models.architecture import (
    LayerSpec,
    Tensor,
    beside_embedding_parameters,
    embedding_parameters,
    layer_parameters,
    layer_tensors,
)
from calc.models.lora import NORMS, adapter_matrices, embedding_matrices, head_matrices, saved_modules
from calc.scenario.words import Checkpointing

# Bytes that the embedding's backward takes for each element of the gradient, where it sorts tokens: see
# `calc.step.instants.SORTED_TOKENS`.
SORTING = 4.4


class Block(NamedTuple):
    """Layers of one kind."""

    segment: Segment
    trained: int  # elements a layer trains
    number: int
    handed: Amount  # what each hands on beside the residual stream, an input of the next layer's checkpoint
    hands: int  # layers of the kind with one above them
    again: bool  # they run again for their backward


class Stop(NamedTuple):
    """A layer whose instants can be the peak: its kind, and the number of layers of each kind below it."""

    layer: int
    kind: int
    below: tuple[int, ...]
    above: int  # trained elements of the layers above it
    beside: tuple[int, ...]  # of those below it, the number of each kind that runs again together with it


class Stack(NamedTuple):
    """A model's segments, compiled once for a way of running it."""

    blocks: tuple[Block, ...]
    stops: tuple[Stop, ...]
    norm: Segment
    head: Segment
    head_waiting: Amount  # what it keeps while another model's forward runs
    head_trained: int
    root_trained: int  # head and final norm
    held: Amount
    layers_trained: int
    embedding_trained: int  # elements that get their gradient last: the table, or an adapter's matrix of its rows
    relaid: bool  # that gradient is copied to the order of its parameter
    retains: bool  # see `calc.memory.run.Run`
    casts: Amount  # autocast's bf16 copies of the layers' weights, until its context ends
    casts_below: Amount  # those of all layers but the last
    wrapped: bool  # autocast's context is the model's own forward
    embedding_own: int  # 0 for a tied embedding, which has been counted as the head
    layers: int
    again: int  # those from the first that run again for their backward
    at_once: int  # those that one checkpoint covers, and that run again together
    bottom: Amount  # activations kept below the first layer
    lent: tuple[tuple[int, Amount], ...]  # lending layers, with the keys and values that they have made again
    layer_inputs: Amount  # the gradient of all layers' own embeddings, while the layers make theirs
    embeds: bool  # the embedding is here, not in an earlier pipeline stage
    ends: bool  # final norm, head and loss are here
    loss_inside: bool  # see `calc.base.plan.Path.inside`
    fsdp: int  # version of FSDP; 0: none
    head_unit: bool  # final norm and head are a unit of FSDP 2, whose gradients are reduced before the layers'
    bucket: int  # elements whose gradients are reduced together; 0: all at once, or each unit's
    residual: Amount  # one tensor of the residual stream
    states: Amount  # one of the layers' inputs that the outputs have
    converted: bool  # these are copies in fp32
    embedding_passing: Amount
    embedding_scratch: Amount
    dims: dict[str, int]


@lru_cache(maxsize=256)
def stack(
    run: Run,
    path: Path,
    masked: bool,
    trained: int,
    fsdp: int = 0,
    checkpointing: Checkpointing = "none",
    bucket: int = 0,
    head_unit: bool = False,
) -> Stack:
    """The compiled model; see `activations.kinds` for `masked`.

    Unless `checkpointing` is none, layers are recomputed from their inputs. Under `fsdp` the second layer and the last
    but one are stops, too, as FSDP overlaps neighbouring layers. So is the layer whose gradients first fill a `bucket`
    of so many elements: below it less is kept, above it no gradient leaves. So are, of layers that run again together,
    the last of each kind at each place among them.
    """
    arch, recompute, adapter = run.arch, checkpointing != "none", run.adapter
    at_once = run.at_once if checkpointing == "full" else 1
    # a flat parameter that holds adapters has all of its views require gradients
    within = replace(run, trained=True) if adapter and adapter.joined else run
    kinds: dict[tuple[activations.Kind, bool, bool], int] = {}
    order: list[int] = []
    retains = run.retains and checkpointing == "full"
    for layer, own in enumerate(activations.kinds(run, masked, recompute)):
        counted = own.again or (layer == 0 and not arch.embeds)
        last = layer == arch.layers - 1
        received = not arch.ends if last else retains
        order.append(kinds.setdefault((own, counted, received), len(kinds)))
    table = embedding_parameters(arch)
    embedding = table * arch.embeds * (run.trained or run.saves("embed_tokens"))
    rows = embedding_matrices(arch, adapter.rank, adapter.targets) if adapter else ()
    norm = arch.final_elements * ((run.trained or run.saves(NORMS)) and arch.ends)
    width = arch.outer * run.trained if path.kind == "scalar" else table * run.head.trained
    beside = sum(t.elements for t in head_matrices(arch, adapter.rank, adapter.targets)) if adapter else 0
    outside = sum(t.elements for t in saved_modules(arch, adapter.saved) if ".*." not in t.name) if adapter else 0
    head_trained = (width + beside) * arch.ends
    dims = dict(dimensions(arch, run.adapter.rank if run.adapter else 0))
    blocks = []
    for (own, counted, received), kind in kinds.items():
        count = order.count(kind)
        weights = layer_parameters(arch, own.spec) if within.trained else 0
        adapters = (trained - outside - beside - sum(t.elements for t in rows)) // arch.layers if adapter else 0
        segment = activations.layer(
            own.run(within), own.spec, first=own.first, counted=counted, received=received,
            selective=checkpointing == "selective", reentrant=run.reentrant and checkpointing == "full" and own.again,
        )  # fmt: skip
        handed = amount(activations.handed_on(run, own.spec), dims) if recompute else NO_BYTES
        blocks.append(Block(segment, weights + adapters, count, handed, count - (order[-1] == kind), own.again))
    stops = []
    # a tied head's gradient waits for the embedding's
    tied = arch.tied and run.trained and path.kind != "scalar"
    fills = _filling([blocks[kind].trained for kind in order], norm if tied else head_trained + norm, bucket)
    for kind in range(len(blocks)):
        places = [n for n, k in enumerate(order) if k == kind]
        edges = (places[-1], places[0], *places[-2:-1], *places[1:2]) if fsdp else (places[-1], places[0])
        edges += tuple({layer % at_once: layer for layer in places}.values())
        for layer in dict.fromkeys((*edges, fills) if fills in places else edges):
            below = tuple(order[:layer].count(k) for k in range(len(blocks)))
            again = order[layer - layer % at_once : layer]
            above = sum(blocks[k].trained for k in order[layer + 1 :])
            stops.append(Stop(layer, kind, below, above, tuple([again.count(k) for k in range(len(blocks))])))
    segment, held, waiting = head(run, path, checkpointing == "full" and bool(arch.depths))
    stream = of(h=run.residual * run.share)
    streams = stream * arch.streams
    # the embedding's backward reads all positions
    whole = of(h=run.residual) if run.sequences else NOTHING
    passing, sorted_rows = stream + whole, stream + whole + of(h=SORTING)
    if rows and adapter:  # by then the gradient is that of the rows of the first matrix
        passing, sorted_rows = of(r=adapter.b), of(r=adapter.b + SORTING)
    return Stack(
        blocks=tuple(blocks),
        stops=tuple(stops),
        norm=activations.final_norm(run),
        head=segment,
        head_waiting=waiting,
        head_trained=head_trained,
        root_trained=head_trained + norm,
        held=held if arch.ends else NO_BYTES,
        layers_trained=sum(block.trained * block.number for block in blocks),
        embedding_trained=rows[0].elements if rows else embedding,
        relaid=bool(rows),
        casts=casts(run, arch.specs),
        casts_below=casts(run, arch.specs[:-1]),
        retains=retains,
        wrapped=run.wrapped,
        embedding_own=sum(t.elements for t in rows)
        + (0 if tied else embedding)
        + (beside_embedding_parameters(arch) if run.trained else 0),
        layers=arch.layers,
        again=arch.layers - run.kept_end if recompute else 0,
        at_once=at_once,
        bottom=amount(activations.below_layers(run, recompute, masked), dims) if arch.embeds else NO_BYTES,
        lent=activations.lent_again(run) if recompute else (),
        layer_inputs=amount(of(Lp=run.residual), dims)
        if arch.layer_inputs and (run.trained or recompute)
        else NO_BYTES,
        embeds=arch.embeds,
        ends=arch.ends,
        loss_inside=path.inside,
        fsdp=fsdp,
        head_unit=head_unit,
        bucket=bucket,
        residual=amount(streams, dims),
        states=amount(of(h=4 if path.outputs_fp32 else run.residual), dims) if path.hidden else NO_BYTES,
        converted=path.outputs_fp32 and run.residual < 4,
        embedding_passing=amount(passing, dims),
        embedding_scratch=amount(sorted_rows, dims),
        dims=dims,
    )


def _filling(trained: Sequence[int], before: int, bucket: int) -> int | None:
    """The first layer in backward by which more than `bucket` elements have gradients, or None.

    `trained` are the elements of each layer, `before` those that have gradients before the layers.
    """
    for layer in reversed(range(len(trained))):
        before += trained[layer]
        if before > bucket > 0:
            return layer
    return None


def casts(run: Run, layers: Iterable[LayerSpec]) -> Amount:
    """The bf16 copies, 2 bytes an element, of weights that autocast has cast in `layers`; the head counts its own."""
    adapter, found = run.adapter, list[Tensor]()
    for spec in layers:
        if run.caches:
            found += [t for t in layer_tensors(run.arch, spec) if t.kind == "linear"]
        if adapter and run.autocast and adapter.b == 4:
            found += adapter_matrices(run.arch, spec, adapter.rank, adapter.targets)
    elements = sum(t.elements * t.count for t in found)
    return Amount(0, 0, 2 * elements, 0, 0, f"2·{elements}") if elements else NO_BYTES
