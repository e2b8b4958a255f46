"""The stages of roles that share GPUs: which moments there are, and what each role leaves beside the others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import P, job

from calc.base.ledger import Line
from calc.base.plan import Stage
from calc.catalog.catalog import load
from calc.engines.replica import Where
from calc.engines.rollout import STARTING
from calc.estimate.gpu_group import sets
from calc.memory import runtime
from calc.resolve.parse import parse
from calc.step.roles import Job, Memo, Roles
from calc.step.stages import Candidate, Stages


def line(component: str, count: int) -> Line:
    return Line(component, "actor", count, "b", {"b": count}, "weights")


def staged(*stages: Stage, placed: dict[str, Any] | None = None, names: tuple[str, ...] = (), **roles: Any) -> Stages:
    """These stages of roles that are placed so."""
    found = object.__new__(Stages)
    known: Any = Memo()
    vars(known).update(keeps=SimpleNamespace(stages=stages), training=Memo(), **roles)
    vars(found).update(roles=known, names=names, placed=placed or {}, serves="rollout" in names, gathered=set())
    return found


@pytest.mark.parametrize("does", ["generate", "save", "score", "serve", "sync", "train"])
def test_an_engine_on_gpus_of_its_own_gets_weights_at_the_sync_alone(does: str) -> None:
    """What the other roles do elsewhere is nothing to it; it has started before."""
    found = list(staged(Stage(does, "actor"), names=("rollout",)).moments(serving=True))
    assert [x.engine for x in found[:3]] == list(STARTING)
    assert [tuple(x) for x in found[3:]] == ([("sync", "weights arrive", [], "all")] if does == "sync" else [])


def test_a_stage_that_does_what_nothing_knows_fails_at_once() -> None:
    unknown: Any = "polish"
    with pytest.raises(AssertionError, match="polish"):
        staged().instants(Stage(unknown, "actor"))


def test_what_may_be_held_back_decides_between_moments_but_not_while_models_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundredth of what is allocated: 995 bytes of it are more than 1,000 of which nothing is, 980 are less."""
    monkeypatch.setattr(runtime, "HELD_BACK", (0.01,) * 40)
    outside = line("context", 1000)._replace(allocated=False)
    for phase, serving, count, larger in (
        ("backward", False, 995, "inside"), ("backward", False, 980, "outside"), ("load", True, 995, "outside"),
        ("sync", True, 995, "inside"),
    ):  # fmt: skip
        moments = [Candidate(phase, "outside", [outside]), Candidate(phase, "inside", [line("weights", count)])]
        found = staged()
        vars(found)["moments"] = lambda serving, moments=moments: iter(moments)
        ((most, known),) = found.largest(serving=serving)
        assert most.at == larger
        assert known[:3] == {"inside": (count, count, count), "outside": (1000, 0, 0)}[larger]


def test_of_equal_moments_the_first_is_the_largest() -> None:
    found = staged()
    vars(found)["moments"] = lambda serving: (Candidate("step", at, [line("weights", 7)]) for at in "ab")
    assert [most.at for most, _ in found.largest(serving=False)] == ["a"]


def test_a_root_group_stays_gathered_from_a_forward_to_the_roles_own_backward() -> None:
    """Only a forward that keeps nothing leaves it so, and only training takes it away."""
    stays = SimpleNamespace(role=SimpleNamespace(root_stays=True), trained=True)
    found = staged(placed={"actor": stays})
    for does, gathered in (
        ("generate", set()), ("sync", set()), ("score", {"actor"}), ("save", {"actor"}), ("sync", {"actor"}),
        ("train", set()),
    ):  # fmt: skip
        found.leave(Stage(does, "actor"))
        assert found.gathered == gathered, does
    stays.role.root_stays = False
    found.leave(Stage("score", "actor"))
    assert found.gathered == set()


def role(count: int, *leaves: str, trained: bool = True, shares: bool = False) -> Any:
    """A placed role of so many bytes of weights, and ten times as many of gradients and activations between steps."""
    engine = SimpleNamespace(
        loading=lambda: [("there", [line("weights", count)])],
        replica=SimpleNamespace(leaves=set(leaves)),
        weights=lambda: [line("weights", count)],
        states=list,
        # as ZeRO has it: gradients so far in backward, otherwise those of the last micro-batch
        at=lambda where: [
            line("gradients", where.done if where.backward else 10 * count),
            line("activations", count),
            line("temporary", count),
        ],
    )
    return SimpleNamespace(
        engine=engine, trained=trained, role=SimpleNamespace(leaves=set(leaves), shares=shares, name="r")
    )


