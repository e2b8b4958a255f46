"""One table object, several renderings: none may say anything that the others do not."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html import unescape
from zipfile import ZipFile

import bibtexparser
import openpyxl
import pytest

from calc.answers.workings import Working
from calc.base.ledger import Line
from calc.catalog.catalog import load
from calc.site.formats import cite, datasets, typeset, workbook
from calc.site.macros import menus
from calc.site.macros.bound import View
from calc.site.macros.macros import Macros
from calc.site.tables import charts, tables
from calc.site.tables.tables import Cell, Column, Table
from calc.site.views.catalog import reference, sheets

GIVEN = {"model": "llama-3-8b", "task": "sft", "gpu": "rtx4090"}
WEIGHTS = Line("weights", "actor", 2, "b·P", {"b": 2, "P": 1, "N": 8}, "weights#replicated")
CONTEXT = Line("context", "process", 1, "C", {"C": 1}, "runtime#context", allocated=False)
WORKING = Working("step: update", (WEIGHTS, CONTEXT, WEIGHTS))

TABLE = Table(
    "an-id",
    'Caption with <tags> & "quotes"',
    (
        Column("model", "Model"),
        Column("size", "Size", "GiB", "number", 1),
        Column("picture", "Picture", kind="bar"),
        Column("full", "Full", "GiB", "verdict", 1),
    ),
    (
        (
            Cell("A <b>"),
            Cell(1234.56, exact=1),
            Cell(html="<span></span>"),
            Cell(("oom", 3.25, "ZeRO-3"), exact=5, scenario=GIVEN, working=WORKING),
        ),
        (Cell("B, with a comma"), Cell(None), Cell(), Cell((None, None, None))),
    ),
    "What it rests on.",
    versions={"catalog": "abc", "calc": "1"},
)


def test_a_models_page_says_what_its_count_leaves_out() -> None:
    """GLM-OCR's layer of multi-token prediction is in the checkpoint, and not in the count."""
    said = unescape(reference.model_summary(load().models["glm-ocr"]))
    assert "exactly the published count" in said
    left_out = "less the layer of multi-token prediction, 217,852,416, which Transformers does not load."
    mamba = reference.model_summary(load().models["mamba-130m"])
    assert "24 layers of width 768, none of which attends, and a vocabulary of 50,280" in mamba
    assert f"Source of the count: total of the safetensors on the model's hub page, 1,325,258,240, {left_out}" in said


def test_html_escapes_text_and_keeps_to_one_line() -> None:
    html = tables.to_html(TABLE)
    assert "\n" not in html
    assert "A &lt;b&gt;" in html
    assert "&lt;tags&gt; &amp;" in html
    assert '<figure class="computed" id="an-id"' in html


def test_html_names_verdict_in_words_and_marks_what_is_not_published() -> None:
    html = tables.to_html(TABLE)
    assert "<b>out of memory</b> <span>3.2</span> <small>ZeRO-3</small>" in html
    assert 'class="empty">not published' in html
    assert "cannot run" in html
    assert '<span class="unit">(GiB)</span>' in html


def test_csv_has_units_in_its_header_and_leaves_the_unpublished_empty() -> None:
    rows = list(csv.reader(io.StringIO(tables.to_csv(TABLE))))
    assert rows[0] == ["model", "size (GiB)", "full_verdict", "full_peak (GiB)", "full_with"]
    assert rows[1] == ["A <b>", "1234.6", "oom", "3.2", "ZeRO-3"]
    assert rows[2] == ["B, with a comma", "", "", "", ""]


def test_json_repeats_the_csv_and_adds_bytes_and_scenario() -> None:
    data = json.loads(tables.to_json(TABLE))
    assert data["rows"][0] == {
        "model": "A <b>",
        "size": 1234.6,
        "full_verdict": "oom",
        "full_peak": 3.2,
        "full_with": "ZeRO-3",
    }
    (cell,) = data["cells"]
    assert cell == {
        "row": 0, "column": "full", "bytes": 5, "scenario": {}, "at": "step: update", "lines": [0, 1, 0],
    }  # fmt: skip
    assert data["scenario"] == GIVEN
    assert (data["catalog_version"], data["calc_version"]) == ("abc", "1")


def test_json_holds_once_what_the_scenarios_of_all_cells_share() -> None:
    row = TABLE.rows[0]
    others = tuple(c._replace(scenario={**GIVEN, "gpu": "l4"}) if c.scenario else c for c in row)
    data = json.loads(tables.to_json(replace(TABLE, rows=(row, others))))
    assert data["scenario"] == {"model": "llama-3-8b", "task": "sft"}
    assert [cell["scenario"] for cell in data["cells"]] == [{"gpu": "rtx4090"}, {"gpu": "l4"}]


