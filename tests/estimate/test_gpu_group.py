"""A set of GPUs, counted on invented moments: range and verdict, and what is there of the process and of an engine."""

from __future__ import annotations

from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import SERVING

from calc.base.ledger import Line, Sums
from calc.base.units import GiB
from calc.catalog.catalog import load
from calc.engines.rollout import Cache
from calc.estimate import verdict
from calc.estimate.gpu_group import Shared, sets
from calc.memory import runtime
from calc.resolve.parse import parse
from calc.step.roles import Job, Memo
from calc.step.stages import Candidate, Stages

USABLE = 80 * GiB
CACHE = Cache(bytes=0, tokens=7, blocks=1, sequences=3, refusal="no room", crowded=True)


def line(component: str, count: int, *, allocated: bool = True) -> Line:
    return Line(component, "actor", count, "b", {"b": count}, "weights", allocated)


def shared(*found: Candidate, usable: int = USABLE, packing: bool = True, **fields: Any) -> Shared:
    """GPUs of one role with these moments, and nothing of a process beside them."""
    on = object.__new__(Shared)
    values: dict[str, Any] = {
        "job": SimpleNamespace(
            roles=Memo(),
            gpu=SimpleNamespace(usable_bytes=usable, architecture="Ampere"),
            s=SimpleNamespace(packing=packing, rollout=None),
            keeps=None,
        ),
        "names": ("actor",),
        "gpus": 1,
        "engine": None,
        "process": [],
        "others": 0,
        "act": None,
    }
    stages = object.__new__(Stages)
    vars(stages).update(moments=lambda serving: (x for x in found if (x.phase in SERVING) is serving), placed={})
    values["job"].roles.training = Memo()
    vars(on).update({**values, "stages": stages, **fields})
    return on


def step(*lines: Line, at: str = "somewhere", phase: str = "step") -> Candidate:
    return Candidate(phase, at, list(lines))


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
    low, above = shared(step(*lines), packing=packing, usable=usable * GiB).group().device_range
    assert (low, above / GiB) == (41 * GiB, pytest.approx(high))


@pytest.mark.usefixtures("even")
def test_the_range_begins_no_lower_than_what_tensors_take() -> None:
    """41 GiB in forward. The peak is the step's: 40, 0.4 held back, and 1.2 or 9 beside them."""
    forward = step(line("weights", 41 * GiB), phase="forward")
    for beside, low in ((1.2, 41.0), (9.0, 49.4 - 1.645 * 0.808)):
        later = step(line("weights", 40 * GiB), line("context", int(beside * GiB), allocated=False))
        assert shared(forward, later).group().device_range[0] / GiB == pytest.approx(low, abs=1e-3)


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
    found = [step(x, at=at) for at, x in (("first", one), ("second", two), ("third", two), ("last", one))]
    assert [p.moment.name for p in shared(*found).group().phases] == ["second"]


@pytest.mark.parametrize("serving", [True, False])
def test_room_is_that_of_the_moments_with_all_that_is_on_the_card(serving: bool) -> None:
    """Whichever phase leaves least: with its workspaces and what may be held back, which loading has neither of."""
    process = [line("context", GiB, allocated=False), line("workspace", GiB)]
    phases = ("load", "rollout") if serving else ("score", "backward")
    for larger in phases:
        found = [step(line("weights", (40 if name == larger else 9) * GiB), phase=name) for name in phases]
        other = step(line("weights", 70 * GiB), phase="step" if serving else "save")
        on = shared(*found, other, process=process)
        rooms = {name: verdict.room(on.moment(x).sums, USABLE) for name, x in zip(phases, found, strict=True)}
        assert on.room(serving=serving) == rooms[larger] == min(rooms.values())


def test_gpus_without_any_such_phase_have_all_their_room() -> None:
    assert shared(step(line("weights", GiB))).room(serving=True) == USABLE


def test_an_engine_awake_may_make_a_smaller_moment_the_largest() -> None:
    """Of a phase in which it changes its state: 30 of the roles beside 5 of its own, 20 beside 50."""
    engine = SimpleNamespace(
        asleep=lambda: [line("cuda_graphs", 5)], awake=lambda others: [line("kv_cache", 50)], cache=lambda others: CACHE
    )
    job = shared().job
    job.s.rollout = SimpleNamespace(sleep=True)
    asleep = Candidate("sync", "asleep", [line("weights", 30)], "asleep")
    awake = Candidate("sync", "awake", [line("weights", 20)], "all")
    same = Candidate("sync", "as much", [line("weights", 65)], "asleep")
    for found, largest in (((asleep, awake), "awake"), ((awake, asleep), "awake"), ((awake, same), "awake")):
        job.roles = Memo()
        job.roles.training = Memo()
        (phase,) = shared(*found, engine=engine, job=job).phases()
        assert (phase.moment.name, phase.moment.sums.needed) == (largest, 70)


