"""The images of a sample: the patches that a vision tower reads of them, and the tokens that they become."""

from __future__ import annotations

import math
from dataclasses import dataclass

from calc.models.vision import EIGHTH, Tower
from calc.scenario.words import Freeze

WIDEST = 200  # the longer side over the shorter, which the processor does not exceed


@dataclass(frozen=True, slots=True)
class Images:
    """`count` images of `width` x `height` pixels in each sample, resized to between `min_pixels` and `max_pixels`.

    `frames`: of a video that is sampled; 1 is an image. `freeze` names the frozen parts, `checkpointing` says if the
    tower's blocks are run again for backward; None: if the language model's layers are. `train_whole`: beside adapters,
    tower and projector are trained whole.
    """

    count: int
    width: int
    height: int
    min_pixels: int
    max_pixels: int
    frames: int
    freeze: Freeze
    checkpointing: bool | None
    train_whole: bool = False

    @property
    def size(self) -> str:
        """Width and height in words, as a message names them."""
        return f"{self.width} x {self.height}"

    def most(self, tower: Tower) -> int:
        """The most pixels that are left: of a frame that has limits of its own, no fewer than 1.05 times the fewest.

        qwen_vl_utils 0.0.11 `vision_process.py:405`; transformers 5.23 `models/qwen2_vl/video_processing_qwen2_vl.py`.
        """
        floor = int(self.min_pixels * 1.05) if tower.frame_limits and self.frames > 1 else 0
        return max(self.max_pixels, floor)

    def resized(self, tower: Tower) -> tuple[int, int]:
        """Height and width as the model sees them: multiples of a token's side, or a square of one size.

        transformers 5.23 `smart_resize` of `models/qwen2_vl/image_processing_qwen2_vl.py` and, for videos, of
        `models/qwen3_vl/video_processing_qwen3_vl.py`; `get_resize_output_image_size` of
        `models/pixtral/image_processing_pixtral.py`; `models/gemma3/image_processing_gemma3.py` without
        `do_pan_and_scan`, which is off by default.
        """
        if tower.edge:
            return tower.edge, tower.edge
        side = tower.patch * tower.merge
        if tower.filled:
            return self.scaled(side)
        if tower.sliced:
            return max(self.slices(tower), key=math.prod)
        if tower.longest:
            shrink = max(1, self.height / tower.longest, self.width / tower.longest)
            return tuple([side * math.ceil(math.floor(e / shrink) / side) for e in (self.height, self.width)])  # type: ignore[return-value]
        if tower.resized:
            return self.shrunk(tower.patch, side)
        height, width = (round(edge / side) * side for edge in (self.height, self.width))
        together = tower.video_limits is not None and self.frames > 1
        rounded = round(self.frames / tower.frames) * tower.frames if together else 1
        given = self.height * self.width * (self.frames if together else 1)
        if rounded * height * width > (most := self.most(tower)):
            shrink = math.sqrt(given / most)
            return tuple([max(side, math.floor(e / shrink / side) * side) for e in (self.height, self.width)])  # type: ignore[return-value]
        if rounded * height * width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / given)
            return tuple([math.ceil(e * grow / side) * side for e in (self.height, self.width)])  # type: ignore[return-value]
        return height, width

    def shrunk(self, patch: int, side: int) -> tuple[int, int]:
        """The same where an image of more patches than `max_pixels` have is made smaller, then filled up.

        `rescale` of `image_processing_kimi_vl.py` beside the weights of Kimi-VL-A3B-Instruct.
        """
        patches, most = (self.height // patch) * (self.width // patch), self.max_pixels // patch**2
        shrink = math.sqrt(patches / most) if patches > most else 1
        height, width = (side * math.ceil(math.floor(edge / shrink) / side) for edge in (self.height, self.width))
        return height, width

    def scaled(self, side: int) -> tuple[int, int]:
        """The same where an image is made as large as `max_pixels` allow, in multiples of `side`, at least one.

        transformers 5.23 `models/gemma4/image_processing_gemma4.py`, `get_aspect_ratio_preserving_size`.
        """
        scale = math.sqrt(self.max_pixels / (self.height * self.width))
        height, width = (math.floor(edge * scale / side) * side for edge in (self.height, self.width))
        longest = self.max_pixels // side**2
        if not height:
            return side, side * min(self.width // self.height, longest)
        return (height, width) if width else (side * min(self.height // self.width, longest), side)

    def patches(self, tower: Tower) -> int:
        """Patches of one sample; a tower reads `tower.frames` frames at once, the last of them twice if it is alone."""
        return self.count * -(-self.frames // tower.frames) * self.tiles(tower) * self.row(tower)

    def row(self, tower: Tower) -> int:
        """Patches of an image, a tile or a frame, with those that fill it up."""
        if tower.filled:
            return self.max_pixels // tower.patch**2
        height, width = self.resized(tower)
        number = (height // tower.patch) * (width // tower.patch) + bool(tower.classes)
        return -(-number // EIGHTH) * EIGHTH if tower.crossed else number

    def read(self, tower: Tower) -> int:
        """Patches of one sample to which layers of the language model attend."""
        return self.count * tower.tiles * (tower.positions + 1) if tower.crossed else 0

    def short(self, tower: Tower) -> bool:
        """True if images are filled up, as their shape leaves some of the patches over."""
        height, width = self.resized(tower)
        return tower.filled and height * width < self.row(tower) * tower.patch**2

    def shape(self, tower: Tower) -> tuple[int, int]:
        """Width and height of an image as its processor gets it."""
        return (tower.edge, tower.edge) if tower.squared else (self.width, self.height)

    def whole(self, tower: Tower) -> bool:
        """True if images are not cut, as LLaVA-OneVision reads several of a sample, or frames of a video."""
        return tower.most > 0 and (self.count > 1 or self.frames > 1)

    def grid(self, tower: Tower) -> tuple[int, int]:
        """Height and width to which an image is resized before it is cut: those that leave most of its pixels.

        Of those that leave as many, the smallest, then the first (transformers 5.23 `image_processing_utils.py`,
        `select_best_resolution`).
        """
        own_width, own_height = self.shape(tower)

        def left(grid: tuple[int, int]) -> tuple[int, int]:
            height, width = grid
            scale = min(width / own_width, height / own_height)
            pixels = int(own_width * scale) * int(own_height * scale)
            return min(pixels, own_width * own_height), -height * width

        return max(tower.grids, key=left)

    def rows(self, tower: Tower) -> tuple[int, int]:
        """Rows and columns of the tokens of an image that is cut, without its newlines and the small picture of it.

        Those of padding alone are left out, and where more than 1.21 times the most are left, they are interpolated
        (transformers 5.23 `models/llava_onevision/modeling_llava_onevision.py`, `unpad_image`, `pack_image_features`).
        """
        down, right = (edge // tower.edge * (tower.edge // tower.patch) for edge in self.grid(tower))
        width, height = self.shape(tower)
        if width / height > right / down:
            down -= (down - int(round(height * (right / width), 7))) // 2 * 2
        else:
            right -= (right - int(round(width * (down / height), 7))) // 2 * 2
        over = math.sqrt(down * right / (tower.most * tower.positions)) if tower.most else 0
        return (int(down // over), int(right // over)) if over > 1.1 else (down, right)

    def tiles(self, tower: Tower) -> int:
        """Squares of an image: those of the grid whose shape is nearest to the image's, and one of all of it.

        Of grids of one shape the larger is taken while the image has more than half their pixels. A frame of a video is
        one (transformers 5.23 `models/got_ocr2/image_processing_got_ocr2.py`, `get_optimal_tiled_canvas`,
        `crop_image_to_patches`; `models/internvl/video_processing_internvl.py`). Idefics 3 makes every image so many
        squares long (`models/idefics3/image_processing_idefics3.py`, `resize_for_vision_encoder`, `split_images`).
        """
        width, height = self.shape(tower)
        if tower.crossed:
            return tower.tiles
        if tower.crops:
            return tower.crops + 1
        if tower.sliced:
            squares = math.prod(self.split(tower))
            return squares + (squares > 1)
        if tower.along:
            short, long = sorted((width, height))
            return tower.along * math.ceil(tower.along * short / long) + 1
        if tower.grids:
            return 1 if self.whole(tower) else math.prod(self.grid(tower)) // tower.edge**2 + 1
        if tower.tiles == 1 or self.frames > 1:
            return 1
        if tower.flattened:
            number = self.canvas(tower)
            return number + (number > 1)
        sides = range(1, tower.tiles + 1)
        grids = sorted([(w, h) for w in sides for h in sides if w * h <= tower.tiles], key=math.prod)
        best = (1, 1)
        for grid in grids:
            off, least = (abs(width / height - w / h) for w, h in (grid, best))
            filled = width * height > 0.5 * tower.edge**2 * math.prod(grid)
            if off < least or (off == least and filled):
                best = grid
        number = math.prod(best)
        return number + (number > 1)

    def canvas(self, tower: Tower) -> int:
        """Squares of the canvas that enlarges an image least or, if all make it smaller, that makes it so least.

        Of those that do so alike the smallest (transformers 5.23 `models/llama4/image_processing_llama4.py`,
        `get_best_fit`).
        """
        width, height = self.shape(tower)
        sides = range(1, tower.tiles + 1)
        grids = [(w, h) for w in sides for h in sides if w * h <= tower.tiles]
        scale = {(w, h): min(w * tower.edge / width, h * tower.edge / height) for w, h in grids}
        best = min([s for s in scale.values() if s >= 1], default=max(scale.values()))
        return min(math.prod(grid) for grid, own in scale.items() if own == best)

    def split(self, tower: Tower) -> tuple[int, int]:
        """Columns and rows of an image that is cut into slices; of a video's frame one.

        Of grids of about as many squares as its area has the one whose shape is nearest to the image's
        (`get_sliced_grid` of image_processing_minicpmv.py beside the weights of MiniCPM-V 2.6).
        """
        squares = min(math.ceil(self.width * self.height / tower.sliced**2), tower.tiles)
        if squares <= 1 or self.frames > 1:
            return 1, 1
        numbers = [n for n in (squares - 1, squares, squares + 1) if 1 < n <= tower.tiles]
        grids = [(m, n // m) for n in numbers for m in range(1, n + 1) if n % m == 0]
        return min(grids, key=lambda grid: abs(math.log(self.width / self.height) - math.log(grid[0] / grid[1])))

    def slices(self, tower: Tower) -> list[tuple[int, int]]:
        """Heights and widths of the picture of the whole image, and of a slice of it if it is cut.

        `find_best_resize` and `get_refine_size` beside it: about `sliced`² pixels, in whole patches.
        """

        def fitted(width: float, height: float) -> tuple[int, int]:
            ratio = width / height
            tall = int(tower.sliced / math.sqrt(ratio))
            high, wide = (max(round(e / tower.patch), 1) * tower.patch for e in (tall, int(tall * ratio)))
            return high, wide

        grid = self.split(tower)
        whole = fitted(self.width, self.height)
        if grid == (1, 1):
            return [whole]
        wide, high = (max(round(e / n) * n, n) / n for e, n in zip((self.width, self.height), grid, strict=True))
        return [whole, fitted(wide, high)]

    def cropped(self, most: int) -> tuple[int, int]:
        """Squares along the shorter and the longer side of an image that is cut into `most` at most.

        `HD_transform` of `image_processing_phi3_v.py` beside the weights of Phi-3.5-vision-instruct.
        """
        short, long = sorted((self.width, self.height))
        squares = max([n for n in range(1, most + 1) if n * math.ceil(n * short / long) <= most])
        return math.ceil(squares * short / long), squares

    def tokens(self, tower: Tower) -> int:
        """Tokens of one sample that stand for its images."""
        if tower.crossed:
            return self.count
        if tower.sliced:
            return self.count * self.frames * self.tiles(tower) * tower.merger.queries
        if tower.crops:
            short, long = self.cropped(tower.crops)
            down = short if self.width >= self.height else long  # a tall image lies on its side until it is cut
            side = tower.edge // tower.patch // tower.merge
            return self.count * self.frames * ((short * long + 1) * side**2 + 1 + (down + 1) * side)
        if tower.filled:
            height, width = self.resized(tower)
            return self.count * self.frames * (height * width // (tower.patch * tower.merge) ** 2)
        if tower.grids and self.whole(tower):  # one newline an image, or a video
            side = tower.edge // tower.patch
            return self.count * (self.frames * math.ceil(side / 2) ** 2 if self.frames > 1 else side**2) + self.count
        if tower.grids:
            down, right = self.rows(tower)
            return self.count * (tower.positions + down * (right + 1))
        classes = bool(tower.classes) * self.count * -(-self.frames // tower.frames) * self.tiles(tower)
        return (self.patches(tower) - classes) // tower.merge**2
