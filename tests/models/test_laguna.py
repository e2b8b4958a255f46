"""Laguna: windows whose layers have more heads, half of which rotates in the others, and a gate for each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from architectures import published, record

from calc.memory.activations import layer
from calc.memory.kv_cache import token_bytes
from calc.memory.run import Run
from calc.models.architecture import ConfigError, active_parameters, layer_parameters, linears, parameters
from calc.models.hf_config import from_config

LAGUNA = published("laguna-xs-2.1")
WHOLE, WINDOW = LAGUNA.specs[0], LAGUNA.specs[1]


def config(**fields: Any) -> dict[str, Any]:
    return {**record("laguna-xs-2.1")["config"], **fields}


def test_its_parameters_fill_the_publishers_file() -> None:
    """Its GGUF of 66,930,226,304 bytes has two for each, four for routers and norms, and 3.8 MB of other things, of
    which the arrays of its vocabulary are 2.7.
    """
    assert parameters(LAGUNA) == 33_442_607_104
    wide = 39 * 256 * 2048 + 81 * 2048 + 80 * 128
    assert 66_930_226_304 - 2 * parameters(LAGUNA) - 2 * wide == 3_765_376
    assert active_parameters(LAGUNA) == 3_017_125_888
    assert parameters(published("laguna-xs.2")) == parameters(LAGUNA)


def test_layers_by_hand() -> None:
    """Queries and output 2048·128 for each of 48 heads, or of 64 with a window, and a gate's number; keys and values of
    8; norms of both, and two of 2048; a dense MLP of 8192, or 256 experts and a shared one of 512, and their router.
    """
    head, both, norms = 2 * 2048 * 128 + 2048, 2 * 2048 * 1024, 2 * 2048 + 2 * 128
    assert layer_parameters(LAGUNA, WHOLE.shapes) == 48 * head + both + norms + 3 * 2048 * 8192
    assert layer_parameters(LAGUNA, WINDOW.shapes) == 64 * head + both + norms + 257 * 3 * 2048 * 512 + 256 * 2048
    gates = [found for found in linears(LAGUNA, WINDOW.shapes) if found.name == "self_attn.g_proj"]
    assert [(gate.inputs, gate.outputs, gate.kind) for gate in gates] == [(2048, 64, "attn")]


def test_the_first_of_each_four_attends_to_all_positions_with_heads_that_rotate_by_half() -> None:
    assert [n for n, spec in enumerate(LAGUNA.specs) if not spec.slides] == list(range(0, 40, 4))
    assert [n for n, spec in enumerate(LAGUNA.specs) if spec.mlp == "dense"] == [0]
    kinds = [LAGUNA.at(spec) for spec in (WHOLE, WINDOW)]
    assert [(own.heads, own.rotary_dim) for own in kinds] == [(48, 64), (64, 128)]
    assert token_bytes(LAGUNA) == 2 * 40 * 2 * 8 * 128


def test_without_lists_all_layers_attend_to_all_positions_and_the_first_has_no_experts() -> None:
    """`LagunaConfig.__post_init__`."""
    lists = ("layer_types", "mlp_layer_types", "num_attention_heads_per_layer", "rope_parameters")
    plain = {name: value for name, value in config().items() if name not in lists}
    arch = from_config(plain)
    assert not arch.sliding_layers
    assert [n for n, spec in enumerate(arch.specs) if spec.mlp == "dense"] == [0]
    assert {(arch.at(spec).heads, arch.at(spec).rotary_dim) for spec in arch.specs} == {(48, 64)}
    listed = from_config(plain | {"mlp_layer_types": ["sparse", "dense"] * 20})
    assert [n for n, spec in enumerate(listed.specs) if spec.mlp == "dense"] == list(range(1, 40, 2))


def test_a_gate_keeps_its_numbers_and_what_it_weighs() -> None:
    """bf16: the numbers in fp32 for the softplus and its result in bf16, 6·H; attention's output, which the gate
    weighs, 2·q, beside the weighed one that the last projection reads.
    """
    kept = [layer(Run(arch), WHOLE).saved.formula for arch in (replace(LAGUNA, output_gate=""), LAGUNA)]
    assert kept == [
        "T·(16·h + 8·q + 8·H + 10·kv + 4·K + 4·o + 8·i + 8)",
        "T·(16·h + 10·q + 14·H + 10·kv + 4·K + 4·o + 8·i + 8)",
    ]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"gating": "per-element"}, "gating: given 'per-element', allowed: true or per-head"),
        ({"gating": False}, "gating: given False, allowed: true or per-head"),
        ({"num_attention_heads_per_layer": [48]}, "num_attention_heads_per_layer: .*a list of num_hidden_layers = 40"),
        ({"num_attention_heads_per_layer": [48, 64] * 20}, "num_attention_heads_per_layer: .*the same multiple"),
        ({"num_attention_heads_per_layer": [44] * 40}, "num_attention_heads_per_layer: .*the same multiple"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types: .*a list of num_hidden_layers = 40 times dense or sparse"),
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping: given 30.0, allowed: 0 for the family"),
        (
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 2}}},
            r"rope_parameters.full_attention.partial_rotary_factor: given 2, allowed: a number above 0, at most 1",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{line}"):
        from_config(config(**fields))
