"""A vision tower's operations: patches, blocks and projector, per patch, as Transformers' eager code runs them.

Read in transformers 5.23 `models/qwen2_5_vl/modeling_qwen2_5_vl.py`. The blocks are an architecture of their own, so
that `calc.memory.activations` writes them; `h`, `q`, `i` and `H` are the tower's, a token is a patch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from calc.autograd.polynomial import Segment
from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory import activations
from calc.memory.linears import WIDTH
from calc.memory.run import Run, dimensions
from calc.models.vision import Tower

PIXEL = 4  # bytes of a number in `pixel_values`, as the image processor makes them


def running(run: Run, tower: Tower, *, trained: bool) -> Run:
    """The settings with which the tower's blocks run in a model that runs as `run` says.

    A mask or a window of the language model is none of theirs.
    """
    kernel = "flash" if run.kernel in ("masked", "eager") else run.kernel
    return replace(run, arch=tower.blocks, trained=trained, adapter=None, kernel=kernel, training=False)


@lru_cache(maxsize=1024)
def block(run: Run, *, first: bool, counted: bool) -> Segment:
    """One block of the tower; `first`: its input needs no gradient, `counted`: its input is a checkpoint."""
    return activations.layer(run, run.arch.specs[0], first=first, counted=counted)


@lru_cache(maxsize=1024)
def patches(run: Run, tower: Tower) -> Segment:
    """`Conv3d` over the pixels of each patch, which keeps them where it is trained, and the order of windows.

    All blocks share cos and sin, in fp32. The embedded patches of a frozen tower are a leaf that a hook makes require a
    gradient.
    """
    program = activations.Program(run)
    tape, b = program.tape, run.compute
    pixels = Tensor(of(pixels=1), PIXEL, differentiable=False)
    pixels.size = NOTHING  # they are counted as the batch's
    weight = tower.blocks.hidden * tower.pixels if run.trained else 0
    read = program.cast(pixels, b, "patches")
    x = tape.op("patches: embed", [read], WIDTH, b, saves=[read] if run.trained else [], weight=weight)
    x.differentiable = True
    shared = [Tensor(Size({"": 1 / tower.merge**2}), 8), Tensor(of(D=2), 4)]
    tape.op("patches: windows", [x], WIDTH, b, saves=shared if run.trained else [*shared, x])
    return Segment(tape, {**dimensions(run.arch), "pixels": tower.pixels})


@lru_cache(maxsize=1024)
def projector(run: Run, tower: Tower, *, first: bool) -> Segment:
    """The norm of each patch, two linears over `merge`² patches at once with a GELU between, and the old order.

    `out` is a token's width over the patches that it is made of; `first`: nothing below is trained.
    """
    width, out = tower.merged, tower.out
    program = activations.Program(replace(run, arch=replace(run.arch, activation="gelu")), first=first)
    program.elements = {
        "ln_q": tower.blocks.hidden, "mlp.0": width * (width + 1), "mlp.2": out * (width + 1),
    }  # fmt: skip
    program.biased = frozenset({"mlp.0", "mlp.2"})
    token = of(out=1)
    x = program.norm(program.input, "ln_q")
    x = program.activated(program.linear("mlp.0", x, WIDTH))
    x = program.linear("mlp.2", x, token)
    program.tape.op("projector: order", [x], token, x.b, saves=[Tensor(Size({"": 1 / tower.merge**2}), 8)])
    dims = {"out": out // tower.merge**2, "W_mlp.0": width * width, "W_mlp.2": out * width}
    return Segment(program.tape, {**dimensions(run.arch), **dims})
