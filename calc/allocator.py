"""PyTorch's caching allocator, as far as sizes go: which segments it takes from the driver, and when none is left.

Read in torch 2.13 `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h`, at their defaults. Blocks of up
to 1 MiB live in segments of 2 MiB of their own; of these only the sum is followed, as if they left no gaps.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from calc.units import MiB

SMALL = 1 * MiB  # kSmallSize: the largest small block, and the most that is given away with a large one
LARGE, BUFFER, GRAIN = 10 * MiB, 20 * MiB, 2 * MiB  # kMinLargeAlloc, kLargeBuffer, kRoundLarge (and kSmallBuffer)
ROUND = 512  # kMinBlockSize
SHARED = 0  # the number of every small block


class OutOfMemory(Exception):
    """No segment of the size asked for is left; the message is PyTorch's, in bytes."""


class Block:
    """A piece of a segment, between its neighbours."""

    __slots__ = ("after", "before", "free", "number", "size")

    def __init__(self, size: int, number: int, before: Block | None, after: Block | None) -> None:
        self.size, self.number, self.before, self.after = size, number, before, after
        self.free = False


class Allocator:
    """Blocks within segments; `limit` bytes are all that it may reserve, None for any number.

    `reserved` are the bytes of all segments, `most_reserved` the largest they have been; `most` is the largest sum of
    blocks handed out, each with what came along because it was too little to be split off.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = self.allocated = self.most = 0
        self._small = self._small_reserved = 0
        self._free: list[tuple[int, int, Block]] = []  # by size, then by age
        self._numbers = 0

    def take(self, size: int) -> Block:
        """A block of `size` bytes: the smallest free one that is large enough, cut to size."""
        size = -(-size // ROUND) * ROUND
        if size <= SMALL:
            return self._take_small(size)
        place = bisect_left(self._free, (size,))
        block = self._free.pop(place)[2] if place < len(self._free) else self._segment(size)
        rest = block.size - size
        if rest > SMALL:
            other = Block(rest, self._number(), block, block.after)
            if block.after:
                block.after.before = other
            block.after, block.size = other, size
            self._keep(other)
        block.free = False
        self._count(block.size)
        return block

    def _take_small(self, size: int) -> Block:
        self._small += size
        if self._small > self._small_reserved:
            self._reserve(GRAIN, size)
            self._small_reserved += GRAIN
        self._count(size)
        return Block(size, SHARED, None, None)

    def _count(self, size: int) -> None:
        self.allocated += size
        if self.allocated > self.most:
            self.most = self.allocated

    def give(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbours."""
        self.allocated -= block.size
        if block.number == SHARED:
            self._small -= block.size
            return
        before, after = block.before, block.after
        if before and before.free:
            self._drop(before)
            block.before, block.size = before.before, block.size + before.size
            if before.before:
                before.before.after = block
        if after and after.free:
            self._drop(after)
            block.after, block.size = after.after, block.size + after.size
            if after.after:
                after.after.before = block
        self._keep(block)

    def _segment(self, size: int) -> Block:
        """A new segment for `size` bytes."""
        whole = BUFFER if size < LARGE else -(-size // GRAIN) * GRAIN
        self._reserve(whole, size)
        return Block(whole, self._number(), None, None)

    def _reserve(self, whole: int, size: int) -> None:
        """Take `whole` bytes for a request of `size`; where the limit is in the way, all-free segments go first."""
        if self.limit is not None and self.reserved + whole > self.limit:
            self._return()
            if self.reserved + whole > self.limit:
                raise OutOfMemory(
                    f"tried to allocate {size}: of {self.limit} allowed {self.reserved} are reserved, "
                    f"{self.allocated} of them allocated"
                )
        self.reserved += whole
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _return(self) -> None:
        """`release_cached_blocks`: segments in which nothing is allocated go back to the driver."""
        whole = [entry for entry in self._free if entry[2].before is None and entry[2].after is None]
        self.reserved -= sum([size for size, _, _ in whole])
        returned = {number for _, number, _ in whole}
        self._free = [entry for entry in self._free if entry[1] not in returned]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(self._free, (block.size, block.number, block))

    def _drop(self, block: Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.number))]
