"""Layers of one process on several GPUs (Accelerate's `device_map`), of which one computes at a time.

A hook copies what a layer reads from another GPU, and in backward its gradient. The hook of the whole model brings the
outputs to the GPU of the inputs, which has the embedding (accelerate 1.10.0 `hooks.py`, `AlignDevicesHook`,
`io_same_device`), where Accelerate casts them if it trains under autocast (`convert_outputs_to_fp32`).
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.autograd.polynomial import amount
from calc.autograd.tape import of
from calc.base.ledger import Line
from calc.base.plan import Path
from calc.engines.replica import Where
from calc.memory.loss import head_dimensions
from calc.memory.run import Run
from calc.step import peaks, tower
from calc.step.instants import Part, Step
from calc.step.placement import Placed
from calc.step.tower import Seen

STREAMED = ("fused", "cut", "tiled")  # losses that return no logits


def training(placed: Placed, own: Step, seen: Seen | None) -> Iterator[tuple[str, str, list[Line]]]:
    """The peak instant of each phase on one GPU, without resident tensors; each micro batch ends before the next.

    `seen`: the images before a vision tower, which the GPU with the embedding has.
    """
    engine, layout = placed.engine, own.plan.layout
    received = [*copied(own, backward=False), *tower.beside(own, seen, trained=placed.trained)]
    forward = [peaks.beside(received, peaks.peak(engine, own, own.plan.forward))]
    if seen:
        forward.append(seen.forward(engine, grad=placed.trained))
    if logits := returned(engine.replica.run, placed.role.path, own):
        there = engine.at(Where("waiting", layout.stack.layers, False))
        forward.append(("logits arrive", [*received, *there, *own.lines([*layout.layers(), logits])]))
    yield "forward", *peaks.largest(forward)
    yield "backward", *tower.backward(engine, own, copied(own, backward=True), seen)
    yield "step", *peaks.beside(own.lines(layout.over("step")), peaks.largest(engine.stepping()))


def copied(own: Step, *, backward: bool) -> list[Line]:
    """The copies of what other GPUs hand on: the input of the lowest layer here, and the gradient of the highest."""
    stack = own.plan.layout.stack
    handed = (not stack.embeds) + (backward and not stack.ends)
    return own.lines([Part("communication", stack.residual, "parallelism#devices", handed)]) if handed else []


def returned(run: Run, path: Path, own: Step) -> Part | None:
    """The model's logits as they arrive on the GPU with the embedding, and as they are cast there; None on others."""
    stack = own.plan.layout.stack
    if not stack.embeds or stack.ends or path.kind in STREAMED:
        return None
    each = (4 if path.head_fp32 else run.compute) + (4 if path.outputs_fp32 else 0)
    return Part("logits", amount(of(V=each * path.kept), head_dimensions(run)), "parallelism#devices")
