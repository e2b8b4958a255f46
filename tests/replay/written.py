"""What allocators under test wrote down."""

from __future__ import annotations


class Written:
    """Lines in the order in which blocks came and went."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def seen(self) -> list[str]:
        """The lines written since the last time."""
        found, self.log = self.log, []
        return found
