"""Memory snapshots: read from their opcodes alone, set beside the estimate, and nothing in them is run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import line

from calc.base.schema import InputError
from calc.base.units import GiB
from calc.diagnose import snapshot

FRAMES = [
    {"name": "allocate", "filename": "torch/csrc/x.cpp", "line": 1},
    {"name": "_init_group", "filename": "torch/optim/adamw.py", "line": 125},
    {"name": "step", "filename": "trainer.py", "line": 7},
]
# 10 GiB are live at the end; before, 6 more were allocated and freed again, in a segment that went back.
HISTORY = [
    {"action": "segment_alloc", "addr": 1, "size": 8 * GiB, "frames": []},
    {"action": "alloc", "addr": 1, "size": 6 * GiB, "frames": FRAMES},
    {"action": "free_requested", "addr": 1, "size": 6 * GiB, "frames": []},
    {"action": "free_completed", "addr": 1, "size": 6 * GiB, "frames": []},
    {"action": "segment_free", "addr": 1, "size": 8 * GiB, "frames": []},
]
BLOCKS = [
    {"address": 2, "size": 7 * GiB, "state": "active_allocated", "frames": FRAMES},
    {"address": 3, "size": 3 * GiB, "state": "active_allocated", "frames": []},
    {"address": 4, "size": 2 * GiB, "state": "inactive", "frames": []},
]
SEGMENT = {"device": 0, "total_size": 12 * GiB, "allocated_size": 10 * GiB, "blocks": BLOCKS}
DUMP: dict[str, Any] = {"segments": [SEGMENT], "device_traces": [HISTORY], "allocator_settings": {"x": True}}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_snapshot_is_built_from_its_opcodes(protocol: int) -> None:
    data = [DUMP, (1, "a", 2.5, None, True, -(2**70)), (), [[]], {"é": ()}]
    assert snapshot.load(pickle.dumps(data, protocol), "x") == data


def test_the_peaks_of_its_history_and_the_largest_allocations() -> None:
    found = snapshot.read(pickle.dumps(DUMP), "x")
    assert (found.allocated, found.reserved, found.left, found.failed) == (16 * GiB, 20 * GiB, 10 * GiB, 0)
    assert found.places == (
        ('File "torch/optim/adamw.py", line 125, in _init_group', 7 * GiB), ("an unknown place", 3 * GiB),
    )  # fmt: skip


def test_the_request_that_failed_tells_the_phase(run: Callable[..., Run], tmp_path: Path) -> None:
    failed = {"action": "oom", "addr": 0, "size": 2 * GiB, "frames": FRAMES}
    file = tmp_path / "memory_snapshot.pickle"
    file.write_bytes(pickle.dumps({**DUMP, "device_traces": [[*HISTORY, failed]]}))
    found = run("diagnose", str(file), "--model", "llama-3.2-1b", "--gpu", "a10", "--json")
    answer = json.loads(found.out)
    assert answer["recognised"]["parts"] == ["a memory snapshot"]
    assert answer["phase"]["told"] == "step"
    assert answer["message"]["tried_bytes"] == 2 * GiB
    assert "snapshot: at most 16.0 GiB allocated and 20.0 GiB reserved" in answer["recognised"]["notes"]
    assert answer["estimate"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize("value", [Evil(), Path("x"), {1, 2}, b"bytes", print])
def test_anything_that_would_run_or_name_a_class_is_refused(value: object, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 4, 5):
        assert "allowed: mappings, lists, text and numbers alone" in line(
            lambda protocol=protocol: snapshot.load(pickle.dumps({"a": value}, protocol), "x")
        )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data", [[1], {"segments": [{}]}, {"segments": 5}, "text", {"segments": [], "device_traces": 3}]
)
def test_a_pickle_of_something_else_is_one_line(data: object) -> None:
    said = line(lambda: snapshot.read(pickle.dumps(data), "x"))
    assert said.startswith("x: given a pickle of something else")


@settings(max_examples=60)
@given(st.binary(max_size=80), st.integers(0, 400))
def test_a_damaged_pickle_is_one_line(noise: bytes, cut: int) -> None:
    for raw in (snapshot.FIRST + noise, pickle.dumps(DUMP)[:cut], pickle.dumps(DUMP)[:cut] + noise):
        try:
            snapshot.read(raw, "x")
        except InputError as error:
            assert str(error).isprintable()
