"""What cannot be of a card: its memory, its rates, its links, each beside the others and beside its architecture.

Bounds are ratios with room on both sides: a slip of units is a factor of a thousand, of bits for bytes one of eight, of
a rate with sparsity one of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

from calc.catalog import GPU, Catalog
from calc.check.architectures import GENERATIONS, SLOT
from calc.check.faults import fault
from calc.check.printed import printed

# What a process gets of the memory that is sold, at least: inline error correction takes a sixteenth, and the driver
# up to a fortieth of the rest, as on the A10: 22,517 of 24,576 MiB.
USABLE = 0.9
# Cards whose memory is corrected inline show fifteen sixteenths of it in nvidia-smi; others at least this share.
CORRECTED = 0.96
# Seconds^-1 in which the memory could be read: 2.1 of DGX Spark's GB10 (273 GB/s, 128 GB), 76 of the RTX 3080.
READS = (1.5, 100)
# FLOP for a byte of bandwidth: 37 of the H20, 71 of the RTX 3060; the most is its generation's.
LEAST_INTENSITY = 10
# GB/s a watt: 1.8 of the RTX 4060 Ti, 8 of the B200 and the H20.
BANDWIDTH_OF_WATT = (1, 20)
# A faster card of a known architecture may come out; none has ever been so much faster.
FASTER = 1.5


def vendor(gpu: GPU, _: Catalog) -> Iterator[str]:
    """An architecture is its vendor's."""
    known = GENERATIONS[gpu.architecture].vendor
    if gpu.vendor != known:
        yield fault("vendor", gpu.vendor, f"{known}, which makes {gpu.architecture}")


def memory(gpu: GPU, _: Catalog) -> Iterator[str]:
    """What the driver shows and what a process gets are most of what is sold, and no more than it."""
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
    """Where the source of a total prints it in GiB, the total is that."""
    for name, value in (("memory.smi_mib", gpu.smi_mib), ("memory.usable_mib", gpu.usable_mib)):
        said = [figure for figure in printed(gpu.sources.get(name, "")) if figure.unit == "GiB"]
        if value is not None and said and not any(figure.means(value, 1024, 1) for figure in said):
            yield fault(name, value, f"{float(said[0].value) * 1024:.0f}, the {said[0].text} of its source")


def correction(gpu: GPU, _: Catalog) -> Iterator[str]:
    """Inline error correction takes a sixteenth of what the driver shows, and nothing else does."""
    if gpu.ecc is None or gpu.smi_mib is None:
        return
    inline = gpu.smi_mib < CORRECTED * gpu.memory_gb * 1024
    if inline != (gpu.ecc == "on, inline"):
        share = f"{gpu.smi_mib} MiB of {gpu.memory_gb:g} GB"
        yield fault("ecc", gpu.ecc, f"on, inline, where smi_mib is 15/16 of the memory, and only there; it is {share}")


def memory_in_name(gpu: GPU, _: Catalog) -> Iterator[str]:
    """A name that says how much memory a card has says what is sold."""
    said = re.search(r"(?<![\w.])(\d+) ?GB\b", gpu.name)
    if said and float(said[1]) != gpu.memory_gb:
        yield fault("memory.marketing_gb", gpu.memory_gb, f"{said[1]}, as name says: {gpu.name}")


def bandwidth(gpu: GPU, _: Catalog) -> Iterator[str]:
    """Memory is read in seconds to hundredths of one, and no card is far ahead of its generation."""
    if gpu.bandwidth_gbs is None:
        return
    low, high = (bound * gpu.memory_gb for bound in READS)
    high = min(high, FASTER * GENERATIONS[gpu.architecture].bandwidth_gbs)
    if not low <= gpu.bandwidth_gbs <= high:
        of = f"GB/s, of {gpu.architecture} with {gpu.memory_gb:g} GB"
        yield fault("bandwidth_gbs", gpu.bandwidth_gbs, f"{low:g} to {high:g} {of}")


