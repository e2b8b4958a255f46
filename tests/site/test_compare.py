"""Jobs side by side: the numbers of each, what the reader adds to them, and addresses that hold it all."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pytest

from calc.catalog.catalog import load
from calc.recommend import recommend
from calc.site.calculator import addresses, browser, calculator, compare
from calc.site.views.jobs import sides

JOB = {"model": "llama-3.1-8b", "task": "sft", "framework": "trl", "seq_len": "2048", "global_batch": "128"}
HERE = urlencode(JOB | {"gpu": "h100-sxm", "gpus": "8", "price": "2.5"})
THERE = urlencode(JOB | {"gpu": "rtx4090", "gpus": "8"})
STATED = urlencode(JOB | {"gpu": "h200", "gpus": "8", "ask": "estimate"})
REFUSED = urlencode({"model": "llama-3.1-8b", "task": "ppo", "framework": "trl", "gpu": "h200", "gpus": "8"})


def answered(*asked: str, samples: str = "100000") -> dict[str, Any]:
    question = {"root": "../", "compare": asked, "samples": samples}
    found: dict[str, Any] = json.loads(browser.answer(json.dumps(question), print))
    return found


def table(*asked: str, samples: int = 100_000) -> list[dict[str, Any]]:
    made = sides.table([compare._side(one) for one in asked], samples, "x", "x")
    return [dict(zip([column.key for column in made.columns], row, strict=True)) for row in made.rows]


def test_a_side_is_what_recommend_answers_with_hours_and_cost_of_its_own() -> None:
    here, there = table(HERE, THERE)
    job = {**JOB, "seq_len": 2048, "global_batch": 128, "gpu": "h100-sxm", "gpus": 8, "gpus_per_node": 8}
    best = recommend(job, load()).recommended
    assert best and best.throughput
    assert here["run"].exact == calculator.words.answered(best.judged).device_bytes
    hours = best.throughput.step_seconds * 100_000 / 128 / 3600
    assert here["hours"].value == pytest.approx(hours)
    assert here["cost"].value == pytest.approx(hours * 8 * 2.5)
    assert here["tokens"].value == best.throughput.tokens_per_second
    assert (there["price"].value, there["cost"].value) == (None, None)  # no price but the reader's
    assert "cost" not in table(THERE)[0]


def test_twice_the_samples_take_twice_the_hours() -> None:
    assert table(HERE, samples=200_000)[0]["hours"].value == 2 * table(HERE)[0]["hours"].value


def test_all_bars_have_one_scale_and_each_card_its_own_limit() -> None:
    shown = sides.table([compare._side(one) for one in (HERE, THERE)], 1, "x", "x")
    alone = sides.table([compare._side(THERE)], 1, "x", "x")
    bars = [row[2].bar for row in shown.rows]
    assert all(bars) and len({bar.scale for bar in bars if bar}) == 1
    assert bars[1] != alone.rows[0][2].bar  # drawn against the larger card
    assert [bar.limit for bar in bars if bar] == [load().gpu(gpu).usable_bytes for gpu in ("h100-sxm", "rtx4090")]


def test_a_job_that_cannot_run_is_a_row_that_says_why() -> None:
    rows = table(HERE, REFUSED)
    assert rows[1]["job"].value == "8 × H200 SXM 141GB, Llama 3.1 8B, PPO"
    assert rows[1]["run"].value[2].startswith("task: given 'ppo', allowed with trl")
    assert rows[0]["hours"].value and rows[1]["hours"].value is None


def test_jobs_are_named_by_what_tells_them_apart() -> None:
    other = urlencode({**dict(parse_qsl(THERE)), "model": "qwen2.5-7b"})
    assert [row["job"].value for row in table(HERE, THERE)] == ["8 × H100 SXM 80GB HBM3", "8 × GeForce RTX 4090"]
    assert table(THERE, other)[1]["job"].value == "8 × GeForce RTX 4090, Qwen2.5 7B"


@pytest.mark.parametrize(
    ("asked", "samples", "said"),
    [
        ((HERE,) * 5, "1", "compare: given 5 jobs, allowed: 1 to 4"),
        ((), "1", "compare: given 0 jobs, allowed: 1 to 4"),
        ((HERE,), "many", "samples: given 'many', allowed: a whole number above 0"),
        ((HERE,), "0", "samples: given '0', allowed: a whole number above 0"),
        ((HERE + "0e999",), "1", "price: given '2.50e999', allowed: a number of $ per GPU hour, 0 or more"),
    ],
)
def test_what_cannot_be_compared_is_one_line(asked: tuple[str, ...], samples: str, said: str) -> None:
    assert answered(*asked, samples=samples) == {"error": said}


def test_every_way_on_from_a_comparison_keeps_what_it_holds() -> None:
    asked = [HERE, THERE, STATED]
    html = answered(*asked, samples="5000")["html"]
    assert addresses.compare("../", asked, 5000).replace("&", "&amp;") in html
    assert addresses.compare("../", asked[1:], 5000).replace("&", "&amp;") in html  # the first one left out
    change = parse_qs(urlsplit(addresses.change("../", asked, 0)).query)
    assert change["compare"] == [THERE, STATED] and change["gpu"] == ["h100-sxm"] and "price" not in change
    job = dict(parse_qsl(STATED))
    *_, shown = calculator.asked(job, load(), calculator.Place("", lambda _: ""), print)
    back = shown.html.partition('class="beside" href="')[2].partition('"')[0].replace("&amp;", "&")
    (one,) = parse_qs(urlsplit(back).query)["compare"]
    assert table(one)[0]["run"] == table(STATED)[0]["run"]


def test_markup_in_an_address_is_text() -> None:
    evil = urlencode({"model": "<img src=x>", "task": "sft", "gpu": "<b>", "gpus": "1"})
    html = answered(HERE, evil)["html"]
    assert "<img" not in html and "<b>1" not in html and "&lt;img" in html
