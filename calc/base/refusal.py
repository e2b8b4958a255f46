"""Refused input as data: code reads the parts of a refusal, and only what shows it to people makes a line of them."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """A `field` whose value cannot be used: what was `given`, what is `allowed`, and `by` whom."""

    field: str
    given: str | float
    allowed: str
    by: str = ""

    def __str__(self) -> str:
        """The line to print."""
        return f"{self.field}: given {self.given}, allowed{self.by and ' '}{self.by}: {self.allowed}"

    def of(self, head: str) -> Refusal:
        """The same refusal with the name of its part, such as `roles.critic.`, in front of the field."""
        return self._replace(field=f"{head}{self.field}")
