"""A diagnosis as text for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from calc.base.units import gb, gib
from calc.catalog.catalog import Catalog
from calc.diagnose.diagnosis import Diagnosis
from calc.diagnose.remedies import Remedy, in_phase
from calc.diagnose.spelled import diff
from calc.estimate.estimate import as_dict as estimate_as_dict
from calc.estimate.report import deciding, verdict
from calc.estimate.result import Estimate

LEARNS = {"nothing": "nothing", "numerics": "numerics only", "what is learned": "what is learned"}


def text(d: Diagnosis, catalog: Catalog) -> str:
    """The diagnosis as text; it ends with a newline."""
    return "\n".join([*_lines(d, catalog)]).rstrip() + "\n"


def _lines(d: Diagnosis, catalog: Catalog) -> Iterator[str]:
    yield f"recognised: {', '.join(d.reading.parts)}"
    assumed = d.job.assumed if d.job else tuple(d.reading.assumed)
    unsaid = {each.field for each in assumed}
    said = [f"{name} {value}" for name, value in d.reading.fields.items() if value != {} and name not in unsaid]
    if said:
        yield f"  {', '.join(said)}"
    if d.reading.error:
        yield f"error: {d.reading.error.row.means}"
    if d.reading.told:
        yield f"died in: {d.reading.told.phase}, by `{d.reading.told.line}`"
    yield from (f"assumed: {each.field} {each.value}, {each.why}" for each in assumed)
    if d.job:
        yield from (f"left out: {line}" for line in d.job.left_out)
    yield from (f"not understood: {name}" for name in d.reading.unread)
    yield from (
        f"not said: {name}, as ${variable} is not set in the text" for name, variable in d.reading.variables.items()
    )
    yield from (f"note: {note}" for note in d.reading.notes)
    yield from (f"question: {question}" for question in d.questions)
    if d.questions:
        yield "  say it with --model or --gpu, by an id that `python -m calc models` or `python -m calc gpus` lists"
    if d.refusal:
        yield f"not computed: {d.refusal}"
    if not d.estimate or not d.job:
        yield from (f"message: {line}" for line in d.agrees)
        return
    yield ""
    yield verdict(d.estimate, d.gpu_name)
    if not d.group or not d.group.refusal:
        yield d.cause
    yield from (f"  {line}" for line in d.agrees)
    yield ""
    if not d.remedies:
        yield "no change that was tried helps"
        return
    yield "what frees memory there" if d.estimate.verdict == "fits" and not d.host else "remedies"
    for n, remedy in enumerate(d.remedies, 1):
        yield from _remedy(n, remedy, d, catalog)


def _remedy(n: int, remedy: Remedy, d: Diagnosis, catalog: Catalog) -> Iterator[str]:
    assert d.job
    assert d.estimate
    size = gb if d.host else gib
    before, after = compared(d, d.estimate), compared(d, remedy.estimate)
    time = "" if remedy.time is None else f"; a step takes {time_words(remedy.time)}"
    told = _short(remedy.estimate) if remedy.estimate.verdict == "oom" else remedy.estimate.verdict
    yield f"  {n}. {' + '.join(remedy.names)}: {told}, {size(before)} → {size(after)}{time}"
    machine = ", on another machine" if remedy.machine else ""
    yield f"     changes {LEARNS[remedy.learns]}{machine}; {remedy.costs}"
    yield from (f"       {line}" for line in diff(d.job, remedy, d.reading, catalog))


def _short(e: Estimate) -> str:
    """What fails of a job that does not fit, in words."""
    if e.on_host:
        return "out of host memory"
    full = any(g.peak.moment.device_bytes > g.usable_bytes for g in e.groups)
    return "vLLM does not start" if not full and any(g.refusal for g in e.groups) else "out of memory"


def compared(d: Diagnosis, e: Estimate) -> int:
    """The bytes by which a remedy is judged: the node's, the peak's, or of a job that fits those where it died."""
    if d.host:
        return e.host_peak
    return in_phase(e, d.reading.phase if d.estimate and d.estimate.verdict == "fits" else None)


def time_words(factor: float) -> str:
    """The time of a step against the job's, in words."""
    if 0.995 <= factor <= 1.005:
        return "as long"
    if not 0.2 < factor < 3:
        return f"{factor:.2g} times as long"
    return f"{100 * abs(factor - 1):.0f} % {'longer' if factor > 1 else 'less'}"


# ---- JSON ----------------------------------------------------------------------------------------------------------


def as_dict(d: Diagnosis, catalog: Catalog) -> dict[str, Any]:
    """The diagnosis, ready for JSON; `docs/reference/cli.md` describes it."""
    r = d.reading
    return {
        "recognised": {
            "parts": r.parts,
            "fields": r.fields,
            "assumed": [each._asdict() for each in d.job.assumed] if d.job else [each._asdict() for each in r.assumed],
            "left_out": list(d.job.left_out) if d.job else [],
            "not_understood": r.unread,
            "not_said": r.variables,
            "notes": r.notes,
            "gpu_candidates": r.cards,
        },
        "error": {
            "kind": r.error.row.name,
            "memory": r.error.row.kind,
            "means": r.error.row.means,
            "line": r.error.line,
        }
        if r.error
        else None,
        "message": r.figures,
        "tracked": r.tracked,
        "phase": {"told": r.phase, "line": r.told.line if r.told else None, "seen": r.told.seen if r.told else None},
        "questions": list(d.questions),
        "refusal": d.refusal or None,
        "estimate": estimate_as_dict(d.estimate, catalog) if d.estimate else None,
        "cause": {
            "phase": d.at.name,
            "moment": d.at.moment.name,
            "group": d.group.name,
            "sentence": d.cause,
        }
        if d.at and d.group
        else None,
        "agreement": list(d.agrees),
        "remedies": [_as_dict(each, d, catalog) for each in d.remedies],
    }


def _as_dict(remedy: Remedy, d: Diagnosis, catalog: Catalog) -> dict[str, Any]:
    assert d.job and d.estimate
    return {
        "names": list(remedy.names),
        "fields": dict(remedy.changes),
        "command": diff(d.job, remedy, d.reading, catalog),
        "verdict": remedy.estimate.verdict,
        "fit_probability": round(remedy.estimate.fit_probability, 4),
        "peak_device_bytes_before": deciding(d.estimate).peak.moment.device_bytes,
        "peak_device_bytes": remedy.peak,
        "host_peak_bytes_per_node_before": d.estimate.host_peak,
        "host_peak_bytes_per_node": remedy.estimate.host_peak,
        "step_time_factor": remedy.time,
        "changes": remedy.learns,
        "costs": remedy.costs,
        "needs_machine": remedy.machine,
        "scenario": remedy.estimate.scenario.as_dict(),
    }
