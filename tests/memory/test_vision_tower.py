"""What Qwen2.5-VL's vision tower keeps for backward, against the storages that Transformers' own code saved.

Counted by `torch.autograd.graph.saved_tensors_hooks` around the forward of `Qwen2_5_VisionTransformerPretrainedModel`
in train mode, bf16, SDPA, weights left out: torch 2.13.0 on a CPU, transformers 5.23.0.
"""

from __future__ import annotations

import pytest

from calc.memory import vision
from calc.memory.run import Run
from calc.models.architecture import Architecture
from calc.models.hf_config import from_config
from calc.scenario.images import Images
from calc.step.tower import Seen

# hidden, intermediate, heads, width of the language model, blocks, patches on a side
SIZES = {
    "3b": (1280, 3420, 16, 2048, 2, 16),
    "7b": (1280, 3420, 16, 3584, 2, 16),
    "32b": (1280, 3456, 16, 5120, 2, 16),
    "72b": (1280, 3456, 16, 8192, 1, 32),
    "small": (160, 220, 2, 256, 4, 32),
    "larger image": (160, 220, 2, 256, 4, 64),
}
# bytes saved where all is trained, where the projector alone is, and where a hook makes frozen patches need a gradient
SAVED = {
    "3b": (38406144, 2621952, 25782272),
    "7b": (38406144, 2621952, 25782272),
    "32b": (38553600, 2621952, 25892864),
    "72b": (86507520, 10487808, 56049664),
    "small": (31973376, 1312768, 20226048),
    "larger image": (127893504, 5251072, 80904192),
}


def model(hidden: int, intermediate: int, heads: int, out: int, depth: int, _: int) -> Architecture:
    text = {"hidden_size": out, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    eyes = {"depth": depth, "hidden_size": hidden, "intermediate_size": intermediate, "num_heads": heads}
    return from_config(
        {
            "model_type": "qwen2_5_vl", "intermediate_size": 8, "vocab_size": 128, **text,
            "vision_config": {**eyes, "out_hidden_size": out},
        }
    )  # fmt: skip


def seen(size: str, freeze: str, *, trained: bool = True, hooked: bool = False) -> Seen:
    arch = model(*SIZES[size])
    assert arch.vision
    side = SIZES[size][-1] * 14
    images = Images(1, side, side, 1, 10**9, 1, freeze, False)  # type: ignore[arg-type]
    return Seen("actor", arch, arch.vision, Run(arch, trained=trained), images, 1, hooked)


def saved(of: Seen) -> int:
    """Everything that the tower keeps but the pixels of the batch."""
    return sum(line.bytes for line in of.kept()) - of.pixels()[0].bytes


@pytest.mark.parametrize("size", SIZES)
def test_the_tower_saves_what_transformers_saves(size: str) -> None:
    """Trained whole, with a frozen tower below a trained projector, and frozen below a hook: exact to a byte a line.

    Autograd's AccumulateGrad holds the hooked leaf, 2·h a patch, which no operation saves.
    """
    leaf = 2 * SIZES[size][0] * SIZES[size][-1] ** 2
    found = [
        saved(seen(size, "none")),
        saved(seen(size, "tower")),
        saved(seen(size, "vision", trained=False, hooked=True)),
    ]
    assert found == pytest.approx([*SAVED[size][:2], SAVED[size][2] + leaf], abs=4)


def test_a_frozen_tower_keeps_nothing() -> None:
    """Neither weights nor pixels need a gradient, so that autograd records nothing of it."""
    assert [line.source for line in seen("7b", "vision").kept()] == ["activations#vision"]
    assert saved(seen("7b", "vision")) == 0


def test_a_block_by_hand() -> None:
    """Bytes a patch: a Llama layer's 16·h + 8·i + 8; 4·h of q and k, 6·h of qkv, 4·h of outputs; 4·H."""
    arch = model(*SIZES["small"])
    assert arch.vision
    run = vision.running(Run(arch), arch.vision, trained=True)
    h, i, heads = 160, 220, 2
    assert vision.block(run, first=False, counted=False).saved.tokens == 16 * h + 8 * i + 8 + 14 * h + 4 * heads


def test_checkpointing_keeps_inputs_of_blocks() -> None:
    """Two bytes of the tower's hidden size a patch and block, beside patches and projector."""
    plain = seen("small", "none")
    images = Images(1, 448, 448, 1, 10**9, 1, "none", True)
    again = Seen(plain.role, plain.arch, plain.tower, plain.run, images, 1)
    assert [line.bytes for line in again.kept() if line.component == "checkpoints"] == [4 * 2 * 160 * 1024]
    assert saved(again) < saved(plain) / 5
