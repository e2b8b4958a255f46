"""RL jobs that cannot be: one line that names the field, what was given and what is allowed, and never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import rl_fields

from calc.estimate.estimate import estimate
from calc.resolve.parse import parse
from calc.scenario.scenario import SCHEMA, Scenario, ScenarioError
from calc.scenario.words import ROLES

JOB = {"model": "llama-3-8b", "gpu": "h200"}
PPO = JOB | {"task": "ppo", "framework": "torch"}
GRPO = JOB | {"task": "grpo", "framework": "verl", "gpus": 8}
# actor with reference on 4 GPUs, critic with reward model on 2, vLLM on 2
APART = JOB | {
    "task": "ppo",
    "framework": "openrlhf",
    "gpus": 8,
    "placement": "separate",
    "roles.actor.gpus": 4,
    "roles.critic.gpus": 2,
    "rollout.gpus": 2,
}
SFT = JOB | {"task": "sft"}
FROZEN = "allowed: model, gpus, method, precision, sharding, offload.parameters, attention, micro_batch"

# a job, what is changed about it (a field that becomes `...` is taken away), and what the line says
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # roles
    "a critic for grpo": (
        GRPO,
        {"roles.critic": {}},
        "roles.critic: not a role of grpo, allowed: actor, reference, rew",
    ),
    "a critic's model for reinforce++": (
        GRPO,
        {"task": "reinforce++", "roles.critic.model": "llama-3-8b"},
        "roles.critic: not a role of reinforce++, allowed: actor, reference, reward",
    ),
    "an actor for sft": (SFT, {"roles.actor": {}}, "roles.actor: not a role of sft, allowed: none beside the trained"),
    "adapters of a role that is not trained": (
        PPO,
        {"roles.reference.method": "lora"},
        "roles.reference.method: given 'lora' for a role that is not trained, allowed: full",
    ),
    "a misspelt role": (PPO, {"roles.critc": "none"}, "'roles.critc'; did you mean 'roles.critic'?"),
    "a misspelt field of a role": (
        PPO,
        {"roles.critic.lora.rnk": 3},
        "'roles.critic.lora.rnk'; did you mean 'roles.critic.lora.rank'?",
    ),
    "a word for a role": (
        PPO,
        {"roles.reward": "nun"},
        "roles.reward: given 'nun', allowed: a mapping of fields or text",
    ),
    "a number for a role": (
        PPO,
        {"roles.reward": 3},
        "roles.reward: given 3, allowed: a mapping of fields or text such",
    ),
    "a role's unknown model": (
        PPO,
        {"roles.critic.model": "llama-3-8"},
        "roles.critic.model: given 'llama-3-8', allowed",
    ),
    "a role's attention": (
        PPO,
        {"roles.reward.attention": "fast"},
        "roles.reward.attention: given 'fast', allowed: flash",
    ),
    "sequences of a role": (
        PPO | {"gpus": 8},
        {"roles.critic.context_parallel": 2},
        "roles.critic.context_parallel: given 2, allowed with ",
    ),
    "layers of a role": (
        PPO | {"gpus": 8},
        {"roles.critic.tensor_parallel": 2},
        "roles.critic.tensor_parallel: given 2, allowed with torch: 1, as in the whole job",
    ),
    "no rows": (
        PPO,
        {"roles.critic.micro_batch": 0},
        "roles.critic.micro_batch: given 0, allowed: an integer of at least",
    ),
    "grpo that trains nothing": (
        GRPO,
        {"roles.actor": "none"},
        "roles.actor: given 'none', allowed: a role to train for g",
    ),
    "ppo that trains nothing": (
        PPO,
        {"roles.actor": "none", "roles.critic": "none"},
        "roles.actor: given 'none', allowed: a role to train for ppo",
    ),
    "an optimizer for a reward model": (
        PPO,
        {"roles.reward.optimizer": "adamw"},
        f"roles.reward.optimizer: given for a role that is not trained, {FROZEN}",
    ),
    "offloaded states of a reference": (
        PPO,
        {"roles": {"reference": {"offload": {"optimizer": True}}}},
        f"roles.reference.offload.optimizer: given for a role that is not trained, {FROZEN}",
    ),
    "adapters of a reference": (
        PPO,
        {"roles.reference.lora.rank": 8},
        f"roles.reference.lora.rank: given for a role that is not trained, {FROZEN}",
    ),
    "lengths of a role": (PPO, {"roles.actor.seq_len": 5}, "unknown field 'roles.actor.seq_len', allowed: "),
    # GPUs
    "GPUs that are left over": (
        APART,
        {"rollout.gpus": 1},
        "gpus: given 8 GPUs for actor 4 + critic 2 + rollout 1 = 7, allowed: GPUs of roles and rollout that add up to",
    ),
    "more GPUs than there are": (
        APART,
        {"roles.actor.gpus": 8},
        "gpus: given 8 GPUs for actor 8 + critic 2 + rollout 2",
    ),
    "GPUs that nobody says": (
        APART,
        {"rollout.gpus": ..., "roles.actor.gpus": ...},
        "rollout.gpus: given 8 GPUs for critic 2 + actor ? + rollout ?, allowed: GPUs of roles and",
    ),
    "GPUs of nobody": (
        GRPO,
        {"placement": "separate"},
        "rollout.gpus: given 8 GPUs for none + actor ? + rollout ?, allowed: GPUs of roles",
    ),
    "none left for the engine": (
        APART,
        {"roles.actor.gpus": 6, "rollout.gpus": ...},
        "rollout.gpus: given 8 GPUs for actor 6 + critic 2 + rollout ?, allowed: GPUs of roles and rollout that add up",
    ),
    "an actor's GPUs where all share": (
        GRPO,
        {"roles.actor.gpus": 4},
        "roles.actor.gpus: given 4, allowed: 8, as all roles share the GPUs",
    ),
    "an engine's GPUs where all share": (
        GRPO,
        {"rollout.gpus": 4},
        "rollout.gpus: given 4, allowed: 8, as all roles share the GPUs",
    ),
    "separate roles of sft": (
        SFT,
        {"placement": "separate"},
        "placement: given 'separate', allowed: colocated; sft has no",
    ),
    "separate roles of torch": (
        PPO,
        {"placement": "separate"},
        "placement: given 'separate', allowed with torch: colocat",
    ),
    "a misspelt placement": (
        GRPO,
        {"placement": "seperate"},
        "placement: given 'seperate', allowed: colocated, separate; d",
    ),
    # the engine
    "heads that ranks cannot share": (
        GRPO,
        {"rollout.tensor_parallel": 3},
        "rollout.tensor_parallel: given 3, allowed: a divisor of the model's 32 attention heads",
    ),
    "another model's heads": (
        GRPO,
        {"model": "qwen2.5-7b", "rollout.tensor_parallel": 8},
        "rollout.tensor_parallel: given 8, allowed: a divisor of the model's 28 attention heads",
    ),
    "more ranks than GPUs": (
        GRPO,
        {"rollout.tensor_parallel": 16},
        "rollout.tensor_parallel: given 16, allowed: a divisor of the rollout's 8 GPUs",
    ),
    "more ranks than the engine's own GPUs": (
        APART,
        {"rollout.tensor_parallel": 4},
        "rollout.tensor_parallel: given 4, allowed: a divisor of the rollout's 2 GPUs",
    ),
    "no rank": (
        GRPO,
        {"rollout.tensor_parallel": 0},
        "rollout.tensor_parallel: given 0, allowed: an integer of at least 1",
    ),
    "nothing of the card": (
        GRPO,
        {"rollout.gpu_memory_utilization": 0},
        "rollout.gpu_memory_utilization: given 0, allowed: a number above 0 and of at most 1",
    ),
    "more than the card": (
        GRPO,
        {"rollout.gpu_memory_utilization": 1.5},
        "rollout.gpu_memory_utilization: given 1.5, allowed: a number above 0 and of at most 1",
    ),
    "percent of the card": (
        GRPO,
        {"rollout": {"gpu_memory_utilization": 90}},
        "rollout.gpu_memory_utilization: given 90, allowed: a number above 0 and of at most 1",
    ),
    "less than nothing of the card": (
        GRPO,
        {"rollout.gpu_memory_utilization": -0.5},
        "rollout.gpu_memory_utilization: given -0.5, allowed: a number above 0 and of at most 1",
    ),
    "a share in words": (
        GRPO,
        {"rollout.gpu_memory_utilization": "half"},
        "rollout.gpu_memory_utilization: given 'half', allowed: a number above 0 and of at most 1",
    ),
    "a share that is no number": (
        GRPO,
        {"rollout.gpu_memory_utilization": float("nan")},
        "rollout.gpu_memory_utilization: given a number that is not finite, allowed: a finite number",
    ),
    "sleep on GPUs of its own": (
        APART,
        {"rollout.sleep": True},
        "rollout.sleep: given true with placement 'separate', allowed: with colocated",
    ),
    "sleep without an engine": (
        PPO,
        {"rollout.sleep": True},
        "rollout.sleep: given true with engine 'hf', allowed: with vllm",
    ),
    "sleep where nothing generates": (
        PPO,
        {"rollout.engine": "none", "rollout.sleep": True},
        "rollout.sleep: given true with engine 'none', allowed: with vllm",
    ),
    "an engine that is not modelled": (
        GRPO,
        {"rollout.engine": "tgi"},
        "rollout.engine: given 'tgi', allowed: vllm, sglang, hf, none",
    ),
    "a misspelt engine": (GRPO, {"rollout.engine": "vlm"}, "did you mean 'vllm'?"),
    "vllm in plain PyTorch": (
        PPO,
        {"rollout.engine": "vllm"},
        "rollout.engine: given 'vllm', allowed with torch: hf, none",
    ),
    "no responses": (GRPO, {"rollout.n": 0}, "rollout.n: given 0, allowed: an integer of at least 1"),
    "a misspelt field of the rollout": (GRPO, {"rollout.bacth": 8}, "did you mean 'rollout.batch'?"),
    "a word for the rollout": (GRPO, {"rollout": "vllm"}, "rollout: given 'vllm', allowed: a mapping of fields"),
    # lengths and batches
    "a sequence for grpo": (GRPO, {"seq_len": 2048}, "seq_len: given for grpo, allowed: prompt_len and response_len"),
    "a prompt for sft": (
        SFT,
        {"prompt_len": 512},
        "prompt_len: given for sft, allowed: for RL tasks alone; sft has seq_len",
    ),
    "a rollout for dpo": (
        JOB | {"task": "dpo"},
        {"rollout": {"n": 8}},
        "rollout.n: given for dpo, allowed: for RL tasks alone",
    ),
    "no prompt": (GRPO, {"prompt_len": 0}, "prompt_len: given 0, allowed: an integer of at least 1"),
    "a response in words": (
        GRPO,
        {"response_len": "1k"},
        "response_len: given '1k', allowed: an integer of at least 1",
    ),
    "a mean response too short for its prompt": (
        GRPO,
        {"prompt_len": 512, "response_len": 512, "expected_len": 600, "rollout.expected_len": 87},
        "rollout.expected_len: given 87, allowed: 88 to 512, a part of expected_len = 600",
    ),
    "a fullest micro batch below the mean": (
        GRPO,
        {"prompt_len": 512, "response_len": 512, "expected_len": 600, "rollout.fullest_len": 599, "packing": True},
        "rollout.fullest_len: given 599, allowed: 600 to 1024",
    ),
    "a fullest micro batch with padding": (
        GRPO,
        {"prompt_len": 512, "response_len": 512, "rollout.fullest_len": 1024, "packing": False},
        "rollout.fullest_len: given 1024 with batches that are padded, allowed: null, or where padding is removed",
    ),
    "a mean beyond the cap": (
        GRPO,
        {"prompt_len": 512, "response_len": 512, "expected_len": 1025},
        "expected_len: given 1025, allowed: at most prompt_len + response_len = 1024",
    ),
    "a batch that GPUs cannot share": (
        GRPO,
        {"micro_batch": 4, "global_batch": 70},
        "global_batch: given 70, allowed: a multiple of micro_batch x data-parallel GPUs = 4 x 8 = 32, as 64 or 96",
    ),
    "a batch that the actor's GPUs cannot share": (
        APART,
        {"micro_batch": 4, "global_batch": 30},
        "global_batch: given 30, allowed: a multiple of micro_batch x data-parallel GPUs = 4 x 4 = 16, as 16 or 32",
    ),
    # versions
    "a version in words": (
        GRPO,
        {"framework": "verl==latest"},
        "framework: given 'verl==latest', allowed: a version of n",
    ),
    "no version": (
        GRPO,
        {"framework": "trl=="},
        "framework: given 'trl==', allowed: a version of numbers, such as trl==",
    ),
    "a misspelt framework": (
        GRPO,
        {"framework": "vrl"},
        "allowed: torch, openrlhf, verl, trl, slime, each with ==version; did you",
    ),
    "a task that a release lacks": (
        PPO,
        {"task": "grpo", "framework": "openrlhf==0.5.0", "gpus": 8},
        "task: given 'grpo', allowed with openrlhf 0.4.6: ppo",
    ),
    # what a role has like the job itself
    "a role's adapters without a method": (
        PPO,
        {"roles.critic.lora.rank": 8},
        "roles.critic.lora.rank: given with method full",
    ),
    "a role's targets": (
        PPO,
        {"roles.critic.method": "lora", "roles.critic.lora.targets": ["q_prj"]},
        "roles.critic.lora.targets: given 'q_prj', allowed: ",
    ),
    "targets that a role's model lacks": (
        PPO,
        {"method": "lora", "lora.targets": ["q_proj"], "roles.critic.model": "phi-3-mini"},
        "lora.targets: given 'q_proj', allowed: ",
    ),
    "a role's parallelism": (
        PPO,
        {"roles.critic.expert_parallel": 2},
        "roles.critic.expert_parallel: given 2, not modelled yet, allowed: 1",
    ),
    "a role's batch that GPUs cannot share": (
        PPO,
        {"gpus": 2, "roles.critic.global_batch": 3},
        "roles.critic.global_batch: given 3, allowed: a multiple of micro_batch x data-parallel GPUs = 1 x 2 = 2",
    ),
    "a role that nothing shares": (
        PPO,
        {"gpus": 2, "roles.critic.sharding": "none"},
        "roles.critic.sharding: given 'none' with gpus = 2, allowed: ddp",
    ),
}


def changed(job: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`job` with `change` put over it, `...` taking a field away."""
    return {name: value for name, value in (job | change).items() if value is not ...}


