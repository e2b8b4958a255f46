"""Logic-RL #8: GRPO of Qwen2.5 7B with a fork of verl on four 80 GB cards; 64 sequences a GPU die, 32 and 48 run.

Figures are worked out by hand from the fork's code, in GiB: P = 7,615,616,512, N = 4, root group r = 2·V·h + h with
V = 152,064 and h = 3,584, and T tokens in one backward. The mean length of 650 is a calibration, not evidence: what the
thread decides is the order of the runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.ledger import Moment
from calc.base.units import GB, GiB
from calc.estimate.estimate import estimate
from calc.estimate.result import Estimate
from calc.resolve.parse import parse

P = 7_615_616_512
V, H, LAYERS = 152_064, 3_584, 28
ROOT = 2 * V * H + H
CAP = 400 + 2048
JOB = {
    "model": "qwen2.5-7b",
    "task": "grpo",
    "framework": "verl==tinyzero",
    "gpu": "a800-80",
    "gpus": 4,
    "sharding": "fsdp1",
    "precision": "fsdp-mixed",
    "offload": {"optimizer": True, "parameters": True},
    "checkpointing": "full",
    "packing": True,
    "micro_batch": 16,
    "prompt_len": 400,
    "response_len": 2048,
    "expected_len": 650,
}
SERVED = {"engine": "vllm", "tensor_parallel": 1, "gpu_memory_utilization": 0.6}
FORK = {"roles": {"reference": {"offload.parameters": True}}}
VERL = {"roles": {"reference": {}}}


def run(batch: int, n: int, share: float = 0.6, **changes: Any) -> Estimate:
    rollout = {**SERVED, "batch": batch, "n": n, "gpu_memory_utilization": share}
    return estimate(parse({**JOB, **FORK, **changes, "rollout": rollout}))


def moment(e: Estimate, phase: str) -> Moment:
    return next(p.moment for p in e.groups[0].phases if p.name == phase)


def held(m: Moment, component: str, role: str = "actor") -> float:
    return sum(x.bytes for x in m.lines if (x.component, x.role) == (component, role)) / GiB


@pytest.mark.parametrize("gpu", ["a800-80", "a100-80-sxm", "h100-sxm"])
def test_the_runs_of_the_thread(gpu: str) -> None:
    """Batch 4 with n 32 and n 48 ran, n 64 did not, nor batch 8 with n 32; the shipped script, 8 with 16, is 32."""
    found = {(b, n): run(b, n, gpu=gpu) for b, n in ((4, 32), (4, 48), (4, 64), (8, 32), (8, 16))}
    assert {key: e.verdict for key, e in found.items()} == {
        (4, 32): "fits", (4, 48): "fits", (4, 64): "oom", (8, 32): "oom", (8, 16): "fits",
    }  # fmt: skip
    assert found[4, 64].verdict_phase == found[8, 32].verdict_phase == "backward"


def test_the_loss_is_the_peak_part_by_part() -> None:
    """12 P / N states, two root groups in bf16, a checkpoint a layer, and 8 bytes a logit; no gradients yet."""
    tokens = 64 * 650
    peak = moment(run(8, 32), "backward")
    assert held(peak, "weights") == pytest.approx(4 * P / 4 / GiB, abs=0.01)
    assert held(peak, "optimizer_states") == pytest.approx(8 * P / 4 / GiB, abs=0.01)
    assert held(peak, "communication") == pytest.approx(2 * ROOT / GiB, abs=0.01)
    assert held(peak, "communication", "reference") == pytest.approx(2 * ROOT / GiB, abs=0.01)
    assert held(peak, "checkpoints") == pytest.approx(2 * H * LAYERS * tokens / GiB, abs=0.01)
    assert held(peak, "logits") == pytest.approx((8 * V + 2 * H) * tokens / GiB, abs=0.01)
    assert held(peak, "gradients") == 0
    assert peak.allocated_bytes / GiB == pytest.approx(81.4, abs=0.2)


def test_a_gpus_whole_rollout_is_one_micro_batch() -> None:
    """So runs with the same batch x n are the same job to a GPU."""
    for one, other in (((8, 32), (4, 64)), ((8, 16), (4, 32))):
        assert moment(run(*one), "backward").device_bytes == moment(run(*other), "backward").device_bytes


def test_the_window_of_mean_lengths() -> None:
    """650 and 700 give the verdicts of the thread; at 600 the largest, at 750 the middle run is a matter of luck."""
    verdicts = {m: [run(4, n, expected_len=m).verdict for n in (32, 48, 64)] for m in (600, 650, 700, 750)}
    assert verdicts[650] == verdicts[700] == ["fits", "fits", "oom"]
    assert verdicts[600] == ["fits", "fits", "tight"]
    assert verdicts[750] == ["fits", "tight", "oom"]


def test_verdicts_are_ordered_by_sequences_at_any_length() -> None:
    for mean in (400, 550, 650, 900, CAP):
        needs = [moment(run(4, n, expected_len=mean), "backward").device_bytes for n in (32, 48, 64)]
        assert needs == sorted(needs)


def test_longer_answers_end_the_shipped_script_too() -> None:
    assert run(8, 16, expected_len=1300).verdict == "oom"


def test_a_smaller_micro_batch_changes_nothing_in_the_fork() -> None:
    """`ppo_micro_batch_size // 4 * n`: n sequences are the least, and with batch 4 they are all that a GPU has."""
    whole = [run(4, 32, micro_batch=m) for m in (16, 8, 4, 2, 1)]
    assert {e.scenario.rows for e in whole} == {32}
    assert len({e.groups[0].peak.moment.device_bytes for e in whole}) == 1
    twice = [run(8, 32, micro_batch=m) for m in (16, 8, 4, 2)]
    assert {(e.scenario.rows, e.verdict) for e in twice} == {(64, "oom")}


def test_its_smallest_micro_batch_halves_a_batch_of_eight() -> None:
    """The way out in the fork: the second half finds the first one's gradients, 4 P / N."""
    e = run(8, 32, micro_batch=1)
    assert (e.scenario.rows, e.verdict) == (32, "fits")
    assert held(moment(e, "backward"), "gradients") == pytest.approx(4 * P / 4 / GiB, abs=0.01)


