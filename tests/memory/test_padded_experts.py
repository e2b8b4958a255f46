"""Routed experts as torchtitan's first code ran them, on a tape."""

from __future__ import annotations

import pytest
from formulas import form, terms
from tapes import arch, backward_of, check, forward_of, passing, tape

from calc.base.refusal import Refusal
from calc.memory.activations import Program
from calc.memory.run import Run
from calc.models.architecture import layer_kinds, layer_parameters
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

TITAN = {"padded": True}
JOB = {
    "model": "qwen3-30b-a3b", "task": "sft", "gpu": "h200", "gpus": 8, "sharding": "fsdp2",
    "experts_implementation": "torchtitan",
}  # fmt: skip


def test_a_layer_keeps_the_filled_rows_and_the_outputs_in_fp32() -> None:
    """Of each row: what gate and up read, 2h, and the outputs in fp32, 4h; gate, act(gate), up and their product, 8j.

    Routing: the best 4k, their index 8k and their sum 4; the order of the weights 8k, the tokens 8k, the order of the
    filled rows 4k, and the weights in fp32, 4k (prime-rl c330a6d4e `trainer/models/layers/moe.py`).
    """
    kept = terms(tape("qwen3-30b-a3b", moe=True, **TITAN).saved(), arch("qwen3-30b-a3b"))[0]
    assert kept == form("16h + 10q + 10kv + 8H + 4K + 4E + 36k + 6k·h + 8k·j + 12")[0]


def test_three_copies_of_the_rows_are_there_beside_those_in_fp32() -> None:
    """Forward: the gathered rows, with a row of zeros, and filled up, 2kh each; a variable keeps the first, and one the
    last copy, 2kh each beside the saved ones, while the outputs' product in fp32, 4kh, is made and cast, 2kh.

    Backward of that product: its gradient in fp32, that of the outputs, and the product which becomes the weights'
    gradient, 4kh each.
    """
    made = tape("qwen3-30b-a3b", moe=True, **TITAN)
    check(passing("qwen3-30b-a3b", forward_of(made)), """
        experts: fill up = 4h + 6k·h + 4k
        experts: weigh = 4h + 8k·h
        experts: weighed: to bf16 = 4h + 10k·h
    """)  # fmt: skip
    check(passing("qwen3-30b-a3b", backward_of(made)), """
        experts: weigh = 2h + 12k·h + 4k
    """)  # fmt: skip


def test_backward_makes_the_gradient_of_every_expert_once() -> None:
    a = arch("qwen3-30b-a3b")
    run = Run(a, padded=True)
    made = sum(backward_of(Program(run, spec).layer())[-1].gradients * n for spec, n in layer_kinds(a))
    assert made == sum(layer_parameters(a, spec) * n for spec, n in layer_kinds(a))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, ""),
        ({"outer_units": "kept"}, ""),
        ({"model": "qwen3-8b"}, "experts_implementation"),
        ({"trainer": "torchtitan"}, ""),
        ({"trainer": "axolotl"}, "experts_implementation"),
        ({"sharding": "zero3"}, "experts_implementation"),
        ({"sharding": "ddp", "experts_implementation": "transformers", "outer_units": "kept"}, "outer_units"),
        ({"model": "qwen3-4b", "experts_implementation": "transformers", "outer_units": "kept"}, "outer_units"),
    ],
)
def test_it_is_refused_where_it_was_not_read(fields: dict[str, str], field: str) -> None:
    try:
        parse(JOB | fields)
    except ScenarioError as error:
        assert isinstance(error.refusal, Refusal)
        assert error.refusal.field == field
    else:
        assert not field
