"""ZeRO-3 block by block: the blocks that it allocates and frees around each layer, and the stream of each.

Read in DeepSpeed 0.19.8 `runtime/zero/stage3.py`, `partition_parameters.py`, `parameter_offload.py` and
`runtime/comm/coalesced_collectives.py`. Parameters are gathered in a stream of their own, and gradients, which are
copied into a bucket as soon as they are made, are reduced in another; PyTorch's allocator gives the freed blocks of a
stream to no other. What the host frees while another stream works on it counts as free at once: where the kernels take
less time than the hooks that DeepSpeed runs between them, the device waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from calc.replay.allocator import NO_BLOCK, Allocator, Block, Process, asked
from calc.replay.blocks import Blocks
from calc.replay.zero3_partitions import Partitioned

ROOT = -1  # the number, among the layers, of what lies outside them

Taken = list[Block]


class Partitions:
    """A model's partitioned parameters on one rank, `heap` being the allocator of the stream that computes."""

    def __init__(self, m: Blocks, heap: Allocator) -> None:
        """Loads the parameters one by one or all at once, each whole before it is cut, and builds the optimizer."""
        assert isinstance(m.partitioned, Partitioned)
        self.model, self.layers, self.heap = m.partitioned, len(m.layers), heap
        self.gathers, self.reduces = heap.beside(), heap.beside()
        self.gathered: dict[int, Block] = {}  # by the slots of `calc.replay.zero3_fetches`
        self.learnt = False  # the order of the modules is known
        self.waiting = NO_BLOCK  # a gradient that is too large for the bucket, until the next one is there
        parts, built = Taken(), iter(heap.take_all(self.model.whole) if self.model.built_whole else ())
        for whole, part in zip(self.model.whole, self.model.parts, strict=True):
            given = next(built, NO_BLOCK) or heap.take(whole)
            parts.append(heap.take(part))
            heap.give(given)
        if self.model.groups:
            self._build(parts)

    def _build(self, parts: Taken) -> None:
        """Makes the trained parts one buffer, by way of the host, then the optimizer's weights and all buffers.

        `_create_fp16_partitions_with_defragmentation`, `_create_fp32_partitions`, `initialize_optimizer_states`,
        `_setup_for_real_optimizer` and, which gathers each trained parameter, `create_reduce_and_remove_grad_hooks`.
        """
        m, heap = self.model, self.heap
        heap.give_all([part for part, trained in zip(parts, m.trained, strict=True) if trained])
        heap.process.release()
        heap.take(sum(m.groups) * m.weight_bytes)
        if not m.offload:
            for group in m.groups:
                converted = heap.take(group * m.master_bytes)
                heap.take(group * m.master_bytes)
                heap.give(converted)
            heap.give(heap.take(max(m.groups) * m.master_bytes))
        heap.take(m.bucket)
        if not m.offload:
            heap.take(sum(m.groups) * m.grad_bytes)
        for whole in [whole for whole, trained in zip(m.whole, m.trained, strict=True) if trained]:
            heap.give(heap.take(whole))

    def copy(self, process: Process) -> Partitions:
        """A copy of the partitions, in a copy of their process."""
        other, streams = copy(self), self.heap.process.streams
        other.heap, other.gathers, other.reduces = (
            process.streams[streams.index(stream)] for stream in (self.heap, self.gathers, self.reduces)
        )
        other.gathered = self.gathered.copy()
        return other

    @property
    def state(self) -> tuple[object, ...]:
        """All blocks that are held, and whether the order of the modules is known."""
        return self.gathered.copy(), self.learnt, self.waiting

    def _at(self, place: int) -> None:
        """Gathers and releases what the modules at a place of the pass do."""
        self.gathers.play((self.model.later if self.learnt else self.model.first)[place], self.gathered)

    def begin(self) -> None:
        """Begins a forward, which a model that is not trained ends in: what is left of the pass before is released."""
        self._clear()
        self._at(0)

    def _clear(self) -> None:
        self.gathers.give_all(self.gathered.values())
        self.gathered = {}

    def enter(self, layer: int) -> None:
        """Begins a layer's forward."""
        self._at(1 + layer)

    def leave(self, layer: int) -> None:
        """Ends a layer's forward, at whose beginning everything has come and gone."""

    def end(self) -> None:
        """Runs the modules after the layers."""
        self._at(1 + self.layers)
        self.learnt |= not self.model.groups

    def turn(self) -> None:
        """Begins backward: with the modules after the layers."""
        self._at(2 + self.layers)

    def reenter(self, layer: int) -> None:
        """Begins a layer's backward, for which it may run again."""
        self._at(2 + 2 * self.layers - layer)

    def arrive(self, gradient: Block, size: int) -> None:
        """A gradient of `size` bytes has been made: it leaves for the bucket if it fits, once the last has left."""
        self.heap.give(self.waiting)
        self.waiting = gradient if size > self.model.bucket else NO_BLOCK
        if not self.waiting:
            self.heap.give(gradient)

    def reduce(self, layer: int, gradients: Taken, *, adding: bool) -> None:
        """Ends a layer's backward, or the model's: buckets that are full are reduced."""
        if layer == ROOT:
            self._at(3 + 2 * self.layers)
        self.reduces.play(self.model.reductions[ROOT if layer == ROOT else self.layers - 1 - layer], {})

    def wait(self) -> None:
        """Ends backward: the embedding, whose backward ends no module, is released (`release_backward_leftovers`)."""
        self._clear()
        self.learnt = True
        self.heap.give(self.waiting)
        self.waiting = NO_BLOCK

    def zero(self) -> None:
        """Frees no gradients: their buffer stays."""

    def step(self, states: Sequence[Sequence[int]], passing: Sequence[int], *, first: bool) -> None:
        """Runs the optimizer over one sub-group after another, of flat fp32 gradients (`step`).

        `states` has the blocks of each one's states, which the `first` step makes, `passing` what its step takes.
        An optimizer on the host takes nothing here: what it copies back it casts there.
        """
        m, heap = self.model, self.heap
        if m.offload:
            return
        heap.play([step for n in m.norms for step in ((0, asked(n)), (0, 0))], {})
        for group, own, each in zip(m.groups, states, passing, strict=True):
            flat = heap.take(group * m.grad_bytes)
            if m.grad_bytes != m.master_bytes:
                low, flat = flat, heap.take(group * m.master_bytes)
                heap.give(low)
            if first:
                heap.take_all(own)
            if each:
                heap.give(heap.take(each))
            heap.give(flat)
