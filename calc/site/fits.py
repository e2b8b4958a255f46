"""What fits where: the look-up tables over the catalog, for a job that is spelled out once, here.

A cell tries the few configurations of its ladder, the fastest first, and shows the first that fits; where none does,
the first that is tight; else the one that comes closest, with what it needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from html import escape
from multiprocessing import get_context
from typing import Any, NamedTuple

from calc.catalog import GPU, Model
from calc.site import answers
from calc.site.tables import Cell, Column, Table
from calc.units import GiB, gb

TASKS = {"sft": "Supervised fine-tuning", "rm": "Reward model", "dpo": "DPO"}
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
COUNTS = (1, 8)

# The job of every look-up table; all else is the default of the framework's newest version.
JOB: Mapping[str, Any] = {
    "framework": "openrlhf",
    "seq_len": 2048,
    "micro_batch": 1,
    "checkpointing": "full",
    "attention": "flash",
}
ASSUMPTIONS = (
    "OpenRLHF's newest known version and its defaults, 2048 tokens a sequence, micro batch 1 (a pair for the reward "
    "model and for DPO), full activation checkpointing, FlashAttention; LoRA and QLoRA on all linear layers. "
    "A cell shows the first configuration that fits, of those its column may use, and what the fullest GPU then needs; "
    "with offload also what a node must have of its own memory."
)


class Rung(NamedTuple):
    """One configuration to try."""

    name: str
    fields: Mapping[str, Any]


ZERO2 = Rung("ZeRO-2", {"sharding": "zero2"})
ZERO3 = Rung("ZeRO-3", {"sharding": "zero3"})
OFFLOAD2 = Rung("offload", {"sharding": "zero2", "offload.optimizer": True})
OFFLOAD3 = Rung("ZeRO-3, offload", {"sharding": "zero3", "offload.optimizer": True})
ALONE = Rung("", {"sharding": "zero2"})

# (method, more than one GPU) -> what to try, the fastest first.
LADDERS: Mapping[tuple[str, bool], tuple[Rung, ...]] = {
    ("full", False): (ALONE, OFFLOAD2),
    ("full", True): (ZERO2, ZERO3, OFFLOAD3),
    ("lora", False): (ALONE,),
    ("lora", True): (ZERO2, ZERO3),
    ("qlora", False): (ALONE,),
    ("qlora", True): (ZERO2,),
}


class Best(NamedTuple):
    """What a cell shows: the verdict, the bytes that the fullest GPU needs, and the configuration that was asked."""

    verdict: str
    needed: int
    rung: str
    given: Mapping[str, Any]


class Asked(NamedTuple):
    """What a cell of the look-up tables asks."""

    model: str
    gpu: str
    task: str
    method: str
    gpus: int


_FOUND: dict[Asked, Best | None] = {}


def best(asked: Asked) -> Best | None:
    """The best configuration of the ladder; None where the framework refuses all of them."""
    if asked not in _FOUND:
        _FOUND[asked] = _search(asked)
    return _FOUND[asked]


def _search(asked: Asked) -> Best | None:
    found: list[Best] = []
    for rung in LADDERS[asked.method, asked.gpus > 1]:
        given = {**asked._asdict(), **JOB, **rung.fields}
        answer = answers.attempt(given)
        if answer is None:
            continue
        found.append(Best(answer.estimate.verdict, answer.device_bytes, _name(rung, answer), given))
        if found[-1].verdict == "fits":
            return found[-1]
    order = ("tight", "oom")
    return min(found, key=lambda b: (order.index(b.verdict), b.needed), default=None)


def _name(rung: Rung, answer: answers.Answer) -> str:
    """The rung in words, with what offloading asks of a node's own memory."""
    if not answer.scenario.offload.optimizer:
        return rung.name
    return f"{rung.name}, host {gb(max(p.moment.device_bytes for p in answer.estimate.host_phases))}"


def _search_all(model: str) -> tuple[dict[Asked, Best | None], int]:
    """Every cell of one model, and how many scenarios that took."""
    before = answers.Clock.asked
    cells = [
        Asked(model, g, t, way, n) for g in answers.catalog().gpus for t in TASKS for way in METHODS for n in COUNTS
    ]
    return {asked: _search(asked) for asked in cells}, answers.Clock.asked - before


def fill() -> None:
    """Answers every cell of the look-up tables at once, over all cores; they are most of a build.

    A model at a time, because what `calc` compiles of a model serves all its scenarios.
    """
    start = time.perf_counter()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for found, asked in pool.map(_search_all, answers.catalog().models):
            _FOUND.update(found)
            answers.Clock.asked += asked
    answers.Clock.seconds += time.perf_counter() - start


