"""The checks of what stands beside the records: other calculators' answers and peaks, jobs unsaid, stored peaks.

No estimate reads these files, and pages show them: each is held to the schema of its folder, and the names in it to the
catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from calc.accuracy import simumax
from calc.base.reading import FILE, decode, parse_json, parse_mapping, read_bytes
from calc.base.schema import InputError, closest, show, validator
from calc.base.units import GiB
from calc.catalog.catalog import Catalog
from calc.check.faults import Rule, fault
from calc.check.texts import ADDRESS, address
from calc.resolve.parse import parse
from calc.scenario.scenario import SCHEMA

Data = Mapping[str, Any]


def answers(data: Data, catalog: Catalog) -> Iterator[str]:
    """Each job can be estimated, or names a model; a calculator answers jobs that are there, and has a reason."""
    jobs, peers, reasons = (data[name] for name in ("jobs", "peers", "reasons"))
    for job, asked in jobs.items():
        if "scenario" in asked:
            yield from _refused(f"jobs.{job}", parse, asked["scenario"], catalog=catalog)
        else:
            yield from _refused(f"jobs.{job}.cache", catalog.model, asked["cache"]["model"])
    for name, told in peers.items():
        for job in told:
            if job not in jobs:
                yield f"unknown field 'peers.{name}.{job}', allowed: {', '.join(jobs)}"
        if name not in reasons:
            yield f"missing field 'reasons.{name}': why it answers otherwise"
    for name in reasons:
        if name not in peers:
            yield f"unknown field 'reasons.{name}'" + (closest(name, peers) or ", allowed: the names in peers")


def _refused(where: str, read: Callable[..., object], given: object, **how: object) -> Iterator[str]:
    try:
        read(given, **how)
    except InputError as error:
        yield f"{where}: {error}"


def unsaid(data: Data, _: Catalog) -> Iterator[str]:
    """Each job has an id of its own, and an address that may exist."""
    seen: set[str] = set()
    for index, job in enumerate(data["jobs"]):
        if job["id"] in seen:
            yield fault(f"jobs[{index}].id", job["id"], "an id of its own")
        seen.add(job["id"])
        if not address(job["url"]):
            yield fault(f"jobs[{index}].url", job["url"], ADDRESS)


def peak(data: Data, catalog: Catalog) -> Iterator[str]:
    """A stored peak is one that a card of the catalog has room for, and no less than what was held at the end."""
    if (name := data["gpu"]) not in catalog.gpus:
        yield f"gpu: given {show(name)}, allowed: an id that `python -m calc gpus` lists{closest(name, catalog.gpus)}"
        return
    held, whole = data["allocated_bytes"], int(catalog.gpus[name].memory_gb * GiB)
    if not held <= data["max_allocated_bytes"] <= whole:
        allowed = f"allocated_bytes = {held} to {whole}, the memory of {name}"
        yield fault("max_allocated_bytes", data["max_allocated_bytes"], allowed)


def published(data: Data, catalog: Catalog) -> Iterator[str]:
    """Each case can be estimated, and its card has room for its peak."""
    for index, case in enumerate(data["cases"]):
        where = f"cases[{index}]"
        yield from _refused(where, simumax.scenario, data, case=case, catalog=catalog)
        gpu = catalog.gpus.get(data["scenario"]["gpu"])
        if gpu and case["peak"] > gpu.memory_gb:
            yield fault(f"{where}.peak", case["peak"], f"up to {gpu.memory_gb} GiB, the memory of {gpu.id}")


def suite(data: Data, catalog: Catalog) -> Iterator[str]:
    """Each field of a suite is one of a scenario, and each model and each card that it names is in the catalog."""
    known: Mapping[str, Callable[[str], object]] = {"model": catalog.model, "gpu": catalog.gpu}
    fields = SCHEMA["properties"]
    for where, given in _written(data):
        for name in given:
            if name.partition(".")[0] not in fields:
                yield f"unknown field '{where}.{name}'" + (closest(name, fields) or ", allowed: those of a scenario")
    for index, case in enumerate(data["cases"]):
        each = case.get("each", {})
        for name, look in known.items():
            named = each.get(name) or [case.get(name, data.get("defaults", {}).get(name))]
            for given in named:
                if given is not None:
                    yield from _refused(f"cases[{index}]", look, given)


def _written(data: Data) -> Iterator[tuple[str, Iterable[str]]]:
    """The fields of scenarios in a suite, with their place."""
    yield "defaults", data.get("defaults", {})
    for index, case in enumerate(data["cases"]):
        yield f"cases[{index}]", case.keys() - {"each", "bench"}
        yield f"cases[{index}].each", case.get("each", {})


class Beside(NamedTuple):
    """A folder of such files: the schema of one document of them, and the rule that each is held to."""

    folder: str
    schema: str
    rule: Rule[Data]


FOLDERS = (
    Beside("measurements/peers", "measurements/peers/schema.json", answers),
    Beside("measurements/blind", "measurements/blind/schema.json", unsaid),
    Beside("measurements/megatron", "measurements/megatron/schema.json", peak),
    Beside("measurements/simumax", "measurements/simumax/schema.json", published),
    Beside("measurements/suites", "measurements/bench/suite.schema.json", suite),
)


def faults(catalog: Catalog, root: Path) -> Iterator[str]:
    """The faults of all such files at `root`, a line each."""
    for kind in FOLDERS:
        paths = [path for path in sorted((root / kind.folder).glob("*.*")) if path.suffix in (".yaml", ".jsonl")]
        for path in paths:
            try:
                for where, data in _documents(path, f"{kind.folder}/{path.name}"):
                    validator(root / kind.schema)(data, where)
                    yield from (f"{where}: {line}" for line in kind.rule(data, catalog))
            except InputError as error:
                yield str(error)


def _documents(path: Path, where: str) -> Iterator[tuple[str, Data]]:
    """The documents of a file, each with its place: the whole of a YAML file, the lines of another."""
    if path.suffix == ".yaml":
        yield where, parse_mapping(read_bytes(path, where), where)
        return
    lines = decode(read_bytes(path, where, FILE), where).splitlines()
    if not lines:
        raise InputError(f"{where}: given nothing, allowed: a record a line")
    for number, line in enumerate(lines, start=1):
        yield f"{where}:{number}", parse_json(line, where, number)
