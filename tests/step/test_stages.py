"""The stages of roles that share GPUs: which moments there are, and what each role leaves beside the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from jobs import P, job, planned, total

from calc.base.ledger import Line
from calc.base.plan import Stage
from calc.engines.rollout import STARTING
from calc.memory import runtime
from calc.scenario.scenario import Scenario
from calc.step.roles import Roles
from calc.step.stages import Candidate, Stages, largest

PPO = {"task": "ppo", "prompt_len": 48, "response_len": 16, "rollout": {"engine": "hf", "n": 1}}
FSDP = PPO | {"sharding": "fsdp2", "gpus": 2}
# verl moves the trained roles' weights and states to the host, until 0.2 the weights only after the first rollout
VERL = {"task": "ppo", "framework": "verl==0.2", "gpus": 8, "offload__parameters": True, "offload__optimizer": True}
APART = {"task": "ppo", "framework": "openrlhf", "placement": "separate", "gpus": 5, "rollout__gpus": 1}
OWN = {f"roles__{name}__gpus": 1 for name in ("actor", "critic", "reference", "reward")}


def stages(s: Scenario, *names: str) -> Stages:
    """The stages of these roles on GPUs of their own, or of all roles of the job."""
    return Stages(Roles(s), names or s.keeps.loading)


def real(**fields: Any) -> Stages:
    """The stages of a job of Llama 3 8B that has one group."""
    return stages(job(**fields))


def line(component: str, count: int) -> Line:
    return Line(component, "actor", count, "b", {"b": count}, "weights")


def parts(lines: Iterable[Line]) -> set[tuple[str, str]]:
    """The components there are, with their roles."""
    return {(line.role, line.component) for line in lines}


def roots(lines: Iterable[Line]) -> set[str]:
    """The roles whose root FSDP unit is gathered."""
    return {line.role for line in lines if line.values.get("what") == "root group"}


def test_a_stage_that_does_what_nothing_knows_fails_at_once() -> None:
    unknown: Any = "polish"
    with pytest.raises(AssertionError, match="polish"):
        real(task="ppo", framework="openrlhf", gpus=8).instants(Stage(unknown, "actor"))


def test_an_engine_on_gpus_of_its_own_gets_weights_at_the_sync_alone() -> None:
    """What the other roles do elsewhere, scores, updates and checkpoints, is nothing to it."""
    on = stages(job(**APART, **OWN), "rollout")
    assert [*on.moments(serving=True)] == [
        *[Candidate("load", f"rollout: {at}", [], at) for at in STARTING],
        Candidate("rollout", "generation", [], "all"),
        Candidate("sync", "weights arrive", [], "all"),
    ]
    assert [*on.moments(serving=False)] == []


def test_a_sync_is_where_weights_leave_and_where_they_arrive() -> None:
    """Beside the role that hands them on they do not arrive once more, and other roles' GPUs have no part in it."""
    both, neither = real(task="ppo", framework="openrlhf", gpus=8), stages(job(**APART, **OWN), "critic")
    assert [x.at for x in both.moments(serving=True) if x.phase == "sync"] == ["weights to the engine"]
    assert {x.phase for x in neither.moments(serving=True)} == {"load"}


@pytest.mark.parametrize(
    ("phase", "count", "larger"),
    [("backward", 995, "inside"), ("backward", 980, "outside"), ("load", 995, "outside"), ("sync", 995, "inside")],
)
def test_what_may_be_held_back_decides_between_moments_but_not_while_models_load(
    monkeypatch: pytest.MonkeyPatch, phase: str, count: int, larger: str
) -> None:
    """A hundredth of what is allocated: 995 bytes of it are more than 1,000 of which nothing is, 980 are less."""
    monkeypatch.setattr(runtime, "FRAGMENTATION", (0.01,) * 40)
    outside = Candidate(phase, "outside", [line("context", 1000)._replace(allocated=False)])
    ((most, known),) = largest([outside, Candidate(phase, "inside", [line("weights", count)])])
    assert most.at == larger
    assert known[:3] == {"inside": (count, count, count * (phase != "load")), "outside": (1000, 0, 0)}[larger]


def test_of_equal_moments_the_first_is_the_largest() -> None:
    found = [Candidate("step", at, [line("weights", count)]) for at, count in (("a", 6), ("b", 7), ("c", 7), ("d", 5))]
    assert [most.at for most, _ in largest(found)] == ["b"]


def test_every_phase_and_every_state_of_an_engine_has_its_largest() -> None:
    """What vLLM takes in each differs from card to card."""
    found = [Candidate(phase, "", [line("weights", 7)], engine) for phase in ("save", "sync") for engine in ("", "all")]
    assert [most for most, _ in largest(found)] == found