def rates(gpu: GPU, _: Catalog) -> Iterator[str]:
    """TFLOPS are dense and of a card of its generation, by themselves and for what its memory moves."""
    best = GENERATIONS[gpu.architecture]
    low, high = 0.0, FASTER * best.tflops
    if gpu.bandwidth_gbs is not None:
        low = LEAST_INTENSITY * gpu.bandwidth_gbs / 1000
        high = min(high, FASTER * best.intensity * gpu.bandwidth_gbs / 1000)
    for name, value, width in (("bf16", gpu.bf16_tflops, 1), ("fp16", gpu.fp16_tflops, 1), ("fp8", gpu.fp8_tflops, 2)):
        if value is not None and not width * low <= value <= width * high:
            bounds = f"{width * low:.3g} to {width * high:.4g} TFLOPS"
            yield fault(f"dense_tflops.{name}", value, f"{bounds}, dense, of {gpu.architecture} with such a memory")


def formats(gpu: GPU, _: Catalog) -> Iterator[str]:
    """A rate is of a format that the architecture's tensor cores have."""
    known = GENERATIONS[gpu.architecture].formats
    for name, value in (("bf16", gpu.bf16_tflops), ("fp16", gpu.fp16_tflops), ("fp8", gpu.fp8_tflops)):
        if value is not None and name not in known:
            yield fault(f"dense_tflops.{name}", value, f"none: {gpu.architecture} has {', '.join(known)}")


def formats_agree(gpu: GPU, _: Catalog) -> Iterator[str]:
    """Both 16-bit formats run alike, and fp8 twice as fast: else one is with sparsity, or accumulates in fp16."""
    half = gpu.bf16_tflops or gpu.fp16_tflops
    if half is None:
        return
    if gpu.fp16_tflops is not None and not 0.98 <= gpu.fp16_tflops / half <= 1.02:
        yield fault("dense_tflops.fp16", gpu.fp16_tflops, f"{half:g}, as bf16: dense, accumulating in fp32")
    if gpu.fp8_tflops is not None and not 1.9 <= gpu.fp8_tflops / half <= 2.1:
        yield fault("dense_tflops.fp8", gpu.fp8_tflops, f"{2 * half:g}, twice the rate in 16 bits")


def power(gpu: GPU, _: Catalog) -> Iterator[str]:
    """Watts are in proportion to what the memory moves."""
    if gpu.tdp_w is None or gpu.bandwidth_gbs is None:
        return
    low, high = (gpu.bandwidth_gbs / bound for bound in reversed(BANDWIDTH_OF_WATT))
    if not low <= gpu.tdp_w <= high:
        yield fault("tdp_w", gpu.tdp_w, f"{low:.0f} to {high:.0f} W, beside {gpu.bandwidth_gbs:g} GB/s")


def slot(gpu: GPU, _: Catalog) -> Iterator[str]:
    """A generation of cards has a generation of PCIe."""
    known = GENERATIONS[gpu.architecture].pcie
    if gpu.pcie_gen is not None and gpu.pcie_gen not in known:
        yield fault("pcie_gen", gpu.pcie_gen, f"{' or '.join(map(str, known))}, which {gpu.architecture} has")


def link(gpu: GPU, _: Catalog) -> Iterator[str]:
    """A link between cards is faster than the slot, and none is far ahead of its generation."""
    known = GENERATIONS[gpu.architecture]
    if not gpu.nvlink_gbs:
        return
    if not known.link_gbs:
        yield fault("nvlink_gbs", gpu.nvlink_gbs, f"0: {gpu.architecture} has no link between cards")
        return
    low, high = 2 * SLOT[gpu.pcie_gen or min(known.pcie)], FASTER * known.link_gbs
    if not low <= gpu.nvlink_gbs <= high:
        yield fault("nvlink_gbs", gpu.nvlink_gbs, f"{low:g} to {high:g} GB/s, both directions added, or 0 for none")
