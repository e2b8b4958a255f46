"""Alternatives: other methods, fewer GPUs, longer sequences, more margin; and what each setting saves."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from calc.base.ledger import Phase
from calc.base.units import GiB, gib
from calc.catalog.catalog import GPU
from calc.recommend.clock import TOLERANCE
from calc.recommend.problem import SENSIBLE, Configuration, Problem, configured
from calc.recommend.search import Found, Judged, Search
from calc.recommend.space import EIGHT_BITS, KEPT, MEGATRON, Branch, Fields, attention
from calc.scenario.scenario import Scenario

# The share of the card that an alternative with more margin leaves free beside the peak and its error.
MARGIN = 0.10
TOLD = GiB // 10  # the least memory that a setting saves for it to be named, in bytes
LONGER = (8, 4, 2)  # times the length that was asked for
KEPT_SMALL = ("optimizer", "precision", "lora.dtype")  # settings of a rung that keep what is trained small
STEPS = 8  # places looked at for more margin


def methods(problem: Problem, chosen: Fields, recommended: Configuration) -> Iterator[Configuration]:
    """The best configuration of each other method, if the method is open and it is quicker or needs less memory."""
    had = {chosen["method"]}
    for rung in problem.rungs:
        if rung["method"] in had:
            continue
        search = problem.asked(rung)
        found = search.best() if search else None
        if search and found:
            best = search.chosen(found)
            adapters = best.scenario.lora
            had.add(rung["method"])
            base = "4-bit weights that stay frozen" if rung["method"] == "qlora" else "frozen weights"
            whole = "serves the weights whole" if best.scenario.task == "inference" else "trains all weights"
            trains = f"trains adapters of rank {adapters.rank} beside {base}" if adapters else whole
            other = configured(search, best, trains if best.scenario.optimizer != "none" or not adapters else base)
            if _gains(other, recommended):
                yield other


def _gains(other: Configuration, recommended: Configuration) -> bool:
    """True if another configuration needs less memory, or is no slower within the error of times."""
    timed, best = other.throughput, recommended.throughput
    slow = timed and best and timed.step_seconds > best.step_seconds * (1 + TOLERANCE)
    return not slow or _peak(other) < _peak(recommended)


def _peak(c: Configuration) -> int:
    return max(g.peak.moment.device_bytes for g in c.judged.estimate.groups)


def slower(problem: Problem, chosen: Fields) -> Iterator[Configuration]:
    """The configuration that was passed over for its time, if it is of the same method."""
    if problem.slow and chosen["method"] == "full":
        search, found, what = problem.slow
        yield configured(search, search.chosen(found), what)


def lighter(problem: Problem, chosen: Fields, search: Search, found: Found) -> Iterator[Configuration]:
    """If the optimizer is offloaded: the same method with one small enough to stay on the GPU, if that is faster."""
    best = configured(search, search.chosen(found))
    for rung in problem.rungs[problem.rungs.index(chosen) + 1 :] if best.scenario.offload.trained else ():
        if rung["method"] != chosen["method"] or all(rung.get(name) == chosen.get(name) for name in KEPT_SMALL):
            continue
        other = problem.search(rung, KEPT)
        at = other.best() if other else None
        if other and at and at.seconds * (1 + TOLERANCE) < found.seconds:
            yield configured(other, other.chosen(at), _kept_small(rung))
            return


def _kept_small(rung: Fields) -> str:
    """The states or weights that a rung keeps small, in words."""
    if "optimizer_in_backward" in rung:
        return "paged states of 8 bits that step in backward"
    if "lora.dtype" in rung:
        kept = "adapters of 16 bits"
    else:
        narrow = {"weights of 16 bits alone": "precision" in rung, "states of 8 bits": rung["optimizer"] in EIGHT_BITS}
        kept = " and ".join([words for words, so in narrow.items() if so])
    return f"{kept}, which stay on the card"


def trades(problem: Problem, rung: Fields, search: Search, found: Found) -> Iterator[Configuration]:
    """Configurations that trade something: fewer GPUs or a smaller card, longer sequences, more margin.

    They keep the sharding and placement of the recommended one, so that they differ in little. The one on the fewest
    GPUs comes last if it takes too long to be sensible.
    """
    fewer, least = _fewer(problem, rung, search, found)
    cheaper = fewer or (None if least else _smaller(problem, rung, search, found))
    others = [other for other in (cheaper, _longer(problem, rung, search, found)) if other]
    if len(others) < 2 and (roomier := _roomier(search, found)):
        others.append(roomier)
    yield from others
    if least:
        yield least


def _kept(problem: Problem, s: Scenario) -> dict[str, Any]:
    """The settings that define the branch of `s`, without those that are given."""
    kept: dict[str, Any] = {"sharding": s.sharding}
    if s.sharding == MEGATRON:
        kept["pipeline_parallel"] = s.pipeline_parallel
    if s.rollout:
        kept |= {"placement": s.placement, "rollout.engine": s.rollout.engine}
        if s.rollout.serves and s.placement == "colocated":
            kept["rollout.tensor_parallel"] = s.rollout.tensor_parallel
        if s.rollout.sleep:
            kept["rollout.sleep"] = True
    return {name: value for name, value in kept.items() if name not in problem.fields}


def _smaller(problem: Problem, rung: Fields, search: Search, found: Found) -> Configuration | None:
    """The same job on a smaller card of the same vendor: the one with the least usable memory on which it fits.

    A smaller card is sold with less memory; one that leaves a process a little less of as much does not count. No card
    of known speed gives way to one of unknown speed, nor to one that reaches so much less of its peak rate that the job
    takes SENSIBLE times as long as the two peak rates suggest. A card is not tried if the leanest place of the
    recommended branch would not fit on it: without vLLM, the memory that place needs does not depend on the card.
    """
    s, catalog = search.chosen(found).scenario, problem.catalog
    card = catalog.gpu(s.gpu)
    lean = search.fit(found.branch, search.branches[found.branch].leanest)
    least = 0 if s.rollout or lean is None else lean.tensors
    smaller = [
        gpu
        for gpu in catalog.gpus.values()
        if least < gpu.usable_bytes
        and gpu.memory_gb < card.memory_gb
        and (gpu.vendor, gpu.lacks_bf16) == (card.vendor, card.lacks_bf16)
    ]
    for gpu in sorted(smaller, key=lambda gpu: (gpu.usable_bytes, gpu.id)):
        limit = SENSIBLE * found.seconds * _rate(card) / _rate(gpu) if search.rated and _rate(gpu) else inf
        runs = {} if "attention" in problem.job else {"attention": attention(s.architecture, gpu)}
        fitting = _leanly(problem, rung, _kept(problem, s) | {"gpu": gpu.id} | runs, limit)
        if fitting and (fitting[0].rated or not search.rated):
            return configured(*fitting, f"less memory suffices, so the {gpu.name} instead of the {card.name}")
    return None


def _rate(gpu: GPU) -> float:
    """A card's dense rate of 16-bit products, in TFLOPS; 0 if it is unknown."""
    return gpu.bf16_tflops or gpu.fp16_tflops or 0.0


