"""A pipeline stage under PyTorch's 1F1B schedule: the tensors of several micro batches that are alive at once.

A stage runs as many forwards ahead of its first backward as there are stages from it to the end, then one backward and
one forward in turn. Read in torch 2.13 `distributed/pipelining/stage.py` and `schedules.py`: outputs of micro batches
whose backward has not ended stay in `fwd_cache`, received tensors have a buffer for every micro batch of the step, and
the gradient that was sent last stays until the next one is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from calc.autograd.polynomial import amount
from calc.autograd.tape import Size
from calc.base.ledger import Line
from calc.engines.replica import TrainingEngine, Where
from calc.memory.run import Run, dimensions
from calc.step import peaks
from calc.step.instants import Part, Step
from calc.step.placement import Placed


class Turn(NamedTuple):
    """A backward that may be the peak.

    `accumulates`: earlier backwards have left gradients. `waiting`: the number of further micro batches whose forward
    has run and whose backward has not begun.
    """

    accumulates: bool
    waiting: int


def turns(index: int, stages: int, micro: int) -> tuple[Turn, ...]:
    """The instants of backward that can be the peak of stage `index`, with `micro` micro batches in a step.

    At most `stages` - `index` micro batches are under way. If the step has no more than these, the first backward has
    all of them and no gradients yet, and the second has gradients and one micro batch fewer.
    """
    ahead = min(micro, stages - index)
    if micro > ahead:
        return (Turn(True, ahead - 1),)
    return Turn(False, ahead - 1), Turn(True, ahead - 2)


def training(placed: Placed, own: Step) -> Iterator[tuple[str, str, list[Line]]]:
    """The peak instant of each phase of the stage, without the resident tensors."""
    index, stages = placed.role.pipeline
    layout, micro = own.plan.layout, placed.s.accumulation
    embeds, ends = layout.stack.embeds, layout.stack.ends
    buffers = own.lines(received(own, micro))
    backward: list[tuple[str, list[Line]]] = []
    rotation = rotated(placed.engine.replica.run)
    for turn in turns(index, stages, micro):
        engine = placed.engine if turn.accumulates else first(placed.engine)
        sent = handed_on(own, (turn.accumulates and not embeds) + turn.waiting * (not ends))
        angles = rotation._replace(times=turn.waiting + 1)
        waiting = [*buffers, *own.lines([*ahead(own, turn.waiting), *sent, angles])]
        if not backward:
            # the model's own variables: the embedding's output, and the input of the layer that runs
            held = own.lines(handed_on(own, 0 if ends else embeds + (not layout.recompute)))
            steady = peaks.beside([*waiting, *held], peaks.peak(engine, own, own.plan.forward))
            yield "forward", *peaks.largest([begun(placed, own, buffers), steady])
        output = own.lines(handed_on(own, not ends))
        backward.append(peaks.beside([*waiting, *output], peaks.peak(engine, own, own.backward())))
        if not turn.accumulates and (copied := engine.copying()):
            backward.append(("embedding's gradient: copy", [*waiting, *output, *copied]))
    left = own.lines([*handed_on(own, (not embeds) + (not ends)), *layout.over("next")])
    backward.append(("reduction", [*buffers, *left, *placed.engine.finishing()]))
    yield "backward", *peaks.largest(backward)
    yield "step", *peaks.beside(buffers, peaks.largest(placed.engine.stepping()))


def begun(placed: Placed, own: Step, buffers: list[Line]) -> tuple[str, list[Line]]:
    """The first micro batch in the last layer, whose weights the engine may have to gather."""
    layout = own.plan.layout
    stop = max(layout.stack.stops)
    gathered = first(placed.engine).at(Where("gather", stop.layer, False))
    return "first micro-batch: gather", [*buffers, *own.lines(layout.below(stop, "forward")), *gathered]


def first(engine: TrainingEngine) -> TrainingEngine:
    """The engine as it is before any gradient is kept."""
    return replace(engine, replica=replace(engine.replica, micro_batches=1))  # type: ignore[type-var]


def received(own: Step, micro: int) -> list[Part]:
    """Receive buffers for the inputs of every micro batch, and for the gradients of their outputs."""
    stack = own.plan.layout.stack
    neighbours = (not stack.embeds) + (not stack.ends)
    return [Part("communication", stack.residual, "parallelism#stages", micro * neighbours)]


def ahead(own: Step, waiting: int) -> list[Part]:
    """Activations that the layers keep for micro batches whose backward has not begun."""
    return [part._replace(times=part.times * waiting) for part in own.plan.layout.layers()] if waiting else []


def rotated(run: Run) -> Part:
    """Cosines and sines of a micro batch's positions, which all its layers reference until it has been processed.

    They have the size of one row, whatever the micro batch; for a single micro batch they would be too small to count.
    Ranks that share a sequence each have those of their positions.
    """
    size = Size({}, {"rope·S" if run.arch.mla else "D·S": 2 * run.residual / run.context})
    return Part("activations", amount(size, dimensions(run.arch)), "parallelism#stages")


def handed_on(own: Step, tensors: int) -> list[Part]:
    """Outputs, and the gradient of an input sent last, that the schedule still references."""
    return [Part("communication", own.plan.layout.stack.residual, "parallelism#stages", tensors)] if tensors else []
