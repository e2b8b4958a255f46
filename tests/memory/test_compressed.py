"""DeepSeek-V4: its tensors, the ways of its layers, and what they keep, against tensors that Transformers 5.23 saves.

Transformers' own code was run on fake CUDA tensors (`python -m measurements.trace --detail`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from architectures import published, record

from calc.autograd.polynomial import amount
from calc.memory.activations import Program
from calc.memory.run import Run, dimensions
from calc.models.architecture import ConfigError, LayerSpec, active_parameters, layer_parameters, parameters
from calc.models.hf_config import from_config
from calc.resolve.parse import ScenarioError, parse

FLASH = published("deepseek-v4-flash")
SPARSE, HEAVY, WINDOW = (LayerSpec("compressed", "experts", pools=pools).shapes for pools in ("sparse", "heavy", ""))


def test_its_parameters_are_those_that_its_card_rounds() -> None:
    """284B in all and 13B active, 1.6T and 49B, its cards say; embedding and head count among the active ones."""
    assert (parameters(FLASH), active_parameters(FLASH)) == (284_332_230_231, 13_799_622_231)
    pro = published("deepseek-v4-pro")
    assert (parameters(pro), active_parameters(pro)) == (1_572_997_179_491, 49_779_058_787)


def test_a_layer_by_hand() -> None:
    """Queries through a rank of 1024 to 64 heads of 512, one key of 512, outputs in 8 groups through 1024 each; sinks,
    and norms of both ranks and of both blocks. 256 experts of 2048 and a shared one, a router. Around each block a
    product of four streams with 24 weights, their offsets and three scales. Layers that pool have two projections to
    a key's width or twice as much, an offset for each position of an entry, and a norm; the indexer's heads are 128
    wide.
    """
    h, rank, key, groups = 4096, 1024, 512, 8
    attention = h * rank + rank + rank * 64 * key + h * key + key + 64 * key // groups * groups * 1024
    attention += groups * 1024 * h + 64
    experts = 257 * 3 * h * 2048 + 256 * h
    streams = 2 * (24 * 4 * h + 24 + 3)
    assert layer_parameters(FLASH, WINDOW) == attention + experts + streams + 2 * h
    heavy = 2 * h * key + 128 * key + key
    assert layer_parameters(FLASH, HEAVY) - layer_parameters(FLASH, WINDOW) == heavy
    own = 2 * h * 2 * 128 + 4 * 2 * 128 + 128 + rank * 64 * 128 + h * 64
    sparse = 2 * h * 2 * key + 4 * 2 * key + key + own
    assert layer_parameters(FLASH, SPARSE) - layer_parameters(FLASH, WINDOW) == sparse


def test_layers_pool_as_the_config_lists_or_in_turn() -> None:
    """The published list has one number more, of the layer that predicts a second token."""
    config = dict(record("deepseek-v4-flash")["config"])
    assert [spec.pools for spec in FLASH.specs[:5]] == ["", "", "sparse", "heavy", "sparse"]
    del config["compress_ratios"]
    in_turn = [spec.pools for spec in from_config(config).specs]
    assert in_turn[:5] == ["heavy", "heavy", "heavy", "sparse", "heavy"]
    listed = from_config(config | {"layer_types": ["sliding_attention"] * 43})
    assert {spec.pools for spec in listed.specs} == {""}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("compress_ratios", [4, 8], "43 times 0, 4, 128"),
        ("compress_ratios", [[4]] * 43, "43 times 0, 4, 128"),
        ("layer_types", ["full_attention"] * 43, "other kinds are not modelled"),
        ("o_groups", 7, "a divisor of num_attention_heads = 64"),
        ("scoring_func", "sigmoid", "sqrtsoftplus"),
        ("n_shared_experts", 2, "others are not modelled"),
        ("qk_rope_head_dim", 1024, "at most 512"),
        ("compress_rates", {"heavily_compressed_attention": 0}, "a positive integer"),
        ("attention_bias", True, "false for the family deepseek_v4"),
    ],
)
def test_what_no_such_model_has_is_refused(field: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_config(record("deepseek-v4-flash")["config"] | {field: value})


def kept(run: Run, spec: LayerSpec, name: str) -> list[float]:
    """Bytes that the operation `name` saves: for each token and, of scores, for each pair."""
    dims = dimensions(run.arch)
    op = next(op for op in Program(run, spec).layer().ops if op.name == name)
    sizes = [amount(t.storage.size, dims) for t in op.saves]
    return [size.pairs or size.tokens for size in sizes]


def test_streams_are_kept_in_fp32_twice() -> None:
    """Four of 4096 numbers: in fp32 for their square and for their product with its root, then what is weighed."""
    run = Run(FLASH, kernel="eager")
    streams = 4 * 4096
    assert kept(run, SPARSE, "attn_hc: norm: square") == [4 * streams]
    assert kept(run, SPARSE, "attn_hc: weigh streams") == [16, 2 * streams]
    assert kept(run, SPARSE, "ffn_hc: mix streams") == [2 * 16, 2 * streams]


def test_scores_count_entries_and_are_fp32_from_sinks_that_stay_so() -> None:
    """64 heads, a key for each position and an entry for each fourth."""
    run = Run(FLASH, kernel="eager")
    assert kept(run, SPARSE, "softmax") == [64 * 1.25 * 2]
    assert kept(replace(run, keeps_wide=True), SPARSE, "softmax") == [64 * 1.25 * 4]
    assert kept(run, WINDOW, "softmax") == [64 * 2]


def test_one_key_is_copied_for_the_heads_of_several_sequences_alone() -> None:
    one, several = (kept(Run(FLASH, kernel="eager", single=single), WINDOW, "scores") for single in (True, False))
    assert (one[1], several[1]) == (2 * 512, 2 * 64 * 512)


JOB = {"model": "deepseek-v4-flash", "gpu": "b200", "gpus": 64, "framework": "trl", "sharding": "zero3"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": "grpo"}, "for the family deepseek_v4, allowed: none; generation is not modelled there"),
        ({"task": "sft", "method": "lora", "lora": {"targets": "all-linear"}}, "group by group"),
        ({"task": "sft", "framework": "torch", "sharding": "fsdp2", "tensor_parallel": 8}, "stays whole"),
        (
            {"task": "sft", "framework": "torch", "trainer": "megatron", "sharding": "megatron"},
            "Megatron-core's layers",
        ),
        ({"task": "rm"}, "one that Transformers can make score sequences"),
    ],
)
def test_what_is_not_modelled_of_it_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        parse(JOB | fields)
