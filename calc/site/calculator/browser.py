"""The calculator's entry in a reader's browser: one question in, one answer out, both as JSON.

There are no files there: the catalog comes from the site's `data/catalog.json`, which the build wrote from the same
data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from calc.base.schema import InputError
from calc.catalog import catalog as files
from calc.catalog.catalog import GPU, Catalog, Model, Node
from calc.models.hf_config import from_config


def catalog(data: Mapping[str, Any]) -> Catalog:
    """The catalog that `calc.site.build.exports.catalog` wrote, without the measurements, which no estimate reads."""
    gpus = {record["id"]: _made(GPU, record) for record in data["gpus"]}
    nodes = {record["id"]: _made(Node, record) for record in data["nodes"]}
    models = {r["id"]: _made(Model, r | {"architecture": from_config(r["config"])}) for r in data["models"]}
    names = {name.casefold(): m.id for m in models.values() for name in (m.id, m.hf, *m.aliases)}
    return Catalog(gpus, nodes, models, (), (), data["catalog"], names)


def _made(kind: Any, record: Mapping[str, Any]) -> Any:
    """A record of the catalog, JSON's lists made tuples."""
    given = {f.name: record[f.name] for f in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def start(text: str) -> None:
    """Reads the catalog's JSON and uses it wherever calc would read files."""
    found = catalog(json.loads(text))
    files.load = lambda root=None: found  # type: ignore[assignment]


def answer(text: str, progress: Callable[[str], None]) -> str:
    """The answer to `{"root": …, "language": …, "job": {field: value}}` or, of a scenario file, to `"file": text`.

    In the page's language: `{"line", "html", "file"}`, or `{"error"}`, calc's one line. Any other exception is a fault
    of calc, and the worker says so.
    """
    # imported here, because calc binds `load` at import
    from calc.site.calculator import calculator
    from calc.site.i18n import speech
    from calc.site.tables import tables

    asked = json.loads(text)
    language = asked.get("language", "")
    place = calculator.Place(asked["root"], tables.to_html)
    try:
        if "file" in asked:
            shown = calculator.check(asked["file"], files.load(), place)
        else:
            shown = calculator.find(
                asked["job"], files.load(), place, lambda line: progress(speech.say(line, language))
            )
    except InputError as error:
        return json.dumps({"error": speech.say(str(error), language)})
    said = shown._replace(line=speech.say(shown.line, language), html=speech.speak(shown.html, language))
    return json.dumps(said._asdict())
