"""A recommendation as JSON, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from calc.base.units import gib
from calc.catalog.catalog import Catalog
from calc.estimate.report import deciding, degrees, holds, lengths, rollout, runs, seconds, segments, span, tokens
from calc.launch.shell import does
from calc.recommend.answer import Recommendation
from calc.recommend.machines import Smallest
from calc.recommend.problem import Configuration, Miss
from calc.recommend.search import Judged
from calc.scenario.scenario import Scenario
from calc.throughput import Throughput

RANKED = "machines are ranked by their usable memory in all, then by the number of GPUs: the catalog has no prices"


def as_dict(r: Recommendation, tried: Smallest | None = None) -> dict[str, Any]:
    """The answer, ready for JSON, in the form that the command-line page describes."""
    return {
        "recommended": _configuration(r.recommended) if r.recommended else None,
        "alternatives": [_configuration(c) for c in r.alternatives],
        "fails": _miss(r.fails) if r.fails else None,
        "passed": _miss(r.passed) if r.passed else None,
        "advice": list(r.advice),
        "considered": r.considered,
        "pruned": r.pruned,
        "command": r.launch.command if r.launch else None,
        "files": dict(r.launch.files) if r.launch else {},
        "notes": [*r.notes, *(r.launch.notes if r.launch else ()), *([RANKED] if tried else [])],
        **(_tried(tried) if tried else {}),
    }


def _tried(tried: Smallest) -> dict[str, Any]:
    least = tried.least
    held = {"least": {"times": round(least.times, 2), **_configuration(least.configuration)}} if least else {}
    return {"machines_too_small": tried.smaller, "machines_too_slow": tried.slower, **held}


def _configuration(c: Configuration) -> dict[str, Any]:
    return {**({"trades": c.trades} if c.trades else {}), **_memory(c.judged), "throughput": _speed(c.throughput)}


def _memory(judged: Judged) -> dict[str, Any]:
    """The scenario with a summary of its estimate, taken from the GPU group with least room."""
    e = judged.estimate
    group = deciding(e)
    return {
        "scenario": e.scenario.as_dict(),
        "verdict": e.verdict,
        "fit_probability": round(e.fit_probability, 4),
        "peak_device_bytes": group.shown_peak.moment.device_bytes,
        "peak_device_range": list(group.device_range),
        "peak_phase": group.shown_peak.name,
        "phases": {p.name: p.moment.device_bytes for p in group.shown},
        "usable_bytes": group.usable_bytes,
        "slack_bytes": judged.slack,
        "host_peak_bytes_per_node": _host(judged),
    }


def _miss(m: Miss) -> dict[str, Any]:
    return {
        **_memory(m.judged),
        "throughput": _speed(m.throughput),
        "lacks": m.where,
        "phase": m.phase,
        "shortfall_bytes": m.shortfall,
        "reason": str(m.reason) if m.reason else None,
    }


def _speed(t: Throughput | None) -> dict[str, Any] | None:
    if t is None:
        return None
    return {
        "step_seconds": t.step_seconds,
        "tokens_per_second": t.tokens_per_second,
        "bound_by": t.bound_by,
        "terms": {term.name: term.seconds for term in t.terms},
    }


# ---- text ----------------------------------------------------------------------------------------------------------


def text(r: Recommendation, catalog: Catalog, tried: Smallest | None = None) -> str:
    """The answer as text for a terminal; it ends with a newline."""
    return "\n".join([*_lines(r, catalog, tried)]).rstrip() + "\n"


def _lines(r: Recommendation, catalog: Catalog, tried: Smallest | None) -> Iterator[str]:
    if tried and tried.machine:
        m = tried.machine
        slow = f" and {tried.slower} too slow" if tried.slower else ""
        yield f"smallest machine: {m.gpus} x {m.gpu.name}, after {tried.smaller} that are too small{slow}"
    if tried and (least := tried.least):
        m = least.machine
        yield f"the least that holds it: {m.gpus} x {m.gpu.name}, {least.times:.1f} times the step that it would allow"
        yield f"  {_settings(least.configuration.judged, catalog)}"
        yield from _pace(least.configuration.scenario, least.configuration.throughput)
    if r.recommended:
        yield from _shown("recommended", r.recommended, catalog)
        if r.passed:
            first = r.passed.judged
            yield f"  method {first.scenario.method} comes first, and where it is closest {_lacking(r.passed)}:"
            yield f"    {_settings(first, catalog)}"
    else:
        yield r.verdict
    fits = r.verdict == "fits"
    if r.recommended and r.fails and not fits:
        yield f"  tight, and nothing safer was found: {_lacking(r.fails)}"
    elif r.fails:
        yield ""
        yield from _failing(r.fails, catalog, "next faster" if r.recommended else "closest miss")
    if r.advice:
        yield ""
        yield "what settings do" if fits else "what would have to change"
        yield from (f"  {line}" for line in r.advice)
    for n, other in enumerate(r.alternatives, 1):
        yield ""
        yield from _shown(f"alternative {n}: {other.trades}", other, catalog)
    yield ""
    yield f"{r.considered:,} configurations considered, {r.pruned:,} pruned"
    if tried:
        yield RANKED
    yield from (f"note: {note}" for note in r.notes)
    if r.launch:
        yield ""
        yield r.launch.command.rstrip()
        for name, content in r.launch.files.items():
            yield ""
            yield f"{name}:"
            yield from (f"    {line}".rstrip() for line in content.splitlines())
        yield ""
        yield from (f"note: {note}" for note in r.launch.notes)


def _shown(title: str, c: Configuration, catalog: Catalog) -> Iterator[str]:
    group = deciding(c.judged.estimate)
    yield title
    yield f"  {_settings(c.judged, catalog)}"
    yield from (f"  {line}" for line in holds(c.scenario))
    yield (
        f"  {span(group)} of {gib(group.usable_bytes)} in {group.peak.name}; fits with probability "
        f"{c.judged.estimate.fit_probability:.2f}"
    )
    if host := _host(c.judged):
        yield f"  host memory {gib(host)} on each node"
    yield from _pace(c.scenario, c.throughput)


def _host(judged: Judged) -> int:
    return judged.estimate.host_peak


def _failing(m: Miss, catalog: Catalog, title: str) -> Iterator[str]:
    yield f"{title}, which does not fit"
    yield f"  {_settings(m.judged, catalog)}"
    yield f"  {_lacking(m)}"
    yield from _pace(m.judged.scenario, m.throughput)


def _lacking(m: Miss) -> str:
    if m.reason:
        return f"{m.reason.verdict}: {m.reason}"
    whose = "host memory" if m.where == "host" else "GPU memory"
    assert m.shortfall is not None
    return f"lacks {gib(m.shortfall)} of {whose} {m.when}, the estimate's error included"


def _pace(s: Scenario, t: Throughput | None) -> Iterator[str]:
    if t:
        largest = next(term for term in t.terms if term.name == t.bound_by)
        timed = f"{seconds(t.step_seconds)} s {'an iteration' if s.rollout else 'a step'}"
        yield f"  {timed}, {tokens(t)}; bound by {t.bound_by}, {seconds(largest.seconds)} s of it"


def _settings(judged: Judged, catalog: Catalog) -> str:
    """The settings to be made, in one line."""
    s = judged.scenario
    way = f"{s.method} of rank {s.lora.rank}" if s.lora else s.method
    if s.optimizer == "none" and s.method == "qlora":
        way = "weights in 4 bits"
    asked = s.trainer != "own" and s.loss != does(s, "loss")
    adapters = [f"adapters in {s.lora.dtype}"] if s.lora and s.lora.dtype != does(s, "lora.dtype") else []
    parts = [
        f"{s.model}, {s.task}, {way}",
        runs(s),
        s.precision,
        *adapters,
        f"{s.gpus} x {catalog.gpu(s.gpu).name}",
        f"sharding {s.sharding}",
        *degrees(s),
        f"micro batch {s.micro_batch} of {s.global_batch}",
        f"checkpointing {s.checkpointing}",
        f"{s.optimizer}" + (f", offloaded: {' and '.join(s.offloaded)}" if s.offloaded else ""),
        *(["Liger's kernels"] if s.kernels == "liger" else [f"loss {s.loss}"] if asked else []),
        *segments(s),
        lengths(s),
    ]
    if s.rollout:
        apart = f", on {s.rollout.gpus} GPUs of its own" if s.placement == "separate" else ""
        parts.append(rollout(s) + apart)
    return ", ".join(parts)
