"""Step times for the search, which asks often, and for configurations that share most of their time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from calc.catalog.catalog import GPU, Node
from calc.scenario.scenario import Scenario
from calc.throughput import Throughput, Unrated, swaps_of, terms_of, throughput
from calc.throughput.rates import rated
from calc.throughput.rollout import SWAP
from calc.throughput.traffic import BUBBLE
from calc.throughput.work import SELECTION

ROLLOUT = "rollout: "
TAILS = (SWAP, BUBBLE, SELECTION)  # of the names of terms that stand apart
# The least relative difference at which an estimate tells which of two configurations is faster: its median error on
# published step times, which tests/accuracy reads off the records.
TOLERANCE = 0.12


class Split(NamedTuple):
    """Seconds of a step: the rollout, copies of what leaves the GPUs between roles' phases, and everything else.

    `idle`: what pipeline stages idle longer than with the smallest micro batch, as part of none of these.
    """

    rollout: float
    swap: float
    rest: float
    idle: float = 0.0


class Bound(NamedTuple):
    """Seconds of a step as if vLLM had its card alone: the least from a place on, and at the place itself."""

    least: float
    here: float


def digits(seconds: float) -> float:
    """A time rounded to three significant digits."""
    return float(f"{seconds:.2e}")


@dataclass
class Clock:
    """Step times on one kind of GPU and node.

    vLLM's generation time follows from its own settings alone, that of copies from what leaves the GPUs, and all other
    time from the other settings: `bound` keeps them apart, so that each is computed once.
    """

    gpu: GPU
    node: Node | None
    _rollouts: dict[Hashable, float] = field(default_factory=dict)
    _swaps: dict[Hashable, float] = field(default_factory=dict)
    _rests: dict[Hashable, tuple[float, float]] = field(default_factory=dict)

    def unrated(self, s: Scenario) -> str | None:
        """The reason why no time can be computed on this GPU, in one line, or None."""
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
        """The throughput with the KV cache that an estimate found, or None if a rate is unknown."""
        try:
            return throughput(s, self.gpu, self.node, cache_tokens)
        except Unrated:
            return None

    def seconds(self, s: Scenario, cache_tokens: int | None) -> float:
        """The step time of a configuration that fits; 0 if a rate is unknown."""
        known = self.full(s, cache_tokens)
        return digits(known.step_seconds) if known else 0.0

    def split(self, s: Scenario, *, served: bool = True, least: int | None = None) -> Split:
        """The step time as if vLLM had its card alone, so that no KV cache is larger; infinite if it cannot start.

        A GPU's waits for selective checkpointing are left out, so that no axis makes a step quicker. What stages idle
        longer than with `least` sequences in a micro batch stands apart, if that is given. If the time in which vLLM
        generates is known already, `served` is false, and it is not counted again.
        """
        try:
            terms = terms_of(s, self.gpu, self.node, served=served)
        except Unrated:
            return Split(0.0 if self.unrated(s) else inf, 0.0, 0.0)
        vllm = s.rollout is not None and s.rollout.serves
        parts: dict[str, float] = {}
        for t in terms:
            kind = ROLLOUT if vllm and t.name.startswith(ROLLOUT) else next(filter(t.name.endswith, TAILS), "")
            parts[kind] = parts.get(kind, 0.0) + t.seconds
        longer = 1 - least / s.micro_batch if least else 0.0
        bubble = parts.get(BUBBLE, 0.0)
        rest = parts.get("", 0.0) + (1 - longer) * bubble
        return Split(parts.get(ROLLOUT, 0.0), parts.get(SWAP, 0.0), rest, longer * bubble)

    def generating(self, rollout: Hashable) -> float:
        """The rollout's part of a `bound` with this key; 0 as long as that is not known."""
        return digits(self._rollouts.get(rollout, 0.0))

    def bound(
        self, rollout: Hashable, rest: Hashable, swap: Hashable, of: Callable[[], Scenario | None], least: int
    ) -> Bound:
        """The bounds of the step time with micro batches of `least` to those of the scenario that `of` makes.

        They are sums of cached parts, keyed by the settings of each.
        """
        known = self._rollouts.get(rollout)
        if known is None or rest not in self._rests or swap not in self._swaps:
            s = of()
            if s is None:
                return Bound(0.0, 0.0)
            if known == inf:
                return Bound(inf, inf)
            if known is not None and rest in self._rests:
                self._swaps[swap] = sum([t.seconds for t in swaps_of(s, self.gpu, self.node)])
            else:
                part = self.split(s, served=known is None, least=least)
                if known is None:
                    known = self._rollouts[rollout] = part.rollout
                if known == inf:
                    return Bound(inf, inf)
                self._swaps[swap], self._rests[rest] = part.swap, (part.rest, part.idle)
        trained, idle = self._rests[rest]
        seconds = known + self._swaps[swap] + trained
        return Bound(digits(seconds), digits(seconds + idle))
