"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: towers of Qwen-VL's kind beside an unused encoder of sound."""

from __future__ import annotations

import pytest
from architectures import published, record

from calc.memory import weights
from calc.models.architecture import ConfigError, parameters, vision_tensors
from calc.models.hf_config import from_config
from calc.models.sound import Whisper

LAYER = 4 * 1280**2 + 2 * 1280 * 5120 + 5120 + 1280 + 2 * 2 * 1280  # without the biases of attention


def heard(model: str) -> int:
    return sum(t.elements * t.count for t in vision_tensors(published(model), "unread"))


def test_the_encoder_of_qwen2_5_omni_by_hand() -> None:
    """Convolutions of 3 over 128 bins, then over 1280 channels; 32 layers of which keys have no bias; a norm; a linear
    to 3584 and the two tokens around sound.
    """
    ends = 1280 * 128 * 3 + 1280**2 * 3 + 2 * 1280 + 2 * 1280 + 1280 * 3584 + 3584 + 2 * 3584
    assert heard("qwen2.5-omni-7b") == ends + 32 * (LAYER + 3 * 1280)


def test_the_encoder_of_qwen3_omni_by_hand() -> None:
    """Three convolutions of 3 by 3 that leave 16 of 128 bins; all of attention has biases; two linears behind."""
    begin = 480 * 9 + 2 * 480**2 * 9 + 3 * 480 + 480 * 16 * 1280
    assert heard("qwen3-omni-30b-a3b") == begin + 32 * (LAYER + 4 * 1280) + 2 * 1280 + 1280 * 1281 + 1280 * 2048 + 2048


def test_the_rest_is_as_in_the_model_that_only_sees() -> None:
    """Three linears have the weights of one; of Qwen3 the vocabulary has 128 rows more, twice."""
    assert parameters(published("qwen2.5-omni-7b")) - heard("qwen2.5-omni-7b") == 8292166656
    assert parameters(published("qwen3-omni-30b-a3b")) - heard("qwen3-omni-30b-a3b") == 31070754032 + 2 * 128 * 2048


def test_sines_of_positions_are_a_buffer_in_fp32() -> None:
    sound = published("qwen2.5-omni-7b").sound
    assert isinstance(sound, Whisper)
    assert weights.sines("policy", sound).bytes == 4 * 1500 * 1280


def test_a_file_with_all_parts_is_read_as_its_thinker() -> None:
    config = record("qwen2.5-omni-7b")["config"]
    outer = ("vision_config", "audio_config")
    text = {name: value for name, value in config.items() if name not in (*outer, "model_type", "architectures")}
    inner = {"text_config": text, **{name: config[name] for name in outer}}
    whole = {"model_type": "qwen2_5_omni", "thinker_config": inner, "talker_config": {}}
    assert parameters(from_config(whole)) == parameters(published("qwen2.5-omni-7b"))
    with pytest.raises(ConfigError, match="thinker_config: nothing given"):
        from_config({"model_type": "qwen2_5_omni"})
    with pytest.raises(ConfigError, match=r"audio_config.output_dim: given 5, allowed: hidden_size = 3584"):
        from_config(config | {"audio_config": {"output_dim": 5}})
