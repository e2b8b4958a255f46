"""The time of one recommendation: `python -m benchmarks.recommend` prints the median, job by job, of processor time.

Both in milliseconds: `best` finds what to run; `whole` adds what fails, what each setting does, the alternatives and
the command.
"""

from __future__ import annotations

from statistics import median
from time import process_time
from typing import Any

from calc.base.collecting import collect_rarely
from calc.catalog.catalog import load
from calc.recommend import recommend
from calc.recommend.problem import Problem

ON_EIGHT: dict[str, Any] = {"model": "llama-3-8b", "gpu": "h100-sxm", "gpus": 8, "method": "full"}
JOBS: dict[str, dict[str, Any]] = {
    "sft, openrlhf": ON_EIGHT | {"task": "sft", "framework": "openrlhf"},
    "sft, torch": ON_EIGHT | {"task": "sft", "framework": "torch"},
    "sft, trl": ON_EIGHT | {"task": "sft", "framework": "trl"},
    "sft, any method": {k: v for k, v in ON_EIGHT.items() if k != "method"} | {"task": "sft", "framework": "openrlhf"},
    "ppo, openrlhf": ON_EIGHT | {"task": "ppo", "framework": "openrlhf"},
    "ppo, verl": ON_EIGHT | {"task": "ppo", "framework": "verl"},
    "grpo, trl": ON_EIGHT | {"task": "grpo", "framework": "trl"},
    "ppo, nothing fits": ON_EIGHT | {"task": "ppo", "framework": "openrlhf", "gpu": "l4"},
}
RUNS = 15


def main() -> None:
    """Print one line per job: the times, and how many configurations were considered and pruned."""
    collect_rarely()  # as every door does
    catalog = load()
    for name, job in JOBS.items():
        best, whole = [], []
        answer = recommend(job, catalog)
        for _ in range(RUNS):
            start = process_time()
            problem = Problem(job, catalog)
            problem.first()
            best.append(process_time() - start)
            start = process_time()
            answer = recommend(job, catalog)
            whole.append(process_time() - start)
        looked = f"{problem.considered} of {problem.size:,} considered, whole {answer.considered}"
        print(f"{name:18} best {median(best) * 1e3:6.1f} ms, whole {median(whole) * 1e3:6.1f} ms; {looked}")


if __name__ == "__main__":
    main()
