"""From a scenario to its estimate: the only place that puts framework, placement, phases and verdict together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from calc import __version__, placement
from calc.catalog import GPU, Catalog, load
from calc.engines.replica import Engine, Where
from calc.ledger import Estimate, Group, Line, Moment, Phase
from calc.memory import runtime
from calc.phases import Batch, Instant, Step, step
from calc.scenario import Scenario, framework

PAIRED = frozenset({"rm", "dpo"})  # a micro batch counts pairs: chosen and rejected run as one batch
FITS, TIGHT = 0.95, 0.20  # the verdict's thresholds on the probability that a job fits


def estimate(s: Scenario, catalog: Catalog | None = None) -> Estimate:
    """The memory of `s`, phase by phase, and whether it fits its GPU.

    Raises CatalogError where the scenario's GPU or model is not in `catalog`.
    """
    catalog = catalog or load()
    gpu = catalog.gpu(s.gpu)
    job = Job(s, gpu)
    group = job.group(gpu.usable_bytes)
    return Estimate(
        scenario=s,
        groups=(group,),
        host_phases=tuple(job.host()),
        verdict=group.verdict,
        verdict_phase=group.verdict_phase,
        fit_probability=group.fit_probability,
        notes=(*s.warnings, *job.keeps.notes),
        catalog_version=catalog.version,
        calc_version=__version__,
    )


class Job:
    """One scenario with its roles placed: the trained model, and for DPO its reference."""

    def __init__(self, s: Scenario, gpu: GPU) -> None:
        """Place the roles of `s` on its GPUs."""
        self.s = s
        self.keeps = framework(s.framework).keeps(s)
        self.process = runtime.process(gpu.architecture, s.gpus, nvlink=bool(gpu.nvlink_gbs))
        own = "reward" if s.task == "rm" else "actor"
        self.trained = placement.engine(s, placement.replica(s, own, self.keeps, trained=True), self.keeps)
        self.reference: Engine | None = None
        if s.task == "dpo" and s.roles.get("reference") != "none":
            other = s.role("reference") or s
            self.reference = placement.engine(
                other, placement.replica(other, "reference", self.keeps, trained=False), self.keeps
            )
        rows = s.micro_batch * (2 if s.task in PAIRED else 1)
        length = s.expected_len if s.packing else s.seq_len
        self.batch = Batch(rows * length, length)

    @property
    def copied(self) -> bool:
        """Whether the reference has weights of its own, not the policy's with the adapter switched off."""
        return self.reference is not None and self.keeps.reference == "copy"

    def step(self, engine: Engine) -> Step:
        """The activations of `engine`'s model on one micro-batch."""
        r, s = engine.replica, self.s
        window = r.arch.sliding_window
        return step(
            r.role,
            r.run,
            r.path,
            r.trainable,
            self.batch,
            masked=s.attention == "sdpa" and window is not None and self.batch.length > window,
            checkpointing=s.checkpointing if r.optimizer else "none",
            inner=s.sharding.startswith("fsdp"),
        )

    def group(self, usable: int) -> Group:
        """All GPUs of the job, which hold the same roles, seen from one of them."""
        phases = tuple(self.phases())
        peak = max((phase.moment for phase in phases), key=lambda moment: moment.device_bytes)
        deviation = runtime.spread(peak.allocated_bytes, peak.held_back)
        probability = runtime.fit_probability(peak.device_bytes, deviation, usable)
        verdict = "fits" if probability >= FITS else "tight" if probability >= TIGHT else "oom"
        margin = int(runtime.RANGE * deviation)
        roles = [self.trained.replica.role] + (["reference"] if self.copied else [])
        return Group(
            name="+".join(roles),
            gpus=self.s.gpus,
            phases=phases,
            usable_bytes=usable,
            device_range=(peak.device_bytes - margin, peak.device_bytes + margin),
            fit_probability=probability,
            verdict=verdict,
            verdict_phase=None if verdict == "fits" else _first_to_break(phases, verdict, usable),
        )

    def phase(self, name: str, kept: list[Line], moment: tuple[str, list[Line]]) -> Phase:
        """A phase at one moment: the process's own lines, what is `kept` through the step, what the moment adds."""
        at, lines = moment
        every = [line for line in (*self.process, *kept, *lines) if line.bytes]
        return Phase(name, Moment(at, (*every, runtime.fragmentation(every))))

    def phases(self) -> Iterator[Phase]:
        """Every phase with its largest moment, in the order of the job."""
        trained, own = self.trained, self.step(self.trained)
        yield self.phase("load", [], _largest(self.loading()))
        kept = trained.resident()
        if self.reference and self.copied:
            kept += self.reference.resident()
        forward = [_peak(trained, own, own.plan.forward)]
        if self.reference:
            forward.append(self.scoring(own, self.reference))
        yield self.phase("forward", kept, _largest(forward))
        if trained.replica.optimizer:
            yield self.phase("backward", kept, _peak(trained, own, own.backward()))
            carried = own.lines(own.plan.layout.over())
            yield self.phase("step", [*kept, *carried], _largest(trained.stepping()))

    def loading(self) -> Iterator[tuple[str, list[Line]]]:
        """Models arrive one after another, and each stays."""
        there: list[Line] = []
        for engine in (self.trained, self.reference):
            if engine is None or (engine is self.reference and not self.copied):
                continue
            lines: list[Line] = []
            for name, lines in engine.loading():
                yield f"{engine.replica.role}: {name}", [*there, *lines]
            there += lines

    def scoring(self, own: Step, reference: Engine) -> tuple[str, list[Line]]:
        """The reference's forward, while everything that the policy keeps for backward is alive."""
        scored = self.step(reference)
        name, lines = _peak(reference, scored, scored.plan.scoring)
        waiting = self.trained.at(Where("waiting", own.plan.layout.stack.layers, False))
        return f"reference, {name}", [*own.lines(own.plan.layout.waiting()), *waiting, *lines]

    def host(self) -> Iterator[Phase]:
        """Host memory of a node, by moment: what its ranks take together."""
        ranks = min(self.s.gpus, self.s.gpus_per_node)
        moments: dict[str, list[Line]] = {}
        for engine in (self.trained, self.reference if self.copied else None):
            for name, lines in engine.host() if engine else ():
                moments.setdefault(name, []).extend(_times(line, ranks) for line in lines if line.bytes)
        for name, lines in moments.items():
            yield Phase(name, Moment(name, tuple(lines)))


