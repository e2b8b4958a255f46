"""Kimi-VL: a tower over images of their own shapes, whose code lies beside the weights, and Moonlight behind it."""

from __future__ import annotations

import pytest
from architectures import published

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.memory import vision
from calc.memory.run import Run
from calc.models.architecture import language, parameters, vision_tensors
from calc.models.vision import Tower
from calc.resolve.parse import parse
from calc.scenario.images import Images
from calc.step.tower import Seen

MODEL = "kimi-vl-a3b"


def tower() -> Tower:
    found = published(MODEL).vision
    assert found
    return found


def image(width: int, height: int) -> Images:
    return Images(1, width, height, 1, tower().limits.most, 1, "none", None)


def test_parameters_are_those_of_the_modules_and_of_moonlight() -> None:
    """Of 27 blocks, patches, 64 x 64 positions and a norm; the projector's norm and two linears with a bias."""
    h, i, wide = 1152, 4304, 4 * 1152
    block = 4 * h + 3 * h * h + 3 * h + h * h + h + 2 * h * i + h + i
    seen = 27 * block + h * 3 * 14**2 + h + 64 * 64 * h + 2 * h
    projector = 2 * h + wide * wide + wide + wide * 2048 + 2048
    arch = published(MODEL)
    assert sum(t.elements * t.count for t in vision_tensors(arch)) == seen + projector == 447_545_840
    assert parameters(language(arch)) == load().models["moonlight-16b-a3b"].parameters
    assert {"vision_tower.encoder.blocks.*.wqkv.weight", "vision_tower.encoder.blocks.*.wo.bias"} <= {
        t.name for t in vision_tensors(arch)
    }


@pytest.mark.parametrize(
    ("width", "height", "resized"),
    [
        (896, 896, (896, 896)), (100, 30, (56, 112)),  # filled up to whole tokens, never enlarged
        (1792, 896, (644, 1288)),  # 8192 patches become 4096: 633 x 1267 pixels, filled up
    ],
)  # fmt: skip
def test_an_image_is_made_smaller_to_4096_patches(width: int, height: int, resized: tuple[int, int]) -> None:
    assert image(width, height).resized(tower()) == resized
    assert image(width, height).tokens(tower()) == resized[0] * resized[1] // 28**2


@pytest.mark.parametrize(("packaged", "kept"), [(False, 108_096), (True, 40_320)])
def test_a_block_keeps_what_its_operations_do(packaged: bool, kept: int) -> None:
    """Counted with the block's operations in bf16 in torch 2.13 on the CPU, over 1,024 patches, without norms' numbers.

    SDPA gets three dimensions, and runs its plain mathematics: fp32 queries, keys and values of 1152, 16 scores to each
    patch. FlashAttention's package keeps q, k, its output, a number of each head, and the projection that v is of.
    """
    run = vision.running(Run(published(MODEL), packaged=packaged), tower(), trained=True, count=1024)
    norms = 2 * 2 * 4  # mean and deviation of two norms, in fp32 on a GPU
    assert (
        vision.block(run, run.arch.specs[0], first=False, counted=False).saved.bytes(1024, 1024) / 1024 == kept + norms
    )


def test_blocks_are_not_run_again() -> None:
    """`MoonVitPretrainedModel` has no gradient checkpointing: with it, the language model alone keeps less."""

    def seen(checkpointing: str) -> int:
        job = {"model": MODEL, "task": "sft", "gpu": "h200", "gpus": 8, "sharding": "fsdp2", "seq_len": 4096}
        s = parse({**job, "checkpointing": checkpointing, "images": {"width": 448, "height": 448}})
        phases = estimate(s, replays=False).groups[0].phases
        lines = next(p.moment.lines for p in phases if p.name == "backward")
        return sum(line.bytes for line in lines if line.source == "activations#vision")

    assert seen("full") == seen("none") > 0


def test_a_mask_over_all_images_is_bytes() -> None:
    """Of one row of all patches, two images of 32 x 32; FlashAttention's package reads lengths instead."""
    arch, two = published(MODEL), image(448, 448)
    plain, packaged = (Seen("policy", arch, tower(), Run(arch, packaged=p), two, 2) for p in (False, True))
    assert [line.bytes for line in plain.mask] == [2048**2]
    assert packaged.mask == []
