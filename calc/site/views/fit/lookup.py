"""The look-up tables of what fits where: one for each kind of GPU, and one for each model."""

from __future__ import annotations

from html import escape

from calc.answers import answers, topics
from calc.answers.fits import (
    ASSUMPTIONS,
    COUNTS,
    GRPO_ASSUMPTIONS,
    METHODS,
    PENDING,
    PPO_ASSUMPTIONS,
    TASKS,
    Asked,
    best,
    by_memory,
    by_size,
)
from calc.base.units import GiB
from calc.catalog.catalog import GPU, Model
from calc.site.tables.tables import Cell, Column, Table


def counted(gpus: int) -> str:
    """A number of GPUs in words."""
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def cell(asked: Asked) -> Cell:
    """The verdict cell of one combination."""
    found = best(asked)
    if found is None or found is PENDING:
        return Cell((None, None, found and found.rung))
    shown, needed = (found.verdict, found.needed / GiB, found.rung), found.needed
    return Cell(shown, exact=needed, scenario=found.given, working=found.working)


def on_gpu(gpu: GPU, task: str, root: str) -> Table:
    """All models on one kind of GPU, for one task: each of its methods, on one GPU and on eight."""
    cases = sorted(TASKS[task].ladders, key=lambda case: (case[1], list(METHODS).index(case[0])))
    columns = (
        Column("model", "Model"),
        *(Column(f"{m}_{n}", f"{METHODS[m]}, {counted(n)}", "GiB", "verdict", 1) for m, n in cases),
    )
    rows = tuple(
        (
            Cell(model.name, f'<a href="{root}models/{model.id}.html">{escape(model.name)}</a>'),
            *(cell(Asked(model.id, gpu.id, task, method, n)) for method, n in cases),
        )
        for model in by_size(answers.catalog().models.values())
    )
    caption = f"{TASKS[task].title} on the {gpu.name}: the verdict, and what the fullest GPU needs"
    about = TASKS[task].assumptions
    return Table(
        f"gpu-{gpu.id}-{task}",
        caption,
        columns,
        rows,
        about,
        versions=answers.versions(),
        folded=f"All {len(rows)} models, with what each needs",
    )


def smallest(model: Model, root: str) -> Table:
    """For each task and method, the tables' card of the least usable memory on which the model fits: one, and eight.

    Cards without bf16 are skipped: they cannot run the job as it is spelled out.
    """
    columns = (
        Column("job", "Job"),
        *(
            column
            for n in COUNTS
            for column in (
                Column(f"gpu_{n}", f"Smallest card, {counted(n)}"),
                Column(f"on_{n}", "There", "GiB", "verdict", 1),
            )
        ),
    )
    rows = []
    for name, task in TASKS.items():
        for method in dict.fromkeys(method for method, _ in task.ladders):
            cells = [Cell(f"{task.title}, {METHODS[method]}")]
            for n in COUNTS:
                asked = (method, n) in task.ladders
                cells += (
                    _smallest(model, name, method, n, root) if asked else (Cell("—"), Cell((None, None, "not asked")))
                )
            rows.append(tuple(cells))
    return Table(
        f"model-{model.id}-gpus",
        f"The smallest card of the tables on which {model.name} fits",
        columns,
        tuple(rows),
        ASSUMPTIONS,
        f"PPO: {PPO_ASSUMPTIONS} GRPO: {GRPO_ASSUMPTIONS}",
        versions=answers.versions(),
    )


def _smallest(model: Model, task: str, method: str, n: int, root: str) -> tuple[Cell, Cell]:
    cards = by_memory(topics.tabled(answers.catalog()))
    for gpu in (g for g in cards if not g.lacks_bf16):
        asked = Asked(model.id, gpu.id, task, method, n)
        found = best(asked)
        if found is PENDING:
            return Cell(PENDING.rung), cell(asked)
        if found is not None and found.verdict == "fits":
            link = f'<a href="{root}hardware/gpus/{gpu.id}.html">{escape(gpu.name)}</a>'
            return Cell(gpu.name, link), cell(asked)
    return Cell(f"none, up to the {cards[-1].name}"), cell(Asked(model.id, cards[-1].id, task, method, n))


def key(name: str) -> str:
    """A catalog id as a column's name."""
    return name.replace("-", "_").replace(".", "_")
