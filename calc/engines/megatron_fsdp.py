"""Megatron-FSDP: Megatron-core's buffers of weights, gradients and masters, each whole or a rank's part of it.

Each layer is a unit with a buffer for experts and one for the rest; embedding, final norm and head are none. Where
weights are parts, a unit's are gathered to compute, with as many units after it as make `PREFETCHED` elements; those of
no unit stay gathered. Where gradients are parts, backward fills a buffer for a whole unit, which goes once later units
need the place in a queue of `QUEUED` elements, not when it is reduced. Read in Megatron-LM d98e8a64dd
`megatron/core/distributed/fsdp/src/megatron_fsdp/{megatron_fsdp,param_and_grad_buffer}.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from calc.base.ledger import Line
from calc.base.plan import MegatronShards
from calc.engines.megatron import Buffer, Megatron
from calc.engines.replica import Where
from calc.memory import communication, gradients, weights
from calc.models.architecture import layer_parameters, layer_tensors

QUEUED = 1_000_000_000  # elements, or two units if they are larger (`suggested_communication_unit_size`)
PREFETCHED = QUEUED // 2


@dataclass(frozen=True)
class MegatronFsdp(Megatron):
    """`replica` with masters and moments in parts of ranks, and by `strategy` gradients and weights too."""

    strategy: MegatronShards = "optim_grads_params"

    @property
    def cuts_gradients(self) -> bool:
        """True if each rank has a part of the gradients."""
        return self.strategy in ("optim_grads", "optim_grads_params")

    @property
    def cuts_weights(self) -> bool:
        """True if each rank has a part of the weights."""
        return self.strategy == "optim_grads_params"

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Elements of each layer of which ranks have parts: without experts that no other rank has."""
        whole = {kind for own in self.buffers if own.shards == 1 for kind in {t.kind for t in own.tensors}}
        arch = self.replica.arch
        found = (layer_tensors(arch, spec) for spec in arch.specs)
        return tuple(sum(t.elements for t in own if t.kind not in whole) for own in found)

    @cached_property
    def rest(self) -> int:
        """Elements that belong to no unit."""
        arch = self.replica.arch
        return self.replica.parameters - sum(layer_parameters(arch, spec) for spec in arch.specs)

    def weights(self) -> list[Line]:
        """A rank's part of each buffer, or all of it."""
        r = self.replica
        if not self.cuts_weights:
            return super().weights()
        return [weights.weights(r.role, own.elements, r.weight_bytes, own.shards) for own in self.buffers]

    def accumulated(self, own: Buffer) -> Line:
        """A rank's part of a buffer's gradients, or all of them."""
        r = self.replica
        return gradients.accumulated(r.role, own.elements, r.grad_bytes, own.shards if self.cuts_gradients else 1)

    def resident(self) -> list[Line]:
        """The rank's own tensors, and whole weights of no unit, whose buffer stays from the first forward on."""
        r = self.replica
        kept = [communication.gathered(r.role, "outside the layers", self.rest, r.weight_bytes)] * self.gathers
        return [*super().resident(), *kept]

    @property
    def gathers(self) -> bool:
        """True if other ranks have parts of the weights."""
        return self.cuts_weights and self.replica.ranks > 1

    def at(self, where: Where) -> list[Line]:
        """Gathered units, and whole gradients that the queue has not let go."""
        r, lines = self.replica, list[Line]()
        if self.gathers and (elements := self.gathered(where)):
            lines.append(communication.gathered(r.role, "layers", elements, r.weight_bytes))
        if r.optimizer and where.backward:
            lines += super().at(where)
            if self.cuts_gradients and (whole := self.unreduced(where)):
                lines.append(gradients.unreduced(r.role, whole, r.grad_bytes))
        return lines

    def gathered(self, where: Where) -> int:
        """Elements of gathered units: the one at work and those after it, in the order of the pass.

        The head's hook gathers ahead, too, as if the first layers came next, whose weights stay until backward gathers.
        """
        match where.segment:
            case "gather" | "layer":
                order = self.units[where.layer :: -1] if where.backward else self.units[where.layer :]
                return order[0] + ahead(order[1:])
            case "norm" | "head" | "loss" | "outside" | "waiting":
                return ahead(self.units)
            case "join" | "tower" | "end" | "reduce":
                return ahead(self.units[:1])

    def unreduced(self, where: Where) -> int:
        """Elements of whole buffers of gradients: outside the layers from the head's on, of a layer from its first."""
        outside = self.rest if where.root or where.segment == "end" else 0
        if where.segment not in ("layer", "join", "end", "reduce"):
            return outside
        first = where.layer if where.segment in ("layer", "join") else 0
        here, *above = self.units[first:]
        queued = 0
        for elements in above:
            queued += elements
            if queued > max(QUEUED, 2 * max(self.units)):
                break
        return outside + here + queued


def ahead(units: tuple[int, ...]) -> int:
    """Elements of the first `units` that are gathered ahead: until they are `PREFETCHED`, or one unit if it is more."""
    enough, gathered = max(PREFETCHED, max(units, default=0)), 0
    for elements in units:
        if gathered >= enough:
            break
        gathered += elements
    return gathered