def test_jobs_that_differ_in_vllm_alone_share_what_trainers_need_and_nothing_else() -> None:
    one, other = shared(), shared()
    vars(one)["stages"] = SimpleNamespace(largest=lambda serving: "one")
    vars(other)["stages"] = SimpleNamespace(largest=lambda serving: "other")
    other.job.roles.training = one.job.roles.training
    assert [on.largest(serving=False) for on in (one, other)] == ["one", "one"]
    assert [on.largest(serving=True) for on in (one, other)] == ["one", "other"]


@pytest.mark.parametrize(("others", "refusal"), [(0, "no room"), (USABLE, None), (USABLE + 1, None)])
def test_an_engine_that_never_gets_its_turn_refuses_nothing(others: int, refusal: str | None) -> None:
    """Where the roles before it fill the card, they are what does not fit."""
    engine = SimpleNamespace(cache=lambda given: CACHE)
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
    moment = shared(process=process).moment(step(line("weights", 100), phase=phase))
    assert moment.device_bytes == (110 if phase == "load" else 115 + 1)


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
    assert shared(engine=engine, job=job).serving("") == []  # before it has come


def test_an_engine_measures_what_came_before_it_alone() -> None:
    """The weights of roles that were there first, and their processes' context."""
    stages = SimpleNamespace(arrived=lambda name: [line("weights", {"reward": 7, "actor": 100}[name])])
    on = shared(stages=stages, names=("reward", "rollout", "actor"))
    vars(on).pop("others")
    vars(on)["processes"] = lambda names: [line("context", 10 * len(names))]
    assert on.others == 7 + 10


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
    group = shared(*[step(line("weights", count), phase=name) for name, count in names.items()]).group()
    assert (group.verdict, group.verdict_phase) == (word, phase)


# -- what is replayed -------------------------------------------------------------------------------------------------


def one(**fields: Any) -> Shared:
    """The only GPU of a real job."""
    given = {"model": "qwen2.5-0.5b", "task": "sft", "gpu": "rtx4090", "seq_len": 512, **fields}
    s = parse(given, catalog=load())
    (found,) = sets(Job(s, load().gpu(s.gpu)))
    return found


def test_what_is_there_while_steps_are_replayed() -> None:
    """The most tensors of forward, backward and step, as the ledger has them, and beside them a context of 0.47 GiB."""
    on = one()
    most = max(phase.moment.allocated_bytes for phase in on.group().phases if phase.name != "load")
    assert on.resting == Sums(most + runtime.CONTEXT, most, 0)
    assert (on.reserve.act, on.reserve.workspace) == (on.act, runtime.WORKSPACE)


def test_what_it_takes_alone_makes_a_job_hopeless_and_not_worth_a_replay() -> None:
    """In any phase. One that lacks a little is replayed as one that has a little is. Nor is one beside an engine."""
    on, usable = one(), one().job.gpu.usable_bytes
    assert {known.allocated for known in on.training} > {on.resting.allocated}
    most = usable // 2
    far = int(-runtime.REPLAYED[0] * most + verdict.SURE * verdict.deviation(most))
    fine = Sums(most, most, 0)
    for needed, asked in (
        (usable - GiB, True),
        (usable + 1, True),
        (usable + far - 1, True),
        (usable + far + 1, False),
    ):
        for found in ([Sums(needed, most, 0), fine], [fine, Sums(needed, most, 0)]):
            on = one()
            vars(on)["training"] = found
            assert (on.act is not None) is asked
    on = one()
    vars(on)["engine"] = SimpleNamespace()
    assert on.act is None


def test_cards_of_one_kind_share_a_replay_and_others_have_their_own() -> None:
    """By what cuBLAS takes, which is all of a card that a replay knows."""
    (first, second, third) = (one(gpu=gpu).reserve for gpu in ("rtx4090", "a100-80-sxm", "h100-sxm"))
    assert first is second
    assert third.workspace == runtime.WORKSPACE_HOPPER


