"""The data beside the pages: each table as CSV and JSON, the catalog, and a data package that describes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calc.architecture import parameters
from calc.site import answers, cite, tables
from calc.site.macros import Record


def files(record: Record) -> dict[str, str]:
    """Every file under data/, by its path there."""
    written = {"catalog.json": _json(catalog())}
    resources = [_resource("catalog", "catalog.json", written["catalog.json"], "json")]
    for table_id, (table, page) in sorted(record.tables.items()):
        csv_path, json_path = f"tables/{table_id}.csv", f"tables/{table_id}.json"
        written[csv_path] = tables.to_csv(table)
        written[json_path] = tables.to_json(table)
        schema = {
            "fields": [
                {"name": f"{name} ({unit})" if unit else name, "type": kind} for name, kind, unit in table.fields
            ],
            "missingValues": [""],
        }
        title = {"title": table.caption, "homepage": f"{page}#{table_id}"}
        resources.append(_resource(table_id, csv_path, written[csv_path], "csv", schema=schema, **title))
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


def _resource(name: str, path: str, text: str, kind: str, **more: Any) -> dict[str, Any]:
    raw = text.encode()
    return {
        "name": name,
        "path": path,
        "format": kind,
        "encoding": "utf-8",
        "bytes": len(raw),
        "hash": "sha256:" + hashlib.sha256(raw).hexdigest(),
        **more,
    }


def save(root: Path, wanted: Mapping[str, str]) -> None:
    """Makes `root` hold exactly the `wanted` files; one that is right already is left alone."""
    for path, text in wanted.items():
        target = root / path
        if not target.is_file() or target.read_text("utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8", newline="")
    for stale in root.rglob("*"):
        if stale.is_file() and stale.relative_to(root).as_posix() not in wanted:
            stale.unlink()
