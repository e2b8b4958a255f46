"""What each framework keeps in memory, by version: defaults, loss paths, engines. No byte is counted here."""

from __future__ import annotations

from functools import lru_cache


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
