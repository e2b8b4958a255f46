"""Passes over tapes by hand: what is alive at each instant, what comes and goes, and that both are the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from formulas import form, terms
from tapes import (
    SETTINGS,
    again_of,
    arch,
    backward_of,
    forward_of,
    layers,
    once_of,
    selective,
    waiting_of,
    without_grad_of,
)  # fmt: skip

from calc.autograd.lifetimes import Lifetimes, Turn
from calc.autograd.polynomial import Snapshot
from calc.autograd.tape import Size, Tape, Tensor, of
from calc.base.plan import Path
from calc.memory.activations import program
from calc.memory.loss import written
from calc.memory.run import Run

X = of(h=1)


def passing(shots: list[Snapshot]) -> dict[str, dict[str, float]]:
    """The bytes in passing at each operation, per token."""
    return {shot.name: terms(shot.passing)[0] for shot in shots}


def saved(shots: list[Snapshot]) -> dict[str, dict[str, float]]:
    """The bytes kept for backward at each operation, per token."""
    return {shot.name: terms(shot.saved)[0] for shot in shots}


# --- forward ---


def test_a_tensor_passes_from_its_making_to_its_last_use() -> None:
    """a feeds b and c: at b there are x, a and b; at c only a, b and c; nothing of x."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    a = tape.op("a", [x], of(a=1), 1)
    b = tape.op("b", [a], of(b=1), 1)
    tape.op("c", [a, b], of(c=1), 1)
    assert passing(forward_of(tape)) == {
        "a": {"x": 1, "a": 1},
        "b": {"a": 1, "b": 1},
        "c": {"a": 1, "b": 1, "c": 1},
    }


def test_what_is_saved_no_longer_passes() -> None:
    """A tensor counts once at an instant, as saved from the operation that saves it, before that as passing."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("y", [x], X, 2)
    tape.op("z", [y], X, 4, saves=[y])
    shots = forward_of(tape)
    assert passing(shots) == {"y": {"h": 4}, "z": {"h": 4}}
    assert saved(shots) == {"y": {}, "z": {"h": 2}}


def test_without_gradients_a_forward_saves_nothing() -> None:
    """A reference's forward: the same tensors pass, none stays."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("y", [x], X, 2, saves=[x])
    tape.op("z", [y], X, 4, saves=[y], saves_out=True)
    shots = without_grad_of(tape)
    assert saved(shots) == {"y": {}, "z": {}}
    assert passing(shots) == {"y": {"h": 4}, "z": {"h": 6}}


def test_scratch_lives_only_while_its_operation_runs() -> None:
    """rotate_half's temporaries are gone at the next operation."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("rotate", [x], X, 2, scratch=of(h=6))
    tape.op("next", [y], X, 2)
    assert passing(forward_of(tape)) == {"rotate": {"h": 10}, "next": {"h": 4}}


def test_a_held_tensor_lives_to_the_end_of_forward() -> None:
    """`outputs.logits` is a variable of the caller: 2h more at the last operation, though nothing reads it again."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    logits = tape.hold(tape.op("logits", [x], X, 2))
    cast = tape.op("cast", [logits], X, 4)
    y = tape.op("softmax", [cast], of(y=1), 1)
    tape.op("nll", [y], of(z=1), 1)
    assert passing(forward_of(tape))["nll"] == {"h": 2, "y": 1, "z": 1}


# --- backward ---


def test_a_saved_tensor_lives_until_the_last_backward_that_needs_it() -> None:
    """Backward runs scale first: x stays for square, which comes later, and is free only after that."""
    tape = Tape()
    x = Tensor(X, 4)
    first = tape.op("first", [x], X, 4)
    y = tape.op("square", [first], X, 4, saves=[first])
    tape.op("scale", [first, y], X, 4, saves=[first, y])
    assert saved(backward_of(tape)) == {"scale": {"h": 8}, "square": {"h": 4}, "first": {}}


