"""The data beside the pages: each table in several formats, the catalog, and a data package of it all."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from calc.answers import answers, published
from calc.answers.processes import Pool
from calc.base.project import ROOT
from calc.site.formats import cite, drawing, typeset, workbook
from calc.site.formats.published import kinds
from calc.site.macros.bound import Record
from calc.site.tables import drawn, tables
from calc.site.tables.tables import Table

FOLDER = ROOT / "build" / "data"  # of the last build


class Tables:
    """The files of tables under `root`, written in other processes while further pages are being rendered."""

    def __init__(self, root: Path) -> None:
        """Starts the processes; nothing is written yet."""
        self._root = root
        self._pool = Pool()  # on every core: it takes longer to write tables than to render their pages
        self._written: list[Future[list[dict[str, Any]]]] = []

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(self, tables: Sequence[tuple[Table, str]]) -> None:
        """Writes the files of these tables, each with its page, in the background; `finish` waits for them."""
        if tables:
            self._written.append(self._pool.submit(_write, self._root, tables))

    def finish(self, record: Record) -> None:
        """Waits for all tables, writes the files about all pages, and removes every other file."""
        described = [resource for written in self._written for resource in written.result()]
        whole = about(record, sorted(described, key=lambda r: str(r["name"])))
        add(self._root, whole)
        wanted = {*whole, *(f"tables/{t.id}.{kind}" for t, _ in record.tables.values() for kind in kinds(t))}
        prune(self._root, wanted)


def _write(root: Path, tables: Sequence[tuple[Table, str]]) -> list[dict[str, Any]]:
    described = []
    for table, page in tables:
        made = twins(table, page)
        add(root, {f"tables/{table.id}.{kind}": content for kind, content in made.items()})
        described.append(_described(table, page, made["csv"]))
    return described


def about(record: Record, described: Sequence[dict[str, Any]]) -> dict[str, str | bytes]:
    """The files under data/ that belong to no single table: the catalog, the numbers in sentences, the data package."""
    everything = published.as_json(published.catalog())
    package = {
        "$schema": "https://datapackage.org/profiles/2.0/datapackage.json",
        "name": "headroom",
        "title": "Headroom: every published table",
        "version": answers.versions()["catalog"],
        "calc_version": answers.versions()["calc"],
        "contributors": [{"title": cite.AUTHORS}],
        "licenses": [{"name": "CC-BY-4.0", "path": "https://creativecommons.org/licenses/by/4.0/"}],
        "resources": [_resource("catalog", "catalog.json", everything, "json"), *described],
    }
    return {
        "catalog.json": everything,
        "spoken.json": published.as_json([s._asdict() for s in record.spoken]),
        "datapackage.json": published.as_json(package),
    }


def twins(table: Table, page: str) -> dict[str, str | bytes]:
    """A table's files, with the same values as on the page, by extension."""
    address = cite.permalink(table, page)
    source = cite.line(table, address)
    picture = drawn.of(table)
    svg = drawing.to_svg(table, picture, address) if picture else ""
    return {
        "csv": tables.to_csv(table),
        "json": tables.to_json(table),
        "md": typeset.to_markdown(table, source),
        "tex": typeset.to_latex(table, source),
        "xlsx": workbook.to_xlsx(table, source),
        **({"svg": svg, "png": drawing.to_png(svg)} if svg else {}),
    }


def _described(table: Table, page: str, content: str | bytes) -> dict[str, Any]:
    """A table's resource: the CSV with its schema. The standard has one file per resource; others are `alternates`."""
    fields = [
        {"name": tables.field_name(name, unit), "type": kind} | ({"unit": unit} if unit else {})
        for name, kind, unit in table.fields
    ]
    return _resource(
        table.id,
        f"tables/{table.id}.csv",
        content,
        "csv",
        type="table",
        title=table.caption,
        **({"description": table.assumptions} if table.assumptions else {}),
        homepage=f"{page}#{table.id}",
        schema={"fields": fields, "missingValues": [""]},
        alternates=[f"tables/{table.id}.{kind}" for kind in kinds(table) if kind != "csv"],
    )


def _resource(name: str, path: str, content: str | bytes, kind: str, **more: Any) -> dict[str, Any]:
    raw = _raw(content)
    return {
        "name": name,
        "path": path,
        "format": kind,
        "encoding": "utf-8",
        "bytes": len(raw),
        "hash": "sha256:" + hashlib.sha256(raw).hexdigest(),
        **more,
    }


def _raw(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def add(root: Path, wanted: Mapping[str, str | bytes]) -> None:
    """Writes the `wanted` files under `root`; files that are already right are left alone."""
    for path, content in wanted.items():
        target, raw = root / path, _raw(content)
        if not target.is_file() or target.read_bytes() != raw:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(raw)


def prune(root: Path, wanted: Collection[str]) -> None:
    """Removes every file under `root` except those `wanted`."""
    for stale in root.rglob("*"):
        if stale.is_file() and stale.relative_to(root).as_posix() not in wanted:
            stale.unlink()
