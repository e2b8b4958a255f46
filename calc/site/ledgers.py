"""Views of the ledger: a job phase by phase, the lines of one moment, and several jobs side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from calc.ledger import Line, Phase
from calc.site import answers, charts
from calc.site.answers import Answer
from calc.site.tables import Cell, Column, Table, verdict_html
from calc.units import GB, GiB


def in_gib(n_bytes: int, answer: Answer | None = None, style: str = "") -> Cell:
    """A number of GiB with the bytes behind it."""
    return Cell(n_bytes / GiB, exact=n_bytes, scenario=answer.given if answer else None, style=style)


def by_component(lines: Iterable[Line]) -> dict[str, int]:
    """Bytes of each component, over the roles."""
    total: dict[str, int] = {}
    for line in lines:
        total[line.component] = total.get(line.component, 0) + line.bytes
    return total


def verdict_text(answer: Answer) -> str:
    """The verdict in words: the first phase that does not fit is named."""
    estimate = answer.estimate
    if estimate.verdict == "oom":
        return f"out of memory in {estimate.verdict_phase}"
    return estimate.verdict


def describe(answer: Answer) -> str:
    """A job in one line: what the numbers of its tables rest on."""
    s, gpu = answer.scenario, answers.catalog().gpu(answer.scenario.gpu)
    model = answers.catalog().models.get(s.model)
    parts = [
        model.name if model else s.model,
        s.task if s.method == "full" else f"{s.task}, {s.method}" + (f" r={s.lora.rank}" if s.lora else ""),
        f"{s.gpus} × {gpu.name}",
        f"{s.framework} {s.framework_version}",
        s.sharding + (" with the optimizer in host memory" if s.offload.optimizer else ""),
        f"precision {s.precision}",
        f"{s.attention} attention",
        f"checkpointing {s.checkpointing}",
        f"{s.seq_len} tokens, micro batch {s.micro_batch}" + (", in pairs" if s.task in ("rm", "dpo") else ""),
    ]
    return " · ".join(parts) + "."


def _scale(answered: Sequence[Answer]) -> int:
    """The bytes that fill a bar: the largest moment or the largest limit, and a little air."""
    moments = [p.moment.device_bytes for a in answered for g in a.estimate.groups for p in g.phases]
    return round(1.04 * max(moments + [a.group.usable_bytes for a in answered]))


def phases(answer: Answer, table_id: str, caption: str) -> Table:
    """One row a phase, at its largest moment, stacked by component against what the card lets a process use."""
    groups = answer.estimate.groups
    scale = _scale([answer])
    components = charts.ordered([x.component for g in groups for p in g.phases for x in p.moment.lines])
    columns = (
        Column("phase", "Phase"),
        Column("total", "Needs", "GiB", "number", 2, "Everything the process takes of the card"),
        Column("bar", "Against the limit", kind="bar"),
        Column("moment", "Largest moment"),
        Column("allocated", "Allocated", "GiB", "number", 2, "What torch.cuda.max_memory_allocated would show"),
        *(
            Column(c, charts.name(c).capitalize() if c != "kv_cache" else "KV cache", "GiB", "number", 2)
            for c in components
        ),
    )
    rows = []
    for group in groups:
        for phase in group.phases:
            parts = by_component(phase.moment.lines)
            label = phase.name if len(groups) == 1 else f"{group.name}: {phase.name}"
            over = "over" if phase.moment.device_bytes > group.usable_bytes else ""
            rows.append(
                (
                    Cell(label),
                    in_gib(phase.moment.device_bytes, answer, over),
                    Cell(html=charts.bar(parts, scale, group.usable_bytes)),
                    Cell(phase.moment.name),
                    in_gib(phase.moment.allocated_bytes, answer),
                    *(in_gib(parts.get(c, 0), answer) for c in components),
                )
            )
    limit = f"what a process can use: {answer.group.usable_bytes / GiB:.2f} GiB"
    return Table(
        table_id,
        caption,
        columns,
        tuple(rows),
        assumptions=describe(answer),
        note=_warnings(answer),
        legend=charts.legend(components, limit),
        versions=answers.versions(),
    )


def _warnings(answer: Answer) -> str:
    return escape(" ".join(answer.estimate.notes))


def find_phase(answer: Answer, name: str | None) -> Phase:
    """The phase called `name`, or the one with the peak."""
    if name is None:
        return answer.peak
    found = {p.name: p for p in answer.group.phases}
    if name not in found:
        raise ValueError(f"no phase {name!r}; this job has {', '.join(found)}")
    return found[name]


def lines(answer: Answer, table_id: str, caption: str, phase: str | None, root: str) -> Table:
    """Every line of a phase's largest moment: formula, the values put in, and the method page that derives it.

    `root` is the relative address of the site's top from the page that shows the table.
    """
    shown = find_phase(answer, phase)
    columns = (
        Column("component", "Component"),
        Column("role", "Role"),
        Column("bytes", "Memory", "GiB", "number", 3),
        Column("formula", "Formula"),
        Column("values", "Values"),
        Column("source", "Derived in"),
        Column("allocated", "Counted by the allocator"),
    )
    rows = tuple(
        (
            Cell(line.component, html=_key(line.component)),
            Cell(line.role),
            in_gib(line.bytes, answer),
            Cell(line.formula, html=f"<code>{escape(line.formula)}</code>"),
            Cell(values_text(line.values, line.formula)),
            Cell(line.source, html=f'<a href="{root}{method_url(line.source)}">{escape(line.source)}</a>'),
            Cell("yes" if line.allocated else "no"),
        )
        for line in shown.moment.lines
    )
    where = f"{shown.name}, at its largest moment ({shown.moment.name}). "
    return Table(table_id, caption, columns, rows, where + describe(answer), versions=answers.versions())


def _key(component: str) -> str:
    swatch = f'<span class="swatch c-{component}" aria-hidden="true"></span>'
    return swatch + escape(charts.name(component))


def values_text(values: Mapping[str, object], formula: str) -> str:
    """What was put into a formula: `P = 8,030,261,248, N = 8`; symbols that it does not use are left out."""
    used = [k for k in values if re.search(rf"(?<![\w]){re.escape(k)}(?![\w])", formula)] or list(values)
    return ", ".join(f"{k} = {v:,}" if isinstance(v := values[k], int | float) else f"{k} = {v}" for k in used)


def method_url(source: str) -> str:
    """The address of a line's derivation: `weights#zero` is an anchor of the page method/weights."""
    page, _, anchor = source.partition("#")
    return f"method/{page}.html" + (f"#{anchor}" if anchor else "")


