"""Multi-token prediction of Megatron-core: what a depth keeps, and where its parameters lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.base.plan import Path
from calc.memory import activations
from calc.memory.loss import head
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture, LayerSpec, parameters, tensors
from calc.models.lora import adapter_matrices, lora_parameters
from calc.models.slices import chunk, part, stage
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError
from calc.step.placement import adapter_tensors

H, V = 512, 1024
PLAIN = Architecture(
    family="qwen3", hidden=H, specs=(LayerSpec(),) * 4, heads=8, kv_heads=8, head_dim=64, intermediate=2048,
    vocab=V, tied=False, max_positions=4096, modeling="megatron",
)  # fmt: skip
PATH = Path("vocab-parallel")
ONE, TWO = (replace(PLAIN, depths=(LayerSpec(),) * n) for n in (1, 2))


def kept(arch: Architecture, *, again: bool = False) -> float:
    """Bytes a token that depths, head and loss save."""
    return head(Run(arch, training=True), PATH, again)[0].saved.tokens


def test_a_depth_keeps_its_norms_their_join_a_layer_and_logits_of_its_own() -> None:
    """Inputs of three norms, 2·h each, with a number of 4 bytes; what `eh_proj` reads, 4·h; the layer; its output, 2·h,
    beside the stream's joined copy; probabilities in fp32, 4·V. The first norm's input is the final norm's output, of
    which the head, too, now has a copy.
    """
    layer = activations.layer(Run(PLAIN, training=True), LayerSpec()).saved.tokens
    # the layer's input is counted with the layer
    own = 3 * (2 * H + 4) + 4 * H + layer + 2 * H + 4 * V
    assert kept(ONE) - kept(PLAIN) == own


def test_a_second_depth_keeps_as_much_but_for_the_first_ones_output() -> None:
    """Which it reads, and which the join has copied; of the depth before nothing else was kept twice."""
    assert kept(TWO) - kept(ONE) == kept(ONE) - kept(PLAIN)


def test_depths_that_run_again_keep_the_streams_that_they_read() -> None:
    """The stream before and the embedding, 4·h, and of what follows the copy of the stream and the probabilities."""
    assert kept(ONE, again=True) - kept(PLAIN) == 4 * H + 2 * H + 4 * V


def test_the_last_stage_alone_has_depths_and_a_copy_of_the_embedding() -> None:
    """One depth: a layer, 2·h² that join, three norms; the copy V·h."""
    alone = parameters(ONE) - parameters(PLAIN)
    assert [parameters(stage(ONE, n, 2)) - parameters(stage(PLAIN, n, 2)) for n in (0, 1)] == [0, alone + V * H]
    assert [bool(chunk(ONE, 1, 2, 2, n).depths) for n in (0, 1)] == [False, True]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_cut_what_joins_both_streams(ranks: int) -> None:
    joins = [t for t in tensors(part(ONE, ranks)) if t.name == "mtp.layers.0.eh_proj.weight"]
    assert [t.shape for t in joins] == [(H // ranks, 2 * H)]


SWIFT = {
    "model": "glm-4.5-air", "task": "sft", "framework": "torch", "trainer": "megatron-swift", "gpu": "h100-sxm",
    "gpus": 4, "tensor_parallel": 4, "sequence_parallel": True, "expert_parallel": 4, "method": "lora",
    "checkpointing": "full", "packing": True,
}  # fmt: skip


def test_adapters_stand_in_a_depths_layer_too() -> None:
    """GLM-4.5-Air: 46 layers, and one more; ranks of 2·(8 + 96/2 + 8)·128 and 4096 beside queries, keys and values."""
    found = []
    for depths in (None, 1):
        s = parse(SWIFT | {"mtp_num_layers": depths, "lora": {"rank": 32, "targets": ["linear_qkv", "linear_proj"]}})
        held = adapter_tensors(s.architecture, Adapter(32, s.lora.targets, dropout=False, b=2))  # type: ignore[union-attr]
        found.append(sum(t.count * t.elements for t in held))
    each = 32 * (4096 + (96 + 2 * 8) * 128) + 32 * (96 * 128 + 4096)
    assert found == [46 * each, 47 * each]


def test_every_linear_is_what_joins_both_streams_too() -> None:
    """Beside `eh_proj`, 8192 to 4096, an adapter whose first matrix keeps what was joined, where no rank cuts it."""
    whole = SWIFT | {"tensor_parallel": 1, "sequence_parallel": False, "lora": {"rank": 32, "targets": "all-linear"}}
    counts = []
    for depths in (None, 1):
        s = parse(whole | {"mtp_num_layers": depths})
        held = adapter_tensors(s.architecture, Adapter(32, "all-linear", dropout=False, b=2))
        counts.append(sum(t.count * t.elements for t in held))
        assert counts[-1] == lora_parameters(s.architecture, 32, "all-linear")
    layer = sum(t.elements for t in adapter_matrices(s.architecture, s.architecture.specs[-1], 32, "all-linear"))
    assert counts[1] - counts[0] == layer + 32 * (8192 + 4096)
    with pytest.raises(ScenarioError, match=r"lora\.targets: given 'all-linear' with mtp_num_layers = 1 and tensor"):
        parse(whole | {"mtp_num_layers": 1, "tensor_parallel": 4, "sequence_parallel": True})
