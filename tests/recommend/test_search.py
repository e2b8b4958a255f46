"""The search finds what trying everything finds; and the properties by which it passes configurations over."""

from __future__ import annotations

from itertools import islice, product
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import SERVING
from problems import searches

from calc.base.ledger import most
from calc.base.units import GiB
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.estimate.verdict import FITS
from calc.recommend.clock import digits
from calc.recommend.failing import _least
from calc.recommend.problem import Problem
from calc.recommend.search import Found, Place, Search, room
from calc.recommend.simplicity import Effort, effort, efforts
from calc.recommend.space import SHARE, _branches, with_whole_sequences
from calc.replay import replay
from calc.scenario.scenario import on_card

PPO: dict[str, Any] = {"model": "llama-3.2-3b", "task": "ppo", "gpu": "a100-80-sxm", "gpus": 4, "framework": "openrlhf"}


def a_search(job: dict[str, Any]) -> Search:
    problem = Problem(job, load())
    found = problem.search(problem.rungs[0])
    assert found
    return found


def further(place: Place, axis: int) -> Place:
    """The place one step further along an axis."""
    return (*place[:axis], place[axis] + 1, *place[axis + 1 :])


def effort_of(search: Search, found: Found) -> Effort:
    branch = search.branches[found.branch]
    return dict((turn, effort) for effort, turn in efforts(branch))[found.place[: branch.turns]]


def simplest(search: Search) -> Found | None:
    """The configuration that the search is to find, by trying everything."""
    every = {found: effort_of(search, found) for found in search.every()}
    every = {f: e for f, e in every.items() if not search.branches[f.branch].alone} or every
    while every:
        limit = search.limit(min(every, key=lambda f: f.seconds))
        best = min([f for f in every if f.seconds <= limit], key=lambda f: (every[f], f.rank))
        one = every[best]._replace(ranks=1)
        if not search.clock.slow_links or every[best].ranks == 1 or one not in every.values():
            return best
        every = {f: e for f, e in every.items() if e.ranks == 1 or e._replace(ranks=1) != one}
    return None


@settings(max_examples=25)  # each takes half a second
@given(searches(400))
def test_pruned_and_exhaustive_search_agree(both: tuple[Search, Search]) -> None:
    """By effort, then by rank: the time to three digits, then the room; two configurations may share both."""
    pruned, exhaustive = both
    anything, best, first = pruned.any(), pruned.best(), simplest(exhaustive)
    assert anything is (first is not None)
    assert pruned.considered <= exhaustive.considered
    if best:
        assert first
        assert (effort_of(pruned, best), best.rank) == (effort_of(exhaustive, first), first.rank)
        assert pruned.chosen(best).estimate.verdict == "fits"
    else:
        assert first is None


@settings(max_examples=40)
@given(searches(4000), st.data())
def test_a_step_takes_no_less_time_further_along_an_axis(both: tuple[Search, Search], data: st.DataObject) -> None:
    search, _ = both
    for _ in range(10):
        b, place, axis = a_place(search, data)
        behind = further(place, axis)
        if search.scenario(b, place) and search.scenario(b, behind):
            assert search.bound(b, place) <= search.bound(b, behind)


@settings(max_examples=40)
@given(searches(4000), st.data())
def test_nothing_holds_less_than_the_place_that_the_search_asks_for_all(
    both: tuple[Search, Search], data: st.DataObject
) -> None:
    """Whatever is recomputed, however large the micro batch, and whatever vLLM does: where it never sleeps, OpenRLHF's
    trainers do not, either, and hold more.
    """
    search, _ = both
    for _ in range(6):
        b, place, _ = a_place(search, data)
        branch = search.branches[b]
        draws = [[*range(last + 1)] for last in branch.leanest]
        for n, axis in enumerate(branch.axes[: branch.turns]):
            draws[n] = draws[n] if axis.name == "checkpointing" else [place[n]]
        places = [place, *[tuple(data.draw(st.sampled_from(each)) for each in draws) for _ in range(3)]]
        alike = [(n, place) for n, own in enumerate(search.branches) if own.axes == branch.axes]
        asked = [at for at in (*[(b, at) for at in places], *alike[:3]) if search.held(*at) == search.held(b, place)]
        assert len(asked) >= len(places)
        lean = search.fit(b, (*place[: branch.turns], *branch.leanest[branch.turns :]))
        fits = [fit for at in asked if (fit := search.fit(*at))]
        assert all(lean is None or fit.beside_resident <= lean.beside_resident for fit in fits)


