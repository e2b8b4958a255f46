"""The images of a sample: the patches that a vision tower reads of them, and the tokens that they become."""

from __future__ import annotations

import math
from dataclasses import dataclass

from calc.models.vision import Tower
from calc.scenario.words import Freeze

WIDEST = 200  # the longer side over the shorter, which the processor does not exceed


@dataclass(frozen=True, slots=True)
class Images:
    """`count` images of `width` x `height` pixels in each sample, resized to between `min_pixels` and `max_pixels`.

    `frames`: of a video that is sampled; 1 is an image. `freeze` names the frozen parts, `checkpointing` says if the
    tower's blocks are run again for backward; None: if the language model's layers are.
    """

    count: int
    width: int
    height: int
    min_pixels: int
    max_pixels: int
    frames: int
    freeze: Freeze
    checkpointing: bool | None

    def resized(self, tower: Tower) -> tuple[int, int]:
        """Height and width as the model sees them: multiples of a token's side, or a square of one size.

        transformers 5.23 `smart_resize` of `models/qwen2_vl/image_processing_qwen2_vl.py` and, for videos, of
        `models/qwen3_vl/video_processing_qwen3_vl.py`; `models/gemma3/image_processing_gemma3.py` without
        `do_pan_and_scan`, which is off by default.
        """
        if tower.edge:
            return tower.edge, tower.edge
        side = tower.patch * tower.merge
        height, width = (round(edge / side) * side for edge in (self.height, self.width))
        together = tower.video_limits is not None and self.frames > 1
        rounded = round(self.frames / tower.frames) * tower.frames if together else 1
        given = self.height * self.width * (self.frames if together else 1)
        if rounded * height * width > self.max_pixels:
            shrink = math.sqrt(given / self.max_pixels)
            return tuple([max(side, math.floor(e / shrink / side) * side) for e in (self.height, self.width)])  # type: ignore[return-value]
        if rounded * height * width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / given)
            return tuple([math.ceil(e * grow / side) * side for e in (self.height, self.width)])  # type: ignore[return-value]
        return height, width

    def patches(self, tower: Tower) -> int:
        """Patches of one sample; a tower reads `tower.frames` frames at once, the last of them twice if it is alone."""
        height, width = self.resized(tower)
        return self.count * -(-self.frames // tower.frames) * (height // tower.patch) * (width // tower.patch)

    def tokens(self, tower: Tower) -> int:
        """Tokens of one sample that stand for its images."""
        return self.patches(tower) // tower.merge**2
