"""PyTorch FSDP 1: each decoder layer and the rest of the model are flat parameters, of which every rank has a part.

Read in torch 2.13 `distributed/fsdp/_runtime_utils.py` and `_flat_param.py`, and traced. Memory is freed in the order
in which the host asks for it, so that one layer is gathered in forward, and two in backward, where a layer's backward
fetches the next layer as it begins. A flat parameter has its gradient once all of its parts have theirs: autograd joins
them in a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from calc.base.ledger import Line, total
from calc.engines.fsdp import Fsdp
from calc.engines.replica import Moments, Where
from calc.memory import communication, gradients, weights
from calc.models.architecture import Architecture, LayerSpec, Tensor, layer_parameters, vision_block


@dataclass(frozen=True)
class Fsdp1(Fsdp):
    """`replica` under FSDP 1; adapters are units of their own, or lie in their layer's flat parameter."""

    @property
    def joined(self) -> bool:
        """True if adapters and the frozen weights beside them are one flat parameter, with one gradient."""
        return self.replica.run.adapter is not None and self.replica.run.adapter.joined

    @property
    def apart(self) -> bool:
        """True if adapters have flat parameters of their own, and layers no gradient."""
        return self.replica.adapter > 0 and not self.joined

    @property
    def first_adapter(self) -> int:
        """Elements of the adapter matrix that a layer's backward comes to last."""
        return self.replica.trained_tensors[0].elements

    @property
    def copies(self) -> bool:
        """True if gathering a unit takes memory: a single rank has the weights already, unless they have to be cast."""
        return self.replica.ranks > 1 or self.replica.weight_bytes != self.replica.run.compute

    @property
    def stepped(self) -> tuple[Tensor, ...]:
        """Empty: the optimizer sees parts of flat parameters."""
        return ()

    def stored(self, found: tuple[Tensor, ...], elements: int) -> int:
        """Elements of all ranks' shards together: flat parameters are cut evenly."""
        return elements

    def layer_of(self, spec: LayerSpec) -> int:
        """Elements of the flat parameter of a layer of the kind `spec`."""
        return layer_parameters(self.replica.arch, spec.shapes) + self.adapter_layer * self.joined

    def layers(self, first: int = 0) -> int:
        """Elements of the flat parameters of the layers from `first` on."""
        number = self.replica.arch.layers - first
        return _layers(self.replica.arch, first) + number * self.adapter_layer * self.joined

    @property
    def differentiated(self) -> int:
        """Elements of all flat gradients."""
        return self.layers() if self.joined else self.replica.trainable

    def table_bytes(self) -> int:
        """Those of the compute type, to which the first forward casts buffers (torch `_runtime_utils.py`)."""
        return self.replica.run.compute

    def loading(self) -> Moments:
        """The instants of loading: the root unit's parameters are flattened on the GPU, then every rank has its shards.

        Units are wrapped, and cut, from the inside out, the root last. torch 2.13 `distributed/fsdp/_flat_param.py`,
        `flatten_tensors_into_flat_param`: parameters and their concatenation are alive together.
        """
        r = self.replica
        if not r.quantised and r.ranks > 1:
            unit = max(self.outer)
            layers = weights.weights(r.role, r.parameters - unit, r.weight_bytes, r.ranks, "weights#fsdp")
            flat = communication.gathered(r.role, "root group", unit, r.weight_bytes, 2)
            yield "root group flattened", [flat] if self.offload else [layers, flat]
        yield "shards on the GPU", self.weights()

    def root(self) -> list[Line]:
        """The root FSDP unit, which stays gathered after a forward that no backward follows."""
        return super().root() if self.copies else []

    def at(self, where: Where) -> list[Line]:
        """Gathered parameters, gradients not yet reduced, and reduced shards."""
        r, c, lines = self.replica, self.replica.run.compute, self.gathered(where)
        if r.optimizer is None or not (where.backward or r.accumulates):
            return lines
        if self.apart:
            return [*lines, *self.own(where)]
        lines += self.kept(where)
        if where.segment in ("join", "reduce"):
            return [*lines, *self.leaving(where)]
        if not where.backward:
            return lines
        fresh = gradients.unreduced(r.role, where.root + where.here, c)
        return [*lines, fresh, *self.tied(where, c), *self.whole_embedding(where, c)]

    def own(self, where: Where) -> list[Line]:
        """Gradients of adapters in units of their own: shards of those made so far or, while reduction waits, whole."""
        r = self.replica
        if r.defers and r.accumulates:
            return [gradients.deferred(r.role, r.trainable, r.run.compute)]
        return self.shards(where.above + where.here)

    def shards(self, made: int) -> list[Line]:
        """Reduced shards of the `made` elements, or of all if earlier micro batches have left theirs on the GPU.

        Offloaded ones are copied to the host as they are made, and freed as backward ends (`_flat_param.py`,
        `prepare_gradient_for_optim`, which deletes `_saved_grad_shard`).
        """
        done = self.differentiated if self.replica.accumulates and not self.offload else made
        return [self.reduced(done)] if done else []

    def kept(self, where: Where) -> list[Line]:
        """Gradients of units that have theirs: shards or, while reduction waits for the last micro batch, whole ones.

        The last micro batch has shards of the layers above, and whole gradients of all other units. A micro batch
        before it has whole gradients only: in a step's second, if it is not the last, those of all units exist already.
        """
        r, c = self.replica, self.replica.run.compute
        first = 0 if where.segment in ("end", "reduce") else where.layer + 1
        above = self.layers(first) if where.backward else 0
        if not (r.defers and r.accumulates):
            return self.shards(above)
        last = [gradients.deferred(r.role, self.differentiated - above, c)]
        if above:
            last.append(self.reduced(above))
        before = [gradients.deferred(r.role, self.differentiated if r.micro_batches > 2 else above, c)]
        return max(last, before, key=total)

    @property
    def casts(self) -> bool:
        """True if a unit's gradient is cast before it is reduced, by when the unit's own weights have been freed."""
        return self.replica.reduce_bytes > self.replica.run.compute

    def leaving(self, where: Where) -> list[Line]:
        """A unit's gradients as they become one: joined beside all parts, or cast beside the reduction's output."""
        r, c, root = self.replica, self.replica.run.compute, where.segment == "reduce"
        if root and self.joined:
            return []
        unit = max(self.outer) if root else self.layer(where.layer)
        lines = [gradients.joined(r.role, unit, c)]
        waiting = self.root_elements - unit if root else where.root
        if waiting:
            lines.append(gradients.unreduced(r.role, waiting, c))
        if not self.casts:
            return [*lines, gradients.unreduced(r.role, unit, c)]
        lines.append(communication.reducing(r.role, unit, r.reduce_bytes))
        return lines if r.ranks == 1 else [*lines, self.reduced(unit)]

    def gathering(self, where: Where) -> list[Line]:
        """The gathered units, whole in the compute type."""
        r = self.replica
        if not self.copies:
            return []
        match where.segment:
            case "reduce":
                # a root without gradients has been freed, too
                return [] if r.adapter or self.casts else self.root()
            case "layer" | "gather" | "join":
                left = where.segment == "join" and self.casts
                layers = [where.layer] * (not left) + [where.layer - 1] * self.fetches(where)
            case "head" | "loss" | "norm":
                layers = [r.arch.layers - 1] * (where.backward and not r.run.reentrant)
            case "tower":
                block = vision_block(r.arch)
                copies = 2 if where.backward else 1
                blocks = communication.gathered(r.role, "vision blocks", block, r.run.compute, copies)
                return [*self.root(), blocks]
            case "outside" | "waiting" | "end":
                layers = []
            case other:
                assert_never(other)
        lines = [*self.root(), *self.units_gathered(layers)]
        if self.fetches_embedding(where):
            lines.append(self.end_gathered("embedding", 1))
        if where.segment == "gather" and r.weight_bytes != r.run.compute:
            lines.append(communication.cast_shard(r.role, self.layer(where.layer), r.run.compute, r.ranks))
        return lines

    def fetches(self, where: Where) -> bool:
        """True if the next layer is gathered while another's backward runs.

        A hook on the outputs of the first forward asks for it, which reentrant checkpointing runs without gradient. If
        adapters are units of their own, it is the hook of the layer's first adapter, which comes last in backward.
        """
        if not where.backward or not where.layer or self.replica.run.reentrant:
            return False
        return not self.apart or where.here >= self.adapter_layer - self.first_adapter

    def fetches_embedding(self, where: Where) -> bool:
        """True if an embedding that is a unit of its own is gathered: for its backward, fetched with the first layer's.

        The root has its gradient then, too: the function that joins its parts was the first of the forward, and
        autograd comes to it last (torch 2.13 `csrc/autograd/engine.cpp`, `CompareNodeTaskTime`: by sequence number).
        """
        first = where.segment in ("layer", "join") and not where.layer and not self.replica.run.reentrant
        return bool(self.replica.ends) and where.backward and (first or where.segment == "end")

    def units_gathered(self, layers: Sequence[int]) -> list[Line]:
        """The gathered weights of `layers`."""
        r = self.replica
        if not layers:
            return []
        if r.quantised:
            packed = layer_parameters(r.arch, r.arch.specs[layers[0]])
            return [communication.gathered(r.role, "4-bit layers", packed, weights.PACKED, len(layers))]
        return [communication.gathered(r.role, "layers", sum(map(self.layer, layers)), r.run.compute)]


@lru_cache(maxsize=4096)
def _layers(arch: Architecture, first: int) -> int:
    return sum([layer_parameters(arch, spec) for spec in arch.specs[first:]])
