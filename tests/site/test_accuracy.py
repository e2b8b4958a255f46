"""Published RL reports beside what is computed for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from calc.accuracy.calibration import Outcome
from calc.accuracy.largest_size import Search
from calc.accuracy.residuals import Residual
from calc.answers import answers
from calc.base.units import GiB
from calc.scenario.words import RL
from calc.site.tables.tables import Cell, Column, Table, to_dict
from calc.site.views.accuracy import accuracy, blind, measured, odds, records, reports, scatter


@pytest.fixture(autouse=True)
def known(
    monkeypatch: pytest.MonkeyPatch,
    residuals: tuple[Residual, ...],
    searches: tuple[Search, ...],
    outcomes: tuple[Outcome, ...],
) -> None:
    """What a build computes and keeps, as the sample's does, is here what `tests/accuracy` judges in the same run."""
    monkeypatch.setattr(accuracy, "residuals", lambda: residuals)
    monkeypatch.setattr(measured, "searches", lambda: searches)
    monkeypatch.setattr(odds, "judged", lambda: outcomes)


def test_published_rl_reports_stand_beside_what_is_computed() -> None:
    known = {r["id"]: r for r in answers.catalog().measurements}
    table = reports.table()
    rows = to_dict(table)["rows"]
    assert len(rows) == reports.count("count") > 0
    for row in rows:
        record = known[row["record"]]
        assert record["scenario"]["task"] in RL
        assert row["reported"] == {"fits": "fits", "oom": "out of memory"}[record["verdict"]]
        died = row["computed"].startswith("out of memory")
        assert died == (record["verdict"] == "oom") or row["agrees"] == "no"
        if record["metric"] == "held":
            assert row["measured"] == round(record["measured_bytes"] / GiB, 2)
            assert row["held"] == pytest.approx(row["measured"], rel=0.01)
        else:
            assert (row["moment"], row["measured"], row["held"]) == ("—", None, None)
    agree = [row["agrees"] for row in rows].count("yes")
    assert agree == reports.count("agree") == len(rows) - reports.count("disagree")
    assert f"{agree} of {len(rows)} agree" in table.note


def test_records_are_called_by_their_source_and_job_and_never_by_their_id() -> None:
    every = answers.catalog().measurements
    for table in (reports.table(), blind.one_by_one(), blind.unsaid(), accuracy.worst(5), scatter.scattered()):
        last = table.columns[-1]
        assert (last.key, last.behind) == ("record", True)
        for row in table.rows:
            assert str(row[0].value).strip() and "/" not in str(row[0].value).split(": ")[0]
    said = {r["id"]: records.label(r) for r in every if r["class"] in ("published", "blind") and "edge" not in r}
    assert said["published/gh-orlhf-354"].startswith("OpenRLHF #354: RM of Llama 3 8B by LoRA on 6 × GeForce RTX 4090")
    assert not [key for key, words in said.items() if key.partition("/")[2] in words]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://github.com/volcengine/verl/issues/12", "verl #12"),
        ("https://github.com/hiyouga/EasyR1/blob/main/README.md", "EasyR1"),
        ("https://www.unsloth.ai/blog", "unsloth.ai"),
        ("https://github.com/", "github.com"),
    ],
)
def test_a_source_is_a_repository_with_its_thread_or_a_host(url: str, words: str) -> None:
    assert records.source(url) == words


