"""Trinity (AFMoE) and K-EXAONE: experts beside attention of two kinds, of which the windowed alone rotates."""

from __future__ import annotations

import pytest
from architectures import published

from calc.memory.run import short
from calc.models.architecture import active_parameters, layer_parameters, parameters
from calc.models.lora import adaptable_names


@pytest.mark.parametrize(
    ("model", "whole", "active"),
    [
        ("trinity-nano", 6_119_996_416, 1_023_917_056),  # 6B and 1B, says its card
        ("trinity-mini", 26_123_970_560, 3_474_728_960),  # 26B and 3B
        ("k-exaone", 236_571_150_336, 23_668_279_296),  # 236B and 23B, says its name
    ],
)
def test_parameters_are_those_that_names_and_cards_round(model: str, whole: int, active: int) -> None:
    assert parameters(published(model)) == whole
    assert active_parameters(published(model)) == active


def test_a_layer_of_trinity_mini_by_hand() -> None:
    """Queries, gate and output 2048·4096 each, keys and values 2048·512, norms of heads 2·128, four norms of 2048; 128
    experts and a shared one of 3·2048·1024, and the router.
    """
    arch = published("trinity-mini")
    attention = 3 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128
    assert layer_parameters(arch, arch.specs[-1].shapes) == attention + 4 * 2048 + 129 * 3 * 2048 * 1024 + 128 * 2048


def test_every_fourth_layer_attends_to_all_positions_and_does_not_rotate() -> None:
    for model in ("trinity-mini", "k-exaone"):
        arch = published(model)
        whole = [n for n in range(arch.layers) if n % 4 == 3]
        assert [n for n, spec in enumerate(arch.specs) if not spec.slides] == whole
        assert list(arch.unrotated_layers) == whole


def test_the_gate_of_attention_is_not_that_of_the_mlp() -> None:
    """Both are called `gate_proj`, and an adapter of that name stands beside both."""
    assert short("self_attn.gate_proj") == "attn_gate_proj"
    assert short("mlp.gate_proj") == "gate_proj"
    assert adaptable_names(published("trinity-mini")).count("gate_proj") == 1
