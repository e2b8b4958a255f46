"""Gated delta rules on a tape, against tensors counted in Transformers 5.23 and fla-core 0.6.0.

Transformers' own code was run on fake CUDA tensors (`python -m measurements.trace --detail`), 1,024 tokens and four
layers. fla's was run in the same way, its Triton kernels replaced by nothing, so that its autograd function alone
allocates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tapes import arch, backward_of, forward_of

from calc.autograd.polynomial import Amount, amount, in_bytes, whole_chunks
from calc.autograd.tape import CHUNK
from calc.memory.activations import Program, kinds, layer, lowest_adapted
from calc.memory.run import Adapter, Run, dimensions
from calc.models.architecture import LayerSpec

DELTA, ATTENTION = LayerSpec("delta"), LayerSpec()
TOKENS = 1024


def kept(model: str, spec: LayerSpec = DELTA, **run: Any) -> Amount:
    return layer(Run(arch(model), **run), spec).saved


@pytest.mark.parametrize(
    ("model", "spec", "run", "traced"),
    [
        ("qwen3.5-4b", DELTA, {}, 486_675),
        ("qwen3.5-4b", ATTENTION, {}, 211_119),
        ("qwen3.5-0.8b", DELTA, {"precision": "fp32"}, 348_894),
        ("qwen3.5-0.8b", ATTENTION, {"precision": "fp32", "kernel": "math"}, 192_570),
        ("qwen3.5-0.8b", DELTA, {"precision": "autocast"}, 313_098),
        ("qwen3.5-0.8b", ATTENTION, {"precision": "autocast"}, 134_235),
        ("qwen3.5-4b", DELTA, {"linear_kernels": True}, 236_253),
    ],
)
def test_a_layer_keeps_what_was_traced(model: str, spec: LayerSpec, run: dict[str, Any], traced: int) -> None:
    """Bytes a token. Left out: weights that a norm adds 1 to, the mask of a chunk, three positions that padding adds.

    Autocast's casts of the first chunk, whose state is zero, and of the last, whose state nothing reads, are missing.
    """
    assert kept(model, spec, **run).bytes(TOKENS, TOKENS) / TOKENS == pytest.approx(traced, rel=0.01)
    if run.get("precision") != "autocast":
        assert kept(model, spec, **run).bytes(TOKENS, TOKENS) / TOKENS == pytest.approx(traced, rel=3e-4)


def test_the_closed_form_of_a_layer_in_pytorchs_operations() -> None:
    """Qwen3.5 4B, bf16: norms 2·(4h + 4h + 2h), MLP 8i, convolution 2·2·d_c, a gated norm of 18·d_v, and the rule.

    fp32 of the rule: queries and keys before their norms 8·d_e; in whole chunks values, solved and corrected values
    12·d_v, and of repeated keys queries, keys, keys times beta, solved, both decayed 24·d_e, five matrices of 64 by 64
    for each head and chunk, a state for each 64 positions.
    """
    formula = kept("qwen3.5-4b").formula
    assert formula == (
        "T·(20·h + 4·d_c + 22·n_v + 8·d_e + 12·d_v·C + 1296·n_v·C + 24·d_e·C + 0.0625·d_s·C + 18·d_v + 8·i + 8)"
    )


def test_the_kernels_keep_two_bytes_of_each_input_and_a_row_of_a_chunk() -> None:
    """Input of the convolution 2·d_c, queries and keys normed 4·d_k with 8·n_k, values within 20·d_v."""
    formula = kept("qwen3.5-4b", linear_kernels=True).formula
    assert formula == "T·(20·h + 2·d_c + 146·n_v + 4·d_k + 8·n_k + 20·d_v + 8·i + 8)"


def test_ranks_that_share_a_sequence_exchange_heads_and_repeat_keys() -> None:
    """ms-swift's code for Qwen3.5, of commit 5a1ff4bf9: 32 value heads beside 16 of keys, 128 wide, so that queries and
    keys of twice the width are kept, with a scale of each head; before the rule each is cut, sent and joined.
    """
    alone = Run(arch("qwen3.5-4b"), linear_kernels=True, trained=False)
    shared = replace(alone, context=4, exchange="zigzag")
    own, more = (layer(run, DELTA).saved.bytes(TOKENS, TOKENS) for run in (alone, shared))
    assert more - own == TOKENS * 2 * (2 * 2048 + 4 * 16)
    names = {op.name for op in Program(shared, DELTA).layer().ops}
    assert {f"delta: {name}: all-to-all" for name in ("q", "k", "v", "b", "a", "output")} <= names


def test_positions_count_up_to_whole_chunks() -> None:
    """65 positions take two chunks of 64, 64 one."""
    assert (whole_chunks(CHUNK), whole_chunks(CHUNK + 1)) == (1, 128 / 65)
    a = kept("qwen3.5-4b")
    assert a.chunked > 0
    assert a.bytes(65, 65) - a.bytes(64, 64) == pytest.approx(a.tokens + 64 * a.chunked)
    assert kept("qwen3.5-4b", linear_kernels=True).chunked == 0


def test_the_scan_makes_the_gradients_of_all_chunks_and_one_more() -> None:
    """fp32, traced: gradients of values, keys twice, queries and pairs, and a slice's, zeros elsewhere."""
    run = Run(arch("qwen3.5-4b"))
    dims, tape = dimensions(run.arch), Program(run, DELTA).layer()
    scan = next(s for s in backward_of(tape) if s.name == "delta: scan")
    values, keys, pairs = 32 * 128, 32 * 128, 32 * 64
    made = 4 * (values + 3 * keys + pairs) + 4 * values  # and one of zeros
    incoming, residual = 4 * values, 2 * run.arch.hidden
    assert in_bytes(scan.passing, dims, CHUNK, CHUNK) >= CHUNK * (made + incoming + residual)