@pytest.mark.parametrize("framework", ["verl==0.4", "verl==0.9.1"])
def test_in_verl_the_micro_batch_counts_sequences(framework: str) -> None:
    at = [run(8, 32, framework=framework, micro_batch=m, expected_len=CAP, **VERL) for m in (8, 4, 2, 1)]
    assert [e.scenario.rows for e in at] == [8, 4, 2, 1]
    needs = [moment(e, "backward").device_bytes for e in at]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] > needs[1] > needs[2]  # at last what counts is the root group's reduction, whatever the batch
    assert {e.verdict for e in at} == {"fits"}
    more = run(8, 64, framework=framework, micro_batch=8, expected_len=CAP, **VERL)
    assert moment(more, "backward").device_bytes == needs[0]  # n costs nothing in training


def test_vllm_is_not_the_cause() -> None:
    """The rollout is far below the card in every run, and a smaller share for it leaves the verdict."""
    for batch, n in ((4, 32), (8, 32), (4, 64)):
        e = run(batch, n)
        asked = batch * n // 4
        assert moment(e, "rollout").device_bytes / GiB < 60
        assert e.groups[0].cache_sequences > 3 * asked
    less = run(8, 32, share=0.3)
    assert moment(less, "rollout").device_bytes < moment(run(8, 32), "rollout").device_bytes
    assert (less.verdict, less.verdict_phase) == ("oom", "backward")


def test_saving_asks_the_host_for_the_whole_model_and_the_gpu_for_little() -> None:
    """Logic-RL #75: FULL_STATE_DICT in fp32, on rank 0."""
    e = run(8, 32)
    device = {p.name: p.moment.device_bytes for p in e.groups[0].phases}
    assert min(device, key=device.__getitem__) == "save"
    host = {p.name: p.moment.device_bytes / GB for p in e.host_phases}
    assert host["save"] - host["after the first step"] == pytest.approx(4 * P / GB, abs=0.1)
