from __future__ import annotations

import pytest
from formulas import evaluate, form, terms

from calc.autograd.tape import NOTHING, Size, Snapshot, Tape, Tensor, of, text

X = of(h=1)


def passing(shots: list[Snapshot]) -> dict[str, dict[str, float]]:
    """What each operation lets pass, per token."""
    return {shot.name: terms(shot.passing)[0] for shot in shots}


def saved(shots: list[Snapshot]) -> dict[str, dict[str, float]]:
    """What is kept for backward at each operation, per token."""
    return {shot.name: terms(shot.saved)[0] for shot in shots}


# --- sizes ---


def test_sizes_add_up_term_by_term_and_scale_by_a_factor() -> None:
    """2h + 3 and h + 5q are 3h + 5q + 3; three times that is 9h + 15q + 9, fixed terms alike."""
    total = Size({"h": 2, "": 3}, {"W": 1}) + Size({"h": 1, "q": 5}, {"W": 4, "U": 1})
    assert total.tokens == {"h": 3, "": 3, "q": 5}
    assert total.fixed == {"W": 5, "U": 1}
    assert (total * 3).tokens == {"h": 9, "": 9, "q": 15}
    assert (total * 3).fixed == {"W": 15, "U": 3}


def test_terms_that_cancel_disappear() -> None:
    """MLA's widths are differences: q less H·rope; a term of zero would print as `0·h`."""
    assert (of(h=2, q=1) + of(h=-2)).tokens == {"q": 1}
    assert not (of(h=1) + of(h=-1))
    assert not NOTHING
    assert Size({}, {"W": 1})


@pytest.mark.parametrize(
    ("tokens", "written"),
    [
        ({}, "0"),
        ({"": 8}, "8"),
        ({"h": 1}, "h"),
        ({"h": 16, "": 8, "q": 4}, "16·h + 4·q + 8"),
        ({"H·S": 6, "": 8, "i": 8}, "8·i + 6·H·S + 8"),
        ({"V": 1.25}, "1.25·V"),
    ],
)
def test_a_sum_is_written_with_its_plain_number_last(tokens: dict[str, float], written: str) -> None:
    """The reader sees `16·h + 4·q + 8`, terms that grow with the length behind those that do not."""
    assert text(tokens) == written


def test_what_is_written_evaluates_to_what_was_meant() -> None:
    """With h = 10, q = 3, H = 2, S = 5: 16·10 + 4·3 + 6·2·5 + 8 = 240."""
    values = {"h": 10, "q": 3, "H": 2, "S": 5}
    assert evaluate(text({"h": 16, "": 8, "q": 4, "H·S": 6}), values) == 160 + 12 + 60 + 8


# --- what is saved ---


def test_a_tensor_that_two_operations_save_counts_once() -> None:
    """RMSNorm's fp32 input serves its square and its scaling: one tensor of 4h, not two."""
    tape = Tape()
    x = Tensor(X, 4)
    y = tape.op("square", [x], X, 4, saves=[x])
    tape.op("scale", [x, y], X, 4, saves=[x])
    assert terms(tape.saved()) == form("4h")


def test_a_saved_tensor_lives_until_the_last_backward_that_needs_it() -> None:
    """Backward runs scale first: x stays for square, which comes later, and is free only after that."""
    tape = Tape()
    x = Tensor(X, 4)
    first = tape.op("first", [x], X, 4)
    y = tape.op("square", [first], X, 4, saves=[first])
    tape.op("scale", [first, y], X, 4, saves=[first, y])
    assert saved(tape.backward()) == {"scale": {"h": 8}, "square": {"h": 4}, "first": {}}


def test_views_share_the_storage_of_what_they_look_into() -> None:
    """Phi-3's q, k and v are views of one product of 6h bytes: saving all three keeps it once."""
    tape = Tape()
    x = Tensor(X, 2)
    qkv = tape.op("qkv", [x], of(h=3), 2)
    q, k, v = (tape.op(n, [qkv], X, 2, view=True) for n in "qkv")
    out = tape.op("attention", [q, k, v], X, 2, saves=[q, k, v])
    assert terms(tape.saved()) == form("6h")
    assert q.storage is k.storage is v.storage is qkv
    assert passing(tape.forward()) == {
        "qkv": {"h": 8},  # x and the product
        "q": {"h": 6}, "k": {"h": 6}, "v": {"h": 6},  # nothing new
        "attention": {"h": 2},  # the output; the product is saved by now
    }  # fmt: skip
    assert out.storage is out


def test_a_view_of_a_view_shares_the_first_storage() -> None:
    """A slice of a reshape still is the one tensor underneath."""
    tape = Tape()
    x = Tensor(of(h=4), 2)
    y = tape.op("slice", [tape.op("reshape", [x], of(h=4), 2, view=True)], X, 2, view=True)
    assert y.storage is x


