"""Megatron-core's DistributedDataParallel with its mixed-precision optimizers, distributed or not.

Weights and gradients lie in contiguous buffers that are made before the first step, gradients in fp32. Beside 16-bit
weights the optimizer keeps fp32 masters and two moments: of all parameters, or with the distributed optimizer of this
rank's part of each bucket. Read in Megatron-LM d98e8a64dd `megatron/core/distributed/{param_and_grad_buffer,
distributed_data_parallel}.py`, `megatron/core/optimizer/{optimizer,distrib_optimizer,param_layout}.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod
from typing import NamedTuple

from calc.base.ledger import Line
from calc.base.plan import Handed, Leaves
from calc.base.units import MiB
from calc.engines.replica import WEIGHTS, Holder, Moments, Replica, Where, times
from calc.memory import communication, gradients, host, optimizer, weights
from calc.models.architecture import Tensor, layer_kinds, tensors
from calc.models.lora import megatron_linears

ALIGNED = 64  # elements at a multiple of which each parameter begins (`pad_param_start`)
CUBLAS = 32 * MiB + 1024  # bytes of Transformer Engine's own workspace
STREAMS = 4  # on which it runs the products of several experts, each with a workspace (`nvte_get_num_compute_streams`)
BUCKET_END = 128  # and each bucket ends, as at one of the ranks (`bucket_end_divisor`)


class Buffer(NamedTuple):
    """Contiguous parameters: their `elements` on this rank, padding included, whose states are cut in `shards`."""

    elements: int
    shards: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Megatron(Holder):
    """`replica` as one rank holds it; `distributed`: ranks share masters and moments.

    `fuses`: products add the gradients of their weights to the buffer themselves (`gradient_accumulation_fusion`);
    `groups`: the products of a rank's experts are one (`moe_grouped_gemm`). `hosted`: the share of the parameters whose
    masters and moments live on the host, where Adam steps (`optimizer_cpu_offload` with `optimizer_offload_fraction`,
    `cpu_offloading/hybrid_optimizer.py`, beside `use_precision_aware_optimizer`); `hosts_masters` is False without the
    last, where masters are the distributed optimizer's, of which the host gets copies. `aware`: the formats of masters
    and moments if Transformer Engine's FusedAdam has both (`use_precision_aware_optimizer`).
    """

    replica: Replica
    distributed: bool = True
    fuses: bool = True
    groups: bool = True
    hosted: float = 0.0
    hosts_masters: bool = True
    aware: optimizer.PrecisionAware | None = None
    eight_bits: weights.EightBits | None = None  # the weights of linears in the layers, in 8 bits

    @cached_property
    def buffers(self) -> list[Buffer]:
        """The buffers of what is trained: one for routed experts, which other ranks have whole, one for the rest.

        Parameters of a kind are of one bucket here: every further one adds less than 128·N elements.
        """
        r = self.replica
        together = r.ranks * r.arch.ranks // (r.arch.expert_ranks * r.arch.expert_tensor)
        found = []
        for experts, ranks in ((False, r.ranks), (True, together)):
            own = [t for t in r.trained_tensors or tensors(r.arch, head=r.head) if (t.kind == "expert") is experts]
            if own:
                shards = ranks if self.distributed and r.optimizer else 1
                found.append(Buffer(self.padded(own, ranks), shards, tuple(own)))
        return found

    def padded(self, own: Sequence[Tensor], ranks: int) -> int:
        """Elements of a buffer: the distributed optimizer aligns each parameter, and the end of the buffer."""
        if not self.distributed or self.replica.optimizer is None:
            return sum(t.count * t.elements for t in own)
        aligned = sum(t.count * (-(-t.elements // ALIGNED) * ALIGNED) for t in own)
        end = lcm(ranks, BUCKET_END)
        return -(-aligned // end) * end

    def weights(self) -> list[Line]:
        """The buffers of 16-bit weights, or the model itself if it is not trained, beside which adapters have buffers.

        Parameters that are frozen stay where they are (`distributed_data_parallel.py`, `DistributedDataParallel`).
        """
        return [*self._weights]

    @cached_property
    def _weights(self) -> list[Line]:
        r = self.replica
        if r.adapter:
            own = [weights.adapter(r.role, buffer.elements, r.adapter_bytes) for buffer in self.buffers]
            return [weights.weights(r.role, r.parameters, r.weight_bytes), *own]
        return [*self._buffers_of_weights(), *self._frozen()]

    def _buffers_of_weights(self) -> list[Line]:
        """The buffers, of which the weights of linears are in 8 bits under a recipe that keeps them so."""
        r = self.replica
        if not (eight := self.eight_bits):
            return [weights.weights(r.role, own.elements, r.weight_bytes) for own in self.buffers]
        lines: list[Line] = []
        for buffer in self.buffers:
            narrow = self.multiplied(experts=buffer.tensors[0].kind == "expert")
            lines.append(weights.weights(r.role, buffer.elements - narrow * eight.alone, r.weight_bytes))
            lines.append(weights.eight_bits(r.role, narrow, eight))
        return lines

    def _frozen(self) -> list[Line]:
        """The parameters of a model that is trained in part, a frozen tower's, which lie in no buffer."""
        r = self.replica
        every = tensors(r.arch, head=r.head)
        if not r.trained_tensors or r.trained_tensors == every:
            return []
        still = sum(t.count * t.elements for t in every if t not in r.trained_tensors)
        return [weights.weights(r.role, still, r.weight_bytes)] if still else []

    def multiplied(self, *, experts: bool) -> int:
        """Elements of the weights of linears in the layers, those of routed experts or the others."""
        arch = self.replica.arch
        kinds = [*layer_kinds(arch), *((spec, 1) for spec in arch.depths)]
        made = [(count, x) for spec, count in kinds for x in megatron_linears(arch, spec)]
        return sum(n * x.outputs * x.inputs * max(1, x.experts) for n, x in made if (x.experts > 0) is experts)

    def loading(self) -> Moments:
        """The weights are on the GPU; then the optimizer has been built, whose moments its first step makes."""
        yield "weights on the GPU", self.weights()
        if self.replica.optimizer:
            later = ("optimizer_states", "master_weights") if self.aware else ("optimizer_states",)
            made = [line for line in self.states() if line.component not in later]
            yield "optimizer built", [*self.weights(), *made]

    def goes(self, line: Line) -> Leaves:
        """The buffer of gradients leaves with the weights, and is made anew (verl `utils/megatron_utils.py`)."""
        return "weights" if line.component == "gradients" else Holder.goes(self, line)

    def resident(self) -> list[Line]:
        """Weights, what training keeps beside them, and what autograd is given in place of gradients."""
        return [*Holder.resident(self), *self.placeholders()]

    def staying(self) -> list[Line]:
        """The states that stay while the role does not train, and the placeholders, but where all blocks pause.

        A hybrid optimizer's masters on the GPU stay there: its states leave alone (verl `utils/megatron_utils.py`,
        `offload_megatron_optimizer`).
        """
        stays = [x for x in self.states() if self.keeps_masters and x.component == "master_weights"]
        return [*Holder.staying(self), *stays, *self.placeholders() * (not self.replica.paused)]

    @property
    def keeps_masters(self) -> bool:
        """True if masters stay on the GPU where states leave it."""
        return "states" in self.replica.leaves and (0 < self.hosted < 1 or not self.hosts_masters)

    def placeholders(self) -> list[Line]:
        """An empty gradient for each shape of a product's weights, from the first backward on, for all micro batches.

        A product that has added its gradient to the buffer itself still owes autograd a tensor. Transformer Engine
        keeps one from 2.3 on, for experts in groups later (`pytorch/module/base.py`, `get_dummy_wgrad`, called in
        `linear.py`, `layernorm_linear.py`, `grouped_linear.py`; the head: Megatron-core 0.16.1
        `core/tensor_parallel/layers.py`).
        """
        return [*self._placeholders]

    @cached_property
    def _placeholders(self) -> list[Line]:
        r = self.replica
        if not (self.fuses and r.optimizer):
            return []
        head = (r.arch.vocab_part, r.arch.hidden)
        if not r.run.trained:  # a copy of the head beside adapters, which make gradients of their own
            return [gradients.placeholders(r.role, prod(head), r.weight_bytes)] if r.run.saves("lm_head") else []
        made = {(x.outputs, x.inputs) for spec, _ in layer_kinds(r.arch) for x in megatron_linears(r.arch, spec)}
        made |= {(x.outputs, x.inputs) for spec in r.arch.depths for x in megatron_linears(r.arch, spec)}
        if r.arch.depths:
            made.add((r.arch.hidden // r.arch.ranks, 2 * r.arch.hidden))
        if r.head == "lm" and r.arch.ends:
            made.add(head)
        return [gradients.placeholders(r.role, sum(n * m for n, m in made), r.weight_bytes)]

    def states(self) -> list[Line]:
        """The buffers of gradients, fp32 masters, and the optimizer's moments."""
        return [*self._states]

    @cached_property
    def _states(self) -> list[Line]:
        r = self.replica
        if not r.optimizer:
            return []
        lines: list[Line] = []
        for own in self.buffers:
            lines.append(self.accumulated(own))
            here = self.here(own.elements)
            if self.aware:
                lines.append(weights.master(r.role, here, self.aware.master_bytes, own.shards))
                lines.append(self.aware.states(r.role, here, own.shards))
                continue
            if r.master_bytes and (masters := here if self.hosts_masters else own.elements):
                lines.append(weights.master(r.role, masters, r.master_bytes, own.shards))
            if here:
                flat = self.distributed and not r.optimizer.facts.orthogonal
                whole = () if flat else own.tensors
                lines.append(optimizer.states(r.optimizer, r.role, here, r.step_bytes, whole, own.shards))
        return lines

    def here(self, elements: int) -> int:
        """The number of the `elements` parameters whose masters and moments are on the GPU: whole ones, the last of
        them.
        """
        return elements - round(self.hosted * elements)

    def accumulated(self, own: Buffer) -> Line:
        """A buffer of gradients, which every rank has whole."""
        return gradients.accumulated(self.replica.role, own.elements, self.replica.grad_bytes)

    def workspace(self, tokens: int, length: int) -> list[Line]:
        """Memory that the layers' library takes once: for cuBLAS, or in the `local` spec for attention scores.

        32 MiB from Hopper on, counted for all cards, where older ones take 4 (TransformerEngine
        `pytorch/cpp_extensions/gemm.py`, `get_cublas_workspace_size_bytes`), and in either spec for a router
        (`moe/moe_utils.py`, `RouterGatingLinearFunction`). Scores are written into one global buffer, 16 bits for each
        head and pair of positions of a micro batch of `tokens` in sequences of `length` (`dot_product_attention.py`).
        """
        r = self.replica
        local, routes = r.arch.modeling == "megatron-local", r.arch.experts > 0
        n = (not local or routes) + STREAMS * (self.groups and routes and not local)
        library = Line("workspace", r.role, n * CUBLAS, "n·w", {"n": n, "w": CUBLAS}, "runtime#cublas")
        values = {"b": 2, "H": r.arch.heads, "T": tokens, "S": length}
        scores = Line("workspace", r.role, 2 * r.arch.heads * tokens * length, "b·H·T·S", values, "runtime#cublas")
        return [library] * (n > 0) + [scores] * local + self.routed(tokens)

    def routed(self, tokens: int) -> list[Line]:
        """Where the tokens of each layer's last micro batch went, which its dispatcher keeps, run again or not.

        The probabilities of all experts and the map of those chosen, of `tokens` as the router sees them, and the order
        of their rows: attributes of the module until its next forward, outside of what autograd saves
        (`moe/token_dispatcher.py`, `MoEAlltoAllTokenDispatcher.dispatch_preprocess`).
        """
        r = self.replica
        layers = sum(spec.mlp == "experts" for spec in (*r.arch.specs, *r.arch.depths))
        values = {"n": layers, "T": int(tokens * r.run.share), "E": r.arch.experts, "k": r.arch.experts_per_token}
        kept = layers * values["T"] * (3 * r.arch.experts + 8 * r.arch.experts_per_token)
        line = Line("activations", r.role, kept, "n·T·(3·E + 8·k)", values, "activations#experts")
        return [line] * (layers > 0)

    def root(self) -> list[Line]:
        """Empty: nothing is gathered to compute, since weights are gathered in place after the step."""
        return []

    def at(self, where: Where) -> list[Line]:
        """The gradient that an operation makes in the weights' type, before a hook adds it to the buffer."""
        r = self.replica
        if r.optimizer is None or not where.backward:
            return []
        made = 0 if self.fuses and where.segment != "end" else where.making
        return [gradients.new(r.role, made, r.weight_bytes)] if made else []

    def stepping(self) -> Moments:
        """The optimizer step in place: masters get views of the gradients' buffer, and a kernel needs nothing else."""
        r = self.replica
        if r.optimizer and self.hosted == 1:
            yield "optimizer step on the host", []
        elif r.optimizer and self.aware:
            # gradients are read as they are (`decoupled_grad`) where the masters are its own; experts have another one
            largest = max(buffer.elements // buffer.shards for buffer in self.buffers)
            own = sum(buffer.elements // buffer.shards for buffer in self.buffers)
            copied = own if self.aware.apart and r.grad_bytes < r.step_bytes else 0
            yield "optimizer step", [self.aware.scratch(r.role, largest), gradients.new(r.role, copied, r.step_bytes)]
        elif r.optimizer:
            own = sum(self.here(buffer.elements) // buffer.shards for buffer in self.buffers)
            scratch = optimizer.step_scratch(r.optimizer, r.role, own, min(own, r.largest), r.step_bytes)
            if r.optimizer.facts.orthogonal:
                scratch = max(
                    (optimizer.orthogonal(r.role, *each) for each in self.matrices()), key=lambda line: line.bytes
                )
            # gradients that are not in fp32 are copied (`_copy_model_grads_to_main_grads`)
            copied = own if r.grad_bytes < r.step_bytes else 0
            yield "optimizer step", [scratch, gradients.new(r.role, copied, r.step_bytes)]

    def matrices(self) -> set[tuple[int, int]]:
        """The elements of each shape of a product's weights, and the number of ranks that have parts of what is made
        orthogonal.
        """
        r = self.replica
        assert r.optimizer
        made = [x for spec, _ in layer_kinds(r.arch) for x in megatron_linears(r.arch, spec)]
        if r.optimizer.blockwise:
            return {(x.outputs * x.inputs, 1) for x in made}
        return {(x.outputs * x.inputs, r.arch.expert_tensor if x.experts else r.arch.ranks) for x in made}

    def handing(self, word: Handed) -> Line:
        """The memory to hand weights on takes: `gradients`, or the largest `parameter`, a `clone` of it.

        A parameter comes from another pipeline stage in a buffer of its own; the parts of all tensor-parallel ranks are
        gathered one by one, and joined (verl `utils/megatron_utils.py`, `per_tensor_generator`; mbridge
        `core/bridge.py`, `export_weights`).
        """
        r = self.replica
        if word == "flattened":
            return communication.flattened(r.role, r.arch.vocab * r.arch.hidden, r.weight_bytes, r.arch.ranks)
        if word == "gradients":
            return communication.handed(r.role, word, sum(own.elements for own in self.buffers), r.grad_bytes)
        part = r.arch.vocab_part * r.arch.hidden
        gathered = 2 * r.arch.ranks * part if r.arch.ranks > 1 else 0
        elements = {"clone": r.embedding, "parameter": gathered + part * r.stays}.get(word, 0)
        return communication.handed(r.role, word, elements, r.weight_bytes)

    def host(self, ranks: int) -> Moments:
        """The parts that step on the host, or leave for it between the role's phases, and copies that stay there."""
        if not (self.hosted or self.replica.leaves or self.replica.backups):
            return
        before, after = self.stepping_there() if self.hosted else ([], [])
        if self.replica.leaves:
            more, later = self.pausing() if self.replica.paused else self.leaving()
            before, after = [*before, *more], [*after, *later]
        kept = [*self.backups(), *before]
        yield "before the first step", times(kept, ranks)
        yield "after the first step", times([*kept, *after], ranks)

    def backups(self) -> list[Line]:
        """Copies of the weights that stay, each parameter's pinned on its own (slime `utils/tensor_backper.py`)."""
        r = self.replica
        each = [host.fsdp(r.role, "weights", own.tensors, 1, r.weight_bytes, r.pins) for own in self.buffers]
        return [line for line in each for _ in range(r.backups)]

    def pausing(self) -> tuple[list[Line], list[Line]]:
        """The blocks that pause with a copy, each as large as it is: those there at first, and the moments.

        `cudaMallocHost` for each block of the allocator (torch_memory_saver `csrc/core.cpp`,
        `TorchMemorySaver::pause`).
        """
        copied = {"all": None, "states": (), "weights": WEIGHTS}[self.replica.paused or "all"]
        lines = [
            host.paused(line)
            for line in Holder.resident(self)
            if copied is None or line.component in copied or self.goes(line) == "states"
        ]
        first = [line for line in lines if line.component != "optimizer_states"]
        later = [line for line in lines if line.component == "optimizer_states"]
        return first, [*later, *(host.paused(line) for line in self.placeholders())]

    def stepping_there(self) -> tuple[list[Line], list[Line]]:
        """A rank's part of its parameters in fp32, and from the first step on their gradients, pinned, and moments.

        `HybridDeviceOptimizer` pins a 16-bit copy and casts it, which leaves the pageable fp32 one
        (`_get_sub_optimizer_param_groups` of Megatron-core 0.16.1); gradients are copied into pinned memory
        (`_set_sub_optimizer_grads`).
        """
        r = self.replica
        if r.optimizer is None:
            return [], []
        states = optimizer.state_bytes_per_parameter(r.optimizer, r.step_bytes)
        masters: list[Line] = []
        later: list[Line] = []
        for own in self.buffers:
            share = (own.elements - self.here(own.elements)) // own.shards
            masters.append(host.master(r.role, share))
            copied = host.fsdp(r.role, "gradients", own.tensors, own.shards, 4, r.pins)
            later += [host.part(copied, self.hosted), host.moments(r.role, share, states)]
        return masters, later

    def leaving(self) -> tuple[list[Line], list[Line]]:
        """Weights, pinned, and states tensor by tensor, pinned too.

        `copy_` into `cpu_data` that is pinned; `.to("cpu", non_blocking=True)`, whose copies PyTorch pins. A model that
        is only scored is copied into pageable memory (verl `utils/megatron_utils.py`).
        """
        r = self.replica
        before: list[Line] = []
        after: list[Line] = []
        for own in self.buffers:
            if "weights" in r.leaves and r.optimizer:
                before.append(host.asleep(r.role, "weights", own.elements, r.weight_bytes, pins=r.pins))
            elif "weights" in r.leaves:
                before.append(host.loading(r.role, own.elements, r.weight_bytes, streamed=False))
            if r.optimizer and "states" in r.leaves and self.hosted < 1:
                states = int(optimizer.state_bytes_per_parameter(r.optimizer, r.step_bytes)) // 4
                masters = host.shared(r.role, "master_weights", own.tensors, own.shards, 1, r.pins)
                before += [] if self.keeps_masters else [masters]
                moments = host.shared(r.role, "optimizer_states", own.tensors, own.shards, states, r.pins)
                after.append(host.part(moments, 1 - self.hosted))
        return before, after
