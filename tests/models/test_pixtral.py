"""Pixtral 12B, and Mistral 3 with images: one tower under one mask, their projectors, and the sizes of images."""

from __future__ import annotations

import pytest
from architectures import record

from calc.catalog.catalog import load, whole
from calc.estimate.estimate import estimate
from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.resolve.parse import parse
from calc.scenario.images import Images

MODEL = "mistral-small-3.2-24b"


def test_parameters_with_the_tower_are_the_published_ones() -> None:
    model = load().models[MODEL]
    assert model.seeing
    assert parameters(model.seeing) == model.published_seeing == 24_011_361_280
    found = {
        t.name.removeprefix("model.multi_modal_projector."): t.shape for t in vision_tensors(model.seeing, "projector")
    }
    assert found == {
        "norm.weight": (1024,), "patch_merger.merging_layer.weight": (1024, 4 * 1024), "linear_1.weight": (5120, 1024),
        "linear_2.weight": (5120, 5120),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("width", "height", "resized"),
    [
        (1540, 1540, (1540, 1540)), (100, 30, (56, 112)),  # rounded up to whole tokens of 28 pixels
        (3080, 1540, (784, 1540)), (2000, 3000, (1540, 1036)),  # the longer side becomes 1540
    ],
)  # fmt: skip
def test_an_image_is_made_smaller_to_a_longer_side(width: int, height: int, resized: tuple[int, int]) -> None:
    tower = load().models[MODEL].reading(images=True).vision
    assert tower
    images = Images(1, width, height, 1, 10**9, 1, "none", None)
    assert images.resized(tower) == resized
    assert images.tokens(tower) == resized[0] * resized[1] // 28**2


def test_the_language_model_is_that_which_the_config_names() -> None:
    """Ministral 3 nests one of its own, which has no window where Mistral's would have one."""
    text = {name: value for name, value in record("ministral-3-3b")["config"].items() if name != "sliding_window"}
    around = record(MODEL)["vision"]["config"]
    assert from_config(whole(text, around), images=True).sliding_layers == ()
    assert from_config(whole(text | {"model_type": "mistral"}, around), images=True).sliding_layers != ()


def test_a_mask_over_all_patches_grows_with_their_square() -> None:
    """In bf16, once for all blocks where its rows are whole eights: 60 x 58 patches; 58 x 58 are copied in each."""

    def held(**images: int) -> int:
        job = {"model": MODEL, "task": "sft", "gpu": "h200", "gpus": 1, "seq_len": 4096, "attention": "sdpa"}
        phases = estimate(parse(job | {"images": {"freeze": "none", **images}})).groups[0].phases
        lines = next(p.moment.lines for p in phases if p.name == "backward")
        return sum(x.bytes for x in lines if x.formula.endswith("P_v^2"))

    assert held(width=840, height=812) == 2 * (60 * 58) ** 2
    assert held(width=840, height=812, count=2) == 2 * (2 * 60 * 58) ** 2
    assert held(width=812, height=812) == 0


def test_pixtral_12b_makes_a_token_of_each_patch() -> None:
    """LLaVA's projector, of two linears with a bias; the longer side becomes 1024 pixels, 64 patches of 16."""
    arch = load().models["pixtral-12b"].architecture
    assert (arch.family, arch.sliding_layers) == ("pixtral", ())
    assert arch.vision
    found = {t.name.removeprefix("model.multi_modal_projector."): t.shape for t in vision_tensors(arch, "projector")}
    assert found == {
        "linear_1.weight": (5120, 1024), "linear_1.bias": (5120,), "linear_2.weight": (5120, 5120),
        "linear_2.bias": (5120,),
    }  # fmt: skip
    block = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024
    tower = 3 * 16**2 * 1024 + 1024 + 24 * block
    language = parameters(load().models["mistral-nemo-12b"].architecture)
    assert parameters(arch) == language + tower + (1024 + 1) * 5120 + (5120 + 1) * 5120
    images = Images(2, 2048, 1000, 1, 10**9, 1, "none", None)
    assert images.resized(arch.vision) == (512, 1024)  # 500 pixels, rounded up to 32 patches
    assert images.tokens(arch.vision) == images.patches(arch.vision) == 2 * 32 * 64


@pytest.mark.parametrize(
    ("name", "given", "allowed"),
    [
        ("multimodal_projector_bias", False, "true"),
        ("vision_feature_layer", -2, "-1"),
        ("vision_feature_select_strategy", "default", "'full'"),
    ],
)
def test_another_projector_behind_pixtral_12b_is_refused(name: str, given: object, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: given .*, allowed: {allowed}; not modelled"):
        from_config(record("pixtral-12b")["config"] | {name: given})


def test_llavas_other_defaults_are_not_those_of_pixtral_12b() -> None:
    given = {name: value for name, value in record("pixtral-12b")["config"].items() if name != "vision_feature_layer"}
    with pytest.raises(ConfigError, match=r"^vision_feature_layer: given -2, allowed: -1"):
        from_config(given)


@pytest.mark.parametrize(("name", "given"), [("multimodal_projector_bias", True), ("vision_feature_layer", [-2, -1])])
def test_another_projector_is_refused(name: str, given: object) -> None:
    data = record(MODEL)
    with pytest.raises(ConfigError, match=rf"^{name}: given .*; not modelled"):
        from_config(whole(data["config"], data["vision"]["config"] | {name: given}), images=True)
