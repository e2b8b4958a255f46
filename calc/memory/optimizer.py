"""Optimizer states, and the temporaries that an optimizer allocates while it steps, in bytes.

What each optimizer keeps and allocates is its row of `calc.base.optimizers`. Sources: torch 2.13 `optim/_adafactor.py`,
bitsandbytes 0.45.5 `optim/optimizer.py` (block size 256, tensors below 4096 elements keep 32-bit states).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from calc.base.ledger import Line
from calc.base.optimizers import OPTIMIZERS, USUAL, Facts
from calc.models.architecture import Tensor

SMALL = 4096  # bitsandbytes `min_8bit_size`, torchao 0.18 `optim/adam.py:_new_buffer`


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A kind of optimizer, by its name in `OPTIMIZERS`, and the implementation of its step in PyTorch."""

    kind: str
    impl: str
    by_trainer: bool = False  # Transformers' Trainer builds it
    blockwise: bool = False  # Muon makes each rank's part of a matrix orthogonal by itself
    rank: int = 0  # of GaLore's projections

    @property
    def facts(self) -> Facts:
        """The row of its kind in `OPTIMIZERS`, or what Transformers' Trainer builds in its place."""
        row = OPTIMIZERS[self.kind]
        return (row.trainer or row) if self.by_trainer else row


def state_bytes_per_parameter(optimizer: Optimizer, b: int) -> float:
    """Bytes of state for each trained parameter, where its tensors are large; `b` bytes is the type it steps in.

    AdamW keeps two moments, Lion and SGD with momentum one, plain SGD none; 8-bit AdamW keeps two bytes and one fp32
    scale for each block of 256 elements and moment, bitsandbytes' 32-bit one fp32 always. Adafactor keeps one moment of
    a flat partition; a matrix's depends on its shape: see `adafactor_bytes`.
    """
    facts = optimizer.facts
    return facts.moments * (facts.packed or (4 if facts.wide else b))


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class PrecisionAware:
    """The formats of the `master` weights and of both moments that Transformer Engine's FusedAdam keeps.

    It makes all three in its first step. Read in TransformerEngine d0067d0d `pytorch/optimizers/fused_adam.py` and
    Megatron-LM d98e8a64dd `megatron/core/optimizer/__init__.py`. `fuses`: its kernel reads moments in bf16, as it does
    since 2.13 (`fuse_unscale`, pull request 2632).
    """

    master: str
    first: str
    second: str
    apart: bool = False  # masters are Megatron-core's, which copies gradients for them
    fuses: bool = True

    @property
    def master_bytes(self) -> int:
        """Bytes of a master: of one in fp32 the low half, whose high half is the bf16 weight
        (`store_param_remainders`).
        """
        return 4 if self.apart else 2

    @property
    def moment_bytes(self) -> int:
        """Bytes of both moments of a parameter."""
        return BYTES[self.first] + BYTES[self.second]

    @property
    def widened(self) -> int:
        """Bytes a parameter of the copies in fp32 with which a step goes on, of all parameters (`get_unscaled_state`).

        The kernel itself reads fp32 and, where it `fuses`, bf16 if both moments are in it.
        """
        read = self.fuses and (self.first, self.second) == ("bf16", "bf16")
        moments = [] if read else [self.first, self.second]
        return 4 * sum(dtype != "fp32" for dtype in (self.master, *moments))

    def states(self, role: str, trained: int, shards: int) -> Line:
        """Both moments of `trained` parameters over `shards` GPUs."""
        values = {"P_t": trained, "N": shards, "s": self.moment_bytes}
        bytes_ = self.moment_bytes * trained // shards
        return Line("optimizer_states", role, bytes_, "s·P_t/N", values, "optimizer#precision-aware")

    def scratch(self, role: str, trained: int) -> Line:
        """The copies in fp32 of the states of the `trained` parameters that one kernel steps."""
        values = {"b": self.widened, "P_t": trained}
        return Line("temporary", role, self.widened * trained, "b·P_t", values, "optimizer#precision-aware")