def test_an_operation_can_save_its_own_output() -> None:
    """Softmax's backward reads its result: 4h kept, its input not."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("cast", [x], X, 4)
    tape.op("softmax", [y], X, 4, saves_out=True)
    assert terms(tape.saved()) == form("4h")


def test_an_operation_on_what_needs_no_gradient_saves_nothing() -> None:
    """Below the first trained weight autograd records nothing: LoRA's first layer keeps less."""
    tape = Tape()
    x = Tensor(X, 2, differentiable=False)
    y = tape.op("frozen", [x], X, 2, saves=[x], saves_out=True)
    assert not y.differentiable
    assert terms(tape.saved()) == form("0")
    z = tape.op("trained", [y], X, 2, saves=[y], weight=1)
    assert z.differentiable
    assert terms(tape.saved()) == form("2h")


# --- selective checkpointing ---


def selective() -> Tape:
    """Four products of different widths, a kernel with a second output, and what stands between them."""
    tape = Tape(selective=True)
    x = Tensor(X, 2)
    q = tape.op("q", [x], of(q=1), 2, saves=[x], product=True)
    k = tape.op("k", [x], of(k=1), 2, saves=[x], product=True)
    rotated = tape.op("rotate", [q], of(q=1), 2)
    lse = Tensor(of(H=1), 4)
    a = tape.op("attention", [rotated, k], of(o=1), 2, saves=[rotated, k, lse], saves_out=True, spared=[lse])
    i = tape.op("up", [a], of(i=1), 2, saves=[a], product=True)
    tape.op("down", [i], X, 2, saves=[i], product=True)
    return tape


def test_every_second_product_and_what_is_spared_stays_until_backward() -> None:
    """Of q, k, up and down the first and the third; attention with its second output. Nothing without the policy."""
    assert terms(selective().kept()) == form("2q + 2o + 4H + 2i")
    assert terms(Tape().kept()) == form("0")


def test_the_first_run_has_no_more_than_what_is_kept_and_what_passes() -> None:
    """Attention reads rotated q and k, which go; its output and log-sum-exp stay, as q does, which nothing reads."""
    shots = selective().once()
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
    shots = selective().again()
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
    assert saved(tape.backward()) == {
        "last": {"h": 2, "a": 2, "b": 2, "c": 2, "d": 2, "z": 2},
        "d": {"h": 2, "a": 2, "b": 2, "c": 2, "z": 2},
        "c": {"h": 2, "a": 2, "b": 2, "z": 2},
        "b": {"h": 2, "a": 2, "z": 2},
        "a": {"h": 2, "z": 2},
    }


# --- forward ---


def test_a_tensor_passes_from_its_making_to_its_last_use() -> None:
    """a feeds b and c: at b there are x, a and b; at c only a, b and c; nothing of x."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    a = tape.op("a", [x], of(a=1), 1)
    b = tape.op("b", [a], of(b=1), 1)
    tape.op("c", [a, b], of(c=1), 1)
    assert passing(tape.forward()) == {
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
    shots = tape.forward()
    assert passing(shots) == {"y": {"h": 4}, "z": {"h": 4}}
    assert saved(shots) == {"y": {}, "z": {"h": 2}}


def test_without_gradients_a_forward_saves_nothing() -> None:
    """A reference's forward: the same tensors pass, none stays."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("y", [x], X, 2, saves=[x])
    tape.op("z", [y], X, 4, saves=[y], saves_out=True)
    shots = tape.forward(grad=False)
    assert saved(shots) == {"y": {}, "z": {}}
    assert passing(shots) == {"y": {"h": 4}, "z": {"h": 6}}


def test_scratch_lives_only_while_its_operation_runs() -> None:
    """rotate_half's temporaries are gone at the next operation."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("rotate", [x], X, 2, scratch=of(h=6))
    tape.op("next", [y], X, 2)
    assert passing(tape.forward()) == {"rotate": {"h": 10}, "next": {"h": 4}}


def test_a_held_tensor_lives_to_the_end_of_forward() -> None:
    """`outputs.logits` is a variable of the caller: 2h more at the last operation, though nothing reads it again."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    logits = tape.hold(tape.op("logits", [x], X, 2))
    cast = tape.op("cast", [logits], X, 4)
    y = tape.op("softmax", [cast], of(y=1), 1)
    tape.op("nll", [y], of(z=1), 1)
    assert passing(tape.forward())["nll"] == {"h": 2, "y": 1, "z": 1}


# --- backward ---


def test_backward_starts_with_the_gradient_of_the_last_output() -> None:
    """Bytes of a gradient are those of its tensor: z's 4h arrives, y's 2h is made beside it."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    y = tape.op("y", [x], X, 2)
    tape.op("z", [y], X, 4)
    assert passing(tape.backward()) == {"z": {"h": 6}, "y": {"h": 2, "x": 1}}


def test_aliases_share_the_gradient_of_the_output() -> None:
    """An addition hands one gradient to both inputs: 2h at the addition, 2h more where one is worked on."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("block", [x], X, 2)
    tape.op("add", [x, y], X, 2, aliases=[x, y])
    assert passing(tape.backward()) == {"add": {"h": 2}, "block": {"h": 4}}


