"""LoRA's adapters beside a model's linears, and the number of their parameters, as PEFT counts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

from calc.models.architecture import (
    Architecture,
    ConfigError,
    LayerSpec,
    Linear,
    Tensor,
    layer_kinds,
    linears,
    vision_tensors,
)


def lora_parameters(arch: Architecture, rank: int, targets: str | Sequence[str]) -> int:
    """The adapter parameters PEFT adds: rank · (inputs + outputs) for each adapted Linear.

    `targets` is `all-linear` (every Linear but the head) or names matched as PEFT matches them: a module's whole name
    or its end after a dot. Routed experts that Transformers 5 has fused are no Linears.

    Raises ConfigError for a name that matches no Linear, and for a rank below 1.
    """
    if type(rank) is not int or rank < 1:
        raise ConfigError("lora.rank", rank, "a positive integer")
    return rank * _lora_width(arch, targets if isinstance(targets, str) else tuple(targets))


def adapter_matrices(
    arch: Architecture, spec: LayerSpec, rank: int, targets: str | Sequence[str], count: int = 1
) -> Iterator[Tensor]:
    """LoRA's two matrices for each adapted linear of a layer of the kind `spec`, of which the model has `count`."""
    for linear in linears(arch, spec):
        if targets == "all-linear" or linear.name.rpartition(".")[2] in targets:
            yield Tensor(f"{linear.name}.lora_A", (rank, linear.inputs), count, "linear", linear.kind)
            yield Tensor(f"{linear.name}.lora_B", (linear.outputs, rank), count, "linear", linear.kind)


@lru_cache(maxsize=4096)
def vision_matrices(arch: Architecture, rank: int, part: Literal["blocks", "projector"]) -> tuple[Tensor, ...]:
    """LoRA's two matrices for each linear of the vision tower's blocks, or of its projectors."""
    return tuple([
        Tensor(f"{linear.name.removesuffix('.weight')}.{name}", shape, linear.count, "linear", "vision")
        for linear in vision_tensors(arch, part)
        if linear.kind == "linear"
        for name, shape in (("lora_A", (rank, linear.shape[1])), ("lora_B", (linear.shape[0], rank)))
    ])  # fmt: skip


@lru_cache(maxsize=4096)
def _lora_width(arch: Architecture, targets: str | tuple[str, ...]) -> int:
    """Inputs plus outputs, over every Linear that `targets` names."""
    found = [(count, linear) for spec, count in layer_kinds(arch) for linear in linears(arch, spec)]
    names = sorted({linear.name.rpartition(".")[2] for _, linear in found})
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError("lora.targets", targets, f"all-linear or a list of {', '.join(names)}", near=["all-linear"])
    wanted = names if isinstance(targets, str) else targets

    def matches(linear: Linear, target: object) -> bool:
        return f".{linear.name}".endswith(f".{target}")

    for target in wanted:
        if not any(matches(linear, target) for _, linear in found):
            raise ConfigError("lora.targets", target, ", ".join(names), near=names)
    adapted = [(count, linear) for count, linear in found if any(matches(linear, target) for target in wanted)]
    return sum(count * (linear.inputs + linear.outputs) for count, linear in adapted)
