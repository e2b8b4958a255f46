"""What each framework keeps in memory, by version: defaults, loss paths, engines. No byte is counted here."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calc.scenario import Scenario

DEEPSPEED = ("zero1", "zero2", "zero3")
FSDP = ("fsdp1", "fsdp2")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version; what follows them (`.post1`) does not count."""
    return tuple([int(part) for part in version.split(".") if part.isdigit()])


@lru_cache(maxsize=65536)
def at_least(version: str, first: str) -> bool:
    """Whether `version` is `first` or later."""
    return numbers(version) >= numbers(first)


def nearest(version: str, known: tuple[str, ...]) -> str:
    """The known version whose memory behaviour `version` shares.

    `0.6` is the last of the 0.6 releases; a version in between is the latest one before it, else the earliest.
    """
    series = [release for release in known if f"{release}.".startswith(f"{version}.")]
    return series[-1] if series else next((k for k in reversed(known) if numbers(k) <= numbers(version)), known[0])


def sharding_fault(s: Scenario) -> str | None:
    """Why precision, offload and method do not go with the sharding of `s`, in one line; None where they do."""
    if s.precision == "fsdp-mixed" and s.sharding not in FSDP:
        return f"precision: given 'fsdp-mixed' with sharding {s.sharding}, allowed: with {', '.join(FSDP)}"
    if s.sharding in DEEPSPEED and s.precision != "mixed":
        return f"precision: given {s.precision!r} with sharding {s.sharding}, allowed: mixed, as DeepSpeed keeps it"
    if s.offload.parameters and s.sharding not in ("zero3", *FSDP):  # zero/config.py of deepspeed 0.16.4: stage 3 alone
        return f"offload.parameters: given true with sharding {s.sharding}, allowed: with zero3, {', '.join(FSDP)}"
    if s.offload.optimizer and s.sharding not in (*DEEPSPEED, *FSDP):
        allowed = ", ".join((*DEEPSPEED, *FSDP))
        return f"offload.optimizer: given true with sharding {s.sharding}, allowed: with {allowed}"
    if s.method == "qlora" and s.sharding == "zero3":
        return "sharding: given 'zero3' with method qlora, allowed: none, ddp, zero1, zero2, fsdp1, fsdp2"
    return None