def _largest(moments: Iterable[tuple[str, list[Line]]]) -> tuple[str, list[Line]]:
    """The moment whose lines add up to most, the first of equals."""
    return max(moments, key=lambda moment: sum([line.bytes for line in moment[1]]))


def _peak(engine: Engine, step: Step, instants: Iterable[Instant]) -> tuple[str, list[Line]]:
    """The largest of `instants`: what the model's activations and what the engine adds there come to."""
    tokens, length = step.batch
    best, most, found = None, -1, []
    for i in instants:
        added = engine.at(i.where)
        size = i.total.bytes(tokens, length) + sum([line.bytes for line in added])
        if size > most:
            best, most, found = i, size, added
    assert best is not None
    return best.name, [*found, *step.lines(best.parts)]


def _times(line: Line, ranks: int) -> Line:
    return line if ranks == 1 else line._replace(bytes=line.bytes * ranks, formula=f"{ranks}·({line.formula})")


def _first_to_break(phases: Iterable[Phase], verdict: str, usable: int) -> str:
    """The first phase whose own moment is at least as doubtful as the whole job."""
    for phase in phases:
        m = phase.moment
        probability = runtime.fit_probability(m.device_bytes, runtime.spread(m.allocated_bytes, m.held_back), usable)
        if probability < (TIGHT if verdict == "oom" else FITS):
            return phase.name
    raise AssertionError("the peak's own phase is that doubtful")


# ---- the contract's JSON ------------------------------------------------------------------------------------------

_SYMBOL = re.compile(r"[^\W\d]\w*(?:·[^\W\d]\w*)*")


@lru_cache(maxsize=65536)
def _symbols(formula: str) -> tuple[str, ...]:
    """The names in a formula; `k·h` is one where the model's dimensions have it, else two."""
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


def as_dict(e: Estimate) -> dict[str, Any]:
    """The estimate as the contract's section 4 spells it, ready for JSON."""
    return {
        "scenario": e.scenario.as_dict(),
        "groups": [
            {
                "name": g.name,
                "gpus": g.gpus,
                "phases": [_phase(p) for p in g.phases],
                "peak_phase": g.peak.name,
                "peak_allocated_bytes": max(p.moment.allocated_bytes for p in g.phases),
                "peak_device_bytes": g.peak.moment.device_bytes,
                "peak_device_range": list(g.device_range),
                "usable_bytes": g.usable_bytes,
                "verdict": g.verdict,
                "verdict_phase": g.verdict_phase,
                "fit_probability": round(g.fit_probability, 4),
            }
            for g in e.groups
        ],
        "host": {
            "phases": [_phase(p) for p in e.host_phases],
            "peak_bytes_per_node": max([p.moment.device_bytes for p in e.host_phases], default=0),
        },
        "throughput": None,
        "verdict": e.verdict,
        "verdict_phase": e.verdict_phase,
        "fit_probability": round(e.fit_probability, 4),
        "notes": list(e.notes),
        "catalog_version": e.catalog_version,
        "calc_version": e.calc_version,
    }