@pytest.mark.parametrize(("job", "change", "told"), BAD.values(), ids=BAD)
def test_an_rl_job_that_cannot_be_is_one_line_naming_field_given_and_allowed(
    job: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    """The job itself is fine; the change alone is what the line speaks of."""
    parse(job)
    with pytest.raises(ScenarioError) as caught:
        parse(changed(job, change), where="job.yaml")
    line = str(caught.value)
    assert line.startswith("job.yaml: ")
    assert line.isprintable()
    assert told in line
    assert "did you mean" in line or "allowed" in line


@pytest.mark.parametrize("name", ["a critic for grpo", "GPUs that are left over", "percent of the card", "no prompt"])
def test_on_the_command_line_it_is_one_line_on_standard_error_and_status_2(
    run: Callable[..., Run], tmp_path: Path, name: str
) -> None:
    """Nothing on standard output, neither as text nor as JSON, and the line starts with the file."""
    job, change, told = BAD[name]
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(changed(job, change)))
    for argv in (("estimate", str(file)), ("estimate", str(file), "--json")):
        line = run(*argv).refused()
        assert line.startswith(f"{file}: ")
        assert told in line


def test_in_a_batch_it_is_an_answer_with_its_line_and_the_others_are_computed(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    """A bad line costs nothing but itself."""
    names = ["sleep on GPUs of its own", "a sequence for grpo", "heads that ranks cannot share"]
    file = tmp_path / "jobs.jsonl"
    file.write_text("\n".join(json.dumps(data) for name in names for data in (GRPO, changed(*BAD[name][:2]))))
    done = run("estimate", "--batch", str(file))
    assert (done.status, done.err) == (0, "")
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert all(answer["scenario"]["task"] == "grpo" for answer in answers[::2])
    for n, name in enumerate(names):
        assert answers[2 * n + 1] == {"error": answers[2 * n + 1]["error"]}
        assert answers[2 * n + 1]["error"].startswith(f"{file}:{2 * n + 2}: ")
        assert BAD[name][2] in answers[2 * n + 1]["error"]


def test_a_role_that_does_not_run_may_be_said_of_any_task() -> None:
    """A job spelled out in full says `none` of what it does not have, and that is no error."""
    for job in (SFT, JOB | {"task": "dpo"}, GRPO):
        named = {f"roles.{name}": "none" for name in ("actor", "critic", "reward")}
        keep = {place: word for place, word in named.items() if place[6:] not in ROLES.get(job["task"], ())}
        assert keep
        assert parse(job | keep) == parse(job)


def leaves(node: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    """Every field below a node of the schema, by dotted name."""
    node = SCHEMA["properties"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    found = [(path, node)] if "properties" not in node or "pattern" in node else []
    return found + [x for name, inner in node.get("properties", {}).items() for x in leaves(inner, f"{path}.{name}")]


PLACES = {path.removeprefix("."): node for path, node in leaves({"properties": {
    name: SCHEMA["properties"][name] for name in ("rollout", "roles", "lora", "placement", "gpus", "method", "sharding",
                                                  "precision", "optimizer", "expected_len", "packing")
}}, "")}  # fmt: skip


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """A field of a role, of the rollout or of the job, with a value of its own type."""
    place = draw(st.sampled_from(sorted(PLACES)))
    node = PLACES[place]
    values: tuple[Any, ...] = node.get("enum", ())
    if "pattern" in node:
        values = ("none", {}) if place.startswith("roles") else ("all-linear", ["q_proj"], ["qkv_proj"], ["nothing"])
    elif node["type"] == "boolean":
        values = (True, False)
    elif node["type"] == "string" and not values:
        values = ("llama-3.2-1b", "phi-3-mini", "qwen2.5-7b")
    elif not values:
        values = (1, 2, 3, 8) if node["type"] == "integer" else (0.05, 0.5, 1)
    return {place: draw(st.sampled_from(values))}


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(rl_fields(), st.lists(changes(), min_size=1, max_size=2))
def test_whatever_an_rl_job_says_is_an_estimate_or_one_line(data: dict[str, Any], change: list[dict[str, Any]]) -> None:
    """Any field of a role or of the rollout, with any value of its type: what is accepted can be computed, and again
    from the scenario that the answer spells out."""
    for one in change:
        (place,) = one
        # a role is said whole or field by field
        branch = place.rpartition(".")[0] if "." in place else place
        data = {name: value for name, value in data.items() if name not in (branch, "roles." + place.split(".")[-1])}
        data |= one
    try:
        s = parse(data, where="job.yaml")
    except ScenarioError as caught:
        assert str(caught).startswith("job.yaml: ")
        assert str(caught).isprintable()
        return
    assert isinstance(s, Scenario)
    assert estimate(s).groups
    assert parse(s.as_dict()) == s
    assert parse(s.as_dict()).warnings == s.warnings


def test_an_empty_mapping_within_a_role_says_nothing() -> None:
    job = {"model": "qwen2.5-0.5b", "gpu": "a40", "task": "ppo", "framework": "torch"}
    assert parse(job | {"roles.critic.lora": {}, "roles.reference": {"offload": {}}}) == parse(job)
