"""The memory of a process beside its tensors: CUDA context, cuBLAS and NCCL buffers, and fragmentation.

None of these follows from the model. Each constant names its source; those marked assumed were not measured by us.
`calc.estimate.verdict` has their spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from calc.base.ledger import Line, Moment
from calc.base.units import GiB, MiB

# Context and loaded kernels: 0.47 GiB on an A100 with lazy loading, torch 2.1.1 (stas00/ml-engineering
# training/performance/README.md), assumed for other cards up to Ada; on H100 and H200 what a training process took in
# the measured records, torch 2.11 with CUDA 13, assumed for later ones.
CONTEXT, CONTEXT_HOPPER = int(0.47 * GiB), 804_061_184
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
# Reports of what a communicator takes: 0.54 GB for two A100 (github.com/NVIDIA/nccl, issue 964), 6 GB for three
# communicators (issue 864).
NCCL_MOST = 2_000_000_000
# An all-to-all connects a GPU to each other one of its node by 32 channels: 3.28 GB for seven of them, measured on
# eight H100 (github.com/NVIDIA/nccl, issue 1685). Issue 964 has 688 MB for an all-reduce of four A100, as above.
NCCL_PEER = 3_280_000_000 // 7
# RCCL was measured on MI250X: 1 GiB for a process's first communicator, and 0.65 GiB, what the channels above come
# to, for each further one (github.com/Lumi-supercomputer/LUMI-AI-Guide, issue 111).
RCCL_START = int(0.35 * GiB)
# Fragmentation as a training run died of a small request: the memory in pieces too small for it, reserved or free, as a
# share of all that the run had asked for; the middles of forty equal parts of the messages in measurements/exhausted,
# smallest first.
FRAGMENTATION = (
    0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0001, 0.0011, 0.0017,
    0.0021, 0.0032, 0.0033, 0.0041, 0.0047, 0.0049, 0.0053, 0.0066, 0.0073, 0.0107,
    0.0108, 0.0112, 0.0119, 0.0138, 0.0168, 0.0175, 0.0181, 0.0182, 0.0194, 0.0234,
    0.0280, 0.0332, 0.0356, 0.0366, 0.0427, 0.0481, 0.0538, 0.0544, 0.0550, 0.1200,
)  # fmt: skip
MIDDLE = len(FRAGMENTATION) // 2
# The share by which more was reserved on a GPU than `calc.replay` says: the same quantiles, of the measured records.
REPLAYED = (
    -0.0527, -0.0311, -0.0195, -0.0150, -0.0122, -0.0078, -0.0055, -0.0034, -0.0016, -0.0013,
    -0.0008, -0.0005, -0.0001, 0.0000, 0.0000, 0.0001, 0.0001, 0.0002, 0.0002, 0.0003,
    0.0005, 0.0006, 0.0007, 0.0009, 0.0011, 0.0013, 0.0015, 0.0019, 0.0021, 0.0024,
    0.0033, 0.0040, 0.0053, 0.0073, 0.0098, 0.0129, 0.0180, 0.0207, 0.0324, 0.0536,
)  # fmt: skip
# Beyond that PyTorch caches freed blocks until memory is short, and releases them before it fails
# (c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`): they do not decide whether memory runs out, but a
# monitor shows them. Where lengths differ from batch to batch they came to 0.1 to 4.8 times what differs, 3.65 times at
# the 95th percentile of the 45 runs that measurements/published.jsonl has of ms-swift's benchmark; with one length, or
# emptied regularly, to a quarter at most. Expandable segments leave blocks of other sizes no holes: on an H200, 24
# steps of twelve layers of Qwen2.5 3B and its head, torch 2.11, cached 0.31 times that, whether sequences had 8,192
# tokens, a few less, as packs have, or anything down to 300; without them 2.9 times, of packs.
Caching = Literal["lengths vary", "one length", "one segment"]
CACHED: Mapping[Caching, float] = {"lengths vary": 3.65, "one length": 0.25, "one segment": 0.31}
VARYING = frozenset({"activations", "checkpoints", "logits", "temporary"})
# Gathers, buckets and partitions of shards come and go between those, in streams of their own. Beyond their peak the
# measured jobs under DeepSpeed and FSDP, whose batches had one length each, reserved up to this many times what comes
# and goes at an instant, at the 95th percentile.
CACHED_SHARDED = 0.98
COMING = VARYING | {"communication", "gradients"}
# The same in the median, of the measured jobs on one GPU and of those under ZeRO: what PyTorch usually reserves beyond
# what tensors take, where no replay says it; with expandable segments, under which no job of ZeRO ran, FSDP's.
USUALLY: Mapping[tuple[str, bool], float] = {
    ("none", False): 0.21, ("none", True): 0.06,
    ("zero", False): 0.52, ("zero", True): 0.37,
}  # fmt: skip
# Memory that a rollout engine takes at its start and never frees piecemeal leaves no holes.
SERVING = "rollout"


def context(architecture: str) -> int:
    """Bytes of a process's CUDA context with its kernels."""
    return CONTEXT_HOPPER if architecture in HOPPER_OR_LATER else CONTEXT


def workspace(architecture: str) -> int:
    """Bytes that cuBLAS takes from PyTorch's allocator for one thread."""
    return WORKSPACE_HOPPER if architecture in HOPPER_OR_LATER else WORKSPACE


def started() -> Line:
    """The tensor of one element by which Accelerate starts CUDA on a GPU, in the smallest block that PyTorch gives.

    accelerate 1.10.0 `utils/modeling.py`, `get_max_memory`; PyTorch's `kMinBlockSize`.
    """
    return Line("temporary", "process", 512, "b", {"b": 512}, "runtime#context")


