"""A remedy in the framework's own spelling: the flags that differ between the commands before and after it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.base.reading import parse_mapping
from calc.base.schema import InputError
from calc.catalog.catalog import Catalog
from calc.diagnose import openrlhf
from calc.diagnose.flags import flat, word
from calc.diagnose.job import Job
from calc.diagnose.reading import Reading
from calc.diagnose.remedies import Remedy
from calc.frameworks.registry import framework
from calc.launch import launch
from calc.launch.shell import Launch
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario

SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
PINNING = "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:{0},pinned_max_cached_size_mb:{0}"
# Settings as trainers without a command of their own have them.
NAMED: Mapping[str, Mapping[str, str]] = {
    "transformers": {
        "micro_batch": "--per_device_train_batch_size {}", "attention": "--attn_implementation flash_attention_2",
        "loss": "--use_liger_kernel True", "optimizer": "--optim {}", "checkpointing": "--gradient_checkpointing True",
        "accumulation": "--gradient_accumulation_steps {}",
    },
}  # fmt: skip
# A file of DeepSpeed or accelerate, in every project.
FILES: Mapping[str, str] = {
    "offload.optimizer": '"offload_optimizer": {"device": "cpu"} in DeepSpeed\'s file',
    "offload.parameters": '"offload_param": {"device": "cpu"} in DeepSpeed\'s file',
}
_OPTION = re.compile(r"(-\w*-?[\w.]+|[+\w.]+=|[A-Z_]+=|[\w-]+\.(?:json|yaml): [^\s:]+: )")


def diff(job: Job, remedy: Remedy, reading: Reading, catalog: Catalog) -> list[str]:
    """The changes to the command: `flag old → flag new`; the fields of a scenario where no command is known."""
    before, after = _command(job.given, catalog), _command(remedy.given, catalog)
    if before and after:
        found = list(_changed(_options(before), _options(after)))
        if reading.flags and openrlhf.recognised(reading.flags) and openrlhf.older(reading.flags):
            found = [_older(line) for line in found]
        if found:
            return [*_cards(job, remedy), *found]
    s = job.scenario
    if framework(s.framework).CHOICES.own_loop and s.trainer in NAMED:
        return list(_named(NAMED[s.trainer], s, remedy))
    return [f"{name}: {word(value)}" for name, value in remedy.changes.items() if value is not None]


def _cards(job: Job, remedy: Remedy) -> Iterator[str]:
    """The number of GPUs where it changes: not every command states it."""
    if "gpus" in remedy.changes:
        yield f"gpus: {job.scenario.gpus} → {remedy.changes['gpus']}"


def _command(given: Mapping[str, Any], catalog: Catalog) -> Launch | None:
    """The newest release's command for a job, or None."""
    newest = {**given, "framework": str(given.get("framework", "")).partition("==")[0]}
    try:
        return launch(parse(newest, catalog=catalog))
    except InputError:
        return None


def _options(found: Launch) -> list[str]:
    """The options of a command, the settings of its files by dotted key, and the lines of its scripts."""
    lines = [line.strip().removesuffix("\\").strip() for line in found.command.splitlines()]
    first = [word for word in lines[0].split() if word.startswith("PYTORCH_")]
    files = [f"{name}: {line}" for name, text in found.files.items() for line in _settings(name, text)]
    return [*first, *lines[1:], *files]


def _settings(name: str, text: str) -> Iterator[str]:
    if name.endswith((".json", ".yaml")):
        yield from (f"{key}: {value}" for key, value in flat(parse_mapping(text.encode(), name)).items())
    else:
        yield from map(str.strip, text.splitlines())


def _changed(before: list[str], after: list[str]) -> Iterator[str]:
    gone = [line for line in before if line not in after]
    new = [line for line in after if line not in before]
    for line in new:
        match = _OPTION.match(line)
        old = next((each for each in gone if match and each.startswith(match[1])), None)
        if old:
            gone.remove(old)
        named = match[1] if match and match[1].endswith(": ") else ""  # a file's key, which once is enough
        yield f"{old} → {line.removeprefix(named)}" if old else line
    yield from (f"without {line}" for line in gone)


def _older(line: str) -> str:
    """A line with the names that flags had before 0.11."""
    for name, old in openrlhf.OLDER.items():
        line = re.sub(rf"--{re.escape(name)}(?![\w.])", f"--{old}", line)
    return line.replace("--attn_implementation flash_attention_2", "--flash_attn")


def _named(names: Mapping[str, str], s: Scenario, remedy: Remedy) -> Iterator[str]:
    """A project's own settings for what a remedy changes."""
    after = remedy.estimate.scenario
    for place, value in remedy.changes.items():
        if place == "expandable_segments":
            yield SEGMENTS
        elif place == "pinned_max_round_threshold_mb":
            yield PINNING.format(value)
        elif place == "sharding":
            yield f"{value} in the file for DeepSpeed or FSDP"
        elif place in FILES and value:
            yield FILES[place]
        elif place == "method" and value == "qlora" and "qlora" in names:
            yield from (names["method"], names["qlora"])
        elif place in names:
            optims = OPTIMIZERS[value].spelled.trl.values() if place == "optimizer" else ()
            yield names[place].format(next((each.optim for each in optims), value))
        elif value is not None:
            yield f"{place}: {word(value)}"
    if after.accumulation != s.accumulation and "accumulation" in names:
        yield names["accumulation"].format(after.accumulation)
