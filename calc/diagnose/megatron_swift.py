"""Megatron-SWIFT's commands read back as fields of a scenario; the inverse of `calc/launch/megatron_swift.py`.

Names of ms-swift 3 are read where they have changed: `train_type` and the numbers of virtual stages.
"""

from __future__ import annotations

import re
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.diagnose.flags import Flags, listed, without_none
from calc.launch.megatron_swift import COMMANDS, DEGREES, STATES

PROGRAM = re.compile(r"\bmegatron (pt|sft|rlhf)\b")
TASKS = {command: task for task, command in COMMANDS.items() if command != "rlhf"}
OPTIMIZER = {facts.spelled.megatron_swift: name for name, facts in OPTIMIZERS.items() if facts.spelled.megatron_swift}
SWITCHES = {
    "packing": "packing",
    "padding_free": "padding_free",
    "sequence_parallel": "sequence_parallel",
    "expert_padding": "moe_pad_expert_input_to_capacity",
}  # fmt: skip
IGNORED = re.compile(
    r"^lr|min_lr|warmup|output|save|logging|eval|report_to|wandb|dataset|epoch|iters|seed|num_proc|num_workers|finetune|"
    r"weight_decay|adam_|clip_grad|use_hf|load|system|model_author|model_name|merge_lora|lora_alpha|beta|rpo_alpha|"
    r"loss_type|(?:un)?desirable_weight|center_rewards|moe_(?:permute|grouped|shared|aux|router|z_loss)|"
    r"log_|tensorboard|use_precision_aware|columns|truncation|stream|shuffle"
)


def recognised(flags: Flags) -> bool:
    """True for a command of Megatron-SWIFT."""
    return bool(PROGRAM.search(flags.program))


def fields(flags: Flags) -> dict[str, Any]:
    """The fields that a command states."""
    found = PROGRAM.search(flags.program)
    assert found
    fused = flags.switch("cross_entropy_loss_fusion")
    stated: dict[str, Any] = {
        "framework": "torch",
        "trainer": "megatron-swift",
        "task": TASKS.get(found[1]) or flags.text("rlhf_type") or "dpo",
        "model": flags.text("model"),
        **flags.machine(("nproc_per_node", "num_gpus"), ("nnodes",)),
        "seq_len": flags.integer("max_length"),
        "micro_batch": flags.integer("micro_batch_size"),
        "global_batch": flags.integer("global_batch_size"),
        **{field: flags.integer(called) for field, called in DEGREES.items()},
        **{field: flags.switch(called) for field, called in SWITCHES.items()},
        "virtual_pipeline": flags.integer(
            "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"
        ),
        "expert_capacity": flags.number("moe_expert_capacity_factor"),
        "loss": None if fused is None else "fused" if fused else "full",
        "roles.reference.model": flags.text("ref_model"),
        "optimizer": OPTIMIZER.get(flags.text("optimizer") or ""),
        "mtp_num_layers": flags.integer("mtp_num_layers"),
        "attention": {"unfused": "eager"}.get(flags.text("attention_backend") or ""),
        **_eight_bits(flags),
        **_hosted(flags),
        **_adapters(flags),
        **_recomputed(flags),
    }
    return without_none(stated)


def _hosted(flags: Flags) -> dict[str, Any]:
    """Adam on the host: for all parameters, which is the default, or for a share of them; or with its own formats."""
    on, share = flags.switch("optimizer_cpu_offload"), flags.number("optimizer_offload_fraction")
    aware = flags.switch("use_precision_aware_optimizer")
    if on and share and (share < 1 or aware is False):
        return {"offload.fraction": share, "offload.masters": aware is not False}
    if aware and not on:
        return {
            "use_precision_aware_optimizer": True,
            "grad_dtype": flags.text("main_grads_dtype"),
            **{name: flags.text(name) for name in STATES},
        }
    return {"offload.optimizer": on}


def _eight_bits(flags: Flags) -> dict[str, Any]:
    """The recipe for products in 8 bits, delayed scaling if none is named."""
    asked, recipe = flags.text("fp8_format"), flags.text("fp8_recipe")
    gathers = flags.switch("fp8_param_gather")
    return {"float8": recipe or "delayed", "fp8_param_gather": gathers} if asked else {}


def _adapters(flags: Flags) -> dict[str, Any]:
    """The method, and the adapters of LoRA."""
    kind = flags.text("tuner_type", "train_type")
    if kind != "lora":
        return {"method": kind if kind == "full" else None}
    named = flags.text("target_modules")
    return {
        "method": "lora",
        "lora.rank": flags.integer("lora_rank"),
        "lora.dropout": flags.number("lora_dropout"),
        "lora.targets": named if named in (None, "all-linear") else listed(named),
    }


def _recomputed(flags: Flags) -> dict[str, Any]:
    """The fields on layers, or parts of them, that run again for their backward; fused attention alone is no part."""
    granularity, modules = flags.text("recompute_granularity"), flags.text("recompute_modules")
    flags.has("recompute_method")
    together = flags.integer("recompute_num_layers")
    if granularity == "selective" and modules:
        return {"checkpointing": "selective", "recompute_modules": listed(modules)}
    if granularity == "full" and together and together > 1:
        return {"checkpointing": "full", "recompute_num_layers": together}
    return {"checkpointing": {"full": "full", "selective": "none", "none": "none"}.get(granularity or "")}
