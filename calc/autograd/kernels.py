"""The kernels of a tape besides matrix products: the bytes they read and write, and how many there are.

A tape has every tensor that an operation reads, makes, keeps and needs in passing, so the traffic of a piece of a model
follows from the same operations as its memory. `tests/trace/test_operations.py` compares it with what PyTorch's
dispatcher sees, family by family.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from calc.autograd.tape import NOTHING, Course, Op, Size, Tape, Tensor


class Kernels(NamedTuple):
    """One pass over a tape: bytes that kernels other than products read and write, and the number of all kernels.

    `kept`: the tensors that the pass saves for backward, weights among them.
    """

    moved: Size
    number: int
    kept: int = 0


def forward(tape: Tape) -> Kernels:
    """The kernels of forward. A temporary is written by one kernel and read by another."""
    moved, number, kept = NOTHING, 0, 0
    for op in tape.ops:
        kept += len(op.saves) + (op.weight > 0)
        if not op.outs or viewed(op):
            continue
        pieces = temporaries(op.course, op.scratch)
        number += 1 + len(pieces)
        if op.inputs and not op.multiplies:
            moved += sizes(*op.inputs, *op.outs) + sum(pieces, NOTHING) * 2
    return Kernels(moved, number, kept)


def backward(tape: Tape) -> Kernels:
    """The kernels of backward. One that makes a temporary reads the incoming gradient, too, and another reads it.

    The gradients of a tensor that several operations read are added up one by one. A bias gets the sum of what comes
    in; pieces of a tensor that was split have their gradients joined.
    """
    moved, number, readers = NOTHING, 0, Counter[Tensor]()
    for op in tape.ops:
        if not op.outs or not op.outs[0].differentiable:
            continue
        readers.update(t for t in op.inputs if t.differentiable)
        out = op.outs[0]
        grads = [g for g in op.gradients(out).values() if g is not out]
        pieces = temporaries(op.backward_course, op.backward_scratch)
        if viewed(op):
            if len(op.outs) > 1:
                moved += sizes(*op.inputs) * 2
                number += 1
        elif op.multiplies:
            number += bool(grads) + bool(op.weight) + len(pieces)
            if op.flat and op.weight and not op.product:
                moved += out.size
                number += 1
        elif grads or op.weight:
            moved += sizes(out, *dict.fromkeys(op.saves), *grads) + sum(pieces, NOTHING) * 2 + out.size * len(pieces)
            number += len(grads) + bool(op.weight) + 2 * len(pieces)
    for tensor, times in readers.items():
        moved += tensor.size * (3 * (times - 1))
        number += times - 1
    return Kernels(moved, number)


def viewed(op: Op) -> bool:
    """True if the operation moves nothing: its output lies in its input."""
    return bool(op.inputs) and op.outs[0].storage is op.inputs[0].storage


def temporaries(course: Course, scratch: Size) -> list[Size]:
    """The temporaries that an operation allocates; where their order is not told, they count as one."""
    return [step for step in course if isinstance(step, Size)] or [scratch] * bool(scratch)


def sizes(*tensors: Tensor) -> Size:
    """The size of all `tensors` together."""
    return sum([t.size for t in tensors], NOTHING)
