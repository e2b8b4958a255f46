"""Charts: each is a figure with a text of its data and files to take away; what is drawn is what the ledger holds."""

from __future__ import annotations

import itertools
import re
from functools import cache
from math import ceil
from xml.etree import ElementTree

import pytest

from calc.answers import answers
from calc.answers.answers import Answer
from calc.answers.fits import Asked, best, by_size
from calc.base.units import GB, GiB
from calc.models.architecture import parameters
from calc.site.build import exports
from calc.site.formats import cite, drawing, published
from calc.site.macros import menus
from calc.site.tables import charts, drawn, tables
from calc.site.tables.grids import SHAPES, Row, grid
from calc.site.tables.tables import Table
from calc.site.views.fit import glance, heat
from calc.site.views.jobs import course, curves, hosts, layouts, ledgers, placements, shares, speed, strategies

SFT = {
    "model": "llama-3-8b", "task": "sft", "framework": "openrlhf", "gpu": "a100-40-sxm", "gpus": 8, "sharding": "zero3",
    "checkpointing": "full", "attention": "flash", "micro_batch": 1, "seq_len": 2048,
}  # fmt: skip
PPO = {
    "model": "llama-3-8b", "task": "ppo", "framework": "openrlhf", "gpu": "a100-80-sxm", "gpus": 8, "sharding": "zero3",
    "checkpointing": "full", "attention": "flash", "micro_batch": 1, "prompt_len": 512, "response_len": 512,
    "rollout": {"engine": "vllm", "tensor_parallel": 1, "gpu_memory_utilization": 0.5, "sleep": True},
}  # fmt: skip
APART = {
    **PPO, "placement": "separate", "rollout": {"engine": "vllm", "gpus": 4, "tensor_parallel": 1},
    "roles": {"actor": {"gpus": 2}, "critic": {"gpus": 2}},
}  # fmt: skip
JOBS = {"shared": PPO, "apart": APART}
NAMESPACE = "{http://www.w3.org/2000/svg}"


def sharded(*kinds: str) -> dict[str, Answer]:
    return {kind: answers.ask({**SFT, "sharding": kind}) for kind in kinds}


@cache
def chart(kind: str) -> Table:
    """A chart of one kind."""
    match kind:
        case "course":
            return course.course(answers.ask(APART), kind, "A course & its instants")
        case "placements":
            return placements.placements({n: answers.ask(job) for n, job in JOBS.items()}, kind, "Roles on cards")
        case "shares":
            return shares.shares(sharded("zero2", "zero3"), kind, "Who holds what")
        case "layouts":
            return layouts.table(answers.catalog().model("llama-3-8b"), 4, 2, kind, "What lies where")
        case "curve":
            return curves.curve(SFT, "seq_len", kind, "Over lengths", [1024, 2048])
        case "bars":
            return ledgers.bars(sharded("zero2", "zero3"), kind, "Bars alone")
        case "terms":
            return speed.terms(answers.ask(SFT), kind, "Where the time goes", "../")
        case "host":
            return hosts.host({"PPO": answers.ask(PPO)}, kind, "On a node", {}, hosts.Node(400))
        case "phases":
            return ledgers.phases(answers.ask(SFT), kind, "Bars in cells")
        case _:
            pair = strategies.Pair("job", *sharded("zero2", "zero3").values())
            return strategies.by_phase(pair, kind, "Bars in two columns")


OPEN = ("terms", "host")  # as a drawing on their page, above their table
SHOWN = ("course", "placements", "shares", "layouts", "curve", "bars", *OPEN)
KINDS = (*SHOWN, "phases", "pair")


