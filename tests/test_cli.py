from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from commands import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calc.__main__ import main
from calc.catalog.catalog import load
from calc.estimate.estimate import as_dict, estimate
from calc.models.architecture import parameters
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario

ROOT = Path(__file__).parent.parent
SFT = {"model": "llama-3-8b", "task": "sft", "gpu": "a100-80-sxm"}
Config = dict[str, Any]


def shell(*argv: str, stdin: bytes = b"", cwd: Path = ROOT) -> Run:
    done = subprocess.run(
        [sys.executable, "-m", "calc", *argv],
        input=stdin,
        capture_output=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    return Run(done.returncode, done.stdout.decode(), done.stderr.decode())


# --- estimate ---


@pytest.mark.parametrize("spelling", ["model: llama-3-8b\ntask: sft\ngpu: a100-80-sxm\n", json.dumps(SFT)])
def test_a_scenario_is_yaml_or_json_from_a_file_or_standard_input(
    run: Callable[..., Run], tmp_path: Path, spelling: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(spelling)
    from_file, from_input = run("estimate", str(file), "--json"), run("estimate", "-", "--json", stdin=spelling)
    assert from_file.status == 0
    assert json.loads(from_file.out) == json.loads(from_input.out) == as_dict(estimate(parse(SFT)))


def test_the_report_opens_with_the_verdict_and_shows_every_line_of_the_peak(run: Callable[..., Run]) -> None:
    answer = estimate(parse(SFT))
    report = run("estimate", "-", stdin=json.dumps(SFT)).out
    first, rest = report.split("\n", 1)
    assert first.startswith({"fits": "fits", "tight": "tight", "oom": "out of memory"}[answer.verdict])
    assert load().gpus[SFT["gpu"]].name in first
    (group,) = answer.groups
    for phase in group.phases:
        assert f"  {phase.name} " in rest
    for line in group.peak.moment.lines:
        assert line.formula in rest


def test_an_out_of_memory_verdict_is_an_answer(run: Callable[..., Run]) -> None:
    done = run("estimate", "-", stdin=json.dumps(SFT | {"gpu": "l4"}))
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("out of memory in ")


def test_what_a_reader_should_know_is_noted(run: Callable[..., Run]) -> None:
    assert "beyond the 8192 positions" in run("estimate", "-", stdin=json.dumps(SFT | {"seq_len": 9000})).out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "llama-3-8"}, ["model", "llama-3-8'", "did you mean"]),
        ({"gpu": "a100-80-sxn"}, ["gpu", "a100-80-sxn", "did you mean 'a100-80-sxm'"]),
        ({"seq_length": 4096}, ["seq_length", "did you mean 'seq_len'"]),
        ({"task": "stf"}, ["task", "stf", "did you mean 'sft'"]),
        ({"task": "inference", "framework": "trl"}, ["task", "inference", "sft, rm, dpo, kto, orpo, simpo, gkd, grpo"]),
        ({"gpus": 2, "sharding": "fsdp2", "expert_parallel": 2}, ["expert_parallel", "2", "without experts"]),
        ({"micro_batch": -1}, ["micro_batch", "-1", "at least 1"]),
        ({"seq_len": 10**15}, ["seq_len", "at most"]),
        ({"gpus": 12, "gpus_per_node": 8, "sharding": "zero2"}, ["gpus", "12", "gpus_per_node", "8"]),
        ({"gpus": 4, "sharding": "none"}, ["sharding", "none", "ddp"]),
        ({"framework": "openrlhf", "gpus": 4, "sharding": "zero3", "method": "qlora"}, ["qlora", "zero3"]),
    ],
)
def test_a_scenario_that_cannot_be_used_is_one_line_naming_file_field_and_what_is_allowed(
    run: Callable[..., Run], tmp_path: Path, change: dict[str, Any], told: list[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(SFT | change))
    for done in (run("estimate", str(file)), run("estimate", str(file), "--json")):
        line = done.refused()
        assert line.startswith(f"{file}: ")
        assert all(word in line for word in told), line


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "nothing"),
        (b"- model\n", "a mapping"),
        (b"llama", "a mapping"),
        (b"model: [\n", "YAML"),
        (b"model: a\nmodel: b\n", "twice"),
        (b'{"model": "a", "model": "b"}', "twice"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"a: 2024-13-45\n", "unknown field 'a'"),
        (b"\x00", "YAML"),
        (b"model: &a [*a]\ntask: sft\ngpu: a40\n", "the alias 'a'"),
        (b"&r {model: a, task: sft, gpu: a40, roles: *r}", "the alias 'r'"),
        (b"[" * 100_000, ""),
        (b'{"a":' * 100_000, ""),
        (b"gpus: " + b"9" * 5000, ""),
        (b"!!python/object:os.system {}", "the tag"),
        (b"--- {}\n--- {}\n", "YAML"),
    ],
)
def test_what_is_no_scenario_at_all_is_one_line_too(run: Callable[..., Run], raw: bytes, told: str) -> None:
    line = run("estimate", "-", stdin=raw).refused()
    assert line.startswith("standard input")
    assert told in line