@pytest.mark.parametrize(
    ("does", "there"), [("serve", 11), ("generate", 10), ("train", 10), ("sync", 10), ("save", 10)]
)
def test_weights_that_wait_for_an_engine_stay_while_others_arrive(does: str, there: int) -> None:
    """A trained role's weights leave for the host after loading, unless they are held until vLLM has served."""
    placed = {"actor": role(1, "weights"), "critic": role(10)}
    found = staged(Stage(does, "actor", holds=("weights",)), placed=placed, names=("actor", "critic"))
    assert [sum(x.bytes for x in moment.lines) for moment in found.loading()] == [1, there]


def test_roles_arrive_after_an_engine_too() -> None:
    """Which is asleep by then."""
    found = [*staged(placed={"actor": role(1)}, names=("rollout", "actor")).loading()]
    assert [(x.at, x.engine) for x in found] == [
        *((f"rollout: {at}", at) for at in STARTING),
        ("actor: there", "asleep"),
    ]


def test_roles_that_take_turns_keep_their_gradients_alone() -> None:
    """Of what lies between two micro-batches; the frozen ones have none."""
    placed = {"actor": role(1), "critic": role(2), "reference": role(4, trained=False)}
    lines = staged(placed=placed).beside(Stage("train", "actor", alternating=True), "actor")
    assert sorted((x.component, x.bytes) for x in lines) == [("gradients", 20), ("weights", 2), ("weights", 4)]


def test_the_largest_instant_counts_what_the_engine_adds_there() -> None:
    """At each place the largest of its instants, the first of equals; 7 and 100 gathered are more than 50."""
    sizes = [("a", 5, "gathered"), ("b", 7, "gathered"), ("c", 7, "gathered"), ("d", 6, "gathered"), ("e", 50, "bare"),
             ("f", 107, "bare")]  # fmt: skip
    instants = [
        SimpleNamespace(name=n, where=w, parts=n, total=SimpleNamespace(bytes=lambda tokens, length, size=size: size))
        for n, size, w in sizes
    ]
    scored = SimpleNamespace(
        batch=(8, 4), plan=SimpleNamespace(scoring=instants), lines=lambda parts: [line("activations", 7)]
    )
    scorer = SimpleNamespace(replica=None, at=lambda w: [line("communication", 100)] if w == "gathered" else [])
    placed: Any = SimpleNamespace(scorer=scorer, s=None, role=SimpleNamespace(name="r", scoring_rows=1, shares=False))
    name, lines = staged(step=lambda *given: scored, batch=lambda *given: None).scoring(placed)
    assert (name, [x.bytes for x in lines]) == ("b", [100, 7])


def real(**fields: Any) -> Stages:
    """The stages of a job of Llama 3 8B that has one group."""
    s = job(**fields)
    (on,) = sets(Job(s, load().gpu(s.gpu)))
    return on.stages


PPO = {"task": "ppo", "prompt_len": 48, "response_len": 16, "rollout": {"engine": "hf", "n": 1}}


def test_each_stage_is_among_those_of_vllm_or_among_the_others() -> None:
    on = real(**PPO)
    phases = [{x.phase for x in on.moments(serving=serving)} for serving in (True, False)]
    assert phases == [{"load", "rollout"}, {"score", "forward", "backward", "step"}]


def test_a_root_group_that_is_gathered_leaves_the_first_layer_no_buffer_for_it() -> None:
    """Its own, or that of the model whose adapters are switched off; other instants stay."""
    sizes = {Where("gather", 0, False): 9, Where("a", 0, False): 7, Where("gather", 5, False): 5}
    instants = [
        SimpleNamespace(name=str(n), where=w, parts=(), total=SimpleNamespace(bytes=lambda tokens, length, n=n: n))
        for w, n in sizes.items()
    ]
    scored = SimpleNamespace(batch=(8, 4), plan=SimpleNamespace(scoring=instants), lines=lambda parts: [])
    scorer = SimpleNamespace(replica=None, at=lambda w: [])
    for shares, gathered, largest in ((False, set(), "9"), (False, {"r"}, "7"), (True, set(), "7")):
        found = staged(step=lambda *given: scored, batch=lambda *given: None)
        found.gathered = gathered
        role: Any = SimpleNamespace(name="r", scoring_rows=1, shares=shares)
        assert found.scoring(SimpleNamespace(scorer=scorer, s=None, role=role))[0] == largest


def test_frozen_roles_keep_their_root_from_the_start() -> None:
    """A trained one's is resharded by its backward."""
    assert real(**PPO).gathered == {"reference", "reward"}


