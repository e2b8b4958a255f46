"""InternVL: its tower's class token, scaled blocks and projector, and the squares into which an image is cut."""

from __future__ import annotations

import pytest
from architectures import published, record

from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.models.vision import Tower
from calc.resolve.parse import parse
from calc.scenario.images import Images


def tower(model: str = "internvl3.5-8b") -> Tower:
    found = published(model).vision
    assert found
    return found


def images(width: int, height: int, frames: int = 1) -> Images:
    return Images(1, width, height, 1, 10**9, frames, "none", None)


@pytest.mark.parametrize(
    ("model", "count"),
    [("internvl3.5-1b", 1_060_897_792), ("internvl3.5-8b", 8_528_318_464), ("internvl3.5-38b", 38_390_405_504)],
)
def test_parameters_are_those_of_transformers_own_model(model: str, count: int) -> None:
    """Counted in `InternVLForConditionalGeneration` of Transformers 5.23."""
    assert parameters(published(model)) == count


def test_the_tower_has_a_class_token_scales_and_a_narrow_projector() -> None:
    """InternViT 300M before Qwen3 8B: 1024 wide, 32 x 32 patches of an image, four of which become a token."""
    found = {t.name: t.shape for t in vision_tensors(published("internvl3.5-8b"))}
    assert found["model.vision_tower.embeddings.cls_token"] == (1, 1, 1024)
    assert found["model.vision_tower.embeddings.position_embeddings"] == (1, 1025, 1024)
    assert found["model.vision_tower.encoder.layer.*.lambda_1"] == (1024,)
    assert found["model.multi_modal_projector.linear_1.weight"] == (4096, 4096)


def test_the_large_tower_norms_queries_and_keys_over_all_heads() -> None:
    """InternViT 6B: RMS norms, 3200 wide, and no biases of queries, keys and values."""
    blocks = tower("internvl3.5-38b").blocks
    assert (blocks.norm, blocks.qk_norm, blocks.qkv_bias, blocks.norm_bias) == ("rms", "width", False, False)
    assert (tower().blocks.norm, tower().blocks.qk_norm, tower().blocks.qkv_bias) == ("layer", "", True)


def test_a_norm_of_another_kind_is_refused() -> None:
    config = record("internvl3.5-8b")["config"]
    with pytest.raises(ConfigError, match=r"^vision_config.norm_type: given 'batch_norm', allowed: layer_norm"):
        from_config({**config, "vision_config": {**config["vision_config"], "norm_type": "batch_norm"}})
    with pytest.raises(ConfigError, match=r"^vision_config.use_qk_norm: given True"):
        from_config({**config, "vision_config": {**config["vision_config"], "use_qk_norm": True}})


@pytest.mark.parametrize(
    ("width", "height", "tiles"),
    [
        (448, 448, 1),
        (896, 448, 3),  # two, and the whole
        (1000, 1000, 10),  # of 1, 4 and 9 squares that which has less than twice its pixels
        (640, 480, 13),  # 4 x 3 is its shape exactly
        (4000, 100, 13),  # the widest grid is 12 x 1
    ],
)
def test_an_image_is_cut_into_the_grid_of_its_shape(width: int, height: int, tiles: int) -> None:
    """`get_optimal_tiled_canvas` with up to 12 tiles of 448 pixels; 256 tokens each."""
    seen = images(width, height)
    assert seen.tiles(tower()) == tiles
    assert seen.tokens(tower()) == 256 * tiles
    assert seen.patches(tower()) == 1025 * tiles


@pytest.mark.parametrize(
    ("model", "tiles", "apart"),
    [("internvl3.5-8b", 13, 1), ("smolvlm2-2.2b", 13, 17), ("llama-4-scout", 5, 1), ("qwen2.5-vl-7b", 1, 1)],
)
def test_axolotl_makes_a_square_of_an_image_before_the_processor_sees_it(model: str, tiles: int, apart: int) -> None:
    """Of the side that the config's `vision_config.image_size` says: axolotl 0.19 `processing_strategies.py:295`."""
    fields = {"model": model, "task": "sft", "gpu": "h200", "seq_len": 8192, "images": {"width": 640, "height": 480}}
    for trainer, number in ("transformers", tiles), ("axolotl", apart):
        s = parse(fields | {"trainer": trainer})
        assert s.images and s.architecture.vision
        assert s.images.tiles(s.architecture.vision) == number


def test_a_frame_of_a_video_is_not_cut() -> None:
    assert images(1000, 1000, frames=8).tokens(tower()) == 8 * 256
