"""The calculator's entry in a reader's browser: one question in, its answer out as it grows, both as JSON.

There are no files there, and nothing is read or imported: `start` runs when the site is built, and the browser goes on
from the memory that it leaves.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from calc.base.collecting import collect_rarely
from calc.base.reading import parse_mapping
from calc.base.schema import InputError
from calc.catalog import catalog as files
from calc.catalog.catalog import GPU, Catalog, Model, Node, whole
from calc.catalog.names import names
from calc.models.hf_config import from_config

if TYPE_CHECKING:
    from calc.site.calculator.calculator import Shown


def catalog(data: Mapping[str, Any]) -> Catalog:
    """The catalog that `calc.answers.published.catalog` gave, without the measurements, which no estimate reads."""
    gpus = {record["id"]: _made(GPU, record) for record in data["gpus"]}
    nodes = {record["id"]: _made(Node, record) for record in data["nodes"]}
    models = {r["id"]: _made(Model, r | _architectures(r)) for r in data["models"]}
    return Catalog(gpus, nodes, models, data["catalog"], names(models.values()))


def _architectures(record: Mapping[str, Any]) -> dict[str, Any]:
    """A model's architectures, of text alone and with images, which are read anew from its config."""
    config, around = record["config"], record["vision"]
    seeing = from_config(whole(config, around), images=True) if around else None
    return {"architecture": from_config(config), "seeing": seeing}


def _made(kind: Any, record: Mapping[str, Any]) -> Any:
    """A record of the catalog, JSON's lists made tuples."""
    given = {f.name: record[f.name] for f in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def start(text: str) -> None:
    """Reads the catalog's JSON, uses it wherever calc would read files, and asks a question of each kind.

    So all that an answer imports, reads or compiles once is in memory.
    """
    collect_rarely()
    found = catalog(json.loads(text))
    files.load = lambda root=None: found  # type: ignore[assignment]
    len(found.names.spelled)  # which is put together when a name is first looked for
    model, gpu = next(iter(found.models)), next(iter(found.gpus))
    job = {"model": model, "task": "sft", "gpu": gpu, "gpus": "1", "framework": "trl", "micro_batch": "1"}
    lines = "".join(f"{name}: {value}\n" for name, value in job.items())
    asked = urlencode(job | {"ask": "estimate"})
    first: tuple[dict[str, Any], ...] = (
        {"job": job | {"ask": "estimate"}, "language": "zh"},
        {"file": lines},
        {"file": "{"},
        {"file": json.dumps(dict(found.models[model].config)), "job": job},
        {"compare": [asked, asked], "samples": "1"},
        {"diagnose": f"{lines}torch.OutOfMemoryError: CUDA out of memory.", "fields": {}},
    )
    for question in first:
        answer(json.dumps({"root": "", **question}), lambda _: None)


def answer(text: str, progress: Callable[[str], None]) -> str:
    """The last of the `parts` of an answer, which is whole."""
    *_, last = filter(None, parts(text, progress))
    return last


def parts(text: str, progress: Callable[[str], None]) -> Iterator[str]:
    """The answer to a question as it grows: `{"line", "html", "file", "fields", "stage"}`, see `calculator.Shown`.

    It is `""` where nothing is new, so that the page may leave it there; and `{"error"}`, calc's one line, for a
    bad question.

    A question has `root`, the relative path to the top of the site, and one of these: `job`, the fields of an address
    as text; `file`, the text of a scenario, or of a Hugging Face config.json, which becomes the model of `job`;
    `compare`, the queries of addresses, with the number of `samples`; or `diagnose`, what a job that died left behind,
    with `fields` to complete it, a memory snapshot in `base64` besides. The answer is in the question's `language`,
    that of the page. Any exception but an InputError is a fault of calc, and the worker says so.
    """
    # imported here, because calc binds `load` at import
    from calc.site.i18n import speech

    asked = json.loads(text)
    language, root = asked.get("language", ""), asked["root"]
    translated = asked.get("translated", ())
    before = None
    try:
        for shown in _shown(asked, lambda line: progress(speech.say(line, language))):
            if shown == before:
                yield ""
                continue
            before = shown
            html = speech.lead(speech.speak(shown.html, language), root, language, translated)
            yield json.dumps(shown._replace(line=speech.say(shown.line, language), html=html)._asdict())
    except InputError as error:
        yield json.dumps({"error": speech.say(str(error), language)})


def _shown(asked: Mapping[str, Any], tell: Callable[[str], None]) -> Iterator[Shown]:
    """The answer to a question as it grows, in English."""
    from calc.recommend import options
    from calc.site.calculator import calculator, compare, diagnosed
    from calc.site.tables import tables

    place = calculator.Place(asked["root"], tables.to_html, asked.get("translated", ()))
    if "diagnose" in asked:
        given = options.read([f"--{name}={value}" for name, value in asked["fields"].items()], "fields")
        pasted = b64decode(asked["base64"]) if "base64" in asked else asked["diagnose"]
        yield from diagnosed.find(pasted, given, files.load(), place)
    elif "compare" in asked:
        yield compare.compared(asked["compare"], asked["samples"], place, tell)
    elif "file" not in asked:
        yield from calculator.asked(asked["job"], files.load(), place, tell)
    elif own := _own_model(asked["file"]):
        job = {**asked["job"], "model": own}
        for shown in calculator.asked(job, files.load(), place, tell):
            yield shown._replace(fields=job)
    else:
        yield from calculator.checking(asked["file"], files.load(), place)


def _own_model(text: str) -> str | None:
    """The path of a Hugging Face config.json, now a file of this browser's; None if the text is something else."""
    try:
        config = parse_mapping(text, "config.json")
    except InputError:
        return None
    if "model_type" not in config or "task" in config:
        return None
    name = str(config.get("_name_or_path") or config["model_type"]).rpartition("/")[2]
    path = Path((re.sub(r"[^\w.-]", "", name) or "model") + ".json")
    path.write_text(text, "utf-8")
    return path.name
