"""Views of the ledger: a job phase by phase, the lines of one moment, roles, loading, and several jobs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import yaml

from calc import report
from calc.architecture import parameters
from calc.job import Job
from calc.ledger import Estimate, Group, Line, Phase
from calc.placement import Placed
from calc.scenario import Scenario
from calc.site import answers, charts
from calc.site.answers import Answer
from calc.site.tables import Cell, Column, Table, verdict_html
from calc.site.workings import Working, difference, method_url, of_moment, of_phase, values_text
from calc.units import GB, GiB


def in_gib(n_bytes: int, answer: Answer | None = None, style: str = "") -> Cell:
    """A number of GiB with the bytes behind it."""
    return Cell(n_bytes / GiB, exact=n_bytes, scenario=answer.given if answer else None, style=style)


def held(working: Working, answer: Answer, style: str = "") -> Cell:
    """What lines of the ledger add up to, with the lines."""
    return in_gib(working.bytes, answer, style)._replace(working=working)


def by_component(lines: Iterable[Line]) -> dict[str, int]:
    """Bytes of each component, over the roles."""
    total: dict[str, int] = {}
    for line in lines:
        total[line.component] = total.get(line.component, 0) + line.bytes
    return total


def verdict_text(found: Estimate | Group) -> str:
    """A verdict in words: the first phase that does not fit is named, and an engine that does not start."""
    refusal = report.deciding(found).refusal if isinstance(found, Estimate) else found.refusal
    if refusal:
        return report.REFUSED
    if found.verdict == "oom":
        return f"out of memory in {found.verdict_phase}"
    return found.verdict


def verdict_cell(found: Estimate | Group, answer: Answer) -> Cell:
    """A verdict in a table of numbers."""
    word = verdict_text(found)
    return Cell(word, verdict_html(found.verdict, word), scenario=answer.given)


def describe(answer: Answer) -> str:
    """A job in one line: what the numbers of its tables rest on."""
    s, gpu = answer.scenario, answers.catalog().gpu(answer.scenario.gpu)
    names = {model.id: model.name for model in answers.catalog().models.values()}
    parts = [
        names.get(s.model, s.model),
        s.task if s.method == "full" else f"{s.task}, {s.method}" + (f" r={s.lora.rank}" if s.lora else ""),
        f"{s.gpus} × {gpu.name}",
        f"{s.framework} {s.framework_version}",
        s.sharding + "".join(f", {what} in host memory" for what in _offloaded(s)),
        f"precision {s.precision}",
        f"{s.attention} attention",
        f"checkpointing {s.checkpointing}",
        report.lengths(s),
        f"micro batch {s.micro_batch}" + (", in pairs" if s.task in ("rm", "dpo") else ""),
        *([report.rollout(s), report.roles(s, names)] if s.rollout else []),
    ]
    return " · ".join(parts) + "."


def _offloaded(s: Scenario) -> list[str]:
    return ["weights"] * s.offload.parameters + ["optimizer"] * s.offload.optimizer


def _scale(answered: Sequence[Answer]) -> int:
    """The bytes that fill a bar: the largest moment or the largest limit, and a little air."""
    moments = [p.moment.device_bytes for a in answered for g in a.estimate.groups for p in g.phases]
    return round(1.04 * max(moments + [a.group.usable_bytes for a in answered]))


def _component_columns(components: Sequence[str]) -> list[Column]:
    return [Column(c, charts.title(c), "GiB", "number", 2) for c in components]


def phases(answer: Answer, table_id: str, caption: str) -> Table:
    """One row a phase, at its largest moment, stacked by component against what the card lets a process use."""
    groups = answer.estimate.groups
    scale = _scale([answer])
    apart = len(groups) > 1
    components = charts.ordered([x.component for g in groups for p in g.phases for x in p.moment.lines])
    columns = (
        Column("phase", "Phase"),
        *([Column("gpus", "GPUs", "", "number"), Column("verdict", "Verdict of these GPUs")] if apart else []),
        Column("total", "Needs", "GiB", "number", 2, "Everything the process takes of the card"),
        Column("bar", "Against the limit", kind="bar"),
        Column("moment", "Largest moment"),
        Column("allocated", "Allocated", "GiB", "number", 2, "What torch.cuda.max_memory_allocated would show"),
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
                    Cell(html=charts.bar(parts, scale, group.usable_bytes)),
                    Cell(phase.moment.name),
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
        assumptions=describe(answer),
        note=_notes(answer),
        legend=charts.legend(components, limit),
        versions=answers.versions(),
    )


def _notes(answer: Answer) -> str:
    """What the KV cache holds, then the estimate's own notes, a line each."""
    serving = answer.placed.keeps.serving
    holds = [
        f"KV cache of each engine: {g.cache_tokens:,} tokens, {g.cache_sequences:,} sequences of full length "
        f"({serving.max_model_len:,} tokens) at once."
        for g in answer.serving
        if g.cache_tokens and serving
    ]
    refusals = {g.refusal for g in answer.estimate.groups}
    said = [f"{report.REFUSED}: {note}" if note in refusals else note for note in answer.estimate.notes]
    return "<br>".join(escape(note) for note in (*holds, *said))