def process(
    architecture: str,
    communicators: int,
    nvlink: bool,
    processes: int = 1,
    role: str = "process",
    peers: int = 0,
    awake: int | None = None,
) -> list[Line]:
    """The memory of each process on a card besides its tensors: CUDA context, cuBLAS workspaces, NCCL's buffers.

    There are `processes` of them on the card, under Ray one for each role; where some sleep without groups or tensors,
    so many are `awake` at once. Each of these has a communicator for every group of GPUs in which it exchanges: shards,
    tensors, stages or sequences; and connections to the `peers` of its node to which it sends tokens for their experts.
    Over PCIe these are too few to count.
    """
    awake = processes if awake is None else awake
    each, n = workspace(architecture), WORKSPACES * awake
    own = context(architecture)
    lines = [
        Line("context", role, processes * own, "m·C", {"m": processes, "C": own}, "runtime#context", False),
        Line("workspace", role, n * each, "n·w", {"n": n, "w": each}, "runtime#cublas"),
    ]
    if communicators:
        channels = awake * communicators * NCCL_CHANNELS[nvlink]
        values = {"channels": channels, "connections": NCCL_CONNECTIONS, "b": NCCL_BUFFERS}
        count = channels * NCCL_CONNECTIONS * NCCL_BUFFERS
        lines.append(Line("nccl", role, count, "channels·connections·b", values, "runtime#nccl", False))
    if peers and nvlink:
        values = {"m": awake, "peers": peers, "b": NCCL_PEER}
        lines.append(Line("nccl", role, awake * peers * NCCL_PEER, "m·peers·b", values, "runtime#nccl", False))
    if communicators and architecture.startswith("CDNA"):
        values = {"m": awake, "C": RCCL_START}
        lines.append(Line("nccl", role, awake * RCCL_START, "m·C", values, "runtime#nccl", False))
    return lines


def symmetric(role: str, elements: int, b: int, ranks: int) -> Line:
    """Async TP's workspace for a group of `ranks`: two pieces of what is scattered, `elements` in all of `b` bytes.

    It is made outside the allocator, and grows to the largest that was asked for (torch 2.13
    `distributed/_symmetric_memory/__init__.py`, `_pipelined_produce_and_all2all`, `get_symm_mem_workspace`).
    """
    values = {"c": b, "n": elements, "t": ranks}
    return Line("communication", role, 2 * b * elements // ranks, "2·c·n/t", values, "parallelism#sequence", False)


def fragmentation(lines: list[Line]) -> Line:
    """The median loss to fragmentation at an instant, once blocks have been freed."""
    values = {"f": FRAGMENTATION[MIDDLE], "B": fragmenting(lines)}
    count = int(values["f"] * values["B"])
    return Line("fragmentation", "process", count, "f·B", values, "runtime#fragmentation", False)


def usually_cached(m: Moment, share: float, usable: int) -> Line:
    """The freed blocks that PyTorch usually caches at an instant beyond fragmentation, as far as a card has room.

    A monitor shows them. They decide nothing: PyTorch gives them back before any of the `usable` bytes lacks.
    """
    lost, taken = m.fragmentation, m.device_bytes
    values = {"c": share, "G": sum(coming(m.lines)), "F": lost, "U": usable, "A": taken}
    count, formula = min((int(share * values["G"]) - lost, "c·G - F"), (usable - taken, "U - A"))
    return Line("cache", "process", max(0, count), formula, values, "runtime#cached", False)


def replayed(lines: list[Line], reserved: int, least: int) -> Line:
    """Reserved memory that no tensor uses at an instant, where `calc.replay` followed every block.

    The allocator must be allowed to reserve the `least`, which decides whether the job fits.
    """
    values = {"R": reserved, "A": sum([line.bytes for line in lines if line.allocated]), "least": least}
    count = values["R"] - values["A"]
    return Line("fragmentation", "process", count, "R - A", values, "runtime#replay", False)


def fragmenting(lines: Iterable[Line]) -> int:
    """The bytes of which fragmentation is a share: all allocated tensors but a rollout engine's."""
    return sum([line.bytes for line in lines if line.allocated and line.role != SERVING])


def beyond(lines: Iterable[Line]) -> int:
    """An upper bound of what NCCL's communicators take beyond their lines, whose channels are assumed, in bytes."""
    most = NCCL_MOST / (NCCL_CHANNELS[True] * NCCL_CONNECTIONS * NCCL_BUFFERS)
    return int((most - 1) * sum([line.bytes for line in lines if "channels" in line.values]))


def shorter(lines: Iterable[Line], least: float) -> int:
    """A lower bound of an instant whose batch has only the share `least` of its tokens, in bytes; nothing is cached."""
    return int(sum([_shortened(line, least) for line in lines if line.component != "fragmentation"]))


def _shortened(line: Line, least: float) -> float:
    return line.bytes * least if line.component in VARYING else line.bytes


def cached(lines: Iterable[Line], caching: Caching, *, pools: bool = False) -> int:
    """An upper bound of the freed blocks that PyTorch keeps at an instant, fragmentation included, in bytes.

    `pools`: shards come and go, too, in streams of their own.
    """
    varying, others = coming(lines)
    if not pools:
        return int(CACHED[caching] * varying)
    return int(max(CACHED[caching], CACHED_SHARDED) * varying + CACHED_SHARDED * others)


def coming(lines: Iterable[Line]) -> tuple[int, int]:
    """The bytes that come and go in a step, as they are at an instant: those that lengths change, and others."""
    found = [line for line in lines if line.component in COMING]
    varying = sum([line.bytes for line in found if line.component in VARYING])
    return varying, sum([line.bytes for line in found]) - varying
