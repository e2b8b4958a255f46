"""Attention without a fused kernel in Megatron-core: what a layer keeps, what it takes in passing, and sinks.

Counted in TransformerEngine d0067d0d `pytorch/attention/dot_product_attention/{backends,softmax}.py`,
`UnfusedDotProductAttention._forward` and `FusedScaleMaskSoftmax.forward_torch_softmax`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calc.autograd.polynomial import Segment
from calc.estimate.estimate import estimate
from calc.memory import activations
from calc.memory.run import Kernel, Run
from calc.models.architecture import Architecture, LayerSpec, parameters
from calc.models.slices import part
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

Q, KV = 512, 128
GROUPED = Architecture(
    family="qwen3", hidden=512, specs=(LayerSpec(),), heads=8, kv_heads=2, head_dim=64, intermediate=1024, vocab=1024,
    tied=False, max_positions=4096, modeling="megatron",
)  # fmt: skip
SINKS = replace(GROUPED, attention_sinks=True)


def layer(arch: Architecture, kernel: Kernel) -> Segment:
    """A layer of it."""
    return activations.layer(Run(arch, kernel=kernel), arch.specs[0])


@pytest.mark.parametrize(
    ("arch", "kernel", "kept"), [(GROUPED, "eager", 2), (GROUPED, "math", 4 + 2), (SINKS, "eager", 4 + 2)]
)
def test_a_layer_keeps_probabilities_once_or_in_both_formats(arch: Architecture, kernel: Kernel, kept: int) -> None:
    """A kernel's output is what multiplies the values; PyTorch's softmax keeps fp32, the product its 16-bit copy."""
    assert layer(arch, kernel).saved.pairs == kept * 8


@pytest.mark.parametrize("arch", [GROUPED, SINKS])
def test_a_plain_softmax_has_scores_twice_and_probabilities_twice_at_its_peak(arch: Architecture) -> None:
    """Scores in 16 bits, which a variable keeps, and in fp32; probabilities in fp32, and their copy in 16 bits."""
    segment = layer(arch, "math")
    assert max(shot.saved.pairs + shot.passing.pairs for shot in segment.forward) == (2 + 4 + 4 + 2) * 8


def test_keys_and_values_are_written_out_for_every_query() -> None:
    """2·q each in place of 2·kv, and attention's output 2·q, which stays as it is; no log-sum-exp, 4·H."""
    assert layer(GROUPED, "math").saved.tokens - layer(GROUPED, "flash").saved.tokens == 2 * 2 * (Q - KV) - 4 * 8


def test_each_head_has_a_sink_which_ranks_share() -> None:
    assert [parameters(part(SINKS, n)) - parameters(part(GROUPED, n)) for n in (1, 2)] == [8, 4]


OSS: dict[str, Any] = {
    "model": "gpt-oss-20b", "task": "sft", "framework": "torch", "trainer": "megatron-swift", "gpu": "h100-sxm",
    "gpus": 2, "expert_parallel": 2, "attention": "eager", "padding_free": False, "checkpointing": "full",
}  # fmt: skip


def test_scores_of_padded_rows_are_written_out_where_a_job_asks_for_them() -> None:
    """Forward of the last layer alone is not the peak; more tokens of a row cost more than as many rows."""

    def peak(**more: int) -> int:
        return estimate(parse(OSS | {"seq_len": 2048, "micro_batch": 2} | more)).groups[0].peak.moment.allocated_bytes

    assert peak(seq_len=8192, micro_batch=1) > peak(seq_len=1024, micro_batch=8)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"padding_free": True}, "padding_free"),
        ({"packing": True}, "padding_free"),
        ({"checkpointing": "none"}, "checkpointing"),
    ],
)
def test_attention_without_a_kernel_is_refused_where_it_was_not_read(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ScenarioError, match=f"{field}: given .* with attention eager"):
        parse(OSS | change)
