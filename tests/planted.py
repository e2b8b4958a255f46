"""A small copy of the data folders, and faults to plant in it: what a maintainer gets wrong in a data file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
GPUS = (
    "a10", "a100-80-sxm", "h100-sxm", "h20", "h200", "l4", "l40s", "mi300x", "rtx3060", "rtx3080", "rtx3090",
    "rtx3090ti", "rtx4070", "rtx4070ti-super", "rtx4080", "rtx4080-super", "rtx4090", "rtx4090-48", "rtx4090d",
    "v100-16", "v100-32",
)  # fmt: skip
NODES = ("consumer-pcie", "dgx-1-v100", "hgx-a100", "hgx-h100", "hgx-h200", "mi300x-platform")
MODELS = (
    "deepseek-v3", "gpt-oss-20b", "llama-2-70b", "llama-2-7b", "llama-3-8b", "llama-3.1-8b", "llama-3.2-1b",
    "llama-3.2-3b", "qwen1.5-1.8b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-vl-7b", "qwen3-30b-a3b", "starcoder2-7b",
)  # fmt: skip
# What stands beside the records, with the schema of a suite.
BESIDE = (
    "blind/unsaid.yaml",
    "megatron/golden.jsonl",
    "peers/answers.yaml",
    "suites/smoke.yaml",
    "bench/suite.schema.json",
)
# One of each kind, by what the tests call it.
RECORDS = {
    "gib": "published/tune24-l8-lora-4090",
    "gb": "published/tune2405-7b-lora",
    "gb or gib": "published/qwen1-1.8B-LoRA-256",
    "bytes": "published/peft-mm-lora-rank32",
    "held": "published/verllog-q05-critic",
    "traced": "traced/qwen2.5-0.5b/sft/s2048/mb1",
    "measured": "measured/h100-2026-11-22/qwen2.5-0.5b/sft/s2048",
    "died": "measured/h100-2026-11-22/llama-3.2-1b/sft/s2048/mb22/checkpointing=full/optimizer_impl=fused",
    "edge": "measured/h100-2026-11-22/llama-3.2-1b/sft/s2048/mb-edge/checkpointing=full/optimizer_impl=fused",
    "blind": "blind/fsdpq-rec-H100-4",
    "matmul": "measured/h200-2026-11-22/llama-3-8b/inference/precision=bf16/matmul",
    "message": "exhausted/DB-GPT-Hub-248",
    "older message": "exhausted/FastChat-1781",
}
Change = Callable[[bytes], bytes]


class Fault(NamedTuple):
    """A file, what is done to it (to none that is there, it is made), and what the one line must begin with.

    `says` follows the file and, of a record, its line; `file` may be the name that `RECORDS` has for one.
    """

    name: str
    file: str
    change: Change
    says: str


def copy(target: Path) -> Path:
    """The copy, of some of the files: one that is checked in milliseconds."""
    shutil.copytree(ROOT / "hardware" / "schema", target / "hardware" / "schema")
    for folder, kept in (("hardware/gpus", GPUS), ("hardware/nodes", NODES), ("models", MODELS)):
        (target / folder).mkdir(exist_ok=True)
        for name in kept:
            shutil.copy(ROOT / folder / f"{name}.yaml", target / folder)
    shutil.copy(ROOT / "models" / "schema.json", target / "models")
    for path in (*(ROOT / "measurements").glob("**/schema.json"), *(ROOT / "measurements" / name for name in BESIDE)):
        copied = target / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    for folder in ("measurements", "measurements/exhausted"):
        for path in sorted((ROOT / folder).glob("*.jsonl")):
            lines = path.read_text("utf-8").splitlines(keepends=True)
            kept_lines = [line for line in lines if json.loads(line)["id"] in RECORDS.values()]
            if kept_lines:
                (target / path.relative_to(ROOT)).write_text("".join(kept_lines), "utf-8")
    return target


def place(root: Path, name: str) -> str:
    """`file:line` of a record by the name that `RECORDS` has for it."""
    for path in sorted((root / "measurements").glob("**/*.jsonl")):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if json.loads(line)["id"] == RECORDS[name]:
                return f"{path.relative_to(root)}:{number}"
    raise AssertionError(name)


def line(name: str) -> bytes:
    """The line of a record of this project by the name that `RECORDS` has for it."""
    where, _, number = place(ROOT, name).partition(":")
    return (ROOT / where).read_bytes().splitlines(keepends=True)[int(number) - 1]


def swap(old: str, new: str) -> Change:
    """Puts text in the place of the first text that is like it."""

    def change(raw: bytes) -> bytes:
        assert old.encode() in raw, old
        return raw.replace(old.encode(), new.encode(), 1)

    return change


def value(field: str, new: object, part: str = "value") -> Change:
    """Puts another value, or source, into a dotted field of a card or node."""

    def change(raw: bytes) -> bytes:
        lines, depth = raw.decode().split("\n"), 0
        at = 0
        for name in (*field.split("."), part):
            at = next(i for i in range(at, len(lines)) if lines[i].startswith(f"{'  ' * depth}{name}:"))
            depth += 1
        lines[at] = f"{'  ' * (depth - 1)}{part}: {new}"
        return "\n".join(lines).encode()

    return change


def config(name: str, new: object) -> Change:
    """Puts another value into a field of a model, of its config where that has it."""

    def change(raw: bytes) -> bytes:
        lines = raw.decode().split("\n")
        at = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
        lines[at] = f"{lines[at].partition(name)[0]}{name}: {new}"
        return "\n".join(lines).encode()

    return change


def record(name: str, *without: str, **fields: Any) -> Change:
    """Puts other values into a record, and takes those `without` out; two underscores are a dot."""

    def change(raw: bytes) -> bytes:
        lines = raw.decode().splitlines(keepends=True)
        for i, line in enumerate(lines):
            data = json.loads(line)
            if data["id"] == RECORDS[name]:
                for field in (*without, *fields):
                    *above, last = field.split("__")
                    into = data
                    for part in above:
                        into = into[part]
                    if field in without:
                        del into[last]
                    else:
                        into[last] = fields[field]
                lines[i] = json.dumps(data, ensure_ascii=False) + "\n"
        return "".join(lines).encode()

    return change


def whole(raw: bytes) -> Change:
    """Puts other contents into a file."""
    return lambda _: raw


def put(before: bytes = b"", after: bytes = b"") -> Change:
    """Puts bytes before and after what is there."""
    return lambda raw: before + raw + after
