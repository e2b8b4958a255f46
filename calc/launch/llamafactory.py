"""LLaMA-Factory 0.9's command: `llamafactory-cli train` with a YAML file of its `hparams` and of TrainingArguments.

It starts torchrun itself where a node has several GPUs, or where FORCE_TORCHRUN is set (`launcher.py` of 0.9.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.launch import hugging_face, shell
from calc.launch.shell import Launch, LaunchError, Placeholder
from calc.scenario.scenario import Scenario

FIRST = "0.9.2"  # use_reentrant_gc
FILE = "llamafactory.yaml"

STAGES = {"pretrain": "pt", "sft": "sft", "rm": "rm", "dpo": "dpo", "orpo": "dpo", "simpo": "dpo"}
ATTENTION = {"flash": "fa2", "sdpa": "sdpa", "eager": "disabled"}


def launch(s: Scenario) -> Launch:
    """The command for `s` with its files; raises LaunchError if a setting is missing that the job needs."""
    files = {FILE: hugging_face.yaml(settings(s)), **hugging_face.sharding_files(s)}
    start = f"llamafactory-cli train {FILE} {shell.assigned('dataset', Placeholder('DATASET', 'name of the data'))}"
    hugging_face.reference(s)
    environment = f"FORCE_TORCHRUN=1 {shell.several(s)}" if s.gpus > 1 else ""
    return Launch(shell.setting(s, environment + start), files, tuple(notes(s, files)))


def settings(s: Scenario) -> dict[str, Any]:
    """The file's keys."""
    pure = s.precision == "bf16" and s.method == "full"
    if s.method != "full" and s.layout not in ("bf16", "mixed"):
        raise LaunchError(
            f"precision: given {s.precision!r} with method {s.method}, allowed for a command of llamafactory: bf16, "
            "fp16, or mixed with DeepSpeed; a frozen base is loaded in 16 bits"
        )
    own = OPTIMIZERS[s.optimizer].spelled.llamafactory
    told = {
        "model_name_or_path": shell.model_name(s.model, variable=True),
        "stage": STAGES[s.task],
        "do_train": True,
        "output_dir": "saves",
        "finetuning_type": "full" if s.method == "full" else "lora",
        "cutoff_len": s.seq_len,
        "packing": s.packing,
        "flash_attn": ATTENTION[s.attention],
        "disable_gradient_checkpointing": s.checkpointing == "none",
        "use_reentrant_gc": s.reentrant,
        "enable_liger_kernel": s.loss == "fused" or s.kernels == "liger",
        **({"use_unsloth_gc": True} if s.offload.activations else {}),
        "per_device_train_batch_size": s.micro_batch,
        "bf16": s.precision not in ("fp32", "fp16"),
        "fp16": s.precision == "fp16",
        "pure_bf16": pure,
        **hugging_face.grouping(s),
        **{
            key: value
            for key, value in hugging_face.arguments(s, {own: True} if own else {}).items()
            if not key.startswith("gradient_checkpointing")
        },
        **(hugging_face.fsdp(s) if s.sharded.family == "fsdp" else {}),
    }
    if s.task in ("orpo", "simpo"):
        told["pref_loss"] = s.task
    if s.images:
        told |= {
            "freeze_vision_tower": s.images.freeze != "none",
            "freeze_multi_modal_projector": s.images.freeze == "vision",
            "image_min_pixels": s.images.min_pixels,
            "image_max_pixels": s.images.max_pixels,
        }
    if s.lora:
        told |= {
            "lora_rank": s.lora.rank,
            "lora_dropout": s.lora.dropout,
            "lora_target": "all" if isinstance(s.lora.targets, str) else ",".join(s.lora.targets),
        }
        if s.lora.init == "pissa":
            told |= {"pissa_init": True, "pissa_iter": -1}
        if s.lora.dora:
            told["use_dora"] = True
        if s.lora.modules_to_save:
            told["additional_target"] = ",".join(s.lora.modules_to_save)
    if s.method == "qlora":
        four = {"quantization_bit": 4, "double_quantization": s.double_quantization}
        told |= {"quantization_bit": 8} if s.load_in_8bit else four
    return told


def notes(s: Scenario, files: dict[str, str]) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no key sets."""
    yield shell.needs("DATASET", "a name in dataset_info.json, whose folder dataset_dir names")
    yield from shell.of_files(s, files)
    untold = ["lora.init"] if s.lora and s.lora.init == "olora" else []
    yield from shell.unsaid(s, *hugging_face.unsaid(s), *hugging_face.LIGER, "lora.dtype", *untold)
    yield from shell.unsaid_of_roles(s)
    yield from shell.common_notes(s)
