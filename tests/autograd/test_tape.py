from __future__ import annotations

import pytest
from formulas import evaluate, form, terms
from tapes import forward_of, selective

from calc.autograd.tape import NOTHING, Size, Tape, Tensor, of, text

X = of(h=1)


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


def test_views_share_the_storage_of_what_they_look_into() -> None:
    """Phi-3's q, k and v are views of one product of 6h bytes: saving all three keeps it once."""
    tape = Tape()
    x = Tensor(X, 2)
    qkv = tape.op("qkv", [x], of(h=3), 2)
    q, k, v = (tape.op(n, [qkv], X, 2, view=True) for n in "qkv")
    out = tape.op("attention", [q, k, v], X, 2, saves=[q, k, v])
    assert terms(tape.saved()) == form("6h")
    assert q.storage is k.storage is v.storage is qkv
    assert {shot.name: terms(shot.passing)[0] for shot in forward_of(tape)} == {
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


def test_every_second_product_and_what_is_spared_stays_until_backward() -> None:
    """Of q, k, up and down the first and the third; attention with its second output. Nothing without the policy."""
    assert terms(selective().kept()) == form("2q + 2o + 4H + 2i")
    assert terms(Tape().kept()) == form("0")
