"""Llama 4's vision tower: unfolded pixels, a token of its own, linears of its own, and the canvas of an image."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import record

from calc.catalog.catalog import load, whole
from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.models.lora import vision_matrices
from calc.models.vision import Tower
from calc.scenario.images import Images
from calc.scenario.rules import unsuited


def config(**eyes: Any) -> dict[str, Any]:
    found = record("llama-4-scout")
    around = found["vision"]["config"]
    return whole(found["config"], {**around, "vision_config": {**around["vision_config"], **eyes}})


def tower() -> Tower:
    found = from_config(config(), images=True).vision
    assert found
    return found


@pytest.mark.parametrize(
    ("model", "count"), [("llama-4-scout", 108_641_793_536), ("llama-4-maverick", 401_583_781_376)]
)
def test_parameters_are_the_published_totals(model: str, count: int) -> None:
    """Of the checkpoints' safetensors; the language model alone is what a job without images loads."""
    found = load().models[model]
    assert found.seeing and parameters(found.seeing) == count
    assert count - found.parameters == 871_932_416


def test_the_tower_has_linears_of_its_own() -> None:
    """336 pixels in patches of 14: 24·24 and a token of the tower's own; four patches, 5632 wide, become a token."""
    found = {t.name: (t.shape, t.kind) for t in vision_tensors(from_config(config(), images=True))}
    assert found["vision_model.patch_embedding.linear.weight"] == ((1408, 588), "linear")
    assert found["vision_model.class_embedding"] == ((1408,), "patches")
    assert found["vision_model.positional_embedding_vlm"] == ((577, 1408), "patches")
    assert found["vision_model.vision_adapter.mlp.fc1.weight"] == ((4096, 5632), "linear")
    assert found["vision_model.vision_adapter.mlp.fc2.weight"] == ((4096, 4096), "linear")
    assert found["multi_modal_projector.linear_1.weight"] == ((5120, 4096), "linear")


def test_adapters_stand_beside_the_towers_own_linears() -> None:
    """Ranks of 2: each linear has 2·(inputs + outputs) elements."""
    found = vision_matrices(from_config(config(), images=True), 2, "linears")
    assert sum(t.elements for t in found) == 2 * (588 + 1408 + 5632 + 4096 + 4096 + 4096)


def test_a_router_stands_against_adapters_beside_all_linears_where_there_is_one() -> None:
    """A dense model of the family, such as Llama Guard 4, has none."""
    dense = config()
    dense["text_config"] = {**dense["text_config"], "moe_layers": []}
    assert "router" in unsuited(from_config(config(), images=True))
    assert unsuited(from_config(dense, images=True)) == ""


@pytest.mark.parametrize(
    ("fields", "routed"),
    [
        ({"moe_layers": [1, 2]}, [1, 2]),
        ({"moe_layers": [1, 2], "interleave_moe_layer_step": 4}, [1, 2]),
        ({"moe_layers": None, "interleave_moe_layer_step": 2}, [1, 3]),
        ({"moe_layers": []}, []),
        ({"moe_layers": [], "interleave_moe_layer_step": 0}, []),
    ],
)
def test_layers_have_experts_where_the_config_lists_them(fields: dict[str, Any], routed: list[int]) -> None:
    """`Llama4TextConfig`: the list where there is one, also an empty one, else the last layer of each interval."""
    arch = from_config({**config()["text_config"], "model_type": "llama4_text", "num_hidden_layers": 4, **fields})
    assert [n for n, spec in enumerate(arch.specs) if spec.mlp == "experts"] == routed
    assert bool(arch.experts) == bool(routed)


@pytest.mark.parametrize("listed", [[48], [True], 4])
def test_a_list_of_layers_with_experts_names_layers(listed: object) -> None:
    dense = {**config()["text_config"], "model_type": "llama4_text", "moe_layers": listed}
    with pytest.raises(ConfigError, match=r"^moe_layers: given .*, allowed: a list of layers' numbers below"):
        from_config(dense)


@pytest.mark.parametrize(
    ("width", "height", "tiles"),
    [
        (336, 336, 1),
        (100, 80, 1),  # enlarged least by one square
        (337, 300, 3),  # two beside each other, and the whole
        (700, 700, 10),  # 3 x 3
        (2000, 2000, 17),  # all make it smaller: 4 x 4 least
        (10_000, 100, 17),  # 16 x 1
    ],
)
def test_an_image_is_put_on_the_canvas_that_enlarges_it_least(width: int, height: int, tiles: int) -> None:
    """`get_best_fit` with up to 16 squares of 336 pixels; 144 tokens each."""
    seen = Images(1, width, height, 1, 10**9, 1, "none", None)
    assert seen.tiles(tower()) == tiles
    assert seen.tokens(tower()) == 144 * tiles


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("pixel_shuffle_ratio", 0.3, "pixel_shuffle_ratio: given 0.3, allowed: 0.25, 0.5 or 1"),
        ("intermediate_size", 1408, "intermediate_size: given 1408, allowed: 5632"),
        ("projector_input_dim", 512, "projector_input_dim: given 512, allowed: 4096"),
    ],
)
def test_widths_that_do_not_fit_are_refused(field: str, value: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=rf"^vision_config.{line}"):
        from_config(config(**{field: value}), images=True)
