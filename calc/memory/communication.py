"""Communication: buckets, gathered parameters and reduction buffers that data parallelism allocates."""

from __future__ import annotations

from calc.base.ledger import Line
from calc.base.plan import Handed


def ddp_buckets(role: str, trained: int, b: int) -> Line:
    """DDP's reduction buckets: as large as all gradients, beside them (torch `reducer.cpp`, no bucket views)."""
    return Line("communication", role, b * trained, "g·P_t", {"g": b, "P_t": trained}, "communication#ddp")


def gathered(role: str, what: str, elements: int, b: float, copies: int = 1) -> Line:
    """Parameters gathered from all ranks, `copies` times where buffers and unsharded weights coexist."""
    values = {"n": copies, "c": b, "p": elements, "what": what}
    return Line("communication", role, int(copies * b * elements), "n·c·p", values, "communication#gathered")


def cast_shard(role: str, elements: int, b: int, ranks: int) -> Line:
    """FSDP 1's 16-bit copy of the shard that is being gathered."""
    return Line(
        "communication",
        role,
        b * elements // ranks,
        "c·p/N",
        {"c": b, "p": elements, "N": ranks},
        "communication#fsdp1",
    )


def reducing(role: str, elements: int, b: int) -> Line:
    """The input of a reduce-scatter: the gradients of an FSDP unit in the type they are reduced in."""
    return Line("communication", role, b * elements, "g·p", {"g": b, "p": elements}, "communication#reduce-scatter")


def bucket(role: str, elements: int, b: int, buffers: int = 1) -> Line:
    """ZeRO's bucket of gradients waiting for reduction, full size however few parameters are trained."""
    values = {"n": buffers, "b": b, "E_b": elements}
    return Line("communication", role, buffers * b * elements, "n·b·E_b", values, "communication#zero-bucket")


def flush(role: str, elements: int, b: int) -> Line:
    """The copy made for a reduction: of a full bucket or of a gradient larger than it, where they span partitions."""
    return Line("communication", role, b * elements, "b·E_f", {"b": b, "E_f": elements}, "communication#zero-bucket")


def offload_buffer(role: str, largest: int, b: int) -> Line:
    """ZeRO-Offload's staging buffer on the GPU, as large as the largest trained parameter."""
    return Line("communication", role, b * largest, "b·P_max", {"b": b, "P_max": largest}, "communication#zero-offload")


def live_parameters(role: str, parameters: int, window: int, module: int, b: int, kept: int = 0) -> Line:
    """ZeRO-3's gathered parameters: prefetching fills the window and overshoots by the last module.

    `kept` elements stay beside the window until backward has used them.
    """
    values = {"b": b, "P": parameters, "E_live": window, "p": module, **({"K": kept} if kept else {})}
    return Line(
        "communication",
        role,
        b * min(parameters, window + module + kept),
        "b·min(P, E_live + p + K)" if kept else "b·min(P, E_live + p)",
        values,
        "communication#zero-3",
    )


BUCKET = 2 << 30  # verl's update_weights_bucket_megabytes, 2048 (trainer/config/rollout/rollout.yaml of 0.9.1)


def handed(role: str, what: Handed, elements: int, b: int) -> Line:
    """Weights gathered or copied to hand them to a rollout engine or a checkpoint: `elements`, or verl's bucket."""
    if what == "bucket":
        return Line("communication", role, BUCKET, "B", {"B": BUCKET}, "communication#handing")
    return Line(
        "communication", role, b * elements, "b·E", {"b": b, "E": elements, "what": what}, "communication#handing"
    )


FLATTENED = 512 << 20  # slime's update_weight_buffer_size (`utils/arguments.py` of 0.3.1)


def flattened(role: str, largest: int, b: int, ranks: int) -> Line:
    """A bucket of slime's: of whole parameters up to `FLATTENED` bytes, or the largest of `largest` elements alone.

    Each of `ranks` tensor-parallel ranks has its part of it, gathers the parts of all, and joins them; without such
    ranks, or once they are gone, it is copied into one flat tensor (slime 0.3.1
    `megatron_utils/update_weight/common.py`, `all_gather_params_async`; sglang 0.5.15 `weight_sync/tensor_bucket.py`,
    `FlattenedTensorBucket`).
    """
    values = {"B": FLATTENED, "b": b, "p": largest, "t": ranks}
    bucket = max(FLATTENED, b * largest)
    if ranks == 1:
        return Line("communication", role, 2 * bucket, "2·max(B, b·p)", values, "communication#handing")
    size = 2 * bucket + bucket // ranks
    return Line("communication", role, size, "(2 + 1/t)·max(B, b·p)", values, "communication#handing")


def persistent(role: str, elements: int, b: int) -> Line:
    """Small parameters that ZeRO-3 keeps whole on every GPU."""
    return Line("communication", role, b * elements, "b·P_s", {"b": b, "P_s": elements}, "communication#zero-3")
