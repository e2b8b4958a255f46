"""What `calc.throughput.work` counts of a layer is what Transformers and PEFT dispatch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from calc.throughput.work import ADAPTED, BACKWARD, DISPATCHED, FORWARD, KERNELS, REENTRANT, Bytes
from tests.trace.test_trace import HERE, answers

TOKENS = 128
H, Q, KV, WIDE, LINEARS = 256, 256, 64, 1024, 7
SIZES = {"hidden_size": H, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
         "intermediate_size": WIDE, "vocab_size": 512}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
INPUTS, OUTPUTS = 6 * H + WIDE, 2 * (H + KV + WIDE) + H


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    cases: dict[str, dict[str, Any]] = {
        "plain": {}, "recomputed": {"checkpointing": True}, "reentrant": {"checkpointing": "reentrant"},
        "normed": {"family": "qwen3"},
        "normed, recomputed": {"family": "qwen3", "checkpointing": True},
        "experts": {"family": "qwen3_moe", "sizes": SIZES | EXPERTS},
        "bf16": {"lora": "bf16"}, "fp32": {"lora": "fp32"}, "fp32, recomputed": {"lora": "fp32", "checkpointing": True},
    }  # fmt: skip
    lines = [
        json.dumps({"config": {"model_type": case.get("family", "llama"), **case.get("sizes", SIZES)},
                    "lora": case.get("lora"), "checkpointing": case.get("checkpointing", False)}) + "\n"
        for case in cases.values()
    ]  # fmt: skip
    return dict(zip(cases, answers(HERE / "operations.py", given="".join(lines)), strict=True))


def norms(found: dict[str, Any], what: str, part: int, suffix: str = "") -> float:
    """Of one norm of queries or keys: Qwen3 has two more than Llama."""
    bare = "recomputed" if suffix else "plain"
    return (found["normed" + suffix][part][what] - found[bare][part][what]) / 2


def test_a_layer_and_a_norm_dispatch_what_is_counted(found: dict[str, Any]) -> None:
    for what, (forward, again, back) in (("kernels", KERNELS), ("all", DISPATCHED)):
        plain, recomputed = found["plain"], found["recomputed"]
        assert (plain[0][what], plain[1][what]) == pytest.approx((forward.layer, back.layer), abs=1)
        assert (norms(found, what, 0), norms(found, what, 1)) == pytest.approx((forward.norm, back.norm), abs=1.5)
        more = sum(part[what] for part in recomputed) - sum(part[what] for part in plain)
        hooks = 3 * plain[0]["kept"] * (what == "all")
        assert more + hooks == pytest.approx(again.layer, abs=2)


def test_reentrant_checkpointing_dispatches_a_forward_more(found: dict[str, Any]) -> None:
    plain, again = found["plain"], found["reentrant"]
    more = sum(part["all"] for part in again) - sum(part["all"] for part in plain)
    assert more == pytest.approx(REENTRANT[1].layer, abs=2)


def test_an_adapter_dispatches_what_is_counted(found: dict[str, Any]) -> None:
    for what, (forward, again, back) in (("kernels", KERNELS), ("all", DISPATCHED)):
        adapted, recomputed = found["fp32"], found["fp32, recomputed"]
        each = [(adapted[part][what] - found["plain"][part][what]) / LINEARS for part in (0, 1)]
        assert each == pytest.approx([forward.adapter, back.adapter], abs=1.5)
        more = sum(part[what] for part in recomputed) - sum(part[what] for part in adapted)
        hooks = 3 * adapted[0]["kept"] * (what == "all")
        assert (more + hooks - again.layer) / LINEARS == pytest.approx(again.adapter, abs=1.5)


def bytes_of(b: Bytes) -> int:
    return 2 * (b.norm + b.residual) * H + b.rope * (Q + KV) + b.gated * WIDE


def test_a_layer_moves_the_bytes_that_are_counted(found: dict[str, Any]) -> None:
    for part, counted in ((0, FORWARD), (1, BACKWARD)):
        assert found["plain"][part]["bytes"] / TOKENS == pytest.approx(bytes_of(counted), rel=0.02)


def test_experts_move_the_bytes_that_are_counted(found: dict[str, Any]) -> None:
    """What routes tokens beside, of the number of experts, is left out: some per cent of so small a layer."""
    copies, wide = EXPERTS["num_experts_per_tok"], EXPERTS["moe_intermediate_size"]
    for part, b in ((0, FORWARD), (1, BACKWARD)):
        more = found["experts"][part]["bytes"] - found["normed"][part]["bytes"]
        counted = copies * (b.routed * H + (b.gated + b.joined) * wide) - b.gated * WIDE
        assert more / TOKENS == pytest.approx(counted, rel=0.12)


@pytest.mark.parametrize(("dtype", "b"), [("bf16", 2), ("fp32", 4)])
def test_an_adapter_moves_the_bytes_that_are_counted(found: dict[str, Any], dtype: str, b: int) -> None:
    """Backward of a frozen layer leaves out the gradients of norms, 8 bytes for each element of its two."""
    frozen = (0, 2 * 8 * H)
    for part, (taken, given) in enumerate(ADAPTED[b]):
        more = (found[dtype][part]["bytes"] - found["plain"][part]["bytes"]) / TOKENS + frozen[part]
        assert more == pytest.approx(taken * INPUTS + given * OUTPUTS, rel=0.03)
