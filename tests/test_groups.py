"""A set of GPUs, counted on invented moments: range and verdict, and what is there of an engine and of other roles."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import P, job

from calc import verdict
from calc.catalog import load
from calc.engines.vllm import Cache
from calc.groups import Shared, sets
from calc.job import Job
from calc.keeps import Stage
from calc.ledger import Line
from calc.memory import runtime
from calc.units import GiB

USABLE = 80 * GiB
ROLES = SimpleNamespace(once=lambda what, found: found())  # nothing is kept from job to job


def line(component: str, count: int, *, allocated: bool = True) -> Line:
    return Line(component, "actor", count, "b", {"b": count}, "weights", allocated)


def shared(*moments: tuple[str, str, list[Line]], usable: int = USABLE, packing: bool = True, **fields: Any) -> Shared:
    """GPUs of one role with these moments, and nothing of a process beside them."""
    found = object.__new__(Shared)
    values: dict[str, Any] = {
        "job": SimpleNamespace(
            roles=ROLES,
            gpu=SimpleNamespace(usable_bytes=usable),
            s=SimpleNamespace(packing=packing, rollout=None),
            keeps=None,
        ),
        "names": ("actor",),
        "gpus": 1,
        "placed": {},
        "engine": None,
        "process": [],
        "around": [],
        "others": 0,
        "gathered": set(),
    }
    if moments:
        values["moments"] = lambda: iter(moments)
    vars(found).update(values | fields)
    return found


def step(*lines: Line) -> tuple[str, str, list[Line]]:
    return ("step", "somewhere", list(lines))


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that always holds back a hundredth."""
    monkeypatch.setattr(runtime, "HELD_BACK", (0.01,) * 40)
    monkeypatch.setattr(verdict, "HELD_BACK", (0.01,) * 40)
    monkeypatch.setattr(runtime, "CACHED", {"lengths vary": 3.6, "one length": 0.25})


MARGIN = verdict.RANGE * sqrt((verdict.FORMULA_SPREAD * 41) ** 2 + (verdict.CONTEXT_SPREAD / GiB) ** 2)


@pytest.mark.usefixtures("even")
@pytest.mark.parametrize(
    ("packing", "usable", "high"),
    [
        (True, 80, 41.41 + MARGIN + 0.25),
        (False, 80, 41.41 + MARGIN + 3.6),
        (False, 43, 43),
        (False, 41, 41.41 + MARGIN),
    ],
)
def test_cached_blocks_widen_the_range_upwards_and_fill_at_most_the_card(
    packing: bool, usable: int, high: float
) -> None:
    """A GiB of activations beside 40 of weights, 0.41 held back; with what may be cached, up to the card."""
    lines = (line("weights", 40 * GiB), line("activations", GiB))
    found = shared(step(*lines), packing=packing, usable=usable * GiB).group().device_range
    assert [end / GiB for end in found] == [pytest.approx(41.41 - MARGIN), pytest.approx(high)]


@pytest.mark.parametrize(
    ("probability", "word"), [(0.95, "fits"), (0.9499, "tight"), (0.5, "tight"), (0.2, "tight"), (0.1999, "oom")]
)
def test_the_verdicts_thresholds_belong_to_the_better_side(
    monkeypatch: pytest.MonkeyPatch, probability: float, word: str
) -> None:
    """At least 95 % fits, at least 20 % is tight."""
    monkeypatch.setattr(verdict, "fit_probability", lambda *given: probability)
    group = shared(step(line("weights", GiB))).group()
    assert (group.verdict, group.fit_probability) == (word, probability)
    assert group.verdict_phase == (None if word == "fits" else "step")


def test_of_equal_moments_the_first_is_shown() -> None:
    """In the order in which they come; a larger one replaces it."""
    one, two = line("weights", 100), line("weights", 200)
    moments = (("step", "first", [one]), ("step", "second", [two]), ("step", "third", [two]), ("step", "last", [one]))
    assert [p.moment.name for p in shared(*moments).group().phases] == ["second"]


