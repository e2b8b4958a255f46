"""The vision tower of a model that reads images, and the projector that hands its output to the language model.

Read in transformers 5.23 `{configuration,modeling}_*.py` of `models/{qwen2_vl,qwen2_5_vl,qwen3_vl,gemma3,siglip,
internvl,glm4v,idefics3,llama4,llava,llava_next,llava_onevision,smolvlm,mistral3,paligemma,pixtral,clip,gemma4,
aya_vision,mllama,paddleocr_vl,glm_ocr,lighton_ocr}`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, assert_never

if TYPE_CHECKING:
    from calc.models.architecture import Architecture, LayerSpec

EIGHTH = 8  # patches of a square of Llama 3.2 Vision are filled up to a multiple of it

# What a projector does with the patches of a token, `merge`² neighbours:
# - mlp: a norm, then two linears read them side by side, a GELU between (Qwen-VL)
# - narrow: the same with PyTorch's own norm, and a first linear as narrow as a token (InternVL)
# - halved: the same, and the first linear makes a gate and what it weighs side by side (Aya Vision)
# - unfolded: a norm of each, then a linear makes a row as wide as a patch of them before two others (Mistral 3)
# - convolved: a convolution makes a token, then come a linear, PyTorch's own norm, and an MLP with a gate (GLM-4V)
# - flat: one linear reads them side by side, without a norm (Idefics 3)
# - each: one linear makes a token of each patch (PaliGemma)
# - stacked: one linear reads the outputs of several blocks side by side, those before the last in one copy, and makes a
#   row of each patch, to which layers of the language model attend (Llama 3.2 Vision)
# - linears: two linears, without a norm (LLaVA, Pixtral 12B, Phi-3 Vision)
# - pooled: one matrix multiplies their average, behind a norm (Gemma 3)
# - averaged: one linear reads their average, behind a norm without weights (Gemma 4)
# - inner: linears of the tower's own read them side by side before the one linear (Llama 4)
# - queries: learned queries, a token each, attend to all patches of a slice (MiniCPM-V)
MergerKind = Literal[
    "mlp", "narrow", "halved", "unfolded", "convolved", "flat", "each", "stacked", "linears", "pooled", "averaged",
    "inner", "queries",
]  # fmt: skip
BIASED: frozenset[MergerKind] = frozenset(
    {"mlp", "narrow", "halved", "each", "stacked", "linears"}
)  # linears have a bias


class Merger(NamedTuple):
    """The names of a projector's norm, if it has one, and of its linears, below the projector's own.

    `joined`: the norm sees the patches of a token as one row, not one by one. `convolution`: the name of the one that
    makes a token, and `inner` the names of the tower's own linears, an activation behind each, of these kinds.
    `queries`: their number for a slice.
    """

    name: str
    norm: str
    linears: tuple[str, ...]
    kind: MergerKind = "mlp"
    joined: bool = False
    convolution: str = ""
    inner: tuple[str, ...] = ()
    queries: int = 0

    @property
    def biased(self) -> bool:
        """True if its linears have a bias."""
        return self.kind in BIASED

    @property
    def one_each(self) -> bool:
        """True if it makes a token of what the tower makes of each patch."""
        return self.kind in ("each", "stacked", "linears")


class Pixels(NamedTuple):
    """The fewest and the most pixels to which an image processor resizes, as the models' publisher sets it up."""

    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision transformer over patches, and a projector that merges `merge`² neighbouring patches into one token.

    `blocks` are its layers as an architecture of their own: hidden size, heads and widths are the tower's. A patch is
    `patch`² pixels of `channels` colours in `frames` frames; an image counts as `frames` equal ones. `windowed`: most
    blocks attend within windows, in whose order the patches lie meanwhile. `positions`: rows of a learned embedding of
    positions, of which an image's patches have one each, or (`interpolated`) a weighted sum; 0: there is none. `edge`:
    side of the square to which every image is resized; 0: it keeps its shape, within `limits`. `each_image`: the
    projector takes one image after the other, whose patches do not lie token by token (PaddleOCR-VL). `squared`: a
    trainer has made such a square of it, bars included, before the processor sees it. `embedding` and `table`
    are the names of what turns pixels into patches, `first_norm` that of a norm before positions are added, `last_norm`
    that of one after the last block. `sampled`: the table of positions is a picture that a bicubic sampling reads in
    fp32 (GLM-4V). `between`: the width of a projector's MLP, where it has a gate. `deep`: the blocks
    whose output goes through a projector of its own, by `deep_name`, and is added to the first layers' output
    (DeepStack). `hooked`:
    the patches are an input embedding to Transformers, which makes them require a gradient with those of tokens.
    `classes`: the name of a token of the tower's own before the patches of each image, whose table of positions is a
    bare parameter with a row more; `tiles`: the most squares into which an image is cut, beside one of all of it
    (InternVL). `ragged`: of squares that may be smaller those without a pixel are left out, and each patch looks its
    position up by its place; `along`: the squares along an image's longer side, into which every image is cut, beside
    one of all of it (Idefics 3). `longest`: the side beyond which an image is made smaller; 0: `limits` alone say so.
    `framed`: images are padded to the largest of them, and the patches of all lie in one row under one mask, unless
    FlashAttention's package reads their lengths (Pixtral). `flattened`: pixels, which the processor makes 16 bits wide,
    are unfolded before a linear, and the token of the tower's own comes last, before a norm of patches with their
    positions; `tiles` then are those of the canvas on which the image is least resized (Llama 4). `grids`: heights and
    widths in pixels, to the best of which an image is resized in its own shape before it is cut into squares, beside
    one of all of it; each row of their tokens, without those of padding alone, ends with a `newline`, a parameter of
    that name (LLaVA-NeXT). `most`: so many squares' tokens are left of an image with many more of them, by an
    interpolation, which leaves a fourth of a video's frame, too; several images of a sample are not cut
    (LLaVA-OneVision). `prefix`: of the tensors' names. `taken`: the blocks, from 1 on, whose output the projector reads
    side by side, where it is not that of a norm behind the last one. `unread`: those behind the last of these, which
    are not among `blocks`; they and the norm behind them get no gradients (LLaVA, whose table of positions is an
    embedding for all that). `head`: the name of what pools the patches, which runs, and whose output nothing reads
    (SigLIP).
    `video_limits` are those of all frames of a video together, `frame_limits` those of each (Qwen2-VL); None of both:
    each frame is resized as an image is. `filled`:
    an image, or frame, is enlarged or made smaller to the most pixels of its limits and, where its shape leaves some
    over, filled up with empty patches, which a mask leaves out; a linear reads the pixels of each patch, the table has
    rows for either direction, and tokens may be `standardised` by numbers that are not trained (Gemma 4). `resized`:
    the table is a picture that an interpolation resizes for each image; images are only made smaller, then filled up to
    whole tokens, all lie in one row under one mask, unless FlashAttention's package reads their lengths, and blocks are
    never run again (Kimi-VL). `crops`: the most squares into which an image is cut, beside one of all of it; all of
    them run, those without a part of the image, too, and four patches become a token, before whose linears each row of
    tokens ends with one parameter and both pictures are parted by another (Phi-3 Vision). `sliced`: the side of the
    square that a slice of an image has about as many pixels as, of its own shape; without FlashAttention's package
    patches of a slice attend by eager attention (MiniCPM-V). `crossed`: layers of the language model attend to what the
    projector makes, of which none lies among the text; an image always has `tiles` squares, empty ones, too, which see
    each other under a mask, each filled up to a multiple of eight patches; a square's patches get positions of their
    own and rows of `ratios` tables by the image's shape, and the last `crossed` blocks are a transformer of their own
    behind a norm, whose outputs numbers weigh; no block is run again (Llama 3.2 Vision).
    """

    blocks: Architecture
    limits: Pixels
    merger: Merger
    patch: int = 14
    frames: int = 2
    channels: int = 3
    merge: int = 2
    out: int = 0  # hidden size of the language model
    windowed: bool = False
    patch_bias: bool = False
    positions: int = 0
    interpolated: bool = False
    edge: int = 0
    each_image: bool = False
    squared: bool = False
    embedding: str = "visual.patch_embed.proj"
    table: str = "visual.pos_embed"
    first_norm: str = ""
    last_norm: str = ""
    sampled: bool = False
    between: int = 0
    deep: tuple[int, ...] = ()
    deep_name: str = "visual.deepstack_merger_list.*"
    hooked: bool = False
    classes: str = ""
    tiles: int = 1
    ragged: bool = False
    along: int = 0
    longest: int = 0
    framed: bool = False
    flattened: bool = False
    grids: tuple[tuple[int, int], ...] = ()
    newline: str = ""
    most: int = 0
    prefix: str = "model."
    taken: tuple[int, ...] = ()
    unread: int = 0
    head: str = ""
    filled: bool = False
    resized: bool = False
    crops: int = 0
    sliced: int = 0
    crossed: int = 0
    ratios: int = 0
    standardised: bool = False
    video_limits: Pixels | None = None
    frame_limits: Pixels | None = None

    def bounds(self, frames: int) -> Pixels:
        """The limits of an image, or of a video of so many frames."""
        return (self.video_limits or self.frame_limits or self.limits) if frames > 1 else self.limits

    @property
    def alone(self) -> bool:
        """True if patches see those of their own image, or slice, in a product of scores that counts."""
        return self.filled or self.sliced > 0 or self.crossed > 0

    @property
    def filling(self) -> float:
        """Patches of a square, its own token included, over those to which it is filled up."""
        rows = self.positions + bool(self.classes)
        return rows / (-(-rows // EIGHTH) * EIGHTH) if self.crossed else 1.0

    def placed(self, name: str, spec: LayerSpec) -> str:
        """The name of a block's tensor, in the transformer to which blocks of the kind `spec` belong."""
        return name.replace(".transformer.", ".global_transformer.") if self.crossed and spec.weighed else name

    @property
    def deep_merger(self) -> Merger:
        """The projector of a `deep` block."""
        return self.merger._replace(name=self.deep_name, joined=True)

    @property
    def pixels(self) -> int:
        """Numbers that describe one patch: the width of `pixel_values`."""
        return self.channels * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """The width of the patches that become one token, of all blocks that are read."""
        return self.blocks.hidden * self.merge**2 * max(1, len(self.taken))

    @property
    def patches(self) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of each tensor of the tower outside its blocks."""
        h, kernel = self.blocks.hidden, (self.patch, self.patch)
        if not self.unfolds:
            yield (
                f"{self.embedding}.weight",
                (h, self.channels, *((self.frames, *kernel) if self.frames > 1 else kernel)),
                "patches",
            )
        if self.patch_bias:
            yield f"{self.embedding}.bias", (h,), "bias"
        if self.crossed:
            yield from self.by_shape(h)
        elif self.classes:
            one = () if self.flattened or self.taken else (1,)
            yield self.classes, (*one, *one, h), "patches"
            yield self.table + ".weight" * bool(self.taken), (*one, self.positions + 1, h), "patches"
        elif self.filled:
            yield self.table, (2, self.positions, h), "patches"
        elif self.positions:
            yield f"{self.table}.weight", (self.positions, h), "patches"
        for norm in filter(None, (self.first_norm, self.last_norm * (not self.taken or self.crossed > 0))):
            yield from self.normed(norm)
        if name := self.merger.convolution:
            yield f"{name}.weight", (self.out, h, self.merge, self.merge), "patches"
            yield f"{name}.bias", (self.out,), "bias"

    def by_shape(self, h: int) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """The same of a square's own token, and of what is added to its patches, some of it by the image's shape."""
        rows, position = self.positions + 1, "vision_model.gated_positional_embedding"
        yield self.classes, (h,), "patches"
        yield f"{position}.gate", (1,), "patches"
        yield f"{position}.embedding", (rows, h), "patches"
        yield f"{position}.tile_embedding.weight", (self.ratios, self.tiles * rows * h), "patches"
        for when in ("pre", "post"):
            yield f"vision_model.{when}_tile_positional_embedding.gate", (1,), "patches"
            yield (
                f"vision_model.{when}_tile_positional_embedding.embedding.weight",
                (self.ratios, self.tiles * h),
                "patches",
            )

    @property
    def unfolds(self) -> bool:
        """True if a linear reads the pixels of each patch, and no convolution."""
        return self.flattened or self.filled

    def normed(self, norm: str) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of each tensor of a norm of patches."""
        for end in ("weight", "bias") if self.blocks.norm_bias else ("weight",):
            yield f"{norm}.{end}", (self.blocks.hidden,), "norm"

    @property
    def idle(self) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of each tensor behind the blocks that gets no gradients."""
        h, wide = self.blocks.hidden, self.blocks.intermediate
        if self.taken and not self.crossed:
            yield from self.normed(self.last_norm)
        if self.head:
            yield f"{self.head}.probe", (1, 1, h), "patches"
            yield f"{self.head}.attention.in_proj_weight", (3 * h, h), "matrix"
            yield f"{self.head}.attention.in_proj_bias", (3 * h,), "bias"
            yield from self.normed(f"{self.head}.layernorm")
            for name, outputs, inputs in ("attention.out_proj", h, h), ("mlp.fc1", wide, h), ("mlp.fc2", h, wide):
                yield f"{self.head}.{name}.weight", (outputs, inputs), "linear"
                yield f"{self.head}.{name}.bias", (outputs,), "bias"

    @property
    def beside(self) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of what stands among an image's tokens, which is trained as the projector is."""
        if self.crops:
            yield "glb_GN", (1, 1, self.merged), "matrix"
            yield "sub_GN", (1, 1, 1, self.merged), "matrix"
        if self.newline:
            yield self.newline, (self.out,), "matrix"

    @property
    def linears(self) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of each linear of the tower's own outside its blocks."""
        if self.unfolds:
            yield f"{self.embedding}.weight", (self.blocks.hidden, self.pixels), "linear"
        for name, inputs in zip(self.merger.inner, (self.merged, self.between), strict=False):
            yield f"{name}.weight", (self.between, inputs), "linear"

    def projector(self, merger: Merger) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of each tensor of a projector."""
        h, width, out = self.blocks.hidden, self.merged, self.out
        if merger.kind == "queries":
            yield from self.resampler(merger)
            return
        normed = out if merger.kind == "convolved" else width if merger.joined else h
        if merger.norm:
            yield f"{merger.name}.{merger.norm}.weight", (normed,), "norm"
        if merger.kind == "pooled":
            (name,) = merger.linears
            yield f"{merger.name}.{name}", (h, out), "matrix"
            return
        if merger.norm and (self.blocks.norm_bias or merger.kind in ("narrow", "convolved")):
            yield f"{merger.name}.{merger.norm}.bias", (normed,), "norm"
        for name, inputs, outputs in self.products(merger):
            own = f"{merger.name}.{name}".removesuffix(".")
            yield f"{own}.weight", (outputs, inputs), "linear"
            if merger.biased:
                yield f"{own}.bias", (outputs,), "bias"

    def resampler(self, merger: Merger) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """The same of one with learned queries; products within attention are no modules (`nn.MultiheadAttention`)."""
        h, out = self.blocks.hidden, self.out
        yield f"{merger.name}.query", (merger.queries, out), "matrix"
        yield f"{merger.name}.kv_proj.weight", (out, h), "linear"
        yield f"{merger.name}.attn.in_proj_weight", (3 * out, out), "matrix"
        yield f"{merger.name}.attn.in_proj_bias", (3 * out,), "bias"
        yield f"{merger.name}.attn.out_proj.weight", (out, out), "linear"
        yield f"{merger.name}.attn.out_proj.bias", (out,), "bias"
        for norm in ("ln_q", "ln_kv", "ln_post"):
            for end in ("weight", "bias"):
                yield f"{merger.name}.{norm}.{end}", (out,), "norm"
        yield f"{merger.name}.proj", (out, out), "matrix"

    def products(self, merger: Merger) -> Iterable[tuple[str, int, int]]:
        """Name, inputs and outputs of each linear of a projector, but for one of `queries` and the `pooled` matrix."""
        h, width, out, wide = self.blocks.hidden, self.merged, self.out, self.between
        match merger.kind:
            case "queries" | "pooled":
                return []
            case "mlp":
                sizes = [(width, width), (width, out)]
            case "narrow":
                sizes = [(width, out), (out, out)]
            case "halved":
                sizes = [(width, wide), (wide // 2, out)]
            case "unfolded":
                sizes = [(width, h), (h, out), (out, out)]
            case "convolved":
                sizes = [(out, out), (out, wide), (out, wide), (wide, out)]
            case "flat" | "each" | "stacked":
                sizes = [(width, out)]
            case "linears":
                sizes = [(width, out), (out, out)]
            case "averaged":
                sizes = [(h, out)]
            case "inner":
                sizes = [(wide, out)]
            case _ as never:
                assert_never(never)
        return [(name, *size) for name, size in zip(merger.linears, sizes, strict=True)]
