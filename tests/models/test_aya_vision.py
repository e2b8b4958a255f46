"""Aya Vision: InternVL's squares before SigLIP's tower, and a projector whose first linear makes a gate, too."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import published, record

from calc.models.architecture import ConfigError, language, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.scenario.images import Images

MODEL = "aya-vision-8b"


def test_the_projector_by_hand() -> None:
    """Four patches of 1152 side by side; 28672 columns, of which one half weighs the other; 4096 wide."""
    arch = published(MODEL)
    shapes = {t.name.removeprefix("model.multi_modal_projector."): t.shape for t in vision_tensors(arch, "projector")}
    assert shapes == {
        "layernorm.weight": (4608,), "layernorm.bias": (4608,), "linear_1.weight": (28672, 4608),
        "linear_1.bias": (28672,), "linear_2.weight": (4096, 14336), "linear_2.bias": (4096,),
    }  # fmt: skip
    block = 4 * 1152**2 + 4 * 1152 + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    tower = 3 * 14**2 * 1152 + 1152 + 26**2 * 1152 + 27 * block + 2 * 1152
    projector = 2 * 4608 + (4608 + 1) * 28672 + (14336 + 1) * 4096
    assert parameters(arch) == parameters(language(arch)) + tower + projector
    assert parameters(language(arch)) == parameters(published("command-r7b"))


def test_an_image_is_cut_as_internvls_is() -> None:
    """Squares of 364 pixels, 26 x 26 patches, a quarter as many tokens."""
    tower = published(MODEL).vision
    assert tower
    assert (tower.merge, tower.taken, tower.unread) == (2, (27,), 0)
    for (width, height), squares in {(728, 728): 5, (364, 364): 1, (1092, 364): 4}.items():
        images = Images(1, width, height, 1, 10**9, 1, "none", None)
        assert (images.patches(tower), images.tokens(tower)) == (squares * 676, squares * 169)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"downsample_factor": 3}, "downsample_factor: given 3, allowed: a divisor of 26"),
        ({"alignment_intermediate_size": 7}, "alignment_intermediate_size: given 7, allowed: an even number"),
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy: given 'default'"),
    ],
)
def test_another_projector_is_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        from_config({**record(MODEL)["config"], **fields})


def test_its_width_is_the_language_models_where_nobody_says_it() -> None:
    config = {name: value for name, value in record(MODEL)["config"].items() if "alignment" not in name}
    arch = from_config(config)
    assert arch.vision and arch.vision.between == 4096
