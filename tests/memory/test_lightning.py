"""Lightning attention: its tensors, what a layer keeps of each block, its buffers and its state."""

from __future__ import annotations

import pytest
from architectures import published, record

from calc.memory import weights
from calc.memory.activations import layer
from calc.memory.kv_cache import cached, state_bytes, states
from calc.memory.run import Run
from calc.models.architecture import ConfigError, LayerSpec, active_parameters, layer_parameters, parameters
from calc.models.hf_config import from_config
from calc.throughput.work import scanned

MINIMAX = published("minimax-text-01")
LIGHTNING = LayerSpec("lightning", "experts")


def test_its_parameters_are_those_that_its_card_rounds() -> None:
    """456B in all, and 45.9B active without the embedding and the head."""
    assert parameters(MINIMAX) == 456_089_655_296
    assert active_parameters(MINIMAX) - 2 * 200064 * 6144 == 45_944_920_064


def test_a_layer_by_hand() -> None:
    """One projection to queries, keys and values of 64·128, one to a gate and one from it, a norm of that width; two
    norms; 32 experts of 3·6144·9216 and their router.
    """
    mixer = 6144 * 8192 * 5 + 8192
    assert layer_parameters(MINIMAX, LIGHTNING.shapes) == mixer + 2 * 6144 + 32 * 3 * 6144 * 9216 + 32 * 6144


def test_each_eighth_layer_attends_and_without_a_list_each_second_does() -> None:
    assert [n for n, spec in enumerate(MINIMAX.specs) if spec.mixer == "attention"] == list(range(7, 80, 8))
    config = {name: value for name, value in record("minimax-text-01")["config"].items() if name != "layer_types"}
    assert [spec.mixer for spec in from_config(config).specs[:4]] == ["attention", "lightning"] * 2
    with pytest.raises(ConfigError, match="block_size"):
        from_config(config | {"block_size": 0})


@pytest.mark.parametrize(("single", "parts"), [(True, 0), (False, 8)])
def test_a_block_keeps_decayed_pairs_queries_keys_and_a_state(single: bool, parts: int) -> None:
    """bf16: the projection and its SiLU 2·3·2·q, of which several sequences keep copies, in place of the SiLU's output,
    queries, keys and values twice; decayed pairs 2·256 of each head, decayed queries and keys 2·2·q, a state of 128 by
    128 for 256 positions; a norm of 4·q + 2·q; its output, the gate and their product, 2·q each.
    """
    kept = layer(Run(MINIMAX, single=single), LIGHTNING).saved
    q = 6 + (parts or 6) + 4 + 4 + 2 + 2 + 2 + 2
    assert f"{q}·q + 2·y_p + {2 / 256:g}·y_s" in kept.formula


def test_buffers_and_states_are_as_large_as_the_heads() -> None:
    """Buffers: 256 by 256 and twice 256 for each of 64 heads in 70 layers. States: 128 by 128 for each head."""
    assert weights.decays("policy", MINIMAX, 2).bytes == 2 * 70 * 64 * (256 * 256 + 2 * 256)
    assert state_bytes(MINIMAX) == 64 * 128 * 128 * 2
    assert states("policy", MINIMAX, 3, 2).bytes == 3 * 70 * 64 * 128 * 128 * 2
    assert cached(MINIMAX, LIGHTNING) == 0


def test_its_products_are_with_a_block_and_with_a_state() -> None:
    assert scanned(MINIMAX) == 2 * 64 * 128 * (256 + 128)