def test_a_cast_input_of_an_addition_gets_a_gradient_of_its_own() -> None:
    """fp32 residual, bf16 block: 4h shared with the residual, 2h for the block."""
    tape = Tape()
    x = Tensor(X, 4)
    y = tape.op("block", [x], X, 2)
    tape.op("add", [x, y], X, 4, aliases=[x])
    assert passing(tape.backward())["add"] == {"h": 6}


def test_a_second_contribution_is_added_into_the_first() -> None:
    """q, k and v give x three gradients: at most two exist at once, the sum so far and the new one."""
    tape = Tape()
    x = Tensor(X, 2)
    q, k, v = (tape.op(n, [x], of(**{n: 1}), 1) for n in "qkv")
    tape.op("join", [q, k, v], of(o=1), 1)
    assert passing(tape.backward()) == {
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
    assert passing(tape.forward()) == {"pair": {"h": 2, "i": 4}, "split": {"i": 4}, "product": {"i": 2}}
    assert passing(tape.backward()) == {"product": {"i": 6}, "split": {"i": 8}, "pair": {"i": 4, "h": 2}}
    assert {shot.gradients for shot in tape.backward()} == {0}


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
    assert [(s.name, s.gradients, s.making) for s in tape.backward()] == [
        ("above", 5, 5),
        ("between", 5, 0),
        ("below", 8, 3),
    ]
    assert [(s.gradients, s.making) for s in tape.forward()] == [(0, 0)] * 3


def test_backward_scratch_lives_only_in_its_own_backward() -> None:
    """Flash's fp32 accumulator of dq: not at the next operation, not in forward."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("below", [x], X, 2)
    tape.op("attention", [y], X, 2, backward_scratch=of(q=4))
    assert passing(tape.backward()) == {"attention": {"h": 4, "q": 4}, "below": {"h": 4}}
    assert passing(tape.forward())["attention"] == {"h": 4}


def test_backward_does_not_enter_what_needs_no_gradient() -> None:
    """No gradient is made for a frozen input, and operations below it do not run backward."""
    tape = Tape()
    x = Tensor(X, 2, differentiable=False)
    y = tape.op("frozen", [x], X, 2)
    tape.op("trained", [y], X, 2, saves=[y], weight=1)
    assert passing(tape.backward()) == {"trained": {"h": 2}}


def test_an_operation_whose_output_leads_nowhere_has_no_backward() -> None:
    """Only what the last output depends on gets a gradient; what it saved is kept until its place in the order."""
    tape = Tape()
    x = Tensor(X, 2)
    tape.op("unused", [x], of(u=1), 2, saves=[x])
    tape.op("used", [x], X, 2)
    shots = tape.backward()
    assert passing(shots) == {"used": {"h": 4}}
    assert saved(shots) == {"used": {"h": 2}}


def test_a_gradient_that_overwrites_what_was_saved_counts_once_and_lives_on() -> None:
    """flash-attn's cross entropy writes into its logits: 2h at the loss, still 2h below, where they were dropped."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    logits = tape.op("head", [x], X, 2)
    tape.op("loss", [logits], of(z=1), 1, saves=[logits], overwrites=True)
    shots = tape.backward()
    assert saved(shots) == {"loss": {"h": 2}, "head": {}}
    assert passing(shots) == {"loss": {"z": 1}, "head": {"h": 2, "x": 1}}


def test_a_gradient_that_overwrites_a_view_keeps_all_it_looks_into() -> None:
    """A slice of half shares the storage of the whole, which stays while the slice's gradient does."""
    tape = Tape()
    x = Tensor(of(x=1), 1)
    logits = tape.op("head", [x], X, 2)
    half = tape.op("slice", [logits], X * 0.5, 2, view=True)
    tape.op("loss", [half], of(z=1), 1, saves=[half], overwrites=True)
    assert passing(tape.backward())["slice"] == {"h": 4}


# --- what checkpointing runs again ---


def test_a_forward_runs_again_up_to_what_saves_last_which_does_not_run() -> None:
    """It stops as the last tensor is saved, before the operation that saves it: `down` and `add` are left out."""
    tape = Tape()
    x = Tensor(X, 2)
    wide = tape.op("up", [x], of(i=1), 2, saves=[x])
    y = tape.op("down", [wide], X, 2, saves=[wide])
    tape.op("add", [x, y], X, 2, aliases=[x, y])
    assert [shot.name for shot in tape.again()] == ["up"]
    assert tape.again()[0].passing.tokens == {"i": 2}


def test_the_gradients_above_what_saves_last_wait_meanwhile() -> None:
    """The output's, shared by the addition's inputs, 2h; the cast's own, 4h; nothing of what lies below."""
    tape = Tape()
    x = Tensor(X, 2)
    y = tape.op("down", [x], X, 4, saves=[x])
    y = tape.op("cast", [y], X, 2)
    tape.op("add", [x, y], X, 2, aliases=[x, y])
    assert tape.waiting().tokens == {"h": 2 + 4}


def test_what_saves_nothing_runs_again_whole() -> None:
    tape = Tape()
    tape.op("add", [Tensor(X, 2)], X, 2)
    assert [shot.name for shot in tape.again()] == ["add"]
    assert tape.waiting().tokens == {"h": 2}
