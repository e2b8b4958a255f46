from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from calc.catalog.catalog import load
from calc.estimate import verdict
from calc.estimate.estimate import estimate
from calc.recommend import Recommendation, recommend
from calc.recommend.answer import fitting, growing
from calc.recommend.clock import TOLERANCE
from calc.recommend.failing import _fewest, _longest
from calc.recommend.problem import SENSIBLE, Problem
from calc.recommend.search import Search, room
from calc.recommend.simplicity import efforts
from calc.recommend.space import Fields
from calc.recommend.trades import MARGIN
from calc.scenario.scenario import ScenarioError
from calc.throughput import node_of, throughput

SFT: dict[str, Any] = {
    "model": "llama-3-8b", "task": "sft", "gpu": "a100-80-sxm", "gpus": 4, "framework": "openrlhf", "method": "full",
}  # fmt: skip
PPO = SFT | {"task": "ppo", "gpus": 8}
JOBS = {
    "sft": SFT,
    "method open": {k: v for k, v in SFT.items() if k != "method"},
    "tight": SFT | {"gpu": "a100-40-sxm"},
    "dpo, torch": SFT | {"task": "dpo", "framework": "torch"},
    "ppo": PPO,
    "ppo, verl": PPO | {"framework": "verl"},
    "grpo, trl": PPO | {"task": "grpo", "framework": "trl", "model": "qwen2.5-1.5b"},
}


def test_an_answer_grows_and_what_it_has_stays() -> None:
    parts = list(growing(JOBS["method open"], load()))
    assert [part.whole for part in parts] == [False] * (len(parts) - 1) + [True]
    best = fitting(JOBS["method open"], load())
    for before, after in pairwise(parts):
        assert best and before.recommended and after.recommended == before.recommended
        assert before.recommended.scenario == best.scenario
        assert (after.launch, after.passed) == (before.launch, before.passed)
        assert after.alternatives[: len(before.alternatives)] == before.alternatives
    assert parts[0].alternatives == () and parts[-1].alternatives
    assert parts[-1] == recommend(JOBS["method open"])


@pytest.fixture(scope="module", params=JOBS)
def answered(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Recommendation]:
    job = JOBS[request.param]
    return job, recommend(job)


def seconds(r: Any) -> float:
    assert r.throughput
    return float(r.throughput.step_seconds)


def test_what_is_recommended_fits_by_its_own_estimate(answered: tuple[dict[str, Any], Recommendation]) -> None:
    job, r = answered
    assert r.recommended
    for c in (r.recommended, *r.alternatives):
        e = estimate(c.scenario)
        assert e.verdict == "fits"
        assert e.fit_probability >= 0.95
        assert min(room(g, p) for g in e.groups for p in g.phases) == c.judged.slack >= 0
    s = r.recommended.scenario
    assert (s.model, s.task, s.gpu, s.gpus, s.framework) == tuple(
        job[k] for k in ("model", "task", "gpu", "gpus", "framework")
    )


def test_the_one_that_fits_is_the_recommended_one(answered: tuple[dict[str, Any], Recommendation]) -> None:
    job, r = answered
    assert r.recommended
    found = fitting(job, load())
    assert found
    assert found.scenario == r.recommended.scenario


def test_where_nothing_fits_there_is_none_even_if_one_is_tight() -> None:
    job = {"model": "llama-3-70b", "task": "sft", "gpu": "rtx4090", "gpus": 1, "method": "full"}
    assert fitting(job, load()) is None


def test_one_setting_away_nothing_fits_that_is_faster(answered: tuple[dict[str, Any], Recommendation]) -> None:
    """Nor roomier at the same time, but for what asks more effort: that has to be faster by more than the error."""
    job, r = answered
    assert r.recommended
    problem = Problem(job, load())
    rung = next(x for x in problem.rungs if x["method"] == r.recommended.scenario.method)
    search = problem.search(rung)
    assert search
    best = search.best()
    assert best
    assert search.chosen(best).scenario == r.recommended.scenario
    branch = search.branches[best.branch]
    asked = {turn: effort for effort, turn in efforts(branch)}
    for axis, index in enumerate(best.place):
        for other in (index - 1, index + 1):
            if 0 <= other <= branch.leanest[axis]:
                found = search.found(best.branch, (*best.place[:axis], other, *best.place[axis + 1 :]))
                if found and asked[found.place[: branch.turns]] > asked[best.place[: branch.turns]]:
                    assert found.seconds * (1 + TOLERANCE) >= best.seconds
                else:
                    assert found is None or found.rank >= best.rank


def test_what_fails_is_faster_beyond_the_error_of_times_and_lacks_what_is_said(
    answered: tuple[dict[str, Any], Recommendation],
) -> None:
    _, r = answered
    assert r.recommended
    if r.fails is None:
        return
    assert r.fails.throughput is None or seconds(r.fails) * (1 + TOLERANCE) < seconds(r.recommended)
    e = estimate(r.fails.judged.scenario)
    if r.fails.where == "gpu":
        group, phase = next(
            (g, p) for g in e.groups for p in g.phases if p.name == r.fails.phase and room(g, p) == -r.fails.shortfall
        )
        # with that much more the phase would fit, barely
        assert verdict.odds(phase.moment.sums, group.usable_bytes + r.fails.shortfall) == pytest.approx(0.95, abs=0.005)
    elif r.fails.where == "vllm":
        assert r.fails.shortfall is None
        assert r.fails.reason in e.notes