def test_the_kernels_backward_has_states_twice() -> None:
    """Traced at `prepare_wy_repr_bwd`: 102,400 bytes a token beside what is kept and the gradient of the output.

    Keys of the transform, values of it, corrected values and their gradient, keys' and values' gradients: 2 bytes each
    of 4,096; a state and its gradient for each 64 positions: 2 · 32 · 128 · 128 / 64.
    """
    run = Run(arch("qwen3.5-4b"), linear_kernels=True)
    tape = Program(run, DELTA).layer()
    rule = next(op for op in tape.ops if op.name == "delta: rule")
    scratch = amount(rule.backward_scratch, dimensions(run.arch))
    inputs = 2 * (2048 + 2048 + 4096)
    assert scratch.tokens + scratch.chunked + inputs == 102_400


def test_joined_projections_are_copied_apart() -> None:
    """Qwen3-Next: each part of the two products lies group by group; Qwen3.5 has a product for each."""
    names = [s.name for s in forward_of(Program(Run(arch("qwen3-next-80b-a3b")), DELTA).layer())]
    assert [n for n in names if n.endswith(": contiguous")][:4] == [
        "delta: v: contiguous", "delta: z: contiguous", "delta: b: contiguous", "delta: a: contiguous",
    ]  # fmt: skip
    assert "delta_in_proj_qkvz" in names
    assert "delta_in_proj_qkv" in [s.name for s in forward_of(Program(Run(arch("qwen3.5-4b")), DELTA).layer())]


def test_layers_below_the_first_adapter_keep_nothing() -> None:
    """Adapters on queries alone: the first attention layer of Qwen3.5 is the fourth layer."""
    run = Run(arch("qwen3.5-2b"), trained=False, adapter=Adapter(8, ("q_proj",), False, 2))
    assert lowest_adapted(run) == 3
    assert [kind.first for kind in kinds(run, masked=False, recompute=False)][:5] == [True] * 4 + [False]
    assert not any(kind.first for kind in kinds(run, masked=False, recompute=True))
    assert layer(run, DELTA, first=True).saved.bytes(TOKENS, TOKENS) == 0
    assert layer(run, DELTA).saved.bytes(TOKENS, TOKENS) > 0