def test_a_file_that_cannot_be_read_is_named(run: Callable[..., Run], tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert str(missing) in run("estimate", str(missing)).refused()
    assert str(tmp_path) in run("estimate", str(tmp_path)).refused()
    assert str(missing) in run("estimate", "--batch", str(missing)).refused()


# --- a model from a config.json ---


def config_file(folder: Path, **changes: Any) -> Path:
    config = {k: v for k, v in ({**load().models["llama-3-8b"].config, **changes}).items() if v is not None}
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def test_a_path_to_a_config_json_is_a_model(run: Callable[..., Run], tmp_path: Path) -> None:
    file = config_file(tmp_path)
    done = run("estimate", "-", "--json", stdin=json.dumps(SFT | {"model": str(file)}))
    answer, catalog = json.loads(done.out), as_dict(estimate(parse(SFT)))
    assert answer["scenario"]["model"] == str(file)
    assert answer["groups"] == catalog["groups"]
    assert parse(answer["scenario"]) == parse(SFT | {"model": str(file)})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[]", "a mapping"),
        (b"\xff", "UTF-8"),
        (b"{}", "model_type"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ],
)
def test_a_config_that_cannot_be_used_is_named_with_its_field(
    run: Callable[..., Run], tmp_path: Path, content: bytes | Config, told: str
) -> None:
    file = config_file(tmp_path, **content) if isinstance(content, dict) else tmp_path / "config.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    line = run("estimate", "-", stdin=json.dumps(SFT | {"model": str(file)})).refused()
    assert str(file) in line
    assert told in line


# --- a batch ---


def test_a_batch_answers_line_by_line_in_order_and_says_which_are_bad(run: Callable[..., Run], tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    lines = [
        json.dumps(SFT),
        "",
        "{",
        json.dumps(SFT | {"gpus": -1}),
        json.dumps(SFT | {"seq_len": 4096}),
        "\u2028",
        "",
        "",
    ]
    file.write_text("\n".join(lines))
    done = run("estimate", "--batch", str(file))
    assert (done.status, done.err) == (0, "")
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert answers[0] == as_dict(estimate(parse(SFT)))
    assert answers[4] == as_dict(estimate(parse(SFT | {"seq_len": 4096})))
    assert [list(answer) for answer in (*answers[1:4], *answers[5:])] == [["error"]] * 4
    for number in (2, 3, 4, 6):
        assert answers[number - 1]["error"].startswith(f"{file}:{number}:")
    assert "gpus" in answers[3]["error"]


def test_a_batch_comes_from_standard_input_too(run: Callable[..., Run]) -> None:
    done = run("estimate", "--batch", "-", stdin=b"\xff\n" + json.dumps(SFT).encode() + b"\n\n\n")
    bad, good = map(json.loads, done.out.splitlines())
    assert "UTF-8" in bad["error"]
    assert good["scenario"]["model"] == "llama-3-8b"


STRANDED = {"model": "qwen3-0.6b", "task": "ppo", "gpu": "rtx4090", "framework": "verl==0.4", "placement": "separate"}


def test_a_critic_without_gpus_or_partner_is_that_lines_answer(run: Callable[..., Run]) -> None:
    """It ended the whole batch with a traceback."""
    lines = [json.dumps(STRANDED | {"roles": {"actor": "none"}}), json.dumps(SFT)]
    bad, good = map(json.loads, run("estimate", "--batch", "-", stdin="\n".join(lines)).out.splitlines())
    assert "roles.critic.gpus: given none with placement 'separate'" in bad["error"]
    assert good["scenario"]["model"] == SFT["model"]


def test_a_fault_of_calc_is_its_lines_answer_and_no_more(run: Callable[..., Run], monkeypatch: Any) -> None:
    def stumble(s: Scenario) -> NoReturn:
        raise ZeroDivisionError("of calc" if s.gpus == 1 else "")

    monkeypatch.setattr("calc.estimate.estimate.estimate", stumble)
    done = run("estimate", "--batch", "-", stdin=f"{json.dumps(SFT)}\n{{}}\n")
    assert (done.status, done.err) == (0, "")
    fault, bad = [json.loads(line)["error"] for line in done.out.splitlines()]
    assert fault.startswith("standard input:1: a fault of calc and not of the line")
    assert bad == "standard input:2: missing field 'model'"


def test_an_empty_batch_has_no_answers(run: Callable[..., Run]) -> None:
    done = run("estimate", "--batch", "-")
    assert (done.status, done.out, done.err) == (0, "", "")


# --- the lists ---


def test_the_models_are_listed_with_their_exact_parameters(run: Callable[..., Run]) -> None:
    listed = {record["id"]: record for record in json.loads(run("models", "--json").out)}
    assert set(listed) == set(load().models)
    for name, model in load().models.items():
        assert listed[name]["parameters"] == parameters(model.architecture)
        assert listed[name]["name"] == model.name
    table = run("models").out
    assert "8,030,261,248" in table
    assert len(table.splitlines()) == 1 + len(listed)


def test_the_gpus_are_listed_with_what_a_process_can_use(run: Callable[..., Run]) -> None:
    listed = {record["id"]: record for record in json.loads(run("gpus", "--json").out)}
    assert set(listed) == set(load().gpus)
    for name, gpu in load().gpus.items():
        assert listed[name] == {
            "id": name,
            "name": gpu.name,
            "memory_gb": gpu.memory_gb,
            "usable_bytes": gpu.usable_bytes,
        }
    assert len(run("gpus").out.splitlines()) == 1 + len(listed)


def test_check_says_what_it_checked_in_one_line(run: Callable[..., Run]) -> None:
    done = run("check")
    assert done.status == 0
    assert done.out.count("\n") == 1
    assert f"{len(load().gpus)} GPUs" in done.out


# --- the command line itself ---


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "command"),
        (["estmate"], "did you mean 'estimate'"),
        (
            ["recommended"],
            "allowed: estimate, recommend, diagnose, lengths, models, gpus, check, add; did you mean 'recommend'?",
        ),
        (["estimate"], "SCENARIO"),
        (["estimate", "a", "--batch", "b"], "both"),
        (["estimate", "--batch"], "--batch"),
        (["estimate", "a", "b"], "'b'"),
        (["gpus", "--jsno"], "did you mean '--json'"),
        (["gpus", "h100"], "'h100'"),
        (["check", "--json"], "--json"),
        (["--version"], "command"),
        (["mod\nels"], "command"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_one_line(run: Callable[..., Run], argv: list[str], told: str) -> None:
    assert told in run(*argv).refused()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.one_of(st.binary(max_size=60), st.text(alphabet="{}[]:,-&*!'\"# \nabgpus1.~%", max_size=60).map(str.encode))
)
def test_no_input_ends_in_a_traceback(run: Callable[..., Run], raw: bytes) -> None:
    run("estimate", "-", stdin=raw).refused()
    done = run("estimate", "--batch", "-", stdin=raw)
    assert done.status == 0
    assert all(set(json.loads(line)) == {"error"} for line in done.out.splitlines())


