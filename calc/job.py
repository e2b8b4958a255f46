"""A job with its roles placed: what every set of its GPUs and every node of it is made of."""

from __future__ import annotations

from calc import placement
from calc.catalog import GPU
from calc.engines.replica import Replica
from calc.phases import Batch, Step, step
from calc.scenario import Scenario, framework


class Job:
    """One scenario with its roles placed."""

    def __init__(self, s: Scenario, gpu: GPU) -> None:
        """Place the roles of `s` on its GPUs."""
        self.s, self.gpu = s, gpu
        keeps = framework(s.framework).keeps(s)
        self.keeps = keeps.without_rollout() if s.rollout and s.rollout.engine == "none" else keeps
        self.placed = {role.name: placement.place(s, role, self.keeps) for role in self.keeps.roles}
        self.engine = placement.serving(s, self.keeps, gpu)

    def batch(self, s: Scenario, rows: int) -> Batch:
        """`rows` sequences as a role with scenario `s` runs them: at their cap, or at their mean without padding."""
        length = s.expected_len if s.packing else s.seq_len
        return Batch(rows * length, length)

    def step(self, r: Replica, s: Scenario, batch: Batch) -> Step:
        """The activations of a model on one micro-batch."""
        window = r.arch.sliding_window
        return step(
            r.role,
            r.run,
            r.path,
            r.trainable,
            batch,
            masked=s.attention == "sdpa" and window is not None and batch.length > window,
            checkpointing=s.checkpointing if r.optimizer else "none",
            inner=s.sharding.startswith("fsdp"),
        )
