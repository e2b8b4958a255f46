"""Host memory of a node: what the ranks of real jobs take there, added up instant by instant."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from jobs import planned, total

from calc.base.plan import Stage
from calc.catalog.catalog import load
from calc.estimate.host_nodes import Hosts
from calc.models.architecture import parameters
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.step.placement import groups
from calc.step.roles import Job, Roles

OFFLOADED = {"sharding": "zero3", "offload.optimizer": True}
# the actor's optimizer is built and steps on the host, the reference's parameters lie there
DPO = {"task": "dpo", "framework": "trl", "gpus": 2, **OFFLOADED, "offload.parameters": True}
# before Transformers 4.51, which leaves weights in the files until they are on the card
PPO = {"task": "ppo", "framework": "openrlhf", "gpus": 8, "versions.transformers": "4.50"}
# vLLM 0.7 beside the trainers, a rank on each GPU: its swap space, and its weights while it sleeps
VLLM = PPO | {"framework": "openrlhf==0.6.1", "rollout.engine": "vllm"}
SWAP, WEIGHTS = 6_442_450_944, 1_845_692_416
P, CRITIC = 494_032_768, 494_033_664  # parameters of Qwen 2.5 0.5B, and with a value head
LORA = 4_399_104


def scenario(**fields: Any) -> Scenario:
    return parse({"model": "qwen2.5-0.5b", "gpu": "a100-80-sxm", **fields}, catalog=load())


def hosts(s: Scenario) -> Hosts:
    # roles of their own: those that are cached know a scenario by its fields, not by its plan
    return Hosts(Job(s, load().gpu(s.gpu), Roles(s)))


def sums(found: Hosts, ranks: dict[str, int]) -> dict[str, int]:
    """Bytes of each instant of a node with so many ranks of each role."""
    return {phase.name: phase.moment.device_bytes for phase in found.node(ranks)}


def saving(s: Scenario, *saves: Stage) -> Scenario:
    """`s` with these checkpoints in place of its framework's."""
    return planned(s, *[stage for stage in s.keeps.stages if stage.does != "save"], *saves)


def test_roles_of_a_node_add_up_and_what_the_first_step_found_stays() -> None:
    """Two ranks and three; the reference, which takes no step, keeps what it had before the first, and nothing else."""
    found = hosts(scenario(**DPO))
    each = {name: found.job.placed[name].engine.host(n) for name, n in (("actor", 2), ("reference", 3))}
    actor, reference = ({at: total(lines) for at, lines in moments} for moments in each.values())
    assert [*reference] == ["loading", "before the first step"]
    assert sums(found, {"actor": 2, "reference": 3}) == {
        "loading": actor["loading"] + reference["loading"],
        "optimizer built": actor["optimizer built"],
        "before the first step": actor["before the first step"] + reference["before the first step"],
        "after the first step": actor["after the first step"] + reference["before the first step"],
    }


def test_an_engine_is_beside_the_steps_alone() -> None:
    """Not while models load; none on a node that has no rank of it."""
    found, both = hosts(scenario(**VLLM, **{"rollout.sleep": True})), 2 * (SWAP + WEIGHTS)
    assert sums(found, {"rollout": 2}) == {"before the first step": both, "after the first step": both}
    assert sums(found, {}) == {}


@pytest.mark.parametrize(
    ("sleep", "level", "expected"),
    [(True, 1, SWAP + WEIGHTS), (True, 2, SWAP), (False, 1, SWAP), (False, 2, SWAP)],
)
def test_weights_wait_on_the_host_where_the_engine_sleeps_at_level_1(sleep: bool, level: int, expected: int) -> None:
    """vLLM's `sleep(level=1)` moves weights, level 2 drops them; an engine that never sleeps keeps them."""
    s = scenario(**VLLM, **{"rollout.sleep": sleep})
    assert s.keeps.serving
    own = replace(s.keeps, serving=replace(s.keeps.serving, sleep_level=level))
    assert total(hosts(replace(s, plan=lambda _: own)).serving(1)) == expected


def test_a_job_that_serves_nothing_has_nothing_of_an_engine() -> None:
    """A node without a rank of vLLM, a job in which Transformers generates, and one in which nothing does."""
    assert hosts(scenario(**VLLM)).serving(0) == []
    for fields in (VLLM | {"rollout.engine": "hf"}, {"task": "sft"}):
        assert hosts(scenario(**fields)).serving(3) == []


@pytest.mark.parametrize(
    ("host", "ranks", "elements"),
    [("first", 2, P + LORA), ("every", 2, 2 * (P + LORA)), ("shards", 2, 332_287_915), ("shards", 3, P + LORA)],
)
def test_a_checkpoints_copy_is_on_the_first_rank_on_every_one_or_a_shard_on_each(
    host: str, ranks: int, elements: int
) -> None:
    """Weights and adapters, two bytes each, of three ranks: two of these hold 332,287,914 2/3 elements, rounded up."""
    line = hosts(scenario(task="sft", method="lora", gpus=3)).saved(Stage("save", "actor", host=host), ranks)
    assert (line.bytes, type(line.bytes), line.component) == (2 * elements, int, "checkpoint")


