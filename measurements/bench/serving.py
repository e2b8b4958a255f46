"""Decoding steps of vLLM, as an engine in a process of its own takes them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BATCHES = (1, 32, 128, 256, 512)
PROMPT, FIRST, STEPS, REPEATS = 64, 4, 64, 2  # tokens of a prompt, steps that are left out, that are timed, and runs
LENGTH = 4096  # tokens that a sequence may have
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # frameworks for RL run the engine beside their own process, too
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # which only a top-p or top-k asks for
}


def serve(config: Mapping[str, Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seconds and tokens/s of a step by sequences at once, without and with log-probabilities of what is drawn."""
    os.environ.update(SETTINGS)
    from vllm import LLM

    batches = options.get("batches", BATCHES)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, **config}))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=LENGTH,
            max_num_seqs=max(batches),
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        return list(_rows(llm, batches))


def _rows(llm: Any, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    _seconds(llm, 2, FIRST, None)
    for logprobs in (None, 0):
        for batch in batches:
            _seconds(llm, batch, FIRST, logprobs)
            # the steps between two lengths: prompts, and what a call takes once, are in both
            short, long = (
                min(_seconds(llm, batch, steps, logprobs) for _ in range(REPEATS)) for steps in (FIRST, FIRST + STEPS)
            )
            taken = (long - short) / STEPS
            yield {
                "op": "vllm step" if logprobs is None else "vllm step with log-probabilities",
                "batch": batch,
                "kv_len": PROMPT + STEPS // 2,
                "seconds": taken,
                "tokens_per_second": batch / taken,
            }


def _seconds(llm: Any, batch: int, steps: int, logprobs: int | None) -> float:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * row + at) % 1000 + 3 for at in range(PROMPT)]} for row in range(batch)]
    drawn = SamplingParams(max_tokens=steps, ignore_eos=True, detokenize=False, temperature=1.0, logprobs=logprobs)
    start = time.perf_counter()
    llm.generate(prompts, drawn, use_tqdm=False)
    return time.perf_counter() - start
