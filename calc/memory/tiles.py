"""The operations of Llama 3.2 Vision's tower around its blocks: positions of squares, and a norm between transformers.

Read in transformers 5.23 `models/mllama/modeling_mllama.py`, `MllamaVisionModel.forward`,
`MllamaPrecomputedPositionEmbedding` and `MllamaPrecomputedAspectRatioEmbedding`.
"""

from __future__ import annotations

from functools import lru_cache

from calc.autograd.polynomial import Segment
from calc.autograd.tape import Size, Tensor
from calc.memory import activations
from calc.memory.linears import WIDTH
from calc.memory.run import Run, dimensions
from calc.models.vision import Tower

PATCH = Size({"": 1})  # one row a patch
BEFORE, BETWEEN = "layernorm_pre", "layernorm_post"


def placed(program: activations.Program, tower: Tower, x: Tensor) -> Tensor:
    """The embedded patches of squares with everything that is added to them, normed and filled up.

    A row for each square and, behind the square's own token, the sum of two tables: one number's tanh weighs that by
    the image's shape, and 1 less it the one that all squares share. Where it is trained it keeps the rows.
    """
    tape, run, share = program.tape, program.run, tower.filling
    h, trained, b = tower.blocks.hidden, run.trained, max(run.residual, run.weight)
    bare, whole = WIDTH * (tower.positions / (tower.positions + 1) * share), WIDTH * share
    rows = h * (tower.positions + 1)

    def added(x: Tensor, name: str, weight: int) -> Tensor:
        return tape.op(name, [x], x.width, b, aliases=[x] if x.b == b else [], weight=weight * trained)

    x.width, x.size = bare, bare * x.b
    x = added(x, "squares: add row", tower.ratios * tower.tiles * h + 1)
    x = tape.op("patches: join class", [x], whole, b, weight=h * trained)
    x = added(x, "positions: add", rows + 1)
    y = tape.op("positions: rows", [], whole, run.weight, weight=tower.ratios * tower.tiles * rows * trained)
    y = tape.op("positions: weigh", [y], whole, run.weight, saves=[y] if trained else [],
                backward_scratch=whole * run.weight)  # fmt: skip
    x = tape.op("positions: add rows", [x, y], whole, b, aliases=[t for t in (x, y) if t.b == b])
    program.elements = {**program.elements, BEFORE: 2 * h}
    x = program.layer_norm(x, BEFORE, PATCH * share)
    return tape.op("patches: fill up", [x], WIDTH, x.b)


@lru_cache(maxsize=1024)
def between(run: Run, tower: Tower, *, first: bool) -> Segment:
    """The norm between both transformers, and a row for each square that is added to its output.

    `first`: nothing below needs a gradient.
    """
    program = activations.Program(run, first=first)
    h, trained, b = tower.blocks.hidden, run.trained, max(run.residual, run.weight)
    program.elements = {**program.elements, BETWEEN: 2 * h}
    x = program.layer_norm(program.input, BETWEEN, PATCH)
    weight = (tower.ratios * tower.tiles * h + 1) * trained
    program.tape.op("squares: add row", [x], WIDTH, b, aliases=[x] if x.b == b else [], weight=weight)
    return Segment(program.tape, {**dimensions(run.arch, run.adapter.rank if run.adapter else 0)})


def stacked(program: activations.Program, tower: Tower, x: Tensor) -> Tensor:
    """The last block's output beside those of blocks before it, of which one copy is made first; empty patches are cut.

    The gradient of that copy is one tensor, of which the blocks' are views (`torch.stack`, `torch.cat`).
    """
    tape, before, share = program.tape, len(tower.taken) - 1, tower.filling
    others = program.elsewhere("blocks", WIDTH * before, x.b)
    others.differentiable = x.differentiable
    y = tape.op("projector: stack blocks", [others], others.width, x.b, aliases=[others])
    parts = [
        tape.op(f"projector: cut {n}", [t], t.width * share, t.b, view=True) for n, t in (("last", x), ("stack", y))
    ]
    return tape.op("projector: join blocks", parts, WIDTH * (len(tower.taken) * share), x.b, aliases=parts)
