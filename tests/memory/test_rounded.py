"""Training that is aware of quantisation: copies of weights that were rounded to four bits and back.

A frozen weight's copy of 2 bytes an element is all that torchao 0.14.1's `Int4WeightFakeQuantizer` and `F.linear` keep
of it, counted with PyTorch's hooks of saved tensors; 16 bytes at most are there as it is made.
"""

from __future__ import annotations

import pytest
from architectures import published

from calc.memory.activations import Program, layer
from calc.memory.run import Adapter, Run
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError

LLAMA = published("llama-3.2-3b")
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
JOB = {"model": "qwen3-4b", "task": "sft", "framework": "torch", "trainer": "unsloth", "gpu": "t4", "precision": "fp16",
       "method": "lora", "lora": {"rank": 16, "targets": NAMES}, "micro_batch": 1, "seq_len": 2048,
       "versions": {"unsloth": "2025.10.8"}}  # fmt: skip


def job(**fields: object) -> Scenario:
    return parse(JOB | fields)


def test_each_product_keeps_a_copy_of_its_weight() -> None:
    adapter = Adapter(16, "all-linear", False, 2)
    rounded, plain = (Run(LLAMA, trained=False, adapter=adapter, rounded=word) for word in (True, False))
    spec = LLAMA.specs[0]
    h, kv, i = 3072, 1024, 8192
    copies = layer(rounded, spec).saved.bytes(1000, 1000) - layer(plain, spec).saved.bytes(1000, 1000)
    assert copies == 2 * (2 * h * h + 2 * h * kv + 3 * h * i)
    (made,) = [op for op in Program(rounded, spec).layer().ops if op.name == "down_proj: to 4 bits and back"]
    assert made.scratch.fixed == {"W_down_proj": 14} and made.outs[0].b == 2


def test_short_micro_batches_round_the_head_too() -> None:
    """Up to 1,024 tokens Unsloth calls the head itself (models/llama.py:1210 of 2025.10.9), whose logits are kept."""
    path = job(qat_scheme="int4").keeps.roles[0].path
    assert (path.kind, path.kept) == ("flash", 0.5)
    assert job(qat_scheme="int4", seq_len=1024).keeps.roles[0].path.kept == 1
    assert job().keeps.roles[0].path.kind != "flash"


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"trainer": "ms-swift", "versions": {}}, "int4 with trainer ms-swift"),
        ({"method": "qlora"}, "int4 with method qlora"),
        ({"method": "full", "lora": None}, "int4 with method full"),
    ],
)
def test_weights_are_rounded_only_where_that_is_modelled(fields: dict[str, object], given: str) -> None:
    asked = {name: value for name, value in (JOB | {"qat_scheme": "int4"} | fields).items() if value is not None}
    with pytest.raises(ScenarioError, match=f"qat_scheme: given {given}"):
        parse(asked)
