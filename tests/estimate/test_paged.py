"""Paged optimizer states fill what a card has room for, and never decide whether a job fits."""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.ledger import staying, total
from calc.estimate.estimate import Estimate, estimate
from calc.resolve.parse import parse

# https://github.com/meta-pytorch/torchtune, recipes/configs/llama3_1/8B_full_single_device.yaml: "at least 24 GB"
RECIPE: dict[str, Any] = {
    "model": "llama-3.1-8b", "task": "sft", "framework": "torch==2.6", "trainer": "torchtune", "gpu": "rtx4090",
    "gpus": 1, "optimizer_in_backward": True, "seq_len": 2048, "micro_batch": 2, "checkpointing": "full",
}  # fmt: skip


def at(**more: Any) -> Estimate:
    return estimate(parse(RECIPE | more))


def test_a_published_recipe_for_24_gb_fits_them_with_most_of_its_states_on_the_host() -> None:
    """Two bytes of states for 8 billion parameters are 15 GiB, beside as many of weights."""
    there, apart = at(), at(optimizer="adamw-8bit")
    assert (there.verdict, apart.verdict) == ("fits", "oom")
    peak = there.groups[0].peak.moment
    states = next(line for line in peak.lines if line.paged)
    assert peak.device_bytes == there.groups[0].usable_bytes == there.groups[0].device_range[1]
    assert states.bytes == states.values["U"] - states.values["R"] == there.groups[0].usable_bytes - staying(peak.lines)
    left = states.values["P"] - states.bytes
    assert left == pytest.approx(12.5 * 2**30, rel=0.02)
    assert [f"{left / 2**30:.1f} GiB of paged" in note for note in there.notes].count(True) == 1


def test_where_a_card_has_room_all_of_them_stay() -> None:
    there = at(gpu="h100-sxm")
    lines = there.groups[0].peak.moment.lines
    states = next(line for line in lines if line.paged)
    assert states.bytes > 15e9 and "P" not in states.values
    assert total(lines) - staying(lines) == states.bytes
    assert not any("paged" in note for note in there.notes)


def test_what_cannot_leave_still_has_to_fit() -> None:
    assert at(micro_batch=16, seq_len=4096).verdict == "oom"
    assert at(gpu="rtx4060ti-16").verdict == "oom"
