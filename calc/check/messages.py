"""Rules that refuse impossible out-of-memory messages: figures unlike the quote, a card of another size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from calc.base.units import GiB
from calc.catalog.catalog import Catalog
from calc.catalog.oom_message import contradiction, newer, sharers
from calc.check.faults import fault

Message = Mapping[str, Any]
# The total that a message prints over the memory sold: 0.92 with inline error correction.
TOTAL = (0.9, 1)
RENAMED = (2, 1)  # the release of torch that reworded the message


def figures(message: Message, _: Catalog) -> Iterator[str]:
    """Each figure agrees with the quote, and the figures do not contradict each other."""
    if wrong := contradiction(message):
        yield wrong


def card(message: Message, catalog: Catalog) -> Iterator[str]:
    """The total is that of the named card."""
    if message["gpu"] is None:
        return
    low, high = (int(bound * catalog.gpu(message["gpu"]).memory_gb * GiB) for bound in TOTAL)
    if not low <= message["total_bytes"] <= high:
        yield fault("gpu", message["gpu"], f"a card of {message['total_bytes'] / GiB:.2f} GiB, which quote says")


def processes(message: Message, _: Catalog) -> Iterator[str]:
    """The number of processes on the card is the number that the message lists."""
    listed = sharers(message["quote"])
    if listed and message["processes"] != listed:
        yield fault("processes", message["processes"], f"{listed}, which quote lists")


def release(message: Message, _: Catalog) -> Iterator[str]:
    """The message is worded as the named release of torch words it."""
    if message["torch"] is None:
        return
    if not re.fullmatch(r"[0-9]+(?:\.[0-9]+){1,2}\S*", message["torch"]):
        yield fault("torch", message["torch"], "a version such as 2.1.0")
        return
    numbers = tuple(int(part) for part in re.findall(r"[0-9]+", message["torch"])[:2])
    if (numbers >= RENAMED) != newer(message["quote"]):
        yield fault("torch", message["torch"], "2.1 or later" if newer(message["quote"]) else "a release before 2.1")
