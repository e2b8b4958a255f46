"""Host memory of a node, counted on jobs of two or three invented roles."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from calc.base.ledger import Line
from calc.base.plan import Stage
from calc.catalog.catalog import load
from calc.estimate.host_nodes import Hosts
from calc.resolve.parse import parse
from calc.step.placement import groups
from calc.step.roles import Job

A_LINE = Line("weights", "actor", 0, "0", {}, "host#loading")


def role(parameters: int = 0, adapter: int = 0, ranks: int = 1, **moments: int) -> Any:
    """A placed role: its size, and the bytes of one of its ranks at each moment."""
    host = {name.replace("_", " "): count for name, count in moments.items()}
    replica = SimpleNamespace(role="actor", parameters=parameters, adapter=adapter, ranks=ranks)
    engine = SimpleNamespace(
        replica=replica, host=lambda n: {at: [A_LINE._replace(bytes=n * count)] for at, count in host.items()}
    )
    return SimpleNamespace(engine=engine)


def hosts(nodes: list[dict[str, int]] | None = None, stages: tuple[Stage, ...] = (), **placed: Any) -> Hosts:
    """A job of these roles without an engine that serves."""
    found = object.__new__(Hosts)
    keeps = SimpleNamespace(stages=stages, serving=None)
    roles = SimpleNamespace(once=lambda what, made: made())  # nothing is kept from job to job
    s = SimpleNamespace(rollout=None)
    found.job = SimpleNamespace(placed=placed, keeps=keeps, engine=None, s=s, roles=roles)  # type: ignore[assignment]
    found.nodes = nodes or []
    return found


def serving(*, sleep: bool, level: int = 1) -> Hosts:
    """A job whose engine takes 5 bytes a rank, and 70 more where its weights wait on the host."""
    found = hosts()
    found.job.engine = SimpleNamespace(host=lambda at: [A_LINE._replace(bytes=75 if at == 1 else 5)])  # type: ignore[assignment]
    found.job.keeps = SimpleNamespace(stages=(), serving=SimpleNamespace(sleep_level=level))  # type: ignore[assignment]
    found.job.s = SimpleNamespace(rollout=SimpleNamespace(sleep=sleep))  # type: ignore[assignment]
    return found


def sums(found: Hosts, ranks: dict[str, int]) -> dict[str, int]:
    """Bytes of each moment of a node."""
    return {phase.name: phase.moment.device_bytes for phase in found.node(ranks)}


def test_roles_of_a_node_add_up_moment_by_moment() -> None:
    """Two ranks of 10 and three of 100; a role that is not placed takes nothing."""
    found = hosts(actor=role(loading=10, optimizer_built=1), critic=role(loading=100))
    assert sums(found, {"actor": 2, "critic": 3, "reward": 4}) == {"loading": 320, "optimizer built": 2}


def test_what_is_there_before_the_first_step_stays_unless_the_step_adds_to_it() -> None:
    """One role has a moment of its own after the step, the other keeps what it had; no other moment is carried on."""
    stepping = role(before_the_first_step=10, after_the_first_step=25)
    waiting = role(before_the_first_step=100)
    found = hosts(actor=stepping, critic=waiting)
    expected = {"before the first step": 110, "after the first step": 125}
    assert sums(found, {"actor": 1, "critic": 1}) == expected


def test_an_engine_is_beside_the_steps_alone() -> None:
    """5 bytes for each of its two ranks, not while models load; none on a node that has no rank of it."""
    found = serving(sleep=False)
    assert sums(found, {"rollout": 2}) == {"before the first step": 10, "after the first step": 10}
    assert sums(found, {}) == {}


@pytest.mark.parametrize(("sleep", "level", "expected"), [(True, 1, 75), (True, 2, 5), (False, 1, 5), (False, 2, 5)])
def test_weights_wait_on_the_host_where_the_engine_sleeps_at_level_1(sleep: bool, level: int, expected: int) -> None:
    """vLLM's `sleep(level=1)` moves weights, level 2 drops them; an engine that never sleeps keeps them."""
    assert sum(line.bytes for line in serving(sleep=sleep, level=level).serving(1)) == expected


@pytest.mark.parametrize("without", ["ranks", "engine", "serving", "rollout"])
def test_a_job_that_serves_nothing_has_nothing_of_an_engine(without: str) -> None:
    """Each of the four alone says so."""
    found = serving(sleep=True)
    if without == "engine":
        found.job.engine = None
    elif without == "serving":
        found.job.keeps = SimpleNamespace(stages=(), serving=None)  # type: ignore[assignment]
    elif without == "rollout":
        found.job.s = SimpleNamespace(rollout=None)  # type: ignore[assignment]
    assert found.serving(0 if without == "ranks" else 3) == []


@pytest.mark.parametrize(
    ("host", "ranks", "expected"), [("first", 3, 26), ("every", 3, 78), ("shards", 3, 20), ("shards", 4, 26)]
)
def test_a_checkpoints_copy_is_on_the_first_rank_on_every_one_or_a_shard_on_each(
    host: str, ranks: int, expected: int
) -> None:
    """10 parameters and 3 of adapters, 2 bytes each, of 4 ranks: three of these hold 39/4, rounded up to 10."""
    found = hosts(actor=role(parameters=10, adapter=3, ranks=4))
    line = found.saved(Stage("save", "actor", host=host), ranks)
    assert (line.bytes, type(line.bytes), line.component) == (expected, int, "checkpoint")


def test_of_several_checkpoints_the_largest_counts() -> None:
    """They are written one after another, beside what is there after the first step; the order does not matter."""
    small, large = role(parameters=10, after_the_first_step=1), role(parameters=50, after_the_first_step=900)
    save = {name: Stage("save", name, host="first") for name in ("actor", "critic")}
    for stages in ((save["actor"], save["critic"]), (save["critic"], save["actor"])):
        found = hosts(stages=stages, actor=small, critic=large)
        assert sums(found, {"actor": 1, "critic": 1}) == {"after the first step": 901, "save": 1001}


def test_only_a_save_to_the_host_of_a_role_on_this_node_is_a_copy() -> None:
    """Not a step of training, not a save from the GPU, not one of a role elsewhere."""
    others = [Stage(does, "actor", host="first") for does in ("generate", "score", "train", "sync")]
    for stage in (*others, Stage("save", "actor")):
        assert sums(hosts(stages=(stage,), actor=role(parameters=10, loading=1)), {"actor": 1}) == {"loading": 1}
    elsewhere = Stage("save", "critic", host="first")
    found = hosts(stages=(elsewhere,), actor=role(loading=1), critic=role(parameters=10))
    assert sums(found, {"actor": 1}) == {"loading": 1}


def test_the_node_that_needs_most_is_shown() -> None:
    """At its largest moment, wherever it stands."""
    nodes = [{"actor": 1}, {"actor": 2, "critic": 1}, {}]
    shown = hosts(nodes, actor=role(loading=10), critic=role(optimizer_built=15)).phases()
    assert {phase.name: phase.moment.device_bytes for phase in shown} == {"loading": 20, "optimizer built": 15}


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
