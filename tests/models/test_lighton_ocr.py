"""LightOnOCR: Pixtral's tower and Mistral 3's projector before Qwen3 0.6B, in modules of other names."""

from __future__ import annotations

from architectures import published

from calc.catalog.catalog import load
from calc.models.architecture import language, parameters, vision_tensors
from calc.models.vision import Tower
from calc.scenario.images import Images


def tower() -> Tower:
    found = published("lightonocr-2-1b").vision
    assert found
    return found


def test_parameters_are_those_of_the_modules() -> None:
    """24 blocks, patches and a norm; a norm, and three linears without a bias; the first reads four patches."""
    h, i, out = 1024, 4096, 1024
    seen = 24 * (2 * h + 4 * h * h + 3 * h * i) + h * 3 * 14**2 + h
    projector = h + 4 * h * h + h * out + out * out
    arch = published("lightonocr-2-1b")
    assert sum(t.elements * t.count for t in vision_tensors(arch)) == seen + projector
    assert parameters(language(arch)) == load().models["qwen3-0.6b"].parameters
    assert round(parameters(arch) / 1e6) == 1006
    names = {t.name.removeprefix("model.") for t in vision_tensors(arch)}
    assert {"vision_encoder.patch_conv.weight", "vision_projection.patch_merger.merging_layer.weight"} < names


def test_a_page_is_made_smaller_to_1540_pixels() -> None:
    """Of the longer side: a page at 200 dots an inch becomes 39 x 55 tokens."""
    image = Images(1, 1654, 2339, 1, 10**9, 1, "none", None)
    assert image.resized(tower()) == (1540, 1092)
    assert image.tokens(tower()) == 55 * 39
