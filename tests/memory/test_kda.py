"""Kimi's delta attention: its tensors, and what a layer keeps, against tensors that Transformers 5.23 saves.

Transformers' own code was run on fake CUDA tensors (`python -m measurements.trace --detail`).
"""

from __future__ import annotations

import pytest
from architectures import published, record

from calc.memory.activations import Program, layer
from calc.memory.kv_cache import pool, state_bytes, token_bytes
from calc.memory.run import Run
from calc.models.architecture import ConfigError, LayerSpec, active_parameters, layer_parameters, parameters
from calc.models.hf_config import from_config

KIMI = published("kimi-linear-48b-a3b")
DELTA = LayerSpec("delta", rotated=False)


def test_its_parameters_are_those_that_its_card_rounds() -> None:
    """48B in all and 3B active, its card says; the embedding and the head are 0.76B of these."""
    assert parameters(KIMI) == 49_122_675_072
    assert active_parameters(KIMI) == 3_484_453_248


def test_a_layer_by_hand() -> None:
    """Queries, keys, values and output of 2304·4096; a convolution of four positions; both gates through a rank of 128;
    a decay's offset for each channel, a factor and beta for each of 32 heads; a head's norm, two norms, an MLP of 9216.
    """
    gates = 2 * (2304 * 128 + 128 * 4096)
    mixer = 4 * 2304 * 4096 + 3 * 4096 * 4 + gates + 4096 + 32 + 2304 * 32 + 128
    assert layer_parameters(KIMI, DELTA.shapes) == mixer + 2 * 2304 + 3 * 2304 * 9216


def test_the_layers_that_attend_are_listed_from_one_on() -> None:
    """The published list differs from the rule of the configuration's class in the last two layers alone."""
    attending = [n for n, spec in enumerate(KIMI.specs) if spec.mixer == "latent"]
    assert attending == [3, 7, 11, 15, 19, 23, 26]
    assert not any(spec.rotated for spec in KIMI.specs)
    config = {name: value for name, value in record("kimi-linear-48b-a3b")["config"].items() if name[:6] != "linear"}
    assert [n for n, spec in enumerate(from_config(config).specs) if spec.mixer == "latent"] == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize("listed", [[0, 1], [28], 3])
def test_a_list_of_no_layers_is_refused(listed: object) -> None:
    with pytest.raises(ConfigError, match=r"kda_layers.*from 1 to num_hidden_layers = 27"):
        from_config(record("kimi-linear-48b-a3b")["config"] | {"linear_attn_config": {"kda_layers": listed}})


def test_the_closed_form_of_a_layer_in_kernels() -> None:
    """bf16: norms 2·(4h + 2h + 2h), MLP 8i, convolution 2·d_c, gates' ranks 2·2·d_f. Of a key's width: queries and keys
    normed 2·2, the forgetting gate's exponential, 1 more and logarithm 3·4 and where it is large 1, decays as they came
    and summed 2·4. Values copied 2, a gated norm of 18. Of a head: scales of three norms 3·4, beta 2, and two rows of
    64 pairs 2·2·64.
    """
    formula = layer(Run(KIMI, linear_kernels=True), DELTA).saved.formula
    assert formula == "T·(16·h + 2·d_c + 4·d_f + 25·d_e + 270·n_v + 20·d_v + 8·i + 8)"


def test_the_closed_form_of_a_layer_in_pytorchs_operations() -> None:
    """Three tensors have a number for each pair of a chunk's positions and each channel: decays, keys times keys and
    queries times keys, 3·4·64·d_e; solving row by row copies 1,365 numbers for each position and head.
    """
    kept = layer(Run(KIMI), DELTA).saved
    assert "808·d_e·C" in kept.formula
    assert 808 == 3 * 4 * 64 + 10 * 4
    assert "5976·n_v·C" in kept.formula
    scan = next(op for op in Program(Run(KIMI), DELTA).layer().ops if op.name == "delta: scan")
    assert scan.backward_scratch.tokens == {"d_e·C": 4 * 64}


def test_only_layers_that_attend_have_a_cache() -> None:
    """A latent of 512 and 64 of a key in seven layers; in the others a state of 32 heads, 128 by 128 in fp32, and three
    positions of 12,288 channels in bf16. A block is as long as a state needs, in steps of 16.
    """
    assert token_bytes(KIMI) == 2 * 7 * 576
    state = 32 * 128 * 128 * 4 + 3 * 12288 * 2
    assert state_bytes(KIMI) == state
    assert pool(KIMI).tokens == -(-state // (16 * 2 * 576)) * 16