@pytest.mark.parametrize(("every", "first"), [(False, (5, 1)), (True, (240, 48))])
def test_transformers_runs_the_prompts_then_a_token_at_a_time(
    monkeypatch: pytest.MonkeyPatch, every: bool, first: tuple[int, int]
) -> None:
    """Five prompts of 48 tokens, 131,072 bytes of cache each, then 64; logits of the last position, or of all."""
    on = real(**PPO)
    batches: list[tuple[int, int]] = []
    step_of = on.roles.step
    monkeypatch.setattr(on.roles, "step", lambda r, s, batch: (batches.append(tuple(batch)), step_of(r, s, batch))[1])
    (stage,) = [stage for stage in on.roles.keeps.stages if stage.does == "generate"]
    holds = ("clone", "units", *["prompt-logits"] * every)
    found = [(at, lines) for _, at, lines in on.generate(replace(stage, rows=5, holds=holds))]
    assert batches == [(240, 48), first, (5, 1)]
    assert [at for at, _ in found] == [
        "prompts: layer: mlp: product",
        "prompts: logits: lm_head",
        "last token: logits: lm_head",
    ]
    cached = [sum(x.bytes for x in lines if x.component == "kv_cache") for _, lines in found]
    assert cached == [240 * 131_072, 240 * 131_072, 320 * 131_072]
    handed = [{x.values["what"] for x in lines if x.source == "communication#handing"} for _, lines in found]
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


@pytest.mark.parametrize(("fields", "roots"), [({}, {"actor", "reference"}), ({"method": "lora"}, {"actor"})])
def test_a_reference_within_the_forward_gathers_a_root_of_its_own(fields: dict[str, Any], roots: set[str]) -> None:
    """Unless it is the policy without its adapters; the policy has no gradient yet while the reference runs."""
    on = real(task="dpo", sharding="fsdp2", gpus=2, **fields)
    ((at, lines),) = [(x.at, x.lines) for x in on.moments(serving=False) if x.phase == "forward"]
    assert at.startswith("reference, ")
    assert {x.role for x in lines if x.values.get("what") == "root group"} == roots
    assert not [x for x in lines if x.component == "gradients"]


def test_a_reference_runs_beside_the_last_gradients_of_an_optimizer_that_drops_them_in_backward() -> None:
    """DeepSpeed's BF16_Optimizer under ZeRO-1: fp32 sums, 4 P, and the bf16 gradients of the step before, 2 P."""
    on = real(task="dpo", gpus=2, sharding="zero1", grad_dtype="fp32", micro_batch=1, global_batch=2)
    ((at, lines),) = [(x.at, x.lines) for x in on.moments(serving=False) if x.phase == "forward"]
    assert at.startswith("reference, ")
    assert [x.bytes for x in lines if x.component == "gradients"] == [4 * P, 2 * P]


def test_what_stays_through_training_is_every_roles_share() -> None:
    """PPO under ZeRO-3: weights and states of what trains, weights of what scores, whoever computes."""
    s = parse({"model": "llama-3-8b", "task": "ppo", "framework": "openrlhf", "gpu": "h100-sxm", "gpus": 8,
               "sharding": "zero3"}, catalog=load())  # fmt: skip
    roles = Roles(s)
    stages = Stages(roles, [*roles.placed])
    assert len(roles.placed) == 4
    assert stages.resident() == sum(line.bytes for p in roles.placed.values() for line in p.engine.resident())
    served = parse({"model": "llama-3-8b", "task": "inference", "gpu": "h100-sxm"}, catalog=load())
    assert Stages(Roles(served), [*Roles(served).placed]).resident() == 0


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
    """Of what is there at some moment of backward beside weights, gradients and states."""
    stages = real(**fields)
    found = [x.lines for x in stages.moments(serving=False) if x.phase == "backward"]
    parts = ("activations", "checkpoints", "logits", "temporary")
    most = max(sum([x.bytes for x in lines if x.component in parts]) for lines in found)
    assert stages.working() <= max(sum([x.bytes for x in lines]) for lines in found)
    assert stages.working() > 0.8 * most


def test_a_forward_keeps_for_a_backward_alone() -> None:
    """Where nothing is trained, one layer's tensors pass; else all 24 layers' stay."""
    kept = []
    for optimizer in ("none", "sgd"):
        given = {"model": "qwen2.5-0.5b", "task": "sft", "gpu": "h100-sxm", "optimizer": optimizer, "loss": "fused"}
        roles = Roles(parse(given, catalog=load()))
        moments = {found.phase: found.lines for found, _ in Stages(roles, [*roles.placed]).largest(serving=False)}
        parts = ("activations", "checkpoints")
        kept.append(sum(line.bytes for line in moments["forward"] if line.component in parts))
    assert kept[1] > 10 * kept[0]
