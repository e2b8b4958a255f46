"""Megatron-core's models: what every framework that trains on it shares."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from calc.models.architecture import Architecture, ConfigError
from calc.scenario.scenario import Scenario

# families that Megatron-core's own layers are, by number and order of their tensors
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


@lru_cache(maxsize=64)  # a search asks for each way of cutting a model
def modelled(
    arch: Architecture, field: str, other: str, layers: Literal["megatron", "megatron-plain"] = "megatron"
) -> Architecture:
    """The model as Megatron-core has it: fused projections and norms, attention without a window.

    Raises ConfigError for `field`, by which Megatron was asked for, and which would have to be `other`, if it has other
    layers than those that were read.
    """
    if arch.family not in FAMILIES:
        known = f"Megatron-core's layers are modelled for {', '.join(FAMILIES)}"
        raise ConfigError(field, "megatron", f"{other} for the family {arch.family}; {known}")
    specs = tuple(spec._replace(slides=False) for spec in arch.specs)
    return replace(arch, modeling=layers, sliding_window=None, specs=specs)


def stages_fault(s: Scenario) -> str | None:
    """The reason why Megatron-core cannot divide its layers over stages as `s` asks, in one line, or None.

    It is told the layers of the first and of the last stage, and divides the others evenly.
    """
    if s.pipeline_layers is None or len(set(s.pipeline_layers[1:-1])) < 2:
        return None
    return f"pipeline_layers: given {[*s.pipeline_layers]}, allowed: as many in each stage between first and last"
