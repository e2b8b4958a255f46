"""ZeRO-1 and 2 block by block: the flat buffer of weights, the bucket, and gradients of this rank's partition.

Read in DeepSpeed 0.14.0 and 0.19.8 `runtime/zero/stage_1_and_2.py`. Unless stage 2 reduces gradients beside backward
(`overlap_comm`), all of it is in the stream that computes. Then there are two buckets, which are filled in turn; copies
for the reduction and this rank's gradients are made in a stream of its own (`average_tensor`, `reduce_ipg_grads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from calc.engines.zero import B
from calc.replay.allocator import NO_BLOCK, Allocator, Block, Process
from calc.replay.blocks import Blocks, Flattened

MASTER = 4  # bytes an element of the optimizer's weights and gradients


class Partition:
    """A model's trained parameters on one rank, `heap` being the allocator of the stream that computes."""

    def __init__(self, m: Blocks, heap: Allocator) -> None:
        """Loads the parameters one after another, joins them, and builds the optimizer."""
        assert isinstance(m.partitioned, Flattened)
        self.model, self.heap = m.partitioned, heap
        self.reduces = heap.beside() if self.model.overlaps else heap
        self.buckets: list[Block] = []
        self.filled = self.done = 0  # elements in the bucket, and of all gradients of this backward
        self.waiting = NO_BLOCK  # a gradient that is too large for the bucket, until it is reduced
        self.whole: list[tuple[Block, int]] = []  # gradients that are reduced before the step, with their bytes
        self.adding = False  # they are there, of the micro batches before
        self.kept = NO_BLOCK  # this rank's gradients
        self.earlier = NO_BLOCK  # their sum over the micro batches before
        self._build()

    def _build(self) -> None:
        """Joins the weights, on the GPU if a second copy has room and else on the host, and makes fp32 ones.

        The first parameters stay in the cache (`__init__`, `initialize_optimizer_states`).
        """
        m, heap = self.model, self.heap
        whole = heap.take_all(m.whole)
        heap.process.release()
        on_host = not m.on_gpu or heap.process.lacks(m.elements * B)
        if on_host:
            heap.give_all(whole)
            heap.process.release()
        heap.take(m.elements * B)
        if not on_host:
            heap.give_all(whole)
        low = heap.take(m.share * B)
        heap.take(m.share * MASTER)
        heap.give(low)
        heap.give(heap.take(m.share * MASTER))

    def copy(self, process: Process) -> Partition:
        """A copy of the partition, in a copy of its process."""
        other = copy(self)
        streams = self.heap.process.streams
        other.heap, other.reduces = (process.streams[streams.index(own)] for own in (self.heap, self.reduces))
        other.whole, other.buckets = self.whole.copy(), self.buckets.copy()
        return other

    @property
    def state(self) -> tuple[object, ...]:
        """All blocks that are held."""
        own = self.waiting, self.kept, self.earlier
        return *own, *self.buckets, *self.whole, self.filled, self.done, self.adding

    def begin(self) -> None:
        """Begins a forward: weights are there."""

    def enter(self, layer: int) -> None:
        """Begins a layer's forward."""

    def leave(self, layer: int) -> None:
        """Ends a layer's forward."""

    def end(self) -> None:
        """Ends the model's forward."""

    def turn(self) -> None:
        """Begins backward: releases before `LAZY_BUCKET` make the bucket now."""
        if not self.model.lazy:
            self._open()

    def reenter(self, layer: int) -> None:
        """Begins a layer's backward."""

    def _open(self) -> None:
        if not self.buckets:
            self.buckets = self.heap.take_all([self.model.bucket * B] * (2 if self.model.overlaps else 1))

    def arrive(self, gradient: Block, size: int) -> None:
        """A gradient of `size` bytes has been made: it moves to the bucket, which is reduced first if it is full.

        Stage 1 keeps all gradients until backward has ended, and adds to them
        (`reduce_independent_p_g_buckets_and_remove_grads`, `setup_buckets`).
        """
        self._open()
        if self.model.stage == 2:
            self._fill(gradient, size // B)
        elif self.adding:
            self.heap.give(gradient)
        else:
            self.whole.append((gradient, size))

    def _fill(self, gradient: Block, elements: int) -> None:
        m = self.model
        if self.filled + elements > m.bucket:
            self._reduce()
        if elements > m.bucket:
            self.waiting = gradient
        else:
            self.heap.give(gradient)
        self.filled += elements
        self.done += elements

    def _reduce(self) -> None:
        """Reduces what is in the bucket, in a copy if several ranks have parts of it, and keeps this rank's part.

        See `average_tensor`, `allreduce_bucket` and `copy_grads_in_partition`.
        """
        m, reduces = self.model, self.reduces
        if not self.filled:
            return
        # backward makes the gradients of the last parameters first
        first = self.done - self.filled if m.stage == 1 else m.elements - self.done
        if first // m.share != (first + self.filled - 1) // m.share:
            reduces.give(reduces.take(self.filled * B))
        self.kept = self.kept or reduces.take(m.touched * B)
        if self.waiting:
            self.heap.give(self.waiting)
            self.waiting = NO_BLOCK
        self.filled = 0

    def reduce(self, layer: int, gradients: list[Block], *, adding: bool) -> None:
        """Ends a layer's backward, or the model's: gradients have left one by one."""

    def wait(self) -> None:
        """Ends backward: stage 2 reduces the rest (`independent_gradient_partition_epilogue`)."""
        self.adding = True
        if self.model.stage == 2:
            self._end()

    def _end(self) -> None:
        """Reduces the rest, frees the buckets, and adds this rank's gradients to those of earlier micro batches."""
        self._reduce()
        self.heap.give_all(self.buckets)
        self.buckets, self.done = [], 0
        if self.earlier:
            self.reduces.give(self.kept)
        else:
            self.earlier = self.kept
        self.kept = NO_BLOCK

    def zero(self) -> None:
        """Frees no gradients: the step has."""

    def step(self, states: Sequence[Sequence[int]], passing: Sequence[int], *, first: bool) -> None:
        """Runs the optimizer over this rank's flat fp32 gradients (`step`).

        `states` has the blocks of its states, which the `first` step makes, `passing` what its step takes.
        """
        m, heap = self.model, self.heap
        if m.stage == 1:
            # the first parameter's gradient, which was made last, comes first here (`reduce_gradients`)
            for gradient, size in reversed(self.whole):
                self._fill(gradient, size // B)
            self.whole, self.adding = [], False
            self._end()
        heap.give(heap.take(m.norm))
        low = heap.take(m.share * B)
        flat = heap.take(m.share * MASTER)
        heap.give(low)
        self.reduces.give(self.earlier)
        self.earlier = NO_BLOCK
        if first:
            heap.take_all([size for own in states for size in own])
        for each in passing:
            if each:
                heap.give(heap.take(each))
        heap.give(flat)
