"""Closed forms: the bytes that a piece of a model keeps and needs in passing, as functions of tokens and length.

The turns of a pass are added up in symbols. Then a model's dimensions are put in once, and instants that another one
always exceeds are dropped, so that an estimate evaluates only a handful of sums.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache, cached_property
from operator import add, le
from typing import NamedTuple

from calc.autograd.lifetimes import Lifetimes, Turn
from calc.autograd.tape import CHUNK, NOTHING, Size, Tape, text, total


def whole_chunks(length: int) -> float:
    """A length in whole chunks over the length."""
    return -(-length // CHUNK) * CHUNK / length


class Amount(NamedTuple):
    """Bytes for T tokens in sequences of S, and their formula in symbols.

    They are `tokens·T + pairs·T·S + fixed + row·S + chunked·T·C`, C being the length in whole chunks over S.
    """

    tokens: float
    pairs: float
    fixed: float
    row: float
    chunked: float
    formula: str

    def bytes(self, tokens: int, length: int) -> int:
        """The bytes for `tokens` tokens in sequences of `length`."""
        whole = whole_chunks(length) if self.chunked else 0
        each = self.tokens + self.pairs * length + self.chunked * whole
        return int(tokens * each + self.fixed + self.row * length)


NO_BYTES = Amount(0, 0, 0, 0, 0, "0")


class Snapshot(NamedTuple):
    """One instant: bytes saved for backward, bytes in passing, trainable elements whose gradient exists by then.

    Of `gradients`, `making` elements belong to the gradient that the operation itself makes.
    """

    name: str
    saved: Size
    passing: Size
    gradients: int
    making: int


def snapshots(turns: Iterable[Turn]) -> list[Snapshot]:
    """The instants of a pass, one for each operation: its temporaries count as if they were all there at once."""
    done, known, saved, shots = 0, None, NOTHING, []
    for turn in turns:
        op = turn.op
        if not op.outs:
            continue
        if turn.saved is not known:
            known, saved = turn.saved, total(turn.saved)
        making = op.weight if turn.backward else 0
        done += making
        passing = total(turn.passing)
        shots.append(Snapshot(op.name, saved, passing + turn.scratch if turn.scratch else passing, done, making))
    return shots


class Shot(NamedTuple):
    """A snapshot of a tape in numbers."""

    name: str
    saved: Amount
    passing: Amount
    gradients: int
    making: int


def amount(size: Size, dims: Mapping[str, int]) -> Amount:
    """`size` with a model's dimensions put in."""
    parts = [f"T·({text(size.tokens)})"] * bool(size.tokens) + [text(size.fixed)] * bool(size.fixed)
    return Amount(*_figures(size, dims), formula=" + ".join(parts) or "0")


def in_bytes(size: Size, dims: Mapping[str, int], tokens: int, length: int) -> int:
    """The bytes of `size` for `tokens` tokens in sequences of `length`."""
    return Amount(*_figures(size, dims), formula="").bytes(tokens, length)


@cache
def _factors(symbol: str) -> tuple[str, str]:
    """The dimension that a term's symbol names, if any, and what it scales with: S, C or neither."""
    if symbol == "S":
        return "", "S"
    base = symbol.removesuffix("·S").removesuffix("·C")
    return base, symbol[len(base) + 1 :]


def _figures(size: Size, dims: Mapping[str, int]) -> tuple[float, float, float, float, float]:
    """The five coefficients of an Amount."""
    found, chunked = [], 0.0
    for terms in (size.tokens, size.fixed):
        plain = by_length = 0.0
        for symbol, c in terms.items():
            base, scales = _factors(symbol)
            value = c * dims[base] if base else c
            if scales == "C":
                chunked += value
            elif scales:
                by_length += value
            else:
                plain += value
        found += [plain, by_length]
    tokens, pairs, fixed, row = found
    return tokens, pairs, fixed, row, chunked


