"""`python -m measurements.add`: a record is checked, compared and appended, or refused in one line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from calc.catalog.catalog import CatalogError, load
from measurements import add

RECORD: dict[str, Any] = {
    "id": "mine/llama-3.2-1b",
    "source": "a test",
    "url": None,
    "class": "measured",
    "metric": "allocated",
    "measured_bytes": 20 * 2**30,
    "verdict": "fits",
    "confidence": "high",
    "scenario": {"model": "llama-3.2-1b", "task": "sft", "gpu": "a100-80-sxm", "seq_len": 1024},
}


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rest of the set is as it is, and not gone through again for each record."""
    calls: list[str] = []
    monkeypatch.setattr(add, "check", lambda: calls.append("check"))
    return calls


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of what stands for measurements/, so that nothing is written there."""
    folder = (tmp_path / "measurements").resolve()
    folder.mkdir()
    monkeypatch.setattr(add, "FOLDER", folder)
    return folder / "mine.jsonl"


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: object, *more: object) -> int:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), "utf-8")
    monkeypatch.setattr("sys.argv", ["add", str(path), *map(str, more)])
    return add.main()


def test_a_record_is_compared_and_appended(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: Path,
    checked: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The estimate stands beside the measurement, and the file has one line more, which is the record."""
    assert run(monkeypatch, tmp_path, RECORD, file) == 0
    assert checked == ["check"]
    shown = capsys.readouterr().out
    assert "estimated: fits: peak" in shown
    assert "measured:  allocated 20.00 GiB, for which the estimate has" in shown
    assert [json.loads(line) for line in file.read_text("utf-8").splitlines()] == [RECORD]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("before", [b'{"id": "a"}', b'{"id": "a"}\n', b""])
def test_what_is_there_stays_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, before: bytes) -> None:
    """A last line without its end is ended, and the file keeps its rights."""
    file.write_bytes(before)
    file.chmod(0o640)
    assert run(monkeypatch, tmp_path, RECORD, file) == 0
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert lines == [*([{"id": "a"}] if before else []), RECORD]
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_write_that_fails_leaves_the_file_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No space is left when all has been written but its name."""
    file.write_bytes(b'{"id": "a"}')

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert run(monkeypatch, tmp_path, RECORD, file) == 2
    assert capsys.readouterr() == ("", f"{file}: no space left on device; nothing was added\n")
    assert file.read_bytes() == b'{"id": "a"}'
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_set_that_is_broken_takes_no_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is checked too, before anything is written."""

    def broken() -> None:
        raise CatalogError("hardware/gpus/l4.yaml: tdp_w: given 7, allowed: 15 to 300 W")

    monkeypatch.setattr(add, "check", broken)
    assert run(monkeypatch, tmp_path, RECORD, file) == 2
    assert capsys.readouterr().err.startswith("hardware/gpus/l4.yaml: tdp_w: ")
    assert not file.exists()


def test_without_a_file_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mere = RECORD | {"metric": "verdict", "measured_bytes": None, "verdict": "oom"}
    assert run(monkeypatch, tmp_path, mere) == 0
    assert "oom; the verdict differs" in capsys.readouterr().out
    assert list(file.parent.iterdir()) == []