@pytest.mark.parametrize(("others", "refusal"), [(0, "no room"), (USABLE, None), (USABLE + 1, None)])
def test_an_engine_that_never_gets_its_turn_refuses_nothing(others: int, refusal: str | None) -> None:
    """Where the roles before it fill the card, they are what does not fit."""
    cache = Cache(bytes=0, tokens=7, blocks=1, sequences=3, refusal="no room", crowded=True)
    engine = SimpleNamespace(cache=lambda given: cache)
    group = shared(step(line("weights", GiB)), engine=engine, others=others).group()
    assert group.refusal == refusal
    assert group.crowded == bool(refusal)
    assert (group.cache_tokens, group.cache_sequences) == (7, 3)
    assert (group.verdict, group.verdict_phase) == (("oom", "load") if refusal else ("fits", None))


def test_gpus_without_an_engine_hold_no_cache() -> None:
    group = shared(step(line("weights", GiB))).group()
    assert (group.cache_tokens, group.cache_sequences, group.refusal) == (0, 0, None)


@pytest.mark.usefixtures("even")
@pytest.mark.parametrize("phase", ["load", "rollout", "score", "forward", "backward", "step", "sync", "save"])
def test_cublas_takes_its_workspaces_in_every_phase_but_loading(phase: str) -> None:
    """At the first multiplication; the context is there from the start. Pieces are held back once blocks are freed."""
    process = [line("context", 10, allocated=False), line("workspace", 5)]
    moment = shared(process=process).moment(phase, "somewhere", [line("weights", 100)])
    assert moment.device_bytes == (110 if phase == "load" else 115 + 1)


@pytest.mark.parametrize("does", ["generate", "save", "score", "serve", "sync", "train"])
def test_an_engine_on_gpus_of_its_own_gets_weights_at_the_sync_alone(does: str) -> None:
    """What the other roles do elsewhere is nothing to it."""
    engine, job = (
        SimpleNamespace(awake=lambda others: []),
        SimpleNamespace(
            s=SimpleNamespace(rollout=SimpleNamespace(sleep=False)),
            keeps=SimpleNamespace(stages=(Stage(does, "actor"),)),
        ),
    )
    found = list(shared(engine=engine, job=job, names=()).moments())
    assert found == ([("sync", "weights arrive", [])] if does == "sync" else [])


@pytest.mark.parametrize(
    ("state", "sleeps", "expected"),
    [("all", True, "awake"), ("weights", True, "weights"), ("asleep", True, "asleep"),
     ("weights", False, "awake"), ("asleep", False, "awake")],
)  # fmt: skip
def test_what_is_there_of_an_engine(state: str, sleeps: bool, expected: str) -> None:
    """One that cannot sleep is always there whole."""
    engine = SimpleNamespace(
        awake=lambda others: [line("awake", 1)],
        with_weights=lambda: [line("weights", 1)],
        asleep=lambda: [line("asleep", 1)],
    )
    job = SimpleNamespace(s=SimpleNamespace(rollout=SimpleNamespace(sleep=sleeps)))
    assert [x.component for x in shared(engine=engine, job=job).serving(state)] == [expected]


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
    keeps = SimpleNamespace(stages=(Stage(does, "actor", holds=("weights",)),))
    placed = {"actor": role(1, "weights"), "critic": role(10)}
    found = shared(placed=placed, names=("actor", "critic"), job=SimpleNamespace(keeps=keeps))
    assert [sum(x.bytes for x in lines) for _, lines in found.loading()] == [1, there]


def test_roles_arrive_after_an_engine_too() -> None:
    """Which measures what is there before it: nothing here."""
    engine = SimpleNamespace(loading=lambda others: [("starts", [line("kv_cache", 5 + others)])])
    job = SimpleNamespace(keeps=SimpleNamespace(stages=()), s=SimpleNamespace(rollout=None))
    found = shared(
        engine=engine, job=job, placed={"actor": role(1)}, names=("rollout", "actor"), processes=lambda n: []
    )
    assert [at for at, _ in found.loading()] == ["rollout: starts", "actor: there"]


