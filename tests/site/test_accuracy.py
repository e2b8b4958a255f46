"""Published RL reports beside what is computed for them."""

from __future__ import annotations

import pytest

from calc.site import accuracy, answers
from calc.site.tables import to_dict
from calc.units import GiB


def test_published_rl_reports_stand_beside_what_is_computed() -> None:
    records = {r["id"].removeprefix("published/"): r for r in answers.catalog().measurements}
    table = accuracy.reports()
    rows = to_dict(table)["rows"]
    assert len(rows) == accuracy.reports_count("count") > 0
    for row in rows:
        record = records[row["report"]]
        assert record["scenario"]["task"] in accuracy.RL
        assert row["reported"] == {"fits": "fits", "oom": "out of memory"}[record["verdict"]]
        died = row["computed"].startswith("out of memory")
        assert died == (record["verdict"] == "oom") or row["agrees"] == "no"
        if record["metric"] == "held":
            assert row["measured"] == round(record["measured_bytes"] / GiB, 2)
            assert row["held"] == pytest.approx(row["measured"], rel=0.01)
        else:
            assert (row["moment"], row["measured"], row["held"]) == ("—", None, None)
    agree = [row["agrees"] for row in rows].count("yes")
    assert agree == accuracy.reports_count("agree") == len(rows) - accuracy.reports_count("disagree")
    assert f"{agree} of {len(rows)} agree" in table.note


def test_reports_can_be_counted_and_a_count_that_is_not_there_is_named() -> None:
    assert accuracy.reports_count("loading") < accuracy.reports_count("count")
    with pytest.raises(ValueError, match="no 'all'; there is count, agree, disagree, loading, jobs"):
        accuracy.reports_count("all")
