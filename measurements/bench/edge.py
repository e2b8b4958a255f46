"""The largest size that runs, found in few probes by starting where `calc` predicts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TOLERANCE = 0.02  # share of the size found; the search stops once the gap is smaller


@dataclass(frozen=True, slots=True)
class Found:
    """The edge: `runs` is the largest size seen to run, 0 if none; `fails` the smallest seen to fail, None if none."""

    runs: int
    fails: int | None
    probes: int


def largest(fits: Callable[[int], bool], start: int, highest: int) -> Found:
    """The largest of 1..`highest` for which `fits`, which is true up to some size and false above it.

    From `start` it walks in doubling strides until it has seen both a size that runs and one that fails, then halves
    the gap, down to one or to TOLERANCE. A good `start` costs two probes.
    """
    size = min(max(start, 1), highest)
    runs, fails, probes, stride = 0, highest + 1, 0, max(1, int(TOLERANCE * size))
    # without a failure seen, only the highest size itself ends the walk
    while fails - runs > max(1, int(TOLERANCE * runs)) or fails > highest > runs:
        probes += 1
        if fits(size):
            runs = size
        else:
            fails = size
        if fails > highest:
            size = min(runs + stride, highest)
        elif not runs:
            size = max(fails - stride, 1)
        else:
            size = (runs + fails) // 2
        stride *= 2
    return Found(runs, fails if fails <= highest else None, probes)
