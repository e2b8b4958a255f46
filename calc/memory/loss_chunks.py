"""Chunks of Unsloth's fused losses, as many or as large as the memory that is free at the first loss allows.

`get_chunk_size` of unsloth_zoo `fused_losses/cross_entropy_loss.py`, whose result for a vocabulary is cached: free is
what the driver has left then, in a process's first forward. `gib`, 2025.8.8: a chunk's logits in fp32 have room of one
GiB, and chunks are rounded to a multiple of four, down to none, which is one. `nearest`, 2025.9.1: half of what is free
is room. `capped`, 2026.7.1: no more than 4 GiB of it, and rounded up. `chain`, 2026.9.3: 16 bytes of each logit, and
room for gradients of input and head besides. `rows`, 2026.10.9 `fused_losses/fused_linear.py`: rows of logits in one
buffer, over which their gradient is written (`fused_linear_rows`, `_ce_impl`), or tiles of vocabulary entries
(`_tiled_layout`) where the head is frozen, on a small card or for many tokens.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple, assert_never

from calc.base.plan import Chunks, Path
from calc.base.units import GiB, MiB

SHARE = 0.5  # of the free memory (`free_gb * 0.5`)
CAP = 4 * GiB  # `_CE_TARGET_GB_CAP`
CHAIN = 16  # bytes of a logit (`_CE_BYTES_PER_LOGIT`)
BUFFER = 2 * GiB  # `_CHUNK_GB`
LEAST, FEWEST, MOST = 512 * 151_936, 512, 4096  # `_MIN_LOGITS`, its clamp in `fused_linear_rows`, `_MAX_ROWS`
TILE, SPLIT = 256 * MiB, 16_384  # `_BWD_TILE_BYTES`, `_SPLIT_COLS`
STATISTICS = 8  # fp32 numbers of a row and split (`part`)
SMALL, MANY = 24.5 * GiB, 4096  # `_SMALL_CARD_BYTES`; labelled tokens from which larger cards take tiles


class Card(NamedTuple):
    """The card as a loss finds it: bytes in all and free, and whether its products may return fp32, and tiles run."""

    total: int
    free: int
    returns_fp32: bool = True
    tiles: bool = True


class Logits(NamedTuple):
    """The logits of a micro batch: its tokens, the vocabulary's entries, the head's inputs, bytes of an element of the
    product, whether the head is trained, and whether other micro batches have fewer tokens.
    """

    tokens: int
    entries: int
    inputs: int
    c: int
    trained: bool
    varying: bool = False


def settled(path: Path, logits: Logits, card: Card) -> Path:
    """The path with the bytes that its chunks take at once."""
    match path.chunks:
        case "":
            return path
        case "gib" | "nearest" | "capped" | "chain":
            # compiled, the logits of a chunk and their gradient
            chunk = rows(path.chunks, logits, card.free) * logits.entries * 2 * logits.c
            return replace(path, chunks="", buffer=chunk)
        case "rows":
            return replace(path, chunks="", buffer=buffer(logits, card))
        case other:
            assert_never(other)


def rows(chunks: Chunks, logits: Logits, free: int) -> int:
    """The tokens of the largest chunk.

    Where others have fewer tokens, a micro batch may have a larger one: logits of twice the room are rounded to a
    single chunk, of three times to four.
    """
    room, each, beside = _room(chunks, logits, free)
    exact = logits.tokens * each / (room - beside * logits.tokens)
    rounded = chunks == "gib" or chunks == "nearest"
    number = max(4 * round(exact / 4), 1) if rounded else 4 * ceil(exact / 4) if exact > 1 else 1
    own = -(-logits.tokens // number)
    alone = int((2 if rounded else 1) * room / (each + beside))
    return max(own, min(logits.tokens, alone)) if logits.varying else own


def _room(chunks: Chunks, logits: Logits, free: int) -> tuple[float, int, int]:
    """The bytes for chunks, those that a token's logits count as, and those of each token of all beside."""
    if chunks == "gib":
        return GiB, 4 * logits.entries, 0
    if chunks == "nearest":
        return SHARE * free, 4 * logits.entries, 0
    room = min(SHARE * free, CAP)
    if chunks == "capped":
        return room, 4 * logits.entries, 0
    own = logits.c * logits.inputs
    head = 2 * own * logits.entries * logits.trained
    if own * logits.tokens + head >= room:
        return room, CHAIN * logits.entries, 0
    return room - head, CHAIN * logits.entries, own


def buffer(logits: Logits, card: Card) -> int:
    """The bytes at once of logits, of their input's gradient in fp32, and of statistics, the newest way."""
    wide = logits.c == 2 and card.returns_fp32
    b, room = 4 if wide else logits.c, min(BUFFER, SHARE * card.free)
    splits, small = -(-logits.entries // SPLIT), card.total <= SMALL
    if wide and card.tiles and not logits.trained and splits > 2 and (small or logits.tokens >= MANY):
        most = min(TILE, room)
        rows = max(min(MOST, logits.tokens, int(most // (SPLIT * b))), 1)
        columns = SPLIT if small else max(int(most // (rows * b)) // SPLIT * SPLIT, SPLIT)
        columns = min(columns, splits * SPLIT)
        return rows * (columns * b + logits.inputs * 4 + STATISTICS * splits * 4)
    rows = _power(logits.tokens * logits.inputs / logits.entries)
    least = min(max(_power(LEAST / logits.entries), FEWEST), MOST)
    rows = min(max(rows, least), MOST, max(int(room // (logits.entries * b)), 2), logits.tokens)
    return rows * (logits.entries * b + logits.inputs * 4)


def _power(number: float) -> int:
    """The largest power of two that is no more than `number`, at least one."""
    return 1 << max(int(number).bit_length() - 1, 0)
