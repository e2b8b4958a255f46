"""FSDP 1 around each layer, by hand: what comes and goes in which stream, and what the host waits for.

Sizes are MiB, of fp32 on four ranks: the lowest layer's part is 12; it is cast to 6 of bf16 and gathered to 24. Its
gradients are joined to 24, cast to 48 and reduced to 12. The next layers' parts are 16 and 20, the root's is 40. A
block that is freed while another stream works on it is written `~`; it becomes free when the host has seen that stream
pass. Names of functions are those of torch 2.13 `distributed/fsdp`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from test_replay import MODEL, outright
from written import Written

from calc.autograd.alloc_trace import Script
from calc.base.units import MiB
from calc.replay import replay
from calc.replay.allocator import Allocator, Block, length
from calc.replay.blocks import Blocks, Flat, Flats, Piece
from calc.replay.fsdp1_streams import Gathers


def unit(part: int) -> Flat:
    """A flat parameter of one tensor, `part` MiB of fp32 on each of four ranks."""
    size = part * MiB
    return Flat((4 * size,), size, size // 2, 2 * size, 2 * size, 4 * size, size, 0)


LAYERS, ROOT = (unit(12), unit(16), unit(20)), unit(40)
FLATS = Flats(LAYERS, ((), (), ()), ROOT, offload=False, ahead=True)
FROZEN = {"joined": 0, "reducing": 0, "reduced": 0}


def model(**fields: object) -> Blocks:
    """MODEL in the flat parameters FLATS, with other fields."""
    return replace(MODEL, weights=(), flats=FLATS._replace(**fields))  # type: ignore[arg-type]


class Watched(Written):
    """Gathers whose allocators write down what they take, `+`, give back, `-`, and give back later, `~`, in MiB."""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.heap = self.watch(Allocator(), "")
        self.all = Gathers(model(**fields), self.heap)
        self.loaded = self.seen()
        for name in ("copies", "gathers", "reduces"):
            self.watch(getattr(self.all, name), f"{name} ")

    def watch(self, heap: Allocator, stream: str) -> Allocator:
        take, give, later = heap.take_all, heap.give_all, heap.give_later

        def taken(sizes: Iterable[int]) -> list[Block]:
            self.log += [f"{stream}+{each // MiB}" for each in sizes]
            return take(sizes)

        def given(blocks: Iterable[Block]) -> None:
            self.log += [f"{stream}-{length(each) // MiB}" for each in blocks]
            give(blocks)

        def given_later(block: Block, **after: int) -> None:
            self.log.append(f"{stream}~{length(block) // MiB}")
            later(block, **after)

        heap.take_all, heap.give_all, heap.give_later = taken, given, given_later  # type: ignore[method-assign]
        heap.take = lambda size: taken((size,))[0]  # type: ignore[method-assign]
        heap.give = lambda block: given((block,))  # type: ignore[method-assign]
        return heap

    def forward(self) -> None:
        """A whole forward, of which nothing is written."""
        self.all.begin()
        for layer in (0, 1, 2):
            self.all.enter(layer)
            self.all.leave(layer)
        self.all.end()
        self.seen()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_unit_is_flattened_before_it_is_cut(watched: Watched) -> None:
    """Parameters and their concatenation; the parameters have become views of it by the time of `shard`."""
    assert watched.loaded[:5] == ["+48", "+48", "-48", "+12", "-48"]
    assert watched.loaded[-5:] == ["+160", "+160", "-160", "+40", "-160"]
    offloaded = Watched(offload=True)
    assert offloaded.loaded[:6] == ["+48", "+48", "-48", "+12", "-48", "-12"]
    assert offloaded.heap.process.allocated == 0


def test_a_forward_gathers_into_two_blocks_by_turns(watched: Watched) -> None:
    """`_use_low_precision_shard` casts in a stream of its own. The rate limiter waits for the unit before the last that
    was freed, so that the third gather finds the first one's block, and the second's is still being read."""
    gathers, process = watched.all, watched.heap.process
    gathers.begin()
    assert watched.seen() == ["copies +20", "gathers +80", "copies ~20"]
    gathers.enter(0)
    assert watched.seen() == ["copies +6", "gathers +24", "copies ~6"]
    gathers.leave(0)
    gathers.enter(1)
    assert watched.seen() == ["gathers ~24", "copies +8", "gathers +32", "copies ~8"]
    gathers.leave(1)
    assert process.seen.number == 0
    gathers.enter(2)
    # the first layer is over, and with it all gathers before it; so its block and the casts of two gathers are free
    # the first layer is over, and with it all gathers before it: its block is free, and so are two casts
    assert sorted(watched.seen()) == sorted(
        ["gathers ~32", "copies -20", "copies -6", "gathers -24", "copies +10", "gathers +40", "copies ~10"]
    )
    assert process.seen == (1, 2)
    gathers.leave(2)
    gathers.end()
    gathers.begin()  # the root has stayed
    assert watched.seen() == ["gathers ~40"]


def test_a_freed_block_serves_nobody_until_the_host_has_seen_the_other_stream_pass() -> None:
    """It counts no more as allocated, though: `free` and `insert_events` of the allocator."""
    heap = Allocator()
    process, other = heap.process, heap.beside()
    block = other.take(30 * MiB)
    event = process.record()
    other.give_later(block, event=event.number)
    assert (process.allocated, process.reserved) == (0, 30 * MiB)
    again = other.take(30 * MiB)
    assert process.reserved == 60 * MiB
    process.wait(event)
    assert process.allocated == 30 * MiB
    assert other.take(30 * MiB) == block and process.reserved == 60 * MiB
    assert again != block


def test_a_collective_is_over_once_the_host_has_seen_a_wait_for_a_later_one() -> None:
    heap = Allocator()
    process = heap.process
    process.issued = 2
    heap.give_later(heap.take(30 * MiB), collective=2)
    process.met = 1
    process.wait(process.record())
    heap.take(30 * MiB)
    assert process.reserved == 60 * MiB
    process.met = 2
    process.wait(process.record())
    heap.take(30 * MiB)
    assert process.reserved == 60 * MiB


def test_memory_that_is_short_waits_for_everything() -> None:
    """`release_cached_blocks` synchronises first, so that what is awaited goes back to the driver, too."""
    heap = Allocator(limit=100 * MiB)
    other = heap.beside()
    other.give_later(other.take(60 * MiB), event=7)
    heap.give_later(heap.take(MiB // 2), event=7)
    heap.take(80 * MiB)
    assert heap.process.reserved == (80 + 2) * MiB
    assert heap.process.allocated == 80 * MiB


def test_a_backward_gathers_the_layer_below_and_reduces_in_a_stream_of_its_own(watched: Watched) -> None:
    watched.forward()
    gathers, heap = watched.all, watched.heap
    gathers.turn()
    assert watched.seen()[-3:] == ["copies +10", "gathers +40", "copies ~10"]
    gathers.reenter(2)
    assert watched.seen()[-3:] == ["copies +8", "gathers +32", "copies ~8"]
    gathers.reduce(2, [heap.take(30 * MiB), heap.take(10 * MiB)], adding=False)
    # joined, freed, cast, reduced; what was joined is read by the reduction
    assert watched.seen() == [
        "+30", "+10", "+40", "-30", "-10", "gathers ~40", "reduces +80", "reduces +20", "reduces -80", "~40",
    ]  # fmt: skip
    gathers.reenter(1)
    assert [each for each in watched.seen() if each[0] == "g"][-1] == "gathers +24"
    gathers.reduce(1, [heap.take(32 * MiB)], adding=True)
    # what the micro batches before left is there: this one's is added and goes
    assert watched.seen()[-5:] == ["reduces +64", "reduces +16", "reduces -16", "reduces -64", "~32"]
    gathers.reenter(0)
    assert not [each for each in watched.seen() if "gathers +" in each]  # nothing lies below
    gathers.reduce(0, [heap.take(24 * MiB)], adding=False)
    gathers.reduce(-1, [heap.take(80 * MiB)], adding=False)
    assert "gathers ~80" in watched.seen()
    gathers.wait()
    gathers.zero()
    shards = 12 + 16 + 20 + 40
    assert heap.process.allocated == shards * MiB
    assert not any(stream.awaited for stream in heap.process.streams)


def test_reentrant_checkpointing_gathers_a_layer_twice_and_none_ahead() -> None:
    """Its first forward made no gradient, so that no output has the hook; its second one gathers and frees as such."""
    watched = Watched(ahead=False)
    watched.forward()
    watched.all.turn()
    assert not [each for each in watched.seen() if "+" in each]
    watched.all.reenter(2)
    twice = [each for each in watched.seen() if each in ("gathers +40", "gathers ~40")]
    assert twice == ["gathers +40", "gathers ~40", "gathers +40"]


def test_offloaded_shards_come_from_the_host_and_gradients_leave_at_the_end() -> None:
    """`_use_low_precision_shard`: the cast, and beside it the whole copy; `_saved_grad_shard` stays to the end."""
    watched = Watched(offload=True)
    watched.all.begin()
    assert watched.seen() == ["copies +20", "copies +40", "copies -40", "gathers +80", "copies ~20"]
    watched.all.gathered[0] = watched.all._unshard(LAYERS[0]._replace(cast=0))
    assert watched.seen() == ["copies +12", "gathers +24", "copies ~12"]
    watched.all.reduce(0, [watched.heap.take(24 * MiB)], adding=True)
    assert "reduces -12" not in watched.seen()
    watched.all.wait()
    assert "reduces -12" in watched.seen()


def test_adapters_that_are_units_are_gathered_and_reduced_one_by_one() -> None:
    """The layer is frozen: it is freed when the gradient of its input is there; its last adapter fetches the next."""
    layers = tuple(layer._replace(**FROZEN) for layer in LAYERS)
    adapter = unit(2)._replace(cast=0, reducing=0, gathered=8 * MiB, joined=8 * MiB)
    adapters = ((adapter, adapter),) * 3
    watched = Watched(layers=layers, adapters=adapters, root=ROOT._replace(**FROZEN))
    watched.forward()
    watched.all.turn()
    watched.all.reenter(2)
    assert "gathers +32" not in watched.seen()
    watched.all.reduce(2, [watched.heap.take(8 * MiB), watched.heap.take(8 * MiB)], adding=False)
    seen = [each for each in watched.seen() if "copies" not in each]
    assert seen.count("reduces +2") == 2
    assert seen.index("gathers +32") > seen.index("reduces +2")
    assert seen[-1] == "gathers ~40"


@pytest.mark.parametrize("fields", [{}, {"ahead": False}, {"offload": True}], ids=str)
def test_a_step_in_flat_parameters_ends_as_it_began(fields: dict[str, bool]) -> None:
    """Beside shards, 12 + 16 + 40, or nothing where they are on the host, there are states, 220, after a step."""
    flats = {"layers": LAYERS[:2], "adapters": ((), ()), **fields}
    r = outright(replay.Act(model(**flats), trained=True, micro_batches=2), None, 0)
    shards = 0 if fields.get("offload") else 12 + 16 + 40
    assert r.heap.process.allocated == (shards + 220) * MiB


def test_inputs_that_are_retained_stay_with_their_gradients_until_backward_ends() -> None:
    """Of two layers, inputs of 20 and their gradients of 20: once the upper one is through its input is still there, 20
    more; after the lower one both inputs and the upper gradient, 60 more. See `calc.memory.run.Run.retains`."""
    forward = Script(((0, 40 * MiB), (1, 20 * MiB)), 1)  # the input stays
    layer = Piece(forward, Script(((2, 20 * MiB), (0, 0)), 2))  # the gradient that comes in belongs to others
    found = []
    for retains in (False, True):
        frozen = tuple(unit._replace(**FROZEN) for unit in LAYERS[:2])
        m = replace(model(layers=frozen, adapters=((), ())), layers=(layer, layer), retains=retains)
        r = replay.Replay(Allocator(), workspace=0)
        r.load(m)
        kept, seen, back = r.forward(m), list[int](), r.back

        def watched(*given: Any, back: Any = back, r: replay.Replay = r, seen: list[int] = seen, **how: bool) -> Block:
            block: Block = back(*given, **how)
            seen.append(r.heap.process.allocated // MiB)
            return block

        r.back = watched  # type: ignore[method-assign]
        r.backward(m, kept)
        found.append([*seen[-2:], r.heap.process.allocated // MiB])
        assert r.retained == []
    assert [more - less for less, more in zip(*found, strict=True)] == [20, 60, 0]
