"""The vision tower of a model that reads images, and the projector that hands its output to the language model.

Read in transformers 5.23 `models/qwen2_5_vl/{configuration,modeling}_qwen2_5_vl.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calc.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision transformer over patches, and a projector that merges `merge`² neighbouring patches into one token.

    `blocks` are its layers as an architecture of their own: hidden size, heads and widths are the tower's. A patch is
    `patch`² pixels of `channels` colours in `frames` frames; an image counts as `frames` equal ones.
    """

    blocks: Architecture
    patch: int = 14
    frames: int = 2
    channels: int = 3
    merge: int = 2
    out: int = 0  # hidden size of the language model

    @property
    def pixels(self) -> int:
        """Numbers that describe one patch: the width of `pixel_values`."""
        return self.channels * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """The width of the patches that become one token."""
        return self.blocks.hidden * self.merge**2

    @property
    def outside(self) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Name, shape and kind of each tensor outside the blocks: the embedding of patches, and the projector."""
        width, side = self.merged, self.patch
        yield "patch_embed.proj.weight", (self.blocks.hidden, self.channels, self.frames, side, side), "patches"
        yield "merger.ln_q.weight", (self.blocks.hidden,), "norm"
        yield "merger.mlp.0.weight", (width, width), "linear"
        yield "merger.mlp.0.bias", (width,), "bias"
        yield "merger.mlp.2.weight", (self.out, width), "linear"
        yield "merger.mlp.2.bias", (self.out,), "bias"
