"""The host memory of a node for a job: given, the share of a node of the catalog, or assumed by a rule that is said."""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.units import GB
from calc.catalog.catalog import load
from calc.estimate.estimate import as_dict, estimate
from calc.estimate.host_memory import FOR_GPU, SHARE, HostMemory, host_memory
from calc.estimate.result import Estimate
from calc.recommend import recommend
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError
from calc.throughput import node_of

SFT: dict[str, Any] = {"model": "llama-3-8b", "task": "sft", "framework": "openrlhf", "sharding": "zero3"}
# Two posts on Llama 2 70B with the optimizer offloaded: 1,118 GB before the first step and 1,670 after it.
CASE = {"model": "llama-2-70b", "task": "sft", "framework": "openrlhf==0.3", "gpu": "a800-80", "gpus": 16}
CASE |= {"gpus_per_node": 16, "sharding": "zero3", "offload.optimizer": True, "seq_len": 2048, "micro_batch": 1}
CASE |= {"checkpointing": "full", "attention": "flash"}


def memory(**job: Any) -> HostMemory:
    s = parse(SFT | {name.replace("__", "."): value for name, value in job.items()})
    return host_memory(s, load().gpu(s.gpu), node_of(s, load()))


def answer(**more: Any) -> Estimate:
    return estimate(parse(CASE | more))


def test_a_known_node_gives_the_share_of_the_gpus_that_the_job_has() -> None:
    """A DGX H100 is sold with 2,048 GB for eight GPUs: two of them have a quarter, sixteen fill two nodes."""
    assert memory(gpu="h100-sxm", gpus=8).gigabytes == 2048
    assert memory(gpu="h100-sxm", gpus=16).gigabytes == 2048
    two = memory(gpu="h100-sxm", gpus=2)
    assert (two.gigabytes, two.source) == (512, "catalog")
    assert "2 of 8 GPUs in the 2,048 GB" in two.basis


def test_a_box_that_nobody_lists_has_twice_the_memory_of_its_gpus() -> None:
    found = memory(gpu="a40", gpus=4)
    assert (found.gigabytes, found.source) == (FOR_GPU * 4 * 48, "assumed")
    assert str(found).startswith("384 GB a node, assumed: 2 times the memory of its GPUs")


def test_what_is_given_is_taken_whole_but_for_what_ray_and_the_system_keep() -> None:
    found = memory(gpu="h100-sxm", gpus=2, host_memory=1000)
    assert (found.gigabytes, found.source, found.bytes) == (1000, "given", int(SHARE * 1000 * GB))


@pytest.mark.parametrize("given", [0, -1, "512GB", True, 10**9])
def test_a_figure_that_no_node_has_is_refused(given: Any) -> None:
    with pytest.raises(ScenarioError, match="host_memory: given"):
        parse(SFT | {"gpu": "a40", "host_memory": given})


def test_a_host_that_is_known_to_lack_memory_fails_at_its_own_moment() -> None:
    """1.6 TB hold the job until Adam makes its moments, in the first step, as the thread behind the post has it."""
    died = answer(host_memory=1600)
    assert (died.verdict, died.verdict_phase, died.on_host, died.fit_probability) == ("oom", "step", True, 0.0)
    assert all(group.verdict == "fits" for group in died.groups)
    earlier = answer(host_memory=1000)
    assert (earlier.verdict_phase, earlier.on_host) == ("load", True)
    lives = answer(host_memory=2000)
    assert (lives.verdict, lives.verdict_phase, lives.on_host) == ("fits", None, False)


def test_a_gpu_that_fails_first_is_named_before_the_host() -> None:
    died = answer(host_memory=1600, gpu="a100-40-sxm", seq_len=32_768)
    assert (died.verdict, died.on_host) == ("oom", False)


def test_on_what_is_merely_assumed_no_verdict_rests_and_the_note_says_so() -> None:
    found = answer(gpu="a40", gpus_per_node=8)
    host = as_dict(found)["host"]
    assert (host["memory_source"], host["verdict"], found.verdict) == ("assumed", "tight", "fits")
    assert host["peak_bytes_per_node"] > host["usable_bytes"] == int(SHARE * 768 * GB)
    assert any(" GB needed, compared with 768 GB a node, assumed" in note for note in found.notes)
    assert not any("compared with" in note for note in answer().notes)


def test_the_search_counts_what_the_node_has_and_says_so() -> None:
    """PPO of Llama 3 8B on four A40 runs with its optimizer in the memory that such a box has."""
    job = {"model": "llama-3-8b", "task": "ppo", "gpu": "a40", "gpus": 4, "framework": "openrlhf"}
    found = recommend(job)
    assert found.recommended
    assert any("of 384 GB a node, assumed" in note for note in found.notes)
    poor = recommend(job | {"host_memory": 128})
    assert poor.recommended is None
    assert any(line.startswith("host_memory ") and "instead of 128 GB a node, as given" in line for line in poor.advice)
    enough = int(next(line for line in poor.advice if line.startswith("host_memory ")).split()[1])
    assert recommend(job | {"host_memory": enough}).recommended
    assert recommend(job | {"host_memory": enough - 2}).recommended is None


def test_what_is_offloaded_does_not_leave_memory_that_cpu_and_gpu_share() -> None:
    """A DGX Spark has 128 GB for both: Adam of a 4B, 76 GB, has room beside a short batch and not beside a long one."""
    job = {"model": "qwen3-4b", "task": "sft", "framework": "trl", "gpu": "gb10", "sharding": "zero2"}
    job |= {"offload.optimizer": True, "micro_batch": 32, "global_batch": 32}
    lives, died = estimate(parse(job | {"seq_len": 1024})), estimate(parse(job | {"seq_len": 4096}))
    assert lives.host_memory.gigabytes == 128
    assert (lives.verdict, lives.on_host) == ("fits", False)
    assert died.host_peak == lives.host_peak < died.host_memory.bytes
    assert all(group.verdict == "fits" for group in died.groups)
    assert (died.verdict, died.on_host) == ("oom", True)
