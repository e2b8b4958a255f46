"""Records: the result of one case, as a line of `measurements/*.jsonl`, and the file they are added to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from calc.base.reading import FILE, decode, parse_json, read_bytes
from calc.base.schema import InputError, validator
from calc.base.writing import replace

from .edge import Found
from .machine import Machine
from .plan import RATES, ROOT, Case, Plan

SCHEMA = ROOT / "measurements/schema.json"
MACHINE_FIELDS = ("device", "capability", "total_bytes", "context_bytes", "cores", "host_bytes")


def record(plan: Plan, case: Case, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """The record `name` of a case's result.

    A case that ran on a GPU is an `allocated` figure with verdict `fits`; an out-of-memory has verdict `oom`; a case
    that failed or was not run, `failed` with its reason; rates, and anything run without a GPU, `untested`, since they
    do not show whether memory suffices.
    """
    observed = {**result.get("observed", {}), "expandable_segments": bool(case.scenario.get("expandable_segments"))}
    if (limit := plan.limit(case)) is not None:
        observed["limit_bytes"] = limit
    own: dict[str, Any] = {"metric": "verdict", "measured_bytes": None, "verdict": _verdict(plan, case, result)}
    if own["verdict"] == "fits":
        own |= {"metric": "allocated", "measured_bytes": observed["allocated_bytes"]}
    if own["verdict"] == "failed":
        own["failure"] = result["reason"]
    if "oom" in result:
        observed["oom"] = result["oom"]
    if "rates" in result:
        own["rates"] = [{name: _short(value) for name, value in rate.items()} for rate in result["rates"]]
    notes = list(result.get("notes", []))
    if limit is not None:
        notes.append(f"the {plan.gpu.id} at hand, limited to the memory of the {plan.card(case).id}")
    if case.scenario.get("sharding") == "fsdp2":
        notes.append("one process of the job; the collectives of the others move nothing")
    if notes:
        own["note"] = "; ".join(notes)
    return _head(plan, case, name) | own | {"observed": observed}


def edge_record(plan: Plan, case: Case, name: str, found: Found, guesses: Mapping[str, int]) -> dict[str, Any]:
    """The record of a search: the largest size that ran, the smallest that did not, and what `calc` predicted.

    `guesses` come from `Plan.guesses`. The scenario is that of the largest size that ran, or of the smallest if none
    did.
    """
    edge = case.edge
    assert edge is not None
    fits = found.runs > 0
    at = case.at(found.runs * edge.step if fits else edge.step)
    return _head(plan, at, name) | {
        "metric": "verdict",
        "measured_bytes": None,
        "verdict": "fits" if fits else "oom",
        "edge": {
            "field": edge.field,
            "found": found.runs * edge.step,
            "fails_at": None if found.fails is None else found.fails * edge.step,
            **{place: size * edge.step for place, size in guesses.items()},
            "probes": found.probes,
        },
    }


def _short(value: Any) -> Any:
    """A measured number, rounded to its significant digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _verdict(plan: Plan, case: Case, result: Mapping[str, Any]) -> str:
    if result["outcome"] == "failed":
        return "failed"
    if case.kind in RATES or not plan.machine.cuda:
        return "untested"
    return "oom" if result["outcome"] == "oom" else "fits"


def _head(plan: Plan, case: Case, name: str) -> dict[str, Any]:
    machine = plan.machine
    return {
        "id": name,
        "source": f"python -m measurements.bench on {machine.words}",
        "url": None,
        "class": "measured",
        "confidence": "high",
        "date": datetime.now(UTC).date().isoformat(),
        "scenario": plan.fields(case),
        "versions": dict(machine.versions),
        "machine": machine_fields(machine, plan.gpu.id),
    }


def machine_fields(machine: Machine, gpu: str) -> dict[str, Any]:
    """The machine as a record has it: in words, and the figures needed to interpret the record."""
    seen = {name: getattr(machine, name) for name in MACHINE_FIELDS}
    return {
        "words": machine.words,
        "name": machine.name,
        "gpu": gpu,
        **{k: v for k, v in seen.items() if v is not None},
    }


class Results:
    """The file of records, one a line. Opening it reads the records, and repairs a last line that was cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        self._check = validator(SCHEMA)
        if path.exists():
            self._read()

    def _read(self) -> None:
        where = str(self.path)
        raw = read_bytes(self.path, where, FILE)
        whole, newline, torn = raw.rpartition(b"\n")
        if torn:
            try:
                json.loads(torn)
            except ValueError:  # the process was ended while writing
                raw = whole + newline
            else:
                raw += b"\n"
            replace(self.path, raw)
        for number, line in enumerate(decode(raw, where).split("\n"), start=1):
            if line.strip():
                record = parse_json(line, where, number)
                self._check(record, f"{where}:{number}")
                self.records[record["id"]] = record

    def name(self, case: Case) -> str:
        """The id of a case's record, unique as long as the file's name is: `measured/<file>/<case>`."""
        return f"measured/{self.path.stem}/{case.name}"

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record, which is on the disk before this returns. Raises ValueError if it is not valid."""
        self._check(record, record["id"])
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records[record["id"]] = dict(record)

    def forget_failed(self) -> None:
        """Remove the failed records from the file, so that their cases run again."""
        kept = {name: record for name, record in self.records.items() if record["verdict"] != "failed"}
        if len(kept) < len(self.records):
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in kept.values()]
            replace(self.path, "".join(lines).encode())
            self.records = kept


def writable(path: Path, cuda: bool) -> None:
    """Raises InputError if records may not be written to `path`: no folder, another ending, or no GPU and real data."""
    if path.suffix != ".jsonl":
        raise InputError(f"--out: given {str(path)!r}, allowed: a name that ends in .jsonl")
    if not path.parent.is_dir():
        raise InputError(f"--out: given {str(path)!r}, allowed: a file in a folder that exists")
    if not cuda and path.resolve().parent == ROOT / "measurements":
        raise InputError(f"--out: given {str(path)!r} without a GPU, allowed: a file outside measurements/")
