"""A GPU group: range and verdict of plain phases, and on cards of any size what real jobs have there and reserve."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
from jobs import total

from calc.base.ledger import Line, Moment, Phase, Sums
from calc.base.units import GiB, MiB
from calc.catalog.catalog import load
from calc.engines.rollout import STARTING, Cache
from calc.estimate import verdict
from calc.estimate.estimate import estimate
from calc.estimate.gpu_group import PHASES, GpuGroup, Unknown, decisive, judged, peaks, sets
from calc.estimate.result import Group
from calc.memory import runtime
from calc.replay import replay
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.step.roles import Job, Memo, Roles
from calc.step.stages import Candidate, Stages

USABLE = 80 * GiB
CACHE = Cache(bytes=0, tokens=7, blocks=1, sequences=3, refusal="no room", crowded=True)


def line(component: str, count: int, *, allocated: bool = True) -> Line:
    return Line(component, "actor", count, "b", {"b": count}, "weights", allocated)


def phase(*lines: Line, name: str = "step", at: str = "somewhere") -> Phase:
    return Phase(name, Moment(at, lines))


def group(
    *phases: Phase,
    usable: int = USABLE,
    cache: Cache | None = None,
    **unknown: Any,
) -> Group:
    """Cards with these phases."""
    return judged("actor", 1, phases, usable, cache, Unknown(**unknown))


def scenario(**fields: Any) -> Scenario:
    """A job of the smallest model, SFT of short sequences unless a task is named; `__` in a name is a dot."""
    given = {name.replace("__", "."): value for name, value in fields.items()}
    short = {} if "task" in fields else {"task": "sft", "seq_len": 512}
    return parse({"model": "qwen2.5-0.5b", "gpu": "a100-80-sxm", **short, **given}, catalog=load())


def on_card(s: Scenario, mib: int | None = None) -> GpuGroup:
    """The only group of `s`, on its own card or on such a one with so much memory."""
    gpu = load().gpu(s.gpu)
    (found,) = sets(Job(s, replace(gpu, usable_mib=mib or gpu.usable_mib), Roles(s)))
    return found


VERL = {"task": "grpo", "framework": "verl", "gpus": 8}
OPENRLHF = {"task": "ppo", "framework": "openrlhf==0.6.0", "gpus": 8, "rollout__engine": "vllm", "rollout__sleep": True}
ZERO = {"gpus": 2, "sharding": "zero3"}
UNFOLLOWED = {"gpus": 2, "sharding": "zero2", "offload__optimizer": True}  # by any replay


# -- range and verdict ------------------------------------------------------------------------------------------------


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that always holds back a hundredth."""
    monkeypatch.setattr(runtime, "FRAGMENTATION", (0.01,) * 40)
    monkeypatch.setattr(verdict, "FRAGMENTATION", (0.01,) * 40)
    monkeypatch.setattr(runtime, "CACHED", {"lengths vary": 3.6, "one length": 0.25, "one segment": 0.5})


MARGIN = verdict.RANGE * sqrt((verdict.FORMULA_SPREAD * 41) ** 2 + (verdict.CONTEXT_SPREAD / GiB) ** 2)


@pytest.mark.usefixtures("even")
@pytest.mark.parametrize(
    ("caching", "usable", "high"),
    [
        ("one length", 80, 41.41 + MARGIN),
        ("one segment", 80, 41.41 + MARGIN + 0.5 - 0.41),
        ("lengths vary", 80, 41.41 + MARGIN + 3.6 - 0.41),
        ("lengths vary", 43, 43),
        ("lengths vary", 41, 41.41 + MARGIN),
    ],
)
def test_cached_blocks_widen_the_range_upwards_and_fill_at_most_the_card(
    caching: runtime.Caching, usable: int, high: float
) -> None:
    """A GiB of activations beside 40 of weights, 0.41 held back; with what more may be cached, up to the card."""
    lines = [line("weights", 40 * GiB), line("activations", GiB)]
    own = phase(*lines, runtime.fragmentation(lines))
    low, above = group(own, caching=caching, usable=usable * GiB).device_range
    assert (low, above / GiB) == (41 * GiB, pytest.approx(high))


