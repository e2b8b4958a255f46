"""PyTorch's out-of-memory message: the figures that it states, in bytes.

Both of its forms are read, as c10/cuda/CUDACachingAllocator.cpp has written them since torch 1.3 and since torch 2.1;
builds for AMD say the same with HIP in place of CUDA. `figures` reads a whole message, `stated` what is left of one in
the midst of other text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from calc.base.schema import InputError, show
from calc.base.units import GiB, MiB

UNITS = {"bytes": 1, "KiB": 1024, "MiB": MiB, "GiB": GiB}
# the rounding error of a sum of three figures in GiB, which are printed with two decimals
ROUNDING = int(Fraction("0.015") * GiB)

_SIZE = r"([\d.]+ (?:bytes|[KMG]iB))"
_OLDER = re.compile(
    rf"Tried to allocate {_SIZE} \(GPU \d+; {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free; "
    rf"{_SIZE} reserved in total by PyTorch\)"
)
_NEWER = re.compile(
    rf"Tried to allocate {_SIZE}\. GPU (?:\d+ )?has a total capac(?:i)?ty of {_SIZE} of which {_SIZE} is free\. (.*)"
    rf"Of the allocated memory {_SIZE} is allocated by PyTorch,.* and {_SIZE} is reserved by PyTorch but unallocated\."
)
_OWN = re.compile(rf"this process has {_SIZE} memory in use\.")
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use\.")


def size(text: str) -> int:
    """The bytes of a figure such as `14.00 MiB`, rounded to the nearest byte."""
    number, unit = text.split(" ")
    return round(Fraction(number) * UNITS[unit])


def figures(message: str) -> dict[str, int | None]:
    """The figures of a message, by the field that records them; raises InputError for any other text.

    `in_use_bytes` is the memory of the card that the failing process uses. Where a message lists processes by number,
    it is that of the only one that can hold what PyTorch has reserved. None in the older form, where several or no
    processes qualify, and where the driver tells a container 0 bytes.
    """
    older = _OLDER.fullmatch(message)
    if older:
        tried, total, allocated, free, reserved = map(size, older.groups())
        return _fields(tried, total, free, None, allocated, reserved - allocated)
    newer = _NEWER.fullmatch(message)
    if not newer:
        raise InputError(f"given {show(message)}, allowed: PyTorch's out-of-memory message, from 'Tried' on")
    tried, total, free = map(size, newer.groups()[:3])
    allocated, unallocated = map(size, newer.groups()[4:])
    own = _OWN.findall(newer[4])
    held = map(size, own or _PROCESS.findall(newer[4]))
    able = [bytes for bytes in held if bytes + ROUNDING >= allocated + unallocated]
    return _fields(tried, total, free, able[0] if len(able) == 1 else None, allocated, unallocated)


def _fields(
    tried: int, total: int, free: int, in_use: int | None, allocated: int, unallocated: int
) -> dict[str, int | None]:
    return {
        "tried_bytes": tried,
        "total_bytes": total,
        "free_bytes": free,
        "in_use_bytes": in_use,
        "allocated_bytes": allocated,
        "unallocated_bytes": unallocated,
    }


# The figures of either form one by one, without white space: a log breaks lines within words.
_FIGURE = r"([\d.]+(?:bytes|[KMG]iB))"
_STATED: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern.replace("FIGURE", _FIGURE))
    for name, pattern in {
        "tried_bytes": r"TriedtoallocateFIGURE",
        "total_bytes": r"totalcapaci?tyofFIGURE|[GN]PU\d+;FIGUREtotalcapacity",
        "free_bytes": r"ofwhichFIGUREisfree|alreadyallocated;FIGUREfree",
        "in_use_bytes": r"thisprocesshasFIGUREmemoryinuse",
        "allocated_bytes": r"OftheallocatedmemoryFIGUREisallocated|totalcapacity;FIGUREalreadyallocated",
        "reserved_bytes": r"FIGUREreservedintotalbyPyTorch",
        "unallocated_bytes": r"andFIGUREisreservedbyPyTorchbutunallocated",
    }.items()
}
_OTHERS = re.compile(r"Process\d+has" + _FIGURE + "memoryinuse")


def stated(text: str) -> dict[str, int] | None:
    """The figures of the first message in `text`, whole or cut off, by the fields of `figures`; None without one.

    `others_bytes` is the memory that other processes have on the card. Of processes that are listed by number, the
    failing one is the smallest that can hold what PyTorch has reserved, or the only one.
    """
    tight = "".join(text.split())
    start = tight.find("Triedtoallocate")
    if start < 0:
        return None
    end = tight.find("Triedtoallocate", start + 1)
    tight = tight[start : end if end > 0 else None]
    found: dict[str, int] = {}
    for name, pattern in _STATED.items():
        if match := pattern.search(tight):
            found[name] = _bytes(next(part for part in match.groups() if part))
    if "reserved_bytes" in found:
        found["unallocated_bytes"] = max(0, found.pop("reserved_bytes") - found.get("allocated_bytes", 0))
    listed = [_bytes(each) for each in _OTHERS.findall(tight)]
    reserved = found.get("allocated_bytes", 0) + found.get("unallocated_bytes", 0)
    if "in_use_bytes" not in found and listed:
        able = [each for each in listed if each + ROUNDING >= reserved]
        if able or len(listed) == 1:
            found["in_use_bytes"] = min(able or listed)
            listed.remove(found["in_use_bytes"])
    if sum(listed):
        found["others_bytes"] = sum(listed)
    if not found.get("in_use_bytes"):
        found.pop("in_use_bytes", None)  # a container is told 0 bytes
    return found


def _bytes(figure: str) -> int:
    """The bytes of a figure without its space."""
    unit = next(unit for unit in UNITS if figure.endswith(unit))
    try:
        return size(f"{figure.removesuffix(unit)} {unit}")
    except ValueError:  # a figure such as 1.2.3
        return 0


def newer(message: str) -> bool:
    """True for the form of torch 2.1 and later."""
    return _NEWER.fullmatch(message) is not None


def sharers(message: str) -> int:
    """The number of processes that the message lists on the card, those of 0 bytes aside; 0 in the older form."""
    return len([text for text in _OWN.findall(message) + _PROCESS.findall(message) if size(text)])


def contradiction(record: Mapping[str, Any]) -> str:
    """The fault in a record's figures, `field: given …, allowed: …`; empty where they match the quote."""
    try:
        stated = figures(record["quote"])
    except InputError as error:
        return f"quote: {error}"
    for name, value in stated.items():
        if record[name] != value:
            return f"{name}: given {show(record[name])}, allowed: {show(value)}, as the quote says"
    reserved = record["allocated_bytes"] + record["unallocated_bytes"]
    most = record["total_bytes"] - record["free_bytes"] + ROUNDING
    if max(reserved, record["in_use_bytes"] or 0) > most:
        return f"quote: given more memory in use than the card has less what is free, allowed: at most {most} bytes"
    return ""
