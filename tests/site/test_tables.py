"""One table object, four renderings: none may say anything that the others do not."""

from __future__ import annotations

import csv
import io
import json
import re

from calc.site import charts, cite, tables
from calc.site.tables import Cell, Column, Table

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
            Cell(("oom", 3.25, "ZeRO-3"), scenario={"a": 1}),
        ),
        (Cell("B, with a comma"), Cell(None), Cell(), Cell((None, None, None))),
    ),
    "What it rests on.",
    versions={"catalog": "abc", "calc": "1"},
)


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
    assert data["cells"] == [{"row": 0, "column": "full", "bytes": None, "scenario": {"a": 1}}]
    assert (data["catalog_version"], data["calc_version"]) == ("abc", "1")


def test_markdown_is_a_table_of_what_is_shown() -> None:
    lines = tables.to_markdown(TABLE).splitlines()
    assert lines[0] == "| Model | Size (GiB) | Full (GiB) |"
    assert lines[2] == "| A <b> | 1,234.6 | oom 3.2 ZeRO-3 |"


def test_bar_widths_add_up_to_the_share_of_the_scale() -> None:
    html = charts.bar({"weights": 30, "logits": 50, "gradients": 0}, scale=100, limit=60)
    assert [float(w) for w in re.findall(r'<span class="c-\w+" style="width:([\d.]+)%', html)] == [30, 50]
    assert "left:60.00%" in html
    assert 'class="stack over"' in html
    assert 'class="stack"' in charts.bar({"weights": 30}, scale=100, limit=60)


def test_citation_names_table_versions_and_licence() -> None:
    line = cite.line(TABLE, "page.html#an-id")
    assert all(part in line for part in ("table an-id", "catalog abc", "calc 1", "page.html#an-id", "CC BY 4.0"))


def test_bibtex_closes_every_brace_and_escapes_what_tex_would_read() -> None:
    text = cite.bibtex(TABLE, "page.html#an-id")
    assert text.count("{") == text.count("}")
    assert r"\&" in text
    assert "{{" not in text
    assert re.findall(r"^  (\w+) = \".*\",$", text, re.M) == ["author", "title", "year", "howpublished", "note", "url"]
