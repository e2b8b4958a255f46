"""From a peak and its error to a range, a probability and a verdict."""

from __future__ import annotations

from math import erf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.base.ledger import Line, Moment, Sums
from calc.base.units import GiB
from calc.estimate import verdict
from calc.memory import runtime

SIZES = st.integers(0, 10**12)


def test_independent_deviations_add_in_squares() -> None:
    """1.2 % of 40 GiB and 0.65 GiB of context: √(0.48² + 0.65²) = 0.8080 GiB."""
    assert verdict.deviation(40 * GiB) / GiB == pytest.approx(0.8080, abs=1e-4)


def test_without_pieces_a_job_as_large_as_the_card_fits_every_second_time() -> None:
    """The middle of a normal distribution, whatever its width."""
    assert verdict.fit_probability(70 * GiB, 0, 0.5 * GiB, 70 * GiB) == 0.5
    assert verdict.fit_probability(70 * GiB, 0, 5.0 * GiB, 70 * GiB) == 0.5


def test_pieces_that_were_held_back_in_so_many_messages_break_so_many_jobs() -> None:
    """Known exactly, a job fits in those cases that leave it room: three of four here, and half of one on the edge."""
    shares = (0.0, 0.01, 0.05, 0.20)
    assert verdict.fit_probability(1000, 1000, 1e-6, 1100, shares) == 0.75
    assert verdict.fit_probability(1000, 1000, 1e-6, 1050, shares) == pytest.approx(0.625)


@given(SIZES, SIZES, SIZES, st.integers(1, 10**11), SIZES)
def test_more_memory_needed_never_fits_better(
    one: int, other: int, fragmenting: int, deviation: int, usable: int
) -> None:
    """Monotone in all three: needing or losing more is never likelier to fit, having more never less likely."""
    low, high = sorted((one, other))
    odds = verdict.fit_probability
    assert odds(low, fragmenting, deviation, usable) >= odds(high, fragmenting, deviation, usable)
    assert odds(usable, low, deviation, fragmenting) >= odds(usable, high, deviation, fragmenting)
    assert odds(usable, fragmenting, deviation, low) <= odds(usable, fragmenting, deviation, high)
    assert 0 <= odds(one, fragmenting, deviation, usable) <= 1


def moment(allocated: int, outside: int, share: float) -> Moment:
    """So much of tensors and of other things, and the share of the tensors that the ledger says is held back."""
    return Moment(
        "m",
        (
            Line("weights", "actor", allocated, "b", {}, "x"),
            Line("context", "process", outside, "b", {}, "x", False),
            Line("fragmentation", "process", int(share * allocated), "f·B", {"f": share, "B": allocated}, "x", False),
        ),
    )


def test_the_range_is_wider_where_more_may_be_lost() -> None:
    """By hand for 40 GiB of tensors and one beside them: the shares of the 5th and the 95th hundredth, from the median,
    in squares with 1.645 deviations."""
    low, middle, high = (verdict.FRAGMENTATION[i] for i in (2, 20, 37))
    found = [end / GiB for end in verdict.reach(moment(40 * GiB, GiB, middle))]
    margin = 1.645 * 0.8080
    peak = 41 + 40 * middle
    assert found == [
        pytest.approx(peak - sqrt(margin**2 + (40 * (middle - low)) ** 2), abs=1e-3),
        pytest.approx(peak + sqrt(margin**2 + (40 * (high - middle)) ** 2), abs=1e-3),
    ]
    assert peak - found[0] < found[1] - peak


def test_the_printed_range_holds_the_middle_nine_tenths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A normal distribution has 0.9 within 1.645 deviations; with nothing held back the odds at its ends are those."""
    assert erf(verdict.RANGE / sqrt(2)) == pytest.approx(0.9, abs=2e-4)
    monkeypatch.setattr(verdict, "FRAGMENTATION", (0.0,) * 40)
    m = moment(60 * GiB, 0, 0.0)
    low, high = verdict.reach(m)
    assert verdict.fit_probability(60 * GiB, 0, verdict.deviation(60 * GiB), high) == pytest.approx(0.95, abs=1e-4)
    assert verdict.fit_probability(60 * GiB, 0, verdict.deviation(60 * GiB), low) == pytest.approx(0.05, abs=1e-4)


def test_odds_leave_the_ledgers_own_line_for_what_is_held_back_out() -> None:
    """It is the median of what the odds go through case by case."""
    m = moment(40 * GiB, GiB, 0.5)
    expected = verdict.fit_probability(41 * GiB, 40 * GiB, verdict.deviation(40 * GiB), 42 * GiB)
    assert verdict.odds(m.sums, 42 * GiB) == expected


def test_the_quantiles_rise_and_have_a_middle() -> None:
    assert list(runtime.FRAGMENTATION) == sorted(runtime.FRAGMENTATION)
    assert len(runtime.FRAGMENTATION) == 40 == 2 * runtime.MIDDLE == 20 * verdict.TAIL


@pytest.mark.parametrize(("probability", "word"), [(0.95, "fits"), (0.9499, "tight"), (0.2, "tight"), (0.1999, "oom")])
def test_the_verdicts_thresholds_belong_to_the_better_side(probability: float, word: str) -> None:
    """At least 95 % fits, at least 20 % is tight."""
    assert verdict.word(probability) == word


@given(st.integers(2**28, 10**12), st.integers(0, 10**10))
def test_with_no_room_left_a_moment_just_fits(allocated: int, outside: int) -> None:
    """The card on which a moment has exactly no room is the one on which it fits with the verdict's 95 %."""
    m = moment(allocated, outside, verdict.FRAGMENTATION[20])
    just = -verdict.room(m.sums, 0)
    assert 0.9499 <= verdict.odds(m.sums, just + 1) <= 0.96
    assert verdict.room(m.sums, just + 5 * GiB) == pytest.approx(5 * GiB, abs=2)


