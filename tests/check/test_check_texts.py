"""Sources, addresses, dates, figures in words, names, files: what every kind of data file has."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import planted
import pytest

from calc.catalog.catalog import CatalogError, load
from calc.check import check, folders, texts
from calc.check.printed import printed

# --- sources ---


@pytest.mark.parametrize(
    "text",
    [
        "https://arxiv.org/abs/2407.21783",
        "https://github.com/a/b/issues/1 (21.99 GiB)",
        "AMD data sheet, https://www.amd.com/en/mi300x.html; https://github.com/a/b/blob/c/README.md",
        "NVIDIA H100 datasheet",
        "the total that nvidia-smi shows of this card in public logs",
        "a test",
    ],
)
def test_a_source_leads_somewhere(text: str) -> None:
    assert texts.leads_somewhere(text)


@pytest.mark.parametrize(
    "text",
    [
        "me", "datasheet", "todo", "TODO: datasheet", "to do later", "trust me", "trust me, it works", "I think so",
        "???", "no source", "from memory", "someone online", "the internet", "same as above", "www.nvidia.com/h100",
        "https://", "http://datasheet", "htps://www.nvidia.com/h100", "https://example.com/h100",
        "NVIDIA, https://datasheet", "12 34", "fixme add the link", "/home/me/h100 datasheet.pdf",
        "my copy, ~/h100.pdf", "file:///h100.pdf of NVIDIA",
    ],
)  # fmt: skip
def test_a_placeholder_is_no_source(text: str) -> None:
    assert not texts.leads_somewhere(text)


# --- days ---


def dated(day: str, id: str = "a") -> list[str]:
    return list(texts.dates({"id": id, "date": day}, load()))


def test_today_is_the_last_day() -> None:
    """Wherever it is latest; a day that passes once passes for good."""
    today = (datetime.now(UTC) + timedelta(hours=14)).date()
    assert dated(today.isoformat()) == []
    assert dated((today + timedelta(days=1)).isoformat())[0].startswith("date: given '")
    assert list(texts.dates({"id": "a"}, load())) == []


def test_a_day_is_one_of_the_calendar_and_near_the_one_in_the_id() -> None:
    assert dated("2025-02-29") == ["date: given '2025-02-29', allowed: a day of the calendar, such as 2026-11-22"]
    assert dated("2024-02-29") == []
    assert dated("2016-08-31")[0].startswith("date: given '2016-08-31', allowed: 2016-09-01 to ")
    assert dated("2025-01-02", "measured/h100-2025-01-01/x") == []  # a suite goes on after midnight
    assert dated("2024-01-02", "measured/h100-2025-01-01/x")[0].endswith("within 31 days of 2025-01-01, which id says")


def test_a_day_in_a_source_or_a_note_is_one_of_the_calendar_that_has_been() -> None:
    """An address may have any figures in its path."""
    card = load().gpus["h100-sxm"]

    def said(source: str, note: str = "") -> list[str]:
        return list(texts.days(replace(card, sources={"tdp_w": source}, notes={"ecc": note}), load()))

    assert said("NVIDIA, https://www.nvidia.com/2026-02-30/h100 (seen 2024-02-29)", "Read on 2025-01-02.") == []
    assert said("NVIDIA, https://www.nvidia.com/h100 (seen 2026-02-30)") == [
        "tdp_w.source: given '2026-02-30', allowed: a day of the calendar, such as 2026-11-22"
    ]
    assert said("NVIDIA H100 datasheet", "Read on 2999-01-02.")[0].startswith("ecc.note: given '2999-01-02', allowed: ")
    record = {"source": "a log", "note": "Seen 2026-06-31."}
    assert next(texts.record_days(record, load())).startswith("note: given '2026-06-31', allowed: a day")
    model = replace(load().models["llama-3-8b"], parameters_source="the hub's page, 2999-01-02")
    assert next(texts.days(model, load())).startswith("parameters_source: given '2999-01-02', allowed: ")


# --- figures in words ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("| 16.2 GiB | 3083 |", [("16.2", "GiB"), ("3083", "")]),
        ("6.7G / 1.0s/it", [("6.7", "G"), ("1.0", "")]),
        ("H100 x 1, 4,194,304 and 72434837504,43467", [("1", ""), ("4194304", ""), ("72434837504", ""), ("43467", "")]),
        ("reserved: 6.079643648GB", [("6.079643648", "GB")]),
        ("141G显存只占用27G", [("141", "G"), ("27", "G")]),
        ("51154.27 MB, 0 bytes", [("51154.27", "MB"), ("0", "bytes")]),
    ],
)  # fmt: skip
def test_the_figures_of_a_text(text: str, found: list[tuple[str, str]]) -> None:
    assert [(f.value, f.unit) for f in printed(text)] == [(Fraction(value), unit) for value, unit in found]


def test_a_figure_means_what_rounds_to_it() -> None:
    (figure,) = printed("16.2 GiB")
    assert figure.means(Fraction("16.15") * 2**30, 2**30) and figure.means(Fraction("16.25") * 2**30, 2**30)
    assert not figure.means(Fraction("16.26") * 2**30, 2**30)


# --- texts, names and files ---


@pytest.mark.parametrize("word", ["TODO", "tbd", "FIXME"])
def test_a_text_that_is_to_be_written_is_refused(word: str) -> None:
    card, model = load().gpu("l4"), load().model("llama-3-8b")
    assert list(texts.finished(card, load())) == list(texts.finished(model, load())) == []
    noted = replace(card, notes={"tdp_w": f"{word} which card?"})
    assert list(texts.finished(noted, load())) == [
        f"tdp_w.note: given '{word} which card?', allowed: a text without {word}"
    ]
    assert list(texts.finished(replace(model, licence=word), load())) == [
        f"licence: given '{word}', allowed: a text without {word}"
    ]
    record: dict[str, Any] = {"note": f"{word} ask", "group": "a"}
    assert list(texts.record_finished(record, load())) == [f"note: given '{word} ask', allowed: a text without {word}"]


@pytest.mark.parametrize("name", [" L4", "L4 ", "L4  24GB", "<b>L4</b>", "[L4](x)", "L4\t24GB"])
def test_a_name_is_plain_words(name: str) -> None:
    card = load().gpu("l4")
    assert list(texts.tidy(card, load())) == []
    assert [line.partition(":")[0] for line in texts.tidy(replace(card, name=name), load())] == ["name"]


def test_sources_of_each_kind_are_looked_at() -> None:
    card, model = load().gpu("l4"), load().model("llama-3-8b")
    assert list(texts.sources(replace(card, sources={"tdp_w": "me"}), load())) == [
        f"tdp_w.source: given 'me', allowed: {texts.SOURCE}"
    ]
    assert list(texts.model_sources(replace(model, parameters_source="me"), load())) == [
        f"parameters_source: given 'me', allowed: {texts.SOURCE}"
    ]
    assert list(texts.model_sources(replace(model, source="https://x"), load())) == [
        f"source: given 'https://x', allowed: {texts.ADDRESS}"
    ]
    record = {"source": "me", "url": "https://x"}
    assert list(texts.record_sources(record, load())) == [
        f"source: given 'me', allowed: {texts.SOURCE}", f"url: given 'https://x', allowed: {texts.ADDRESS}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "url", "line"),
    [
        ("a/b issue #858", "https://github.com/A/B/issues/858#issuecomment-1", ""),
        ("a/b issue #858", "https://github.com/a/b/issues/8580", "that of number 858, which source names"),
        ("a/b pull request 7", "https://github.com/c/d/pull/7", "an address of a/b, which source names"),
        ("a/b README 'Memory'", "https://github.com/a/b#memory", ""),
        ("a/b README 'Memory'", "https://github.com/a/c#memory", "an address of a/b, which source names"),
        ("QwenLM/Qwen README", "https://qwen.readthedocs.io/en/latest", ""),
        ("a blog on A/B tests", "https://github.com/a/b", ""),
    ],
)  # fmt: skip
def test_an_address_is_that_of_the_thread_that_is_named(source: str, url: str, line: str) -> None:
    found = list(texts.thread({"source": source, "url": url}, load()))
    assert found == [] if not line else found[0].startswith(f"url: given {url!r}, allowed: {line}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return planted.copy(tmp_path)


def refused(root: Path) -> str:
    load.cache_clear()
    with pytest.raises(CatalogError) as caught:
        check(root)
    return str(caught.value)


@pytest.mark.parametrize("later", ["a", "z"])
def test_of_two_files_with_one_name_the_newer_is_blamed(root: Path, later: str) -> None:
    """Whatever their order, by when they were changed; both are named."""
    copied, original = root / f"models/{later}.yaml", root / "models/llama-3-8b.yaml"
    shutil.copy(original, copied)
    os.utime(original, ns=(1, 10**9))
    taken = "hf: given 'meta-llama/Meta-Llama-3-8B', already a name of models/"
    assert refused(root) == f"models/{later}.yaml: {taken}llama-3-8b.yaml, allowed: a name of its own"
    os.utime(copied, ns=(1, 1))
    assert refused(root) == f"models/llama-3-8b.yaml: {taken}{later}.yaml, allowed: a name of its own"


def test_of_two_records_with_one_id_the_one_in_the_newer_file_is_blamed(root: Path) -> None:
    line = (root / "measurements/traced.jsonl").read_text("utf-8")
    (root / "measurements/a.jsonl").write_text(line, "utf-8")
    os.utime(root / "measurements/traced.jsonl", ns=(1, 1))
    assert refused(root).startswith("measurements/a.jsonl:1: id: given 'traced/qwen2.5-0.5b/sft/s2048/mb1', already")
    os.utime(root / "measurements/a.jsonl", ns=(1, 0))
    assert refused(root).startswith(
        "measurements/traced.jsonl:1: id: given 'traced/qwen2.5-0.5b/sft/s2048/mb1', already"
    )
    os.utime(root / "measurements/traced.jsonl", ns=(1, 0))  # neither: the later in order
    assert refused(root).startswith("measurements/traced.jsonl:1: id: ")


@pytest.mark.parametrize("name", [".l4.yaml.swp", ".#l4.yaml", ".l4.yaml.new"])
def test_what_an_editor_leaves_for_a_moment_is_let_be(root: Path, name: str) -> None:
    (root / "hardware/gpus" / name).write_bytes(b"\0")
    assert list(folders.faults(root)) == []


def test_a_file_that_cannot_be_read_is_named(root: Path) -> None:
    (root / "hardware/gpus/gone.yaml").symlink_to(root / "nowhere")
    assert next(folders.faults(root)).startswith("hardware/gpus/gone.yaml: given what is no file, allowed: names that")


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"a: \x00\n", "f:1: given the character '\\x00'"),
        (b"a\nb\r\n", "f:2: given a carriage return"),
        (b'{"a": "\\u0007"}', "f:1: given the character"),
        (b'{"a": "\\udc00"}', "f:1: given the character"),
    ],
)
def test_text_that_is_not_seen_is_named_by_its_line(raw: bytes, line: str) -> None:
    assert next(folders.unreadable(raw, "f")).startswith(line)


def test_other_languages_and_whole_pairs_are_text() -> None:
    assert list(folders.unreadable('a: 显存 é – × "\\ud83d\\ude00"\n'.encode(), "f")) == []
