"""LLaVA-NeXT, Granite Vision and LLaVA-OneVision: images in squares, the tokens left of them, and the blocks read."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import published, record

from calc.catalog.catalog import load
from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.models.releases import newest_type
from calc.resolve.parse import parse
from calc.scenario.images import Images
from calc.scenario.scenario import ScenarioError
from calc.step.placement import frozen_tensors

GRANITE = "granite-vision-3.3-2b"
MANY = "llava-onevision-7b"


def images(width: int, height: int, count: int = 1, frames: int = 1) -> Images:
    return Images(count, width, height, 1, 10**9, frames, "none", None)


def test_parameters_are_the_published_ones() -> None:
    """Granite Vision's are those of SigLIP whole, with what pools the patches, though nothing reads that."""
    assert parameters(published(GRANITE)) == 2_975_396_928
    beside = 3 * 1152**2 + 3 * 1152 + 1152**2 + 1152 + 2 * 1152 * 4304 + 4304 + 1152 + 2 * 1152 + 1152
    idle = vision_tensors(published(GRANITE), "unread")
    assert sum(t.elements * t.count for t in idle) == beside + 2 * 1152


def test_a_newline_more_than_llava() -> None:
    """CLIP's tower, the projector and a language model of the same shapes are those of LLaVA 1.5."""
    for ours, before in ("llava-1.6-vicuna-7b", "llava-1.5-7b"), ("llava-1.6-vicuna-13b", "llava-1.5-13b"):
        arch = published(ours)
        assert parameters(arch) == parameters(published(before)) + arch.hidden
    names = {t.name for t in vision_tensors(published("llava-1.6-vicuna-7b"), "projector")}
    assert "model.image_newline" in names


@pytest.mark.parametrize(
    ("model", "width", "height", "squares", "rows"),
    [
        ("llava-1.6-mistral-7b", 672, 672, 4, (48, 48)),
        ("llava-1.6-mistral-7b", 336, 672, 2, (48, 24)),
        # 672 x 672 leaves 672 x 403 pixels, which are 48 x 28.8 patches of 48 x 48: ten rows above and below are cut
        ("llava-1.6-mistral-7b", 1000, 600, 4, (28, 48)),
        ("llava-1.6-mistral-7b", 300, 900, 3, (72, 24)),
        ("llava-1.6-mistral-7b", 100, 100, 2, (24, 24)),  # it is enlarged; of two grids that leave all the first
        (GRANITE, 768, 768, 4, (54, 54)),
        (GRANITE, 3000, 500, 6, (27, 162)),
        (GRANITE, 100, 100, 1, (27, 27)),
        (MANY, 384, 384, 1, (27, 27)),
        (MANY, 800, 600, 6, (54, 73)),  # 81 columns of which 9 are padding, an even number of which is cut
        (MANY, 1200, 1200, 16, (81, 81)),  # 108 x 108, interpolated to 9 squares
    ],
)
def test_an_image_is_cut_into_squares_and_loses_its_padding(
    model: str, width: int, height: int, squares: int, rows: tuple[int, int]
) -> None:
    """Each row ends with a newline; a small picture of the whole comes first."""
    tower = published(model).vision
    assert tower
    seen = images(width, height)
    assert (seen.tiles(tower), seen.rows(tower)) == (squares + 1, rows)
    side = tower.edge // tower.patch
    assert seen.patches(tower) == (squares + 1) * (side**2 + bool(tower.classes))
    assert seen.tokens(tower) == side**2 + rows[0] * (rows[1] + 1)


def test_several_images_of_a_sample_are_not_cut_nor_are_frames() -> None:
    """LLaVA-OneVision makes 27² tokens of an image among several, 14² of a frame, and a newline of each file."""
    tower = published(MANY).vision
    assert tower
    assert images(1920, 1080, count=3).tokens(tower) == 3 * (729 + 1)
    assert images(1920, 1080, count=3).patches(tower) == 3 * 729
    assert images(1920, 1080, count=2, frames=8).tokens(tower) == 2 * (8 * 196 + 1)
    assert images(1920, 1080, count=2, frames=8).patches(tower) == 2 * 8 * 729
    next_tower = published("llava-1.6-34b").vision
    assert next_tower
    assert images(672, 672, count=3).tokens(next_tower) == 3 * images(672, 672).tokens(next_tower)


def test_a_video_is_a_job_of_llava_onevision_alone() -> None:
    job = {"task": "sft", "gpu": "h200", "seq_len": 8192, "images": {"width": 640, "height": 360, "frames": 8}}
    assert parse({**job, "model": MANY}).images == images(640, 360, frames=8)
    with pytest.raises(ScenarioError, match=r"images.frames: given 8, allowed: nothing"):
        parse({**job, "model": "llava-1.6-34b"})


