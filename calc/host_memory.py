"""What a node's host has for a job, and how that is known: given, a share of a node in the catalog, or assumed."""

from __future__ import annotations

from typing import NamedTuple

from calc.catalog import GPU, Node
from calc.scenario import Scenario
from calc.units import GB

# Ray ends workers when a node's memory is so full (RAY_memory_usage_threshold); elsewhere the rest is the system's.
SHARE = 0.95
# Host memory for each byte of GPU memory where no node of the catalog says it: what the smaller machines with several
# GPUs are rented with, as 192 GiB beside 4 x 24 GB (g5.12xlarge, https://aws.amazon.com/ec2/instance-types/g5/) and 384
# beside 4 x 48 GB (g6e.12xlarge, https://aws.amazon.com/ec2/instance-types/g6e/).
FOR_GPU = 2.0


class HostMemory(NamedTuple):
    """The memory of one node that a job may count on, in GB (10^9 bytes), and where the figure comes from, in words.

    `source`: `given` by the reader, read in the `catalog`, or `assumed` by a rule, on which no verdict rests.
    """

    gigabytes: float
    source: str
    basis: str

    @property
    def bytes(self) -> int:
        """What the job's processes may take of it."""
        return int(SHARE * self.gigabytes * GB)

    def lacks(self, needed: int) -> bool:
        """True where a node is known to have less than `needed` bytes for the job."""
        return self.source != "assumed" and needed > self.bytes

    def __str__(self) -> str:
        """The figure and where it comes from."""
        return f"{self.gigabytes:,.0f} GB a node, {self.basis}"


def host_memory(s: Scenario, gpu: GPU, node: Node | None) -> HostMemory:
    """The host memory of a node of `s` on `gpu`, which stands in a `node`, if the catalog has one.

    By default the share of the node that the job's GPUs have, since others use the rest.
    """
    if s.host_memory is not None:
        return HostMemory(s.host_memory, "given", "as given")
    gpus = min(s.gpus, s.gpus_per_node)
    if node and node.host_ram_gb:
        whole = f"the {node.host_ram_gb:,} GB of the {node.name}"
        if gpus >= node.gpus:
            return HostMemory(node.host_ram_gb, "catalog", f"taken from the catalog: {whole}")
        share = f"taken from the catalog: the share of {gpus} of {node.gpus} GPUs in {whole}"
        return HostMemory(node.host_ram_gb * gpus / node.gpus, "catalog", share)
    words = f"assumed: {FOR_GPU:g} times the memory of its GPUs, as the catalog knows no such node"
    return HostMemory(FOR_GPU * gpu.memory_gb * gpus, "assumed", words)
