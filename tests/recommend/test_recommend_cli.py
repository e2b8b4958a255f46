"""`python -m calc recommend`: its options, its two forms, its exit status and what it says of bad input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Run

from calc import __main__ as main
from calc.catalog.catalog import load
from calc.recommend import options, recommend
from calc.recommend.problem import COUNTS
from calc.resolve.parse import parse
from calc.scenario.scenario import SCHEMA

RL = ("--model", "llama-3-8b", "--task", "ppo", "--gpu", "a40", "--gpus", "2")
JOB = ("--model", "llama-3-8b", "--task", "sft", "--framework", "openrlhf", "--method", "full")
EIGHT = (*JOB, "--gpu", "a100-40-sxm", "--gpus", "8")
CONFIGURATION = {
    "scenario", "verdict", "fit_probability", "peak_device_bytes", "peak_device_range", "peak_phase", "phases",
    "usable_bytes", "slack_bytes", "host_peak_bytes_per_node", "throughput",
}  # fmt: skip


def asked(run: Callable[..., Run], *argv: str) -> dict[str, Any]:
    done = run("recommend", *argv, "--json")
    assert (done.status, done.err) == (0, "")
    answer = json.loads(done.out)
    assert isinstance(answer, dict)
    return answer


def test_json_holds_the_configurations_with_their_memory_and_time_and_a_command(run: Callable[..., Run]) -> None:
    answer = asked(run, *EIGHT)
    assert set(answer) == {
        "recommended", "alternatives", "fails", "passed", "advice", "considered", "pruned", "command", "files",
        "notes",
    }  # fmt: skip
    assert set(answer["recommended"]) == CONFIGURATION
    for other in answer["alternatives"]:
        assert set(other) == CONFIGURATION | {"trades"}
    assert set(answer["fails"]) == CONFIGURATION | {"lacks", "phase", "shortfall_bytes", "reason"}
    expected = recommend(options.read(EIGHT, "recommend"))
    assert expected.recommended
    assert expected.recommended.throughput
    assert parse(answer["recommended"]["scenario"]) == expected.recommended.scenario
    pace = answer["recommended"]["throughput"]
    assert pace["step_seconds"] == expected.recommended.throughput.step_seconds
    assert sum(pace["terms"].values()) == pytest.approx(pace["step_seconds"])
    assert expected.launch
    assert answer["command"] == expected.launch.command
    assert (answer["considered"], answer["pruned"]) == (expected.considered, expected.pruned)


def test_a_recommended_scenario_can_be_estimated_as_it_stands(run: Callable[..., Run]) -> None:
    scenario = asked(run, *EIGHT)["recommended"]["scenario"]
    assert run("estimate", "-", stdin=json.dumps(scenario)).out.startswith("fits")


def test_text_says_what_to_run_what_fails_and_how_to_start_it(run: Callable[..., Run]) -> None:
    out = run("recommend", *EIGHT).out
    answer = asked(run, *EIGHT)
    assert out.startswith("recommended\n  llama-3-8b, sft, full, ")
    assert "next faster, which does not fit" in out
    assert f"{answer['considered']:,} configurations considered, {answer['pruned']:,} pruned" in out
    assert answer["command"].strip() in out
    for line in answer["advice"]:
        assert f"  {line}\n" in out
    for n, other in enumerate(answer["alternatives"], 1):
        assert f"alternative {n}: {other['trades']}" in out


def test_what_is_given_stays_fixed_by_option_or_by_file(run: Callable[..., Run], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("sharding: zero3\noffload: {optimizer: true}\nseq_len: 1024\n")
    options_too = ("--seq-len", "4096", "--checkpointing=full")
    s = asked(run, *EIGHT, "--scenario", str(file), *options_too)["recommended"]["scenario"]
    assert (s["sharding"], s["offload"]["optimizer"], s["seq_len"], s["checkpointing"]) == ("zero3", True, 4096, "full")


def test_without_gpus_the_answer_is_on_the_smallest_machine_and_says_how_that_is_ranked(
    run: Callable[..., Run],
) -> None:
    answer = asked(run, *JOB, "--gpu", "a100-80-sxm")
    before = answer["machines_too_small"] + answer["machines_too_slow"]
    assert answer["recommended"]["scenario"]["gpus"] == COUNTS[before]
    assert any("no prices" in note for note in answer["notes"])
    out = run("recommend", *JOB, "--gpu", "a100-80-sxm").out
    assert out.startswith(f"smallest machine: {COUNTS[before]} x ")
    assert "no prices" in out


def test_nothing_feasible_is_an_answer(run: Callable[..., Run]) -> None:
    argv = ("--model", "llama-3-70b", *JOB[2:], "--gpu", "a100-40-sxm", "--gpus", "1")
    answer = asked(run, *argv)
    assert (answer["recommended"], answer["alternatives"], answer["command"]) == (None, [], None)
    assert answer["fails"]["shortfall_bytes"] > 0
    assert answer["fails"]["verdict"] == "oom"
    out = run("recommend", *argv).out
    assert out.startswith("nothing fits\n")
    assert "closest miss" in out
    assert "what would have to change" in out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ((*EIGHT, "--seq-length", "4"), ["--seq-length", "did you mean '--seq-len'"]),
        ((*EIGHT, "--seq-len"), ["--seq-len", "given nothing", "a value"]),
        ((*EIGHT, "--seq-len", "--json"), ["--seq-len", "given nothing"]),
        ((*EIGHT, "--seq-len", "long"), ["seq_len: given 'long'", "an integer"]),
        ((*EIGHT, "--seq-len", "4", "--seq-len", "8"), ["--seq-len", "twice"]),
        ((*EIGHT, "--gpu", "h100"), ["--gpu", "twice"]),
        ((*JOB, "--gpus", "8", "--gpu", "h100-sxn"), ["gpu", "h100-sxn", "did you mean 'h100-sxm'"]),
        (("--model", "lama-3-8b", *EIGHT[2:]), ["model", "lama-3-8b", "did you mean"]),
        ((*EIGHT[:3], "stf", *EIGHT[4:]), ["task", "stf", "did you mean 'sft'"]),
        (EIGHT[2:], ["missing field 'model'"]),
        (("--model", "llama-3-8b"), ["missing field 'task'"]),
        ((*EIGHT, "--sharding", "fsdp2"), ["sharding", "fsdp2", "zero2"]),
        ((*EIGHT, "--lora.rank", "8"), ["lora.rank", "method full"]),
        ((*EIGHT, "--lora.rank", "["), ["--lora.rank", "YAML"]),
        ((*EIGHT, "--offload.optimizer", "maybe"), ["offload.optimizer", "maybe", "true or false"]),
        ((*JOB, "--gpu", "a40", "--gpus", "abc"), ["recommend: gpus: given 'abc'", "an integer"]),
        ((*JOB, "--gpus", "abc"), ["recommend: gpus: given 'abc'", "an integer"]),
        ((*RL, "--framework", "oenrlhf"), ["recommend: framework: given 'oenrlhf'", "did you mean 'openrlhf'"]),
        ((*RL, "--framework", "verl==x"), ["recommend: framework: given 'verl==x'", "verl==1.0"]),
        ((*JOB, "--gpu", "a40", "--gpus", "[1]"), ["recommend: gpus: given a list, [1]", "an integer"]),
        ((*JOB, "--gpu", "[a]"), ["recommend: gpu: given a list, ['a']", "text"]),
        ((*JOB, "--gpu", "5", "--gpus", "1"), ["recommend: gpu: given '5'", "calc gpus"]),
        ((*JOB, "--gpus-per-node", "[1]"), ["recommend: gpus_per_node: given a list, [1]", "an integer"]),
        ((*EIGHT, "--roles.reference", "{a: 1}"), ["roles.reference.a"]),
        ((*EIGHT, "job.yaml"), ["job.yaml", "an option"]),
        ((*EIGHT, "--scenario", "no/such.yaml"), ["no/such.yaml"]),
    ],
)
def test_bad_input_is_one_line_that_names_the_option_or_field(
    run: Callable[..., Run], argv: tuple[str, ...], told: list[str]
) -> None:
    line = run("recommend", *argv).refused()
    assert all(word in line for word in told), line


ONE = (
    "--model",
    "llama-3.1-8b",
    "--task",
    "sft",
    "--framework",
    "trl",
    "--gpu",
    "rtx4090",
    "--gpus",
    "1",
    "--seq-len",
    "2048",
)


def test_adapters_that_nobody_asked_for_say_what_full_fine_tuning_lacks(run: Callable[..., Run]) -> None:
    answer = asked(run, *ONE)
    assert answer["recommended"]["scenario"]["method"] == "lora"
    assert answer["passed"]["scenario"]["method"] == "full"
    assert answer["passed"]["verdict"] != "fits" or answer["passed"]["shortfall_bytes"] > 0
    text = run("recommend", *ONE).out
    assert "method full comes first, and where it is closest lacks" in text
    assert asked(run, *ONE, "--method", "lora")["passed"] is None
    assert asked(run, *EIGHT)["passed"] is None


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ((*ONE, "--global-batch", "64"), "a step: 64 sequences, 131,072 tokens; each GPU takes 64 of them in"),
        ((*ONE, "--global-batch", "6", "--micro-batch", "3"), "a step: 6 sequences, 12,288 tokens; each GPU takes 6 of "
         "them in 2 forwards, micro batch 3"),
    ],
)  # fmt: skip
def test_an_answer_says_what_a_step_holds_and_its_speed_over_the_whole_job(
    run: Callable[..., Run], job: tuple[str, ...], said: str
) -> None:
    text = run("recommend", *job).out
    assert said in text
    assert "tokens a second over the whole job" in text


def test_a_long_time_has_no_exponent_and_that_of_rl_is_an_iteration_s(run: Callable[..., Run]) -> None:
    text = run("recommend", "--framework", "openrlhf", *RL[:-1], "4").out
    [timed] = [line for line in text.split("alternative")[0].splitlines() if "an iteration, " in line][:1]
    assert re.fullmatch(r"  \d,\d{3} s an iteration, [\d,]+ tokens a second over the whole job; bound by .*", timed)
    assert "e+0" not in text and " s a step" not in text
    assert " s a step, " in run("recommend", *EIGHT).out


def test_text_of_an_address_is_the_value_that_an_option_has() -> None:
    values = {
        "gpus": 8, "rollout.gpu_memory_utilization": 0.5, "roles.reference": {}, "versions.torch": "2.4",
        "lora.targets": ["q_proj", "v_proj"], "rollout.sleep": True, "model": "llama-3-8b",
    }  # fmt: skip
    texts = options.spelled(values)
    assert texts["rollout.sleep"] == "true" and texts["versions.torch"] == "2.4"
    assert options.typed(texts, "p") == values


def test_every_field_of_a_scenario_is_an_option() -> None:
    names = dict(options.names())
    flat = {name for name, value in SCHEMA["properties"].items() if "properties" not in value}
    assert flat <= set(names)
    assert {"rollout.gpu_memory_utilization", "lora.targets", "versions.torch", "roles.critic.model",
            "roles.actor.offload.parameters", "roles.reference"} <= set(names)  # fmt: skip
    read = options.read(
        ("--rollout.gpu-memory-utilization", "0.5", "--roles.reference=none", "--versions.torch", "2.4",
         "--lora.targets", "[q_proj, v_proj]", "--rollout.sleep", "true"), "p",
    )  # fmt: skip
    assert read == {
        "rollout.gpu_memory_utilization": 0.5, "roles.reference": "none", "versions.torch": "2.4",
        "lora.targets": ["q_proj", "v_proj"], "rollout.sleep": True,
    }  # fmt: skip


def test_progress_is_said_on_standard_error_after_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 0.5, 1.1, 1.2, 2.2))
    monkeypatch.setattr(main, "monotonic", lambda: next(clock))
    progress = main._Progress()
    for line in ("first", "second", "third", "fourth"):
        progress(line)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "second\nfourth\n")
    assert not sys.stderr.isatty()


def test_the_largest_machine_is_named_where_none_suffices(run: Callable[..., Run]) -> None:
    answer = asked(run, "--model", "deepseek-v3", *JOB[2:], "--gpu", "l4", "--gpus", "2")
    assert answer["recommended"] is None
    assert answer["fails"]["scenario"]["gpu"] in load().gpus


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpus: x", "gpus: given 'x', allowed: an integer"),
        ("gpu: 5", "gpu: given 5, allowed: text"),
        ("gpu: true", "gpu: given true, allowed: text"),
        ("gpus_per_node: [1]", "gpus_per_node: given a list, [1], allowed: an integer"),
        ("gpus: !!bool maybe", "given the tag '!!bool'"),
        ("gpu: h100", "gpu: given 'h100', allowed: "),
    ],
)
def test_a_fault_of_the_file_is_the_files_and_one_of_an_option_the_options(
    run: Callable[..., Run], tmp_path: Path, text: str, told: str
) -> None:
    """Each is held to the schema where it stands, before a field of it is used."""
    path = tmp_path / "job.yaml"
    path.write_text(f"model: qwen3-0.6b\ntask: sft\n{text}\n")
    line = run("recommend", "--scenario", str(path), "--seq-len", "512").refused()
    assert line.startswith(str(path))
    assert told in line
    path.write_text("model: qwen3-0.6b\ntask: sft\n")
    assert (
        run("recommend", "--scenario", str(path), "--gpus", "abc").refused().startswith("recommend: gpus: given 'abc'")
    )


def test_a_reference_that_differs_in_nothing_can_be_asked_for(run: Callable[..., Run]) -> None:
    """`{}`: GRPO's KL reference as the actor has it."""
    job = ("--model", "qwen3-0.6b", "--task", "grpo", "--framework", "verl", "--gpu", "a100-80-sxm", "--gpus", "8")
    roles = asked(run, *job, "--roles.reference", "{}")["recommended"]["scenario"]["roles"]
    assert roles["reference"]["model"] == "qwen3-0.6b"
    assert asked(run, *job)["recommended"]["scenario"]["roles"]["reference"] == "none"
