"""The facts of a release: the libraries that it runs on, and a row for each default that it brought.

And the libraries below the frameworks, by the newest release that has been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from calc.base.versions import at_least

# The newest release in which each library that runs below a framework has been read.
READ: Mapping[str, str] = {
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
    "deepspeed": "0.19.8",
    "flash-attn": "2.8.3",
    "litgpt": "0.4.0",
    "peft": "0.21.2",
    "sglang": "0.5.15",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "vllm": "0.29.0",
}
# bitsandbytes, which nothing pins: the last release before each Transformers since which 4-bit linears take less memory
# (0.43.0 came on 2024-03-08, 0.43.2 on 2024-07-23, a day with Transformers 4.43.0).
FOUR_BITS: Mapping[str, str] = {"4.39": "0.42.0", "4.43": "0.43.1"}
GONE: Final = object()  # the value of a field that a table no longer has


def bitsandbytes(transformers: str) -> str:
    """The release of bitsandbytes as new as that of Transformers."""
    return next((own for first, own in FOUR_BITS.items() if not at_least(transformers, first)), READ["bitsandbytes"])


class Default(NamedTuple):
    """A default that a release brought, and that stays until a later row of the same field.

    `source`: where the release says so. `tasks`: those whose trainers have it; empty for all.
    """

    field: str
    since: str
    value: Any
    source: str
    tasks: tuple[str, ...] = ()


class Table:
    """The rows that hold for some jobs; those of one field in the order of releases, rows for single tasks last."""

    def __init__(self, *rows: Default) -> None:
        self.rows = rows


NOTHING = Table()


def stated(task: str, version: str, *tables: Table) -> dict[str, Any]:
    """The defaults of a release for `task`, by dotted key; a later table goes before an earlier one."""
    return {field: value for table in tables for field, value in _held(table, task, version).items()}


@cache
def _held(table: Table, task: str, version: str) -> Mapping[str, Any]:
    """Of each field the last row that holds, unless it is gone by then."""
    held = [row for row in table.rows if at_least(version, row.since) and (not row.tasks or task in row.tasks)]
    values = {row.field: row.value for row in held}
    return {field: value for field, value in values.items() if value is not GONE}


def pinned(pins: NamedTuple) -> dict[str, str]:
    """The libraries of a release as fields of a scenario; a suffix (`.post1`) is left out."""
    return {f"versions.{name.replace('_', '-')}": pin.partition(".post")[0] for name, pin in pins._asdict().items()}
