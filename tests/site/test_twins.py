"""The files beside every published table hold what its JSON holds, which `test_numbers` holds against the page."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bibtexparser
import openpyxl
import pytest
from figures import disagreement, of_each_kind, tables
from pylatexenc.latex2text import LatexNodes2Text

from calc.base.ledger import Moment
from calc.catalog.catalog import Catalog, load
from calc.estimate.estimate import course, estimate, loading_moments
from calc.estimate.wording import spoken
from calc.resolve.parse import parse

BRIEF = ("component", "role", "bytes", "formula")
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
    text = LATEX.latex_to_text(latex)
    # as pylatexenc reads \textperiodcentered, which is no dot above, and \textasciicircum
    for read, meant in (("“", '"'), ("”", '"'), ("˙", "·"), ("ˆ", "^")):
        text = text.replace(read, meant)
    return " ".join(text.split())


def latex_rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of a LaTeX table, after its header."""
    body = text.partition("\\midrule\n")[2].partition("    \\bottomrule")[0]
    for line in body.splitlines():
        assert line.endswith(" \\\\")
        yield [said(cell) for cell in re.split(r"(?<!\\) & ", line.strip().removesuffix(" \\\\"))]


def test_every_chart_is_a_figure_with_words_and_with_files_of_it(site: Path) -> None:
    charts = 0
    for page in site.rglob("*.html"):
        for figure, html in re.findall(r'<figure class="computed" id="([^"]+)"(.*?)</figure>', page.read_text("utf-8")):
            drawing = site / f"data/tables/{figure}.svg"
            drawn = re.search(r'<svg class="drawing" [^>]*aria-label="([^"]*)"', html)
            assert drawing.exists() or not drawn
            if drawing.exists():
                charts += 1
                root = ElementTree.parse(drawing).getroot()
                words = root.findtext("{http://www.w3.org/2000/svg}desc") or ""
                translated = "zh" in page.relative_to(site).parts  # a file is in English
                assert re.search(r"\d", words) and (not drawn or translated or unescape(drawn[1]) == words), figure
                assert f'<figcaption id="{figure}-caption">' in html
                assert all(f'{figure}.{kind}" download' in html for kind in ("svg", "png")), figure
                assert drawing.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert charts


@pytest.mark.parametrize(("end", "rows"), [("md", markdown_rows), ("tex", latex_rows)])
def test_markdown_and_latex_say_what_the_json_holds(
    site: Path, found: dict[str, dict[str, Any]], end: str, rows: Any
) -> None:
    for table_id, data in of_each_kind(found).items():
        text = (site / f"data/tables/{table_id}.{end}").read_text("utf-8")
        for cells, row in zip(rows(text), data["rows"], strict=True):
            assert not disagreement(cells, row), (table_id, disagreement(cells, row))


def test_workbooks_hold_what_the_json_holds(site: Path, found: dict[str, dict[str, Any]]) -> None:
    for table_id, data in of_each_kind(found).items():
        book = openpyxl.load_workbook(site / f"data/tables/{table_id}.xlsx", read_only=True)
        head, *rows = book["Table"].iter_rows(values_only=True)
        names = [f["name"] + (f" ({f['unit']})" if "unit" in f else "") for f in data["fields"]]
        assert list(head) == names, table_id
        assert rows == [tuple(None if v == "" else v for v in row.values()) for row in data["rows"]], table_id


def test_every_table_can_be_cited(site: Path, found: dict[str, dict[str, Any]]) -> None:
    entries = set()
    for page in site.rglob("*.html"):
        html = page.read_text("utf-8")
        for text in re.findall(r'aria-label="BibTeX">(.*?)</pre>', html):
            library = bibtexparser.parse_string(unescape(text))
            assert not library.failed_blocks, text
            (entry,) = library.entries
            entries.add(entry.key.removeprefix("headroom-"))
            place, _, anchor = entry["url"].partition("#")
            assert site / place == page
            assert f' id="{anchor}"' in html
    assert entries == set(found)


def test_the_lines_behind_each_cell_add_up_to_it(found: dict[str, dict[str, Any]]) -> None:
    worked = 0
    for table_id, data in found.items():
        for cell in data["cells"]:
            if "lines" in cell:
                worked += 1
                assert sum(data["lines"][i]["bytes"] for i in cell["lines"]) == cell["bytes"], (table_id, cell)
    assert worked > 20_000


def moments(catalog: Catalog, given: dict[str, Any], first: str) -> Iterator[Moment]:
    """The moments that a table's rows can be of, by its `first` column: of loading, of a whole step, or its peaks."""
    scenario = parse(given, catalog=catalog)
    if first == "moment":
        yield from (moment for _, moment in loading_moments(scenario, catalog))
    elif first == "number":
        yield from (phase.moment for _, phases in course(scenario, catalog) for phase in phases)
    else:
        answer = estimate(scenario, catalog)
        yield from (p.moment for p in [*(p for g in answer.groups for p in g.phases), *answer.host_phases])


def test_the_lines_behind_a_cell_are_those_of_its_scenario(project: Path, found: dict[str, dict[str, Any]]) -> None:
    catalog, pick = load(project), random.Random(11)
    chosen = []
    for data in found.values():
        # a difference has lines of two scenarios, and a table of roles those of no one moment
        cells = [c for c in data["cells"] if c.get("lines") and c["column"] not in ("weights", "states")]
        cells = [c for c in cells if "; against " not in c["at"]]
        chosen += [(cell, data) for cell in pick.sample(cells, min(1, len(cells)))]
    # a model at a time, because what is compiled of one serves all its scenarios
    for cell, data in sorted(chosen, key=lambda c: str(c[0]["scenario"]["model"])):
        lines = {tuple(data["lines"][i][name] for name in BRIEF) for i in cell["lines"]}
        there = moments(catalog, cell["scenario"], data["columns"][0]["key"])
        found_at = [m.name for m in there if lines <= {tuple(getattr(x, n) for n in BRIEF) for x in m.lines}]
        assert any(cell["at"].split(", as ")[0].endswith(spoken(name)) for name in found_at), (data["id"], cell["at"])


def test_a_pages_tables_are_data_sets_for_search_engines(site: Path, found: dict[str, dict[str, Any]]) -> None:
    named = []
    for page in site.rglob("*.html"):
        if "zh" in page.parts:
            continue  # a translation shows the tables of its original
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
