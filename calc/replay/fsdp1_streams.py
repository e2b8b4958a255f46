"""FSDP 1 block by block: the blocks that it allocates and frees around each layer, and the stream of each.

Read in torch 2.13 `distributed/fsdp/_runtime_utils.py`, `_flat_param.py` and `_limiter_utils.py`. Shards are copied
from the host or cast in one stream, gathered in a second, and gradients are reduced in a third. What the host frees
while another stream works on it is reusable once the host has seen that stream pass: gathered parameters once the
computation that read them is over, gradients once their reduction is. The host runs ahead of the device, but before it
gathers it waits for the computation of the unit before the last that it freed.
"""

from __future__ import annotations

from copy import copy

from calc.replay.allocator import Allocator, Block, Event, Process
from calc.replay.blocks import Blocks, Flat

ROOT = -1  # the root's number among the layers
INFLIGHT = 2  # `_max_num_inflight_all_gathers`

Taken = list[Block]


class Gathers:
    """A model's flat parameters on one rank, `heap` being the allocator of the stream that computes."""

    def __init__(self, m: Blocks, heap: Allocator) -> None:
        """Loads the units from the inside out, each flattened whole before it is cut."""
        assert m.flats
        self.flats, self.heap = m.flats, heap
        self.copies, self.gathers, self.reduces = heap.beside(), heap.beside(), heap.beside()
        self.gathered: dict[int, tuple[Block, int]] = {}  # by layer, with the number of the collective
        self.freed: list[Event] = []  # `_FreeEventQueue`
        self.reduced: Taken = []  # this rank's gradients
        for layer, adapters in zip(self.flats.layers, self.flats.adapters, strict=True):
            for unit in (*adapters, layer):
                self._load(unit)
        self._load(self.flats.root)

    def _load(self, unit: Flat) -> None:
        """Flattens a unit and keeps this rank's part, or sends it to the host (`_init_param_handle_from_params`).

        With `use_orig_params` the parameters are views of the flat one by the time that it is cut.
        """
        whole = self.heap.take_all(unit.whole)
        flat = self.heap.take_all([sum(unit.whole)] if whole else [])
        self.heap.give_all(whole)
        shard = self.heap.take(unit.shard)
        self.heap.give_all(flat)
        if self.flats.offload:
            self.heap.give(shard)

    def copy(self, process: Process) -> Gathers:
        """A copy of the gathers, in a copy of their process."""
        other, streams = copy(self), self.heap.process.streams
        other.heap, other.copies, other.gathers, other.reduces = (
            process.streams[streams.index(stream)] for stream in (self.heap, self.copies, self.gathers, self.reduces)
        )
        other.gathered, other.freed, other.reduced = self.gathered.copy(), self.freed.copy(), self.reduced.copy()
        return other

    @property
    def state(self) -> tuple[object, ...]:
        """All blocks that are held, and how far the host is behind the events and collectives that it may wait for."""
        process = self.heap.process
        gathered = [(unit, block, max(n - process.met, 0)) for unit, (block, n) in self.gathered.items()]
        freed = [(max(e.number - process.seen.number, 0), max(e.collective - process.met, 0)) for e in self.freed]
        return gathered, freed, self.reduced.copy()

    def _unshard(self, unit: Flat) -> tuple[Block, int]:
        """Gathers a unit; the block, and the number of the collective (`_unshard`)."""
        process = self.heap.process
        sent = self._sent(unit)
        self._limit()
        block = self.gathers.take(unit.gathered)
        process.issued += 1
        for each in sent:
            self.copies.give_later(each, collective=process.issued)
        return block, process.issued

    def _sent(self, unit: Flat) -> Taken:
        """The block that a rank sends if that is not its shard as it lies: a cast of it, or its copy from the host."""
        if not unit.cast:
            return [self.copies.take(unit.shard)] if self.flats.offload else []
        cast = self.copies.take(unit.cast)
        if self.flats.offload:
            self.copies.give(self.copies.take(unit.shard))
        return [cast]

    def _limit(self) -> None:
        """Waits for the oldest of the units that were freed, once there are two (`limit_all_gathers`)."""
        if len(self.freed) >= INFLIGHT:
            self.heap.process.wait(self.freed.pop(0))

    def _reshard(self, gathered: tuple[Block, int]) -> None:
        """Frees a gathered unit, on which the computation may still work (`_reshard`)."""
        event = self.heap.process.record()
        self.gathers.give_later(gathered[0], event=event.number)
        self.freed.append(event)

    def _await(self, gathered: tuple[Block, int]) -> tuple[Block, int]:
        """Lets the stream that computes wait for a gather."""
        process = self.heap.process
        process.met = max(process.met, gathered[1])
        return gathered

    def _through(self, layer: int) -> None:
        """Gathers and frees the adapters of a layer that are units, one after another."""
        for unit in self.flats.adapters[layer]:
            self._reshard(self._await(self._unshard(unit)))

    def begin(self) -> None:
        """Begins the model's forward: gathers the root, unless it has stayed gathered."""
        if ROOT not in self.gathered:
            self.gathered[ROOT] = self._await(self._unshard(self.flats.root))

    def enter(self, layer: int) -> None:
        """Begins a layer's forward."""
        self.gathered[layer] = self._await(self._unshard(self.flats.layers[layer]))
        self._through(layer)

    def leave(self, layer: int) -> None:
        """Ends a layer's forward or backward: frees its parameters."""
        self._reshard(self.gathered.pop(layer))

    def end(self) -> None:
        """Ends the model's forward; the root stays gathered."""

    def turn(self) -> None:
        """Begins backward: the root's hook, which finds it gathered, gathers the last layer ahead."""
        self._limit()
        if self.flats.ahead:
            self._fetch(len(self.flats.layers) - 1)

    def _fetch(self, layer: int) -> None:
        """Gathers a layer ahead of its backward, if there is one."""
        if layer >= 0:
            self.gathered[layer] = self._unshard(self.flats.layers[layer])

    def reenter(self, layer: int) -> None:
        """Begins a layer's backward.

        The hook gathers the unit before it in the order in which forward ended: the layer below, or the layer's own
        adapters, of which the last gathers the layer below. Reentrant checkpointing has run the forward before, which
        gathers and frees the layer, too.
        """
        if not self.flats.ahead:
            self.enter(layer)
            self.leave(layer)
            self.gathered[layer] = self._unshard(self.flats.layers[layer])
        self._await(self.gathered[layer])
        if self.flats.ahead and not self.flats.adapters[layer]:
            self._fetch(layer - 1)

    def reduce(self, layer: int, gradients: Taken, *, adding: bool) -> None:
        """Ends a unit's backward: its parameters are freed, its gradients joined and reduced.

        `adding`: gradients of earlier micro batches exist, and this one's are added to them.
        """
        adapters = self.flats.adapters[layer] if layer >= 0 else ()
        if adapters:
            self._reduce_adapters(layer, gradients, adding=adding)
        unit = self.flats.layers[layer] if layer >= 0 else self.flats.root
        if unit.joined:
            joined = self.heap.take(unit.joined)
            self.heap.give_all(gradients)
            self.leave(layer)
            self._reduce(unit, joined, adding=adding)
        elif layer in self.gathered:
            self.leave(layer)

    def _reduce_adapters(self, layer: int, gradients: Taken, *, adding: bool) -> None:
        """Reduces the gradients of a layer's adapters, each a unit; the last one fetches the layer below."""
        for unit, gradient in zip(reversed(self.flats.adapters[layer]), gradients, strict=True):
            gathered = self._await(self._unshard(unit))
            joined = self.heap.take(unit.joined)
            self.heap.give(gradient)
            self._reshard(gathered)
            self._reduce(unit, joined, adding=adding)
        if self.flats.ahead:
            self._fetch(layer - 1)

    def _reduce(self, unit: Flat, gradient: Block, *, adding: bool) -> None:
        """Reduces a unit's whole gradient, which the stream that computes may use again when that is over."""
        process, reduces = self.heap.process, self.reduces
        cast = reduces.take_all([unit.reducing] if unit.reducing else [])
        output = reduces.take(unit.reduced)
        process.issued += 1
        if unit.kept:
            low, output = output, reduces.take(unit.kept)
            reduces.give(low)
        if adding and not self.flats.offload:
            reduces.give(output)
        else:
            self.reduced.append(output)
        reduces.give_all(cast)
        self.heap.give_later(gradient, collective=process.issued)

    def wait(self) -> None:
        """Ends backward: the stream that computes waits for all reductions, and the host, which reads the loss, for it.

        What is reduced has been copied to the host by then, if it belongs there (`_post_backward_final_callback`).
        """
        process = self.heap.process
        process.met = process.issued
        process.wait(process.record())
        if self.flats.offload:
            self.zero()

    def zero(self) -> None:
        """Frees the gradients."""
        self.reduces.give_all(self.reduced)
        self.reduced = []