def test_a_report_without_a_note_or_a_verdict_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both may be left out of a record."""
    one, record = reports.found()[0], reports._record
    monkeypatch.setattr(reports, "found", lambda: [replace(one, reported=None)])
    monkeypatch.setattr(reports, "_record", lambda r: {k: v for k, v in record(r).items() if k != "note"})
    (row,) = reports.table().rows
    shown = dict(zip([column.key for column in reports.table().columns], row, strict=True))
    assert shown["reported"].value == "—"


def test_reports_can_be_counted_and_a_count_that_is_not_there_is_named() -> None:
    assert reports.count("loading") < reports.count("count")
    with pytest.raises(ValueError, match="no 'all'; there is count, agree, disagree, loading, jobs"):
        reports.count("all")


def test_a_table_of_verdicts_names_the_records_that_they_rest_on() -> None:
    """Each class of jobs in it once, by the row that it has on the validation page."""
    jobs = ({"sharding": "zero3", "gpus": 8}, {"sharding": "zero2", "gpus": 8}, {"method": "lora"})
    cells = [Cell(1, scenario={"model": "llama-3-8b", "task": "sft", "gpu": "a100-80-sxm", **job}) for job in jobs]
    table = Table("t", "t", (Column("a", "A"),), tuple((cell,) for cell in (*cells, Cell("no job"))))
    assert odds.rests_on(table) == [("rows-zero-full", "ZeRO, full"), ("rows-whole-adapters", "whole, adapters")]
    shown = "".join(row[0].html for row in odds.comparable().rows)
    for anchor, _ in odds.rests_on(table):
        assert f'id="{anchor}"' in shown


def test_every_published_job_is_in_one_bin_of_the_calibration() -> None:
    rows = to_dict(odds.outcomes())["rows"]
    tables = [row for row in rows if row["found"] == "tables and logs"]
    assert sum(row["jobs"] for row in tables) == int(odds.figure("jobs"))
    assert sum(row["ran"] for row in tables if row["verdict"] == "fits") == int(odds.figure("ran"))
    assert sum(row["jobs"] - row["ran"] for row in rows) == int(odds.figure("died"))
    assert all(row["ran"] <= row["jobs"] for row in rows)


def test_a_figure_of_the_calibration_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no 'all'; there is jobs"):
        odds.figure("all")


@pytest.mark.parametrize(("k", "n", "low", "high"), [(10, 10, 0.722, 1.0), (0, 10, 0.0, 0.278), (5, 10, 0.237, 0.763)])
def test_an_interval_is_wilsons(k: int, n: int, low: float, high: float) -> None:
    """Tables of the Wilson score interval at 95 %."""
    assert odds.wilson(k, n) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = to_dict(measured.shown(name))["rows"]
    return found


def test_every_measured_record_is_counted_once_and_in_every_table_of_its_kind() -> None:
    """Jobs that ran or died, searches, rates, and what failed otherwise."""
    records = [r for r in answers.catalog().measurements if r["class"] == "measured"]
    machines = rows("machines")
    assert sum(row[of] for row in machines for of in ("ran", "died", "failed", "searches", "rates")) == len(records)
    ran = sum(row["ran"] for row in machines)
    assert ran == int(measured.figure("count")) == sum(row["records"] for row in rows("context")) > 0
    for name in ("by-kind", "reserved"):
        *parts, every = rows(name)
        assert sum(row["records"] for row in parts) == every["records"] == ran
    assert sum(row["records"] for row in rows("verdicts")) == ran + sum(row["died"] for row in machines)
    assert len(rows("edges")) == sum(row["searches"] for row in machines) == int(measured.figure("searches"))


def test_jobs_that_changed_formulas_are_nearer_now_than_at_first() -> None:
    found = rows("trainers")
    assert sum(row["records"] for row in found) == int(measured.figure("corrected")) > 0
    for row in found:
        assert abs(row["median"]) <= abs(row["first_median"]) and abs(row["worst"]) <= abs(row["first_worst"])


def test_a_search_is_no_record_with_a_residual() -> None:
    searched = {r["id"] for r in answers.catalog().measurements if "edge" in r}
    assert searched and not searched & {r["id"] for r in accuracy.comparable(answers.catalog())}


def test_the_machines_are_named_with_driver_and_versions() -> None:
    for row in rows("machines"):
        assert "driver" in row["machine"] and "cuda" in row["machine"] and "torch" in row["machine"]
        assert row["libraries"].startswith("transformers ")


def test_figures_of_measured_jobs_are_those_of_the_tables() -> None:
    edges = rows("edges")
    assert sum(row["kept"] == "yes" for row in edges) == int(measured.figure("kept"))
    assert sum(abs(row["error"]) <= 5 for row in edges) == int(measured.figure("close"))
    assert rows("reserved")[-1]["inside"] == int(measured.figure("inside"))
    died = [row for row in rows("verdicts") if row["reported"] == "out of memory"]
    assert sum(row["records"] for row in died) == int(measured.figure("died"))
    assert sum(row["fits"] for row in died) == int(measured.figure("missed"))
    assert float(measured.figure("median").removesuffix(" %")) == round(rows("by-kind")[-1]["median"], 2)


@pytest.mark.parametrize("ask", [measured.figure, measured.shown])
def test_a_figure_or_table_of_measured_jobs_that_is_not_there_is_named(ask: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="no 'all'; there is"):
        ask("all")
