"""A vision tower's projector, per patch: what makes the language model's tokens of the patches, one way a kind.

Read in transformers 5.23 `models/{qwen2_vl,qwen2_5_vl,qwen3_vl,gemma3,internvl,glm4v,idefics3,llama4,llava,mistral3,
paligemma,pixtral,gemma4,aya_vision,paddleocr_vl}/modeling_*.py`, and beside the weights of Phi-3 Vision,
Kimi-VL and MiniCPM-V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod

from calc.autograd.polynomial import Segment
from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory import activations, tiles
from calc.memory.linears import WIDTH
from calc.memory.run import Run, dimensions, symbol
from calc.models.vision import Merger, MergerKind, Tower

DOWN = "downsample"  # the convolution that makes a token of its patches
LAST = "post_layernorm"  # the tower's norm after its blocks, where it has one
HEAD = 128  # of a resampler's attention
PATCH = Size({"": 1})  # one row a patch


@lru_cache(maxsize=1024)
def projector(
    run: Run, tower: Tower, merger: Merger, *, first: bool, counted: bool = False, below: Run | None = None
) -> Segment:
    """The projector, after the tower's last norm if it has one, and what puts its tokens into the text's order.

    `out` is a token's width over the patches that it is made of; `first`: nothing below is trained. `below`: the
    settings with which the tower's own norm, convolution and linears run. `counted`: a block keeps the input, too.
    """
    on = Projector(run, tower, merger, first=first, counted=counted, below=below)
    on.arranged(on.token_of(WAYS[merger.kind](on, on.input)))
    adapter = run.adapter or (below and below.adapter)
    rank = adapter.rank if adapter else 0
    return Segment(on.tape, {**dimensions(run.arch, rank), **on.weights(), **on.widths})


class Projector(activations.Program):
    """Writes the operations of one projector on a tape; each of `WAYS` goes up to the input of its last linear."""

    def __init__(
        self, run: Run, tower: Tower, merger: Merger, *, first: bool, counted: bool, below: Run | None
    ) -> None:
        """See `projector`."""
        arch = replace(run.arch, activation="gelu", norm_fp32=merger.kind == "pooled")
        super().__init__(replace(run, arch=arch, replaced=frozenset()), first=first, counted=counted)
        self.tower, self.merger, self.below = tower, merger, below
        self.looks = below is not None and below.trained
        patches = tower.merge**2
        self.row_share = tower.filling / patches
        self.token = Size({"": self.row_share})  # one row a token
        modules = elements(tower, merger)
        self.named, *names = [*modules] if merger.norm else ["", *modules]  # the norm's name
        self.names = tuple(names)
        self.biased = frozenset(names if merger.biased else ())
        between = tower.blocks.hidden if merger.kind == "unfolded" else tower.between
        self.widths = {"out": tower.out // patches, "between": between // patches}
        self.towers = {name.removesuffix(".weight"): prod(shape) for name, shape, _ in tower.linears}
        self.elements = modules | self.towers | {LAST: self.looks * tower.blocks.hidden * (1 + tower.blocks.norm_bias)}

    def copied(self, x: Tensor, *names: str) -> Tensor:
        """Copies, one after another."""
        for name in names:
            x = self.tape.op(f"projector: {name}", [x], x.width, x.b)
        return x

    def side_by_side(self, x: Tensor) -> Tensor:
        """The patches of a token side by side, by a copy of the rows and one of the columns."""
        return self.copied(x, "shuffle rows", "shuffle columns")

    def last_norm(self, x: Tensor) -> Tensor:
        """The tower's own norm of each patch."""
        return self.layer_norm(x, LAST, PATCH)

    def with_gelu(self, x: Tensor, name: str, width: Size) -> Tensor:
        """A linear with a GELU behind it."""
        return self.activated(self.linear(name, x, width))

    def mlp_of_patches(self, x: Tensor) -> Tensor:
        """Of an image that was only made smaller, the tower's norm comes before two copies."""
        if self.tower.resized:
            x = self.copied(self.last_norm(x), "side by side", "join images")
        if self.tower.each_image:
            (x,) = self.tape.split("projector: images", self.last_norm(x), [WIDTH])
            x = self.copied(self.norm(x, self.named), "side by side")
            return self.with_gelu(x, self.names[0], WIDTH)
        x = self.norm(x, self.named, self.token if self.merger.joined else None)
        return self.with_gelu(x, self.names[0], WIDTH)

    def narrow(self, x: Tensor) -> Tensor:
        """Its patches are put side by side before the norm."""
        x = self.layer_norm(self.side_by_side(x), self.named, self.token)
        return self.with_gelu(x, self.names[0], of(out=1))

    def halved(self, x: Tensor) -> Tensor:
        """The norm itself copies what lies row by row, and keeps it as it lay."""
        tape = self.tape
        x = self.layer_norm(self.copied(x, "shuffle"), self.named, self.token)
        x = self.linear(self.names[0], x, of(between=1))
        kept, gate = tape.split("projector: halves", x, [of(between=0.5)] * 2)
        act = tape.op("projector: activation", [gate], gate.width, gate.b, saves=[gate])
        return tape.op("projector: product", [act, kept], act.width, act.b, saves=[act, kept])

    def unfolded(self, x: Tensor) -> Tensor:
        """`between` is a patch's width here."""
        x = self.linear(self.names[0], self.side_by_side(self.norm(x, self.named)), of(between=1))
        return self.with_gelu(x, self.names[1], of(out=1))

    def by_convolution(self, x: Tensor) -> Tensor:
        """The tower's own convolution, of patches that lie side by side; `silu(gate(x)) · up(x)` at the end."""
        tower, tape, wide = self.tower, self.tape, of(between=1)
        first, gate, up, _ = self.names
        self.biased |= {DOWN}
        self.elements = {**self.elements, DOWN: self.looks * (tower.merged + 1) * tower.out}
        x = self.whole(DOWN, self.rms_norm(x, LAST, PATCH), of(out=1))
        x = self.activated(self.layer_norm(self.linear(first, x, of(out=1)), self.named, self.token))
        act = tape.op("projector: activation", [g := self.linear(gate, x, wide)], wide, g.b, saves=[g])
        return tape.op("projector: product", [act, u := self.linear(up, x, wide)], wide, act.b, saves=[act, u])

    def flat(self, x: Tensor) -> Tensor:
        """The patches side by side, behind the tower's norm."""
        return self.side_by_side(self.last_norm(x))

    def stacked(self, x: Tensor) -> Tensor:
        """Several blocks' outputs side by side, without the patches that fill a square up."""
        return tiles.stacked(self, self.tower, x)

    def linears(self, x: Tensor) -> Tensor:
        """The output of several blocks is joined by a copy, whose gradient theirs are views of.

        Without the tower's own token patches are copied, unless a cast cuts it off. Squares' tokens are laid out as the
        image is, then joined with newlines.
        """
        tower = self.tower
        if len(tower.taken) > 1:
            x = self.tape.op("projector: join blocks", [x], WIDTH * len(tower.taken), x.b, aliases=[x])
        elif tower.classes and x.b == self.run.compute:
            x = self.copied(x, "cut")
        if tower.crops:
            x = self.copied(x, "side by side", "lay out", "end rows", "join pictures")
        return self.with_gelu(x, self.names[0], of(out=1))

    def pooled(self, x: Tensor) -> Tensor:
        """The average of `merge`² patches, of a copy that lies channel by channel, which the average keeps."""
        x = self.copied(self.last_norm(x), "by channel")
        x = self.tape.op("projector: pool", [x], WIDTH * (1 / self.tower.merge**2), x.b, saves=[x])
        return self.rms_norm(x, self.named, self.token)

    def averaged(self, x: Tensor) -> Tensor:
        """The average of `merge`² patches as a product with weights of all patches in fp32.

        It is scaled, picked where it is one of an image, and standardised in fp32 (`Gemma4VisionPooler`,
        `Gemma4VisionModel.forward`, `Gemma4MultimodalEmbedder`).
        """
        tape, b, share, token = self.tape, x.b, 1 / self.tower.merge**2, self.token
        wide = WIDTH * share
        x = tape.op("projector: blank", [x], WIDTH, b, saves=[Tensor(PATCH, 1)])
        number = tape.op("projector: one-hot", [], Size({"S": share}), 8)
        weights = tape.op("projector: weights to fp32", [number], Size({"S": share}), 4)
        weights = tape.op("projector: weights", [weights], Size({"S": share}), 4)
        weights.differentiable = False
        x = tape.op("projector: average", [weights, self.cast(x, 4, "projector")], wide, 4, saves=[weights])
        x = self.cast(self.cast(x, b, "projector: average"), 4, "projector: average")
        x = tape.op("projector: scale", [x], wide, 4)
        x = tape.op("projector: pick", [x], wide, 4, saves=[Tensor(token * 2, 8)])
        if self.tower.standardised:
            x = tape.op("projector: less mean", [x], wide, 4, aliases=[x])
            x = tape.op("projector: standardise", [x], wide, 4)
        x = self.cast(x, b, "projector: standardised")
        return self.cast(self.unweighed(self.cast(x, 4, "projector: norm"), "projector: norm", token), b, "norm")

    def inner(self, x: Tensor) -> Tensor:
        """The tower's own linears, an activation behind each, with the settings of the tower."""
        assert self.below
        own, self.run = self.run, replace(self.run, trained=self.below.trained, adapter=self.below.adapter)
        x = self.side_by_side(self.last_norm(x))
        for name in self.merger.inner:
            x = self.with_gelu(x, name, of(between=1))
        self.run = own
        return x

    def resampled(self, x: Tensor) -> Tensor:
        """Learned queries that attend to the normed, projected patches of their slice, to whose keys positions are
        added.

        Products of queries, keys and values are parts of one weight; scores of all heads are tensors, and their average
        is returned (`Resampler` of resampler.py beside the weights of MiniCPM-V 2.6, torch `nn.MultiheadAttention`).
        """
        tape, c, tower, trained = self.tape, self.c, self.tower, self.run.trained
        # a head for each query and patch, where a slice has merge² patches to a query
        self.widths |= {"wide": tower.out, "scores": tower.out // HEAD * self.merger.queries}
        self.biased = frozenset({"attn.out_proj"})
        wide, rows, scores = of(wide=1), of(out=1), of(scores=1)
        weight = tower.out * (tower.out + 1) * trained
        self.row_share, share = 1, self.row_share  # all patches are projected
        y = self.layer_norm(self.linear("kv_proj", self.last_norm(x), wide), "ln_kv", PATCH)
        self.row_share = share
        keys = tape.op("keys: add positions", [y], wide, y.b)

        def product(name: str, of_: Tensor, width: Size) -> Tensor:
            read = self.cast(of_, c, name)
            return tape.op(name, [read], width, c, saves=[read] * trained, weight=weight, multiplies=True)

        k, v = product("keys", keys, wide), product("values", y, wide)
        q = tape.op("queries", [], rows, self.run.weight, weight=self.merger.queries * tower.out * trained)
        q.size = NOTHING  # the parameter itself
        q = product("queries: product", self.layer_norm(q, "ln_q", self.token), rows)
        q = tape.op("queries: scale", [q], rows, c)
        a = tape.op("scores", [q, k], scores, c, saves=[q, k], multiplies=True)
        soft = 4 if self.autocast else c
        a = tape.op("softmax", [self.cast(a, soft, "softmax")], scores, soft, saves_out=True)
        a = self.cast(a, c, "probabilities")
        mixed = tape.op("mix", [a, v], rows, c, saves=[a, v], multiplies=True)
        mixed = tape.op("mix: contiguous", [mixed], rows, c)
        return self.layer_norm(self.linear("attn.out_proj", mixed, rows), "ln_post", self.token)

    def token_of(self, x: Tensor) -> Tensor:
        """The last linear, or a matrix that is no module's."""
        project = self.whole if self.merger.kind in ("pooled", "queries") else self.linear
        return project(self.names[-1], x, of(out=self.tower.filling))

    def arranged(self, x: Tensor) -> Tensor:
        """Rows end with newlines, and what lay in windows is put into the old order."""
        if self.tower.newline:
            x = self.copied(x, "lay out", "join")
        if self.tower.each_image:
            x = self.copied(x, "join images")
        if self.tower.windowed:
            x = self.tape.op("projector: order", [x], x.width, x.b, saves=[Tensor(self.token, 8)])
        return x

    def weights(self) -> dict[str, int]:
        """Elements of each weight, by its symbol."""
        tower = self.tower
        if self.merger.kind == "queries":
            found = {symbol(name): size for name, size in self.elements.items()}
        elif self.merger.kind == "pooled":
            found = {symbol(self.names[-1]): tower.blocks.hidden * tower.out}
        else:
            products = tower.products(self.merger)
            found = {symbol(name): i * o for name, (_, i, o) in zip(self.names, products, strict=True)}
        own = {symbol(name): size for name, size in self.towers.items()}
        return {**found, "W_downsample": tower.merged * tower.out, **own}


WAYS: Mapping[MergerKind, Callable[[Projector, Tensor], Tensor]] = {
    "mlp": Projector.mlp_of_patches,
    "narrow": Projector.narrow,
    "halved": Projector.halved,
    "unfolded": Projector.unfolded,
    "convolved": Projector.by_convolution,
    "flat": Projector.flat,
    "each": Projector.last_norm,
    "stacked": Projector.stacked,
    "linears": Projector.linears,
    "pooled": Projector.pooled,
    "averaged": Projector.averaged,
    "inner": Projector.inner,
    "queries": Projector.resampled,
}


def elements(tower: Tower, merger: Merger) -> dict[str, int]:
    """Elements of a projector's modules by name, a bias counted with its weight."""
    found: dict[str, int] = {}
    for name, shape, _ in tower.projector(merger):
        own = name.removesuffix(".weight").removesuffix(".bias").removeprefix("visual.").replace(".*", "")
        own = own.partition(".")[2] if merger.kind == "queries" else own
        found[own] = found.get(own, 0) + prod(shape)
    return found
