"""Models with gated delta rules or state spaces: their layers and tensors, counted as Transformers 5.23 builds them."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalog.catalog import load
from calc.memory.run import dimensions
from calc.models.architecture import ConfigError, LayerSpec, active_parameters, layer_tensors, parameters
from calc.models.hf_config import from_config

TEXT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 512, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "counted", "active"),
    [
        ("qwen3.5-0.8b", 752_393_024, 752_393_024),
        ("qwen3.5-2b", 1_881_825_088, 1_881_825_088),
        ("qwen3.5-4b", 4_205_751_296, 4_205_751_296),
        ("qwen3.5-9b", 8_953_803_264, 8_953_803_264),
        ("qwen3.5-27b", 26_895_998_464, 26_895_998_464),
        ("qwen3.5-35b-a3b", 34_660_610_688, 3_454_988_928),
        ("qwen3.5-122b-a10b", 122_111_526_912, 9_771_288_576),
        ("qwen3.5-397b-a17b", 396_346_350_336, 17_349_040_896),
        ("qwen3-next-80b-a3b", 79_674_391_296, 3_874_929_408),
    ],
)
def test_parameters_are_those_of_transformers(model: str, counted: int, active: int) -> None:
    """`sum(p.numel())` of `AutoModelForCausalLM.from_config` on the meta device, names and shapes being equal."""
    arch = load().model(model).architecture
    assert (parameters(arch), active_parameters(arch)) == (counted, active)


def test_every_fourth_layer_attends_unless_layers_are_listed() -> None:
    kinds = [spec.mixer for spec in from_config({"model_type": "qwen3_5_text", **TEXT}).specs]
    assert kinds == ["delta", "delta", "delta", "attention"] * 2
    listed = ["full_attention"] + ["linear_attention"] * 7
    arch = from_config({"model_type": "qwen3_5_text", **TEXT, "layer_types": listed})
    assert [spec.mixer for spec in arch.specs] == ["attention"] + ["delta"] * 7


def test_a_checkpoint_with_a_vision_part_is_its_language_model() -> None:
    """`AutoModelForCausalLM` loads Qwen3.5's text alone."""
    whole = from_config({"model_type": "qwen3_5", "text_config": TEXT, "vision_config": {"depth": 2}})
    assert whole == from_config({"model_type": "qwen3_5_text", **TEXT})


def test_queries_come_with_a_gate_and_part_of_each_head_rotates() -> None:
    arch = from_config({"model_type": "qwen3_5_text", **TEXT})
    shapes = {t.name.rpartition(".*.")[2]: t.shape for t in layer_tensors(arch, LayerSpec())}
    assert shapes["self_attn.q_proj.weight"] == (2 * 4 * 16, 64)
    assert arch.rotary_dim == 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: given 3, allowed: a multiple of linear_num_key_heads"),
        (
            {"layer_types": ["linear_attention"]},
            "layer_types: given .*, allowed: a list of num_hidden_layers = 8 names",
        ),
        ({"layer_types": ["sliding_attention"] * 8}, r"layer_types\[0\]: given 'sliding_attention', allowed: full"),
        ({"mamba_ssm_dtype": "float64"}, "mamba_ssm_dtype: given 'float64', allowed: bfloat16, float16, float32"),
    ],
)
def test_what_no_such_model_can_have_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}"):
        from_config({"model_type": "qwen3_5_text", **TEXT, **changes})


NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 512, "mamba_num_heads": 4,
    "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 20,
}  # fmt: skip


def test_each_of_nemotrons_layers_is_one_block() -> None:
    """As letters or names say; attention has no positions, and the state space's tensors are its module's."""
    arch = from_config({**NEMOTRON, "hybrid_override_pattern": "ME*-", "n_routed_experts": 4})
    blocks = [("ssm", "none"), ("none", "experts"), ("attention", "none"), ("none", "dense")]
    assert [(spec.mixer, spec.mlp, spec.rotated) for spec in arch.specs] == [(*block, False) for block in blocks]
    assert arch == from_config(
        {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "mlp"], "n_routed_experts": 4}
    )
    shapes = {t.name.rpartition(".*.")[2]: t.shape for t in layer_tensors(arch, LayerSpec("ssm", "none"))}
    assert shapes["mixer.in_proj.weight"] == (96 + 96 + 2 * 40 + 4, 64)
    assert shapes["mixer.conv1d.weight"] == (176, 1, 4)
    assert shapes["norm.weight"] == (64,)


