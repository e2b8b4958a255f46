"""PyTorch's caching allocator in sizes: segments, cutting and joining, and what is given back when none is left.

By hand after c10/cuda/CUDACachingAllocator.cpp of torch 2.13: `get_allocation_size`, `should_split`,
`try_merge_blocks`, `release_cached_blocks`.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.allocator import Allocator, OutOfMemory
from calc.units import MiB


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
    """Of 100 MiB allowed 60 are free but for a block of 20, and 40 all free: these go back, and 60 do not come."""
    heap = Allocator(limit=100 * MiB)
    first, second = heap.take(60 * MiB), heap.take(40 * MiB)
    heap.give(first)
    heap.take(20 * MiB)
    heap.give(second)
    heap.take(40 * MiB)  # 40 of 40 that are all free, not of what is left of 60
    assert heap.reserved == 100 * MiB
    with pytest.raises(OutOfMemory, match=f"tried to allocate {60 * MiB}: of {100 * MiB} allowed {100 * MiB} are"):
        heap.take(60 * MiB)


def test_segments_that_are_all_free_go_back_before_memory_runs_out() -> None:
    heap = Allocator(limit=100 * MiB)
    for block in [heap.take(50 * MiB), heap.take(50 * MiB)]:
        heap.give(block)
    heap.take(80 * MiB)
    assert (heap.reserved, heap.most_reserved) == (80 * MiB, 100 * MiB)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90 * MiB), st.integers(0, 30)), min_size=1, max_size=60))
def test_blocks_lie_within_segments_and_all_come_back(requests: list[tuple[int, int]]) -> None:
    """Whatever is taken and given back: no more is handed out than is reserved, and at the end all is free in one."""
    heap, alive = Allocator(), []
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
