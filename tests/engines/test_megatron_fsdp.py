"""Megatron-FSDP: what each strategy gives a rank a part of, what is gathered ahead, and which gradients wait.

Counted in Megatron-LM d98e8a64dd `megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py`,
`AllGatherPipeline.all_gather_params` and `GradReducePipeline.wait_for_previous_grad_reduce`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calc.base.ledger import total
from calc.engines import megatron_fsdp
from calc.engines.megatron_fsdp import MegatronFsdp, ahead
from calc.engines.replica import Where
from calc.estimate.estimate import estimate, speed
from calc.models.slices import part
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError
from calc.step.roles import Roles
from tests.engines.test_megatron import GPT, P, engine

JOB: dict[str, Any] = {"model": "llama-3.1-8b", "task": "sft", "gpu": "h100-sxm", "gpus": 8, "trainer": "megatron",
                       "micro_batch": 1, "global_batch": 32, "seq_len": 4096}  # fmt: skip
OUTSIDE = 50_304 * 512 + 1024 * 512 + 2 * 512
LAYER = (P - OUTSIDE) // 12


def fsdp(ranks: int = 8, **cuts: bool) -> MegatronFsdp:
    """The small GPT's engine."""
    return MegatronFsdp(engine(ranks).replica, fuses=False, **cuts)


def test_each_strategy_cuts_more() -> None:
    """Masters and moments, 12 B, are cut always, gradients of 4 B and weights of 2 B as it says.

    Whole weights outside the layers stay gathered beside the part of a rank.
    """
    assert total(fsdp(strategy="optim").resident()) == 6 * P + 12 * P // 8
    assert total(fsdp(strategy="optim_grads").resident()) == 2 * P + 16 * P // 8
    assert total(fsdp().resident()) == 18 * P // 8 + 2 * OUTSIDE
    assert total(fsdp(1).resident()) == 18 * P


def test_layers_are_gathered_ahead_until_they_are_enough() -> None:
    """Two of 300 M are more than 500 M; one larger than that is enough; the last layers have fewer behind them."""
    assert ahead((300_000_000,) * 4) == 600_000_000
    assert ahead((700_000_000,) * 4) == 700_000_000
    assert ahead((100_000_000,) * 2) == 200_000_000
    assert ahead(()) == 0


def test_the_pass_decides_which_layers_come_next() -> None:
    """The small GPT fits into what is gathered ahead: forward gathers what is above, backward what is below."""
    held = fsdp()
    assert held.units == (LAYER,) * 12
    assert held.gathered(Where("layer", 9, False)) == 3 * LAYER
    assert held.gathered(Where("layer", 9, True)) == 10 * LAYER
    assert held.gathered(Where("head", 12, False)) == 12 * LAYER


def test_whole_gradients_wait_until_later_ones_need_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of two and a half layers keeps the three above; outside the layers all wait for the embedding's."""
    monkeypatch.setattr(megatron_fsdp, "QUEUED", 5 * LAYER // 2)
    held = fsdp()
    assert held.unreduced(Where("layer", 2, True, root=1)) == OUTSIDE + 4 * LAYER
    assert held.unreduced(Where("layer", 10, True, root=1)) == OUTSIDE + 2 * LAYER
    assert held.unreduced(Where("loss", 12, True)) == 0
    assert total(fsdp(strategy="optim").at(Where("layer", 2, True, root=1))) == 0


def test_experts_that_no_other_rank_has_are_not_gathered() -> None:
    """Eight ranks with an eighth of the experts each: their weights and gradients are whole from the start."""
    spec = GPT.specs[0]._replace(mlp="experts")
    whole = replace(GPT, specs=(spec,) * 12, gated=True, experts=8, experts_per_token=2, moe_intermediate=2048)
    held = []
    for ranks in (4, 8):
        arch = part(whole, 1, ranks)
        model = replace(engine(8).replica, arch=arch, trained_tensors=(), parameters=0)
        held.append(replace(fsdp(), replica=model).units[0])
    assert held[0] - held[1] == 2 * 3 * 512 * 2048


def test_more_is_cut_and_more_is_moved() -> None:
    names = ("optim", "optim_grads", "optim_grads_params")
    found = [parse(JOB | {"data_parallel_sharding_strategy": name}) for name in names]
    assert [Roles(s).placed["actor"].engine.gathers for s in found] == [False, False, True]  # type: ignore[attr-defined]
    assert {s.grad_dtype for s in found} == {"bf16"}
    moved = [{t.name: t.seconds for t in speed(estimate(s)).terms} for s in found]
    assert moved[0]["reduce"] < moved[1]["reduce"] == moved[2]["reduce"]
    assert moved[0]["gather"] == moved[1]["gather"] < moved[2]["gather"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"trainer": "own"},
            "data_parallel_sharding_strategy: given .?optim with torch, allowed: no_shard, or with",
        ),
        ({"pipeline_parallel": 2}, "pipeline_parallel: given 2 with Megatron-FSDP, allowed: 1; not modelled"),
        ({"offload": {"optimizer": True}}, "offload.optimizer: given true with Megatron-FSDP, allowed: false; not mod"),
    ],
)
def test_refused_in_one_line(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        parse(JOB | {"data_parallel_sharding_strategy": "optim"} | more)
