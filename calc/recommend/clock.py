"""The time of a step as the search asks for it: often, and of configurations that share most of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from calc.catalog import GPU, Node
from calc.scenario import Scenario
from calc.throughput import Throughput, Unrated, throughput
from calc.throughput.rates import rated

ROLLOUT = "rollout: "
# By how much two times must differ before an estimate tells which configuration is faster: as much as it is off in the
# median of published step times, which tests/accuracy reads off the records.
TOLERANCE = 0.12


class Split(NamedTuple):
    """Seconds of a step: those of the rollout, and of all else."""

    rollout: float
    rest: float


def digits(seconds: float) -> float:
    """A time to the three digits that count."""
    return float(f"{seconds:.2e}")


@dataclass
class Clock:
    """Step times on one kind of GPU and node.

    What vLLM takes to generate follows from its own settings alone, and all else from the others: `bound` keeps both
    apart, so that each is computed once.
    """

    gpu: GPU
    node: Node | None
    _rollouts: dict[Hashable, float] = field(default_factory=dict)
    _rests: dict[Hashable, float] = field(default_factory=dict)

    def unrated(self, s: Scenario) -> str | None:
        """Why no time can be computed on this GPU, in one line; None where it can."""
        try:
            rated(self.gpu, self.node, s.gpus_per_node, s.precision)
        except Unrated as reason:
            return str(reason)
        return None

    @property
    def slow_links(self) -> bool:
        """True where GPUs exchange data over PCIe alone."""
        return self.node.link.startswith("PCIe") if self.node else not self.gpu.nvlink_gbs

    def full(self, s: Scenario, cache_tokens: int | None) -> Throughput | None:
        """The throughput with the KV cache that an estimate found; None where no rate is known."""
        try:
            return throughput(s, self.gpu, self.node, cache_tokens)
        except Unrated:
            return None

    def seconds(self, s: Scenario, cache_tokens: int | None) -> float:
        """The step time of a configuration that fits; 0 where no rate is known."""
        known = self.full(s, cache_tokens)
        return digits(known.step_seconds) if known else 0.0

    def split(self, s: Scenario) -> Split:
        """The step time as if vLLM had its card alone, so that no cache is smaller; infinite where it cannot start."""
        try:
            terms = throughput(s, self.gpu, self.node).terms
        except Unrated:
            return Split(0.0 if self.unrated(s) else inf, 0.0)
        vllm = s.rollout is not None and s.rollout.engine == "vllm"
        rollout = sum([t.seconds for t in terms if vllm and t.name.startswith(ROLLOUT)])
        return Split(rollout, sum([t.seconds for t in terms]) - rollout)

    def bound(self, rollout: Hashable, rest: Hashable, of: Callable[[], Scenario | None]) -> float:
        """The step time from both parts, by what each depends on; `of` makes the scenario where one is not known."""
        if rollout not in self._rollouts or rest not in self._rests:
            s = of()
            if s is None:
                return 0.0
            part = self.split(s)
            self._rollouts[rollout] = part.rollout
            if part.rollout < inf:
                self._rests[rest] = part.rest
            return digits(part.rollout + part.rest)
        return digits(self._rollouts[rollout] + self._rests[rest])