def test_far_from_the_limit_nothing_is_computed_and_nothing_lost() -> None:
    """Six deviations beyond the worst share the sum is one to nine digits."""
    needed, fragmenting, width = 10**9, 10**9, 10**7
    edge = needed + int(verdict.FRAGMENTATION[-1] * fragmenting + verdict.SURE * width)
    assert verdict.fit_probability(needed, fragmenting, width, edge + 2) == 1.0
    assert verdict.fit_probability(needed, fragmenting, width, edge - 2) == pytest.approx(1.0, abs=1e-9)
    assert verdict.fit_probability(needed, fragmenting, width, needed - 6 * width - 1) == 0.0
    assert 0.0 < verdict.fit_probability(needed, fragmenting, width, needed - 6 * width + 1) < 1e-9


def replayed(allocated: int, reserved: int, outside: int, least: int = 0) -> Moment:
    """So much of tensors and of other things, and what a replay says that is reserved for them, or must be."""
    values = {"R": reserved, "A": allocated, "least": least or reserved}
    lost = Line("fragmentation", "process", reserved - allocated, "R - A", values, "x", False)
    return Moment("m", (*moment(allocated, outside, 0.0).lines[:2], lost))


def test_a_replays_own_errors_take_the_place_of_what_is_held_back() -> None:
    """By hand for 44 GiB reserved for 40, and one beside them: the replays' 5th and 95th hundredth, from itself."""
    m = replayed(40 * GiB, 44 * GiB, GiB)
    low, high = (runtime.REPLAYED[i] for i in (2, 37))
    margin = 1.645 * 0.8080
    assert [end / GiB for end in verdict.reach(m)] == [
        pytest.approx(45 - sqrt(margin**2 + (44 * low) ** 2), abs=1e-3),
        pytest.approx(45 + sqrt(margin**2 + (44 * high) ** 2), abs=1e-3),
    ]
    expected = verdict.fit_probability(45 * GiB, 44 * GiB, verdict.deviation(40 * GiB), 46 * GiB, runtime.REPLAYED)
    assert verdict.odds(m.sums, 46 * GiB) == expected


def test_what_must_be_reserved_decides_and_what_is_is_shown() -> None:
    """Undisturbed 44 GiB of which 42 must be allowed: the odds are those of 42, the range lies around 44."""
    roomy, tight = (replayed(40 * GiB, reserved * GiB, GiB, 42 * GiB) for reserved in (44, 42))
    assert verdict.odds(roomy.sums, 45 * GiB) == verdict.odds(tight.sums, 45 * GiB)
    assert verdict.reach(roomy) == verdict.reach(replayed(40 * GiB, 44 * GiB, GiB))


@given(st.integers(2**28, 10**11), st.integers(0, 10**10), st.integers(0, 10**10), st.integers(2**28, 2 * 10**11))
def test_a_hopeless_job_never_fits_however_it_is_counted(most: int, more: int, outside: int, usable: int) -> None:
    """By a replay that finds nothing held back or much, or by the shares of others; a certain one always does."""
    found = [replayed(most, most, outside), replayed(most, most + more, outside), moment(most, outside, 0.0)]
    odds = [verdict.odds(m.sums, usable) for m in found]
    assert verdict.hopeless(Sums(most + outside, most, 0), usable) is (odds[0] == 0.0)
    if odds[0] == 0.0:
        assert odds == [0.0, 0.0, 0.0]
    assert [verdict.certain(m.sums, usable) for m in found[:2]] == [p == 1.0 for p in odds[:2]]


@pytest.mark.parametrize("shares", [runtime.FRAGMENTATION, runtime.REPLAYED])
def test_room_between_two_whole_ratios_lies_between_theirs(shares: tuple[float, ...]) -> None:
    """Straight lines join the margins: no step where the tensors are a whole number of deviations, half way in it."""
    most = 10**10
    width = verdict.deviation(most)
    replay = shares is runtime.REPLAYED

    def margin(ratio: float) -> float:
        lost = int(ratio * width)
        sums = Sums(most, most, 0 if replay else lost, lost if replay else 0)
        return -verdict.room(sums._replace(needed=0), 0) / width

    assert margin(3 - 1e-9) == pytest.approx(margin(3 + 1e-9), abs=1e-6)
    assert margin(3.5) == pytest.approx((margin(3) + margin(4)) / 2, abs=1e-6)
