"""Llama 3.2 Vision: over text, layers that text passes over, which are loaded and adapted; and with images."""

from __future__ import annotations

import pytest

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.models.architecture import (
    Architecture,
    ConfigError,
    embedding_parameters,
    language,
    parameters,
    passed_tensors,
)
from calc.models.hf_config import from_config
from calc.models.lora import lora_parameters, passed_parameters
from calc.models.slices import part, stage
from calc.resolve.parse import parse

# of the 10,670,220,835 parameters of Llama 3.2 11B Vision and the 88,593,355,323 of 90B, without the tower and the
# projector (Transformers 5.23, `MllamaForConditionalGeneration` and `MllamaForCausalLM`, counted on the meta device)
COUNTS = {"llama-3.2-11b-vision": 9_775_192_080, "llama-3.2-90b-vision": 87_666_865_192}
JOB = {"model": "llama-3.2-11b-vision", "task": "sft", "gpu": "h100-sxm", "seq_len": 2048}


def arch(name: str = "llama-3.2-11b-vision") -> Architecture:
    return load().models[name].architecture


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_every_parameter_is_counted(name: str, count: int) -> None:
    assert parameters(arch(name)) == count


@pytest.mark.parametrize(("name", "count"), {"11b": 10_670_220_835, "90b": 88_593_355_323}.items())
def test_every_parameter_of_the_tower_is_counted(name: str, count: int) -> None:
    """As Transformers 5.23 counts `MllamaForConditionalGeneration` on the meta device, of squares of 560 pixels."""
    seeing = load().models[f"llama-3.2-{name}-vision"].seeing
    assert seeing
    assert parameters(seeing) == count
    assert (seeing.passed, seeing.crosses) == (0, seeing.layers // 5)


def test_a_tower_beside_text_leaves_its_layers_out() -> None:
    """They are loaded with the tower, and text passes over them."""
    both = parse(JOB | {"framework": "torch", "vision_tower": True}).architecture
    assert (both.passed, both.crosses) == (8, 0)
    assert parameters(both) == 10_670_220_835


@pytest.mark.parametrize(
    ("field", "value"),
    [("vision_output_dim", 6400), ("intermediate_layers_indices", [32]), ("supported_aspect_ratios", [[1]])],
)
def test_another_tower_is_refused(field: str, value: object) -> None:
    config = {"model_type": "mllama", "text_config": arch_config(), "vision_config": {field: value}}
    with pytest.raises(ConfigError, match=rf"^vision_config\.{field}: "):
        from_config(config, images=True)


def test_rollouts_with_images_are_refused() -> None:
    job = JOB | {"task": "grpo", "framework": "trl", "images": {"width": 560, "height": 560}}
    job = {name: value for name, value in job.items() if name != "seq_len"}
    with pytest.raises(ValueError, match=r"rollout\.engine: .*allowed: none; generation is not modelled there"):
        parse(job)


def test_layers_that_attend_to_images_alone_do_not_run() -> None:
    """What runs has the shapes of Llama 3.1 8B, but for 8 tokens that the head never says."""
    own, plain = arch(), load().models["llama-3.1-8b"].architecture
    assert (own.layers, own.passed) == (plain.layers, 8) == (32, 8)
    assert parameters(language(own)) == parameters(plain) + 8 * own.hidden
    assert embedding_parameters(own) == 128_264 * 4096
    # both gates, and the norms of a head of queries and of keys, beside a layer of Llama's
    layer = parameters(plain) - parameters(stripped(plain))
    assert sum(t.elements * t.count for t in passed_tensors(own)) == 8 * (layer + 2 + 2 * 128)


def stripped(plain: Architecture) -> Architecture:
    """The same model with a layer less."""
    config = dict(load().models["llama-3.1-8b"].config)
    return from_config(config | {"num_hidden_layers": plain.layers - 1})


def test_their_weights_have_no_gradients_and_no_states() -> None:
    """AdamW's step passes by what has no gradient."""
    trained = parse(JOB | {"framework": "torch", "optimizer": "adamw", "precision": "bf16"})
    states = [
        line
        for group in estimate(trained).groups
        for phase in group.phases
        for line in phase.moment.lines
        if line.component == "optimizer_states"
    ]
    assert {line.bytes for line in states} == {2 * 2 * parameters(language(arch()))}


def test_peft_adapts_them_too() -> None:
    """It matches modules by name, whichever run: 8 of 40 layers' adapters are never trained."""
    both, idle = lora_parameters(arch(), 16, "all-linear"), passed_parameters(arch(), 16, "all-linear")
    assert both == 5 * idle == lora_parameters(load().models["llama-3.1-8b"].architecture, 16, "all-linear") + idle


def test_ranks_and_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel: given 2, allowed: 1 .*whose layers for images stay"):
        part(arch(), 2)
    with pytest.raises(ConfigError, match=r"^pipeline_parallel: given 2, allowed: 1 .*with layers for images$"):
        stage(arch(), 0, 2)


@pytest.mark.parametrize("listed", ["3, 8", [3.5], None, list(range(40))])
def test_other_lists_of_layers_are_refused(listed: object) -> None:
    config = dict(arch_config()) | {"cross_attention_layers": listed}
    with pytest.raises(ConfigError, match=r"^cross_attention_layers: .*, allowed: a list of layers' numbers"):
        from_config(config)


def arch_config() -> dict[str, object]:
    return dict(load().models["llama-3.2-11b-vision"].config)


def test_transformers_has_no_code_with_flash_attention() -> None:
    scenario = parse(JOB | {"framework": "trl", "attention": "flash"})
    assert any("no code with FlashAttention" in note for note in estimate(scenario).notes)