def known(undisturbed: int, least: int, usable: int = USABLE) -> Shared:
    """GPUs whose role has 60 GiB of tensors, for which so many GiB are reserved undisturbed and at least."""
    reserve = SimpleNamespace(undisturbed=undisturbed * GiB, least=least * GiB, meets=lambda asked: asked(least * GiB))
    on = shared(step(line("weights", 60 * GiB)), act=object(), reserve=reserve, usable=usable)
    vars(on.stages).update({"resident": lambda: 0, "working": lambda: 0})
    return on


@pytest.mark.parametrize(
    ("undisturbed", "least", "reserved", "decides"),
    [
        (60, 60, 60, 60),
        (62, 61, 62, 62),  # beyond doubt, so that nobody asks how little is enough
        (74, 66, 74, 66),
        (79, 66, 66, 66),
        (90, 85, 85, 85),
        (50, 40, 60, 60),  # never less than tensors take
    ],
)
def test_a_card_that_is_too_small_for_what_is_reserved_undisturbed_may_have_what_must_be(
    undisturbed: int, least: int, reserved: int, decides: int
) -> None:
    assert known(undisturbed, least).reserved == (reserved * GiB, decides * GiB)


def test_more_memory_never_makes_a_job_less_likely_to_fit() -> None:
    """The same replay answers on both sides of what tensors take, and of what is reserved undisturbed."""
    cards = [usable * GiB // 4 for usable in range(4 * 50, 4 * 90)]
    for undisturbed, least in ((70, 64), (61, 60), (60, 60)):
        groups = [known(undisturbed, least, usable).group() for usable in cards]
        odds = [group.fit_probability for group in groups]
        assert odds == sorted(odds) and odds[0] == 0.0 and odds[-1] == 1.0
        trains = [known(undisturbed, least, usable).trains for usable in cards]
        assert trains == sorted(trains)
        # the room that a search asks for is a share of a deviation off at most
        assert abs(sum(trains) - sum(group.verdict == "fits" for group in groups)) <= 1


def test_a_larger_card_of_the_catalog_has_no_worse_a_verdict() -> None:
    """Tensors alone are more than an L40S has, for which a milder formula said tight; an RTX 6000 Ada was oom."""
    fields = {"model": "qwen2-1.5b", "task": "rm", "framework": "trl==0.7", "method": "qlora", "precision": "fp32",
              "seq_len": 8192, "micro_batch": 2}  # fmt: skip
    small, large = (one(**fields, gpu=card).group() for card in ("l40s", "rtx6000ada"))
    assert small.usable_bytes < large.usable_bytes
    assert small.peak.moment == large.peak.moment
    assert small.verdict == large.verdict == "oom"


def test_what_is_reserved_takes_the_place_of_what_is_allocated() -> None:
    on = one()
    vars(on)["resting"] = Sums(100, 70, 0)
    assert on.replayed(90) == Sums(120, 70, 0, 90)


@pytest.mark.parametrize(("room", "trains"), [(-1, False), (0, True), (1, True)])
def test_a_job_trains_where_it_has_room(room: int, trains: bool) -> None:
    on = shared(room=lambda *, serving: 5 if serving else room)
    vars(on.stages).update({"resident": lambda: USABLE, "working": lambda: USABLE})
    assert on.trains is trains


@pytest.mark.parametrize("much", ["resident", "working"])
def test_what_stays_or_what_passes_may_be_too_much_alone(much: str) -> None:
    """Then no moment is worked out."""
    on = shared(room=lambda *, serving: 5)
    vars(on.stages).update({"resident": lambda: 0, "working": lambda: 0, much: lambda: USABLE + 1})
    assert on.trains is False


@pytest.mark.parametrize(("least", "trains"), [(70, True), (79, False)])
def test_a_replay_says_whether_a_job_trains(least: int, trains: bool) -> None:
    on = known(100, least)
    assert on.trains is trains is (on.room(serving=False) >= 0)


def test_a_job_that_lacks_room_without_any_blocks_held_back_is_not_replayed_to_say_so() -> None:
    on = known(100, 70, 61 * GiB)
    vars(on).pop("reserve")
    assert on.act and not on.trains


def test_a_replay_is_the_room_of_what_trains_alone() -> None:
    """That of what must be reserved, which decides."""
    for undisturbed, least in ((74, 62), (100, 62), (100, 90)):
        on = known(undisturbed, least)
        expected = verdict.room(Sums(least * GiB, 60 * GiB, 0, least * GiB), USABLE)
        assert on.room(serving=False) == expected
        assert on.room(serving=True) == USABLE