def _fewer(
    problem: Problem, rung: Fields, search: Search, found: Found
) -> tuple[Configuration | None, Configuration | None]:
    """The same job on the fewest GPUs that are sensible, halving their number; and on even fewer, if it fits there."""
    s = search.chosen(found).scenario
    if s.placement == "separate" or any(name.endswith(".gpus") for name in problem.job):
        return None, None
    fewest: Configuration | None = None
    for gpus in [s.gpus >> n for n in range(s.gpus.bit_length(), 0, -1) if s.gpus % (1 << n) == 0]:
        kept = _kept(problem, s)
        if gpus == 1:
            kept.pop("sharding", None)
        fitting = _leanly(problem, rung, kept | _counted(problem, s, gpus))
        if fitting is None:
            continue
        words = f"{gpus} GPU{'s' if gpus > 1 else ''} instead of {s.gpus}"
        other = configured(*fitting)
        hours = _hours(other) / _hours(configured(search, search.chosen(found)))
        if hours <= SENSIBLE:
            more = f", {100 * (hours - 1):.0f} % more GPU hours" if hours >= 1.005 else ""
            return other._replace(trades=words + more), fewest
        fewest = fewest or other._replace(
            trades=f"{words}, the fewest that hold it: {hours:.1f} times the GPU hours of what is recommended"
        )
    return None, fewest


def _hours(c: Configuration) -> float:
    """GPU seconds of a step; 1 where no rate is known."""
    return c.scenario.gpus * c.throughput.step_seconds if c.throughput else 1.0


def _counted(problem: Problem, s: Scenario, gpus: int) -> dict[str, Any]:
    """The settings that change with the number of GPUs: one shards with nobody, an engine spans at most all."""
    changes: dict[str, Any] = {"gpus": gpus, "gpus_per_node": min(gpus, s.gpus_per_node)}
    if gpus == 1 and problem.fields.get("sharding") == "ddp":
        changes["sharding"] = "none"
    if s.rollout and s.rollout.serves and "rollout.tensor_parallel" not in problem.fields:
        changes["rollout.tensor_parallel"] = min(gpus, s.rollout.tensor_parallel)
    return changes


