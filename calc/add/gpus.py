"""The draft of a GPU: its YAML as it was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from calc.add.draft import Draft
from calc.base.project import ROOT
from calc.base.schema import validator
from calc.base.units import gib
from calc.catalog.catalog import Catalog

# The values that a card's file can have, in its order.
VALUES = (
    "memory.smi_mib", "memory.usable_mib", "ecc", "bandwidth_gbs", "dense_tflops.bf16", "dense_tflops.fp16",
    "dense_tflops.fp8", "nvlink_gbs", "pcie_gen", "tdp_w",
)  # fmt: skip


def draft(data: Mapping[str, Any], raw: bytes, where: str) -> Draft:
    """The draft of a card; InputError for a file that the schema refuses."""
    validator(ROOT / "hardware" / "schema" / "gpu.schema.json")(data, where)
    return Draft("hardware/gpus", data["id"], raw, partial(_told, data["id"]))


def _told(id: str, catalog: Catalog) -> Iterable[str]:
    card = catalog.gpus[id]
    yield f"{card.name}: {card.memory_gb:g} GB, of which a process gets {gib(card.usable_bytes, 2)}"
    if card.usable_derived:
        yield f"memory.usable_mib: {card.sources['memory.usable_mib']}"
    if absent := [name for name in VALUES if name not in card.sources]:
        yield f"not found: {', '.join(absent)}; pages say that these are not published"
    if not any(id in node.gpu_ids for node in catalog.nodes.values()):
        yield "not found: a node in hardware/nodes/ that the card comes in"
