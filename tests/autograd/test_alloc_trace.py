"""Scripts against tapes: the same operations in order must keep, and at most take, what the tape says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tapes import (
    BF16_LORA,
    FP32_LORA,
    SETTINGS,
    again_of,
    arch,
    backward_of,
    forward_of,
    frozen,
    layers,
    once_of,
    tape,
    waiting_of,
    without_grad_of,
)

from calc.autograd.alloc_trace import CAST, GIVEN, INPUT, MULTIPLY, PASSING, WEIGHT, Script, Writer
from calc.autograd.lifetimes import Lifetimes
from calc.autograd.polynomial import Segment, Shot, Snapshot, amount, in_bytes
from calc.autograd.tape import Size, Tape, Tensor, of
from calc.base.plan import Path
from calc.memory.activations import program
from calc.memory.loss import head_dimensions, written
from calc.memory.run import Run, dimensions

TOKENS, LENGTH = 4096, 2048

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama-3-8b", {}),
    ("qwen2.5-7b", {}),
    ("phi-3-mini", {}),
    ("gemma-2-2b", {}),
    ("llama-3-8b", {"precision": "autocast"}),
    ("llama-3-8b", {"precision": "autocast-bf16"}),
    ("llama-3-8b", frozen(FP32_LORA, precision="autocast-bf16")),
    ("llama-3-8b", {"kernel": "eager"}),
    ("llama-3-8b", frozen(BF16_LORA)),
    ("llama-3-8b", {"first": True, **frozen(FP32_LORA)}),
    ("mixtral-8x7b", {"moe": True}),
    ("deepseek-v3", {"moe": True}),
]


class Layer:
    """A layer on its tape, and the writer of its scripts."""

    def __init__(self, model: str, *, moe: bool = False, first: bool = False, **run: Any) -> None:
        self.tape: Tape = tape(model, moe=moe, first=first, **run)
        adapter = run.get("adapter")
        self.dims = dimensions(Run(arch(model), **run).arch, adapter.rank if adapter else 0)
        self.writer = Writer(Lifetimes(self.tape), self.dims, TOKENS, LENGTH, 2)
        self.start = {INPUT: self.bytes(self.writer.lifetimes.input.size)}
        self.given = {GIVEN: self.bytes(self.tape.final.size)}

    def bytes(self, size: Size) -> int:
        return amount(size, self.dims).bytes(TOKENS, LENGTH)

    def most(self, shots: list[Snapshot]) -> int:
        return max(self.bytes(shot.saved) + self.bytes(shot.passing) for shot in shots)


def follow(script: Script, alive: dict[int, int]) -> tuple[int, int]:
    """Takes and gives back in `alive`; the most there was, and what was made of gradients of weights."""
    most, weights = sum(alive.values()), 0
    for slot, size in script.steps:
        if slot == WEIGHT:
            weights += size
        elif slot == MULTIPLY:
            continue
        elif slot == CAST:
            alive[CAST] = alive.get(CAST, 0) + size
            most = max(most, sum(alive.values()))
        elif size:
            assert slot not in alive
            alive[slot] = size
        else:
            alive.pop(slot, None)
        most = max(most, sum(alive.values()))
    return most, weights


@pytest.mark.parametrize(("model", "run"), CASES, ids=str)
def test_a_layer_keeps_and_takes_what_its_tape_says(model: str, run: dict[str, Any]) -> None:
    """To the rounding of a byte for each of some hundred tensors; backward leaves the gradient of the input alone."""
    layer = Layer(model, **run)
    alive = dict(layer.start)
    forward, backward = layer.writer.forward(), layer.writer.backward()
    most, _ = follow(forward, alive)
    assert most == pytest.approx(layer.most(forward_of(layer.tape)), rel=1e-6)
    assert alive.pop(forward.out) == layer.bytes(layer.tape.final.size)
    assert sum(alive.values()) == pytest.approx(layer.bytes(layer.tape.saved()), rel=1e-6)
    alive |= layer.given
    most, weights = follow(backward, alive)
    assert most == pytest.approx(layer.most(backward_of(layer.tape)), rel=1e-6)
    assert weights == 2 * sum(op.weight for op in layer.tape.ops)
    assert set(alive) <= {backward.out}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_most_that_a_script_takes_is_the_largest_closed_form(setting: dict[str, Any]) -> None:
    """In each kind of layer of each family, for both are folds of the same turns; a script's sizes are whole bytes.

    Two exceptions. Attention around a ring, of DeepSeek, GLM 4.5, MiniCPM3, Nemotron-H and OPT, writes its log-sum-exp
    when its temporaries have gone, less than two thousandths, and the closed form adds up all that an operation has. An
    adapter beside the down projection of an MLP without a gate: autograd adds both gradients of the wide input in a
    third tensor, which no operation's instant has.
    """
    for name, run, kind in layers(**setting):
        spec = kind._replace(rotated=kind.mlp != "none")  # Nemotron-H's attention, alone in its layer, does not rotate
        tape, dims = program(run, spec).layer(), dimensions(run.arch, run.adapter.rank if run.adapter else 0)
        segment, writer = Segment(tape, dims), Writer(Lifetimes(tape), dims, TOKENS, LENGTH, 2)
        alive = {INPUT: in_bytes(writer.lifetimes.input.size, dims, TOKENS, LENGTH)}
        forward, backward = writer.forward(), writer.backward()
        rounding, off = 3 * len(tape.ops), 0.0
        if setting.get("exchange") == "ring" and (
            run.arch.mla or kind.mlp == "none" or run.arch.positions or name.startswith("glm-4.5")
        ):
            off = 2e-3
        most, _ = follow(forward, alive)
        assert most == pytest.approx(largest(segment.forward), rel=off, abs=rounding), name
        alive[GIVEN] = alive.pop(forward.out)
        most, _ = follow(backward, alive)
        third = 0.25 if run.adapter and not run.arch.gated else 0
        assert most >= largest(segment.backward) - rounding, name
        assert most == pytest.approx(largest(segment.backward), rel=third, abs=rounding), name


def largest(shots: Sequence[Shot]) -> int:
    """The largest of a segment's instants."""
    return max(shot.saved.bytes(TOKENS, LENGTH) + shot.passing.bytes(TOKENS, LENGTH) for shot in shots)