def test_advice_names_what_one_setting_changes() -> None:
    r = recommend(SFT | {"checkpointing": "full", "gpu": "a100-40-sxm"})
    assert r.recommended
    s = r.recommended.scenario
    assert s.offload.optimizer
    line = next(line for line in r.advice if line.startswith("offloading the optimizer saves"))
    (e,) = estimate(s).groups
    problem = Problem(SFT | {"gpu": "a100-40-sxm", "checkpointing": "full", "sharding": s.sharding,
                             "micro_batch": s.micro_batch, "offload.optimizer": False}, load())  # fmt: skip
    search = problem.search(problem.rungs[0])
    assert search
    without = search.judged(0, search.branches[0].leanest)
    assert without
    peak = without.estimate.groups[0].peak
    same = next(p for p in e.phases if p.name == peak.name)
    assert line.endswith(f"{(peak.moment.device_bytes - same.moment.device_bytes) / 2**30:.1f} GiB in `{peak.name}`")


def test_full_comes_first_where_the_method_is_open_and_the_others_stand_beside_it() -> None:
    r = recommend(JOBS["method open"])
    assert r.recommended
    assert r.recommended.scenario.method == "full"
    assert [c.scenario.method for c in r.alternatives][:2] == ["lora", "qlora"]
    small = recommend(JOBS["method open"] | {"gpu": "rtx3090", "gpus": 1, "offload.optimizer": False})
    assert small.recommended
    assert small.recommended.scenario.method == "lora"
    only = recommend(SFT | {"method": "qlora"})
    assert only.recommended
    assert {c.scenario.method for c in (only.recommended, *only.alternatives)} == {"qlora"}


def test_alternatives_trade_fewer_gpus_longer_sequences_or_more_margin() -> None:
    r = recommend(SFT)
    assert r.recommended
    fewer, longer, fewest = r.alternatives
    assert fewer.scenario.gpus < 4
    assert seconds(fewer) > seconds(r.recommended)
    assert longer.scenario.seq_len > r.recommended.scenario.seq_len
    assert fewest.scenario.gpus < fewer.scenario.gpus and "the fewest that hold it" in fewest.trades
    tight = recommend(SFT | {"gpus": 1, "seq_len": 8192, "gpu": "a100-40-sxm", "checkpointing": "full"})
    if tight.recommended and tight.alternatives:
        usable = load().gpu("a100-40-sxm").usable_bytes
        assert all(c.judged.slack >= MARGIN * usable for c in tight.alternatives if "free" in c.trades)


def test_where_one_gpu_is_all_there_is_a_smaller_card_is_cheaper() -> None:
    r = recommend(SFT | {"gpus": 1, "model": "llama-3.2-1b"})
    cheaper = r.alternatives[0]
    catalog = load()
    usable = catalog.gpu(cheaper.scenario.gpu).usable_bytes
    assert cheaper.scenario.gpus == 1
    assert catalog.gpu(cheaper.scenario.gpu).memory_gb < 80
    kept = SFT | {"gpus": 1, "model": "llama-3.2-1b", "sharding": cheaper.scenario.sharding}
    for gpu in catalog.gpus.values():
        if gpu.vendor == "NVIDIA" and not gpu.lacks_bf16 and gpu.usable_bytes < usable:
            found = recommend(kept | {"gpu": gpu.id}).recommended
            rates = 312 / (gpu.bf16_tflops or 1)  # of the A100, against this card's
            assert found is None or seconds(found) > SENSIBLE * rates * seconds(r.recommended)


def test_times_are_those_of_the_throughput_with_the_cache_that_was_found() -> None:
    r = recommend(PPO)
    assert r.recommended
    s, catalog = r.recommended.scenario, load()
    expected = throughput(s, catalog.gpu(s.gpu), node_of(s, catalog), estimate(s).groups[0].cache_tokens)
    assert r.recommended.throughput == expected


def test_nothing_feasible_is_an_answer_that_says_what_would_have_to_change() -> None:
    r = recommend(SFT | {"model": "llama-3-70b", "gpus": 2})
    assert (r.recommended, r.alternatives, r.launch) == (None, (), None)
    assert r.fails
    assert r.fails.shortfall
    assert r.fails.judged.estimate.verdict != "fits" or r.fails.where == "host"
    assert any("GPUs instead of 2 suffice" in line for line in r.advice)
    assert r.considered > 0


def test_host_memory_counts_where_it_is_known() -> None:
    """Eight A100 40GB stand beside 1024 GB: GPUs hold what is left of a 70B model, the host not what is moved there."""
    r = recommend(SFT | {"model": "llama-3-70b", "gpus": 8, "sharding": "zero3", "offload.optimizer": True,
                         "gpu": "a100-40-sxm"})  # fmt: skip
    assert r.recommended is None
    assert r.fails
    assert (r.fails.where, r.fails.shortfall is not None) == ("host", True)


