"""Both generations of BailingMoE, whose files have the same model type (Ling, Ring)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architectures import published

from calc.catalog.catalog import load
from calc.memory.activations import program
from calc.memory.run import Run
from calc.models.architecture import ConfigError, parameters, tensors
from calc.models.hf_config import from_config

LITE, MINI = "ling-lite-1.5", "ling-mini-2.0"


def test_the_first_generation_has_no_norms_of_queries_and_softmax_of_plain_logits() -> None:
    """`BailingMoeGate`: `F.linear` in the compute type, its softmax in fp32; the second's router runs in fp32."""
    lite, mini = published(LITE), published(MINI)
    assert (lite.qk_norm, lite.routing, mini.qk_norm, mini.routing) == ("", "softmax", "heads", "fp32")
    assert lite.sparse_layers == 28
    assert not any("layernorm" in t.name and ".attention." in t.name for t in tensors(lite))


def test_parameters_are_those_of_the_modules() -> None:
    """Of a layer: 16 + 2·4 heads of 128, an output, a router, 64 experts and two shared ones, and two norms."""
    h, expert = 2048, 3 * 2048 * 1408
    layer = h * 24 * 128 + h * h + 64 * h + 64 * expert + 2 * expert + 2 * h
    assert parameters(published(LITE)) == 28 * layer + 2 * 126464 * h + h == 16_801_974_272


def test_each_layer_has_tables_of_all_positions_and_picks_the_tokens() -> None:
    """`BailingMoeRotaryEmbedding` caches cos and sin, of which `apply_rotary_pos_emb` makes rows of every token's."""
    arch = published(LITE)
    assert (arch.cached_positions, arch.rotary_tables) == (32768, 2 * 128)
    kept, bare = (program(Run(a)).layer().saved() for a in (arch, replace(arch, rotary_tables=0)))
    assert kept != bare


def test_deepseeks_first_moe_has_the_loop_that_ling_took_over() -> None:
    """And a dense first layer, weights of experts that are not normed, and plain projections."""
    arch = published("deepseek-moe-16b")
    assert (arch.dense_layers, arch.sparse_layers, arch.experts_apart, arch.routing_normed) == (1, 27, True, False)
    assert (arch.cached_positions, arch.rotary_tables, arch.fused_qkv) == (4096, 2 * 128, "")
    assert parameters(arch) == load().models["deepseek-moe-16b"].published_parameters == 16_375_728_128


def test_a_head_of_normed_columns_is_refused() -> None:
    """Ling-lite's own file has it: `torch.norm(…, dim=0)`, not the rows' norms of Baichuan 2."""
    with pytest.raises(ConfigError, match=r"^norm_head: given True, allowed: false"):
        from_config({**load().models[LITE].config, "norm_head": True})
