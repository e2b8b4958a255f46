"""What others read by a standard: the citation file, the data package, and every page's weight.

`cff-1.2.0.schema.json` is the schema of the Citation File Format 1.2.0, as the package cffconvert 2.0.0 has it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from urllib.parse import urlsplit

import fastjsonschema
import pytest
import yaml
from figures import of_each_kind, tables
from frictionless import Package
from sites import ROOT

from calc.site.build import checks
from calc.site.build.build import EXTERNAL

TRANSFERRED = 160_000  # bytes: a page with all that it loads at once
# asked for by the theme's script
SEARCH = ("assets/search.js", "search/search_index.json")  # its other files come with the first word


def test_citation_file_follows_its_schema() -> None:
    schema = json.loads((Path(__file__).parent / "cff-1.2.0.schema.json").read_text("utf-8"))
    check = fastjsonschema.compile(schema)
    cited = yaml.load((ROOT / "CITATION.cff").read_text("utf-8"), yaml.BaseLoader)  # dates and versions are text in it
    check(cited)
    assert cited["license"] == ["MIT", "CC-BY-4.0"]
    with pytest.raises(fastjsonschema.JsonSchemaException):
        check(cited | {"authors": []})


def test_every_table_follows_the_schema_that_the_data_package_gives_it(site: Path) -> None:
    package = Package(str(site / "data/datapackage.json"))
    assert package.licenses[0]["name"] == "CC-BY-4.0"
    found = {resource.name: resource for resource in package.resources if resource.format == "csv"}
    every = tables(site)
    assert found.keys() == every.keys()
    reports = {name: found[name].validate() for name in of_each_kind(every)}
    assert len(reports) > 40
    assert [(n, e.message) for n, report in reports.items() for task in report.tasks for e in task.errors] == []


def test_no_page_transfers_too_much(site: Path) -> None:
    weight: dict[Path, int] = {}

    def weighed(path: Path) -> int:
        if path not in weight:
            weight[path] = len(gzip.compress(path.read_bytes(), 6))
        return weight[path]

    always = sum(weighed(next(site.glob(name))) for name in SEARCH)
    for name, page in checks.read(site).items():
        if name == "404.html":
            continue
        here = site / name
        loads = {
            (here.parent / urlsplit(load).path).resolve()
            for load in page.loads
            if urlsplit(load).path and not load.startswith("data:")
        }
        total = always + weighed(here) + sum(weighed(path) for path in loads)
        assert total < TRANSFERRED, f"{name}: {total}"


def test_links_elsewhere_are_listed(site: Path) -> None:
    listed = json.loads((site / EXTERNAL).read_text("utf-8"))
    assert "reference/about.html" in listed["https://creativecommons.org/licenses/by/4.0/"]
    assert all(address.startswith("https://") for address in listed)