@settings(max_examples=60)
@given(searches(4000), st.data())
def test_no_more_is_resident_where_more_leaves_the_gpus(both: tuple[Search, Search], data: st.DataObject) -> None:
    """A search passes over all that holds more than what is too much."""
    search, _ = both
    for _ in range(6):
        b, place, axis = a_place(search, data)
        leaner = further(place, axis)
        one, other = search.fit(b, place), search.fit(b, leaner)
        if axis < search.branches[b].turns and one and other:
            assert one.beside_resident <= other.beside_resident


@settings(max_examples=10)
@given(searches(400))
def test_the_closest_miss_lacks_least_of_all_that_were_looked_at_or_ruled_out(both: tuple[Search, Search]) -> None:
    """Though most are passed over by a bound."""
    search, _ = both
    if search.best():
        return
    nearest = _least([search])
    looked = [(b, fit, bound) for b, place, bound in list(search.lacking()) if (fit := search.fit(b, place))]
    assert all(fit.slack <= bound for _, fit, bound in looked)
    made = [(b, fit) for b, fit, _ in looked]
    lack = [f.slack - f.short for b, f in made if f.slack < 0 or not (f.too_lean and search.branches[b].shares)]
    if nearest and lack:
        assert nearest.judged.slack - nearest.judged.short == max(lack)


@settings(max_examples=40)
@given(searches(4000), st.data())
def test_what_fits_on_the_device_fits_with_leaner_values_too(both: tuple[Search, Search], data: st.DataObject) -> None:
    search, _ = both
    for _ in range(6):
        b, place, axis = a_place(search, data)
        if axis < search.branches[b].turns:
            continue
        lean = further(place, axis)
        one, other = search.fit(b, place), search.fit(b, lean)
        if one and other:
            assert other.on_device or not one.on_device
            if search.branches[b].axes[axis].name == SHARE and one.too_lean:
                assert other.too_lean


@settings(max_examples=40)
@given(searches(4000), st.data())
def test_how_a_configuration_fits_is_what_its_estimate_says(both: tuple[Search, Search], data: st.DataObject) -> None:
    """The search asks for less than an estimate, and shares it between cards: both must come to the same."""
    search, _ = both
    for _ in range(8):
        b, place, _ = a_place(search, data)
        judged, fit = search.judged(b, place), search.fit(b, place)
        if judged is None or fit is None:
            continue
        e = judged.estimate
        assert fit.training <= fit.training_at_most
        assert fit.slack == min(room(g, p) for g in e.groups for p in g.phases) <= fit.spare
        assert fit.trains is (fit.training >= 0)  # what stays is never too much where all that trains is not
        assert search.host_lacks(b, place) <= fit.short == max(0, e.host_peak - search.host.bytes)
        assert (fit.refused, fit.crowded) == (any(g.refusal for g in e.groups), any(g.crowded for g in e.groups))
        if fit.slack >= 0 and not e.on_host:
            assert (e.fit_probability >= FITS) is not fit.refused


EDGE: dict[str, Any] = {"model": "qwen2.5-1.5b", "task": "sft", "gpu": "rtx4090", "gpus": 1, "framework": "torch"}