def compare(answered: Mapping[str, Answer], table_id: str, caption: str, said: Mapping[str, str]) -> Table:
    """One row a job: its largest moment stacked by component, the total, and the verdict.

    `said` holds, for some of the jobs, what a source reports about them: it is shown as a quotation.
    """
    everyone = list(answered.values())
    scale = _scale(everyone)
    components = charts.ordered([x.component for a in everyone for x in a.peak.moment.lines])
    quoted = any(said.get(name) for name in answered)
    columns = (
        Column("job", "Job"),
        Column("verdict", "Verdict"),
        Column("total", "Needs", "GiB", "number", 2, "Everything the process takes of the fullest GPU"),
        Column("bar", "Against the limit", kind="bar"),
        Column("usable", "Usable", "GiB", "number", 2, "What the card lets a process use"),
        Column("probability", "Likely to fit", "%", "number", 0, "The probability that the peak stays below usable"),
        *([Column("reported", "As reported")] if quoted else []),
        Column("allocated", "Allocated", "GiB", "number", 2, "What torch.cuda.max_memory_allocated would show"),
        Column("phase", "Peak in"),
        *(
            Column(c, charts.name(c).capitalize() if c != "kv_cache" else "KV cache", "GiB", "number", 2)
            for c in components
        ),
    )
    rows = []
    for label, answer in answered.items():
        parts = by_component(answer.peak.moment.lines)
        quote = said.get(label, "")
        word = verdict_text(answer)
        rows.append(
            (
                Cell(label),
                Cell(word, verdict_html(answer.estimate.verdict, word), scenario=answer.given),
                in_gib(answer.device_bytes, answer),
                Cell(html=charts.bar(parts, scale, answer.group.usable_bytes)),
                in_gib(answer.group.usable_bytes, answer),
                Cell(round(100 * answer.estimate.fit_probability), scenario=answer.given),
                *([Cell(quote, f"<q>{escape(quote)}</q>" if quote else "—")] if quoted else []),
                in_gib(answer.allocated_bytes, answer),
                Cell(f"{answer.peak.name}: {answer.peak.moment.name}"),
                *(in_gib(parts.get(c, 0), answer) for c in components),
            )
        )
    return Table(
        table_id,
        caption,
        columns,
        tuple(rows),
        assumptions=_shared(everyone),
        legend=charts.legend(components, "what a process can use"),
        versions=answers.versions(),
    )


def _shared(answered: Sequence[Answer]) -> str:
    """What all the jobs have in common; the rows say what differs."""
    described = [describe(a).rstrip(".").split(" · ") for a in answered]
    return " · ".join(part for part in described[0] if all(part in other for other in described)) + "."


def host(answered: Mapping[str, Answer], table_id: str, caption: str, said: Mapping[str, str]) -> Table:
    """Host memory of a node, phase by phase, for jobs that keep something there."""
    quoted = any(said.get(name) for name in answered)
    names = list(dict.fromkeys(p.name for a in answered.values() for p in a.estimate.host_phases))
    columns = (
        Column("job", "Job"),
        *(Column(n, n.capitalize(), "GB", "number") for n in names),
        *([Column("reported", "As reported")] if quoted else []),
    )
    rows = []
    for label, answer in answered.items():
        held = {p.name: p.moment.device_bytes for p in answer.estimate.host_phases}
        quote = said.get(label, "")
        rows.append(
            (
                Cell(label),
                *(Cell(held[n] / GB, exact=held[n], scenario=answer.given) if n in held else Cell() for n in names),
                *([Cell(quote, f"<q>{escape(quote)}</q>" if quote else "—")] if quoted else []),
            )
        )
    return Table(table_id, caption, columns, tuple(rows), _shared(list(answered.values())), versions=answers.versions())