def adafactor_bytes(tensors: Sequence[Tensor], b: int) -> int:
    """A row and a column of second moments for a matrix, a full second moment for a vector (torch `_adafactor.py`)."""
    return sum(
        b * t.count * ((t.elements // t.shape[-1] + t.elements // t.shape[-2]) if len(t.shape) > 1 else t.elements)
        for t in tensors
    )


def in_32_bits(optimizer: Optimizer, tensor: Tensor) -> bool:
    """True if an 8-bit optimizer does not pack a tensor's states: it is small, or was named as an exception.

    Transformers' Trainer names every embedding to bitsandbytes (5.23 `trainer.py`, `register_module_override`).
    """
    named = optimizer.by_trainer and optimizer.facts.bitsandbytes
    return tensor.elements < SMALL or (named and tensor.kind == "embedding")


def steps_as_matrix(tensor: Tensor) -> bool:
    """True if Muon steps a tensor: a matrix that is neither embedding nor head (`_is_nonlinear_or_embedding`)."""
    return tensor.kind in ("linear", "expert", "router", "matrix") and len(tensor.shape) > 1


def orthogonal(role: str, elements: int, ranks: int) -> Line:
    """The memory that it takes to make one matrix orthogonal, of which each of `ranks` has `elements`.

    Of a whole one the momentum is normalised in fp32 and goes on in bf16, and what comes of that is cast, then scaled
    twice: 12 bytes an element in all, more than the products of its smaller side before. Ranks gather all parts and
    join them before, which takes 8, with at most 8 more: two matrices in bf16 and two products, no larger
    (Emerging-Optimizers `muon_utils.py`, `newton_schulz_tp`; `emerging_optimizers.py`, `scaled_orthogonalize_fn`).
    Moonlight's casts the momentum first, compiled, and takes no more.
    """
    values = {"b": 12 if ranks == 1 else 16, "W": elements, "T": ranks}
    return Line("temporary", role, values["b"] * elements * ranks, "b·W·T", values, "optimizer#muon")


def gram(role: str, shape: Sequence[int]) -> Line:
    """The memory that DeepSpeed's Muon takes to make one matrix of n x m orthogonal, n up to m.

    In fp16 two copies of it, as it is normalised, restarted or put together, and four products of the smaller side
    (0.19.6 `muon/original_muon.py`, `zeropower_via_gram_newtonschulz`).
    """
    n, m = sorted((shape[-2], shape[-1]))
    values = {"b": 2, "n": n, "m": m}
    return Line("temporary", role, 2 * (2 * n * m + 4 * n * n), "b·(2·n·m + 4·n·n)", values, "optimizer#muon")


def projected(tensor: Tensor) -> bool:
    """True if GaLore projects a tensor's gradient: that of a linear of a layer (ms-swift `find_all_linears`)."""
    return tensor.kind == "linear" and len(tensor.shape) > 1


def galore_states(tensor: Tensor, rank: int, b: int) -> tuple[int, ...]:
    """The bytes of each of GaLore's states of a tensor that steps in `b` bytes an element.

    A matrix of n x m, n up to m, has a projection of r x n, and two moments of r x m. The projection is cut out of a
    decomposition in fp32: of a gradient of that type it is a view, which keeps all of its n x n. Other tensors have
    AdamW's moments (galore-torch 1.0 `galore_projector.py`, `get_orthogonal_matrix`; `adamw.py`; the same in ms-swift
    3.0 to 4.6).
    """
    if not projected(tensor):
        return (b * tensor.elements,) * 2
    n, m = sorted(tensor.shape[-2:])
    r = min(rank, n)
    return b * n * (n if b == 4 else r), b * r * m, b * r * m


def galore_bytes(tensors: Sequence[Tensor], rank: int, b: int) -> int:
    """GaLore's states of all trained tensors, see `galore_states`."""
    return sum(t.count * sum(galore_states(t, rank, b)) for t in tensors)


def decomposition(tensor: Tensor, b: int) -> int:
    """Bytes in which GaLore decomposes a gradient of n x m, n up to m, in fp32, in its first step and every so often.

    The gradient's copy, unless it is fp32 itself, another that the solver overwrites, and both factors (torch 2.13
    `native/cuda/linalg/BatchLinearAlgebraLib.cpp`, `svd_cusolver`); the solver's workspace is not counted.
    """
    n, m = sorted(tensor.shape[-2:])
    return 4 * ((2 if b == 4 else 3) * n * m + n * n)


def decomposed(role: str, tensors: Sequence[Tensor], b: int) -> Line:
    """The memory in which GaLore decomposes the gradient of the largest matrix."""
    found = max((t for t in tensors if projected(t)), key=lambda t: decomposition(t, b))
    n, m = sorted(found.shape[-2:])
    values = {"c": 2 if b == 4 else 3, "n": n, "m": m}
    return Line("temporary", role, decomposition(found, b), "4·(c·n·m + n^2)", values, "optimizer#galore")


def muon_partition(role: str, matrices: int, b: int, rest: int) -> Line:
    """A rank's states under DeepSpeed's Muon: a momentum of the gradients' `b` bytes of each matrix that it has a part
    of, whole, and AdamW's moments in fp32 for its partition of the `rest`.
    """
    moments = 4 * OPTIMIZERS[USUAL].moments
    values = {"b": b, "M": matrices, "a": moments, "E_r": rest}
    return Line("optimizer_states", role, b * matrices + moments * rest, "b·M + a·E_r", values, "optimizer#muon")


def auxiliary(role: str, elements: int) -> Line:
    """The temporaries of the AdamW beside DeepSpeed's Muon: four tensors of its partition, in fp32."""
    return Line("temporary", role, 16 * elements, "16·E_r", {"E_r": elements}, "optimizer#muon")


def states(optimizer: Optimizer, role: str, trained: int, b: int, tensors: Sequence[Tensor], shards: int = 1) -> Line:
    """The optimizer's states for `trained` parameters spread over `shards` GPUs.

    `tensors` are the parameters as the optimizer sees them; none where it steps flat partitions (ZeRO, FSDP 1), which
    have neither rows nor small tensors.
    """
    facts = optimizer.facts
    if facts.factored and tensors:
        total = adafactor_bytes(tensors, 4 if facts.wide else b)
        return Line(
            "optimizer_states", role, -(-total // shards), "F/N", {"F": total, "N": shards}, "optimizer#adafactor"
        )
    per = state_bytes_per_parameter(optimizer, b)
    if facts.low_rank:
        of = {"G": galore_bytes(tensors, optimizer.rank, b), "r": optimizer.rank}
        return Line("optimizer_states", role, of["G"], "G", of, "optimizer#galore")
    if facts.orthogonal:
        rest = sum(t.elements * t.count for t in tensors if not steps_as_matrix(t))
        both = OPTIMIZERS[USUAL].moments * b
        values = {"P_t": trained, "P_r": rest, "N": shards, "s": per, "a": both}
        count = int((per * (trained - rest) + both * rest) / shards)
        return Line("optimizer_states", role, count, "(s·(P_t - P_r) + a·P_r)/N", values, "optimizer#muon")
    if facts.eight_bit:
        whole = sum(t.elements * t.count for t in tensors if in_32_bits(optimizer, t))
        values = {"P_t": trained, "P_32": whole, "N": shards, "s": per}
        wide = (4 if facts.wide else b) * facts.moments
        count = int((per * (trained - whole) + wide * whole) / shards)
        # paged states are managed memory (bitsandbytes `get_paged`): on the card, but not of PyTorch's allocator
        own = not facts.paged
        formula = f"(s·(P_t - P_32) + {wide}·P_32)/N"
        return Line("optimizer_states", role, count, formula, values, "optimizer#8-bit", own)
    values = {"P_t": trained, "N": shards, "s": per}
    own = not facts.paged
    return Line("optimizer_states", role, int(per * trained / shards), "s·P_t/N", values, "optimizer#states", own)


def temporaries(optimizer: Optimizer) -> int:
    """The number of temporaries of a parameter's size that the step makes: for all at once foreach, else one by one."""
    return optimizer.facts.steps[optimizer.impl].temporaries


def scratch(optimizer: Optimizer, b: int) -> int:
    """Bytes an element that the step of one parameter takes where they are not its type's, else 0.

    With states in fp32 the temporaries are in fp32 as well; gradients and weights of fewer bytes are copied to it.
    """
    facts, n = optimizer.facts, temporaries(optimizer)
    if facts.scratch or not (facts.wide and n):
        return facts.scratch
    return 4 * n + (8 if b < 4 else 0)


def passing(optimizer: Optimizer, b: int) -> int:
    """Bytes an element that the step of one parameter of `b` bytes an element takes."""
    return scratch(optimizer, b) or b * temporaries(optimizer)


def single_step(optimizer: Optimizer, role: str, elements: int, grad: int, b: int, *, part: bool = False) -> Line:
    """The temporaries of one parameter's own step, in backward: `b` bytes an element, times their number.

    LOMO steps a parameter when the next one's gradient comes in, and so keeps a gradient of `grad` bytes until then. A
    16-bit one is copied to fp32 and dropped, then the weight is copied: 6 bytes, then 8. Of `part` of a weight, its
    rank's, the copy is small: 6.
    """
    each = passing(optimizer, b)
    if optimizer.facts.widens:
        each = grad if grad == 4 else 6 if part else 8
    return Line("temporary", role, each * elements, "b·W", {"b": each, "W": elements}, "optimizer#in-backward")


def step_scratch(optimizer: Optimizer, role: str, trained: int, largest: int, b: int, shards: int = 1) -> Line:
    """The step's temporaries (see `temporaries`): foreach for all parameters, else for the largest."""
    n = temporaries(optimizer)
    if own := scratch(optimizer, b):
        values = {"b": own, "P_max": largest, "N": shards}
        return Line("temporary", role, own * largest // shards, "b·P_max/N", values, "optimizer#step")
    if not n:
        return Line("temporary", role, 0, "0", {}, "optimizer#step")
    if optimizer.impl == "foreach":
        values = {"P_t": trained, "b": b, "N": shards}
        return Line("temporary", role, b * trained // shards, "b·P_t/N", values, "optimizer#step")
    values = {"n": n, "P_max": largest, "b": b, "N": shards}
    return Line("temporary", role, n * b * largest // shards, "n·b·P_max/N", values, "optimizer#step")
