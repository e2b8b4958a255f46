"""Published iterations of RL stage by stage, as frameworks log them, beside their estimated terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calc.catalog.catalog import Catalog
from calc.resolve.parse import parse
from calc.throughput import Term, node_of, throughput

MAKING_ROOM = (": wake", ": sleep")  # how terms of what an engine frees and takes again end


def staged(record: Mapping[str, Any], catalog: Catalog) -> dict[str, list[Term]]:
    """The estimated terms of each stage that a record has seconds of."""
    s = parse(record["scenario"], where=record["id"], catalog=catalog)
    found: dict[str, list[Term]] = {stage: [] for stage in record["measured_stages"] if stage != "calibrates"}
    for term in throughput(s, catalog.gpu(s.gpu), node_of(s, catalog)).terms:
        found.get(stage_of(term.name), []).append(term)
    return found


def stage_of(name: str) -> str:
    """The stage of an iteration to which a term of this name belongs.

    What a role's phase brings to the GPU and sends back counts as that phase, as verl logs it
    (workers/fsdp_workers.py:569-606 of 0.4.0).
    """
    if name.startswith("weight sync") or name.endswith(MAKING_ROOM):
        return "sync"
    if name.startswith("rollout: "):
        return "rollout"
    return "scoring" if ", scoring: " in name else "update"


def logged(seconds: float | list[float]) -> float:
    """The seconds of a stage, of which a log may have parts."""
    return sum(seconds) if isinstance(seconds, list) else seconds
