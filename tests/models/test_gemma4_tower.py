"""Gemma 4's vision tower: images as large as allowed, filled up with empty patches, and the part that hears."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import record

from calc.catalog.catalog import load, whole
from calc.engines.zero_partition import padded
from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.models.vision import Tower
from calc.resolve.parse import parse
from calc.scenario.images import Images
from calc.step.placement import frozen_tensors, masked


def config(model: str = "gemma-4-31b", **around: Any) -> dict[str, Any]:
    found = record(model)
    return whole(found["config"], {**found["vision"]["config"], **around})


def tower(model: str = "gemma-4-31b") -> Tower:
    found = from_config(config(model), images=True).vision
    assert found
    return found


@pytest.mark.parametrize(
    ("model", "eyes"),
    [("gemma-4-31b", 27 * 20_187_792), ("gemma-4-e2b", 16 * (4 * 768**2 + 3 * 768 * 3072 + 4 * 768 + 2 * 64))],
)
def test_the_tower_is_counted_block_by_block(model: str, eyes: int) -> None:
    """A block: four square matrices, three of its MLP, four norms, and those of queries and keys.

    1152 wide: 4·1152² + 3·1152·4304 + 4·1152 + 2·72 = 20,187,792.
    """
    assert sum(t.elements * t.count for t in vision_tensors(load().models[model].seeing, "blocks")) == eyes


def test_the_part_that_hears_is_loaded_and_not_trained() -> None:
    """304,824,608 parameters of `Gemma4AudioModel`, as Transformers counts them, and 1536² to the language model."""
    arch = load().models["gemma-4-e2b"].seeing
    assert arch
    heard = vision_tensors(arch, "unread")
    assert sum(t.elements * t.count for t in heard) == 304_824_608 + 1536**2
    assert parameters(arch) == 5_104_297_504  # the model card says 5.1B
    job = parse({"model": "gemma-4-e2b", "task": "sft", "gpu": "h200", "images": {"width": 640, "height": 480}})
    assert frozen_tensors(job, arch) == heard
    assert not vision_tensors(load().models["gemma-4-31b"].seeing, "unread")


@pytest.mark.parametrize(
    ("width", "height", "high", "wide"),
    [(960, 672, 672, 960), (768, 768, 768, 768), (64, 64, 768, 768), (4000, 1000, 384, 1584), (3000, 10, 48, 13440)],
)
def test_images_keep_their_shape_and_take_what_is_allowed(width: int, height: int, high: int, wide: int) -> None:
    """As `get_aspect_ratio_preserving_size` has them, of 2520 patches of 16 pixels in multiples of 48."""
    eyes = tower()
    seen = Images(2, width, height, 1, 645120, 1, "none", None)
    assert seen.resized(eyes) == (high, wide)
    assert (seen.patches(eyes), seen.tokens(eyes)) == (2 * 2520, 2 * high * wide // 48**2)
    assert seen.short(eyes) == (high * wide < 645120)


def test_a_frame_of_a_video_has_a_quarter_of_the_patches() -> None:
    eyes = tower()
    seen = Images(1, 768, 768, 1, eyes.bounds(8).most, 8, "none", None)
    assert (seen.patches(eyes), seen.tokens(eyes)) == (8 * 630, 8 * 64)


def test_tokens_of_an_image_that_see_each_other_need_a_mask_in_layers_with_a_window() -> None:
    job: dict[str, Any] = {"task": "sft", "gpu": "h200", "attention": "sdpa", "seq_len": 900}
    for model, both in ("gemma-4-31b", True), ("gemma-4-e4b", False):
        s = parse({**job, "model": model, "images": {"width": 640, "height": 480}})
        assert masked(s, s.architecture, 400) == both


def test_the_table_of_both_directions_is_cut_by_ranks_as_if_it_had_a_row_for_each() -> None:
    """Two rows over eight ranks of FSDP 2: each rank stores one, so that all eight store four times the table."""
    (table,) = [t for t in vision_tensors(load().models["gemma-4-31b"].seeing) if "position_embedding" in t.name]
    assert table.shape == (2, 10240, 1152)
    assert padded((table,), 8) == 4 * table.elements


@pytest.mark.parametrize(
    ("around", "line"),
    [
        ({"vision_config": {"head_dim": 128}}, "vision_config.head_dim: given 128, allowed: 64"),
        ({"audio_config": 3}, "audio_config: given 3"),
        ({"audio_config": {"subsampling_conv_channels": [1]}}, "audio_config.subsampling_conv_channels: given"),
    ],
)
def test_what_no_such_model_has_is_refused(around: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        from_config(config(**around), images=True)
