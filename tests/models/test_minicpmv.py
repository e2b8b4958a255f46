"""MiniCPM-V: SigLIP over slices of an image, and learned queries that make tokens, by code beside the weights."""

from __future__ import annotations

import pytest
from architectures import published

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.memory import vision
from calc.memory.projector import projector
from calc.memory.run import Run
from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.models.vision import Tower
from calc.resolve.parse import parse
from calc.scenario.images import Images

MODELS = ("minicpm-v-2.6", "minicpm-v-4.5")


def tower(model: str = MODELS[0]) -> Tower:
    found = published(model).vision
    assert found
    return found


def image(width: int, height: int, count: int = 1) -> Images:
    return Images(count, width, height, 1, 10**9, 1, "none", None)


@pytest.mark.parametrize(("model", "out", "text"), [(MODELS[0], 3584, 7_612_763_648), (MODELS[1], 4096, 8_189_195_264)])
def test_parameters_are_the_published_ones(model: str, out: int, text: int) -> None:
    """27 blocks, patches, 70 x 70 positions and a norm; queries, their attention, three norms and two products."""
    h, i = 1152, 4304
    block = 4 * h + 4 * (h * h + h) + 2 * h * i + h + i
    seen = 27 * block + 3 * 14**2 * h + h + 70 * 70 * h + 2 * h
    resampler = 64 * out + h * out + 3 * out * (out + 1) + out * (out + 1) + 6 * out + out * out
    arch = published(model)
    assert sum(t.elements * t.count for t in vision_tensors(arch)) == seen + resampler
    assert parameters(arch) == text + seen + resampler == load().models[model].published_parameters


def test_the_version_says_which_language_model_it_has() -> None:
    assert (published(MODELS[0]).qk_norm, published(MODELS[1]).qk_norm) == ("", "heads")
    with pytest.raises(ConfigError, match=r"^version: given 4, allowed: 2.6"):
        from_config({**load().models[MODELS[0]].config, "version": 4})


@pytest.mark.parametrize(
    ("width", "height", "slices", "tokens"),
    [
        (448, 448, [(448, 448)], 64),  # not cut
        (200, 100, [(322, 630)], 64),  # enlarged
        (896, 896, [(448, 448)] * 2, 5 * 64),  # 2 x 2, and one of all of it
        (1344, 1344, [(448, 448)] * 2, 10 * 64),  # nine at most
        (1920, 1080, [(336, 602), (476, 420)], 9 * 64),  # 4 x 2
    ],
)
def test_an_image_is_cut_into_slices_of_its_shape(
    width: int, height: int, slices: list[tuple[int, int]], tokens: int
) -> None:
    """Heights and widths in whole patches; slices of a batch are filled up to the one with most patches."""
    seen = image(width, height)
    assert seen.slices(tower()) == slices
    assert seen.tokens(tower()) == tokens
    assert seen.patches(tower()) == tokens // 64 * max(h * w // 14**2 for h, w in slices)


@pytest.mark.parametrize(("packaged", "kept"), [(False, 133_952), (True, 35_712)])
def test_a_block_keeps_what_its_operations_do(packaged: bool, kept: int) -> None:
    """Counted with the block's operations in bf16 in torch 2.13 on the CPU, over slices of 1,024 patches.

    Without norms' numbers. Eager attention keeps the softmax in fp32 and in bf16; FlashAttention's package instead of
    both its output and a number of each head.
    """
    run = vision.running(Run(published(MODELS[0]), packaged=packaged), tower(), trained=True)
    norms = 2 * 2 * 4  # mean and deviation of two norms, in fp32 on a GPU
    assert (
        vision.block(run, run.arch.specs[0], first=False, counted=False).saved.bytes(1024, 1024) / 1024 == kept + norms
    )


def test_queries_keep_what_their_attention_does() -> None:
    """Counted likewise, of a slice: 43,967.9 bytes of a patch without norms' numbers, and the tower's norm's input."""
    run = vision.running(Run(published(MODELS[0])), tower(), trained=True)
    kept = projector(run, tower(), tower().merger, first=False, below=run).saved.bytes(1024, 1024) / 1024
    norms = 8 + 8 + 2 * 8 / 16  # of each patch twice, and of each query twice
    assert kept == pytest.approx(43_967.9 + 2 * 1152 + norms, abs=0.5)


def test_scores_grow_with_slices_and_not_with_their_square() -> None:
    """A slice's patches see those of their own slice alone."""

    def seen(count: int) -> int:
        job = {"model": MODELS[0], "task": "sft", "gpu": "h200", "gpus": 8, "sharding": "fsdp2", "seq_len": 4096}
        s = parse({**job, "attention": "sdpa", "images": {"width": 448, "height": 448, "count": count}})
        phases = estimate(s, replays=False).groups[0].phases
        lines = next(p.moment.lines for p in phases if p.name == "backward")
        return sum(line.bytes for line in lines if line.source == "activations#vision" and "27·" in line.formula)

    assert seen(4) == 4 * seen(1) > 0
