"""What allocators under test wrote down."""

from __future__ import annotations

from collections.abc import Iterable

from calc.base.units import MiB
from calc.replay.allocator import Allocator, Block, length


class Written:
    """Lines in the order in which blocks came and went."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def seen(self) -> list[str]:
        """The lines written since the last time."""
        found, self.log = self.log, []
        return found

    def watched(self, names: dict[int, str]) -> Allocator:
        """An allocator whose streams write down what they take, `+`, and give back, `-`, in MiB, after their names."""
        watch = self

        class Each(Allocator):
            def play(self, steps: Iterable[tuple[int, int]], own: dict[int, Block]) -> None:
                name = names[self.process.streams.index(self)]
                for slot, size in steps:
                    if size or own.get(slot):
                        watch.log.append(f"{name}{'+' if size else '-'}{(size or length(own[slot])) // MiB}")
                    super().play(((slot, size),), own)

        return Each()
