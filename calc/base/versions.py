"""Releases by their version numbers."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
def numbers(version: str) -> tuple[int, ...]:
    """The numeric parts of a version; a suffix (`.post1`) is left out."""
    return tuple([int(part) for part in version.split(".") if part.isdigit()])


@lru_cache(maxsize=65536)
def at_least(version: str, first: str) -> bool:
    """True if `version` is `first` or later."""
    return numbers(version) >= numbers(first)


def _in_series(release: str, version: str) -> bool:
    """True if `release` is `version`, or one of the releases for which that stands: 4.51.3 for `4.51`."""
    return f"{release}.".startswith(f"{version}.")


@lru_cache(maxsize=65536)
def since(version: str, first: str) -> bool:
    """True if `version` is `first` or later, where `4.51` stands for the last of the 4.51 releases."""
    return at_least(version, first) or _in_series(first, version)


def nearest(version: str, known: tuple[str, ...]) -> str:
    """The known version whose memory behaviour `version` shares.

    `0.6` means the last of the 0.6 releases; a version between two known ones means the earlier of them, and one before
    all means the earliest.
    """
    series = [release for release in known if _in_series(release, version)]
    return series[-1] if series else next((k for k in reversed(known) if numbers(k) <= numbers(version)), known[0])
