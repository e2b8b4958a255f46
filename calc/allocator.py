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


class OutOfMemory(Exception):
    """No segment of the size asked for is left; the message is PyTorch's, in bytes."""


class Block:
    """A piece of a segment from address `start`, between its neighbours; `free` to be handed out, if it is `mapped`."""

    __slots__ = ("after", "before", "free", "mapped", "size", "start")

    def __init__(self, start: int, size: int, before: Block | None = None, after: Block | None = None) -> None:
        self.start, self.size, self.before, self.after = start, size, before, after
        self.free, self.mapped = False, True

    def cut(self, size: int) -> Block:
        """The first `size` bytes stay; the rest comes back as a block of its own."""
        rest = Block(self.start + size, self.size - size, self, self.after)
        if self.after:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def join(self) -> None:
        """The next block becomes part of this one."""
        assert self.after
        self.size += self.after.size
        self.after = self.after.after
        if self.after:
            self.after.before = self


class Process:
    """What the allocators of a process's streams count together; `limit` bytes are all that they may reserve, if any.

    `reserved` are the bytes of all segments, `most_reserved` the largest they have been; `most` is the largest sum of
    blocks handed out, each with what came along because it was too little to be split off.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = self.allocated = self.most = 0
        self.streams: list[Allocator] = []

    def lacks(self, whole: int) -> bool:
        """Whether the limit is in the way of `whole` bytes more."""
        return self.limit is not None and self.reserved + whole > self.limit

    def release(self) -> None:
        """`release_cached_blocks`: all that is free in every stream, and can, goes back to the driver."""
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
        self.reserved += whole
        self.most_reserved = max(self.most_reserved, self.reserved)


class Allocator:
    """Blocks within segments that one stream takes; a block that is given back serves that stream alone."""

    LEAST = SMALL + ROUND  # the smallest rest that is split off

    def __init__(self, limit: int | None = None, process: Process | None = None) -> None:
        """The first stream of a process that may reserve `limit` bytes, or another stream of `process`."""
        self.process = process or Process(limit)
        self.process.streams.append(self)
        self._small = self._small_reserved = 0
        self._free: list[tuple[int, int, Block]] = []  # by size, then by address
        self._end = 0  # the address at which the next segment ends: drivers map each below the last

    def beside(self) -> Self:
        """The allocator of another stream of the same process."""
        return type(self)(process=self.process)

    def take(self, size: int) -> Block:
        """A block of `size` bytes: the smallest free one that is large enough, cut to size."""
        size = -(-size // ROUND) * ROUND
        if size <= SMALL:
            block = self._take_small(size)
        else:
            place = self._fit(size)
            block = self._free.pop(place)[2] if place < len(self._free) else self._segment(size)
            if block.size - size >= self.LEAST:
                self._keep(block.cut(size))
            block.free = False
        process = self.process
        process.allocated += block.size
        if process.allocated > process.most:
            process.most = process.allocated
        return block

    def _take_small(self, size: int) -> Block:
        self._small += size
        if self._small > self._small_reserved:
            self.process.reserve(GRAIN, size)
            self._small_reserved += GRAIN
        return Block(SHARED, size)

    def give(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbours."""
        self.process.allocated -= block.size
        if block.start == SHARED:
            self._small -= block.size
            return
        if block.after and block.after.free:
            self._drop(block.after)
            block.join()
        if block.before and block.before.free:
            block = block.before
            self._drop(block)
            block.join()
        self._keep(block)

    def _fit(self, size: int) -> int:
        """Where among the free blocks one of `size` bytes is to be looked for."""
        return bisect_left(self._free, (size,))

    def _segment(self, size: int) -> Block:
        """A new segment for `size` bytes."""
        whole = BUFFER if size < LARGE else -(-size // GRAIN) * GRAIN
        self.process.reserve(whole, size)
        self._end -= whole
        return Block(self._end, whole)

    def release(self) -> None:
        """Segments in which nothing is allocated go back to the driver."""
        whole = {start for _, start, block in self._free if block.before is None and block.after is None}
        self.process.reserved -= sum([size for size, start, _ in self._free if start in whole])
        self._free = [entry for entry in self._free if entry[1] not in whole]

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(self._free, (block.size, block.start, block))

    def _drop(self, block: Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.start))]


