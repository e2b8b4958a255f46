"""FSDP 2 block by block: what it takes and gives back around each layer, and in which stream.

Read in torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_{init,param,param_group,collectives,state}.py`. Gathers fill
buffers in one stream of their own and reductions leave their outputs in another; what is copied out, and what is put in
to be reduced, is of the stream that computes. PyTorch's allocator lends a stream's freed blocks to no other.
"""

from __future__ import annotations

from copy import copy

from calc.allocator import Allocator, Block, Process
from calc.blocks import Blocks, Unit

Taken = list[Block]


class Shards:
    """A model's units on one rank, `heap` being the allocator of the stream that computes."""

    def __init__(self, m: Blocks, heap: Allocator) -> None:
        """The units arrive one after another, each whole before it is cut."""
        self.layers, self.root = m.units[:-1], m.units[-1]
        self.heap, self.gathers, self.reduces = heap, heap.beside(), heap.beside()
        self.buffers: Taken = []  # of gathers, the oldest first
        self.copied: dict[int, Taken] = {}  # what is gathered, by layer; -1 is the root
        self.reducing: Block = 0  # the input of the last reduction
        self.reduced: Taken = []  # this rank's gradients
        for unit in m.units:
            whole = heap.take_all(unit.whole)
            heap.take_all(unit.shards)
            heap.give_all(whole)

    def copy(self, process: Process) -> Shards:
        """The same in the copy of a process."""
        other, streams = copy(self), self.heap.process.streams
        other.heap, other.gathers, other.reduces = (
            process.streams[streams.index(stream)] for stream in (self.heap, self.gathers, self.reduces)
        )
        other.buffers, other.copied, other.reduced = self.buffers.copy(), self.copied.copy(), self.reduced.copy()
        return other

    @property
    def state(self) -> tuple[object, ...]:
        """The blocks that there are."""
        return self.buffers.copy(), self.copied.copy(), self.reducing, self.reduced.copy()

    def _gather(self, unit: Unit) -> None:
        """A gather fills a buffer; its input is given back at once."""
        cast = self.gathers.take(unit.cast) if unit.cast else 0
        self.buffers.append(self.gathers.take(unit.buffer))
        if cast:
            self.gathers.give(cast)

    def _drop(self) -> None:
        """The oldest buffer is given back."""
        self.gathers.give(self.buffers.pop(0))

    def begin(self) -> None:
        """The model's forward begins: the root is gathered, unless it has stayed."""
        if -1 not in self.copied:
            self._gather(self.root)
            self.copied[-1] = self.heap.take_all(self.root.gathered)

    def enter(self, layer: int) -> None:
        """A layer's forward begins; the buffer of the gather before goes once this one is copied out."""
        self._gather(self.layers[layer])
        self.copied[layer] = self.heap.take_all(self.layers[layer].gathered)
        if len(self.buffers) > 1:
            self._drop()

    def leave(self, layer: int) -> None:
        """A layer has run, forward or backward: its whole parameters end."""
        self.heap.give_all(self.copied.pop(layer))

    def end(self) -> None:
        """The model's forward has ended; the root stays."""
        self._drop()

    def turn(self) -> None:
        """Backward begins: the last layer is gathered ahead."""
        self._gather(self.layers[-1])

    def reenter(self, layer: int) -> None:
        """A layer's backward begins: its gather is copied out, and the next one is under way."""
        self.copied[layer] = self.heap.take_all(self.layers[layer].gathered)
        self._drop()
        if layer:
            self._gather(self.layers[layer - 1])

    def reduce(self, layer: int, gradients: Taken, *, adding: bool) -> None:
        """A unit's backward has ended: its gradients are joined and reduced; the input stays until the next one's.

        `adding`: the gradients of the micro-batches before are there, and this one's are added to them.
        """
        unit = self.layers[layer] if layer >= 0 else self.root
        self.leave(layer)
        self.wait()
        if unit.reducing:
            self.reducing = self.heap.take(unit.reducing)
            # `foreach_reduce` names its last parameter's until it returns: the root's is the head, whose came first
            last = 1 if layer < 0 else 0
            self.heap.give_all(gradients[last:])
            output = self.reduces.take(unit.reduced)
            self.heap.give_all(gradients[:last])
            if adding:
                self.reduces.give(output)
            else:
                self.reduced.append(output)

    def wait(self) -> None:
        """The last reduction has ended, and its input goes."""
        if self.reducing:
            self.heap.give(self.reducing)
            self.reducing = 0

    def zero(self) -> None:
        """The gradients end."""
        self.reduces.give_all(self.reduced)
        self.reduced = []