@pytest.mark.parametrize(("model", "run"), CASES, ids=str)
def test_a_layer_that_is_run_again_keeps_its_input_alone(model: str, run: dict[str, Any]) -> None:
    """Beside the input, a checkpoint here, no more is taken than without one, in the first run and in the second."""
    layer = Layer(model, **run)
    once, again = layer.writer.once(), layer.writer.again()
    alive = dict(layer.start)
    most, _ = follow(once, alive)
    assert (
        layer.most(once_of(layer.tape)) <= most * (1 + 1e-6) <= layer.most(once_of(layer.tape)) + 2 * layer.start[INPUT]
    )
    assert alive.pop(CAST, 0) == sum(layer.bytes(t.size) for t in layer.tape.cached)
    assert set(alive) == {INPUT, once.out}
    alive = {**layer.start, **layer.given}
    most, weights = follow(again, alive)
    waiting = layer.bytes(waiting_of(layer.tape))
    known = max(layer.most(again_of(layer.tape)) + waiting, layer.most(backward_of(layer.tape)))
    assert 0.95 * known <= most <= known + layer.start[INPUT]
    assert weights == 2 * sum(op.weight for op in layer.tape.ops)
    assert set(alive) <= {again.out}


def test_without_gradients_nothing_is_kept() -> None:
    layer = Layer("llama-3-8b")
    alive = dict(layer.start)
    script = layer.writer.without_grad()
    most, _ = follow(script, alive)
    assert most == pytest.approx(layer.most(without_grad_of(layer.tape)), rel=1e-6)
    assert alive == {script.out: layer.bytes(layer.tape.final.size)}


@pytest.mark.parametrize(("flat", "taken"), [(False, 2), (True, 3)])
def test_a_second_gradient_is_added_in_place_unless_the_first_is_a_view(flat: bool, taken: int) -> None:
    """Two operations read x: the sum of their gradients takes a third tensor where each was made as a matrix that is
    then seen as three-dimensional, as a linear's is (torch `input_buffer.cpp`, `can_accumulate_inplace`)."""
    made = Tape()
    x = made.op("begin", [Tensor(of(h=1), 2)], of(h=1), 2)
    a, b = (made.op(name, [x], of(h=1), 2, flat=flat) for name in ("left", "right"))
    made.op("end", [a, b], of(h=1), 2, aliases=[a, b])
    steps = Writer(Lifetimes(made), {"h": 512}, 1024, 1024, 2).backward().steps
    sizes = [size for slot, size in steps if size and slot != MULTIPLY]
    assert sizes[:taken] == [2 * 512 * 1024] * taken
    assert len(sizes) == taken + 1  # and the gradient of what `begin` read