def test_what_nothing_reads_gets_no_gradients() -> None:
    """LLaVA-NeXT's last block and the norm behind it; of LLaVA-OneVision, which lacks SigLIP's last block, the norm."""
    for model, blocks, unread in ("llava-1.6-vicuna-7b", 23, 1), (MANY, 26, 0), (GRANITE, 27, 0):
        arch = published(model)
        assert arch.vision and (arch.vision.blocks.layers, arch.vision.unread) == (blocks, unread)
        job = parse({"model": model, "task": "sft", "gpu": "h200", "seq_len": 8192, "images.width": 400,
                     "images.height": 400})  # fmt: skip
        assert frozen_tensors(job, arch) == vision_tensors(arch, "unread")
    norm = vision_tensors(published(MANY), "unread")
    assert [t.name.partition("vision_tower.")[2] for t in norm] == ["post_layernorm.weight", "post_layernorm.bias"]


def test_a_projector_reads_several_blocks_side_by_side() -> None:
    """The 4th, 8th, 16th and last block of 27 from -24, -20, -12 and -1."""
    arch = published(GRANITE)
    assert arch.vision and arch.vision.taken == (4, 8, 16, 27)
    shapes = {t.name.rpartition("projector.")[2]: t.shape for t in vision_tensors(arch, "projector")}
    assert shapes["linear_1.weight"] == (2048, 4 * 1152)
    fewer = from_config({**record(GRANITE)["config"], "vision_feature_layer": [3, -5]})
    assert fewer.vision and (fewer.vision.taken, fewer.vision.unread) == ((3, 23), 4)


def test_several_blocks_need_a_later_release_than_one() -> None:
    config = record(GRANITE)["config"]
    assert newest_type(config) == "granitevision"
    assert newest_type({**config, "vision_feature_layer": -2}) == "granite"
    assert newest_type(record("llava-1.6-34b")["config"]) == "llava_next"
    job = {"model": GRANITE, "task": "sft", "gpu": "h200", "versions": {"transformers": "4.48"}}
    with pytest.raises(ScenarioError, match=r"versions.transformers: given '4.48', which lacks granitevision"):
        parse(job)


def test_a_language_model_that_ties_its_head_ties_it_in_llava_onevision() -> None:
    """`LlavaOnevisionConfig` takes the field over from `text_config`; LLaVA-NeXT's own field decides."""
    small = record("llava-onevision-0.5b")["config"]
    assert from_config({**small, "tie_word_embeddings": False}).tied
    granite = record(GRANITE)["config"]
    assert not from_config({**granite, "tie_word_embeddings": False}).tied


def test_each_has_a_name_of_its_own() -> None:
    catalog = load()
    for name, id in {
        "liuhaotian/llava-v1.6-mistral-7b": "llava-1.6-mistral-7b",
        "llava-hf/llava-v1.6-34b-hf": "llava-1.6-34b",
        "lmms-lab/llama3-llava-next-8b": "llama3-llava-next-8b",
        "lmms-lab/llava-onevision-qwen2-7b-ov-chat": MANY,
    }.items():
        assert catalog.model(name).id == id


@pytest.mark.parametrize(
    ("model", "fields", "line"),
    [
        (
            GRANITE,
            {"vision_feature_layer": [-24, 0]},
            r"vision_feature_layer: given \[-24, 0\], allowed: a number from",
        ),
        (GRANITE, {"vision_feature_layer": 28}, "vision_feature_layer: given 28, allowed: a number from -1 to -27, or"),
        (GRANITE, {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy: given 'default'"),
        (
            GRANITE,
            {"image_grid_pinpoints": [[384, 400]]},
            r"image_grid_pinpoints: given \[\[384, 400\]\], allowed: a lis",
        ),
        (GRANITE, {"image_grid_pinpoints": [384]}, r"image_grid_pinpoints: given \[384\], allowed: a list of heights"),
        (
            GRANITE,
            {"image_grid_pinpoints": []},
            r"image_grid_pinpoints: given \[\], allowed: a list of heights and wid",
        ),
        (
            MANY,
            {"vision_aspect_ratio": "square"},
            "vision_aspect_ratio: given 'square', allowed: anyres_max_N, such as",
        ),
        (
            MANY,
            {"vision_aspect_ratio": "anyres_max_0"},
            "vision_aspect_ratio: given 'anyres_max_0', allowed: anyres_ma",
        ),
    ],
)
def test_what_no_image_processor_does_is_refused(model: str, fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        from_config({**record(model)["config"], **fields})


def test_grids_are_those_of_the_class_where_a_config_has_none() -> None:
    for model in ("llava-1.6-34b", MANY):
        config = record(model)["config"]
        bare = {name: value for name, value in config.items() if name != "image_grid_pinpoints"}
        assert from_config(bare) == published(model)
