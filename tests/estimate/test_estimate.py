"""The estimate of a whole job, put together from its groups, and the contract's JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from jobs import job

import calc.estimate.estimate
import calc.estimate.gpu_group
from calc.base.ledger import Line, Moment, Phase
from calc.estimate.estimate import as_dict, estimate, speed
from calc.estimate.result import Group

WEIGHTS = Line("weights", "actor", 1000, "b·P", {"b": 2, "P": 500}, "weights")
CONTEXT = Line("context", "process", 300, "C", {"C": 300}, "runtime#context", False)
SEPARATE = {
    "task": "ppo",
    "framework": "openrlhf==0.6.1",
    "gpus": 5,
    "placement": "separate",
    "rollout": {"engine": "vllm", "gpus": 1, "n": 1},
    "roles": {name: {"gpus": 1} for name in ("actor", "critic", "reference", "reward")},
}


def group(verdict: str, phase: str | None, probability: float, refusal: str | None = None) -> Group:
    phases = (Phase("step", Moment("step: somewhere", (WEIGHTS, CONTEXT))),)
    return Group("actor", 1, phases, 10_000, (0, 2000), probability, verdict, phase, refusal)


def answered(monkeypatch: pytest.MonkeyPatch, *groups: Group) -> Any:
    """The estimate of a job whose groups, in this order, are these; what is left of its GPUs fits."""
    left: Iterator[Group] = iter([*groups, *[group("fits", None, 1.0)] * 9])

    class GpuGroup:
        def __init__(self, *given: object, replays: bool) -> None: ...
        def group(self) -> Group:
            return next(left)

    monkeypatch.setattr(calc.estimate.gpu_group, "GpuGroup", GpuGroup)
    return estimate(job(**SEPARATE))


def test_the_worst_group_decides_and_names_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is merely tight breaks earlier, but it is not what stops the job."""
    e = answered(monkeypatch, group("tight", "load", 0.5), group("oom", "step", 0.01), group("oom", "backward", 0.1))
    assert (e.verdict, e.verdict_phase, e.fit_probability) == ("oom", "backward", 0.01)
    e = answered(monkeypatch, group("tight", "step", 0.5))
    assert (e.verdict, e.verdict_phase, e.fit_probability) == ("tight", "step", 0.5)


def test_a_job_that_fits_names_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing breaks."""
    e = answered(monkeypatch)
    assert (e.verdict, e.verdict_phase, e.fit_probability) == ("fits", None, 1.0)


def test_every_refusal_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the groups, after the scenario's own."""
    e = answered(
        monkeypatch, group("oom", "load", 0.0, "first"), group("fits", None, 1.0), group("oom", "load", 0, "b")
    )
    assert e.notes[-2:] == ("first", "b")


def test_a_rollout_is_as_fast_as_its_cache_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest cache of any group's; a job that serves nothing has none."""
    given: list[Any] = []
    monkeypatch.setattr(calc.estimate.estimate, "throughput", lambda *args: given.append(args[-1]))
    small, large = (replace(group("fits", None, 1.0), cache_tokens=n) for n in (100, 300))
    speed(answered(monkeypatch, small, large, group("fits", None, 1.0)))
    speed(estimate(job()))
    assert given == [300, None]


def test_a_probability_is_printed_with_four_digits() -> None:
    """For the job and for each of its groups."""
    e = estimate(job())
    odd = replace(e, fit_probability=0.123456, groups=(replace(e.groups[0], fit_probability=0.654321),))
    data = as_dict(odd)
    assert (data["fit_probability"], data["groups"][0]["fit_probability"]) == (0.1235, 0.6543)


def test_only_what_pytorch_does_not_allocate_says_so() -> None:
    """`allocated` is there where it is false; a line is spelled as the contract does."""
    e = estimate(job())
    phases = (Phase("step", Moment("somewhere", (WEIGHTS, CONTEXT))),)
    (phase,) = as_dict(replace(e, groups=(replace(e.groups[0], phases=phases),)))["groups"][0]["phases"]
    assert phase["lines"] == [
        {"component": "weights", "role": "actor", "bytes": 1000, "formula": "b·P", "values": {"b": 2, "P": 500},
         "source": "weights"},
        {"component": "context", "role": "process", "bytes": 300, "formula": "C", "values": {"C": 300},
         "source": "runtime#context", "allocated": False},
    ]  # fmt: skip
    assert (phase["allocated_bytes"], phase["device_bytes"]) == (1000, 1300)


def test_a_node_that_keeps_nothing_takes_nothing() -> None:
    """The host of a job whose models are loaded elsewhere."""
    host = as_dict(replace(estimate(job()), host_phases=()))["host"]
    assert (host["phases"], host["peak_bytes_per_node"], host["verdict"]) == ([], 0, "fits")
