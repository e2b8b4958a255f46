"""Published figures that were kept back: they stay as they came out, and today's estimates get no worse."""

from __future__ import annotations

from statistics import median

import pytest

from calc.accuracy.residuals import RANGES, Residual
from calc.catalog.catalog import load
from calc.site.views.accuracy import accuracy, blind
from calc.site.views.accuracy.blind import Compared, Kept

RECORDS = [r for r in load().measurements if r["class"] == "blind"]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, residuals: tuple[Residual, ...]) -> None:
    """The residuals that the whole of `tests/accuracy` judges."""
    monkeypatch.setattr(accuracy, "residuals", lambda: residuals)


def test_a_record_says_all_of_its_job_or_what_it_lacks() -> None:
    for record in RECORDS:
        about = record["blind"]
        assert (about["said"] == "all") == (about["lacks"] is None), record["id"]
        assert about["first"] is None or about["first"]["low_bytes"] <= about["first"]["high_bytes"], record["id"]


def test_no_job_is_both_said_and_not_said() -> None:
    said = {record["id"].removeprefix("blind/") for record in RECORDS}
    unsaid = [job["id"] for job in blind.unsaid_jobs()]
    assert len(unsaid) == len(set(unsaid)) and not said & set(unsaid)
    assert all(job["lacks"] and job["url"].startswith("https://") for job in blind.unsaid_jobs())


def test_a_figure_in_either_unit_is_compared_with_the_nearer() -> None:
    """22 GB may be 20.5 or 22 GiB: 23 is 4.5 % above the nearer, 21 is 2.5 % off the lower."""
    one = Kept({"verdict": "fits"}, 2049, 2200, None, Compared(2299, 2100, 2400, "fits"))
    assert one.error(one.now) == pytest.approx(0.045) and one.inside(one.now)
    assert one.error(Compared(2100, 0, 1, "fits")) == pytest.approx(2100 / 2049 - 1)
    assert not one.inside(Compared(2299, 2201, 2400, "fits")) and not one.inside(Compared(2000, 0, 2048, "fits"))


def test_a_job_that_ran_agrees_with_all_but_out_of_memory() -> None:
    ran = Kept({"verdict": "fits"}, 0, 0, None, Compared(1, 0, 2, "tight"))
    assert ran.same_verdict(ran.now) and not ran.same_verdict(Compared(1, 0, 2, "oom"))
    died = ran._replace(record={"verdict": "oom"})
    assert died.same_verdict(Compared(1, 0, 2, "oom")) and not died.same_verdict(ran.now)


@pytest.mark.parametrize(
    ("revision", "number", "middle", "inside"),
    [
        # of the 48 errors of that day, in order, the two in the middle are 8.93 and 11.24 %
        ("136e11c", 48, 0.101, 28),
        # of 25, the one in the middle; 20 of them said the whole job, with a median of 8.4 %
        ("ab27c8b", 25, 0.0884, 17),
        # of 47, the one in the middle; 32 of them said the whole job, with a median of 20.4 %
        ("bd4c898", 47, 0.172, 32),
        # of 39, the one in the middle; 31 of them said the whole job, with a median of 20.5 %
        ("22483b7", 39, 0.1438, 21),
        # of 23, the one in the middle; 19 of them seemed to say the whole job, with a median of 15.6 %
        ("1d82256", 23, 0.1171, 18),
        # of 35, the one in the middle; 24 of them said the whole job, with a median of 10.0 %
        ("8fca1b8", 35, 0.1252, 23),
        # of 65, the one in the middle; 29 of them seemed to say the whole job, with a median of 11.4 %
        ("92a0e63a", 65, 0.0944, 47),
        # of 15, the one in the middle; 8 of them seemed to say the whole job, with a median of 22.0 %
        ("f2ebcae2", 15, 0.1609, 11),
        # of 27, the one in the middle; 9 of them seemed to say the whole job, with a median of 37.7 %
        ("307dea55", 27, 0.1916, 8),
        # of 47, the one in the middle; 39 of them seemed to say the whole job, with a median of 14.1 %
        ("1b77e3fe", 47, 0.1352, 35),
        # of 70, the two in the middle; 62 of them seemed to say the whole job, with a median of 11.2 %
        ("b88dc900", 70, 0.0875, 36),
        # of 16, the two in the middle; all of them said the whole job
        ("78b5af1e", 16, 0.0516, 8),
        # of 12, the two in the middle; 9 of them seemed to say the whole job, with a median of 1.6 %
        ("cbae8d20", 12, 0.0423, 9),
        # of 20, the two in the middle; 16 of them seemed to say the whole job, with a median of 10.2 %
        ("322a2f1b", 20, 0.1024, 10),
        # of 5, the one in the middle; all of them said the whole job
        ("68ce2637", 5, 0.4418, 4),
        # of 6, the two in the middle; all of them said the whole job
        ("03f1d49f", 6, 0.1059, 4),
        # of 10, the two in the middle; 6 of them seemed to say the whole job, with a median of 13.3 %
        ("6a15b1f4", 10, 0.1114, 3),
        # both, which said the whole job
        ("bec29675", 2, 0.0206, 2),
        # of 53, the one in the middle; 38 of them seemed to say the whole job, with a median of 14.4 %
        ("aa287f81", 53, 0.1755, 15),
        # of 38, the two in the middle; 23 of them seemed to say the whole job, with a median of 9.5 %
        ("c53ba3cf", 38, 0.1639, 21),
        # of 51, the one in the middle; 35 of them seemed to say the whole job, with a median of 7.5 %
        ("7b395332", 51, 0.0830, 12),
    ],
)
def test_the_first_comparisons_stay_as_they_came_out(revision: str, number: int, middle: float, inside: int) -> None:
    first = blind.compared(blind.figures(), revision)
    assert len(first) == number
    assert median(abs(one.error(then)) for one, then in first) == pytest.approx(middle, abs=5e-4)
    assert sum(one.inside(then) for one, then in first if then.ranged) == inside


