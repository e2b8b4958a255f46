"""Gemma 4: layers with heads of two sizes, keys that are values, borrowed keys, and embeddings of each layer."""

from __future__ import annotations

import pytest
from architectures import published

from calc.memory.kv_cache import token_bytes
from calc.models.architecture import LayerSpec, layer_tensors, parameters, tensors

GLOBAL = LayerSpec(broad=True)


def shapes(model: str, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors, by the last parts of their names."""
    found = layer_tensors(published(model), spec)
    return {t.name.partition(".*.")[2].removesuffix(".weight"): t.shape for t in found}


def test_global_layers_have_few_wide_heads_and_one_projection_for_keys_and_values() -> None:
    """Gemma 4 31B: 32 heads of 512 over 4 of keys, of 256 over 16 elsewhere (`Gemma4TextAttention`)."""
    whole, windowed = shapes("gemma-4-31b", GLOBAL), shapes("gemma-4-31b", LayerSpec())
    assert (whole["self_attn.q_proj"], whole["self_attn.k_proj"]) == ((16384, 5376), (2048, 5376))
    assert "self_attn.v_proj" not in whole
    assert (windowed["self_attn.q_proj"], windowed["self_attn.v_proj"]) == ((8192, 5376), (4096, 5376))
    assert [n for n, spec in enumerate(published("gemma-4-31b").specs) if spec.broad] == [*range(5, 60, 6)]


def test_layers_that_borrow_keys_have_no_projection_of_them_and_a_wider_mlp() -> None:
    """Gemma 4 E2B: the last 20 of 35 layers; twice 6144 wide (`use_double_wide_mlp`)."""
    arch = published("gemma-4-e2b")
    assert [n for n, spec in enumerate(arch.specs) if spec.borrows] == [*range(15, 35)]
    own, borrowing = (shapes("gemma-4-e2b", LayerSpec(borrows=borrows)) for borrows in (False, True))
    assert {*own} - {*borrowing} == {"self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm"}
    assert (own["mlp.up_proj"], borrowing["mlp.up_proj"]) == ((6144, 1536), (12288, 1536))


def test_every_layer_has_an_embedding_of_its_own_in_one_table() -> None:
    """Gemma 4 E4B: 42 layers, 256 each, of as many rows as the vocabulary."""
    found = {t.name: t.shape for t in tensors(published("gemma-4-e4b"))}
    assert found["model.embed_tokens_per_layer.weight"] == (262144, 42 * 256)
    assert found["model.per_layer_model_projection.weight"] == (42 * 256, 2560)
    assert shapes("gemma-4-e4b", LayerSpec())["per_layer_input_gate"] == (256, 2560)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("gemma-4-31b", 30_697_345_280),
        ("gemma-4-26b-a4b", 25_233_141_760),
        ("gemma-4-12b", 11_907_350_272),
        ("gemma-4-e4b", 7_463_013_376),
        ("gemma-4-e2b", 4_628_569_344),
    ],
)
def test_parameters_are_those_of_transformers_own_model(model: str, count: int) -> None:
    """Counted in `Gemma4ForCausalLM`, and `Gemma4UnifiedForCausalLM` for 12B, of Transformers 5.23."""
    assert parameters(published(model)) == count


def test_a_token_is_cached_in_the_heads_that_each_layer_has() -> None:
    """26B A4B: 25 layers with 8 heads of 256 and 5 with 2 of 512; E2B: of its own 15 layers, 3 with heads of 512."""
    assert token_bytes(published("gemma-4-26b-a4b")) == 2 * (25 * 2 * 8 * 256 + 5 * 2 * 2 * 512) == 225_280
    assert token_bytes(published("gemma-4-e2b")) == 2 * (12 * 2 * 256 + 3 * 2 * 512) == 18_432
