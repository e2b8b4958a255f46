"""A memory snapshot of PyTorch, read without running anything in it, as the text of what it shows.

`torch.cuda.memory._dump_snapshot` pickles mappings, lists, text and numbers (torch/cuda/memory.py of 2.13). Those are
built here from the opcodes; any other opcode, such as one that names a class or calls a function, is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from calc.base.schema import InputError
from calc.base.units import GiB, gib

FIRST = b"\x80"  # the opcode PROTO, with which every pickle since protocol 2 begins
STEPS = 50_000_000  # opcodes of one snapshot
LARGEST = 5  # places in the code that are named
_VALUES = {
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8", "UNICODE",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_MARK = object()


class Snapshot(NamedTuple):
    """The card with the most memory allocated: the peaks of its history, what is left, and the request that failed.

    `places` are the live bytes by the place in the code that allocated them; `frames` are those of the failed request,
    or of the allocation at the peak, innermost first.
    """

    allocated: int
    reserved: int
    left: int
    failed: int
    places: tuple[tuple[str, int], ...]
    frames: tuple[str, ...]


def is_snapshot(raw: bytes) -> bool:
    """True for a pickle."""
    return raw.startswith(FIRST)


def as_text(raw: bytes, where: str) -> str:
    """A snapshot as a log would show it: a traceback, an error if a request failed, and its figures."""
    found = read(raw, where)
    lines = ["Traceback (most recent call last):", *(f"  {frame}" for frame in reversed(found.frames))]
    if found.failed:
        spare = max(0, found.reserved - found.allocated)
        lines.append(
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {_size(found.failed)}. Of the allocated "
            f"memory {_size(found.left)} is allocated by PyTorch, and {_size(spare)} is reserved by PyTorch but "
            "unallocated."
        )
    return "\n".join(lines) + "\n"


def said(raw: bytes, where: str) -> Iterator[str]:
    """The content of a snapshot, a line each, to stand beside the estimate."""
    found = read(raw, where)
    yield f"snapshot: at most {gib(found.allocated)} allocated and {gib(found.reserved)} reserved"
    yield from (f"snapshot: {gib(bytes, 2)} allocated at {place}" for place, bytes in found.places)


def _size(n: int) -> str:
    return f"{n / GiB:.2f} GiB"


def read(raw: bytes, where: str) -> Snapshot:
    """The snapshot in a pickle; InputError, one line, for anything else."""
    data = load(raw, where)
    try:
        return _read(data)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        allowed = "a snapshot of torch.cuda.memory._dump_snapshot"
        raise InputError(f"{where}: given a pickle of something else, allowed: {allowed}") from None


def _read(data: Mapping[str, Any]) -> Snapshot:
    segments = data["segments"]
    devices = {int(segment["device"]) for segment in segments} or {0}
    live = {n: sum(int(s["allocated_size"]) for s in segments if int(s["device"]) == n) for n in devices}
    card = max(devices, key=lambda n: live[n])
    own = [segment for segment in segments if int(segment["device"]) == card]
    held = sum(int(segment["total_size"]) for segment in own)
    traces = data.get("device_traces") or []
    events = traces[card] if card < len(traces) else []
    allocated, at = _peak(events, live[card], "alloc", "free_completed")
    reserved, _ = _peak(events, held, "segment_alloc", "segment_free")
    failed = next((event for event in reversed(events) if event["action"] == "oom"), None)
    frames = (failed or at or {}).get("frames") or []
    return Snapshot(
        allocated,
        reserved,
        live[card],
        int(failed["size"]) if failed else 0,
        tuple(_places(own)),
        tuple(_frame(frame) for frame in frames[:200] if str(frame.get("filename", "")).endswith(".py")),
    )


def _peak(events: Sequence[Mapping[str, Any]], last: int, more: str, less: str) -> tuple[int, Mapping[str, Any] | None]:
    """The largest sum of a history that ends at `last`, and the event that reached it."""
    now, most, at = last, last, None
    for event in reversed(events):
        if event["action"] == more:
            if at is None or now > most:
                most, at = max(most, now), event
            now -= int(event["size"])
        elif event["action"] == less:
            now += int(event["size"])
    return max(most, now), at


def _places(segments: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Live bytes by the innermost line of Python that allocated them, the largest first."""
    found: dict[str, int] = {}
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                frames = [f for f in block.get("frames") or [] if str(f.get("filename", "")).endswith(".py")]
                place = _frame(frames[0]) if frames else "an unknown place"
                found[place] = found.get(place, 0) + int(block["size"])
    return sorted(found.items(), key=lambda item: -item[1])[:LARGEST]


def _frame(frame: Mapping[str, Any]) -> str:
    return f'File "{frame["filename"]}", line {int(frame["line"])}, in {frame["name"]}'


# ---- the reader ----------------------------------------------------------------------------------------------------


def load(raw: bytes, where: str) -> Any:
    """The value of a pickle of mappings, lists, tuples, text and numbers; InputError for one of anything else."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for step, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
            if step > STEPS:
                raise InputError(f"{where}: given more than {STEPS:,} values, allowed: no more")
            if opcode.name == "STOP":
                return stack[-1]
            if not _simple(opcode.name, argument, stack, memo):
                raise InputError(
                    f"{where}: given a pickle with {opcode.name}, allowed: mappings, lists, text and numbers alone"
                )
    except InputError:
        raise
    except Exception:  # a pickle that is broken in whatever way
        raise InputError(f"{where}: given a pickle that is cut off or damaged, allowed: a whole one") from None
    raise InputError(f"{where}: given a pickle that does not end, allowed: a whole one")


def _simple(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> bool:
    """Applies one opcode to the stack; False if it is none of those that are read."""
    if name in _VALUES:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
        stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[name])
    elif name == "MARK":
        stack.append(_MARK)
    elif name in ("APPEND", "SETITEM"):
        items = [stack.pop() for _ in range(1 if name == "APPEND" else 2)][::-1]
        _add(stack[-1], items)
    elif name in ("APPENDS", "SETITEMS"):
        items = _marked(stack)
        _add(stack[-1], items)
    elif name in ("TUPLE", "LIST", "DICT"):
        items = _marked(stack)
        made = {"TUPLE": tuple, "LIST": list}.get(name)
        stack.append(made(items) if made else dict(zip(items[::2], items[1::2], strict=True)))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
        memo[len(memo) if name == "MEMOIZE" else int(argument)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[int(argument)])
    else:
        return name in ("PROTO", "FRAME")
    return True


def _add(into: Any, items: list[Any]) -> None:
    """Adds items to a list, or names and values to a mapping."""
    if isinstance(into, list):
        into.extend(items)
    else:
        into.update(zip(items[::2], items[1::2], strict=True))


def _marked(stack: list[Any]) -> list[Any]:
    """The values above the last mark, which go with it from the stack."""
    items: list[Any] = []
    while (top := stack.pop()) is not _MARK:
        items.append(top)
    return items[::-1]