def test_backward_starts_with_the_gradient_of_the_last_output() -> None:
    """Bytes of a gradient are those of its tensor: z's 4h arrives, y's 2h is made beside it."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    y = tape.op("y", [x], X, 2)
    tape.op("z", [y], X, 4)
    assert passing(backward_of(tape)) == {"z": {"h": 6}, "y": {"h": 2, "x": 1}}


def test_aliases_share_the_gradient_of_the_output() -> None:
    """An addition hands one gradient to both inputs: 2h at the addition, 2h more where one is worked on."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("block", [x], X, 2)
    tape.op("add", [x, y], X, 2, aliases=[x, y])
    assert passing(backward_of(tape)) == {"add": {"h": 2}, "block": {"h": 4}}


def test_a_cast_input_of_an_addition_gets_a_gradient_of_its_own() -> None:
    """fp32 residual, bf16 block: 4h shared with the residual, 2h for the block."""
    tape = Tape()
    x = Tensor(X, 4)
    y = tape.op("block", [x], X, 2)
    tape.op("add", [x, y], X, 4, aliases=[x])
    assert passing(backward_of(tape))["add"] == {"h": 6}


def test_a_second_contribution_is_added_into_the_first() -> None:
    """q, k and v give x three gradients: at most two exist at once, the sum so far and the new one."""
    tape = Tape()
    x = Tensor(X, 2)
    q, k, v = (tape.op(n, [x], of(**{n: 1}), 1) for n in "qkv")
    tape.op("join", [q, k, v], of(o=1), 1)
    assert passing(backward_of(tape)) == {
        "join": {"o": 1, "q": 1, "k": 1, "v": 1},
        "v": {"q": 1, "k": 1, "v": 1, "h": 2},
        "k": {"q": 1, "k": 1, "h": 4},
        "q": {"q": 1, "h": 4},
    }


def test_a_split_concatenates_the_gradients_of_its_parts() -> None:
    """gate and up, i each, were views of one product of 2i: backward makes 2i beside theirs, forward nothing."""
    tape = Tape()
    x = Tensor(X, 2)
    pair = tape.op("pair", [x], of(i=2), 2)
    gate, up = tape.split("split", pair, [of(i=1), of(i=1)])
    tape.op("product", [gate, up], of(i=1), 2, saves=[gate, up])
    assert terms(tape.saved()) == form("4i")
    assert passing(forward_of(tape)) == {"pair": {"h": 2, "i": 4}, "split": {"i": 4}, "product": {"i": 2}}
    assert passing(backward_of(tape)) == {"product": {"i": 6}, "split": {"i": 8}, "pair": {"i": 4, "h": 2}}
    assert {shot.gradients for shot in backward_of(tape)} == {0}


def test_a_part_of_a_split_that_needs_no_gradient_makes_none() -> None:
    """A split of frozen activations has no backward at all."""
    tape = Tape()
    parts = tape.split("split", Tensor(of(i=2), 2, differentiable=False), [of(i=1), of(i=1)])
    assert [part.differentiable for part in parts] == [False, False]


def test_weights_gradients_add_up_as_backward_goes_down() -> None:
    """The last operation's weight is first: 5, then 5 + 3; `making` is each one's own, 0 where there is none."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("below", [x], X, 2, weight=3)
    y = tape.op("between", [y], X, 2)
    tape.op("above", [y], X, 2, weight=5)
    assert [(s.name, s.gradients, s.making) for s in backward_of(tape)] == [
        ("above", 5, 5),
        ("between", 5, 0),
        ("below", 8, 3),
    ]
    assert [(s.gradients, s.making) for s in forward_of(tape)] == [(0, 0)] * 3


def test_backward_scratch_lives_only_in_its_own_backward() -> None:
    """Flash's fp32 accumulator of dq: not at the next operation, not in forward."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("below", [x], X, 2)
    tape.op("attention", [y], X, 2, backward_scratch=of(q=4))
    assert passing(backward_of(tape)) == {"attention": {"h": 4, "q": 4}, "below": {"h": 4}}
    assert passing(forward_of(tape))["attention"] == {"h": 4}


def test_backward_does_not_enter_what_needs_no_gradient() -> None:
    """No gradient is made for a frozen input, and operations below it do not run backward."""
    tape = Tape()
    x = Tensor(X, 2, differentiable=False)
    y = tape.op("frozen", [x], X, 2)
    tape.op("trained", [y], X, 2, saves=[y], weight=1)
    assert passing(backward_of(tape)) == {"trained": {"h": 2}}