@pytest.mark.parametrize("kind", KINDS)
def test_a_chart_can_be_taken_with_its_words_source_and_versions(kind: str) -> None:
    table = chart(kind)
    files = exports.twins(table, "page.html")
    root = ElementTree.fromstring(str(files["svg"]))
    written = " ".join("".join(text.itertext()) for text in root.iter(f"{NAMESPACE}text"))
    for words in (table.caption, cite.edition(table.versions), cite.LICENCE, f"page.html#{table.id}"):
        assert words in re.sub(r"\s+", " ", written), words
    alone = root.find(f"{NAMESPACE}desc")
    picture = drawn.of(table)
    assert picture and alone is not None and alone.text == picture.words
    cells = [cell for row in table.rows for cell in row]
    exact = {f"{cell.exact / unit:,.1f}" for cell in cells if cell.exact for unit in (GiB, GB)}
    exact |= {f"{cell.value:,.3f}" for cell in cells if isinstance(cell.value, float)}
    assert exact & set(re.findall(r"[\d,]+\.\d+", picture.words)), "its text has no figure of its data"
    png = bytes(files["png"])  # type: ignore[arg-type]
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20]) == ceil(drawing.ZOOM * int(root.attrib["width"]))
    assert drawing.to_png(str(files["svg"])) == png
    for kind in ("svg", "png"):
        assert f'data/tables/{table.id}.{kind}" download' in menus.footer(table, "page.html", "")


@pytest.mark.parametrize("kind", SHOWN)
def test_a_page_shows_a_drawing_with_a_name_and_its_table_below_or_behind_a_click(kind: str) -> None:
    table = chart(kind)
    html = tables.to_html(table)
    assert table.picture
    found = re.search(r'<svg class="drawing" [^>]*role="img" aria-label="([^"]+)"', html)
    assert found and re.search(r"\d", found[1])
    assert f'<figcaption id="{table.id}-caption">' in html
    assert ('<details class="twin">' in html) is (kind not in OPEN)
    assert "style=" not in html, "a page's policy allows none"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_brings_a_colour_for_everything_that_is_drawn(kind: str) -> None:
    table = chart(kind)
    picture = drawn.of(table)
    assert picture
    svg = drawing.to_svg(table, picture, "x")
    style = svg[svg.index("<style>") : svg.index("</style>")]
    assert "var(" not in svg
    for name in {n for names in re.findall(r'class="([^"]+)"', picture.body) for n in names.split()} - {"axis", "word"}:
        assert re.search(rf"\.{name}\b", style), name


def test_every_component_has_a_colour_on_pages() -> None:
    css = drawing.STYLES[0].read_text("utf-8")
    assert [name for name in charts.COMPONENTS if f"\n.c-{name} {{" not in css or f"  --c-{name}: #" not in css] == []


def test_a_table_without_a_drawing_offers_none() -> None:
    table = ledgers.lines(answers.ask(SFT), "lines", "Lines", answers.ask(SFT).peak, "")
    assert not {"svg", "png"} & set(published.kinds(table))
    assert ".svg" not in menus.footer(table, "page.html", "")


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_cards_of_a_placement_hold_what_the_estimate_says(job: dict[str, object]) -> None:
    answer = answers.ask(job)
    table = placements.placements({"job": answer}, "x", "caption")
    for group in answer.estimate.groups:
        rows = [row for row in table.rows if row[1].value == group.name.replace("+", ", ")]
        assert sum(row[5].exact or 0 for row in rows) == group.peak.moment.device_bytes
        assert {row[2].value for row in rows} == {group.gpus}
    assert table.picture
    boxes = re.findall(
        r'<rect class="c-\w+" x="([\d.]+)" y="[\d.-]+" width="30.0" height="([\d.]+)"', table.picture.body
    )
    cards = {x: sum(float(h) for at, h in boxes if at == x) for x, _ in boxes}
    assert len(cards) == 8, "one for each GPU"
    top = 1.02 * max(max(g.peak.moment.device_bytes, g.usable_bytes) for g in answer.estimate.groups)
    peaks = [placements.DEEP * g.peak.moment.device_bytes / top for g in answer.estimate.groups for _ in range(g.gpus)]
    assert sorted(cards.values()) == pytest.approx(sorted(peaks), abs=1)


