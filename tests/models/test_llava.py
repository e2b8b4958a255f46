"""LLaVA's vision tower: CLIP, of which the last block but one is read, and two linears for each patch."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import published, record

from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.resolve.parse import parse
from calc.scenario.images import Images
from calc.step.placement import frozen_tensors


def test_parameters_are_those_that_are_published() -> None:
    assert parameters(published("llava-1.5-7b")) == 7_063_427_072


def test_what_nothing_reads_is_a_block_and_a_norm() -> None:
    """1024 wide: 4·1024² and a bias of attention, 8·1024² and biases of the MLP, two norms; and one norm more."""
    arch = published("llava-1.5-7b")
    assert arch.vision and (arch.vision.unread, arch.vision.blocks.layers) == (1, 23)
    idle = vision_tensors(arch, "unread")
    block = 12 * 1024**2 + 4 * 1024 + (4096 + 1024) + 4 * 1024
    assert sum(t.elements * t.count for t in idle) == block + 2 * 1024
    job = parse({"model": "llava-1.5-7b", "task": "sft", "gpu": "h200", "images": {"width": 336, "height": 336}})
    assert frozen_tensors(job, arch) == idle


def test_an_image_is_one_square_of_a_token_a_patch() -> None:
    tower = published("llava-1.5-7b").vision
    assert tower
    seen = Images(2, 1000, 500, 1, 10**9, 1, "none", None)
    assert (seen.patches(tower), seen.tokens(tower)) == (2 * 577, 2 * 576)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"vision_feature_layer": [-2, -25]}, r"vision_feature_layer: given \[-2, -25\]"),
        ({"vision_feature_layer": 0}, "vision_feature_layer: given 0, allowed: a number from -1 to -24"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy: given 'full'"),
        (
            {
                "vision_config": {
                    **record("llava-1.5-7b")["config"]["vision_config"],
                    "model_type": "siglip_vision_model",
                }
            },
            "vision_config.model_type: given 'siglip_vision_model', allowed: clip_vision_model; other towers are not",
        ),
    ],
)
def test_other_features_of_the_tower_are_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        from_config({**record("llava-1.5-7b")["config"], **fields})