def test_lengths_vary_unless_sequences_are_cut_and_segments_that_expand_have_room_for_each() -> None:
    """A trainer's packs are nearly full, but not quite; those of pretraining are cut at their full length."""

    def caching(**fields: object) -> runtime.Caching:
        return on_card(scenario(**ZERO, **fields)).caching

    assert caching(packing=False) == caching(packing=True) == "lengths vary"
    assert caching(packing=True, task="pretrain") == "one length"
    sampled = {"prompt_len": 512, "response_len": 1024, "rollout": {"engine": "vllm"}}
    verl = scenario(framework="verl==0.4.0", task="grpo", gpus=2, sharding="fsdp1", packing=True, **sampled)
    assert on_card(verl).caching == "lengths vary"
    assert caching(packing=False, expandable_segments=True) == "one segment"


@pytest.mark.usefixtures("even")
def test_the_range_begins_no_lower_than_what_tensors_take() -> None:
    """41 GiB in forward. The peak is the step's: 40, 0.4 held back, and 1.2 or 9 beside them."""
    forward = phase(line("weights", 41 * GiB), name="forward")
    for beside, low in ((1.2, 41.0), (9.0, 49.4 - 1.645 * 0.808)):
        lines = [line("weights", 40 * GiB), line("context", int(beside * GiB), allocated=False)]
        found = group(forward, phase(*lines, runtime.fragmentation(lines)))
        assert found.device_range[0] / GiB == pytest.approx(low, abs=1e-3)


@pytest.mark.usefixtures("even")
def test_the_range_begins_with_short_batches_where_nothing_says_how_long_the_data_are() -> None:
    """40 GiB that stay; in forward 8 of activations, 4 more of logits in backward: a quarter of these is left.

    What the allocator holds back goes with them.
    """
    forward = phase(line("weights", 40 * GiB), line("activations", 8 * GiB), name="forward")
    lines = [line("weights", 40 * GiB), line("activations", 8 * GiB), line("logits", 4 * GiB)]
    backward = phase(*lines, runtime.fragmentation(lines))
    assert group(forward, backward, least=0.25).device_range[0] == 43 * GiB
    assert group(forward, backward, least=0.25).filled_low == group(forward, backward).device_range[0] == 52 * GiB


def test_data_may_be_shorter_than_the_cap_unless_a_scenario_says_more() -> None:
    """232 tokens are the longest of the second shortest of 27 data sets, so that one in twenty is shorter.

    ms-swift, docs/source_en/Instruction/Supported-models-and-datasets.md: advertise-gen.
    """

    def least(**fields: object) -> float:
        s = scenario(**{**ZERO, "seq_len": 2048, "packing": False, **fields})
        return sets(Job(s, load().gpu(s.gpu), Roles(s)))[0].unknown.least

    assert least() == 232 / 2048
    assert least(seq_len=100) == 1
    assert least(lengths={"mean": 100, "longest": 300}) == least(packing=True) == least(task="pretrain") == 1
    # stages exchange tensors of one shape
    staged = {"model": "llama-3-8b", "framework": "torch", "sharding": "fsdp2", "pipeline_parallel": 2}
    assert least(**staged, global_batch=32) == 1


