"""Bytes and how they are shown: GiB (2^30) for memory, GB (10^9) only where a vendor or a source says so."""

from __future__ import annotations

MiB = 2**20
GiB = 2**30
GB = 10**9


def gib(n_bytes: float, digits: int = 1) -> str:
    """`n_bytes` in binary gibibytes, as pages and tables print it."""
    return f"{n_bytes / GiB:,.{digits}f} GiB"


def gb(n_bytes: float, digits: int = 0) -> str:
    """`n_bytes` in decimal gigabytes, for host memory and whatever a source states in GB."""
    return f"{n_bytes / GB:,.{digits}f} GB"
