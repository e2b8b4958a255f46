"""The type of a catalog rule, and the line that a rule yields for a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from calc.base.schema import show
from calc.catalog.catalog import Catalog

Thing = TypeVar("Thing")
# A rule yields a line for each fault of one thing of the catalog; the place (file, or file and line) is put before it.
Rule = Callable[[Thing, Catalog], Iterator[str]]


def fault(field: str, given: Any, allowed: str) -> str:
    """The line of a fault: the field, what was given, what is allowed."""
    return f"{field}: given {f'{given:g}' if isinstance(given, float) else show(given)}, allowed: {allowed}"
