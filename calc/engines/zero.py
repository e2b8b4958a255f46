"""DeepSpeed ZeRO 1, 2 and 3: what each stage partitions, and the buffers around it.

Read in DeepSpeed 0.13.5, 0.16.4 and 0.19.5: `runtime/zero/{stage_1_and_2,stage3,partitioned_param_coordinator}.py`,
`runtime/bf16_optimizer.py`, `ops/adam/*.py`. Frozen parameters are never flattened; ZeRO-3 partitions them too.
"""

from __future__ import annotations

from dataclasses import dataclass

from calc.architecture import largest_in_layer
from calc.engines.partition import Cut, cut
from calc.engines.replica import Moments, Replica, Where
from calc.keeps import DeepSpeed
from calc.ledger import Line
from calc.memory import communication, gradients, host, optimizer, weights

LAZY_BUCKET = (0, 18, 3)  # the bucket of stages 1 and 2 is allocated at the first gradient, before at backward's start
GPU_STEP_COPY = ((0, 14, 1), (0, 17, 0))  # ZeRO-Offload copies the fp32 partition to the GPU in the step
B = 2  # DeepSpeed's bf16 engine: every parameter, bucket and gathered weight


@dataclass(frozen=True, slots=True)
class Zero:
    """`replica` under ZeRO `stage`, with optimizer states or parameters in host memory."""

    replica: Replica
    stage: int
    config: DeepSpeed
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @property
    def version(self) -> tuple[int, ...]:
        """DeepSpeed's version as numbers."""
        return tuple(int(part) for part in self.config.version.split("."))

    @property
    def cut(self) -> Cut:
        """How the trained parameters are cut."""
        return cut(
            self.replica.trained_tensors, self.replica.ranks, self.config.sub_group, self.config.persistence_threshold
        )

    @property
    def plain_bf16(self) -> bool:
        """Stage 1 with fp32 accumulation runs DeepSpeed's BF16_Optimizer: full fp32 gradients, no buckets."""
        return self.stage == 1 and self.replica.grad_bytes == 4 and not self.offload_optimizer

    def weights(self) -> list[Line]:
        """Whole weights below stage 3, where a frozen model is a replica too; from there a shard of everything."""
        r = self.replica
        shards = r.ranks if self.stage == 3 else 1
        lines = []
        if r.quantised:
            lines.append(weights.quantised(r.role, r.arch, r.head, r.weight_bytes))
        elif not (self.offload_parameters and shards > 1):
            lines.append(weights.weights(r.role, r.parameters, r.weight_bytes, shards, "weights#zero"))
        if r.adapter:
            lines.append(weights.adapter(r.role, r.adapter, r.adapter_bytes, shards))
        return lines

    def loading(self) -> Moments:
        """Weights move in, then the fp32 master and the buffers of the optimizer's construction."""
        lines = self.weights()
        yield "weights on the GPU", lines
        if self.replica.optimizer:
            yield "optimizer built", [*lines, *self.states(adam=False)]

    def resident(self) -> list[Line]:
        """Weights, this rank's optimizer states, and buffers that live as long as the engine."""
        return [*self.weights(), *(self.states() if self.replica.optimizer else [])]

    def states(self, *, adam: bool = True) -> list[Line]:
        """What the optimizer keeps on the GPU; its moments exist from the first step on."""
        r, lines = self.replica, []
        assert r.optimizer is not None
        if not self.offload_optimizer:
            lines.append(weights.master(r.role, r.trainable, r.master_bytes, r.ranks))
            if adam:
                lines.append(
                    optimizer.states(r.optimizer, r.role, r.trainable, r.step_bytes, r.trained_tensors, r.ranks)
                )
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
        lines = [self.live(where)] if self.stage == 3 and where.segment != "reduce" else []
        if self.replica.optimizer:
            if self.stage == 3:
                lines += self.reducing(where) if where.backward else []
            elif self.plain_bf16:
                lines += [gradients.so_far(self.replica.role, where.done, B)] if where.backward else []
            else:
                lines += self.partitioning(where)
        return lines

    def live(self, where: Where) -> Line:
        """ZeRO-3's gathered parameters at a place: the window, and the module that comes last into it."""
        r = self.replica
        if where.segment in ("layer", "norm", "gather"):
            index = min(where.layer, r.arch.layers - 1)
            module = largest_in_layer(r.arch, index)
        else:
            module = r.arch.vocab * r.arch.hidden
        return communication.live_parameters(r.role, r.parameters + r.adapter, self.config.max_live, module, B)

    def reducing(self, where: Where) -> list[Line]:
        """ZeRO-3 backward: one gradient in flight, and the bucket's copy when it is flushed."""
        r, lines = self.replica, []
        if where.making:
            lines.append(gradients.new(r.role, where.making, B))
            lines.append(
                communication.flush(r.role, min(self.config.reduce_bucket, r.trainable) if r.ranks > 1 else 0, B)
            )
            if self.offload_optimizer:
                part = where.making // r.ranks
                lines.append(gradients.squared_norm(r.role, min(part, 250_000_000)))
        return lines

    def partitioning(self, where: Where) -> list[Line]:
        """Stages 1 and 2: the bucket, gradients on their way through it, those of the partition that are kept."""
        r, c, lines = self.replica, self.cut, []
        filled = where.done > 0 if self.version >= LAZY_BUCKET else where.backward
        if self.stage == 1 and not self.offload_optimizer:
            # reduction waits for the last micro-batch, so that gradients accumulate whole as in plain PyTorch
            count = r.trainable if r.accumulates else where.done if where.backward else 0
            lines.append(gradients.so_far(r.role, count, B))
            filled = filled or r.accumulates
        if filled and (where.backward or self.stage == 1):
            lines.append(
                communication.bucket(r.role, self.config.reduce_bucket, B, 2 if self.config.overlap_comm else 1)
            )
        if self.stage == 2 and not self.offload_optimizer:
            kept = min(c.touched, where.done) if where.backward else 0
            lines.append(gradients.partition(r.role, c.touched + kept if r.accumulates else kept, B))
        if where.making and where.backward:
            if self.stage == 2:
                lines.append(gradients.new(r.role, where.making, B))
            if r.ranks > 1:
                lines.append(communication.flush(r.role, min(self.config.reduce_bucket, r.trainable), B))
            if self.offload_optimizer:
                lines.append(gradients.checked(r.role, where.making))
        return lines

    def stepping(self) -> Moments:
        """The norm of the gradients, then their flat fp32 copy beside them while the optimizer runs."""
        r, c = self.replica, self.cut
        if r.optimizer is None:
            return
        share = -(-r.trainable // r.ranks)
        if self.offload_optimizer:
            low, high = GPU_STEP_COPY
            copied = share if self.stage < 3 and low <= self.version < high else 0
            yield "optimizer step on the host", [gradients.flattened(r.role, copied, 4)]
        elif self.plain_bf16:
            yield (
                "reduction of all gradients",
                [gradients.so_far(r.role, r.trainable, B), gradients.flattened(r.role, r.trainable, B)],
            )
        elif self.stage == 3:
            group = max(c.sub_groups)
            yield "gradient norm", [gradients.squared_norm(r.role, -(-c.largest // r.ranks))]
            yield (
                "optimizer step of a sub-group",
                [gradients.flattened(r.role, group, 4 if r.grad_bytes == 4 else B + 4)],
            )
        else:
            kept = gradients.partition(r.role, c.touched, B)
            yield "gradient norm", [kept, gradients.squared_norm(r.role, c.slice)]
            yield "gradients flattened", [kept, gradients.flattened(r.role, share, B + 4)]

    def host(self) -> Moments:
        """What a rank takes of its node's memory, from loading to after the first step."""
        r = self.replica
        yield from host.zero_loading(r.role, r.parameters, r.weight_bytes, self.stage)
        kept = []
        if self.offload_parameters and self.stage == 3:
            kept.append(host.parameters(r.role, r.parameters, r.ranks))
        if r.optimizer and self.offload_optimizer:
            c = self.cut
            pinned_master = self.stage < 3 and self.version >= GPU_STEP_COPY[0]
            groups = c.sub_groups if self.stage == 3 else (c.rank_elements,)
            kept += host.zero_optimizer(r.role, c.rank_elements, groups,
                                        pinned_master=pinned_master)  # fmt: skip
            if self.stage == 3:
                kept.append(host.accumulation_buffer(r.role, c.rank_elements, r.grad_bytes))
            else:
                kept.append(host.accumulated_gradients(r.role, c.touched if r.accumulates else 0))
                kept.append(host.staging(r.role, c.largest))
            if self.version < GPU_STEP_COPY[0]:
                kept.append(host.cpu_adam_buffers(r.role))
            if self.version >= GPU_STEP_COPY[1] and self.stage < 3:
                kept.append(host.half_precision_copy(r.role, c.rank_elements))
        if kept:
            yield "before the first step", kept
        if r.optimizer and self.offload_optimizer:
            yield "after the first step", [*kept, host.moments(r.role, self.cut.rank_elements)]
