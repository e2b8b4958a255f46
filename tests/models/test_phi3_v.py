"""Phi-3 Vision: CLIP over squares of an image, of which four patches become a token, by code beside the weights."""

from __future__ import annotations

import pytest
from architectures import published

from calc.catalog.catalog import load
from calc.memory import vision
from calc.memory.projector import projector
from calc.memory.run import Run
from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.models.vision import Tower
from calc.scenario.images import Images

MODEL = "phi-3.5-vision"


def tower() -> Tower:
    found = published(MODEL).vision
    assert found
    return found


def image(width: int, height: int) -> Images:
    return Images(1, width, height, 1, 10**9, 1, "none", None)


def test_parameters_are_the_published_ones() -> None:
    """Phi-3 mini's, CLIP ViT-L/14-336's, two linears, and the parameters between rows and between pictures."""
    h, i, out = 1024, 4096, 3072
    block = 4 * h + 4 * (h * h + h) + 2 * h * i + h + i
    clip = 24 * block + 3 * 14**2 * h + h + 577 * h + 4 * h
    projector = 4 * h * out + out + out * out + out + 2 * 4 * h
    arch = published(MODEL)
    assert sum(t.elements * t.count for t in vision_tensors(arch)) == clip + projector == 325_541_888
    assert parameters(arch) == load().models["phi-3-mini"].parameters + 325_541_888 == 4_146_621_440
    names = {t.name.removeprefix("model.vision_embed_tokens.") for t in vision_tensors(arch, "projector")}
    assert {"glb_GN", "sub_GN", "img_projection.0.weight", "img_projection.2.bias"} <= names


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (896, 896, 757),  # 2 x 2 squares: (4 + 1)·144 + 1 + (2 + 1)·12
        (1344, 336, 745),  # 4 x 1
        (336, 1344, 781),  # 1 x 4, with four times 12 ends of rows
        (100, 100, 757),  # enlarged, too
        (1200, 800, 757),  # 2 x 1.33, filled up to 2 x 2
    ],
)
def test_an_image_is_cut_into_four_squares_at_most(width: int, height: int, tokens: int) -> None:
    """And all five are seen, of which each has 24 x 24 patches and one token of the tower's own."""
    assert image(width, height).tokens(tower()) == tokens
    assert image(width, height).patches(tower()) == 5 * 577


def test_the_projector_keeps_the_input_of_each_linear_and_of_its_gelu() -> None:
    """Of a token of four patches 4096, 3072 and 3072 elements in bf16."""
    run = vision.running(Run(published(MODEL)), tower(), trained=True)
    kept = projector(run, tower(), tower().merger, first=False, below=run).saved.bytes(4, 4)
    assert kept == 2 * (4096 + 3072 + 3072)


def test_the_sizes_of_its_tower_stand_in_code() -> None:
    """Its config has no `vision_config`, which others need."""
    config = load().models[MODEL].config
    assert "vision_config" not in config
    assert from_config(config).vision == tower()
    with pytest.raises(ConfigError, match=r"^vision_config: "):
        from_config({**load().models["llava-1.5-7b"].config, "vision_config": None})
