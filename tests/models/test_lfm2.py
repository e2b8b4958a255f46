"""LFM2: short convolutions between attention layers, and the widths that its configs state."""

from __future__ import annotations

import pytest
from architectures import published, tiny

from calc.memory.kv_cache import pool, state_bytes, token_bytes
from calc.models.architecture import ConfigError, LayerSpec, layer_tensors, parameters


def test_a_convolution_has_two_projections_and_a_kernel_for_each_channel() -> None:
    """LFM2 1.2B: 2048 channels, 3 positions (`Lfm2ShortConv`)."""
    found = {t.name.partition(".*.")[2]: t.shape for t in layer_tensors(published("lfm2-1.2b"), LayerSpec("conv"))}
    assert found["conv.in_proj.weight"] == (6144, 2048)
    assert found["conv.conv.weight"] == (2048, 1, 3)
    assert found["conv.out_proj.weight"] == (2048, 2048)
    assert found["feed_forward.w1.weight"] == (8192, 2048)


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"block_ff_dim": 6656}, 4608),  # two thirds are 4437, a multiple of 256 above them
        ({"block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.5}, 6656),  # 6655, rounded up
        ({"block_ff_dim": 6656, "block_ffn_dim_multiplier": None}, 4437),
        ({"block_ff_dim": 6656, "block_auto_adjust_ff_dim": False}, 6656),
        ({"intermediate_size": 300}, 256),
    ],
)
def test_the_width_of_the_mlp_follows_the_adjustment(fields: dict[str, object], width: int) -> None:
    """`Lfm2MLP` in Transformers 5.23."""
    assert tiny("lfm2", num_key_value_heads=4, **fields).intermediate == width


def test_layers_are_those_listed_or_numbered() -> None:
    mixers = [spec.mixer for spec in tiny("lfm2", num_key_value_heads=4, full_attn_idxs=[1]).specs]
    assert mixers == [
        spec.mixer for spec in tiny("lfm2", num_key_value_heads=4, layer_types=["conv", "full_attention"]).specs
    ]
    assert mixers == ["conv", "attention"]
    with pytest.raises(ConfigError, match=r"^full_attn_idxs: given \[2\]"):
        tiny("lfm2", num_key_value_heads=4, full_attn_idxs=[2])
    with pytest.raises(ConfigError, match=r"^layer_types\[0\]: given 'mamba'"):
        tiny("lfm2", num_key_value_heads=4, layer_types=["mamba", "conv"])


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("lfm2-350m", 354_483_968),
        ("lfm2-700m", 742_489_344),
        ("lfm2-1.2b", 1_170_340_608),
        ("lfm2-2.6b", 2_569_272_320),
        ("lfm2-8b-a1b", 8_339_929_856),
    ],
)
def test_parameters_are_the_published_ones(model: str, count: int) -> None:
    assert parameters(published(model)) == count


def test_a_sequence_keeps_two_positions_of_each_convolution() -> None:
    """LFM2 1.2B: 6 layers with 8 key heads of 64 cache tokens, 10 keep a state of 2 x 2048 numbers."""
    arch = published("lfm2-1.2b")
    assert token_bytes(arch) == 2 * 6 * 2 * 8 * 64
    assert state_bytes(arch) == 2 * 2 * 2048
    assert pool(arch).tokens == 16  # whose keys and values are larger than a state