def _longer(problem: Problem, rung: Fields, search: Search, found: Found) -> Configuration | None:
    """The longest sequences for which the model has positions and that fit, in doublings of the given length."""
    s = search.chosen(found).scenario
    if s.lengths or "expected_len" in problem.job or "rollout.expected_len" in problem.job:
        return None
    for factor in LONGER:
        names = ("prompt_len", "response_len") if s.rollout else ("seq_len",)
        changes = _kept(problem, s) | {name: factor * getattr(s, name) for name in names}
        length = factor * s.seq_len
        if length <= s.architecture.max_positions and (fitting := _leanly(problem, rung, changes)):
            return configured(*fitting, f"sequences of {length} tokens, {factor} times as long")
    return None


def _leanly(problem: Problem, rung: Fields, changes: Fields, limit: float = inf) -> tuple[Search, Judged] | None:
    """The best configuration with `changes`, if the leanest place of a branch has room on the device.

    None if all take longer than `limit` seconds.
    """
    search = problem.search(rung, changes)
    if search is None or not any(search.possible(b, branch.leanest) for b, branch in enumerate(search.branches)):
        return None
    if search.rated and limit < inf and not search.within(limit):
        return None
    found = search.best()
    return (search, search.chosen(found)) if found else None


def _roomier(search: Search, found: Found) -> Configuration | None:
    """The fastest leaner place of the same branch that leaves a tenth of the card free, if it is sensible."""
    usable = search.clock.gpu.usable_bytes
    wanted = MARGIN * usable
    if found.slack >= wanted:
        return None
    ahead, seen = [(found.seconds, found.place)], {found.place}
    for _ in range(STEPS):
        if not ahead:
            break
        ahead.sort()
        seconds, place = ahead.pop(0)
        if search.rated and seconds > SENSIBLE * found.seconds:
            break
        at = search.found(found.branch, place)
        if at and at.slack >= wanted and not (search.rated and at.seconds > SENSIBLE * found.seconds):
            return configured(search, search.chosen(at), f"{gib(at.slack)} free beside the peak and its error")
        for following in search.behind(found.branch, place, range(len(place))):
            if following not in seen:
                seen.add(following)
                ahead.append((search.bound(found.branch, following), following))
    return None


# ---- what each setting does ----------------------------------------------------------------------------------------


def advice(search: Search, found: Found) -> Iterator[str]:
    """The memory that each setting of the recommended configuration saves, or would save, when it alone is switched."""
    branch: Branch = search.branches[found.branch]
    best = search.chosen(found)
    for axis, index in enumerate(found.place[:-1]):
        other = index - 1 if index else 1
        judged = search.judged(found.branch, (*found.place[:axis], other, *found.place[axis + 1 :]))
        if judged is None:
            continue
        hungry, lean = (judged, best) if index else (best, judged)
        name = branch.axes[axis].name
        phase, saved = _saved(hungry, lean)
        if saved < TOLD:
            continue
        setting = _worded(name, branch.axes[axis].values[max(index, other)], lean.scenario)
        if index:
            yield f"{setting} saves {gib(saved)} in `{phase}`"
        else:
            seconds = search.clock.seconds(judged.scenario, judged.cache_tokens)
            slower = f", for {100 * max(seconds / found.seconds - 1, 0):.0f} % more time" if search.rated else ""
            yield f"{setting} would save {gib(saved)} in `{phase}`{slower}"


def _saved(hungry: Judged, lean: Judged) -> tuple[str, int]:
    """The phase in which the hungry one peaks, and the bytes that the lean one saves there."""
    group = max(hungry.estimate.groups, key=lambda g: g.peak.moment.device_bytes / g.usable_bytes)
    peak: Phase = group.peak
    phases = [p for g in lean.estimate.groups if g.name == group.name for p in g.phases]
    beside = next((p for p in phases if p.name == peak.name), None)
    return peak.name, peak.moment.device_bytes - beside.moment.device_bytes if beside else 0


def _worded(name: str, value: Fields, s: Scenario) -> str:
    """A setting in words."""
    engine = s.rollout.server if s.rollout else ""
    words = {
        "checkpointing": f"{value.get(name)} activation checkpointing",
        "offload.optimizer": "offloading the optimizer",
        "offload.parameters": "offloading the weights",
        "offload": "offloading weights and optimizer",
        "offload.fraction": "Adam on the host",
        "rollout.sleep": f"letting {engine} sleep while others work",
        "rollout.gpu_memory_utilization": f"a share of {value.get(name)} of the card for {engine}",
    }
    return words.get(name, "offloading the frozen roles")
