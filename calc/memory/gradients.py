"""Gradients: those that exist so far in a backward pass, and those kept between micro batches."""

from __future__ import annotations

from calc.base.ledger import Line


def so_far(role: str, done: int, b: int) -> Line:
    """Gradients of the `done` parameters that backward has reached."""
    return Line("gradients", role, b * done, "g·G", {"g": b, "G": done}, "gradients")


def accumulated(role: str, trained: int, b: float, shards: int = 1) -> Line:
    """Gradients kept from the first micro batch to the step."""
    return Line(
        "gradients",
        role,
        int(b * trained / shards),
        "g·P_t/N",
        {"g": b, "P_t": trained, "N": shards},
        "gradients#accumulation",
    )


def new(role: str, making: int, b: int) -> Line:
    """The gradient one operation makes, before it is added to the accumulated one."""
    return Line("temporary", role, b * making, "g·W", {"g": b, "W": making}, "gradients#accumulation")


def placeholders(role: str, elements: int, b: int) -> Line:
    """Gradients that nothing is written to, of `elements` in all: one for each shape of a weight."""
    return Line("gradients", role, b * elements, "g·W_s", {"g": b, "W_s": elements}, "parallelism#megatron")


def tied_embedding(role: str, elements: int, b: int, *, contiguous: bool) -> Line:
    """A tied embedding's two contributions, from the head and from the input, beside their sum.

    Autograd adds in place only into a contiguous gradient (torch `input_buffer.cpp`): the head's is a transposed view,
    unless autocast's cast has written it anew, or the loss has made it (`Replica.ties_in_place`).
    """
    extra = 1 if contiguous else 2
    return Line(
        "temporary", role, extra * b * elements, "n·g·V_h", {"n": extra, "g": b, "V_h": elements}, "gradients#tied"
    )


def whole_embedding(role: str, elements: int, b: int) -> Line:
    """The rows of the embedding's gradient that belong to other tensor-parallel ranks: every rank makes all of them."""
    return Line("gradients", role, b * elements, "g·W_o", {"g": b, "W_o": elements}, "gradients#tensor")


def deferred(role: str, elements: int, b: int) -> Line:
    """Whole gradients on every GPU, until the last micro batch reduces them."""
    return Line("gradients", role, b * elements, "g·G_w", {"g": b, "G_w": elements}, "gradients#deferred")


def unreduced(role: str, elements: int, b: int) -> Line:
    """Gradients of gathered parameters, in the compute type, until their FSDP unit is reduced."""
    return Line("gradients", role, b * elements, "c·G_u", {"c": b, "G_u": elements}, "gradients#unreduced")


def joined(role: str, elements: int, b: int) -> Line:
    """FSDP 1's gradient of a flat parameter, which autograd joins from those of its parts."""
    return Line("temporary", role, b * elements, "c·p", {"c": b, "p": elements}, "gradients#joined")


def partition(role: str, elements: int, b: int) -> Line:
    """Gradients that a rank keeps for its own partition, with the parameters at its borders whole."""
    return Line("gradients", role, b * elements, "g·K", {"g": b, "K": elements}, "gradients#zero")


def checked(role: str, elements: int, b: int = 11) -> Line:
    """An overflow check's memory: of one gradient at a time with ZeRO-2's offload, of all with fp16's loss scaler.

    The fp32 copy of a gradient and its masks take 11 bytes an element, from DeepSpeed 0.19.6 on nothing, as it reduces
    first; ZeRO-3 takes 3 for its share of all: absolute values in fp16, and a mask.
    """
    return Line("temporary", role, b * elements, "b·W", {"b": b, "W": elements}, "gradients#zero-offload")


def squared_norm(role: str, elements: int) -> Line:
    """The norm of one gradient slice, in fp64."""
    return Line("temporary", role, 8 * elements, "8·G_s", {"G_s": elements}, "gradients#norm")


def updates(role: str, elements: int, b: int) -> Line:
    """Matrices made orthogonal from the gradients of a partition, beside these."""
    return Line("temporary", role, b * elements, "b·M", {"b": b, "M": elements}, "optimizer#muon")


def flattened(role: str, elements: int, b: int) -> Line:
    """The flattened gradients of a partition or sub-group, and their fp32 copy for the step.

    DeepSpeed sets its states up with fp32 zeros of the same size.
    """
    return Line("temporary", role, b * elements, "b·E_s", {"b": b, "E_s": elements}, "gradients#step")
