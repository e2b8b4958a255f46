"""Counts of vision towers, by hand; the published totals are in `models/`. And configs that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calc.models import architecture as A
from calc.models.hf_config import from_config
from calc.models.lora import vision_matrices

TEXT = {
    "model_type": "qwen2_5_vl", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 12, "vocab_size": 10,
}  # fmt: skip
EYES = {"depth": 3, "hidden_size": 4, "num_heads": 2, "intermediate_size": 6, "out_hidden_size": 8}


def tiny(**eyes: Any) -> A.Architecture:
    return from_config({**TEXT, "vision_config": {**EYES, **eyes}})


def qwen3(**eyes: Any) -> A.Architecture:
    more = {"num_position_embeddings": 9, "deepstack_visual_indexes": [0, 2]}
    return from_config({**TEXT, "model_type": "qwen3_vl", "head_dim": 4, "vision_config": {**EYES, **more, **eyes}})


def test_qwen2_5_vl_by_hand() -> None:
    """A block: qkv 4·12 + 12, proj 4·4 + 4, MLP 3·24 + 6 + 6 + 4, two norms of 4, 176 in all.

    Patches 4·3·2·14·14 = 4704; the projector's norm 4, 16·16 + 16 and 16·8 + 8: 412.
    """
    arch = tiny()
    assert sum(t.elements * t.count for t in A.vision_tensors(arch, "blocks")) == 3 * 176
    assert sum(t.elements for t in A.vision_tensors(arch, "projector")) == 412
    text = from_config({**TEXT, "model_type": "qwen2"})
    assert A.parameters(arch) == A.parameters(text) + 3 * 176 + 412 + 4704
    assert A.parameters(A.language(arch)) == A.parameters(text)


def test_qwen2_vl_by_hand() -> None:
    """A block: qkv 60, proj 20, an MLP without gate 4·8 + 8 and 8·4 + 4, two norms of 4 + 4, 172 in all.

    Patches 4704; the projector's norm has a bias, too: 416.
    """
    eyes = {"depth": 3, "embed_dim": 4, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 8}
    arch = from_config({**TEXT, "model_type": "qwen2_vl", "vision_config": eyes})
    text = from_config({**TEXT, "model_type": "qwen2"})
    assert sum(t.elements * t.count for t in A.vision_tensors(arch, "blocks")) == 3 * 172
    assert A.parameters(arch) == A.parameters(text) + 3 * 172 + 416 + 4704


def test_qwen3_vl_by_hand() -> None:
    """A block: qkv 60, proj 20, an MLP without gate 4·6 + 6 and 6·4 + 4, two norms of 8, 154 in all.

    Patches of 16 x 16, 4·3·2·256 = 6144 and a bias of 4; 9 positions of 4. The last projector has a norm of 8 and 408
    others, those of the two deep blocks have norms of 16 + 16.
    """
    arch = qwen3()
    text = from_config({**TEXT, "model_type": "qwen3", "head_dim": 4})
    assert sum(t.elements * t.count for t in A.vision_tensors(arch, "blocks")) == 3 * 154
    assert sum(t.elements * t.count for t in A.vision_tensors(arch, "projector")) == 416 + 2 * 440
    assert A.parameters(arch) == A.parameters(text) + 3 * 154 + 416 + 2 * 440 + 6144 + 4 + 36
    assert arch.vision and arch.vision.deep == (0, 2)


def gemma(outside: dict[str, Any] | None = None, **eyes: Any) -> A.Architecture:
    """Images of 8 x 8 patches of 2 x 2 pixels, of which an image makes 16 tokens."""
    vision = {
        "num_hidden_layers": 3, "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 6, "image_size": 16,
        "patch_size": 2, "vision_use_head": False,
    }  # fmt: skip
    around = {"mm_tokens_per_image": 16, **(outside or {})}
    return from_config(
        {"model_type": "gemma3", "text_config": TEXT, "vision_config": {**vision, **eyes}, **around}, images=True
    )


def test_gemma_3_by_hand() -> None:
    """A block: q, k, v and their biases 60, out 20, MLP 24 + 6 + 24 + 4, two norms of 8: 154.

    Patches 4·3·2·2 and a bias of 4; 64 positions of 4; a norm of 8 at the end. The projector's norm has 4, its matrix
    4·8. Without images the language model is alone.
    """
    arch = gemma()
    inner = {**TEXT, "model_type": "gemma3_text"}
    text = from_config({"model_type": "gemma3", "text_config": inner, "vision_config": {}})
    assert text == from_config(inner)
    assert sum(t.elements * t.count for t in A.vision_tensors(arch, "blocks")) == 3 * 154
    assert sum(t.elements * t.count for t in A.vision_tensors(arch, "projector")) == 4 + 32
    assert A.parameters(arch) == A.parameters(text) + 3 * 154 + 36 + 48 + 4 + 256 + 8
    assert arch.vision and (arch.vision.merge, arch.vision.edge, arch.vision.positions) == (2, 16, 64)


def test_paligemma_by_hand() -> None:
    """Gemma 3's tower; one linear of 4·8 and a bias of 8 makes a token of each of the 64 patches."""
    eyes = gemma().vision
    text = {**TEXT, "model_type": "gemma", "head_dim": 4}
    inside = {
        "num_hidden_layers": 3, "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 6, "image_size": 16,
        "patch_size": 2, "vision_use_head": False,
    }  # fmt: skip
    arch = from_config({"model_type": "paligemma", "text_config": text, "vision_config": inside})
    assert arch.vision and eyes and arch.vision.blocks == replace(eyes.blocks, family="paligemma")
    assert sum(t.elements * t.count for t in A.vision_tensors(arch, "projector")) == 4 * 8 + 8
    assert (arch.vision.merge, arch.vision.edge, arch.vision.positions) == (1, 16, 64)


