"""Megatron-core's pipeline schedules, 1F1B and interleaved: the micro batches under way on a stage at its peak.

A stage runs forwards ahead of its first backward. Each micro batch under way keeps what its layers saved and the input
that the stage received; outputs are freed once they are sent (`deallocate_output_tensor`). With several model chunks a
stage, micro batches go through a chunk in groups of as many as there are stages. What the loop's variables name
outlives its turn. Read in Megatron-LM d98e8a64dd `megatron/core/pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.autograd.polynomial import amount
from calc.autograd.tape import of
from calc.base.ledger import Line
from calc.engines.megatron import Megatron
from calc.step import peaks
from calc.step.instants import Part, Step
from calc.step.tower import Seen


def warmup(index: int, stages: int, chunks: int, micro: int) -> int:
    """The number of forwards, of one chunk each, that stage `index` runs before 1F1B begins.

    See `get_pp_rank_microbatches`; `micro` are the micro batches of a step.
    """
    ahead = stages - index - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    return min(ahead, micro * chunks)


def outliving(turns: int, chunks: int) -> tuple[int, int]:
    """Tensors of the stream of earlier turns that the loop's variables hold, in a forward and in a backward.

    Of `turns`, each a forward and a backward, the last. 1F1B: the output, whose graph ends in its input with a
    gradient, until the next forward has returned; the gradient until the next backward has. Interleaved, with its
    communication overlapped: the input that warmup received last with its gradient, and the last gradient
    (`forward_backward_pipelining_{without,with}_interleaving`).
    """
    if turns < 2:
        return 0, 0
    if chunks == 1:
        return 2, 1
    past = 2 if turns == 2 else 3
    return past, past


def training(
    engine: Megatron,
    own: Step,
    index: int,
    stages: int,
    chunks: int,
    micro: int,
    *,
    masked: bool = True,
    handed: int = 1,
    earlier: Step | None = None,
    seen: Seen | None = None,
) -> Iterator[tuple[str, str, list[Line]]]:
    """The peak instant of each phase of a stage, without the resident tensors; `own` is its last chunk's step.

    `masked`: the loader makes a mask of every pair of a sequence's positions, a byte each (`create_attention_mask`).
    `handed`: tensors of the stream that are received, and whose gradients are, as one; but for the last they are
    outputs of forwards without gradient. `earlier`: the step of each chunk before the last, where it has other layers.
    `seen`: the images of a micro batch before a first stage's vision tower, whose pixels go when its forward returns.
    """
    layout = own.plan.layout
    ahead = warmup(index, stages, chunks, micro)
    waiting = min(ahead, micro * chunks - 1)
    there = (earlier or own).plan.layout.layers() if waiting else []
    kept = [part._replace(times=part.times * waiting) for part in there]
    # a first stage makes its inputs itself, and its layers keep them; of several chunks only the first begins there
    inputs = 0 if layout.stack.embeds else waiting + 1
    stream = Part("communication", layout.stack.residual, "parallelism#stages", handed)
    received = [stream._replace(times=handed * inputs)] if inputs else []
    mask = [Part("temporary", amount(of(S=1), layout.stack.dims), "parallelism#stages")] if masked else []
    fixed = engine.workspace(*own.batch)
    looked, pixels = (seen.saved(), seen.pixels()) if seen else ([], [])
    beside = [*fixed, *own.lines([*kept, *received, *mask]), *looked * (waiting + 1)]
    gradient = own.lines([stream])
    others = own.lines([stream._replace(times=handed - 1)]) if handed > 1 and not layout.stack.ends else []
    past, behind = outliving(micro * chunks - ahead, chunks) if inputs else (0, 0)
    if not layout.stack.ends:
        # the gradient that was received last
        past += micro * chunks - ahead > 1
    over, left = (own.lines([stream._replace(times=handed * n)] if n else []) for n in (past, behind))
    yield "forward", *peaks.beside([*beside, *pixels, *others, *over], peaks.peak(engine, own, own.plan.forward))
    if seen:
        before = [*fixed, *own.lines([*kept, *mask]), *looked * waiting]
        yield "forward", *peaks.beside(before, seen.forward(engine, grad=True))
    back = [*beside, *left] if layout.stack.ends else [*beside, *left, *gradient]
    yield "backward", *peaks.beside(back, peaks.peak(engine, own, own.backward()))
    yield "step", *peaks.beside([*fixed, *own.lines(layout.remaining())], peaks.largest(engine.stepping()))
