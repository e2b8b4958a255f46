"""What a record is called on a page: where it was published, and its job in words; its id stands behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any
from urllib.parse import urlsplit

from calc.answers import answers
from calc.site.tables.tables import Cell, Column

LABEL = Column("label", "Record")
ID = Column("record", "Id", behind=True)
THREADS = ("issues", "pull", "discussions")
TASKS = {"inference": "Inference", "pretrain": "Pre-training"}  # others are acronyms
METHODS = {"lora": " by LoRA", "qlora": " by QLoRA"}
SHARDING = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp1": "FSDP 1", "fsdp2": "FSDP 2"}


def cells(record_id: str) -> tuple[Cell, Cell]:
    """The cells of `LABEL`, which leads to the source if there is one, and of `ID`."""
    record = _by_id(answers.versions()["catalog"])[record_id]
    words, url = label(record), record.get("url")
    link = f'<a href="{escape(url)}">{escape(words)}</a>' if url and record["class"] in ("published", "blind") else ""
    return Cell(words, link), Cell(record_id)


@cache
def _by_id(catalog_version: str) -> Mapping[str, Mapping[str, Any]]:
    return {record["id"]: record for record in answers.catalog().measurements}


def label(record: Mapping[str, Any]) -> str:
    """A record in words, such as "OpenRLHF #858: PPO of Llama 3 8B on 4 × A40, micro batch 4"."""
    published = record["class"] in ("published", "blind") and record.get("url")
    return (f"{source(record['url'])}: " if published else "") + job(record)


def source(url: str) -> str:
    """Where something was published: a repository, with the number of a thread there, or a host."""
    at = urlsplit(url)
    _, *parts = at.path.split("/")
    if at.netloc != "github.com" or len(parts) < 2:
        return at.netloc.removeprefix("www.")
    thread = f" #{parts[3]}" if len(parts) > 3 and parts[2] in THREADS else ""
    return parts[1] + thread


def job(record: Mapping[str, Any]) -> str:
    """The job of a record: its task, model and machine, and what else it says of lengths, batch and sharding."""
    return ", ".join(_job(record["scenario"], traced=record["class"] == "traced"))


def _job(s: Mapping[str, Any], *, traced: bool) -> Iterator[str]:
    """The parts of that; a trace runs without a GPU."""
    catalog = answers.catalog()
    model = catalog.models.get(s["model"])
    task, method = TASKS.get(s["task"], s["task"].upper()), METHODS.get(s.get("method", ""), "")
    words = f"{task} of {model.name if model else s['model']}{method}"
    yield words if traced else f"{words} on {s.get('gpus', 1)} × {catalog.gpu(s['gpu']).name}"
    for name, said in (
        ("seq_len", "{:,} tokens"),
        ("prompt_len", "prompts of {:,}"),
        ("response_len", "responses of {:,}"),
        ("micro_batch", "micro batch {}"),
    ):
        if name in s:
            yield said.format(s[name])
    if s.get("sharding") in SHARDING:
        yield SHARDING[s["sharding"]]
    if s.get("checkpointing") == "full":
        yield "checkpointing"
