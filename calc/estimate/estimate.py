"""From a scenario to its estimate: the only place that puts framework, placement, phases and verdict together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from calc import __version__
from calc.base.ledger import Line, Moment, Phase, most
from calc.base.units import gb, gib
from calc.catalog.catalog import Catalog, load
from calc.estimate import verdict
from calc.estimate.gpu_group import PHASES, sets
from calc.estimate.host_memory import HostMemory, host_memory
from calc.estimate.host_nodes import DURING, Hosts
from calc.estimate.result import Estimate, Group
from calc.scenario.rules import activation_notes, card_notes, card_warnings, linear_notes
from calc.scenario.scenario import Scenario
from calc.step.roles import Job
from calc.throughput import Throughput, Unrated, node_of, throughput


def estimate(s: Scenario, catalog: Catalog | None = None, *, replays: bool = True) -> Estimate:
    """The memory of `s`, phase by phase, and whether it fits its GPUs.

    With `replays`, PyTorch's allocator is replayed where all blocks are known, which says what fragmentation takes.
    Without, a measured share stands for that everywhere: the same tensors in a tenth of the time, for callers that read
    neither the verdict nor reserved memory.

    Raises CatalogError where the scenario's GPU or model is not in `catalog`.
    """
    catalog = catalog or load()
    job = Job(s, catalog.gpu(s.gpu))
    groups = tuple(on.group() for on in sets(job, replays=replays))
    host = host_memory(s, job.gpu, node_of(s, catalog))
    hosted = tuple(Hosts(job).phases())
    needed = most(hosted)
    beside = on_gpus(s, groups)
    lacking = [DURING[p.name] for p in hosted if host.lacks(p.moment.device_bytes, beside)]
    probability = 0.0 if lacking else min(g.fit_probability for g in groups)
    found = verdict.word(probability)
    failing = [(PHASES.index(g.verdict_phase), False) for g in groups if g.verdict == found and g.verdict_phase]
    failing += [(PHASES.index(phase), True) for phase in lacking]
    first, on_host = min(failing, default=(None, False))
    return Estimate(
        scenario=s,
        groups=groups,
        host_phases=hosted,
        host_memory=host,
        verdict=found,
        verdict_phase=None if first is None else PHASES[first],
        on_host=on_host,
        fit_probability=probability,
        notes=tuple(dict.fromkeys(_notes(s, job, groups, host_notes(host, needed, beside)))),
        catalog_version=catalog.version,
        calc_version=__version__,
    )


def _notes(s: Scenario, job: Job, groups: Sequence[Group], on_host: Iterable[str]) -> Iterator[str]:
    """The notes of an estimate; groups of GPUs that are alike say the same."""
    yield from s.warnings
    yield from card_warnings(s, job.gpu)
    yield from card_notes(s, job.gpu)
    yield from linear_notes(s)
    yield from activation_notes(s)
    yield from job.keeps.notes
    yield from (str(g.refusal) for g in groups if g.refusal)
    yield from paged_out(groups)
    for g in groups:
        yield from g.notes
    yield from on_host


def on_gpus(s: Scenario, groups: Sequence[Group]) -> int:
    """Bytes that the GPUs of a node take at their peaks, at most."""
    return min(s.gpus, s.gpus_per_node) * max(g.peak.moment.device_bytes for g in groups)


def host_notes(host: HostMemory, needed: int, beside: int) -> list[str]:
    """The note on a node that needs more host memory than it is known to have."""
    return [f"host memory: {gb(needed)} needed, compared with {host}"] if host.short(needed, beside) else []


def paged_out(groups: Sequence[Group]) -> list[str]:
    """The note on paged optimizer states for which the fullest card has no room."""
    left = max([line.left for g in groups for phase in g.phases for line in phase.moment.lines], default=0)
    if not left:
        return []
    return [
        f"{gib(left)} of paged optimizer states leave for host memory and come back for each step, which takes longer"
    ]


def host_verdict(e: Estimate) -> verdict.Verdict:
    """`fits`, `oom`, or `tight` where a node needs more host memory than it is merely assumed to have."""
    beside = on_gpus(e.scenario, e.groups)
    if not e.host_memory.short(e.host_peak, beside):
        return "fits"
    return "oom" if e.host_memory.lacks(e.host_peak, beside) else "tight"


def loading_moments(s: Scenario, catalog: Catalog | None = None) -> list[tuple[str, Moment]]:
    """Every instant of loading, in order, with the name of the GPU group in which it occurs."""
    job = Job(s, (catalog or load()).gpu(s.gpu))
    return [("+".join(on.names), moment) for on in sets(job) for moment in on.loading()]


def reserved_in_turn(s: Scenario, catalog: Catalog | None = None) -> dict[str, int]:
    """The bytes that PyTorch reserves at most as roles of RL score and train, by GPU group, where that is replayed."""
    job = Job(s, (catalog or load()).gpu(s.gpu))
    found = {"+".join(on.names): on.reserved_in_turn() for on in sets(job)}
    return {name: most for name, most in found.items() if most is not None}


def course(s: Scenario, catalog: Catalog | None = None) -> list[tuple[str, list[Phase]]]:
    """Every instant from loading to the end of a step that can be the peak of its phase, by GPU group, in order."""
    job = Job(s, (catalog or load()).gpu(s.gpu))
    return [("+".join(on.names), [*on.course()]) for on in sets(job)]


def speed(e: Estimate, catalog: Catalog | None = None) -> Throughput:
    """The throughput of the job of `e`, with the KV cache of its estimate; a job that does not fit is rated as if it
    did.

    Computed only on request. Raises Unrated where the catalog lacks a rate, or vLLM does not start.
    """
    catalog, s = catalog or load(), e.scenario
    refused = next((g.refusal for g in e.groups if g.refusal), None)
    if refused:
        raise Unrated(f"rollout: {refused}")
    tokens = max(g.cache_tokens for g in e.groups)
    return throughput(s, catalog.gpu(s.gpu), node_of(s, catalog), tokens or None)


# ---- the contract's JSON ------------------------------------------------------------------------------------------

_SYMBOL = re.compile(r"[^\W\d]\w*(?:·[^\W\d]\w*)*")


@lru_cache(maxsize=65536)
def _symbols(formula: str) -> tuple[str, ...]:
    """The names in a formula; `k·h` counts whole and in its parts, as the model's dimensions may have either."""
    found: dict[str, None] = {}
    for name in _SYMBOL.findall(formula):
        found[name] = None
        found.update(dict.fromkeys(name.split("·")))
    return tuple(found)


