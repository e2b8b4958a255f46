"""A model of PyTorch's caching allocator by sizes alone: which segments it takes from the driver, and when it runs out.

Read in torch 2.13 `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h`, at their defaults and with
`expandable_segments:True`. Each stream has an allocator of its own. Blocks of up to 1 MiB live in 2 MiB segments of
their own; only the sum of these blocks is tracked, as if they left no gaps.

A block is its address and its bytes; a small one has no address, and an empty tuple stands for no block. Free blocks
are few sizes, each many times over: of each size the lowest is taken first.

Where a tensor is freed while another stream still works on it (`Tensor.record_stream`), its block counts no more as
allocated, and serves nobody until the host has seen that stream pass the work (`free`, `insert_events`,
`process_events`). `Process` has the clock for that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache
from math import inf
from typing import NamedTuple, Self

from calc.base.units import MiB

LARGE, BUFFER, GRAIN = 10 * MiB, 20 * MiB, 2 * MiB  # kMinLargeAlloc, kLargeBuffer, kRoundLarge (and kSmallBuffer)
ROUND = 512  # kMinBlockSize
SMALL = MiB  # kSmallSize: the largest small block, and the largest remainder not split off a large one
ENDLESS = 1 << 59  # the address space of an expandable segment
UNPLACED = -1  # in place of the address of a small block
ADDRESS = 60  # bits of an address, behind the size in the key by which free blocks are ordered
PLACE = (1 << ADDRESS) - 1  # the address in such a key

Block = tuple[int, ...]
NO_BLOCK: Block = ()
Steps = Sequence[tuple[int, int]]  # a slot and the bytes it requests, or 0 to free the slot's block
FREED: Steps = ((0, 0),)  # the block in the only slot
Awaited = tuple[int, int, Block]  # a freed block, and the clock's counts of which it waits for
State = tuple[int, int, dict[int, int], dict[int, int], int, dict[int, int], list[Awaited]]


class Event(NamedTuple):
    """A place in the stream that computes: its number, and the last collective that the stream has waited for there."""

    number: int
    collective: int


def address(block: Block) -> int:
    """The address where a large block starts."""
    return block[0]


def length(block: Block) -> int:
    """The bytes of a block."""
    return block[1] if block else 0


def asked(size: int) -> int:
    """A request for `size` bytes, rounded up to ROUND."""
    return -(-size // ROUND) * ROUND


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
    segments go back, and `refused` is the smallest total that the limit kept from being reserved.

    The clock: `recorded` events so far, `issued` collectives, `met` the last one for which the stream that computes has
    waited, and `seen`, the last event for which the host has. Collectives of one communicator run in the order of their
    issue, so that all before one that has been waited for are over. The device is never taken to be further than the
    host has seen: it is the slower one.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = self.allocated = self.most = self.released = 0
        self.refused = inf
        self.recorded = self.issued = self.met = 0
        self.seen = Event(0, 0)
        self.streams: list[Allocator] = []

    def copy(self, limit: int | None) -> Process:
        """A copy of the process and its streams under another limit, which is the `same` so far."""
        other = copy(self)
        other.limit = limit
        other.streams = []
        for stream in self.streams:
            stream.copy(other)
        return other

    def same(self, limit: int) -> bool:
        """True if everything so far would have happened in the same way under this limit."""
        return self.most_reserved <= limit < self.refused

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
        if event[0] > self.seen[0]:
            self.seen = event
            for stream in self.streams:
                if stream.awaited:
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

    Free blocks are indexed by their start and by their end, so that neighbours can be merged, and ordered by their size
    and then by their start: a single integer each, which compares several times as fast as the two.
    """

    LEAST = SMALL + ROUND  # the smallest remainder that is split off

    def __init__(self, limit: int | None = None, process: Process | None = None) -> None:
        """The first stream of a process that may reserve `limit` bytes, or another stream of `process`."""
        self.process = process or Process(limit)
        self.process.streams.append(self)
        self._spare = 0  # bytes left in the segments of small blocks
        self._free: list[int] = []  # size << ADDRESS | start of each free block, in order
        self._starts: dict[int, int] = {}  # sizes of free blocks by their start
        self._ends: dict[int, int] = {}  # sizes of free blocks by their end
        self._segments: dict[int, int] = {}  # sizes of segments by their start
        self._unmapped: dict[int, int] = {}  # bytes of each unmapped range of an expandable segment, by its start
        self._end = ENDLESS  # the next segment ends below this address: drivers map each below the last
        self.awaited: list[Awaited] = []

    def beside(self) -> Self:
        """An allocator for another stream of the same process."""
        return type(self)(process=self.process)

    def copy(self, process: Process) -> Self:
        """A copy of this stream that belongs to `process`, the copy of its own process."""
        other = type(self)(process=process)
        other._spare, other._end, other._segments = self._spare, self._end, self._segments.copy()
        other._free, other._unmapped = self._free.copy(), self._unmapped.copy()
        other._starts, other._ends = self._starts.copy(), self._ends.copy()
        other.awaited = self.awaited.copy()
        return other

    @property
    def state(self) -> State:
        """Everything that decides how requests are served: what small blocks have left, and free blocks and segments.

        The second is where pages end that are mapped without deciding it, 0 if there are none.
        """
        number, collective = self.process.seen
        awaited = [(max(event - number, 0), max(n - collective, 0), block) for event, n, block in self.awaited]
        return self._spare, 0, self._starts.copy(), self._unmapped.copy(), self._end, self._segments.copy(), awaited

    def take(self, size: int) -> Block:
        """Allocate a block of `size` bytes: the smallest free block that is large enough, split to size."""
        own: dict[int, Block] = {}
        self.play(((0, asked(size)),), own)
        return own[0]

    def take_all(self, sizes: Iterable[int]) -> list[Block]:
        """Allocate blocks of these sizes, one after another."""
        own: dict[int, Block] = {}
        self.play(requests(tuple(sizes)), own)
        return [*own.values()]

    def give(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbours."""
        self.play(FREED, {0: block})

    def give_all(self, blocks: Iterable[Block]) -> None:
        """Free blocks, one after another."""
        own = dict(enumerate(blocks))
        self.play(frees(len(own)), own)

    def give_later(self, block: Block, *, event: int = 0, collective: int = 0) -> None:
        """Free a block on which another stream works until the event, or the collective, of this number is over."""
        if block:
            self.process.allocated -= block[1]
        self.awaited.append((event, collective, block))

    def settle(self, seen: Event) -> None:
        """Free the awaited blocks whose event and collective the host has seen pass."""
        number, collective = seen
        over = [block for event, n, block in self.awaited if event <= number and n <= collective]
        if not over:
            return
        self.awaited = [a for a in self.awaited if a[0] > number or a[1] > collective]
        self.process.allocated += sum([block[1] for block in over if block])
        self.give_all(over)

    def play(self, steps: Steps, own: dict[int, Block]) -> None:
        """Allocate and free as `steps` says, one step after another; `own` maps slots to their blocks."""
        # a single loop, because an estimate runs it tens of thousands of times
        free, starts, ends, unmapped = self._free, self._starts, self._ends, self._unmapped
        process, spare, least, low = self.process, self._spare, self.LEAST, PLACE
        allocated, most = process.allocated, process.most
        for slot, size in steps:
            if size > SMALL:
                place = bisect_left(free, size << ADDRESS)
                if place < len(free):
                    key = free[place]
                    have, start = key >> ADDRESS, key & low
                    if unmapped and start + have in unmapped:
                        place = self._fit(place)
                        key = free[place]
                        have, start = key >> ADDRESS, key & low
                    del free[place], starts[start]
                else:
                    process.allocated, self._spare = allocated, spare
                    start, have = self._segment(size)
                    spare = self._spare
                rest = have - size
                if rest < least:
                    size = have
                    ends.pop(start + have, 0)
                else:
                    after = start + size
                    starts[after] = ends[start + have] = rest
                    insort(free, rest << ADDRESS | after)
                own[slot] = start, size
                allocated += size
                if allocated > most:
                    most = allocated
            elif size:
                own[slot] = UNPLACED, size
                spare -= size
                if spare < 0:
                    # awaited blocks may become free on the way
                    process.allocated, self._spare = allocated, spare
                    process.reserve(GRAIN, size)
                    spare = self._spare + GRAIN
                allocated += size
                if allocated > most:
                    most = allocated
            else:
                block = own.pop(slot, NO_BLOCK)
                if not block:
                    continue
                start, size = block
                allocated -= size
                if start < 0:
                    spare += size
                    continue
                end = start + size
                if after := starts.pop(end, 0):
                    del free[bisect_left(free, after << ADDRESS | end)]
                    size += after
                    end += after
                if before := ends.pop(start, 0):
                    start -= before
                    del free[bisect_left(free, before << ADDRESS | start)]
                    size += before
                starts[start] = ends[end] = size
                insort(free, size << ADDRESS | start)
        self._spare, process.allocated, process.most = spare, allocated, most

    def _fit(self, place: int) -> int:
        """The place of the free block to take, where the first one that is large enough, at `place`, borders on
        unmapped pages.

        Such a block ranks by the size that it can grow to, so that a larger block that cannot grow may come before it.
        """
        free, unmapped = self._free, self._unmapped
        have, start = free[place] >> ADDRESS, free[place] & PLACE
        grown = have + unmapped.get(start + have, 0)
        for following in range(place + 1, len(free)):
            have, start = free[following] >> ADDRESS, free[following] & PLACE
            growing = have + unmapped.get(start + have, 0)
            if grown <= growing:
                break
            place, grown = following, growing
            if grown == have:
                break  # it cannot grow, so that it is smaller than the next anyway
        return place

    def _segment(self, size: int) -> tuple[int, int]:
        """Reserve a new segment for `size` bytes; a gap keeps blocks of two segments from being neighbours."""
        whole = BUFFER if size < LARGE else -(-size // GRAIN) * GRAIN
        self.process.reserve(whole, size)
        self._end -= whole + GRAIN
        self._segments[self._end] = whole
        return self._end, whole

    def release(self) -> None:
        """Return the segments in which nothing is allocated to the driver."""
        for start, size in [own for own in self._starts.items() if self._segments.get(own[0]) == own[1]]:
            self._drop(start, size)
            del self._segments[start]
            self.process.reserved -= size
        # below all others as before, and at the same address in every step: of addresses only the order matters
        self._end = min(self._segments, default=ENDLESS)

    def _keep(self, start: int, size: int) -> None:
        """Add a block to the free ones."""
        self._starts[start] = self._ends[start + size] = size
        insort(self._free, size << ADDRESS | start)

    def _drop(self, start: int, size: int) -> None:
        """Remove a block from the free ones."""
        del self._starts[start], self._ends[start + size]
        del self._free[bisect_left(self._free, size << ADDRESS | start)]


class Expandable(Allocator):
    """The allocator with expandable segments: one segment, of which pages are mapped as needed and unmapped when free.

    See `find_expandable_block`, `map_block` and `unmap_block`.
    """

    LEAST = ROUND

    def __init__(self, limit: int | None = None, process: Process | None = None) -> None:
        super().__init__(limit, process)
        self._unmapped[0] = ENDLESS

    @property
    def state(self) -> State:
        """As above. Where only the last range is unmapped, the free pages before it place no block.

        Nothing but that range grows, so that a block is cut off its free pages last, and off where they begin, as it is
        where none of them are mapped yet.
        """
        whole = super().state
        if len(self._unmapped) > 1:
            return whole
        spare, _, starts, unmapped, end, segments, awaited = whole
        (mapped,) = unmapped
        begin = mapped - self._ends.get(mapped, 0)
        starts.pop(begin, 0)
        return spare, mapped, starts, {begin: ENDLESS - begin}, end, segments, awaited

    def _segment(self, size: int) -> tuple[int, int]:
        """A free block of at least `size` bytes at the lowest address with room for it, its unmapped pages mapped."""
        start, missing = self._place(size)
        if self.process.lacks(missing):
            self.process.release()
            start, missing = self._place(size)
        self.process.reserve(missing, size)
        return start, self._map(start, size)

    def _place(self, size: int) -> tuple[int, int]:
        """The start of the lowest range with `size` bytes free or unmapped, and the bytes to be mapped there."""
        starts, ends, unmapped = self._starts, self._ends, self._unmapped
        for first in sorted(unmapped):
            begin = end = first - ends.get(first, 0)
            missing = 0
            while end < begin + size:
                if free := starts.get(end):
                    end += free
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
        size = self._starts.get(end, 0)
        if size:
            self._drop(end, size)
        return size

    def _map_pages(self, start: int, size: int) -> int:
        """Map the pages of the first `size` bytes of an unmapped range; their bytes. The rest stays unmapped."""
        have = self._unmapped.pop(start)
        pages = min(_pages(size), have)
        if pages < have:
            self._unmapped[start + pages] = have - pages
        return pages

    def release(self) -> None:
        """Return whole pages in which nothing is allocated to the driver."""
        for key in self._free[bisect_left(self._free, BUFFER << ADDRESS) :]:
            size, begin = key >> ADDRESS, key & PLACE
            end = begin + size
            low, high = _pages(begin), end // BUFFER * BUFFER
            if low == high:
                continue
            self._drop(begin, size)
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
