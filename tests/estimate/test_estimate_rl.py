"""RL jobs phase by phase: roles that share GPUs or have their own, an engine beside them, and what leaves between.

By hand for Llama 3 8B: P = 8,030,261,248; with a head of one number in place of the vocabulary's, P_s = P - V·h + h.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from formulas import holds
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jobs import VH, P, at, total
from strategies import FROZEN, RL, rl_scenarios

from calc.base.ledger import Line, Moment
from calc.base.plan import Stage
from calc.base.units import MiB
from calc.catalog.catalog import load
from calc.engines.fsdp import Fsdp
from calc.estimate.estimate import as_dict, estimate, host_verdict, loading_moments
from calc.estimate.gpu_group import PHASES, GpuGroup, sets
from calc.estimate.result import Estimate, Group
from calc.frameworks.registry import framework
from calc.memory.runtime import CONTEXT_HOPPER, FRAGMENTATION, MIDDLE, NCCL_BUFFERS
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.step.roles import Job

P_S = P - VH + 4096
ROOT, ROOT_S = 2 * VH + 4096, VH + 2 * 4096  # FSDP's root group: embedding, final norm, head
CACHE = 2 * 2 * 32 * 8 * 128  # bytes of a token: a key and a value, bf16, 32 layers, 8 heads of 128
BASE = {"model": "llama-3-8b", "gpu": "h200"}
TRAINING = ("score", "forward", "backward", "step")
PROCESS = CONTEXT_HOPPER + 2 * 32 * MiB  # of one role's process on a Hopper card
NCCL = 24 * 3 * NCCL_BUFFERS


def rl(task: str = "ppo", **fields: Any) -> Scenario:
    """An RL job of Llama 3 8B on H200s with these fields; `__` in a name is a dot."""
    return parse(BASE | {"task": task} | {name.replace("__", "."): value for name, value in fields.items()})


def answer(task: str = "ppo", **fields: Any) -> Estimate:
    """The estimate of `rl(task, **fields)`."""
    return estimate(rl(task, **fields))


def moments(e: Estimate | Group) -> dict[str, Moment]:
    """The moment of each phase, of a group or of a job that has one group."""
    group = e if isinstance(e, Group) else e.groups[0]
    assert isinstance(e, Group) or len(e.groups) == 1
    return {phase.name: phase.moment for phase in group.phases}


def of(lines: Iterable[Line], role: str) -> list[Line]:
    """The lines of one role."""
    return [line for line in lines if line.role == role]


def held(e: Estimate, *phases: str) -> dict[tuple[int, str], int]:
    """Bytes of each group in these phases, or in all, without vLLM's cache, which takes what others leave."""
    return {
        (n, p.name): sum(x.bytes for x in p.moment.lines if (x.role, x.component) != ("rollout", "kv_cache"))
        for n, g in enumerate(e.groups)
        for p in g.phases
        if not phases or p.name in phases
    }


def never_more(less: dict[tuple[int, str], int], more: dict[tuple[int, str], int], rounding: int = 8) -> None:
    """Asserts that no phase of the first needs more than that phase of the second, but for roundings of a few lines."""
    assert less.keys() <= more.keys()
    assert {place: (n, more[place]) for place, n in less.items() if n > more[place] + rounding} == {}


def groups_of(s: Scenario) -> list[GpuGroup]:
    """A job's sets of GPUs."""
    return sets(Job(s, load().gpu(s.gpu)))


# --- PPO by hand ---


def test_four_roles_of_plain_pytorch_lie_on_one_card() -> None:
    """bf16: weights 2P of actor and reference, 2P_s of critic and reward model, then Adam's 4P and 4P_s; the actor's
    step adds its gradients and foreach's list of square roots, 2P each. Of all tensors a share is lost."""
    found = moments(answer())
    weights = 2 * (2 * P + 2 * P_S)
    # cuBLAS takes its workspaces at the first multiplication
    assert found["load"].device_bytes == weights + CONTEXT_HOPPER
    step = found["step"]
    assert step.name == "actor: optimizer step"
    tensors = weights + 4 * (P + P_S) + 2 * P + 2 * P
    assert step.device_bytes == tensors + PROCESS + int(FRAGMENTATION[MIDDLE] * (tensors + PROCESS - CONTEXT_HOPPER))


