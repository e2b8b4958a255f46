"""A tower that reads squares: their copy, several blocks side by side, and heads that are in no groups in fp32."""

from __future__ import annotations

from typing import Any

from architectures import published

from calc.estimate.estimate import estimate
from calc.memory.run import Run
from calc.memory.vision import running
from calc.models.architecture import Architecture
from calc.resolve.parse import parse
from calc.scenario.images import Images
from calc.step.tower import Seen

GRANITE = "granite-vision-3.3-2b"


def seen(model: str, **settings: Any) -> Seen:
    arch: Architecture = published(model)
    assert arch.vision
    run = Run(arch, "bf16", trained=True, **settings)
    return Seen("actor", arch, arch.vision, run, Images(1, 768, 768, 1, 10**9, 1, "none", False), 1)


def held(lines: list[Any]) -> int:
    return sum(line.bytes for line in lines)


def test_the_gradient_of_several_blocks_waits_for_the_lowest() -> None:
    """Granite Vision's four outputs are joined: of five squares of 27² patches, 1152 wide in bf16.

    The last block's gradient is a view of it, which its backward counts.
    """
    images = seen(GRANITE)
    each = 5 * 27**2 * 1152 * 2
    assert [held(images.joined(layer)) for layer in (26, 25, 4, 3, 0)] == [3 * each, 4 * each, 4 * each, 0, 0]
    assert [held(images.waiting(layers)) for layers in (3, 4, 26, 27)] == [0, each, 3 * each, 3 * each]
    assert not seen("llava-1.6-vicuna-7b").joined(0)


def test_squares_are_joined_by_a_copy_of_their_pixels_which_frames_need_not() -> None:
    """5 squares of 3·384² numbers in fp32, beside the batch's own; in bf16 a cast of them is what is kept."""
    arch = published("llava-onevision-0.5b")
    assert arch.vision
    run = Run(arch, "fp32", trained=True)
    image, video = Images(1, 768, 768, 1, 10**9, 1, "none", None), Images(1, 768, 768, 1, 10**9, 5, "none", None)
    joined, there = (Seen("actor", arch, arch.vision, run, it, 1) for it in (image, video))
    assert joined.count == there.count == 5 * 27**2
    kept = [it.line("activations", it.patches.saved).bytes for it in (joined, there)]
    assert kept[0] - kept[1] == 4 * 3 * 14**2 * joined.count


def test_a_tower_has_no_grouped_heads_in_fp32() -> None:
    """The language model's go through SDPA's plain mathematics, which keeps scores; the tower's do not."""
    job = {"model": "llava-onevision-0.5b", "task": "sft", "gpu": "h200", "seq_len": 4096, "precision": "fp32",
           "attention": "sdpa", "images": {"width": 768, "height": 768}}  # fmt: skip
    lines = [line for phase in estimate(parse(job)).groups[0].phases for line in phase.moment.lines]
    assert not [line for line in lines if "P_v·P_v" in line.formula or "P_v^2" in line.formula]
    arch = published("llava-onevision-0.5b")
    assert arch.vision
    assert running(Run(arch, "fp32", kernel="math"), arch.vision, trained=True).kernel == "efficient"
