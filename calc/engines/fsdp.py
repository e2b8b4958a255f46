"""PyTorch FSDP: every rank keeps a shard of each layer and gathers whole layers while they run.

One group a decoder layer, everything else (embedding, final norm, head) in the root group, which stays gathered from
its first use to the end of backward. FSDP 2 read in torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_{param_group,
collectives}.py`: a gather fills a buffer, which is copied out into the layer's own parameters and lives until the next
gather; a reduction copies all gradients of a group into one input. FSDP 1 read in `distributed/fsdp/_runtime_utils.py`:
flat parameters, at most two gathered layers in flight, beside a 16-bit copy of the shard where that is in fp32. What
gathers the next layer in backward is a hook on the output of the first forward, which reentrant checkpointing runs
without gradient: then there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from calc.architecture import (
    Architecture,
    Head,
    Tensor,
    layer_kinds,
    layer_parameters,
    layer_tensors,
    parameters,
    tensors,
)
from calc.engines.partition import padded
from calc.engines.replica import Holder, Moments, Replica, Where, times
from calc.ledger import Line
from calc.memory import communication, gradients, host, optimizer, weights


@dataclass(frozen=True, slots=True)
class Fsdp(Holder):
    """`replica` under FSDP `version` 1 or 2; `offload`: shards, gradients and optimizer live on the host.

    That is PyTorch's CPUOffload; where a framework itself moves shards between phases, the replica's `leaves` says so.
    """

    replica: Replica
    version: int
    offload: bool = False
    _gathered: dict[tuple[str, int, bool], list[Line]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def adapter_layer(self) -> int:
        """LoRA elements of one layer."""
        return self.replica.adapter // self.replica.arch.layers

    @property
    def root_elements(self) -> int:
        """Elements of the root group: embedding, final norm, head."""
        return _root_elements(self.replica.arch, self.replica.head)

    @property
    def stepped(self) -> tuple[Tensor, ...]:
        """The parameters as the optimizer sees them: none of their own in FSDP 1, which flattens them."""
        return self.replica.trained_tensors if self.version == 2 else ()

    def stored(self, found: tuple[Tensor, ...], elements: int) -> int:
        """Elements of all ranks' shards together, padding included; FSDP 1 cuts flat parameters evenly."""
        return padded(found, self.replica.ranks) if self.version == 2 else elements

    def layer(self, index: int) -> int:
        """Elements that gathering layer `index` brings together."""
        return _layer_elements(self.replica.arch, index, self.replica.ranks, self.version) + self.adapter_layer

    def reduced(self, elements: int) -> Line:
        """This rank's shards of the reduced gradients of `elements` parameters."""
        r = self.replica
        share = self.stored(r.trained_tensors, r.trainable) / r.trainable
        return gradients.accumulated(r.role, int(elements * share), r.grad_bytes, r.ranks)

    def weights(self) -> list[Line]:
        """This rank's shard."""
        r = self.replica
        if self.offload:
            return []
        own = [
            r.packed(r.ranks)
            if r.quantised
            else weights.weights(
                r.role, self.stored(tensors(r.arch, head=r.head), r.parameters), r.weight_bytes, r.ranks, "weights#fsdp"
            )
        ]
        return [*own, weights.adapter(r.role, r.adapter, r.adapter_bytes, r.ranks)] if r.adapter else own

    def loading(self) -> Moments:
        """Groups are wrapped from the inside out; FSDP 1 flattens the root's parameters on the GPU before it cuts them.

        torch 2.13 `distributed/fsdp/_flat_param.py`, `flatten_tensors_into_flat_param`: parameters and their
        concatenation are alive together.
        """
        r = self.replica
        if self.version == 1 and not r.quantised and r.ranks > 1:
            layers = weights.weights(r.role, r.parameters - self.root_elements, r.weight_bytes, r.ranks, "weights#fsdp")
            flat = communication.gathered(r.role, "root group", self.root_elements, r.weight_bytes, 2)
            yield "root group flattened", [flat] if self.offload else [layers, flat]
        yield "shards on the GPU", self.weights()

    def root(self) -> list[Line]:
        """The root group, which stays gathered after a forward that no backward follows."""
        return [self.root_gathered(1)]

    def root_gathered(self, copies: int) -> Line:
        """The root group in the compute type; twice while the buffer it was gathered into is not given back."""
        return communication.gathered(
            self.replica.role, "root group", self.root_elements, self.replica.run.compute, copies
        )

    def states(self) -> list[Line]:
        """Shards of optimizer states."""
        r = self.replica
        if r.optimizer is None or self.offload:
            return []
        trained = self.stored(r.trained_tensors, r.trainable)
        return [optimizer.states(r.optimizer, r.role, trained, r.step_bytes, self.stepped, r.ranks)]

    def at(self, where: Where) -> list[Line]:
        """Gathered parameters, gradients not yet reduced, and reduced shards."""
        r = self.replica
        lines = self.gathered(where)
        if r.optimizer is None or not (where.backward or r.accumulates):
            return lines
        if r.defers and r.accumulates:
            return [*lines, *self.deferred(where)]
        if not self.offload and (where.above or r.accumulates):
            lines.append(self.reduced(r.trainable if r.accumulates else where.above))
        lines += self.tied(where, r.run.compute)
        lines += self.whole_embedding(where, r.run.compute)
        if where.segment == "reduce":
            lines += self.reducing_root()
        elif unreduced := where.root + where.here:
            lines.append(gradients.unreduced(r.role, unreduced, r.run.compute))
        return lines

    def deferred(self, where: Where) -> list[Line]:
        """Whole gradients kept since the first micro-batch; in the last one those of the layers above are reduced.

        FSDP 1 keeps them in the compute type, FSDP 2 in the type they are reduced in (torch 2.13 `_fsdp_param.py`,
        `to_accumulated_grad_if_needed`), where what this micro-batch makes lies beside it until it is added.
        """
        r, c = self.replica, self.replica.run.compute
        kept = r.reduce_bytes if self.version == 2 else c
        lines = [gradients.deferred(r.role, r.trainable - where.above, kept), *self.tied(where, r.run.compute)]
        if where.above and not self.offload:
            lines.append(self.reduced(where.above))
        if where.segment == "reduce":
            root = self.root_elements if r.run.trained else self.adapter_layer
            return lines if self.version == 1 and kept == r.reduce_bytes else [*lines, self.reducing(root)]
        if kept == c:
            return [*lines, gradients.new(r.role, where.making, c)] if where.making else lines
        fresh = where.root + where.here
        return [*lines, gradients.unreduced(r.role, fresh, c)] if fresh else lines

    def reducing(self, elements: int) -> Line:
        """The input of a group's reduce-scatter."""
        return communication.reducing(self.replica.role, elements, self.replica.reduce_bytes)

    def gathered(self, where: Where) -> list[Line]:
        """What is gathered at a place, computed once: many instants of a step share it."""
        key = where.segment, where.layer, where.backward
        if key not in self._gathered:
            self._gathered[key] = self.gathering(where)
        return [*self._gathered[key]]

    def gathering(self, where: Where) -> list[Line]:
        """Whole layers in the compute type: more copies while gathering runs ahead than anybody computes with."""
        r, c = self.replica, self.replica.run.compute
        if where.segment == "reduce":
            return []
        last = r.arch.layers - 1
        index = min(where.layer, last)
        lines = self.root()
        if where.segment in ("end", "outside", "waiting"):
            # the root's forward has ended, which frees the last gather's buffer; the lowest layer's reduction waits
            # for the root's
            lowest = self.adapter_layer or self.layer(0)
            ends = where.segment == "end" and r.optimizer is not None
            return [*lines, self.reducing(lowest)] if ends else lines
        if where.segment == "gather":
            # the buffer of the group before, the layer's own, and the parameters copied out of it
            copies = 3 if self.version == 2 else 2
            if self.version == 2 and r.ranks > 1 and not where.layer:
                # the group before the first layer is the root
                lines, copies = [self.root_gathered(2)], 2
        elif where.segment == "layer":
            ahead = where.layer > 0 and not r.run.reentrant
            copies = 2 if ahead or not where.backward else 1
        else:
            copies = 1
        if r.ranks == 1:
            # weights are cast into storage of their own, without a buffer
            copies = 1
        if r.quantised:
            packed = layer_parameters(r.arch, index)
            lines.append(communication.gathered(r.role, "4-bit layers", packed, weights.NF4[r.run.nested], copies))
            lines.append(communication.gathered(r.role, "adapters", self.adapter_layer, c, copies))
        else:
            lines.append(communication.gathered(r.role, "layers", self.layer(index), c, copies))
        if self.version == 1 and r.weight_bytes != c:
            lines.append(communication.cast_shard(r.role, self.layer(index), c, r.ranks))
        if where.segment == "layer" and where.backward and where.layer < last and r.optimizer:
            trained = self.adapter_layer or self.layer(where.layer + 1)
            lines.append(self.reducing(trained))
        return lines

    def reducing_root(self) -> list[Line]:
        """The root group's reduction, either as its input is filled or once its output exists, whichever is more."""
        r, c = self.replica, self.replica.run.compute
        if not r.run.trained:
            # adapters lie in layers alone: the lowest layer's are the last to leave
            return [self.reducing(self.adapter_layer)]
        elements = self.root_elements
        # a loop's variable keeps the gradient of the group's last parameter: an untied head (`foreach_reduce`)
        one = 0 if r.arch.tied or r.head != "lm" else r.embedding
        whole = self.reducing(elements)
        output = gradients.accumulated(r.role, elements, r.grad_bytes, r.ranks)
        if self.version == 1 and r.reduce_bytes == c:
            # the flat gradient is reduced as it is
            return [whole, output]
        if output.bytes + c * one > c * elements:
            return [whole, output, gradients.unreduced(r.role, one, c)]
        return [whole, gradients.unreduced(r.role, elements, c)]

    def stepping(self) -> Moments:
        """Sharded gradients, the root group still gathered no more, and what the optimizer allocates."""
        r = self.replica
        if r.optimizer and self.offload:
            yield "optimizer step on the host", []
        elif r.optimizer:
            kept = self.reduced(r.trainable)
            scratch = optimizer.step_scratch(r.optimizer, r.role, r.trainable, r.largest, r.step_bytes, r.ranks)
            yield "optimizer step", [kept, scratch]

    def handing(self, word: str) -> Line:
        """A state dict unshards group by group in the stored type, the root while the layers go by."""
        r = self.replica
        layer = max(self.layer(0), self.layer(-1))
        elements = {
            "parameter": r.embedding,
            "root": self.root_elements,
            "units": self.root_elements + max(layer, r.embedding),
            "copies": -(-r.parameters // r.ranks),
            "whole": r.parameters,
        }
        return communication.handed(r.role, word, elements.get(word, 0), r.weight_bytes)

    @property
    def units(self) -> tuple[int, ...]:
        """Elements of a rank's part of each group: the layers', then the root's."""
        r = self.replica
        layers = [self.layer(i) for i, n in layer_kinds(r.arch) for _ in range(n)]
        return tuple(-(-elements // r.ranks) for elements in (*layers, self.root_elements))

    def host(self, ranks: int) -> Moments:
        """What the node's ranks take: shards that PyTorch offloads, or that a framework moves between phases."""
        r = self.replica
        if r.leaves:
            # pinned: copied with `non_blocking=True` (verl `utils/fsdp_utils.py`)
            moved = [host.units(r.role, "weights", self.units, r.weight_bytes)] if "weights" in r.leaves else []
            yield "before the first step", times(moved, ranks)
            if "states" in r.leaves and r.optimizer:
                states = optimizer.state_bytes_per_parameter(r.optimizer, r.step_bytes)
                moved = [*moved, host.units(r.role, "optimizer_states", self.units, 4, int(states) // 4)]
            yield "after the first step", times(moved, ranks)
        for name, lines in self.offloaded() if self.offload else ():
            yield name, times(lines, ranks)

    def offloaded(self) -> Moments:
        """A rank's pinned shards of parameters and gradients, and the optimizer's states from its first step."""
        r = self.replica
        kept = [host.fsdp(r.role, "weights", tensors(r.arch, head=r.head), r.ranks, r.weight_bytes)]
        if r.adapter:
            kept.append(host.fsdp(r.role, "adapter", r.trained_tensors, r.ranks, r.adapter_bytes))
        if r.optimizer is None:
            yield "before the first step", kept
            return
        kept.append(host.fsdp(r.role, "gradients", r.trained_tensors, r.ranks, r.grad_bytes))
        yield "before the first step", kept
        states = optimizer.state_bytes_per_parameter(r.optimizer, r.step_bytes)
        yield "after the first step", [*kept, host.moments(r.role, -(-r.trainable // r.ranks), states)]


@lru_cache(maxsize=4096)
def _layer_elements(arch: Architecture, index: int, ranks: int, version: int) -> int:
    return padded(layer_tensors(arch, index), ranks) if version == 2 else layer_parameters(arch, index)


@lru_cache(maxsize=1024)
def _root_elements(arch: Architecture, head: Head) -> int:
    return parameters(arch, head=head) - sum(layer_parameters(arch, i) * n for i, n in layer_kinds(arch))
