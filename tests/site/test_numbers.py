"""Every published number is what `calc` says: on the page, in the CSV, in the JSON."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import pytest
from figures import Figures, disagreement, table_of, tables
from sites import ROOT

from calc.base.units import GB, GiB
from calc.catalog.catalog import Catalog, load
from calc.estimate.estimate import estimate, host_verdict
from calc.estimate.verdict import VERDICTS
from calc.resolve.parse import parse
from calc.site.views.accuracy import scatter

CUT = {"accuracy-records": scatter.FURTHEST}  # rows that the page shows of a table whose files have more


@pytest.fixture(scope="session")
def catalog(project: Path) -> Catalog:
    return load(project)


def test_csv_equals_json_in_every_table(site: Path) -> None:
    found = tables(site)
    assert len(found) > 3 * len(list((ROOT / "hardware/gpus").glob("*.yaml")))
    for table_id, data in found.items():
        with (site / f"data/tables/{table_id}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        names = [f["name"] + (f" ({f['unit']})" if "unit" in f else "") for f in data["fields"]]
        assert rows[0] == names, table_id
        assert len(rows) == 1 + len(data["rows"])
        for line, row in zip(rows[1:], data["rows"], strict=True):
            for text, value in zip(line, row.values(), strict=True):
                same = (
                    float(text) == value if isinstance(value, int | float) else text == ("" if value is None else value)
                )
                assert same, (table_id, text, value)


def test_the_page_shows_what_the_json_holds_in_every_table(site: Path) -> None:
    on_pages: dict[str, list[list[str]]] = {}
    for page in site.rglob("*.html"):
        if "zh" in page.relative_to(site).parts:
            continue  # the same tables, in Chinese words
        on_pages |= Figures(page.read_text("utf-8")).found
    found = tables(site)
    assert on_pages.keys() == found.keys()
    for table_id, data in found.items():
        for cells, row in zip(on_pages[table_id][1:], data["rows"][: CUT.get(table_id)], strict=True):
            assert not disagreement(cells, row), (table_id, disagreement(cells, row))


def cells_with_scenario(site: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(data, cell) for data in tables(site).values() for cell in data["cells"]]


def test_look_up_cells_are_what_calc_answers_to_their_scenario(site: Path, catalog: Catalog) -> None:
    looked_up = [(d, c) for d, c in cells_with_scenario(site) if f"{c['column']}_verdict" in d["rows"][c["row"]]]
    assert len(looked_up) > 10_000
    for data, cell in random.Random(7).sample(looked_up, 300):
        answer = estimate(parse(cell["scenario"], catalog=catalog), catalog)
        needed = max(p.moment.device_bytes for g in answer.groups for p in g.phases)
        row = data["rows"][cell["row"]]
        assert cell["bytes"] == needed
        assert row[f"{cell['column']}_verdict"] == max(answer.verdict, host_verdict(answer), key=VERDICTS.index)
        assert row[f"{cell['column']}_peak"] == round(needed / GiB, 1)


def test_case_study_tables_are_what_calc_answers(site: Path, catalog: Catalog) -> None:
    compared = table_of(site, "rm-6x4090")
    for cell in compared["cells"]:
        if cell["column"] not in ("total", "allocated", "usable"):
            continue
        (group,) = estimate(parse(cell["scenario"], catalog=catalog), catalog).groups
        moment = group.peak.moment
        expected = {"total": moment.device_bytes, "allocated": moment.allocated_bytes, "usable": group.usable_bytes}
        assert cell["bytes"] == expected[cell["column"]]
        assert compared["rows"][cell["row"]][cell["column"]] == round(cell["bytes"] / GiB, 2)
    lines = table_of(site, "rm-6x4090-zero2-4096-lines")
    total = sum(c["bytes"] for c in lines["cells"])
    job = next(
        c for c in compared["cells"] if c["scenario"] == lines["cells"][0]["scenario"] and c["column"] == "total"
    )
    assert total == job["bytes"]


def test_components_of_each_phase_add_up_to_its_total(site: Path) -> None:
    for table_id in ("rm-6x4090-zero3-8192", "rm-6x4090-zero2-4096", "phases-together"):
        data = table_of(site, table_id)
        for row in range(len(data["rows"])):
            held = {c["column"]: c["bytes"] for c in data["cells"] if c["row"] == row}
            parts = sum(n for column, n in held.items() if column not in ("total", "allocated"))
            assert parts == held["total"]


def test_a_group_on_gpus_of_its_own_has_its_verdict_and_its_moments(site: Path, catalog: Catalog) -> None:
    data = table_of(site, "scenario-apart")
    scenario = data["cells"][0]["scenario"]
    groups = estimate(parse(scenario, catalog=catalog), catalog).groups
    expected = [
        (f"{g.name}: {p.name}", g.gpus, g.verdict, round(p.moment.device_bytes / GiB, 2))
        for g in groups
        for p in g.phases
    ]
    assert len(groups) == 5
    assert [(r["phase"], r["gpus"], r["verdict"], r["total"]) for r in data["rows"]] == expected


def test_host_memory_of_a_70b_model_needs_its_moments_only_after_the_first_step(site: Path) -> None:
    before, after = (table_of(site, "host-70b")["rows"][0][f"{t} the first step"] for t in ("before", "after"))
    # 8 bytes of Adam's moments for each of 68,976,648,192 parameters
    assert after - before == round(8 * 68_976_648_192 / GB)


def test_saved_bytes_of_a_layer(site: Path) -> None:
    rows = {r["model"]: r for r in table_of(site, "saved-per-layer")["rows"]}
    assert rows["Llama 3 8B"]["bytes"] == 200_840
    assert rows["Llama 3 8B"]["lora"] == 185_352
    assert rows["Qwen2.5 7B"]["bytes"] == 225_400
    assert rows["Llama 2 7B"]["bytes"] == 186_504
    assert table_of(site, "operations-llama-3-8b")["rows"][-1]["bytes"] == 200_840
