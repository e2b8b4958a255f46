"""Idefics 3 and SmolVLM: a tower over squares, the tokens that are cut of them, and how many of them an image has."""

from __future__ import annotations

import pytest
from architectures import published, record

from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.scenario.images import Images


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("smolvlm2-256m", 256_484_928), ("smolvlm2-500m", 507_482_304), ("smolvlm2-2.2b", 2_246_784_880),
        ("granite-docling-258m", 257_517_120),
    ],
)  # fmt: skip
def test_parameters_are_the_published_ones(model: str, count: int) -> None:
    assert parameters(published(model)) == count


def test_one_linear_without_a_bias_reads_a_token_s_patches() -> None:
    """16 patches of 768 numbers each become a token of 960."""
    found = {t.name: t.shape for t in vision_tensors(published("smolvlm2-500m"), "projector")}
    assert found == {"model.connector.modality_projection.proj.weight": (960, 16 * 768)}


@pytest.mark.parametrize(
    ("width", "height", "squares"),
    [
        (512, 512, 4 * 4 + 1), (100, 100, 4 * 4 + 1),  # every image is made four squares long
        (1024, 768, 4 * 3 + 1), (768, 1024, 4 * 3 + 1), (1920, 1080, 4 * 3 + 1), (2000, 400, 4 + 1),
    ],
)  # fmt: skip
def test_an_image_is_cut_into_squares_beside_one_of_all_of_it(width: int, height: int, squares: int) -> None:
    """Of SmolVLM2 500M a square has 32 x 32 patches, and 64 tokens."""
    tower = published("smolvlm2-500m").vision
    assert tower
    images = Images(2, width, height, 1, 10**9, 1, "none", None)
    assert images.tiles(tower) == squares
    assert images.patches(tower) == 2 * squares * 1024
    assert images.tokens(tower) == 2 * squares * 64


@pytest.mark.parametrize("factor", [0, 5, "4", True])
def test_a_factor_that_does_not_divide_a_square_is_refused(factor: object) -> None:
    with pytest.raises(ConfigError, match=r"^scale_factor: given .*, allowed: a divisor of 32"):
        from_config({**record("smolvlm2-500m")["config"], "scale_factor": factor})
