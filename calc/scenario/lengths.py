"""The lengths of a data set's sequences: the tokens of the fullest batch of an epoch, and of an average one.

A batch without packing is padded to its own longest sequence, so that its length follows from the data and not from the
cap alone. What is known is either a histogram, or the mean and the longest, perhaps with the shortest and the standard
deviation. Then the distribution is the one of greatest entropy between shortest and longest that has the mean and at
most that deviation: exponential by the mean alone, normal by both, cut off at both ends (Jaynes, Information Theory and
Statistical Mechanics, 1957).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import ceil, exp, log, sqrt
from operator import mul
from typing import Any

from calc.scenario.data_sets import mixture

SAMPLES = 10_000  # sequences of an epoch where nobody says
POINTS = 256  # lengths that stand for a distribution known by its mean and its longest
CELLS = 512  # most cells of the distribution of a batch's tokens, and the least to one of its standard deviations
FINE = 8
NEVER = 1e-12  # a probability left out
# Newton's method: most steps, what another would gain at most when it ends, and a curvature that is none
NEWTON, CLOSE, FLAT = 100, 1e-11, 1e-24
# An epoch's batches where their sizes matter one by one: so many in a row, and as many lengths, one for each equal part
# of the distribution, in the order of multiples of the golden ratio, which fall into all parts alike. Twice as many
# batches take twice the time, and come no nearer to what was published (median of the same 140 jobs: 6.8 % off).
BATCHES = 24
GOLDEN = (sqrt(5) - 1) / 2
# Batches that Transformers sorts together by length: so many times a step's sequences, or a quarter of the data where
# that is less (transformers 4.31 to 5.9 `trainer_pt_utils.py`, `get_length_grouped_indices`).
MEGABATCH, QUARTER = 50, 4

Sum = tuple[int, list[float]]  # the distribution of a sum by cells: the first one, and the probabilities from there on


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens: `counts` of (length, sequences), shortest first, or `mean` and `longest` of `samples`.

    `deviation` is the standard deviation, None where it is not known; `prompt` has the tokens of each sequence that
    come before its answer.
    """

    mean: float
    longest: int
    samples: int
    counts: tuple[tuple[int, int], ...] = ()
    deviation: float | None = None
    shortest: int = 1
    prompt: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The field `lengths` of a scenario, from which the same is read."""
        own = {"prompt": self.prompt} if self.prompt else {}
        if self.counts:
            return {"counts": [list(pair) for pair in self.counts], **own}
        told = {"mean": self.mean, "longest": self.longest, "samples": self.samples, **own}
        if self.shortest > 1:
            told["shortest"] = self.shortest
        return told if self.deviation is None else {**told, "deviation": self.deviation}

    def longest_below(self, cap: int) -> int:
        """Tokens of the longest sequence, cut off at `cap`; every epoch meets it."""
        return min(cap, self.longest)

    def mean_below(self, cap: int) -> float:
        """Tokens of a sequence on average, cut off at `cap`."""
        return sum([length * weight for length, weight in _weights(self, cap)])

    def sorted_together(self, rows: int, steps: int) -> int:
        """Batches of `rows` sequences that are sorted together where they are grouped by length, `steps` to a step."""
        return steps * max(1, min(MEGABATCH, self.samples // (QUARTER * rows * steps)))

    def padded(self, cap: int, rows: int, together: int = 1) -> float:
        """Tokens to which each of `rows` sequences is padded, on average over the batches: the mean of their longest.

        The longest of n is at most x with the probability F(x)^n. Of so many batches that are sorted `together` the
        longest are every n-th of all their sequences.
        """
        weights = _weights(self, cap)
        if together > 1 and rows > 1:
            every = rows * together
            return sum([_quantile(weights, (rows * n - 0.5) / every) for n in range(1, together + 1)]) / together
        below = [min(1.0, total) ** rows for total in accumulate(weight for _, weight in weights)]
        before = [0.0, *below]
        return sum([length * (to - since) for (length, _), to, since in zip(weights, below, before, strict=False)])


def known(said: Mapping[str, Any]) -> Lengths:
    """The lengths that the field `lengths` of a scenario describes; ValueError, one line, where that cannot be."""
    prompt = said.get("prompt", 0)
    found = _known({name: value for name, value in said.items() if name != "prompt"})
    if prompt >= found.mean:
        raise ValueError(f"lengths.prompt: given {prompt}, allowed: less than the mean of {found.mean:.0f} tokens")
    return replace(found, prompt=prompt)


def _known(said: Mapping[str, Any]) -> Lengths:
    """The lengths without what of them are prompts."""
    if "counts" in said:
        if len(said) > 1:
            raise ValueError("lengths: given counts and more, allowed: counts alone, data alone, or mean and longest")
        merged: dict[int, int] = {}
        for length, count in said["counts"]:
            merged[length] = merged.get(length, 0) + count
        counts = tuple(sorted(merged.items()))
        samples = sum(merged.values())
        return Lengths(sum([length * count for length, count in counts]) / samples, counts[-1][0], samples, counts)
    if "data" in said:
        if len(said) > 1:
            raise ValueError("lengths: given data and more, allowed: counts alone, data alone, or mean and longest")
        whole = mixture(said["data"])
        return Lengths(whole.mean, whole.longest, whole.samples, (), whole.deviation, whole.shortest)
    for name in ("mean", "longest"):
        if name not in said:
            raise ValueError(f"lengths.{name}: given nothing, allowed: mean and longest, data, or counts")
    mean, longest, shortest = said["mean"], said["longest"], said.get("shortest", 1)
    if mean > longest:
        raise ValueError(f"lengths.mean: given {mean}, allowed: at most lengths.longest = {longest}")
    if shortest > mean:
        raise ValueError(f"lengths.shortest: given {shortest}, allowed: at most lengths.mean = {mean}")
    return Lengths(mean, longest, said.get("samples", SAMPLES), (), said.get("deviation"), shortest)


@lru_cache(maxsize=256)
def _weights(lengths: Lengths, cap: int) -> tuple[tuple[int, float], ...]:
    """Lengths, cut off at `cap`, with their probabilities, shortest first."""
    if lengths.counts:
        pairs = [(length, count / lengths.samples) for length, count in lengths.counts]
    else:
        pairs = _likeliest(lengths)
    below = [(length, weight) for length, weight in pairs if length < cap]
    rest = sum([weight for length, weight in pairs if length >= cap])
    return (*below, (cap, rest)) if rest else tuple(below)


def _likeliest(known: Lengths) -> list[tuple[int, float]]:
    """The distribution of greatest entropy for the mean and the deviation, on up to POINTS lengths."""
    step = max(1, ceil((known.longest - known.shortest) / POINTS))
    lengths = [*range(known.shortest, known.longest, step), known.longest]
    middle, half = (known.longest + known.shortest) / 2, max(1, known.longest - known.shortest) / 2
    points = [(length - middle) / half for length in lengths]  # from -1 to 1
    mean = (known.mean - middle) / half
    found = _entropic(points, mean)
    if known.deviation is not None:
        # lengths a step apart may not deviate less
        square = mean**2 + (max(known.deviation, step / 2) / half) ** 2
        if sum([weight * x * x for x, weight in zip(points, found, strict=True)]) > square:
            found = _entropic(points, mean, square)
    return list(zip(lengths, found, strict=True))


def _entropic(points: Sequence[float], mean: float, square: float | None = None) -> list[float]:
    """Probabilities of `points` as exp(a·x + b·x²), with that mean and mean square; b is 0 where that is not given.

    They are where the logarithm of their sum, less a·mean + b·square, is least, which is convex: Newton's method, whose
    steps are halved until they lead down. Its slopes are moments less those wanted, its curvature their covariance.
    """
    powers = [[x**power for x in points] for power in (1, 2, 3, 4)]
    a = b = 0.0
    low, found = _weighed(points, a, b)
    for _ in range(NEWTON):
        one, two, three, four = (sum(map(mul, power, found)) for power in powers)
        slope, other = one - mean, 0.0 if square is None else two - square
        aa, ab, bb = two - one**2, three - one * two, four - two**2
        if square is None:
            ab, bb = 0.0, 1.0
        if (whole := aa * bb - ab**2) < FLAT:
            break
        da, db = (ab * other - bb * slope) / whole, (ab * slope - aa * other) / whole
        falls, wanted = -slope * da - other * db, da * mean + db * (square or 0.0)
        then, weights = _weighed(points, a + da, b + db)
        while falls > CLOSE and then - wanted > low - falls / 4:
            da, db, falls, wanted = da / 2, db / 2, falls / 2, wanted / 2
            then, weights = _weighed(points, a + da, b + db)
        a, b, low, found = a + da, b + db, then, weights
        if falls <= CLOSE:
            break
    return found


def _weighed(points: Sequence[float], a: float, b: float) -> tuple[float, list[float]]:
    """The logarithm of the sum of exp(a·x + b·x²) over `points`, and the share of each."""
    bent = [(a + b * x) * x for x in points]
    top = max(bent)
    raw = [exp(max(-700.0, each - top)) for each in bent]
    whole = sum(raw)
    return top + log(whole), [weight / whole for weight in raw]


@lru_cache(maxsize=1024)
def fullest(lengths: Lengths, cap: int, rows: int, met: float = 0.95) -> int:
    """Tokens of `rows` sequences, without padding, that no batch of an epoch exceeds with the probability `met`.

    An epoch has `samples` / `rows` batches. Of one sequence to a batch it meets the longest for certain.
    """
    longest = lengths.longest_below(cap)
    if rows == 1 or longest == 1:
        return longest * rows
    width, start, cells = _batch(lengths, cap, rows)
    exceeded = 1 - met ** min(1.0, rows / lengths.samples)  # by one batch
    rest = 0.0
    for cell in range(len(cells) - 1, -1, -1):
        rest += cells[cell]
        if rest > exceeded:
            return min(longest * rows, max(longest, (start + cell) * width))
    return longest


@lru_cache(maxsize=1024)
def middles(lengths: Lengths, cap: int, rows: int, parts: int) -> tuple[int, ...]:
    """Tokens of `rows` sequences, without padding: the middle batch of each of so many equal parts, the least first."""
    width, start, cells = _batch(lengths, cap, rows)
    below = list(accumulate(cells))
    found = [bisect_left(below, (part + 0.5) / parts * below[-1]) for part in range(parts)]
    return tuple([(start + cell) * width for cell in found])


def _batch(lengths: Lengths, cap: int, rows: int) -> tuple[int, int, list[float]]:
    """The distribution of the tokens of `rows` sequences: the width of a cell, the first cell, and each one's share."""
    weights = _weights(lengths, cap)
    longest, mean = lengths.longest_below(cap), lengths.mean_below(cap)
    deviation = sqrt(sum([weight * (length - mean) ** 2 for length, weight in weights]))

    def width(rows: int) -> int:
        return max(1, ceil(min(longest * rows / CELLS, sqrt(rows) * deviation / FINE)))

    return width(rows), *_together(weights, rows, width)


