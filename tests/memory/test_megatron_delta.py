"""Gated delta rules in Megatron-core: what a layer keeps, how its heads are cut, and what other ranks' positions cost.

Traced: Megatron-LM d98e8a64dd `megatron/core/ssm/gated_delta_net/gdn.py` and mcore-bridge 1.6.5
`model/modules/gated_delta_net.py` ran on PyTorch 2.13 with the sizes of Qwen3.5 4B, compiled as they are, fla's kernels
replaced by functions that keep the same tensors; storages that autograd's hooks were handed are counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tapes import arch

from calc.autograd.polynomial import amount
from calc.frameworks import megatron_core
from calc.memory import activations
from calc.memory.run import Adapter, Run, dimensions
from calc.models.architecture import Architecture, ConfigError, LayerSpec, layer_tensors, parameters
from calc.models.lora import adaptable
from calc.models.slices import part, stage

DELTA, ATTENTION = LayerSpec("delta"), LayerSpec()
H, INNER = 2560, 9216  # of Qwen3.5 4B
# behind the block: the stream and the scale of its norm, the norm's output, gate and up, their product
MLP = 2 * H + 4 + 2 * H + 4 * INNER + 2 * INNER
STREAM = 2 * H + 4  # before it: the stream and the scale of its norm


def modelled(model: str, *, by_head: bool = False) -> Architecture:
    return megatron_core.modelled(arch(model), "trainer", "own", by_head=by_head)


def saved(a: Architecture, spec: LayerSpec = DELTA, **how: Any) -> float:
    """Bytes a token that a layer saves."""
    return activations.layer(Run(a, **how), spec).saved.tokens


@pytest.mark.parametrize(("by_head", "traced"), [(False, 99_904), (True, 91_840)])
def test_a_layer_keeps_what_was_traced(by_head: bool, traced: int) -> None:
    """Behind the norm, bytes a token: what the block keeps from the input of its first product on."""
    assert saved(modelled("qwen3.5-4b", by_head=by_head)) == STREAM + traced + MLP


def test_the_closed_form_of_what_a_block_keeps() -> None:
    """16 key and 32 value heads of 128: d_k = 2048, d_v = d_e = 4096, d_c = 8192.

    The norm's output 2·h; what the first product made 2·(d_c + d_v + 2·n_v); normed queries and keys 4·d_k with 8·n_k;
    beta 2·n_v; for the rule queries and keys 4·d_e, values 2·d_v, decays 4·n_v, a row of each chunk 128·n_v; its output
    2·d_v with 4·n_v; the norm's output and the gate 4·d_v; the input of the last product 2·d_v.
    """
    d_k, d_v, d_e, d_c, n_k, n_v = 2048, 4096, 4096, 8192, 16, 32
    block = 2 * H + 2 * (d_c + d_v + 2 * n_v) + 4 * d_k + 8 * n_k + 2 * n_v
    block += 4 * d_e + 2 * d_v + (4 + 128) * n_v + 2 * d_v + 4 * n_v + 4 * d_v + 2 * d_v
    assert block == 99_904
    assert saved(modelled("qwen3.5-4b")) == STREAM + block + MLP


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_has_its_heads_their_channels_and_their_gates(ranks: int) -> None:
    """Qwen3.5 27B, hidden 5120, 16 key and 48 value heads of 128: the norm of a head stays whole."""
    cut = part(modelled("qwen3.5-27b"), ranks)
    projected, convolved, gates, out = (2 * 2048 + 2 * 6144 + 2 * 48) * 5120, (2 * 2048 + 6144) * 4, 2 * 48, 6144 * 5120
    mine = [t for t in layer_tensors(cut, DELTA) if ".linear_attn." in t.name]
    assert sum(t.elements for t in mine) == (projected + convolved + gates + out) // ranks + 128


def test_expert_ranks_hold_their_experts_and_tensor_ranks_halves_of_the_rest() -> None:
    """Qwen3.5 35B-A3B: 40 layers of 256 experts of 3·2048·512; of eight ranks each has 32."""
    whole, spread = (parameters(part(modelled("qwen3.5-35b-a3b"), 2, ranks)) for ranks in (1, 8))
    assert whole - spread == 40 * (256 - 32) * 3 * 2048 * 512


def test_heads_that_do_not_divide_are_refused() -> None:
    a = replace(modelled("qwen3.5-27b"), heads=48, kv_heads=48, intermediate=48 * 128)
    with pytest.raises(ConfigError, match="tensor_parallel: given 3, allowed: a divisor of the model's linear_num_key"):
        part(a, 3)


def test_sequence_parallelism_halves_all_that_a_layer_keeps() -> None:
    """Norms see a rank's own positions, all else its heads."""
    a = modelled("qwen3.5-4b")
    assert saved(part(a, 2), sequences=True) == saved(a) / 2


def test_every_rank_of_mcore_bridge_norms_all_positions() -> None:
    """In place of half of the stream, its scale and the norm's output it keeps all of them: 2·h + 2 bytes more."""
    a = modelled("qwen3.5-4b", by_head=True)
    assert saved(part(a, 2), sequences=True) - saved(a) / 2 == 2 * H + 2


