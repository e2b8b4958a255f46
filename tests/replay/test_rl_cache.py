"""What PyTorch caches in a step of RL: phases between calls of `empty_cache`, and micro batches that are records."""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.units import GiB, MiB
from calc.catalog.catalog import load
from calc.replay.rl_cache import records, reserved, sections
from calc.resolve.parse import parse
from calc.step.roles import Roles
from calc.step.stages import Stages

# two GPUs with 16 sequences each a step, in four micro batches of four; answers are half as long as they may be
JOB: dict[str, Any] = {
    "gpu": "h100-sxm", "gpus": 2, "model": "qwen2.5-0.5b", "task": "grpo", "framework": "verl==0.4.0", "packing": True,
    "checkpointing": "full", "prompt_len": 256, "response_len": 512, "expected_len": 384, "micro_batch": 4,
    "global_batch": 32, "entropy_coeff": 0, "roles": {"reference": "none"},
    "rollout": {"n": 4, "batch": 8, "tensor_parallel": 1, "micro_batch": 4, "expected_len": 256},
}  # fmt: skip
OFFLOADED = {"offload": {"parameters": True, "optimizer": True}}
ENOUGH, WORKSPACE = 200 * GiB, 32 * MiB


def roles(**fields: Any) -> Roles:
    return Roles(parse({**JOB, **fields}, where="test", catalog=load()))


def phases(**fields: Any) -> list[list[tuple[str, bool, int]]]:
    found = roles(**fields)
    every = sections(found, Stages(found, found.keeps.loading))
    return [[(p.placed.role.name, p.trains, len(p.lengths)) for p in section] for section in every]


def most(limit: int = ENOUGH, **fields: Any) -> int:
    found = roles(**fields)
    count = reserved(found, found.keeps.loading, limit, WORKSPACE)
    assert count is not None
    return count


@pytest.mark.parametrize(
    ("passes", "steps", "expected"),
    [
        (1, 100, 1),
        # of five, c(5, k)/120: 24, 50, 35, 10 and 1 of the orders have 1 to 5 records; half have 2 at most
        (5, 1, 2),
        # (119/120)^82 is above a half, (119/120)^83 below: so many steps meet the rising order
        (5, 82, 4),
        (5, 83, 5),
    ],
)
def test_records_of_a_random_order(passes: int, steps: int, expected: int) -> None:
    """The median of the most records of any step, by Stirling's numbers of the first kind."""
    assert records(passes, steps) == expected


def test_the_cache_is_emptied_where_weights_leave() -> None:
    """verl since 0.3: `offload_fsdp_model_to_cpu`; weights that stay leave the cache to the next phase."""
    assert phases() == [[("actor", False, 4), ("actor", True, 4)]]
    assert phases(**OFFLOADED) == [[("actor", False, 4)], [("actor", True, 4)]]


def test_the_cache_was_emptied_after_each_phase() -> None:
    """verl 0.2, fsdp_workers.py:450 and :526, whatever leaves."""
    old = {"framework": "verl==0.2", "entropy_coeff": 0.001}
    assert phases(**old) == [[("actor", False, 4)], [("actor", True, 4)]]


def test_nothing_is_replayed_where_no_framework_empties_the_cache() -> None:
    """Without such calls nothing says between which of its phases the cache of a step begins anew."""
    assert phases(framework="torch", roles={"reference": "none", "critic": "none", "reward": "none"}) == []


@pytest.mark.parametrize(
    "fields", [{"packing": False}, {"expected_len": 768, "rollout": {**JOB["rollout"], "expected_len": 512}}]
)
def test_micro_batches_of_one_length_are_no_records(fields: dict[str, Any]) -> None:
    """With padding, or with answers that are all as long as they may be."""
    assert phases(**fields) == [[("actor", False, 1), ("actor", True, 1)]]


def test_parts_of_a_dynamic_batch_are_alike_but_updates_are_not() -> None:
    """Each update's parts come with the largest first: four updates of 8 sequences make four records, scores one."""
    dynamic = {name: value for name, value in JOB["rollout"].items() if name != "micro_batch"}
    found = phases(max_tokens_per_gpu=1536, global_batch=8, rollout=dynamic, micro_batch=1)
    assert found == [[("actor", False, 1), ("actor", True, 4)]]


def test_each_record_has_all_its_logits_reserved_anew() -> None:
    """By hand: the backward of the division holds four tensors of logits in 16 bits, and the last 4 find none of them.

    The shortest of the micro batches has rows · tokens · V · 2 bytes for each; all others have more.
    """
    own, alone = roles(**OFFLOADED), most(**OFFLOADED, response_len=256)
    trains = next(p for section in sections(own, Stages(own, own.keeps.loading)) for p in section if p.trains)
    shortest, *_, longest = trains.lengths
    assert len({*trains.lengths}) == 4 and shortest < 384 < longest
    one = 4 * 2 * 4 * 151936
    assert most(**OFFLOADED) - alone > 3 * one * shortest - one * (longest - 384)
    assert most(**OFFLOADED) < 4 * one * longest + alone


def test_a_card_bounds_what_is_cached() -> None:
    """Cached segments go back to the driver before a request fails."""
    free = most(**OFFLOADED)
    assert 0.7 * free < most(limit=int(0.8 * free), **OFFLOADED) <= 0.8 * free


def test_a_job_that_does_not_fit_reserves_all_that_it_may() -> None:
    """The request that fails finds the card full of live tensors."""
    assert most(limit=GiB, **OFFLOADED) == GiB


def test_a_model_whose_blocks_are_unknown_is_not_replayed() -> None:
    """Megatron-core's blocks are an example."""
    found = roles(sharding="megatron", gpus=2, packing=True)
    assert reserved(found, found.keeps.loading, ENOUGH, WORKSPACE) is None


def test_a_model_that_stays_takes_room_while_another_runs() -> None:
    """With a critic beside it the same phases reserve more: its weights and states stay."""
    both = {"task": "ppo", "rollout": {**JOB["rollout"], "n": 1, "batch": 32}, "roles": {"reference": "none"}}
    assert most(**both) > most() + 0.9 * GiB
