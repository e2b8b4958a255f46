"""An estimate as text for a terminal: the verdict in words, then phases, the peak's lines, host memory and notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from calc.estimate import shown_values
from calc.ledger import Estimate, Line, Phase
from calc.units import GiB, gib

VERDICTS = {"fits": "fits", "tight": "tight, it may run and may die on a long batch", "oom": "out of memory"}


def text(e: Estimate, gpu_name: str) -> str:
    """The whole report, `gpu_name` being the card's name in words; it ends with a newline."""
    return "\n".join([verdict(e, gpu_name), "", *_job(e), *_groups(e), *_host(e), *_notes(e)]).rstrip() + "\n"


def verdict(e: Estimate, gpu_name: str) -> str:
    """One line: whether the job fits, at which moment it needs most, and of how much."""
    group = max(e.groups, key=lambda g: g.peak.moment.device_bytes / g.usable_bytes)
    first = f" in {e.verdict_phase}" if e.verdict_phase else ""
    peak, low, high = group.peak, *group.device_range
    return (
        f"{VERDICTS[e.verdict]}{first}: peak {gib(peak.moment.device_bytes)} ({gib(low)} to {gib(high)}) of "
        f"{gib(group.usable_bytes)} usable on each {gpu_name}, in {_instant(peak)}; "
        f"fits with probability {e.fit_probability:.2f}"
    )


def _job(e: Estimate) -> Iterator[str]:
    s = e.scenario
    adapters = f" of rank {s.lora.rank}" if s.lora else ""
    yield (
        f"{s.model}, {s.task}, {s.method}{adapters}, {s.framework}=={s.framework_version}, {s.precision}, "
        f"sharding {s.sharding}, {s.gpus} x {s.gpu}, micro batch {s.micro_batch}, {s.seq_len} tokens"
    )
    yield ""


def _groups(e: Estimate) -> Iterator[str]:
    for group in e.groups:
        yield f"{group.name}: {group.verdict} on {_count(group.gpus, 'GPU')}, per GPU"
        moments = [(p.name, p.moment) for p in group.phases]
        rows = [(name, m.name, _number(m.allocated_bytes), _number(m.device_bytes)) for name, m in moments]
        yield from table(("phase", "moment", "allocated GiB", "device GiB"), rows, right=(2, 3))
        yield ""
        yield f"{group.name} at its peak, in {_instant(group.peak)}"
        yield from _lines(group.peak)
        yield ""


def _host(e: Estimate) -> Iterator[str]:
    if e.host_phases:
        yield "host memory, per node"
        rows = [(p.name, p.moment.name, _number(p.moment.device_bytes)) for p in e.host_phases]
        yield from table(("phase", "moment", "GiB"), rows, right=(2,))
        yield ""


def _notes(e: Estimate) -> Iterator[str]:
    yield from (f"note: {note}" for note in e.notes)


def _instant(phase: Phase) -> str:
    return f"{phase.name} ({phase.moment.name})"


def _lines(phase: Phase) -> Iterator[str]:
    largest = sorted(phase.moment.lines, key=lambda line: -line.bytes)
    rows = [(line.component, line.role, _number(line.bytes), f"{line.formula}{_values(line)}") for line in largest]
    return table(("component", "role", "GiB", "formula"), rows, right=(2,))


def _values(line: Line) -> str:
    values = ", ".join(f"{name} = {_value(value)}" for name, value in shown_values(line).items())
    return f"  with {values}" if values else ""


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _number(n_bytes: int) -> str:
    """GiB with two decimals, and never 0.00 for what is there."""
    return "< 0.01" if 0 < n_bytes < GiB / 200 else f"{n_bytes / GiB:,.2f}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> Iterator[str]:
    """Columns two spaces apart, numbers to the right."""
    sizes = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    layout = "  ".join(f"{{:{'>' if i in right else '<'}{size}}}" for i, size in enumerate(sizes))
    for row in (head, *rows):
        yield f"  {layout.format(*row)}".rstrip()
