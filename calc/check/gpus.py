"""Rules that refuse impossible cards: memory, rates and links are checked against each other and the architecture.

Bounds are ratios with room on both sides: a wrong unit is off by a factor of a thousand, bits for bytes by a factor of
eight, a rate with sparsity by a factor of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

from calc.catalog.catalog import GPU, Catalog
from calc.check.architectures import GENERATIONS, SLOT
from calc.check.faults import fault
from calc.check.printed import printed

# The least share of the memory sold that a process gets: inline error correction takes a sixteenth, and the driver up
# to a fortieth of the rest, as on the A10: 22,517 of 24,576 MiB.
USABLE = 0.9
# Cards with inline error correction show fifteen sixteenths of it in nvidia-smi; others show at least this share.
CORRECTED = 0.96
# Times per second that the whole memory could be read: 2.1 on DGX Spark's GB10 (273 GB/s, 128 GB), 76 on the RTX 3080.
READS = (1.5, 100)
# FLOP per byte of bandwidth: 37 on the H20, 71 on the RTX 3060; the upper bound is the generation's.
LEAST_INTENSITY = 10
# GB/s per watt: 1.8 on the RTX 4060 Ti, 8 on the B200 and the H20.
BANDWIDTH_OF_WATT = (1, 20)
# A faster card of a known architecture may come out; none has ever been this much faster.
FASTER = 1.5
# FLOP per byte of an architecture's GeForce cards, whose tensor cores sum in fp32 at half the rate of sums in fp16: RTX
# 3090, RTX 4090, RTX 5080.
GEFORCE = {"Ampere": 76, "Ada Lovelace": 164, "Blackwell": 118}


def vendor(gpu: GPU, _: Catalog) -> Iterator[str]:
    """The vendor is the one that makes the architecture."""
    known = GENERATIONS[gpu.architecture].vendor
    if gpu.vendor != known:
        yield fault("vendor", gpu.vendor, f"{known}, which makes {gpu.architecture}")


def memory(gpu: GPU, _: Catalog) -> Iterator[str]:
    """The memory that the driver shows, and that a process gets, is most of the memory sold, and no more than it."""
    sold = int(gpu.memory_gb * 1024)
    least = ceil(USABLE * sold)
    for name, value in (("smi_mib", gpu.smi_mib), ("usable_mib", gpu.usable_mib)):
        if value is not None and not least <= value <= sold:
            bounds = f"{least} to {sold}"
            yield fault(f"memory.{name}", value, f"{bounds}, as marketing_gb is {gpu.memory_gb:g}, times 1024")


def usable(gpu: GPU, _: Catalog) -> Iterator[str]:
    """A process gets no more than the driver shows."""
    if gpu.smi_mib is not None and gpu.usable_mib > gpu.smi_mib:
        yield fault("memory.usable_mib", gpu.usable_mib, f"at most {gpu.smi_mib}, which smi_mib says")


def usable_as_printed(gpu: GPU, _: Catalog) -> Iterator[str]:
    """A total agrees with its source, where that prints it in GiB."""
    for name, value in (("memory.smi_mib", gpu.smi_mib), ("memory.usable_mib", gpu.usable_mib)):
        said = [figure for figure in printed(gpu.sources.get(name, "")) if figure.unit == "GiB"]
        if value is not None and said and not any(figure.means(value, 1024, 1) for figure in said):
            yield fault(name, value, f"{float(said[0].value) * 1024:.0f}, the {said[0].text} of its source")


def correction(gpu: GPU, _: Catalog) -> Iterator[str]:
    """Inline error correction takes a sixteenth of the memory away from what the driver shows; nothing else does."""
    if gpu.ecc is None or gpu.smi_mib is None:
        return
    inline = gpu.smi_mib < CORRECTED * gpu.memory_gb * 1024
    if inline != (gpu.ecc == "on, inline"):
        share = f"{gpu.smi_mib} MiB of {gpu.memory_gb:g} GB"
        yield fault("ecc", gpu.ecc, f"on, inline, where smi_mib is 15/16 of the memory, and only there; it is {share}")


def memory_in_name(gpu: GPU, _: Catalog) -> Iterator[str]:
    """A size of memory in the card's name is the memory sold."""
    said = re.search(r"(?<![\w.])(\d+) ?GB\b", gpu.name)
    if said and float(said[1]) != gpu.memory_gb:
        yield fault("memory.marketing_gb", gpu.memory_gb, f"{said[1]}, as name says: {gpu.name}")


