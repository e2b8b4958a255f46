"""The file of records: mended, resumed, valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stub_worker

from calc.base.schema import InputError
from calc.catalog.catalog import load
from measurements.bench.machine import Machine
from measurements.bench.plan import ROOT, Case, Plan
from measurements.bench.record import Results, record, writable

PLAN = Plan(load(), Machine.of(stub_worker.MACHINE), load().gpus["h200"])
CASE = Case({"model": "qwen2.5-0.5b", "task": "sft"})


def made(name: str, **scenario: Any) -> dict[str, Any]:
    case = Case({**CASE.scenario, **scenario})
    return record(PLAN, case, name, stub_worker.answer({"kind": "step", "scenario": PLAN.fields(case), "steps": 5}))


def test_a_last_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    Results(file).add(made("one"))
    whole = file.read_bytes()
    file.write_bytes(whole + json.dumps(made("two")).encode()[:-40])
    assert list(Results(file).records) == ["one"]
    assert file.read_bytes() == whole


def test_a_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(made("one")))
    results = Results(file)
    results.add(made("two"))
    assert list(Results(file).records) == ["one", "two"]


def test_a_broken_line_amid_others_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(made('one'))}\nbroken\n{json.dumps(made('two'))}\n")
    with pytest.raises(InputError, match=r"a\.jsonl:2: not JSON"):
        Results(file)


def test_what_the_schema_refuses_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with pytest.raises(InputError, match=r"unknown field 'observed.alocated'"):
        Results(file).add({**made("one"), "observed": {"alocated": 1}})
    assert not file.exists()


def test_failed_records_can_be_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    results = Results(file)
    for one in (made("one"), made("two", attention="eager"), made("three")):
        results.add(one)
    results.forget_failed()
    assert list(Results(file).records) == ["one", "three"]


def test_a_figure_a_verdict_a_failure() -> None:
    fits, failed = made("one"), made("two", attention="eager")
    assert (fits["metric"], fits["measured_bytes"], fits["verdict"]) == ("allocated", 10 * 2**30, "fits")
    assert fits["machine"]["words"].startswith("one NVIDIA H200 (139.8 GiB)")
    assert fits["scenario"]["optimizer_impl"] == "foreach"  # defaults are filled in
    assert (failed["metric"], failed["measured_bytes"], failed["verdict"]) == ("verdict", None, "failed")
    assert failed["failure"] == "forward: ValueError: no eager attention today"


def test_without_a_gpu_a_record_says_nothing_on_memory(tmp_path: Path) -> None:
    plan = Plan(load(), Machine("cpu", "CPU", {"torch": "2.13.0+cpu"}), load().gpus["h200"])
    one = record(plan, CASE, "one", {"outcome": "ran", "observed": {"allocated_bytes": None, "steps": 5}})
    assert (one["metric"], one["measured_bytes"], one["verdict"]) == ("verdict", None, "untested")
    Results(tmp_path / "a.jsonl").add(one)


def test_without_a_gpu_nothing_goes_among_the_projects_data(tmp_path: Path) -> None:
    writable(tmp_path / "a.jsonl", cuda=False)
    writable(ROOT / "measurements/a.jsonl", cuda=True)
    for path, cuda in (
        (ROOT / "measurements/a.jsonl", False),
        (tmp_path / "a.json", True),
        (tmp_path / "b/a.jsonl", True),
    ):
        with pytest.raises(InputError, match=r"^--out: given "):
            writable(path, cuda)
