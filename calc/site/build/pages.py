"""The generated pages, one per GPU and one per model. Each is a few lines of Markdown around macros."""

from __future__ import annotations

import json
from pathlib import Path

from calc.answers import advice, answers, fits, topics
from calc.catalog.catalog import GPU, Model
from calc.recommend import options
from calc.site.build.exports import add, prune
from calc.site.calculator import addresses
from calc.site.macros import notices
from calc.site.text.inline import coded, inline
from calc.site.views.advice import advised

GPU_DIR, MODEL_DIR = "hardware/gpus", "models"


BEFORE_AMPERE = """
!!! warning "Older than Ampere"
    This card has no bf16, and FlashAttention-2 does not run on it. The tables count 16 bits and a fused attention
    kernel: train in fp16, with PyTorch's own attention.
"""

BEFORE_AMPERE_ASKED = """
!!! warning "Older than Ampere"
    This card has no bf16, and FlashAttention-2 does not run on it: train in fp16, with PyTorch's own attention.
"""

NEXT = "\n\n"
LENGTHS = """
## How long its sequences may be

[[ lengths_curve({name}) ]]
"""


def write(docs: Path) -> None:
    """Writes the pages and the notices under `docs`, and removes the pages of GPUs and models that are gone."""
    add(docs, {notices.FILE: notices.text()})
    found = answers.catalog()
    gpus = {f"{g.id}.md": gpu(g) for g in found.gpus.values()}
    models = {f"{m.id}.md": model(m) for m in found.models.values()}
    for folder, made in ((GPU_DIR, gpus), (MODEL_DIR, models)):
        add(docs / folder, made)
        prune(docs / folder, {"index.md", *made})


def _front(title: str, description: str) -> str:
    # JSON strings are valid YAML strings; the theme takes both for HTML
    title, description = json.dumps(inline(title)), json.dumps(inline(description))
    about = "hide: [navigation]\nsearch: {boost: 2}\ngenerated: true"
    return f"---\ntitle: {title}\ndescription: {description}\n{about}\n---\n"


def gpu(card: GPU) -> str:
    """A GPU's page: what to run and what fits, unless no table has the card, and its figures."""
    has = card in topics.tabled(answers.catalog())
    what = "usable memory, bandwidth, links" + (", and verdicts by model, task and method" if has else " and rates")
    title = f"What fits on the {card.name}" if has else f"The {card.name}"
    name_of = inline(card.name)
    return f"""{_front(card.name, f"{title}: {what}.")}
[Hardware](../index.md) › {name_of}
{{ .breadcrumb }}

# {name_of}

{_tables(card) if has else _asked(card)}

## Specifications

[[ gpu_table({json.dumps(card.id)}) ]]

## Links and nodes

[[ gpu_links({json.dumps(card.id)}) ]]

[[ nodes_table({json.dumps(card.id)}) ]]
"""


def _tables(card: GPU) -> str:
    """The part of a GPU's page that says what to run on it, and what fits."""
    name = json.dumps(card.id)
    what_fits = "\n\n".join(
        f"### {task.title}\n\n[[ fits_table({name}, {json.dumps(t)}) ]]" for t, task in fits.TASKS.items()
    )
    what_to_run = "\n\n".join(
        f"### {advised.heading(t)}\n\n[[ advice_table({name}, {json.dumps(t)}) ]]" for t in advised.TITLES
    )
    return f"""[[ gpu_summary({name}) ]]

[[ gpu_glance({name}) ]]
{BEFORE_AMPERE if card.lacks_bf16 else ""}
## What to run

{inline(advised.about(card)) if card.lacks_bf16 else f"[[ count_choice() ]]{NEXT}{what_to_run}"}

Another model, another number of cards? [Ask the calculator](../../index.md?gpu={card.id}#calculator). Another card?
[Compare them]({_beside(card)}).

## How many cards

Full fine-tuning spreads weights, gradients and optimizer states over all cards (ZeRO-3), and nothing else: activations,
logits and buffers stay as large on each. The model is the largest of the usual sizes that eight of these cards train
with nothing offloaded.

[[ counts_curve({name}) ]]

## What fits

{what_fits}"""


def _asked(card: GPU) -> str:
    """The same of a card that no table has: the memory, and where to ask."""
    return f"""[[ gpu_memory({json.dumps(card.id)}) ]]

What to run on it, and what fits? [Ask the calculator](../../index.md?gpu={card.id}#calculator). Another card?
[Compare them]({_beside(card)}).
{BEFORE_AMPERE_ASKED if card.lacks_bf16 else ""}"""


def _beside(card: GPU) -> str:
    """The comparison of eight of these cards with eight of others on a usual job."""
    job = {"model": "llama-3.1-8b", "task": "sft", **advice.JOBS["sft"], "gpus": 8}
    cards = dict.fromkeys((card.id, "h100-sxm", "a100-80-sxm"))
    return addresses.compare(
        "../../", [addresses.query(options.spelled({**job, "gpu": name})) for name in cards]
    ).replace(".html", ".md", 1)


def model(found: Model) -> str:
    """A model's page."""
    name = json.dumps(found.id)
    name_of = inline(found.name)
    about = f"{found.name}: parameters counted tensor by tensor, and the smallest GPU on which it trains."
    return f"""{_front(found.name, about)}
[Models](index.md) › {name_of}
{{ .breadcrumb }}

# {name_of}

[[ model_summary({name}) ]]

[[ model_glance({name}) ]]

## What to run, and on what

{f"[[ machines_table({name}) ]]" if topics.searched(found) else coded(advised.unsearched(found))}

Another machine, another length? [Ask the calculator](../index.md?model={found.id}#calculator).
{LENGTHS.format(name=name) if topics.searched(found) else ""}
## Where it fits

[[ smallest_table({name}) ]]

## Tensor by tensor

[[ parameters_table({name}) ]]
"""
