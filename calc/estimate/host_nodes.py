"""Host memory: the RAM that the roles on one node take at each instant."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import assert_never

from calc.base.ledger import Line, Moment, Phase, most
from calc.base.plan import Stage
from calc.engines.replica import times
from calc.memory import host
from calc.step import placement
from calc.step.roles import Job

# the instants of a node, each with the phase of the job in which it falls
DURING = {
    "loading": "load",
    "weights flattened": "load",
    "optimizer built": "load",
    "before the first step": "backward",
    "after the first step": "step",
    "save": "save",
}
HOST = tuple(at for at in DURING if at != "save")


class Hosts:
    """The host memory of a job's nodes."""

    def __init__(self, job: Job) -> None:
        """The nodes of `job`."""
        self.job = job

    @cached_property
    def nodes(self) -> list[dict[str, int]]:
        """The number of ranks of each role on a node, for every kind of node in the job, in node order.

        Groups fill nodes one after another, as Ray packs them, so nodes between a group's first and last are alike.
        """
        per_node, taken = self.job.s.gpus_per_node, 0
        spans: list[tuple[int, int, str]] = []  # first GPU, one past the last, role
        for names, gpus in placement.groups(self.job.s, self.job.keeps):
            spans += [(taken, taken + gpus, name) for name in names]
            taken += gpus
        ends = {at // per_node for start, end, _ in spans for at in (start, end - 1)}
        kinds = []
        for node in sorted({each for end in ends for each in (end, end + 1) if each <= max(ends)}):
            low, high = node * per_node, (node + 1) * per_node
            shares: dict[str, int] = {}
            for start, end, name in spans:
                if (share := min(high, end) - max(low, start)) > 0:
                    shares[name] = shares.get(name, 0) + share  # vLLM runs beside every pipeline stage
            kinds.append(shares)
        return kinds

    def phases(self) -> list[Phase]:
        """The instants of the node that needs most."""
        return self.job.roles.once("host", self._phases)  # the same on every card

    def _phases(self) -> list[Phase]:
        # nodes that hold the same roles need the same
        each = [self.node(dict(kind)) for kind in dict.fromkeys(tuple(node.items()) for node in self.nodes)]
        return max(each, key=most)

    def node(self, ranks: Mapping[str, int]) -> list[Phase]:
        """The instants of a node with `ranks` ranks of each role, each with the lines of all roles together."""
        moments: dict[str, list[Line]] = {at: [] for at in HOST}
        each = [self.held(n, count) for n, count in ranks.items() if n in self.job.placed]
        for at in HOST:
            for role in each:
                # what is there before the first step stays, unless the step adds to it
                lines = role.get(at, role.get("before the first step", []) if at == "after the first step" else [])
                moments[at] += lines
        for at in HOST[-2:]:
            for name, count in ranks.items():
                moments[at].extend(self.checkpoints(name, count))
                moments[at].extend(self.away(name, count, stepped=at == HOST[-1]))
            moments[at].extend(self.serving(ranks.get("rollout", 0)))
        saves = [
            stage for stage in self.job.keeps.stages if stage.does == "save" and stage.host and stage.role in ranks
        ]
        if saves:
            # one role after another is written
            copies = [self.saved(stage, ranks[stage.role]) for stage in saves]
            moments["save"] = [*moments["after the first step"], max(copies, key=lambda line: line.bytes)]
        found = {at: tuple(line for line in lines if line.bytes) for at, lines in moments.items()}
        return [Phase(at, Moment(at, lines)) for at, lines in found.items() if lines]

    def held(self, name: str, ranks: int) -> Mapping[str, list[Line]]:
        """The lines of `ranks` ranks of a role at each instant; equal stages of its pipeline hold the same."""
        placed = self.job.placed[name]
        key = placed.role.model or name, placement.architecture(placed.s, placed.role), placed.role.leaves, ranks
        return self.job.roles.training.once(("host", *key), lambda: dict(placed.engine.host(ranks)))

    def checkpoints(self, name: str, ranks: int) -> list[Line]:
        """Host memory of the checkpoints of a role's `ranks` ranks, if they leave the GPU."""
        placed = self.job.placed.get(name)
        if not placed or not placed.role.streams or not placed.trained:
            return []
        r = placed.engine.replica
        batch = self.job.roles.batch(placed.s, placed.role.rows)
        one = batch.tokens * r.arch.hidden * r.run.residual
        pageable = placed.role.pageable
        return times([host.checkpoints(r.role, r.arch.layers, one, pageable=pageable, pins=r.pins)], ranks)

    def away(self, name: str, ranks: int, *, stepped: bool) -> list[Line]:
        """Host memory of what a role's `ranks` ranks have there while the engine generates; `stepped`: states, too."""
        placed = self.job.placed.get(name)
        if not placed or placed.role.shares or not placed.role.away:
            return []
        there = [*placed.engine.weights(), *(placed.engine.states() if stepped else [])]
        return times([host.paused(line) for line in there if line.component in placed.role.away], ranks)

    def serving(self, ranks: int) -> list[Line]:
        """Host memory of `ranks` vLLM ranks: swap space, and the weights of ranks that sleep at level 1."""
        engine, rollout = self.job.engine, self.job.s.rollout
        if not (ranks and engine and rollout):
            return []
        return times(engine.host(engine.serving.sleep_level if rollout.sleep else 0), ranks)

    def saved(self, stage: Stage, ranks: int) -> Line:
        """The host copy of a checkpoint: whole on the first rank or on every rank, or a shard on each."""
        r = self.job.placed[stage.role].engine.replica
        elements = r.parameters + r.adapter
        whole = host.saved(r.role, elements, stage.host_bytes)
        match stage.host:
            case "" | "first":
                return whole
            case "every":
                return times([whole], ranks)[0]
            case "shards":
                return host.saved(r.role, -(-elements * ranks // r.ranks), stage.host_bytes)
            case other:
                assert_never(other)