def test_a_root_group_stays_gathered_from_a_forward_to_the_roles_own_backward() -> None:
    """Only a forward that keeps nothing leaves it so, and only training takes it away; seen beside the critic."""
    s, seen = job(**FSDP), Stage("save", "critic")
    step = [Stage(does, "actor", rows=1) for does in ("generate", "sync", "score", "save", "sync", "train")]
    each = [stage for own in step for stage in (own, seen)]
    for stays, expected in ((True, [False, False, True, True, True, False]), (False, [False] * 6)):
        on = stages(planned(s, *each, Stage("train", "critic"), root_stays=stays))
        beside = [roots(x.lines) for x in on.moments(serving=True) if x.at == "critic: state dict"]
        assert ["actor" in found for found in beside] == expected
        assert {found >= {"reference", "reward"} for found in beside} == {stays}


def test_a_root_group_that_is_gathered_leaves_the_first_layer_no_buffer_for_it() -> None:
    """A critic whose own is gathered scores as if it were not there."""
    score, train = Stage("score", "critic"), Stage("train", "critic")
    on = stages(planned(job(**FSDP), score, score, train, score))
    first, second, again = (x.at for x in on.moments(serving=False) if x.phase == "score")
    assert first == again == "critic: first layer: gather"
    assert second == "critic: layer: gather"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_reference_has_its_root_or_shares_the_policys(method: str) -> None:
    """Frozen, it keeps it from the start; as the policy without its adapters it runs where that is gathered."""
    on = real(task="dpo", sharding="fsdp2", gpus=2, seq_len=16, micro_batch=1, method=method)
    actor, reference = (on.scoring(on.roles.placed[name])[0] for name in ("actor", "reference"))
    assert (actor, reference) == ("first layer: gather", "layer: gather")


def test_weights_that_wait_for_an_engine_stay_while_others_arrive() -> None:
    """A trained role's leave for the host after loading, unless held until vLLM has served; a frozen one's do."""
    s, leaves = job(**VERL), frozenset({"weights", "states"})
    waiting = {("critic", "weights"), ("actor", "weights")}
    for holds in (("weights",), ()):
        own = [replace(stage, holds=holds) if stage.does == "serve" else stage for stage in s.keeps.stages]
        on = stages(planned(s, *own, leaves=leaves))
        kept = {x.at: parts(x.lines) for x in on.moments(serving=True)}
        assert ("critic", "weights") in kept["critic: shards on the GPU"]
        assert (("critic", "weights") in kept["actor: shards on the GPU"]) is bool(holds)
        for at in ("rollout: KV cache allocated", "generation"):
            assert kept[at] == (waiting if holds else set())


def test_another_stage_that_holds_weights_lets_those_of_loading_leave() -> None:
    """What a checkpoint or a sync holds is its own."""
    s = job(**VERL)
    own = [replace(stage, holds=("weights",) * (stage.does != "serve")) for stage in s.keeps.stages]
    assert stages(planned(s, *own)).arrived("critic") == []


def test_roles_arrive_after_an_engine_too() -> None:
    """Which is asleep by then."""
    found = [*real(task="ppo", framework="openrlhf", gpus=8).loading()]
    assert [(x.at, x.engine) for x in found[:4]] == [
        *((f"rollout: {at}", at) for at in STARTING),
        ("actor: weights on the GPU", "asleep"),
    ]
    assert {x.engine for x in found[4:]} == {"asleep"}


def test_roles_that_take_turns_keep_their_gradients_alone() -> None:
    """Of what lies between two micro-batches, where ZeRO-1 has a bucket, too; the frozen ones have neither."""
    on = real(task="ppo", framework="openrlhf==0.5.6", gpus=2, sharding="zero1")
    (stage,) = [x for x in on.roles.keeps.stages if x.does == "train" and x.role == "actor"]
    turns, alone = (on.beside(replace(stage, alternating=turns), "actor") for turns in (True, False))
    assert parts(turns) - parts(alone) == {("critic", "gradients")}
    assert {role for role, _ in parts(alone)} == {"critic", "reference", "reward"}
    assert total(turns, "gradients") == 2 * on.placed["critic"].engine.replica.trainable


def test_a_forward_that_scores_has_no_gradients_of_its_own() -> None:
    """Though those of earlier micro-batches lie there while the same role trains."""
    found = [x for x in real(**PPO, global_batch=2).moments(serving=False) if x.at.startswith("actor: ")]
    have = {phase: [("actor", "gradients") in parts(x.lines) for x in found if x.phase == phase]
            for phase in ("score", "forward")}  # fmt: skip
    assert have == {"score": [False], "forward": [True]}


def test_each_stage_is_among_those_of_vllm_or_among_the_others() -> None:
    on = real(**PPO)
    phases = [{x.phase for x in on.moments(serving=serving)} for serving in (True, False)]
    assert phases == [{"load", "rollout"}, {"score", "forward", "backward", "step"}]


def test_frozen_roles_keep_their_root_from_the_start() -> None:
    """A trained one's is resharded by its backward."""
    generation = [x for x in real(**FSDP).moments(serving=True) if x.phase == "rollout"]
    assert {frozenset(roots(x.lines) - {"actor"}) for x in generation} == {frozenset({"reference", "reward"})}


