"""Views of the ledger: a job phase by phase, the lines of one moment, loading, and several jobs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import yaml

from calc.answers import answers, words
from calc.answers.answers import Answer
from calc.answers.workings import Working, difference, method_url, of_moment, of_phase, values_text
from calc.base.ledger import Line, Phase
from calc.base.units import GiB
from calc.estimate import report
from calc.estimate.result import Estimate, Group
from calc.estimate.wording import spoken
from calc.site.tables import charts, drawn
from calc.site.tables.charts import Bar
from calc.site.tables.tables import Cell, Column, Table, verdict_html

# The one unit of speed, in every table as in every answer (report.tokens).
TOKENS = Column("tokens", "Tokens a second", "", "number", 0, "Over the whole job")
PROBABILITY = Column(
    "probability", "Likely to fit", "%", "number", 0, "The probability that the peak stays below usable", behind=True
)


def in_gib(n_bytes: int, answer: Answer | None = None, style: str = "") -> Cell:
    """A number of GiB with the bytes behind it."""
    return Cell(n_bytes / GiB, exact=n_bytes, scenario=answer.given if answer else None, style=style)


def held(working: Working, answer: Answer, style: str = "") -> Cell:
    """The sum of some lines of the ledger, with the lines."""
    return in_gib(working.bytes, answer, style)._replace(working=working)


def by_component(lines: Iterable[Line]) -> dict[str, int]:
    """Bytes of each component, summed over roles."""
    total: dict[str, int] = {}
    for line in lines:
        total[line.component] = total.get(line.component, 0) + line.bytes
    return total


def verdict_text(found: Estimate | Group) -> str:
    """A verdict in words, with the first phase that does not fit, or an engine that does not start."""
    refusal = report.deciding(found).refusal if isinstance(found, Estimate) else found.refusal
    if refusal:
        return refusal.verdict
    if found.verdict == "oom":
        memory = "host memory" if isinstance(found, Estimate) and found.on_host else "memory"
        return f"out of {memory} in {found.verdict_phase}"
    return found.verdict


def headline(answer: Answer) -> str:
    """A job's answer in a caption: `fits, 25.3 of 39.5 GiB in backward`."""
    needs, usable = answer.device_bytes / GiB, answer.group.usable_bytes / GiB
    verdict, where = verdict_text(answer.estimate), f" in {answer.peak.name}"
    return f"{verdict}, {needs:,.1f} of {usable:,.1f} GiB{where * (not verdict.endswith(where))}"


def verdict_cell(found: Estimate | Group, answer: Answer) -> Cell:
    """A verdict as a cell of a table of numbers."""
    word = verdict_text(found)
    return Cell(word, verdict_html(found.verdict, word), scenario=answer.given)


def _scale(answered: Sequence[Answer]) -> int:
    """The bytes that fill a bar: the largest peak or the largest limit, plus 4 %."""
    moments = [p.moment.device_bytes for a in answered for g in a.estimate.groups for p in g.phases]
    return round(1.04 * max(moments + [a.group.usable_bytes for a in answered]))


def _component_columns(components: Sequence[str]) -> list[Column]:
    return [Column(c, charts.title(c), "GiB", "number", 2, behind=True) for c in components]


def phases(answer: Answer, table_id: str, caption: str) -> Table:
    """One row per phase at its peak, stacked by component against the memory that the card lets a process use."""
    groups = answer.estimate.groups
    scale = _scale([answer])
    apart = len(groups) > 1
    components = charts.ordered([x.component for g in groups for p in g.phases for x in p.moment.lines])
    columns = (
        Column("phase", "Phase"),
        *([Column("gpus", "GPUs", "", "number"), Column("verdict", "Verdict of these GPUs")] if apart else []),
        Column("total", "Needs", "GiB", "number", 2, "Everything the process takes of the card"),
        Column("bar", "Against the limit", kind="bar"),
        Column("moment", "Peak at"),
        Column(
            "allocated", "Allocated", "GiB", "number", 2, "What torch.cuda.max_memory_allocated would show", behind=True
        ),
        *_component_columns(components),
    )
    rows = []
    for group in groups:
        for phase in group.phases:
            parts, working = by_component(phase.moment.lines), of_phase(phase)
            over = "over" if phase.moment.device_bytes > group.usable_bytes else ""
            rows.append(
                (
                    Cell(f"{group.name}: {phase.name}" if apart else phase.name),
                    *([Cell(group.gpus), verdict_cell(group, answer)] if apart else []),
                    held(working, answer, over),
                    Cell(bar=Bar(parts, scale, group.usable_bytes)),
                    Cell(spoken(phase.moment.name)),
                    held(working.allocated(), answer),
                    *(held(working.of(c), answer) for c in components),
                )
            )
    limit = f"what a process can use: {answer.group.usable_bytes / GiB:.2f} GiB"
    return Table(
        table_id,
        caption,
        columns,
        tuple(rows),
        assumptions=words.describe(answer),
        note=_notes(answer),
        legend=charts.legend(components, limit),
        versions=answers.versions(),
    )