def find_phase(answer: Answer, name: str | None, group: str | None = None) -> Phase:
    """The phase called `name` of the group that decides, or of another that has it, or of `group`; else the peak's."""
    groups = [answer.group_of(group)] if group else [answer.group, *answer.estimate.groups]
    if name is None:
        return groups[0].peak
    found = {p.name: p for g in reversed(groups) for p in g.phases}
    if name not in found:
        raise ValueError(f"no phase {name!r}; this job has {', '.join(found)}")
    return found[name]


def lines(answer: Answer, table_id: str, caption: str, shown: Phase, root: str) -> Table:
    """Every line of a phase's largest moment: formula, the values put in, and the method page that derives it.

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
    where = f"{shown.name}, at its largest moment ({shown.moment.name}). "
    return Table(table_id, caption, columns, rows, where + describe(answer), versions=answers.versions())


def _key(component: str) -> str:
    swatch = f'<span class="swatch c-{component}" aria-hidden="true"></span>'
    return swatch + escape(charts.name(component))


def compare(
    answered: Mapping[str, Answer], table_id: str, caption: str, said: Mapping[str, str], base: Answer | None = None
) -> Table:
    """One row a job: its largest moment stacked by component, the total, and the verdict.

    `said` holds, for some of the jobs, what a source reports about them: it is shown as a quotation. With `base` a row
    also says what is changed against that job, and how much that saves.
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
        Column("usable", "Usable", "GiB", "number", 2, "What the card lets a process use"),
        Column("probability", "Likely to fit", "%", "number", 0, "The probability that the peak stays below usable"),
        *([Column("reported", "As reported")] if quoted else []),
        Column("allocated", "Allocated", "GiB", "number", 2, "What torch.cuda.max_memory_allocated would show"),
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
                Cell(html=charts.bar(parts, scale, answer.group.usable_bytes)),
                in_gib(answer.group.usable_bytes, answer),
                Cell(round(100 * answer.estimate.fit_probability), scenario=answer.given),
                *([Cell(quote, f"<q>{escape(quote)}</q>" if quote else "—")] if quoted else []),
                held(working.allocated(), answer),
                Cell(f"{where}{answer.peak.name}: {answer.peak.moment.name}"),
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
    """Whether a field only says that a role runs, and `other` says so by the role's fields."""
    return value == {} and any(k.startswith(f"{key}.") for k in other)


def flattened(given: Mapping[str, Any], head: str = "") -> dict[str, Any]:
    """A scenario's fields by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        inner = isinstance(value, Mapping) and value  # an empty one says that a role runs
        flat |= flattened(value, f"{head}{key}.") if inner else {f"{head}{key}": value}
    return flat


def spelled(value: Any) -> str:
    """A value as YAML has it: `true`, not `True`."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def shared(answered: Sequence[Answer]) -> str:
    """What all the jobs have in common; the rows say what differs."""
    described = [describe(a).rstrip(".").split(" · ") for a in answered]
    return " · ".join(part for part in described[0] if all(part in other for other in described)) + "."


class Node(NamedTuple):
    """A node's memory as its owner states it, and the share of it at which jobs on it are killed."""

    gb: int
    killed_at: float = 1.0

    @property
    def limit(self) -> float:
        """The bytes above which a job dies."""
        return self.gb * GB * self.killed_at

    @property
    def note(self) -> str:
        """What the column about this node rests on."""
        killing = f" on which jobs are killed from {100 * self.killed_at:.0f} % on, that is {self.limit / GB:,.0f} GB"
        return (
            f"Against a node of {self.gb:,} GB{killing if self.killed_at < 1 else ''}. "
            "What the operating system and other processes take comes on top."
        )