def test_nemotrons_experts_may_work_on_a_projection() -> None:
    """Of 32 features here: a linear before them and one behind, and a token's rows are that wide for each expert."""
    sizes = {**NEMOTRON, "layers_block_type": ["moe"] * 4, "n_routed_experts": 4, "moe_intermediate_size": 24}
    arch = from_config({**sizes, "moe_latent_size": 32})
    shapes = {t.name.rpartition(".*.")[2]: t.shape for t in layer_tensors(arch, LayerSpec("none", "experts"))}
    assert shapes["mixer.experts.up_proj"] == (4, 24, 32)
    assert shapes["mixer.experts.down_proj"] == (4, 32, 24)
    assert (shapes["mixer.fc1_latent_proj.weight"], shapes["mixer.fc2_latent_proj.weight"]) == ((32, 64), (64, 32))
    assert dimensions(arch)["k·l"] == 2 * 32
    assert dimensions(from_config(sizes))["k·h"] == 2 * 64


def test_bambas_config_numbers_the_layers_with_attention() -> None:
    """The others are state spaces; all have an MLP, and attention rotates."""
    arch = from_config({**NEMOTRON, "model_type": "bamba", "mamba_n_heads": 4, "attn_layer_indices": [2]})
    assert [spec.mixer for spec in arch.specs] == ["ssm", "ssm", "attention", "ssm"]
    assert {(spec.mlp, spec.rotated) for spec in arch.specs} == {("dense", True)}


JAMBA: dict[str, Any] = {
    "model_type": "jamba", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512, "num_experts": 4, "attn_layer_period": 4,
    "attn_layer_offset": 2, "mamba_d_state": 5,
}  # fmt: skip


def test_jambas_layers_attend_and_route_at_their_places_in_a_period() -> None:
    """Transformers 5.23 `models/jamba/configuration_jamba.py`: every second layer has experts, from the second on."""
    arch = from_config(JAMBA)
    mixers = [("ssm", "dense"), ("ssm", "experts"), ("attention", "dense"), ("ssm", "experts")]
    assert [(spec.mixer, spec.mlp) for spec in arch.specs] == mixers
    assert not any(spec.rotated for spec in arch.specs)
    one = from_config({**JAMBA, "num_experts": 1, "num_experts_per_tok": 1})
    assert {spec.mlp for spec in one.specs} == {"dense"}
    shapes = {t.name.rpartition(".*.")[2]: t.shape for t in layer_tensors(arch, LayerSpec("ssm", "experts"))}
    assert shapes["mamba.in_proj.weight"] == (2 * 128, 64)
    assert shapes["mamba.x_proj.weight"] == (4 + 2 * 5, 128)  # a rank of 64 / 16, by default
    assert (shapes["mamba.dt_proj.weight"], shapes["mamba.A_log"]) == ((128, 4), (128, 5))
    assert shapes["feed_forward.router.weight"] == (4, 64)


@pytest.mark.parametrize("name", ["attn_layer", "expert_layer"])
def test_a_place_beyond_the_period_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}_offset: given 7, allowed: below {name}_period = 3"):
        from_config({**JAMBA, f"{name}_period": 3, f"{name}_offset": 7})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"hybrid_override_pattern": "MM"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "MMMx"}, "hybrid_override_pattern"),
        ({"layers_block_type": ["mamba"] * 3}, "layer_types"),
        ({"layers_block_type": ["mamba"] * 3 + ["conv"]}, r"layer_types\[3\]"),
        ({"n_groups": 3}, "mamba_num_heads"),
        ({"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype"),
        ({"moe_latent_size": 0}, "moe_latent_size"),
        ({"attn_layer_indices": [4], "model_type": "bamba"}, "attn_layer_indices"),
    ],
)
def test_what_no_state_space_has(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: given "):
        from_config({**NEMOTRON, **fields})


def test_granites_layers_rotate_only_if_the_config_says_so() -> None:
    config = {**NEMOTRON, "model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 96}
    config |= {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4}
    assert [spec.rotated for spec in from_config(config).specs] == [False] * 4
    rotates = from_config({**config, "position_embedding_type": "rope"})
    assert [(spec.mixer, spec.mlp, spec.rotated) for spec in rotates.specs][1] == ("attention", "dense", True)
    assert rotates.recurrent == rotates.attending == 2
    with pytest.raises(ConfigError, match=r"^shared_intermediate_size: nothing given"):  # or no linear has a weight
        from_config({**config, "shared_intermediate_size": None})


def test_a_layer_of_experts_without_experts_is_refused() -> None:
    """Its share of tokens would be one of none."""
    model = load().model("nemotron-3-nano-30b-a3b")
    config = {name: value for name, value in model.config.items() if name != "n_routed_experts"}
    with pytest.raises(ConfigError) as caught:
        from_config(config)
    assert caught.value.field == "n_routed_experts"
