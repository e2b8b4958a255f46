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
# The indices of units outside the layers: the root, or the head's where the embedding's is another
ROOT, EMBEDDING = -1, -2


class Shards:
    """A model's units on one rank, `heap` being the allocator of the stream that computes."""

    def __init__(self, m: Blocks, heap: Allocator) -> None:
        """Loads the units one after another, each whole before it is sharded."""
        self.ends, layers = m.ends, EMBEDDING if m.ends else ROOT
        self.keeps, self.keeps_last = m.keeps_gathered, m.keeps_last
        self.layers, self.outer = m.units[:layers], m.units[layers:]
        self.heap, self.gathers, self.reduces = heap, heap.beside(), heap.beside()
        self.buffers: Taken = []  # buffers of gathers, the oldest first
        self.copied: dict[int, Taken] = {}  # what is gathered, by the unit's index
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
        self.buffers.append(self.gathers.take(unit.buffer) if unit.buffer else NO_BLOCK)
        if cast:
            self.gathers.give(cast)

    def _drop(self) -> None:
        """Frees the oldest buffer."""
        self.gathers.give(self.buffers.pop(0))

    def _unit(self, index: int) -> Unit:
        """The unit of a layer, or one outside the layers."""
        return self.layers[index] if index >= 0 else self.outer[index]

    def _outside(self, index: int) -> None:
        """Gathers a unit outside the layers, unless it has stayed gathered."""
        if index not in self.copied:
            self._gather(self.outer[index])
            self.copied[index] = self.heap.take_all(self.outer[index].gathered)

    def begin(self) -> None:
        """Begins the model's forward: gathers the root FSDP unit, or the embedding's."""
        self._outside(EMBEDDING if self.ends else ROOT)

    def embedded(self) -> None:
        """Ends the forward of an embedding that is a unit."""
        self.leave(EMBEDDING)

    def enter_head(self) -> None:
        """Begins the forward of a final norm and a head that are a unit."""
        self._outside(ROOT)
        if len(self.buffers) > 1:
            self._drop()

    def enter(self, layer: int) -> None:
        """Begins a layer's forward; the buffer of the gather before is freed once this one is copied out."""
        self._gather(self.layers[layer])
        self.copied[layer] = self.heap.take_all(self.layers[layer].gathered)
        if len(self.buffers) > 1:
            self._drop()

    def leave(self, layer: int) -> None:
        """Ends a layer's forward: frees its whole parameters, unless they stay for its backward."""
        if not (self.keeps or self._stays(layer)):
            self._reshard(layer)

    def _stays(self, layer: int) -> bool:
        """True for the last layer if its parameters stay whole from its forward to its backward."""
        return self.keeps_last and layer == len(self.layers) - 1

    def _reshard(self, layer: int) -> None:
        """Frees a unit's whole parameters."""
        self.heap.give_all(self.copied.pop(layer))

    def end(self) -> None:
        """Ends the model's forward; the root FSDP unit stays gathered, or the head's unless it is freed."""
        if self.buffers:
            self._drop()
        if self.ends == "freed":
            self.leave(ROOT)

    def turn(self) -> None:
        """Begins backward: the last layer is gathered ahead, unless it is there."""
        if self.keeps:
            return
        if self.ends == "freed":
            self._outside(ROOT)
            self._drop()
        if not self.keeps_last:
            self._gather(self.layers[-1])

    def reenter(self, layer: int) -> None:
        """Begins a layer's backward: its gather is copied out, and the next one starts.

        The last is that of an embedding that is a unit, whose backward does not read it. What has stayed is there.
        """
        if self.keeps:
            return
        if not self._stays(layer):
            self.copied[layer] = self.heap.take_all(self._unit(layer).gathered)
            self._drop()
        if layer > 0:
            self._gather(self.layers[layer - 1])
        elif layer == 0 and self.ends:
            self._gather(self.outer[EMBEDDING])

    def reduce(self, layer: int, gradients: Taken, *, adding: bool) -> None:
        """Ends a unit's backward: joins and reduces its gradients; the input stays until the next reduction.

        `adding`: gradients of earlier micro batches exist, and this one's are added to them.
        """
        unit = self._unit(layer)
        self._reshard(layer)
        self.wait()
        if unit.reducing:
            self.reducing = self.heap.take(unit.reducing)
            # a variable of `foreach_reduce` keeps the gradient of the last parameter until it returns: in the root unit
            # that is the head, whose gradient came first
            last = 1 if layer < 0 else 0
            self.heap.give_all(gradients[last:])
            output = self.reduces.take(unit.reduced)
            if unit.kept:  # `_to_dtype_if_needed`
                kept = self.reduces.take(unit.kept)
                self.reduces.give(output)
                output = kept
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
