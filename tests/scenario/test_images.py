"""Images of a sample: tokens as the processors make them, and images that no job can have."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.launch import launch
from calc.resolve.parse import parse, vary
from calc.scenario.images import Images
from calc.scenario.scenario import ScenarioError
from calc.step.roles import Roles
from calc.step.stages import Stages

VL = {"model": "qwen2.5-vl-3b", "task": "sft", "gpu": "h100-sxm", "seq_len": 4096}


SMALL = {"width": 448, "height": 448}


def held(fields: dict[str, Any]) -> dict[str, int]:
    """The bytes of each component as the weights are loaded."""
    (group,) = estimate(parse(fields)).groups
    return {line.component: line.bytes for line in group.phases[0].moment.lines}


def peak(**fields: Any) -> int:
    phases = estimate(parse({**VL, **fields})).groups[0].phases
    return max(phase.moment.allocated_bytes for phase in phases)


@pytest.mark.parametrize(
    ("said", "resized", "patches"),
    [
        # by hand: 1024/28 = 36.57 and 768/28 = 27.43 round to 37 and 27 tokens
        ({"width": 1024, "height": 768}, (756, 1036), 4 * 27 * 37),
        # 4000 x 3000 above 1003520 pixels: sqrt(12e6/1003520) = 3.458 shrinks to 30 x 41 tokens
        ({"width": 4000, "height": 3000, "max_pixels": 1003520}, (840, 1148), 4 * 30 * 41),
        # 30 x 30 is one token of 784 pixels, below 3136: grown to 56 x 56
        ({"width": 30, "height": 30}, (56, 56), 16),
        # five frames are read two by two, and two videos twice
        ({"width": 336, "height": 336, "frames": 5, "count": 2}, (336, 336), 2 * 3 * 576),
        # a frame has 100352 pixels at least, 128 tokens: 280 x 280 grow by 1.13 to 317, rounded up
        ({"width": 280, "height": 280, "frames": 2}, (336, 336), 576),
        # and may have 1.05 times as many, whatever is asked for: 640 x 360 shrink by sqrt(230400/105369) = 1.479
        ({"width": 640, "height": 360, "frames": 12, "max_pixels": 50176}, (224, 420), 6 * 16 * 30),
        # the same processor
        ({"model": "qwen2-vl-2b", "width": 1024, "height": 768}, (756, 1036), 4 * 27 * 37),
        # patches of 16: 1024/32 = 32 and 768/32 = 24 tokens
        ({"model": "qwen3-vl-2b", "width": 1024, "height": 768}, (768, 1024), 4 * 24 * 32),
        # below 65536 pixels: sqrt(65536/40000) = 1.28 grows 200 x 200 to 256 x 256
        ({"model": "qwen3-vl-2b", "width": 200, "height": 200}, (256, 256), 256),
        # a video's frames share 25165824 pixels: 64 of 1024 x 1024 shrink by sqrt(64·2^20/25165824) = 1.63 to 608
        ({"model": "qwen3-vl-2b", "width": 1024, "height": 1024, "frames": 64}, (608, 608), 32 * 38 * 38),
    ],
)
def test_patches_as_the_processor_makes_them(said: dict[str, Any], resized: tuple[int, int], patches: int) -> None:
    """transformers 5.23 `models/qwen2_vl/image_processing_qwen2_vl.py`, `smart_resize`."""
    images = {name: given for name, given in said.items() if name != "model"}
    s = parse({**VL, "seq_len": 16384, "model": said.get("model", VL["model"]), "images": images})
    tower = s.architecture.vision
    assert tower and isinstance(s.images, Images)
    assert (s.images.resized(tower), s.images.patches(tower)) == (resized, patches)
    assert s.images.tokens(tower) * 4 == patches
    assert parse(s.as_dict()).images == s.images


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"model": "qwen2.5-3b"}, "images: given for a model without a vision tower"),
        ({"seq_len": 100}, "seq_len: given 100, allowed: at least the 999 tokens of a sample's images"),
        (
            {"method": "lora", "lora.targets": ["q_proj"], "images.freeze": "none"},
            "images.freeze: given 'none', allowed: vision with lora.targets by name",
        ),
        ({"attention": "eager"}, "attention: given 'eager' with images, allowed: flash, sdpa"),
        ({"images.min_pixels": 10**9}, "images.min_pixels: given 1000000000, allowed: at most max_pixels = 12845056"),
        ({"images.height": 1}, "images.width: given 1024 with height 1, allowed: sides of which neither"),
    ],
)
def test_impossible_images_are_refused(fields: dict[str, Any], line: str) -> None:
    given = {"images.width": 1024, "images.height": 768} | fields
    with pytest.raises(ScenarioError, match=r"^scenario: " + line):
        parse({**VL, **given})


def test_memory_follows_the_images() -> None:
    """More pixels, more frames and more images take more; freezing and checkpointing take less."""
    small = SMALL
    assert peak() < peak(images=small) < peak(images={"width": 896, "height": 896})
    assert peak(images=small) < peak(images={**small, "count": 2})
    assert peak(images={**small, "freeze": "vision"}) < peak(images={**small, "freeze": "tower"}) < peak(images=small)
    assert peak(images={**small, "checkpointing": True}) < peak(images=small)


def test_a_tower_may_be_loaded_beside_text() -> None:
    """Gemma 3 4B has 419,816,304 parameters of tower and projector, in bf16 here, which nothing reads or trains."""
    base = {**VL, "model": "gemma-3-4b", "method": "lora", "lora.rank": 8}
    alone, beside = (held(base | {"vision_tower": it}) for it in (False, True))
    assert beside["weights"] - alone["weights"] == 2 * 419_816_304
    assert beside["adapter"] == alone["adapter"]
    for fields, said in (({"model": "llama-3-8b"}, "for llama-3-8b"), ({"images": SMALL}, "with images")):
        with pytest.raises(ScenarioError, match=f"vision_tower: given true {said}"):
            parse(base | {"vision_tower": True} | fields)


def test_gemma_3_has_its_tower_where_it_reads_images() -> None:
    """Each image becomes 256 tokens of 16 patches; without images the answer says that the tower is left out."""
    gemma = {**VL, "model": "gemma-3-4b"}
    s = parse({**gemma, "images": {"width": 300, "height": 2000, "count": 2}})
    assert s.images and s.architecture.vision
    assert (s.images.resized(s.architecture.vision), s.images.tokens(s.architecture.vision)) == ((896, 896), 512)
    assert not any("vision tower" in warning for warning in s.warnings)
    text = parse(gemma)
    assert text.architecture == load().model("gemma-3-4b").architecture and text.architecture.vision is None
    said = "gemma-3-4b without images is its language model alone: with images its vision tower counts, too"
    assert said in text.warnings
    assert not any("vision tower" in warning for warning in parse(VL).warnings)


@pytest.mark.parametrize(("field", "given"), [("min_pixels", 4096), ("max_pixels", 10**6), ("frames", 2)])
def test_what_a_processor_of_one_size_does_not_ask_for_is_refused(field: str, given: int) -> None:
    line = rf"^scenario: images.{field}: given {given}, allowed: nothing; every image is resized to 896 pixels a side"
    with pytest.raises(ScenarioError, match=line):
        parse({**VL, "model": "gemma-3-4b", "images": {"width": 64, "height": 64, field: given}})


@pytest.mark.parametrize(
    ("model", "trainer", "versions", "keeps"),
    [
        ("qwen2.5-vl-3b", "own", {}, True),
        ("gemma-3-4b", "own", {}, True),
        ("qwen3-vl-2b", "own", {}, False),
        ("qwen2.5-vl-3b", "own", {"transformers": "4.57"}, False),
        ("qwen2.5-vl-3b", "llamafactory", {}, False),
    ],
)
def test_checkpointing_hooks_the_patches_of_a_frozen_tower(
    model: str, trainer: str, versions: dict[str, str], keeps: bool
) -> None:
    """Transformers 5 does so where the patches are an input embedding to it, with adapters or without.

    transformers 5.23 `modeling_utils.py`, `activation_checkpointing_enable`; LLaMA-Factory 0.9.4 has a function of its
    own.
    """
    s = parse(
        {
            **VL, "model": model, "trainer": trainer, "versions": versions, "checkpointing": "full",
            "images": {"width": 896, "height": 896, "freeze": "vision"},
        }
    )  # fmt: skip
    roles = Roles(s)
    (placed,) = roles.placed.values()
    seen = Stages(roles, ("actor",)).seen(placed, 1)
    assert seen and seen.passes == keeps


def test_adapters_in_the_tower_take_more_than_adapters_outside() -> None:
    job = {"method": "lora", "checkpointing": "full"}
    image = {"width": 896, "height": 896}
    at = [peak(**job, images={**image, "freeze": freeze}) for freeze in ("vision", "tower", "none")]
    assert at[0] < at[1] < at[2]


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_more_ranks_never_take_more(sharding: str) -> None:
    """Each engine holds the tower, and shards of it where it shards."""
    at = {n: peak(sharding=sharding, gpus=n, images={"width": 448, "height": 448}) for n in (4, 8)}
    assert at[8] <= at[4]


@pytest.mark.parametrize(
    ("trainer", "freeze", "again"),
    [("own", "none", None), ("llamafactory", "vision", None), ("ms-swift", "vision", False)],
)
def test_trainers_have_habits_of_their_own(trainer: str, freeze: str, again: bool | None) -> None:
    """ms-swift 4.4.0 and LLaMA-Factory 0.9.4 freeze tower and projector; ms-swift then runs no block of it again."""
    s = parse({**VL, "trainer": trainer, "checkpointing": "full", "images": {"width": 448, "height": 448}})
    assert s.images
    assert (s.images.freeze, s.images.checkpointing) == (freeze, again)


def test_commands_say_what_is_frozen() -> None:
    swift, factory = (
        launch(parse({**VL, "trainer": trainer, "images": {"width": 448, "height": 448, "max_pixels": 1003520}}))
        for trainer in ("ms-swift", "llamafactory")
    )
    assert "MAX_PIXELS=1003520 swift sft" in swift.command
    assert "--freeze_vit True" in swift.command and "--vit_gradient_checkpointing False" in swift.command
    assert "freeze_vision_tower: true" in factory.files["llamafactory.yaml"]
    assert "image_max_pixels: 1003520" in factory.files["llamafactory.yaml"]
    job = {"task": "grpo", "framework": "openrlhf", "rollout.n": 4, "attention": "flash", "prompt_len": 1024}
    images = {"width": 448, "height": 448, "count": 2, "freeze": "vision"}
    command = launch(parse({**{k: v for k, v in VL.items() if k != "seq_len"}, **job, "images": images})).command
    assert "--data.max_images_per_prompt 2" in command and "--actor.freeze_visual_encoder" in command


def test_a_search_that_varies_checkpointing_varies_the_tower() -> None:
    """The tower follows the layers where nothing else is said, in `vary` as in `parse`."""
    images = {"width": 896, "height": 896}
    plain = parse({**VL, "images": images})
    changed = estimate(vary(plain, {"checkpointing": "full"})).groups[0].phases
    asked = estimate(parse({**VL, "images": images, "checkpointing": "full"})).groups[0].phases
    assert [p.moment.device_bytes for p in changed] == [p.moment.device_bytes for p in asked]