def host(
    answered: Mapping[str, Answer], table_id: str, caption: str, said: Mapping[str, str], node: Node | None = None
) -> Table:
    """Host memory of a node, moment by moment, for jobs that keep something there; a dash where a job has no such one.

    With `node` each row says at which moment that node's memory runs out first.
    """
    quoted = any(said.get(name) for name in answered)
    names = list(dict.fromkeys(p.name for a in answered.values() for p in a.estimate.host_phases))
    columns = (
        Column("job", "Job"),
        *([Column("on_node", f"A node of {node.gb:,} GB")] if node else []),
        *(Column(n, n.capitalize(), "GB", "number") for n in names),
        *([Column("reported", "As reported")] if quoted else []),
    )
    rows = []
    for label, answer in answered.items():
        moments = {p.name: of_phase(p) for p in answer.estimate.host_phases}
        over = [n for n, there in moments.items() if node and there.bytes > node.limit]
        word = f"out of memory: {over[0]}" if over else "fits"
        quote = said.get(label, "")
        rows.append(
            (
                Cell(label),
                *([Cell(word, verdict_html("oom" if over else "fits", word), scenario=answer.given)] if node else []),
                *(
                    _in_gb(moments[n], answer, "over" if n in over else "") if n in moments else Cell(None, "—")
                    for n in names
                ),
                *([Cell(quote, f"<q>{escape(quote)}</q>" if quote else "—")] if quoted else []),
            )
        )
    rests_on, note = shared(list(answered.values())), escape(node.note) if node else ""
    return Table(table_id, caption, columns, tuple(rows), rests_on, note, versions=answers.versions())


def _in_gb(working: Working, answer: Answer, style: str) -> Cell:
    n_bytes = working.bytes
    return Cell(n_bytes / GB, exact=n_bytes, scenario=answer.given, style=style, working=working)


DOES = {"train": "trained", "score": "scores", "generate": "generates"}


def roles(answer: Answer, table_id: str, caption: str) -> Table:
    """One row a role that runs: its model, what it does, and what of it lies where."""
    job, s = answer.placed, answer.scenario
    columns = (
        Column("role", "Role"),
        Column("model", "Model"),
        Column("does", "What it does"),
        Column("gpus", "GPUs", "", "number"),
        Column("weights", "Weights on each GPU", "GiB", "number", 2, "While the role works"),
        Column("states", "Optimizer states there", "GiB", "number", 2, "With fp32 master weights"),
        Column("between", "While others work"),
        Column("held", "Held by"),
        Column("parameters", "Parameters", "", "number"),
    )
    rows = []
    for name, placed in job.placed.items():
        r, own = placed.engine.replica, placed.s
        weights = _lying(placed.engine.weights(), "weights", "adapter")
        states = _lying(placed.engine.states(), "master_weights", "optimizer_states")
        adapters = f", LoRA r={own.lora.rank}" if own.lora and r.adapter else ""
        by = "the actor, its adapters off" if placed.role.shares else f"{own.sharding}, {own.precision}{adapters}"
        rows.append(
            (
                Cell(name),
                _model(own),
                Cell(_does(job, name)),
                Cell(own.gpus),
                Cell(None, "—") if placed.role.shares else held(weights, answer),
                held(states, answer) if placed.trained else Cell(None, "—"),
                Cell("—" if placed.role.shares else _between(placed, weights.bytes, states.bytes)),
                Cell(by),
                Cell(r.parameters + r.adapter),
            )
        )
    if job.engine and s.rollout and job.keeps.serving:
        asleep = ("weights go to host memory", "weights are dropped")[job.keeps.serving.sleep_level - 1]
        weights = Working("while the role works", tuple(job.engine.weights()))
        rows.append(
            (
                Cell("rollout"),
                _model(s),
                Cell("generates"),
                Cell(s.rollout.gpus),
                held(weights, answer),
                Cell(None, "—"),
                Cell(f"sleeps: its {asleep}" if s.rollout.sleep else "stays on the GPU"),
                Cell(f"vLLM {job.keeps.serving.version}, tensor parallel {s.rollout.tensor_parallel}"),
                Cell(parameters(s.architecture)),
            )
        )
    return Table(table_id, caption, columns, tuple(rows), describe(answer), versions=answers.versions())


def _lying(lines: Iterable[Line], *components: str) -> Working:
    return Working("while the role works", tuple(x for x in lines if x.component in components))


def _model(s: Scenario) -> Cell:
    found = answers.catalog().models.get(s.model)
    return Cell(found.name if found else s.model)


def _does(job: Job, name: str) -> str:
    """What a role does in a step: `scores, trained`."""
    done = [DOES[stage.does] for stage in job.keeps.stages if name in (stage.role, stage.beside) and stage.does in DOES]
    done += ["scores" for stage in job.keeps.stages if stage.inside == name]
    return ", ".join(dict.fromkeys(done)) or "nothing on the GPU"


