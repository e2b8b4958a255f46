"""Gemma 3 as Unsloth computes it in fp32: what a layer keeps, counted by hand and as its own patches were traced.

The patched norms, attention and MLP of unsloth_zoo 2025.3.17, 2025.8.8 and 2025.12.7 ran in a layer of Transformers
5.23 on torch 2.13's CPU, compiled by AOTAutograd with the min-cut partitioner and Inductor's decompositions, SDPA in
its plain mathematics, and LoRA of rank 8 as `COMPILED_LORA_FORWARD_forced_float32` has it beside all seven linears; 32
tokens in each of two rows.
"""

from __future__ import annotations

import pytest
from formulas import form, terms
from tapes import arch, backward_of

from calc.autograd.tape import Tape
from calc.base.plan import Forced
from calc.memory.activations import layer, program
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture
from calc.models.hf_config import from_config
from calc.models.lora import lora_parameters

LORA = Adapter(8, "all-linear", False, 4)


def small() -> Architecture:
    """The layer that was traced."""
    return from_config({
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 100,
    })  # fmt: skip


def run(a: Architecture, forced: Forced, adapter: Adapter = LORA) -> Run:
    kernel = "efficient" if forced == "repeated" else "math"
    return Run(a, "wide-stream", trained=False, adapter=adapter, kernel=kernel, forced=forced)


def tape(a: Architecture, forced: Forced) -> Tape:
    written = program(run(a, forced)).layer()
    assert isinstance(written, Tape)
    return written


@pytest.mark.parametrize(
    ("forced", "expected"),
    [
        ("grouped", "16h + 16q + 2kv + 6i + 4H·S + 4H + 4K + 16 + 14r"),
        ("norms", "18h + 16q + 2kv + 8i + 4H·S + 4H + 4K + 16 + 14r"),
        ("repeated", "16h + 20q + 2kv + 6i + 8H + 4K + 16 + 14r"),
    ],
)
def test_a_layer_keeps_its_stream_in_fp32_and_what_products_read_in_fp16(forced: Forced, expected: str) -> None:
    """Bytes a token, attention's output o being as wide as queries.

    The stream before both blocks 8h, both blocks' inputs 4h, the outputs of o_proj and of `down` that norms read 4h;
    q and k as they are normed 2q + 2kv, o_proj's input 2o; gate, up and their product 6i; scales of four norms' rows
    and of each head 16 + 4H + 4K; 2r between each of seven adapters' matrices. Plain mathematics: queries and keys of
    each query head, scaled, 8q, values 4o, probabilities 4H·S. `norms`: the output of `down` in fp32 2h more, act(gate)
    2i. `repeated`: q, k and v of each query head 8q + 4o, the output 4o, a log-sum-exp 4H.
    """
    a = arch("gemma-3-4b")
    assert terms(tape(a, forced).saved(), a)[0] == form(expected)[0]


@pytest.mark.parametrize(("forced", "traced"), [("grouped", 229_376), ("norms", 249_856)])
def test_a_layer_keeps_the_bytes_that_a_trace_of_the_patches_kept(forced: Forced, traced: int) -> None:
    """The total of the storages that autograd saved; copies of the adapters' matrices in fp16 are 14,848 bytes of it.

    Rank 8 times the inputs and outputs of seven linears: 2 · 8 · (2 · (64 + 64) + 2 · (64 + 32) + 3 · (64 + 96)).
    """
    a = small()
    saved = layer(run(a, forced), a.specs[0].shapes).saved
    assert saved.bytes(64, 32) == traced
    assert saved.fixed == 2 * 8 * (2 * 128 + 2 * 96 + 3 * 160) == 14_848


def test_backward_makes_the_gradient_of_every_adapter_once() -> None:
    """Rank times inputs and outputs, whether a matrix is cast or is in 16 bits itself."""
    a = arch("gemma-3-4b")
    for b in (4, 2):
        written = program(run(a, "grouped", Adapter(8, "all-linear", False, b))).layer()
        assert isinstance(written, Tape)
        assert backward_of(written)[-1].gradients == lora_parameters(a, 8, "all-linear") // a.layers


def test_the_head_reads_what_the_last_norm_returns() -> None:
    """fp16, or fp32 in the releases whose norms return that."""
    a = arch("gemma-3-4b")
    for forced, b in (("grouped", 2), ("norms", 4)):
        settings = run(a, forced)
        written = program(settings).final_norm()
        assert isinstance(written, Tape)
        assert written.final.b == settings.head.residual == b
        saved = run(a, forced, Adapter(8, "all-linear", False, 4, saved=("lm_head",)))
        assert saved.head.trained and saved.head.residual == b