def _notes(answer: Answer) -> str:
    """The KV cache's capacity, then the estimate's own notes, one per line."""
    serving = answer.placed.keeps.serving
    holds = [
        f"KV cache of each engine: {g.cache_tokens:,} tokens, {g.cache_sequences:,} sequences of full length "
        f"({serving.max_model_len:,} tokens) at once."
        for g in answer.serving
        if g.cache_tokens and serving
    ]
    return "<br>".join(escape(note) for note in (*holds, *report.noted(answer.estimate)))


def find_phase(answer: Answer, name: str | None, group: str | None = None) -> Phase:
    """The phase called `name`, in `group` or else in any, the deciding group first; without `name`, the peak phase."""
    groups = [answer.group_of(group)] if group else [answer.group, *answer.estimate.groups]
    if name is None:
        return groups[0].peak
    found = {p.name: p for g in reversed(groups) for p in g.phases}
    if name not in found:
        raise ValueError(f"no phase {name!r}; this job has {', '.join(found)}")
    return found[name]


def lines(answer: Answer, table_id: str, caption: str, shown: Phase, root: str) -> Table:
    """Every line of a phase's peak: formula, values put in, and the method page that derives it.

    `root` is the relative address of the site's top from the page that shows the table.
    """
    columns = (
        Column("component", "Component"),
        Column("role", "Role"),
        Column("bytes", "Memory", "GiB", "number", 3),
        Column("formula", "Formula"),
        Column("values", "Values"),
        Column("source", "Derived in"),
        Column("allocated", "Counted by the allocator"),
    )
    at = of_phase(shown).at
    rows = tuple(
        (
            Cell(line.component, html=_key(line.component)),
            Cell(line.role),
            held(Working(at, (line,)), answer),
            Cell(line.formula, html=f"<code>{escape(line.formula)}</code>"),
            Cell(values_text(line.values, line.formula)),
            Cell(line.source, html=f'<a href="{root}{method_url(line.source)}">{escape(line.source)}</a>'),
            Cell("yes" if line.allocated else "no"),
        )
        for line in shown.moment.lines
    )
    where = f"{shown.name}, at its peak ({spoken(shown.moment.name)}). "
    return Table(table_id, caption, columns, rows, where + words.describe(answer), versions=answers.versions())


def _key(component: str) -> str:
    swatch = f'<span class="swatch c-{component}" aria-hidden="true"></span>'
    return swatch + escape(charts.name(component))


def compare(
    answered: Mapping[str, Answer], table_id: str, caption: str, said: Mapping[str, str], base: Answer | None = None
) -> Table:
    """One row per job: its peak stacked by component, the total, and the verdict.

    `said` holds reports of a source about some of the jobs, shown as quotations. With `base` a row also gives the
    changes against that job, and the memory that they save.
    """
    everyone = list(answered.values())
    scale = _scale(everyone)
    components = charts.ordered([x.component for a in everyone for x in a.peak.moment.lines])
    quoted = any(said.get(name) for name in answered)
    against = (Column("difference", "Against the first", "GiB", "number", 2), Column("changes", "What changes"))
    columns = (
        Column("job", "Job"),
        Column("verdict", "Verdict"),
        Column("total", "Needs", "GiB", "number", 2, "Everything the process takes of the fullest GPU"),
        *(against if base else ()),
        Column("bar", "Against the limit", kind="bar"),
        Column("usable", "Usable", "GiB", "number", 2, "What the card lets a process use", behind=True),
        PROBABILITY,
        *([Column("reported", "As reported")] if quoted else []),
        Column(
            "allocated", "Allocated", "GiB", "number", 2, "What torch.cuda.max_memory_allocated would show", behind=True
        ),
        Column("phase", "Peak in"),
        *_component_columns(components),
    )
    rows = []
    for label, answer in answered.items():
        parts, working = by_component(answer.peak.moment.lines), of_phase(answer.peak)
        quote = said.get(label, "")
        where = f"{answer.group.name}: " if len(answer.estimate.groups) > 1 else ""
        rows.append(
            (
                Cell(label),
                verdict_cell(answer.estimate, answer),
                held(working, answer),
                *([held(difference(working, of_phase(base.peak)), answer), _changes(base, answer)] if base else []),
                Cell(bar=Bar(parts, scale, answer.group.usable_bytes)),
                in_gib(answer.group.usable_bytes, answer),
                Cell(round(100 * answer.estimate.fit_probability), scenario=answer.given),
                *([Cell(quote, f"<q>{escape(quote)}</q>" if quote else "—")] if quoted else []),
                held(working.allocated(), answer),
                Cell(f"{where}{answer.peak.name}: {spoken(answer.peak.moment.name)}"),
                *(held(working.of(c), answer) for c in components),
            )
        )
    return Table(
        table_id,
        caption,
        columns,
        tuple(rows),
        assumptions=shared(everyone),
        legend=charts.legend(components, "what a process can use"),
        versions=answers.versions(),
    )


