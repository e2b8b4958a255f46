"""ms-swift 4's commands: `swift pt`, `swift sft` and `swift rlhf`, whose flags are fields of `swift/arguments`.

NPROC_PER_NODE and its like make it start torchrun (`cli/main.py` of 4.6.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from calc.base.optimizers import OPTIMIZERS
from calc.launch import hugging_face, shell
from calc.launch.shell import Launch, LaunchError, Placeholder, Words, option
from calc.scenario.scenario import Scenario
from calc.scenario.words import PREFERENCE

FIRST = "4"
FSDP = "fsdp.json"

COMMANDS = {"pretrain": "pt", "sft": "sft", **dict.fromkeys(("rm", "gkd", *PREFERENCE), "rlhf")}
ATTENTION = {"flash": "flash_attn", "sdpa": "sdpa", "eager": "eager"}
# torch_dtype and mixed precision by our word; DeepSpeed and FSDP make fp32 of what they train.
PRECISIONS = {
    "bf16": ("bfloat16", "bf16"), "mixed": ("bfloat16", "bf16"), "fsdp-mixed": ("bfloat16", "bf16"),
    "autocast": ("float32", "bf16"), "fp16": ("float16", "fp16"), "fp32": ("float32", ""),
}  # fmt: skip


def launch(s: Scenario) -> Launch:
    """The command for `s` with its files; raises LaunchError if a flag is missing that the job needs."""
    hugging_face.reference(s)
    files = hugging_face.sharding_files(s)
    if s.sharded.family == "fsdp":
        files[FSDP] = json.dumps(hugging_face.fsdp(s), indent=2) + "\n"
    seen = f"MIN_PIXELS={s.images.min_pixels} MAX_PIXELS={s.images.max_pixels} " if s.images else ""
    command = seen + shell.command(f"swift {COMMANDS[s.task]}", flags(s))
    return Launch(shell.setting(s, shell.several(s) + command), files, tuple(notes(s, files)))


def flags(s: Scenario) -> Iterator[Words]:
    """The command's flags."""
    if s.precision == "fp16" and s.layout == "autocast":  # weights are loaded in fp16, which the scaler cannot step
        raise LaunchError("precision: given 'fp16', allowed for a command of ms-swift: with DeepSpeed, or bf16, fp32")
    dtype, mixed = PRECISIONS[s.precision]
    if COMMANDS[s.task] == "rlhf":
        yield option("--rlhf_type", s.task)
    if s.task == "gkd":
        yield option("--teacher_model", shell.role_model(s, "teacher"))
        yield option("--lmbda", s.on_policy)
        yield option("--sft_alpha", s.sft_alpha)
    if s.task == "dpo" and s.sft_alpha:
        yield option("--rpo_alpha", s.sft_alpha)
    if s.task == "simpo":
        yield option("--cpo_alpha", 1.0)
    yield option("--model", shell.model_name(s.model))
    yield option("--use_hf", True)
    yield option("--dataset", Placeholder("DATASET", "name or path of the training data"))
    yield option("--tuner_type", "full" if s.method == "full" else "lora")
    yield option("--torch_dtype", dtype)
    yield option("--bf16", mixed == "bf16")
    yield option("--fp16", mixed == "fp16")
    yield option("--attn_impl", ATTENTION[s.attention])
    yield option("--max_length", s.seq_len)
    yield option("--packing", s.packing)
    yield option("--padding_free", s.padding_free)
    if s.group_by_length:
        yield option("--group_by_length", True)
    yield option("--per_device_train_batch_size", s.micro_batch)
    yield option("--use_liger_kernel", s.loss == "fused" or s.kernels == "liger")
    own = OPTIMIZERS[s.optimizer].spelled.swift
    for name, value in hugging_face.arguments(s, {"optimizer": own} if own else {}).items():
        yield option(f"--{name}", json.dumps(value) if isinstance(value, dict) else value)
    if s.sharded.family == "fsdp":
        yield option("--fsdp", FSDP)
    if s.images:
        yield option("--freeze_vit", s.images.freeze != "none")
        yield option("--freeze_aligner", s.images.freeze == "vision")
        yield option("--vit_gradient_checkpointing", bool(s.images.checkpointing))
    if s.lora:
        yield option("--lora_rank", s.lora.rank)
        yield option("--lora_dropout", s.lora.dropout)
        yield option("--target_modules", *([s.lora.targets] if isinstance(s.lora.targets, str) else s.lora.targets))
        if s.lora.init != "random":
            yield option("--init_weights", s.lora.init)
        if s.lora.dora:
            yield option("--use_dora", True)
        if s.lora.modules_to_save:
            yield option("--modules_to_save", *s.lora.modules_to_save)
        if s.lora.dtype == "bf16" and s.sharded.family != "zero":
            yield option("--lora_dtype", "bfloat16")
    if s.method == "qlora":
        yield option("--quant_method", "bnb")
        yield option("--quant_bits", 8 if s.load_in_8bit else 4)
        if not s.load_in_8bit:
            yield option("--bnb_4bit_use_double_quant", s.double_quantization)


def notes(s: Scenario, files: dict[str, str]) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no flag sets."""
    yield shell.needs("DATASET", "your data, or a data set's name")
    yield from shell.of_files(s, files)
    yield from shell.unsaid(s, *hugging_face.unsaid(s), *hugging_face.LIGER)
    yield from shell.unsaid_of_roles(s, ("teacher.model",))
    yield from shell.common_notes(s)
