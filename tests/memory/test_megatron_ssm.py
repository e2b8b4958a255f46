"""What Megatron-core's state spaces keep for backward, counted by hand, and their parts over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.accuracy.megatron_golden import architecture
from calc.memory import activations
from calc.memory.run import Run
from calc.models.architecture import ConfigError, LayerSpec, parameters
from calc.models.lora import megatron_linears
from calc.models.slices import part
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

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


SUPER = {
    "model": "nemotron-3-super-120b-a12b", "task": "sft", "framework": "torch", "trainer": "megatron",
    "gpu": "h100-sxm", "gpus": 32, "expert_parallel": 32,
}  # fmt: skip


def test_parameters_of_a_rank_of_nemotron_3() -> None:
    """40 state spaces of 128 heads of 64 in 8 groups of 128, 40 layers of experts, of which a rank has 16 of 512, and 8
    that attend: each of one block behind one norm.
    """
    s = parse(SUPER)
    h, inner, convolved = 4096, 128 * 64, 128 * 64 + 2 * 8 * 128
    state = h * (inner + convolved + 128) + 5 * convolved + 3 * 128 + inner + inner * h
    experts = 512 * h + 16 * 2 * 1024 * 2688 + 2 * h * 5376 + 2 * h * 1024
    attends = h * (32 + 2 * 2) * 128 + 32 * 128 * h
    each = 40 * state + 40 * experts + 8 * attends + 88 * h
    assert parameters(part(s.architecture, 1, 32)) == each + 2 * 131_072 * h + h
    assert not any(spec.rotated for spec in s.architecture.specs)


def test_adapters_stand_beside_products_of_state_spaces_and_of_latent_experts() -> None:
    arch = parse(SUPER).architecture
    names = {
        spec.mixer: [x.name.partition(".")[2] for x in megatron_linears(arch, spec)]
        for spec in dict.fromkeys(arch.specs)
    }
    assert names["ssm"] == ["in_proj", "out_proj"]
    assert names["attention"] == ["linear_qkv", "linear_proj"]
    experts = ("experts", "shared_experts")
    assert names["none"] == [
        *[f"{owner}.{name}" for owner in experts for name in ("linear_fc1", "linear_fc2")],
        "fc1_latent_proj", "fc2_latent_proj",
    ]  # fmt: skip


def test_depths_of_several_layers_are_refused() -> None:
    with pytest.raises(ScenarioError, match="mtp_num_layers: given 2 for the family nemotron_h, allowed: null"):
        parse(SUPER | {"mtp_num_layers": 2})
