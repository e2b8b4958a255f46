"""The calculator on its page: the picker, the answer to its first job, and that job as a scenario file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from calc.answers import advice, answers, words
from calc.answers.fits import by_memory, by_size
from calc.catalog.catalog import Model
from calc.catalog.names import plain
from calc.site.calculator import browser_engine, calculator
from calc.site.calculator.calculator import Place
from calc.site.views.advice.recipes import Recipe

COUNTS = (1, 2, 4, 6, 8, 16, 32, 64)
# Values that a form field has until the reader sets it: the jobs of the GPUs' pages.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **advice.JOBS,
    "reinforce++": {"framework": "openrlhf", **advice.PROMPTED},
}
METHODS = {"": "full if it fits, else LoRA, else QLoRA", "full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
NUMBERS = {
    "seq_len": "Tokens a sequence",
    "global_batch": "Sequences or pairs a step",
    "prompt_len": "Tokens a prompt",
    "response_len": "Tokens a response",
}


def show(first: Recipe, place: Place) -> str:
    """The calculator's HTML, on one line, so that no Markdown rule can touch it."""
    shown = calculator.recommended(calculator.question(first.job, answers.catalog()), first.answer, place)
    return (
        f'<div id="calculator" class="calculator">{_form(first.job)}'
        '<p class="offline">Without JavaScript the calculator has this one answer; the tables below have the rest.</p>'
        f'<div class="answer">{shown.html}</div>{_file(shown.file)}'
        f'<script type="application/json">{_data(place.root)}</script>'
        f'<script defer src="{place.root}assets/calculator.js"></script></div>'
    )


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


def _data(root: str) -> str:
    """The script's data as JSON that cannot close its tag."""
    data = {
        "defaults": DEFAULTS,
        "numbers": [*NUMBERS, "gpus", "host_memory"],
        "root": root,
        "engine": f"{root}assets/calculator/{browser_engine.version()}/",
        "catalog": f"{root}data/catalog.json?v={answers.versions()['catalog']}",
    }
    return json.dumps(data).replace("<", "\\u003c")


def _form(job: Mapping[str, Any]) -> str:
    catalog = answers.catalog()
    given = {**DEFAULTS[job["task"]], **job}
    models = {m.id: m.name for m in by_size(catalog.models.values())}
    others = {name: name.partition("/")[2] for m in catalog.models.values() for name in _others(m)}
    gpus = {"": "the smallest that runs it", **{g.id: g.name for g in by_memory(catalog.gpus.values())}}
    counts = "".join(f'<option value="{n}"></option>' for n in COUNTS)
    numbers = "".join(_number(name, title, given.get(name, "")) for name, title in NUMBERS.items())
    return (
        '<form class="picker" aria-label="Calculator" autocomplete="off">'
        f"{_select('model', 'Model', models, given, others)}{_select('task', 'Task', words.TASKS, given)}"
        f"{_select('gpu', 'GPU', gpus, given)}{_number('gpus', 'How many', given.get('gpus', ''), 'any')}"
        f'<datalist id="calculator-counts">{counts}</datalist>'
        "<details><summary>Method, framework, lengths, host memory</summary><div>"
        f"{_select('method', 'Method', METHODS, given)}"
        f"{_select('framework', 'Framework', words.FRAMEWORKS, given)}{numbers}"
        f"{_number('host_memory', 'Host memory, GB a node', given.get('host_memory', ''), 'its share')}"
        "</div></details>"
        '<p class="buttons"><button type="submit" class="md-button md-button--primary">What do I run?</button> '
        '<button type="button" class="md-button copy-link">Copy link</button> '
        '<button type="button" class="md-button stop" hidden>Stop</button></p>'
        '<p class="state" role="status" aria-live="polite"></p></form>'
    )


def _others(model: Model) -> Iterator[str]:
    """The model's Hugging Face names that are more than another spelling of its own."""
    own = {plain(name) for name in (model.id, model.hf)}
    yield from (name for name in model.aliases if "/" in name and plain(name) not in own)


def _select(
    name: str,
    title: str,
    options: Mapping[str, str],
    given: Mapping[str, Any],
    others: Mapping[str, str] | None = None,
) -> str:
    """A select of options by value; `others` stand under a heading below them, by name."""
    chosen = given.get(name, "")
    items = "".join(_options(options.items(), chosen))
    if others:
        listed = "".join(_options(sorted(others.items(), key=lambda item: item[1].casefold()), chosen))
        items += f'<optgroup label="The same shapes">{listed}</optgroup>'
    return f'<label class="{name}">{title} <select name="{name}">{items}</select></label>'


def _options(options: Iterable[tuple[str, str]], chosen: str) -> Iterable[str]:
    for value, words_of in options:
        yield f'<option value="{escape(value)}"{" selected" if value == chosen else ""}>{escape(words_of)}</option>'


def _number(name: str, title: str, value: Any, empty: str = "") -> str:
    more = ' list="calculator-counts"' if name == "gpus" else ""
    more += f' placeholder="{empty}"' if empty else ""
    field = f'<input type="number" name="{name}" min="1" step="1" value="{escape(str(value))}"{more}>'
    return f'<label class="{name}">{title} {field}</label>'
