"""Megatron-core's step under the tracer: a small one counted by hand, and stored records again, to the byte.

Needs the packages of `requirements/megatron.txt` beside those of `requirements/trace.txt`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trace.test_trace import SMALL, answers, run, stored

CASES = (
    "traced/llama-3.2-1b/sft/s2048/mb2/attn=fa2/prec=mixed/megatron=True/ranks=2",
    "traced/qwen3-0.6b/sft/s1024/mb4/attn=fa2/prec=mixed/megatron=True/ranks=4",
    # lets outputs go, and fills their storages again
    "traced/deepseek-v2-lite/sft/s4096/mb1/ckpt=selective/attn=fa2/prec=mixed/ep=8/megatron=True/again=moe_act/ranks=8",
)
RANKS, TOKENS, LAYERS = 2, 2 * 256, 3
# fused queries, keys and values of 4, 2 and 2 heads of 64; their output; gate and up; down
LAYER = (512 * 256, 256 * 256, 1024 * 256, 256 * 512)
HEAD = 2048 * 256
COUNT = 2 * HEAD + LAYERS * (sum(LAYER) + 2 * 256) + 256


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    """Names the package that is missing."""
    for package in ("megatron-core", "transformer-engine"):
        asked = f"from measurements.trace.case import installed; print(installed({package!r}))"
        if run("-c", asked).stdout.strip() == "None":
            pytest.skip(f"{package} is not installed beside PyTorch here: make trace-check installs it")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A step of a small Llama with three layers, and one with two of them."""
    config = tmp_path_factory.mktemp("models") / "llama.json"
    config.write_text(json.dumps({**SMALL, "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False}))
    case = {"model": str(config), "megatron": True, "ranks": RANKS, "seq": 256, "mb": 2, "prec": "mixed", "attn": "fa2"}
    given = "".join(json.dumps({**case, "layers": n}) + "\n" for n in (LAYERS, LAYERS - 1))
    return answers("-m", "measurements.trace", "--batch", "-", given=given)


def test_buffers_and_states_are_counted_by_hand(small: list[dict[str, Any]]) -> None:
    """16-bit weights and fp32 gradients of all parameters, and on each of two ranks masters and moments of half.

    Transformer Engine keeps an empty gradient of each shape of a product's weights, for all layers.
    """
    assert small[0]["n_params"] == COUNT
    assert small[0]["params_bytes"] == 2 * COUNT
    assert small[0]["optim_bytes"] == 12 * COUNT // RANKS
    assert small[0]["grads_bytes"] == 4 * COUNT + 2 * (sum(LAYER) + HEAD)


def test_a_layer_keeps_what_is_counted_by_hand(small: list[dict[str, Any]]) -> None:
    """Of each token the inputs and outputs of two norms with their scales, queries, keys and values, attention's output
    with a log-sum-exp of each head, gate and up, and their product; and of the whole layer a state of random numbers.
    """
    norms = 2 * (2 * 2 * 256 + 4)
    attention = 2 * (256 + 128 + 128 + 256) + 4 * 4
    mlp = 2 * (2 * 512 + 512)
    more = small[0]["activation_peak_bytes"] - small[1]["activation_peak_bytes"]
    assert more == TOKENS * (norms + attention + mlp) + 512


@pytest.mark.parametrize("case", CASES)
def test_stored_records_are_traced_again_to_the_byte(case: str) -> None:
    record = stored()[case]
    (answer,) = answers("-m", "measurements.trace", "--batch", "-", given=json.dumps(record["scenario"]))
    assert answer["total_peak_bytes"] == record["measured_bytes"]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"pipeline_parallel": 2}, "pipeline_parallel: 2 cannot be traced with sharding megatron; allowed: 1"),
        ({"loss": "fused"}, "loss: 'fused' cannot be traced with sharding megatron; allowed: full"),
        (
            {"checkpointing": "selective", "recompute_modules": ["gdn_norm_out"]},
            "recompute_modules: 'gdn_norm_out' cannot be traced; allowed: core_attn, mlp, moe, shared_experts",
        ),
        ({"model": "gemma-2-2b"}, "model: family 'gemma2' cannot be traced here; allowed: llama, "),
    ],
)
def test_what_is_not_traced_is_one_line(tmp_path: Path, fields: dict[str, Any], complaint: str) -> None:
    """The field is named, and what it may be."""
    job = {"model": "llama-3.2-1b", "task": "sft", "trainer": "megatron", "sharding": "megatron", "gpus": 4, **fields}
    done = run("-m", "measurements.trace", "-", given=json.dumps(job))
    assert done.returncode == 2
    assert done.stderr.startswith(complaint)
    assert done.stderr.count("\n") == 1
