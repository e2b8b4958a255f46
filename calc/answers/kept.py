"""Answers kept between builds, each under everything it depends on, so that a stale one is never found again.

A file holds the answers on one topic, behind a checksum. A damaged file counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from calc.answers import answers
from calc.base.project import ROOT

Q = TypeVar("Q")
A = TypeVar("A")
CALC = ROOT / "calc"
FOLDER = CALC.parent / "build" / "kept"
UNUSED = ("sources", "notes", "gpu_ids")  # fields of a GPU or a node that decide no answer on one card


def fingerprint(data: Any) -> str:
    """A hash of JSON data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@cache
def of_gpu(name: str) -> str:
    """A hash of the catalog's data on a GPU and its nodes, without sources, notes and the nodes' other cards."""
    catalog = answers.catalog()
    found = [catalog.gpu(name), *[node for node in catalog.nodes.values() if name in node.gpu_ids]]
    plain = [answers.plain(record) for record in found]
    return fingerprint([{k: v for k, v in record.items() if k not in UNUSED} for record in plain])


@cache
def of_model(name: str) -> str:
    """A hash of the catalog's data on a model."""
    return fingerprint(answers.plain(answers.catalog().model(name)))


@cache
def of_models() -> str:
    """A hash of the catalog's data on all models."""
    return fingerprint([of_model(name) for name in answers.catalog().models])


@cache
def source(root: Path = CALC) -> str:
    """A hash of the code that decides an answer: all of calc but its site, which shows answers, and Python."""
    code = [path for path in root.rglob("*") if path.suffix in (".py", ".json")]
    return fingerprint([sys.version, of_files(root, [p for p in code if p.relative_to(root).parts[0] != "site"])])


def of_files(root: Path, paths: Iterable[Path]) -> str:
    """A hash of files and their paths under `root`; folders among `paths` are ignored."""
    whole = hashlib.sha256()
    for path in sorted(p for p in paths if p.is_file()):
        raw = path.read_bytes()
        whole.update(f"{path.relative_to(root).as_posix()}\0{len(raw)}\0".encode() + raw)
    return whole.hexdigest()


def sealed(raw: bytes) -> bytes:
    """The bytes to keep, behind their checksum."""
    return hashlib.sha256(raw).digest() + raw


def checked(raw: bytes) -> bytes:
    """The bytes behind their checksum; empty if they are damaged."""
    check, text = raw[:32], raw[32:]
    return text if hashlib.sha256(text).digest() == check else b""


class Kept:
    """Answers in `folder`, one file per topic; answers of an earlier calc are deleted."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Uses the subfolder of this very version of calc."""
        self.folder = folder / source()[:16]

    def read(self, topic: str) -> dict[Hashable, Any]:
        """The answers on a topic by key; none if the file is missing or damaged."""
        try:
            raw = (self.folder / topic).read_bytes()
        except OSError:
            return {}
        text = checked(raw)
        return pickle.loads(text) if text else {}  # our own file, written by this very calc

    def write(self, topic: str, found: Mapping[Hashable, Any]) -> None:
        """Keeps the answers on a topic, replacing earlier ones; nothing under the preview, where files may change."""
        if answers.Preview.on:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        text = pickle.dumps(dict(found), pickle.HIGHEST_PROTOCOL)
        # builds may run side by side: a reader finds either the old file or the new one, complete
        fresh = self.folder / f".{topic}.{os.getpid()}"
        try:
            fresh.write_bytes(sealed(text))
            fresh.replace(self.folder / topic)
        finally:
            fresh.unlink(missing_ok=True)  # a partial file, if the disk is full

    def complete(
        self, asked: Mapping[str, Mapping[Hashable, Q]], compute: Callable[[Sequence[Q]], Sequence[A]]
    ) -> dict[str, dict[Hashable, A]]:
        """The answers to questions by topic and key: kept ones, and for a topic's others those that `compute` gives.

        Topics are computed over all cores. Other answers in a topic's file stay: builds of other catalogs share the
        folder.
        """
        known: dict[str, dict[Hashable, A]] = {}
        missing: dict[str, dict[Hashable, Q]] = {}
        for topic, questions in asked.items():
            kept = self.read(topic)
            known[topic] = {key: kept[key] for key in questions if key in kept}
            if left := {key: question for key, question in questions.items() if key not in kept}:
                missing[topic] = left
        # the longest first, so that no core waits for another at the end
        missing = dict(sorted(missing.items(), key=lambda item: -len(item[1])))
        made = answers.spread(compute, [list(left.values()) for left in missing.values()]) if missing else ()
        for (topic, left), found in zip(missing.items(), made, strict=True):
            known[topic] |= dict(zip(left, found, strict=True))
            answers.Clock.asked += len(left)
            self.write(topic, self.read(topic) | known[topic])
        return known

    def forget(self) -> None:
        """Removes the answers of earlier versions of calc."""
        for other in self.folder.parent.glob("*"):
            if other != self.folder and other.is_dir():
                shutil.rmtree(other, ignore_errors=True)
