"""`make fuzz`: hostile input for every door of `calc`, for as long as one likes.

A fault is what is neither an answer nor a refusal in one line: it is shown as small as it can be made, with the seed
that leads to it. So is what takes over two seconds of a processor that has nothing else to do, or needs more than
500 MB: that is shown as it was given.
"""

from __future__ import annotations

import argparse
import gc
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.doors import DOORS, Door

SECONDS, MEGABYTES = 2.0, 500
AT_ONCE = 100  # inputs of one run of a door


class Clock:
    """Seconds of a processor that has nothing else to do: who shares ours makes it slower, and no input of ours."""

    def __init__(self) -> None:
        self.least = min(self._yardstick() for _ in range(20))

    def seconds(self, taken: float) -> float:
        """`taken` seconds of the processor as busy as it is now, in those of an idle one."""
        found = [self._yardstick() for _ in range(9)]
        self.least = min(self.least, *found)
        return taken * self.least / sorted(found)[len(found) // 2]

    @staticmethod
    def _yardstick() -> float:
        """Seconds that the same few milliseconds of work take."""
        start, kept = time.process_time(), {}
        for n in range(30_000):
            kept[n % 997] = (n, kept.get(n % 991))[0]
        return time.process_time() - start


def most() -> float:
    """The most memory that this process has had, since `forget` where the system can, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forget() -> None:
    """Lets the peak of memory start anew, so that no input hides behind a larger one before it (Linux, proc(5))."""
    if (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")


def run(door: Door, number: int, clock: Clock, met: Counter[str]) -> list[str]:
    """One run of a door: what took too much. Raises what its smallest fault raises."""
    # no input of this run pays for a walk through all that those before it have left in caches
    gc.collect()
    gc.freeze()
    slow = []

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
        forget()
        start, before = time.process_time(), most()
        answered = door.enter(raw)
        took, more = time.process_time() - start, most() - before
        met["answered" if answered else "refused"] += 1
        if took > SECONDS and (took := clock.seconds(took)) > SECONDS:
            slow.append(f"{took:.1f} s of the processor: {raw!r}")
        if more > MEGABYTES:
            slow.append(f"{more:.0f} MB: {raw!r}")

    entered()
    return slow


def main() -> int:
    """Runs each door in turn, as often as every other, until the time is up; 1 where a fault was found."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long, and to the end of the round")
    parser.add_argument("--seed", type=int, default=1, help="the first round's seed; each later one has the next")
    parser.add_argument("--door", choices=DOORS, action="append", help="one door alone, or several")
    asked = parser.parse_args()
    # stopped at any time, it says how far it came: also in the background, where a shell has an interrupt ignored
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    end, number, faults, clock = time.monotonic() + asked.seconds, asked.seed, 0, Clock()
    met: dict[str, Counter[str]] = {name: Counter() for name in asked.door or DOORS}
    try:
        while time.monotonic() < end:
            for name, counted in met.items():
                said = []
                try:
                    said = run(DOORS[name], number, clock, counted)
                except BaseException as fault:
                    if isinstance(fault, KeyboardInterrupt):
                        raise
                    # of several faults each; a subclass is one that did not come a second time
                    for each in fault.exceptions if type(fault) is ExceptionGroup else (fault,):
                        said.append("\n".join((f"{type(each).__name__}: {each}", *getattr(each, "__notes__", []))))
                faults += len(said)
                for each in said:
                    print(f"{name}, seed {number}: {each}", flush=True)
            number += 1
    except KeyboardInterrupt:
        pass
    for name, counted in met.items():
        print(f"{name}: {counted.total():,} inputs, {counted['answered']:,} answered, {counted['refused']:,} refused")
    print(f"{sum(counted.total() for counted in met.values()):,} inputs, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