def _quantile(weights: Sequence[tuple[int, float]], share: float) -> int:
    """The length that the `share` of all does not exceed."""
    below = list(accumulate(weight for _, weight in weights))
    return weights[min(bisect_left(below, share), len(weights) - 1)][0]


@lru_cache(maxsize=256)
def in_turn(lengths: Lengths, cap: int, rows: int, together: int = 1) -> tuple[int, ...]:
    """Tokens to which batches of `rows` sequences are padded, one after another, as an epoch has them.

    Those that are sorted `together` come from the longest to the shortest, and then come as many others. The longest
    sequence of all comes first.
    """
    weights = _weights(lengths, cap)
    if together > 1:
        many, every = min(together, BATCHES), rows * together
        places = [together - (n + 0.5) / many * together + 0.5 for n in range(many)]
        falling = [_quantile(weights, (rows * place - 0.5) / every) for place in places]
        return (lengths.longest_below(cap), *[falling[n % many] for n in range(1, BATCHES)])
    below = [total**rows for total in accumulate(weight for _, weight in weights)]
    middles = [(part + 0.5) / BATCHES for part in range(BATCHES)]
    of_part = [weights[min(bisect_left(below, middle), len(weights) - 1)][0] for middle in middles]
    batches = min(BATCHES, max(1, lengths.samples // rows))
    return tuple([of_part[int(GOLDEN * n % 1 * BATCHES)] for n in range(1, batches + 1)])


def _cells(weights: Iterable[tuple[int, float]], width: int) -> Sum:
    """The probabilities of lengths by multiples of `width`, each shared by its neighbours so that the mean stays."""
    shared: dict[int, float] = {}
    for length, weight in weights:
        cell, over = divmod(length, width)
        shared[cell] = shared.get(cell, 0.0) + weight * (1 - over / width)
        shared[cell + 1] = shared.get(cell + 1, 0.0) + weight * over / width
    start = min(shared)
    return start, [shared.get(cell, 0.0) for cell in range(start, max(shared) + 1)]


def _together(weights: Iterable[tuple[int, float]], rows: int, width: Callable[[int], int]) -> Sum:
    """The distribution of the sum of `rows` independent lengths, in multiples of `width(rows)`.

    Cells grow with the sum: as wide as at the end, a single length would be spread over far more than it varies.
    """
    if rows == 1:
        return _cells(weights, width(1))
    fine = width(rows // 2)
    half = _together(weights, rows // 2, width)
    start, cells = _sums(half, half)
    whole = _cells([(cell * fine, share) for cell, share in enumerate(cells, start)], width(rows))
    return _sums(whole, _cells(weights, width(rows))) if rows % 2 else whole


def _sums(one: Sum, other: Sum) -> Sum:
    """The distribution of a sum, without ends that never happen: of many rows only what is near their mean is left."""
    (start, cells), (more, others) = one, other
    back, last = others[::-1], len(others) - 1
    sums = [sum(map(mul, cells[max(0, n - last) : n + 1], back[max(0, last - n) :])) for n in range(len(cells) + last)]
    while sums[-1] < NEVER:
        sums.pop()
    first = next(n for n, share in enumerate(sums) if share >= NEVER)
    return start + more + first, sums[first:]