# --- as a process ---


def test_it_runs_from_any_folder(tmp_path: Path) -> None:
    done = shell("estimate", "-", "--json", stdin=json.dumps(SFT).encode(), cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out)["scenario"]["model"] == "llama-3-8b"


def test_as_a_process_an_error_is_one_line_and_status_2(tmp_path: Path) -> None:
    assert "did you mean 'gpus'" in shell("gpu").refused()
    assert "did you mean" in shell("estimate", "-", stdin=json.dumps(SFT | {"gpu": "h100-sx"}).encode()).refused()
    assert "not UTF-8" in shell("estimate", "-", stdin=b"\xff").refused()


def test_a_reader_that_leaves_early_is_no_error() -> None:
    lines = (json.dumps(SFT) + "\n") * 300
    process = subprocess.Popen(
        [sys.executable, "-m", "calc", "estimate", "--batch", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write(lines.encode())
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_an_answer_that_cannot_be_written_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a standard output that the shell has closed; status 1, as nothing was wrong with the input."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("calc.__main__._silence", lambda: None)
    for out, told in ((Full(), "no space left on device"), (None, "closed")):
        err = io.StringIO()
        with monkeypatch.context() as m:
            m.setattr("sys.stdout", out)
            m.setattr("sys.stderr", err)
            assert main(["gpus"]) == 1
        assert err.getvalue() == f"standard output: {told}\n"


@pytest.mark.parametrize(
    ("name", "right", "wrong", "told"),
    [
        ("hardware/gpus/a40.yaml", "vendor:", "vendro:", ": unknown field 'vendro'; did you mean 'vendor'?"),
        ("measurements/throughput.jsonl", '"verdict":', '"verdcit":', ":1: unknown field 'verdcit'; did you mean"),
    ],
)
def test_an_invalid_catalog_stops_the_check(
    run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    right: str,
    wrong: str,
    told: str,
) -> None:
    """Records included, which an estimate does not validate."""
    for folder in ("hardware", "models", "measurements"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    file = tmp_path / name
    file.write_text(file.read_text("utf-8").replace(right, wrong), "utf-8")
    monkeypatch.setattr("calc.catalog.catalog.load", lambda: load(tmp_path))
    assert run("check").refused().startswith(f"{name}{told}")


def test_a_list_of_the_catalog_waits_for_no_estimate() -> None:
    """To import all of calc takes longer than most answers do."""
    asked = "import sys; from calc.__main__ import main; main(['gpus', '--json']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {name.split(".")[1] for name in done.stderr.split() if name.startswith("calc.")}
    assert json.loads(done.stdout)
    assert imported == {"__main__", "base", "catalog", "models"}
