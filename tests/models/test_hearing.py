"""Qwen2-Audio and Voxtral: a language model with Whisper's encoder beside it, which text does not run."""

from __future__ import annotations

import pytest
from architectures import published, record

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.models import slices
from calc.models.architecture import ConfigError, language, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.resolve.parse import parse

WHISPER = (
    1280 * 128 * 3 + 1280**2 * 3 + 2 * 1280  # convolutions of 3 over 128 bins, then over 1280 channels
    + 1500 * 1280 + 2 * 1280  # positions, and the last norm
    + 32 * (4 * 1280**2 + 2 * 1280 * 5120 + 5120 + 1280 + 3 * 1280 + 4 * 1280)  # keys have no bias
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "projector", "text"),
    [
        ("qwen2-audio-7b", 1280 * 4096 + 4096, 7_754_878_976),
        ("voxtral-mini-3b", 4 * 1280 * 3072 + 3072**2, 4_014_136_320),
        ("voxtral-small-24b", 4 * 1280 * 5120 + 5120**2, 23_572_403_200),
    ],
)
def test_what_hears_by_hand_beside_the_language_model(model: str, projector: int, text: int) -> None:
    """Transformers 5.23 `models/{qwen2_audio,voxtral}`; of Voxtral four rows of the encoder become a token.

    The sizes of the report on Voxtral (arXiv 2507.13264): 640M of the encoder, 25M and 52M of the adapter.
    """
    arch = published(model)
    assert sum(t.elements * t.count for t in vision_tensors(arch)) == WHISPER + projector
    assert parameters(language(arch)) == text
    assert parameters(arch) == text + WHISPER + projector


def test_the_language_model_has_the_sizes_of_one_without_sound() -> None:
    assert parameters(language(published("voxtral-small-24b"))) == parameters(published("mistral-small-24b"))


@pytest.mark.parametrize("model", ["qwen2-audio-7b", "voxtral-mini-3b"])
def test_a_step_over_text_keeps_what_hears_and_trains_none_of_it(model: str) -> None:
    """Its weights are there, without gradients and states; as positions are parameters, there is no buffer of sines."""
    job = {"model": model, "task": "sft", "gpu": "h200", "framework": "torch", "precision": "bf16"}
    found = estimate(parse(job))
    moment = next(p.moment for p in found.groups[0].phases if p.name == "step")
    of = {line.component: line.bytes for line in moment.lines}
    arch = load().models[model].architecture
    trained = parameters(language(arch))
    assert of["weights"] == 2 * parameters(arch)
    assert of["optimizer_states"] == pytest.approx(4 * trained, rel=1e-6)
    assert of["gradients"] == 2 * trained


def test_a_model_that_hears_is_not_cut() -> None:
    arch = published("voxtral-mini-3b")
    with pytest.raises(ConfigError, match=r"tensor_parallel.*whose part that hears stays whole"):
        slices.part(arch, 2)


def test_fields_that_published_files_leave_out_are_those_of_their_classes() -> None:
    """Qwen2-Audio's file has three sizes of its language model, Voxtral's may have none, and old names are read."""
    config = record("qwen2-audio-7b")["config"]
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    text = {name: value for name, value in config["text_config"].items() if name not in sizes}
    assert parameters(from_config(config | {"text_config": text})) == parameters(from_config(config))
    mini = record("voxtral-mini-3b")["config"]
    old = {"d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120}
    assert parameters(from_config(mini | {"audio_config": old})) == parameters(from_config(mini))
    assert parameters(from_config({"model_type": "voxtral"})) == parameters(from_config(mini))
    with pytest.raises(ConfigError, match=r"audio_config: given 3, allowed: a mapping"):
        from_config(mini | {"audio_config": 3})
    with pytest.raises(ConfigError, match=r"audio_config.intermediate_size: given 5121, allowed: a multiple of"):
        from_config(mini | {"audio_config": old | {"encoder_ffn_dim": 5121}})
