"""A model of PyTorch's caching allocator by sizes alone: which segments it takes from the driver, and when it runs out.

Read in torch 2.13 `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h`, at their defaults and with
`expandable_segments:True`. Each stream has an allocator of its own. Blocks of up to 1 MiB live in 2 MiB segments of
their own; only the sum of these blocks is tracked, as if they left no gaps.

A block is one integer, since an estimate allocates and frees tens of thousands of them: its bytes in the bits above
WIDTH, its address below. Sorted, the smallest block comes first, and of equal ones the lowest; splitting a block is a
subtraction. A small block has no address and is negative, and 0 stands for no block.

Where a tensor is freed while another stream still works on it (`Tensor.record_stream`), its block counts no more as
allocated, and serves nobody until the host has seen that stream pass the work (`free`, `insert_events`,
`process_events`). `Process` has the clock for that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple, Self

from calc.base.units import MiB

LARGE, BUFFER, GRAIN = 10 * MiB, 20 * MiB, 2 * MiB  # kMinLargeAlloc, kLargeBuffer, kRoundLarge (and kSmallBuffer)
ROUND = 512  # kMinBlockSize
ENDLESS = 1 << 62  # the address space of an expandable segment
WIDTH = 63  # bits of an address
ADDRESS = (1 << WIDTH) - 1
SMALL = MiB << WIDTH  # kSmallSize: the largest small block, and the largest remainder not split off a large one

Block = int
Steps = Sequence[tuple[int, int]]  # a slot and its request, a block at address 0; or 0 to free the slot's block
Awaited = tuple[int, int, Block]  # a freed block, and the clock's counts of which it waits for
State = tuple[int, list[Block], dict[int, int], int, tuple[Block, ...], list[Awaited]]


class Event(NamedTuple):
    """A place in the stream that computes: its number, and the last collective that the stream has waited for there."""

    number: int
    collective: int


def address(block: Block) -> int:
    """The address where a large block starts."""
    return block & ADDRESS


def length(block: Block) -> int:
    """The bytes of a block."""
    return abs(block) >> WIDTH


def asked(size: int) -> Block:
    """A request for `size` bytes, rounded up to ROUND, as a block at address 0."""
    return -(-size // ROUND) * ROUND << WIDTH


@lru_cache(maxsize=4096)
def requests(sizes: tuple[int, ...]) -> Steps:
    """The steps that allocate blocks of these sizes, in slots numbered from 0; cached, as each layer asks the same."""
    return tuple([(slot, asked(size)) for slot, size in enumerate(sizes)])


@lru_cache(maxsize=4096)
def frees(number: int) -> Steps:
    """The steps that free the blocks in so many slots."""
    return tuple([(slot, 0) for slot in range(number)])


class OutOfMemory(Exception):
    """Raised when no segment of the requested size is left; the message is PyTorch's, in bytes."""


