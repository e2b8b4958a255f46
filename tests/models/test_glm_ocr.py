"""GLM-OCR: GLM-4V's tower without positions that are looked up, with norms of queries and keys and with biases."""

from __future__ import annotations

from architectures import published, record

from calc.models.architecture import language, parameters, vision_tensors
from calc.models.hf_config import from_config


def test_parameters_are_those_of_the_modules() -> None:
    """24 blocks, patches of two frames, a norm, a convolution of four patches; a norm, an MLP three times as wide."""
    h, i, out = 1024, 4096, 1536
    block = 2 * h + 2 * 64 + 4 * (h * h + h) + 3 * h * i + 2 * i + h
    seen = 24 * block + h * 3 * 2 * 14**2 + h + h + out * h * 4 + out
    projector = out * out + 2 * out + 3 * out * 3 * out
    layer = 4 * out + 2 * out * 2048 + 2 * out * 1024 + 3 * out * 4608
    text = 16 * layer + out + 2 * 59_392 * out
    arch = published("glm-ocr")
    assert sum(t.elements * t.count for t in vision_tensors(arch)) == seen + projector
    assert parameters(language(arch)) == text
    # the safetensors' 1,325,258,240 have a 17th layer, with an embedding, a head, norms and what joins two streams
    assert parameters(arch) == seen + projector + text
    assert parameters(arch) + layer + 2 * 59_392 * out + 2 * out * out + 3 * out == 1_325_258_240


def test_queries_keys_and_values_have_no_bias_whatever_the_config_says() -> None:
    """`GlmOcrTextAttention` gives them none; heads are wider than the residual stream's share of each."""
    given = record("glm-ocr")["config"]
    arch = from_config({**given, "text_config": {**given["text_config"], "attention_bias": True}})
    assert not arch.qkv_bias
    assert (arch.heads * arch.head_dim, arch.hidden) == (2048, 1536)


def test_the_tower_has_no_table_of_positions() -> None:
    names = {t.name for t in vision_tensors(published("glm-ocr"))}
    assert not any("position_embedding" in name or "post_conv_layernorm" in name for name in names)
    assert {"model.visual.blocks.*.attn.q_norm.weight", "model.visual.blocks.*.mlp.down_proj.bias"} <= names