class Expandable(Allocator):
    """Blocks within one segment, of which pages are mapped as they are needed, and given back wherever they are free.

    See `find_expandable_block`, `map_block` and `unmap_block`.
    """

    LEAST = ROUND

    def __init__(self, limit: int | None = None, process: Process | None = None) -> None:
        super().__init__(limit, process)
        self._unmapped = [Block(0, ENDLESS)]  # by address
        self._unmapped[0].mapped = False

    def _fit(self, size: int) -> int:
        """A block before unmapped pages counts as large as it can become."""
        free = self._free
        place, last = bisect_left(free, (size,)), len(free) - 1
        # one that cannot grow is smaller than the next anyway
        while place < last and _unmapped_after(here := free[place][2]):
            if here.size + _unmapped_after(here) <= free[place + 1][0] + _unmapped_after(free[place + 1][2]):
                break
            place += 1
        return place

    def _segment(self, size: int) -> Block:
        """The lowest address with room for `size` bytes in free and unmapped blocks, mapped."""
        first, missing = self._place(size)
        if self.process.lacks(missing):
            self.process.release()
            first, missing = self._place(size)
        self.process.reserve(missing, size)
        return self._map(first, size)

    def _place(self, size: int) -> tuple[Block, int]:
        """The first of the blocks that have room together, and the bytes to be mapped there."""
        for block in self._unmapped:
            first = block.before if block.before and block.before.free else block
            here: Block | None = first
            have = missing = 0
            while here and have < size and (here.free or not here.mapped):
                if not here.mapped:
                    missing += _pages(min(size - have, here.size))
                have += here.size
                here = here.after
            if have >= size:
                return first, missing
        raise AssertionError("the last block has no end")

    def _map(self, block: Block, size: int) -> Block:
        """One block of `size` bytes or more, of `block` and those after it."""
        if block.mapped:
            self._drop(block)
        else:
            self._map_pages(block, size)
        while block.size < size:
            assert block.after
            if block.after.mapped:
                self._drop(block.after)
            else:
                self._map_pages(block.after, size - block.size)
            block.join()
        if block.after and block.after.free:
            self._drop(block.after)
            block.join()
        return block

    def _map_pages(self, block: Block, size: int) -> None:
        """Map the pages of the first `size` bytes of an unmapped block; what is left stays unmapped."""
        place = self._unmapped.index(block)
        pages = _pages(min(size, block.size))
        if pages < block.size:
            self._unmapped[place] = rest = block.cut(pages)
            rest.mapped = False
        else:
            del self._unmapped[place]
        block.mapped = True

    def release(self) -> None:
        """Whole pages in which nothing is allocated go back to the driver."""
        for _, start, block in [*self._free]:
            low, high = _pages(start), (start + block.size) // BUFFER * BUFFER
            if low >= high:
                continue
            self._drop(block)
            if low > start:
                head, block = block, block.cut(low - start)
                self._keep(head)
            if high < low + block.size:
                self._keep(block.cut(high - low))
            self.process.reserved -= block.size
            self._unmap(block)

    def _unmap(self, block: Block) -> None:
        block.free = block.mapped = False
        if block.after and not block.after.mapped:
            self._unmapped.remove(block.after)
            block.join()
        if block.before and not block.before.mapped:
            block.before.join()
        else:
            insort(self._unmapped, block, key=lambda b: b.start)


def _pages(size: int) -> int:
    """The bytes of the pages that hold `size` bytes."""
    return -(-size // BUFFER) * BUFFER


def _unmapped_after(block: Block) -> int:
    """The unmapped bytes into which a block can grow."""
    return block.after.size if block.after and not block.after.mapped else 0