@pytest.mark.parametrize("by_head", [False, True])
def test_context_parallelism_swaps_positions_and_heads(by_head: bool) -> None:
    """As much is kept for each of a rank's tokens; each all-to-all takes a copy of what it sends, or has got."""
    a = modelled("qwen3.5-4b", by_head=by_head)
    assert saved(a, context=4) == saved(a)
    tape = activations.program(Run(a, context=4), DELTA).layer()
    found = {op.name: amount(op.scratch, dimensions(a)).tokens for op in tape.ops if "all-to-all" in op.name}
    assert found == {
        "delta: all-to-all": 2 * (8192 + 4096 + 64),
        "delta: all-to-all back": 2 * 4096,
    }
    alone = [op.name for op in activations.program(Run(a), DELTA).layer().ops]
    assert not any("all-to-all" in name or "order" in name for name in alone)


def test_the_convolution_makes_its_output_and_a_gradient_for_each_chunk_again() -> None:
    """2·d_c, and of four weights of each channel in fp32 one for each 64 positions: d_c·16/64."""
    a = modelled("qwen3.5-4b")
    (op,) = [op for op in activations.program(Run(a), DELTA).layer().ops if op.name == "delta: convolution"]
    assert amount(op.backward_scratch, dimensions(a)).tokens == 2 * 8192 + 8192 / 4


def test_a_gate_keeps_the_product_in_which_it_lies() -> None:
    """One key/value head on a rank: the gate is a view of all of 2·(2·q + 2·kv) bytes; the output is kept already.

    With several heads it is copied, 2·q.
    """
    a = part(modelled("qwen3.5-35b-a3b"), 2)
    plain = replace(a, output_gate=False)
    q, kv = 8 * 256, 256
    assert a.kv_heads == 1
    spec = LayerSpec(mlp="experts")
    gated = {op.name: op for op in activations.program(Run(a), spec).layer().ops}["attention: gate"]
    assert [amount(t.storage.size, dimensions(a)).tokens for t in gated.saves] == [2 * q, 2 * (2 * q + 2 * kv)]
    # the context that the next product keeps is the gate's output, and attention's is kept beside it
    assert saved(a, spec) - saved(plain, spec) >= 2 * q
    whole = modelled("qwen3.5-35b-a3b")
    gated = {op.name: op for op in activations.program(Run(whole), spec).layer().ops}["attention: gate"]
    assert [amount(t.storage.size, dimensions(whole)).tokens for t in gated.saves] == [4 * q, 4 * q]


def test_a_shared_expert_is_weighed_by_a_sigmoid() -> None:
    """Its output of 2·h and the sigmoid's 2 bytes are kept; the logit's input is the router's."""
    a, spec = modelled("qwen3.5-35b-a3b"), LayerSpec("delta", "experts")
    assert saved(a, spec) - saved(replace(a, shared_gate=False), spec) == 2 * 2048 + 2


def test_adapters_stand_beside_the_products_to_and_from_the_rule() -> None:
    """mcore-bridge, two ranks: both see all positions, each has half of what is cut.

    Matrices of in_proj: 8·(2560 + 12352/2) elements, of out_proj 8·(4096/2 + 2560). What frozen products do not keep
    their adapters do: inputs, and a product of low rank each, 2·8.
    """
    a = part(modelled("qwen3.5-4b", by_head=True), 2)
    found = {x.name: 8 * (x.inputs + x.outputs) for x in adaptable(a, DELTA)}
    assert found["linear_attn.in_proj"] == 8 * (2560 + 12_352 // 2)
    assert found["linear_attn.out_proj"] == 8 * (4096 // 2 + 2560)
    adapter = Adapter(8, ("in_proj", "out_proj"), False, 2)
    plain = saved(a, trained=False, sequences=True)
    assert saved(a, trained=False, sequences=True, adapter=adapter) - plain == 2 * H + 4096 + 2 * (2 * 8)


def test_recomputing_attention_leaves_linear_attention_as_it_is() -> None:
    """Beside it, no log-sum-exp of 16 heads stays; in place of the copy of values, 1024, it keeps the product that they
    are a part of: queries and gates of 4096, keys and values.
    """
    a = modelled("qwen3.5-4b")
    again = frozenset({"core_attn"})
    assert saved(a, again=again) == saved(a)
    more = 2 * (2 * 4096 + 2 * 1024) - 2 * 1024 - 4 * 16
    assert saved(a, ATTENTION, again=again) - saved(a, ATTENTION) == more


def test_stages_have_the_kinds_of_layers_that_lie_in_them() -> None:
    """Every fourth of 32 layers attends: of three stages the first two have 11, of which two and three do."""
    a = modelled("qwen3.5-4b")
    found = [[spec.mixer for spec in stage(a, index, 3).specs] for index in range(3)]
    assert [len(kinds) for kinds in found] == [11, 11, 10]
    assert [kinds.count("attention") for kinds in found] == [2, 3, 3]
