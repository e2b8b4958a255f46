"""GLM-4V: a tower with sampled positions, a convolution that makes tokens, and a projector with a gate."""

from __future__ import annotations

import pytest
from architectures import published

from calc.models.architecture import language, parameters, vision_tensors
from calc.models.vision import Tower
from calc.scenario.images import Images


def tower(model: str = "glm-4.1v-9b") -> Tower:
    found = published(model).vision
    assert found
    return found


@pytest.mark.parametrize(
    ("model", "count"),
    [
        # by hand: patches 1536·(3·2·14·14) + 1536, positions 576·1536, both norms 2·1536; 24 blocks of 4·1536² (qkv,
        # proj), 3·1536·4096 (MLP) and 2·1536 (norms); downsampling 4096·1536·4 + 4096; 4096² + 2·4096 + 3·4096·13696
        ("glm-4.1v-9b", 892_498_432),
        ("glm-4.5v", 858_681_856),  # an MLP of 10944 instead
    ],
)
def test_the_tower_and_its_projector_by_hand(model: str, count: int) -> None:
    arch = published(model)
    assert parameters(arch) - parameters(language(arch)) == count


def test_the_language_model_of_the_large_one_is_glm_4_5_air_without_norms_of_queries() -> None:
    large, air = language(published("glm-4.5v")), published("glm-4.5-air")
    assert parameters(large) == parameters(air)


def test_names_are_those_of_the_checkpoint() -> None:
    found = {t.name: t.shape for t in vision_tensors(published("glm-4.1v-9b"))}
    assert found["model.visual.downsample.weight"] == (4096, 1536, 2, 2)
    assert found["model.visual.embeddings.position_embedding.weight"] == (576, 1536)
    assert found["model.visual.merger.post_projection_norm.bias"] == (4096,)
    assert "model.visual.merger.proj.bias" not in found


def test_blocks_are_as_wide_inside_as_the_language_model() -> None:
    blocks = tower("glm-4.5v").blocks
    assert (blocks.intermediate, tower("glm-4.5v").between) == (4096, 10944)
    assert (blocks.qkv_bias, blocks.o_bias, blocks.mlp_bias) == (False, False, False)


def test_an_image_counts_as_two_frames_whose_pixels_are_limited_together() -> None:
    """`smart_resize`: up to 9,633,792 pixels of both, which are 6144 tokens of 28 x 28."""
    limits = tower().bounds(1)
    seen = Images(1, 8000, 8000, limits.fewest, limits.most, 1, "none", None)
    assert seen.resized(tower()) == (2184, 2184)
    assert seen.tokens(tower()) == 78 * 78