def test_room_is_compared_with_a_bound_without_being_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations at the edge of a card, each with several bounds: as their room says, and with fewer replays."""
    tried, go = list[int](), replay.Reserve._try

    def counted(self: replay.Reserve, limit: int) -> bool:
        tried.append(limit)
        return go(self, limit)

    monkeypatch.setattr(replay.Reserve, "_try", counted)
    for cache in (replay.reserve, _branches):
        cache.cache_clear()
    search = a_search({**EDGE, "seq_len": 4096, "method": "lora", "optimizer": "adamw", "global_batch": 16})
    fits = [*islice((fit for at in search.branches[0].places() if (fit := search.fit(0, at)) and fit.trains), 3)]
    more = {(fit, room): fit.leaves(room) for fit in fits for room in (-1, GiB, 2 * GiB)}
    before = len(tried)
    assert more == {(fit, room): fit.training > room for fit, room in more}
    assert before < len(tried)


@settings(max_examples=30)
@given(searches(4000), st.data())
def test_a_bound_is_the_time_with_the_largest_cache(both: tuple[Search, Search], data: st.DataObject) -> None:
    """Though its halves are computed for different configurations; of a card without a rate it counts steps."""
    search, _ = both
    for _ in range(12):
        b, place, _ = a_place(search, data)
        s = search.scenario(b, place)
        if s and search.rated:
            whole = sum(search.clock.split(s))
            bound = search.bound(b, place)
            assert bound == inf if whole == inf else bound == pytest.approx(digits(whole), rel=0.006)
            # without the time in which vLLM generates, which is known from another place, all else is the same
            assert whole == inf or search.clock.split(s, served=False).rest == pytest.approx(search.clock.split(s).rest)
            assert search.reaches(b, place, bound) and (whole == inf or not search.reaches(b, place, bound / 2))
            judged, fit = search.judged(b, place), search.fit(b, place)
            if judged and fit and fit.fits:
                assert fit.cache_tokens == judged.cache_tokens
                assert search.clock.seconds(s, fit.cache_tokens) >= bound * 0.994


def a_place(search: Search, data: st.DataObject) -> tuple[int, tuple[int, ...], int]:
    """A place, and an axis along which it is not the last."""
    b = data.draw(st.sampled_from([n for n, branch in enumerate(search.branches) if branch.size > 1] or [0]))
    leanest = search.branches[b].leanest
    open_axes = [n for n, last in enumerate(leanest) if last] or [len(leanest) - 1]
    axis = data.draw(st.sampled_from(open_axes))
    place = tuple(data.draw(st.integers(0, max(0, last - (n == axis)))) for n, last in enumerate(leanest))
    return (b, place, axis) if leanest[axis] else (b, (*place[:axis], -1), axis)


@pytest.mark.parametrize(
    "job",
    [
        PPO,
        {"model": "qwen2.5-1.5b", "task": "grpo", "gpu": "l40s", "gpus": 4, "framework": "verl"},
        {"model": "qwen2.5-1.5b", "task": "grpo", "gpu": "l40s", "gpus": 4, "framework": "trl"},
    ],
)
def test_while_vllm_sleeps_trainers_need_the_same_whatever_its_settings(job: dict[str, Any]) -> None:
    search = a_search(job)
    trainers: dict[Any, set[tuple[int, ...]]] = {}
    servers: dict[Any, set[tuple[int, ...]]] = {}
    for b, branch in enumerate(search.branches):
        for n, place in enumerate(branch.places()):
            s = branch.at(place) if n % 7 == 0 else None
            if s and s.rollout and (s.rollout.sleep or s.placement == "separate"):
                # one that shares nothing with the others
                e = estimate(on_card(s, search.clock.gpu.id))
                phases = [p for g in e.groups for p in g.phases]
                trains = tuple(p.moment.device_bytes for p in phases if p.name not in SERVING)
                serves = tuple(p.moment.device_bytes for p in phases if p.name in SERVING)
                trainers.setdefault(search.trainer(b, place), set()).add(trains)
                servers.setdefault(search.server(b, place), set()).add(serves)
    assert max(map(len, trainers.values())) == 1
    assert max(map(len, servers.values())) == 1
    assert len(trainers) > 10


def test_most_configurations_of_a_large_space_are_never_computed() -> None:
    search = a_search(PPO)
    assert search.best()
    assert search.size > 3000
    assert search.considered < 60


def test_a_share_of_the_free_memory_buys_a_cache_that_others_make_smaller() -> None:
    """verl 0.2's worker of vLLM takes its share of what is free: bounds tie where times do not."""
    job = {
        "model": "gemma-2-9b", "task": "ppo", "gpu": "rtx4090", "framework": "verl==0.2", "gpus": 16, "method": "full",
        "prompt_len": 1024, "response_len": 256, "roles.reference": {}, "rollout.tensor_parallel": 2,
        "placement": "colocated", "micro_batch": 2,
    }  # fmt: skip
    best, first = a_search(job).best(), min(a_search(job).every(), key=lambda f: f.rank)
    assert best
    assert best.rank == first.rank


