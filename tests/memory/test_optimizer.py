"""Optimizer states and step temporaries, from torch 2.13, bitsandbytes 0.45.5 and lion-pytorch."""

from __future__ import annotations

import pytest
from jobs import VH, P

from calc.catalog.catalog import load
from calc.memory.optimizer import (
    Optimizer,
    adafactor_bytes,
    in_32_bits,
    state_bytes_per_parameter,
    states,
    step_scratch,
    temporaries,
)
from calc.models.architecture import Tensor, tensors

LLAMA = tensors(load().model("llama-3-8b").architecture)


def of(kind: str, impl: str = "fused") -> Optimizer:
    """An optimizer."""
    return Optimizer(kind, impl)


@pytest.mark.parametrize(
    ("kind", "b", "expected"),
    [
        ("adamw", 2, 4),
        ("adamw", 4, 8),
        ("lion", 4, 4),
        ("sgd", 4, 0),
        ("sgd-momentum", 2, 2),
        ("adamw-8bit", 2, 2.03125),  # 2 · (1 + 4/256)
        ("adamw-paged-8bit", 4, 2.03125),
    ],
)
def test_states_take_these_bytes_a_parameter(kind: str, b: int, expected: float) -> None:
    """`zeros_like(param)` a moment; 8-bit moments with an fp32 scale for each block of 256."""
    assert state_bytes_per_parameter(of(kind), b) == expected


def test_small_tensors_keep_32_bit_states() -> None:
    """Below 4,096 elements (`min_8bit_size`) 8 bytes each. Llama 3 8B's norms have 4,096: none is small; Qwen2.5 0.5B's
    49 norms of 896, and biases of 896 and 2 · 128 in 24 layers, are."""
    assert not any(in_32_bits(of("adamw-8bit"), t) for t in LLAMA)
    assert states(of("adamw-8bit"), "actor", P, 2, LLAMA).bytes == int(2.03125 * P)
    qwen = tensors(load().model("qwen2.5-0.5b").architecture)
    small = 49 * 896 + 24 * (896 + 2 * 128)
    found = states(of("adamw-8bit"), "actor", 494_032_768, 2, qwen).bytes
    assert found == int(2.03125 * (494_032_768 - small) + 8 * small)


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix() -> None:
    """`_adafactor.py`: row_var and col_var for two dimensions and more, a whole variance for a vector."""
    assert adafactor_bytes([Tensor("w", (30, 20), 2, "linear", "mlp")], 4) == 2 * 4 * (30 + 20)
    assert adafactor_bytes([Tensor("n", (30,), 3, "norm", "norm")], 2) == 3 * 2 * 30
    # fused experts: for each of 8 a row and a column
    assert adafactor_bytes([Tensor("e", (8, 30, 20), 1, "expert", "mlp")], 2) == 2 * 8 * (30 + 20)


def test_a_flat_partition_has_neither_rows_nor_small_tensors() -> None:
    """ZeRO and FSDP 1 hand the optimizer one vector: Adafactor keeps a whole moment, 8-bit AdamW no 32-bit tensor."""
    assert states(of("adafactor"), "actor", P, 4, (), 8).bytes == 4 * P // 8
    assert states(of("adamw-8bit"), "actor", 494_032_768, 4, ()).bytes == int(2.03125 * 494_032_768)


def test_states_are_spread_over_shards() -> None:
    """Adam in fp32 over 8: 8P/8."""
    assert states(of("adamw"), "actor", P, 4, LLAMA, 8).bytes == P


@pytest.mark.parametrize(
    ("kind", "impl", "expected"),
    [
        ("adamw", "fused", 0),
        ("adamw", "foreach", 2 * P),  # `_foreach_sqrt` of all moments
        ("adamw", "single", 2 * 2 * VH),  # root and quotient of the largest
        ("adamw-8bit", "foreach", 0),
        ("sgd", "foreach", 0),
        ("sgd-momentum", "foreach", 0),  # `_foreach_mul_`, `_foreach_add_` into the buffers
        ("lion", "single", 2 * 2 * VH),  # a clone and a sum
        ("adafactor", "single", 2 * VH),  # `row_var @ col_var`, then in place
        ("adafactor", "foreach", 2 * P),
    ],
)
def test_a_step_allocates(kind: str, impl: str, expected: int) -> None:
    """Read in torch 2.13 optim/*.py and lion_pytorch.py; Llama 3 8B in bf16."""
    assert step_scratch(of(kind, impl), "actor", P, VH, 2).bytes == expected


@pytest.mark.parametrize(
    ("kind", "b", "scratch", "state"),
    [
        ("lion", 2, 0, 4),  # bitsandbytes' kernel, in place, its state in fp32
        ("lion", 4, 0, 4),
        ("adafactor", 4, 8, None),  # the squares, and their sum with epsilon
        ("adafactor", 2, 16, None),  # beside fp32 copies of gradient and weight
    ],
)
def test_transformers_trainer_builds_classes_of_its_own(kind: str, b: int, scratch: int, state: int | None) -> None:
    """`trainer_optimizer.py` of 5.17: bitsandbytes' Lion and `transformers.optimization.Adafactor`; bytes an element.

    Measured on an H200 under TRL 1.16.0: 4.60 and 1.96 GiB beside 9.27 of weights and gradients.
    """
    own = Optimizer(kind, "single", by_trainer=True)
    assert step_scratch(own, "actor", P, VH, b).bytes == scratch * VH
    if state:
        assert states(own, "actor", P, b, LLAMA).bytes == state * P


