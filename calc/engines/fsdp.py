"""PyTorch FSDP 2: every rank keeps a shard of each layer and gathers whole layers while they run.

Each decoder layer is an FSDP unit; everything else (embedding, final norm, head) is the root FSDP unit, which stays
gathered from its first use to the end of backward, unless a trainer makes units of the embedding and of the head (see
`calc.base.plan.Role`, `ends`). Read in torch 2.13
`distributed/fsdp/_fully_shard/_fsdp_{param_group,collectives}.py`: a gather fills a buffer, which is copied out into
the layer's own parameters and lives until the next gather; a reduction copies all gradients of a unit into one input.
In backward the next layer is gathered by a hook on the output of the first forward, which reentrant checkpointing runs
without gradient: then only one layer is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, assert_never

from calc.base.ledger import Line, total
from calc.base.plan import Handed
from calc.engines.replica import Holder, Moments, Place, Replica, Where, times
from calc.engines.zero_partition import padded
from calc.memory import communication, gradients, host, optimizer, weights
from calc.models.architecture import (
    Architecture,
    Head,
    LayerSpec,
    Tensor,
    largest_in_layer,
    layer_kinds,
    layer_parameters,
    layer_tensors,
    passed_tensors,
    tensors,
    vision_block,
    vision_tensors,
)


@dataclass(frozen=True)
class Fsdp(Holder):
    """`replica` under FSDP 2; `offload`: shards, gradients and optimizer live on the host.

    This is PyTorch's CPUOffload; if a framework itself moves shards between phases, the replica's `leaves` says so.
    """

    replica: Replica
    offload: bool = False
    _gathered: dict[tuple[Place, int, bool, bool], list[Line]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def adapter_layer(self) -> int:
        """LoRA elements of one layer."""
        return (self.replica.adapter - self.replica.vision_adapter) // self.replica.arch.layers

    @cached_property
    def root_elements(self) -> int:
        """Elements of the root FSDP unit: embedding, final norm, head; with padding, where shards have some."""
        root = _root(self.replica.arch, self.replica.head)
        return self.stored(root, sum([t.elements * t.count for t in root]))

    @cached_property
    def outer(self) -> tuple[int, ...]:
        """Elements of each unit outside the layers: the root, or the embedding, and the final norm with the head."""
        embedding = self.replica.embedding
        return (embedding, self.root_elements - embedding) if self.replica.ends else (self.root_elements,)

    @property
    def stepped(self) -> tuple[Tensor, ...]:
        """The parameters as the optimizer sees them."""
        return self.replica.trained_tensors

    def stored(self, found: tuple[Tensor, ...], elements: int) -> int:
        """Elements of all ranks' shards together, padding included; of experts those of all GPUs that share them."""
        shared, ranks = self.replica.arch.expert_ranks, self.replica.ranks
        if shared == 1:
            return padded(found, ranks)
        experts, others = _by_experts(found)
        return padded(others, ranks) + shared * padded(experts, ranks // shared)

    def layer(self, index: int) -> int:
        """Elements that gathering layer `index` brings together."""
        return self.layer_of(self.replica.arch.specs[index])

    def layer_of(self, spec: LayerSpec) -> int:
        """Elements that gathering a layer of the kind `spec` brings together."""
        r = self.replica
        return _layer_elements(r.arch, spec.shapes, r.ranks, self.experts_outside) + self.adapter_layer

    @property
    def experts_outside(self) -> bool:
        """True if routed experts are in no unit, as no two ranks have the same ones (NeMo Automodel's `apply_fsdp`)."""
        return self.replica.run.dispatched and self.replica.ranks == self.replica.arch.expert_ranks

    @property
    def apart(self) -> bool:
        """True if adapters are FSDP units of their own; under FSDP 2 they lie in their layer's."""
        return False

    @property
    def differentiated(self) -> int:
        """Elements that have gradients."""
        return self.replica.trainable

    def reduced(self, elements: int) -> Line:
        """This rank's shards of the reduced gradients of `elements` parameters."""
        r = self.replica
        share = self.stored(r.trained_tensors, r.trainable) / r.trainable
        return gradients.accumulated(r.role, int(elements * share), r.grad_bytes, r.ranks)

    def weights(self) -> list[Line]:
        """This rank's shard of the weights and of the adapters."""
        r = self.replica
        if self.offload:
            return [*([r.scales()] if r.quantised else []), *self.tables()]
        own = [
            r.packed(r.ranks)
            if r.quantised
            else weights.weights(
                r.role, self.stored(tensors(r.arch, head=r.head), r.parameters), r.weight_bytes, r.ranks, "weights#fsdp"
            )
        ]
        adapter = [weights.adapter(r.role, r.adapter, r.adapter_bytes, r.ranks)] if r.adapter else []
        return [*own, *adapter, *self.tables()]

    def loading(self) -> Moments:
        """One instant: a rank has its shards from the start."""
        yield "shards on the GPU", self.weights()

    def root(self) -> list[Line]:
        """The root FSDP unit, or the head's, which stays gathered after a forward that no backward follows."""
        match self.replica.ends:
            case "":
                return [self.root_gathered(1)]
            case "kept" | "embedding":
                return [self.end_gathered("head", 1)]
            case "freed":
                return []
            case other:
                assert_never(other)

    def root_gathered(self, copies: int) -> Line:
        """The root FSDP unit in the compute type; two copies until the buffer it was gathered into is freed."""
        return communication.gathered(
            self.replica.role, "root group", self.root_elements, self.replica.run.compute, copies
        )

    def end_gathered(self, which: Literal["embedding", "head"], copies: int) -> Line:
        """The embedding's unit, or the head's, in the compute type."""
        elements = self.outer[0 if which == "embedding" else -1]
        return communication.gathered(self.replica.role, which, elements, self.replica.run.compute, copies)

    def around(self, where: Where) -> list[Line]:
        """The units gathered beside layers: the root, or the embedding's or the head's where they are units.

        Each is gathered when it runs: the embedding again in backward, ahead of its own, and for nothing.
        """
        if not self.replica.ends:
            return self.root()
        if self.replica.keeps_gathered:
            return self.around_kept(where)
        several = self.replica.ranks > 1
        match where.segment:
            case "outside" | "waiting":
                return self.root()
            case "norm" | "head" | "loss":
                return [self.end_gathered("head", 2 if several and not where.backward else 1)]
            case "layer" if where.layer or not where.backward:
                return []
            case "layer" | "end":
                return [self.end_gathered("embedding", 1)]
            case "gather" if several and not where.layer:
                return [self.end_gathered("embedding", 1)]  # the buffer, until the first layer is gathered
            case "gather" | "join" | "tower" | "reduce":
                return []
            case other:
                assert_never(other)

    def around_kept(self, where: Where) -> list[Line]:
        """The embedding's unit, which stays to the end of backward, and the head's, which stays until its own."""
        several = self.replica.ranks > 1
        match where.segment:
            case "norm" | "head" | "loss":
                head = [self.end_gathered("head", 2 if several and not where.backward else 1)]
            case "outside" | "waiting":
                head = [self.end_gathered("head", 1)]
            case "gather" | "layer" | "end" | "join" | "tower" | "reduce":
                head = []
            case other:
                assert_never(other)
        first = where.segment == "gather" and several and not where.layer  # its buffer, until a layer is gathered
        return [self.end_gathered("embedding", 2 if first else 1), *head]

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
        if r.in_backward:
            return [*lines, *self.at_once(where)]
        if r.defers and r.accumulates:
            return [*lines, *max(self.last(where), self.before(where), key=total)]
        lines += self.pending(where)
        above, waiting = self.reduced_before(where)
        if not self.offload and (above or r.accumulates):
            lines.append(self.reduced(r.trainable if r.accumulates else above))
        lines += self.tied(where, r.run.compute)
        lines += self.whole_embedding(where, r.run.compute)
        if where.segment == "reduce":
            lines += self.reducing_root(where)
        elif unreduced := waiting + where.here:
            lines.append(gradients.unreduced(r.role, unreduced, r.run.compute))
        return lines

    def reduced_before(self, where: Where) -> tuple[int, int]:
        """Elements outside the layer at work whose gradients are reduced, and those that wait for their unit's.

        The root unit's wait to the end of backward; a head's of its own are reduced before the layers'.
        """
        passed = where.segment in ("layer", "end") or (where.segment == "reduce" and not where.layer)
        return (where.above + where.root, 0) if self.replica.ends and passed else (where.above, where.root)

    def at_once(self, where: Where) -> list[Line]:
        """Gradients where parameters step in backward: those of the layer at work, and shards of one unit that step.

        Hooks on the shards run as soon as their unit is reduced (torch 2.13 `_fsdp_collectives.py`, `foreach_reduce`).
        """
        r, c = self.replica, self.replica.run.compute
        lines = [*self.pending(where), *self.tied(where, c), *self.whole_embedding(where, c)]
        if where.segment == "reduce":
            return [*lines, *self.reducing_root(where)]
        if where.segment in ("layer", "end") and where.above:
            above = 0 if where.segment == "end" else min(where.layer + 1, r.arch.layers - 1)
            lines += self.stepped_shards(self.layer(above), self.largest_in(above))
        elif where.segment == "layer" and r.ends:
            lines += self.stepped_shards(self.outer[-1], r.embedding)
        return [*lines, gradients.unreduced(r.role, self.reduced_before(where)[1] + where.here, c)]

    def stepped_shards(self, unit: int, largest: int) -> list[Line]:
        """A rank's shards of a unit's gradients, and the temporaries of the step of the largest of them."""
        r = self.replica
        assert r.optimizer
        each = optimizer.single_step(r.optimizer, r.role, -(-largest // r.ranks), r.grad_bytes, r.step_bytes)
        return [self.reduced(unit), each]

    def largest_in(self, layer: int) -> int:
        """Elements of the largest tensor in a layer."""
        return largest_in_layer(self.replica.arch, self.replica.arch.specs[layer])

    def last(self, where: Where) -> list[Line]:
        """Gradients in a step's last micro batch, if reduction waits for it: whole, but shards of the layers above.

        The whole ones are kept in the type they are reduced in (torch 2.13 `_fsdp_param.py`,
        `to_accumulated_grad_if_needed`).
        """
        r = self.replica
        left = r.trainable - where.above
        lines = [*self.whole(left, left - self.root_elements), *self.pending(where)]
        if where.above and not self.offload:
            lines.append(self.reduced(where.above))
        if where.segment == "reduce":
            return [*lines, self.reducing(self.root_elements if r.run.trained else self.adapter_layer)]
        return [*lines, *self.fresh(where)]

    def before(self, where: Where) -> list[Line]:
        """Gradients in the micro batch before the last, which reduces nothing.

        Those of all layers exist already, unless that micro batch is the first.
        """
        r = self.replica
        if not where.backward or where.segment == "reduce":
            return []
        there, layers = (r.trainable, r.trainable - self.root_elements) if r.micro_batches > 2 else (where.above,) * 2
        return [*self.whole(there, layers), *self.fresh(where)]

    def whole(self, elements: int, layers: int) -> list[Line]:
        """Whole gradients of `elements` parameters, `layers` of them in layers, that wait for the last micro batch.

        They have the type that they are reduced in, but those of experts in no unit, which are added up as they are.
        """
        r = self.replica
        split = self.experts_outside and r.reduce_bytes != r.grad_bytes
        share = layers / (r.trainable - self.root_elements) if split else 0
        apart = round(share * sum([t.elements * t.count for t in _by_experts(r.trained_tensors)[0]]))
        own = [gradients.deferred(r.role, elements - apart, r.reduce_bytes)]
        return [*own, gradients.deferred(r.role, apart, r.grad_bytes)] if apart else own

    def fresh(self, where: Where) -> list[Line]:
        """New gradients of a micro batch, until they are added to the kept ones.

        If the kept ones have another type, the new ones of a whole unit are there at once.
        """
        r, c = self.replica, self.replica.run.compute
        lines = self.tied(where, c)
        if r.reduce_bytes == c:
            return [*lines, *self.waiting_head(where, c), gradients.new(r.role, where.making, c)]
        return [*lines, gradients.unreduced(r.role, where.root + where.here, c)]

    def pending(self, where: Where) -> list[Line]:
        """The input of the reduction under way: the layer above's, or the lowest layer's while the root unit waits.

        If a vision tower is trained, its lowest block comes after that layer.
        """
        if not where.backward:
            return []
        match where.segment:
            case "end" if where.seen:
                return [self.reducing(vision_block(self.replica.arch))]
            case "end" | "tower":
                return [self.reducing(self.adapter_layer or self.layer(0))]
            case "layer" if where.layer < self.replica.arch.layers - 1:
                return [self.reducing(self.adapter_layer or self.layer(where.layer + 1))]
            case "layer" if self.replica.ends:
                return [self.reducing(self.outer[-1])]
            case "layer" | "gather" | "join" | "norm" | "head" | "loss" | "outside" | "waiting" | "reduce":
                return []
            case other:
                assert_never(other)

    def reducing(self, elements: int) -> Line:
        """The input of an FSDP unit's reduce-scatter."""
        return communication.reducing(self.replica.role, elements, self.replica.reduce_bytes)

    def gathered(self, where: Where) -> list[Line]:
        """The parameters gathered at a place, computed once, as many instants of a step share it."""
        key = where.segment, where.layer, where.backward, self.fetches(where)
        if key not in self._gathered:
            self._gathered[key] = self.gathering(where)
        return [*self._gathered[key]]

    def fetches(self, where: Where) -> bool:
        """True if the next layer is gathered while another's backward runs."""
        return where.layer > 0

    def gathering(self, where: Where) -> list[Line]:
        """The root unit and whole layers in the compute type: several copies of a layer while gathering runs ahead."""
        r, c = self.replica, self.replica.run.compute
        index = min(where.layer, r.arch.layers - 1)
        if r.keeps_gathered:
            last = where.segment == "reduce" and not where.layer
            return [] if last else [*self.around(where), *self.layers_kept(where)]
        lines = self.around(where)
        stays = [communication.gathered(r.role, "layers", self.layer(index), r.gathers or c)] if r.keeps_last else []
        match where.segment:
            case "reduce" if not where.layer:
                return []
            case "end":
                return lines
            case "outside" | "waiting":
                # the root's forward has ended, which frees the last gather's buffer
                return [*lines, *stays]
            case "tower":
                # the block that runs and the next one's buffer
                block = vision_block(r.arch)
                return [*lines, communication.gathered(r.role, "vision blocks", block, c, 2 if r.ranks > 1 else 1)]
            case "gather":
                # the buffer of the unit before, the layer's own, and the parameters copied out of it
                copies = 3
                if r.ranks > 1 and not where.layer:
                    # the unit before the first layer is the root, or the embedding
                    lines, copies = lines if r.ends else [self.root_gathered(2)], 2
            case "layer":
                copies = 2 if self.fetches(where) or not where.backward else 1
            case "norm" | "head" | "loss" if r.ends and not where.backward:
                return [*lines, *stays]  # the head's gather has freed the last layer's buffer
            case "norm" | "head" | "loss" if r.keeps_last and not where.backward:
                copies = 2  # what stays, and the buffer that it was gathered in
            case "join" | "norm" | "head" | "loss" | "reduce":
                copies = 1
            case other:
                assert_never(other)
        if r.ranks == 1:
            # weights are cast into storage of their own, without a buffer
            copies = 1
        if r.quantised:
            packed = layer_parameters(r.arch, r.arch.specs[index])
            lines.append(communication.gathered(r.role, "4-bit layers", packed, weights.PACKED, copies))
            lines.append(communication.gathered(r.role, "adapters", self.adapter_layer, c, copies))
        else:
            lines.append(communication.gathered(r.role, "layers", self.layer(index), r.gathers or c, copies))
        return lines

    def layers_kept(self, where: Where) -> list[Line]:
        """Layers that stay gathered from their forward to their backward, and the buffers of a gather in forward.

        torch 2.13 `_fsdp_param_group.py`: `post_forward` reshards nothing, so that `unshard` returns at once in
        backward, and `post_backward` reshards.
        """
        r, c = self.replica, self.replica.run.compute
        buffers = 0
        match where.segment:
            case "end":
                return []
            case "gather":
                number = where.layer + 1
                buffers = 2 if where.layer else 1  # the unit before has its own until this one is copied out
            case "layer":
                number, buffers = where.layer + 1, 0 if where.backward else 1
            case "norm" | "head" | "loss":
                # the head's gather, where it is a unit, has freed the last layer's buffer
                number, buffers = r.arch.layers, 0 if where.backward or r.ends else 1
            case "outside" | "waiting" | "tower" | "join" | "reduce":
                number = r.arch.layers
            case other:
                assert_never(other)
        elements = _first_layers(r.arch, number, r.ranks, self.experts_outside) + number * self.adapter_layer
        lines = [communication.gathered(r.role, "layers", elements, r.gathers or c)]
        if buffers and r.ranks > 1:
            index = min(where.layer, r.arch.layers - 1)
            lines.append(communication.gathered(r.role, "buffers", self.layer(index), r.gathers or c, buffers))
        return lines

    def reducing_root(self, where: Where) -> list[Line]:
        """The root unit's reduction, either as its input is filled or once its output exists, whichever takes more.

        Where it is no unit, the head's, above all layers, or the embedding's.
        """
        r, c = self.replica, self.replica.run.compute
        if not r.run.trained:
            # adapters lie in layers alone: the lowest layer's are reduced last
            return [self.reducing(self.adapter_layer)]
        elements = self.outer[-1 if where.layer else 0]
        # a loop's variable keeps the gradient of the unit's last parameter: an untied head (`foreach_reduce`)
        one = 0 if r.arch.tied or r.head != "lm" else r.embedding
        whole = self.reducing(elements)
        output = gradients.accumulated(r.role, elements, r.grad_bytes, r.ranks)
        if output.bytes + c * one > c * elements:
            return [whole, output, gradients.unreduced(r.role, one, c)]
        return [whole, gradients.unreduced(r.role, elements, c)]

    def stepping(self) -> Moments:
        """Sharded gradients and the optimizer's temporaries; the root unit is no longer gathered."""
        r = self.replica
        if r.in_backward:
            yield "optimizer step of the root unit", self.stepped_shards(self.outer[0], r.embedding)
        elif r.optimizer and self.offload:
            yield "optimizer step on the host", []
        elif r.optimizer:
            kept = self.reduced(self.differentiated)
            trained = self.stored(r.trained_tensors, r.trainable)
            scratch = optimizer.step_scratch(r.optimizer, r.role, trained, r.largest, r.step_bytes, r.ranks)
            yield "optimizer step", [kept, scratch]

    def handing(self, word: Handed) -> Line:
        """A state dict unshards unit by unit in the stored type, the root unit while the layers go by.

        A single rank has what FSDP 1 summons (`whole`, a `layer`, an `adapter`) as it is: NO_SHARD never unshards
        (torch 2.7 `distributed/fsdp/_flat_param.py:1346`). A layer's state dict, of shards, copies them
        (`_chunk_dtensor`).
        """
        r = self.replica
        layer = max([self.layer_of(spec) for spec, _ in layer_kinds(r.arch)])
        summoned = layer + self.adapter_layer * self.apart
        adapter = max([t.elements for t in r.trained_tensors], default=0)
        elements: dict[Handed, int] = {
            "parameter": r.embedding,
            "root": self.root_elements,
            "units": self.root_elements + max(layer, r.embedding),
            "copies": -(-r.parameters // r.ranks),
            "whole": r.parameters * (r.ranks > 1),
            "layer": (summoned + -(-summoned // r.ranks)) * (r.ranks > 1),
            "adapter": adapter * (r.ranks > 1),
            "clone": 0,
            "bucket": 0,
        }
        return communication.handed(r.role, word, elements[word], r.weight_bytes)

    @property
    def units(self) -> tuple[int, ...]:
        """Elements of a rank's part of each FSDP unit: the layers, the root, and adapters that are units."""
        r = self.replica
        layers = [self.layer_of(spec) for spec, n in layer_kinds(r.arch) for _ in range(n)]
        if r.arch.vision:
            layers += [vision_block(r.arch)] * r.arch.vision.blocks.layers
        groups = tuple(-(-elements // r.ranks) for elements in (*layers, *self.outer))
        return (*groups, *self.adapters) if self.apart else groups

    @property
    def adapters(self) -> tuple[int, ...]:
        """Elements of a rank's part of each adapter matrix, which has states of its own; empty without adapters."""
        r = self.replica
        matrices = [t.elements for t in r.trained_tensors for _ in range(t.count)] if r.adapter else []
        return tuple(-(-elements // r.ranks) for elements in matrices)

    def host(self, ranks: int) -> Moments:
        """Host memory of the node's ranks: the model as it is read, and shards that PyTorch or a framework offloads."""
        r = self.replica
        if read := r.built(ranks):
            yield "loading", read
        if r.leaves:
            # pinned: copied with `non_blocking=True` (verl `utils/fsdp_utils.py`)
            moved = (
                [host.units(r.role, "weights", self.units, r.weight_bytes, pins=r.pins)]
                if "weights" in r.leaves
                else []
            )
            yield "before the first step", times(moved, ranks)
            if "states" in r.leaves and r.optimizer:
                states = optimizer.state_bytes_per_parameter(r.optimizer, r.step_bytes)
                trained = self.adapters or self.units
                moved = [*moved, host.units(r.role, "optimizer_states", trained, 4, int(states) // 4, r.pins)]
            yield "after the first step", times(moved, ranks)
        for name, lines in self.offloaded() if self.offload else ():
            yield name, times(lines, ranks)

    def offloaded(self) -> Moments:
        """A rank's pinned shards of parameters and gradients, and the optimizer's states from its first step."""
        r = self.replica
        kept = [
            host.fsdp(r.role, "weights", part, r.ranks, b, r.pins)
            for b, part in r.stored_as(tensors(r.arch, head=r.head))
        ]
        if r.adapter:
            kept.append(host.fsdp(r.role, "adapter", r.trained_tensors, r.ranks, r.adapter_bytes, r.pins))
        if r.optimizer is None:
            yield "before the first step", kept
            return
        kept.append(host.fsdp(r.role, "gradients", r.trained_tensors, r.ranks, r.grad_bytes, r.pins))
        yield "before the first step", kept
        states = optimizer.state_bytes_per_parameter(r.optimizer, r.step_bytes)
        yield "after the first step", [*kept, host.moments(r.role, -(-r.trainable // r.ranks), states)]


@lru_cache(maxsize=4096)
def _layer_elements(arch: Architecture, spec: LayerSpec, ranks: int, experts_outside: bool) -> int:
    found = layer_tensors(arch, spec)
    if arch.expert_ranks == 1:
        return padded(found, ranks)
    # experts are a unit of their own, over the ranks that have the same ones
    experts, others = _by_experts(found)
    return padded(others, ranks) + (0 if experts_outside else padded(experts, ranks // arch.expert_ranks))


def _by_experts(found: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The tensors of routed experts, and all others."""
    return tuple([t for t in found if t.kind == "expert"]), tuple([t for t in found if t.kind != "expert"])


@lru_cache(maxsize=4096)
def _first_layers(arch: Architecture, number: int, ranks: int, experts_outside: bool) -> int:
    """Elements that gathering the `number` lowest layers brings together."""
    return sum([_layer_elements(arch, spec.shapes, ranks, experts_outside) for spec in arch.specs[:number]])


@lru_cache(maxsize=1024)
def _root(arch: Architecture, head: Head) -> tuple[Tensor, ...]:
    # vision blocks are units of their own, too (Transformers' `_no_split_modules`); patches and projector are not
    units = {t.name for part in ("blocks", "unread") for t in vision_tensors(arch, part) if ".*." in t.name}
    units |= {t.name for t in passed_tensors(arch)}
    units |= {t.name for spec, _ in layer_kinds(arch) for t in layer_tensors(arch, spec)}
    return tuple([t for t in tensors(arch, head=head) if t.name not in units])