@pytest.mark.parametrize(
    ("outside", "eyes", "line"),
    [
        ({"mm_tokens_per_image": 15}, {}, "mm_tokens_per_image: given 15, allowed: the square of a divisor of 8"),
        ({"mm_tokens_per_image": 9}, {}, "mm_tokens_per_image: given 9, allowed: the square of a divisor of 8"),
        ({}, {"num_attention_heads": 3}, "vision_config.num_attention_heads: given 3, allowed: a divisor of hidden_si"),
    ],
)
def test_an_impossible_tower_of_gemma_is_refused(outside: dict[str, int], eyes: dict[str, Any], line: str) -> None:
    with pytest.raises(A.ConfigError) as caught:
        gemma(outside, **eyes)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize("deep", [[3], [-1], [0.5], [0, 1, 2]])
def test_a_deep_block_that_there_is_not_is_refused(deep: list[float]) -> None:
    """Nor are there more of them than layers to add their output to."""
    with pytest.raises(A.ConfigError, match=r"^vision_config.deepstack_visual_indexes: given .*, allowed: indices of"):
        qwen3(deepstack_visual_indexes=deep)


def test_text_config_of_its_own_reads_the_same() -> None:
    """Newer files keep the language model's fields in `text_config`."""
    inner = {k: v for k, v in TEXT.items() if k != "model_type"}
    assert from_config({"model_type": "qwen2_5_vl", "text_config": inner, "vision_config": EYES}) == tiny()


@pytest.mark.parametrize(
    ("eyes", "line"),
    [
        ({"out_hidden_size": 16}, "vision_config.out_hidden_size: given 16, allowed: hidden_size = 8"),
        ({"num_heads": 3}, "vision_config.num_heads: given 3, allowed: a divisor of hidden_size = 4"),
        ({"depth": 0}, "depth: given 0, allowed: a positive integer"),
    ],
)
def test_an_impossible_tower_is_refused(eyes: dict[str, int], line: str) -> None:
    with pytest.raises(A.ConfigError) as caught:
        tiny(**eyes)
    assert str(caught.value).startswith(line)


def test_a_missing_tower_is_refused() -> None:
    with pytest.raises(A.ConfigError, match=r"^vision_config: nothing given, allowed: a mapping"):
        from_config(TEXT)


def test_adapters_beside_the_tower_by_hand() -> None:
    """Rank 2: beside a block's qkv 4 + 12, proj 4 + 4 and MLP twice 4 + 6; beside a projector's 16 + 16 and 16 + 8."""
    arch = qwen3()
    blocks = sum(t.elements * t.count for t in vision_matrices(arch, 2, "blocks"))
    projectors = sum(t.elements * t.count for t in vision_matrices(arch, 2, "projector"))
    assert (blocks, projectors) == (3 * 2 * (16 + 8 + 20), 3 * 2 * (32 + 24))
