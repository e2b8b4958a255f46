"""A job's roles on its GPUs: which activations each gets, and what is left where nothing generates."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from calc.base.plan import Keeps, Role
from calc.catalog.catalog import load
from calc.scenario.scenario import Scenario
from calc.step import placement
from calc.step.instants import Batch
from calc.step.placement import Placed
from calc.step.roles import Job, Roles


def placed(s: Scenario) -> Job:
    return Job(s, load().gpu(s.gpu))


def asked(monkeypatch: pytest.MonkeyPatch, length: int = 1, **fields: Any) -> dict[str, Any]:
    """The activations of the first role on one sequence of this length."""
    monkeypatch.setattr("calc.step.roles.step", lambda *given, **named: named)
    found = placed(job(**fields)).roles
    role = next(iter(found.placed.values()))
    return dict(found.step(role.engine.replica, role.s, Batch(length, length)))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("model", "attention", "length", "masked"),
    [
        ("mistral-7b-v0.1", "sdpa", 4095, False),
        ("mistral-7b-v0.1", "sdpa", 4096, True),
        ("mistral-7b-v0.1", "sdpa", 4097, True),
        ("mistral-7b-v0.1", "flash", 4097, False),
        ("mistral-7b-v0.1", "eager", 4097, False),
        ("llama-3-8b", "sdpa", 4097, False),
    ],
)
def test_sdpa_gets_a_mask_where_a_sequence_reaches_the_window(
    monkeypatch: pytest.MonkeyPatch, model: str, attention: str, length: int, masked: bool
) -> None:
    """Mistral 7B v0.1 attends to 4,096 positions; flash takes the window as an argument, Llama has none.

    `_ignore_causal_mask_sdpa` of Transformers' `masking_utils.py` makes one from a length of the window on; traced.
    """
    fields = {"model": model, "attention": attention, "seq_len": 4096}
    assert asked(monkeypatch, length, **fields)["masked"] is masked


def test_layers_are_gathered_one_by_one_under_fsdp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version says which instants of a layer are looked at."""
    assert asked(monkeypatch, sharding="fsdp2", gpus=2)["fsdp"] == 2
    assert asked(monkeypatch, sharding="fsdp1", gpus=2)["fsdp"] == 1
    assert asked(monkeypatch, sharding="ddp", gpus=2)["fsdp"] == 0


@pytest.mark.parametrize(("engine", "does"), [("none", set()), ("hf", {"generate"}), ("vllm", {"serve"})])
def test_a_job_whose_responses_come_from_elsewhere_has_no_stage_that_makes_them(engine: str, does: set[str]) -> None:
    """The framework's stages without rollout and sync, and nothing that serves."""
    fields = {"task": "ppo", "prompt_len": 64, "response_len": 64, "rollout": {"engine": engine, "n": 1}}
    if engine == "vllm":  # which a framework places beside its trainers
        fields |= {"framework": "openrlhf==0.6.1", "gpus": 5, "placement": "separate"}
        fields["rollout"] = {"engine": engine, "n": 1, "gpus": 1}
        fields["roles"] = {name: {"gpus": 1} for name in ("actor", "critic", "reference", "reward")}
    found = placed(job(**fields))
    assert {stage.does for stage in found.keeps.stages} & {"serve", "generate"} == does
    assert (found.engine is not None) is (engine == "vllm")


def test_rows_are_padded_to_their_cap_or_packed_at_their_mean() -> None:
    """Three sequences of 512 at most: 1,536 tokens; packed, three of the mean length."""
    padded = job(seq_len=512)
    assert placed(padded).roles.batch(padded, 3) == Batch(3 * 512, 512)
    packed = job(seq_len=512, packing=True)
    assert placed(packed).roles.batch(packed, 3) == Batch(3 * packed.expected_len, packed.expected_len)


def test_a_role_is_placed_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search may need the first stage of a pipeline alone."""
    seen, place = list[str](), placement.place

    def noted(s: Scenario, role: Role, keeps: Keeps) -> Placed:
        seen.append(role.name)
        return place(s, role, keeps)

    monkeypatch.setattr(placement, "place", noted)
    # Roles of its own: those that other tests' jobs share may have been asked for.
    found = Roles(job(task="ppo", framework="openrlhf", gpus=8)).placed
    assert set(found) == {"actor", "critic", "reference", "reward"}
    assert "actor" in found and "rollout" not in found and not seen
    assert found["actor"] is found["actor"] and seen == ["actor"]
    assert len(found) == 4 == len([*found.values()]) == len(seen)
