"""Megatron-core's pipeline schedules, 1F1B and interleaved: the micro batches under way on a stage at its peak.

A stage runs forwards ahead of its first backward. Each micro batch under way keeps what its layers saved and the input
that the stage received; outputs are freed once they are sent (`deallocate_output_tensor`). With several model chunks a
stage, micro batches go through a chunk in groups of as many as there are stages. Read in Megatron-LM d98e8a64dd
`megatron/core/pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.autograd.polynomial import amount
from calc.autograd.tape import of
from calc.base.ledger import Line
from calc.engines.megatron import Megatron
from calc.step import peaks
from calc.step.instants import Part, Step


def warmup(index: int, stages: int, chunks: int, micro: int) -> int:
    """The number of forwards, of one chunk each, that stage `index` runs before 1F1B begins.

    See `get_pp_rank_microbatches`; `micro` are the micro batches of a step.
    """
    ahead = stages - index - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    return min(ahead, micro * chunks)


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
) -> Iterator[tuple[str, str, list[Line]]]:
    """The peak instant of each phase of a stage, without the resident tensors; `own` is its last chunk's step.

    `masked`: the loader makes a mask of every pair of a sequence's positions, a byte each (`create_attention_mask`).
    `handed`: tensors of the stream that are received, and whose gradients are, as one; but for the last they are
    outputs of forwards without gradient.
    """
    layout = own.plan.layout
    waiting = min(warmup(index, stages, chunks, micro), micro * chunks - 1)
    kept = [part._replace(times=part.times * waiting) for part in layout.layers()] if waiting else []
    # a first stage makes its inputs itself, and its layers keep them; of several chunks only the first begins there
    inputs = 0 if layout.stack.embeds else waiting + 1
    stream = Part("communication", layout.stack.residual, "parallelism#stages", handed)
    received = [stream._replace(times=handed * inputs)] if inputs else []
    mask = [Part("temporary", amount(of(S=1), layout.stack.dims), "parallelism#stages")] if masked else []
    fixed = engine.workspace(*own.batch)
    beside = [*fixed, *own.lines([*kept, *received, *mask])]
    gradient = own.lines([stream])
    others = own.lines([stream._replace(times=handed - 1)]) if handed > 1 and not layout.stack.ends else []
    yield "forward", *peaks.beside([*beside, *others], peaks.peak(engine, own, own.plan.forward))
    back = beside if layout.stack.ends else [*beside, *gradient]
    yield "backward", *peaks.beside(back, peaks.peak(engine, own, own.backward()))
    yield "step", *peaks.beside(fixed, peaks.largest(engine.stepping()))
