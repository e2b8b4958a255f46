"""Pictures of verdicts: a mark for each model on one GPU or on each size of GPU, or for each GPU under one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple
from urllib.parse import urlencode

from calc.answers import answers, topics
from calc.answers.fits import COUNTS, LEARNING, METHODS, PENDING, TASKS, Asked, Best, best, by_memory, by_size
from calc.catalog.catalog import GPU, Model
from calc.site.tables.grids import Row, grid
from calc.site.tables.tables import WORDS, Cell, Column, Table
from calc.site.text.inline import inline
from calc.site.views.fit.heat import newest
from calc.site.views.fit.lookup import counted

STEP = 1.25  # of the models drawn each is so many times as large as the one before: some forty, which a screen shows
SHORT = {"sft": "SFT", "rm": "Reward model", "dpo": "DPO", "ppo": "PPO", "grpo": "GRPO"}


class Case(NamedTuple):
    """A job of the look-up tables, on one number of GPUs."""

    task: str
    method: str
    gpus: int

    @property
    def label(self) -> str:
        """The job in a few words."""
        return f"{counted(self.gpus)}: {SHORT[self.task]}, {METHODS[self.method]}"

    @property
    def drawn(self) -> str:
        """The same beside a drawing, which a phone has little room for."""
        return self.label.replace(SHORT["rm"], "RM")


def cases() -> list[Case]:
    """Every job of the look-up tables, on few GPUs first."""
    found = [Case(task, method, n) for task, its in TASKS.items() for method, n in its.ladders]
    return sorted(found, key=lambda case: (case.gpus, [*TASKS].index(case.task), [*METHODS].index(case.method)))


def on_gpu(card: GPU, root: str) -> Table:
    """One row per job: how many models fit on this card, and the largest of them."""
    models = by_size(answers.catalog().models.values())
    found = {case: [_best(m, card, case) for m in models] for case in cases()}
    rows = []
    for case, cells in found.items():
        largest = next((m for m, b in zip(reversed(models), reversed(cells), strict=True) if _fits(b)), None)
        rows.append((*_counts(case, cells), _model(largest, root), _ask(case, largest, card, root)))
    caption = f"Which of {len(models)} models fit on the {card.name}, by task and size"
    columns = (*COUNTED, Column("largest", "Largest that fits"), ASK)
    drawn = _spaced(models)
    marks = [_marks(case.drawn, [cells[n] for n in drawn]) for case, cells in found.items()]
    notes = f"{NOTES} {_drawn(drawn)}"
    return _table(f"gpu-{card.id}-glance", caption, columns, rows, marks, [models[n].name for n in drawn], notes)


def _drawn(drawn: Sequence[int]) -> str:
    return f"The drawing has {len(drawn)} of the models, from small to large; the table counts all of them."


def on_sizes(task: str, jobs: Sequence[tuple[str, int]], root: str) -> Table:
    """One row per method and number of GPUs, and size of GPU: how many models fit, and the largest of them.

    Of the cards that are sold with as much memory, the newest stands for all.
    """
    models = by_size(answers.catalog().models.values())
    drawn = _spaced(models)
    rows, marks = [], []
    for case in (Case(task, method, gpus) for method, gpus in jobs):
        for memory, card in sizes():
            cells = [_best(m, card, case) for m in models]
            largest = next((m for m, b in zip(reversed(models), reversed(cells), strict=True) if _fits(b)), None)
            job, *counts = _counts(case, cells)
            rows.append((job, _card(card, root), *counts, _model(largest, root), _ask(case, largest, card, root)))
            size = f"{case.gpus} × {memory:g} GB" if case.gpus > 1 else f"{memory:g} GB"
            marks.append(_marks(f"{METHODS[case.method]}, {size}", [cells[n] for n in drawn]))
    columns = (COUNTED[0], Column("gpu", "GPU"), *COUNTED[1:], Column("largest", "Largest that fits"), ASK)
    caption = f"{TASKS[task].title} by memory of the card: which of {len(models)} models fit"
    notes = f"Of each size the newest card is shown; the tables have more. {_drawn(drawn)}"
    table_id = f"fits-{task}-{'-'.join(f'{method}-{gpus}' for method, gpus in jobs)}-glance"
    return _table(table_id, caption, columns, rows, marks, [models[n].name for n in drawn], notes)


def sizes() -> list[tuple[float, GPU]]:
    """The newest card of each size of memory, from small to large, as GB and GPU."""
    cards = [g for g in topics.tabled(answers.catalog()) if not g.lacks_bf16]
    return sorted({g.memory_gb: g for g in reversed(newest(cards))}.items())


def _spaced(models: Sequence[Model]) -> list[int]:
    """The places, among models from small to large, of those that are drawn."""
    drawn: list[int] = []
    for n, model in enumerate(models):
        if not drawn or model.parameters >= STEP * models[drawn[-1]].parameters:
            drawn.append(n)
    return drawn


def of_model(model: Model, root: str) -> Table:
    """One row per job: on how many kinds of GPU the model fits, and the smallest of them."""
    cards = by_memory(topics.tabled(answers.catalog()))
    found = {case: [_best(model, g, case) for g in cards] for case in cases()}
    rows = []
    for case, cells in found.items():
        smallest = next((g for g, b in zip(cards, cells, strict=True) if _fits(b)), None)
        rows.append((*_counts(case, cells), _card(smallest, root), _ask(case, model, smallest, root)))
    caption = f"On which of {len(cards)} GPUs {model.name} fits, by task"
    columns = (*COUNTED, Column("smallest", "Smallest that fits"), ASK)
    marks = [_marks(case.drawn, cells) for case, cells in found.items()]
    return _table(f"model-{model.id}-glance", caption, columns, rows, marks, [g.name for g in cards], NOTES)


def summary(model: Model) -> str:
    """Markdown: the smallest cards on which a model's supervised fine-tuning fits, one of them and several."""
    cards = [g for g in by_memory(topics.tabled(answers.catalog())) if not g.lacks_bf16]
    lines = []
    for n in COUNTS:
        on = {m: next((g for g in cards if _fits(_best(model, g, Case("sft", m, n)))), None) for m in METHODS}
        said = [f"{inline(g.name) if g else 'none'} with {LEARNING[m]}" for m, g in on.items()]
        lines.append(f"- **{'One card' if n == 1 else f'{n} cards'}**: {', '.join(said)}.")
    return "The smallest cards on which supervised fine-tuning fits with the usual settings:\n\n" + "\n".join(lines)