def test_transformers_generates_beside_everything_that_is_resident() -> None:
    """The cache of 2 rows of 2,048 tokens and one layer's longer keys; logits of the last position alone."""
    found = moments(answer(micro_batch=2))["rollout"]
    assert found.name.startswith("last token")
    own = of(found.lines, "actor")
    assert total(own, "kv_cache") == 2 * 2048 * CACHE
    assert at(own, "kv-cache#dynamic") - total(own, "kv_cache") == 2 * 2048 * 2 * 8 * 128
    assert total(own, "logits") == 2 * (2 * 4096 + 2 * 128_256)
    assert total(found.lines, "optimizer_states") == 4 * (P + P_S)


def test_a_rewards_forward_has_no_vocabulary() -> None:
    """The actor's and the reference's scoring make six bytes a logit of the response; value heads one number."""
    e = answer(roles={"actor": "none", "reference": "none"})
    assert total(moments(e)["score"].lines, "logits") < 100_000
    with_logits = moments(answer())["score"]
    assert total(with_logits.lines, "logits") == 6 * 128_256 * 2048


def test_openrlhf_gives_each_role_a_process_and_vllm_its_own_gpus() -> None:
    """Actor with reference on 4 GPUs, critic with reward model on 2, one vLLM engine on each of 2: contexts double,
    and so do NCCL's two sets of buffers; ZeRO-2 shards 12 bytes a parameter over the group's own GPUs, and the cache
    takes what its share of the card leaves.
    """
    e = answer(framework="openrlhf", gpus=8, placement="separate", roles__actor__gpus=4, roles__critic__gpus=2,
               rollout__gpus=2)  # fmt: skip
    assert [(g.name, g.gpus) for g in e.groups] == [("rollout", 2), ("actor+reference", 4), ("reward+critic", 2)]
    assert [list(moments(g)) for g in e.groups] == [
        ["load", "rollout", "sync"],
        ["load", "score", "forward", "backward", "step", "sync", "save"],
        ["load", "score", "forward", "backward", "step"],
    ]
    rollout, actor, critic = (moments(g) for g in e.groups)
    for found, n, parameters in ((actor, 4, P), (critic, 2, P_S)):
        lines = found["step"].lines
        assert total(lines, "context", "workspace", "nccl") == 2 * (PROCESS + 2 * NCCL)
        assert total(lines, "weights") == 2 * 2 * parameters
        assert total(lines, "master_weights", "optimizer_states") == 12 * parameters // n
    usable = load().gpu("h200").usable_bytes
    lines = rollout["rollout"].lines
    # the engine's release counts CUDA graphs into its pool; its context lies outside
    pool = total(lines, "weights", "kv_cache", "temporary", "cuda_graphs")
    assert 0 <= int(0.95 * usable) - pool < 16 * CACHE
    assert e.groups[0].cache_tokens * CACHE == total(lines, "kv_cache")
    engine = Job(e.scenario, load().gpu("h200")).engine
    assert engine is not None
    assert e.groups[0].cache_sequences == min(e.groups[0].cache_tokens // 2048, engine.max_num_seqs)


def test_roles_of_separate_jobs_lie_on_the_host_of_their_own_nodes() -> None:
    """Groups fill nodes in turn: 2 ranks of the engine and 2 of the actor on the first, 2 of the actor and 2 of the
    critic on the second. Loading takes 2P or 2P_s for each rank and role, before Transformers 4.51; the second node
    needs less."""
    e = answer(framework="openrlhf", versions__transformers="4.50", gpus=8, gpus_per_node=4, placement="separate",
               roles__actor__gpus=4, roles__critic__gpus=2, rollout__gpus=2, roles__reference="none")  # fmt: skip
    host = {phase.name: phase.moment for phase in e.host_phases}
    loading = host["loading"]
    by_role = {role: total(of(loading.lines, role), "weights") for role in ("actor", "reward", "critic")}
    assert by_role == {"actor": 2 * 2 * P, "reward": 2 * 2 * P_S, "critic": 2 * 2 * P_S}


# --- what stays of a role while others run ---


def test_a_scored_models_root_group_stays_gathered_through_everything_that_follows() -> None:
    """FSDP reshards no root after a forward without gradient: 2r of the frozen models from their first forward on, and
    of a trained one until its own backward frees it. The critic is updated first."""
    (on,) = groups_of(rl(gpus=4, sharding="fsdp2", precision="fsdp-mixed"))
    gathered = {
        f"{x.phase} {x.at.partition(':')[0]}": {
            role: at(of(x.lines, role), "communication#gathered") for role in ("actor", "critic", "reference", "reward")
        }
        for serving in (True, False)
        for x in on.stages.moments(serving=serving)
    }
    frozen = {"reference": 2 * ROOT, "reward": 2 * (ROOT_S + 3 * 4096)}  # a head of one row, padded for four ranks
    assert gathered["step critic"] == frozen | {"actor": 2 * ROOT, "critic": 0}
    assert gathered["step actor"] == frozen | {"actor": 0, "critic": 0}
    assert gathered["forward actor"] == frozen | {"actor": 2 * ROOT, "critic": 0}
    assert gathered["load reward"] == dict.fromkeys(("actor", "critic", "reference", "reward"), 0)


def test_a_release_that_reshards_by_hand_keeps_no_root() -> None:
    """verl calls `_handle.reshard(True)` from 0.2 to 0.7, not before, and not since 0.8."""
    fields: dict[str, Any] = {"gpus": 8, "roles__reference": {}}
    kept = {}
    for version in ("tinyzero", "0.4.0", "0.8.0"):
        lines = moments(answer("grpo", framework=f"verl=={version}", **fields))["step"].lines
        kept[version] = at(of(lines, "reference"), "communication#gathered")
    assert kept == {"tinyzero": 2 * ROOT, "0.4.0": 0, "0.8.0": 2 * ROOT}


def test_weights_and_states_that_leave_are_on_the_gpu_in_their_own_phases_alone() -> None:
    """verl with param_offload and optimizer_offload: 12 bytes a parameter over 8 GPUs in a role's own update, nothing
    during the other's and the rollout, and all of it pinned on the host from the first step on."""
    fields: dict[str, Any] = {"framework": "verl==0.4.0", "gpus": 8, "rollout__gpu_memory_utilization": 0.4}
    sizes = {"actor": P, "critic": P_S}
    for moved in (False, True):
        s = rl(**fields, offload__parameters=moved, offload__optimizer=moved)
        (on,) = groups_of(s)
        kept = {
            (x.phase, x.at.partition(":")[0]): {
                role: total(of(x.lines, role), "weights", "optimizer_states") for role in sizes
            }
            for serving in (True, False)
            for x in on.stages.moments(serving=serving)
        }
        own = {role: 12 * parameters // 8 for role, parameters in sizes.items()}
        assert kept["rollout", "generation"] == (dict.fromkeys(own, 0) if moved else own)
        assert kept["step", "actor"] == {"actor": own["actor"], "critic": 0 if moved else own["critic"]}
        assert kept["step", "critic"] == {"critic": own["critic"], "actor": 0 if moved else own["actor"]}
        host = {phase.name: phase.moment.lines for phase in estimate(s).host_phases}
        lines = host.get("after the first step", ())
        pinned = sum(total(of(lines, role), "weights", "optimizer_states") for role in sizes)
        assert pinned >= 12 * (P + P_S) if moved else pinned == 0


def test_weights_that_wait_for_the_first_sync_are_beside_the_engine() -> None:
    """Until 0.2 verl's actor leaves once vLLM has generated; from 0.3 on before it wakes."""
    fields: dict[str, Any] = {"gpus": 8, "offload__parameters": True, "offload__optimizer": True}
    beside = {}
    for version in ("tinyzero", "0.2", "0.3.0"):
        lines = moments(answer("grpo", framework=f"verl=={version}", **fields))["rollout"].lines
        beside[version] = total(of(lines, "actor"), "weights")
    assert beside == {"tinyzero": 4 * P // 8, "0.2": 4 * P // 8, "0.3.0": 0}


def test_a_policy_with_adapters_scores_as_its_own_reference() -> None:
    """No second copy of the weights, neither on the card nor while loading, and its forward is no larger."""
    lora = moments(answer("grpo", method="lora", roles__reward="none"))
    other = moments(answer("grpo", method="lora", roles={"reward": "none", "reference": {"model": "llama-3.1-8b"}}))
    assert total(lora["score"].lines, "weights") == 2 * P
    assert total(lora["load"].lines, "weights") == 2 * P
    assert of(lora["step"].lines, "reference") == []
    assert total(of(other["step"].lines, "reference"), "weights") == 2 * P


# --- roles that train together ---


def gradients_of_the_other(e: Estimate) -> int:
    """Gradient bytes, at the peak of backward, of the trained role that does not run."""
    backward = moments(e)["backward"]
    running = backward.name.partition(":")[0]
    return total(of(backward.lines, {"actor": "critic", "critic": "actor"}[running]), "gradients")


def test_roles_that_take_turns_keep_each_others_gradients() -> None:
    """OpenRLHF without Ray updates actor and critic micro-batch by micro-batch: the critic accumulates 2K in the
    actor's backward. With one micro-batch a step nothing waits."""
    fields: dict[str, Any] = {"framework": "openrlhf==0.6.1", "gpus": 8, "micro_batch": 1}
    assert rl(**fields).rollout.engine == "hf"  # type: ignore[union-attr]
    assert gradients_of_the_other(answer(**fields, global_batch=16)) > 2 * P_S // 8
    assert gradients_of_the_other(answer(**fields, global_batch=8)) == 0


def test_roles_that_train_at_once_take_at_least_what_each_takes_alone() -> None:
    """OpenRLHF from 0.9.1 on: phase by phase the actor's update with the critic's largest moment beside it."""
    (together,) = groups_of(rl(framework="openrlhf==0.9.1", gpus=8, rollout__gpu_memory_utilization=0.3))
    both, actor, critic = (
        {phase: total(lines) for phase, _, lines in together.stages.train(stage)}
        for stage in (
            Stage("train", "actor", engine="all", beside="critic"),
            Stage("train", "actor", engine="all"),
            Stage("train", "critic", engine="all"),
        )
    )
    assert list(both) == list(actor) == list(critic) == ["forward", "backward", "step"]
    for phase, bytes_ in both.items():
        assert bytes_ >= actor[phase]
        assert bytes_ >= max(critic.values())
    resident = total(together.stages.placed["critic"].engine.resident())
    beside = (
        max(critic.values())
        - total(together.stages.beside(Stage("train", "critic", engine="all"), "critic"))
        - resident
    )
    assert {both[phase] - actor[phase] for phase in both} == {beside}


@pytest.mark.parametrize(
    ("version", "fields", "at_once"),
    [
        ("0.9.1", {}, True),
        ("0.9.0", {}, False),
        ("0.9.1", {"rollout__sleep": True}, False),
    ],
)
def test_actor_and_critic_train_at_once_from_0_9_1_unless_states_sleep(
    version: str, fields: dict[str, Any], at_once: bool
) -> None:
    """Both roles' activations are in one moment, or they are not."""
    backward = moments(answer(framework=f"openrlhf=={version}", gpus=8, **fields))["backward"]
    passing = {line.role for line in backward.lines if line.component in ("activations", "checkpoints")}
    assert (passing >= {"actor", "critic"}) is at_once


# --- the engine ---


@pytest.mark.parametrize(
    ("utilization", "told"),
    [
        (0.98, "allowed: less; vLLM finds"),
        (0.05, "allowed: more; vLLM has no available memory"),
        (0.15, "allowed: more; the model's max seq len (32768) is larger than the "),
    ],
)
def test_an_engine_that_does_not_start_is_out_of_memory_while_loading_with_one_note(
    utilization: float, told: str
) -> None:
    """vLLM's own refusal: too little free for its pool, no block left, or fewer tokens than a sequence has."""
    e = answer("grpo", framework="verl==0.6.0", gpus=8, rollout__gpu_memory_utilization=utilization,
               prompt_len=8192, response_len=24_576,
               rollout__tensor_parallel=1)  # fmt: skip
    assert (e.verdict, e.verdict_phase, e.fit_probability) == ("oom", "load", 0.0)
    (note,) = [note for note in e.notes if "gpu_memory_utilization" in note]
    assert note.startswith(f"rollout.gpu_memory_utilization: given {utilization}, {told}")
    assert note.isprintable()
    (group,) = as_dict(e)["groups"]
    assert (group["verdict"], group["verdict_phase"]) == ("oom", "load")


def test_an_engine_that_starts_says_what_its_cache_holds() -> None:
    """Tokens of its blocks, and how many whole sequences; a job without vLLM says nothing."""
    (group,) = as_dict(answer("grpo", framework="verl", gpus=8))["groups"]
    (cache,) = [x["bytes"] for x in group["phases"][1]["lines"] if x["component"] == "kv_cache"]
    assert cache == group["kv_cache"]["tokens"] * CACHE // 2  # heads over two ranks
    assert group["kv_cache"]["sequences"] <= group["kv_cache"]["tokens"] // 1024
    assert "kv_cache" not in as_dict(answer())["groups"][0]


def test_a_sleeping_engine_leaves_its_graphs_and_its_process() -> None:
    """Weights and cache are unmapped; CUDA graphs lie outside the pool, context and NCCL's buffers stay."""
    fields: dict[str, Any] = {"framework": "verl==0.8.0", "gpus": 8}
    asleep, awake = (moments(answer("grpo", **fields, rollout__sleep=sleep))["step"] for sleep in (True, False))
    assert {line.component for line in of(asleep.lines, "rollout")} == {"context", "workspace", "nccl", "cuda_graphs"}
    assert {line.component for line in of(awake.lines, "rollout")} > {"weights", "kv_cache"}


# --- loading ---


def test_models_arrive_one_after_another_and_stay() -> None:
    """OpenRLHF, actor, reference, reward model, critic: every line of a model that has arrived is in each moment of
    those that follow."""
    every = loading_moments(rl(framework="openrlhf==0.6.2", gpus=8, placement="separate", roles__actor__gpus=4,
                               roles__critic__gpus=2, rollout__gpus=2))  # fmt: skip
    there: dict[str, dict[str, list[Line]]] = {}
    for group, moment in every:
        name = moment.name.partition(":")[0]
        arrived = there.setdefault(group, {})
        for earlier, lines in arrived.items():
            if earlier != name:
                assert of(moment.lines, earlier) == lines
        arrived[name] = of(moment.lines, name)
    assert [list(names) for names in there.values()] == [["rollout"], ["actor", "reference"], ["reward", "critic"]]


@settings(max_examples=60)
@given(rl_scenarios())
def test_moments_of_loading_are_cumulative(s: Scenario) -> None:
    """Whatever arrived and does not leave is in every later moment of its GPUs, byte for byte."""
    keeps = framework(s.framework).keeps(s)
    last: dict[tuple[str, str], list[Line]] = {}
    for group, moment in loading_moments(s):
        name = moment.name.partition(":")[0]
        for (where, earlier), lines in last.items():
            if where == group and earlier != name and not keeps.role(earlier).leaves:
                assert of(moment.lines, earlier) == lines
        if name != "rollout":
            last[group, name] = of(moment.lines, name)


# --- for any RL scenario ---


@settings(max_examples=70)
@given(rl_scenarios())
def test_every_phases_lines_add_up_and_every_formula_gives_its_bytes(s: Scenario) -> None:
    """The ledger's promise for RL: cache, graphs, processes, what is gathered and handed on, and the host's lines.

    The response's share of a sequence makes factors such as 3.55556 of a vocabulary.
    """
    data = as_dict(estimate(s))
    for phase in [p for g in data["groups"] for p in g["phases"]] + data["host"]["phases"]:
        holds(phase, printed=5e-6)


@settings(max_examples=50)
@given(rl_scenarios())
def test_phases_come_in_the_contracts_order_and_groups_have_all_gpus(s: Scenario) -> None:
    """Every set of GPUs loads first; roles that train have their three phases; GPUs add up, roles are in one group.

    The verdict is the worst group's, but where the host's memory does not suffice: then nothing fits.
    """
    e = estimate(s)
    keeps = framework(s.framework).keeps(s)
    for g in e.groups:
        names = [phase.name for phase in g.phases]
        assert names == sorted(set(names), key=PHASES.index)
        assert names[0] == "load"
        trains = {stage.role for stage in keeps.stages if stage.does == "train"} & set(g.name.split("+"))
        assert (set(names) >= {"forward", "backward", "step"}) == bool(trains)
        assert max(phase.moment.device_bytes for phase in g.phases) == g.peak.moment.device_bytes
    assert sum(g.gpus for g in e.groups) == s.gpus
    assert sorted(name for g in e.groups for name in g.name.split("+")) == sorted(keeps.loading)
    worst = min(e.groups, key=lambda g: g.fit_probability)
    found = ("oom", 0.0) if host_verdict(e) == "oom" else (worst.verdict, worst.fit_probability)
    assert (e.verdict, e.fit_probability) == found
    assert (e.verdict_phase is None) == (e.verdict == "fits")


@settings(max_examples=50)
@given(rl_scenarios())
def test_an_estimates_scenario_gives_the_same_estimate_again(s: Scenario) -> None:
    """Its JSON holds everything that decides memory, roles, rollout and GPUs included."""
    data = json.loads(json.dumps(as_dict(estimate(s))))
    again = parse(data["scenario"])
    assert again == s
    assert as_dict(estimate(again)) == data


@settings(max_examples=50)
@given(rl_scenarios(), st.sampled_from(("prompt", "response", "both")))
def test_longer_prompts_and_responses_never_need_less(s: Scenario, which: str) -> None:
    """Twice as long: no less in any phase beside vLLM's cache, which shrinks by what its profile run takes more."""
    prompt = s.prompt_len * (1 + (which != "response"))
    response = s.response_len * (1 + (which != "prompt"))
    mean = s.expected_len * (prompt + response) // s.seq_len
    longer = replace(s, prompt_len=prompt, response_len=response, seq_len=prompt + response,
                     expected_len=max(mean, s.expected_len))  # fmt: skip
    never_more(held(estimate(s)), held(estimate(longer)))


@settings(max_examples=50)
@given(rl_scenarios())
def test_a_larger_micro_batch_never_needs_less(s: Scenario) -> None:
    """Twice the rows at the same number of micro-batches."""
    larger = replace(s, micro_batch=2 * s.micro_batch, global_batch=2 * s.global_batch)
    never_more(held(estimate(s)), held(estimate(larger)))


@settings(max_examples=50)
@given(rl_scenarios("openrlhf", "verl", "trl"), st.floats(0.05, 1), st.floats(0.05, 1))
def test_a_larger_share_of_the_card_never_holds_fewer_tokens(s: Scenario, one: float, other: float) -> None:
    """Nor takes less of the card while it generates, unless vLLM then finds too little free to start at all."""
    assume(s.rollout is not None and s.rollout.engine == "vllm")
    assert s.rollout is not None
    low, high = (
        estimate(replace(s, rollout=replace(s.rollout, gpu_memory_utilization=share))) for share in sorted((one, other))
    )
    for few, many in zip(low.groups, high.groups, strict=True):
        if many.refusal and "allowed: less" in str(many.refusal):
            continue
        assert many.cache_tokens >= few.cache_tokens
        assert many.cache_sequences >= few.cache_sequences
        if "rollout" in moments(many):
            assert moments(many)["rollout"].device_bytes >= moments(few)["rollout"].device_bytes


@settings(max_examples=50)
@given(rl_scenarios("openrlhf", "verl", "trl", placement="colocated", rollout__engine="vllm"))
def test_sleeping_never_needs_more_while_roles_score_and_train(s: Scenario) -> None:
    """An engine that sleeps gives memory back, and lets optimizer states do so too."""
    assert s.rollout
    asleep, awake = (estimate(replace(s, rollout=replace(s.rollout, sleep=sleep))) for sleep in (True, False))
    never_more(held(asleep, *TRAINING), held(awake, *TRAINING))
    for less, more in zip(asleep.groups, awake.groups, strict=True):
        for phase in TRAINING:
            if phase in moments(more) and not more.refusal:
                assert moments(less)[phase].device_bytes <= moments(more)[phase].device_bytes + 8


@settings(max_examples=50)
@given(rl_scenarios("torch", "verl", "trl", placement="colocated"))
def test_twice_the_ranks_never_need_more_of_a_gpu_under_fsdp(s: Scenario) -> None:
    """The same work for each GPU on twice as many: shards halve. vLLM's cache may grow into what becomes free, and
    FSDP 2's padding of layers is left out, that of the root counted."""
    trained = [p for p in Job(s, load().gpu(s.gpu)).placed.values() if isinstance(p.engine, Fsdp)]
    assume(s.sharded.family == "fsdp" and s.gpus > 1 and s.rollout)
    assert s.rollout
    wider = replace(s, gpus=2 * s.gpus, gpus_per_node=2 * s.gpus_per_node, global_batch=2 * s.global_batch,
                    rollout=replace(s.rollout, gpus=2 * s.rollout.gpus, batch=2 * s.rollout.batch))  # fmt: skip
    more = Job(wider, load().gpu(s.gpu)).placed
    padded = 0
    for p in trained:
        other = more[p.role.name].engine
        assert isinstance(other, Fsdp) and isinstance(p.engine, Fsdp)
        assume(other.layer(-1) == p.engine.layer(-1))
        padded += 8 * (other.root_elements - p.engine.root_elements)
    phases = ("load", *TRAINING, "save") if s.rollout.engine != "vllm" else (*TRAINING, "save")
    never_more(held(estimate(wider), *phases), held(estimate(s), *phases), rounding=64 + padded)


@settings(max_examples=50)
@given(rl_scenarios())
def test_loading_holds_at_least_the_weights_of_all_roles_that_stay(s: Scenario) -> None:
    """Each GPU's loading ends with every model of its group that does not leave for the host."""
    for on, g in zip(groups_of(s), estimate(s).groups, strict=True):
        staying = [p for p in on.stages.placed.values() if "weights" not in p.role.leaves and not p.role.shares]
        assert moments(g)["load"].device_bytes >= sum(total(p.engine.weights()) for p in staying)


@settings(max_examples=50)
@given(rl_scenarios(placement="colocated"), st.sampled_from(("critic", *FROZEN)))
def test_a_job_without_a_role_never_needs_more(s: Scenario, name: str) -> None:
    """Neither on the card nor on the host; vLLM's cache may take what the role leaves."""
    assume(s.has(name))
    less = replace(s, roles={**s.roles, name: "none"})
    phases = [phase for phase in PHASES if not (phase == "load" and s.rollout and s.rollout.engine == "vllm")]
    never_more(held(estimate(less), *phases), held(estimate(s), *phases))
    host, before = ({p.name: p.moment.device_bytes for p in estimate(x).host_phases} for x in (less, s))
    assert all(host[phase] <= before[phase] for phase in host)


@pytest.mark.parametrize("name", RL)
def test_every_version_of_a_framework_answers_every_task_that_it_has(name: str) -> None:
    """With nothing but model, task and GPUs given: an estimate, or one line that says what the release lacks."""
    gpus = {"gpus": 8} if name != "torch" else {}
    for task in RL[name]:
        answers = 0
        for version in framework(name).KNOWN:
            data = BASE | {"task": task, "framework": f"{name}=={version}"} | gpus
            try:
                s = parse(data)
            except ValueError as error:
                assert "allowed" in str(error) and str(error).isprintable()
                continue
            assert parse(s.as_dict()) == s
            assert parse(s.as_dict()).warnings == s.warnings
            assert estimate(s).groups
            answers += 1
        assert answers > 0
