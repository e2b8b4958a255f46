"""MiMo-V2-Flash: values narrower than keys, and windows whose layers have more key-value heads, and sinks."""

from __future__ import annotations

import pytest
from architectures import published, record

from calc.catalog.catalog import load
from calc.memory.activations import layer
from calc.memory.kv_cache import token_bytes
from calc.memory.run import Run
from calc.models.architecture import ConfigError, active_parameters, layer_parameters, parameters
from calc.models.hf_config import from_config
from calc.recommend.space import attention

MIMO = published("mimo-v2-flash")
WHOLE, WINDOW = MIMO.specs[0], MIMO.specs[1]


def test_its_parameters_are_those_that_its_card_rounds() -> None:
    """309B in all and 15B active, without the layers that predict further tokens."""
    assert parameters(MIMO) == 308_778_768_832
    assert active_parameters(MIMO) == 15_445_924_288


def test_layers_by_hand() -> None:
    """Queries 4096·64·192 and output 64·128·4096; keys of 192 and values of 128 for 4 heads without a window, for 8
    with one, beside 64 sinks; two norms; a dense MLP of 16384, or 256 experts of 2048 and their router.
    """
    both, norms = 4096 * 64 * (192 + 128), 2 * 4096
    assert layer_parameters(MIMO, WHOLE.shapes) == both + 4096 * 4 * 320 + norms + 3 * 4096 * 16384
    experts = 256 * 3 * 4096 * 2048 + 256 * 4096
    assert layer_parameters(MIMO, WINDOW.shapes) == both + 4096 * 8 * 320 + 64 + norms + experts


def test_the_first_layer_and_each_sixth_attend_to_all_positions() -> None:
    whole = [n for n, spec in enumerate(MIMO.specs) if not spec.slides]
    assert whole == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    config = record("mimo-v2-flash")["config"]
    listed = [int(n not in whole) for n in range(48)]
    assert from_config(config | {"hybrid_layer_pattern": listed, "moe_layer_freq": [0, *[1] * 47]}) == MIMO


@pytest.mark.parametrize("name", ["hybrid_layer_pattern", "moe_layer_freq"])
def test_a_list_that_is_no_layers_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*num_hidden_layers = 48 times 0 or 1"):
        from_config(record("mimo-v2-flash")["config"] | {name: [0, 1]})


def test_the_cache_has_keys_and_values_of_their_own_widths() -> None:
    assert token_bytes(MIMO) == 2 * 320 * (9 * 4 + 39 * 8)


def test_a_sink_is_a_column_of_the_probabilities() -> None:
    """bf16: two norms of 10·h + 4, less what the last weight multiplies in place of a cast; queries and keys for every
    query, 4·q; values so and the output, 4·o; of each head the index of its largest score, and probabilities of 16
    bits, with a column more where there is a sink.
    """
    kept = {spec.slides: layer(Run(MIMO, kernel="eager"), spec._replace(slides=False)).saved.formula for spec in
            (WHOLE, WINDOW)}  # fmt: skip
    assert kept[False] == "T·(16·h + 4·q + 8·H + 4·o + 8·i + 2·H·S + 8)"
    assert "4·q + 10·H + 4·o" in kept[True]
    assert "2·H·S" in kept[True]


def test_no_flash_attention_that_is_modelled_runs() -> None:
    assert attention(MIMO, load().gpus["h200"]) == "eager"
