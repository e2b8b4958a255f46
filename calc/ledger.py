"""The ledger: lines add up to moments, the largest moment is the phase, the largest phase is the peak.

A peak is never the sum of maxima: two tensors count together only when one moment sees both alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from calc.host_memory import HostMemory
    from calc.scenario import Scenario


class Line(NamedTuple):
    """One component of one role at one moment.

    `bytes` is what the formula gives with `values` put in; `source` is the anchor of the method page that derives
    it (`weights#zero`). `allocated` is false for what PyTorch's allocator does not count as allocated: the CUDA
    context, NCCL's buffers, and what the allocator holds back.
    """

    component: str
    role: str
    bytes: int
    formula: str
    values: Mapping[str, Any]
    source: str
    allocated: bool = True


class Sums(NamedTuple):
    """What lines add up to: all that is `needed` of the card, of it what PyTorch's allocator counts, and of that the
    `stirred` bytes, of which a share that nobody knows is held back beside; none where a replay knows what must be
    reserved, `replayed`.
    """

    needed: int
    allocated: int
    stirred: int
    replayed: int = 0


def total(lines: Iterable[Line]) -> int:
    """What lines add up to."""
    return sum([line.bytes for line in lines])


class Moment(NamedTuple):
    """A named instant and everything alive at it."""

    name: str
    lines: tuple[Line, ...]

    @property
    def allocated_bytes(self) -> int:
        """What `torch.cuda.max_memory_allocated` would show at this instant."""
        return sum([line.bytes for line in self.lines if line.allocated])

    @property
    def device_bytes(self) -> int:
        """What the whole process takes of the card at this instant."""
        return total(self.lines)

    @property
    def held_back(self) -> int:
        """What the allocator has reserved beyond what is allocated."""
        return sum([line.bytes for line in self.lines if line.component == "fragmentation"])

    @property
    def sums(self) -> Sums:
        """What decides whether it fits."""
        lost = [line for line in self.lines if line.component == "fragmentation"]
        stirred, replayed, reserved = (sum([x.values.get(name, 0) for x in lost]) for name in ("B", "least", "R"))
        spare = self.held_back if stirred else reserved - replayed
        return Sums(self.device_bytes - spare, self.allocated_bytes, stirred, replayed)


class Phase(NamedTuple):
    """A phase of the job with its largest moment."""

    name: str
    moment: Moment


def most(phases: Iterable[Phase]) -> int:
    """What the largest of phases takes, in bytes; 0 where there is none."""
    return max([p.moment.device_bytes for p in phases], default=0)


@dataclass(frozen=True, slots=True)
class Group:
    """A set of GPUs that hold the same roles, seen from the one that needs most.

    `device_range` holds the middle nine tenths of what a monitor may show at the peak. `verdict_phase` is the first
    phase that makes the verdict other than `fits`; `refusal` says in one line why vLLM does not start, `crowded`
    that it is for want of free memory. Where it does, its KV cache holds `cache_tokens`, and `cache_sequences` of full
    length at once.
    """

    name: str
    gpus: int
    phases: tuple[Phase, ...]
    usable_bytes: int
    device_range: tuple[int, int]
    fit_probability: float
    verdict: str
    verdict_phase: str | None
    refusal: str | None = None
    cache_tokens: int = 0
    cache_sequences: int = 0
    crowded: bool = False

    @property
    def peak(self) -> Phase:
        """The phase with the largest moment; of equals, where the allocator keeps what it has, that of most tensors."""
        return max(self.phases, key=lambda phase: (phase.moment.device_bytes, phase.moment.allocated_bytes))


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer to one scenario; `calc.estimate.as_dict` spells it as the contract does.

    `on_host`: what fails first is a node's host, and not a GPU.
    """

    scenario: Scenario
    groups: tuple[Group, ...]
    host_phases: tuple[Phase, ...]
    host_memory: HostMemory
    verdict: str
    verdict_phase: str | None
    on_host: bool
    fit_probability: float
    notes: tuple[str, ...]
    catalog_version: str
    calc_version: str

    @property
    def host_peak(self) -> int:
        """The most host memory that a node needs at any moment, in bytes."""
        return most(self.host_phases)
