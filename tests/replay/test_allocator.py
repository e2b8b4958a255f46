"""PyTorch's caching allocator in sizes: segments, cutting and joining, and what is given back when none is left.

By hand after c10/cuda/CUDACachingAllocator.cpp of torch 2.13: `get_allocation_size`, `should_split`,
`try_merge_blocks`, `release_cached_blocks`, and of expandable segments `find_expandable_block`, `map_block`,
`unmap_block`.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.base.units import MiB
from calc.replay.allocator import Allocator, Block, Expandable, OutOfMemory, address, length

PAGE = 20 * MiB  # kLargeBuffer


@pytest.mark.parametrize(
    ("size", "segment", "block"),
    [
        (1, 2, 512 / MiB),  # small blocks share segments of 2 MiB, and are multiples of 512 bytes
        (MiB, 2, 1),
        (MiB + 1, 20, 1 + 512 / MiB),  # up to 10 MiB they are cut from 20
        (int(9.5 * MiB), 20, 9.5),
        (10 * MiB, 10, 10),
        (int(11.5 * MiB), 12, 12),  # from there on a segment is a multiple of 2 MiB, and a rest of 1 MiB is not cut off
        (35 * MiB, 36, 36),
        (int(34.9 * MiB) // 512 * 512, 36, int(34.9 * MiB) // 512 * 512 / MiB),
    ],
)
def test_a_first_block_takes_a_segment_by_its_size(size: int, segment: float, block: float) -> None:
    heap = Allocator()
    heap.take(size)
    assert (heap.process.reserved / MiB, heap.process.allocated / MiB) == (segment, block)


def test_small_blocks_take_a_segment_when_the_last_is_full() -> None:
    heap = Allocator()
    blocks = [heap.take(MiB) for _ in range(2)]
    assert heap.process.reserved == 2 * MiB
    blocks.append(heap.take(MiB))
    assert (heap.process.reserved, heap.process.allocated) == (4 * MiB, 3 * MiB)
    for block in blocks:
        heap.give(block)
    heap.take(MiB)
    assert (heap.process.reserved, heap.process.allocated, heap.process.most) == (4 * MiB, MiB, 3 * MiB)


def test_the_smallest_free_block_that_is_large_enough_is_cut() -> None:
    heap = Allocator()
    large, middle, _ = heap.take(60 * MiB), heap.take(40 * MiB), heap.take(30 * MiB)
    heap.give(large)
    heap.give(middle)
    heap.take(34 * MiB)  # of the 40, of which 6 are left
    assert heap.process.reserved == 130 * MiB
    heap.take(60 * MiB)  # is still whole
    heap.take(6 * MiB)
    assert heap.process.reserved == 130 * MiB and heap.process.allocated == 130 * MiB


def test_free_neighbours_become_one_block_again() -> None:
    heap = Allocator()
    whole = heap.take(60 * MiB)
    heap.give(whole)
    parts = [heap.take(20 * MiB) for _ in range(3)]
    for block in (parts[0], parts[2], parts[1]):
        heap.give(block)
    heap.take(60 * MiB)
    assert heap.process.reserved == 60 * MiB


def test_a_block_that_lies_within_a_segment_keeps_it_from_going_back() -> None:
    """Of 100 MiB allowed 62 are free but for a block of 20, and 38 all free: these go back, and 60 do not come."""
    heap = Allocator(limit=100 * MiB)
    first, second = heap.take(62 * MiB), heap.take(38 * MiB)
    heap.give(first)
    heap.take(20 * MiB)
    heap.give(second)
    heap.take(38 * MiB)  # 38 of 38 that are all free, not of what is left of 62
    assert heap.process.reserved == 100 * MiB
    with pytest.raises(OutOfMemory, match=f"tried to allocate {60 * MiB}: of {100 * MiB} allowed {100 * MiB} are"):
        heap.take(60 * MiB)


def test_segments_that_are_all_free_go_back_before_memory_runs_out() -> None:
    heap = Allocator(limit=120 * MiB)
    heap.take(12 * MiB)
    for block in [heap.take(50 * MiB), heap.take(38 * MiB)]:
        heap.give(block)
    heap.take(80 * MiB)
    assert (heap.process.reserved, heap.process.most_reserved) == (92 * MiB, 100 * MiB)
    heap.take(20 * MiB)  # not of what went back
    assert heap.process.reserved == 112 * MiB


def test_a_new_segment_lies_just_below_those_that_did_not_go_back() -> None:
    """Only the order of addresses decides; so what goes back and comes again in every step comes to the same place."""
    heap = Allocator(limit=120 * MiB)
    heap.take(40 * MiB)
    places = []
    for size in (50, 60, 70, 80):
        block = heap.take(size * MiB)
        places.append(address(block) + length(block))
        heap.give(block)
    assert len({*places}) == 1


def test_a_small_request_that_finds_no_room_takes_what_goes_back() -> None:
    """Small blocks have segments of 2 MiB of their own; at the limit a free segment of large ones makes room."""
    heap = Allocator(limit=41 * MiB)
    heap.give(heap.take(40 * MiB))
    heap.take(MiB)
    assert heap.process.reserved == 2 * MiB
    heap = Allocator(limit=43 * MiB)
    heap.give(heap.take(40 * MiB))
    heap.take(MiB)
    assert heap.process.reserved == 42 * MiB  # nothing goes back where there is room


def test_of_equals_the_lowest_address_is_taken() -> None:
    heap = Allocator()
    first, second = heap.take(40 * MiB), heap.take(40 * MiB)
    assert address(second) < address(first)  # as drivers map: each segment below the last
    heap.give(first)
    heap.give(second)
    assert heap.take(40 * MiB) == second


def test_blocks_of_two_segments_never_become_one() -> None:
    """However near one begins to where the other ends."""
    heap = Allocator()
    for block in [heap.take(40 * MiB), heap.take(40 * MiB)]:
        heap.give(block)
    heap.take(80 * MiB)
    assert heap.process.reserved == 160 * MiB


def test_an_expandable_segment_maps_pages_of_20_mib_and_cuts_exactly() -> None:
    heap = Expandable()
    heap.take(35 * MiB)
    heap.take(5 * MiB - 512)  # fixed segments would have handed out 36 and 20
    assert (heap.process.reserved, heap.process.allocated) == (40 * MiB, 40 * MiB - 512)
    heap.take(MiB + 512)  # the 512 bytes that are left are too few
    assert heap.process.reserved == 60 * MiB


def test_the_end_of_an_expandable_segment_grows_by_what_is_missing() -> None:
    heap = Expandable()
    heap.take(30 * MiB)
    heap.give(heap.take(30 * MiB))
    heap.take(45 * MiB)  # of the 30 that are free and 20 more
    assert heap.process.reserved == 80 * MiB
    heap.take(5 * MiB)
    assert heap.process.reserved == 80 * MiB


def test_a_hole_before_unmapped_pages_waits_for_what_fills_it() -> None:
    """Best fit counts the last hole as endless: a larger hole within the segment is taken before it."""
    heap = Expandable()
    heap.take(20 * MiB)
    hole, _, last = heap.take(40 * MiB), heap.take(20 * MiB), heap.take(20 * MiB)
    heap.give(hole)
    heap.give(last)
    assert address(heap.take(20 * MiB)) == address(hole)
    assert address(heap.take(25 * MiB)) == address(last)  # 20 are left of the hole, and 20 and more at the end
    assert heap.process.reserved == 120 * MiB


def test_how_many_pages_are_mapped_at_the_end_of_an_expandable_segment_places_no_block() -> None:
    """One of which 600 MiB have been in use hands out the same addresses as a new one, and but for them is like it."""
    drawn, alive = random.Random(5), list[Block]()
    few, many = Expandable(), Expandable()
    many.give(many.take(600 * MiB))
    for _ in range(400):
        assert (few.state[0], *few.state[2:]) == (many.state[0], *many.state[2:])
        assert few.state[1] <= many.state[1] == 600 * MiB
        while alive and drawn.random() < 0.48:
            block = alive.pop(drawn.randrange(len(alive)))
            few.give(block)
            many.give(block)
        if few.process.allocated < 400 * MiB:
            alive.append(few.take(drawn.choice((1, 5, 30, 75)) * MiB - drawn.choice((0, 512, MiB // 2))))
            assert many.take(length(alive[-1])) == alive[-1]
    assert few.process.reserved > 400 * MiB


def test_free_pages_of_an_expandable_segment_go_back_wherever_they_lie() -> None:
    """Of 120 MiB allowed 10 to 60 are free: the pages from 20 to 60 go back, and 60 MiB are mapped at the end."""
    heap = Expandable(limit=120 * MiB)
    _, middle, _ = heap.take(10 * MiB), heap.take(50 * MiB), heap.take(40 * MiB)
    heap.give(middle)
    assert address(heap.take(55 * MiB)) == 100 * MiB
    assert (heap.process.reserved, heap.process.allocated) == (120 * MiB, 105 * MiB)
    assert address(heap.take(8 * MiB)) == 10 * MiB  # is still mapped
    with pytest.raises(OutOfMemory, match=f"tried to allocate {40 * MiB}: of {120 * MiB} allowed {120 * MiB} are"):
        heap.take(40 * MiB)


def test_pages_that_went_back_are_mapped_again_where_they_were() -> None:
    heap = Expandable(limit=100 * MiB)
    low, _, high = heap.take(40 * MiB), heap.take(20 * MiB), heap.take(40 * MiB)
    heap.give(low)
    heap.give(high)
    heap.take(80 * MiB)  # there is no room below
    assert (heap.process.reserved, heap.process.most_reserved) == (100 * MiB, 100 * MiB)
    with pytest.raises(OutOfMemory):
        heap.take(30 * MiB)
    heap.process.limit = None
    assert address(heap.take(30 * MiB)) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((Allocator, Expandable)),
    st.lists(st.tuples(st.integers(1, 90 * MiB), st.integers(0, 30)), min_size=1, max_size=60),
)
def test_blocks_lie_within_segments_and_all_come_back(kind: type[Allocator], requests: list[tuple[int, int]]) -> None:
    """Whatever is taken and given back: no more is handed out than is reserved, and at the end all is free in one."""
    heap, alive = kind(), []
    for wanted, which in requests:
        alive.append(heap.take(wanted))
        assert length(alive[-1]) >= wanted
        if which < len(alive):
            heap.give(alive.pop(which))
        assert heap.process.allocated == sum(map(length, alive)) <= heap.process.reserved
    for block in alive:
        heap.give(block)
    assert heap.process.allocated == 0
    before = heap.process.reserved
    heap.release()
    small, *_ = heap.state  # of segments of small blocks all is left
    assert heap.process.reserved == small <= before  # every segment of large blocks was whole again


class Pages:
    """An expandable segment once more: what is allocated, and which pages are mapped, gone through for each request."""

    def __init__(self, limit: int) -> None:
        self.limit, self.blocks, self.mapped = limit, dict[int, int](), set[int]()

    def holes(self) -> list[tuple[int, int, bool]]:
        """Start, end and whether mapped of what is free, by address; the last has no end."""
        found, at = [], 0
        for start, size in [*sorted(self.blocks.items()), (1 << 40, 0)]:
            while at < start:
                mapped, end = at // PAGE in self.mapped, at
                while end < start and (end // PAGE in self.mapped) is mapped and (mapped or end < 1 << 33):
                    end = end // PAGE * PAGE + PAGE
                end = min(end, start) if end < 1 << 33 else start
                found.append((at, end, mapped))
                at = end
            at = start + size
        return found

    def take(self, size: int) -> int | None:
        """The place of `size` bytes; None where they find no pages."""
        holes = self.holes()
        grown = {end: last for end, last, mapped in holes if not mapped}
        fits = sorted((end - start, start) for start, end, mapped in holes if mapped and end - start >= size)
        could = [grown.get(start + length, start + length) - start for length, start in fits]
        for n, (_, start) in enumerate(fits):
            if n + 1 == len(fits) or could[n + 1] >= could[n]:
                self.blocks[start] = size
                return start
        for last in (False, True):
            start = self.place(size)
            missing = set(range(start // PAGE, -(-(start + size) // PAGE))) - self.mapped
            if (len(self.mapped) + len(missing)) * PAGE <= self.limit:
                self.mapped |= missing
                self.blocks[start] = size
                return start
            if not last:
                self.mapped = {n for b, own in self.blocks.items() for n in range(b // PAGE, -(-(b + own) // PAGE))}
        return None

    def place(self, size: int) -> int:
        """The lowest unmapped hole, with the mapped one before it, after which so much is free in one."""
        holes = self.holes()
        for n, (start, _, mapped) in enumerate(holes):
            if not mapped:
                first = holes[n - 1][0] if n and holes[n - 1][1] == start else start
                end = first
                for begin, over, _ in holes:
                    end = over if begin == end else end
                if end - first >= size:
                    return first
        raise AssertionError


@pytest.mark.parametrize("seed", range(4))
def test_an_expandable_segment_lies_as_its_pages_say(seed: int) -> None:
    """Hundreds of requests that come and go, with a card that is full again and again."""
    drawn = random.Random(seed)
    heap, pages, alive, refused = Expandable(limit=400 * MiB), Pages(400 * MiB), list[Block](), 0
    for _ in range(800):
        wanted = drawn.choice((2, 5, 20, 30, 40, 60, 75, 90)) * MiB + drawn.choice((0, 512, MiB))
        expected = pages.take(wanted)
        if expected is None:
            refused += 1
            with pytest.raises(OutOfMemory):
                heap.take(wanted)
        else:
            alive.append(heap.take(wanted))
            assert (address(alive[-1]), length(alive[-1])) == (expected, wanted)
        assert heap.process.reserved == len(pages.mapped) * PAGE
        while alive and (expected is None or drawn.random() < 0.45):
            expected = 0
            given = alive.pop(drawn.randrange(len(alive)))
            heap.give(given)
            del pages.blocks[address(given)]
    assert 30 < refused < 400


@pytest.mark.parametrize("kind", [Allocator, Expandable])
def test_a_copy_of_an_allocator_does_as_that_does(kind: type[Allocator]) -> None:
    """Before each of hundreds of requests, with a card that is full again and again; and neither changes the other."""
    drawn = random.Random(7)
    heap, alive, refused = kind(limit=800 * MiB), list[Block](), 0
    for _ in range(600):
        while alive and drawn.random() < 0.45:
            heap.give(alive.pop(drawn.randrange(len(alive))))
        wanted = drawn.choice((1, 5, 30, 75)) * MiB - drawn.choice((0, 512, MiB // 2))
        process = heap.process.copy(800 * MiB)
        (other,), before = process.streams, heap.state
        try:
            block = other.take(wanted)
        except OutOfMemory:
            refused += 1
            with pytest.raises(OutOfMemory):
                heap.take(wanted)
            heap.give(alive.pop())
        else:
            assert heap.state == before
            alive.append(heap.take(wanted))
            assert alive[-1] == block
            assert (other.state, process.reserved) == (heap.state, heap.process.reserved)
            other.give(block)
    assert 10 < refused < 300


@pytest.mark.parametrize("kind", [Allocator, Expandable])
def test_any_limit_between_what_was_reserved_and_what_was_refused_goes_the_same_way(kind: type[Allocator]) -> None:
    def course(limit: int) -> Allocator:
        drawn, heap, alive = random.Random(3), kind(limit=limit), list[Block]()
        with suppress(OutOfMemory):
            for _ in range(120):
                while alive and drawn.random() < 0.45:
                    heap.give(alive.pop(drawn.randrange(len(alive))))
                alive.append(heap.take(drawn.choice((1, 5, 30, 75)) * MiB))
        return heap

    heap = course(400 * MiB)
    low, high = heap.process.most_reserved, heap.process.refused
    assert heap.process.released and low < 400 * MiB < high
    for limit in (low, high - 1):
        assert course(limit).state == heap.state
    assert course(high).process.refused > high
