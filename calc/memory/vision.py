"""A vision tower's operations: patches and blocks, per patch, as Transformers' eager code runs them.

Read in transformers 5.23 `models/{qwen2_vl,qwen2_5_vl,qwen3_vl,gemma3,siglip,internvl,glm4v,idefics3,llama4,llava,
llava_next,llava_onevision,smolvlm,mistral3,paligemma,pixtral,clip,gemma4,aya_vision,paddleocr_vl}/modeling_*.py`. The
blocks are an architecture of their own, so that `calc.memory.activations` writes them; `h`, `q`, `i` and `H` are the
tower's, a token is a patch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from calc.autograd.polynomial import Segment
from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory import activations, tiles
from calc.memory.linears import WIDTH
from calc.memory.run import Run, dimensions, symbol
from calc.models.architecture import LayerSpec
from calc.models.kernels import replaced_in_tower
from calc.models.vision import Tower

MASKED = 8  # bytes that say whether a pixel is one of an image, of `pixel_attention_mask`
PIXEL = 4  # bytes of a number in `pixel_values`, as the image processor makes them
FIRST = "post_conv_layernorm"  # the tower's norm before its blocks, where it has one
ROW = 8  # numbers of which a mask's row has a multiple in the memory-efficient kernel
UNFOLDED = "patch_embedding"  # the linear that reads unfolded pixels
TAPS = 4  # rows of a table of positions that a bilinear interpolation weighs


def running(
    run: Run, tower: Tower, *, trained: bool, adapted: bool = False, count: int = 0, short: bool = False
) -> Run:
    """The settings of the tower's blocks over `count` patches, in a model with the settings `run`.

    `short`: images are filled up, so that SDPA gets a mask, of which each block makes a copy in the products' type.

    The language model's mask and window do not apply. A mask of the tower's own has the dtype of its patches; each
    layer keeps it, or a copy, if its rows are padded to multiples of eight or autocast casts it. Under autocast the
    residual stream is bf16, which the convolution returns, unless fp32 position embeddings are added without a cast, or
    a norm returns fp32.
    """
    narrow = run.precision == "autocast" and (tower.interpolated or not (tower.positions or tower.framed))
    kernel = "flash" if run.kernel in ("masked", "eager") else run.kernel
    kernel = "efficient" if kernel == "math" else kernel  # a tower's heads are in no groups
    if tower.framed and not run.packaged:
        kernel = "masked" if count % ROW or run.compute != run.weight else "efficient"
    if tower.crossed:  # a product has made its mask, in the products' type
        kernel = "efficient"
    if short and not run.packaged:
        kernel = "masked"
    if tower.sliced and not run.packaged:
        kernel = "eager"
    if tower.resized and not run.packaged:
        kernel = "math"  # its queries have no dimension of a batch, which PyTorch's fused kernels ask for
    adapter = run.adapter if adapted else None
    return replace(
        run, arch=tower.blocks, trained=trained, adapter=adapter, kernel=kernel, training=False,
        replaced=replaced_in_tower(run.arch.family, run.replaced),
        precision="autocast-narrow" if narrow else "bf16" if run.forced else run.precision,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def block(run: Run, spec: LayerSpec, *, first: bool, counted: bool) -> Segment:
    """A block of the tower; `first`: its input needs no gradient, `counted`: its input is a checkpoint."""
    return activations.layer(run, spec, first=first, counted=counted)


@lru_cache(maxsize=1024)
def patches(run: Run, tower: Tower, *, embeds: bool, joins: bool = False) -> Segment:
    """A convolution over the pixels of each patch, which keeps them where it is trained, then positions or windows.

    `embeds`: gradients reach what it makes. `joins`: the squares of all images are joined by a copy first. Interpolated
    positions are the weighted sum, in fp32, of the `TAPS` rows of a table that are nearest. All blocks share cos and
    sin, in fp32 but for a framed tower's, where they rotate. A ragged tower's positions are a row for each patch. The
    embedded patches of a frozen tower are a leaf that a hook makes require a gradient, and the first block's input if
    neither positions nor another order come between, or the hook comes behind them. A table that is sampled as a
    picture is cast to fp32 first; its positions, and the norm before them, are in the weights' type. Of one that is
    resized for each image the positions lie channel by channel, are laid out by a copy, and all images' joined by one.
    """
    narrow = tower.first_norm and run.precision == "autocast"  # the convolution's output
    program = activations.Program(replace(run, precision="autocast-narrow") if narrow else run)
    program.widths = {"pixels": tower.pixels}
    tape, b, trained = program.tape, run.compute, run.trained
    pixels = Tensor(of(pixels=1), pixel(run, tower), differentiable=False)
    pixels.size = NOTHING  # they are counted as the batch's
    for name in ("centre", "scale") if tower.filled else ():
        pixels = tape.op(f"patches: {name}", [pixels], pixels.width, pixels.b)
    if joins:
        pixels = tape.op("patches: join squares", [pixels], pixels.width, pixels.b)
    hidden = tower.blocks.hidden
    weight = hidden * (tower.pixels + tower.patch_bias) if trained else 0
    read = program.cast(pixels, b, "patches")
    if tower.ragged:
        read = tape.op("patches: those with pixels", [read], of(pixels=1), read.b)
    if tower.unfolds:
        x = unfolded(program, tower, read)
    else:
        x = tape.op("patches: embed", [read], WIDTH, b, saves=[read] if trained else [], weight=weight)
    x.differentiable = embeds
    leaf, moved = x, tower.windowed or tower.framed or (tower.positions > 0 and not tower.ragged)
    if tower.framed:
        x = tape.op("patches: join", [x], WIDTH, x.b)
    table = tower.positions * hidden
    if tower.first_norm and not tower.classes:
        program.elements = {**program.elements, FIRST: hidden}
        x = program.rms_norm(x, FIRST, Size({"": 1}))
    if tower.sampled:
        wide = Size({}, {"": table * (run.weight != 4)})
        y = tape.op("positions: to fp32", [], wide, 4, weight=table * trained)
        y = tape.op("positions: sample", [y], WIDTH, 4, saves=[y, Tensor(Size({"": 2}), 4)])
        y = program.cast(y, run.weight, "positions")
        x = tape.op("positions: add", [x, y], WIDTH, run.weight, aliases=[x, y])
    elif tower.interpolated:
        rows, near, shares = WIDTH * TAPS, Tensor(Size({"": TAPS}), 8), Tensor(Size({"": TAPS}), 4)
        y = tape.op("positions: rows", [], rows, run.weight, saves=[near], weight=table * trained)
        y = tape.op("positions: weigh", [y], rows, 4, saves=[shares])
        y = program.cast(tape.op("positions: sum", [y], WIDTH, 4), b, "positions")
        x = tape.op("positions: add", [x, y], WIDTH, b, aliases=[x, y])
    elif tower.crossed:
        x = tiles.placed(program, tower, x)
    elif tower.classes:
        x = tape.op("patches: join class", [x], WIDTH, x.b, weight=hidden if trained else 0)
        to = x.b if tower.flattened else run.residual
        x = tape.op("positions: add", [x], WIDTH, to, aliases=[x] if x.b == to else [],
                    weight=(table + hidden) * trained)  # fmt: skip
        if tower.first_norm:
            program.elements = {**program.elements, FIRST: 2 * hidden}
            x = program.layer_norm(x, FIRST, Size({"": 1}))
    elif tower.resized:
        y = tape.op("positions: resize", [], WIDTH, run.weight, weight=table * trained)
        for name in ("lay out", "join"):
            y = tape.op(f"positions: {name}", [y], WIDTH, y.b)
        x = tape.op("positions: add", [x, y], WIDTH, run.residual, aliases=[x] if b == run.residual else [y])
    elif tower.filled:
        x = tape.op("positions: add", [x, crossed(program, tower)], WIDTH, run.residual, aliases=[x])
    elif tower.positions:
        each = tower.ragged or tower.sliced > 0
        rows = WIDTH if each else Size({}, {"": table})
        places = [Tensor(Size({"": 1}), 8)] * (each and trained)
        y = tape.op("positions: rows", [], rows, run.weight, saves=places, weight=table * trained)
        x = tape.op("positions: add", [x, y], WIDTH, run.residual, aliases=[x] if b == run.residual else [])
    angles, order = (
        Tensor(of(D=1 if tower.resized else 2), x.b if tower.framed or tower.filled else 4),
        Tensor(Size({"": 1 / tower.merge**2}), 8),
    )
    kept = [
        *[angles] * (run.arch.specs[0].rotated and not tower.flattened),
        *[order] * tower.windowed,
        *[leaf] * (moved and embeds and not trained and not (tower.flattened and run.adapter)),
    ]
    x.differentiable = True  # in what follows, adapters make it so
    tape.op("patches: order", [x], WIDTH, x.b, saves=kept, view=not tower.windowed)
    rank = run.adapter.rank if run.adapter else 0
    return Segment(tape, {**dimensions(run.arch, rank), symbol(UNFOLDED): hidden * tower.pixels, **program.widths})


def pixel(run: Run, tower: Tower) -> int:
    """Bytes of a number in `pixel_values`, as the image processor makes them."""
    return 2 if tower.flattened and run.precision != "fp32" else PIXEL


def unfolded(program: activations.Program, tower: Tower, x: Tensor) -> Tensor:
    """A linear of the pixels of each patch, which a flattened tower copies, as they lie channel by channel before."""
    program.elements = {**program.elements, UNFOLDED: tower.blocks.hidden * tower.pixels}
    for name in ("unfold", "lay out") if tower.flattened else ():
        x = program.tape.op(f"patches: {name}", [x], x.width, x.b)
    return program.linear(UNFOLDED, x, WIDTH)


def crossed(program: activations.Program, tower: Tower) -> Tensor:
    """The sum of two rows of a table, one for each patch's column and one for its row; none for empty patches.

    The gradient of either row is a table of one direction, then one of both that is 0 for the other.
    """
    tape, run = program.tape, program.run
    b, table = run.weight, tower.positions * tower.blocks.hidden * run.trained
    places = [Tensor(Size({"": 2}), 8)] * run.trained
    scratch = Size({}, {"": 2 * table * b})
    column = tape.op("positions: columns", [], WIDTH, b, saves=places, weight=table, backward_scratch=scratch)
    row = tape.op("positions: rows", [], WIDTH, b, saves=places, weight=table, backward_scratch=scratch)
    both = tape.op("positions: sum", [column, row], WIDTH, b, aliases=[column, row])
    return tape.op("positions: blank", [both], WIDTH, b, saves=[Tensor(Size({"": 1}), 1)])


def added(tower: Tower) -> Size:
    """Bytes a patch that adding a `deep` block's tokens to a layer's output keeps: two indices, each of two numbers.

    Transformers writes the sums over the places of image tokens in a copy of the output (`_deepstack_process`).
    """
    return Size({"": 2 * 2 * 8 / tower.merge**2})
