"""Adds a record to the measurements: `python -m measurements.add RECORD.yaml FILE.jsonl`.

It checks the record as `make check-catalog` would, prints what `calc` says of its scenario beside what was measured,
and appends it to the file. `-` reads the record from standard input; without FILE nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calc import report
from calc.catalog import Catalog, check_measurement, load
from calc.estimate import estimate
from calc.pace import pace
from calc.reading import parse_mapping, read_input
from calc.residuals import RANGES, Residual, residual
from calc.scenario import parse
from calc.schema import InputError, validator
from calc.units import gib

ROOT = Path(__file__).parents[1]
SCHEMA = Path(__file__).with_name("schema.json")


def check(record: Mapping[str, Any], where: str, catalog: Catalog) -> None:
    """Raises InputError, one line, for a record that the folder could not take."""
    validator(SCHEMA)(record, where)
    if any(other["id"] == record["id"] for other in catalog.measurements):
        raise InputError(f"{where}: id: given {record['id']!r}, which a record has already, allowed: one of its own")
    check_measurement(record, where, catalog.gpus, catalog.names)


def beside(record: Mapping[str, Any], where: str, catalog: Catalog) -> str:
    """The estimate of the record's scenario, and how it compares with what was seen."""
    scenario = parse(record["scenario"], where=f"{where}: scenario", catalog=catalog)
    shown = report.verdict(estimate(scenario, catalog), catalog.gpu(scenario.gpu).name)
    return f"estimated: {shown}\nmeasured:  {_seen(residual(record, catalog))}\n{_paced(record, catalog)}"


def _paced(record: Mapping[str, Any], catalog: Catalog) -> str:
    """A line on the record's rate, where it has one that the catalog can be asked about."""
    found = pace(record, catalog) if "measured_rate" in record else None
    if found is None:
        return ""
    return f"step:      estimated {found.predicted:.3g} s, measured {found.measured:.3g} s, {found.error:+.1%}\n"


def _seen(r: Residual) -> str:
    if not r.measured:
        return f"{r.reported}; the verdict {'agrees' if r.same_verdict else 'differs'}"
    if r.metric in RANGES:
        inside = "inside" if r.inside else "outside"
        return f"{r.metric} {gib(r.measured, 2)}, {inside} {gib(r.low, 2)} to {gib(r.high, 2)}"
    return f"{r.metric} {gib(r.measured, 2)}, for which the estimate has {gib(r.predicted, 2)}, {r.error:+.2%}"


def main() -> int:
    """Runs the command and returns its exit status: 0, or 2 for a record that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m measurements.add", description=__doc__)
    parser.add_argument("record", metavar="RECORD", help="the record, YAML or JSON; - for standard input")
    parser.add_argument("file", metavar="FILE.jsonl", nargs="?", type=Path, help="a file of measurements/ to append to")
    options = parser.parse_args()
    try:
        raw, where = read_input(options.record)
        record = parse_mapping(raw, where)
        catalog = load()
        check(record, where, catalog)
        compared = beside(record, where, catalog)
        if options.file:
            _append(record, options.file)
        print(compared, end="")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _append(record: Mapping[str, Any], path: Path) -> None:
    """Adds the record as the last line of `path`, which must be one that the catalog reads."""
    if path.suffix != ".jsonl" or path.resolve().parent != ROOT / "measurements":
        raise InputError(f"FILE: given {str(path)!r}, allowed: a .jsonl file in measurements/")
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
