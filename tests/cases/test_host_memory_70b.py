"""OpenRLHF #332: a 70B Llama 2 under ZeRO-3 with optimizer offload, killed by host memory at the 32nd micro-batch.

128 sequences over 4 GPUs at micro batch 1 are 32 micro-batches, and Adam's moments are allocated by the first step.
"""

from __future__ import annotations

from typing import Any

import pytest

from calc.estimate import estimate
from calc.ledger import Estimate
from calc.scenario import parse

JOB = {
    "model": "llama-2-70b",
    "task": "sft",
    "framework": "openrlhf==0.3",
    "gpu": "a800-80",
    "gpus": 4,
    "sharding": "zero3",
    "offload.optimizer": True,
    "checkpointing": "full",
    "attention": "flash",
    "micro_batch": 1,
    "global_batch": 128,
    "seq_len": 2048,
}


def host_gb(e: Estimate) -> dict[str, float]:
    return {p.name: p.moment.device_bytes / 1e9 for p in e.host_phases}


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [({}, 1118, 1670), ({"gpus": 8}, 1118, 1670), ({"grad_dtype": "bf16"}, 843, 1395)],
    ids=["fp32 accumulation, 4 GPUs", "8 GPUs", "bf16 accumulation"],
)
def test_moments_allocated_by_the_first_step_decide(changes: dict[str, Any], before: float, after: float) -> None:
    """P = 68,976,648,192: 4 P master + fp32 gradients pinned a sub-group + accumulation pinned a rank, then 8 P."""
    host = host_gb(estimate(parse({**JOB, **changes})))
    assert host["before the first step"] == pytest.approx(before, abs=1)
    assert host["after the first step"] == pytest.approx(after, abs=1)


def test_a_node_of_1600_gb_holds_the_accumulation_but_not_the_step() -> None:
    """Which is why the job died after 31 good micro-batches."""
    host = host_gb(estimate(parse(JOB)))
    assert host["before the first step"] < 1600 < host["after the first step"]


def test_the_gpu_side_fits() -> None:
    """2·P/4 = 32.1 GiB of shards, bucket, gathered layers, checkpoints and logits stay near 40 GiB of 79."""
    e = estimate(parse(JOB))
    assert e.verdict == "fits"
    assert e.groups[0].peak.moment.device_bytes / 2**30 == pytest.approx(41, abs=2)