def test_an_operation_whose_output_leads_nowhere_has_no_backward() -> None:
    """Only what the last output depends on gets a gradient; what it saved is kept until its place in the order."""
    tape = Tape()
    x = Tensor(X, 2)
    tape.op("unused", [x], of(u=1), 2, saves=[x])
    tape.op("used", [x], X, 2)
    shots = backward_of(tape)
    assert passing(shots) == {"used": {"h": 4}}
    assert saved(shots) == {"used": {"h": 2}}


def test_a_gradient_that_overwrites_what_was_saved_counts_once_and_lives_on() -> None:
    """flash-attn's cross entropy writes into its logits: 2h at the loss, still 2h below, where they were dropped."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    logits = tape.op("head", [x], X, 2)
    tape.op("loss", [logits], of(z=1), 1, saves=[logits], overwrites=True)
    shots = backward_of(tape)
    assert saved(shots) == {"loss": {"h": 2}, "head": {}}
    assert passing(shots) == {"loss": {"z": 1}, "head": {"h": 2, "x": 1}}


def test_a_gradient_that_overwrites_a_view_keeps_all_it_looks_into() -> None:
    """A slice of half shares the storage of the whole, which stays while the slice's gradient does."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    logits = tape.op("head", [x], X, 2)
    half = tape.op("slice", [logits], X * 0.5, 2, view=True)
    tape.op("loss", [half], of(z=1), 1, saves=[half], overwrites=True)
    assert passing(backward_of(tape))["slice"] == {"h": 4}


# --- selective checkpointing ---


def test_the_first_run_has_no_more_than_what_is_kept_and_what_passes() -> None:
    """Attention reads rotated q and k, which go; its output and log-sum-exp stay, as q does, which nothing reads."""
    shots = once_of(selective())
    assert saved(shots) == {
        "q": {"q": 2}, "k": {"q": 2}, "rotate": {"q": 2},
        "attention": {"q": 2, "o": 2, "H": 4},
        "up": {"q": 2, "o": 2, "H": 4, "i": 2},
        "down": {"q": 2, "o": 2, "H": 4, "i": 2},
    }  # fmt: skip
    assert passing(shots)["attention"] == {"q": 2, "k": 2}


def test_run_again_an_operation_takes_its_output_from_the_cache() -> None:
    """q leaves the cache where it was made and is free once rotated; the rest waits for its turn. The run ends before
    down, the last to save: up's output is out of the cache by then."""
    shots = again_of(selective())
    assert [shot.name for shot in shots] == ["q", "k", "rotate", "attention", "up"]
    cached = {"o": 2, "H": 4, "i": 2}
    assert saved(shots)["q"] == saved(shots)["rotate"] == {"h": 2, **cached}
    assert passing(shots)["rotate"] == {"q": 4, "k": 2}
    assert saved(shots)["attention"] == {"h": 2, "q": 2, "k": 2, **cached}
    assert passing(shots)["up"] == {"i": 2}


def test_what_recomputation_does_not_come_to_stays_until_the_layers_backward_is_over() -> None:
    """Five products: the fifth is kept, and the second run ends before it. It waits for the last saved tensor, x."""
    tape = Tape(selective=True)
    y = Tensor(X, 2)
    for width in "abcd":
        y = tape.op(width, [y], Size({width: 1}), 2, saves=[y], product=True)
    tape.op("last", [y], of(z=1), 2, saves=[y], product=True)
    assert terms(tape.kept()) == form("2a + 2c + 2z")
    assert saved(backward_of(tape)) == {
        "last": {"h": 2, "a": 2, "b": 2, "c": 2, "d": 2, "z": 2},
        "d": {"h": 2, "a": 2, "b": 2, "c": 2, "z": 2},
        "c": {"h": 2, "a": 2, "b": 2, "z": 2},
        "b": {"h": 2, "a": 2, "z": 2},
        "a": {"h": 2, "z": 2},
    }


# --- what checkpointing runs again ---


