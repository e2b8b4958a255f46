"""Unsloth's chunks as `get_chunk_size` and `fused_linear_rows` of unsloth_zoo count them, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.plan import Chunks, Path
from calc.base.units import GiB, MiB
from calc.memory.loss_chunks import Card, Logits, rows, settled

# 262,144 entries: a MiB of fp32 logits for each token
GEMMA: dict[str, Any] = {"entries": 2**18, "inputs": 640, "c": 2, "trained": False}


@pytest.mark.parametrize(
    ("chunks", "tokens", "free", "number"),
    [
        # 8 chunks of 1 GiB of 8, 4 · round(8 / 4); 4 · round(5 / 4) of 5; one of 2, as round(0.5) is 0
        ("gib", 8192, 1, 8),
        ("gib", 5 * 1024, 1, 4),
        ("gib", 2048, 1, 1),
        # 5 GiB of the 10 that are free: 16 are 3.2 of them, 4 · round(0.8); 10 are two, 4 · round(0.5)
        ("nearest", 16384, 10, 4),
        ("nearest", 10 * 1024, 10, 1),
        # no more than 4 GiB of 64, of which 16 have four and 17 eight; up to 4 are whole; of 4 GiB two are room
        ("capped", 16384, 64, 4),
        ("capped", 17 * 1024, 64, 8),
        ("capped", 4096, 64, 1),
        ("capped", 4096, 4, 4),
    ],
)
def test_chunks_are_a_multiple_of_four_or_one(chunks: Chunks, tokens: int, free: int, number: int) -> None:
    assert rows(chunks, Logits(tokens, **GEMMA), free * GiB) == tokens / number


def test_sixteen_bytes_of_a_logit_have_room_beside_the_gradients_of_input_and_head() -> None:
    """1,024 tokens of 4 MiB and 1,280 bytes each: 4 GiB have room for less than one chunk, so that there are four.

    The head's gradient is counted twice, 640 MiB: with 1,000 tokens 3.9 GiB are more than the 3.4 that are left.
    """
    assert rows("chain", Logits(1024, **GEMMA), 64 * GiB) == 256
    assert rows("chain", Logits(1000, **GEMMA), 64 * GiB) == 1000
    assert rows("chain", Logits(1000, **{**GEMMA, "trained": True}), 64 * GiB) == 250


@pytest.mark.parametrize("chunks", ["gib", "nearest", "capped", "chain"])
def test_no_batch_of_fewer_tokens_has_a_larger_chunk_than_a_batch_of_varying_lengths(chunks: Chunks) -> None:
    """At 16,384 tokens and 10 GiB there are four chunks of 4 GiB; at 10,240 one, of 10 GiB."""
    fewer = max(rows(chunks, Logits(tokens, **GEMMA), 10 * GiB) for tokens in range(1, 16385))
    assert rows(chunks, Logits(16384, **GEMMA, varying=True), 10 * GiB) == fewer
    assert chunks != "nearest" or fewer == 10 * 1024


def test_a_chunk_has_its_logits_and_their_gradient() -> None:
    card = Card(16 * GiB, 10 * GiB)
    made = settled(Path("fused", chunks="nearest"), Logits(16384, **GEMMA), card)
    assert made == Path("fused", buffer=4096 * 2**18 * 2 * 2)
    assert settled(Path("cut"), Logits(16384, **GEMMA), card) == Path("cut")


def test_the_newest_release_has_rows_of_logits_in_one_buffer_or_tiles_of_them() -> None:
    """2,048 tokens of Llama 3's width and vocabulary: 65 rows by Liger's rule, raised to 606, whose power is 512.

    A trained head has these rows in fp32, over which their gradient is written, and the product's gradient of 4,096
    inputs. A frozen one has 2,048 rows of 16,384 entries at a time on a card of 24 GB, a sum of their inputs, and eight
    numbers for each of eight splits; a larger card takes tiles from 4,096 tokens on.
    """

    def buffer(tokens: int, card: Card, *, trained: bool = False, entries: int = 128_256) -> int:
        logits = Logits(tokens, entries, 4096, 2, trained)
        return settled(Path("fused", chunks="rows"), logits, card).buffer

    small, large = Card(22 * GiB, 8 * GiB), Card(80 * GiB, 40 * GiB)
    whole = 512 * (128_256 + 4096) * 4
    assert buffer(2048, small, trained=True) == buffer(2048, large) == whole
    assert buffer(2048, small) == 2048 * (16_384 * 4 + 4096 * 4 + 8 * 8 * 4)
    # 256 MiB of 4,096 rows are 16,384 entries each
    assert buffer(8192, large) == 256 * MiB + 4096 * (4096 * 4 + 8 * 8 * 4)
    # 32,768 tokens: 1,046 rows, whose power is 1,024; a card without tiles, and one whose products stay in 16 bits
    assert buffer(32_768, large._replace(tiles=False)) == 1024 * (128_256 + 4096) * 4
    assert buffer(32_768, large._replace(returns_fp32=False)) == 1024 * (128_256 * 2 + 4096 * 4)
    # 32,768 entries are two splits, which are no tiles: 4,096 rows
    assert buffer(32_768, small, entries=32_768) == 4096 * (32_768 + 4096) * 4
    # half of 256 MiB has room for 261 rows
    assert buffer(2048, Card(22 * GiB, 256 * MiB), trained=True) == 261 * (128_256 + 4096) * 4
