"""The list of every published table with its downloads, from the data package that the build has written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

PACKAGE = Path(__file__).parents[2] / "docs" / "data" / "datapackage.json"
# The part of the guide that a table stands in, by how its page's address begins; the rest is home.
PARTS = {
    "hardware/gpus/": "Pages of GPUs",
    "hardware/": "Hardware",
    "models/": "Models",
    "recipes/": "Recipes",
    "strategies/": "Strategies",
    "case-studies/": "Case studies",
    "method/": "Method",
    "validation": "Validation",
    "reference/": "Reference",
}


def listed(root: str) -> str:
    """All tables by the part of the guide that they stand in; nothing while the package is still to be written."""
    if not PACKAGE.is_file():
        return ""
    package = json.loads(PACKAGE.read_text("utf-8"))
    tables = sorted((r for r in package["resources"] if "schema" in r), key=lambda r: (_part(r), r["homepage"]))
    whole = f"<p>{len(tables)} tables, catalog <code>{escape(package['version'])}</code>.</p>"
    return whole + "".join(_group(part, list(found), root) for part, found in groupby(tables, key=_part))


def _part(resource: dict[str, Any]) -> str:
    page = resource["homepage"]
    return next((name for start, name in PARTS.items() if page.startswith(start)), "Home and other pages")


def _group(part: str, found: list[dict[str, Any]], root: str) -> str:
    items = "".join(
        f'<li><a href="{root}{escape(r["homepage"])}">{escape(r["title"])}</a> {" ".join(_files(r, root))}</li>'
        for r in found
    )
    return f"<details><summary>{part}: {len(found)} tables</summary><ul>{items}</ul></details>"


def _files(resource: dict[str, Any], root: str) -> Iterator[str]:
    for path in (resource["path"], *resource.get("alternates", [f"tables/{resource['name']}.json"])):
        kind = PurePosixPath(path).suffix[1:]
        yield f'<a href="{root}data/{path}" download>{kind.upper()}</a>'
