"""The first loss of a process, whose chunks Unsloth counts by the memory that is free then."""

from __future__ import annotations

from calc.base.ledger import Line, total
from calc.base.plan import Path
from calc.catalog.catalog import BEFORE_AMPERE, GPU
from calc.memory import loss_chunks, runtime
from calc.step import peaks
from calc.step.instants import Step
from calc.step.placement import Placed

LATER = ("optimizer_states", "gradients")  # what the first step and the first backward make


def path(placed: Placed, step: Step, gpu: GPU) -> Path:
    """The loss path of a role on this card, for the micro batch of `step`."""
    r = placed.engine.replica
    nvidia = gpu.vendor == "NVIDIA"  # ROCm has no products of 16 bits that return fp32, and takes no tiles
    tiles = nvidia and gpu.architecture not in BEFORE_AMPERE
    card = loss_chunks.Card(gpu.usable_bytes, free(placed, step, gpu), nvidia, tiles)
    head, varying = r.run.head, not placed.s.packing
    logits = loss_chunks.Logits(step.batch.tokens, r.arch.vocab, r.arch.outer, head.compute, head.trained, varying)
    return loss_chunks.settled(r.path, logits, card)


def free(placed: Placed, step: Step, gpu: GPU) -> int:
    """The bytes that the driver has free as the first loss begins, at least one.

    PyTorch keeps the most that it has had: as the model was loaded, or in the layers' first forward.
    """
    engine, layout = placed.engine, step.plan.layout
    there = _first(engine.resident())
    before = [i for i in step.plan.forward if i.where.segment in ("gather", "layer")]
    _, running = peaks.peak(engine, step, before)
    kept = max(
        *[total(lines) for _, lines in engine.loading()],
        total([*there, *_first(running)]),
        total([*there, *step.lines(layout.waiting())]),
    )
    process = runtime.process(gpu.architecture, placed.s.communicators, gpu.linked)
    return max(gpu.usable_bytes - kept - total(process), 1)


def _first(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.component not in LATER]
