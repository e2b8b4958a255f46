"""What Megatron-core's state spaces keep for backward, counted by hand, and their parts over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.accuracy.megatron_golden import architecture
from calc.memory import activations
from calc.memory.run import Run
from calc.models.architecture import ConfigError, LayerSpec, parameters
from calc.models.slices import part

HYBRID = architecture({
    "hybrid-layer-pattern": "M-*-", "hidden-size": 1024, "num-attention-heads": 16, "num-query-groups": 8,
    "max-position-embeddings": 1024, "tensor-model-parallel-size": 1, "transformer-impl": "transformer_engine",
})  # fmt: skip
STATE = LayerSpec("ssm", "none", rotated=False)
INNER, GROUPED, HEADS = 2048, 8 * 128, 32
PROJECTED = 2 * INNER + 2 * GROUPED + HEADS


def saved(**how: object) -> float:
    """Bytes a token that a layer with a state space saves."""
    return activations.layer(replace(Run(HYBRID, training=True), **how), STATE).saved.tokens  # type: ignore[arg-type]


def test_a_state_space_keeps_two_norms_a_projection_and_an_output_before_its_gate() -> None:
    """In bf16 the layer's input, its norm's output, what is scanned, the output before its gate and behind it, and the
    group norm's output. In fp32 two statistics of the layer's norm and one of each group's; a byte of dropout.
    """
    assert saved() == 2 * (2 * 1024 + PROJECTED + 3 * INNER) + 4 * (2 + 8) + 1024


def test_its_parameters() -> None:
    """Of Mamba-2: two products, a convolution over four positions with its bias, three numbers a head, two norms."""
    one = replace(HYBRID, specs=HYBRID.specs[:1])
    convolved = INNER + 2 * GROUPED
    own = 1024 * PROJECTED + INNER * 1024 + 5 * convolved + 3 * HEADS + INNER + 2 * 1024
    assert parameters(one) - parameters(replace(HYBRID, specs=())) == own


def test_ranks_share_its_groups() -> None:
    half = part(HYBRID, 2)
    assert half.ssm and (half.ssm.heads, half.ssm.groups) == (HEADS // 2, 4)
    with pytest.raises(ConfigError, match="tensor_parallel: given 16, allowed: a divisor of the 8 groups"):
        part(replace(HYBRID, kv_heads=16), 16)


def test_ranks_of_a_sequence_swap_positions_for_heads() -> None:
    """What they keep is as much, of all positions and a part of the heads."""
    assert saved(context=2) == saved()
