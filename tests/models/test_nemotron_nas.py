"""Layers of which a search left out attention or MLP, or chose the MLP's width (Llama-Nemotron)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from architectures import published

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.models.architecture import ConfigError, LayerSpec, layer_tensors, parameters
from calc.models.hf_config import from_config
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario

SUPER = "nemotron-super-49b"
BLOCK: dict[str, Any] = {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 5.25}}


def searched(*blocks: dict[str, Any]) -> dict[str, Any]:
    """The published config with other layers."""
    return {**load().models[SUPER].config, "num_hidden_layers": len(blocks), "block_configs": list(blocks)}


def allocated(s: Scenario) -> list[int]:
    """The allocated bytes of each phase at its peak."""
    return [phase.moment.allocated_bytes for phase in estimate(s, replays=False).groups[0].phases]


def test_widths_are_two_thirds_of_a_multiple_up_to_the_next_256() -> None:
    """`_ffn_mult_to_intermediate_size`: 1.0 gives 5461, that is 5632, and 5.25 the 28672 of Llama 3.1 70B."""
    assert {spec.width for spec in published(SUPER).specs} == {2816, 5632, 7168, 14336, 17920, 28672}
    assert sum(spec.mixer == "none" for spec in published(SUPER).specs) == 31


@pytest.mark.parametrize(("model", "count"), [(SUPER, 49_867_145_216), ("nemotron-ultra-253b", 253_401_268_224)])
def test_parameters_are_those_of_the_blocks_of_the_config(model: str, count: int) -> None:
    """Two norms of a whole layer, one of a layer with one block; what does nothing has none."""
    config = load().models[model].config
    h, found = config["hidden_size"], 2 * config["vocab_size"] * config["hidden_size"] + config["hidden_size"]
    for block in config["block_configs"]:
        if group := block["attention"].get("n_heads_in_group"):
            found += h + 2 * h * h + 2 * h * h // group
        if factor := block["ffn"].get("ffn_mult"):
            found += h + 3 * h * (-(-int(2 * factor * h / 3) // 256) * 256)
    assert parameters(published(model)) == found == count


def test_a_layer_without_attention_has_the_norm_before_its_mlp_alone() -> None:
    names = [t.name.partition(".*.")[2] for t in layer_tensors(published(SUPER), LayerSpec("none", width=5632))]
    ends = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "post_attention_layernorm.weight"]
    assert names == ends
    only = [t.name.partition(".*.")[2] for t in layer_tensors(published(SUPER), LayerSpec("attention", "none"))]
    assert only[-1] == "input_layernorm.weight"


def test_layers_that_do_nothing_are_none() -> None:
    """Ultra has 162 of which 81 are left: neither a weight nor a tensor is theirs."""
    nothing = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
    assert from_config(searched(BLOCK, nothing, BLOCK)) == from_config(searched(BLOCK, BLOCK))
    assert published("nemotron-ultra-253b").layers == 81


@pytest.mark.parametrize("how", [{}, {"method": "lora"}, {"sharding": "zero3", "checkpointing": "full"}])
def test_layers_that_are_all_alike_take_what_llamas_do(how: dict[str, Any]) -> None:
    """With 80 blocks of Llama 3.1 70B's sizes it is that model, in every line."""
    s = parse({"model": "llama-3.1-70b", "task": "sft", "gpu": "h200", "gpus": 8, **how})
    searched_for = from_config({**searched(*[BLOCK] * 80), "vocab_size": s.architecture.vocab})
    assert {spec.width for spec in searched_for.specs} == {28672}
    assert allocated(replace(s, architecture=searched_for)) == allocated(s)


def test_more_width_needs_more_and_no_attention_less() -> None:
    def peak(*blocks: dict[str, Any]) -> int:
        s = parse({"model": SUPER, "task": "sft", "gpu": "h200", "gpus": 1, "micro_batch": 1})
        return max(allocated(replace(s, architecture=from_config(searched(*blocks)))))

    wide, narrow = ({**BLOCK, "ffn": {"ffn_mult": factor}} for factor in (2.625, 0.5))
    alone = {**wide, "attention": {"no_op": True}}
    assert peak(wide, narrow) < peak(wide, wide)
    assert peak(wide, alone) < peak(wide, wide)


@pytest.mark.parametrize(
    ("block", "field"),
    [
        (
            {**BLOCK, "ffn": {"replace_with_linear": True, "ffn_mult": 1.0}},
            r"block_configs\[1\].ffn.replace_with_linear",
        ),
        ({**BLOCK, "ffn": {"ffn_mult": -1}}, r"block_configs\[1\].ffn.ffn_mult"),
        ({**BLOCK, "attention": {"n_heads_in_group": 16}}, r"block_configs\[\].attention.n_heads_in_group"),
        ({"ffn": {}}, r"block_configs\[1\].attention"),
    ],
)
def test_what_is_not_modelled_is_refused(block: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        from_config(searched(BLOCK, block))
