"""FSDP 2 within a pipeline stage: weights gathered for the first micro batch of a step stay until the last.

Neither `reshard_after_forward` nor a backward frees layers, and nothing is reduced before the last micro batch
(torchtitan's policy; torch 2.13 `distributed/pipelining/stage.py`, `backward_maybe_with_nosync`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from calc.base.ledger import Line
from calc.engines.fsdp import Fsdp
from calc.engines.replica import Where
from calc.memory import communication, gradients
from calc.models.architecture import layer_kinds

# the gradients of a stage: none yet, whole ones, or shards once its last backward is over
Kept = Literal["", "whole", "reduced"]


@dataclass(frozen=True)
class Staged(Fsdp):
    """A pipeline stage that its ranks share: each rank holds it whole, except for master weights and states."""

    def at(self, where: Where) -> list[Line]:
        """A stage's whole weights, and the whole gradients that exist so far."""
        r, c = self.replica, self.replica.run.compute
        kept = r.reduce_bytes
        lines = [self.root_gathered(1), self.layers_gathered()]
        if where.segment == "gather":
            # the first micro batch gathers layers, in a buffer that lives until the next one's is filled
            lines.append(communication.gathered(r.role, "layers", self.layer(-1), c, 1 if r.ranks == 1 else 2))
        if not where.backward and not r.accumulates:
            return lines
        lines += self.whole_embedding(where, c)
        if r.accumulates:
            lines += self.waiting(r.trainable)
        if kept == c:
            made = gradients.new(r.role, where.making, c) if r.accumulates else gradients.so_far(r.role, where.done, c)
            return [*lines, made]
        # made in the compute type, added up in the type they are reduced in once their unit has them all
        fresh = where.root + (where.making if where.segment == "end" else where.here)
        there = [] if r.accumulates else self.waiting(where.above)
        return [*lines, *there, gradients.unreduced(r.role, fresh, c)]

    def waiting(self, elements: int) -> list[Line]:
        """Whole gradients that nothing has reduced, other ranks' rows of a shared embedding among them."""
        r = self.replica
        lines = [gradients.deferred(r.role, elements, r.reduce_bytes)]
        if r.accumulates and r.embedding_kept:
            lines.append(gradients.whole_embedding(r.role, r.embedding_kept, r.reduce_bytes))
        return lines

    def between(self, kept: Kept) -> list[Line]:
        """What a stage has while another of its rank's runs, with its gradients as they are `kept`."""
        r = self.replica
        if kept == "reduced":
            return [self.reduced(r.trainable)]
        weights = [self.root_gathered(1), self.layers_gathered()]
        return [*weights, *self.waiting(r.trainable)] if kept else weights

    def layers_gathered(self, but: int = 0) -> Line:
        """All layers whole, in the compute type, `but` elements left out."""
        layers = sum([self.layer_of(spec) * n for spec, n in layer_kinds(self.replica.arch)])
        return communication.gathered(self.replica.role, "layers", layers - but, self.replica.run.compute)

    def copying(self) -> list[Line]:
        """Whole gradients in the type in which they are reduced, the embedding's in the compute type, too.

        torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param.py`, `to_accumulated_grad_if_needed`, after the first
        micro batch; later ones add to it.
        """
        r, c = self.replica, self.replica.run.compute
        if not r.arch.embeds or r.reduce_bytes == c:
            return []
        held = [self.root_gathered(1), self.layers_gathered(), *self.waiting(r.trainable)]
        return [*held, gradients.unreduced(r.role, r.embedding, c)]

    def finishing(self) -> list[Line]:
        """The reduction of the first unit, its weights freed: the root unit or, if that is empty, a layer.

        The root's largest gradient is still referenced when the output exists, see `reducing_root`.
        """
        r = self.replica
        whole = self.waiting(r.trainable)
        if not self.root_elements:
            first = self.layer(0)
            return [self.layers_gathered(first), *whole, self.reducing(first)]
        output = gradients.accumulated(r.role, self.root_elements, r.grad_bytes, r.ranks)
        return [self.layers_gathered(), *whole, self.reducing(self.root_elements), output]
