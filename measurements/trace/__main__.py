"""`python -m measurements.trace SCENARIO.yaml`: trace a scenario's step and print its record as JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import TextIO

import yaml

from . import fake  # noqa: F401  (before anything imports torch)
from .case import Case, from_record, from_scenario
from .detail import detail
from .record import record


def _case(data: dict[str, object]) -> Case:
    return from_record(data) if "mb" in data or "seq" in data else from_scenario(data)


def _batch(lines: TextIO) -> None:
    for line in lines:
        if line.strip():
            try:
                answer = record(_case(json.loads(line)))
            except ValueError as error:  # a CaseError, or what the model's own code refuses
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


def main() -> int:
    """Run the command line; 0 for an answer, 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m measurements.trace", description=__doc__)
    parser.add_argument("scenario", nargs="?", help="a scenario file, YAML or JSON ('-': standard input)")
    parser.add_argument("--batch", metavar="FILE.jsonl", help="a case a line in, a record a line out")
    parser.add_argument("--detail", action="store_true", help="the tensors behind the numbers, as text")
    options = parser.parse_args()
    try:
        if options.batch:
            with sys.stdin if options.batch == "-" else Path(options.batch).open() as lines:
                _batch(lines)
        elif options.scenario:
            text = sys.stdin.read() if options.scenario == "-" else Path(options.scenario).read_text()
            case = _case(yaml.safe_load(text))
            print(detail(case) if options.detail else json.dumps(record(case), indent=2))
        else:
            parser.error("a scenario file or --batch is needed")
    except (ValueError, OSError) as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
