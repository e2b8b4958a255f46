"""Routed experts as torchtitan's first code ran them, on a tape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from formulas import form, terms
from tapes import arch, backward_of, check, forward_of, frozen, passing, tape, without_grad_of

from calc.base.refusal import Refusal
from calc.memory.activations import Program
from calc.memory.run import Adapter, Run
from calc.models.architecture import layer_kinds, layer_parameters
from calc.models.lora import lora_parameters
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


def test_adapters_beside_experts_keep_what_they_read_and_both_terms_of_each_sum_to_the_end() -> None:
    """Beside frozen experts: the filled rows, 2kh, which gate's and up's read, the product, 2kj, which down's does, and
    what lies between each two matrices, 2kr.

    In a forward without gradient, as down's sum is made: the gathered and the filled rows, down's two terms, one of
    them scaled, and the sum, 12kh; both terms of gate's and of up's, their sums and the product, 14kj (prime-rl
    559b44772 `trainer/models/layers/lora/multi_moe.py`, `MultiLoRAGroupedExperts.forward`).
    """
    own = replace(arch("qwen3-30b-a3b"), expert_linears=("gate_proj", "up_proj", "down_proj"))
    spec, beside = own.specs[0], Adapter(16, ("gate_proj", "up_proj", "down_proj"), False, 2)
    plain, made = (Program(Run(own, **frozen(it), padded=True), spec).layer() for it in (None, beside))
    before, kept = (terms(each.saved(), own)[0] for each in (plain, made))
    more = {name: size - before.get(name, 0) for name, size in kept.items() if size != before.get(name, 0)}
    assert more == form("2k·h + 2k·j + 6k·r")[0]
    assert backward_of(made)[-1].gradients == 128 * 16 * 3 * (2048 + 768)
    (summed,) = (at for at in without_grad_of(made) if at.name == "experts down_proj: LoRA add")
    there = terms(summed.passing, own)[0]
    assert (there["k·h"], there["k·j"]) == (12, 14)


def test_ends_of_names_tell_experts_from_shared_experts_that_have_linears_of_the_same_name() -> None:
    """GLM-4.5-Air in prime-rl's code: adapters beside attention, the first layer's MLP and all experts' parameters, and
    none beside shared experts (c330a6d4e `trainer/config.py`, `target_modules`; `models/layers/moe.py`).
    """
    mlp = ("gate_proj", "up_proj", "down_proj")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", *(f"{end}.{name}" for end in ("mlp", "experts") for name in mlp)]
    job = JOB | {"model": "glm-4.5-air", "method": "lora", "lora": {"rank": 16, "targets": targets}}
    s = parse(job)
    assert s.lora
    attention, dense, experts = 2 * (4096 + 12288) + 2 * (4096 + 1024), 3 * (4096 + 10944), 128 * 3 * (4096 + 1408)
    assert lora_parameters(s.architecture, 16, s.lora.modules) == 16 * (46 * attention + dense + 45 * experts)
    beside = Adapter(16, s.lora.modules, False, 2)
    made = Program(Run(s.architecture, **frozen(beside), padded=True), s.architecture.specs[-1]).layer()
    adapted = {at.name.partition(":")[0] for at in forward_of(made) if "LoRA" in at.name}
    assert adapted == {*targets[:4], *(f"experts {name}" for name in mlp)}


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
        ({"model": "glm-4.5-air", "method": "lora"}, ""),
        ({"method": "lora", "lora": {"rank": 16, "count": 4}}, ""),
        ({"method": "qlora"}, "experts_implementation"),
        ({"method": "lora", "experts_implementation": "automodel"}, "experts_implementation"),
        ({"trainer": "axolotl"}, "experts_implementation"),
        ({"sharding": "zero3"}, "experts_implementation"),
        ({"sharding": "ddp", "experts_implementation": "transformers", "outer_units": "kept"}, "outer_units"),
        ({"model": "qwen3-4b", "experts_implementation": "transformers", "outer_units": "kept"}, "outer_units"),
    ],
)
def test_it_is_refused_where_it_was_not_read(fields: dict[str, Any], field: str) -> None:
    try:
        parse(JOB | fields)
    except ScenarioError as error:
        assert isinstance(error.refusal, Refusal)
        assert error.refusal.field == field
    else:
        assert not field