def peaks(snapshots: list[Snapshot], dims: Mapping[str, int], apart: Sequence[Container[str]] = ()) -> tuple[Shot, ...]:
    """The snapshots that can be the largest for some number of tokens and length: those that no other one dominates.

    Operations named in one of `apart` run while an engine has something else in memory, so they are compared only with
    each other.
    """
    saved = {size: _figures(size, dims) for size in {s.saved for s in snapshots}}
    keys = [(*map(add, saved[s.saved], _figures(s.passing, dims)), s.gradients, s.making) for s in snapshots]
    groups: dict[int, list[int]] = {}
    for n, s in enumerate(snapshots):
        own = next((place for place, names in enumerate(apart) if s.name in names), len(apart))
        groups.setdefault(own, []).append(n)
    kept = [among[n] for among in groups.values() for n in maxima([keys[n] for n in among])]
    return tuple(
        [
            Shot(s.name, amount(s.saved, dims), amount(s.passing, dims), s.gradients, s.making)
            for s in [snapshots[n] for n in sorted(kept)]
        ]
    )


def maxima(sizes: Sequence[tuple[float, ...]]) -> list[int]:
    """The indices of the sizes that no other size equals or exceeds in all figures; of equal sizes the first."""
    found: list[int] = []
    # a size that dominates another stands before it in this order, and is found or dominated by one that is
    for n in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        own = sizes[n]
        if not any([all(map(le, own, sizes[m])) for m in found]):
            found.append(n)
    return sorted(found)


class Segment:
    """A piece of the model as estimates use it: what it keeps, and its peak instants, each computed on first use."""

    def __init__(
        self, tape: Tape, dims: Mapping[str, int], apart: Sequence[Container[str]] = (), scoring: Tape | None = None
    ) -> None:
        """Takes a tape and a model's dimensions; see `peaks` for `apart`. `scoring`: the tape without gradient, if
        another.
        """
        self._tape, self._scoring, self._dims, self._apart = tape, scoring or tape, dims, apart
        self._lifetimes = Lifetimes(tape)

    @property
    def saves(self) -> int:
        """The number of tensors that operations save, each as often as it is saved."""
        return sum([len(op.saves) for op in self._tape.ops])

    @property
    def dims(self) -> Mapping[str, int]:
        """The numbers behind the symbols of the formulas."""
        return self._dims

    def _peaks(self, turns: Iterable[Turn]) -> tuple[Shot, ...]:
        return peaks(snapshots(turns), self._dims, self._apart)

    @cached_property
    def saved(self) -> Amount:
        """The bytes saved for backward."""
        return amount(self._tape.saved(), self._dims)

    @cached_property
    def forward(self) -> tuple[Shot, ...]:
        """The instants of a forward that is followed by a backward."""
        return self._peaks(self._lifetimes.forward.turns)

    @cached_property
    def backward(self) -> tuple[Shot, ...]:
        """The instants of backward."""
        return self._peaks(self._lifetimes.backward.turns)

    @cached_property
    def without_grad(self) -> tuple[Shot, ...]:
        """The instants of a forward without gradient, which keeps nothing."""
        return self._peaks(Lifetimes(self._scoring).without_grad.turns)

    @cached_property
    def once(self) -> tuple[Shot, ...]:
        """The instants of a forward that checkpointing will repeat."""
        return self._peaks(self._lifetimes.once.turns) if self._tape.selective else self.without_grad

    @cached_property
    def again(self) -> tuple[Shot, ...]:
        """The instants of the recomputation."""
        return self._peaks(self._lifetimes.recomputed())

    @cached_property
    def waiting(self) -> Amount:
        """The gradients that exist during the recomputation."""
        return amount(total(self._lifetimes.waiting()), self._dims)

    @cached_property
    def kept(self) -> Amount:
        """The bytes that checkpointing keeps in addition to the input."""
        return amount(self._tape.kept(), self._dims)
