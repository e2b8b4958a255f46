"""Routed experts as NeMo Automodel runs them, on a tape, and torchtitan's where GPUs share the experts."""

from __future__ import annotations

import pytest
from formulas import form, terms
from tapes import arch, backward_of, tape

from calc.base.refusal import Refusal
from calc.engines.fsdp import Fsdp
from calc.engines.replica import Where
from calc.estimate.estimate import estimate
from calc.memory.activations import Program
from calc.memory.run import Run
from calc.models.architecture import layer_kinds, layer_parameters
from calc.models.slices import part
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError
from calc.step.placement import place

JOB = {"model": "qwen3-30b-a3b", "task": "sft", "gpu": "h200", "gpus": 8, "sharding": "fsdp2", "seq_len": 1024}
TITAN, AUTOMODEL = ({"experts_implementation": name} for name in ("torchtitan", "automodel"))
EXPERT = 3 * 2048 * 768  # gate, up and down of one of 128 experts
DENSE = 2048 * (4096 + 2 * 512) + 4096 * 2048 + 2 * 128 + 2 * 2048 + 128 * 2048  # attention, norms and router


def shared(**fields: object) -> Scenario:
    return parse(JOB | fields)


def engine(s: Scenario) -> Fsdp:
    found = place(s, s.keeps.roles[0], s.keeps).engine
    assert isinstance(found, Fsdp)
    return found


def test_a_layer_keeps_rows_of_experts_the_activation_and_its_input() -> None:
    """Of each row: what gate and up read, 2h, their outputs, 4j, the activation's, 2j, and its weight in fp32, 4.

    Routing: the best 4k, their index 8k and their sum 4, a map of all experts, E (Automodel 36044ad3d). Norms: 8.
    """
    kept = terms(tape("qwen3-30b-a3b", moe=True, dispatched=True).saved(), arch("qwen3-30b-a3b"))[0]
    assert kept == form("16h + 10q + 10kv + 8H + 4K + 5E + 16k + 2k·h + 6k·j + 12")[0]


def test_backward_makes_the_gradients_of_the_experts_that_a_gpu_has() -> None:
    whole = arch("qwen3-30b-a3b")
    own = part(whole, 1, 4)
    for run in (Run(own, dispatched=True), Run(own, padded=True)):
        made = sum(backward_of(Program(run, spec).layer())[-1].gradients * n for spec, n in layer_kinds(own))
        assert made == sum(layer_parameters(own, spec) * n for spec, n in layer_kinds(own))
        assert made == sum(layer_parameters(whole, spec) * n for spec, n in layer_kinds(whole)) - 48 * 96 * EXPERT


def test_gpus_that_share_experts_gather_their_own_alone() -> None:
    """Shards are an eighth of the model either way. Over four GPUs each gathers 32 of 128 experts, from two ranks."""
    whole, four = engine(shared(**TITAN)), engine(shared(**TITAN, expert_parallel=4))
    assert whole.layer(0) == DENSE + 128 * EXPERT
    assert four.layer(0) == DENSE + 32 * EXPERT
    assert [line.bytes for line in four.resident()] == [line.bytes for line in whole.resident()]
    gather = Where("gather", 1, False)
    less = sum(line.bytes for line in whole.at(gather)) - sum(line.bytes for line in four.at(gather))
    assert less == 3 * 2 * 96 * EXPERT


def test_experts_of_which_no_two_gpus_have_the_same_are_in_no_unit_of_automodel() -> None:
    """`apply_fsdp` leaves them out where its mesh of shards is one GPU; torchtitan still casts them there."""
    assert engine(shared(**AUTOMODEL, expert_parallel=8)).layer(0) == DENSE
    assert engine(shared(**TITAN, expert_parallel=8)).layer(0) == DENSE + 16 * EXPERT


def test_all_to_alls_are_kept_by_selective_checkpointing() -> None:
    """What each brings is 2kh: torchtitan c4e229115 `models/deepseek_v3/infra/parallelize.py`, `_save_list`."""
    own = part(arch("qwen3-30b-a3b"), 1, 4)
    ops = {op.name: op.kept for op in Program(Run(own, padded=True), own.specs[0], selective=True).layer().ops}
    found = [ops[f"experts: all-to-all{way}"] for way in ("", " back")]
    assert [(len(kept), kept[0].width.tokens, kept[0].b) for kept in found] == [(1, {"k·h": 1}, 2)] * 2
    alone = Program(Run(arch("qwen3-30b-a3b"), padded=True), own.specs[0], selective=True).layer().ops
    assert not any("all-to-all" in op.name for op in alone)


@pytest.mark.parametrize("implementation", [TITAN, AUTOMODEL])
def test_more_gpus_that_share_experts_never_need_more(implementation: dict[str, str]) -> None:
    peaks = []
    for ranks in (1, 2, 4, 8):
        s = shared(**implementation, expert_parallel=ranks, gpus=16)
        phases = estimate(s, replays=False).groups[0].phases
        peaks.append(max(p.moment.allocated_bytes for p in phases))
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"expert_parallel": 8}, "8 with sharding fsdp2"),
        ({"expert_parallel": 16, **TITAN}, "16 with sharding fsdp2"),
        ({"expert_parallel": 4, "sharding": "zero3"}, "4 with sharding zero3"),
        ({"expert_parallel": 4, "sharding": "fsdp1", **TITAN}, "4 with sharding fsdp1"),
    ],
)
def test_experts_are_shared_only_where_that_was_read(fields: dict[str, object], given: str) -> None:
    with pytest.raises(ScenarioError) as error:
        shared(**fields)
    assert isinstance(error.value.refusal, Refusal) and given in str(error.value)