def cell(asked: Asked) -> Cell:
    """The verdict cell of one combination."""
    found = best(asked)
    if found is None:
        return Cell((None, None, None))
    return Cell((found.verdict, found.needed / GiB, found.rung), exact=found.needed, scenario=found.given)


def by_size(models: Iterable[Model]) -> list[Model]:
    """Models from small to large."""
    return sorted(models, key=lambda m: (m.published_parameters, m.id))


def by_memory(gpus: Iterable[GPU]) -> list[GPU]:
    """GPUs from little to much usable memory."""
    return sorted(gpus, key=lambda g: (g.usable_mib, g.id))


def matrix(task: str, method: str, gpus: int, root: str) -> Table:
    """All models against all GPUs, for one task, method and number of GPUs."""
    columns = [Column("model", "Model")]
    cards = by_memory(answers.catalog().gpus.values())
    columns += [Column(_key(g.id), g.name + " in fp16" * g.lacks_bf16, "GiB", "verdict", 1) for g in cards]
    rows = tuple(
        (
            Cell(m.name, f'<a href="{root}models/{m.id}.html">{escape(m.name)}</a>'),
            *(cell(Asked(m.id, g.id, task, method, gpus)) for g in cards),
        )
        for m in by_size(answers.catalog().models.values())
    )
    count = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return Table(
        f"fits-{task}-{method}-{gpus}",
        f"{TASKS[task]}, {METHODS[method]}, on {count}: the verdict, and what the fullest GPU needs",
        tuple(columns),
        rows,
        ASSUMPTIONS,
        versions=answers.versions(),
    )


def on_gpu(gpu: GPU, task: str, root: str) -> Table:
    """All models on one kind of GPU, for one task: each method on one GPU and on eight."""
    cases = [(method, n) for n in COUNTS for method in METHODS]
    columns = (
        Column("model", "Model"),
        *(Column(f"{m}_{n}", f"{METHODS[m]}, {n} GPU{'s' if n > 1 else ''}", "GiB", "verdict", 1) for m, n in cases),
    )
    rows = tuple(
        (
            Cell(model.name, f'<a href="{root}models/{model.id}.html">{escape(model.name)}</a>'),
            *(cell(Asked(model.id, gpu.id, task, method, n)) for method, n in cases),
        )
        for model in by_size(answers.catalog().models.values())
    )
    caption = f"{TASKS[task]} on the {gpu.name}: the verdict, and what the fullest GPU needs"
    return Table(f"gpu-{gpu.id}-{task}", caption, columns, rows, ASSUMPTIONS, versions=answers.versions())


def smallest(model: Model, root: str) -> Table:
    """For each task and method, the card with the least usable memory on which the model fits: alone, and by eight.

    Cards without bf16 are passed over: they cannot run the job as it is spelled out.
    """
    columns = (
        Column("job", "Job"),
        *(
            column
            for n in COUNTS
            for column in (
                Column(f"gpu_{n}", f"Smallest card, {n} GPU{'s' if n > 1 else ''}"),
                Column(f"on_{n}", "There", "GiB", "verdict", 1),
            )
        ),
    )
    rows = []
    for task in TASKS:
        for method in METHODS:
            cells = [Cell(f"{TASKS[task]}, {METHODS[method]}")]
            for n in COUNTS:
                cells += _smallest(model, task, method, n, root)
            rows.append(tuple(cells))
    return Table(
        f"model-{model.id}-gpus",
        f"The smallest card in the catalog on which {model.name} fits",
        columns,
        tuple(rows),
        ASSUMPTIONS,
        versions=answers.versions(),
    )


def _smallest(model: Model, task: str, method: str, n: int, root: str) -> tuple[Cell, Cell]:
    cards = by_memory(answers.catalog().gpus.values())
    for gpu in (g for g in cards if not g.lacks_bf16):
        asked = Asked(model.id, gpu.id, task, method, n)
        found = best(asked)
        if found is not None and found.verdict == "fits":
            link = f'<a href="{root}hardware/gpus/{gpu.id}.html">{escape(gpu.name)}</a>'
            return Cell(gpu.name, link), cell(asked)
    return Cell(f"none, up to the {cards[-1].name}"), cell(Asked(model.id, cards[-1].id, task, method, n))


def _key(name: str) -> str:
    """A catalog id as a column's name."""
    return name.replace("-", "_").replace(".", "_")