def test_a_group_of_more_cards_than_are_drawn_says_so() -> None:
    many = placements.placements({"job": answers.ask({**SFT, "gpus": 16, "gpus_per_node": 8})}, "x", "caption")
    assert many.picture
    assert "16 GPUs (8 drawn)" in many.picture.body


@pytest.mark.parametrize("job", [SFT, *JOBS.values()], ids=["sft", *JOBS])
def test_a_course_reaches_the_peak_of_each_phase_and_never_more(job: dict[str, object]) -> None:
    answer = answers.ask(job)
    found = dict(answer.course())
    assert found.keys() == {group.name for group in answer.estimate.groups}
    for group in answer.estimate.groups:
        for phase in group.phases:
            heights = [p.moment.device_bytes for p in found[group.name] if p.name == phase.name]
            assert max(heights) == phase.moment.device_bytes
        assert found[group.name][0].name == "load"


def test_the_instants_of_a_shared_job_stand_in_the_order_of_its_stages() -> None:
    ((_, phases),) = answers.ask(PPO).course()
    names = [p.name for p in phases]
    order = [names.index(name) for name in ("load", "rollout", "score", "forward")]
    assert order == sorted(order)
    assert names.index("rollout") < names.index("sync")


def test_ranks_hold_the_less_the_more_is_sharded() -> None:
    table = shares.shares(sharded("zero1", "zero2", "zero3"), "x", "caption")
    keys = [column.key for column in table.columns]
    one, two, three = ({k: cell.exact or 0 for k, cell in zip(keys, row, strict=True)} for row in table.rows)
    assert one["optimizer_states"] == two["optimizer_states"] == three["optimizer_states"]
    assert one["gradients"] > two["gradients"]
    assert one["weights"] == two["weights"] == pytest.approx(8 * three["weights"], rel=0.001)
    assert three["each"] == sum(three[c] for c in shares.KEPT if c in three)
    assert table.rows[2][-1].values[0] == pytest.approx(8 * three["each"] / GiB)


def test_every_layout_holds_the_whole_model() -> None:
    model = answers.catalog().model("llama-3-8b")
    total = parameters(model.architecture)
    whole, shard, tensor, stages, both = layouts.layouts(model, 4, 2)
    assert [rank.parameters for rank in whole.ranks] == [total] * 4
    assert sum(rank.parameters for rank in stages.ranks) == total
    assert sum(rank.parameters for rank in shard.ranks) == pytest.approx(total, abs=4)
    norms = (2 * model.architecture.layers + 1) * model.architecture.hidden  # whole on each tensor-parallel GPU
    assert sum(rank.parameters for rank in tensor.ranks) == total + 3 * norms
    assert sum(rank.parameters for rank in both.ranks) == total + norms
    assert [rank.held.above for rank in stages.ranks][:-1] == [rank.held.below for rank in stages.ranks][1:]


def test_a_mark_differs_by_shape_and_stands_in_its_row() -> None:
    made = grid([Row("one", ["fits", "oom"]), Row("two", [None, "tight"])], ["left", "right"])
    assert len(set(SHAPES.values())) == 3
    for verdict in SHAPES:
        assert len(re.findall("M", re.findall(rf'class="mark {verdict}" d="([^"]+)"', made.body)[0])) == 1
    assert made.words == "one: 1 fits, 1 out of memory; two: 1 tight"
    assert [key.words for key in made.keys] == ["fits", "tight", "out of memory"]


def test_a_card_at_a_glance_counts_the_verdicts_of_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: answers.catalog().model(name) for name in ("qwen2.5-0.5b", "llama-3-8b", "llama-3-70b")}
    monkeypatch.setattr(glance, "by_size", lambda models: list(few.values()))
    table = glance.on_gpu(answers.catalog().gpu("rtx4090"), "../")
    cases = glance.cases()
    assert [row[0].value for row in table.rows] == [case.label for case in cases]
    for case, row in zip(cases, table.rows, strict=True):
        verdicts = [found.verdict for name in few if (found := best(Asked(name, "rtx4090", *case)))]
        assert [cell.value for cell in row[1:4]] == [verdicts.count(v) for v in ("fits", "tight", "oom")]
        if "fits" in verdicts:
            assert f"gpu=rtx4090&amp;gpus={case.gpus}" in row[5].html
    assert table.picture and table.picture.words.count("1 GPU: SFT, full: ") == 1


