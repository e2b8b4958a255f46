"""The answer to a scenario: the verdict, and the phases of each GPU group and of a node's host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from calc.base.ledger import Phase, most
from calc.engines.rollout import Unstarted
from calc.estimate.host_memory import HostMemory
from calc.estimate.verdict import Verdict
from calc.memory import runtime
from calc.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Group:
    """A GPU group, the GPUs that hold the same roles, seen from the GPU that needs most.

    `device_range` is the interval of the middle nine tenths of what a monitor may show at the peak, and `filled_low`
    its lower end where every batch is known to be as long as the scenario lets it be. `verdict_phase` is the first
    phase that makes the verdict other than `fits`. `refusal` is the reason why vLLM does not start;
    `crowded`: the reason is a lack of free memory. Where vLLM starts, its KV cache holds `cache_tokens`, and
    `cache_sequences` of full length at once. `events` is what the replays of the allocator took, `notes` what they left
    out. `provisional`: a replay that could move the verdict was left out. `usual`: the share
    of what comes and goes that PyTorch usually caches, and gives back before memory is short.
    """

    name: str
    gpus: int
    phases: tuple[Phase, ...]
    usable_bytes: int
    device_range: tuple[int, int]
    fit_probability: float
    verdict: Verdict
    verdict_phase: str | None
    refusal: Unstarted | None = None
    cache_tokens: int = 0
    cache_sequences: int = 0
    crowded: bool = False
    events: int = 0
    notes: tuple[str, ...] = ()
    provisional: bool = False
    filled_low: int = 0
    usual: float = 0.0

    @property
    def peak(self) -> Phase:
        """The phase with the largest peak; of equal ones (the allocator keeps what it has) that with most tensors."""
        return _largest(self.phases)

    @property
    def shown(self) -> tuple[Phase, ...]:
        """The phases as a monitor usually shows them: with what PyTorch caches besides."""
        return tuple([self._shown(phase) for phase in self.phases]) if self.usual else self.phases

    @property
    def shown_peak(self) -> Phase:
        """The phase with the largest peak as a monitor usually shows it."""
        return _largest(self.shown)

    def _shown(self, phase: Phase) -> Phase:
        line = runtime.usually_cached(phase.moment, self.usual, self.usable_bytes)
        if phase.name == "load" or not line.bytes:
            return phase
        return phase._replace(moment=replace(phase.moment, lines=(*phase.moment.lines, line)))


def _largest(phases: Iterable[Phase]) -> Phase:
    return max(phases, key=lambda phase: (phase.moment.device_bytes, phase.moment.allocated_bytes))


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer to one scenario; `calc.estimate.estimate.as_dict` spells it as the contract does.

    `on_host`: what fails first is a node's host, and not a GPU.
    """

    scenario: Scenario
    groups: tuple[Group, ...]
    host_phases: tuple[Phase, ...]
    host_memory: HostMemory
    verdict: Verdict
    verdict_phase: str | None
    on_host: bool
    fit_probability: float
    notes: tuple[str, ...]
    catalog_version: str
    calc_version: str

    @property
    def provisional(self) -> bool:
        """True if a replay was left out that could move the verdict."""
        return any(g.provisional for g in self.groups)

    @property
    def host_peak(self) -> int:
        """The most host memory that a node needs at any instant, in bytes."""
        return most(self.host_phases)
