"""Python's garbage collector, set to run rarely."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Makes garbage collection rare: most of a search's objects stay to its end, and scans took a third of its time.

    The oldest objects are scanned about once in ten models' searches, which leave cycles: a build has hundreds.
    """
    gc.set_threshold(25_000, 11, 11)