@pytest.mark.parametrize(("every", "first"), [(False, (5, 1)), (True, (240, 48))])
def test_transformers_runs_the_prompts_then_a_token_at_a_time(every: bool, first: tuple[int, int]) -> None:
    """Five prompts of 48 tokens, 131,072 bytes of cache each, then 64; logits of the last position, or of all."""
    on = real(**PPO)
    (stage,) = [stage for stage in on.roles.keeps.stages if stage.does == "generate"]
    holds = ("clone", "units", *["prompt-logits"] * every)
    found = {at: lines for _, at, lines in on.generate(replace(stage, rows=5, holds=holds))}
    batches = {at: {(x.values["T"], x.values["S"]) for x in lines if "S" in x.values} for at, lines in found.items()}
    assert batches == {
        "prompts: layer: mlp: product": {(240, 48)},
        "prompts: logits: lm_head": {first},
        "last token: logits: lm_head": {(5, 1)},
    }
    assert [total(lines, "kv_cache") for lines in found.values()] == [240 * 131_072, 240 * 131_072, 320 * 131_072]
    handed = [{x.values["what"] for x in lines if x.source == "communication#handing"} for lines in found.values()]
    assert handed == [{"clone", "units"}] * 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, False),
        ({"task": "dpo"}, False),  # the reference is scored inside of the policy's forward
        (PPO, True),
        (PPO | {"task": "grpo", "rollout": {"engine": "hf", "n": 8}, "roles": {"reward": "none"}}, True),
    ],
)
def test_moments_of_training_name_their_role_where_several_could_be_meant(fields: dict[str, Any], named: bool) -> None:
    on = real(**fields)
    found = [x.at for x in on.moments(serving=False) if x.phase in ("backward", "step")]
    assert {at.startswith(("actor: ", "critic: ")) for at in found} == {named}


@pytest.mark.parametrize(("fields", "gathered"), [({}, {"actor", "reference"}), ({"method": "lora"}, {"actor"})])
def test_a_reference_within_the_forward_gathers_a_root_of_its_own(fields: dict[str, Any], gathered: set[str]) -> None:
    """Unless it is the policy without its adapters; the policy has no gradient yet while the reference runs."""
    on = real(task="dpo", sharding="fsdp2", gpus=2, **fields)
    ((at, lines),) = [(x.at, x.lines) for x in on.moments(serving=False) if x.phase == "forward"]
    assert at.startswith("reference, ")
    assert roots(lines) == gathered
    assert not [x for x in lines if x.component == "gradients"]


def test_a_reference_runs_beside_the_last_gradients_of_an_optimizer_that_drops_them_in_backward() -> None:
    """DeepSpeed's BF16_Optimizer under ZeRO-1: fp32 sums, 4 P, and the bf16 gradients of the step before, 2 P."""
    on = real(task="dpo", gpus=2, sharding="zero1", grad_dtype="fp32", micro_batch=1, global_batch=2)
    ((at, lines),) = [(x.at, x.lines) for x in on.moments(serving=False) if x.phase == "forward"]
    assert at.startswith("reference, ")
    assert [x.bytes for x in lines if x.component == "gradients"] == [4 * P, 2 * P]


def test_what_stays_through_training_is_every_roles_share() -> None:
    """PPO under ZeRO-3: weights and states of what trains, weights of what scores, whoever computes."""
    on = real(task="ppo", framework="openrlhf", gpus=8, sharding="zero3")
    assert len(on.placed) == 4
    assert on.resident() == sum(total(placed.engine.resident()) for placed in on.placed.values())
    assert real(task="inference").resident() == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"task": "dpo", "checkpointing": "full", "seq_len": 8192},
        {"gpus": 8, "sharding": "zero3", "framework": "openrlhf", "method": "lora", "micro_batch": 8},
        {"gpus": 8, "sharding": "fsdp2", "checkpointing": "selective"},
        {"gpus": 2, "tensor_parallel": 2, "packing": True},
    ],
)
def test_activations_are_a_bound_from_below_and_no_loose_one(fields: dict[str, Any]) -> None:
    """Of what is there at some moment of backward, and they count beside what is resident."""
    on = real(**fields)
    found = [x.lines for x in on.moments(serving=False) if x.phase == "backward"]
    most = max(total(lines, "activations", "checkpoints", "logits", "temporary") for lines in found)
    assert on.working() <= max(total(lines) for lines in found)
    assert on.working() - on.resident() > 0.8 * most


def test_a_forward_keeps_for_a_backward_alone() -> None:
    """Where nothing is trained, one layer's tensors pass; else all 24 layers' stay."""
    kept = []
    for optimizer in ("none", "sgd"):
        on = real(model="qwen2.5-0.5b", optimizer=optimizer, loss="fused")
        (forward,) = [found.lines for found, _ in on.largest(serving=False) if found.phase == "forward"]
        kept.append(total(forward, "activations", "checkpoints"))
    assert kept[1] > 10 * kept[0]