def test_a_rate_is_compared_with_the_estimated_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thousand seconds are far off; fp32 has no rate, and then nothing is said."""
    rate = {"measured_rate": {"unit": "step_seconds", "value": 1000}}
    assert run(monkeypatch, tmp_path, RECORD | rate) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith("step:      estimated ") and "measured 1e+03 s, -100.0%" in shown
    unrated = RECORD | rate | {"scenario": RECORD["scenario"] | {"precision": "fp32"}}
    assert run(monkeypatch, tmp_path, unrated) == 0
    assert "step:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"measured_rate": {"unit": "it/s", "value": 1}}, "measured_rate.unit: given 'it/s', allowed: step_seconds, "),
        ({"metric": "peak"}, "metric: given 'peak', allowed: allocated, "),
        (
            {"id": "traced/qwen2.5-0.5b/sft/s512/mb4"},
            "id: given 'traced/qwen2.5-0.5b/sft/s512/mb4', which a record has",
        ),
        ({"scenario": RECORD["scenario"] | {"model": "llama-9"}}, "scenario.model: given 'llama-9', allowed: "),
        ({"metric": "verdict"}, "measured_bytes: given 21474836480 with metric verdict, allowed: bytes, or null"),
        ({"scenario": RECORD["scenario"] | {"micro_batch": 0}}, "scenario: micro_batch: given 0, allowed: "),
        ({"scenario": RECORD["scenario"] | {"task": []}}, "scenario: task: given a list, [], allowed: "),
        ({"scenario": RECORD["scenario"] | {"gpu": [["a"]]}}, "scenario.gpu: given a list, [['a']], allowed: text"),
        ({"scenario": RECORD["scenario"] | {"model": {}}}, "scenario.model: given a mapping of fields, allowed: text"),
        (
            {"scenario": RECORD["scenario"] | {"versions": {"torch": [1]}}},
            "scenario: versions.torch: given a list, [1]",
        ),
        ({"scenario": RECORD["scenario"] | {"roles": {"actor": {"lora": {"rank": {}}}}}}, "scenario: roles"),
        ({"scenario": []}, "scenario: given a list, [], allowed: a mapping of fields"),
        ({"id": 5}, "id: given 5, allowed: text such as"),
        ({"id": ["a"]}, "id: given a list, ['a'], allowed: text such as"),
        ({"metric": "held"}, "missing field 'moment'"),
        ({"metric": "held", "moment": "in between"}, "moment: given 'in between', allowed: "),
        ({"measured_bytes": 20}, "measured_bytes: given 20, allowed: bytes, at least 1048576"),
        ({"measured_bytes": float("nan")}, "measured_bytes: given nan, allowed: an integer of at least 1 or null"),
        ({"source": "todo"}, "source: given 'todo', allowed: an http(s) address"),
        ({"source": "a \ud800 test"}, "given half of a surrogate pair, allowed: text that UTF-8 can hold"),
        ({"note": "bell \u0007"}, ": given the character '\\\\u0007', allowed: UTF-8 text"),
        ({"date": "2026-13-01"}, "date: given '2026-13-01', allowed: a day of the calendar"),
        ({"observed": {"allocator": {}}}, "missing field 'machine': where it was observed"),
    ],
)
def test_a_record_that_cannot_be_used_is_one_line_and_appends_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    change: Any,
    told: str,
) -> None:
    assert run(monkeypatch, tmp_path, RECORD | change, file) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err
    assert list(file.parent.iterdir()) == []


def test_another_record_under_a_new_id_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would pass by itself, and the whole set would not pass with it."""
    there = load().measurements[0]
    assert run(monkeypatch, tmp_path, {**there, "id": "published/once-more"}, file) == 2
    allowed = f"a record of its own, as this is that of {load().places[there['id']]}"
    assert capsys.readouterr().err.endswith(f": id: given 'published/once-more', allowed: {allowed}\n")
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize("record", [[], None, "a record", [RECORD], 5])
def test_what_is_no_record_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: object
) -> None:
    assert run(monkeypatch, tmp_path, record) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "allowed: a mapping of fields" in err


@pytest.mark.parametrize(
    "name",
    ["{out}/mine.jsonl", "{folder}/none/mine.jsonl", "{folder}/mine.json", "{folder}/Mine.jsonl", "{folder}", "", "\0"],
)
def test_a_file_that_the_catalog_does_not_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Of another folder, one that is not there, another ending, another case, a folder, and no name at all."""
    assert run(monkeypatch, tmp_path, RECORD, name.format(out=tmp_path, folder=file.parent)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "allowed: a .jsonl file in measurements/" in err


def test_a_record_comes_from_standard_input_too(
    monkeypatch: pytest.MonkeyPatch, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["add", "-"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(RECORD | {"id": 1}).encode())))
    assert add.main() == 2
    assert capsys.readouterr().err.startswith("standard input: id: given 1, allowed: text")
