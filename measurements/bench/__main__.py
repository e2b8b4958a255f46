"""`python -m measurements.bench SUITE.yaml --out FILE.jsonl`: measure the cases of a suite on the GPU at hand.

Exit status 0 when every case has a record or the time given is over, 2 for input that cannot be used, 130 when
interrupted; whatever was measured is in the file, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calc.base.schema import InputError
from calc.base.units import GiB, gib
from calc.catalog.catalog import load
from measurements.commands import Parser

from .edge import largest
from .machine import Machine
from .plan import Case, Plan, read
from .pool import Pool, TimedOut
from .progress import Clock, Progress
from .record import Results, edge_record, record, writable

PROBE_SECONDS = 300.0
AT_LEAST_SECONDS, TIMES_EXPECTED = 120.0, 4  # the time after which a case counts as hung
OTHERS = 2 * GiB  # more than a CUDA context: other processes hold memory
SPARES, PROBES_AHEAD = 4, 2  # processes made ready at most, and for the next probes of an edge


class OutOfTime(Exception):
    """The time given is over before a case could end."""


class Run:
    """One suite, from where its file stands to its end, or to the end of the time given."""

    def __init__(self, plan: Plan, cases: Sequence[Case], results: Results, pool: Pool, show: Progress) -> None:
        self.plan, self.cases, self.results, self.pool, self.show = plan, cases, results, pool, show
        self.clock = show.clock
        self.rest = {case.name: plan.seconds(case) for case in cases}

    def all(self) -> bool:
        """Measure every case that has no record; false where time ran out before."""
        whole = True
        for n, case in enumerate(self.cases):
            expected = self.rest[case.name]
            if self.clock.likely(expected) > self.clock.left:
                whole = False  # a shorter case further on may still have its turn
                continue
            self.show.start(case.name, self._rest())
            try:
                found = self.search(case) if case.edge else self.measure(case, self.cases[n + 1 :])
            except OutOfTime:
                whole = False
                break
            del self.rest[case.name]
            self.show.end(case.name, _words(found), self._rest())
        return whole

    def _rest(self) -> float:
        return sum(self.rest.values())

    def measure(self, case: Case, then: Sequence[Case]) -> dict[str, Any]:
        """The record of a case: the one in the file, or that of a process run now."""
        name = self.results.name(case)
        if name not in self.results.records:
            reason = self.plan.refuse(case)
            result = {"outcome": "failed", "reason": reason} if reason else self._result(case, then)
            self.results.add(record(self.plan, case, name, result))
        return self.results.records[name]

    def _result(self, case: Case, then: Sequence[Case]) -> dict[str, Any]:
        expected, started = self.plan.seconds(case), self.clock.elapsed
        allowed = max(AT_LEAST_SECONDS, TIMES_EXPECTED * self.clock.likely(expected))
        try:
            later = [self.plan.environment(each) for each in then[: self.pool.ahead]]
            result = self.pool.run(
                self.plan.job(case), self.plan.environment(case), min(allowed, self.clock.left), later
            )
        except TimedOut as error:
            if self.clock.left <= 0:
                raise OutOfTime from None  # not the case's fault: it stays for the next time
            result = {"outcome": "failed", "reason": f"{error}, of which {allowed:.0f} were allowed"}
        self.clock.ran(expected, self.clock.elapsed - started)
        return result

    def search(self, case: Case) -> dict[str, Any]:
        """The record of an edge. Each probe is a case with a record of its own, so an interrupted search resumes."""
        name, edge = self.results.name(case), case.edge
        assert edge is not None
        if name in self.results.records:
            return self.results.records[name]
        guesses = self.plan.guesses(case)

        def fits(size: int) -> bool:
            probe = case.at(size * edge.step)
            found = self.measure(probe, [probe] * PROBES_AHEAD)
            self.show.note(f"    {edge.field} {size * edge.step}: {_words(found)}")
            if found["verdict"] in ("failed", "untested"):
                raise _NoEdge(found.get("failure") or "no edge: without a GPU nothing runs out of memory")
            return bool(found["verdict"] == "fits")

        try:
            found = largest(fits, guesses["predicted"], edge.highest // edge.step)
        except _NoEdge as error:
            failed = {"outcome": "failed", "reason": str(error)}
            own = record(self.plan, case.at(edge.step), name, failed)
        else:
            own = edge_record(self.plan, case, name, found, guesses)
        self.results.add(own)
        return own


class _NoEdge(Exception):
    """A probe that neither ran nor ran out of memory."""


def _words(found: Mapping[str, Any]) -> str:
    """A record's outcome, for a line of progress."""
    if found["verdict"] == "failed":
        return str(found["failure"])
    if "edge" in found:
        edge = found["edge"]
        return f"{edge['field']} {edge['found']} runs, {edge['predicted']} predicted"
    if "rates" in found:
        return f"{len(found['rates'])} rates"
    seen = found["observed"]
    if "oom" in seen:
        return f"out of memory in {seen['oom']['phase']}"
    memory = f"{gib(seen['allocated_bytes'])} allocated, " if seen["allocated_bytes"] else ""
    return memory + (f"{seen['step_seconds']:.3f} s a step" if seen.get("step_seconds") else "ran")


