"""A rank of PyTorch's interleaved 1F1B, with several pieces of the model that take turns: what is alive of each.

Micro batches go through a piece in rounds of about as many as there are ranks, then through the next; backwards come in
the same rounds, the last piece first. Each piece is a module of its own under FSDP: its weights stay gathered and its
gradients whole until its own last backward. Read in torch 2.13 `distributed/pipelining/schedules.py`
(`ScheduleInterleaved1F1B`, `_get_warmup_ops`, `_get_1f1b_rank_ops`, `_add_unshard_reshard`) and `stage.py`
(`backward_maybe_with_nosync`); the rest is as in `calc.step.schedule_1f1b`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from calc.base.ledger import Line
from calc.engines.staged import Kept, Staged
from calc.step import peaks
from calc.step.instants import Step
from calc.step.placement import Placed
from calc.step.schedule_1f1b import ahead, begun, first, handed_on, received, rotated

Piece = tuple[Placed, Step]


class Turn(NamedTuple):
    """A forward or backward of a `piece` that may be the peak, and how far all pieces are, one by one.

    `waiting`: the micro batches, but for the one at work, whose forward has run and whose backward has not begun.
    `kept`: each piece's gradients. `named`: the piece of the latest forward that has ended, whose output the schedule's
    variable has, if any. `begins`: it is the piece's first forward; `over`: its last backward.
    """

    piece: int
    backward: bool
    waiting: tuple[int, ...]
    kept: tuple[Kept, ...]
    named: int | None
    begins: bool = False
    over: bool = False


def order(index: int, stages: int, chunks: int, micro: int) -> Iterator[tuple[int, bool]]:
    """The pieces that rank `index` runs in a step of `micro` micro batches, forward or backward (True), in turn.

    torch 2.13 `ScheduleInterleaved1F1B._calculate_single_rank_operations`: its idle turns are left out.
    """
    together = micro // max(1, micro // stages)
    turns = [step // together % chunks for step in range(chunks * micro)]
    warmup = min((chunks - 1) * together + 2 * (stages - 1 - index), len(turns))
    backwards = [chunks - 1 - piece for piece in turns]
    yield from [(piece, False) for piece in turns[:warmup]]
    for forward, backward in zip(turns[warmup:], backwards, strict=False):
        yield from ((forward, False), (backward, True))
    yield from [(piece, True) for piece in backwards[len(turns) - warmup :]]


def turns(index: int, stages: int, chunks: int, micro: int) -> list[Turn]:
    """The turns of rank `index` that can be its peak: of those alike but for what waits, none that another exceeds."""
    waiting, ended, named = [0] * chunks, [0] * chunks, None
    ran, found = [0] * chunks, dict[Turn, None]()
    for piece, backward in order(index, stages, chunks, micro):
        waiting[piece] -= backward
        kept: tuple[Kept, ...] = tuple("reduced" if n == micro else "whole" if n else "" for n in ended)
        begins, over = not (backward or ran[piece]), backward and ended[piece] == micro - 1
        found[Turn(piece, backward, tuple(waiting), kept, named, begins, over)] = None
        if backward:
            ended[piece] += 1
        else:
            waiting[piece], ran[piece], named = waiting[piece] + 1, ran[piece] + 1, piece
    most: dict[Turn, list[Turn]] = {}
    for turn in found:
        most.setdefault(turn._replace(waiting=()), []).append(turn)
    return [turn for alike in most.values() for turn in alike if not any(_exceeds(other, turn) for other in alike)]


def _exceeds(other: Turn, turn: Turn) -> bool:
    """True if of every piece as many micro batches wait at the `other` turn, or more."""
    return other != turn and all(a >= b for a, b in zip(other.waiting, turn.waiting, strict=True))


def training(placed: Placed, pieces: Sequence[Piece]) -> Iterator[tuple[str, str, list[Line]]]:
    """The peak instant of each phase of a rank, without the resident tensors; `placed` has all its `pieces`."""
    index, stages = placed.role.pipeline
    micro = placed.s.accumulation
    buffers = [line for _, own in pieces for line in own.lines(received(own, micro))]
    forward: list[tuple[str, list[Line]]] = []
    backward: list[tuple[str, list[Line]]] = []
    for turn in turns(index, stages, len(pieces), micro):
        there = [*buffers, *_beside(turn, pieces)]
        found = _backward(turn, pieces) if turn.backward else _forward(turn, pieces)
        (backward if turn.backward else forward).extend(peaks.beside(there, moment) for moment in found)
    yield "forward", *peaks.largest(forward)
    yield "backward", *peaks.largest(backward)
    yield "step", *peaks.beside(buffers, peaks.largest(placed.engine.stepping()))


def _beside(turn: Turn, pieces: Sequence[Piece]) -> list[Line]:
    """What waits beside the micro batch at work: of all pieces its activations and outputs, of others their weights."""
    lines: list[Line] = []
    for n, (placed, own) in enumerate(pieces):
        stack, waiting = own.plan.layout.stack, turn.waiting[n]
        lines += own.lines([*ahead(own, waiting), *handed_on(own, waiting * (not stack.ends))])
        if n != turn.piece:
            lines += _staged(placed).between(turn.kept[n])
            lines += own.lines(own.plan.layout.over("next") if n == turn.named else [])
    placed, own = pieces[turn.piece]
    # the gradient that was sent last; a first piece sends none
    sent = any(kept and not step.plan.layout.stack.embeds for kept, (_, step) in zip(turn.kept, pieces, strict=True))
    angles = rotated(placed.engine.replica.run)._replace(times=sum(turn.waiting) + 1)
    return [*lines, *own.lines([*handed_on(own, sent), angles])]


def _staged(placed: Placed) -> Staged:
    """The engine of a piece."""
    assert isinstance(placed.engine, Staged)
    return placed.engine


def _forward(turn: Turn, pieces: Sequence[Piece]) -> Iterator[tuple[str, list[Line]]]:
    """The peak instants of a forward of a piece."""
    placed, own = pieces[turn.piece]
    stack = own.plan.layout.stack
    engine = placed.engine if turn.kept[turn.piece] else first(placed.engine)
    # the model's own variables: the embedding's output, and the input of the layer that runs
    held = own.lines(handed_on(own, 0 if stack.ends else stack.embeds + (not own.plan.layout.recompute)))
    yield peaks.beside(held, peaks.peak(engine, own, own.plan.forward))
    if turn.begins:
        yield begun(placed, own, [])


def _backward(turn: Turn, pieces: Sequence[Piece]) -> Iterator[tuple[str, list[Line]]]:
    """The peak instants of a backward of a piece, and after its last one those of its reduction."""
    placed, own = pieces[turn.piece]
    stack, adds = own.plan.layout.stack, bool(turn.kept[turn.piece])
    engine = placed.engine if adds else first(placed.engine)
    output = own.lines(handed_on(own, not stack.ends))
    yield peaks.beside(output, peaks.peak(engine, own, own.backward()))
    if not adds and (copied := first(placed.engine).copying()):
        yield "embedding's gradient: copy", [*output, *copied]
    if turn.over:
        left = own.lines([*handed_on(own, (not stack.embeds) + (not stack.ends)), *own.plan.layout.over("next")])
        yield "reduction", [*left, *_staged(placed).finishing()]
