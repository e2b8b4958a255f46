"""`python -m measurements.add`: a record is checked, compared and appended, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
FILE = add.ROOT / "measurements" / "test-of-add.jsonl"


@pytest.fixture(autouse=True)
def gone() -> Iterator[None]:
    yield
    FILE.unlink(missing_ok=True)


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: dict[str, Any], *more: str) -> int:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), "utf-8")
    monkeypatch.setattr("sys.argv", ["add", str(path), *more])
    return add.main()


def test_a_record_is_compared_and_appended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The estimate stands beside the measurement, and the file has one line more, which is the record."""
    assert run(monkeypatch, tmp_path, RECORD, str(FILE)) == 0
    shown = capsys.readouterr().out
    assert "estimated: fits: peak" in shown
    assert "measured:  allocated 20.00 GiB, for which the estimate has" in shown
    assert [json.loads(line) for line in FILE.read_text("utf-8").splitlines()] == [RECORD]


def test_without_a_file_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mere = RECORD | {"metric": "verdict", "measured_bytes": None, "verdict": "oom"}
    assert run(monkeypatch, tmp_path, mere) == 0
    assert "oom; the verdict differs" in capsys.readouterr().out
    assert not FILE.exists()


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
    ],
)
def test_a_record_that_cannot_be_used_is_one_line_and_appends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, told: str
) -> None:
    assert run(monkeypatch, tmp_path, RECORD | change, str(FILE)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err
    assert not FILE.exists()


def test_a_file_that_the_catalog_does_not_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, RECORD, str(tmp_path / "mine.jsonl")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "allowed: a .jsonl file in measurements/" in err
