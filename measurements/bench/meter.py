"""Allocator figures, phase by phase; on a device without CUDA every figure is null."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

# keys of torch.cuda.memory_stats, by the names that records use
PEAKS = {
    "active_bytes": "active_bytes.all.peak",
    "requested_bytes": "requested_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.peak",
    "segments": "segment.all.peak",
}
COUNTS = {"retries": "num_alloc_retries", "ooms": "num_ooms", "device_allocations": "num_device_alloc"}


class Meter:
    """The peaks of each phase of a job, over all its steps, and the use of the whole device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.phase = "start"
        self.phases: dict[str, dict[str, int]] = {}
        self.peaks: Counter[str] = Counter()
        self.at_start = self.free()

    def free(self) -> int | None:
        """The bytes that cudaMemGetInfo calls free; the first call makes the CUDA context."""
        return int(torch.cuda.mem_get_info()[0]) if self.cuda else None

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Counts what happens inside as `phase`; after an exception `self.phase` still names it."""
        self.phase = phase
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            self._read()

    def _read(self) -> None:
        seen = self.phases.setdefault(self.phase, {})
        if self.cuda:
            stats = torch.cuda.memory_stats()
            for name in ("allocated_bytes", "reserved_bytes"):
                seen[name] = max(seen.get(name, 0), stats[f"{name}.all.peak"])
            for name, key in PEAKS.items():
                self.peaks[name] = max(self.peaks[name], stats.get(key, 0))

    def observed(self) -> dict[str, Any]:
        """All figures, in bytes; `context_bytes` is what is neither free nor PyTorch's once everything has run."""
        if not self.cuda:
            nothing = dict.fromkeys(("allocated_bytes", "reserved_bytes", "device_bytes", "context_bytes"))
            return {**nothing, "phases": {name: {} for name in self.phases}}
        total, free, stats = int(torch.cuda.mem_get_info()[1]), self.free(), torch.cuda.memory_stats()
        assert free is not None and self.at_start is not None
        return {
            "allocated_bytes": max((p["allocated_bytes"] for p in self.phases.values()), default=0),
            "reserved_bytes": max((p["reserved_bytes"] for p in self.phases.values()), default=0),
            "device_bytes": total - free,
            "context_bytes": total - free - torch.cuda.memory_reserved(),
            "context_at_start_bytes": total - self.at_start,
            "free_before_bytes": self.at_start,
            "free_after_bytes": free,
            "phases": self.phases,
            "allocator": {**self.peaks, **{name: stats.get(key, 0) for name, key in COUNTS.items()}},
        }


class Phases:
    """Phases of a meter that each last until the next one begins, so that nothing between two calls is missed."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Phases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def begin(self, phase: str) -> None:
        """Ends the phase before, and begins another."""
        self._open.close()
        self._open.enter_context(self.meter.of(phase))

    def then(self, phase: str, call: Callable[..., Any], after: str | None = None) -> Callable[..., Any]:
        """`call` wrapped so that `phase` begins with it, unless it has begun, and the phase `after` follows it."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            if self.meter.phase != phase:
                self.begin(phase)
            result = call(*args, **kwargs)
            if after:
                self.begin(after)
            return result

        return marked
