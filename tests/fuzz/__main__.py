"""`make fuzz`: hostile input for every door of `calc`, for as long as one likes.

A fault is what is neither an answer nor a refusal in one line, takes over two seconds of the processor, or needs more
than 500 MB: it is shown as small as it can be made, with the seed that leads to it.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.doors import DOORS, Door

SECONDS, MEGABYTES = 2.0, 500
AT_ONCE = 500  # inputs of one run of a door


class Slow(AssertionError):
    """An input that takes too long, or too much memory."""


def resident() -> float:
    """The most memory that this process has had, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(door: Door, number: int, met: Counter[str]) -> None:
    """One run of a door; raises what its smallest fault raises."""
    # no input of this run pays for a walk through all that those before it have left in caches
    gc.collect()
    gc.freeze()

    @seed(number)
    @settings(
        max_examples=AT_ONCE,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(door.inputs)
    def entered(raw: Any) -> None:
        start, before = time.process_time(), resident()
        answered = door.enter(raw)
        met["answered" if answered else "refused"] += 1
        if (took := time.process_time() - start) > SECONDS:
            raise Slow(f"took {took:.1f} s of the processor")
        if (more := resident() - before) > MEGABYTES:
            raise Slow(f"needed {more:.0f} MB")

    entered()


def main() -> int:
    """Runs the doors in turn until the time is up; 1 where a fault was found."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="the first run's seed; each later one has the next")
    parser.add_argument("--door", choices=DOORS, action="append", help="one door alone, or several")
    asked = parser.parse_args()
    end, number, faults = time.monotonic() + asked.seconds, asked.seed, 0
    met: dict[str, Counter[str]] = {name: Counter() for name in asked.door or DOORS}
    while time.monotonic() < end:
        for name, counted in met.items():
            if time.monotonic() >= end:
                break
            try:
                run(DOORS[name], number, counted)
            except BaseException as fault:
                if isinstance(fault, KeyboardInterrupt):
                    end = 0
                    break
                # of several faults each; a subclass is one that did not come a second time
                for each in fault.exceptions if type(fault) is ExceptionGroup else (fault,):
                    faults += 1
                    said = f"{name}, seed {number}: {type(each).__name__}: {each}"
                    print(said, *getattr(each, "__notes__", []), sep="\n")
        number += 1
    for name, counted in met.items():
        print(f"{name}: {counted.total():,} inputs, {counted['answered']:,} answered, {counted['refused']:,} refused")
    print(f"{sum(counted.total() for counted in met.values()):,} inputs, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
