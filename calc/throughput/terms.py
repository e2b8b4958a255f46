"""What a step time is made of: named terms, each with its formula and the values that were put in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Unrated(ValueError):
    """No rate is known for something that a job needs; its text is one line that says for what."""


class Constant(float):
    """A number that no formula gives: what it is, and where it comes from.

    `status`: `published`, read off somebody's measurement; `measured`, a rate that this project saw; `calibrated` on
    steps of records, which then judge nothing; or `assumed`.
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

    `seconds` is what `formula` gives with `values` put in: bytes, floating-point operations, rates in bytes or
    operations a second. `source` is the anchor of the method page that derives it. A term below zero is time that
    another one hides.
    """

    name: str
    seconds: float
    formula: str
    values: Mapping[str, float]
    source: str


def within(prefix: str, terms: list[Term]) -> list[Term]:
    """The same terms, named as part of a stage of the job."""
    return [term._replace(name=f"{prefix}: {term.name}") for term in terms]