CUT: dict[str, Any] = {
    "model": "qwen3-30b-a3b", "task": "grpo", "gpu": "h100-sxm", "gpus": 32, "framework": "slime", "method": "full",
    "tensor_parallel": 2, "pipeline_parallel": 8, "expert_parallel": 1, "rollout.tensor_parallel": 1,
    "rollout.gpu_memory_utilization": 0.9, "placement": "colocated", "checkpointing": "none",
}  # fmt: skip


def test_small_micro_batches_are_found_behind_large_ones_that_keep_stages_waiting() -> None:
    """Once nothing within 164 s: eight stages idle most of a step of few micro batches, which bounded all others."""
    search = a_search(CUT)
    best, first = search.best(), min(a_search(CUT).every(), key=lambda f: f.rank)
    assert best
    assert best.rank == first.rank
    (branch,) = {found.branch for found in (best, first)}
    bounds = [search.bound(branch, (0, n)) for n in range(len(search.branches[branch].axes[-1].values))]
    times = [search.time(branch, (0, n)) for n in range(len(bounds))]
    assert bounds == sorted(bounds)
    assert times[0] > search.limit(best) > times[-1]
    assert bounds[-1] == times[-1]


def test_of_places_that_generate_for_too_long_nothing_else_is_timed() -> None:
    search = a_search({name: value for name, value in CUT.items() if name not in ("tensor_parallel", "checkpointing")})
    assert not search.within(0.0)
    assert len(search.clock._rests) <= len(search.clock._rollouts) < len({branch.kin for branch in search.branches})


@pytest.mark.parametrize("job", [PPO, CUT], ids=["zero", "megatron"])
def test_efforts_are_those_of_the_scenarios(job: dict[str, Any]) -> None:
    """The weights of a frozen role that leave the card by themselves count, too."""
    search = a_search(job)
    for b, branch in enumerate(search.branches):
        for asked, turn in efforts(branch):
            if s := search.scenario(b, (*turn, *branch.leanest[branch.turns :])):
                frozen = sum(own.get("offload.parameters", False) for own in s.roles.values() if isinstance(own, dict))
                there = [own for own in branch.base.roles.values() if isinstance(own, dict)]
                usual = sum(own.get("offload.parameters", False) for own in there)
                known = effort(s)
                assert asked == known._replace(offloaded=known.offloaded + frozen - usual)


def test_what_a_framework_refuses_is_no_place_of_a_search() -> None:
    """slime's SGLang always sleeps: places without, whose bound is 0, were all looked at, 23,043 of them."""
    given = {name: value for name, value in CUT.items() if name not in ("checkpointing", "placement")}
    search = a_search(given)
    assert "rollout.sleep" not in {axis.name for branch in search.branches for axis in branch.axes}
    assert search.best()
    assert search.considered < search.size / 2


