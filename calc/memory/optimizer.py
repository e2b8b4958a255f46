"""Optimizer states, and the temporaries that an optimizer allocates while it steps, in bytes.

What each optimizer keeps and allocates is its row of `calc.base.optimizers`. Sources: torch 2.13 `optim/_adafactor.py`,
bitsandbytes 0.45.5 `optim/optimizer.py` (block size 256, tensors below 4096 elements keep 32-bit states).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from calc.base.ledger import Line
from calc.base.optimizers import OPTIMIZERS, Facts
from calc.models.architecture import Tensor

SMALL = 4096  # bitsandbytes `min_8bit_size`
BLOCK = 256  # bitsandbytes `blocksize` since 0.44, 2048 before


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A kind of optimizer, by its name in `OPTIMIZERS`, and the implementation of its step in PyTorch."""

    kind: str
    impl: str
    wide_embeddings: bool = False  # 8-bit optimizers leave the states of embeddings in 32 bits

    @property
    def facts(self) -> Facts:
        """What is known of its kind."""
        return OPTIMIZERS[self.kind]


def state_bytes_per_parameter(optimizer: Optimizer, b: int) -> float:
    """Bytes of state for each trained parameter, where its tensors are large; `b` bytes is the type it steps in.

    AdamW keeps two moments, Lion and SGD with momentum one, plain SGD none; 8-bit AdamW keeps two bytes and one fp32
    scale for each block of 256 elements and moment. Adafactor keeps one moment of a flat partition; a matrix's depends
    on its shape: see `adafactor_bytes`.
    """
    facts = optimizer.facts
    return facts.moments * (1 + 4 / BLOCK if facts.eight_bit else b)


def adafactor_bytes(tensors: Sequence[Tensor], b: int) -> int:
    """A row and a column of second moments for a matrix, a full second moment for a vector (torch `_adafactor.py`)."""
    return sum(
        b * t.count * ((t.elements // t.shape[-1] + t.elements // t.shape[-2]) if len(t.shape) > 1 else t.elements)
        for t in tensors
    )


def in_32_bits(optimizer: Optimizer, tensor: Tensor) -> bool:
    """True if an 8-bit optimizer leaves a tensor's states in 32 bits: it is small, or was named as an exception.

    Transformers' Trainer names every embedding (5.23 `trainer.py`, `register_module_override`).
    """
    return tensor.elements < SMALL or (optimizer.wide_embeddings and tensor.kind == "embedding")


def states(optimizer: Optimizer, role: str, trained: int, b: int, tensors: Sequence[Tensor], shards: int = 1) -> Line:
    """The optimizer's states for `trained` parameters spread over `shards` GPUs.

    `tensors` are the parameters as the optimizer sees them; none where it steps flat partitions (ZeRO, FSDP 1), which
    have neither rows nor small tensors.
    """
    facts = optimizer.facts
    if facts.factored and tensors:
        total = adafactor_bytes(tensors, b)
        return Line(
            "optimizer_states", role, -(-total // shards), "F/N", {"F": total, "N": shards}, "optimizer#adafactor"
        )
    per = state_bytes_per_parameter(optimizer, b)
    if facts.eight_bit:
        whole = sum(t.elements * t.count for t in tensors if in_32_bits(optimizer, t))
        values = {"P_t": trained, "P_32": whole, "N": shards, "s": per}
        wide = 4 * facts.moments
        count = int((per * (trained - whole) + wide * whole) / shards)
        # paged states are managed memory (bitsandbytes `get_paged`): on the card, but not of PyTorch's allocator
        own = not facts.paged
        formula = f"(s·(P_t - P_32) + {wide}·P_32)/N"
        return Line("optimizer_states", role, count, formula, values, "optimizer#8-bit", own)
    values = {"P_t": trained, "N": shards, "s": per}
    return Line("optimizer_states", role, int(per * trained / shards), "s·P_t/N", values, "optimizer#states")


def temporaries(optimizer: Optimizer) -> int:
    """The number of temporaries of a parameter's size that the step makes: for all at once foreach, else one by one."""
    return optimizer.facts.steps[optimizer.impl].temporaries


def step_scratch(optimizer: Optimizer, role: str, trained: int, largest: int, b: int, shards: int = 1) -> Line:
    """The step's temporaries (see `temporaries`): foreach for all parameters, else for the largest."""
    n = temporaries(optimizer)
    if not n:
        return Line("temporary", role, 0, "0", {}, "optimizer#step")
    if optimizer.impl == "foreach":
        values = {"P_t": trained, "b": b, "N": shards}
        return Line("temporary", role, b * trained // shards, "b·P_t/N", values, "optimizer#step")
    values = {"n": n, "P_max": largest, "b": b, "N": shards}
    return Line("temporary", role, n * b * largest // shards, "n·b·P_max/N", values, "optimizer#step")
