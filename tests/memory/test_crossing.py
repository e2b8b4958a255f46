"""Llama 3.2 Vision's layers that attend to images, and the tower before them, counted by hand."""

from __future__ import annotations

import pytest

from calc.catalog.catalog import load
from calc.memory import activations, vision
from calc.memory.run import Adapter, Crossing, Run
from calc.memory.tiles import between
from calc.models.architecture import CROSSING, Architecture, LayerSpec
from calc.models.vision import Tower
from calc.scenario.images import Images

ARCH = load().models["llama-3.2-11b-vision"].seeing
H, Q, KV, WIDE, HEADS, GROUPS = 4096, 4096, 1024, 14336, 32, 8
ROWS = 4 * 1601  # patches of an image: four squares of 40 x 40, and a token of each square's own


def arch() -> Architecture:
    assert ARCH
    return ARCH


def tower() -> Tower:
    assert arch().vision
    return arch().vision


def saved(run: Run) -> float:
    return activations.layer(run, CROSSING).saved.tokens


@pytest.mark.parametrize("images", [1, 2])
def test_a_layer_that_attends_to_images_by_hand(images: int) -> None:
    """Bytes for each of 1,024 tokens.

    Two RMS norms 16·h + 8 and both outputs that a number weighs 4·h; a norm of each head of queries 6·q + 4·H, of each
    patch's keys 6·kv + 4·K; what attention reads, 2·q, and keys and values that are copied for all query heads, 4·q a
    patch; its output and sum 2·q + 4·H; the MLP 8·i. A mask whose rows are no whole groups of eight is copied.
    """
    patches, each = images * ROWS, images * ROWS / 1024
    mask = 2 * patches if patches % 8 else 0
    own = 20 * H + 8 + 6 * Q + 4 * HEADS + 2 * Q + 2 * Q + 4 * HEADS + 8 * WIDE + mask
    run = Run(arch(), crossing=Crossing(patches, each, differentiable=True))
    assert saved(run) == pytest.approx(own + each * (6 * KV + 4 * GROUPS + 4 * Q))


def test_a_frozen_layer_keeps_no_output_that_its_number_weighs() -> None:
    """Beside adapters it keeps their inputs, of which those of keys and values have a row a patch."""
    run = Run(arch(), trained=False, crossing=Crossing(ROWS, 2.0, differentiable=False))
    adapted = Run(arch(), trained=False, adapter=Adapter(8, "all-linear", dropout=False, b=2),
                  crossing=Crossing(ROWS, 2.0, differentiable=False))  # fmt: skip
    # four linears of attention and three of the MLP keep 8 numbers of 2 bytes; of keys and values two patches a token
    low = 2 * 8 * (1 + 2 * 2 + 1 + 3)
    assert saved(adapted) - saved(run) >= low
    assert saved(run) < saved(Run(arch(), crossing=Crossing(ROWS, 2.0, differentiable=True)))


def test_more_images_keep_more() -> None:
    kept = [saved(Run(arch(), crossing=Crossing(n * ROWS, n * 6.0, differentiable=True))) for n in (1, 2, 3)]
    assert kept == sorted(kept)


def test_a_block_of_the_second_transformer_keeps_both_outputs() -> None:
    """4·h more than a block of the first: what the tanh of a number multiplies."""
    run = vision.running(Run(arch()), tower(), trained=True)
    specs = tower().blocks.specs
    low, top = (vision.block(run, spec, first=False, counted=False).saved.tokens for spec in (specs[0], specs[-1]))
    assert (len(specs), top - low) == (40, 4 * 1280)
    assert {*specs} == {LayerSpec(rotated=False), LayerSpec(rotated=False, weighed=True)}
    # two layer norms' inputs and outputs 8·h, with mean and scale 16; q, k, v and what attention makes 8·h; 4·H; 4·i
    assert low == 16 * 1280 + 16 + 4 * 16 + 4 * 5120
    # the norm between keeps its input, a mean and a scale
    assert between(run, tower(), first=False).saved.tokens == 2 * 1280 + 8


def test_an_image_has_four_squares_whatever_its_shape() -> None:
    """Each is filled up to 1,608 patches; one token of the text stands for the image."""
    for width, height in ((560, 560), (2000, 500)):
        two = Images(2, width, height, 1, 10**9, 1, "none", None)
        assert (two.patches(tower()), two.read(tower()), two.tokens(tower())) == (2 * 4 * 1608, 2 * ROWS, 2)
