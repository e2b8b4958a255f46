"""What the frameworks' plans share: their names of shardings, and defaults that follow from others."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from calc.scenario.words import DEEPSPEED, TOGETHER


def accumulated(precision: str, sharding: str) -> str:
    """The default type of gradients: that of the weights, which DeepSpeed and pure bf16 keep in 16 bits."""
    if precision == "fp16":
        return "fp16" if sharding in DEEPSPEED else "fp32"
    return "bf16" if precision in ("bf16", "mixed") else "fp32"


def together(fields: Mapping[str, Any]) -> int:
    """The number of GPUs that work on the same sequences: the product of the degrees in `fields`."""
    return prod(int(fields.get(place, 1)) for place in TOGETHER)
