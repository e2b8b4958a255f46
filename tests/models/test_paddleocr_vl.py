"""PaddleOCR-VL: SigLIP over images of their own shapes, whose projector takes one after the other, and ERNIE 4.5."""

from __future__ import annotations

import pytest
from architectures import published

from calc.models.architecture import language, parameters, vision_tensors
from calc.models.vision import Tower
from calc.scenario.images import Images


def tower() -> Tower:
    found = published("paddleocr-vl").vision
    assert found
    return found


def test_parameters_are_those_of_the_modules() -> None:
    """27 blocks, patches, 27 x 27 positions, a norm; a norm and two linears of four patches; ERNIE with a head."""
    h, i, wide = 1152, 4304, 4 * 1152
    block = 4 * h + 4 * (h * h + h) + 2 * h * i + h + i
    seen = 27 * block + h * 3 * 14**2 + h + 27**2 * h + 2 * h
    projector = 2 * h + wide * wide + wide + wide * 1024 + 1024
    layer = 2 * 1024 + 2 * 1024 * 2048 + 2 * 1024 * 256 + 3 * 1024 * 3072
    text = 18 * layer + 1024 + 2 * 103_424 * 1024
    arch = published("paddleocr-vl")
    assert sum(t.elements * t.count for t in vision_tensors(arch)) == seen + projector
    assert parameters(language(arch)) == text
    # of the safetensors' 958,588,736, Transformers leaves out SigLIP's head and 32,768 packed positions
    head = 2 * h + h + 4 * (h * h + h) + 2 * h * i + h + i
    assert parameters(arch) == seen + projector + text == 958_588_736 - head - 32_768 * h


@pytest.mark.parametrize(
    ("width", "height", "resized"),
    [
        (1654, 2339, (1988, 1400)),  # a page at 200 dots an inch, above 2,822,400 pixels
        (280, 280, (392, 392)),  # enlarged to 147,384
        (840, 1120, (1120, 840)),
    ],
)
def test_an_image_keeps_its_shape_between_the_processors_limits(
    width: int, height: int, resized: tuple[int, int]
) -> None:
    """And becomes a token for each 28 x 28 pixels."""
    limits = tower().limits
    image = Images(1, width, height, limits.fewest, limits.most, 1, "none", None)
    assert image.resized(tower()) == resized
    assert image.tokens(tower()) == resized[0] * resized[1] // 28**2


def test_adapters_of_the_language_model_let_no_gradient_into_the_tower() -> None:
    """Transformers finds no embedding of the tower that a hook could make require one (`get_input_embeddings`)."""
    assert not tower().hooked


def test_a_text_alone_is_read_without_the_rotation_of_ernie() -> None:
    """All layers share cos and sin, of which each section reads a position of its own."""
    arch = published("paddleocr-vl")
    assert (arch.rotation, arch.rotary_tables) == ("", 0)
