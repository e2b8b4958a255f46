"""Plain PyTorch: the whole model on every GPU, alone or under DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

from calc.engines.replica import Moments, Replica, Where
from calc.ledger import Line
from calc.memory import communication, gradients, optimizer, weights


@dataclass(frozen=True, slots=True)
class Plain:
    """`replica` as one process holds it; with `buckets` under DDP."""

    replica: Replica
    buckets: bool = False

    def weights(self) -> list[Line]:
        """The model's own weights and its adapters."""
        r = self.replica
        own = (
            weights.quantised(r.role, r.arch, r.head, r.weight_bytes)
            if r.quantised
            else weights.weights(r.role, r.parameters, r.weight_bytes)
        )
        return [own, weights.adapter(r.role, r.adapter, r.adapter_bytes)] if r.adapter else [own]

    def loading(self) -> Moments:
        """One moment: the weights are on the GPU."""
        yield "weights on the GPU", self.weights()

    def resident(self) -> list[Line]:
        """Weights, the fp32 master of mixed precision, optimizer states, DDP's buckets."""
        r, lines = self.replica, self.weights()
        if r.optimizer:
            if r.master_bytes:
                lines.append(weights.master(r.role, r.trainable, r.master_bytes))
            lines.append(optimizer.states(r.optimizer, r.role, r.trainable, r.step_bytes, r.trained_tensors))
            if self.buckets:
                lines.append(communication.ddp_buckets(r.role, r.trainable, r.grad_bytes))
        return lines

    def at(self, where: Where) -> list[Line]:
        """Gradients: those of this pass so far, or all of them from the micro-batches before."""
        r = self.replica
        if r.optimizer is None:
            return []
        if r.accumulates:
            lines = [gradients.accumulated(r.role, r.trainable, r.grad_bytes)]
            if where.making:
                lines.append(gradients.new(r.role, where.making, r.grad_bytes))
        else:
            lines = [gradients.so_far(r.role, where.done, r.grad_bytes)] if where.done else []
        if where.segment == "end" and r.ties_gradients:
            contiguous = r.run.precision == "autocast"
            elements = r.arch.vocab * r.arch.hidden
            lines.append(gradients.tied_embedding(r.role, elements, r.grad_bytes, contiguous=contiguous))
        return lines

    def stepping(self) -> Moments:
        """All gradients and what the optimizer allocates."""
        r = self.replica
        if r.optimizer:
            kept = gradients.accumulated(r.role, r.trainable, r.grad_bytes)
            yield (
                "optimizer step",
                [kept, optimizer.step_scratch(r.optimizer, r.role, r.trainable, r.largest, r.step_bytes)],
            )

    def host(self) -> Moments:
        """Nothing of a plain replica stays on the host."""
        return iter(())
