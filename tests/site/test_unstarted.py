"""vLLM's refusals for readers of pages: every kind of them, as the engine words it."""

from __future__ import annotations

import pytest

from calc.base.plan import Serving
from calc.base.units import GiB
from calc.catalog.catalog import load
from calc.engines.rollout import Unstarted
from calc.engines.vllm import Vllm
from calc.site.i18n import speech

QWEN = load().model("qwen2.5-7b").architecture


def unstarted(utilization: float, others: int = 0, ranks: int = 1, length: int = 2048) -> Unstarted:
    """The refusal of Qwen2.5 7B on 79 GiB with vLLM 0.11."""
    engine = Vllm(QWEN, Serving("0.11.0", length, max_num_batched_tokens=8192), ranks, utilization, 79 * GiB)
    refusal = engine.cache(others * GiB).refusal
    assert refusal
    return refusal


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (unstarted(0.6, others=40), "it asks for 47.40 GiB and finds 39.00 GiB free"),
        (unstarted(0.1), "its share of 0.1 leaves no room for a KV cache"),
        (unstarted(0.6, ranks=3), "3 GPUs cannot share 4 key/value heads"),
        (
            unstarted(0.26, length=32768),
            "its share of 0.26 leaves a KV cache of 14768 tokens, less than one sequence of 32768",
        ),
    ],
)
def test_a_refusal_is_paraphrased(given: Unstarted, said: str) -> None:
    """No field, no `given`, no `allowed`; and Chinese pages have it too."""
    assert given.words == said
    assert speech.say(f"does not start vLLM: {said}", "zh").startswith("vLLM 无法启动：")
    assert "does" not in speech.say(f"does not start vLLM: {said}", "zh")


def test_the_setting_that_is_refused_is_named() -> None:
    found = unstarted(0.1).refusal
    assert (found.field, found.given) == ("rollout.gpu_memory_utilization", 0.1)
    assert str(unstarted(0.1)).startswith("rollout.gpu_memory_utilization: given 0.1, allowed: more; vLLM has no ")
