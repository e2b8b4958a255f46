"""Tables of RL jobs: groups with a verdict each, roles, loading moment by moment, KV caches and remedies."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from calc.answers import answers, words
from calc.answers.answers import Answer
from calc.base.units import GB, GiB
from calc.site.tables.tables import Table, to_dict, to_html
from calc.site.views.jobs import hosts, ledgers, roles

JOB = {"model": "llama-3-8b", "gpu": "a100-80-sxm", "gpus": 8, "micro_batch": 1, "checkpointing": "full"}
VERL = {**JOB, "task": "grpo", "framework": "verl==0.9.1", "rollout.n": 8, "rollout.batch": 64, "roles.reference": {}}
RAY = {
    **JOB,
    "task": "ppo",
    "framework": "openrlhf==0.9.0",
    "sharding": "zero3",
    "placement": "separate",
    "rollout.gpus": 4,
    "roles": {"critic": {"gpus": 2}},
}


def ask(given: dict[str, Any], **changes: Any) -> Answer:
    return answers.ask(given | {name.replace("__", "."): value for name, value in changes.items()})


def rows(table: Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = to_dict(table)["rows"]
    return found


def refused(given: dict[str, Any]) -> Answer:
    """A job whose engine is given more of the card than is free."""
    found = ask(given, rollout__gpu_memory_utilization=0.98)
    assert found.group.refusal
    return found


def test_jobs_that_have_nothing_in_common_share_no_note() -> None:
    """A lone full stop stood below such a table; two jobs of one model say that model."""
    other = ask({"model": "qwen3-0.6b", "task": "sft", "gpu": "h200", "micro_batch": 2, "precision": "fp32"})
    assert ledgers.shared([ask(RAY), other]) == ""
    assert ledgers.shared([ask(RAY), ask(VERL)]).startswith("Llama 3 8B · ")


def test_groups_are_rows_with_their_gpus_and_a_verdict_each() -> None:
    answer = ask(RAY)
    found = rows(ledgers.phases(answer, "x", "x"))
    groups = answer.estimate.groups
    assert [g.gpus for g in groups] == [4, 2, 2]
    assert [(r["phase"], r["gpus"], r["verdict"]) for r in found] == [
        (f"{g.name}: {p.name}", g.gpus, ledgers.verdict_text(g)) for g in groups for p in g.phases
    ]


def test_one_group_needs_no_label() -> None:
    found = rows(ledgers.phases(ask(VERL), "x", "x"))
    assert [r["phase"] for r in found] == ["load", "rollout", "score", "forward", "backward", "step", "sync", "save"]
    assert "verdict" not in found[0]


def test_a_phases_table_says_what_the_cache_holds_and_why_an_engine_does_not_start() -> None:
    answer = ask(VERL)
    assert f"KV cache of each engine: {answer.group.cache_tokens:,} tokens" in ledgers.phases(answer, "x", "x").note
    died = refused(VERL)
    assert ledgers.verdict_text(died.estimate) == ledgers.verdict_text(died.group) == "vLLM does not start"
    assert "vLLM does not start: rollout.gpu_memory_utilization: given 0.98" in ledgers.phases(died, "x", "x").note


def test_a_group_whose_engine_does_not_start_is_the_one_that_decides() -> None:
    answer = ask(RAY)
    rollout, actor, critic = answer.estimate.groups
    stopped = replace(rollout, refusal="too much", verdict="oom", fit_probability=0.0)
    crowded = replace(actor, usable_bytes=GiB)
    changed = answer._replace(estimate=replace(answer.estimate, groups=(crowded, stopped, critic), verdict="oom"))
    assert changed.group is stopped
    assert changed.group_of("actor") is crowded
    assert changed.group_of("reward").name == critic.name
    with pytest.raises(ValueError, match="no group 'x'; this job has actor"):
        changed.group_of("x")


def test_a_phase_is_found_in_the_group_that_has_it() -> None:
    answer = ask(RAY)
    actor, rollout = answer.group_of("actor"), answer.group_of("rollout")
    assert ledgers.find_phase(answer, "rollout") in rollout.phases
    assert ledgers.find_phase(answer, "step") in answer.group.phases
    assert ledgers.find_phase(answer, "load", "actor") in actor.phases
    assert ledgers.find_phase(answer, None, "rollout") == rollout.peak
    with pytest.raises(ValueError, match="no phase 'rollout'"):
        ledgers.find_phase(answer, "rollout", "actor")


def test_roles_say_what_they_do_and_where_they_wait() -> None:
    found = {r["role"]: r for r in rows(roles.roles(ask(VERL), "x", "x"))}
    assert list(found) == ["reference", "actor", "rollout"]
    assert found["actor"]["does"] == "scores, trained"
    assert found["reference"]["does"] == "scores"
    assert found["actor"]["between"] == "weights and states stay on the GPU"
    # fp32 shards of 8,030,261,248 parameters, and two moments of each, over eight GPUs
    assert found["actor"]["weights"] == round(8_030_261_248 * 4 / 8 / GiB, 2)
    assert found["actor"]["states"] == round(8_030_261_248 * 8 / 8 / GiB, 2)
    assert (found["reference"]["weights"], found["reference"]["states"]) == (0, None)
    assert found["reference"]["between"] == "weights always in host memory"
    assert found["rollout"]["held"] == "vLLM 0.24.0, tensor parallel 2"
    assert found["rollout"]["between"] == "sleeps: its weights are dropped"


def test_offloaded_roles_leave_for_the_host_and_apart_ones_stay() -> None:
    moved = {r["role"]: r for r in rows(roles.roles(ask(VERL, offload__optimizer=True), "x", "x"))}
    assert moved["actor"]["between"] == "states go to host memory; weights stay on the GPU"
    apart = {r["role"]: r for r in rows(roles.roles(ask(RAY), "x", "x"))}
    assert {role: r["gpus"] for role, r in apart.items()} == {
        "actor": 2, "reference": 2, "reward": 2, "critic": 2, "rollout": 4,
    }  # fmt: skip
    assert apart["rollout"]["between"] == "stays on the GPU"


def test_an_adapters_reference_is_the_actor() -> None:
    found = {r["role"]: r for r in rows(roles.roles(ask(VERL, method="lora"), "x", "x"))}
    assert found["reference"]["held"] == "the actor, its adapters off"
    assert found["reference"]["weights"] is None
    assert found["actor"]["held"].endswith("LoRA r=64")


def test_loading_is_shown_moment_by_moment_up_to_its_phase() -> None:
    answer = ask(VERL)
    found = rows(ledgers.timeline(answer, "x", "x"))
    (load,) = [p for p in answer.group.phases if p.name == "load"]
    assert max(r["total"] for r in found) == round(load.moment.device_bytes / GiB, 2)
    assert max(r["allocated"] for r in found) == round(load.moment.allocated_bytes / GiB, 2)
    assert load.moment.name in [r["moment"] for r in found]
    assert [r["moment"].partition(":")[0] for r in found] == sorted(
        (r["moment"].partition(":")[0] for r in found), key=["reference", "actor", "rollout"].index
    )
    apart = ask(RAY)
    assert {r["group"] for r in rows(ledgers.timeline(apart, "x", "x"))} == {g.name for g in apart.estimate.groups}


def test_a_moment_of_loading_has_a_place_and_a_name() -> None:
    answer = ask(VERL)
    held = [m.device_bytes for _, m in answer.loading()]
    assert ledgers.loaded(answer, 0) == held[0]
    assert ledgers.loaded(answer, -1) == held[-1] == ledgers.loaded(answer, "rollout")
    allocated = [m.allocated_bytes for _, m in answer.loading()]
    assert ledgers.loaded(answer, -1, "allocated") == allocated[-1] < held[-1]
    for missing in ("critic", len(held)):
        with pytest.raises(ValueError, match=f"no moment of loading {missing!r}; this job has reference"):
            ledgers.loaded(answer, missing)
    with pytest.raises(ValueError, match="no 'bytes' of a moment: device or allocated"):
        ledgers.loaded(answer, 0, "bytes")


def test_caches_are_compared_and_one_that_does_not_start_says_why() -> None:
    good, died = ask(VERL), refused(VERL)
    first, second = rows(roles.caches({"good": good, "died": died}, "x", "x"))
    assert first["tokens"] == good.group.cache_tokens
    assert first["length"] == good.scenario.seq_len
    assert first["sequences"] == good.group.cache_sequences <= first["tokens"] // first["length"]
    assert first["asked"] == 64 * 8 // 4
    assert first["starts"] == "yes"
    # 16 tokens a block; a key and a value of 128 for 4 of the 8 heads in each of 32 layers, in bf16
    assert first["cache"] == round(first["tokens"] * 2 * 2 * 128 * 4 * 32 / GiB, 2)
    assert (second["tokens"], second["cache"]) == (0, 0)
    assert second["starts"].startswith("no rollout.gpu_memory_utilization: given 0.98")
    with pytest.raises(ValueError, match="vLLM does not serve"):
        roles.caches({"sft": ask(JOB, task="sft", sharding="ddp")}, "x", "x")


def test_remedies_name_what_changes_and_what_it_saves() -> None:
    base = ask(VERL)
    jobs = {
        "base": base,
        "offload": ask(VERL, offload__optimizer=True, offload__parameters=True),
        "without": answers.ask({k: v for k, v in VERL.items() if k != "roles.reference"}),
    }
    found = rows(ledgers.compare(jobs, "x", "x", {}, base))
    assert [r["changes"] for r in found] == [
        "—", "offload.optimizer: true, offload.parameters: true", "by default: roles.reference",
    ]  # fmt: skip
    assert found[0]["difference"] == 0
    for row, answer in zip(found, jobs.values(), strict=True):
        assert row["difference"] == round((answer.device_bytes - base.device_bytes) / GiB, 2)


def test_a_remedy_that_only_names_a_role_again_is_no_change() -> None:
    moved = ask({k: v for k, v in VERL.items() if k != "roles.reference"}, roles={"reference": {"sharding": "fsdp2"}})
    found = rows(ledgers.compare({"base": moved, "role": ask(VERL)}, "x", "x", {}, moved))
    assert found[1]["changes"] == "by default: roles.reference.sharding"


def test_host_memory_breaks_a_node_at_its_first_moment_above_the_limit() -> None:
    offloaded = ask(JOB, task="sft", framework="openrlhf==0.3.1", sharding="zero3", **{"offload.optimizer": True})
    bare = ask(JOB, task="sft", framework="openrlhf==0.3.1", sharding="zero3", method="lora")
    held = {p.name: p.moment.device_bytes for p in offloaded.estimate.host_phases}
    after = held["after the first step"]
    # the moments come with the first step: half a gigabyte below, the limit lies between the two
    node = hosts.Node(int(after / GB), killed_at=1.0)
    table = hosts.host({"offloaded": offloaded, "bare": bare}, "x", "x", {}, node)
    first, second = rows(table)
    assert held["before the first step"] < node.limit < after
    assert first["on_node"] == "out of memory: after the first step"
    assert first["after the first step"] == round(after / GB)
    assert (second["on_node"], second["after the first step"]) == ("fits", None)
    assert '<td class="number">—</td>' in to_html(table)
    assert "not published" not in to_html(table)
    assert "1,520 GB" in hosts.Node(1600, 0.95).note
    assert "on_node" not in rows(hosts.host({"offloaded": offloaded}, "x", "x", {}))[0]


def test_a_job_is_described_by_what_its_numbers_rest_on() -> None:
    said = words.describe(ask(RAY))
    assert "prompts of 1024 and responses of 1024 tokens" in said
    assert "GPUs apart: actor on 2, critic on 2, reference with actor, reward with critic, vLLM on 4" in said
    assert "2048 tokens" not in said
    assert not re.search(r"\b(sft|rm|ppo|lora|zero\d|fsdp\d|openrlhf|flash)\b", said)  # names, as readers know them
    assert "optimizer in host memory" in words.describe(ask(VERL, offload__optimizer=True))


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ("set DATASET: your data", "Set DATASET: your data."),
        ("accelerate.yaml: put beside the command", "accelerate.yaml: put beside the command."),
        ("--data.max_len bounds both", "--data.max_len bounds both."),
    ],
)
def test_a_note_is_a_sentence_that_leaves_names_as_they_are_spelled(note: str, said: str) -> None:
    assert words.sentence(note) == said


def test_a_headline_is_the_answer_that_the_estimate_gives() -> None:
    answer = ask(VERL)
    needs, usable = answer.peak.moment.device_bytes / GiB, answer.group.usable_bytes / GiB
    verdict = ledgers.verdict_text(answer.estimate)
    assert ledgers.headline(answer) == f"{verdict}, {needs:.1f} of {usable:.1f} GiB in {answer.peak.name}"
