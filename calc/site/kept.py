"""Answers kept between builds, each under a hash of all that it depends on: a stale one is never found again.

A file holds one answer a line, with its key and a checksum. A line that is damaged, or that is no line of ours, is as
good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

CALC = Path(__file__).parents[1]
ASKING = ("advice.py", "kept.py")  # what of the site decides an answer, too


def fingerprint(data: Any) -> str:
    """A hash of JSON data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@cache
def source(root: Path = CALC) -> str:
    """A hash of calc, of its site what asks: all that decides an answer beside the data that it is asked about."""
    whole = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".json")):
        place = path.relative_to(root)
        if place.parts[0] != "site" or place.name in ASKING:
            raw = path.read_bytes()
            whole.update(f"{place.as_posix()}\0{len(raw)}\0".encode() + raw)
    return whole.hexdigest()


class Kept:
    """Answers in `folder`, in files by topic; those of an earlier calc are thrown away."""

    def __init__(self, folder: Path) -> None:
        """Answers of this calc alone."""
        self.folder = folder / source()[:16]

    def read(self, topic: str) -> dict[str, Any]:
        """The answers on a topic by their keys, without those that are damaged."""
        try:
            lines = (self.folder / f"{topic}.jsonl").read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return {}
        found = {}
        for line in lines:
            key, _, rest = line.partition(" ")
            check, _, text = rest.partition(" ")
            if check == _checksum(key, text):
                found[key] = json.loads(text)
        return found

    def write(self, topic: str, answers: Mapping[str, Any]) -> None:
        """Keeps `answers` on a topic, in place of those that were kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for key, answer in sorted(answers.items()):
            text = json.dumps(answer, separators=(",", ":"))
            lines.append(f"{key} {_checksum(key, text)} {text}\n")
        # builds may run side by side: a reader finds the old file or the new one, whole
        fresh = self.folder / f".{topic}.{os.getpid()}"
        fresh.write_text("".join(lines), "utf-8")
        fresh.replace(self.folder / f"{topic}.jsonl")

    def forget(self) -> None:
        """Removes what an earlier calc has left."""
        for other in self.folder.parent.glob("*"):
            if other != self.folder and other.is_dir():
                shutil.rmtree(other, ignore_errors=True)


def _checksum(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode()).hexdigest()[:32]
