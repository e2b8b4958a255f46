"""ZeRO-3 of the parameters alone, for an optimizer that steps in backward: no buckets, no master weights, no states.

DeepSpeed's engine is given no optimizer and hooks the modules (`runtime/zero/parameter_offload.py`,
`DeepSpeedZeRoOffload`); each gradient is all-reduced whole, and every rank steps its own part (lomo_optim 0.1.1
`lomo.py`, `fuse_update_zero3`).
"""

from __future__ import annotations

from dataclasses import dataclass

from calc.base.ledger import Line
from calc.engines.replica import Moments, Where, times
from calc.engines.zero import B, Zero
from calc.memory import communication, host


@dataclass(frozen=True, slots=True)
class ZeroParameters(Zero):
    """`replica` under ZeRO-3, stepped by its optimizer's own hooks."""

    def loading(self) -> Moments:
        """One instant: a rank has its shards from the start."""
        yield "shards on the GPU", [*self.weights(), *self.states()]

    def states(self, *, adam: bool = True) -> list[Line]:
        """The small parameters that stay whole."""
        return [communication.persistent(self.replica.role, self.cut.persistent, B)]

    def at(self, where: Where) -> list[Line]:
        """Gathered parameters, the gradient that is being made, and the step of the one before."""
        lines = [] if where.segment in ("reduce", "waiting") else [self.live(where)]
        return [*lines, *self.stepped_at_once(where, part=True), *self.tied(where, B)]

    def stepping(self) -> Moments:
        """The step of the last parameter."""
        return self.last_step(part=True)

    def host(self, ranks: int) -> Moments:
        """Host memory while the model loads, and of shards that live there."""
        r = self.replica
        yield "loading", times([host.loading(r.role, r.parameters, r.weight_bytes, streamed=True)], ranks)
        if self.parameters_on_host:
            yield "before the first step", times([host.parameters(r.role, r.parameters, r.ranks)], ranks)