def bars(answered: Mapping[str, Answer], table_id: str, caption: str) -> Table:
    """The bars of `compare` as a drawing, with its numbers behind a click."""
    table = compare(answered, table_id, caption, {})
    return replace(table, picture=drawn.of(table), legend="", folded="The jobs as a table")


def changes(base: Answer, answer: Answer) -> str:
    """The fields in which a job differs from `base`, as the scenario file spells them; last those it leaves out."""
    before, after = flattened(base.given), flattened(answer.given)
    changed = [f"{k}: {spelled(v)}" for k, v in after.items() if before.get(k) != v and not _runs(k, v, before)]
    left_out = [k for k, v in before.items() if k not in after and not _runs(k, v, after)]
    text = ", ".join(changed) + ("; " if changed and left_out else "")
    return text + (f"by default: {', '.join(left_out)}" if left_out else "") or "nothing"


def _changes(base: Answer, answer: Answer) -> Cell:
    text = changes(base, answer)
    return (
        Cell(text, f"<code>{escape(text)}</code>", style="changes") if text != "nothing" else Cell("—", style="changes")
    )


def _runs(key: str, value: Any, other: Mapping[str, Any]) -> bool:
    """True if the field says only that a role runs, and `other` says the same through the role's fields."""
    return value == {} and any(k.startswith(f"{key}.") for k in other)


def flattened(given: Mapping[str, Any], head: str = "") -> dict[str, Any]:
    """A scenario's fields by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        inner = isinstance(value, Mapping) and value  # an empty mapping only says that a role runs
        flat |= flattened(value, f"{head}{key}.") if inner else {f"{head}{key}": value}
    return flat


def spelled(value: Any) -> str:
    """A value as YAML has it: `true`, not `True`."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def shared(answered: Sequence[Answer]) -> str:
    """The settings that all the jobs share, if any; the rows give those that differ."""
    described = [words.describe(a).rstrip(".").split(" · ") for a in answered]
    common = [part for part in described[0] if all(part in other for other in described)]
    return " · ".join(common) + "." if common else ""


def timeline(answer: Answer, table_id: str, caption: str) -> Table:
    """Loading, moment by moment: the memory in use on the GPU so far, against what the card lets a process use."""
    groups = answer.estimate.groups
    usable = answer.group.usable_bytes
    every = answer.loading()
    components = charts.ordered([line.component for _, m in every for line in m.lines])
    scale = round(1.04 * max([usable, *(m.device_bytes for _, m in every)]))
    columns = (
        Column("moment", "Moment of loading"),
        *([Column("group", "GPUs of")] if len(groups) > 1 else []),
        Column("total", "On the GPU", "GiB", "number", 2, "Everything the processes take of the card by then"),
        Column(
            "allocated",
            "Allocated",
            "GiB",
            "number",
            2,
            "What torch.cuda.memory_allocated would show by then",
            behind=True,
        ),
        Column("bar", "Against the limit", kind="bar"),
        *_component_columns(components),
    )
    rows = []
    for group, moment in every:
        parts, working = by_component(moment.lines), of_moment(moment)
        rows.append(
            (
                Cell(spoken(moment.name)),
                *([Cell(group)] if len(groups) > 1 else []),
                held(working, answer, "over" if moment.device_bytes > usable else ""),
                held(working.allocated(), answer),
                Cell(bar=Bar(parts, scale, usable)),
                *(held(working.of(c), answer) for c in components),
            )
        )
    return Table(
        table_id,
        caption,
        columns,
        tuple(rows),
        words.describe(answer),
        legend=charts.legend(components, f"what a process can use: {usable / GiB:.2f} GiB"),
        versions=answers.versions(),
    )


def loaded(answer: Answer, moment: int | str, what: str = "device") -> int:
    """The bytes on a GPU at a moment of loading, given by index or by the start of its name (then the largest match).

    `what`: `device`, everything the processes take of the card, or `allocated`, what PyTorch's allocator counts.
    """
    if what not in ("device", "allocated"):
        raise ValueError(f"no {what!r} of a moment: device or allocated")
    every = [m for _, m in answer.loading()]
    try:
        found = [every[moment]] if isinstance(moment, int) else [m for m in every if m.name.startswith(moment)]
    except IndexError:
        found = []
    if not found:
        raise ValueError(f"no moment of loading {moment!r}; this job has {', '.join(m.name for m in every)}")
    return max(m.allocated_bytes if what == "allocated" else m.device_bytes for m in found)
