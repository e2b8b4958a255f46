"""How fast a GPU, its node and their links are at the kinds of work that a step is made of.

Catalog rates are peaks; the shares of them that kernels reach come from published measurements, named beside each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from calc.catalog import GPU, Node
from calc.throughput.terms import Unrated

GIGA = 1e9
# What a plain large multiplication reaches of the best among many shapes: 215.3 TFLOPS on an A800 PCIe (fp16, n = 8192,
# mli/transformers-benchmarks issue 4) of 256.4 on the same chip, the A100 PCIe (stas00/ml-engineering).
PLAIN = 215.3 / 256.4
# Share of the peak that large multiplications reach. The best of many shapes in bf16, stas00/ml-engineering,
# compute/accelerator: A100 SXM 271 of 312, H100 SXM 794 of 989, B200 1745 of 2250, MI300X 668 of 1300, MI250X 147 of
# 191.5. A plain one on the RTX 4090: 158.6 of 165.2 (mli/transformers-benchmarks issue 4).
MATRIX = {
    "Ampere": 271 / 312 * PLAIN,
    "Hopper": 794 / 989 * PLAIN,
    "Blackwell": 1745 / 2250 * PLAIN,
    "Ada Lovelace": 158.6 / 165.2,
    "CDNA 3": 668 / 1300 * PLAIN,
    "CDNA 2": 147 / 191.5 * PLAIN,
}
MATRIX_OTHER = 0.65  # assumed: no source for cards of other architectures
# Share of the peak that FlashAttention-2 reaches: forward 362 of 989 TFLOPS on the H100 (2048 tokens, heads of 128; the
# FlashAttention-3 paper, arXiv:2407.08608, figure 5), 50 to 73 % on the A100 (arXiv:2307.08691, abstract), the middle.
FLASH = {"Ampere": 0.60, "Hopper": 362 / 989}
FLASH_OTHER = 0.45  # assumed
# Share of a card's memory bandwidth that kernels reading and writing once reach: 1.80 of 2.04 TB/s on the A100
# (forums.developer.nvidia.com/t/339083), 1727 of 1935 GB/s on the A800 (mli/transformers-benchmarks issue 4).
MEMORY = 0.88
# Share of a link's bandwidth that a ring reaches: 235 of 300 GB/s in the HGX A100 (hardware/nodes/hgx-a100.yaml).
BUS = 235 / 300
# Without peer-to-peer each byte crosses PCIe into host memory and out of it again, and all cards share the host. Of
# 32 GB/s, eight L20 on PCIe Gen4 reached 6.13 through shared memory, the mean over messages of up to 512 MB, as gathers
# of single modules are (NVIDIA/nccl issue 1817). Single reports reach from a few GB/s to 0.44 of the link (issue 1639).
THROUGH_HOST = 6.13 / 32
# GB/s of 16 lanes in one direction, by PCIe generation, and what copies reach of it: 56 of 63 GB/s (Gen5, voipmonitor,
# rtx6kpro, hardware/pcie-bandwidth.md).
PCIE = {3: 16.0, 4: 32.0, 5: 64.0}
PCIE_COPY = 56 / 63
NETWORK_GBS = 12.5  # assumed for a node whose network the catalog does not know: 100 Gb/s
# Bytes a second that CPU Adam gets through on one node: DeepSpeed's steps 10 billion parameters in 2.57 s
# (ZeRO-Offload, arXiv:2101.06840, table 4), reading and writing 28 bytes for each.
CPU_ADAM = 28 * 10e9 / 2.57


@dataclass(frozen=True, slots=True)
class Rates:
    """What one GPU of a job reaches, in operations and bytes a second.

    `matrix` and `flash` are operations of large multiplications and of FlashAttention, `memory` bytes of the card's
    own memory, `bus` those of a collective within a node (bus bandwidth, as NCCL's tests define it), `network` of one
    GPU's share of the network, `pcie` of a copy from or to host memory.
    """

    matrix: float
    flash: float
    memory: float
    bus: float
    network: float
    pcie: float
    per_node: int

    def link(self, ranks: int) -> float:
        """Bus bandwidth of a collective over `ranks` GPUs: the slower of the links within and between nodes.

        Between nodes NCCL's rings leave by every GPU's share of the network at once.
        """
        return self.bus if ranks <= self.per_node else min(self.bus, self.network * self.per_node)


@lru_cache(maxsize=1024)
def rated(gpu: GPU, node: Node | None, per_node: int, precision: str) -> Rates:
    """The rates of `gpu` in `node`, with `per_node` GPUs of the job in each node.

    Raises Unrated where the catalog lacks the card's arithmetic rate or memory bandwidth, and for fp32, whose rate it
    does not have. Without a node the link is the card's own, NVLink or PCIe.
    """
    peak = gpu.bf16_tflops or gpu.fp16_tflops
    if peak is None or gpu.bandwidth_gbs is None:
        what = "16-bit matrix rate" if peak is None else "memory bandwidth"
        raise Unrated(f"gpu: no source gives the {what} of the {gpu.name}, so nothing is said of its speed")
    if precision == "fp32":
        raise Unrated(
            "precision: given 'fp32', whose matrix rate the catalog does not have, so nothing is said of speed"
        )
    slot = PCIE.get(gpu.pcie_gen or 4, PCIE[4])
    return Rates(
        matrix=peak * 1e12 * MATRIX.get(gpu.architecture, MATRIX_OTHER),
        flash=peak * 1e12 * FLASH.get(gpu.architecture, FLASH_OTHER),
        memory=gpu.bandwidth_gbs * GIGA * MEMORY,
        bus=_bus(gpu, node, slot) * GIGA,
        network=(node.inter_gbs if node and node.inter_gbs else NETWORK_GBS / per_node) * GIGA,
        pcie=slot * PCIE_COPY * GIGA,
        per_node=per_node,
    )


def _bus(gpu: GPU, node: Node | None, slot: float) -> float:
    """Bus bandwidth within a node, GB/s: measured, or the share that links reach."""
    if node and node.measured_gbs:
        return node.measured_gbs
    theory = node.intra_gbs if node and node.intra_gbs else (gpu.nvlink_gbs or 0) / 2 or slot
    return theory * (THROUGH_HOST if node and node.p2p is False else BUS)
