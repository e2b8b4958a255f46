"""What a process takes beside its tensors: CUDA context, cuBLAS and NCCL buffers, and what the allocator holds back.

None of these follows from the model. Each constant names its source; those marked assumed were not measured by us, and
the range of every estimate covers their spread.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import erf, sqrt

from calc.ledger import Line
from calc.units import GiB, MiB

# Context and loaded kernels: 0.47 GiB on an A100 with lazy loading, torch 2.1.1 (stas00/ml-engineering
# training/performance/README.md). Assumed for other cards and versions.
CONTEXT = int(0.47 * GiB)
# PyTorch's cuBLAS workspace, one for the thread that runs forward and one for autograd's: 8320 KiB below compute
# capability 9.0, 32 MiB from there on (torch docs, CUBLAS_WORKSPACE_CONFIG; aten/src/ATen/cuda/CublasHandlePool.cpp).
WORKSPACES = 2
WORKSPACE, WORKSPACE_HOPPER = 8320 * 1024, 32 * MiB
HOPPER_OR_LATER = ("Hopper", "Blackwell")
# NCCL keeps for each channel and connection one buffer a protocol: Simple 4 MiB, LL128 640·120·8·8 B, LL 512·8·8·16 B
# (nccl src/include/device.h); a ring and a tree make three connections. Channels are assumed:
# 2 over PCIe, 24 over NVLink.
NCCL_BUFFERS = 4 * MiB + 640 * 120 * 8 * 8 + 512 * 8 * 8 * 16
NCCL_CONNECTIONS = 3
NCCL_CHANNELS = {False: 2, True: 24}
# Reserved beyond allocated, as a share of what is allocated and freed in a step. Reports range from 0.13 GiB of 24 to
# 5.6 of 79 (pytorch out-of-memory messages in OpenRLHF #398, ms-swift #5943). Assumed: 5 %, give or take as much.
FRAGMENTATION = 0.05
# Beyond that PyTorch keeps freed blocks, until memory is short, when it gives them back before it fails
# (c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`): what runs out is not decided by them, what a monitor
# shows is. Where lengths differ from batch to batch they came to 0.1 to 4.8 times what differs, 3.6 times at the 95th
# percentile of the 38 runs that measurements/published.jsonl has of ms-swift's benchmark; with one length, or emptied
# regularly, to a quarter at most.
CACHED = {"lengths vary": 3.6, "one length": 0.25}
VARYING = frozenset({"activations", "checkpoints", "logits", "temporary"})
# Standard deviations behind the range of an estimate, assumed until measured: of the formulas, of the context.
FORMULA_SPREAD = 0.01
CONTEXT_SPREAD = 0.15 * GiB
# The printed range holds the middle nine tenths.
RANGE = 1.645
# What is allocated and freed within a step; weights and optimizer states are allocated once and leave no holes.
PASSING = frozenset({"activations", "checkpoints", "logits", "temporary", "gradients", "communication"})


def process(architecture: str, ranks: int, nvlink: bool, processes: int = 1, role: str = "process") -> list[Line]:
    """The lines that every moment of `processes` on one card has: roles under Ray have a process each."""
    workspace = WORKSPACE_HOPPER if architecture in HOPPER_OR_LATER else WORKSPACE
    n = WORKSPACES * processes
    lines = [
        Line("context", role, processes * CONTEXT, "m·C", {"m": processes, "C": CONTEXT}, "runtime#context", False),
        Line("workspace", role, n * workspace, "n·w", {"n": n, "w": workspace}, "runtime#cublas"),
    ]
    if ranks > 1:
        channels = processes * NCCL_CHANNELS[nvlink]
        values = {"channels": channels, "connections": NCCL_CONNECTIONS, "b": NCCL_BUFFERS}
        count = channels * NCCL_CONNECTIONS * NCCL_BUFFERS
        lines.append(Line("nccl", role, count, "channels·connections·b", values, "runtime#nccl", False))
    return lines


def fragmentation(lines: list[Line]) -> Line:
    """What the allocator reserves beyond the lines of a moment."""
    passing = sum([line.bytes for line in lines if line.component in PASSING])
    values = {"f": FRAGMENTATION, "B": passing}
    return Line("fragmentation", "process", int(FRAGMENTATION * passing), "f·B", values, "runtime#fragmentation", False)


def cached(lines: Iterable[Line], *, lengths_vary: bool) -> int:
    """The most that PyTorch keeps of freed blocks beside the lines of a moment."""
    varying = sum([line.bytes for line in lines if line.component in VARYING])
    return int(CACHED["lengths vary" if lengths_vary else "one length"] * varying)


def spread(allocated: int, held_back: int) -> float:
    """The standard deviation of an estimate, in bytes: the formulas', the context's, the allocator's."""
    return sqrt((FORMULA_SPREAD * allocated) ** 2 + CONTEXT_SPREAD**2 + held_back**2)


def fit_probability(device: int, deviation: float, usable: int) -> float:
    """How likely `device` bytes, known to `deviation`, stay below `usable`: a normal distribution's tail."""
    return 0.5 * (1 + erf((usable - device) / (deviation * sqrt(2))))
