"""GPUs whose pages are a sheet of figures: no table compares them, and whoever asks is answered."""

from __future__ import annotations

import pytest

from calc.answers import answers, fits, topics
from calc.recommend.machines import machines
from calc.site.build import pages
from calc.site.calculator import picker
from calc.site.tables.tables import Cell
from calc.site.views.fit import glance, heat


def test_no_table_asks_of_a_card_that_has_a_sheet_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat, "heated", lambda asked, gpu: Cell(""))
    catalog, sheets = answers.catalog(), {*topics.sizes()["sheets"]}
    assert sheets < catalog.gpus.keys()
    tabled = catalog.gpus.keys() - sheets
    assert {card.id for card in topics.tabled(catalog)} == tabled
    assert {cell.gpu for cell in fits._cells("qwen2.5-0.5b")} == tabled
    assert {cell.gpu for topic in topics.topics(catalog) for cell in topic.cells} <= tabled
    assert {card.id for _, card in glance.sizes()} <= tabled
    columns = {column.key for column in heat.matrix("sft", "full", 1, "").columns[1:]}
    assert columns == {card.replace("-", "_") for card in tabled}


def test_a_sheet_has_figures_and_says_where_to_ask() -> None:
    card, tabled = (answers.catalog().gpu(name) for name in ("h100-nvl", "h100-sxm"))
    sheet, whole = pages.gpu(card), pages.gpu(tabled)
    for macro in ("fits_table", "advice_table", "gpu_glance", "gpu_summary", "counts_curve", "count_choice"):
        assert f"[[ {macro}(" in whole
        assert f"[[ {macro}(" not in sheet
    for macro in ("gpu_memory", "gpu_table", "gpu_links", "nodes_table"):
        assert f'[[ {macro}("h100-nvl") ]]' in sheet
    assert "index.md?gpu=h100-nvl#calculator" in sheet
    assert "train in fp16" in pages.gpu(answers.catalog().gpu("p100"))


def test_whoever_asks_is_answered_of_every_card() -> None:
    catalog, sheets, chosen = answers.catalog(), topics.sizes()["sheets"], picker.gpu_choices()
    recommended = {machine.gpu.id for machine in machines(catalog)}
    for name in sheets:
        assert chosen[name] == catalog.gpu(name).name
        assert name in recommended or catalog.gpu(name).lacks_bf16
