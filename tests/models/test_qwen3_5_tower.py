"""Qwen3.5's vision tower: Qwen3-VL's, of which only the last block's output reaches the language model."""

from __future__ import annotations

import pytest

from calc.catalog.catalog import load
from calc.models.architecture import parameters


@pytest.mark.parametrize(
    ("model", "tower"),
    [
        # 4B by hand: patches 1024·(3·2·16·16) + 1024, positions 2304·1024; 24 blocks of 4·1024² + 4·1024 (qkv, proj and
        # biases), 2·1024·4096 + 5120 (MLP) and 4·1024 (norms); the projector's norm 2·1024, 4096² + 4096,
        # 4096·2560 + 2560
        ("qwen3.5-4b", 333_514_240),
        # 9B: patches 1152·1536 + 1152, 2304·1152; 27 of 4·1152² + 4·1152, 2·1152·4304 + 5456, 4·1152; 2·1152,
        # 4608² + 4608, 4608·4096 + 4096
        ("qwen3.5-9b", 456_010_480),
    ],
)
def test_the_tower_and_its_projector_by_hand(model: str, tower: int) -> None:
    found = load().models[model]
    assert found.seeing and found.seeing.vision and not found.seeing.vision.deep
    assert parameters(found.seeing) - parameters(found.architecture) == tower


def test_images_bring_the_tower_and_a_job_without_them_the_language_model_alone() -> None:
    model = load().models["qwen3.5-35b-a3b"]
    assert model.architecture.vision is None
    assert model.seeing and model.seeing.family == "qwen3_5_moe"


def test_the_checkpoint_of_9b_holds_both_and_the_layer_that_predicts_a_second_token() -> None:
    """Its index gives 19,306,216,416 bytes: that layer has queries with a gate for 16 heads of 256, 4 of keys and
    values, an MLP of 12,288, a projection of two states, and norms; of 24 layers `A_log` and the gated norm are fp32.
    """
    model, h = load().models["qwen3.5-9b"], 4096
    second = 2 * 16 * 256 * h + 2 * 4 * 256 * h + 16 * 256 * h + 3 * h * 12_288 + 2 * h * h + 5 * h + 2 * 256
    wide = 24 * (32 + 128)
    assert model.seeing and 2 * (parameters(model.seeing) + second + wide) == 19_306_216_416
