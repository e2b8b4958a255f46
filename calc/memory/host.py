"""Host memory: what loading and offloading take of a node's RAM, in bytes of one rank.

PyTorch's pinned-memory allocator rounds every block up to a power of two (torch `ATen/core/CachingHostAllocator.h`).
Read in DeepSpeed 0.13.5 to 0.19.5, `runtime/zero/{stage_1_and_2,stage3}.py` and `ops/adam/cpu_adam.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calc.ledger import Line
from calc.units import GB, MiB

# `save_pretrained` cuts checkpoints into shards of at most this size (transformers, `max_shard_size`)
CHECKPOINT_SHARD = 5 * GB
# DeepSpeedCPUAdam's two tiles of 128 Mi floats, up to DeepSpeed 0.14.0 (csrc/includes/cpu_adam.h)
CPU_ADAM_BUFFERS = 2 * 512 * MiB


def pinned(n_bytes: int) -> int:
    """`n_bytes` as PyTorch's pinned allocator takes them from the host: the next power of two."""
    return 1 << (n_bytes - 1).bit_length() if n_bytes > 0 else 0


def _line(component: str, role: str, count: int, formula: str, values: dict[str, float], anchor: str) -> Line:
    return Line(component, role, count, formula, values, f"host#{anchor}")


def zero_loading(role: str, parameters: int, b: int, stage: int) -> Iterator[tuple[str, list[Line]]]:
    """Every rank builds the whole model on the host below stage 3, and reads one checkpoint shard at a time in it."""
    whole = b * parameters
    if stage == 3:
        line = _line("checkpoint", role, min(whole, CHECKPOINT_SHARD), "min(b·P, shard)",
                     {"b": b, "P": parameters, "shard": CHECKPOINT_SHARD}, "loading")  # fmt: skip
    else:
        line = _line("weights", role, whole, "b·P", {"b": b, "P": parameters}, "loading")
    yield "loading", [line]


def parameters(role: str, count: int, ranks: int) -> Line:
    """ZeRO-3's offloaded shards, pinned."""
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


def accumulated_gradients(role: str, touched: int) -> Line:
    """ZeRO-2's accumulated gradients, parameters at the partition's borders whole."""
    return _line("gradients", role, 2 * touched, "2·K", {"K": touched}, "accumulation")


def staging(role: str, largest: int) -> Line:
    """ZeRO-2's staging buffer for one gradient, pinned."""
    return _line("communication", role, pinned(2 * largest), "pow2(2·P_max)", {"P_max": largest}, "staging")


def cpu_adam_buffers(role: str) -> Line:
    """The double buffer of DeepSpeed's CPU Adam."""
    return _line("communication", role, CPU_ADAM_BUFFERS, "b", {"b": CPU_ADAM_BUFFERS}, "cpu-adam")


def half_precision_copy(role: str, share: int) -> Line:
    """ZeRO-2's pinned bf16 copy of the partition, from DeepSpeed 0.17."""
    return _line("weights", role, pinned(2 * share), "pow2(2·P_r)", {"P_r": share}, "master")


def moments(role: str, share: int) -> Line:
    """Adam's two moments, pageable, allocated by the first step."""
    return _line("optimizer_states", role, 8 * share, "8·P_r", {"P_r": share}, "moments")


def fsdp(role: str, share: int, b: int, states: float) -> Iterator[tuple[str, list[Line]]]:
    """FSDP's CPU offload: pinned shards of parameters and gradients, optimizer states from the first step."""
    kept = [
        _line("weights", role, pinned(b * share), "pow2(b·P_r)", {"b": b, "P_r": share}, "fsdp"),
        _line("gradients", role, pinned(b * share), "pow2(b·P_r)", {"b": b, "P_r": share}, "fsdp"),
    ]
    yield "before the first step", kept
    yield (
        "after the first step",
        [*kept, _line("optimizer_states", role, int(states * share), "s·P_r", {"s": states, "P_r": share}, "fsdp")],
    )
