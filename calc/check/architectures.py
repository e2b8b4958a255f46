"""The limits of each GPU architecture, against which the files of cards are checked.

The architectures are those of `hardware/schema/gpu.schema.json`; a new one is a word there and a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Generation:
    """The best figures of one architecture's cards: GB/s of memory and, both ways, of links; dense 16-bit rates.

    The rates are in TFLOPS and, as `intensity`, in FLOP for each byte that the memory of the same card moves. `nvlink`
    is the NVLink generation; 0: the vendor has another link, or none. `formats` are those of its tensor cores.
    """

    vendor: str
    bandwidth_gbs: float
    tflops: float
    intensity: float
    formats: tuple[str, ...]
    pcie: tuple[int, ...]
    link_gbs: float
    nvlink: int = 0


_16 = ("fp16",)
_BF16 = ("bf16", "fp16")
_FP8 = ("bf16", "fp16", "fp8")
# Of NVIDIA's, the whitepapers of the architecture and the data sheets of the cards named, and of links
# https://www.nvidia.com/en-us/data-center/nvlink/; of the others, the data sheets of the cards named.
GENERATIONS: Mapping[str, Generation] = {
    "Pascal": Generation("NVIDIA", 732, 21.2, 29, _16, (3,), 160, 1),  # P100
    "Volta": Generation("NVIDIA", 1134, 130, 139, _16, (3,), 300, 2),  # V100S; V100 SXM2
    "Turing": Generation("NVIDIA", 672, 130.5, 203, _16, (3,), 100, 2),  # Quadro RTX 8000; intensity: T4
    "Ampere": Generation("NVIDIA", 2039, 312, 215, _BF16, (4,), 600, 3),  # A100 80GB SXM; intensity: A40
    "Ada Lovelace": Generation("NVIDIA", 1008, 364.2, 419, _FP8, (4,), 0),  # RTX 4090; RTX 6000 Ada; L40S
    "Hopper": Generation("NVIDIA", 4900, 990, 378, _FP8, (5,), 900, 4),  # GH200 with HBM3e; intensity: H100 PCIe
    "Blackwell": Generation("NVIDIA", 8000, 2500, 313, _FP8, (5, 6), 1800, 5),  # GB200; PCIe Gen6: B300
    "CDNA 2": Generation("AMD", 3277, 383, 117, _BF16, (4,), 800),  # MI250X, both dies
    "CDNA 3": Generation("AMD", 6000, 1307.4, 247, _FP8, (5,), 1024),  # MI325X; intensity: MI300X
    "CDNA 4": Generation("AMD", 8000, 2516.6, 315, _FP8, (5,), 1075),  # MI355X
    "Xe HPC": Generation("Intel", 3277, 839, 256, _BF16, (5,), 1696),  # Data Center GPU Max 1550
    "Da Vinci": Generation("Huawei", 3200, 800, 250, _BF16, (4, 5), 784),  # Ascend 910C, both dies
}

# GB/s of a slot's sixteen lanes in one direction, by PCIe generation: PCI-SIG's base specifications 3.0 to 6.0.
SLOT = {3: 16, 4: 32, 5: 64, 6: 128}
