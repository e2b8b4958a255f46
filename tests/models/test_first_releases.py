"""The release of Transformers with which a model type came; against the packages: tests/frameworks."""

from __future__ import annotations

from calc.models.families import ALIKE, FAMILIES, NESTED, SEEING
from calc.models.releases import BROUGHT, CODE_BESIDE, FIRST, knows, logits_cast, newest_type
from calc.models.sound_config import HEARING

TYPES = {*FAMILIES, *ALIKE, *NESTED, *SEEING, *HEARING}


def test_every_model_type_has_its_first_release_unless_its_code_lies_beside_weights_alone() -> None:
    assert TYPES - FIRST.keys() == {
        "baichuan",
        "bailing_moe",
        "bailing_moe_lite",
        "deepseek",
        "kimi_k2",
        "kimi_vl",
        "mimo",
        "minicpm",
        "minicpmv",
        "minicpmv4_5",
        "nemotron-nas",
        "phi3_v",
    }
    assert FIRST.keys() <= TYPES
    assert len(FIRST) == sum(map(len, BROUGHT.values()))
    assert set(CODE_BESIDE) <= FIRST.keys()


def test_a_version_in_two_numbers_stands_for_the_last_of_its_releases() -> None:
    assert knows("4.51", "qwen3")
    assert knows("4.51", "glm4")  # since 4.51.3
    assert not knows("4.51.0", "glm4")
    assert not knows("4.5", "qwen3")
    assert knows("4.30", "kimi_k2")


def test_a_config_with_a_language_model_inside_takes_both_types() -> None:
    inner = {"model_type": "ministral3"}
    assert newest_type({"model_type": "mistral3", "text_config": inner}) == "ministral3"
    assert newest_type({"model_type": "mistral3", "text_config": {}}) == "mistral3"
    assert newest_type({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}) == "pixtral"
    assert newest_type({"model_type": "mimo"}) is None


def test_codegen_gpt_j_and_gpt_neo_cast_logits_themselves_before_release_5() -> None:
    """The `lm_logits` of `modeling_{codegen,gptj,gpt_neo}.py` become fp32 before the loss, from 4.21 to 4.57."""
    for family in ("codegen", "gptj", "gpt_neo"):
        assert [logits_cast(family, version) for version in ("4.21", "4.48.3", "4.57.3", "5.0.0")] == [
            *["model"] * 3, "loss",
        ]  # fmt: skip
    assert logits_cast("qwen2", "4.57.3") == "loss"
