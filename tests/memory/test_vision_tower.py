"""The tensors that Qwen-VL's vision towers keep for backward, against the storages that Transformers' own code saved.

Counted by `torch.autograd.graph.saved_tensors_hooks` around the forward of `Qwen2VisionTransformerPretrainedModel`,
`Qwen2_5_VisionTransformerPretrainedModel` and `Qwen3VLVisionModel` in train mode, bf16, SDPA, weights left out: torch
2.13.0 on a CPU, transformers 5.23.0. There PyTorch's layer norm keeps mean and scale of a row in bf16, on a GPU in fp32
(torch 2.13 `native/cpu/layer_norm_kernel.cpp`, `native/cuda/layer_norm_kernel.cu`): 4 bytes more a row.
"""

from __future__ import annotations

from typing import Any

import pytest

from calc.memory import vision
from calc.memory.run import Run
from calc.models.architecture import Architecture
from calc.models.hf_config import from_config
from calc.scenario.images import Images
from calc.step.tower import Seen

# the family, and hidden, intermediate, heads, width of the language model, blocks, patches on a side, deep blocks
SIZES: dict[str, tuple[Any, ...]] = {
    "2.5 3b": ("qwen2_5_vl", 1280, 3420, 16, 2048, 2, 16, []),
    "2.5 7b": ("qwen2_5_vl", 1280, 3420, 16, 3584, 2, 16, []),
    "2.5 32b": ("qwen2_5_vl", 1280, 3456, 16, 5120, 2, 16, []),
    "2.5 72b": ("qwen2_5_vl", 1280, 3456, 16, 8192, 1, 32, []),
    "2.5 small": ("qwen2_5_vl", 160, 220, 2, 256, 4, 32, []),
    "2.5 larger image": ("qwen2_5_vl", 160, 220, 2, 256, 4, 64, []),
    "2 2b": ("qwen2_vl", 1280, 5120, 16, 1536, 2, 16, []),
    "2 small": ("qwen2_vl", 160, 640, 2, 256, 4, 32, []),
    "3 2b": ("qwen3_vl", 1024, 4096, 16, 2048, 4, 16, [0, 1, 2]),
    "3 8b": ("qwen3_vl", 1152, 4304, 16, 4096, 2, 16, [0]),
    "3 small": ("qwen3_vl", 160, 256, 2, 256, 4, 32, [1, 2]),
}
# bytes saved where all is trained, where the projectors alone are, and where a hook makes frozen patches need a
# gradient; Qwen3-VL has no such hook
SAVED = {
    "2.5 3b": (38406144, 2621952, 25782272),
    "2.5 7b": (38406144, 2621952, 25782272),
    "2.5 32b": (38553600, 2621952, 25892864),
    "2.5 72b": (86507520, 10487808, 56049664),
    "2.5 small": (31973376, 1312768, 20226048),
    "2.5 larger image": (127893504, 5251072, 80904192),
    "2 2b": (33571840, 2622464, 22483968),
    "2 small": (34590720, 1314816, 22351872),
    "3 2b": (47666944, 8390400, 0),
    "3 8b": (26903808, 4719872, 0),
    "3 small": (25810944, 3938304, 0),
}