def bandwidth(gpu: GPU, _: Catalog) -> Iterator[str]:
    """The bandwidth is in proportion to the memory, and no card is far ahead of its generation."""
    if gpu.bandwidth_gbs is None:
        return
    low, high = (bound * gpu.memory_gb for bound in READS)
    high = min(high, FASTER * GENERATIONS[gpu.architecture].bandwidth_gbs)
    if not low <= gpu.bandwidth_gbs <= high:
        of = f"GB/s, of {gpu.architecture} with {gpu.memory_gb:g} GB"
        yield fault("bandwidth_gbs", gpu.bandwidth_gbs, f"{low:g} to {high:g} {of}")


def rates(gpu: GPU, _: Catalog) -> Iterator[str]:
    """Dense TFLOPS are plausible for the generation, by themselves and in proportion to the bandwidth."""
    best = GENERATIONS[gpu.architecture]
    low, high = 0.0, FASTER * best.tflops
    if gpu.bandwidth_gbs is not None:
        low = LEAST_INTENSITY * gpu.bandwidth_gbs / 1000
        intensity = GEFORCE.get(gpu.architecture, best.intensity) if gpu.geforce else best.intensity
        high = min(high, FASTER * intensity * gpu.bandwidth_gbs / 1000)
    for name, value, width in (("bf16", gpu.bf16_tflops, 1), ("fp16", gpu.fp16_tflops, 1), ("fp8", gpu.fp8_tflops, 2)):
        if value and not width * low <= value <= width * high:
            bounds = f"{width * low:.3g} to {width * high:.4g} TFLOPS"
            yield fault(f"dense_tflops.{name}", value, f"{bounds}, dense, of {gpu.architecture} with such a memory")


def formats(gpu: GPU, _: Catalog) -> Iterator[str]:
    """A rate is 0 in the formats that the architecture's tensor cores do not have, and only in those."""
    known = GENERATIONS[gpu.architecture].formats
    for name, value in (("bf16", gpu.bf16_tflops), ("fp16", gpu.fp16_tflops), ("fp8", gpu.fp8_tflops)):
        if name not in known and value != 0:
            yield fault(f"dense_tflops.{name}", value, f"0, for none: {gpu.architecture} has {', '.join(known)}")
        if name in known and value == 0:
            yield fault(f"dense_tflops.{name}", value, f"a rate, or none given: {gpu.architecture} has {name}")


def formats_agree(gpu: GPU, _: Catalog) -> Iterator[str]:
    """Both 16-bit formats run alike, and fp8 twice as fast; other rates are with sparsity, or accumulate in fp16."""
    half = gpu.bf16_tflops or gpu.fp16_tflops
    if half is None:
        return
    if gpu.fp16_tflops and not 0.98 <= gpu.fp16_tflops / half <= 1.02:
        yield fault("dense_tflops.fp16", gpu.fp16_tflops, f"{half:g}, as bf16: dense, accumulating in fp32")
    if gpu.fp8_tflops and not 1.9 <= gpu.fp8_tflops / half <= 2.1:
        yield fault("dense_tflops.fp8", gpu.fp8_tflops, f"{2 * half:g}, twice the rate in 16 bits")


def power(gpu: GPU, _: Catalog) -> Iterator[str]:
    """The power is in proportion to the bandwidth."""
    if gpu.tdp_w is None or gpu.bandwidth_gbs is None:
        return
    low, high = (gpu.bandwidth_gbs / bound for bound in reversed(BANDWIDTH_OF_WATT))
    if not low <= gpu.tdp_w <= high:
        yield fault("tdp_w", gpu.tdp_w, f"{low:.0f} to {high:.0f} W, beside {gpu.bandwidth_gbs:g} GB/s")


def slot(gpu: GPU, _: Catalog) -> Iterator[str]:
    """The PCIe generation is one that the architecture has."""
    known = GENERATIONS[gpu.architecture].pcie
    if gpu.pcie_gen is not None and gpu.pcie_gen not in known:
        yield fault("pcie_gen", gpu.pcie_gen, f"{' or '.join(map(str, known))}, which {gpu.architecture} has")


def link(gpu: GPU, _: Catalog) -> Iterator[str]:
    """A link between cards is faster than the slot, and none is far ahead of its generation."""
    known = GENERATIONS[gpu.architecture]
    if not known.link_gbs and gpu.nvlink_gbs != 0:
        yield fault("nvlink_gbs", gpu.nvlink_gbs, f"0: {gpu.architecture} has no link between cards")
    if not known.link_gbs or not gpu.nvlink_gbs:
        return
    low, high = 2 * SLOT[gpu.pcie_gen or min(known.pcie)], FASTER * known.link_gbs
    if not low <= gpu.nvlink_gbs <= high:
        yield fault("nvlink_gbs", gpu.nvlink_gbs, f"{low:g} to {high:g} GB/s, both directions added, or 0 for none")
