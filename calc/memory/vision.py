"""A vision tower's operations: patches, blocks and projector, per patch, as Transformers' eager code runs them.

Read in transformers 5.23 `models/{qwen2_vl,qwen2_5_vl,qwen3_vl,gemma3,siglip,internvl,glm4v,idefics3,llama4,llava,
llava_next,llava_onevision,smolvlm,mistral3,paligemma,pixtral,clip,gemma4,aya_vision}/modeling_*.py`. The blocks are an
architecture of their own, so that `calc.memory.activations` writes them; `h`, `q`, `i` and `H` are the tower's, a token
is a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from calc.autograd.polynomial import Segment
from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory import activations
from calc.memory.linears import WIDTH
from calc.memory.run import Run, dimensions, symbol
from calc.models.kernels import replaced_in_tower
from calc.models.vision import Merger, Tower

MASKED = 8  # bytes that say whether a pixel is one of an image, of `pixel_attention_mask`
DOWN = "downsample"  # the convolution that makes a token of its patches
PIXEL = 4  # bytes of a number in `pixel_values`, as the image processor makes them
# the tower's norms before and after its blocks, where it has them
FIRST, LAST = "post_conv_layernorm", "post_layernorm"
ROW = 8  # numbers of which a mask's row has a multiple in the memory-efficient kernel
UNFOLDED = "patch_embedding"  # the linear that reads unfolded pixels
HEAD = 128  # of a resampler's attention
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
        precision="autocast-narrow" if narrow else run.precision,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def block(run: Run, *, first: bool, counted: bool) -> Segment:
    """One block of the tower; `first`: its input needs no gradient, `counted`: its input is a checkpoint."""
    return activations.layer(run, run.arch.specs[0], first=first, counted=counted)


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


@lru_cache(maxsize=1024)
def projector(
    run: Run, tower: Tower, merger: Merger, *, first: bool, counted: bool = False, below: Run | None = None
) -> Segment:
    """The norm of each patch or token, and the linears, after the tower's last norm if it has one.

    Two linears read `merge`² patches at once, with a GELU between, or one alone; one matrix multiplies their average. A
    narrow projector's patches, and those that no norm follows, are put together by two copies. Where blocks attend
    within windows, the output is put into the old order. The output of several blocks is joined by a copy, whose
    gradient theirs are views of. Squares' tokens are laid out as the image is, then joined with newlines. A convolution
    makes a token of its patches before a linear and an MLP. `out` is a token's width over the patches that it is made
    of; `first`: nothing below is trained. `below`: the settings with which the tower's own norm, convolution and
    linears run. `counted`: a block keeps the input, too.
    """
    looks = below is not None and below.trained
    width, out, token = tower.merged, tower.out, Size({"": 1 / tower.merge**2})
    arch = replace(run.arch, activation="gelu", norm_fp32=merger.pooled)
    own = replace(run, arch=arch, replaced=frozenset())
    program = activations.Program(own, first=first, counted=counted)
    program.elements = elements(tower, merger)
    if merger.queries:
        program.elements = {name.partition(".")[2]: n for name, n in program.elements.items()}
    norm, *linears = program.elements if merger.norm else ("", *program.elements)
    plain = merger.pooled or merger.convolved or merger.unfolded or not merger.norm
    program.biased = frozenset(linears) if merger.biased or not plain else frozenset()
    between = tower.blocks.hidden if merger.unfolded else tower.between
    program.widths = {"out": out // tower.merge**2, "between": between // tower.merge**2}
    if merger.queries:
        # a head of 128 for each query and patch, where a slice has merge² patches to a query
        program.widths |= {"wide": out, "scores": out // HEAD * merger.queries}
        program.biased = frozenset({"attn.out_proj"})
    program.row_share = 1 / tower.merge**2
    program.elements |= {name.removesuffix(".weight"): prod(shape) for name, shape, _ in tower.linears}
    program.elements[LAST] = looks * tower.blocks.hidden * (1 + tower.blocks.norm_bias)
    x = program.input
    if merger.queries:
        x = resampled(program, tower, program.layer_norm(x, LAST, Size({"": 1})))
    elif merger.pooled:
        x = pooled(program, tower, program.layer_norm(x, LAST, Size({"": 1})))
        x = program.rms_norm(x, norm, token)
    elif merger.halved:
        # the norm itself copies what lies row by row, and keeps it as it lay
        x = program.tape.op("projector: shuffle", [x], WIDTH, x.b)
        x = program.linear(linears[0], program.layer_norm(x, norm, token), of(between=1))
        kept, gate = program.tape.split("projector: halves", x, [of(between=0.5)] * 2)
        act = program.tape.op("projector: activation", [gate], gate.width, gate.b, saves=[gate])
        x = program.tape.op("projector: product", [act, kept], act.width, act.b, saves=[act, kept])
    elif merger.narrow:
        x = program.activated(
            program.linear(linears[0], program.layer_norm(shuffled(program, x), norm, token), of(out=1))
        )
    elif merger.unfolded:
        x = program.linear(linears[0], shuffled(program, program.norm(x, norm)), of(between=1))
        x = program.activated(program.linear(linears[1], x, of(out=1)))
    elif merger.inner and below:
        program.run = replace(own, trained=below.trained, adapter=below.adapter)
        x = shuffled(program, program.layer_norm(x, LAST, Size({"": 1})))
        for name in merger.inner:
            x = program.activated(program.linear(name, x, of(between=1)))
        program.run = own
    elif merger.averaged:
        x = averaged(program, tower, x)
    elif not merger.norm and len(linears) > 1:
        if len(tower.taken) > 1:
            x = program.tape.op("projector: join blocks", [x], WIDTH * len(tower.taken), x.b, aliases=[x])
        elif tower.classes and x.b == run.compute:  # without the tower's own token; a cast cuts it off, too
            x = program.tape.op("projector: cut", [x], WIDTH, x.b)
        for name in ("side by side", "lay out", "end rows", "join pictures") if tower.crops else ():
            x = program.tape.op(f"projector: {name}", [x], WIDTH, x.b)
        for name in linears[:-1]:
            x = program.activated(program.linear(name, x, of(out=1)))
    elif not merger.norm:
        x = program.layer_norm(x, LAST, Size({"": 1}))
        x = x if merger.biased else shuffled(program, x)
    elif merger.convolved:
        x = convolved(program, tower, program.rms_norm(x, LAST, Size({"": 1})), looks)
        x = program.activated(program.layer_norm(program.linear(linears[0], x, of(out=1)), norm, token))
        x = gated(program, x, linears[1:-1])
    else:
        if tower.resized:
            x = program.layer_norm(x, LAST, Size({"": 1}))
            for name in ("side by side", "join images"):
                x = program.tape.op(f"projector: {name}", [x], WIDTH, x.b)
        x = program.norm(x, norm, token if merger.joined else None)
        x = program.activated(program.linear(linears[0], x, WIDTH))
    project = program.whole if merger.pooled or merger.queries else program.linear
    x = project(linears[-1], x, of(out=1))
    for name in ("lay out", "join") if tower.newline else ():
        x = program.tape.op(f"projector: {name}", [x], x.width, x.b)
    if tower.windowed:
        program.tape.op("projector: order", [x], x.width, x.b, saves=[Tensor(token, 8)])
    products = [] if merger.pooled or merger.queries else tower.products(merger)
    sizes = [inputs * outputs for _, inputs, outputs in products] or [tower.blocks.hidden * out]
    linears = [] if merger.queries else linears
    sizes = sizes[: len(linears)]
    weights = {symbol(name): size for name, size in zip(linears, sizes, strict=True)} | {"W_downsample": width * out}
    weights |= {symbol(name): size for name, size in program.elements.items()} if merger.queries else {}
    weights |= {symbol(name.removesuffix(".weight")): prod(shape) for name, shape, _ in tower.linears}
    adapter = run.adapter or (below and below.adapter)
    rank = adapter.rank if adapter else 0
    return Segment(program.tape, {**dimensions(run.arch, rank), **weights, **program.widths})


def shuffled(program: activations.Program, x: Tensor) -> Tensor:
    """The patches of a token side by side, by a copy of the rows and one of the columns."""
    for name in ("rows", "columns"):
        x = program.tape.op(f"projector: shuffle {name}", [x], WIDTH, x.b)
    return x


def pooled(program: activations.Program, tower: Tower, x: Tensor) -> Tensor:
    """The average of `merge`² patches, of a copy that lies channel by channel, which the average keeps."""
    x = program.tape.op("projector: by channel", [x], WIDTH, x.b)
    return program.tape.op("projector: pool", [x], WIDTH * (1 / tower.merge**2), x.b, saves=[x])


def averaged(program: activations.Program, tower: Tower, x: Tensor) -> Tensor:
    """The average of `merge`² patches behind a norm without weights, as a product with weights of all patches in fp32.

    It is scaled, picked where it is one of an image, and standardised in fp32 (`Gemma4VisionPooler`,
    `Gemma4VisionModel.forward`, `Gemma4MultimodalEmbedder`).
    """
    tape, b, share = program.tape, x.b, 1 / tower.merge**2
    token, wide = Size({"": share}), WIDTH * share
    x = tape.op("projector: blank", [x], WIDTH, b, saves=[Tensor(Size({"": 1}), 1)])
    number = tape.op("projector: one-hot", [], Size({"S": share}), 8)
    weights = tape.op("projector: weights to fp32", [number], Size({"S": share}), 4)
    weights = tape.op("projector: weights", [weights], Size({"S": share}), 4)
    weights.differentiable = False
    x = tape.op("projector: average", [weights, program.cast(x, 4, "projector")], wide, 4, saves=[weights])
    x = program.cast(program.cast(x, b, "projector: average"), 4, "projector: average")
    x = tape.op("projector: scale", [x], wide, 4)
    x = tape.op("projector: pick", [x], wide, 4, saves=[Tensor(token * 2, 8)])
    if tower.standardised:
        x = tape.op("projector: less mean", [x], wide, 4, aliases=[x])
        x = tape.op("projector: standardise", [x], wide, 4)
    x = program.cast(x, b, "projector: standardised")
    return program.cast(program.unweighed(program.cast(x, 4, "projector: norm"), "projector: norm", token), b, "norm")


def resampled(program: activations.Program, tower: Tower, x: Tensor) -> Tensor:
    """Learned queries that attend to the normed, projected patches of their slice, to whose keys positions are added.

    Products of queries, keys and values are parts of one weight; scores of all heads are tensors, and their average is
    returned (`Resampler` of resampler.py beside the weights of MiniCPM-V 2.6, torch `nn.MultiheadAttention`).
    """
    tape, c, trained = program.tape, program.c, program.run.trained
    wide, rows, one = of(wide=1), of(out=1), Size({"": 1 / tower.merge**2})
    weight = tower.out * (tower.out + 1) * trained
    program.row_share, share = 1, program.row_share  # all patches are projected
    y = program.layer_norm(program.linear("kv_proj", x, wide), "ln_kv", Size({"": 1}))
    program.row_share = share
    keys = tape.op("keys: add positions", [y], wide, y.b)

    def product(name: str, of_: Tensor, width: Size) -> Tensor:
        read = program.cast(of_, c, name)
        return tape.op(name, [read], width, c, saves=[read] * trained, weight=weight, multiplies=True)

    k, v = product("keys", keys, wide), product("values", y, wide)
    query = tower.merger.queries * tower.out * trained
    q = tape.op("queries", [], rows, program.run.weight, weight=query)
    q.size = NOTHING  # the parameter itself
    q = tape.op("queries: scale", [product("queries: product", program.layer_norm(q, "ln_q", one), rows)], rows, c)
    scores = of(scores=1)
    a = tape.op("scores", [q, k], scores, c, saves=[q, k], multiplies=True)
    a = tape.op("softmax", [program.cast(a, 4 if program.autocast else c, "softmax")], scores,
                4 if program.autocast else c, saves_out=True)  # fmt: skip
    a = program.cast(a, c, "probabilities")
    mixed = tape.op("mix", [a, v], rows, c, saves=[a, v], multiplies=True)
    mixed = tape.op("mix: contiguous", [mixed], rows, c)
    return program.layer_norm(program.linear("attn.out_proj", mixed, rows), "ln_post", one)


def convolved(program: activations.Program, tower: Tower, x: Tensor, looks: bool) -> Tensor:
    """A token of `merge`² patches that lie side by side, by a convolution that is the tower's own."""
    program.biased |= {DOWN}
    program.elements = {**program.elements, DOWN: looks * (tower.merged + 1) * tower.out}
    return program.whole(DOWN, x, of(out=1))


def gated(program: activations.Program, x: Tensor, names: Sequence[str]) -> Tensor:
    """The input of an MLP's last linear: `silu(gate(x)) · up(x)`."""
    gate, up = names
    wide = of(between=1)
    act = program.tape.op("projector: activation", [g := program.linear(gate, x, wide)], wide, g.b, saves=[g])
    return program.tape.op("projector: product", [act, u := program.linear(up, x, wide)], wide, act.b, saves=[act, u])


def elements(tower: Tower, merger: Merger) -> dict[str, int]:
    """Elements of a projector's modules by name, a bias counted with its weight."""
    found: dict[str, int] = {}
    for name, shape, _ in tower.projector(merger):
        own = name.removesuffix(".weight").removesuffix(".bias").removeprefix("visual.").replace(".*", "")
        found[own] = found.get(own, 0) + prod(shape)
    return found


def added(tower: Tower) -> Size:
    """Bytes a patch that adding a `deep` block's tokens to a layer's output keeps: two indices, each of two numbers.

    Transformers writes the sums over the places of image tokens in a copy of the output (`_deepstack_process`).
    """
    return Size({"": 2 * 2 * 8 / tower.merge**2})
