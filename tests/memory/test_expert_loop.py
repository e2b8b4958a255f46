"""Routed experts one after another, as Transformers 4 runs them, against bytes counted in its own code.

Counted with transformers 4.55.4 on the CPU: one block of 1,024 tokens in bf16, every storage followed through forward
and backward; 8 experts, 2 a token, hidden 256, experts 320 wide.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.autograd.alloc_trace import Script, Writer
from calc.autograd.lifetimes import Lifetimes
from calc.catalog.catalog import load
from calc.memory.activations import Program
from calc.memory.run import Adapter, Run, dimensions
from calc.models.architecture import Architecture
from calc.models.releases import with_experts

TOKENS = 1024
SMALL = {"experts": 8, "experts_per_token": 2, "hidden": 256, "moe_intermediate": 320}


def small(model: str) -> Architecture:
    """The experts of `model` in the sizes that were counted."""
    return replace(load().model(model).architecture, **SMALL)  # type: ignore[arg-type]


def course(arch: Architecture, *, trained: bool, adapter: Adapter | None = None) -> tuple[int, int]:
    """The bytes that are kept after forward, and the most in backward, without the gradient that it is given."""
    program = Program(Run(arch, trained=trained, looped=True, adapter=adapter))
    program.experts(program.input)
    dims = dimensions(arch, adapter.rank if adapter else 0)
    writer = Writer(Lifetimes(program.tape), dims, TOKENS, TOKENS, 2)
    there: dict[tuple[int, int], int] = {}
    most = 0
    kept = 0
    for n, script in enumerate((writer.forward(), writer.backward())):
        most = _play(script, there)
        kept = sum(there.values()) if n == 0 else kept
    return kept, most


def _play(script: Script, there: dict[tuple[int, int], int]) -> int:
    """Plays a script over blocks by slot; gradients of weights, of slot -3, stay."""
    most = sum(there.values())
    for n, (slot, size) in enumerate(script.steps):
        if slot == -4:  # cuBLAS
            continue
        if size:
            there[slot, n if slot == -3 else 0] = size
        else:
            there.pop((slot, 0), None)
        most = max(most, sum(there.values()))
    return most


@pytest.mark.parametrize(
    ("model", "trained", "kept", "most"),
    [
        ("gpt-oss-20b", True, 16_834_624, 23_045_808),
        ("gpt-oss-20b", False, 14_475_328, 14_732_854),
        ("qwen3-30b-a3b", True, 8_998_912, 9_697_294),
        ("qwen3-30b-a3b", False, 6_639_616, 7_061_882),
    ],
)
def test_a_block_keeps_what_its_code_keeps(model: str, trained: bool, kept: int, most: int) -> None:
    """Kept to 0.2 %; backward within what one of eight experts and three tensors of the stream come to."""
    found = course(small(model), trained=trained)
    assert found[0] == pytest.approx(kept, rel=2e-3)
    assert most <= found[1] <= most + 3 * 2 * 256 * TOKENS + found[0] // 8


ALL = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("targets", "b", "kept"),
    [(ALL, 2, 8_536_064), (ALL, 4, 13_041_664), (ALL[2:], 2, 7_454_720), (ALL[2:], 4, 8_781_824)],
)
def test_adapters_beside_each_expert_keep_what_peft_does(targets: tuple[str, ...], b: int, kept: int) -> None:
    """Counted with peft 0.21.2 at rank 4 beside a loop over such experts, which keeps 6,127,616 bytes without them.

    The block's input, 1,024 · 256 in bf16, is there besides.
    """
    arch = with_experts(small("qwen3-30b-a3b"), "4.55")
    assert course(arch, trained=False, adapter=Adapter(4, targets, False, b))[0] == kept + TOKENS * 256 * 2


@pytest.mark.parametrize(("trained", "kept", "most"), [(True, 9_023_496, 15_314_956), (False, 5_615_624, 11_907_084)])
def test_experts_of_ling_write_over_rows_in_turn(trained: bool, kept: int, most: int) -> None:
    """Counted with the block's operations in torch 2.13 on the CPU: each expert makes all rows' gradients anew."""
    found = course(small("ling-mini-2.0"), trained=trained)
    assert found == (pytest.approx(kept, rel=2e-3), pytest.approx(most, rel=1e-4))


def test_a_row_of_a_parameter_is_copied_and_its_gradient_is_as_large_as_the_parameter() -> None:
    """GPT-OSS: copies of all experts' weights, 8·256·640 and 8·320·256, are kept, and backward has both gradients and
    one more of the larger; experts that are linears keep no weight.
    """
    arch = small("gpt-oss-20b")
    copies = 2 * (8 * 256 * 640 + 8 * 320 * 256)
    loop, grouped = (Program(Run(arch, looped=looped)) for looped in (True, False))
    for program in (loop, grouped):
        program.experts(program.input)
    assert grouped.tape.saved().fixed == {}
    assert loop.tape.saved().fixed == {"W_experts_gate_up_proj": 2, "W_experts_down_proj": 2}
    kept, most = course(arch, trained=True)
    assert most - kept >= copies + 2 * 8 * 256 * 640 - (copies + kept) // 8


def test_experts_in_four_bits_are_opened_one_at_a_time() -> None:
    """One linear of one expert: 256·320 in 16 bits, and its scales in fp32, one for 64."""
    arch = small("qwen3-30b-a3b")
    run = Run(arch, trained=False, looped=True, quantised=True, four_bit_experts="linears")
    program = Program(run)
    program.experts(program.input)
    (loop,) = [op for op in program.tape.ops if op.name == "experts: one by one"]
    scratch = sum(share * 8 * 256 * 640 for share in loop.scratch.fixed.values())
    assert scratch == pytest.approx(256 * 320 * (2 + 4 / 64))
