"""PyTorch's releases that are known, and the libraries that a loop of one's own runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Pins(NamedTuple):
    """The libraries beside a release of PyTorch, of which none is pinned."""

    deepspeed: str
    torch: str
    transformers: str


RELEASES: Mapping[str, Pins] = {"2.13": Pins("0.16.4", "2.13.0", "5.23.0")}