def test_rows_are_written_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each row asked for the parts of all: 16,000 short sequences took minutes."""
    asked, parts = list[int](), Writer._parts

    def counted(self: Writer, t: Tensor) -> list[tuple[int, int]]:
        asked.append(self.rows)
        return parts(self, t)

    monkeypatch.setattr(Writer, "_parts", counted)
    run = Run(arch("llama-3-8b"))
    for rows in (2, 64):
        writer = Writer(Lifetimes(written(run, Path("selective")).tape), head_dimensions(run), rows * 8, 8, 2)
        writer.forward()
        assert len(writer.backward().steps) > rows
    assert 0 < asked.count(2) == asked.count(64)


def test_what_is_computed_row_by_row_is_a_tensor_of_each_sequence() -> None:
    """Two sequences: each row's log-softmax is kept, V·S of bf16. Backward holds, at the end, each row's gradient and
    their stack, then the stack and the gradient of all positions (trl `trainer/utils.py`, `selective_log_softmax`)."""
    run = Run(arch("llama-3-8b"))
    program = written(run, Path("selective"))
    writer = Writer(Lifetimes(program.tape), head_dimensions(run), TOKENS, LENGTH, 2)
    row = 2 * LENGTH * arch("llama-3-8b").vocab
    alive: dict[int, int] = {}
    follow(writer.forward(), alive)
    assert sorted(size for size in alive.values() if size >= row) == [row, row]
    most, _ = follow(writer.backward(), alive)
    assert most - 4 * row < row // 10  # and the input of the head, h of V


# -- by hand, in bytes: hidden 100, three tokens of one sequence ------------------------------------------------------


def by_hand(tape: Tape, tokens: int = 3, length: int = 3) -> Writer:
    return Writer(Lifetimes(tape), {"h": 100}, tokens, length, 2)


def product(scratch: float) -> Tape:
    """A matrix product of 7 weights whose input is seen as a matrix, with passing bytes a token beside its output."""
    tape, x = Tape(), Tensor(of(h=1), 1)
    tape.op("product", [x], of(h=1), 1, saves=[x], scratch=of(h=scratch), flat=True, weight=7)
    return tape


def test_what_rounds_to_no_byte_takes_nothing() -> None:
    """A fifth of a byte a token in a batch of one token: once a division by zero."""
    tape = Tape()
    tape.op("mask", [], of(h=0.002), 1, scratch=of(h=0.002))
    tape.op("product", [Tensor(of(h=1), 1)], of(h=1), 1)
    assert [size for _, size in by_hand(tape, 1, 1).forward().steps if size] == [100]


@pytest.mark.parametrize(
    ("scratch", "pieces"), [(1, [300]), (2, [300] * 2), (4, [300] * 4), (4.5, [1350]), (5, [1500])]
)
def test_temporaries_are_a_few_of_an_outputs_size_or_one(scratch: float, pieces: list[int]) -> None:
    """What passes, then the output in slot 0, then what passes goes; cuBLAS comes once there is something to fill."""
    slots = [PASSING - n for n in range(len(pieces))]
    taken = [*zip(slots, pieces, strict=True), (0, 300), *[(slot, 0) for slot in slots]]
    assert by_hand(product(scratch)).forward() == Script((*taken, (MULTIPLY, 1)), 0)


def test_a_products_backward_makes_the_weights_gradient_first() -> None:
    """Two bytes for each weight; autograd's thread has a workspace of its own."""
    writer = by_hand(product(1))
    writer.forward()
    steps = ((WEIGHT, 14), (MULTIPLY, 2), (1, 300), (INPUT, 0), (GIVEN, 0))
    assert writer.backward() == Script(steps, 1)


def three() -> Tape:
    """x to y, twice as wide, to z, to u; x and y are kept for backward."""
    tape, x = Tape(), Tensor(of(h=1), 1)
    y = tape.op("first", [x], of(h=2), 1, saves=[x])
    z = tape.op("second", [y], of(h=1), 1, saves=[y])
    tape.op("third", [z], of(h=1), 1)
    return tape


def test_operations_take_their_outputs_and_give_back_what_nobody_needs() -> None:
    writer = by_hand(three())
    assert writer.forward() == Script(((0, 600), (1, 300), (2, 300), (1, 0)), 2)
    steps = ((3, 300), (GIVEN, 0), (4, 600), (0, 0), (3, 0), (5, 300), (INPUT, 0), (4, 0))
    assert writer.backward() == Script(steps, 5)
    assert by_hand(three()).without_grad() == Script(((0, 600), (INPUT, 0), (1, 300), (0, 0), (2, 300), (1, 0)), 2)


def test_a_repeated_forward_stops_before_what_saves_last() -> None:
    """The third keeps nothing: its gradient comes first; then y is made again, and z never is."""
    writer = by_hand(three())
    assert writer.once() == Script(((0, 600), (1, 300), (0, 0), (2, 300), (1, 0)), 2)
    steps = ((3, 300), (GIVEN, 0), (0, 600), (4, 600), (0, 0), (3, 0), (5, 300), (4, 0), (INPUT, 0))
    assert writer.again() == Script(steps, 5)


def test_a_tensor_of_each_sequence_is_as_many_blocks() -> None:
    """Six tokens of two sequences: two blocks of half the bytes each, in slots of their own."""
    tape, x = Tape(), Tensor(of(h=1), 1)
    rows = Tensor(of(h=1), 1, apart=True)
    y = tape.op("rows", [x], of(h=1), 1, saves=[rows])
    tape.op("next", [y], of(h=1), 1)
    writer = by_hand(tape, 6, 3)
    assert writer.forward().steps[:3] == ((0, 600), (1, 300), (2, 300))
    assert {(1, 0), (2, 0)} <= {*writer.backward().steps}
