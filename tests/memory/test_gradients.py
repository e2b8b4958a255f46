"""Gradients: the bytes of each line, by hand."""

from __future__ import annotations

from jobs import VH, P

from calc.memory import gradients


def test_each_kind_of_gradient_takes_its_bytes() -> None:
    """Bytes an element times elements over shards, as the DeepSpeed and torch sources give them."""
    for line, expected, component in (
        (gradients.so_far("actor", VH, 2), 2 * VH, "gradients"),
        (gradients.accumulated("actor", P, 2, 8), P // 4, "gradients"),
        (gradients.accumulated("actor", P, 4), 4 * P, "gradients"),
        (gradients.unreduced("actor", VH, 2), 2 * VH, "gradients"),
        (gradients.partition("actor", VH, 2), 2 * VH, "gradients"),
        # what only passes
        (gradients.new("actor", VH, 2), 2 * VH, "temporary"),
        (gradients.squared_norm("actor", VH), 8 * VH, "temporary"),  # fp64, 4.2e9 bytes for Llama 3's embedding
        (gradients.checked("actor", VH), 11 * VH, "temporary"),  # fp32 copy 4, |x| 4, three masks
        (gradients.flattened("actor", P // 8, 6), 6 * P // 8, "temporary"),
    ):
        assert line.bytes == expected
        assert line.component == component
        assert line.role == "actor"


def test_a_tied_embeddings_contributions_are_two_or_one_beside_their_sum() -> None:
    """Traced: two more V·h where the head's gradient is a transposed view, one where it is contiguous."""
    assert gradients.tied_embedding("actor", 100, 2, contiguous=False).bytes == 400
    assert gradients.tied_embedding("actor", 100, 4, contiguous=True).bytes == 400


def test_accumulated_gradients_that_do_not_divide_are_rounded_down_once() -> None:
    """A fractional size an element stands for a mix of types: 2.5 · 7 over 2 is 8.75."""
    assert gradients.accumulated("actor", 7, 2.5, 2).bytes == 8
    assert gradients.accumulated("actor", 7, 0.5, 2).bytes == 1