def test_where_nobody_knows_a_nodes_memory_offload_is_held_against_that_of_its_gpus() -> None:
    """A full 70B model would take 1.1 TB of host memory beside one L4: nobody has that."""
    r = recommend(SFT | {"model": "llama-3-70b", "gpus": 1, "gpu": "l4", "method": "full"})
    assert r.recommended is None
    small = recommend(
        SFT | {"model": "qwen2.5-1.5b", "gpus": 1, "gpu": "l4", "method": "full", "offload.optimizer": True}
    )
    assert small.recommended
    assert any("needed of 48 GB a node, assumed: 2 times the memory" in note for note in small.notes)
    light = recommend(SFT | {"model": "qwen2.5-0.5b", "gpus": 1, "gpu": "l4", "framework": "trl"})
    assert any(note.startswith("host memory: none needed of 48 GB a node, assumed") for note in light.notes)


@pytest.mark.parametrize(
    ("model", "asked", "chosen", "told"),
    [
        ("qwen2.5-3b", {}, "bf16", True),
        ("qwen2.5-3b", {"precision": "bf16"}, "bf16", False),
        ("qwen2.5-0.5b", {}, "autocast", False),
    ],
)
def test_that_small_updates_round_away_without_fp32_weights_is_said_where_nobody_asked_for_it(
    model: str, asked: dict[str, Any], chosen: str, told: bool
) -> None:
    job = {"model": model, "task": "sft", "gpu": "rtx4090", "gpus": 1, "framework": "trl", "method": "full"}
    found = recommend(job | asked)
    assert found.recommended and found.recommended.scenario.precision == chosen
    assert any("rounded away" in note for note in found.notes) == told


def test_a_command_stands_beside_a_framework_that_has_one() -> None:
    assert (launched := recommend(SFT).launch)
    assert "openrlhf.cli.train_sft" in launched.command
    plain = recommend(SFT | {"framework": "torch"})
    assert plain.launch is None
    assert any(note.startswith("no command") for note in plain.notes)


def test_a_card_without_a_known_rate_is_ranked_by_room() -> None:
    unrated = [
        gpu for gpu in load().gpus.values() if gpu.bandwidth_gbs is None or not (gpu.bf16_tflops or gpu.fp16_tflops)
    ]
    for gpu in unrated:
        r = recommend(SFT | {"gpu": gpu.id, "framework": "torch"})
        assert any("ranked by how simple they are" in note for note in r.notes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"framework": "verl", "task": "rm"}, "task: given 'rm'"),
        ({"sharding": "fsdp1"}, "sharding: given 'fsdp1'"),
        ({"seq_length": 3}, "unknown field 'seq_length'"),
        ({"gpu": "v100-32", "framework": "verl==0.5.0", "task": "grpo"}, "gpu: given 'v100-32'"),
        ({"lora.rank": 8}, "lora.rank: given with method full"),
    ],
)
def test_a_job_that_cannot_be_run_at_all_is_an_error(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ScenarioError, match=f"^job: {told}"):
        recommend(SFT | change, where="job")


@pytest.mark.parametrize("longest", [None, 128, 512, 1024, 4096, 8192])
def test_the_longest_sequences_that_fit_are_found_by_the_shortest_and_halves(longest: int | None) -> None:
    asked: list[int] = []

    def fits(length: int) -> bool:
        asked.append(length)
        return longest is not None and length <= longest

    assert _longest([8192 >> n for n in range(7)], fits) == longest
    assert len(asked) <= (1 if longest is None else 4)


@pytest.mark.parametrize("enough", [8, 16, 64, None])
@pytest.mark.parametrize("likely", range(5))
def test_the_fewest_gpus_that_fit_are_found_from_wherever_the_search_starts(enough: int | None, likely: int) -> None:
    counts = (8, 16, 32, 64)
    assert _fewest(counts, likely, lambda n: enough is not None and n >= enough) == enough


def test_of_no_length_none_fits() -> None:
    assert _longest([], lambda length: True) is None


def test_a_rung_is_searched_once_however_often_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full fine-tuning that offloads its optimizer is compared with LoRA, which then is an alternative, too."""
    searched = Counter[str]()
    search = Problem.search

    def counted(self: Problem, rung: Fields, changes: Fields | None = None) -> Search | None:
        searched[json.dumps([self.fields, rung, changes], sort_keys=True)] += 1
        return search(self, rung, changes)

    monkeypatch.setattr(Problem, "search", counted)
    job = {"model": "llama-3.1-8b", "task": "sft", "gpu": "a100-40-sxm", "gpus": 2, "framework": "trl", "seq_len": 2048}
    answer = recommend(job)
    assert answer.recommended and answer.recommended.scenario.offload.optimizer
    assert any(each.scenario.method == "lora" for each in answer.alternatives)
    assert max(searched.values()) == 1
