"""IA3: a vector of each target, and what its products keep, by hand from peft 0.21 `tuners/ia3/layer.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architectures import published

from calc.memory.activations import Program, layer
from calc.memory.run import Adapter, Run
from calc.models.lora import lora_parameters
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

TARGETS = ("k_proj", "v_proj", "down_proj")
LLAMA = replace(published("llama-3.2-3b"), adapters="vectors")
JOB = {"model": "llama-3.2-3b", "task": "sft", "framework": "torch", "gpu": "l40s", "method": "lora", "micro_batch": 1,
       "seq_len": 1024, "lora": {"ia3": True, "rank": 1, "targets": [*TARGETS]}}  # fmt: skip


@pytest.mark.parametrize("rank", [1, 64])
def test_each_target_has_a_vector_whatever_the_rank(rank: int) -> None:
    """28 layers of 1,024 + 1,024 + 8,192, as PEFT prints (`num_trainable_params` of its comparison on MetaMathQA)."""
    assert lora_parameters(LLAMA, rank, TARGETS) == 286_720


def test_products_keep_what_a_vector_weighs_and_a_copy_of_it() -> None:
    """Beside the vectors' copies in fp32, 4 bytes each: of keys and values what their linears return, 2 bytes each, and
    an MLP's input in fp32, 4; adapters of rank 1 beside none of them would keep none.
    """
    alone = Run(LLAMA, trained=False, adapter=Adapter(1, TARGETS, False, 4, ia3=True))
    other = replace(alone, adapter=Adapter(1, ("o_proj",), False, 4, ia3=True))
    (ours, theirs) = (layer(run, LLAMA.specs[0]).saved.bytes(1000, 1000) for run in (alone, other))
    assert ours - theirs == 1000 * (2 * 2 * 1024 + 4 * 8192 - 2 * 3072) + 4 * (2 * 1024 + 8192 - 3072)
    names = [op.name for op in Program(alone, LLAMA.specs[0]).layer().ops]
    assert names.index("down_proj: IA3") < names.index("down_proj") and names.index("k_proj") < names.index(
        "k_proj: IA3"
    )


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"sharding": "zero2", "gpus": 2}, "true with sharding zero2"),
        ({"trainer": "axolotl"}, "true with trainer axolotl"),
        ({"lora": {"ia3": True, "targets": ["lm_head", "k_proj"]}}, "true with lora.targets lm_head"),
        ({"lora": {"ia3": True, "dora": True, "targets": ["k_proj"]}}, "true with lora.dora"),
    ],
)
def test_vectors_are_refused_where_they_are_not_modelled(fields: dict[str, object], given: str) -> None:
    with pytest.raises(ScenarioError, match=f"lora.ia3: given {given}"):
        parse(JOB | fields)
