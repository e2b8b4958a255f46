"""Properties of every answer, whatever the question, over a grid of more than two thousand.

A few of them, spread over the grid, are asked by `make test`; `GRID=1` asks all, `GRID=10` every tenth.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest

from calc.catalog.catalog import load
from calc.launch import LaunchError, launch
from calc.models.architecture import parameters
from calc.recommend import Recommendation, recommend
from calc.recommend.clock import TOLERANCE
from calc.recommend.problem import SENSIBLE, Configuration, Problem
from calc.scenario.rules import card_warnings
from calc.scenario.scenario import ScenarioError
from calc.scenario.words import DEEPSPEED, FSDP, RL

MODELS = ("qwen2.5-0.5b", "llama-3.2-3b", "qwen2.5-7b", "llama-3.1-8b", "phi-4", "qwen2.5-32b", "llama-3.1-70b",
          "mixtral-8x7b", "qwen3-30b-a3b")  # fmt: skip
MACHINES = (("rtx4090", 1), ("rtx4090", 8), ("a10g", 4), ("l40s", 4), ("a100-40-sxm", 8), ("a100-80-sxm", 1),
            ("a100-80-sxm", 8), ("h100-sxm", 8), ("h100-sxm", 32), ("h20", 8), ("rtx6000ada", 2))  # fmt: skip
ASKED: dict[str, tuple[dict[str, Any], ...]] = {
    "trl": ({"task": "sft"}, {"task": "dpo"}, {"task": "grpo"}),
    "openrlhf": ({"task": "sft"}, {"task": "rm"}, {"task": "dpo"}, {"task": "ppo"}),
    "verl": ({"task": "grpo"}, {"task": "ppo"}),
    "torch": ({"task": "sft"}, {"task": "dpo"}),
}
METHODS: tuple[dict[str, Any], ...] = ({}, {"method": "lora"})
GRID = [
    {"model": model, "framework": name, "gpu": gpu, "gpus": gpus, **task, **method,
     **({} if task["task"] in RL else {"seq_len": 2048})}
    for (name, tasks), model, (gpu, gpus), method in product(ASKED.items(), MODELS, MACHINES, METHODS)
    for task in tasks
]  # fmt: skip
STEP = int(os.environ.get("GRID", "211"))
KEPT = ("method", "optimizer", "sharding", "precision", "checkpointing")


def named(job: dict[str, Any]) -> str:
    return " ".join(map(str, job.values()))


def test_the_grid_is_large() -> None:
    assert len(GRID) >= 2000


@pytest.mark.parametrize("job", GRID[::STEP], ids=named)
def test_an_expert_would_sign_it(job: dict[str, Any]) -> None:
    try:
        r = recommend(job)
    except ScenarioError as refused:
        assert "allowed" in str(refused)  # a named limit of the framework
        return
    best = r.recommended
    if best is None or r.verdict != "fits":
        return
    its_notes_and_command_are_there(best, r)
    nothing_is_offloaded_or_recomputed_for_nothing(job, best)
    no_engine_spans_pcie_for_nothing(job, best)
    it_is_as_quick_as_hardware_can_be(best)
    for other in r.alternatives:
        it_is_not_better_in_all(best, other)


def seconds(c: Configuration) -> float:
    assert c.throughput
    return c.throughput.step_seconds


def its_notes_and_command_are_there(best: Configuration, r: Recommendation) -> None:
    assert set(best.judged.estimate.notes) <= set(r.notes)
    try:
        launch(best.scenario)
    except LaunchError:
        assert r.launch is None
    else:
        assert (r.launch is None) == bool(list(card_warnings(best.scenario, load().gpu(best.scenario.gpu))))
    assert r.launch or any(note.startswith("no command") for note in r.notes)
    assert not [note for note in (r.launch.notes if r.launch else ()) if "has no flag for it" in note]


def quickest(job: dict[str, Any], best: Configuration, changes: dict[str, Any]) -> float | None:
    """The seconds of the quickest configuration like `best` but for `changes`, its micro batch open."""
    s = best.scenario
    same: dict[str, Any] = {name: getattr(s, name) for name in KEPT}
    same |= {"offload.optimizer": s.offload.optimizer, "offload.parameters": s.offload.parameters}
    same |= {name: getattr(s, name) for name in ("tensor_parallel", "context_parallel")}
    same |= {"lora.dtype": s.lora.dtype} if s.lora else {}  # adapters of 16 bits are another training
    for name in ("reference", "reward"):
        if (own := s.role(name)) and s.sharding == "zero3":  # FSDP's offload moves all models together
            same[f"roles.{name}.offload.parameters"] = own.offload.parameters
    if s.rollout:
        same |= {"placement": s.placement, "rollout.engine": s.rollout.engine, "rollout.n": s.rollout.n}
        if s.rollout.engine == "vllm":
            same["rollout.tensor_parallel"] = s.rollout.tensor_parallel
    try:
        first = Problem({**same, **job, **changes}, load()).first()
    except ScenarioError:
        return None
    return first[2].seconds if first else None


def nothing_is_offloaded_or_recomputed_for_nothing(job: dict[str, Any], best: Configuration) -> None:
    s = best.scenario
    if s.placement == "separate":  # whose GPUs the search divides
        return
    limit = tolerated(job)
    simpler: list[dict[str, Any]] = []
    if s.offload.optimizer or s.offload.parameters:
        simpler.append({"offload.optimizer": False, "offload.parameters": False})
    if s.checkpointing == "full":
        simpler.append({"checkpointing": "none"})
    for changes in simpler:
        without = quickest(job, best, changes)
        assert without is None or without > limit * 0.999, changes
    if s.gpus == 1 and s.framework in ("torch", "trl") and s.sharding in (*DEEPSPEED, *FSDP):
        first = Problem({**job, "sharding": "none", "method": s.method, "optimizer": s.optimizer}, load()).first()
        # weights of 16 bits alone are another training than fp32 ones, beside those of 16 bits or not
        assert first is None or first[1].chosen(first[2]).scenario.precision == "bf16" != s.precision


def tolerated(job: dict[str, Any]) -> float:
    """The seconds that nobody can tell from those of the fastest configuration."""
    first = Problem(job, load()).first()
    assert first
    search = first[1]
    return search.limit(search.quickest(search.groups(sharing=False)) or search.quickest(search.groups()))


def no_engine_spans_pcie_for_nothing(job: dict[str, Any], best: Configuration) -> None:
    s = best.scenario
    gpu = load().gpu(s.gpu)
    if s.rollout and s.rollout.engine == "vllm" and s.rollout.tensor_parallel > 1 and not gpu.linked:
        assert quickest(job, best, {"rollout.tensor_parallel": 1}) is None


def it_is_as_quick_as_hardware_can_be(best: Configuration) -> None:
    """MFU: six operations a multiplied parameter and token, four where weights are frozen, of the card's dense peak."""
    s = best.scenario
    gpu = load().gpu(s.gpu)
    if s.rollout or not best.throughput or not gpu.bf16_tflops:
        return
    arch = s.architecture
    active = parameters(arch, head="scalar" if s.task == "rm" else "lm")
    if s.task == "rm" or not arch.tied:  # a look-up multiplies nothing; a tied head does
        active -= arch.vocab * arch.hidden
    if arch.experts:
        routed = 3 * arch.hidden * arch.moe_intermediate * arch.experts * (arch.layers - arch.dense_layers)
        active -= routed * (1 - arch.experts_per_token / arch.experts)
    rate = best.throughput.tokens_per_second / s.gpus * (4 if s.lora else 6) * active
    mfu = rate / (gpu.bf16_tflops * 1e12)
    # an H20 has a Hopper's bandwidth for a seventh of its arithmetic
    assert mfu <= (0.64 if s.gpu == "h20" else 0.62), mfu
    moved = s.offload.optimizer or s.offload.parameters
    gathered = arch.experts and not gpu.linked and s.sharding not in ("none", "ddp")  # all of them, for few that work
    if not moved and not gathered and parameters(arch) > 1e9:
        assert mfu >= 0.03, mfu


def it_is_not_better_in_all(best: Configuration, other: Configuration) -> None:
    """An alternative trades something: what is on the same card with less is no quicker, what is cheaper says so."""
    if " free beside the peak" in other.trades or "times as long" in other.trades:
        assert seconds(other) >= seconds(best) * 0.999
    if " free beside the peak" in other.trades:
        assert seconds(other) <= SENSIBLE * seconds(best)
    if " instead of " in other.trades and "GPU" in other.trades.split(" instead of ")[0]:
        hours = seconds(other) * other.scenario.gpus / (seconds(best) * best.scenario.gpus)
        assert (hours <= SENSIBLE) is ("the fewest that hold it" not in other.trades)
        assert seconds(other) >= seconds(best) / (1 + TOLERANCE)
