"""The time of one estimate: `python -m benchmarks.estimate` prints the median in milliseconds, job by job.

`ledger` is the answer by sums alone; `replayed` is the whole estimate, with the allocator
replayed where that is possible; `parsed` includes reading the scenario. Caches that the next estimate of the same job
would use are cleared before each; caches of what depends on the model alone stay.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import process_time

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.replay import replay
from calc.replay.blocks import blocks
from calc.resolve.parse import parse
from calc.step import roles

LEFT = (roles._roles, replay.reserve, replay._undisturbed, blocks)  # caches of what depends on a job

JOBS = {
    "sft, with room": {"model": "llama-3-8b", "task": "sft", "gpu": "b200"},
    "sft, at the edge": {"model": "llama-3-8b", "task": "sft", "gpu": "h100-sxm"},
    "sft, LoRA": {"model": "llama-3-8b", "task": "sft", "gpu": "h100-sxm", "framework": "trl", "method": "lora"},
    "sft, FSDP 2": {"model": "llama-3-8b", "task": "sft", "gpu": "h100-sxm", "gpus": 8, "sharding": "fsdp2"},
    "FSDP 2, at the edge": {
        "model": "codellama-34b",
        "task": "sft",
        "gpu": "rtx6000ada",
        "gpus": 8,
        "sharding": "fsdp2",
        "seq_len": 512,
    },
    "sft, ZeRO-3": {
        "model": "llama-3-8b",
        "task": "sft",
        "gpu": "h100-sxm",
        "gpus": 8,
        "framework": "openrlhf",
        "sharding": "zero3",
    },
    "rm": {"model": "llama-3-8b", "task": "rm", "gpu": "h100-sxm"},
    "dpo": {"model": "llama-3-8b", "task": "dpo", "gpu": "h100-sxm"},
    "ppo": {"model": "llama-3-8b", "task": "ppo", "gpu": "h100-sxm"},
    # four roles in three groups of GPUs, one of them vLLM's
    "ppo, separate": {
        "model": "llama-3-8b",
        "task": "ppo",
        "gpu": "h100-sxm",
        "framework": "openrlhf",
        "gpus": 16,
        "placement": "separate",
        "roles.actor.gpus": 8,
        "roles.critic.gpus": 4,
        "rollout.gpus": 4,
    },
    "ppo, verl": {"model": "llama-3-8b", "task": "ppo", "gpu": "h100-sxm", "framework": "verl", "gpus": 8},
    "grpo, trl": {"model": "llama-3-8b", "task": "grpo", "gpu": "h100-sxm", "framework": "trl", "gpus": 8},
}
RUNS = 25


def main() -> None:
    """Print one line a job."""
    catalog = load()
    print(f"{'':20}{'ledger':>10}{'replayed':>10}{'parsed':>10}")
    for name, data in JOBS.items():
        scenario = parse(data, catalog=catalog)
        ledger = timed(lambda scenario=scenario: estimate(scenario, catalog, replays=False))
        replayed = timed(lambda scenario=scenario: estimate(scenario, catalog))
        parsed = timed(lambda data=data: estimate(parse(data, catalog=catalog), catalog))
        print(f"{name:20}{ledger:10.2f}{replayed:10.2f}{parsed:10.2f} ms")


def timed(asked: Callable[[], object]) -> float:
    """The median over RUNS, in milliseconds of processor time."""
    found = []
    for _ in range(RUNS):
        for cache in LEFT:
            cache.cache_clear()
        start = process_time()
        asked()
        found.append(process_time() - start)
    return median(found) * 1e3


if __name__ == "__main__":
    main()