def model(
    family: str, hidden: int, intermediate: int, heads: int, out: int, depth: int, _: int, deep: list[int]
) -> Architecture:
    text = {"hidden_size": out, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    eyes = {"depth": depth, "hidden_size": hidden, "intermediate_size": intermediate, "out_hidden_size": out}
    if family == "qwen2_vl":
        eyes = {"depth": depth, "embed_dim": hidden, "mlp_ratio": intermediate // hidden, "hidden_size": out}
    return from_config(
        {
            "model_type": family, "intermediate_size": 8, "vocab_size": 128, **text,
            "vision_config": {**eyes, "num_heads": heads, "deepstack_visual_indexes": deep},
        }
    )  # fmt: skip


def seen(size: str, freeze: str, *, trained: bool = True, hooked: bool = False) -> Seen:
    arch = model(*SIZES[size])
    assert arch.vision
    side = SIZES[size][-2] * arch.vision.patch
    images = Images(1, side, side, 1, 10**9, 1, freeze, False)  # type: ignore[arg-type]
    return Seen("actor", arch, arch.vision, Run(arch, trained=trained), images, 1, hooked)


def saved(of: Seen) -> int:
    """Everything that the tower itself keeps but the pixels of the batch."""
    projected = of.line("activations", of.projector.saved).bytes if of.keeps else 0
    return sum(line.bytes for line in of.below(of.tower.blocks.layers)) + projected


def statistics(of: Seen, blocks: bool) -> int:
    """Bytes of layer norms' mean and scale of each row that a GPU keeps more: two norms a block, one a projector."""
    if of.tower.blocks.norm != "layer":
        return 0
    tokens = of.count // of.tower.merge**2
    return 4 * (of.count * (1 + 2 * of.tower.blocks.layers * blocks) + tokens * len(of.tower.deep))


@pytest.mark.parametrize("size", SIZES)
def test_the_tower_saves_what_transformers_saves(size: str) -> None:
    """Trained whole, with a frozen tower below a trained projector, and frozen below a hook: exact to a byte a line.

    Autograd's AccumulateGrad holds the hooked leaf, 2·h a patch, which no operation saves unless a layer norm has it
    as its input.
    """
    whole, projecting, frozen = (
        seen(size, "none"), seen(size, "tower"), seen(size, "vision", trained=False, hooked=True),
    )  # fmt: skip
    leaf = 2 * whole.tower.blocks.hidden * whole.count * whole.tower.windowed
    expected = [SAVED[size][0] + statistics(whole, True), SAVED[size][1] + statistics(whole, False)]
    expected.append(SAVED[size][2] + (leaf + statistics(whole, True)) * whole.tower.hooked)
    assert [saved(of) for of in (whole, projecting, frozen)] == pytest.approx(expected, abs=4)


def test_a_frozen_tower_keeps_nothing() -> None:
    """Neither weights nor pixels need a gradient, so that autograd records nothing of it."""
    assert [line.source for line in seen("2.5 7b", "vision").kept()] == ["activations#vision"]
    assert saved(seen("2.5 7b", "vision")) == 0


def test_a_block_by_hand() -> None:
    """Bytes a patch: a Llama layer's 16·h + 8·i + 8; 4·h of q and k, 6·h of qkv, 4·h of outputs; 4·H.

    Qwen2-VL's: two layer norms' inputs, means and scales 4·h + 16, their outputs 4·h, the same attention, and an MLP
    without gate that keeps its input, a sigmoid of it and their product.
    """
    arch = model(*SIZES["2.5 small"])
    assert arch.vision
    run = vision.running(Run(arch), arch.vision, trained=True)
    h, i, heads = 160, 220, 2
    assert (
        vision.block(run, run.arch.specs[0], first=False, counted=False).saved.tokens
        == 16 * h + 8 * i + 8 + 14 * h + 4 * heads
    )
    arch = model(*SIZES["2 small"])
    assert arch.vision
    run, i = vision.running(Run(arch), arch.vision, trained=True), 640
    assert (
        vision.block(run, run.arch.specs[0], first=False, counted=False).saved.tokens
        == 8 * h + 16 + 14 * h + 4 * heads + 6 * i
    )


def test_checkpointing_keeps_inputs_of_blocks() -> None:
    """Two bytes of the tower's hidden size a patch and block, beside patches and projector."""
    plain = seen("2.5 small", "none")
    images = Images(1, 448, 448, 1, 10**9, 1, "none", True)
    again = Seen(plain.role, plain.arch, plain.tower, plain.run, images, 1)
    assert [line.bytes for line in again.kept() if line.component == "checkpoints"] == [4 * 2 * 160 * 1024]
    assert saved(again) < saved(plain) / 5