def test_sizes_of_cards_at_a_glance_count_the_verdicts_of_the_newest_card_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = {name: answers.catalog().model(name) for name in ("qwen2.5-0.5b", "llama-3-8b", "llama-3-70b")}
    monkeypatch.setattr(glance, "by_size", lambda models: list(few.values()))
    table = glance.on_sizes("sft", [("lora", 1), ("qlora", 1)], "../")
    cards = [card for _, card in glance.sizes()]
    assert [row[1].value for row in table.rows] == 2 * [card.name for card in cards]
    assert len({card.memory_gb for card in cards}) == len(cards) == len(glance.sizes())
    newer = answers.catalog().gpu("rtx5070ti")  # of 16 GB, as is the older 4060 Ti
    assert newer.memory_gb == 16 and newer.name in [card.name for card in cards]
    for card, row in zip(cards, table.rows, strict=False):
        verdicts = [f.verdict for name in few if (f := best(Asked(name, card.id, "sft", "lora", 1)))]
        assert [cell.value for cell in row[2:5]] == [verdicts.count(v) for v in ("fits", "tight", "oom")]
    assert table.picture and "QLoRA, 16 GB: " in table.picture.words


def test_a_screen_shows_the_drawing_of_a_card_whole_from_the_smallest_model_to_the_largest() -> None:
    models = by_size(answers.catalog().models.values())
    drawn = [models[n] for n in glance._spaced(models)]
    sizes = [model.parameters for model in drawn]
    assert all(after >= glance.STEP * before for before, after in itertools.pairwise(sizes))
    assert all(any(size <= m.parameters < glance.STEP * size for size in sizes) for m in models)
    assert grid([Row("8 GPUs: GRPO, QLoRA", ["fits"] * len(drawn))], [model.name for model in drawn]).width < 1000


def test_a_heatmap_is_drawn_from_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [answers.catalog().model(name) for name in ("qwen2.5-0.5b", "llama-3-8b")]
    monkeypatch.setattr(heat, "by_size", lambda models: few)
    table = heat.matrix("sft", "lora", 1, "")
    picture = drawn.of(table)
    assert table.picture is None and picture
    marks = sum(len(re.findall("M", path)) for path in re.findall(r'class="mark \w+" d="([^"]+)"', picture.body))
    assert marks == sum(cell.values[0] is not None for row in table.rows for cell in row[1:])


def test_terms_of_a_step_follow_each_other_to_the_end_of_its_time() -> None:
    """What is hidden goes back: the sum below starts where the first does, and ends where the last one ends."""
    table = chart("terms")
    assert table.picture
    seconds = [row[1].value for row in table.rows]
    boxes = re.findall(r'<rect class="(time|hidden)" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', table.picture.body)
    at = [(style, float(x), float(width)) for style, x, width in boxes]
    ends = [x if style == "hidden" else x + width for style, x, width in at]
    starts = [x + width if style == "hidden" else x for style, x, width in at]
    assert [style == "hidden" for style, *_ in at] == [n < 0 for n in seconds]
    assert starts[1:-1] == pytest.approx(ends[:-2], abs=0.11)
    assert (starts[-1], ends[-1]) == pytest.approx((starts[0], ends[-2]), abs=0.11)


def test_bars_of_a_host_are_told_in_gb_against_its_node() -> None:
    table = chart("host")
    assert table.picture
    last = table.rows[0][-1].exact
    assert f"{last / 1e9:,.1f}" in table.picture.words
    assert table.picture.words.endswith("Limit: 400.0 GB")
