"""DeepSpeed's coordinator by hand: what modules gather, wait for and release (`partitioned_param_coordinator.py`)."""

from __future__ import annotations

import pytest

from calc.replay import zero3_fetches
from calc.replay.zero3_fetches import B, Limits, Steps, Use, blocks

# three modules with one parameter each, of 40, 40 and 60 elements on four ranks, and one with both of 8 and 10
ELEMENTS, RANKS = (40, 40, 60, 8, 10), 4
FIRST, SECOND, THIRD, PAIR, NONE = (0,), (1,), (2,), (3, 4), ()


def through(*modules: tuple[int, ...]) -> tuple[tuple[Use, ...], ...]:
    """Each module in turn, from its beginning to its end."""
    return tuple([(Use(module, True), Use(module, False)) for module in modules])


ALONE = Limits(0, 1000)  # nothing ahead


def gathered(places: tuple[tuple[Use, ...], ...], limits: Limits = ALONE) -> tuple[Steps, ...]:
    """What comes and goes at each place of a pass whose order is known."""
    return blocks(places, ELEMENTS, RANKS, limits, learnt=True)


def held(steps: tuple[Steps, ...]) -> set[int]:
    """The slots of blocks that are left."""
    own: set[int] = set()
    for slot, size in [step for place in steps for step in place]:
        assert (slot in own) is not bool(size), "taken once, and given back once"
        own ^= {slot}
    return own


def test_one_parameter_is_gathered_in_place_and_several_are_copied_out_of_a_buffer() -> None:
    """Each rank's part of 10 is 3, so that the buffer has 4·(2 + 3); the copies are as large as the parameters."""
    alone, both = blocks(through(FIRST, PAIR), ELEMENTS, RANKS, Limits(1000, 1000), learnt=False)
    assert alone == ((0, 40 * B), (0, 0))
    assert both == ((-1, 20 * B), (3, 8 * B), (4, 10 * B), (-1, 0), (3, 0), (4, 0))


def test_what_comes_next_is_gathered_ahead_until_it_is_enough() -> None:
    """41 elements ahead take both of 40, 42 with a third, of 60; a module without parameters gathers ahead, too."""
    places = through(NONE, FIRST, SECOND, THIRD)
    for ahead, first in ((0, ()), (1, ((0, 80),)), (41, ((-1, 160),)), (81, ((-1, 280),))):
        steps = gathered(places, Limits(ahead, 1000))
        assert steps[0] == first and not held(steps)
    assert gathered(places, Limits(41, 1000))[1] == ((0, 80), (1, 80), (2, 120), (0, 0))
    # the buffer stays until the last of what it holds has been reached
    assert gathered(places, Limits(41, 1000))[2] == ((-1, 0), (1, 0))


def test_nothing_is_gathered_ahead_beyond_what_may_be_live() -> None:
    """With 40 of 50 elements there, ten more may be fetched: the next one still comes, but no other."""
    steps = gathered(through(FIRST, SECOND, THIRD), Limits(1000, 50))
    assert steps[0] == ((0, 80), (1, 80), (0, 0))
    assert steps[1] == ((2, 120), (1, 0))


def test_a_parameter_that_is_used_again_soon_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between both uses of the first parameter lie 40 and 60 elements."""
    places = through(FIRST, SECOND, THIRD, FIRST)
    for reuse, first in ((101, ((0, 80),)), (100, ((0, 80), (0, 0)))):
        monkeypatch.setattr(zero3_fetches, "REUSE", reuse)
        blocks.cache_clear()
        steps = gathered(places)
        assert steps[0] == first and not held(steps)
    blocks.cache_clear()


def test_a_use_that_was_passed_over_because_the_parameter_was_there_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking ahead as the second module begins, DeepSpeed passes over the first one's later use."""
    monkeypatch.setattr(zero3_fetches, "REUSE", 0)
    blocks.cache_clear()
    both = (Use(FIRST, True), Use(SECOND, True), Use(FIRST, False), Use(SECOND, False))
    for ahead, first in ((0, ((0, 80), (1, 80), (0, 0), (1, 0))), (1000, ((0, 80), (1, 80), (1, 0)))):
        steps = gathered((both, *through(NONE, FIRST)), Limits(ahead, 1000))
        assert steps[0] == first and not held(steps)
    blocks.cache_clear()


def test_the_first_pass_gathers_nothing_ahead_and_keeps_nothing() -> None:
    places = through(FIRST, SECOND, FIRST)
    steps = blocks(places, ELEMENTS, RANKS, Limits(1000, 1000), learnt=False)
    assert steps == (((0, 80), (0, 0)), ((1, 80), (1, 0)), ((0, 80), (0, 0)))
