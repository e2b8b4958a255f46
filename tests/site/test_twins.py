"""The files beside every published table hold what its JSON holds, which `test_numbers` holds against the page."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import bibtexparser
import ids
import openpyxl
import pytest
from figures import disagreement, tables
from pylatexenc.latex2text import LatexNodes2Text
from sites import NEW_GPU

from calc.catalog import Catalog, load
from calc.estimate import estimate, loading_moments
from calc.ledger import Line
from calc.scenario import parse
from calc.site import checks

LATEX = LatexNodes2Text(math_mode="text", strict_latex_spaces=True)


@pytest.fixture(scope="module")
def found(site: Path) -> dict[str, dict[str, Any]]:
    return tables(site)


def markdown_rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of a Markdown table, after its header."""
    for line in [line for line in text.splitlines() if line.startswith("| ")][2:]:
        cells = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
        yield [" ".join(re.sub(r"\\(.)", r"\1", cell).split()) for cell in cells]


@cache
def said(latex: str) -> str:
    return " ".join(LATEX.latex_to_text(latex).replace("“", '"').replace("”", '"').split())


def latex_rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of a LaTeX table, after its header."""
    body = text.partition("\\midrule\n")[2].partition("    \\bottomrule")[0]
    for line in body.splitlines():
        assert line.endswith(" \\\\")
        yield [said(cell) for cell in re.split(r"(?<!\\) & ", line.strip().removesuffix(" \\\\"))]


@pytest.mark.parametrize(("end", "rows"), [("md", markdown_rows), ("tex", latex_rows)])
def test_markdown_and_latex_say_what_the_json_holds(
    site: Path, found: dict[str, dict[str, Any]], end: str, rows: Any
) -> None:
    for table_id, data in found.items():
        text = (site / f"data/tables/{table_id}.{end}").read_text("utf-8")
        for cells, row in zip(rows(text), data["rows"], strict=True):
            # a quotation has its own marks on the page, and quotes within text are marks in LaTeX
            assert not disagreement(cells, row), (table_id, disagreement(cells, row))


def test_workbooks_hold_what_the_json_holds(site: Path, found: dict[str, dict[str, Any]]) -> None:
    for table_id, data in found.items():
        book = openpyxl.load_workbook(site / f"data/tables/{table_id}.xlsx", read_only=True)
        head, *rows = book["Table"].iter_rows(values_only=True)
        names = [f["name"] + (f" ({f['unit']})" if "unit" in f else "") for f in data["fields"]]
        assert list(head) == names, table_id
        assert rows == [tuple(None if v == "" else v for v in row.values()) for row in data["rows"]], table_id


def test_every_table_can_be_cited(site: Path, found: dict[str, dict[str, Any]]) -> None:
    entries = set()
    for page in site.rglob("*.html"):
        parsed = checks.Page(html := page.read_text("utf-8"))
        for text in re.findall(r'aria-label="BibTeX">(.*?)</pre>', html):
            library = bibtexparser.parse_string(re.sub("&#10;", "\n", text))
            assert not library.failed_blocks, text
            (entry,) = library.entries
            entries.add(entry.key.removeprefix("headroom-"))
            place, _, anchor = entry["url"].partition("#")
            assert site / place == page
            assert anchor in parsed.ids
    assert entries == set(found)


def test_the_lines_behind_each_cell_add_up_to_it(found: dict[str, dict[str, Any]]) -> None:
    worked = 0
    for table_id, data in found.items():
        for cell in data["cells"]:
            if "lines" in cell:
                worked += 1
                assert sum(data["lines"][i]["bytes"] for i in cell["lines"]) == cell["bytes"], (table_id, cell)
    assert worked > 40_000


def moments(catalog: Catalog, given: dict[str, Any]) -> set[tuple[str, str, int, str]]:
    """Every line that an estimate has, on the GPU, on the host, and while roles load."""
    scenario = parse(given, catalog=catalog)
    answer = estimate(scenario, catalog)
    phases = [p for g in answer.groups for p in g.phases] + list(answer.host_phases)
    lines = [x for p in phases for x in p.moment.lines]
    lines += [x for _, m in loading_moments(scenario, catalog) for x in m.lines]
    return {_brief(line) for line in lines}


def _brief(line: Line) -> tuple[str, str, int, str]:
    return line.component, line.role, line.bytes, line.formula


def test_the_lines_behind_a_cell_are_those_of_its_scenario(project: Path, found: dict[str, dict[str, Any]]) -> None:
    catalog, pick = load(project), random.Random(11)
    for table_id, data in found.items():
        # a difference has lines of two scenarios, and a table of roles those of no one moment
        cells = [c for c in data["cells"] if c.get("lines") and c["column"] not in ("difference", "weights", "states")]
        for cell in pick.sample(cells, min(2, len(cells))):
            lines = [data["lines"][i] for i in cell["lines"]]
            expected = moments(catalog, cell["scenario"])
            assert {(x["component"], x["role"], x["bytes"], x["formula"]) for x in lines} <= expected, (table_id, cell)


def test_a_pages_tables_are_data_sets_for_search_engines(site: Path, found: dict[str, dict[str, Any]]) -> None:
    named = []
    for page in site.rglob("*.html"):
        html = page.read_text("utf-8")
        scripts = re.findall(r'<script type="application/ld\+json">(.*?)</script>', html)
        assert len(scripts) == ('<figure class="computed"' in html), page
        for script in scripts:
            data = json.loads(script)
            authors, *sets = data["@graph"]
            assert len(script) < 1500 * len(sets)
            for one in sets:
                table = found[one["identifier"]]
                named.append(one["identifier"])
                assert one["name"] == table["caption"]
                assert len(one["description"]) > 50
                assert one["creator"]["@id"] == authors["@id"]
                assert f"catalog {table['catalog_version']}" in one["version"]
                for file in one["distribution"]:
                    assert (page.parent / file["contentUrl"]).is_file()
    assert sorted(named) == sorted(found)


def test_no_table_id_is_lost_and_a_new_one_is_listed(site: Path) -> None:
    here = {name for name in ids.published(site) if NEW_GPU not in name}
    lost, new = sorted(ids.known() - here), sorted(here - ids.known())
    assert not lost, f"ids that were published and are gone, though one never changes: {', '.join(lost)}"
    assert not new, f"ids that tests/site/ids.txt does not list yet, which `make ids` adds: {', '.join(new)}"
