"""What vLLM's refusals are for readers of pages: every kind of them, as the engine words it."""

from __future__ import annotations

import pytest

from calc.answers import words
from calc.base.plan import Serving
from calc.base.units import GiB
from calc.catalog.catalog import load
from calc.engines.vllm import Vllm
from calc.site.i18n import speech

QWEN = load().model("qwen2.5-7b").architecture


def refusal(utilization: float, others: int = 0, ranks: int = 1, length: int = 2048) -> str:
    """The refusal of Qwen2.5 7B on 79 GiB with vLLM 0.11."""
    engine = Vllm(QWEN, Serving("0.11.0", length, max_num_batched_tokens=8192), ranks, utilization, 79 * GiB)
    return str(engine.cache(others * GiB).refusal)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (refusal(0.6, others=40), "it asks for 47.40 GiB and finds 39.00 GiB free"),
        (refusal(0.1), "its share of 0.1 leaves no room for a KV cache"),
        (refusal(0.6, ranks=3), "3 GPUs cannot share 4 key/value heads"),
    ],
)
def test_a_refusal_is_paraphrased(given: str, said: str) -> None:
    """No field, no `given`, no `allowed`; and Chinese pages have it too."""
    assert words.unstarted(given) == said
    assert speech.say(f"does not start vLLM: {said}", "zh").startswith("vLLM 无法启动：")
    assert "does" not in speech.say(f"does not start vLLM: {said}", "zh")


def test_a_cache_shorter_than_a_sequence_says_both_lengths() -> None:
    given = (
        "rollout.gpu_memory_utilization: given 0.25, allowed: more; the model's max seq len (32768) is larger than the"
        " 160 tokens that can be stored in KV cache"
    )
    said = "its share of 0.25 leaves a KV cache of 160 tokens, less than one sequence of 32768"
    assert words.unstarted(given) == said
    assert "160 个 token" in speech.say(said, "zh")


def test_another_reason_stays() -> None:
    assert words.unstarted("something else") == "something else"
