"""Fresh processes, one a case; the processes of the next cases import their libraries while one runs."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
GRACE_SECONDS = 3.0


class TimedOut(Exception):
    """A case ran past its time and was ended."""


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[str]
    errors: IO[str]
    environment: Mapping[str, str]


class Pool:
    """Runs jobs in processes of `python`, with up to `ahead` made ready for the next jobs."""

    def __init__(self, python: str, *, ahead: int = 0) -> None:
        self.command = [python, "-m", "measurements.bench.worker"]
        self.ahead = ahead
        self._spares: list[_Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *raised: object) -> None:
        while self._spares:
            _end(self._spares.pop())

    def run(
        self,
        job: Mapping[str, Any],
        environment: Mapping[str, str],
        timeout: float,
        then: Sequence[Mapping[str, str]] = (),
    ) -> dict[str, Any]:
        """The result of one job in a process that has run nothing before, with these environment variables.

        `then` are the environments of the jobs expected next. Raises TimedOut. A process that dies gives a result with
        outcome `failed` and the last line that it printed.
        """
        worker = self._take(environment)
        try:
            assert worker.process.stdin and worker.process.stdout
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.write(json.dumps(job) + "\n")
                worker.process.stdin.flush()
            self._prepare(then[: self.ahead])
            # standard input stays open: the worker ends when it closes, so it cannot outlive this process
            return self._answer(worker, timeout)
        finally:
            _end(worker)

    def _take(self, environment: Mapping[str, str]) -> _Worker:
        """A spare process with this environment, the oldest if there are several, or else a new one."""
        for worker in self._spares:
            if worker.environment == environment and worker.process.poll() is None:
                self._spares.remove(worker)
                return worker
        return self._start(environment)

    def _prepare(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Have a spare process for each of the environments, and no other."""
        idle, self._spares = self._spares, []
        for environment in environments:
            fit = next((w for w in idle if w.environment == environment and w.process.poll() is None), None)
            if fit:
                idle.remove(fit)
            self._spares.append(fit or self._start(environment))
        for worker in idle:
            _end(worker)

    def _start(self, environment: Mapping[str, str]) -> _Worker:
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed when the worker ends)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # so that its children end with it, and the terminal's Ctrl-C is ours alone
            env={**os.environ, **ALWAYS, "PYTHONPATH": path, **environment},
        )
        return _Worker(process, errors, dict(environment))

    def _answer(self, worker: _Worker, timeout: float) -> dict[str, Any]:
        stream, process = worker.process.stdout, worker.process
        assert stream
        with selectors.DefaultSelector() as ready:
            ready.register(stream, selectors.EVENT_READ)
            if not ready.select(max(timeout, 0.0)):
                raise TimedOut(f"no result in {timeout:.0f} s")
        line = stream.readline()  # a worker writes its one line all at once
        if line.strip():
            result: dict[str, Any] = json.loads(line)
            return result
        status = process.wait()
        worker.errors.seek(0)
        said = [text.strip() for text in worker.errors.read().splitlines() if text.strip()]
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return {"outcome": "failed", "reason": ": ".join([f"the process ended with {how}", *said[-1:]])[:1000]}


def _end(worker: _Worker) -> None:
    """End a process and its children: by closing its input, then by signals."""
    process = worker.process
    with contextlib.suppress(BrokenPipeError):
        if process.stdin:
            process.stdin.close()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        if process.returncode is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
    process.wait()
    if process.stdout:
        process.stdout.close()
    worker.errors.close()
