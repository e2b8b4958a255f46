"""The part of a model that each GPU holds when its layers, its tensors or its stages are spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from calc.answers import answers
from calc.base.units import GiB
from calc.catalog.catalog import Model
from calc.models.architecture import Architecture, parameters
from calc.models.slices import layers_of, part, stage
from calc.site.tables.pictures import Key, Picture, box, text
from calc.site.tables.tables import Cell, Column, Table

BYTES = 2  # of a weight in bf16
# of the drawing, in its units
RANK, GAP, DEEP, HEAD, FOOT, APART = 34, 4, 190, 40, 40, 26


class Held(NamedTuple):
    """A run of layers on one GPU: where in the model it begins and ends, and the slice of its width, as shares."""

    below: float
    above: float
    left: float
    right: float


class Rank(NamedTuple):
    """A GPU: the layers it has, in words, its parameters, and the rectangle of the model that these are."""

    layers: str
    parameters: int
    held: Held


class Layout(NamedTuple):
    """A way to spread a model, with what each GPU of it holds."""

    name: str
    ranks: tuple[Rank, ...]


def layouts(model: Model, gpus: int, tensor: int) -> list[Layout]:
    """A model on `gpus` in the ways that a scenario has fields for; the last cuts each stage's layers over `tensor`.

    Raises ConfigError where the model cannot be cut so.
    """
    arch, every = model.architecture, range(gpus)
    whole = Held(0, 1, 0, 1)
    layers = f"1 to {arch.layers}"
    total = parameters(arch)
    return [
        Layout("Data parallel", tuple(Rank(f"{layers}, whole", total, whole) for _ in every)),
        Layout(
            "ZeRO-3, FSDP",
            tuple(Rank(f"{layers}, a shard", -(-total // gpus), Held(0, 1, r / gpus, (r + 1) / gpus)) for r in every),
        ),
        Layout("Tensor parallel", tuple(_rank(arch, r, 1, gpus) for r in every)),
        Layout("Pipeline", tuple(_rank(arch, r, gpus, 1) for r in every)),
        Layout(
            f"{gpus // tensor} stages, tensor {tensor}", tuple(_rank(arch, r, gpus // tensor, tensor) for r in every)
        ),
    ]


def _rank(arch: Architecture, rank: int, stages: int, tensor: int) -> Rank:
    """A GPU of a pipeline whose layers are cut: those of one stage are neighbours."""
    index, cut = divmod(rank, tensor)
    counts = layers_of(arch.layers, stages) if stages > 1 else (arch.layers,)
    first = sum(counts[:index])
    sizes = [parameters(stage(arch, n, stages)) for n in range(stages)]
    ends = [0, *accumulate(sizes)]
    held = Held(ends[index] / ends[-1], ends[index + 1] / ends[-1], cut / tensor, (cut + 1) / tensor)
    ends_too = [*["embedding"] * (index == 0), *["head"] * (index == stages - 1)] if stages > 1 else []
    words = ", ".join([f"{first + 1} to {first + counts[index]}", *ends_too, *([f"1/{tensor} of each"] * (tensor > 1))])
    return Rank(words, parameters(part(stage(arch, index, stages), tensor)), held)


def table(model: Model, gpus: int, tensor: int, table_id: str, caption: str) -> Table:
    """One row per GPU of each layout, under the parts of the model that they hold."""
    found = layouts(model, gpus, tensor)
    columns = (
        Column("layout", "Spread by"),
        Column("gpu", "GPU", "", "number"),
        Column("layers", "Layers"),
        Column("parameters", "Parameters", "", "number"),
        Column("weights", "Weights in bf16", "GiB", "number", 2),
    )
    rows = tuple(
        (
            Cell(layout.name),
            Cell(n),
            Cell(rank.layers),
            Cell(rank.parameters),
            Cell(BYTES * rank.parameters / GiB, exact=BYTES * rank.parameters),
        )
        for layout in found
        for n, rank in enumerate(layout.ranks)
    )
    return Table(
        table_id,
        caption,
        columns,
        rows,
        f"{model.name}, {gpus} GPUs, weights in bf16.",
        "A frame is the whole model, from the embedding at the bottom to the head at the top; what a GPU holds is "
        "filled. A shard is gathered, layer by layer, before anything is computed with it; a tensor-parallel part is "
        "computed with as it lies. Norms and routers are whole on each tensor-parallel GPU.",
        versions=answers.versions(),
        folded="The parts as a table",
        picture=picture(found),
    )


def picture(found: Sequence[Layout]) -> Picture:
    """The layouts side by side, each with a frame for each of its GPUs."""
    wide = max((RANK + GAP) * len(layout.ranks) for layout in found) + APART
    body = "".join(part for n, layout in enumerate(found) for part in _layout(layout, n * wide))
    said = (
        f"{layout.name}: "
        + ", ".join(f"GPU {n} layers {rank.layers}, {_gib(rank)} GiB" for n, rank in enumerate(layout.ranks))
        for layout in found
    )
    keys = (Key("c-weights", "weights that lie on this GPU"),)
    return Picture(wide * len(found), HEAD + DEEP + FOOT, body, "; ".join(said), keys)


def _gib(rank: Rank) -> str:
    return f"{BYTES * rank.parameters / GiB:.1f}"


def _layout(layout: Layout, left: float) -> Iterator[str]:
    yield text(left, 16, layout.name, style="heading")
    for n, rank in enumerate(layout.ranks):
        x, h = left + n * (RANK + GAP), rank.held
        high = DEEP * (h.above - h.below)
        yield box(x + RANK * h.left, HEAD + DEEP * (1 - h.above), RANK * (h.right - h.left), high, "c-weights")
        yield box(x, HEAD, RANK, DEEP, "card")
        yield text(x + RANK / 2, HEAD - 6, str(n), "middle")
        yield text(x + RANK / 2, HEAD + DEEP + 17, _gib(rank), "middle")
    yield text(left, HEAD + DEEP + 34, "GiB on each")
