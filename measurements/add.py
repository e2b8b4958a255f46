"""Adds a record to the measurements: `python -m measurements.add RECORD.yaml FILE.jsonl`.

It checks the record with all that is there as `make check-catalog` would, prints what `calc` says of its scenario
beside what was measured, and appends it to the file. `-` reads the record from standard input; without FILE nothing is
written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calc.accuracy.residuals import RANGES, Residual, residual
from calc.accuracy.step_time_errors import pace
from calc.base.project import ROOT
from calc.base.reading import parse_mapping, read_input
from calc.base.schema import InputError
from calc.base.units import gib
from calc.base.writing import replace
from calc.catalog.catalog import Catalog, load
from calc.check import check, check_record, folders
from calc.estimate import report
from calc.estimate.estimate import estimate
from calc.resolve.parse import parse

from .commands import Parser

FOLDER = ROOT / "measurements"


def beside(record: Mapping[str, Any], where: str, catalog: Catalog) -> str:
    """The estimate of the record's scenario, and how it compares with what was measured."""
    scenario = parse(record["scenario"], where=f"{where}: scenario", catalog=catalog)
    shown = report.verdict(estimate(scenario, catalog), catalog.gpu(scenario.gpu).name)
    return f"estimated: {shown}\nmeasured:  {_seen(residual(record, catalog))}\n{_paced(record, catalog)}"


def _paced(record: Mapping[str, Any], catalog: Catalog) -> str:
    """A line on the record's rate, if it has one that can be compared with the catalog's."""
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
    parser = Parser(prog="python -m measurements.add", description=__doc__)
    parser.add_argument("record", metavar="RECORD", help="the record, YAML or JSON; - for standard input")
    parser.add_argument("file", metavar="FILE.jsonl", nargs="?", help="a file of measurements/ to append to")
    options = parser.parse_args()
    try:
        file = None if options.file is None else _file(options.file)
        raw, where = read_input(options.record)
        record = parse_mapping(raw, where)
        check()
        catalog = load()
        check_record(record, where, catalog)
        line = _line(record, where)
        compared = beside(record, where, catalog)
        if file:
            append(line, file)
        print(compared, end="")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _file(given: str) -> Path:
    """The file of measurements/ that `given` names, whether it exists or not."""
    path = Path(given)
    wrong = folders.misnamed(path.name, ".jsonl")
    if wrong or Path(os.path.realpath(path.parent)) != FOLDER or path.is_dir():
        raise InputError(f"FILE: given {given!r}, allowed: a .jsonl file in measurements/, its name in lower case")
    return FOLDER / path.name


def _line(record: Mapping[str, Any], where: str) -> bytes:
    """The record as a line of a file."""
    text = json.dumps(record, ensure_ascii=False) + "\n"
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: given half of a surrogate pair, allowed: text that UTF-8 can hold") from None
    for wrong in folders.unreadable(raw, where):
        raise InputError(wrong)
    return raw


def append(line: bytes, path: Path) -> None:
    """Adds a line to the end of a file, all of it or nothing: a reader finds the file as before or as after."""
    try:
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        replace(path, before + line)
    except OSError as error:
        raise InputError(f"{path}: {str(error.strerror).lower()}; nothing was added") from None


if __name__ == "__main__":
    sys.exit(main())
