"""The data beside the pages: each table as files of several kinds, the catalog, and a data package of it all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calc.architecture import parameters
from calc.site import answers, cite, tables, typeset, workbook
from calc.site.bound import Record
from calc.site.published import ALTERNATES
from calc.site.tables import Table


def files(record: Record) -> dict[str, str | bytes]:
    """Every file under data/ but for `markdown`, by its path there."""
    written: dict[str, str | bytes] = {"catalog.json": _json(catalog())}
    resources = [_resource("catalog", "catalog.json", written["catalog.json"], "json")]
    for table_id, (table, page) in sorted(record.tables.items()):
        made = _twins(table, _source(table, page))
        written |= {f"tables/{table_id}.{kind}": content for kind, content in made.items()}
        resources.append(_described(table, page, made["csv"]))
    written["spoken.json"] = _json([s._asdict() for s in record.spoken])
    written["datapackage.json"] = _json(
        {
            "$schema": "https://datapackage.org/profiles/2.0/datapackage.json",
            "name": "headroom",
            "title": "Headroom: every published table",
            "version": answers.versions()["catalog"],
            "calc_version": answers.versions()["calc"],
            "contributors": [{"title": cite.AUTHORS}],
            "licenses": [{"name": "CC-BY-4.0", "path": "https://creativecommons.org/licenses/by/4.0/"}],
            "resources": resources,
        }
    )
    return written


def markdown(record: Record) -> dict[str, str | bytes]:
    """The tables as Markdown, by their paths under data/: under docs/ they would become pages of the guide."""
    return {
        f"tables/{table_id}.md": typeset.to_markdown(table, _source(table, page))
        for table_id, (table, page) in record.tables.items()
    }


def _source(table: Table, page: str) -> str:
    return cite.line(table, cite.permalink(table, page))


def _twins(table: Table, source: str) -> dict[str, str | bytes]:
    """Files with the same values as the page, by the ends of their names."""
    return {
        "csv": tables.to_csv(table),
        "json": tables.to_json(table),
        "tex": typeset.to_latex(table, source),
        "xlsx": workbook.to_xlsx(table, source),
    }


def _described(table: Table, page: str, content: str | bytes) -> dict[str, Any]:
    """A table's resource: the CSV with its schema. The standard has one file a resource, so the others stand apart."""
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
        alternates=[f"tables/{table.id}.{kind}" for kind in ALTERNATES],
    )


def catalog() -> dict[str, Any]:
    """The catalog as `calc` read it: GPUs, nodes, and models with their counted parameters."""
    found = answers.catalog()
    return {
        **answers.versions(),
        "gpus": [answers.plain(g) | {"usable_bytes": g.usable_bytes} for g in found.gpus.values()],
        "nodes": [answers.plain(n) for n in found.nodes.values()],
        "models": [answers.plain(m) | {"parameters": parameters(m.architecture)} for m in found.models.values()],
    }


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"


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


def save(root: Path, wanted: Mapping[str, str | bytes]) -> None:
    """Makes `root` hold exactly the `wanted` files; one that is right already is left alone."""
    add(root, wanted)
    for stale in root.rglob("*"):
        if stale.is_file() and stale.relative_to(root).as_posix() not in wanted:
            stale.unlink()


def add(root: Path, wanted: Mapping[str, str | bytes]) -> None:
    """Writes the `wanted` files under `root`; one that is right already is left alone."""
    for path, content in wanted.items():
        target, raw = root / path, _raw(content)
        if not target.is_file() or target.read_bytes() != raw:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(raw)
