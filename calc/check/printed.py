"""The figures that a text prints, with the digits they are printed to, and the unit where one stands beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

_FIGURE = re.compile(
    r"(?<![\w.])(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?P<digits>\.[0-9]+)?"
    r"(?:[ ]?(?P<unit>bytes|[KMGT]i?B|[GM])(?!\w))?",
    re.ASCII,
)


class Printed(NamedTuple):
    """A figure: its value, by how much its last digit may have been rounded, its unit or "", and both as text."""

    value: Fraction
    rounding: Fraction
    unit: str
    text: str

    def means(self, value: float | Fraction, scale: int, slack: float = 0) -> bool:
        """True if `value` is the figure times `scale`, to the digits printed."""
        return abs(Fraction(value) - self.value * scale) <= self.rounding * scale + Fraction(slack)


def printed(text: str) -> Iterator[Printed]:
    """All figures of `text`, in order."""
    for found in _FIGURE.finditer(text):
        digits = found["digits"] or "."
        value = Fraction(found["number"].replace(",", "") + (found["digits"] or ""))
        yield Printed(value, Fraction(1, 2 * 10 ** (len(digits) - 1)), found["unit"] or "", found[0])
