"""Step times as tables: the sums that they show, and what stands there where nothing was published."""

from __future__ import annotations

import pytest

from calc.accuracy.step_time_errors import judging, paces, steps
from calc.answers import answers
from calc.catalog.catalog import load
from calc.site.macros.macros import Macros, Record, View
from calc.site.tables.tables import to_dict
from calc.site.views.accuracy import rates
from calc.site.views.jobs import speed
from calc.throughput.work import HOOK, LAUNCH

SLOW = {
    "model": "llama-3-8b",
    "task": "rm",
    "framework": "openrlhf==0.3",
    "gpu": "rtx4090",
    "gpus": 6,
    "method": "lora",
    "sharding": "zero3",
    "checkpointing": "full",
    "micro_batch": 1,
    "global_batch": 126,
    "seq_len": 4096,
}


def test_terms_add_up_to_the_step() -> None:
    rows = to_dict(speed.terms(answers.ask(SLOW), "x", "caption", "../"))["rows"]
    assert rows[-1]["term"] == "one step"
    assert sum(row["seconds"] for row in rows[:-1]) == pytest.approx(rows[-1]["seconds"], abs=0.01)
    assert all(row["formula"] and row["values"] for row in rows[:-1])


def test_jobs_side_by_side_take_hours_for_the_same_pairs() -> None:
    answered = {"slow": answers.ask(SLOW), "fast": answers.ask({**SLOW, "sharding": "zero2"})}
    table = to_dict(speed.compare(answered, "x", "caption", 126_000))
    slow, fast = table["rows"]
    assert (slow["times"], fast["times"]) == (1, pytest.approx(slow["step"] / fast["step"], rel=0.01))
    assert slow["hours"] == pytest.approx(slow["step"] * 1000 / 3600, abs=0.1)
    assert slow["traffic"] > 5 * fast["traffic"]
    assert "126,000 pairs" in [column.title for column in speed.compare(answered, "x", "c", 126_000).columns]


def test_prices_are_even_where_hours_times_cards_times_price_are_equal() -> None:
    """Six cards for three hours and eight for one: an hour of the latter may cost 18/8 = 2.25 of the former's."""
    jobs = {"slow": SLOW, "fast": {**SLOW, "gpu": "a100-80-sxm", "gpus": 8, "global_batch": 128}}
    macros = Macros(lambda: View("x.md", "x.html", {"scenarios": jobs}), Record())
    slow, fast = (speed.hours(answers.ask(job), 1000) for job in jobs.values())
    assert float(macros.even_price("fast", "slow", 3)) == pytest.approx(slow * 6 / (fast * 8), abs=0.001)
    assert float(macros.even_price("slow", "slow", 3)) == 1
    assert float(macros.short_of("slow", 1000, 2 * slow, 3)) == 2


def test_every_judging_record_is_counted_in_its_source_and_in_all() -> None:
    rows = to_dict(speed.by_source())["rows"]
    everyone = judging(paces(load()))
    assert rows[-1]["source"] == speed.ALL
    assert rows[-1]["records"] == sum(row["records"] for row in rows[:-1]) == len(everyone) == len(speed.each().rows)
    assert speed.error("count") == len(everyone)
    assert speed.error("median") == pytest.approx(rows[-1]["median"], abs=0.05)
    with pytest.raises(ValueError, match="no 'mean'; there is count, median, worst, within"):
        speed.error("mean")


def test_every_measured_step_that_judges_is_counted_in_its_kind_and_in_all() -> None:
    rows = to_dict(speed.by_kind())["rows"]
    everyone = judging(steps(load()))
    assert rows[-1]["records"] == sum(row["records"] for row in rows[:-1]) == len(everyone)
    assert speed.error("count", "measured") == len(everyone)
    assert speed.error("median", "measured") == pytest.approx(rows[-1]["median"], abs=0.05)
    within = sum(abs(p.error) <= 0.2 for p in everyone) / len(everyone)
    assert speed.error("within", "measured") == pytest.approx(100 * within)


def test_those_furthest_off_come_first() -> None:
    rows = to_dict(speed.furthest())["rows"]
    sizes = [abs(row["error"]) for row in rows]
    assert len(rows) == speed.WORST and sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(speed.error("worst", "measured"), abs=0.05)


def test_measured_rates_stand_with_their_share() -> None:
    """The H200's own copies read and write; its memory moves 4,800 GB/s, its slot 64."""
    shown = {row["copy"]: row for row in to_dict(rates.copies())["rows"]}
    assert shown["device to device"]["share"] == pytest.approx(shown["device to device"]["rate"] / 48, abs=0.6)
    assert shown["pinned host to device"]["share"] == pytest.approx(
        shown["pinned host to device"]["rate"] / 0.64, abs=0.6
    )
    products = to_dict(rates.products())["rows"]
    assert len(products) == 6 and all(60 < row["tokens_32768"] < 80 for row in products)
    assert {row["sequences"] for row in to_dict(rates.decoding())["rows"]} == set(rates.SEQUENCES)
    assert f"{1e6 * LAUNCH:.1f}" in {str(row["each"]) for row in to_dict(rates.hosts())["rows"]}


def test_nothing_published_is_an_empty_table_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "residuals", tuple)
    monkeypatch.setattr(speed, "measured", tuple)
    assert speed.by_source().rows == speed.each().rows == speed.by_kind().rows == speed.furthest().rows == ()
    assert speed.error("median") is None


def test_every_constant_stands_with_its_source() -> None:
    shown = to_dict(speed.constants())["rows"]
    rows = {row["name"]: row for row in shown}
    assert len(rows) == len(shown)
    assert rows["LAUNCH"]["status"] == LAUNCH.status == "calibrated"
    assert rows["HOOK"]["value"] == f"{HOOK:.3g}"
    assert {"MATRIX, Ampere", "FLASH, Hopper", "OVERLAP, zero3", "ENGINE_STEP", "CPU_ADAM"} <= rows.keys()
    assert all(
        row["source"] and row["status"] in ("published", "measured", "calibrated", "assumed") for row in rows.values()
    )
    published = [r["measured_rate"] for r in load().measurements if "measured_rate" in r]
    assert {rate.get("calibrates") for rate in published} == {None, "LAUNCH in calc/throughput/work.py"}
