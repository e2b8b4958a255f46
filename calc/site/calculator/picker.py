"""The calculator on its page: the picker, the answer to its first job, and that job as a scenario file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from calc.answers import advice, answers, words
from calc.answers.fits import by_memory, by_size
from calc.catalog.catalog import Model
from calc.catalog.names import plain
from calc.scenario.scenario import SCHEMA
from calc.site.calculator import calculator, fields, page
from calc.site.calculator.calculator import Place
from calc.site.views.advice.recipes import Recipe

COUNTS = (1, 2, 4, 6, 8, 16, 32, 64)
HEADS = tuple(SCHEMA["properties"])  # what the names of all fields begin with
# Values that a form field has until the reader sets it: the jobs of the GPUs' pages.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **advice.JOBS,
    "reinforce++": {"framework": "openrlhf", **advice.PROMPTED},
}
# The treatment of settings that the form leaves open, as by the commands `recommend` and `estimate`.
ASKS = {"": "search for the best", "estimate": "take the framework's defaults"}


def show(first: Recipe, place: Place) -> str:
    """The calculator's HTML, on one line, so that no Markdown rule can touch it."""
    shown = calculator.recommended(calculator.question(first.job, answers.catalog()), first.answer, place)
    inner = (
        f'{_form(first.job)}<p class="offline">Without JavaScript the calculator has this one answer; the tables below '
        f'have the rest.</p><div class="answer">{shown.html}</div>{_file(shown.file)}'
    )
    return page.box("calculator", place, HEADS, inner, defaults=DEFAULTS, heads=HEADS)


def _file(text: str) -> str:
    """A scenario file to copy, or to change and ask about."""
    inner = escape(text).replace("\n", "&#10;")
    return (
        '<details class="scenario"><summary>The scenario file, to copy or to change</summary>'
        "<p>Save it, and ask <code>python -m calc estimate scenario.yaml</code>; or change it here.</p>"
        f'<textarea aria-label="Scenario file" rows="16" spellcheck="false">&#10;{inner}</textarea>'
        '<p class="buttons"><button type="button" class="md-button copy-file">Copy</button> '
        '<button type="button" class="md-button estimate">Estimate it</button></p></details>'
    )


# ---- the form ------------------------------------------------------------------------------------------------------


def _form(job: Mapping[str, Any]) -> str:
    catalog = answers.catalog()
    usual, first = DEFAULTS[job["task"]], [field.name for field in fields.FIRST]
    given = {name: str(job.get(name, usual.get(name, ""))) for name in (*usual, *first)}
    models = {m.id: m.name for m in by_size(catalog.models.values())}
    others = {name: name.partition("/")[2] for m in catalog.models.values() for name in _others(m)}
    model, task, gpu, gpus = fields.FIRST
    counts = "".join(f'<option value="{n}"></option>' for n in COUNTS)
    return (
        '<form class="picker" aria-label="Calculator" autocomplete="off">'
        f"{_labelled(model, _select(model.name, models, given, others=others))}"
        f"{_labelled(task, _select(task.name, words.TASKS, given))}"
        f"{_labelled(gpu, _select(gpu.name, gpu_choices(), given))}"
        f"{_labelled(gpus, _number(gpus, given))}"
        f'<datalist id="calculator-counts">{counts}</datalist>'
        f"{''.join(_group(group, given) for group in fields.GROUPS)}"
        '<p class="rest" hidden>Also in this job: </p>'
        '<p class="buttons"><button type="submit" class="md-button md-button--primary">What do I run?</button> '
        '<button type="button" class="md-button copy-link">Copy link</button> '
        '<button type="button" class="md-button stop" hidden>Stop</button></p>'
        '<p class="state" role="status" aria-live="polite"></p></form>'
    )


def _others(model: Model) -> Iterator[str]:
    """The model's Hugging Face names that are more than another spelling of its own."""
    own = {plain(name) for name in (model.id, model.hf)}
    yield from (name for name in model.aliases if "/" in name and plain(name) not in own)


def gpu_choices() -> dict[str, str]:
    """The GPUs by id, from small to large, behind the one that is left open."""
    return {"": "the smallest that runs it", **{g.id: g.name for g in by_memory(answers.catalog().gpus.values())}}


def _group(group: fields.Group, given: Mapping[str, str]) -> str:
    first = group == fields.GROUPS[0]
    more = _open_settings() + _own_model() if first else ""
    inner = "".join(_field(field, given) for field in group.fields)
    return f"<details><summary>{escape(group.title)}</summary><div>{inner}{more}</div></details>"


def _field(field: fields.Field, given: Mapping[str, str]) -> str:
    about = f"about-{field.name}"
    described = f' aria-describedby="{about}"'
    if field.name == "framework":
        control = _frameworks(given, described)
    elif field.choices:
        control = _select(field.name, {"": field.empty, **field.choices}, given, described)
    else:
        control = _number(field, given, described)
    return _labelled(field, control, f'<small id="{about}">{escape(field.about)}</small>')


def _labelled(field: fields.Field, control: str, about: str = "") -> str:
    """A control under its label, hidden for a task that lacks it."""
    tasks = "" if field.tasks == fields.TASKS else f' data-tasks="{" ".join(field.tasks)}"'
    return (
        f'<div class="field {field.name.replace(".", "-")}"{tasks}><label>{field.title} {control}</label>{about}</div>'
    )


def _open_settings() -> str:
    about = "Searched: the simplest configuration that fits and is as fast as any. Defaults: the job as you state it."
    return (
        f'<div class="field ask"><label>Settings left open {_select("ask", ASKS, {})}</label>'
        f"<small>{about}</small></div>"
    )


def _own_model() -> str:
    """The choice of a model that the catalog lacks."""
    return (
        '<div class="field config"><label>A model of your own: its config.json '
        '<input type="file" accept=".json,application/json" aria-describedby="about-config"></label>'
        '<small id="about-config">The config.json of a Hugging Face model, chosen, dropped or pasted here. It stays in '
        "this browser: a link to the job does not carry it.</small></div>"
    )


def _frameworks(given: Mapping[str, str], more: str) -> str:
    chosen = given.get("framework", "")
    groups = "".join(
        f'<optgroup label="{escape(said)}">{"".join(_options(versions.items(), chosen))}</optgroup>'
        for said, versions in fields.frameworks()
    )
    return f'<select name="framework"{more}><option value="">any</option>{groups}</select>'


def _select(
    name: str,
    options: Mapping[str, str],
    given: Mapping[str, str],
    more: str = "",
    others: Mapping[str, str] | None = None,
) -> str:
    """A select of options by value; `others` stand under a heading below them, by name."""
    chosen = given.get(name, "")
    items = "".join(_options(options.items(), chosen))
    if others:
        listed = "".join(_options(sorted(others.items(), key=lambda item: item[1].casefold()), chosen))
        items += f'<optgroup label="The same shapes">{listed}</optgroup>'
    return f'<select name="{name}"{more}>{items}</select>'


def _options(options: Iterable[tuple[str, str]], chosen: str) -> Iterable[str]:
    for value, words_of in options:
        yield f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>{escape(words_of)}</option>'


def _number(field: fields.Field, given: Mapping[str, str], more: str = "") -> str:
    more += ' list="calculator-counts"' if field.name == "gpus" else ""
    more += f' placeholder="{escape(field.empty)}"' if field.empty else ""
    limits = ' min="1" step="1"' if field.kind == "integer" else ' min="0" step="any"'
    return f'<input type="number" name="{field.name}"{limits} value="{escape(given.get(field.name, ""))}"{more}>'