def _between(placed: Placed, weights: int, states: int) -> str:
    """Where a role's weights and states are while other roles work."""
    parts = {"weights": weights} | ({"states": states} if placed.trained else {})
    always = [part for part, there in parts.items() if not there]
    moved = [part for part in parts if part in placed.role.leaves and part not in always]
    stay = [part for part in parts if part not in always and part not in moved]
    words = {"always in host memory": always, "go to host memory": moved, "stay on the GPU": stay}
    return "; ".join(f"{' and '.join(what)} {where}" for where, what in words.items() if what)


def caches(answered: Mapping[str, Answer], table_id: str, caption: str) -> Table:
    """What vLLM's KV cache holds, job by job, or why vLLM does not start."""
    columns = (
        Column("job", "Job"),
        Column("vllm", "vLLM"),
        Column("tensor_parallel", "Tensor parallel", "", "number"),
        Column("utilization", "Utilization", "", "number", 2, "The share of the card that the engine may take"),
        Column("cache", "KV cache of each GPU", "GiB", "number", 2),
        Column("tokens", "It holds", "tokens", "number"),
        Column("length", "Full length", "tokens", "number", 0, "The longest sequence that the engine is built for"),
        Column("sequences", "Of full length at once", "sequences", "number", 0, "No more than the engine runs at once"),
        Column("asked", "To generate, each engine", "sequences", "number", 0, "In one rollout"),
        Column("starts", "Starts"),
    )
    rows = []
    for label, answer in answered.items():
        rollout, serving = answer.scenario.rollout, answer.placed.keeps.serving
        if rollout is None or serving is None:
            raise ValueError(f"{label}: vLLM does not serve in this job")
        (group,) = answer.serving
        (rolling,) = [of_phase(p) for p in group.phases if p.name == "rollout"] or [Working("", ())]
        cache = Working(rolling.at, tuple(x for x in rolling.of("kv_cache").lines if x.role == "rollout"))
        asked = -(-rollout.batch * rollout.n * rollout.tensor_parallel // rollout.gpus)
        rows.append(
            (
                Cell(label),
                Cell(serving.version),
                Cell(rollout.tensor_parallel),
                Cell(float(rollout.gpu_memory_utilization)),
                held(cache, answer),
                Cell(group.cache_tokens),
                Cell(serving.max_model_len),
                Cell(group.cache_sequences),
                Cell(asked),
                Cell(
                    f"no {group.refusal}" if group.refusal else "yes",
                    verdict_html("oom", "no") + f" {escape(group.refusal)}" if group.refusal else "",
                ),
            )
        )
    return Table(table_id, caption, columns, tuple(rows), shared(list(answered.values())), versions=answers.versions())


def timeline(answer: Answer, table_id: str, caption: str) -> Table:
    """Loading, moment by moment: what has arrived on the GPU so far, against what the card lets a process use."""
    groups = answer.estimate.groups
    usable = answer.group.usable_bytes
    every = answer.loading()
    components = charts.ordered([line.component for _, m in every for line in m.lines])
    scale = round(1.04 * max([usable, *(m.device_bytes for _, m in every)]))
    columns = (
        Column("moment", "Moment of loading"),
        *([Column("group", "GPUs of")] if len(groups) > 1 else []),
        Column("total", "On the GPU", "GiB", "number", 2, "Everything the processes take of the card by then"),
        Column("allocated", "Allocated", "GiB", "number", 2, "What torch.cuda.memory_allocated would show by then"),
        Column("bar", "Against the limit", kind="bar"),
        *_component_columns(components),
    )
    rows = []
    for group, moment in every:
        parts, working = by_component(moment.lines), of_moment(moment)
        rows.append(
            (
                Cell(moment.name),
                *([Cell(group)] if len(groups) > 1 else []),
                held(working, answer, "over" if moment.device_bytes > usable else ""),
                held(working.allocated(), answer),
                Cell(html=charts.bar(parts, scale, usable)),
                *(held(working.of(c), answer) for c in components),
            )
        )
    return Table(
        table_id,
        caption,
        columns,
        tuple(rows),
        describe(answer),
        legend=charts.legend(components, f"what a process can use: {usable / GiB:.2f} GiB"),
        versions=answers.versions(),
    )


def loaded(answer: Answer, moment: int | str, what: str = "device") -> int:
    """What a GPU holds at a moment of loading: by its place in the order, or by how its name begins, the largest.

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