def shown_values(line: Line) -> dict[str, Any]:
    """The values that the line's formula names."""
    return {name: line.values[name] for name in _symbols(line.formula) if name in line.values}


def _line(line: Line) -> dict[str, Any]:
    data = {
        "component": line.component,
        "role": line.role,
        "bytes": line.bytes,
        "formula": line.formula,
        "values": shown_values(line),
        "source": line.source,
    }
    return data if line.allocated else {**data, "allocated": False}


def _phase(phase: Phase) -> dict[str, Any]:
    m = phase.moment
    return {
        "name": phase.name,
        "moment": m.name,
        "allocated_bytes": m.allocated_bytes,
        "device_bytes": m.device_bytes,
        "lines": [_line(line) for line in m.lines],
    }


def _cache(g: Group) -> dict[str, Any]:
    """The size of a group's KV cache, in tokens and in full-length sequences; empty where the group does not serve."""
    if not g.cache_tokens:
        return {}
    return {"kv_cache": {"tokens": g.cache_tokens, "sequences": g.cache_sequences}}


def _speed(e: Estimate, catalog: Catalog | None) -> tuple[dict[str, Any] | None, list[str]]:
    """The throughput and no note, or None and a note that says why."""
    try:
        t = speed(e, catalog)
    except Unrated as error:
        return None, [f"throughput: {error}"]
    shown = {term.name: term.seconds for term in t.terms}
    return {
        "step_seconds": t.step_seconds,
        "tokens_per_second": t.tokens_per_second,
        "bound_by": t.bound_by,
        "terms": shown,
    }, []


def as_dict(e: Estimate, catalog: Catalog | None = None) -> dict[str, Any]:
    """The estimate as the contract's section 4 spells it, ready for JSON.

    `throughput` is null where a rate that the job needs is unknown; a note then says which.
    """
    rate, notes = _speed(e, catalog)
    return {
        "scenario": e.scenario.as_dict(),
        "groups": [
            {
                "name": g.name,
                "gpus": g.gpus,
                "phases": [_phase(p) for p in g.shown],
                "peak_phase": g.shown_peak.name,
                "peak_allocated_bytes": max(p.moment.allocated_bytes for p in g.phases),
                "peak_device_bytes": g.shown_peak.moment.device_bytes,
                "peak_device_range": list(g.device_range),
                "usable_bytes": g.usable_bytes,
                "verdict": g.verdict,
                "verdict_phase": g.verdict_phase,
                "fit_probability": round(g.fit_probability, 4),
                **_cache(g),
            }
            for g in e.groups
        ],
        "host": {
            "phases": [_phase(p) for p in e.host_phases],
            "peak_bytes_per_node": e.host_peak,
            "memory_gb": e.host_memory.gigabytes,
            "memory_source": e.host_memory.source,
            "memory_basis": e.host_memory.basis,
            "usable_bytes": e.host_memory.bytes,
            "verdict": host_verdict(e),
        },
        "throughput": rate,
        "verdict": e.verdict,
        "verdict_phase": e.verdict_phase,
        "fit_probability": round(e.fit_probability, 4),
        "notes": [*e.notes, *notes],
        "catalog_version": e.catalog_version,
        "calc_version": e.calc_version,
    }
