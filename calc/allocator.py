"""PyTorch's caching allocator, as far as sizes go: which segments it takes from the driver, and when none is left.

Read in torch 2.13 `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h`, at their defaults and with
`expandable_segments:True`. Each stream has an allocator of its own. Blocks of up to 1 MiB live in segments of 2 MiB of
their own; of these only the sum is followed, as if they left no gaps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Self

from calc.units import MiB

SMALL = MiB  # kSmallSize: the largest small block, and the most that is given away with a large one
LARGE, BUFFER, GRAIN = 10 * MiB, 20 * MiB, 2 * MiB  # kMinLargeAlloc, kLargeBuffer, kRoundLarge (and kSmallBuffer)
ROUND = 512  # kMinBlockSize
ENDLESS = 1 << 62  # the address space of a segment that grows
SHARED = 1  # where every small block starts
WIDTH = 63  # bits of an address
ADDRESS = (1 << WIDTH) - 1

Block = tuple[int, int]  # the address where it starts, and its bytes
State = tuple[int, tuple[int, ...], tuple[Block, ...], int, tuple[Block, ...]]


class OutOfMemory(Exception):
    """No segment of the size asked for is left; the message is PyTorch's, in bytes."""


class Process:
    """What the allocators of a process's streams count together; `limit` bytes are all that they may reserve, if any.

    `reserved` are the bytes of all segments, `most_reserved` the largest they have been; `most` is the largest sum of
    blocks handed out, each with what came along because it was too little to be split off. `released` counts how often
    the limit was in the way.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = self.allocated = self.most = self.released = 0
        self.streams: list[Allocator] = []

    def lacks(self, whole: int) -> bool:
        """Whether the limit is in the way of `whole` bytes more."""
        return self.limit is not None and self.reserved + whole > self.limit

    def release(self) -> None:
        """`release_cached_blocks`: all that is free in every stream, and can, goes back to the driver."""
        self.released += 1
        for stream in self.streams:
            stream.release()

    def reserve(self, whole: int, size: int) -> None:
        """Take `whole` bytes of the driver, for a request of `size`; what is free goes back first where they lack."""
        if self.lacks(whole):
            self.release()
        if self.lacks(whole):
            raise OutOfMemory(
                f"tried to allocate {size}: of {self.limit} allowed {self.reserved} are reserved, "
                f"{self.allocated} of them allocated"
            )
        self.add(whole)

    def add(self, reserved: int, allocated: int = 0, peak: int = 0) -> None:
        """So much more is reserved, and allocated, of which there was a `peak` before."""
        self.most = max(self.most, self.allocated + peak)
        self.allocated += allocated
        self.reserved += reserved
        self.most_reserved = max(self.most_reserved, self.reserved)


class Allocator:
    """Blocks within segments that one stream takes; a block that is given back serves that stream alone.

    Free blocks are known by their start and by their end, so that a neighbour finds them.
    """

    LEAST = SMALL + ROUND  # the smallest rest that is split off

    def __init__(self, limit: int | None = None, process: Process | None = None) -> None:
        """The first stream of a process that may reserve `limit` bytes, or another stream of `process`."""
        self.process = process or Process(limit)
        self.process.streams.append(self)
        self._spare = 0  # what is left of segments of small blocks
        self._free: list[int] = []  # by size, then by address, both in one number
        self._sizes: dict[int, int] = {}  # of free blocks, by their start
        self._starts: dict[int, int] = {}  # of free blocks, by their end
        self._segments: tuple[Block, ...] = ()  # where each starts, and its bytes
        self._unmapped: dict[int, int] = {}  # the bytes of each stretch of pages in a segment that grows, by its start
        self._end = ENDLESS  # the address below which the next segment ends: drivers map each below the last

    def beside(self) -> Self:
        """The allocator of another stream of the same process."""
        return type(self)(process=self.process)

    @property
    def state(self) -> State:
        """All that decides what comes of requests, as long as no limit is in the way; segments only then."""
        return self._spare, tuple(self._free), tuple(sorted(self._unmapped.items())), self._end, self._segments

    @state.setter
    def state(self, state: State) -> None:
        self._spare, free, unmapped, self._end, self._segments = state
        self._free, self._unmapped = [*free], dict(unmapped)
        blocks = [(found & ADDRESS, found >> WIDTH) for found in free]
        self._sizes = dict(blocks)
        self._starts = {start + size: start for start, size in blocks}

    def take(self, size: int) -> Block:
        """A block of `size` bytes: the smallest free one that is large enough, cut to size."""
        size = -(-size // ROUND) * ROUND
        if size <= SMALL:
            self._take_small(size)
            start = SHARED
        else:
            free = self._free
            place = self._fit(size)
            if place < len(free):
                found = free.pop(place)
                start, have = found & ADDRESS, found >> WIDTH
                del self._sizes[start]
            else:
                start, have = self._segment(size)
            if have - size >= self.LEAST:
                rest, end = have - size, start + size
                self._sizes[end], self._starts[start + have] = rest, end
                insort(free, rest << WIDTH | end)
            else:
                size = have
                self._starts.pop(start + have, None)
        process = self.process
        process.allocated += size
        if process.allocated > process.most:
            process.most = process.allocated
        return start, size

    def _take_small(self, size: int) -> None:
        self._spare -= size
        if self._spare < 0:
            self.process.reserve(GRAIN, size)
            self._spare += GRAIN

    def give(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbours."""
        start, size = block
        self.process.allocated -= size
        if start == SHARED:
            self._spare += size
            return
        sizes, starts, free = self._sizes, self._starts, self._free
        end = start + size
        # as `_drop` and `_keep` do, of which a step has tens of thousands
        if after := sizes.pop(end, 0):
            del free[bisect_left(free, after << WIDTH | end)]
            end += after
        if start in starts:
            before = starts.pop(start)
            del free[bisect_left(free, sizes[before] << WIDTH | before)]
            start = before
        sizes[start] = size = end - start
        starts[end] = start
        insort(free, size << WIDTH | start)

    def _fit(self, size: int) -> int:
        """Where among the free blocks one of `size` bytes is to be looked for."""
        return bisect_left(self._free, size << WIDTH)

    def _segment(self, size: int) -> Block:
        """A new segment for `size` bytes; between two lies a gap, so that blocks of both are no neighbours."""
        whole = BUFFER if size < LARGE else -(-size // GRAIN) * GRAIN
        self.process.reserve(whole, size)
        self._end -= whole + GRAIN
        self._segments += ((self._end, whole),)
        return self._end, whole

    def release(self) -> None:
        """Segments in which nothing is allocated go back to the driver."""
        whole = [(start, size) for start, size in self._segments if self._sizes.get(start) == size]
        for start, _ in whole:
            self.process.reserved -= self._drop(start)
        self._segments = tuple([segment for segment in self._segments if segment not in whole])

    def _keep(self, start: int, size: int) -> None:
        """A block is free."""
        self._sizes[start] = size
        self._starts[start + size] = start
        insort(self._free, size << WIDTH | start)

    def _drop(self, start: int) -> int:
        """The free block at `start` is none any more; its bytes."""
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._free[bisect_left(self._free, size << WIDTH | start)]
        return size


class Expandable(Allocator):
    """Blocks within one segment, of which pages are mapped as they are needed, and given back wherever they are free.

    See `find_expandable_block`, `map_block` and `unmap_block`.
    """

    LEAST = ROUND

    def __init__(self, limit: int | None = None, process: Process | None = None) -> None:
        super().__init__(limit, process)
        self._unmapped[0] = ENDLESS

    def _fit(self, size: int) -> int:
        """A block before unmapped pages counts as large as it can become."""
        free, unmapped = self._free, self._unmapped
        place, last = bisect_left(free, size << WIDTH), len(free) - 1
        # one that cannot grow is smaller than the next anyway
        while place < last and (free[place] & ADDRESS) + (free[place] >> WIDTH) in unmapped:
            if self._room(place) <= self._room(place + 1):
                break
            place += 1
        return place

    def _room(self, place: int) -> int:
        """As many bytes as the block at a place among the free can become."""
        size, start = self._free[place] >> WIDTH, self._free[place] & ADDRESS
        return size + self._unmapped.get(start + size, 0)

    def _segment(self, size: int) -> Block:
        """The lowest address with room for `size` bytes in free and unmapped blocks, mapped."""
        start, missing = self._place(size)
        if self.process.lacks(missing):
            self.process.release()
            start, missing = self._place(size)
        self.process.reserve(missing, size)
        return start, self._map(start, size)

    def _place(self, size: int) -> tuple[int, int]:
        """Where so much is free or unmapped, and the bytes to be mapped there."""
        for unmapped in sorted(self._unmapped):
            start = end = self._starts.get(unmapped, unmapped)
            missing = 0
            while end - start < size and (have := self._sizes.get(end) or self._unmapped.get(end)):
                if end not in self._sizes:
                    missing += _pages(min(size - (end - start), have))
                end += have
            if end - start >= size:
                return start, missing
        raise AssertionError("the last block has no end")

    def _map(self, start: int, size: int) -> int:
        """One block of `size` bytes or more, of what is free and unmapped from `start` on; its bytes."""
        end = start
        while end - start < size:
            end += self._drop(end) if end in self._sizes else self._map_pages(end, size - (end - start))
        if end in self._sizes:
            end += self._drop(end)
        return end - start

    def _map_pages(self, start: int, size: int) -> int:
        """Map the pages of the first `size` bytes of an unmapped stretch; what is left stays unmapped."""
        have = self._unmapped.pop(start)
        pages = min(_pages(size), have)
        if pages < have:
            self._unmapped[start + pages] = have - pages
        return pages

    def release(self) -> None:
        """Whole pages in which nothing is allocated go back to the driver."""
        for start, size in [*self._sizes.items()]:
            low, high = _pages(start), (start + size) // BUFFER * BUFFER
            if low >= high:
                continue
            self._drop(start)
            if low > start:
                self._keep(start, low - start)
            if high < start + size:
                self._keep(high, start + size - high)
            self.process.reserved -= high - low
            self._unmap(low, high)

    def _unmap(self, low: int, high: int) -> None:
        """Unmapped are the pages from `low` to `high`, and the stretches beside them, as one."""
        high += self._unmapped.pop(high, 0)
        before = next((start for start, size in self._unmapped.items() if start + size == low), low)
        self._unmapped[before] = high - before


def _pages(size: int) -> int:
    """The bytes of the pages that hold `size` bytes."""
    return -(-size // BUFFER) * BUFFER
