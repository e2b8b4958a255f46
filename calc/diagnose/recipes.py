"""Commands of torchtune, torchtitan and LitGPT read back: of programs that take the model from a configuration.

Keys are those that `calc/launch/torchtune.py` and `calc/launch/torchtitan.py` write, and LitGPT's flags as
`litgpt/args.py` has them.
"""

from __future__ import annotations

import re
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.diagnose.flags import Flags, without_none
from calc.launch import torchtitan

TUNE, TITAN, LIT = "torchtune", "torchtitan", "litgpt"
PROGRAMS: tuple[tuple[str, str], ...] = (
    (r"\btune run\b|torchtune\.models\.", TUNE),
    (r"torchtitan", TITAN),
    (r"\blitgpt (?:finetune|pretrain)", LIT),
)
IGNORED = re.compile(
    r"^(?:[mc]|config|job|module|metrics|checkpoint|profiling|comm|profiler|log|seed|out_dir|output_dir|data|epochs|"
    r"metric_logger|tokenizer|dataset|device|hf_assets)|\.(?:lr|num_warmup_steps|_component_)|lora_alpha|train\.epochs|"
    r"train\.(?:lr|save|log)|eval|resume|logger|shuffle|validat|training\.steps|lr_scheduler|master_|rdzv|node_rank|"
    r"local_ranks|role|tee|max_steps|disable_cuda_graphs"
)
_SETTING = re.compile(r"(?<!\S)([A-Za-z_]\w*)=(\S+)")  # an override without a section
_COMPONENT = re.compile(r"torchtune\.models\.\w+\.(?:(q?lora)_)?([a-z]+\w*?_\d+(?:_\d+)?b)\b", re.IGNORECASE)
_RECIPE = re.compile(r"\b(qlora|lora|full)(?:_dpo|_finetune)?(?:_|\b)")
_RECOMPUTED = {"full": "full", "selective": "selective", "none": "none"}
_PRECISIONS = {"bf16": "bf16", "fp32": "fp32", "bf16-true": "bf16", "32-true": "fp32", "bf16-mixed": "autocast"}


def project(flags: Flags) -> str:
    """The program of a command, or ""."""
    where = f"{flags.program} {flags.values.get('model._component_', '')}"
    found = next((name for pattern, name in PROGRAMS if re.search(pattern, where)), "")
    return found or (TITAN if "training.local_batch_size" in flags.values else "")


def fields(flags: Flags, program: str) -> dict[str, Any]:
    """The fields that a command states."""
    flags.values = {**dict(_SETTING.findall(flags.program)), **flags.values}
    read = {TUNE: _tune, TITAN: _titan, LIT: _lit}[program](flags)
    return without_none({"framework": "torch", "trainer": program, **read})


def _tune(flags: Flags) -> dict[str, Any]:
    config, component = flags.text("config") or "", flags.text("model._component_") or ""
    built = _COMPONENT.search(component)
    recipe = _RECIPE.search(config.rpartition("/")[2]) or _RECIPE.search(flags.program)
    method = (built[1] or "full") if built else recipe[1] if recipe else None
    named = config.removesuffix(".yaml").rpartition("/")
    size = re.match(r"\d+(?:\.\d+)?B", named[2])
    model = f"{named[0].rpartition('/')[2]}_{size[0]}" if size and named[0] else built[2] if built else None
    offloads = flags.switch("fsdp_cpu_offload")
    optimizer = flags.text("optimizer", "optimizer._component_")
    lora = method in ("lora", "qlora")
    return {
        "task": "dpo" if "dpo" in flags.program else "sft",
        "model": _dotted(model) if model else None,
        "method": method,
        "lora.rank": flags.integer("model.lora_rank") if lora else None,
        "lora.dropout": flags.number("model.lora_dropout") if lora else None,
        **flags.machine(("nproc_per_node", "nproc-per-node"), ("nnodes",)),
        "micro_batch": flags.integer("batch_size"),
        "accumulation": flags.integer("gradient_accumulation_steps"),
        "seq_len": flags.integer("tokenizer.max_seq_len", "dataset.max_seq_len", "max_seq_len"),
        "packing": flags.switch("dataset.packed"),
        "precision": _PRECISIONS.get(flags.text("dtype") or ""),
        "checkpointing": flags.recomputed("enable_activation_checkpointing"),
        "offload.activations": flags.switch("enable_activation_offloading"),
        "offload.parameters": offloads,
        "offload.optimizer": offloads,
        "optimizer_in_backward": flags.switch("optimizer_in_bwd"),
        "optimizer": next((name for name, facts in OPTIMIZERS.items() if facts.spelled.torch == optimizer), None),
    }


def _titan(flags: Flags) -> dict[str, Any]:
    config = f"{flags.text('config', 'job.config_file') or ''} {flags.program}"
    configured = {name: model for model, (_, name) in torchtitan.CONFIGS.items()}
    model = next((configured[name] for name in sorted(configured, key=len, reverse=True) if name in config), None)
    named, flavor = flags.text("model.name"), flags.text("model.flavor")
    if named and flavor:
        model = configured.get(f"{named}_{flavor}".casefold().replace(".", "_"), model)
    shards = flags.integer("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree")
    mode = flags.text("activation_checkpoint.mode")
    schedule = flags.text("parallelism.pipeline_parallel_schedule")
    return {
        "task": "pretrain",
        "model": model,
        **flags.machine(("nproc_per_node", "ngpu"), ("nnodes",)),
        "micro_batch": flags.integer("training.local_batch_size", "training.batch_size"),
        "global_batch": flags.integer("training.global_batch_size"),
        "seq_len": flags.integer("training.seq_len"),
        "sharding": "ddp" if shards == 1 else "fsdp2" if shards else None,
        "tensor_parallel": flags.integer("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
        "pipeline_parallel": flags.integer("parallelism.pipeline_parallel_degree"),
        "virtual_pipeline": 2 if (schedule or "").casefold() == "interleaved1f1b" else None,
        "context_parallel": flags.integer("parallelism.context_parallel_degree"),
        "checkpointing": _RECOMPUTED.get(mode or ""),
    }


def _lit(flags: Flags) -> dict[str, Any]:
    started = re.search(r"\blitgpt (finetune|pretrain)_?(\w*)(?:\s+([^-\s]\S*))?", flags.program)
    assert started
    adapted = started[2] != "full" and started[1] == "finetune"
    method = "full"
    if adapted:
        method = "qlora" if (flags.text("quantize") or "").startswith("bnb.nf4") else "lora"
    return {
        "task": "sft" if started[1] == "finetune" else "pretrain",
        "model": flags.text("checkpoint_dir", "model_name") or started[3],
        "method": method,
        "lora.rank": flags.integer("lora_r") if adapted else None,
        "lora.dropout": flags.number("lora_dropout") if adapted else None,
        **flags.machine(("devices",), ("num_nodes",)),
        "micro_batch": flags.integer("train.micro_batch_size"),
        "global_batch": flags.integer("train.global_batch_size"),
        "seq_len": flags.integer("train.max_seq_length"),
        "precision": _PRECISIONS.get(flags.text("precision") or ""),
    }


def _dotted(name: str) -> str:
    """A model as a folder of configurations spells it, with points in its release: `llama3_1_8B` is `llama3.1-8B`."""
    return re.sub(r"(?<=\d)_(?=\d+(?:_|$))", ".", name).replace("_", "-")