def test_a_forward_runs_again_up_to_what_saves_last_which_does_not_run() -> None:
    """It stops as the last tensor is saved, before the operation that saves it: `down` and `add` are left out."""
    tape = Tape()
    x = Tensor(X, 2)
    wide = tape.op("up", [x], of(i=1), 2, saves=[x])
    y = tape.op("down", [wide], X, 2, saves=[wide])
    tape.op("add", [x, y], X, 2, aliases=[x, y])
    assert [shot.name for shot in again_of(tape)] == ["up"]
    assert again_of(tape)[0].passing.tokens == {"i": 2}


def test_the_gradients_above_what_saves_last_wait_meanwhile() -> None:
    """The output's, shared by the addition's inputs, 2h; the cast's own, 4h; nothing of what lies below."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("down", [x], X, 4, saves=[x])
    y = tape.op("cast", [y], X, 2)
    tape.op("add", [x, y], X, 2, aliases=[x, y])
    assert waiting_of(tape).tokens == {"h": 2 + 4}


def test_what_saves_nothing_runs_again_whole() -> None:
    tape = Tape()
    tape.op("add", [Tensor(X, 2)], X, 2)
    assert [shot.name for shot in again_of(tape)] == ["add"]
    assert waiting_of(tape).tokens == {"h": 2}


def test_reentrant_a_forward_runs_again_to_its_end_and_output_and_gradient_stay() -> None:
    """As above, h and i: `add` runs, too. In its backward y stays, and its gradient, an argument of that backward.

    At `up`, the last: y 2h, its gradient 2h, that of `wide` 2i, and of x 2h, into which x's first part is added.
    """
    tape = Tape(reentrant=True)
    x = Tensor(X, 2)
    wide = tape.op("up", [x], of(i=1), 2, saves=[x])
    y = tape.op("down", [wide], X, 2, saves=[wide])
    tape.op("add", [x, y], X, 2, aliases=[x, y])
    assert [shot.name for shot in again_of(tape)] == ["up", "down", "add"]
    assert waiting_of(tape).tokens == {"h": 2}
    shots = {shot.name: (shot.saved.tokens, shot.passing.tokens) for shot in backward_of(tape)}
    assert shots["add"] == ({"h": 2, "i": 2}, {"h": 2 + 2})
    assert shots["down"] == ({"h": 2, "i": 2}, {"h": 2 + 2, "i": 2})
    assert shots["up"] == ({"h": 2}, {"h": 2 + 2 + 2, "i": 2})


# --- what comes and goes, and what is alive ---


def agree(turns: Iterable[Turn], there: Iterable[Tensor], unread: Iterable[Tensor] = ()) -> None:
    """Asserts that what has come and not gone is what is alive, at each operation; `unread` may be there before.

    Gradients of one sequence after another are there after their operation only.
    """
    alive = {*there}
    for turn in turns:
        new = {*turn.kept, *turn.made}
        at_once = not (turn.backward and turn.op.rowwise)
        if turn.op.outs:
            found = alive | (new if at_once else {*turn.kept})
            assert found - {*turn.saved, *turn.passing} <= {*unread}, turn.op.name
            assert found >= {*turn.saved, *turn.passing}, turn.op.name
        alive = (alive | new) - {*turn.freed}


def hold(tape: Tape, *, recomputes: bool) -> None:
    """Asserts that the passes over a tape agree; without recomputation, and of the input alone before it is read."""
    own, unread = Lifetimes(tape), {Lifetimes(tape).input} - {t.storage for t in tape.ops[0].inputs}
    passes = [own.forward, own.without_grad, *([own.once] if recomputes else [])]
    for run in passes:
        agree(run.turns, {own.input}, unread)
    saved = {t.storage for op in tape.ops for t in op.saves}
    agree(own.backward.turns, {*saved, own.given})
    if recomputes:
        agree(own.recomputed(), {own.input}, unread)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_comes_and_goes_in_a_layer_is_what_its_closed_form_adds_up(setting: dict[str, Any]) -> None:
    """The ledger adds up what is alive during each operation, the replay allocates and frees: the same storages, in
    each kind of layer of each family."""
    for _, run, spec in layers(**setting):
        for first in {False, not run.trained}:  # what is trained has an input that needs a gradient
            hold(program(run, spec, first=first).layer(), recomputes=True)


PATHS = [
    Path("cross-entropy"), Path("cross-entropy", upcast=True, shift_copy=True), Path("cross-entropy", held="next"),
    Path("log-softmax"), Path("selective"), Path("logsumexp", entropy="eager"), Path("rows"), Path("scalar"),
    Path("flash", in_place=True, scaled="view"), Path("flash", entropy="compiled", in_place=True),
    Path("chunked"), Path("ahead", summed=4, copied=True), Path("cut"),
    Path("fused"), Path("pieces", tile=128), Path("tiled", tile=4), Path("selective", kept=0.5),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("setting", [{}, {"precision": "autocast"}, {"trained": False}], ids=str)
def test_what_comes_and_goes_in_a_head_is_what_its_closed_form_adds_up(path: Path, setting: dict[str, Any]) -> None:
    """For each way of computing the loss; gradients written over logits, and rows one by one, are among them."""
    for model in ("llama-3-8b", "gemma-2-2b"):
        hold(written(Run(arch(model), **setting), path).tape, recomputes=False)


def test_a_replay_gives_selective_checkpointings_cache_back_whole() -> None:
    """Beside what the closed form adds up it has what has left the cache and been read, here of five products; then
    backward's first operation ends all of it but what was saved."""
    tape = selective()
    own, kept = Lifetimes(tape), {t.storage for op in tape.ops for t in op.kept}
    agree(own.recomputed(), {own.input, *kept}, kept)
    first = next(turn for turn in own.again.turns if turn.backward and turn.op.name == "down")
    saved = {t.storage for op in tape.ops[:-1] for t in op.saves}
    assert {*first.freed} >= kept - saved
    assert not any(kept & {*turn.freed} for turn in own.recomputed())


