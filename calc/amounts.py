"""From tapes to numbers: what a piece of a model keeps and passes, as a function of tokens and length.

A tape answers in symbols; here a model's dimensions are put in once, and the instants that another one always covers
are dropped, so that an estimate evaluates a handful of sums.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from operator import add, le
from typing import NamedTuple

from calc.tape import Size, Snapshot, Tape, text


class Amount(NamedTuple):
    """Bytes for T tokens in sequences of S: `tokens·T + pairs·T·S + fixed + row·S`, and how that was composed."""

    tokens: float
    pairs: float
    fixed: float
    row: float
    formula: str

    def bytes(self, tokens: int, length: int) -> int:
        """The bytes for `tokens` in sequences of `length`."""
        return int(tokens * (self.tokens + self.pairs * length) + self.fixed + self.row * length)


NO_BYTES = Amount(0, 0, 0, 0, "0")


class Shot(NamedTuple):
    """A snapshot of a tape in numbers."""

    name: str
    saved: Amount
    passing: Amount
    gradients: int
    making: int


def amount(size: Size, dims: Mapping[str, int]) -> Amount:
    """`size` with a model's numbers put in."""
    parts = [f"T·({text(size.tokens)})"] * bool(size.tokens) + [text(size.fixed)] * bool(size.fixed)
    return Amount(*_figures(size, dims), formula=" + ".join(parts) or "0")


def _figures(size: Size, dims: Mapping[str, int]) -> tuple[float, float, float, float]:
    """The four coefficients of an Amount."""
    found = []
    for terms in (size.tokens, size.fixed):
        plain = by_length = 0.0
        for symbol, c in terms.items():
            base = symbol.removesuffix("·S")
            value = c * dims[base] if base not in ("", "S") else c
            if symbol == "S" or base != symbol:
                by_length += value
            else:
                plain += value
        found += [plain, by_length]
    tokens, pairs, fixed, row = found
    return tokens, pairs, fixed, row


def peaks(snapshots: list[Snapshot], dims: Mapping[str, int], apart: Container[str] = ()) -> tuple[Shot, ...]:
    """The snapshots that can be the largest for some number of tokens and length: those that no other one covers.

    Operations named in `apart` run where an engine has something else in memory: they cover each other alone.
    """
    keys = [(*map(add, _figures(s.saved, dims), _figures(s.passing, dims)), s.gradients, s.making) for s in snapshots]
    kept = [
        s
        for n, (s, key) in enumerate(zip(snapshots, keys, strict=True))
        if not any(
            all(map(le, key, other)) and (key != other or m < n)
            for m, other in enumerate(keys)
            if m != n and (snapshots[m].name in apart) == (s.name in apart)
        )
    ]
    return tuple([Shot(s.name, amount(s.saved, dims), amount(s.passing, dims), s.gradients, s.making) for s in kept])


class Segment(NamedTuple):
    """A piece of the model as estimates use it: what it keeps, its instants, and how many parameters it trains."""

    saved: Amount
    forward: tuple[Shot, ...]
    backward: tuple[Shot, ...]
    without_grad: tuple[Shot, ...]
    once: tuple[Shot, ...]  # of a forward that checkpointing will repeat,
    again: tuple[Shot, ...]  # of the repetition, and
    waiting: Amount  # the gradients that exist meanwhile
    kept: Amount  # beside its input, by selective checkpointing


def segment(tape: Tape, dims: Mapping[str, int], apart: Container[str] = ()) -> Segment:
    """The answers of one tape in a model's numbers; see `peaks` for `apart`."""
    without_grad = peaks(tape.forward(grad=False), dims, apart)
    return Segment(
        amount(tape.saved(), dims),
        peaks(tape.forward(), dims, apart),
        peaks(tape.backward(), dims, apart),
        without_grad,
        peaks(tape.once(), dims, apart) if tape.selective else without_grad,
        peaks(tape.again(), dims, apart),
        amount(tape.waiting(), dims),
        amount(tape.kept(), dims),
    )
