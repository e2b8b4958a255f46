"""The diagnosis of a pasted text as HTML: the build writes the worked example, the reader's browser all others.

Both come from the function behind `python -m calc diagnose`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from calc.answers import answers, words
from calc.answers.answers import Answer
from calc.answers.workings import method_url
from calc.base.units import GB, GiB
from calc.catalog.catalog import GPU, Catalog, Model
from calc.diagnose import Diagnosis, growing
from calc.diagnose.remedies import Remedy
from calc.diagnose.spelled import diff
from calc.diagnose.text import LEARNS, compared, time_words
from calc.site.calculator import fields
from calc.site.calculator.calculator import Place, Shown, file
from calc.site.tables.tables import WORDS, Cell, Column, Table, verdict_html
from calc.site.views.jobs import ledgers

INCOMPLETE = "What is read does not make a whole job yet."
REMEDIES, PHASES = "diagnose-remedies", "diagnose-phases"
# Fields that a reader is asked to complete, whatever the text states.
ASKED = {"model": "Model", "gpu": "GPU", "gpus": "How many GPUs", "host_memory": "Host memory, GB a node"}
# The labels of the calculator's form, and labels of fields that it leaves out; other fields have their name alone.
FIELDS = {each.name: each for each in (*fields.FIRST, *(one for group in fields.GROUPS for one in group.fields))}
TITLES: Mapping[str, str] = {
    **{name: each.title for name, each in FIELDS.items()},
    "trainer": "Trainer",
    "lora.targets": "What LoRA adapts",
    "lora.dropout": "LoRA dropout",
    "optimizer_impl": "How the optimizer steps",
    "grad_dtype": "Gradients in",
    "offload.activations": "Activations in host memory",
    "kernels": "Kernels",
    "pipeline_parallel": "Pipeline parallel",
    "expert_parallel": "Expert parallel",
    "max_tokens_per_gpu": "Tokens a micro batch",
    "rollout.batch": "Prompts a rollout",
    "rollout.micro_batch": "Micro batch of the rollout",
    "rollout.gpus": "GPUs that generate",
    "expandable_segments": "Expandable segments",
    "roles.critic.model": "Critic's model",
    "roles.reward.model": "Reward model",
}


def find(text: str | bytes, more: Mapping[str, Any], catalog: Catalog, place: Place) -> Iterator[Shown]:
    """The diagnosis of a text or a snapshot, completed by `more`, as it grows. InputError if nothing is recognised."""
    for found in growing(text, more, catalog, where="your text"):
        html = "".join(_parts(found, catalog, place))
        scenario = file(found.job.scenario) if found.job else ""
        yield Shown(_line(found), html, scenario, stage="whole" if found.whole else "growing")


def _line(d: Diagnosis) -> str:
    """The diagnosis in one line, for screen readers."""
    if not d.estimate:
        return d.refusal or INCOMPLETE
    if not d.whole:
        return ledgers.verdict_text(d.estimate)
    fits = sum(remedy.fits for remedy in d.remedies)
    many = "1 change" if fits == 1 else f"{fits} changes"
    return f"{ledgers.verdict_text(d.estimate)}; {many} that fit{'s' if fits == 1 else ''}"


def _parts(d: Diagnosis, catalog: Catalog, place: Place) -> Iterator[str]:
    yield from _headline(d)
    yield "<dl>"
    yield _pair("Read", escape(", ".join(d.reading.parts)))
    if d.reading.error:
        yield _pair("Error", escape(d.reading.error.row.means))
    if d.where:
        told = f" by <code>{escape(d.reading.told.line)}</code>" if d.reading.told else " by the estimate"
        yield _pair("Died in", f"{escape(d.where)},{told}")
    if d.cause and d.estimate:
        yield _pair("Cause", f"{escape(d.cause)}{_derived(d, place.root)}")
    yield _pair("Message and estimate", _list(d.agrees))
    yield _pair("Snapshot", _list(tuple(note for note in d.reading.notes if note.startswith("snapshot: "))))
    yield _pair("Still needed", _list(d.questions))
    yield _pair("Not computed", escape(d.refusal))
    yield "</dl>"
    yield _form(d, catalog)
    if not d.whole:  # what follows is put at the end, so that what the reader has opened stays so
        return
    if d.remedies and d.job and d.estimate:
        yield place.table(_remedies(d, catalog))
    elif d.estimate:
        yield "<p>No change that was tried helps.</p>"
    if d.job and d.estimate:
        answer = Answer(d.job.scenario.as_dict(), d.job.scenario, d.estimate)
        caption = f"{words.model(answer.scenario.model)}, {words.task(answer.scenario.task)}: memory by phase"
        yield place.table(ledgers.phases(answer, PHASES, caption))
    yield from _assumed(d)


def _headline(d: Diagnosis) -> Iterator[str]:
    if d.job and d.estimate:
        s = d.job.scenario
        title = f"{words.model(s.model)}, {words.task(s.task)} on {words.machine(s)}"
        word = ledgers.verdict_text(d.estimate)
        yield f'<p class="headline">{verdict_html(d.estimate.verdict, word)} <b>{escape(title)}</b></p>'
    else:
        yield f'<p class="headline"><b>{INCOMPLETE}</b></p>'


def _pair(name: str, html: str) -> str:
    return f"<dt>{name}</dt><dd>{html}</dd>" if html else ""


def _list(lines: tuple[str, ...]) -> str:
    return f"<ul>{''.join(f'<li>{words.code(line)}</li>' for line in lines)}</ul>" if lines else ""


def _derived(d: Diagnosis, root: str) -> str:
    """Links to the method pages of the largest lines of the moment."""
    assert d.at
    pages: dict[str, str] = {}
    for line in sorted(d.at.moment.lines, key=lambda line: -line.bytes):
        pages.setdefault(line.source.partition("#")[0], line.source)
    links = [f'<a href="{root}{method_url(source)}">{escape(name)}</a>' for name, source in list(pages.items())[:3]]
    return f" How these are counted: {', '.join(links)}."


def _form(d: Diagnosis, catalog: Catalog) -> str:
    """The recognised fields, to complete or correct."""
    known = {name: value for name, value in d.reading.fields.items() if not isinstance(value, Mapping)}
    given = {**known, **{name: value for name, value in (d.job.given if d.job else {}).items() if name in ASKED}}
    items = "".join(_field(name, title, given.get(name, ""), catalog) for name, title in ASKED.items())
    more = "".join(
        _field(name, TITLES.get(name, name), value, catalog) for name, value in known.items() if name not in ASKED
    )
    rest = f"<details><summary>Every field that was read</summary><div>{more}</div></details>" if more else ""
    button = '<p class="buttons"><button type="submit" class="md-button">Ask again with these</button></p>'
    return (
        f'<form class="picker fields" aria-label="What was recognised" autocomplete="off">{items}{rest}{button}</form>'
    )


def _field(name: str, title: str, value: Any, catalog: Catalog) -> str:
    catalogs: dict[str, Mapping[str, Model | GPU]] = {"model": catalog.models, "gpu": catalog.gpus}
    label = f'<label class="{name.replace(".", "-")}">{escape(title)} '
    said = (
        " ".join(map(str, value))
        if isinstance(value, list)
        else str(value).lower()
        if value in (True, False)
        else value
    )
    if name in catalogs:
        known = {"": "choose one", **{id: each.name for id, each in catalogs[name].items()}}
    elif name == "task":
        known = words.TASKS | words.UNPICKED
    elif name == "framework":
        known = {value: title for _, releases in fields.frameworks() for value, title in releases.items()}
    else:
        known = FIELDS[name].choices if name in FIELDS else {}
    if str(said) not in known:  # a release, or a number
        return f'{label}<input name="{escape(name)}" value="{escape(str(said))}"></label>'
    options = "".join(
        f'<option value="{escape(id)}"{" selected" if id == str(said) else ""}>{escape(title_of)}</option>'
        for id, title_of in known.items()
    )
    return f'{label}<select name="{name}">{options}</select></label>'


def _remedies(d: Diagnosis, catalog: Catalog) -> Table:
    """The remedies, a row each, with the peak before and after."""
    assert d.estimate
    host = d.host or d.estimate.on_host
    unit, one = ("GB", GB) if host else ("GiB", GiB)
    before = d.estimate.host_peak if host else compared(d, d.estimate)
    columns = (
        Column("remedy", "Change, and how the command says it"),
        Column("verdict", "Verdict"),
        Column("before", "Peak before", unit, "number", 1),
        Column("after", "Peak after", unit, "number", 1),
        Column("time", "A step takes"),
        Column("changes", "Changes for the training"),
    )
    rows = tuple(_row(remedy, before, host, one, d, catalog) for remedy in d.remedies)
    fits = "what frees memory where it died" if d.estimate.verdict == "fits" and not host else "what to change"
    return Table(
        REMEDIES,
        f"Remedies computed for this job: {fits}, the best first",
        columns,
        rows,
        assumptions="Each row is the job with that change alone, estimated as a whole; time is that of one step.",
        versions=answers.versions(),
    )


def _row(remedy: Remedy, before: int, host: bool, one: int, d: Diagnosis, catalog: Catalog) -> tuple[Cell, ...]:
    assert d.job
    after = remedy.estimate.host_peak if host else compared(d, remedy.estimate)
    lines = diff(d.job, remedy, d.reading, catalog)
    scenario = remedy.estimate.scenario.as_dict()
    names = " + ".join(remedy.names) + (": " if lines else "")
    code = "<br>" * bool(lines) + "; <br>".join(map(_flag, lines))
    word = WORDS[remedy.estimate.verdict]
    return (
        Cell(f"{names}{'; '.join(lines)}", f"{escape(names)}{code}"),
        Cell(word, verdict_html(remedy.estimate.verdict)),
        Cell(before / one),
        Cell(after / one, exact=after, scenario=scenario),
        Cell("" if remedy.time is None else time_words(remedy.time)),
        Cell(LEARNS[remedy.learns]),
    )


def _flag(line: str) -> str:
    """A change of a command, each side of it as code of its own."""
    return " → ".join(f"<code>{escape(side)}</code>" for side in line.split(" → "))


def _assumed(d: Diagnosis) -> Iterator[str]:
    """The assumptions, and the settings that were not understood, behind a click."""
    r = d.reading
    lines = [f"{each.field} {each.value}: {each.why}" for each in (d.job.assumed if d.job else r.assumed)]
    lines += [f"left out: {line}" for line in (d.job.left_out if d.job else ())]
    lines += [f"not understood: {name}" for name in r.unread]
    lines += [f"not said: {name}, as ${variable} is not set in the text" for name, variable in r.variables.items()]
    lines += r.notes
    if lines:
        title = "What was assumed, and what was not understood"
        yield f"<details><summary>{title}</summary>{_list(tuple(lines))}</details>"