# --- results that go, and come back ---


def restored() -> Tape:
    """A norm, whose output a product keeps, and an addition; the norm's results go once the product has run."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    n = tape.op("norm", [x], of(n=1), 1, saves=[x, Tensor(of(s=1), 1)])
    y = tape.op("product", [n], of(y=1), 1, saves=[n])
    tape.restore(0, 1)
    tape.op("add", [y], of(z=1), 1, saves=[y])
    return tape


def test_results_that_are_restored_are_kept_from_backward_on() -> None:
    """Forward has n and s until the product is done; backward has them from before the product's to the norm's."""
    tape = restored()
    assert terms(tape.saved())[0] == {"x": 1, "y": 1}
    there = saved(forward_of(tape))
    assert there["product"] == {"x": 1, "s": 1, "n": 1}
    assert there["add"] == {"x": 1, "y": 1}
    back = backward_of(tape)
    assert [shot.name for shot in back] == ["add", "norm", "product", "norm"]
    assert [terms(shot.saved)[0] for shot in back] == [
        {"x": 1, "y": 1}, {"x": 1, "s": 1}, {"x": 1, "s": 1, "n": 1}, {"x": 1, "s": 1},
    ]  # fmt: skip
    # the norm runs again beside the gradient of the product's output
    assert terms(back[1].passing)[0] == {"y": 1, "n": 1}


def test_what_goes_is_freed_once_in_each_pass() -> None:
    lifetimes = Lifetimes(restored())
    (norm, product) = lifetimes.tape.ops[:2]
    n, s = norm.outs[0].storage, norm.saves[1].storage
    for turns in (lifetimes.forward.turns, lifetimes.backward.turns):
        freed = [t for turn in turns for t in turn.freed]
        assert freed.count(n) == 1 and freed.count(s) == 1
    (going,) = [turn for turn in lifetimes.forward.turns if turn.op is product]
    assert {n, s} <= {*going.freed}


def test_what_others_made_stays_where_results_are_restored() -> None:
    """A norm of a view keeps all that the view lies in, whether the norm itself keeps it or not."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    whole = tape.op("whole", [x], of(w=1), 1)
    view = tape.op("view", [whole], of(v=1), 1, view=True)
    n = tape.op("kernel", [view], of(n=1), 1, saves_out=True)
    tape.op("product", [n], of(y=1), 1, saves=[n])
    tape.restore(2, 3)
    assert terms(tape.saved())[0] == {"w": 1}