def test_roles_that_take_turns_keep_their_gradients_alone() -> None:
    """Of what lies between two micro-batches; the frozen ones have none."""
    placed = {"actor": role(1), "critic": role(2), "reference": role(4, trained=False)}
    lines = shared(placed=placed).beside(Stage("train", "actor", alternating=True), "actor")
    assert sorted((x.component, x.bytes) for x in lines) == [("gradients", 20), ("weights", 2), ("weights", 4)]


@pytest.mark.parametrize(
    ("probabilities", "word", "phase"),
    [
        ({10: 0.99, 20: 0.5, 30: 0.1}, "oom", "step"),
        ({10: 0.99, 20: 0.2, 30: 0.1}, "oom", "step"),
        ({10: 0.99, 20: 0.19, 30: 0.1}, "oom", "forward"),
        ({10: 0.99, 20: 0.9, 30: 0.5}, "tight", "forward"),
        ({10: 0.99, 20: 0.95, 30: 0.5}, "tight", "step"),
        ({10: 0.99, 20: 0.98, 30: 0.97}, "fits", None),
    ],
)
def test_the_first_phase_as_doubtful_as_the_job_is_named(
    monkeypatch: pytest.MonkeyPatch, probabilities: dict[int, float], word: str, phase: str | None
) -> None:
    """A phase that is merely tight does not stop a job that another one runs out of memory."""
    monkeypatch.setattr(verdict, "fit_probability", lambda needed, *given: probabilities[needed])
    names = {"load": 10, "forward": 20, "step": 30}
    moments = [(name, "somewhere", [line("weights", count)]) for name, count in names.items()]
    group = shared(*moments).group()
    assert (group.verdict, group.verdict_phase) == (word, phase)


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
    job = SimpleNamespace(step=lambda *given: scored, batch=lambda *given: None, roles=ROLES)
    placed: Any = SimpleNamespace(scorer=scorer, s=None, role=SimpleNamespace(name="r", scoring_rows=1, shares=False))
    name, lines = shared(job=job).scoring(placed)
    assert (name, [x.bytes for x in lines]) == ("b", [100, 7])


def real(**fields: Any) -> Shared:
    """The GPUs of a job of Llama 3 8B that has one group."""
    s = job(**fields)
    found = Job(s, load().gpu(s.gpu))
    (on,) = sets(found)
    return on


PPO = {"task": "ppo", "prompt_len": 48, "response_len": 16, "rollout": {"engine": "hf", "n": 1}}


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
    step_of = on.job.step
    monkeypatch.setattr(on.job, "step", lambda r, s, batch: (batches.append(tuple(batch)), step_of(r, s, batch))[1])
    (stage,) = [stage for stage in on.job.keeps.stages if stage.does == "generate"]
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
    found = [at for phase, at, _ in on.moments() if phase in ("backward", "step")]
    assert {at.startswith(("actor: ", "critic: ")) for at in found} == {named}


@pytest.mark.parametrize(("fields", "roots"), [({}, {"actor", "reference"}), ({"method": "lora"}, {"actor"})])
def test_a_reference_within_the_forward_gathers_a_root_of_its_own(fields: dict[str, Any], roots: set[str]) -> None:
    """Unless it is the policy without its adapters; the policy has no gradient yet while the reference runs."""
    on = real(task="dpo", sharding="fsdp2", gpus=2, **fields)
    ((at, lines),) = [(at, lines) for phase, at, lines in on.moments() if phase == "forward"]
    assert at.startswith("reference, ")
    assert {x.role for x in lines if x.values.get("what") == "root group"} == roots
    assert not [x for x in lines if x.component == "gradients"]


def test_a_reference_runs_beside_the_last_gradients_of_an_optimizer_that_drops_them_in_backward() -> None:
    """DeepSpeed's BF16_Optimizer under ZeRO-1: fp32 sums, 4 P, and the bf16 gradients of the step before, 2 P."""
    on = real(task="dpo", gpus=2, sharding="zero1", grad_dtype="fp32", micro_batch=1, global_batch=2)
    ((at, lines),) = [(at, lines) for phase, at, lines in on.moments() if phase == "forward"]
    assert at.startswith("reference, ")
    assert [x.bytes for x in lines if x.component == "gradients"] == [4 * P, 2 * P]