def test_later_rounds_figures_are_those_of_whole_jobs() -> None:
    assert (blind.figure("second_count"), blind.figure("second_median")) == ("20", "8.4 %")
    assert blind.figure("second_inside") == "14 of 20"
    assert (blind.figure("third_count"), blind.figure("third_median")) == ("32", "20.4 %")
    assert blind.figure("third_inside") == "22 of 32"
    assert (blind.figure("fourth_count"), blind.figure("fourth_median")) == ("31", "20.5 %")
    assert blind.figure("fourth_inside") == "14 of 24"
    assert (blind.figure("fifth_count"), blind.figure("fifth_median")) == ("19", "15.6 %")
    assert blind.figure("fifth_inside") == "14 of 19"
    assert (blind.figure("sixth_count"), blind.figure("sixth_median")) == ("24", "10.0 %")
    assert blind.figure("sixth_inside") == "18 of 24"
    assert (blind.figure("seventh_count"), blind.figure("seventh_median")) == ("29", "11.4 %")
    assert blind.figure("seventh_inside") == "23 of 29"
    assert (blind.figure("eighth_count"), blind.figure("eighth_median")) == ("8", "22.0 %")
    assert blind.figure("eighth_inside") == "7 of 8"
    assert (blind.figure("ninth_count"), blind.figure("ninth_median")) == ("9", "37.7 %")
    assert blind.figure("ninth_inside") == "7 of 8"
    assert (blind.figure("tenth_count"), blind.figure("tenth_median")) == ("39", "14.1 %")
    assert blind.figure("tenth_inside") == "28 of 36"
    assert (blind.figure("eleventh_count"), blind.figure("eleventh_median")) == ("62", "11.2 %")
    assert blind.figure("eleventh_inside") == "30 of 44"
    assert (blind.figure("twelfth_count"), blind.figure("twelfth_median")) == ("16", "5.2 %")
    assert blind.figure("twelfth_inside") == "8 of 8"
    assert (blind.figure("thirteenth_count"), blind.figure("thirteenth_median")) == ("9", "1.6 %")
    assert blind.figure("thirteenth_inside") == "9 of 9"
    assert (blind.figure("fourteenth_count"), blind.figure("fourteenth_median")) == ("16", "10.2 %")
    assert blind.figure("fourteenth_inside") == "9 of 11"
    assert (blind.figure("fifteenth_count"), blind.figure("fifteenth_median")) == ("4", "21.9 %")
    assert blind.figure("fifteenth_inside") == "4 of 4"
    assert (blind.figure("sixteenth_count"), blind.figure("sixteenth_median")) == ("1", "0.2 %")
    assert blind.figure("sixteenth_inside") == "1 of 1"
    assert (blind.figure("seventeenth_count"), blind.figure("seventeenth_median")) == ("5", "44.2 %")
    assert blind.figure("seventeenth_inside") == "4 of 5"
    assert (blind.figure("eighteenth_count"), blind.figure("eighteenth_median")) == ("6", "10.6 %")
    assert blind.figure("eighteenth_inside") == "4 of 6"
    assert (blind.figure("nineteenth_count"), blind.figure("nineteenth_median")) == ("6", "13.3 %")
    assert blind.figure("nineteenth_inside") == "3 of 6"
    assert (blind.figure("twentieth_count"), blind.figure("twentieth_median")) == ("2", "2.1 %")
    assert blind.figure("twentieth_inside") == "2 of 2"
    assert (blind.figure("twenty-first_count"), blind.figure("twenty-first_median")) == ("38", "14.4 %")
    assert blind.figure("twenty-first_inside") == "12 of 22"
    assert (blind.figure("twenty-second_count"), blind.figure("twenty-second_median")) == ("23", "9.5 %")
    assert blind.figure("twenty-second_inside") == "16 of 19"
    assert (blind.figure("twenty-third_count"), blind.figure("twenty-third_median")) == ("35", "7.5 %")
    assert blind.figure("twenty-third_inside") == "8 of 15"


def test_jobs_that_are_said_as_a_whole_are_missed_by_no_more_than_today() -> None:
    whole = [abs(one.error(one.now)) for one in blind.figures() if one.record["blind"]["said"] == "all"]
    assert len(whole) >= 650
    assert median(whole) <= 0.0416  # 4.05 % of 638, before jobs that were said in part came to be said whole


def test_nine_in_ten_figures_of_whole_jobs_lie_inside_the_range() -> None:
    whole = [one for one in blind.figures() if one.record["blind"]["said"] == "all"]
    inside = [one.inside(one.now) for one in whole if one.record["metric"] in RANGES]
    assert sum(inside) >= 0.9 * len(inside)


def test_the_tables_hold_every_figure_and_every_job() -> None:
    summary, verdicts, rows, unsaid = blind.summary(), blind.verdicts(), blind.one_by_one(), blind.unsaid()
    first = [48, 25, 47, 39, 23, 35, 65, 15, 27, 47, 70, 16, 12, 20, 4, 1, 5, 6, 10, 2, 53, 38, 51]
    assert [row[2].value for row in summary.rows[-24:]] == [*first, len(rows.rows)]
    assert len(rows.rows) == sum(bool(r["measured_bytes"]) for r in RECORDS)
    assert len(unsaid.rows) == len(blind.unsaid_jobs())
    assert sum(row[2].value for row in verdicts.rows) == sum(not r["measured_bytes"] for r in RECORDS)


def test_a_figure_of_the_class_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="there is count"):
        blind.figure("mean")
