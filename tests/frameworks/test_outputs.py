"""Loops whose variables keep what the model returned: their logits live as long as the scenario says."""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.ledger import Phase
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

TOKENS, VOCABULARY = 8192, 151936
JOB = {
    "model": "qwen3-0.6b", "task": "sft", "gpu": "h100-sxm", "gpus": 1, "micro_batch": 1, "seq_len": TOKENS,
    "checkpointing": "full", "versions": {"transformers": "4.57"},
}  # fmt: skip


def phases(**fields: Any) -> dict[str, Phase]:
    return {p.name: p for g in estimate(parse(JOB | fields), load()).groups for p in g.phases}


def allocated(name: str, **fields: Any) -> int:
    return phases(**fields)[name].moment.allocated_bytes


@pytest.mark.parametrize(("wide", "each"), [(False, 2), (True, 4)])
def test_logits_that_are_kept_stand_beside_their_gradients(wide: bool, each: int) -> None:
    """Backward's largest instant has a softmax and two gradients in fp32, beside the logits as the loop has them."""
    kept = allocated("backward", outputs_kept="backward", outputs_fp32=wide)
    assert kept - allocated("backward") == each * TOKENS * VOCABULARY


@pytest.mark.parametrize(("kept", "step", "forward"), [("backward", 0, 0), ("step", 1, 0), ("next", 1, 1)])
def test_outputs_are_there_in_the_step_and_in_the_next_forward_as_long_as_a_name_refers_to_them(
    kept: str, step: int, forward: int
) -> None:
    logits = 2 * TOKENS * VOCABULARY
    assert allocated("step", outputs_kept=kept) - allocated("step") == step * logits
    assert allocated("forward", outputs_kept=kept) - allocated("forward") == forward * logits


STATES = 29 * 2 * TOKENS * 1024  # inputs of 28 layers of 1,024 numbers a token, and the last norm's output, in bf16


@pytest.mark.parametrize(("kept", "step", "forward"), [("backward", 0, 0), ("step", 1, 0), ("next", 1, 1)])
def test_hidden_states_are_kept_beside_a_loss_that_returns_no_logits(kept: str, step: int, forward: int) -> None:
    """`out.hidden_states` of NeMo Automodel's `_forward_backward_step` with its loss of cut cross entropy."""
    more = {"loss": "cut", "outputs_kept": kept, "output_hidden_states": True}
    assert allocated("step", **more) - allocated("step", loss="cut") == step * STATES
    assert allocated("forward", **more) - allocated("forward", loss="cut") == forward * STATES


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({}, "outputs_kept none"),
        ({"outputs_kept": "next", "trainer": "ms-swift"}, "trainer ms-swift"),
        ({"outputs_kept": "next", "framework": "trl"}, "trainer transformers"),
    ],
)
def test_hidden_states_are_those_that_a_variable_of_ones_own_loop_keeps(fields: dict[str, Any], given: str) -> None:
    line = f"output_hidden_states: given true with {given}, allowed: false, or in your own loop with outputs_kept"
    with pytest.raises(ScenarioError, match=line):
        parse(JOB | {"output_hidden_states": True} | fields)


@pytest.mark.parametrize("task", ["simpo", "orpo", "dpo"])
def test_a_pair_without_a_reference_keeps_the_logits_of_both_its_sequences(task: str) -> None:
    """Until the next forward: two sequences of half the length, in bf16, in the step and in forward."""
    pair = {"task": task, "seq_len": TOKENS // 2, "logprob": "selective"} | (
        {"roles": {"reference": "none"}} if task == "dpo" else {}
    )
    logits = 2 * TOKENS * VOCABULARY
    for name in ("step", "forward"):
        assert allocated(name, outputs_kept="next", **pair) - allocated(name, **pair) == logits


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"trainer": "transformers"}, "outputs_kept: given next with trainer transformers, allowed: none, or with"),
        ({"framework": "trl"}, "outputs_kept: given next with framework trl, allowed: none, or with framework torch"),
        ({"task": "kto"}, "given next with task kto, allowed: none, or with task pretrain, sft, dpo, orpo, simpo"),
        ({"task": "dpo"}, "outputs_kept: given next with roles.reference, allowed: none, or roles.reference none"),
        ({"loss": "cut"}, "outputs_kept: given next with loss cut, allowed: none, or with loss full"),
    ],
)
def test_only_loops_of_ones_own_say_what_becomes_of_their_outputs(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ScenarioError, match=line):
        parse(JOB | {"outputs_kept": "next"} | fields)
    with pytest.raises(ScenarioError, match="outputs_fp32: given true with"):
        parse(JOB | {"outputs_fp32": True} | fields)


def test_a_loss_in_the_type_of_its_logits_makes_nothing_in_fp32() -> None:
    """Of each logit forward has it and its log-softmax, backward that, two gradients, and the logit that is kept.

    NeMo Automodel 36044ad3d `components/loss/masked_ce.py` with `fp32_upcast: false`; `out` lives as long
    as `_forward_backward_step` of `recipes/llm/train_ft.py`.
    """
    narrow, wide = (phases(precision="bf16", loss_fp32=wide)["forward"].moment.lines for wide in (False, True))
    each = TOKENS * VOCABULARY
    logits = [sum(line.bytes for line in lines if line.component == "logits") // each for lines in (narrow, wide)]
    assert logits == [4, 10]
    kept = phases(precision="bf16", loss_fp32=False, outputs_kept="backward")["backward"].moment
    assert sum(line.bytes for line in kept.lines if line.component == "logits") // each == 8
    with pytest.raises(ScenarioError, match="loss_fp32: given false with trainer transformers"):
        parse(JOB | {"trainer": "transformers", "loss_fp32": False})
