"""Gemma 4's layers on Megatron-core: what their norms, gates and experts beside a dense MLP keep, and how they are cut.

Counted in mcore-bridge 1.6.5 `mcore_bridge/model/mm_gpts/gemma4.py`, and Megatron-LM d98e8a64dd
`megatron/core/transformer/{mlp,moe/experts}.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calc.base.plan import Path
from calc.memory import activations
from calc.memory.loss import head
from calc.memory.run import Kernel, Run
from calc.models.architecture import Architecture, ConfigError, LayerSpec, parameters
from calc.models.mixers import Broad
from calc.models.slices import part
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

KV, K, INNER = 128, 2, 1024
GROUPED = Architecture(
    family="gemma4_text", hidden=512, specs=(LayerSpec(),), heads=8, kv_heads=K, head_dim=64, intermediate=INNER,
    vocab=1024, tied=False, max_positions=4096, modeling="megatron", qk_norm="heads",
)  # fmt: skip
SPEC = LayerSpec(mlp="experts")
MOE = replace(GROUPED, specs=(SPEC,), experts=8, experts_per_token=2, moe_intermediate=256, qk_norm="")
GEMMA: dict[str, Any] = {
    "model": "gemma-4-26b-a4b", "task": "sft", "framework": "torch", "trainer": "megatron-swift", "gpu": "h100-sxm",
    "gpus": 8, "versions": {"megatron-swift": "4.6"},
}  # fmt: skip


def saved(arch: Architecture, kernel: Kernel = "flash") -> float:
    """Bytes a token that a layer saves."""
    return activations.layer(Run(arch, kernel=kernel), arch.specs[0]).saved.tokens


def test_a_norm_without_weights_keeps_values_in_fp32() -> None:
    """The input widened, 4·kv, and a scale of each head, 4·K; its output is what attention keeps, as a copy before."""
    assert saved(replace(GROUPED, values_normed=True)) - saved(GROUPED) == 4 * KV + 4 * K


def test_values_that_are_the_keys_make_the_product_narrower() -> None:
    """Neither norm keeps it: of its 2·q + 4·kv, those of keys and values read copies, and 2·kv are not made."""
    values = replace(GROUPED, values_normed=True)
    shared = replace(values, keys_as_values=True)
    assert saved(values) == saved(shared)
    widths = [op.outs[0].width for arch in (values, shared)
              for op in activations.program(Run(arch), SPEC).layer().ops if op.name == "linear_qkv"]  # fmt: skip
    assert widths[0].tokens["kv"] - widths[1].tokens["kv"] == 1


def test_a_gate_that_no_kernel_fuses_keeps_what_it_activates_and_a_copy_of_the_ups() -> None:
    """10·i in place of 6·i; experts 12·k·j, whose weighed product is cast again, in place of 6·k·j."""
    gelu = {"activation": "gelu_pytorch_tanh"}
    assert saved(replace(GROUPED, **gelu)) - saved(GROUPED) == 4 * INNER
    assert saved(replace(MOE, **gelu)) - saved(MOE) == 6 * 2 * 256


def test_experts_beside_a_dense_mlp_read_the_stream_behind_a_norm_of_their_own() -> None:
    """Beside a layer of each kind: the stream in fp32 with its scale, what the scale multiplies, and what the router
    reads, 4·h + 4 + 2·h; its probabilities, 2·E; inputs and scales of the norms of both outputs, twice 2·h + 4.
    """
    dense = replace(MOE, specs=(LayerSpec(),))
    alone = replace(dense, intermediate=0)
    attention = saved(alone) - (2 * 512 + 4 + 2 * 512)  # what an MLP's norm and first product keep
    both = attention + (saved(dense) - attention) + (saved(MOE) - attention)
    beside = replace(MOE, experts_beside=True, router="router.proj", experts_name="experts", router_linear=True)
    # the norm before the MLP and that before the experts read one stream
    extra = (4 * 512 + 4 + 2 * 512) + 2 * 512 + 2 * 8 + 2 * (2 * 512 + 4)
    assert saved(beside) == both + extra - 2 * 512 - 2 * 512


def test_experts_beside_a_dense_mlp_run_again_with_their_norms() -> None:
    """Of all that they keep their input alone is left, which is the residual stream that the MLP's norm keeps."""
    beside = replace(MOE, experts_beside=True, router="router.proj", experts_name="experts", router_linear=True)
    again = activations.layer(Run(beside, again=frozenset({"moe"})), SPEC).saved.tokens
    dense = saved(replace(MOE, specs=(LayerSpec(),)))
    assert again - dense == 2 * (2 * 512 + 4)


def test_layers_of_both_kinds_of_heads_are_cut() -> None:
    """Four of eight heads of 64, and four of 128 with one key head of two."""
    two = (LayerSpec(), LayerSpec(broad=True))
    arch = replace(GROUPED, specs=two, broad=Broad(2, 128, keys_as_values=True))
    narrow, broad = (part(arch, 2).at(spec) for spec in two)
    assert (narrow.heads, narrow.kv_heads, narrow.head_dim) == (4, 1, 64)
    assert (broad.heads, broad.kv_heads, broad.head_dim, broad.keys_as_values) == (4, 1, 128, True)
    with pytest.raises(ConfigError, match="a divisor of the 2 key heads of some layers"):
        part(replace(arch, kv_heads=4), 4)


def test_parameters_of_a_rank_of_gemma_4() -> None:
    """Two ranks to a layer, four to its experts. 25 layers of 8 heads of 256 with 4 key heads, 5 of 8 of 512 with one,
    which makes the values, too; norms of heads; of experts 32 of 3·2816·704, beside 3·2816·1056; a router with its
    scales, seven norms of the stream; the table, 262,144/2 rows.
    """
    arch = parse(GEMMA | {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4}).architecture
    h = 2816
    other = 32 * 3 * h * 704 + 3 * h * 1056 + 128 * h + h + 128 + 7 * h
    sliding, whole = h * (8 + 4 + 4 + 8) * 256 + 2 * 256, h * (8 + 1 + 8) * 512 + 2 * 512
    assert parameters(part(arch, 2, 4)) == 25 * sliding + 5 * whole + 30 * other + 131_072 * h + h


def test_logits_of_a_rank_are_capped_on_that_rank() -> None:
    """`Gemma4TextGPTModel._forward_output_layer`: before ranks join anything; a tanh is kept, 2·V of a rank's part."""

    def kept(arch: Architecture) -> float:
        return head(Run(arch), Path("vocab-parallel"))[0].saved.tokens

    for ranks in (1, 2):
        capped = part(replace(GROUPED, softcap_logits=True), ranks)
        assert kept(capped) - kept(part(GROUPED, ranks)) == 2 * 1024 / ranks


def test_layers_that_borrow_keys_are_refused() -> None:
    with pytest.raises(ScenarioError, match="own for layers that borrow keys or have inputs of their own"):
        parse(GEMMA | {"model": "gemma-4-e4b"})


def test_releases_without_these_layers_refuse_them() -> None:
    with pytest.raises(ScenarioError, match="own for the family gemma4_text"):
        parse(GEMMA | {"versions": {"megatron-swift": "3.12"}})
