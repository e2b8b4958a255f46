"""Adapters beside Megatron-core's linears: what a layer keeps with them, alone and over tensor-parallel ranks.

Counted in ms-swift 3.12.0 `swift/megatron/tuners/lora.py` and mcore-bridge 1.6.5 `mcore_bridge/tuners/lora.py`, and in
TransformerEngine `pytorch/module/{linear,layernorm_linear,grouped_linear}.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.memory import activations
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture, LayerSpec
from calc.models.mixers import Mla
from calc.models.slices import part

H, Q, INNER, R = 512, 512, 1024, 16
DENSE = Architecture(
    family="qwen3", hidden=H, specs=(LayerSpec(),) * 2, heads=8, kv_heads=8, head_dim=64, intermediate=INNER,
    vocab=1024, tied=False, max_positions=4096, modeling="megatron",
)  # fmt: skip
SPEC = LayerSpec(mlp="experts")
MOE = replace(DENSE, specs=(SPEC,) * 2, experts=8, experts_per_token=2, moe_intermediate=256)
LORA = Adapter(R, "all-linear", dropout=False, b=2)


def saved(arch: Architecture, adapter: Adapter | None, **how: object) -> float:
    """Bytes a token that a layer saves."""
    run = Run(arch, trained=adapter is None, training=True, adapter=adapter)
    return activations.layer(replace(run, **how), arch.specs[0]).saved.tokens  # type: ignore[arg-type]


def test_adapters_keep_the_inputs_that_frozen_linears_do_not_and_what_is_of_low_rank() -> None:
    """Four linears: their inputs as before, and 2·r each."""
    assert saved(DENSE, LORA) - saved(DENSE, None) == 4 * 2 * R


def test_a_frozen_linear_without_an_adapter_keeps_nothing() -> None:
    """Without the output's adapter nothing changes but 2·r: attention keeps its output; the others keep 2·h, 2·i."""
    attention = replace(LORA, targets=("linear_qkv",))
    assert saved(DENSE, LORA) - saved(DENSE, replace(LORA, targets=("linear_qkv", "linear_fc1", "linear_fc2"))) == 2 * R
    assert saved(DENSE, LORA) - saved(DENSE, attention) == 3 * 2 * R + 2 * H + 2 * INNER


def test_dropout_keeps_a_copy_of_each_input_and_a_mask() -> None:
    """A byte an element of every input; attention's output stays beside its copy, 2·q."""
    dropped = saved(DENSE, replace(LORA, dropout=True)) - saved(DENSE, LORA)
    assert dropped == H + Q + H + INNER + 2 * Q


def test_ranks_keep_their_own_positions_of_an_input_or_in_other_libraries_all_of_them() -> None:
    """Two ranks: of the two linears cut by outputs 2·h in place of h, and of all four 2·r in place of r."""
    half = part(DENSE, 2)
    own, whole, shared = (
        saved(replace(half, adapters=which), LORA, sequences=True)  # type: ignore[arg-type]
        for which in ("own", "whole", "shared")
    )
    assert whole - own == 2 * H + 4 * R
    assert shared == whole
    assert own - saved(half, None, sequences=True) == 4 * R


def test_tensor_parallelism_alone_has_every_position_on_every_rank() -> None:
    half = part(DENSE, 2)
    assert saved(half, LORA) - saved(half, None) == 4 * 2 * R


def test_experts_have_adapters_of_their_own_for_each_token_and_expert() -> None:
    """Beside attention's 4·r, 2·k·r for either grouped product, and of the router's input nothing more."""
    assert saved(MOE, LORA) - saved(MOE, None) == 2 * 2 * R + 2 * 2 * 2 * R
    dropped = saved(MOE, replace(LORA, dropout=True)) - saved(MOE, LORA)
    # k·h and k·j bytes of masks; attention's output stays beside its copy
    assert dropped == H + Q + 2 * H + 2 * 256 + 2 * Q


def test_latent_attention_has_an_adapter_beside_each_of_its_five_linears() -> None:
    low = Mla(96, 64, 32, 16, 24)
    latent = replace(DENSE, mla=low, head_dim=48, specs=(LayerSpec("latent"),) * 2)
    assert saved(latent, LORA) - saved(latent, None) == 7 * 2 * R


@pytest.mark.parametrize("arch", [DENSE, MOE])
def test_the_first_layer_is_no_exception(arch: Architecture) -> None:
    """The embedding's output requires a gradient, whatever is trained (`gpt_model.py`, `_preprocess`)."""
    run = Run(arch, trained=False, training=True, adapter=LORA)
    assert not any(kind.first for kind in activations.kinds(run, masked=False, recompute=False))
