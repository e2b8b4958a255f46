"""What-fits heatmaps: models against GPUs, a word and a number in each cell, its colour as deep as the card is full.

Each is a real table: the colour says nothing that a word or a number does not.
"""

from __future__ import annotations

from html import escape

from calc.answers import answers
from calc.answers.fits import METHODS, PENDING, TASKS, Asked, best, by_memory, by_size
from calc.base.units import GiB
from calc.catalog.catalog import GPU
from calc.site.tables.tables import WORDS, Cell, Column, Table
from calc.site.views.fit.lookup import cell, key

STEPS = 10
# The page of each task; the home page has two tables of the first.
PAGES = {"sft": "index", "rm": "what-fits/reward-model", "dpo": "what-fits/dpo", "ppo": "what-fits/ppo",
         "grpo": "what-fits/grpo"}  # fmt: skip
MORE = {"what-fits/sft": "Supervised fine-tuning, other methods"}


def matrix(task: str, method: str, gpus: int, root: str) -> Table:
    """All models against all GPUs, for one task, method and number of GPUs."""
    cards = by_memory(answers.catalog().gpus.values())
    columns = (
        Column("model", "Model"),
        *(
            Column(key(g.id), _title(g), "GiB", "verdict", 1, "Its name, and what a process can use of it")
            for g in cards
        ),
    )
    rows = tuple(
        (
            Cell(m.name, f'<a href="{root}models/{m.id}.html">{escape(m.name)}</a>'),
            *(heated(Asked(m.id, g.id, task, method, gpus), g) for g in cards),
        )
        for m in by_size(answers.catalog().models.values())
    )
    count = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return Table(
        f"fits-{task}-{method}-{gpus}",
        f"{TASKS[task].title}, {METHODS[method]}, on {count}: the verdict, and what the fullest GPU needs",
        columns,
        rows,
        TASKS[task].assumptions,
        legend=LEGEND,
        versions=answers.versions(),
    )


def _title(card: GPU) -> str:
    return f"{card.name}{' in fp16' if card.lacks_bf16 else ''}: {card.usable_bytes / GiB:.1f} usable"


LEGEND = (
    '<ul class="legend">'
    + "".join(
        f'<li><span class="swatch heat {v} h5" aria-hidden="true"></span>{word}</li>' for v, word in WORDS.items()
    )
    + "<li>Darker: fuller card, or further over</li></ul>"
)


def heated(asked: Asked, card: GPU) -> Cell:
    """A verdict cell with its depth as a class: tenths of the card used, or, out of memory, the number of cards."""
    found = best(asked)
    if found is None or found is PENDING:
        return cell(asked)
    share = found.needed / card.usable_bytes
    depth = int(share) if found.verdict == "oom" else int(STEPS * share)
    return cell(asked)._replace(style=f"heat h{min(max(depth, 1), STEPS)}")


def switch(current: str, root: str) -> str:
    """Links to the heatmap of each task; `current` is the page that shows them, without its extension."""
    shown = {page: TASKS[task].title for task, page in PAGES.items()} | MORE
    links = (
        f"<b>{escape(title)}</b>" if page == current else f'<a href="{root}{page}.html#what-fits">{escape(title)}</a>'
        for page, title in shown.items()
    )
    return f'<p class="switch">{" · ".join(links)}</p>'
