"""The ledger: lines are summed at each instant, a phase counts its largest instant, the peak is the largest phase.

A peak is never the sum of maxima: two tensors count together only when both are alive at the same instant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class Line(NamedTuple):
    """One component of one role at one instant.

    `bytes` is what the formula gives with `values` put in; `source` is the anchor of the method page that derives it
    (`weights#zero`). `allocated` is false for what PyTorch's allocator does not count as allocated: the CUDA context,
    NCCL's buffers, and fragmentation.
    """

    component: str
    role: str
    bytes: int
    formula: str
    values: Mapping[str, Any]
    source: str
    allocated: bool = True

    @property
    def paged(self) -> bool:
        """True for managed memory: it fills what a card has room for, and leaves for the host before anything fails."""
        return self.component == "optimizer_states" and not self.allocated

    @property
    def left(self) -> int:
        """Bytes of managed memory that are on the host, since the card has no room for them."""
        return self.values["P"] - self.bytes if self.source == "optimizer#paged" else 0


class Sums(NamedTuple):
    """The totals of an instant's lines, in bytes.

    `needed` is all that the card must hold, `allocated` the part of it that PyTorch's allocator counts, and
    `fragmenting` the part of that which causes fragmentation, an unknown share of it. Where a replay knows what must be
    reserved, that is `replayed`, and `fragmenting` is 0.
    """

    needed: int
    allocated: int
    fragmenting: int
    replayed: int = 0


def total(lines: Iterable[Line]) -> int:
    """The bytes of all lines together."""
    return sum([line.bytes for line in lines])


def staying(lines: Iterable[Line]) -> int:
    """The bytes of the lines that the card must hold: all but managed memory."""
    return sum([line.bytes for line in lines if line.allocated or not line.paged])


@dataclass(frozen=True)
class Moment:
    """A named instant and everything alive at it."""

    name: str
    lines: tuple[Line, ...]

    @cached_property
    def allocated_bytes(self) -> int:
        """The bytes that `torch.cuda.max_memory_allocated` would show at this instant."""
        return sum([line.bytes for line in self.lines if line.allocated])

    @cached_property
    def device_bytes(self) -> int:
        """The bytes that the whole process takes of the card at this instant."""
        return total(self.lines)

    @cached_property
    def fragmentation(self) -> int:
        """The bytes of fragmentation: what the allocator has reserved beyond what is allocated."""
        return sum([line.bytes for line in self.lines if line.component == "fragmentation"])

    @cached_property
    def sums(self) -> Sums:
        """The totals that decide whether the instant fits."""
        needed, allocated, fragmenting, replayed = staying(self.lines), self.allocated_bytes, 0, 0
        for line in self.lines:
            if line.component == "fragmentation":
                lost = line.values
                fragmenting += lost.get("B", 0)
                replayed += lost.get("least", 0)
                # of fragmentation the least that must be reserved counts, or an unknown share of what is fragmenting
                needed -= line.bytes if lost.get("B") else lost.get("R", 0) - lost.get("least", 0)
        return Sums(needed, allocated, fragmenting, replayed)


class Phase(NamedTuple):
    """A phase of the job, at its peak instant."""

    name: str
    moment: Moment


def most(phases: Iterable[Phase]) -> int:
    """The bytes of the largest phase; 0 where there is none."""
    return max([p.moment.device_bytes for p in phases], default=0)
