"""What cannot be used, as data: who reads a refusal asks for its parts, and only who shows it makes a line of it."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """A `field` whose value cannot be used: what was `given`, beside what; what is `allowed`, and `by` whom."""

    field: str
    given: str | float
    allowed: str
    by: str = ""

    def __str__(self) -> str:
        """The line to print."""
        return f"{self.field}: given {self.given}, allowed{self.by and ' '}{self.by}: {self.allowed}"

    def of(self, head: str) -> Refusal:
        """The same of what `head` names, such as `roles.critic.`."""
        return self._replace(field=f"{head}{self.field}")