def test_json_holds_a_line_once_with_the_values_that_its_formula_uses_and_its_name() -> None:
    data = json.loads(tables.to_json(TABLE))
    assert [line["values"] for line in data["lines"]] == [{"b": 2, "P": 1}, {"C": 1}]
    assert [line.get("allocated", True) for line in data["lines"]] == [True, False]
    assert data["components"] == {"weights": "weights", "context": "CUDA context"}
    assert [c["key"] for c in data["columns"]] == ["model", "size", "full"]


def test_markdown_is_a_table_of_what_is_shown() -> None:
    lines = typeset.to_markdown(TABLE, "who_wrote it").splitlines()
    assert lines[0] == r'**Caption with \<tags\> & "quotes"**'
    assert lines[2] == "| Model | Size (GiB) | Full (GiB) |"
    assert lines[3] == "| --- | ---: | --- |"
    assert lines[4] == r"| A \<b\> | 1,234.6 | out of memory 3.2 ZeRO-3 |"
    assert lines[5] == "| B, with a comma | not published | cannot run |"
    assert lines[-1] == r"Source: who\_wrote it"


def test_what_a_card_does_not_have_is_none_in_words_and_zero_in_data() -> None:
    """Apart from what is not published."""
    by_id = {row[0].value: row for row in sheets.gpus("").rows}
    table = replace(sheets.gpus(""), rows=(by_id["A40"], by_id["Ascend 910B 64GB"]))
    columns = [column.key for column in table.columns]
    fp8, nvlink = columns.index("fp8_tflops"), columns.index("nvlink_gbs")
    assert [line.split(" | ")[fp8] for line in typeset.to_markdown(table, "").splitlines()[4:6]] == ["none", "none"]
    assert typeset.to_markdown(table, "").splitlines()[5].split(" | ")[nvlink] == "not published"
    assert [row["fp8_tflops"] for row in json.loads(tables.to_json(table))["rows"]] == [0, 0]
    assert tables.to_html(table).count('<td class="number">none</td>') == 2
    assert "none" in [row[1].value for row in sheets.gpu(load().gpus["a40"]).rows]


def test_latex_is_a_booktabs_table_of_what_is_shown() -> None:
    lines = [line.strip() for line in typeset.to_latex(TABLE, "50 % of [it]").splitlines()]
    assert r"\begin{tabular}{lrl}" in lines
    assert r"Model & Size (GiB) & Full (GiB) \\" in lines
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    assert body[0].endswith(r" & 1,234.6 & out of memory 3.2 ZeRO-3 \\")
    assert r"\label{tab:an-id}" in lines
    assert lines[-2].endswith(r"What it rests on. Source: 50 \% of [it]")


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("P_4 · 2 & 5 %", r"P\_4 \textperiodcentered{} 2 \& 5 \%"),
        ("a → b ≤ c", r"a \textrightarrow{} b \ensuremath{\leq} c"),
        ("--flag", "-{}-flag"),  # two are a dash
        ("[0, 1]", "{[}0, 1]"),  # behind a row's end it would be a length
        ('the "new" one', "the ``new'' one"),  # in BibTeX it would end the field
    ],
)
def test_what_latex_would_read_is_escaped(text: str, latex: str) -> None:
    assert typeset.tex(text) == latex


def test_a_workbook_has_numbers_as_numbers_the_same_bytes_each_time_and_says_what_it_is() -> None:
    made = workbook.to_xlsx(TABLE, "source")
    assert made == workbook.to_xlsx(TABLE, "source")
    assert {entry.date_time[0] for entry in ZipFile(io.BytesIO(made)).infolist()} == {1980}
    book = openpyxl.load_workbook(io.BytesIO(made))
    assert list(book["Table"].iter_rows(values_only=True)) == [
        ("model", "size (GiB)", "full_verdict", "full_peak (GiB)", "full_with"),
        ("A <b>", 1234.6, "oom", 3.2, "ZeRO-3"),
        ("B, with a comma", None, None, None, None),
    ]
    assert dict(book["About"].iter_rows(values_only=True))["Rests on"] == "What it rests on."


