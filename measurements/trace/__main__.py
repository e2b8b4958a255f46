"""`python -m measurements.trace SCENARIO.yaml`: trace a scenario's step and print its record as JSON."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

from measurements.commands import Parser

from .case import Case, from_record, from_scenario
from .reading import documents, mapping, only, regular


def _case(data: dict[str, Any]) -> Case:
    return from_record(data) if "mb" in data or "seq" in data else from_scenario(data)


def _batch(lines: TextIO) -> None:
    from .record import record

    for line in lines:
        if line.strip():
            try:
                answer = record(_case(only([json.loads(line)], "line")))
            except ValueError as error:  # a CaseError, or what the model's own code refuses
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


def main() -> int:
    """Run the command line; 0 for an answer, 2 for input that cannot be used."""
    parser = Parser(prog="python -m measurements.trace", description=__doc__)
    parser.add_argument("scenario", nargs="?", help="a scenario file, YAML or JSON ('-': standard input)")
    parser.add_argument("--batch", metavar="FILE.jsonl", help="a case a line in, a record a line out")
    parser.add_argument("--detail", action="store_true", help="the tensors behind the numbers, as text")
    options = parser.parse_args()
    if not options.batch and not options.scenario:
        parser.error("a scenario file or --batch is needed")
    try:
        if options.scenario == "-":
            given = only(documents(sys.stdin.read(), "standard input"), "standard input")
        else:
            given = {} if options.batch else mapping(Path(options.scenario))
        from . import fake  # noqa: F401  (before anything imports torch)

        if options.batch:
            with sys.stdin if options.batch == "-" else regular(Path(options.batch)).open() as lines:
                _batch(lines)
        else:
            print(_traced(_case(given), options.detail))
    except (ImportError, ValueError, OSError, subprocess.CalledProcessError) as error:
        print(str(error).partition("\n")[0], file=sys.stderr)
        return 2
    return 0


def _traced(case: Case, with_tensors: bool) -> str:
    from .detail import detail
    from .record import record

    return detail(case) if with_tensors else json.dumps(record(case), indent=2)


if __name__ == "__main__":
    sys.exit(main())
