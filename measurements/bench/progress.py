"""The progress of a run and its expected end: a line kept up to date on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


def duration(seconds: float) -> str:
    """`seconds` in words: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


class Clock:
    """The time that a run has and needs; the times of finished cases correct what is expected of the rest."""

    def __init__(self, limit: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._start, self.limit = now, now(), limit
        self._expected = self._taken = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    @property
    def left(self) -> float:
        """Seconds until the limit, infinite without one."""
        return float("inf") if self.limit is None else self.limit - self.elapsed

    def ran(self, expected: float, taken: float) -> None:
        """Note a case's expected time and the time it took."""
        self._expected += expected
        self._taken += taken

    def likely(self, expected: float) -> float:
        """The time that a case expected to take `expected` seconds will take, judged by the cases so far."""
        return expected * self._taken / self._expected if self._expected else expected


class Progress:
    """Shows a run of `total` cases on `stream`."""

    def __init__(self, total: int, stream: TextIO, clock: Clock) -> None:
        self.total, self.stream, self.clock = total, stream, clock
        self.live = stream.isatty()
        self.done = 0

    def start(self, name: str, rest: float) -> None:
        """A case begins; it and those after it are expected to take `rest` seconds."""
        if self.live:
            left = duration(self.clock.likely(rest))
            self._put(f"[{self.done + 1}/{self.total}] {name} … {left} left")

    def end(self, name: str, outcome: str, rest: float) -> None:
        """A case has ended; those after it are expected to take `rest` seconds."""
        self.done += 1
        left = f", {duration(self.clock.likely(rest))} left" if rest else ""
        self._put(f"[{self.done}/{self.total}] {name}: {outcome}{left}")
        self.stream.write("\n")
        self.stream.flush()

    def note(self, text: str) -> None:
        """Print a line of its own."""
        self._put(text)
        self.stream.write("\n")
        self.stream.flush()

    def _put(self, text: str) -> None:
        self.stream.write(f"\r\x1b[K{text}" if self.live else text)
        self.stream.flush()
