"""The vision tower of a model that reads images, and the projector that hands its output to the language model.

Read in transformers 5.23 `models/{qwen2_vl,qwen2_5_vl,qwen3_vl,gemma3,siglip,internvl}/{configuration,modeling}_*.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from calc.models.architecture import Architecture


class Merger(NamedTuple):
    """The names of a projector's norm and of its linears, below the projector's own.

    Two linears with a bias read the patches of a token side by side, or one without reads their average (`pooled`).
    `joined`: the norm sees the patches of a token as one row, not one by one. `narrow`: it is PyTorch's own, and the
    first linear's output is as wide as a token (InternVL).
    """

    name: str
    norm: str
    linears: tuple[str, ...]
    joined: bool = False
    pooled: bool = False
    narrow: bool = False


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
    side of the square to which every image is resized; 0: it keeps its shape, within `limits`. `embedding` and `table`
    are the names of what turns pixels into patches, `last_norm` that of a norm after the last block. `deep`: the blocks
    whose output goes through a projector of its own and is added to the first layers' output (DeepStack). `hooked`:
    the patches are an input embedding to Transformers, which makes them require a gradient with those of tokens.
    `classes`: the name of a token of the tower's own before the patches of each image, whose table of positions is a
    bare parameter with a row more; `tiles`: the most squares into which an image is cut, beside one of all of it
    (InternVL).
    `video_limits` are those of all frames of a video together; None: each frame is resized as an image is.
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
    embedding: str = "visual.patch_embed.proj"
    table: str = "visual.pos_embed"
    last_norm: str = ""
    deep: tuple[int, ...] = ()
    hooked: bool = False
    classes: str = ""
    tiles: int = 1
    video_limits: Pixels | None = None

    def bounds(self, frames: int) -> Pixels:
        """The limits of an image, or of a video of so many frames."""
        return self.video_limits if self.video_limits and frames > 1 else self.limits

    @property
    def deep_merger(self) -> Merger:
        """The projector of a `deep` block."""
        return self.merger._replace(name="visual.deepstack_merger_list.*", joined=True)

    @property
    def pixels(self) -> int:
        """Numbers that describe one patch: the width of `pixel_values`."""
        return self.channels * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """The width of the patches that become one token."""
        return self.blocks.hidden * self.merge**2

    @property
    def patches(self) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of each tensor of the tower outside its blocks."""
        h, kernel = self.blocks.hidden, (self.patch, self.patch)
        yield (
            f"{self.embedding}.weight",
            (h, self.channels, *((self.frames, *kernel) if self.frames > 1 else kernel)),
            "patches",
        )
        if self.patch_bias:
            yield f"{self.embedding}.bias", (h,), "bias"
        if self.classes:
            yield self.classes, (1, 1, h), "patches"
            yield self.table, (1, self.positions + 1, h), "patches"
        elif self.positions:
            yield f"{self.table}.weight", (self.positions, h), "patches"
        if self.last_norm:
            yield f"{self.last_norm}.weight", (h,), "norm"
            yield f"{self.last_norm}.bias", (h,), "norm"

    def projector(self, merger: Merger) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of each tensor of a projector."""
        h, width = self.blocks.hidden, self.merged
        normed = width if merger.joined else h
        yield f"{merger.name}.{merger.norm}.weight", (normed,), "norm"
        if merger.pooled:
            (name,) = merger.linears
            yield f"{merger.name}.{name}", (h, self.out), "matrix"
            return
        if self.blocks.norm_bias or merger.narrow:
            yield f"{merger.name}.{merger.norm}.bias", (normed,), "norm"
        between = self.out if merger.narrow else width
        for name, inputs, out in zip(merger.linears, (width, between), (between, self.out), strict=True):
            yield f"{merger.name}.{name}.weight", (out, inputs), "linear"
            yield f"{merger.name}.{name}.bias", (out,), "bias"