def test_shards_that_no_replay_has_followed_leave_blocks_in_the_cache() -> None:
    """0.98 times each of 2 GiB of activations, 3 gathered, 1 of gradients; 3.65 of the first where lengths vary."""
    lines = [line("activations", 2 * GiB), line("communication", 3 * GiB), line("gradients", GiB)]
    assert runtime.coming(lines) == (2 * GiB, 4 * GiB)
    assert runtime.cached(lines, "one segment", pools=True) == int(0.98 * 6 * GiB)
    assert runtime.cached(lines, "lengths vary", pools=True) == int(3.65 * 2 * GiB + 0.98 * 4 * GiB)
    own = phase(*lines)
    assert group(own, pools=True).device_range[1] - group(own).device_range[1] == int(0.98 * 6 * GiB) - 0.5 * GiB
    assert on_card(scenario(**UNFOLLOWED)).unknown.pools
    fsdp = {**ZERO, "sharding": "fsdp2", "framework": "torch"}
    assert not on_card(scenario(**fsdp)).unknown.pools
    assert on_card(scenario(**fsdp, offload__parameters=True, offload__optimizer=True)).unknown.pools


@pytest.mark.parametrize(("usable", "cached"), [(100, 0.5 * 6 - 2), (49, 49 - 48.5), (48, 0)])
def test_a_monitor_shows_what_is_usually_cached_and_the_verdict_does_without(usable: int, cached: float) -> None:
    """Half of 1 GiB of activations, 3 gathered and 2 of gradients, beside 40 of weights; 2 are lost to holes."""
    sizes = {"weights": 40, "activations": 1, "communication": 3, "gradients": 2}
    lines = [*(line(component, n * GiB) for component, n in sizes.items()), line("context", GiB // 2, allocated=False)]
    lost = Line("fragmentation", "process", 2 * GiB, "f·B", {"B": 0}, "x", False)
    loading = phase(line("communication", 9 * GiB), name="load")
    found = group(loading, phase(*lines, lost), usable=usable * GiB, usual=0.5)
    plain = group(loading, phase(*lines, lost), usable=usable * GiB)
    assert found.peak.moment.device_bytes == 48.5 * GiB
    assert found.shown_peak.moment.device_bytes == (48.5 + cached) * GiB
    assert found.shown_peak.moment.allocated_bytes == 46 * GiB
    assert found.shown[0] == loading
    assert (found.fit_probability, found.device_range) == (plain.fit_probability, plain.device_range)
    assert plain.shown == plain.phases


def test_only_what_no_replay_follows_and_was_measured_is_usually_cached() -> None:
    """ZeRO-2 with its optimizer on the host; not a job that is replayed, nor one of RL, nor FSDP 2 under a trainer."""
    assert on_card(scenario(**UNFOLLOWED)).unknown.usual == 0.52
    assert on_card(scenario(**UNFOLLOWED, expandable_segments=True)).unknown.usual == 0.37
    assert on_card(scenario(**ZERO)).unknown.usual == on_card(scenario(**OPENRLHF)).unknown.usual == 0
    assert on_card(scenario(framework="trl", gpus=2, sharding="fsdp2")).unknown.usual == 0


def test_replays_were_compared_with_nvidias_cards_alone() -> None:
    """On others the range begins with what tensors take: 40 GiB, of 44 that a replay reserves."""
    lines = [line("weights", 40 * GiB)]
    own = phase(*lines, runtime.replayed(lines, 44 * GiB, 44 * GiB))
    assert group(own, compared=False).device_range[0] == 40 * GiB < group(own).device_range[0]
    assert on_card(scenario(**ZERO)).unknown.compared
    assert not on_card(scenario(**{**ZERO, "gpu": "mi300x"})).unknown.compared


def test_batches_of_several_lengths_may_come_in_an_order_that_caches_nothing() -> None:
    """40 GiB, of 44 that a replay of one order reserves."""
    lines = [line("weights", 40 * GiB)]
    own = phase(*lines, runtime.replayed(lines, 44 * GiB, 44 * GiB))
    assert group(own, shuffled=True).device_range[0] == 40 * GiB < group(own).device_range[0]
    fuller = [line("weights", 42 * GiB)]
    later = phase(*fuller, runtime.replayed(fuller, 44 * GiB, 44 * GiB))
    assert group(own, later, shuffled=True).filled_low == 42 * GiB  # tensors of either phase were there
    fields = {"model": "qwen2.5-0.5b", "micro_batch": 2}
    assert on_card(scenario(**fields, lengths={"mean": 100, "longest": 300})).unknown.shuffled
    assert not on_card(scenario(**fields, seq_len=300)).unknown.shuffled


@pytest.mark.parametrize(
    ("probability", "word"), [(0.95, "fits"), (0.9499, "tight"), (0.5, "tight"), (0.2, "tight"), (0.1999, "oom")]
)
def test_the_verdicts_thresholds_belong_to_the_better_side(
    monkeypatch: pytest.MonkeyPatch, probability: float, word: str
) -> None:
    """At least 95 % fits, at least 20 % is tight."""
    monkeypatch.setattr(verdict, "fit_probability", lambda *given: probability)
    found = group(phase(line("weights", GiB)))
    assert (found.verdict, found.fit_probability) == (word, probability)
    assert found.verdict_phase == (None if word == "fits" else "step")


@pytest.mark.parametrize(
    ("probabilities", "word", "first"),
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
    monkeypatch: pytest.MonkeyPatch, probabilities: dict[int, float], word: str, first: str | None
) -> None:
    """A phase that is merely tight does not stop a job that another one runs out of memory."""
    monkeypatch.setattr(verdict, "fit_probability", lambda needed, *given: probabilities[needed])
    names = {"load": 10, "forward": 20, "step": 30}
    found = group(*[phase(line("weights", count), name=name) for name, count in names.items()])
    assert (found.verdict, found.verdict_phase) == (word, first)


def test_a_refusal_is_a_verdict_of_its_own() -> None:
    """vLLM does not start, though all would fit; its cache is shown all the same."""
    found = group(phase(line("weights", GiB)), cache=CACHE)
    assert (found.verdict, found.verdict_phase, found.fit_probability) == ("oom", "load", 0.0)
    assert (found.refusal, found.crowded, found.cache_tokens, found.cache_sequences) == ("no room", True, 7, 3)


def test_gpus_without_an_engine_hold_no_cache() -> None:
    found = group(phase(line("weights", GiB)))
    assert (found.cache_tokens, found.cache_sequences, found.refusal, found.crowded) == (0, 0, None, False)
    assert (found.verdict, found.verdict_phase) == ("fits", None)


# -- what is on a card ------------------------------------------------------------------------------------------------


def test_each_phase_shows_its_largest_instant_the_first_of_equals() -> None:
    """In the order of a job, whatever that of the instants."""
    given = [("step", "a", 100), ("step", "b", 200), ("step", "c", 200), ("load", "d", 300), ("step", "e", 100)]
    found = peaks([phase(line("weights", count), name=name, at=at) for name, at, count in given])
    assert [(one.name, one.moment.name) for one in found] == [("load", "d"), ("step", "b")]
    assert [one.name for one in peaks([phase(name=name) for name in PHASES[::-1]])] == [*PHASES]


def test_an_engine_awake_may_make_a_smaller_moment_the_largest() -> None:
    """verl 0.2 syncs as vLLM sleeps, and once its weights are there: the roles have less then, the card more."""
    moved = {"offload__parameters": True, "offload__optimizer": True, "rollout__tensor_parallel": 1}
    on = on_card(scenario(task="ppo", framework="verl==0.2", gpus=2, **moved))
    every = [x for serving in (True, False) for x in on.stages.moments(serving=serving)]
    most = {name: max(on.moment(x).device_bytes for x in every if x.phase == name) for name in PHASES}
    assert {one.name: one.moment.device_bytes for one in on.phases()} == most
    asleep, awake = [x for x in every if x.phase == "sync"]
    assert (asleep.engine, awake.engine) == ("asleep", "weights")
    assert total(asleep.lines) > total(awake.lines)
    assert on.moment(asleep).device_bytes < on.moment(awake).device_bytes


@pytest.mark.parametrize(
    ("fields", "serving", "decides"),
    [
        (ZERO, True, "load"),
        (OPENRLHF, True, "sync"),
        (VERL, True, "rollout"),
        (ZERO | {"seq_len": 64}, False, "step"),
        (ZERO | {"seq_len": 8192, "checkpointing": "full"}, False, "backward"),
        (VERL, False, "backward"),
    ],
)
def test_room_is_that_of_the_phase_that_leaves_least(fields: dict[str, Any], serving: bool, decides: str) -> None:
    """With all that is on the card at its instants, vLLM and what may be held back among it."""
    on = on_card(scenario(**fields))
    found = [*on.stages.moments(serving=serving)]
    rooms = [verdict.room(on.moment(one).sums, on.job.gpu.usable_bytes) for one in found]
    assert on.room(serving=serving) == min(rooms)
    assert found[rooms.index(min(rooms))].phase == decides


def test_gpus_without_any_such_phase_have_all_their_room() -> None:
    on = on_card(scenario(task="inference"))
    assert on.room(serving=False) == on.job.gpu.usable_bytes


def test_jobs_that_differ_in_vllm_alone_share_what_trainers_need_and_nothing_else() -> None:
    known = Memo()
    each = [scenario(**VERL, rollout__gpu_memory_utilization=share) for share in (0.4, 0.6)]
    one, other = (sets(Job(s, load().gpu(s.gpu), Roles(s, known)))[0] for s in each)
    assert one.largest(serving=False) is other.largest(serving=False)
    assert one.largest(serving=True) is not other.largest(serving=True)


@pytest.mark.parametrize(("less", "refused"), [(-1, True), (0, False)])
def test_an_engine_that_never_gets_its_turn_refuses_nothing(less: int, refused: bool) -> None:
    """Where the roles before it fill the card, they are what does not fit."""
    s = scenario(**VERL)
    on = on_card(s, on_card(s).others // MiB - less)
    found = on.group()
    assert (found.refusal is not None) is found.crowded is refused
    assert (found.verdict, found.verdict_phase) == ("oom", "load")


@pytest.mark.parametrize("name", PHASES)
def test_cublas_takes_its_workspaces_in_every_phase_but_loading(name: str) -> None:
    """At the first multiplication; the context is there from the start. Pieces are held back once blocks are freed."""
    on = on_card(scenario(**UNFOLLOWED))
    found = on.moment(Candidate(name, "somewhere", [line("weights", GiB), line("gradients", 0)]))
    expected = {"context", "nccl", "weights"}
    assert {x.component for x in found.lines} == (
        expected if name == "load" else expected | {"workspace", "fragmentation"}
    )
    workspaces = runtime.WORKSPACES * runtime.WORKSPACE
    lost = 0 if name == "load" else int(runtime.FRAGMENTATION[runtime.MIDDLE] * (GiB + workspaces))
    assert found.fragmentation == lost


def test_what_is_there_of_an_engine() -> None:
    """One that cannot sleep is always there whole, before it has come nothing is."""
    on, whole = on_card(scenario(**VERL)), on_card(scenario(**VERL, rollout__sleep=False))
    assert on.engine and whole.engine
    assert on.serving("all") == on.engine.awake(on.others)
    assert on.serving("weights") == on.engine.with_weights()
    assert on.serving("asleep") == on.engine.asleep() != on.serving("weights") != on.serving("all")
    for state in ("all", "weights", "asleep"):
        assert whole.serving(state) == whole.engine.awake(whole.others)
    for shared in (on, whole):
        assert [shared.serving(at) for at in STARTING] == [shared.engine.starting(at, shared.others) for at in STARTING]  # type: ignore[union-attr]
        assert shared.serving("") == []
    assert on_card(scenario()).serving("all") == []


def test_an_engine_measures_what_came_before_it_alone() -> None:
    """The weights of roles that were there first, and their processes' context."""
    job = on_card(scenario(**OPENRLHF)).job
    on = GpuGroup(job, ("reward", "rollout", "actor"), 8)
    reward = job.placed["reward"].engine.replica
    assert on.others == 2 * reward.parameters + total(runtime.process("Ampere", 2, nvlink=True))
    assert GpuGroup(job, ("rollout", "reward", "actor"), 8).others == total(
        runtime.process("Ampere", 0, nvlink=True, processes=0)
    )


# -- what is replayed -------------------------------------------------------------------------------------------------


def test_what_is_there_while_steps_are_replayed() -> None:
    """The most tensors of forward, backward and step, as the ledger has them, and beside them a context of 0.47 GiB."""
    on = on_card(scenario())
    most = max(one.moment.allocated_bytes for one in on.group().phases if one.name != "load")
    assert on.resting == Sums(most + runtime.CONTEXT, most, 0)
    assert (on.reserve.act, on.reserve.workspace) == (on.act, runtime.WORKSPACE)


def test_what_is_reserved_takes_the_place_of_what_is_allocated() -> None:
    """And is never less."""
    on = on_card(scenario())
    needed, most, *_ = on.resting
    assert on.replayed(most + 20) == Sums(needed + 20, most, 0, most + 20)
    assert on.replayed(most - 20) == on.replayed(0) == Sums(needed, most, 0, most)


def test_what_it_takes_alone_makes_a_job_hopeless_and_not_worth_a_replay() -> None:
    """In any phase. One that lacks a little is replayed as one that has a little is."""
    s = scenario(seq_len=4096)
    training = on_card(s).training
    needed, most, *_ = max(training)
    assert needed > max(training[0].needed, training[-1].needed)  # neither the first phase nor the last
    limit = needed + int(runtime.REPLAYED[0] * most - verdict.SURE * verdict.deviation(most))
    for mib, asked in (
        (needed // MiB + 1024, True),
        (needed // MiB, True),
        (-(-limit // MiB), True),
        (limit // MiB, False),
    ):
        assert (on_card(s, mib).act is not None) is asked


def test_an_answer_without_a_replay_has_the_same_tensors_and_a_share_for_fragmentation() -> None:
    """Line by line, in every phase; loading has no fragmentation at all."""
    replayed, ledger = (estimate(scenario(), replays=word) for word in (True, False))
    for one, other in zip(replayed.groups[0].phases, ledger.groups[0].phases, strict=True):
        tensors = [[line for line in p.moment.lines if line.component != "fragmentation"] for p in (one, other)]
        assert (one.name, one.moment.name, tensors[0]) == (other.name, other.moment.name, tensors[1])
        sources = [p.moment.lines[-1].source for p in (one, other) if p.name != "load"]
        assert sources == ([] if one.name == "load" else ["runtime#replay", "runtime#fragmentation"])


def test_cards_of_one_kind_share_a_replay_and_others_have_their_own() -> None:
    """By what cuBLAS takes, which is all of a card that a replay knows."""
    (first, second, third) = (on_card(scenario(gpu=gpu)).reserve for gpu in ("rtx4090", "a100-80-sxm", "h100-sxm"))
    assert first is second
    assert third.workspace == runtime.WORKSPACE_HOPPER


@pytest.mark.parametrize(
    ("card", "undisturbed", "least"),
    [
        (20, True, False),  # beyond doubt, so that nobody asks how little is enough
        (8.5, True, True),
        (7, False, True),
        (4, False, True),
    ],
)
def test_a_card_that_is_too_small_for_what_is_reserved_undisturbed_may_have_what_must_be(
    card: float, undisturbed: bool, least: bool
) -> None:
    """5.9 GiB undisturbed, 5.0 at least."""
    on = on_card(scenario(), int(card * 1024))
    most, enough = on.reserve.undisturbed, on.reserve.least
    assert most > enough + GiB // 2 and enough > on.resting.allocated
    assert on.reserved == (most if undisturbed else enough, enough if least else most)
    shown = on.group().peak.moment
    assert shown.fragmentation == on.reserved[0] - shown.allocated_bytes
    assert shown.sums.replayed == on.reserved[1]


@pytest.mark.parametrize("length", [128, 512, 4096])
def test_more_memory_never_makes_a_job_less_likely_to_fit(length: int) -> None:
    """The same replay answers on both sides of what tensors take, and of what is reserved undisturbed."""
    s = scenario(seq_len=length)
    most = on_card(s).resting.allocated // MiB
    cards = [on_card(s, mib) for mib in range(most - 4096, most + 8192, 64)]
    groups = [on.group() for on in cards]
    odds = [found.fit_probability for found in groups]
    assert odds == sorted(odds) and odds[0] == 0.0 and odds[-1] == 1.0
    trains = [on.trains for on in cards]
    assert trains == sorted(trains) == [on.room(serving=False) >= 0 for on in cards]
    # the room that a search asks for is a share of a deviation off at most
    assert abs(sum(trains) - sum(found.verdict == "fits" for found in groups)) <= 1


def test_a_larger_card_of_the_catalog_has_no_worse_a_verdict() -> None:
    """Tensors alone are more than an L40S has, for which a milder formula said tight; an RTX 6000 Ada was oom."""
    fields = {"model": "qwen2-1.5b", "task": "rm", "framework": "trl==0.7", "method": "qlora", "precision": "fp32",
              "seq_len": 8192, "micro_batch": 2}  # fmt: skip
    small, large = (on_card(scenario(**fields, gpu=card)).group() for card in ("l40s", "rtx6000ada"))
    assert small.usable_bytes < large.usable_bytes
    assert small.peak.moment == large.peak.moment
    assert small.verdict == large.verdict == "oom"


@pytest.mark.parametrize("fields", [{"seq_len": 4096}, ZERO, VERL, {"task": "ppo"}])
def test_a_job_trains_where_it_has_room(fields: dict[str, Any]) -> None:
    """To the MiB; what is free beside what stays and what passes is no less than its room."""
    s = scenario(**fields)
    low, high = 0, load().gpu(s.gpu).usable_mib
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if on_card(s, middle).room(serving=False) >= 0 else (middle, high)
    for mib, trains in ((low - 64, False), (low, False), (high, True), (high + 64, True)):
        on = on_card(s, mib)
        assert on.trains is trains
        assert on.free_at_most >= on.room(serving=False)


def test_what_stays_may_be_too_much_alone_or_with_what_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no moment is worked out."""
    s = scenario(seq_len=4096)
    stages = on_card(s).stages
    resident, working = stages.resident(), stages.working()
    assert working > 1.5 * resident
    monkeypatch.setattr(Stages, "moments", lambda *given, **named: pytest.fail("a moment is worked out"))
    for much in (resident, working):
        assert on_card(s, much // MiB).trains is False


def test_a_job_that_lacks_room_without_any_blocks_held_back_is_not_replayed_to_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "reserve", lambda *given: pytest.fail("it is replayed"))
    s = scenario()
    on = on_card(s, on_card(s).resting.needed // MiB + 512)
    assert on.act and not on.trains


def test_a_replay_is_the_room_of_what_trains_alone() -> None:
    """That of what must be reserved, which decides."""
    for card in (20, 8.5, 7):
        on = on_card(scenario(), int(card * 1024))
        usable = on.job.gpu.usable_bytes
        assert on.reserved
        assert on.room(serving=False) == verdict.room(on.replayed(on.reserved[1]), usable)
        (loading,) = on.stages.moments(serving=True)
        assert on.room(serving=True) == verdict.room(on.moment(loading).sums, usable)


EDGE = {"model": "qwen2.5-1.5b", "task": "sft", "gpu": "rtx4090", "framework": "torch", "seq_len": 4096}


def test_a_job_of_more_events_than_a_replay_may_have_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answer as where nobody asks for replays, and one line that says so."""
    s = parse(EDGE)
    known, ledger = estimate(s), estimate(s, replays=False)
    assert known.groups[0].events > 0 and known.groups[0].peak != ledger.groups[0].peak
    assert ledger.provisional and not known.provisional
    monkeypatch.setattr(replay, "MOST", 1000)
    found = estimate(s)
    assert found.groups == (replace(ledger.groups[0], notes=found.groups[0].notes, provisional=False),)
    (note,) = set(found.notes) - set(ledger.notes)
    assert note.startswith("the allocator is not replayed: that would take more than 1,000 events")


def test_a_search_that_ends_early_is_said_where_the_least_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """No less is asked for then; where there is room for all that is reserved undisturbed nothing was sought."""
    s, roomy = parse(EDGE), parse(EDGE | {"gpu": "h200"})
    known, easy = estimate(s), estimate(roomy)
    monkeypatch.setattr(replay, "SOUGHT", 0)
    replay.reserve.cache_clear()
    found = estimate(s)
    (note,) = set(found.notes) - set(known.notes)
    assert note.startswith("the allocator may need up to ") and note.endswith("would take more than 0 events")
    assert found.fit_probability <= known.fit_probability
    assert estimate(roomy) == easy
    replay.reserve.cache_clear()


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_of_equal_stages_the_first_decides(micro: int, checkpointing: str) -> None:
    """However many micro batches a step has: the room that is left, and whether vLLM starts, follow from fewer groups.

    Eight stages of as many layers; the first, the second and the last differ.
    """
    job = of_stages(framework="verl", task="grpo", model="llama-3.1-70b", gpus=64, tensor_parallel=8,
                    sharding="megatron", checkpointing=checkpointing, micro_batch=1, global_batch=micro,
                    rollout={"batch": micro, "n": 1})  # fmt: skip
    few, every = decisive(job), sets(job)
    assert [each.names for each in few] == [each.names for each in (every[0], every[1], every[-1])]
    for serving in (True, False):
        assert min(e.room(serving=serving) for e in few) == min(e.room(serving=serving) for e in every)
    assert min(e.free_at_most for e in few) == min(e.free_at_most for e in every)
    assert [e.cache() for e in few[1:2]] == [e.cache() for e in every[2:3]]


def test_shallow_stages_are_all_asked() -> None:
    """Two layers of a stage keep no more than the tensors that loops hold."""
    job = of_stages(framework="torch", trainer="megatron", task="sft", model="llama-3.2-1b", gpus=8, micro_batch=1,
                    global_batch=32, seq_len=2048)  # fmt: skip
    assert len(decisive(job)) == len(sets(job)) == 8


def of_stages(**fields: Any) -> Job:
    """A job in eight pipeline stages."""
    s = parse({"gpu": "h100-sxm", "pipeline_parallel": 8, **fields})
    return Job(s, load().gpu(s.gpu), Roles(s))


@pytest.mark.parametrize(("ranks", "nccl"), [(1, 0), (2, 1)])
def test_vllm_in_the_trainers_process_has_a_communicator_of_its_own(ranks: int, nccl: int) -> None:
    """vLLM's `init_model_parallel_group` makes new groups; the CUDA context is the trainer's, whose line it stays."""
    fields = {"model": "qwen2.5-0.5b", "task": "grpo", "framework": "verl==0.4.0", "gpu": "h100-sxm", "gpus": 8,
              "rollout": {"tensor_parallel": ranks}}  # fmt: skip
    (own,) = sets(Job(parse(fields), load().gpu("h100-sxm")))
    found = [line.component for line in own.process if line.role == "rollout"]
    assert found == ["nccl"] * nccl
    assert own.engine and own.engine.growth == sum(x.bytes for x in own.process if x.role == "rollout")
