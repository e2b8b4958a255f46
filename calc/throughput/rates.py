"""How fast a GPU, its node and their links are at the kinds of work that a step is made of.

Catalog rates are peaks; the shares of them that kernels reach come from published measurements, named beside each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from calc.catalog import GPU, Node
from calc.throughput.terms import Unrated

GIGA = 1e9
# Share of the peak that large matrix multiplications reach.
MATRIX = {"Ampere": 0.80, "Hopper": 0.72, "Ada Lovelace": 0.85, "Blackwell": 0.72, "CDNA 3": 0.5}
MATRIX_OTHER = 0.70
# Share of the peak that FlashAttention-2 reaches, forward and backward together.
FLASH = {"Ampere": 0.55, "Hopper": 0.40, "Ada Lovelace": 0.60, "Blackwell": 0.35}
FLASH_OTHER = 0.35
MEMORY = 0.85  # share of a card's memory bandwidth that kernels reading and writing once reach
BUS = 0.78  # share of a link's bandwidth that an all-reduce reaches: 235 of 300 GB/s in the HGX A100 (hardware/nodes)
# Without peer-to-peer each byte crosses PCIe into host memory and out of it again, and all cards share the host.
THROUGH_HOST = 0.12
PCIE_LANES = 16
# GB/s of 16 lanes in one direction by generation, and the share of it that copies from pinned memory reach
PCIE = {3: 16.0, 4: 32.0, 5: 64.0}
PCIE_COPY = 0.78
NETWORK_GBS = 12.5  # assumed for a node whose network the catalog does not know: 100 Gb/s
# DeepSpeed's CPU Adam, parameters a second of one node: 10 billion in 2.57 s (ZeRO-Offload, arXiv:2101.06840, table 4).
CPU_ADAM = 10e9 / 2.57


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
def rates(gpu: GPU, node: Node | None, per_node: int, precision: str) -> Rates:
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
