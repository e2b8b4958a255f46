"""The command from end to end, with a stand-in for the Python that has PyTorch."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from calc.catalog.catalog import load
from measurements.bench.__main__ import main
from measurements.bench.pool import Pool, TimedOut
from measurements.bench.progress import Clock, Progress, duration

ROOT = Path(__file__).parents[2]
SUITE = """
defaults: {model: qwen2.5-0.5b, task: sft, seq_len: 1024}
cases:
  - {micro_batch: 4}
  - {attention: eager}
  - {optimizer: adamw-8bit, expandable_segments: true}
  - {micro_batch: 100, gpu: rtx4090}
  - {precision: fp32}
  - {framework: openrlhf, gpus: 2}
  - {task: inference, bench: {kind: matmul}}
"""


class Bench:
    """A folder with a suite, an out file, and a stand-in for the worker's Python."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.suite, self.out, self.log = folder / "suite.yaml", folder / "out.jsonl", folder / "log.jsonl"
        self.python = folder / "python"
        stub = Path(__file__).with_name("stub_worker.py")
        self.python.write_text(f"#!/bin/sh\nexec {sys.executable} {stub}\n")
        self.python.chmod(0o755)
        monkeypatch.setenv("BENCH_LOG", str(self.log))
        monkeypatch.setenv("BENCH_LARGEST", "50000")
        self.suite.write_text(SUITE)

    @property
    def command(self) -> list[str]:
        return [str(self.suite), "--out", str(self.out), "--python", str(self.python)]

    def run(self, *more: str) -> int:
        return main([*self.command, *more])

    def records(self) -> dict[str, dict[str, Any]]:
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        return {record["id"].removeprefix("measured/out/qwen2.5-0.5b/"): record for record in map(json.loads, lines)}

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs that were run, probes aside."""
        jobs = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [job for job in jobs if job["kind"] != "probe"]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_every_case_has_a_record_and_the_catalog_takes_them(bench: Bench, tmp_path: Path) -> None:
    assert bench.run() == 0
    records = bench.records()
    assert {name: record["verdict"] for name, record in records.items()} == {
        "sft/s1024/mb4": "fits",
        "sft/s1024/attention=eager": "failed",
        "sft/s1024/optimizer=adamw-8bit/expandable_segments=True": "fits",
        "sft/s1024/mb100/gpu=rtx4090": "oom",
        "sft/s1024/precision=fp32": "failed",
        "sft/s1024/framework=openrlhf/gpus=2": "failed",
        "inference/s1024/matmul": "untested",
    }
    assert records["sft/s1024/mb100/gpu=rtx4090"]["observed"]["oom"]["phase"] == "backward"
    assert records["sft/s1024/precision=fp32"]["failure"] == "the process ended with exit status 3: a last word"
    assert records["sft/s1024/framework=openrlhf/gpus=2"]["failure"] == "not run: framework openrlhf is not built here"
    assert records["inference/s1024/matmul"]["rates"] == [{"op": "matmul", "seconds": 0.12346, "tflops": 700}]

    root = tmp_path / "root"
    (root / "measurements").mkdir(parents=True)
    for name in ("hardware", "models", "measurements/schema.json", "measurements/exhausted"):
        (root / name).symlink_to(ROOT / name)
    (root / "measurements/out.jsonl").write_bytes(bench.out.read_bytes())
    assert len(load(root).measurements) == 7


def test_each_case_has_a_process_its_allocator_setting_and_its_limit(bench: Bench) -> None:
    bench.run()
    jobs = bench.jobs()
    assert len({job["pid"] for job in jobs}) == len(jobs) == 6
    assert [job["conf"] for job in jobs[:3]] == [f"expandable_segments:{on}" for on in (False, False, True)]
    card = load().gpus["rtx4090"].usable_bytes
    assert [job["limit_bytes"] for job in jobs] == [None, None, None, card - 2**29, None, None]
    assert bench.records()["sft/s1024/mb100/gpu=rtx4090"]["observed"]["limit_bytes"] == card - 2**29


def test_what_has_a_record_is_not_run_again(bench: Bench) -> None:
    bench.run()
    before = bench.out.read_bytes()
    bench.log.write_text("")
    assert bench.run() == 0
    assert (bench.jobs(), bench.out.read_bytes()) == ([], before)


def test_retry_runs_the_failed_ones_again(bench: Bench) -> None:
    bench.run()
    bench.log.write_text("")
    bench.run("--retry")
    assert len(bench.jobs()) == 2  # the third is refused without a process
    assert len(bench.records()) == 7


def test_a_run_that_is_killed_leaves_no_process_and_goes_on(bench: Bench) -> None:
    bench.suite.write_text(SUITE.replace("{attention: eager}", "{optimizer: sgd}"))  # which takes its time
    with subprocess.Popen([sys.executable, "-m", "measurements.bench", *bench.command], cwd=ROOT) as run:
        wait_for(lambda: bench.log.exists() and len(bench.jobs()) == 2)
        run.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(alive(job["pid"]) for job in bench.jobs()))
    assert list(bench.records()) == ["sft/s1024/mb4"]
    bench.suite.write_text(SUITE)
    bench.run()
    assert len(bench.records()) == 7


def wait_for(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_case_past_its_time_is_ended(bench: Bench) -> None:
    with Pool(str(bench.python)) as pool, pytest.raises(TimedOut):
        scenario = {"attention": "sdpa", "precision": "bf16", "optimizer": "sgd-momentum"}
        pool.run({"kind": "step", "scenario": scenario}, {}, timeout=1)
    wait_for(lambda: not alive(bench.jobs()[0]["pid"]))


@pytest.mark.parametrize("edge", [48, 3, 1, 0])
def test_an_edge_holds_what_was_found_beside_what_was_predicted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, edge: int
) -> None:
    bench.suite.write_text(
        "cases: [{model: qwen2.5-0.5b, task: sft, seq_len: 1024, gpu: rtx4090, bench: {edge: {field: micro_batch}}}]"
    )
    monkeypatch.setenv("BENCH_LARGEST", str(1024 * edge + 1))
    assert bench.run() == 0
    records = bench.records()
    summary = records.pop("sft/s1024/mb-edge/gpu=rtx4090")
    seen = {record["scenario"]["micro_batch"]: record["verdict"] for record in records.values()}
    assert summary["edge"]["found"] == edge and summary["edge"]["fails_at"] == edge + 1
    assert summary["edge"]["probes"] == len(seen) == len(bench.jobs())
    assert seen[edge + 1] == "oom" and (edge == 0 or seen[edge] == "fits")
    assert summary["scenario"]["micro_batch"] == max(edge, 1)
    assert summary["verdict"] == ("fits" if edge else "oom")
    assert 1 <= summary["edge"]["predicted_fits"] <= summary["edge"]["predicted"]
    bench.log.write_text("")
    bench.out.write_text("".join(line for line in bench.out.open() if "mb-edge" not in line))
    bench.run()  # a search cut off before its end goes on with the probes it has
    assert bench.jobs() == [] and bench.records()["sft/s1024/mb-edge/gpu=rtx4090"]["edge"] == summary["edge"]


def test_an_edge_whose_probe_fails_is_failed(bench: Bench) -> None:
    bench.suite.write_text(
        "cases: [{model: qwen2.5-0.5b, task: sft, attention: eager, bench: {edge: {field: micro_batch}}}]"
    )
    assert bench.run() == 0
    assert {record["verdict"] for record in bench.records().values()} == {"failed"}


def test_no_case_is_begun_that_would_not_end_in_time(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--minutes", "0.05") == 0
    assert bench.records() == {}
    assert "time is over, the same command goes on from here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x.json"], "--out: given 'x.json', allowed: a name that ends in .jsonl"),
        (["--gpu", "h20O"], "gpu: given 'h20O'"),
        (["--python", "/bin/false"], "--python: the process ended with exit status 1"),
        (["--python", "/no/such/python"], "--python: given '/no/such/python': no such file or directory"),
    ],
)
def test_bad_input_is_one_line(
    bench: Bench, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert bench.run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(message) and printed.err.count("\n") == 1


def test_a_python_without_pytorch_is_named(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    assert bench.run() == 2
    assert capsys.readouterr().err == (
        f"--python: given '{bench.python}', which has no torch, allowed: a Python that has it\n"
    )


def test_progress_is_plain_lines_where_there_is_no_terminal(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("7 of 7 cases to measure")
    assert lines[1].startswith("[1/7] qwen2.5-0.5b/sft/s1024/mb4: 10.0 GiB allocated, 0.250 s a step, ")
    assert lines[1].endswith(" left") and lines[-1].startswith("[7/7]") and "\x1b" not in "".join(lines)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_keeps_one_line_up_to_date_on_a_terminal() -> None:
    now = iter(range(100))
    stream, clock = Terminal(), Clock(None, lambda: next(now))
    show = Progress(2, stream, clock)
    show.start("a", 40)
    clock.ran(20, 10)  # twice as fast as expected
    show.end("a", "ran", 20)
    assert stream.getvalue() == "\r\x1b[K[1/2] a … 40 s left\r\x1b[K[1/2] a: ran, 10 s left\n"


@pytest.mark.parametrize(("seconds", "text"), [(7, "7 s"), (89, "89 s"), (600, "10 min"), (7500, "2 h 05 min")])
def test_durations_are_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text
