"""ms-swift 4's `megatron pt`, `megatron sft` and `megatron rlhf`, whose flags are fields of `swift/megatron/arguments`.

NPROC_PER_NODE and its like make them start torchrun (`cli/_megatron/main.py` of 4.6.0).
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.base.optimizers import OPTIMIZERS, USUAL
from calc.launch import shell
from calc.launch.shell import Launch, Placeholder, Words, option
from calc.models.slices import account_for, told_layers
from calc.scenario.scenario import Scenario

FIRST = "4"
COMMANDS = {"pretrain": "pt", "sft": "sft", **dict.fromkeys(("rm", "dpo", "kto"), "rlhf")}
DEGREES = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "expert_tensor_parallel": "expert_tensor_parallel_size",
}
MODULES = {"embed_tokens": "word_embeddings", "lm_head": "output_layer"}  # their names in Megatron-core's GPTModel

STATES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def launch(s: Scenario) -> Launch:
    """The command for `s`."""
    seen = f"MIN_PIXELS={s.images.min_pixels} MAX_PIXELS={s.images.max_pixels} " if s.images else ""
    command = seen + shell.command(f"megatron {COMMANDS[s.task]}", flags(s))
    return Launch(shell.setting(s, shell.several(s) + command), {}, tuple(notes(s)))


def flags(s: Scenario) -> Iterator[Words]:
    """The command's flags."""
    if COMMANDS[s.task] == "rlhf":
        yield option("--rlhf_type", s.task)
    yield option("--model", shell.model_name(s.model))
    if (reference := s.role("reference")) and reference.model != s.model:
        yield option("--ref_model", shell.model_name(reference.model))
    yield option("--use_hf", True)
    yield option("--dataset", Placeholder("DATASET", "name or path of the training data"))
    yield option("--tuner_type", s.method)
    if s.lora:
        yield option("--lora_rank", s.lora.rank)
        yield option("--lora_dropout", s.lora.dropout)
        yield option("--target_modules", *([s.lora.targets] if isinstance(s.lora.targets, str) else s.lora.targets))
        if s.lora.modules_to_save:
            yield option("--modules_to_save", *[MODULES[name] for name in s.lora.modules_to_save])
    if s.images:
        yield option("--freeze_vit", True)
        yield option("--freeze_aligner", True)
    yield option("--max_length", s.seq_len)
    yield option("--packing", s.packing)
    yield option("--padding_free", s.padding_free)
    yield option("--micro_batch_size", s.micro_batch)
    yield option("--global_batch_size", s.global_batch)
    yield option("--sequence_parallel", s.sequence_parallel)
    for field, called in DEGREES.items():
        yield option(f"--{called}", getattr(s, field))
    if s.expert_capacity:
        yield option("--moe_expert_capacity_factor", f"{s.expert_capacity:g}")
        yield option("--moe_pad_expert_input_to_capacity", s.expert_padding)
    if s.virtual_pipeline > 1:
        yield option("--virtual_pipeline_model_parallel_size", s.virtual_pipeline)
    told = told_layers(s.architecture.layers, s.pipeline_parallel, s.pipeline_layers, s.virtual_pipeline)
    for which, count in told.items():
        yield option(f"--decoder_{which}_pipeline_num_layers", count)
    for name in account_for(s.pipeline_layers, s.virtual_pipeline):
        yield option(f"--{name}", True)
    yield option("--recompute_granularity", "full" if s.checkpointing == "full" else "selective")
    if s.recomputed:
        yield option("--recompute_modules", *sorted(s.recomputed))
    if s.checkpointing == "full":
        yield option("--recompute_method", "uniform")
        yield option("--recompute_num_layers", s.recompute_num_layers or 1)
    yield option("--cross_entropy_loss_fusion", s.loss == "fused")
    if s.attention == "eager":
        yield option("--attention_backend", "unfused")
    if s.mtp_num_layers:
        yield option("--mtp_num_layers", s.mtp_num_layers)
    if s.optimizer != USUAL:
        yield option("--optimizer", OPTIMIZERS[s.optimizer].spelled.megatron_swift)
    hosted = s.offload.optimizer or s.offload.fraction > 0
    yield option("--optimizer_cpu_offload", hosted)
    if hosted:
        yield option("--use_precision_aware_optimizer", s.offload.masters)
        yield option("--optimizer_offload_fraction", s.offload.fraction or 1.0)
    if s.float8 != "none":
        yield option("--fp8_format", "hybrid")
        yield option("--fp8_recipe", s.float8)
        yield option("--fp8_param_gather", s.fp8_param_gather)
    if s.use_precision_aware_optimizer:
        yield option("--use_precision_aware_optimizer", True)
        yield option("--main_grads_dtype", s.grad_dtype)
        yield from (option(f"--{name}", getattr(s, name)) for name in STATES)


def notes(s: Scenario) -> Iterator[str]:
    """Notes on the values that the reader fills in."""
    yield shell.needs("DATASET", "your data, or a data set's name")
    yield from shell.common_notes(s)
