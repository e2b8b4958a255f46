"""What tests read off a layer's tape: its bytes a token, and what passes at each instant."""

from __future__ import annotations

from typing import Any

from formulas import form, terms

from calc.autograd.tape import Snapshot, Tape
from calc.catalog.catalog import load
from calc.memory import activations
from calc.memory.activations import Program
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture, LayerSpec
from calc.models.hf_config import from_config

BF16_LORA = Adapter(64, "all-linear", False, 2)
FP32_LORA = Adapter(64, "all-linear", True, 4)


def arch(model: str) -> Architecture:
    return load().model(model).architecture


def of_kind(a: Architecture, moe: bool) -> LayerSpec:
    """The kind of the last layer, or of the first, which has no experts."""
    return a.specs[-1 if moe else 0].shapes


def tape(model: str, *, moe: bool = False, first: bool = False, **run: Any) -> Tape:
    """One layer of `model` on a tape; `run` are fields of Run."""
    a = arch(model)
    return Program(Run(a, **run), of_kind(a, moe), first=first).layer()


def frozen(adapter: Adapter | None = None, **run: Any) -> dict[str, Any]:
    return {"trained": False, "adapter": adapter, **run}


def per_token(model: str, *, moe: bool = False, first: bool = False, **run: Any) -> float:
    """Bytes that a layer keeps for backward, a token."""
    return activations.layer(Run(arch(model), **run), of_kind(arch(model), moe), first=first).saved.tokens


def passing(model: str, shots: list[Snapshot], prefix: str = "") -> dict[str, tuple[dict[str, float], ...]]:
    """What passes at each instant whose name starts with `prefix`, in order."""
    return {shot.name: terms(shot.passing, arch(model)) for shot in shots if shot.name.startswith(prefix)}


def table(text: str) -> dict[str, tuple[dict[str, float], ...]]:
    """`name = form` on each line, as `passing` gives it."""
    lines = (line.partition(" = ") for line in text.strip().splitlines())
    return {name.strip(): form(sizes) for name, _, sizes in lines}


def check(found: dict[str, tuple[dict[str, float], ...]], text: str) -> None:
    """Every row of the table as found; rows that the table leaves out are checked elsewhere."""
    for name, sizes in table(text).items():
        assert found[name] == sizes, name


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 10}


def small(family: str, **fields: Any) -> Architecture:
    return from_config({"model_type": family, **SIZES, "num_key_value_heads": 2, **fields})
