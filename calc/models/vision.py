"""The vision tower of a model that reads images, and the projector that hands its output to the language model.

Read in transformers 5.23 `models/{qwen2_vl,qwen2_5_vl,qwen3_vl}/{configuration,modeling}_*.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from calc.models.architecture import Architecture


class Merger(NamedTuple):
    """The names of a projector's norm and of its two linears, below the projector's own.

    `joined`: the norm sees the patches of a token as one row, not one by one.
    """

    name: str
    norm: str
    first: str
    second: str
    joined: bool = False


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
    positions, which is interpolated to an image's patches; 0: there is none. `deep`: the blocks whose output goes
    through a projector of its own and is added to the first layers' output (DeepStack). `hooked`: the
    patches are an input embedding to Transformers, which makes them require a gradient with those of tokens.
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
    deep: tuple[int, ...] = ()
    hooked: bool = False

    @property
    def deep_merger(self) -> Merger:
        """The projector of a `deep` block."""
        return self.merger._replace(name="deepstack_merger_list.*", joined=True)

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
        """Name, shape and kind of each tensor that turns pixels into patches."""
        h, side = self.blocks.hidden, self.patch
        yield "patch_embed.proj.weight", (h, self.channels, self.frames, side, side), "patches"
        if self.patch_bias:
            yield "patch_embed.proj.bias", (h,), "bias"
        if self.positions:
            yield "pos_embed.weight", (self.positions, h), "patches"

    def projector(self, merger: Merger) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of each tensor of a projector."""
        width = self.merged
        normed = width if merger.joined else self.blocks.hidden
        yield f"{merger.name}.{merger.norm}.weight", (normed,), "norm"
        if self.blocks.norm_bias:
            yield f"{merger.name}.{merger.norm}.bias", (normed,), "norm"
        for name, out in (merger.first, width), (merger.second, self.out):
            yield f"{merger.name}.{name}.weight", (out, width), "linear"
            yield f"{merger.name}.{name}.bias", (out,), "bias"
