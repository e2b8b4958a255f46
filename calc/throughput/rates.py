"""The speed that a GPU, its node and their links reach at each kind of work in a step.

Catalog rates are peaks; the shares of them that kernels reach come from published measurements, named beside each, or
from this project's own, by a function of `calc.accuracy.timing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

from calc.catalog.catalog import GPU, Node
from calc.scenario.words import Precision
from calc.throughput.terms import Constant, Unrated

GIGA = 1e9
STAS = "stas00/ml-engineering, compute/accelerator, best of many shapes in bf16"
MLI = "https://github.com/mli/transformers-benchmarks/issues/4"
NCCL = "https://github.com/NVIDIA/nccl/issues"
_LARGE = "share of the peak that large multiplications reach"
_FLASH = "share of the peak that FlashAttention-2 reaches"
_SDPA = "share of the peak that PyTorch's attention reaches, forward and backward"

PLAIN = Constant(
    215.3 / 256.4, "what a plain large multiplication reaches of the best among many shapes", "published",
    f"A800 PCIe, fp16, n = 8192: 215.3 TFLOPS ({MLI}); the same chip, A100 PCIe, at its best: 256.4 ({STAS})",
)  # fmt: skip
MATRIX = {
    "Ampere": Constant(271 / 312 * PLAIN, _LARGE, "published", f"A100 SXM 271 of 312 TFLOPS, {STAS}; times PLAIN"),
    "Hopper": Constant(
        0.697,
        _LARGE,
        "measured",
        "H200, products of 32,768 tokens in the shapes of six models, which reach its power limit: timing.matrix",
    ),
    "Blackwell": Constant(1745 / 2250 * PLAIN, _LARGE, "published", f"B200 1745 of 2250, {STAS}; times PLAIN"),
    "Ada Lovelace": Constant(158.6 / 165.2, _LARGE, "published", f"RTX 4090, fp16, n = 8192: 158.6 of 165.2, {MLI}"),
    "CDNA 3": Constant(668 / 1300 * PLAIN, _LARGE, "published", f"MI300X 668 of 1300, {STAS}; times PLAIN"),
    "CDNA 2": Constant(147 / 191.5 * PLAIN, _LARGE, "published", f"MI250X 147 of 191.5, {STAS}; times PLAIN"),
}
GROUPED = Constant(
    2 * 8192 * 5120 * 8192 / 1.31e-3 / 989e12 / MATRIX["Hopper"],
    "share of the rate of large multiplications that one reaches whose rows are grouped by expert", "published",
    "torch._grouped_mm of 8,192 rows, 16 experts of 5120 x 8192, takes 1.31 ms on an H100: "
    "https://github.com/pytorch/ao/pull/2490; other cards taken alike",
)  # fmt: skip
NARROW = Constant(
    1.0, "share of the peak in 8 bits that large multiplications reach, by the share of that in 16", "published",
    "torchao 0.18, testing/training/roofline_utils.py: pct_achievable_gemm_tops is one for all formats",
)  # fmt: skip
MATRIX_OTHER = Constant(0.65, f"{_LARGE}, other architectures", "assumed", "no source")
FLASH = {
    "Ampere": Constant(0.60, _FLASH, "published", "50 to 73 % on the A100, arXiv:2307.08691, abstract; the middle"),
    "Hopper": Constant(
        0.489,
        _SDPA,
        "calibrated",
        "two pairs of lengths, heads of 128 and of 64, on an H200: timing.flash",
    ),
}
MASKED = Constant(
    0.177 / 0.489, "rate of the kernel that takes a mask, over all keys, by that of PyTorch's attention without one",
    "calibrated", "a step of StarCoder2 with sequences of twice its window on an H200: timing.masked",
)  # fmt: skip
FLASH_OTHER = Constant(0.45, f"{_FLASH}, other architectures", "assumed", "no source")
MEMORY = Constant(
    0.88, "share of a card's memory bandwidth that kernels reading and writing once reach", "published",
    f"A100 1.80 of 2.04 TB/s, https://forums.developer.nvidia.com/t/339083; A800 1727 of 1935 GB/s, {MLI}; "
    "an H200 copies within itself at 0.875 of its own: timing.memory",
)  # fmt: skip
EAGER = {
    "Hopper": Constant(
        3.07e12, "bytes a second that element-wise kernels of eager code reach, however fast the card's memory is",
        "calibrated", "four steps of Llama 3 8B on an H200 and an H100: timing.eager",
    ),
}  # fmt: skip
FP32 = {
    "Hopper": Constant(
        67 / 989, "rate of products in fp32 by that in 16 bits", "published",
        "67 of 989 TFLOPS, NVIDIA H100 datasheet, https://www.nvidia.com/en-us/data-center/h100/",
    ),
}  # fmt: skip
BUS = Constant(
    235 / 300, "share of a link's bandwidth that a ring reaches", "published", "HGX A100, hardware/nodes/hgx-a100.yaml"
)
THROUGH_HOST = Constant(
    6.13 / 32, "the same where cards reach each other through host memory alone", "published",
    "eight L20 on PCIe Gen4 through shared memory, the mean over messages of up to 512 MB, as gathers of single "
    f"modules are: {NCCL}/1817. Single reports go up to 0.44 of the link ({NCCL}/1639).",
)  # fmt: skip
PCIE = {3: 16.0, 4: 32.0, 5: 64.0}  # GB/s of 16 lanes in one direction, by generation
PCIE_COPY = Constant(
    0.866,
    "share of PCIe that copies from and to pinned memory reach",
    "measured",
    "H200, Gen5: timing.pcie",
)
NETWORK_GBS = Constant(12.5, "network of a node that the catalog does not know, GB/s", "assumed", "100 Gb/s Ethernet")
CPU_ADAM = Constant(
    28 * 10e9 / 2.57, "bytes a second that CPU Adam gets through on one node", "published",
    "10 billion parameters in 2.57 s, ZeRO-Offload, arXiv:2101.06840, table 4, at 28 bytes each",
)  # fmt: skip
CPU_CORES = Constant(
    48, "cores of that node: fewer threads are taken to reach their share of its rate, more to reach no more",
    "published", "two Xeon Platinum 8168, same paper, section 6",
)  # fmt: skip
CORES = Constant(
    6, "cores for each GPU of a machine that the catalog does not know", "published",
    "48 vCPUs, two a core, with four GPUs: g5.12xlarge, https://aws.amazon.com/ec2/instance-types/g5/, and "
    "g6e.12xlarge, https://aws.amazon.com/ec2/instance-types/g6e/",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that one GPU of a job reaches, in operations or bytes a second.

    `matrix`, `fp32` and `flash` are operations of large multiplications in 16 bits and in fp32, and of FlashAttention;
    `narrow` of those in 8 bits, or in 16 on a card that has no rate in 8; `masked` of attention with a mask, `grouped`
    of multiplications whose rows are grouped by expert. `memory` is bytes of the card's own memory, `eager` bytes that
    element-wise kernels of eager code get through, `bus` bytes of a collective within a node (bus bandwidth, as NCCL's
    tests define it), `network` of one GPU's share of the network, `pcie` of a copy from or to host memory.
    `cores` are those of a node's CPUs that belong to the job's GPUs in it.
    """

    matrix: float
    narrow: float
    grouped: float
    fp32: float
    flash: float
    masked: float
    memory: float
    eager: float
    bus: float
    network: float
    pcie: float
    per_node: int
    cores: float

    def link(self, ranks: int, apart: int = 1) -> float:
        """Bus bandwidth of a collective over `ranks` GPUs, each `apart` from the next: the slower of the links within
        and between nodes.

        Between nodes NCCL's rings use the share of the network of every GPU that the group has in a node.
        """
        own = self.neighbours(apart)
        return self.bus if ranks <= own else min(self.bus, self.network * own)

    def neighbours(self, apart: int) -> int:
        """The GPUs of a node that are in one group, where each is `apart` from the next."""
        return max(1, self.per_node // apart)


@lru_cache(maxsize=1024)
def rated(gpu: GPU, node: Node | None, per_node: int, precision: Precision) -> Rates:
    """The rates of `gpu` in `node`, with `per_node` GPUs of the job in each node.

    Raises Unrated if the catalog lacks the card's arithmetic rate or memory bandwidth, and for fp32, whose rate it does
    not have. Without a node the link is the card's own, NVLink or PCIe.
    """
    peak = gpu.bf16_tflops or gpu.fp16_tflops
    if peak is None or gpu.bandwidth_gbs is None:
        what = "16-bit matrix rate" if peak is None else "memory bandwidth"
        raise Unrated(f"gpu: no source states the {what} of the {gpu.name}, so its speed is not estimated")
    if precision == "fp32":
        raise Unrated("precision: given 'fp32', whose matrix rate the catalog does not have, so speed is not estimated")
    slot = PCIE.get(gpu.pcie_gen or 4, PCIE[4])
    large = peak * 1e12 * MATRIX.get(gpu.architecture, MATRIX_OTHER)
    return Rates(
        matrix=large,
        narrow=large * NARROW * gpu.fp8_tflops / peak if gpu.fp8_tflops else large,
        grouped=large * GROUPED,
        fp32=peak * 1e12 * (FP32.get(gpu.architecture) or MATRIX.get(gpu.architecture, MATRIX_OTHER)),
        flash=peak * 1e12 * FLASH.get(gpu.architecture, FLASH_OTHER),
        masked=peak * 1e12 * FLASH.get(gpu.architecture, FLASH_OTHER) * MASKED,
        memory=gpu.bandwidth_gbs * GIGA * MEMORY,
        eager=min(gpu.bandwidth_gbs * GIGA * MEMORY, EAGER.get(gpu.architecture, inf)),
        bus=_bus(gpu, node, slot) * GIGA,
        network=(node.inter_gbs if node and node.inter_gbs else NETWORK_GBS / per_node) * GIGA,
        pcie=slot * PCIE_COPY * GIGA,
        per_node=per_node,
        cores=cores_of(node, per_node),
    )


def cores_of(node: Node | None, gpus: int) -> float:
    """The CPU cores of `gpus` GPUs of a node: their share of it, since other jobs have the rest."""
    if node and node.cpu_cores:
        return node.cpu_cores * min(1, gpus / node.gpus)
    return CORES * gpus


def threads_of(node: Node | None, gpus: int) -> int:
    """The threads of each of `gpus` ranks on a node that keep all their cores busy, and none twice."""
    return max(1, int(cores_of(node, gpus) // gpus))


def _bus(gpu: GPU, node: Node | None, slot: float) -> float:
    """Bus bandwidth within a node, GB/s: as measured, or the link's bandwidth times the share that rings reach."""
    if node and node.measured_gbs:
        return node.measured_gbs
    theory = node.intra_gbs if node and node.intra_gbs else (gpu.nvlink_gbs or 0) / 2 or slot
    return theory * (THROUGH_HOST if node and node.p2p is False else BUS)