def test_bar_widths_add_up_to_the_share_of_the_scale() -> None:
    html = charts.bar(charts.Bar({"weights": 30, "logits": 50, "gradients": 0}, scale=100, limit=60))
    assert re.findall(r'<span class="c-\w+ ([^"]+)"', html) == ["p300", "p500"]
    assert '<i class="p600">' in html
    thirds = charts.bar(charts.Bar({"weights": 1, "logits": 1, "context": 1}, scale=3, limit=3))
    assert re.findall(r'<span class="c-\w+ ([^"]+)"', thirds) == ["p300 p30 p3", "p300 p30 p4", "p300 p30 p3"]
    assert "style" not in html + thirds
    assert 'class="stack over"' in html
    below = charts.bar(charts.Bar({"weights": 30}, scale=100, limit=60))
    assert 'class="stack"' in below
    assert '<em class="p600">' in below and '<em class="p800">' in html  # right of the limit, and of the bar


def test_a_column_behind_is_marked_in_every_row_and_the_table_has_a_switch() -> None:
    model, size, *others = TABLE.columns
    html = tables.to_html(replace(TABLE, columns=(model, replace(size, behind=True), *others)))
    assert '<th scope="col" class="number behind">Size' in html
    assert '<td class="behind number">1,234.6</td>' in html and '<td class="behind empty">' in html
    assert html.count('<input type="checkbox"') == 1 and html.index("checkbox") < html.index("<table")
    assert "checkbox" not in tables.to_html(TABLE)


def test_citation_names_table_versions_and_licence() -> None:
    line = cite.line(TABLE, "page.html#an-id")
    assert line.startswith("The Headroom authors. (2026). Caption with <tags>")
    assert all(part in line for part in ("table an-id", "catalog abc", "calc 1", "[Data set]", "CC BY 4.0"))
    assert line.endswith(" page.html#an-id")


def test_bibtex_parses_and_escapes_what_tex_would_read() -> None:
    text = cite.bibtex(TABLE, "page.html#an-id")
    parsed = bibtexparser.parse_string(text)
    assert not parsed.failed_blocks
    (entry,) = parsed.entries
    fields = {name: field.value for name, field in entry.fields_dict.items()}
    assert (entry.entry_type, entry.key) == ("misc", "headroom-an-id")
    assert fields["title"] == r"{Caption with \ensuremath{<}tags\ensuremath{>} \& ``quotes''}"
    assert fields["url"] == "page.html#an-id"
    assert fields["version"] == "catalog abc, calc 1"
    assert "{{" not in text  # a page's check takes that for template code


@pytest.mark.parametrize(
    ("url", "version", "address"),
    [
        ("", "", "gpus/x.html#an-id"),
        ("", "0.3", "gpus/x.html#an-id"),
        ("https://guide.example/", "", "https://guide.example/gpus/x.html#an-id"),
        ("https://guide.example", "0.3", "https://guide.example/0.3/gpus/x.html#an-id"),
    ],
)
def test_a_permalink_names_the_version(monkeypatch: pytest.MonkeyPatch, url: str, version: str, address: str) -> None:
    monkeypatch.setenv("HEADROOM_SITE_URL", url)
    monkeypatch.setenv("HEADROOM_VERSION", version)
    assert cite.permalink(TABLE, "gpus/x.html") == address
    assert ("guide 0.3, " in cite.line(TABLE, address)) is bool(version)
    footer = menus.footer(TABLE, "gpus/x.html", "../")
    assert f'<a href="{address if url else "#an-id"}">' in footer
    assert datasets.described(TABLE, "gpus/x.html", "../")["url"] == (address if url else "#an-id")
    assert (' data-address="gpus/x.html#an-id"' in footer) is not bool(url)  # which a script makes whole


@pytest.mark.parametrize("address", ["", "https://code.example/headroom"])
def test_the_code_is_where_the_build_was_told(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HEADROOM_REPOSITORY_URL", address)
    block = Macros(lambda: View("x.md", "x.html", {})).clone()
    assert f"git clone {address or 'ADDRESS'} headroom" in block
    assert ("ADDRESS" in block) is not bool(address)


def test_a_menu_links_each_file_and_says_where_there_is_a_working() -> None:
    footer = menus.footer(TABLE, "gpus/x.html", "../")
    assert re.findall(r'href="\.\./data/tables/an-id\.(\w+)" download', footer) == ["csv", "json", "xlsx", "md", "tex"]
    assert " data-worked>" in footer
    bare = Table("bare", "Bare", TABLE.columns, TABLE.rows[1:], versions=TABLE.versions)
    assert " data-worked>" not in menus.footer(bare, "gpus/x.html", "../")


def test_a_folded_table_takes_what_it_rests_on_with_it_and_keeps_its_caption_in_sight() -> None:
    html = tables.to_html(replace(TABLE, folded="All of it", assumptions="Said of it."))
    shown, inside = html.split("<details")
    assert TABLE.id in shown and "<figcaption" in shown
    assert "Said of it." in inside and "<table" in inside
    assert "Said of it." not in shown