@pytest.mark.parametrize("framework", ["verl", "slime"])
def test_stages_of_megatron_core_are_searched_by_the_same_properties(framework: str) -> None:
    """Bounds never fall; what leaves the GPUs between two updates changes neither of them, and adds to no phase; what
    is recomputed changes nothing on the host.
    """
    job = {name: value for name, value in CUT.items() if name.startswith(("model", "task", "gpu", "method", "tensor"))}
    cut = {"pipeline_parallel": 4, "expert_parallel": 4, "rollout.tensor_parallel": 2, "placement": "colocated"}
    search = a_search({**job, **cut, "framework": framework, "sharding": "megatron"})
    updates: dict[Any, set[bool]] = {}
    for b, branch in enumerate(search.branches):
        for place in [*branch.places()][:: max(1, branch.size // 20)]:
            bound = search.bound(b, place)
            for axis in [n for n, last in enumerate(branch.leanest) if place[n] < last]:
                assert bound <= search.bound(b, further(place, axis))
            assert search.generating(b, place) <= bound or search.scenario(b, place) is None
            smaller = [search.time(b, (*place[:-1], n)) for n in range(place[-1], branch.leanest[-1] + 1)]
            assert search.soonest(b, place, bound) == min([bound] * (smaller[0] <= bound) or filter(None, smaller))
            judged, fit = search.judged(b, place), search.fit(b, place)
            if judged and fit:
                assert bound <= search.time(b, place)
                assert fit.slack == min(room(g, p) for g in judged.estimate.groups for p in g.phases)
                assert fit.updates or not fit.trains
                assert fit.trains == (fit.training >= 0)
                updates.setdefault(search.updater(b, place), set()).add(fit.updates)
    assert max(map(len, updates.values())) == 1
    hosts: dict[Any, set[int]] = {}
    for turn in product(*[range(n + 1) for n in search.branches[0].leanest[: search.branches[0].turns]]):
        first = (*turn, *[0] * (len(search.branches[0].axes) - len(turn)))
        if judged := search.judged(0, first):
            hosts.setdefault(search.hosted(0, first), set()).add(most(judged.estimate.host_phases))
    assert max(map(len, hosts.values())) == 1 < len(hosts)


@pytest.mark.parametrize(("gpu", "gpus"), [("l4", 8), ("h100-sxm", 2), ("a30", 16)])
@pytest.mark.parametrize("job", [
    {"framework": "openrlhf", "task": "sft", "packing": True, "seq_len": 32768},
    {"framework": "verl", "task": "ppo", "response_len": 8192},
])  # fmt: skip
def test_shorter_shares_of_sequences_are_no_help_where_lengths_are_not_what_lacks(
    job: dict[str, Any], gpu: str, gpus: int
) -> None:
    """Else a rung whose GPUs share sequences would be passed over although something fits there."""
    seen: set[tuple[bool, bool]] = set()
    for model in ("qwen3-0.6b", "mixtral-8x7b"):
        problem = Problem(job | {"model": model, "gpu": gpu, "gpus": gpus}, load(), names=False)
        for rung, whole in [(rung, with_whole_sequences(rung)) for rung in problem.rungs]:
            search, shared = problem.asked(whole) if whole else None, problem.asked(rung)
            if search and shared:
                seen.add((search.whatever_length, shared.any()))
    assert len(seen) > 1 and (True, True) not in seen


@settings(max_examples=60)
@given(searches(400), st.data())
def test_along_the_lean_axes_the_host_never_needs_less(both: tuple[Search, Search], data: st.DataObject) -> None:
    """So that a branch's offload is given up where it is too much with the lean axes at their first values."""
    search, _ = both
    b = data.draw(st.integers(0, len(search.branches) - 1))
    branch = search.branches[b]
    place = tuple(data.draw(st.integers(0, last)) for last in branch.leanest)
    first = (*place[: branch.turns], *[0] * (len(place) - branch.turns))
    one, other = search.judged(b, first), search.judged(b, place)
    if one and other:
        assert most(one.estimate.host_phases) <= most(other.estimate.host_phases)
    alike = [n for n, own in enumerate(search.branches) if len(own.axes) == len(first) and n != b]
    for n in [n for n in alike if search.hosted(n, first) == search.hosted(b, first)][:2]:
        # asked once for all tensor parallelisms of vLLM
        if one and (same := search.judged(n, first)):
            assert most(same.estimate.host_phases) == most(one.estimate.host_phases)
