"""Plain PyTorch: the whole model on every GPU, alone or under DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

from calc.base.ledger import Line
from calc.base.plan import Handed
from calc.engines.replica import Holder, Moments, Replica, Where, largest
from calc.memory import communication, gradients, optimizer, weights
from calc.memory.optimizer import steps_as_matrix


@dataclass(frozen=True, slots=True)
class Plain(Holder):
    """`replica` as one process holds it; `buckets`: under DDP, which may have to find parameters that are `unused`.

    `recorded`: what collectives work on is freed for others only once the host has seen that they are over.
    """

    replica: Replica
    buckets: bool = False
    unused: bool = False
    recorded: bool = False

    def weights(self) -> list[Line]:
        """The model's own weights and its adapters."""
        r = self.replica
        own = r.packed() if r.quantised else weights.weights(r.role, r.parameters, r.weight_bytes)
        adapter = [weights.adapter(r.role, r.adapter, r.adapter_bytes)] if r.adapter else []
        if r.ref_bytes:
            adapter.append(weights.adapter("reference", r.adapter, r.ref_bytes))
        saved = [weights.saved(r.role, r.saved, r.saved_bytes)] if r.saved else []
        return [own, *adapter, *saved, *self.tables()]

    def loading(self) -> Moments:
        """The weights are on the GPU; before, the last of them are cast, joined or decomposed there, where they are."""
        r = self.replica
        if r.run.four_bit_experts == "whole":
            yield "experts before four bits", [*self.weights(), weights.stacked_experts(r.role, r.arch, r.run.compute)]
        if r.recast and (last := weights.published(r.role, r.arch, r.head, r.recast)):
            yield "last table: cast", [*self.weights(), last]
        if r.casts_table:
            yield "table: cast on the GPU", [*self.weights(), weights.cast_table(r.role, r.arch, r.weight_bytes)]
        if starting := r.starting():
            yield "adapters decomposed from weights", [*self.weights(), *starting]
        yield "weights on the GPU", self.weights()

    def states(self) -> list[Line]:
        """The fp32 master of mixed precision, optimizer states, DDP's buckets, and what the first forward leaves."""
        r, lines = self.replica, self.left()
        if r.optimizer:
            if r.master_bytes:
                lines.append(weights.master(r.role, r.trainable, r.master_bytes))
            for part in r.parts:
                lines.append(optimizer.states(r.optimizer, r.role, part.elements, part.step, part.tensors))
                if self.buckets:
                    lines.append(communication.ddp_buckets(r.role, part.elements, part.grad))
        return lines

    def root(self) -> list[Line]:
        """Empty: nothing is gathered."""
        return []

    def at(self, where: Where) -> list[Line]:
        """Gradients: those of this backward so far, or all of them if earlier micro batches have left theirs."""
        r = self.replica
        if r.optimizer is None:
            return []
        if r.in_backward:
            waiting = [] if where.segment == "end" else self.waiting_head(where, r.grad_bytes)
            return [*self.stepped_at_once(where), *waiting, *self.tied(where, r.grad_bytes)]
        if r.accumulates:
            lines = [gradients.accumulated(r.role, part.elements, part.grad) for part in r.parts]
            if where.making:
                ends = r.saved and where.segment in ("head", "loss", "outside", "end")
                lines.append(gradients.new(r.role, where.making, r.saved_bytes if ends else r.grad_bytes))
            lines += self.waiting_head(where, r.grad_bytes)
        else:
            whole = (where.root + (where.here if where.segment == "end" else 0)) if r.saved else 0
            done = ((where.done - whole, r.grad_bytes), (whole, r.saved_bytes))
            lines = [gradients.so_far(r.role, elements, b) for elements, b in done if elements]
            lines += self.laid_anew(where, r.grad_bytes)
        if r.accumulates and r.embedding_kept:
            lines.append(gradients.whole_embedding(r.role, r.embedding_kept, r.grad_bytes))
        lines += self.whole_embedding(where, r.grad_bytes)
        lines += self.tied(where, r.grad_bytes)
        return lines

    def stepping(self) -> Moments:
        """All gradients and the optimizer's temporaries."""
        r = self.replica
        if r.in_backward:
            yield from self.last_step()
        elif r.optimizer:
            kept = [gradients.accumulated(r.role, part.elements, part.grad) for part in r.parts]
            passing = [
                optimizer.step_scratch(r.optimizer, r.role, part.elements, largest(part.tensors), part.step)
                for part in r.parts
            ]
            if r.optimizer.facts.orthogonal:
                whole = [t.elements for t in r.trained_tensors if steps_as_matrix(t)]
                passing.append(optimizer.orthogonal(r.role, max(whole, default=0), 1))
            if r.optimizer.facts.low_rank:
                passing.append(optimizer.decomposed(r.role, r.trained_tensors, r.step_bytes))
            if r.embedding_kept:
                kept.append(gradients.whole_embedding(r.role, r.embedding_kept, r.grad_bytes))
                # the own part is cut out and updates the moments, before anything else is computed from them
                passing.append(gradients.new(r.role, r.embedding, r.grad_bytes))
            yield "optimizer step", [*kept, max(passing, key=lambda line: line.bytes)]

    def handing(self, word: Handed) -> Line:
        """The memory to hand weights on: none, as they are whole already, but for a clone of the largest parameter."""
        r = self.replica
        return communication.handed(r.role, word, r.embedding if word == "clone" else 0, r.weight_bytes)

    def host(self, ranks: int) -> Moments:
        """Host memory of the node's ranks: the model as it is read, on its way to the card."""
        if read := self.replica.built(ranks):
            yield "loading", read
