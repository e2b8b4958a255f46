"""FSDP 2 block by block: the blocks that it allocates and frees around each layer, and the stream of each.

Read in torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_{init,param,param_group,collectives,state}.py`. Gathers fill
buffers in one stream of their own and reductions leave their outputs in another; what is copied out of a gather, or
copied in to be reduced, belongs to the stream that computes. PyTorch's allocator gives the freed blocks of a stream to
no other.
"""

from __future__ import annotations

from copy import copy

from calc.replay.allocator import NO_BLOCK, Allocator, Block, Process
from calc.replay.blocks import Blocks, Unit

Taken = list[Block]


class Shards:
    """A model's units on one rank, `heap` being the allocator of the stream that computes."""

    def __init__(self, m: Blocks, heap: Allocator) -> None:
        """Loads the units one after another, each whole before it is sharded."""
        self.ends = m.ends
        self.layers, self.root = m.units[: -2 if m.ends else -1], m.units[-1]
        self.embedding = m.units[len(self.layers)]  # the root, unless the head's unit is another
        self.heap, self.gathers, self.reduces = heap, heap.beside(), heap.beside()
        self.buffers: Taken = []  # buffers of gathers, the oldest first
        self.copied: dict[int, Taken] = {}  # what is gathered, by layer; -1 is the root or the head, -2 the embedding
        self.reducing = NO_BLOCK  # the input of the last reduction
        self.reduced: Taken = []  # this rank's gradients
        for unit in m.units:
            whole = heap.take_all(unit.whole)
            heap.take_all(unit.shards)
            heap.give_all(whole)

    def copy(self, process: Process) -> Shards:
        """A copy of the shards, in a copy of their process."""
        other, streams = copy(self), self.heap.process.streams
        other.heap, other.gathers, other.reduces = (
            process.streams[streams.index(stream)] for stream in (self.heap, self.gathers, self.reduces)
        )
        other.buffers, other.copied, other.reduced = self.buffers.copy(), self.copied.copy(), self.reduced.copy()
        return other

    @property
    def state(self) -> tuple[object, ...]:
        """All blocks that are held."""
        return self.buffers.copy(), self.copied.copy(), self.reducing, self.reduced.copy()

    def _gather(self, unit: Unit) -> None:
        """Gathers a unit into a buffer; the gather's input is freed at once."""
        cast = self.gathers.take(unit.cast) if unit.cast else NO_BLOCK
        self.buffers.append(self.gathers.take(unit.buffer))
        if cast:
            self.gathers.give(cast)

    def _drop(self) -> None:
        """Frees the oldest buffer."""
        self.gathers.give(self.buffers.pop(0))

    def _outer(self, key: int, unit: Unit) -> None:
        """Gathers a unit outside the layers, unless it has stayed gathered."""
        if key not in self.copied:
            self._gather(unit)
            self.copied[key] = self.heap.take_all(unit.gathered)

    def begin(self) -> None:
        """Begins the model's forward: gathers the root FSDP unit, or the embedding's."""
        if self.ends:
            self._outer(-2, self.embedding)
        else:
            self._outer(-1, self.root)

    def embedded(self) -> None:
        """Ends the forward of an embedding that is a unit."""
        self.leave(-2)

    def enter_head(self) -> None:
        """Begins the forward of a final norm and a head that are a unit."""
        self._outer(-1, self.root)
        if len(self.buffers) > 1:
            self._drop()

    def enter(self, layer: int) -> None:
        """Begins a layer's forward; the buffer of the gather before is freed once this one is copied out."""
        self._gather(self.layers[layer])
        self.copied[layer] = self.heap.take_all(self.layers[layer].gathered)
        if len(self.buffers) > 1:
            self._drop()

    def leave(self, layer: int) -> None:
        """Ends a layer's forward or backward: frees its whole parameters."""
        self.heap.give_all(self.copied.pop(layer))

    def end(self) -> None:
        """Ends the model's forward; the root FSDP unit stays gathered, or the head's unless it is freed."""
        if self.buffers:
            self._drop()
        if self.ends == "freed":
            self.leave(-1)

    def turn(self) -> None:
        """Begins backward: the last layer is gathered ahead."""
        if self.ends == "freed":
            self._outer(-1, self.root)
            self._drop()
        self._gather(self.layers[-1])

    def reenter(self, layer: int) -> None:
        """Begins a layer's backward: its gather is copied out, and the next one starts."""
        self.copied[layer] = self.heap.take_all(self.layers[layer].gathered)
        self._drop()
        if layer:
            self._gather(self.layers[layer - 1])
        elif self.ends:
            self._gather(self.embedding)

    def reenter_embedding(self) -> None:
        """Begins the backward of an embedding that is a unit, which is gathered though nothing reads it."""
        self.copied[-2] = self.heap.take_all(self.embedding.gathered)
        self._drop()

    def reduce(self, layer: int, gradients: Taken, *, adding: bool) -> None:
        """Ends a unit's backward: joins and reduces its gradients; the input stays until the next reduction.

        `adding`: gradients of earlier micro batches exist, and this one's are added to them.
        """
        unit = self.layers[layer] if layer >= 0 else self.root if layer == -1 else self.embedding
        self.leave(layer)
        self.wait()
        if unit.reducing:
            self.reducing = self.heap.take(unit.reducing)
            # a variable of `foreach_reduce` keeps the gradient of the last parameter until it returns: in the root unit
            # that is the head, whose gradient came first
            last = 1 if layer < 0 else 0
            self.heap.give_all(gradients[last:])
            output = self.reduces.take(unit.reduced)
            self.heap.give_all(gradients[:last])
            if adding:
                self.reduces.give(output)
            else:
                self.reduced.append(output)

    def wait(self) -> None:
        """Waits for the last reduction, and frees its input."""
        if self.reducing:
            self.heap.give(self.reducing)
            self.reducing = NO_BLOCK

    def zero(self) -> None:
        """Frees the gradients."""
        self.reduces.give_all(self.reduced)
        self.reduced = []
