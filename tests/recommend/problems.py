"""Random jobs for the search: what a user may leave open, and what is given so that all can be tried."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from calc.catalog.catalog import load
from calc.frameworks.registry import framework
from calc.recommend.problem import Problem
from calc.recommend.search import Search
from calc.recommend.space import branches
from calc.scenario.scenario import ScenarioError
from calc.scenario.words import RL

TASKS = {
    "torch": ("sft", "rm", "dpo", "ppo", "grpo", "inference"),
    "openrlhf": ("sft", "rm", "dpo", "ppo", "grpo", "reinforce++"),
    "verl": ("ppo", "grpo", "reinforce++"),
    "trl": ("sft", "rm", "dpo", "grpo"),
}


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """A job with much left open; some cannot be run."""
    catalog = load()
    name = draw(st.sampled_from(sorted(TASKS)))
    task = draw(st.sampled_from(TASKS[name]))
    released = draw(st.sampled_from((name, name, *(f"{name}=={version}" for version in framework(name).KNOWN))))
    job: dict[str, Any] = {
        "model": draw(st.sampled_from(sorted(catalog.models))),
        "task": task,
        "gpu": draw(st.sampled_from(sorted(catalog.gpus))),
        "gpus": draw(st.sampled_from((1, 2, 4, 6, 8, 16))),
        "framework": released,
    }
    if task in RL:
        job |= {"prompt_len": draw(st.sampled_from((256, 1024))), "response_len": draw(st.sampled_from((256, 4096)))}
        if name == "verl" and draw(st.booleans()):
            job["roles.reference"] = {}
        optional: dict[str, tuple[Any, ...]] = {
            "rollout.tensor_parallel": (1, 2),
            "rollout.gpu_memory_utilization": (0.4, 0.9),
            "placement": ("colocated",),
        }
    else:
        job["seq_len"] = draw(st.sampled_from((256, 2048, 8192)))
        optional = {"global_batch": (8, 128), "checkpointing": ("full",)}
    optional |= {"micro_batch": (1, 2), "offload.optimizer": (False, True), "host_memory": (1, 64)}
    for place in draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)):
        job[place] = draw(st.sampled_from(optional[place]))
    return job


@st.composite
def searches(draw: st.DrawFn, most: int) -> tuple[Search, Search]:
    """The same search of one rung twice, one for each way to look, of at most `most` configurations."""
    catalog = load()
    for _ in range(50):
        try:
            problem = Problem(draw(jobs()), catalog)
        except ScenarioError:
            continue
        rung = draw(st.sampled_from(problem.rungs)) if problem.rungs else None
        if rung and 0 < sum(branch.size for branch in branches(problem.fields, rung, catalog)) <= most:
            one, other = problem.search(rung), problem.search(rung)
            if one and other:  # a card may lack kernels for the whole rung
                return one, other
    raise AssertionError("no small problem in fifty")
