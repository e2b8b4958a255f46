"""PyTorch's caching allocator in sizes: segments, cutting and joining, and what is given back when none is left.

By hand after c10/cuda/CUDACachingAllocator.cpp of torch 2.13: `get_allocation_size`, `should_split`,
`try_merge_blocks`, `release_cached_blocks`, and of expandable segments `find_expandable_block`, `map_block`,
`unmap_block`.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.allocator import Allocator, Expandable, OutOfMemory
from calc.units import MiB

PAGE = 20 * MiB  # kLargeBuffer


@pytest.mark.parametrize(
    ("size", "segment", "block"),
    [
        (1, 2, 512 / MiB),  # small blocks share segments of 2 MiB, and are multiples of 512 bytes
        (MiB, 2, 1),
        (MiB + 1, 20, 1 + 512 / MiB),  # up to 10 MiB they are cut from 20
        (10 * MiB, 10, 10),
        (int(11.5 * MiB), 12, 12),  # from there on a segment is a multiple of 2 MiB, and a rest of 1 MiB is not cut off
        (35 * MiB, 36, 36),
        (int(34.9 * MiB) // 512 * 512, 36, int(34.9 * MiB) // 512 * 512 / MiB),
    ],
)
def test_a_first_block_takes_a_segment_by_its_size(size: int, segment: float, block: float) -> None:
    heap = Allocator()
    heap.take(size)
    assert (heap.reserved / MiB, heap.allocated / MiB) == (segment, block)


def test_small_blocks_take_a_segment_when_the_last_is_full() -> None:
    heap = Allocator()
    blocks = [heap.take(MiB) for _ in range(3)]
    assert (heap.reserved, heap.allocated) == (4 * MiB, 3 * MiB)
    for block in blocks:
        heap.give(block)
    heap.take(MiB)
    assert (heap.reserved, heap.allocated, heap.most) == (4 * MiB, MiB, 3 * MiB)


def test_the_smallest_free_block_that_is_large_enough_is_cut() -> None:
    heap = Allocator()
    large, middle, _ = heap.take(60 * MiB), heap.take(40 * MiB), heap.take(30 * MiB)
    heap.give(large)
    heap.give(middle)
    heap.take(34 * MiB)  # of the 40, of which 6 are left
    assert heap.reserved == 130 * MiB
    heap.take(60 * MiB)  # is still whole
    heap.take(6 * MiB)
    assert heap.reserved == 130 * MiB and heap.allocated == 130 * MiB


def test_free_neighbours_become_one_block_again() -> None:
    heap = Allocator()
    whole = heap.take(60 * MiB)
    heap.give(whole)
    parts = [heap.take(20 * MiB) for _ in range(3)]
    for block in (parts[0], parts[2], parts[1]):
        heap.give(block)
    heap.take(60 * MiB)
    assert heap.reserved == 60 * MiB


def test_a_block_that_lies_within_a_segment_keeps_it_from_going_back() -> None:
    """Of 100 MiB allowed 62 are free but for a block of 20, and 38 all free: these go back, and 60 do not come."""
    heap = Allocator(limit=100 * MiB)
    first, second = heap.take(62 * MiB), heap.take(38 * MiB)
    heap.give(first)
    heap.take(20 * MiB)
    heap.give(second)
    heap.take(38 * MiB)  # 38 of 38 that are all free, not of what is left of 62
    assert heap.reserved == 100 * MiB
    with pytest.raises(OutOfMemory, match=f"tried to allocate {60 * MiB}: of {100 * MiB} allowed {100 * MiB} are"):
        heap.take(60 * MiB)


def test_segments_that_are_all_free_go_back_before_memory_runs_out() -> None:
    heap = Allocator(limit=100 * MiB)
    for block in [heap.take(50 * MiB), heap.take(50 * MiB)]:
        heap.give(block)
    heap.take(80 * MiB)
    assert (heap.reserved, heap.most_reserved) == (80 * MiB, 100 * MiB)


def test_an_expandable_segment_maps_pages_of_20_mib_and_cuts_exactly() -> None:
    heap = Expandable()
    heap.take(35 * MiB)
    heap.take(5 * MiB - 512)  # fixed segments would have handed out 36 and 20
    assert (heap.reserved, heap.allocated) == (40 * MiB, 40 * MiB - 512)
    heap.take(MiB + 512)  # the 512 bytes that are left are too few
    assert heap.reserved == 60 * MiB


def test_the_end_of_an_expandable_segment_grows_by_what_is_missing() -> None:
    heap = Expandable()
    heap.take(30 * MiB)
    heap.give(heap.take(30 * MiB))
    heap.take(45 * MiB)  # of the 30 that are free and 20 more
    assert heap.reserved == 80 * MiB
    heap.take(5 * MiB)
    assert heap.reserved == 80 * MiB


def test_a_hole_before_unmapped_pages_waits_for_what_fills_it() -> None:
    """Best fit counts the last hole as endless: a larger hole within the segment is taken before it."""
    heap = Expandable()
    heap.take(20 * MiB)
    hole, _, last = heap.take(40 * MiB), heap.take(20 * MiB), heap.take(20 * MiB)
    heap.give(hole)
    heap.give(last)
    assert heap.take(20 * MiB).start == hole.start
    assert heap.take(25 * MiB).start == last.start  # 20 are left of the hole, and 20 and more at the end
    assert heap.reserved == 120 * MiB


def test_free_pages_of_an_expandable_segment_go_back_wherever_they_lie() -> None:
    """Of 120 MiB allowed 10 to 60 are free: the pages from 20 to 60 go back, and 60 MiB are mapped at the end."""
    heap = Expandable(limit=120 * MiB)
    _, middle, _ = heap.take(10 * MiB), heap.take(50 * MiB), heap.take(40 * MiB)
    heap.give(middle)
    assert heap.take(55 * MiB).start == 100 * MiB
    assert (heap.reserved, heap.allocated) == (120 * MiB, 105 * MiB)
    assert heap.take(8 * MiB).start == 10 * MiB  # is still mapped
    with pytest.raises(OutOfMemory, match=f"tried to allocate {40 * MiB}: of {120 * MiB} allowed {120 * MiB} are"):
        heap.take(40 * MiB)


def test_pages_that_went_back_are_mapped_again_where_they_were() -> None:
    heap = Expandable(limit=100 * MiB)
    low, _, high = heap.take(40 * MiB), heap.take(20 * MiB), heap.take(40 * MiB)
    heap.give(low)
    heap.give(high)
    heap.take(80 * MiB)  # there is no room below
    assert (heap.reserved, heap.most_reserved) == (100 * MiB, 100 * MiB)
    with pytest.raises(OutOfMemory):
        heap.take(30 * MiB)
    heap.limit = None
    assert heap.take(30 * MiB).start == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((Allocator, Expandable)),
    st.lists(st.tuples(st.integers(1, 90 * MiB), st.integers(0, 30)), min_size=1, max_size=60),
)
def test_blocks_lie_within_segments_and_all_come_back(kind: type[Allocator], requests: list[tuple[int, int]]) -> None:
    """Whatever is taken and given back: no more is handed out than is reserved, and at the end all is free in one."""
    heap, alive = kind(), []
    for size, which in requests:
        alive.append(heap.take(size))
        assert alive[-1].size >= size
        if which < len(alive):
            heap.give(alive.pop(which))
        assert heap.allocated == sum(block.size for block in alive) <= heap.reserved
    for block in alive:
        heap.give(block)
    assert heap.allocated == 0
    before = heap.reserved
    heap._return()
    small = heap._small_reserved
    assert heap.reserved == small <= before  # every segment of large blocks was whole again


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(2 * MiB, 90 * MiB), st.integers(0, 8)), min_size=1, max_size=60))
def test_the_blocks_of_an_expandable_segment_never_overlap(requests: list[tuple[int, int]]) -> None:
    """With 300 MiB allowed, pages come and go; who is refused has no pages left but those that others lie in."""
    heap, alive = Expandable(limit=300 * MiB), []
    for size, which in requests:
        try:
            alive.append(heap.take(size))
        except OutOfMemory:
            pages = {page for b in alive for page in range(b.start // PAGE, -(-(b.start + b.size) // PAGE))}
            assert heap.reserved == len(pages) * PAGE > 300 * MiB - size - PAGE
        if which < len(alive):
            heap.give(alive.pop(which))
        lying = sorted((b.start, b.start + b.size) for b in alive)
        assert all(end <= start for (_, end), (start, _) in pairwise(lying))
        assert sum(b.size for b in alive) <= heap.reserved <= 300 * MiB
