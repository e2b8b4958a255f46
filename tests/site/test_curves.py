"""Curves and bars: what is drawn is what calc computes, in words and hatching beside the colour."""

from __future__ import annotations

import re
from itertools import pairwise
from math import dist, log

import pytest

from calc.answers import answers, topics
from calc.answers.fits import Asked, best
from calc.base.units import GiB
from calc.estimate.estimate import estimate
from calc.resolve.parse import parse
from calc.site.tables import charts, plots, tables
from calc.site.tables.charts import Bar
from calc.site.tables.pictures import LETTER
from calc.site.views.accuracy import scatter
from calc.site.views.fit import heat
from calc.site.views.jobs import curves

JOB = {
    "model": "llama-3-8b", "task": "rm", "framework": "openrlhf==0.3", "gpu": "rtx4090", "gpus": 6, "gpus_per_node": 6,
    "method": "lora", "lora.rank": 64, "sharding": "zero2", "micro_batch": 1, "checkpointing": "full",
}  # fmt: skip


def peak(**changes: object) -> int:
    e = estimate(parse({**JOB, **changes}))
    return max(g.peak.moment.device_bytes for g in e.groups)


def verdict(length: int) -> str:
    return estimate(parse({**JOB, "seq_len": length})).verdict


def shown(over: str, values: list[int]) -> tables.Table:
    return curves.curve(JOB, over, "x", "caption", values)


def body(table: tables.Table) -> str:
    assert table.picture
    return table.picture.body


def test_points_are_estimates_and_stand_as_numbers_on_the_drawing() -> None:
    lengths = [1024, 2048, 4096]
    table = shown("seq_len", lengths)
    totals = [peak(seq_len=n) for n in lengths]
    assert [row[2].exact for row in table.rows] == totals
    assert re.findall(r'class="name total"[^>]*>([\d.]+)<', body(table)) == [f"{n / GiB:.1f}" for n in totals]
    limit = float(re.findall(r">([\d.]+) usable<", body(table))[0])
    assert limit == pytest.approx(table.rows[0][3].values[0], abs=0.05)


def test_areas_are_the_components_to_scale() -> None:
    table = shown("seq_len", [1024, 4096])
    limit = float(re.findall(r'class="limit" d="M\d+ ([\d.]+)h', body(table))[0])
    floor = plots.TOP + plots.DEEP
    unit = (floor - limit) / (table.rows[0][3].values[0])  # of the drawing for a GiB
    drawn = dict(re.findall(r'<path class="c-(\w+)" d="M([^"]+)Z"', body(table)))
    for c, path in drawn.items():
        first, last, back_last, back_first = [float(pair.split()[1]) for pair in path.split("L")]
        for row, high in ((table.rows[0], back_first - first), (table.rows[1], back_last - last)):
            exact = next(cell.exact for cell, column in zip(row, table.columns, strict=True) if column.key == c)
            assert high / unit == pytest.approx((exact or 0) / GiB, abs=0.2 / unit)
    assert {"weights", "activations", "checkpoints"} <= set(drawn)


def test_a_name_stands_within_its_area() -> None:
    drawing = body(shown("seq_len", [512, 1024, 2048, 4096, 8192, 32768]))
    named = re.findall(r'<text class="name" x="([\d.]+)" y="([\d.]+)" text-anchor="end">([a-z ]+)</text>', drawing)
    assert named[0][2] == "weights"
    for right, base, name in named:
        path = re.search(rf'<path class="c-{name}" d="M([^"]+)Z"', drawing)
        assert path
        edge = [tuple(map(float, pair.split())) for pair in path[1].split("L")]
        above, below = edge[: len(edge) // 2], edge[: len(edge) // 2 - 1 : -1]
        for x in (float(right) - LETTER * len(name), float(right)):
            highest, lowest = (
                next(a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0]) for a, b in pairwise(side) if x <= b[0])
                for side in (above, below)
            )
            assert highest <= float(base) - 9  # of a letter above its line
            assert float(base) <= lowest


def test_columns_stand_for_numbers_of_gpus_and_add_up() -> None:
    table = shown("gpus", [2, 3, 6])
    assert [row[2].exact for row in table.rows] == [peak(gpus=n, gpus_per_node=n) for n in (2, 3, 6)]
    rects = re.findall(r'<rect class="c-\w+" x="([\d.]+)" y="[\d.]+" width="[\d.]+" height="([\d.]+)"', body(table))
    limit = float(re.findall(r'class="limit" d="M\d+ ([\d.]+)h', body(table))[0])
    unit = (plots.TOP + plots.DEEP - limit) / table.rows[0][3].values[0]
    for row, x in zip(table.rows, sorted({float(x) for x, _ in rects}), strict=True):
        high = sum(float(h) for at, h in rects if float(at) == x)
        assert high / unit == pytest.approx(row[2].values[0], abs=0.06 * len(rects) / unit)


