"""The times of vLLM's steps, of an engine whose clock is counted by hand."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from measurements.bench.serving import serve


class Engine:
    """Takes 10 ms a call and 1 ms a prompt, and for each step 4 ms, and 10 µs a sequence, twice that with its
    log-probability.
    """

    now = 0.0

    def __init__(self, **settings: Any) -> None:
        self.most = settings["max_num_seqs"]

    def generate(self, prompts: list[Any], drawn: Any, *, use_tqdm: bool) -> None:
        assert len(prompts) <= self.most and not use_tqdm
        each = 10e-6 if drawn.logprobs is None else 20e-6
        Engine.now += 0.01 + 1e-3 * len(prompts) + drawn.max_tokens * (4e-3 + each * len(prompts))


def test_a_step_of_vllm_is_what_lies_between_two_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("vllm")
    library.LLM, library.SamplingParams = Engine, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", library)
    monkeypatch.setattr(time, "perf_counter", lambda: Engine.now)
    rows = serve({"model_type": "llama"}, {"batches": [1, 256]})
    drawn = "vllm step with log-probabilities"
    assert [(row["op"], row["batch"]) for row in rows] == [
        ("vllm step", 1),
        ("vllm step", 256),
        (drawn, 1),
        (drawn, 256),
    ]
    assert [row["seconds"] for row in rows] == pytest.approx([4.01e-3, 6.56e-3, 4.02e-3, 9.12e-3])
    assert rows[1]["tokens_per_second"] == pytest.approx(256 / 6.56e-3)
