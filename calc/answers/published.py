"""The catalog as the site publishes it, and as the calculator in a reader's browser reads it."""

from __future__ import annotations

import json
from typing import Any

from calc.answers import answers
from calc.models.architecture import Architecture, parameters


def catalog() -> dict[str, Any]:
    """The catalog as `calc` read it: GPUs, nodes, and models with their counted parameters."""
    found = answers.catalog()
    return {
        **answers.versions(),
        "gpus": [answers.plain(g) | {"usable_bytes": g.usable_bytes} for g in found.gpus.values()],
        "nodes": [answers.plain(n) for n in found.nodes.values()],
        "models": [
            answers.plain(m)
            | {"architecture": _architecture(m.architecture), "parameters": parameters(m.architecture)}
            | {"seeing": m.seeing and _architecture(m.seeing)}
            for m in found.models.values()
        ],
    }


def _architecture(arch: Architecture) -> dict[str, Any]:
    """An architecture as data, its layers counted and listed by what sets them apart."""
    facts = {name: value for name, value in answers.plain(arch).items() if name != "specs"}
    lists = {"sliding_layers": [*arch.sliding_layers], "unrotated_layers": [*arch.unrotated_layers]}
    return {**facts, "layers": arch.layers, "dense_layers": arch.dense_layers, **lists}


def as_json(data: Any) -> str:
    """Compact JSON."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"