def test_bands_end_at_the_very_token() -> None:
    table = shown("seq_len", [2048, 8192])
    fits, tight, oom = (int(n.replace(",", "")) for n in re.findall(r"[\d,]{4,}", table.note))
    assert tight == fits + 1
    assert [verdict(n) for n in (fits, tight, oom - 1, oom)] == ["fits", "tight", "tight", "oom"]
    words = re.findall(r'class="word (\w+)"[^>]*>([a-z ]+)<', body(table))
    assert ("fits", "fits") in words
    assert "hatch" in body(table)


def test_a_curve_needs_two_points_and_a_known_axis() -> None:
    with pytest.raises(ValueError, match="allowed: seq_len"):
        shown("batch", [1, 2])
    with pytest.raises(ValueError, match="fewer than two"):
        shown("seq_len", [2048])


@pytest.mark.parametrize("gpu", ["rtx4090", "h100-sxm"])
def test_a_cards_curve_is_of_the_largest_size_that_eight_of_it_train_in_full(gpu: str) -> None:
    table = curves.counts(answers.catalog().gpu(gpu))
    assert table is not None
    jobs = {row[0].value: row[0].scenario for row in table.rows}
    assert {(job["sharding"], job["gpu"], job.get("offload.optimizer")) for job in jobs.values() if job} == {
        ("zero3", gpu, None)
    }
    eight = jobs[8]
    assert eight and estimate(parse(eight)).verdict == "fits"
    verdicts = [str(row[1].value).partition(" in ")[0] for row in table.rows]
    assert verdicts[:2] == ["out of memory"] * 2  # of what is far too few, no more is drawn
    assert verdicts[2] != "out of memory"
    sizes = topics.sizes()["sft"]
    for larger in sizes[sizes.index(eight["model"]) + 1 :]:
        assert estimate(parse({**eight, "model": larger})).verdict != "fits"


def test_a_drawing_opens_its_table_and_has_a_name() -> None:
    html = tables.to_html(shown("gpus", [2, 6]))
    assert re.search(r'<svg class="drawing" [^>]*role="img" aria-label="caption: 2 GPUs: ', html)
    assert re.search(r'<details class="twin"><summary>[^<]+</summary><div class="scroll".*</div></details>', html)


def test_what_lies_beyond_the_limit_is_hatched_and_said() -> None:
    html = charts.bar(Bar({"weights": 30 * GiB, "logits": 50 * GiB}, scale=100 * GiB, limit=60 * GiB))
    assert '<s class="p600"><span class="p500"></span></s>' in html
    assert ">80.0, 20.0 over</em>" in html
    below = charts.bar(Bar({"weights": 30 * GiB}, scale=100 * GiB, limit=60 * GiB))
    assert "<s " not in below
    assert ">30.0, 30.0 free</em>" in below


def test_a_heatmaps_ground_is_as_deep_as_the_card_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat, "by_size", lambda models: [answers.catalog().model("llama-3.1-8b")])
    table = heat.matrix("sft", "lora", 1, "")
    keys = [column.key for column in table.columns]
    (row,) = table.rows
    for gpu, words in (("a100-80-sxm", "fits"), ("a100-40-sxm", "fits"), ("rtx4090", "fits"), ("l4", "tight")):
        cell, found = row[keys.index(gpu.replace("-", "_"))], best(Asked("llama-3.1-8b", gpu, "sft", "lora", 1))
        assert found and cell.exact == found.needed and cell.values[0] == words
    deep = [row[keys.index(k)].style for k in ("a100_80_sxm", "a100_40_sxm", "rtx4090")]
    assert deep == sorted(deep, key=lambda style: int(style.removeprefix("heat h")))
    assert len(set(deep)) == 3


def test_a_heatmap_of_each_task_is_one_click_from_the_others() -> None:
    links = heat.switch(heat.PAGES["sft"], "")
    assert "<b>Supervised fine-tuning</b>" in links
    others = {*heat.PAGES.values(), *heat.MORE} - {heat.PAGES["sft"]}
    assert set(re.findall(r'href="([^"#]+)', links)) == {f"{page}.html" for page in others}


def test_every_record_is_a_point_at_its_place() -> None:
    """Points that nobody can tell apart are one, and the page has the rows that are furthest off."""
    table = scatter.scattered()
    drawn = dict(re.findall(r'<path class="point ([\w-]+)" d="([^"]+)"', body(table)))
    assert len(table.rows) > scatter.FURTHEST == tables.to_html(table).count("<tr>") - 1

    def place(gib: float) -> float:
        return float(scatter.FIELD * log(gib / scatter.LOW) / log(scatter.HIGH / scatter.LOW))

    for kind, style in scatter.KINDS.items():
        points = [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)m", drawn[style])]
        assert len(points) == len(set(points))
        held = [(row[4].exact / GiB, row[3].exact / GiB) for row in table.rows if row[1].value == kind]
        for measured, estimated in held:
            there = (scatter.LEFT + place(measured), scatter.FIELD - place(estimated))
            assert any(dist(there, point) < 0.4 for point in points), (kind, measured)
        assert len(points) <= len(held)