class Process:
    """The counters that a process's streams share; `limit` is the most bytes that they may reserve, if any.

    `reserved` is the bytes of all segments, `most_reserved` its maximum so far; `most` is the largest sum of allocated
    blocks, each with any remainder too small to be split off. `released` counts how often the limit made cached
    segments go back, and `refused` is the smallest total that the limit kept from being reserved: under any limit from
    `most_reserved` to just below `refused`, everything would have happened in the same way.

    The clock: `recorded` events so far, `issued` collectives, `met` the last one for which the stream that computes has
    waited, and `seen`, the last event for which the host has. Collectives of one communicator run in the order of their
    issue, so that all before one that has been waited for are over. The device is never taken to be further than the
    host has seen: it is the slower one.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = self.allocated = self.most = self.released = 0
        self.refused = ENDLESS
        self.recorded = self.issued = self.met = 0
        self.seen = Event(0, 0)
        self.streams: list[Allocator] = []

    def copy(self, limit: int | None) -> Process:
        """A copy of the process and its streams under another limit, which has not been in the way so far."""
        other = copy(self)
        other.limit = limit
        other.streams = []
        for stream in self.streams:
            stream.copy(other)
        return other

    def lacks(self, whole: int) -> bool:
        """True if `whole` more bytes would exceed the limit; `refused` then records it."""
        if self.limit is None or self.reserved + whole <= self.limit:
            return False
        self.refused = min(self.refused, self.reserved + whole)
        return True

    def record(self) -> Event:
        """An event at the end of what has been asked of the stream that computes."""
        self.recorded += 1
        return Event(self.recorded, self.met)

    def wait(self, event: Event) -> None:
        """The host waits for an event: the blocks that waited for it, or for a collective before it, are free."""
        if event.number > self.seen.number:
            self.seen = event
            for stream in self.streams:
                stream.settle(event)

    def release(self) -> None:
        """Return everything that is free in any stream, and can go, to the driver: `release_cached_blocks`.

        It first waits for everything: `synchronize_and_free_events`.
        """
        self.released += 1
        for stream in self.streams:
            stream.settle(Event(ENDLESS, ENDLESS))
        for stream in self.streams:
            stream.release()

    def reserve(self, whole: int, size: int) -> None:
        """Reserve `whole` bytes from the driver for a request of `size`; where the limit requires it, cached segments
        go back first.

        Raises OutOfMemory if even that leaves too little.
        """
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
    """The allocator of one stream: it splits segments into blocks, and hands a freed block only to that stream again.

    Free blocks are indexed by their start and by their end, so that neighbours can be merged.
    """

    LEAST = SMALL + (ROUND << WIDTH)  # the smallest remainder that is split off

    def __init__(self, limit: int | None = None, process: Process | None = None) -> None:
        """The first stream of a process that may reserve `limit` bytes, or another stream of `process`."""
        self.process = process or Process(limit)
        self.process.streams.append(self)
        self._spare = 0  # bytes left in the segments of small blocks
        self._free: list[Block] = []  # the smallest first
        self._starts: dict[int, Block] = {}  # free blocks by their start
        self._ends: dict[int, Block] = {}  # free blocks by their end
        self._segments: tuple[Block, ...] = ()
        self._unmapped: dict[int, int] = {}  # bytes of each unmapped range of an expandable segment, by its start
        self._end = ENDLESS  # the next segment ends below this address: drivers map each below the last
        self._awaited: list[Awaited] = []

    def beside(self) -> Self:
        """An allocator for another stream of the same process."""
        return type(self)(process=self.process)

    def copy(self, process: Process) -> Self:
        """A copy of this stream that belongs to `process`, the copy of its own process."""
        other = type(self)(process=process)
        other._spare, other._end, other._segments = self._spare, self._end, self._segments
        other._free, other._starts = self._free.copy(), self._starts.copy()
        other._ends, other._unmapped = self._ends.copy(), self._unmapped.copy()
        other._awaited = self._awaited.copy()
        return other

    @property
    def state(self) -> State:
        """Everything that decides how requests are served: free blocks, segments, and what small blocks have left."""
        number, collective = self.process.seen
        awaited = [(max(event - number, 0), max(n - collective, 0), block) for event, n, block in self._awaited]
        return self._spare, self._free.copy(), self._unmapped.copy(), self._end, self._segments, awaited

    def take(self, size: int) -> Block:
        """Allocate a block of `size` bytes: the smallest free block that is large enough, split to size."""
        return self.take_all((size,))[0]

    def take_all(self, sizes: Iterable[int]) -> list[Block]:
        """Allocate blocks of these sizes, one after another."""
        own: dict[int, Block] = {}
        self.play(requests(tuple(sizes)), own)
        return [*own.values()]

    def give(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbours."""
        self.give_all((block,))

    def give_all(self, blocks: Iterable[Block]) -> None:
        """Free blocks, one after another."""
        own = dict(enumerate(blocks))
        self.play(frees(len(own)), own)

    def give_later(self, block: Block, *, event: int = 0, collective: int = 0) -> None:
        """Free a block on which another stream works until the event, or the collective, of this number is over."""
        self.process.allocated -= length(block)
        self._awaited.append((event, collective, block))

    def settle(self, seen: Event) -> None:
        """Free the awaited blocks whose event and collective the host has seen pass."""
        if not self._awaited:
            return
        over = [block for event, n, block in self._awaited if event <= seen.number and n <= seen.collective]
        self._awaited = [a for a in self._awaited if a[0] > seen.number or a[1] > seen.collective]
        self.process.allocated += sum(map(length, over))
        self.give_all(over)

    def play(self, steps: Steps, own: dict[int, Block]) -> None:
        """Allocate and free as `steps` says, one step after another; `own` maps slots to their blocks."""
        # a single loop, because an estimate runs it tens of thousands of times
        free, starts, ends, unmapped, process = self._free, self._starts, self._ends, self._unmapped, self.process
        spare, allocated, most = self._spare << WIDTH, process.allocated << WIDTH, process.most << WIDTH
        least = self.LEAST
        for slot, size in steps:
            if not size:
                block = own.pop(slot, 0)
                if block <= 0:
                    spare -= block
                    allocated += block
                    continue
                start = block & ADDRESS
                end = start + (block >> WIDTH)
                allocated -= block - start
                if after := starts.pop(end, 0):
                    del free[bisect_left(free, after)]
                    block += after - end
                    end += after >> WIDTH
                if before := ends.pop(start, 0):
                    del free[bisect_left(free, before)]
                    block += before - start
                    start = before & ADDRESS
                starts[start] = ends[end] = block
                insort(free, block)
                continue
            if size <= SMALL:
                own[slot] = -size
                spare -= size
                if spare < 0:
                    # awaited blocks may become free on the way
                    process.allocated, self._spare = allocated >> WIDTH, spare >> WIDTH
                    process.reserve(GRAIN, size >> WIDTH)
                    spare = self._spare + GRAIN << WIDTH
            else:
                place = bisect_left(free, size)
                if place < len(free):
                    found = free[place]
                    start = found & ADDRESS
                    end = start + (found >> WIDTH)
                    if end in unmapped and place + 1 < len(free):
                        place = self._fit(place)
                        found = free[place]
                        start = found & ADDRESS
                        end = start + (found >> WIDTH)
                    del starts[start]
                    del free[place]
                else:
                    process.allocated, self._spare = allocated >> WIDTH, spare >> WIDTH
                    found = self._segment(size >> WIDTH)
                    spare = self._spare << WIDTH
                    start = found & ADDRESS
                    end = start + (found >> WIDTH)
                rest = found - size
                if rest >= least:
                    own[slot] = size + start
                    # its start is further by what has been cut off
                    start += size >> WIDTH
                    rest += size >> WIDTH
                    starts[start] = ends[end] = rest
                    insort(free, rest)
                else:
                    own[slot] = found
                    ends.pop(end, 0)
                    size = found - start
            allocated += size
            if allocated > most:
                most = allocated
        self._spare, process.allocated, process.most = spare >> WIDTH, allocated >> WIDTH, most >> WIDTH

    def _fit(self, place: int) -> int:
        """The index of the free block to take, where the first one that is large enough borders on unmapped pages.

        Such a block ranks by the size that it can grow to, so that a larger block that cannot grow may come before it.
        """
        free, unmapped, last = self._free, self._unmapped, len(self._free) - 1
        while place < last:
            block, following = free[place], free[place + 1]
            more = unmapped.get((block & ADDRESS) + (block >> WIDTH), 0)
            # a block that cannot grow is smaller than the next anyway
            if not more or (block >> WIDTH) + more <= (following >> WIDTH) + unmapped.get(
                (following & ADDRESS) + (following >> WIDTH), 0
            ):
                break
            place += 1
        return place

    def _segment(self, size: int) -> Block:
        """Reserve a new segment for `size` bytes; a gap keeps blocks of two segments from being neighbours."""
        whole = BUFFER if size < LARGE else -(-size // GRAIN) * GRAIN
        self.process.reserve(whole, size)
        self._end -= whole + GRAIN
        segment = whole << WIDTH | self._end
        self._segments += (segment,)
        return segment

    def release(self) -> None:
        """Return the segments in which nothing is allocated to the driver."""
        whole = [segment for segment in self._segments if self._starts.get(address(segment)) == segment]
        for segment in whole:
            self._drop(segment)
            self.process.reserved -= length(segment)
        self._segments = tuple([segment for segment in self._segments if segment not in whole])

    def _keep(self, start: int, size: int) -> None:
        """Add a block to the free ones."""
        block = size << WIDTH | start
        self._starts[start] = self._ends[start + size] = block
        insort(self._free, block)

    def _drop(self, block: Block) -> None:
        """Remove a block from the free ones."""
        del self._starts[address(block)]
        del self._ends[address(block) + length(block)]
        del self._free[bisect_left(self._free, block)]


class Expandable(Allocator):
    """The allocator with expandable segments: one segment, of which pages are mapped as needed and unmapped when free.

    See `find_expandable_block`, `map_block` and `unmap_block`.
    """

    LEAST = ROUND << WIDTH

    def __init__(self, limit: int | None = None, process: Process | None = None) -> None:
        super().__init__(limit, process)
        self._unmapped[0] = ENDLESS

    def _segment(self, size: int) -> Block:
        """A free block of at least `size` bytes at the lowest address with room for it, its unmapped pages mapped."""
        start, missing = self._place(size)
        if self.process.lacks(missing):
            self.process.release()
            start, missing = self._place(size)
        self.process.reserve(missing, size)
        return self._map(start, size) << WIDTH | start

    def _place(self, size: int) -> tuple[int, int]:
        """The start of the lowest range with `size` bytes free or unmapped, and the bytes to be mapped there."""
        starts, ends, unmapped = self._starts, self._ends, self._unmapped
        for first in sorted(unmapped):
            begin = end = address(ends.get(first, first))
            missing = 0
            while end < begin + size:
                if block := starts.get(end):
                    end += block >> WIDTH
                elif have := unmapped.get(end):
                    missing += _pages(min(begin + size - end, have))
                    end += have
                else:
                    break
            else:
                return begin, missing
        raise AssertionError("the last block has no end")

    def _map(self, begin: int, wanted: int) -> int:
        """Join free and newly mapped pages from `begin` on into one block of `wanted` bytes or more; its bytes."""
        end = begin
        while end - begin < wanted:
            if not (free := self._joined(end)):
                free = self._map_pages(end, wanted - (end - begin))
            end += free
        return end + self._joined(end) - begin

    def _joined(self, end: int) -> int:
        """Remove the free block that starts at `end` from the free ones, and return its bytes; 0 if there is none."""
        block = self._starts.get(end, 0)
        if block:
            self._drop(block)
        return length(block)

    def _map_pages(self, start: int, size: int) -> int:
        """Map the pages of the first `size` bytes of an unmapped range; their bytes. The rest stays unmapped."""
        have = self._unmapped.pop(start)
        pages = min(_pages(size), have)
        if pages < have:
            self._unmapped[start + pages] = have - pages
        return pages

    def release(self) -> None:
        """Return whole pages in which nothing is allocated to the driver."""
        for block in self._free[bisect_left(self._free, BUFFER << WIDTH) :]:
            begin, end = address(block), address(block) + length(block)
            low, high = _pages(begin), end // BUFFER * BUFFER
            if low == high:
                continue
            self._drop(block)
            if low > begin:
                self._keep(begin, low - begin)
            if high < end:
                self._keep(high, end - high)
            self.process.reserved -= high - low
            self._unmap(low, high)

    def _unmap(self, low: int, high: int) -> None:
        """Record the pages from `low` to `high` as unmapped, in one range with those beside them."""
        high += self._unmapped.pop(high, 0)
        before = next((start for start, size in self._unmapped.items() if start + size == low), low)
        self._unmapped[before] = high - before


def _pages(size: int) -> int:
    """The bytes of the pages that `size` bytes take up."""
    return -(-size // BUFFER) * BUFFER
