"""Models that are newer than the Transformers that a job runs on."""

from __future__ import annotations

from typing import Any

import pytest
from refused import line

from calc.recommend import recommend
from calc.resolve.parse import parse

QWEN3 = {"model": "qwen3-0.6b", "gpu": "h100-sxm", "task": "sft"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"framework": "openrlhf==0.3.0"},
            "framework: given 'openrlhf==0.3.0', whose transformers 4.40.0 lacks qwen3, which came with 4.51.0, "
            "allowed: openrlhf==0.7.1 or later, or a newer versions.transformers",
        ),
        (
            {"framework": "verl==tinyzero", "task": "grpo"},
            "framework: given 'verl==tinyzero', whose transformers 4.47.1 lacks qwen3, which came with 4.51.0, "
            "allowed: verl==0.4.0 or later, or a newer versions.transformers",
        ),
        (
            {"framework": "trl==0.16.0"},
            "framework: given 'trl==0.16.0', whose transformers 4.50.0 lacks qwen3, which came with 4.51.0, "
            "allowed: trl==0.17.0 or later, or a newer versions.transformers",
        ),
        (
            {"trainer": "llamafactory", "versions.llamafactory": "0.9.1"},
            "versions.llamafactory: given '0.9.1', whose transformers 4.46.1 lacks qwen3, which came with 4.51.0, "
            "allowed: a newer versions.transformers",
        ),
        (
            {"versions.transformers": "4.40"},
            "versions.transformers: given '4.40', which lacks qwen3, allowed: 4.51.0 or later",
        ),
        (
            {"model": "gemma-4-31b", "versions.transformers": "4.50"},
            "versions.transformers: given '4.50', which lacks gemma4_text, allowed: 5.5.0 or later",
        ),
    ],
)
def test_a_model_that_the_jobs_transformers_lacks_is_refused(fields: dict[str, Any], told: str) -> None:
    """Once computed without a word."""
    assert line(lambda: parse(QWEN3 | fields)) == f"scenario: {told}"
    assert line(lambda: recommend(QWEN3 | fields, where="recommend")) == f"recommend: {told}"


def test_a_model_of_a_role_counts() -> None:
    job = {"model": "llama-3-8b", "task": "dpo", "gpu": "h100-sxm", "framework": "trl==0.16.0"}
    parse(job)
    assert "lacks qwen3" in line(lambda: parse(job | {"roles.reference.model": "qwen3-0.6b"}))


def test_a_newer_transformers_can_be_stated() -> None:
    assert parse(QWEN3 | {"framework": "trl==0.16.0", "versions.transformers": "4.51.0"}).framework_version == "0.16.0"


@pytest.mark.parametrize("trainer", ["torchtune", "torchtitan"])
def test_who_makes_models_by_code_of_his_own_needs_no_transformers(trainer: str) -> None:
    task = "pretrain" if trainer == "torchtitan" else "sft"
    assert parse(QWEN3 | {"trainer": trainer, "task": task, "versions.transformers": "4.40"})


def test_what_runs_by_the_code_beside_its_weights_is_noted() -> None:
    """DeepSeek V3 ran on Transformers 4.46 with `trust_remote_code`, two releases before its class."""
    job = {"model": "deepseek-v3", "gpu": "h100-sxm", "gpus": 64, "task": "sft", "versions.transformers": "4.46"}
    noted = "deepseek_v3 came with transformers 4.51.0: transformers 4.46 runs the code beside its weights"
    assert any(warning.startswith(noted) for warning in parse(job).warnings)
    assert not [w for w in parse(job | {"versions.transformers": "4.51"}).warnings if "came with" in w]