@pytest.mark.parametrize("order", [("actor", "critic"), ("critic", "actor")])
def test_of_several_checkpoints_the_largest_counts(order: tuple[str, str]) -> None:
    """They are written one after another, beside what is there after the first step; the order does not matter."""
    saves = [Stage("save", name, host="first", host_bytes=4 if name == "critic" else 2) for name in order]
    found = sums(hosts(saving(scenario(**PPO, **OFFLOADED), *saves)), {"actor": 8, "critic": 8})
    assert found["save"] == found["after the first step"] + 4 * CRITIC


def test_only_a_save_to_the_host_of_a_role_on_this_node_is_a_copy() -> None:
    """Not a save from the GPU, not one of a role elsewhere, not another stage."""
    s = scenario(**PPO)
    saved = hosts(saving(s, Stage("save", "actor", host="first")))
    assert sums(saved, {"actor": 1}) == {"loading": 2 * P, "save": 2 * P}
    assert sums(saved, {"critic": 1}) == {"loading": 2 * CRITIC}
    assert sums(hosts(saving(s, Stage("save", "actor"))), {"actor": 1}) == {"loading": 2 * P}
    others = planned(s, *[Stage(does, "actor", host="first") for does in ("generate", "score", "train", "sync")])
    assert sums(hosts(others), {"actor": 1}) == {"loading": 2 * P}


@pytest.mark.parametrize(
    ("fields", "shown", "largest"),
    [({}, 2, "loading"), ({"roles.reference.model": "qwen2.5-1.5b"}, 1, "loading"), (OFFLOADED, 1, "save")],
)
def test_the_node_that_needs_most_is_shown(fields: dict[str, Any], shown: int, largest: str) -> None:
    """At its largest instant, wherever that stands: the critic is a little larger, the actor's node saves."""
    homes = {f"roles.{name}.gpus": 1 for name in ("actor", "critic", "reference", "reward")}
    apart = {"gpus": 6, "gpus_per_node": 2, "placement": "separate", "rollout.gpus": 2, **homes}
    found = hosts(scenario(**PPO | apart | fields))
    assert [[*node] for node in found.nodes] == [["rollout"], ["actor", "reference"], ["reward", "critic"]]
    phases = found.phases()
    assert phases == found.node(found.nodes[shown])
    assert max(phases, key=lambda phase: phase.moment.device_bytes).name == largest


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_every_kind_of_node_is_there_once_counted_gpu_by_gpu(per_node: int) -> None:
    """Roles on GPUs of their own fill nodes one after another; a million GPUs have as few kinds of node as 64."""
    apart = {"task": "ppo", "framework": "openrlhf", "placement": "separate", "roles.critic.gpus": 8}
    job = {"model": "qwen3-0.6b", "gpu": "a40", "gpus": 64, "gpus_per_node": per_node, "rollout.gpus": 16, **apart}
    s = parse(job | {"roles.reference.gpus": 4, "roles.reward.gpus": 4, "roles.actor.gpus": 32})
    found = Hosts(Job(s, load().gpu("a40")))
    gpus = [name for names, count in groups(s, s.keeps) for name in ["+".join(names)] * count]
    assert len(gpus) == 64
    each = [Counter(gpus[at : at + per_node]) for at in range(0, 64, per_node)]
    wanted = {tuple((n, c) for name, c in node.items() for n in name.split("+")) for node in each}
    assert {tuple(node.items()) for node in found.nodes} == wanted


def test_fsdp_has_the_whole_model_in_host_memory_while_it_loads() -> None:
    """Once 0 GB. With cpu_ram_efficient_loading a rank of each node reads it; in verl the first, or all if tied."""

    def loading(**fields: Any) -> int:
        s = scenario(task="sft", sharding="fsdp2", seq_len=1024, **fields)
        return next(total(phase.moment.lines) for phase in hosts(s).phases() if phase.name == "loading")

    def whole(model: str) -> int:
        return parameters(load().model(model).architecture)

    lora = {"model": "qwen2.5-7b", "framework": "trl", "method": "lora", "precision": "bf16"}
    early = {"versions.transformers": "4.50"}  # `low_cpu_mem_usage`; since, weights of the files' type stay in them
    assert loading(**lora, **early, gpus=8) == loading(**lora, **early, gpus=16) == 2 * whole("qwen2.5-7b")
    assert loading(model="qwen2.5-7b", framework="verl", gpus=16) == 4 * whole("qwen2.5-7b")
    assert loading(framework="verl", gpus=16) == 8 * 4 * P
