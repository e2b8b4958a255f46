"""What-fits heatmaps: models against GPUs, a word and a number in each cell, its colour as deep as the card is full.

Each is a real table: the colour says nothing that a word or a number does not. It tells `docs/assets/matrix.js` its
rows, its columns and the job of each cell; that script filters it, and leads from each cell to the calculator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import ceil
from typing import Any
from urllib.parse import urlencode

from calc.answers import advice, answers, topics
from calc.answers.fits import METHODS, PENDING, TASKS, Asked, Rung, best, by_memory, by_size
from calc.base.units import GiB
from calc.catalog.catalog import GPU, Model
from calc.site.tables.tables import WORDS, Cell, Column, Table
from calc.site.views.fit.lookup import cell, key

STEPS = 5  # of depth, which the eye tells apart; each more is a kilobyte of a page
# From the newest on, by the year in which cards of it could first be bought. One that is not listed is newer.
ARCHITECTURES = (
    "CDNA 4", "Blackwell", "CDNA 3", "Hopper", "Ada Lovelace", "Da Vinci", "CDNA 2", "Ampere", "Turing", "Volta",
    "Pascal",
)  # fmt: skip
# The limits between the choices of a filter: GB of a card as it is sold, billions of parameters.
MEMORY, SIZE = (24, 48, 80), (2, 10, 40)
BEFORE_SIZE = re.compile(r"[ -]*V?\d")  # what follows a model's family in its name
# The page of each task.
PAGES = {"sft": "what-fits/sft-full-8", "rm": "what-fits/reward-model", "dpo": "what-fits/dpo", "ppo": "what-fits/ppo",
         "grpo": "what-fits/grpo"}  # fmt: skip
# Each with the tables that a page of this size has room for.
MORE = {"what-fits/sft-full": "SFT in full, one GPU", "what-fits/sft": "SFT with LoRA or QLoRA, one GPU",
        "what-fits/sft-lora": "SFT with LoRA, eight GPUs",
        "what-fits/reward-model-lora": "Reward model with LoRA, one GPU",
        "what-fits/dpo-lora": "DPO with LoRA, one GPU"}  # fmt: skip


def matrix(task: str, method: str, gpus: int, root: str) -> Table:
    """All models against all GPUs, for one task, method and number of GPUs."""
    cards = newest(topics.tabled(answers.catalog()))
    columns = (
        Column("model", "Model"),
        *(
            Column(
                key(g.id), _title(g), "GiB", "verdict", 1, "Its name, and what a process can use of it", data=_facts(g)
            )
            for g in cards
        ),
    )
    rows = tuple(
        (
            Cell(m.name, f'<a href="{root}models/{m.id}.html">{escape(m.name)}</a>', data=_traits(m)),
            *(heated(Asked(m.id, g.id, task, method, gpus), g) for g in cards),
        )
        for m in by_size(answers.catalog().models.values())
    )
    job = {"task": task, "method": method, "gpus": gpus, **TASKS[task].job}
    rungs = TASKS[task].ladders[method, gpus]
    count = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return Table(
        f"fits-{task}-{method}-{gpus}",
        f"{TASKS[task].title}, {METHODS[method]}, on {count}: the verdict, and what the fullest GPU needs",
        columns,
        rows,
        TASKS[task].assumptions,
        differs(task, job, rungs),
        legend=LEGEND,
        versions=answers.versions(),
        data={
            "calculator": f"{root}index.html",
            "job": urlencode(_plain(job)),
            "rungs": json.dumps([urlencode(_plain(rung.fields)) for rung in rungs]),
        },
    )


def newest(cards: Iterable[GPU]) -> list[GPU]:
    """GPUs by architecture, the newest first, and of one architecture from little to much usable memory."""
    return sorted(
        by_memory(cards), key=lambda g: ARCHITECTURES.index(g.architecture) if g.architecture in ARCHITECTURES else -1
    )


def _facts(card: GPU) -> dict[str, str]:
    return {"gpu": card.id, "vendor": card.vendor, "memory": f"{card.memory_gb:g}"}


def _traits(model: Model) -> dict[str, str]:
    return {"model": model.id, "family": family(model), "size": f"{_billions(model):g}"}


def family(model: Model) -> str:
    """The name of a model's family: its own up to the first number."""
    return BEFORE_SIZE.split(model.name)[0]


