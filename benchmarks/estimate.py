"""How long one estimate takes: `python -m benchmarks.estimate` prints the median in microseconds, job by job."""

from __future__ import annotations

from statistics import median
from time import perf_counter

from calc.catalog import load
from calc.estimate import estimate
from calc.scenario import parse

JOBS = {
    "sft": {"model": "llama-3-8b", "task": "sft", "gpu": "h100-sxm"},
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
RUNS = 2000


def main() -> None:
    """Print one line a job: the estimate alone, and with the parsing of its scenario."""
    catalog = load()
    for name, data in JOBS.items():
        scenario = parse(data, catalog=catalog)
        alone, whole = [], []
        for _ in range(RUNS):
            start = perf_counter()
            estimate(scenario, catalog)
            alone.append(perf_counter() - start)
            start = perf_counter()
            estimate(parse(data, catalog=catalog), catalog)
            whole.append(perf_counter() - start)
        print(f"{name:13} {median(alone) * 1e6:7.0f} µs, with parsing {median(whole) * 1e6:7.0f} µs")


if __name__ == "__main__":
    main()
