"""Plain PyTorch: the whole model on every GPU, alone or under DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

from calc.base.ledger import Line
from calc.base.plan import Handed
from calc.engines.replica import Holder, Moments, Replica, Where
from calc.memory import communication, gradients, optimizer, weights


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
        return [own, *adapter, *self.tables()]

    def loading(self) -> Moments:
        """The weights are on the GPU; before, the last layer's experts are joined if they go into four bits whole."""
        r = self.replica
        if r.run.four_bit_experts == "whole":
            yield "experts before four bits", [*self.weights(), weights.stacked_experts(r.role, r.arch, r.run.compute)]
        yield "weights on the GPU", self.weights()

    def states(self) -> list[Line]:
        """The fp32 master of mixed precision, optimizer states, DDP's buckets."""
        r, lines = self.replica, list[Line]()
        if r.optimizer:
            if r.master_bytes:
                lines.append(weights.master(r.role, r.trainable, r.master_bytes))
            lines.append(optimizer.states(r.optimizer, r.role, r.trainable, r.step_bytes, r.trained_tensors))
            if self.buckets:
                lines.append(communication.ddp_buckets(r.role, r.trainable, r.grad_bytes))
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
            lines = [gradients.accumulated(r.role, r.trainable, r.grad_bytes)]
            if where.making:
                lines.append(gradients.new(r.role, where.making, r.grad_bytes))
            lines += self.waiting_head(where, r.grad_bytes)
        else:
            lines = [gradients.so_far(r.role, where.done, r.grad_bytes)] if where.done else []
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
            kept = [gradients.accumulated(r.role, r.trainable, r.grad_bytes)]
            passing = [optimizer.step_scratch(r.optimizer, r.role, r.trainable, r.largest, r.step_bytes)]
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
