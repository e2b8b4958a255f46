"""The command line: `python -m calc estimate | recommend | diagnose | lengths | models | gpus | check | add`.

Exit status 0 for an answer, 2 for input that cannot be used: then one line on standard error and nothing on standard
output. A command imports what it needs when it runs: all that `calc` has takes longer to import than most answers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, NoReturn

from calc.base.collecting import collect_rarely
from calc.base.columns import table
from calc.base.reading import FILE, decode, lines, parse_json, parse_mapping, read_input
from calc.base.schema import InputError, closest
from calc.catalog.catalog import load
from calc.models.architecture import parameters

PROGRAM = "python -m calc"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command (`sys.argv` by default) and returns its exit status."""
    try:
        for text in _run(_arguments(sys.argv[1:] if argv is None else argv)):
            _write(text)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as in shells
    except BrokenPipeError:
        _silence()  # the reader has seen enough
    except _Unwritten as error:
        print(f"standard output: {error}", file=sys.stderr)
        return 1
    return 0


class _Unwritten(Exception):
    """The reason why an answer could not be written."""


def _write(text: str) -> None:
    """Writes to standard output, which may be full or closed."""
    if sys.stdout is None:  # the shell's `>&-`
        raise _Unwritten("closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence()
        raise _Unwritten(str(error.strerror).lower()) from None
    except UnicodeEncodeError as error:
        raise _Unwritten(f"cannot show {error.object[error.start]!a} in {error.encoding}; set PYTHONUTF8=1") from None


def _silence() -> None:
    """Python flushes once more at exit, which must not complain either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: argparse.Namespace) -> Iterable[str]:
    """The output of the command, in pieces."""
    match arguments.command:
        case "estimate":
            if arguments.batch is not None:
                return _batch(arguments.batch)
            return _estimate(arguments.scenario, arguments.json)
        case "recommend":
            return _recommend(arguments.fields, arguments.scenario, arguments.json)
        case "diagnose":
            return _diagnose(arguments.text, arguments.fields, arguments.json)
        case "lengths":
            return _lengths(arguments.data, arguments.tokenizer, arguments.json)
        case "models":
            return _list(_models(), arguments.json)
        case "gpus":
            return _list(_gpus(), arguments.json)
        case "add":
            return _add(arguments)
        case _:
            return _check()


def _estimate(path: str, as_json: bool) -> Iterator[str]:
    from calc.estimate import report
    from calc.estimate.estimate import as_dict, estimate
    from calc.resolve.parse import parse

    raw, where = read_input(path)
    answer = estimate(parse(parse_mapping(raw, where), where=where))
    if as_json:
        yield json.dumps(as_dict(answer), indent=2) + "\n"
    else:
        yield report.text(answer, load().gpu(answer.scenario.gpu).name)


def _recommend(fields: dict[str, Any], path: str | None, as_json: bool) -> Iterator[str]:
    """The configuration to run; where the GPU or the number of GPUs is open, on the smallest machine.

    An option overrides the file's field. Both are checked against the schema where they stand, before they become one
    job.
    """
    from calc.recommend import recommend, smallest, text
    from calc.resolve.parse import given

    catalog, where = load(), "recommend"
    job = given(fields, where=where, needed=())
    if path is not None:
        raw, where = read_input(path)
        job = {**given(parse_mapping(raw, where), where=where, needed=()), **job}
    tried = None
    if "gpu" in job and "gpus" in job:
        answer = recommend(job, where=where)
    else:
        tried = smallest(job, where=where, progress=_Progress())
        answer = tried.recommendation
    yield json.dumps(text.as_dict(answer, tried), indent=2) + "\n" if as_json else text.text(answer, catalog, tried)


def _diagnose(path: str, fields: dict[str, Any], as_json: bool) -> Iterator[str]:
    """Explain what a job died of, and what to change; options give what the pasted text leaves open."""
    from calc.diagnose import diagnose, text

    raw, where = read_input(path, FILE)
    catalog = load()
    answer = diagnose(raw, fields, catalog, where=where)
    if as_json:
        yield json.dumps(text.as_dict(answer, catalog), indent=2) + "\n"
    else:
        yield text.text(answer, catalog)


class _Progress:
    """Reports progress on standard error, at most once a second, after the first second.

    On a terminal each line overwrites the one before; elsewhere each stands on its own.
    """

    def __init__(self) -> None:
        self.start = self.last = monotonic()

    def __call__(self, line: str) -> None:
        now = monotonic()
        if now - self.start >= 1 and now - self.last >= 1:
            self.last = now
            over = sys.stderr.isatty()
            print(f"\r{line}\033[K" if over else line, end="" if over else "\n", file=sys.stderr, flush=True)

    def __del__(self) -> None:
        if self.last > self.start and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _batch(path: str) -> Iterator[str]:
    """One line out for each line in; blank lines are errors too, except at the end of the file."""
    where = "standard input" if path == "-" else path
    blank: list[str] = []
    for number, raw in enumerate(lines(path), 1):
        if raw.strip():
            yield from blank
            blank = []
            yield _answer(raw, where, number)
        else:
            blank.append(_error(f"{where}:{number}: given a blank line, allowed: a scenario"))


def _answer(raw: bytes, where: str, number: int) -> str:
    """The output line for one scenario of a batch: its estimate, or the reason for none; no failure ends the batch."""
    from calc.estimate.estimate import as_dict, estimate
    from calc.resolve.parse import parse

    place = f"{where}:{number}"
    try:
        return json.dumps(as_dict(estimate(parse(parse_json(decode(raw, place), where, number), where=place)))) + "\n"
    except InputError as error:
        return _error(str(error))
    except Exception as error:
        return _error(f"{place}: a fault of calc and not of the line, please report it with the line: {error!r}")


def _error(message: str) -> str:
    return json.dumps({"error": message}) + "\n"


def _lengths(path: str, tokenizer: str | None, as_json: bool) -> Iterator[str]:
    """The lengths of a data set's sequences, as a file that a scenario can name."""
    from calc.scenario import data_lengths

    tokenize = data_lengths.tokenizer(tokenizer) if tokenizer else None
    found = data_lengths.counted(lines(path), "standard input" if path == "-" else path, tokenize)
    yield json.dumps({"counts": data_lengths.binned(found)}) + "\n" if as_json else data_lengths.text(found)


def _models() -> list[dict[str, Any]]:
    return [
        {
            "id": model.id,
            "name": model.name,
            "parameters": parameters(model.architecture),
            "family": model.architecture.family,
            "hf": model.hf,
        }
        for model in load().whole().models.values()
    ]


def _gpus() -> list[dict[str, Any]]:
    return [
        {"id": gpu.id, "name": gpu.name, "memory_gb": gpu.memory_gb, "usable_bytes": gpu.usable_bytes}
        for gpu in load().gpus.values()
    ]


def _list(records: list[dict[str, Any]], as_json: bool) -> Iterator[str]:
    """Records as JSON, or as a table with one column per field."""
    if as_json:
        yield json.dumps(records, indent=2) + "\n"
        return
    numbers = [i for i, value in enumerate(records[0].values()) if isinstance(value, int | float)]
    rows = [[f"{v:,}" if isinstance(v, int | float) else v for v in record.values()] for record in records]
    yield "".join(f"{line}\n" for line in table(list(records[0]), rows, right=numbers))


def _options() -> Mapping[str, str]:
    """The options of `add`, and what each gives."""
    from calc.add.models import OPTIONS

    return OPTIONS


def _add(arguments: argparse.Namespace) -> Iterator[str]:
    from calc.add import add

    given = {name: vars(arguments)[name] for name in _options() if vars(arguments)[name] is not None}
    yield add(arguments.file, given, over=arguments.replace)


def _check() -> Iterator[str]:
    from calc.check import check

    c = check()
    counts = f"{len(c.gpus)} GPUs, {len(c.nodes)} nodes, {len(c.models)} models, {len(c.measurements)} measurements"
    counts += f", {len(c.exhausted)} out-of-memory messages"
    yield f"catalog {c.version}: {counts}, all valid\n"


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports errors like any other bad input."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; {self.prog} --help shows what is")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; raises InputError for one that cannot be used."""
    command = next((word for word in argv if not word.startswith("-")), None)
    parser = _Parser(prog=PROGRAM, description="Does a post-training job fit its GPUs?", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    sub = commands.add_parser("estimate", help="memory of a job, phase by phase", allow_abbrev=False)
    sub.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a YAML or JSON file, - for standard input")
    sub.add_argument("--batch", metavar="FILE", help="a JSON scenario a line in (- too), a JSON line out for each")
    sub.add_argument("--json", action="store_true", help="the estimate as JSON")
    sub = commands.add_parser(
        "recommend", help="which configuration to run: every field of a scenario is an option", allow_abbrev=False
    )
    sub.add_argument("--scenario", metavar="FILE", help="fields that stay fixed, as a YAML or JSON file, - for input")
    sub.add_argument("--json", action="store_true", help="the answer as JSON")
    sub = commands.add_parser(
        "diagnose",
        help="what a job died of, and what to change: every field of a scenario is an option",
        allow_abbrev=False,
    )
    sub.add_argument("text", metavar="FILE", help="a command, a log, a scenario or a memory snapshot; - for input")
    sub.add_argument("--json", action="store_true", help="the answer as JSON")
    sub = commands.add_parser("lengths", help="lengths of a data set's sequences, for a scenario", allow_abbrev=False)
    sub.add_argument("data", metavar="DATA.jsonl", help="a sequence a line: tokens, their ids, or text; - for input")
    sub.add_argument("--tokenizer", metavar="NAME", help="what reads text: a folder or a hub's name, by Transformers")
    sub.add_argument("--json", action="store_true", help="as JSON")
    for name, what in (("models", "the models of the catalog"), ("gpus", "the GPUs of the catalog")):
        sub = commands.add_parser(name, help=what, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="as JSON")
    commands.add_parser("check", help="reads and checks the catalogs", allow_abbrev=False)
    sub = commands.add_parser("add", help="writes a file of the catalog after all checks", allow_abbrev=False)
    sub.add_argument(
        "file", metavar="CONFIG.json | GPU.yaml", help="a model's config.json or a GPU's file, - for input"
    )
    added = _options() if command == "add" else {}
    for name, what in added.items():
        sub.add_argument(f"--{name}", dest=name, metavar=name.upper(), help=what)
    sub.add_argument("--replace", action="store_true", help="replaces the file that is there")

    if command is not None and command not in commands.choices:
        near = closest(command, commands.choices)
        raise InputError(f"{PROGRAM}: command: given {command!r}, allowed: {', '.join(commands.choices)}{near}")
    own, of_fields = _apart(argv) if command == "diagnose" else (argv, [])
    arguments, unknown = parser.parse_known_args(own)
    unknown += of_fields
    if arguments.command in ("recommend", "diagnose"):
        from calc.recommend import options

        arguments.fields = options.read(unknown, f"{PROGRAM} {arguments.command}")
    elif unknown:
        near = closest(unknown[0], ("--json", "--batch", "--help", "--replace", *map("--{}".format, added)))
        raise InputError(f"{PROGRAM} {arguments.command}: given {unknown[0]!r}, which it does not take{near}")
    if arguments.command == "estimate" and (arguments.scenario is None) == (arguments.batch is None):
        given = "neither" if arguments.batch is None else "both"
        raise InputError(f"{PROGRAM} estimate: given {given}, allowed: one of SCENARIO and --batch FILE")
    return arguments


def _apart(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and the options of fields with their values: these may stand before the file's name."""
    own: list[str] = []
    fields: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if not word.startswith("--") or word in ("--", "--json", "--help"):
            own.append(word)
            continue
        fields.append(word)
        if "=" not in word and left and not left[0].startswith("--"):
            fields.append(left.pop(0))
    return own, fields


if __name__ == "__main__":
    collect_rarely()
    sys.exit(main())
