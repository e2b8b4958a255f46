"""A node's host memory for a job, and how it is known: given, a share of a node in the catalog, or assumed."""

from __future__ import annotations

from typing import NamedTuple

from calc.base.units import GB
from calc.catalog.catalog import GPU, Node
from calc.scenario.scenario import Scenario

# Ray kills workers when a node's memory is this full (RAY_memory_usage_threshold); elsewhere the system has the rest.
SHARE = 0.95
# Bytes of host memory per byte of GPU memory where no node of the catalog gives it: what the smaller machines with
# several GPUs are rented with, such as 192 GiB with 4 x 24 GB (g5.12xlarge,
# https://aws.amazon.com/ec2/instance-types/g5/) and 384 with 4 x 48 GB (g6e.12xlarge,
# https://aws.amazon.com/ec2/instance-types/g6e/).
FOR_GPU = 2.0


class HostMemory(NamedTuple):
    """The memory of one node that a job may count on, in GB (10^9 bytes), and where the figure comes from, in words.

    `source`: `given` by the reader, read in the `catalog`, or `assumed` by a rule, on which no verdict rests.
    `unified`: it is the memory of the GPUs, too.
    """

    gigabytes: float
    source: str
    basis: str
    unified: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of it that the job's processes may take."""
        return int(SHARE * self.gigabytes * GB)

    def short(self, needed: int, on_gpus: int) -> int:
        """The bytes that a node lacks of `needed`, beside `on_gpus` that its GPUs take."""
        beside = on_gpus if self.unified and needed else 0
        return max(0, needed + beside - self.bytes)

    def lacks(self, needed: int, on_gpus: int) -> bool:
        """True if a node is known to have less than `needed` bytes for the job, as in `short`."""
        return self.source != "assumed" and self.short(needed, on_gpus) > 0

    def __str__(self) -> str:
        """The figure and where it comes from."""
        return f"{self.gigabytes:,.0f} GB a node, {self.basis}"


def host_memory(s: Scenario, gpu: GPU, node: Node | None) -> HostMemory:
    """The host memory of a node of `s` on `gpu`, where `node` is the catalog's node with that GPU, if there is one.

    By default this is the share of the node that the job's GPUs have, since others use the rest.
    """
    if s.host_memory is not None:
        return HostMemory(s.host_memory, "given", "as given")
    gpus = min(s.gpus, s.gpus_per_node)
    if gpu.unified:
        words = "taken from the catalog: CPU and GPU share one memory"
        return HostMemory(gpu.memory_gb * gpus, "catalog", words, unified=True)
    if node and node.host_ram_gb:
        whole = f"the {node.host_ram_gb:,} GB of the {node.name}"
        if gpus >= node.gpus:
            return HostMemory(node.host_ram_gb, "catalog", f"taken from the catalog: {whole}")
        share = f"taken from the catalog: the share of {gpus} of {node.gpus} GPUs in {whole}"
        return HostMemory(node.host_ram_gb * gpus / node.gpus, "catalog", share)
    words = f"assumed: {FOR_GPU:g} times the memory of its GPUs, as the catalog knows no such node"
    return HostMemory(FOR_GPU * gpu.memory_gb * gpus, "assumed", words)
