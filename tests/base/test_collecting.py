"""Python's garbage collector while a search runs."""

from __future__ import annotations

import gc

from calc.base.collecting import collect_rarely


def test_a_search_s_objects_are_scanned_less_often_than_by_default() -> None:
    """By default after 700 new objects (Python 3.11 `gc.get_threshold`), hundreds of times in a search."""
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        collect_rarely()
        assert all(now > usual for now, usual in zip(gc.get_threshold(), (700, 10, 10), strict=True))
    finally:
        gc.set_threshold(*before)