def test_only_8_bit_optimizers_keep_small_tensors_in_32_bits() -> None:
    """Qwen2.5 0.5B's norms and biases are small, yet AdamW keeps 2 · 2 bytes of them as of all, Lion and SGD 2."""
    qwen = tensors(load().model("qwen2.5-0.5b").architecture)
    found = [states(of(kind), "actor", 494_032_768, 2, qwen).bytes for kind in ("adamw", "lion", "sgd-momentum", "sgd")]
    assert found == [4 * 494_032_768, 2 * 494_032_768, 2 * 494_032_768, 0]


def test_states_that_do_not_divide_are_whole_bytes() -> None:
    """Three of the four bytes an element over 2 ranks: Adafactor's own shards are rounded up, flat ones down."""
    matrix = [Tensor("w", (2, 3), 1, "linear", "mlp")]  # 2 + 3 moments of 1 byte
    assert [states(of("adafactor"), "a", 6, 1, matrix, n).bytes for n in (1, 2, 5)] == [5, 3, 1]
    assert states(of("adamw"), "a", 5, 1, matrix, 4).bytes == 2  # 10 bytes over 4
    # 8-bit: all of its 6 elements are small, 8 bytes each
    assert [states(of("adamw-8bit"), "a", 6, 2, matrix, n).bytes for n in (1, 4, 5)] == [48, 12, 9]
    assert states(of("adamw-8bit"), "a", 5, 2, (), 4).bytes == 2  # 10.16 over 4: 2.54
    for kind in ("adafactor", "adamw", "adamw-8bit"):
        assert type(states(of(kind), "a", 6, 1, matrix, 5).bytes) is int


@pytest.mark.parametrize(
    ("kind", "impl", "expected"),
    [("adamw", "foreach", 3), ("adamw", "single", 3), ("adafactor", "single", 1), ("adafactor", "foreach", 3)],
)
def test_what_a_step_allocates_is_spread_over_shards(kind: str, impl: str, expected: int) -> None:
    """FSDP steps shards: of 7 elements, 3 in the largest tensor, 2 bytes each, over 4 ranks, rounded down."""
    line = step_scratch(of(kind, impl), "actor", 7, 3, 2, 4)
    assert (line.bytes, type(line.bytes)) == (expected, int)


def test_a_row_and_a_column_are_counted_in_whole_elements() -> None:
    """A matrix of 3 by 2: 3 rows and 2 columns; bytes are whole ones."""
    found = adafactor_bytes([Tensor("w", (3, 2), 1, "linear", "mlp")], 4)
    assert (found, type(found)) == (20, int)


def test_a_tensor_of_4095_elements_is_small_and_one_of_4096_is_not() -> None:
    """`min_8bit_size` is the first size that has 8-bit states."""
    sizes = [Tensor("n", (4095,), 2, "norm", "norm"), Tensor("m", (4096,), 1, "norm", "norm")]
    assert [in_32_bits(of("adamw-8bit"), t) for t in sizes] == [True, False]


def test_an_embedding_keeps_32_bit_states_where_the_trainer_names_it() -> None:
    """Transformers 5.23 `trainer.py:1338`: 8 bytes for each of 10,000 entries, not 2.03125; other tensors as before."""
    both = [Tensor("e", (100, 100), 1, "embedding", "embedding"), Tensor("w", (100, 100), 1, "linear", "mlp")]
    named = Optimizer("adamw-8bit", "foreach", by_trainer=True)
    assert states(named, "actor", 20_000, 2, both).bytes == 8 * 10_000 + int(2.03125 * 10_000)
    assert states(of("adamw-8bit"), "actor", 20_000, 2, both).bytes == int(2.03125 * 20_000)
    assert not in_32_bits(named, Tensor("b", (5000,), 1, "bias", "attention"))


def test_two_copies_of_the_largest_are_as_wide_as_its_type() -> None:
    """Root and quotient of 100 fp32 elements: 2 · 4 · 100."""
    assert step_scratch(of("adamw", "single"), "actor", 300, 100, 4).bytes == 800


@pytest.mark.parametrize(
    ("kind", "fused", "foreach", "single"),
    [
        ("adamw", 0, 1, 2),
        ("lion", 0, 1, 2),
        ("adafactor", 0, 1, 1),
        ("sgd-momentum", 0, 0, 0),
        ("sgd", 0, 0, 0),
        ("adamw-8bit", 0, 0, 0),
        ("none", 0, 0, 0),
    ],
)
def test_a_step_makes_so_many_tensors_for_each_parameter(kind: str, fused: int, foreach: int, single: int) -> None:
    """torch 2.13 `optim/adamw.py`, `_adafactor.py`, and lion-pytorch: lists of temporaries, or one after another."""
    assert [temporaries(of(kind, impl)) for impl in ("fused", "foreach", "single")] == [fused, foreach, single]


@pytest.mark.parametrize(("kind", "own"), [("adamw-8bit", True), ("adamw-paged-8bit", False)])
def test_paged_states_are_managed_memory(kind: str, own: bool) -> None:
    """bitsandbytes `get_paged`: on the card, and no block of PyTorch's allocator."""
    assert states(of(kind, "single"), "actor", 10_000, 2, ()).allocated is own