def probe(pool: Pool, python: str) -> Machine:
    """The machine at hand, as a small job run on it found it."""
    try:
        result = pool.run({"kind": "probe"}, {}, PROBE_SECONDS)
    except OSError as error:
        raise InputError(f"--python: given {python!r}: {str(error.strerror).lower()}") from None
    except TimedOut as error:
        raise InputError(f"--python: the probe of this machine gave {error}") from None
    if result["outcome"] != "ran":
        said = str(result.get("reason") or result["oom"]["message"])
        if lacking := re.search(r"No module named '(torch|transformers)'", said):
            raise InputError(f"--python: given {python!r}, which has no {lacking[1]}, allowed: a Python that has it")
        raise InputError(f"--python: {said}")
    return Machine.of(result["machine"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (`sys.argv` by default) and returns its exit status."""
    try:
        return _main(_arguments(argv))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _main(options: argparse.Namespace) -> int:
    clock = Clock(None if options.minutes is None else 60 * options.minutes)
    catalog, cases = load(), read(options.suite)
    writable(options.out, cuda=True)
    results = Results(options.out)
    if options.retry:
        results.forget_failed()
    with Pool(options.python) as pool:
        machine = probe(pool, options.python)
        # a process that imports takes a core, and the one being measured must not wait for a core
        pool.ahead = min(SPARES, (machine.cores or 1) // 4) if machine.cuda else 0
        writable(options.out, machine.cuda)
        plan = Plan(catalog, machine, machine.gpu(catalog, options.gpu))
        for case in cases:
            plan.check(case)
        cases, named = plan.runnable(cases), cases
        todo = [case for case in cases if results.name(case) not in results.records]
        show = Progress(len(todo), sys.stderr, clock)
        show.note(f"{machine.words}; {len(todo)} of {len(cases)} cases to measure")
        if larger := sorted({plan.card(case).id for case in named if case not in cases}):
            show.note(f"{len(named) - len(cases)} cases left out, for {', '.join(larger)}: more memory than is at hand")
        if not machine.cuda:
            show.note("no GPU here: the cases run, and their records say nothing on memory")
        if (machine.used_bytes or 0) > OTHERS:
            show.note(f"another process seems to hold memory of this GPU: {gib(machine.used_bytes or 0)} were in use")
        started = time.strftime("%H:%M")
        whole = Run(plan, todo, results, pool, show).all()
    end = "" if whole else "; time is over, the same command goes on from here"
    print(f"{options.out}: {len(results.records)} records, begun {started}, {show.done} of {len(todo)} done{end}")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m measurements.bench", description=__doc__)
    parser.add_argument("suite", type=Path, metavar="SUITE.yaml", help="a suite, or a single scenario")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="records are added to this file")
    parser.add_argument("--gpu", metavar="ID", help="catalog id of the GPU at hand, where its name leaves it open")
    parser.add_argument("--minutes", type=float, metavar="N", help="start nothing that may not end in time")
    parser.add_argument("--retry", action="store_true", help="run the cases again that failed before")
    parser.add_argument(
        "--python", default=sys.executable, help="the Python that has PyTorch, if another than this one"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
