"""DeepSpeed ZeRO 1, 2 and 3: what each stage partitions, and the buffers around it.

Read in DeepSpeed 0.13.5, 0.16.4 and 0.19.5: `runtime/zero/{stage_1_and_2,stage3,partitioned_param_coordinator}.py`,
`runtime/bf16_optimizer.py`, `ops/adam/*.py`. Frozen parameters are never flattened; ZeRO-3 partitions them too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import NamedTuple, assert_never

from calc.base.ledger import Line, total
from calc.base.plan import DeepSpeed, Handed
from calc.base.versions import numbers
from calc.engines.replica import Holder, Moments, Replica, Where, times
from calc.engines.zero_partition import Cut, both, cut
from calc.memory import communication, gradients, host, optimizer, weights
from calc.models.architecture import (
    Architecture,
    Tensor,
    largest_in_layer,
    layer_parameters,
    layer_tensors,
    tensors,
    vision_tensors,
)

LAZY_BUCKET = (0, 18, 3)  # the bucket of stages 1 and 2 is allocated at the first gradient, before at backward's start
GPU_STEP_COPY = ((0, 14, 1), (0, 17, 0))  # ZeRO-Offload copies the fp32 partition to the GPU in the step
CPU_ADAM_LEAN = (0, 14, 3)  # DeepSpeedCPUAdam without buffers of its own
FLATTENS_ON_GPU = (0, 19, 0)  # stages 1 and 2 flatten where there is room for it; before, always on the host
NORM_CHUNK = 250_000_000  # elements that ZeRO-3's offload squares at once (`_constant_buffered_norm2`)
# Looking for overflow in a gradient copies it to fp32 and makes masks (`_has_inf_or_nan`), until 0.19.6 reduces it
# first (`runtime/utils.py:has_inf_or_nan`); stage 3 takes absolute values and a mask of all at once (`has_overflow`).
REDUCES, COPIED, MASKED = (0, 19, 6), 11, 3
B = 2  # DeepSpeed's bf16 engine: every parameter, bucket and gathered weight
FOURS = 4  # elements of four bits in one of `bnb_4bit_quant_storage`, of B bytes


class Reduced(NamedTuple):
    """Gradients that leave the bucket at a place, in elements.

    `waiting`: a gradient larger than the bucket, which stays where it is until the next parameter's hook. `copied`:
    what is concatenated for the reduction. `largest`: the largest gradient among them. `kept`: True if any has left.
    """

    waiting: int = 0
    copied: int = 0
    largest: int = 0
    kept: bool = False


@lru_cache(maxsize=4096)
def _parameters(arch: Architecture, layers: int) -> int:
    """Parameters of the lowest `layers` layers."""
    return sum(layer_parameters(arch, spec) for spec in arch.specs[:layers])


@lru_cache(maxsize=4096)
def _linears(arch: Architecture, layer: int) -> int:
    """Elements of the linears up to a layer: those that forward has come to, or backward has not."""
    below = arch.specs[: layer + 1]
    return sum(t.elements for spec in below for t in layer_tensors(arch, spec) if t.kind == "linear")


@dataclass(frozen=True, slots=True)
class Zero(Holder):
    """`replica` under ZeRO `stage`, with optimizer states or parameters in host memory.

    `recomputes`: layers are run again for backward. `keeps_weights`: weights that stage 3 gathers for a forward stay
    until backward, in the views that PyTorch's own linear saves, where DeepSpeed's linear is off (`zero/linear.py`).
    `scaled`: the loss is scaled, for fp16, so that each step looks for overflow first. `built_whole`: no zero.Init.
    """

    replica: Replica
    stage: int
    config: DeepSpeed
    offload_optimizer: bool = False
    offload_parameters: bool = False
    recomputes: bool = False
    keeps_weights: bool = False
    scaled: bool = False
    built_whole: bool = False
    cut: Cut = field(init=False, repr=False, compare=False)  # the cuts of the trained parameters
    # those of each of the optimizer's groups: Muon's matrices and what AdamW steps, or all in one
    cuts: tuple[Cut, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Cut the parameters once: every place of a step asks for it."""
        r, c = self.replica, self.config
        groups: tuple[tuple[Tensor, ...], ...] = (r.trained_tensors,)
        if self.orthogonal:
            groups = tuple(
                tuple([t for t in r.trained_tensors if optimizer.steps_as_matrix(t) is one]) for one in (True, False)
            )
        cuts = tuple([cut(group, r.ranks, c.sub_group, c.persistence_threshold) for group in groups])
        object.__setattr__(self, "cuts", cuts)
        object.__setattr__(self, "cut", reduce(both, cuts))

    @property
    def orthogonal(self) -> bool:
        """True if DeepSpeed's Muon steps the matrices (`runtime/zero/muon`)."""
        return self.replica.optimizer is not None and self.replica.optimizer.facts.orthogonal

    @property
    def version(self) -> tuple[int, ...]:
        """DeepSpeed's version as numbers."""
        return numbers(self.config.version)

    @property
    def overlaps(self) -> bool:
        """True if parameters are gathered, and gradients reduced, in streams of their own."""
        return self.stage == 3 if self.config.overlap_comm is None else self.config.overlap_comm

    @property
    def plain_bf16(self) -> bool:
        """True for stage 1 with fp32 accumulation and no offload: DeepSpeed's BF16_Optimizer.

        It keeps full fp32 gradients, and has no buckets.
        """
        return self.stage == 1 and self.replica.grad_bytes == 4 and not self.offload_optimizer

    @property
    def whole_gradients(self) -> bool:
        """True for stage 1, which reduces once backward has ended: until then gradients are whole as in plain PyTorch.

        Its hooks reduce under overlap_comm alone (`process_gradients`); the rest is `reduce_gradients`.
        """
        return self.stage == 1

    def weights(self) -> list[Line]:
        """Whole weights below stage 3, those of a frozen model, too; at stage 3 a shard of everything."""
        r = self.replica
        shards = r.ranks if self.stage == 3 else 1
        lines = []
        if r.quantised:
            lines.append(r.packed(shards))
        elif not self.parameters_on_host:
            lines.append(weights.weights(r.role, r.parameters, r.weight_bytes, shards, "weights#zero"))
        if r.adapter and not self.parameters_on_host:
            lines.append(weights.adapter(r.role, r.adapter, r.adapter_bytes, shards))
            if r.saved:
                lines.append(weights.saved(r.role, r.saved, r.saved_bytes, shards))
        return [*lines, *self.tables()]

    @property
    def parameters_on_host(self) -> bool:
        """True if shards stay in host memory; stages below 3 ignore `offload_parameters`."""
        return self.offload_parameters and self.stage == 3

    def loading(self) -> Moments:
        """Weights move in, then the fp32 master and the buffers of the optimizer's construction.

        From DeepSpeed 0.19 on stages 1 and 2 flatten on the GPU if a second copy has room there, so that this never
        runs out of memory.
        """
        r, lines = self.replica, self.weights()
        if r.quantised and self.stage == 3:
            # no zero.Init for 4-bit weights (transformers modeling_utils.py): each rank loads all, then keeps its part
            yield "whole weights on the GPU", [r.packed()]
        elif self.built_whole:
            # `self.module.to(self.device)` unless zero.Init was there (runtime/engine.py:1584-1585 of 0.19.2)
            whole = [weights.weights(r.role, r.parameters, r.weight_bytes, source="weights#zero")]
            yield "whole weights on the GPU", [*whole, *self.tables()]
        yield "weights on the GPU", lines
        if r.optimizer is None:
            return
        if self.plain_bf16:
            yield "weights flattened", [*lines, weights.weights(r.role, r.trainable, B, source="weights#zero")]
        built = [*lines, *self.states(adam=False)]
        if not (self.offload_optimizer or self.plain_bf16):
            zeros = max(self.cut.sub_groups) if self.stage == 3 else self.cut.share
            yield "optimizer built", [*built, gradients.flattened(r.role, zeros, 4)]
        yield "ready", built

    def root(self) -> list[Line]:
        """Empty: every module's parameters are released when its forward ends."""
        return []

    def states(self, *, adam: bool = True) -> list[Line]:
        """Optimizer states and buffers that live as long as the engine; Adam's moments exist from the first step on."""
        r, lines = self.replica, list[Line]()
        if r.optimizer is None:
            return lines
        if not self.offload_optimizer:
            lines.append(weights.master(r.role, r.trainable, r.master_bytes, r.ranks))
            if adam:
                # the optimizer sees a flat partition, no parameters
                if self.orthogonal:
                    matrices, rest = self.cuts
                    lines.append(optimizer.muon_partition(r.role, matrices.kept, B, rest.share))
                else:
                    lines.append(optimizer.states(r.optimizer, r.role, r.trainable, r.step_bytes, (), r.ranks))
        if self.plain_bf16:
            lines.append(gradients.accumulated(r.role, r.trainable, 4))
        if self.stage == 3:
            lines.append(communication.bucket(r.role, self.config.reduce_bucket, B))
            lines.append(communication.persistent(r.role, self.cut.persistent, B))
            if not self.offload_optimizer:
                lines.append(gradients.accumulated(r.role, r.trainable, r.grad_bytes, r.ranks))
        elif self.offload_optimizer:
            lines.append(communication.offload_buffer(r.role, self.cut.largest, B))
        return lines

    def at(self, where: Where) -> list[Line]:
        """Gathered parameters, gradients in flight and kept, buckets."""
        r = self.replica
        # a model whose forward has ended has released what it gathered
        lines = [self.live(where)] if self.stage == 3 and where.segment not in ("reduce", "waiting") else []
        if r.optimizer is None:
            return lines
        if self.plain_bf16:
            # BF16_Optimizer drops the bf16 gradients when the next backward starts
            done = gradients.so_far(r.role, where.done if where.backward else r.trainable, B)
            return [done, *self.tied(where, B)]
        out = self.reduced(where)
        if self.stage < 3:
            lines += self.partitioning(where, out)
        leaving = self.reducing(where, out)
        lines += self.waiting_head(where, B)
        if tied := self.tied(where, B):
            # both contributions are summed before anything leaves
            return lines + max(leaving, [*leaving[:1], *tied], key=total)
        return lines + leaving

    def live(self, where: Where) -> Line:
        """ZeRO-3's gathered parameters at a place: the window, and the module that comes last into it.

        The head is fetched ahead of its time, and so within the window. A tied head stays beside layers that are run
        again, for the embedding to use it. Backward releases each layer for good: the layers above are gone. A single
        rank has nothing to gather, unless its shards lie on the host.
        """
        r = self.replica
        within = where.backward and where.segment == "layer"
        stays = within and self.recomputes and r.arch.tied and r.head == "lm" and not r.saved
        module = r.embedding if stays or where.segment == "end" else self.layer_largest(where.layer)
        elements = self.stored(r.parameters + self.copied, r.arch.layers) + r.adapter
        kept = _linears(r.arch, where.layer) if self.keeps_weights and r.optimizer else 0
        if within or where.segment == "end":
            begun = where.layer + 1 if within else 0  # layers whose backward is not over
            below = self.stored(_parameters(r.arch, begun), begun) + r.adapter * begun // r.arch.layers
            # backward gathers anew what forward has released: by now as much as lies above
            elements = kept + elements - below + module if kept else r.embedding + below
        if where.segment == "tower":
            # the language model has been released, or is not gathered yet
            elements = sum(t.elements * t.count for t in vision_tensors(r.arch))
        elements *= r.ranks > 1 or self.offload_parameters
        return communication.live_parameters(r.role, elements, self.config.max_live, module, B, kept)

    @property
    def copied(self) -> int:
        """Elements that copies of modules add to what is gathered: a copied module itself does not run.

        One copy each of a tied embedding and head are two tables in place of one (peft 0.21 `utils/other.py`,
        `ModulesToSaveWrapper.forward`).
        """
        r = self.replica
        tables = sum(r.run.saves(name) for name in ("embed_tokens", "lm_head"))
        return r.embedding * (tables > 0 and r.arch.tied and r.head == "lm")

    def layer_largest(self, layer: int) -> int:
        """Elements of the largest tensor in a layer, as stored."""
        r = self.replica
        return largest_in_layer(r.arch, r.arch.specs[min(layer, r.arch.layers - 1)]) // (FOURS if r.quantised else 1)

    def stored(self, elements: int, layers: int) -> int:
        """Elements of storage of `elements` parameters, those of the lowest `layers` layers among them."""
        if not self.replica.quantised:
            return elements
        linears = _linears(self.replica.arch, layers - 1)
        return elements - linears + linears // FOURS

    def partitioning(self, where: Where, out: Reduced) -> list[Line]:
        """Stages 1 and 2: the bucket, and gradients kept whole or for the rank's own partition."""
        r, lines = self.replica, []
        filled = where.done > 0 if self.version >= LAZY_BUCKET else where.backward
        if self.whole_gradients and r.accumulates:
            lines.append(gradients.accumulated(r.role, r.trainable, B))
        elif self.whole_gradients and where.done:
            lines.append(gradients.so_far(r.role, where.done, B))
        if (filled and where.backward) or (self.whole_gradients and r.accumulates):
            buffers = 2 if self.overlaps else 1
            lines.append(communication.bucket(r.role, self.config.reduce_bucket, B, buffers))
        if not (self.offload_optimizer or self.whole_gradients):
            # earlier micro batches, and this one as soon as the first gradient has left the bucket
            before = self.cut.kept if r.accumulates else 0
            left = self.cut.kept if where.segment == "end" else self.cut.inside
            lines.append(gradients.partition(r.role, before + (left if out.kept else 0), B))
        return lines

    def reducing(self, where: Where, out: Reduced) -> list[Line]:
        """The gradient that is being made, and the temporaries of reducing those before it.

        Gradients that are in the bucket when backward has ended leave then.
        """
        r = self.replica
        if where.segment == "reduce" and not self.whole_gradients:
            last = min(r.trainable, self.config.reduce_bucket) if r.ranks > 1 else 0
            return [communication.flush(r.role, last, B)]
        if not (where.backward and where.making):
            return []
        if self.whole_gradients:
            return [gradients.new(r.role, where.making, B)] if r.accumulates else []
        lines = [gradients.new(r.role, where.making + out.waiting, B)]
        passing = [communication.flush(r.role, out.copied, B)]
        if self.offload_optimizer and self.stage == 3:
            passing.append(gradients.squared_norm(r.role, min(out.largest // r.ranks, NORM_CHUNK)))
        elif self.offload_optimizer:
            passing.append(gradients.checked(r.role, out.largest, self.checks))
        return [*lines, max(passing, key=_bytes)]

    @property
    def checks(self) -> int:
        """Bytes an element that looking for overflow in one gradient takes: its fp32 copy and masks, or none.

        From `REDUCES` on DeepSpeed reduces the gradient first.
        """
        return 0 if self.version >= REDUCES else COPIED

    def reduced(self, where: Where) -> Reduced:
        """The gradients that leave the bucket as another one comes in: all of them, once the bucket is full.

        A gradient larger than the bucket is copied only by stages 1 and 2, and only where it spans partitions.
        """
        r, c, bucket = self.replica, self.cut, self.config.reduce_bucket

        def copied(large: int) -> int:
            return large if self.stage < 3 and large > c.share else 0

        if not where.backward:
            return Reduced()
        head = 0 if r.ties_gradients else where.root - where.making
        there = where.done + where.making - (where.root if r.ties_gradients else 0)
        match where.segment:
            case "norm" if head > bucket:
                return Reduced(head if where.making else 0, copied(head), head, True)
            case "gather" | "join" | "norm" | "head" | "loss" | "outside" | "waiting":
                return Reduced()
            case "layer" | "tower" | "end" | "reduce" if min(there, r.trainable) <= bucket:
                # all that exists fits the bucket
                return Reduced()
            case "end":
                return Reduced(0, max(bucket, copied(where.making)) if r.ranks > 1 else 0, where.making, True)
            case "layer" | "tower" | "reduce":
                # the first bucket to leave may hold the head
                first = there <= 2 * bucket and where.root <= bucket and not r.ties_gradients
                largest = c.largest if first or r.adapter else self.layer_largest(where.layer)
                beside = max(bucket, where.making if self.stage < 3 else 0) if r.ranks > 1 else 0
                return Reduced(0, beside, largest, True)
            case other:
                assert_never(other)

    def stepping(self) -> Moments:
        """The norm of the gradients, then their flat fp32 copy beside them while the optimizer runs."""
        r = self.replica
        if r.optimizer is None:
            return
        c = self.cut
        if self.offload_optimizer:
            low, high = GPU_STEP_COPY
            copied = c.share if self.stage < 3 and low <= self.version < high else 0
            yield "optimizer step on the host", [gradients.flattened(r.role, copied, 4)]
        elif self.plain_bf16:
            yield (
                "reduction of all gradients",
                [gradients.so_far(r.role, r.trainable, B), gradients.flattened(r.role, r.trainable, B)],
            )
        elif self.stage == 3:
            group = max(c.sub_groups)
            if self.scaled:
                yield "overflow check", [gradients.checked(r.role, c.rank_elements, MASKED)]
            yield "gradient norm", [gradients.squared_norm(r.role, -(-c.largest // r.ranks))]
            flat = gradients.flattened(r.role, group, 4 if r.grad_bytes == 4 else B + 4)
            yield "gradients of a sub-group flattened", [flat]
            # a flat sub-group is one parameter
            scratch = optimizer.step_scratch(r.optimizer, r.role, group, group, 4)
            yield "optimizer step of a sub-group", [gradients.flattened(r.role, group, 4), scratch]
        else:
            if self.whole_gradients:
                # Gradients move into the bucket, from where those of the own partition are copied to a buffer; one that
                # is larger is copied past the bucket, while that stands empty (`copy_grads_in_partition`).
                whole = gradients.accumulated(r.role, r.trainable, B)
                own = gradients.partition(r.role, c.share, B)
                bucket = communication.bucket(r.role, self.config.reduce_bucket, B)
                past = [own, bucket] if c.largest > self.config.reduce_bucket else [max(own, bucket, key=_bytes)]
                yield "reduction of all gradients", [whole, *past]
            if self.orthogonal:
                yield from self.made_orthogonal()
                return
            kept = gradients.partition(r.role, c.kept, B)
            if self.scaled:
                yield "overflow check", [kept, gradients.checked(r.role, c.slice, self.checks)]
            yield "gradient norm", [kept, gradients.squared_norm(r.role, c.slice)]
            yield "gradients flattened", [kept, gradients.flattened(r.role, c.share, B + 4)]
            # a flat partition is one parameter
            scratch = optimizer.step_scratch(r.optimizer, r.role, r.trainable, r.trainable, 4, r.ranks)
            yield "optimizer step", [gradients.flattened(r.role, c.share, 4), scratch]

    def made_orthogonal(self) -> Moments:
        """Muon's step: whole matrices of the partition are made orthogonal as backward ends, then two groups step.

        What comes of a matrix is a tensor beside its gradient, of which both live until their group's have been
        flattened. AdamW has its corrected moments, the root of one, and the update, all in fp32 (0.19.6
        `stage_1_and_2.py`, `get_flat_partition`, `step`; `muon/original_muon.py`, `muon_update`, `adam_update`).
        """
        r, (matrices, rest) = self.replica, self.cuts
        there = [gradients.partition(r.role, self.cut.kept, B), gradients.updates(r.role, matrices.kept, B)]
        bucket = communication.bucket(r.role, self.config.reduce_bucket, B, 2 if self.overlaps else 1)
        made = [optimizer.gram(r.role, t.shape) for t in r.trained_tensors if optimizer.steps_as_matrix(t)]
        yield "matrices made orthogonal", [*there, bucket, max(made, key=_bytes)]
        yield "gradient norm", [*there, gradients.squared_norm(r.role, self.cut.slice)]
        yield "gradients of matrices flattened", [*there, gradients.flattened(r.role, matrices.share, B + 4)]
        left = gradients.partition(r.role, rest.kept, B)
        yield "optimizer step of matrices", [left, gradients.flattened(r.role, matrices.share, 4)]
        yield "other gradients flattened", [left, gradients.flattened(r.role, rest.share, B + 4)]
        yield "optimizer step", [
            gradients.flattened(r.role, rest.share, 4), optimizer.auxiliary(r.role, rest.share),
        ]  # fmt: skip

    def handing(self, word: Handed) -> Line:
        """The memory to hand weights on: at stage 3 a parameter gathered, a group, or all; below, a clone alone."""
        r = self.replica
        elements: dict[Handed, int] = {
            "parameter": r.embedding, "clone": r.embedding, "whole": r.parameters, "group": self.group,
        }  # fmt: skip
        return communication.handed(r.role, word, elements[word] if self.stage == 3 or word == "clone" else 0, B)

    @property
    def group(self) -> int:
        """Elements of the largest group of weights that are handed on: of layers, a vision tower's, or the others'.

        ms-swift 3.10 `trainers/rlhf_trainer/rollout_mixin.py`, `split_batches`: each group has as many layers but the
        last, embedding, final norm and head are one more, and so is all that reads images.
        """
        r = self.replica
        each = [layer_parameters(r.arch, spec) for spec in r.arch.specs]
        size = -(-len(each) // r.groups)
        seen = sum(t.elements * t.count for t in vision_tensors(r.arch)) if r.arch.vision else 0
        layers = [sum(each[first : first + size]) for first in range(0, len(each), size)]
        return max(*layers, seen, r.parameters - sum(each) - seen)

    def host(self, ranks: int) -> Moments:
        """Host memory of the node's ranks, from loading to after the first step."""
        for name, lines in self.on_rank():
            yield name, times(lines, ranks)

    def on_rank(self) -> Moments:
        """Host memory of one rank, from loading to after the first step."""
        r = self.replica
        if "states" in r.leaves:
            # pinned copies, tensor by tensor (runtime/zero/offload_states.py)
            moved = [host.asleep(r.role, "master_weights", self.cut.share, 4, pins=r.pins)]
            yield "before the first step", moved
            yield (
                "after the first step",
                [*moved, host.asleep(r.role, "optimizer_states", self.cut.share, 4, 2, r.pins)],
            )
        streamed = self.stage == 3 or r.quantised
        held = streamed or r.copied
        loaded = [host.loading(r.role, r.parameters, r.weight_bytes, streamed=streamed)] if held else []
        yield "loading", loaded
        if self.stage < 3 and not self.plain_bf16 and self.version < FLATTENS_ON_GPU:
            # a frozen model that was built beside the trained one is still on the host
            yield "weights flattened", [host.flattening(r.role, r.trainable)] if r.optimizer else loaded
        kept = []
        if self.parameters_on_host:
            frozen = tensors(r.arch, head=r.head) if r.adapter or r.optimizer is None else ()
            kept.append(host.frozen_parameters(r.role, frozen, r.ranks, r.pins))
            kept.append(host.parameters(r.role, r.trainable, r.ranks, r.pins))
        if r.optimizer and self.offload_optimizer:
            yield from self.offloaded(kept)
        elif kept:
            yield "before the first step", kept

    def offloaded(self, kept: list[Line]) -> Moments:
        """The optimizer in host memory, beside what is `kept` there: being built, before and after its first step."""
        r, c = self.replica, self.cut
        assert r.optimizer is not None
        if self.stage == 3:
            built = [
                *host.zero_optimizer(r.role, c.rank_elements, c.sub_groups, pinned_master=False, pins=r.pins),
                host.accumulation_buffer(r.role, c.rank_elements, r.grad_bytes, r.pins),
            ]
            last = r.grad_bytes * c.rank_elements
        else:
            pinned = self.version >= GPU_STEP_COPY[0]
            built = host.zero_optimizer(r.role, c.share, (c.share,), pinned_master=pinned, pins=r.pins)
            built.append(host.staging(r.role, c.largest, r.pins))
            if self.version >= GPU_STEP_COPY[1]:
                built.append(host.half_precision_copy(r.role, c.share, r.pins))
            last = 4 * c.share
        if self.version < CPU_ADAM_LEAN:
            built.append(host.cpu_adam_buffers(r.role))
        yield "optimizer built", [*kept, *built, host.pinning(r.role, last)]
        if self.stage < 3 and r.accumulates:
            built.append(host.accumulated_gradients(r.role, c.touched, r.pins))
        yield "before the first step", [*kept, *built]
        states = optimizer.state_bytes_per_parameter(r.optimizer, r.step_bytes)
        moments = host.moments(r.role, c.rank_elements if self.stage == 3 else c.share, states)
        yield "after the first step", [*kept, *built, moments]


def _bytes(line: Line) -> int:
    return line.bytes