COUNTED = (
    Column("job", "Job"),
    *(Column(verdict, word[:1].upper() + word[1:], "", "number") for verdict, word in WORDS.items()),
)
NOTES = (
    "Jobs with the usual settings, as in the tables of what fits below. What to run tries more of them, such as "
    "weights in host memory, and so finds smaller machines."
)
ASK = Column("ask", "Another length, another number")


def _best(model: Model, card: GPU, case: Case) -> Best | None:
    found = best(Asked(model.id, card.id, *case))
    return None if found is PENDING else found


def _fits(found: Best | None) -> bool:
    return found is not None and found.verdict == "fits"


def _counts(case: Case, cells: Sequence[Best | None]) -> Iterator[Cell]:
    """The job, and how many of its cells have each verdict."""
    yield Cell(case.label)
    yield from (Cell(sum(b is not None and b.verdict == verdict for b in cells)) for verdict in WORDS)


def _model(found: Model | None, root: str) -> Cell:
    return (
        Cell(found.name, f'<a href="{root}models/{found.id}.html">{escape(found.name)}</a>') if found else Cell("none")
    )


def _card(found: GPU | None, root: str) -> Cell:
    link = f'<a href="{root}hardware/gpus/{found.id}.html">{escape(found.name)}</a>' if found else ""
    return Cell(found.name, link) if found else Cell("none")


def _ask(case: Case, model: Model | None, card: GPU | None, root: str) -> Cell:
    """A link to the calculator with the job; nothing where it fits nowhere."""
    if not (model and card):
        return Cell("—")
    asked = urlencode({"model": model.id, "task": case.task, "gpu": card.id, "gpus": case.gpus, "method": case.method})
    return Cell("calculator", f'<a href="{root}index.html?{escape(asked)}#calculator">calculator</a>')


def _marks(label: str, cells: Sequence[Best | None]) -> Row:
    return Row(label, [b and b.verdict for b in cells])


def _table(
    table_id: str,
    caption: str,
    columns: tuple[Column, ...],
    rows: Sequence[tuple[Cell, ...]],
    marks: Sequence[Row],
    names: Sequence[str],
    notes: str,
) -> Table:
    return Table(
        table_id,
        caption,
        columns,
        tuple(rows),
        notes,
        versions=answers.versions(),
        folded="How many fit, and the largest or smallest, as a table",
        picture=grid(marks, names),
    )
