"""Unsloth's command: `unsloth train` with a YAML file of `unsloth_cli/config.py`, which torchrun starts on each GPU.

Of several processes `unsloth_cli/commands/train.py` makes one folder (`_launch_rank`), and each loads on its own GPU.
The optimizer is fixed there; a script of one's own may choose another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from calc.launch import hugging_face, shell
from calc.launch.shell import Launch, LaunchError, Placeholder
from calc.scenario.scenario import Scenario

FIRST = "2026.10"
FILE = "unsloth.yaml"
PADS = "UNSLOTH_DISABLE_AUTO_PADDING_FREE=1 "  # unsloth/trainer.py:193
CHECKPOINTING = {("full", True): "unsloth", ("full", False): "true", ("none", False): "none"}


def launch(s: Scenario) -> Launch:
    """The command for `s` with its file; raises LaunchError if a setting is missing that the job needs."""
    train = f"unsloth train --config {FILE} --dataset {Placeholder('DATASET', 'name of the training data')}"
    files = {FILE: hugging_face.yaml(settings(s))}
    start = shell.command("torchrun", [*shell.torchrun(s), ("--no-python", train)]) if s.gpus > 1 else train
    padded = "" if s.unpadded else PADS
    return Launch(padded + shell.setting(s, start, switches_segments=True), files, tuple(notes(s, files)))


def settings(s: Scenario) -> dict[str, Any]:
    """The file's keys, by section."""
    if s.optimizer != (usual := shell.does(s, "optimizer")):
        raise LaunchError(f"optimizer: given {s.optimizer!r}, allowed for a command of unsloth: {usual}")
    found: dict[str, Any] = {
        "model": shell.model_name(s.model, variable=True),
        "data": {"format_type": "raw" if s.task == "pretrain" else "auto"},
        "training": {
            "training_type": "full" if s.method == "full" else "lora",
            "max_seq_length": s.seq_len,
            "load_in_4bit": s.method == "qlora",
            "batch_size": s.micro_batch,
            "gradient_accumulation_steps": s.accumulation,
            "packing": s.packing,
            "gradient_checkpointing": CHECKPOINTING[s.checkpointing, s.offload.activations],
        },
    }
    if s.lora:
        if isinstance(s.lora.targets, str):
            raise LaunchError("lora.targets: given 'all-linear', allowed for a command of unsloth: a list of names")
        found["lora"] = {
            "lora_r": s.lora.rank,
            "lora_dropout": s.lora.dropout,
            "target_modules": ",".join((*s.lora.targets, *s.lora.modules_to_save)),
        }
    return found


def notes(s: Scenario, files: dict[str, str]) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no key sets."""
    yield shell.needs("DATASET", "your data on Hugging Face; local_dataset takes files")
    yield from shell.of_files(s, files)
    if not s.expandable_segments:
        yield "expandable_segments false: set PYTORCH_ALLOC_CONF yourself, or unsloth switches them on"
    places = [*hugging_face.unsaid(s), "lora.dtype", "lora.init", "loss", "reentrant", "qat_scheme"]
    # without flash-attn, xFormers or PyTorch's own keep the same
    yield from shell.unsaid(s, *places, "group_by_length", *(["attention"] if s.attention == "eager" else []))
    yield from shell.common_notes(s)
