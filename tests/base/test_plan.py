"""The words of a framework's plan, and what follows from them."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from calc.base.plan import Held, LossKind, Path, Stage


def test_a_loss_runs_inside_the_model_unless_its_outputs_are_kept_for_a_turn() -> None:
    """Losses of a model's own forward, and a value head; log-probabilities are taken from what it has returned."""
    inside = {kind for kind in get_args(LossKind) if Path(kind).inside}
    # Megatron-core's, and verl's on it
    own = {"vocab-parallel", "vocab-parallel-compiled", "vocab-parallel-te", "vocab-parallel-softmax", "linear-entropy",
           "vocab-chunked", "chunked-entropy"}  # fmt: skip
    assert inside == {
        "cross-entropy",
        "chunked",
        "chunked-views",
        "fused",
        "fused-rows",
        "cut",
        "tiled",
        "scalar",
        *own,
    }
    assert [held for held in get_args(Held) if not Path("cross-entropy", held=held).inside] == ["turn"]


def test_a_kind_of_loss_that_nothing_knows_fails_at_once() -> None:
    unknown: Any = "focal"
    with pytest.raises(AssertionError, match="focal"):
        _ = Path(unknown).inside


def test_an_engine_hands_on_what_a_stage_holds_but_for_whole_weights_and_logits() -> None:
    """These two say what stays on the GPU, and not what is gathered or copied."""
    assert Stage("sync", "actor", holds=("weights", "units", "prompt-logits", "clone")).handed == ("units", "clone")