def families(models: Iterable[Model]) -> list[str]:
    """The families of models by name; of two that differ in case alone, capitals come first."""
    return sorted({family(m) for m in models}, key=lambda name: (name.casefold(), name))


def _billions(model: Model) -> float:
    return round(model.parameters / 1e9, 2)


def _plain(fields: Mapping[str, Any]) -> dict[str, str]:
    """Fields of a scenario as an address holds them, each value as JSON, text without its quotes."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}


def differs(task: str, job: Mapping[str, Any], rungs: Sequence[Rung]) -> str:
    """The settings of a matrix's cells that the calculator does not have by itself, in a sentence of HTML."""
    own, given = advice.JOBS[task], _plain(job)
    others = [f"{name} {given[name]} (not {own[name]})" for name in given if name in own and own[name] != job[name]]
    fixed = [f"{name} {value}" for name, value in given.items() if name not in (*own, "task", "gpus")]
    named = ", and what the cell names" if any(rung.fields for rung in rungs) else ""
    settings = ", ".join(f"<code>{escape(setting)}</code>" for setting in [*others, *fixed])
    return f"A cell opens the calculator with its job, and not with its defaults: {settings}{named}."


def _title(card: GPU) -> str:
    return f"{card.name}{' in fp16' if card.lacks_bf16 else ''}: {card.usable_bytes / GiB:.1f} usable"


LEGEND = (
    '<ul class="legend">'
    + "".join(
        f'<li><span class="swatch heat {v} h3" aria-hidden="true"></span>{word}</li>' for v, word in WORDS.items()
    )
    + "<li>Darker: fuller card, or further over</li>"
    + "<li>newest cards first</li></ul>"
)


def heated(asked: Asked, card: GPU) -> Cell:
    """A verdict cell with its depth as a class: fifths of the card used, or, out of memory, the number of cards."""
    found = best(asked)
    if found is None or found is PENDING:
        return cell(asked)
    job = {**asked._asdict(), **TASKS[asked.task].job}
    rungs = [job | {**rung.fields} for rung in TASKS[asked.task].ladders[asked.method, asked.gpus]]
    rung = rungs.index(dict(found.given))
    share = found.needed / card.usable_bytes
    depth = int(share) if found.verdict == "oom" else ceil(STEPS * share)
    return cell(asked)._replace(style=f"heat h{min(max(depth, 1), STEPS)}", data={"rung": str(rung)} if rung else None)


def switch(current: str, root: str) -> str:
    """Links to the heatmap of each task; `current` is the page that shows them, without its extension."""
    shown = {page: TASKS[task].title for task, page in PAGES.items()} | MORE
    links = (
        f"<b>{escape(title)}</b>" if page == current else f'<a href="{root}{page}.html#what-fits">{escape(title)}</a>'
        for page, title in shown.items()
    )
    return f'<p class="switch">{" · ".join(links)}</p>'


COUNTED = "<output><b></b> <span>models</span> × <b></b> <span>cards</span></output>"


def filters(root: str) -> str:
    """The form that filters a page's matrices, with its script; without a script everything is shown."""
    found = answers.catalog()
    cards, models = newest(topics.tabled(found)), by_size(found.models.values())
    every = {
        "vendor": ("Vendor", {v: v for v in sorted({g.vendor for g in cards})}),
        "memory": ("Card's memory", _ranges([g.memory_gb for g in cards], MEMORY, " GB")),
        "family": ("Family", {f: f for f in families(models)}),
        "size": ("Parameters", _ranges([_billions(m) for m in models], SIZE, "B")),
    }
    fields = "".join(
        f'<label>{title} <select name="{name}"><option value="">any</option>'
        + "".join(f'<option value="{escape(value)}">{escape(words)}</option>' for value, words in options.items())
        + "</select></label>"
        for name, (title, options) in every.items()
    )
    return (
        f'<form class="filters" aria-label="Filter" autocomplete="off">{fields}{COUNTED}</form>'
        f'<script defer src="{root}assets/matrix.js"></script>'
    )


def _ranges(values: Sequence[float], limits: Sequence[float], unit: str) -> dict[str, str]:
    """The choices between limits: each `above-upto`, with the least and the largest of the values that lie there."""
    named = {}
    for above, upto in pairwise([0, *limits, max(values)]):
        if there := [v for v in values if above < v <= upto]:
            ends = dict.fromkeys((f"{min(there):g}", f"{max(there):g}"))
            named[f"{above:g}-{upto:g}"] = f"{' – '.join(ends)}{unit}"
    return named
