"""PyTorch's out-of-memory messages: both forms are read to the byte, and every record says what its quote says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from calc.base.schema import InputError
from calc.base.units import GiB, MiB
from calc.catalog.catalog import CatalogError, load
from calc.catalog.oom_message import contradiction, figures, sharers, size

ROOT = Path(__file__).parents[2]
# OpenRLHF #398 and FastChat #1781, shortened
NEWER = (
    "Tried to allocate 112.00 MiB. GPU 7 has a total capacity of 39.39 GiB of which 14.00 MiB is free. Process 1117993 "
    "has 39.36 GiB memory in use. Of the allocated memory 38.34 GiB is allocated by PyTorch, and 385.64 MiB is "
    "reserved by PyTorch but unallocated."
)
OLDER = (
    "Tried to allocate 98.00 MiB (GPU 2; 39.59 GiB total capacity; 37.33 GiB already allocated; 16.19 MiB free; "
    "37.68 GiB reserved in total by PyTorch)"
)


# --- reading ---


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("0 bytes", 0), ("512 bytes", 512), ("14.00 MiB", 14 * MiB), ("1.50 GiB", 3 * GiB // 2), ("0.01 KiB", 10)],
)
def test_a_figure_is_its_bytes_to_the_nearest(text: str, bytes: int) -> None:
    assert size(text) == bytes


def test_the_newer_form_by_hand() -> None:
    assert figures(NEWER) == {
        "tried_bytes": 112 * MiB,
        "total_bytes": round(39.39 * GiB),
        "free_bytes": 14 * MiB,
        "in_use_bytes": round(39.36 * GiB),
        "allocated_bytes": round(38.34 * GiB),
        "unallocated_bytes": round(385.64 * MiB),
    }


def test_the_older_form_gives_the_difference_of_reserved_and_allocated_and_no_process() -> None:
    found = figures(OLDER)
    assert found["unallocated_bytes"] == round(37.68 * GiB) - round(37.33 * GiB)
    assert (found["in_use_bytes"], sharers(OLDER)) == (None, 0)


def test_the_misspelt_capacity_of_torch_2_1_is_read_alike() -> None:
    assert figures(NEWER.replace("capacity", "capacty")) == figures(NEWER)


def test_private_pools_are_a_part_of_what_is_allocated() -> None:
    pools = "PyTorch, with 62.28 MiB allocated in private pools (e.g., CUDA Graphs), and"
    assert figures(NEWER.replace("PyTorch, and", pools)) == figures(NEWER)


@pytest.mark.parametrize(
    ("processes", "in_use", "count"),
    [
        ("Including non-PyTorch memory, this process has 39.36 GiB memory in use.", "39.36 GiB", 1),
        # the failing process is the one that says so, or the one that can hold what PyTorch has reserved
        (
            "Process 7 has 398.00 MiB memory in use. Including non-PyTorch memory, this process has 38.90 GiB memory "
            "in use.",
            "38.90 GiB",
            2,
        ),
        ("Process 7 has 398.00 MiB memory in use. Process 8 has 38.90 GiB memory in use.", "38.90 GiB", 2),
        ("Process 7 has 39.00 GiB memory in use. Process 8 has 38.90 GiB memory in use.", None, 2),
        ("Including non-PyTorch memory, this process has 0 bytes memory in use.", None, 0),
    ],
)
def test_what_the_failing_process_takes_of_the_card(processes: str, in_use: str | None, count: int) -> None:
    message = NEWER.replace("Process 1117993 has 39.36 GiB memory in use.", processes)
    assert figures(message)["in_use_bytes"] == (None if in_use is None else size(in_use))
    assert sharers(message) == count


@pytest.mark.parametrize("message", ["CUDA out of memory.", NEWER[:-20], f"RuntimeError: {OLDER}", ""])
def test_anything_else_is_no_such_message(message: str) -> None:
    with pytest.raises(InputError, match="allowed: PyTorch's out-of-memory message, from 'Tried' on"):
        figures(message)


# --- the records ---


def test_every_record_has_its_quotes_figures() -> None:
    records = load().exhausted
    assert len(records) >= 100
    for record in records:
        assert {name: record[name] for name in figures(record["quote"])} == figures(record["quote"]), record["id"]
        listed = sharers(record["quote"])
        assert record["processes"] == (listed or record["processes"]), record["id"]


def test_no_message_is_counted_twice() -> None:
    keys = [(record["url"], *figures(record["quote"]).values()) for record in load().exhausted]
    assert len(set(keys)) == len(keys)


def test_the_reserved_sources_are_left_out() -> None:
    reserved = ("torchtitan", "torchtune", "fsdp_qlora", "lomo", "llm-foundry", "axolotl", "ms-swift", "easyr1")
    for record in load().exhausted:
        assert not any(f"/{name}/" in record["url"].lower() for name in reserved), record["id"]


# --- faults ---

RECORD: dict[str, Any] = {
    "id": "exhausted/one",
    "url": "https://github.com/a/b/issues/1",
    "source": "a test",
    "quote": NEWER,
    "framework": "openrlhf",
    "task": "ppo",
    "gpu": None,
    "processes": 1,
    "expandable_segments": None,
    "torch": None,
    "sharding": "zero2",
    "gpus": 8,
    "phase": None,
    "note": None,
    **figures(NEWER),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the data folders without measurements."""
    for folder in ("hardware", "models", "measurements"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.jsonl", "trace"))
    return tmp_path


def test_a_good_record_loads_and_has_nothing_against_it(root: Path) -> None:
    (root / "measurements/exhausted/a.jsonl").write_text(json.dumps(RECORD) + "\n")
    assert load(root).exhausted == (RECORD,)
    assert load(root).measurements == ()
    assert contradiction(RECORD) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "h1000"}, "gpu: given 'h1000', allowed: "),
        ({"id": "two"}, "id: given 'two', allowed: "),
        ({"gpus": 0}, "gpus: given 0, allowed: "),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"id": "exhausted/one"}, "id: given 'exhausted/one', already the id of measurements/exhausted/a.jsonl:1"),
    ],
)
def test_a_fault_is_one_line_that_names_file_and_field(root: Path, change: dict[str, Any], message: str) -> None:
    lines = [json.dumps(record) for record in (RECORD, {**RECORD, "id": "exhausted/two", **change})]
    (root / "measurements/exhausted/a.jsonl").write_text("\n".join(lines))
    with pytest.raises(CatalogError) as caught:
        assert load(root).exhausted
    assert str(caught.value).startswith(f"measurements/exhausted/a.jsonl:2: {message}")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"free_bytes": 1}, f"free_bytes: given 1, allowed: {14 * MiB}, as the quote says"),
        ({"in_use_bytes": None}, f"in_use_bytes: given null, allowed: {round(39.36 * GiB)}, as the quote says"),
        ({"quote": "out of memory"}, "quote: given 'out of memory', allowed: PyTorch's out-of-memory message"),
    ],
)
def test_a_figure_is_the_quotes(change: dict[str, Any], message: str) -> None:
    assert contradiction({**RECORD, **change}).startswith(message)


def test_more_in_use_than_the_card_has_is_refused() -> None:
    quote = NEWER.replace("39.39 GiB", "38.39 GiB")
    assert contradiction({**RECORD, "quote": quote, **figures(quote)}).startswith("quote: given more memory in use")
