"""Host memory: the bytes of a node's RAM that one rank takes for loading and offloading.

PyTorch's pinned-memory allocator rounds every block up to a power of two (torch `ATen/core/CachingHostAllocator.h`).
Read in DeepSpeed 0.13.5 to 0.19.5, `runtime/zero/{stage_1_and_2,stage3}.py` and `ops/adam/cpu_adam.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calc.base.ledger import Line
from calc.base.units import GB, MiB
from calc.models.architecture import Tensor

# `save_pretrained` cuts checkpoints into shards of at most this size (transformers, `max_shard_size`)
CHECKPOINT_SHARD = 5 * GB
# DeepSpeedCPUAdam's two tiles of 128 Mi floats, up to DeepSpeed 0.14.2 (csrc/includes/cpu_adam.h)
CPU_ADAM_BUFFERS = 2 * 512 * MiB


def pinned(n_bytes: int) -> int:
    """The bytes that PyTorch's pinned allocator takes from the host for `n_bytes`: the next power of two."""
    return 1 << (n_bytes - 1).bit_length() if n_bytes > 0 else 0


def _line(component: str, role: str, count: int, formula: str, values: Mapping[str, float], anchor: str) -> Line:
    return Line(component, role, count, formula, values, f"host#{anchor}")


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


def frozen_parameters(role: str, tensors: Sequence[Tensor], ranks: int) -> Line:
    """ZeRO-3's offloaded shards of a frozen model, each parameter's pinned on its own."""
    count = sum(t.count * pinned(2 * -(-t.elements // ranks)) for t in tensors)
    values = {"P": sum(t.count * t.elements for t in tensors), "N": ranks}
    return _line("weights", role, count, "sum of pow2(2·p/N)", values, "parameters")


def parameters(role: str, count: int, ranks: int) -> Line:
    """ZeRO-3's offloaded shards of trained parameters, one pinned block."""
    share = -(-2 * count // ranks)
    return _line("weights", role, pinned(share), "pow2(b·P/N)", {"b": 2, "P": count, "N": ranks}, "parameters")


def zero_optimizer(role: str, share: int, sub_groups: Sequence[int], *, pinned_master: bool) -> list[Line]:
    """The fp32 master of a rank's `share`, and its fp32 gradients, one pinned block for each sub-group."""
    master = pinned(4 * share) if pinned_master else 4 * share
    grads = sum(pinned(4 * group) for group in sub_groups)
    return [
        _line("master_weights", role, master, "pow2(4·P_r)" if pinned_master else "4·P_r", {"P_r": share}, "master"),
        _line(
            "gradients", role, grads, "sum of pow2(4·s)", {"s": max(sub_groups), "groups": len(sub_groups)}, "gradients"
        ),
    ]


def accumulation_buffer(role: str, share: int, b: int) -> Line:
    """ZeRO-3's accumulated gradients: one pinned block for the whole rank."""
    return _line("gradients", role, pinned(b * share), "pow2(g·P_r)", {"g": b, "P_r": share}, "accumulation")


def accumulated_gradients(role: str, touched: Sequence[int]) -> Line:
    """ZeRO-2's accumulated gradients, pinned one by one, parameters at the partition's borders whole."""
    count = sum(pinned(2 * elements) for elements in touched)
    return _line("gradients", role, count, "sum of pow2(2·k)", {"K": sum(touched)}, "accumulation")


def staging(role: str, largest: int) -> Line:
    """ZeRO-2's staging buffer for one gradient, pinned."""
    return _line("communication", role, pinned(2 * largest), "pow2(2·P_max)", {"P_max": largest}, "staging")


def cpu_adam_buffers(role: str) -> Line:
    """The double buffer of DeepSpeed's CPU Adam."""
    return _line("communication", role, CPU_ADAM_BUFFERS, "b", {"b": CPU_ADAM_BUFFERS}, "cpu-adam")


def half_precision_copy(role: str, share: int) -> Line:
    """ZeRO-2's pinned bf16 copy of the partition, from DeepSpeed 0.17."""
    return _line("weights", role, pinned(2 * share), "pow2(2·P_r)", {"P_r": share}, "master")


def moments(role: str, share: int, s: float = 8) -> Line:
    """The optimizer's states, `s` bytes a parameter (Adam's two moments 8), pageable, allocated by the first step."""
    return _line("optimizer_states", role, int(s * share), "s·P_r", {"s": s, "P_r": share}, "moments")


def units(role: str, component: str, parts: Sequence[int], b: int, tensors: int = 1) -> Line:
    """A rank's part of each FSDP unit, flat and pinned on its own, `tensors` of them a unit."""
    count = sum(tensors * pinned(b * part) for part in parts)
    values = {"n": tensors, "b": b, "P": sum(parts)}
    return _line(component, role, count, "sum of n·pow2(b·p)", values, "units")


def asleep(role: str, component: str, share: int, b: int, tensors: int = 1) -> Line:
    """Tensors of a rank's share, `tensors` of them, which DeepSpeed keeps in pinned memory while other roles run."""
    values = {"n": tensors, "b": b, "P_r": share}
    return _line(component, role, tensors * pinned(b * share), "n·pow2(b·P_r)", values, "asleep")


def saved(role: str, parameters: int, b: int) -> Line:
    """A state dict gathered on the host for a checkpoint."""
    return _line("checkpoint", role, b * parameters, "b·P", {"b": b, "P": parameters}, "save")


def fsdp(role: str, component: str, tensors: Sequence[Tensor], ranks: int, b: int) -> Line:
    """FSDP's CPU offload: shards of parameters or of their gradients, each pinned on its own."""
    count = sum(t.count * pinned(b * -(-t.elements // ranks)) for t in tensors)
    values = {"b": b, "P": sum(t.count * t.elements for t in tensors), "N": ranks}
    return _line(component, role, count, "sum of pow2(b·p/N)", values, "fsdp")
