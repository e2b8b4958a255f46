"""The terms that a step time is made of, each with its formula and the values put in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Unrated(ValueError):
    """Raised if no rate is known for something that a job needs; the text is one line that names it."""


class Constant(float):
    """A number that no formula gives: what it is, and where it comes from.

    `status`: `published`, read off somebody's measurement; `measured`, a rate that this project saw; `calibrated`,
    fitted to steps of records, which are then not used to judge accuracy; or `assumed`.
    """

    def __new__(cls, value: float, what: str, status: str, source: str) -> Constant:
        """The number `value`."""
        made = super().__new__(cls, value)
        made.what, made.status, made.source = what, status, source
        return made

    def __getnewargs__(self) -> tuple[float, str, str, str]:  # type: ignore[override]  # float's has the number alone
        return float(self), self.what, self.status, self.source

    what: str
    status: str
    source: str


class Term(NamedTuple):
    """A part of the step's time.

    `seconds` is the value of `formula` with `values` put in: bytes, floating-point operations, rates in bytes or
    operations a second. `source` is the anchor on the method page that derives the formula. A term below zero is time
    hidden behind another term.
    """

    name: str
    seconds: float
    formula: str
    values: Mapping[str, float]
    source: str


def within(prefix: str, terms: list[Term]) -> list[Term]:
    """The same terms, named as part of a stage of the job."""
    return [Term(f"{prefix}: {t.name}", t.seconds, t.formula, t.values, t.source) for t in terms]
