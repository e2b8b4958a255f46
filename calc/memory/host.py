"""Host memory: the bytes of a node's RAM that one rank takes for loading and offloading.

Pinned blocks come from PyTorch's allocator, see `HostAllocator`. Read in DeepSpeed 0.13.5 to 0.19.5,
`runtime/zero/{stage_1_and_2,stage3}.py` and `ops/adam/cpu_adam.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from calc.base.ledger import Line
from calc.base.units import GB, MiB
from calc.models.architecture import Tensor

# `save_pretrained` cuts checkpoints into shards of at most this size (transformers, `max_shard_size`)
CHECKPOINT_SHARD = 5 * GB
# DeepSpeedCPUAdam's two tiles of 128 Mi floats, up to DeepSpeed 0.14.2 (csrc/includes/cpu_adam.h)
CPU_ADAM_BUFFERS = 2 * 512 * MiB


def pinned(n_bytes: int, threshold: int | None = None) -> int:
    """The bytes that PyTorch's pinned allocator takes from the host for `n_bytes`.

    The next power of two, or above `threshold` bytes exactly what is asked for (`allocate` in torch
    `ATen/core/CachingHostAllocator.h`; the threshold exists since 2.13).
    """
    if threshold is not None and n_bytes > threshold:
        return n_bytes
    return 1 << (n_bytes - 1).bit_length() if n_bytes > 0 else 0


@dataclass(frozen=True, slots=True)
class HostAllocator:
    """PyTorch's allocator of pinned host memory, as the environment of a job sets it.

    `threshold`: bytes above which a block is not rounded, by `pinned_max_round_threshold_mb`; None rounds all.
    """

    threshold: int | None = None

    def block(self, n_bytes: int) -> int:
        """The bytes that a block of `n_bytes` takes from the host."""
        return pinned(n_bytes, self.threshold)

    def formula(self, n_bytes: str) -> str:
        """`block` in the notation of formulas."""
        return f"pow2({n_bytes})" if self.threshold is None else f"pin({n_bytes}, t)"

    @property
    def values(self) -> dict[str, float]:
        """The value of t in a formula; empty where there is none."""
        return {} if self.threshold is None else {"t": self.threshold}


ROUNDED = HostAllocator()


def _line(component: str, role: str, count: int, formula: str, values: Mapping[str, float], anchor: str) -> Line:
    return Line(component, role, count, formula, values, f"host#{anchor}")


def _pinned(
    component: str, role: str, n_bytes: int, formula: str, values: dict[str, float], anchor: str, pins: HostAllocator
) -> Line:
    """The line of one pinned block of `n_bytes`."""
    return _line(component, role, pins.block(n_bytes), pins.formula(formula), values | pins.values, anchor)


def loading(role: str, parameters: int, b: int, *, streamed: bool) -> Line:
    """Every rank builds the whole model on the host, or reads a checkpoint shard at a time (ZeRO-3, 4-bit weights)."""
    whole = b * parameters
    if streamed:
        values = {"b": b, "P": parameters, "shard": CHECKPOINT_SHARD}
        return _line("checkpoint", role, min(whole, CHECKPOINT_SHARD), "min(b·P, shard)", values, "loading")
    return _line("weights", role, whole, "b·P", {"b": b, "P": parameters}, "loading")


def flattening(role: str, trained: int) -> Line:
    """ZeRO-1 and ZeRO-2 move 16-bit parameters to the host and flatten them there, up to DeepSpeed 0.18."""
    return _line("weights", role, 4 * trained, "4·P_t", {"P_t": trained}, "loading")


def pinning(role: str, count: int) -> Line:
    """The pageable tensor that is being copied into pinned memory."""
    return _line("temporary", role, count, "B", {"B": count}, "pinned")


def frozen_parameters(role: str, tensors: Sequence[Tensor], ranks: int, pins: HostAllocator = ROUNDED) -> Line:
    """ZeRO-3's offloaded shards of a frozen model, each parameter's pinned on its own."""
    count = sum(t.count * pins.block(2 * -(-t.elements // ranks)) for t in tensors)
    values = {"P": sum(t.count * t.elements for t in tensors), "N": ranks} | pins.values
    return _line("weights", role, count, f"sum of {pins.formula('2·p/N')}", values, "parameters")


def parameters(role: str, count: int, ranks: int, pins: HostAllocator = ROUNDED) -> Line:
    """ZeRO-3's offloaded shards of trained parameters, one pinned block."""
    share = -(-2 * count // ranks)
    values = {"b": 2, "P": count, "N": ranks} | pins.values
    return _line("weights", role, pins.block(share), pins.formula("b·P/N"), values, "parameters")


def zero_optimizer(
    role: str, share: int, sub_groups: Sequence[int], *, pinned_master: bool, pins: HostAllocator = ROUNDED
) -> list[Line]:
    """The fp32 master of a rank's `share`, and its fp32 gradients, one pinned block for each sub-group."""
    grads = sum(pins.block(4 * group) for group in sub_groups)
    values = {"s": max(sub_groups), "groups": len(sub_groups)} | pins.values
    return [
        _pinned("master_weights", role, 4 * share, "4·P_r", {"P_r": share}, "master", pins)
        if pinned_master
        else master(role, share),
        _line("gradients", role, grads, f"sum of {pins.formula('4·s')}", values, "gradients"),
    ]


def accumulation_buffer(role: str, share: int, b: int, pins: HostAllocator = ROUNDED) -> Line:
    """ZeRO-3's accumulated gradients: one pinned block for the whole rank."""
    return _pinned("gradients", role, b * share, "g·P_r", {"g": b, "P_r": share}, "accumulation", pins)


def accumulated_gradients(role: str, touched: Sequence[int], pins: HostAllocator = ROUNDED) -> Line:
    """ZeRO-2's accumulated gradients, pinned one by one, parameters at the partition's borders whole."""
    count = sum(pins.block(2 * elements) for elements in touched)
    values = {"K": sum(touched)} | pins.values
    return _line("gradients", role, count, f"sum of {pins.formula('2·k')}", values, "accumulation")


def staging(role: str, largest: int, pins: HostAllocator = ROUNDED) -> Line:
    """ZeRO-2's staging buffer for one gradient, pinned."""
    return _pinned("communication", role, 2 * largest, "2·P_max", {"P_max": largest}, "staging", pins)


def cpu_adam_buffers(role: str) -> Line:
    """The double buffer of DeepSpeed's CPU Adam."""
    return _line("communication", role, CPU_ADAM_BUFFERS, "b", {"b": CPU_ADAM_BUFFERS}, "cpu-adam")


def half_precision_copy(role: str, share: int, pins: HostAllocator = ROUNDED) -> Line:
    """ZeRO-2's pinned bf16 copy of the partition, from DeepSpeed 0.17."""
    return _pinned("weights", role, 2 * share, "2·P_r", {"P_r": share}, "master", pins)


def master(role: str, share: int) -> Line:
    """The fp32 copy of a rank's `share` of 16-bit weights, pageable."""
    return _line("master_weights", role, 4 * share, "4·P_r", {"P_r": share}, "master")


def part(line: Line, share: float) -> Line:
    """A `share` of what a line counts."""
    if share == 1:
        return line
    values = {**line.values, "f": share}
    return line._replace(bytes=round(share * line.bytes), formula=f"f·({line.formula})", values=values)


def moments(role: str, share: int, s: float = 8) -> Line:
    """The optimizer's states, `s` bytes a parameter (Adam's two moments 8), pageable, allocated by the first step."""
    return _line("optimizer_states", role, int(s * share), "s·P_r", {"s": s, "P_r": share}, "moments")


def wide_gradients(role: str, share: int) -> Line:
    """A rank's gradients in fp32, pageable, as the step on the host reads them."""
    return _line("gradients", role, 4 * share, "4·P_r", {"P_r": share}, "gradients")


def units(
    role: str, component: str, parts: Sequence[int], b: int, tensors: int = 1, pins: HostAllocator = ROUNDED
) -> Line:
    """A rank's part of each FSDP unit, flat and pinned on its own, `tensors` of them a unit."""
    count = sum(tensors * pins.block(b * part) for part in parts)
    values = {"n": tensors, "b": b, "P": sum(parts)} | pins.values
    return _line(component, role, count, f"sum of n·{pins.formula('b·p')}", values, "units")


def checkpoints(role: str, layers: int, count: int, *, pageable: bool, pins: HostAllocator = ROUNDED) -> Line:
    """The checkpoints of all layers, `count` bytes each, every one in a block of its own."""
    values: dict[str, float] = {"L": layers, "C": count}
    if pageable:
        return _line("checkpoints", role, layers * count, "L·C", values, "checkpoints")
    formula = f"L·{pins.formula('C')}"
    return _line("checkpoints", role, layers * pins.block(count), formula, values | pins.values, "checkpoints")


def asleep(role: str, component: str, share: int, b: int, tensors: int = 1, pins: HostAllocator = ROUNDED) -> Line:
    """Tensors of a rank's share, `tensors` of them, which DeepSpeed keeps in pinned memory while other roles run."""
    values = {"n": tensors, "b": b, "P_r": share} | pins.values
    return _line(component, role, tensors * pins.block(b * share), f"n·{pins.formula('b·P_r')}", values, "asleep")


def paused(line: Line) -> Line:
    """The host's copy of a `line` of the GPU while its memory is given back, of the same size."""
    return line._replace(source="host#asleep")


def shared(
    role: str, component: str, tensors: Sequence[Tensor], ranks: int, copies: int, pins: HostAllocator = ROUNDED
) -> Line:
    """The fp32 states of a rank's share of whole tensors, `copies` of each, each pinned on its own; the average."""
    count = copies * sum(t.count * pins.block(4 * t.elements) for t in tensors) // ranks
    values = {"n": copies, "P": sum(t.count * t.elements for t in tensors), "N": ranks} | pins.values
    return _line(component, role, count, f"sum of n·{pins.formula('4·p')}/N", values, "asleep")


def saved(role: str, parameters: int, b: int) -> Line:
    """A state dict gathered on the host for a checkpoint."""
    return _line("checkpoint", role, b * parameters, "b·P", {"b": b, "P": parameters}, "save")


def fsdp(
    role: str, component: str, tensors: Sequence[Tensor], ranks: int, b: float, pins: HostAllocator = ROUNDED
) -> Line:
    """FSDP's CPU offload: shards of parameters or of their gradients, each pinned on its own."""
    count = sum(t.count * pins.block(ceil(b * -(-t.elements // ranks))) for t in tensors)
    values = {"b": b, "P": sum(t.count * t.elements for t in tensors), "N": ranks} | pins.values
    return _line(component, role, count, f"sum of {pins.formula('b·p/N')}", values, "fsdp")
