"""Figures of a layer's tape for tests: its bytes a token, and what passes at each instant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from formulas import form, terms

from calc.autograd.lifetimes import Lifetimes
from calc.autograd.polynomial import Snapshot, snapshots
from calc.autograd.tape import Size, Tape, Tensor, of, total
from calc.catalog.catalog import load
from calc.memory import activations
from calc.memory.activations import Program
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture, LayerSpec
from calc.models.hf_config import from_config

# Settings that change the operations of a layer or how they follow on each other, as fields of Run.
SETTINGS: list[dict[str, Any]] = [
    *[{"precision": precision} for precision in ("bf16", "autocast", "autocast-bf16", "fp32")],
    *[
        {"precision": precision, "trained": False, "adapter": Adapter(16, targets, dropout, b)}
        for precision, targets, dropout, b in (
            ("bf16", "all-linear", False, 2),
            ("autocast", "all-linear", True, 4),
            ("autocast-bf16", ("q_proj", "v_proj"), True, 4),
            ("fp32", ("q_proj", "down_proj"), False, 4),
        )
    ],
    *[{"kernel": kernel} for kernel in ("efficient", "masked", "eager", "math")],
    {"kernel": "eager", "precision": "autocast", "training": True},
    {"trained": False, "adapter": Adapter(16, "all-linear", False, 2), "quantised": True},
    {"trained": False, "differentiable": True, "precision": "autocast"},
    *[{"context": 2, "exchange": exchange} for exchange in ("all-to-all", "all-gather", "ring")],
]

BF16_LORA = Adapter(64, "all-linear", False, 2)
FP32_LORA = Adapter(64, "all-linear", True, 4)


def arch(model: str) -> Architecture:
    return load().model(model).architecture


def of_kind(a: Architecture, moe: bool) -> LayerSpec:
    """The kind of the last layer, or of the first, which has no experts."""
    return a.specs[-1 if moe else 0].shapes


def layers(**setting: Any) -> Iterator[tuple[str, Run, LayerSpec]]:
    """A model of half of the catalog's families with each kind of its layers, run with one of the settings.

    Each family meets half of the settings: in turn the first and the last of four, the first two, the second and the
    third, and the last two.
    """
    models = {model.architecture.family: model.id for model in load().models.values()}
    turn = SETTINGS.index(setting)
    for n, name in enumerate(models.values()):
        if (n + 3 * turn) % 4 > 1:
            continue
        run = Run(arch(name), **setting)
        for spec in dict.fromkeys(spec.shapes for spec in run.arch.specs):
            yield name, run, spec


def tape(model: str, *, moe: bool = False, first: bool = False, **run: Any) -> Tape:
    """One layer of `model` on a tape; `run` are fields of Run."""
    a = arch(model)
    return Program(Run(a, **run), of_kind(a, moe), first=first).layer()


def forward_of(tape: Tape) -> list[Snapshot]:
    """The instants of a forward that a backward follows."""
    return snapshots(Lifetimes(tape).forward.turns)


def without_grad_of(tape: Tape) -> list[Snapshot]:
    """The instants of a forward without gradient."""
    return snapshots(Lifetimes(tape).without_grad.turns)


def once_of(tape: Tape) -> list[Snapshot]:
    """The instants of a forward that checkpointing will run again."""
    return snapshots(Lifetimes(tape).once.turns)


def again_of(tape: Tape) -> list[Snapshot]:
    """The instants of the forward that runs again."""
    return snapshots(Lifetimes(tape).recomputed())


def waiting_of(tape: Tape) -> Size:
    """The gradients that exist meanwhile."""
    return total(Lifetimes(tape).waiting())


def backward_of(tape: Tape) -> list[Snapshot]:
    """The instants of a backward."""
    return snapshots(Lifetimes(tape).backward.turns)


def selective() -> Tape:
    """Four products of different widths, a kernel with a second output, and what stands between them."""
    tape = Tape(selective=True)
    x = Tensor(of(h=1), 2)
    q = tape.op("q", [x], of(q=1), 2, saves=[x], product=True)
    k = tape.op("k", [x], of(k=1), 2, saves=[x], product=True)
    rotated = tape.op("rotate", [q], of(q=1), 2)
    lse = Tensor(of(H=1), 4)
    a = tape.op("attention", [rotated, k], of(o=1), 2, saves=[rotated, k, lse], saves_out=True, spared=[lse])
    i = tape.op("up", [a], of(i=1), 2, saves=[a], product=True)
    tape.op("down", [i], of(h=1), 2, saves=[i], product=True)
    return tape


def frozen(adapter: Adapter | None = None, **run: Any) -> dict[str, Any]:
    return {"trained": False, "adapter": adapter, **run}


def per_token(model: str, *, moe: bool = False, first: bool = False, **run: Any) -> float:
    """Bytes that a layer keeps for backward, a token."""
    return activations.layer(Run(arch(model), **run), of_kind(arch(model), moe), first=first).saved.tokens


def passing(model: str, shots: list[Snapshot], prefix: str = "") -> dict[str, tuple[dict[str, float], ...]]:
    """The bytes in passing at each instant whose name starts with `prefix`, in order."""
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
