"""From a peak and its error to a range, a probability and a verdict.

Three errors are known apart: fragmentation when memory runs out, the error of the formulas, and the error of what a
process takes beside its tensors. Each is computed from `measurements/` by `calc.accuracy.calibration`, and a test
compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import erf, sqrt
from typing import Literal, get_args

from calc.base.ledger import Moment, Sums
from calc.base.units import GiB
from calc.memory.runtime import FRAGMENTATION, MIDDLE, REPLAYED

# Root mean square of the errors of traced peaks where they are largest, under DeepSpeed.
FORMULA_SPREAD = 0.012
# Root mean square of the difference between the messages of measurements/exhausted and calc.memory.runtime in what a
# process takes beside its tensors.
CONTEXT_SPREAD = 0.65 * GiB
# The printed range holds the middle nine tenths.
RANGE = 1.645
SURE = 6.0  # deviations beyond which a probability counts as 0 or 1: one in 10^9
TAIL = len(FRAGMENTATION) // 20
Verdict = Literal["fits", "tight", "oom"]  # from the best to the worst
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
FITS, TIGHT = 0.95, 0.20  # the verdict's thresholds on the probability that a job fits


def deviation(allocated: int) -> float:
    """The standard deviation, in bytes, of all errors but fragmentation: those of the formulas and of the context."""
    return sqrt((FORMULA_SPREAD * allocated) ** 2 + CONTEXT_SPREAD**2)


def fit_probability(
    needed: float, fragmenting: float, deviation: float, usable: float, shares: Sequence[float] = FRAGMENTATION
) -> float:
    """The probability that `needed` bytes, uncertain by `deviation`, and fragmentation on top stay below `usable`.

    Each share of `fragmenting` that was seen as fragmentation is equally likely: the mean of a normal distribution's
    tails.
    """
    room, width = usable - needed, deviation * sqrt(2)
    if room > shares[-1] * fragmenting + SURE * deviation or room < shares[0] * fragmenting - SURE * deviation:
        return float(room > 0)
    return sum([0.5 * (1 + erf((room - share * fragmenting) / width)) for share in shares]) / len(shares)


def odds(moment: Sums, usable: int, shares: Sequence[float] = FRAGMENTATION) -> float:
    """The probability that an instant of the job fits."""
    needed, allocated, fragmenting, replayed = moment
    if replayed:
        fragmenting, shares = replayed, REPLAYED
    return fit_probability(needed, fragmenting, deviation(allocated), usable, shares)


def room(moment: Sums, usable: int) -> int:
    """Bytes to spare beside an instant that fits with just the probability that the verdict asks.

    Below 0 if they are lacking. Off by a share of a deviation at most, to the safe side: margins are joined by straight
    lines.
    """
    needed, allocated, fragmenting, replayed = moment
    width, shares = deviation(allocated), REPLAYED if replayed else FRAGMENTATION
    whole, part = divmod((replayed or fragmenting) / width, 1)
    low, high = _margin(int(whole), shares), _margin(int(whole) + 1, shares)
    return int(usable - needed - width * (low + part * (high - low)))


def hopeless(moment: Sums, usable: int) -> bool:
    """True if an instant never fits, even without fragmentation and with a replay as far too high as any seen."""
    needed, allocated, *_ = moment
    return fit_probability(needed, allocated, deviation(allocated), usable, REPLAYED) == 0.0


def certain(moment: Sums, usable: int) -> bool:
    """True if a replayed instant always fits."""
    needed, allocated, _, replayed = moment
    return fit_probability(needed, replayed, deviation(allocated), usable, REPLAYED) == 1.0


@cache
def _margin(ratio: int, shares: Sequence[float]) -> float:
    """The free bytes needed beside the estimate, in deviations, where `shares` of `ratio` deviations may be lost."""
    low, high = 0.0, 2.0 + ratio
    for _ in range(50):
        middle = (low + high) / 2
        enough = fit_probability(0, ratio, 1.0, middle, shares) >= FITS
        low, high = (low, middle) if enough else (middle, high)
    return high


def reach(m: Moment) -> tuple[int, int]:
    """The middle nine tenths of what an instant may take; on each side both errors add in squares."""
    _, allocated, fragmenting, replayed = m.sums
    shares, lost = (REPLAYED, allocated + m.fragmentation) if replayed else (FRAGMENTATION, fragmenting)
    # the middle is the replay itself or, without one, the median of the fragmentation
    margin, share = RANGE * deviation(allocated), 0.0 if replayed else shares[MIDDLE]
    below, above = (share - shares[TAIL]) * lost, (shares[-1 - TAIL] - share) * lost
    return int(m.device_bytes - sqrt(margin**2 + below**2)), int(m.device_bytes + sqrt(margin**2 + above**2))


def word(probability: float) -> Verdict:
    """`fits`, `tight` (it may run, and may die on a long batch) or `oom`."""
    return "fits" if probability >= FITS else "tight" if probability >= TIGHT else "oom"
