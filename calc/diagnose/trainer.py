"""Commands and files of Transformers' Trainer read back as fields of a scenario: TRL's, and what is built like it.

TRL's are the inverse of `calc/launch/trl.py`, with the files for accelerate and DeepSpeed beside the command. Names of
LLaMA-Factory, Axolotl and ms-swift are read where they mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.diagnose.flags import Flags, listed, without_none
from calc.launch.shell import ATTENTION
from calc.scenario.words import PREFERENCE

MODEL = (
    "model_name_or_path", "base_model", "model_id_or_path", "model_id", "model", "model_name", "base_model_name",
    "model.pretrained_model_name_or_path",
)  # fmt: skip
MICRO_BATCH = (
    "per_device_train_batch_size", "micro_batch_size", "per_gpu_train_batch_size", "device_train_microbatch_size",
    "batch_size", "train_micro_batch_size_per_gpu",
)  # fmt: skip
LENGTH = (
    "max_length", "max_seq_length", "max_seq_len", "cutoff_len", "sequence_len", "model_max_length", "block_size",
    "context_length",
)  # fmt: skip
FSDP_VERSION = ("fsdp_config.fsdp_version", "fsdp_version")
CHECKPOINTING = ("gradient_checkpointing", "use_gradient_checkpointing", "fsdp_config.activation_checkpointing")
LIGER = ("use_liger_kernel", "enable_liger_kernel", "use_liger")
REENTRANT = ("gradient_checkpointing_kwargs.use_reentrant", "use_reentrant_gc")
OPTIMIZER = ("optim", "optimizer")
FLASH = ("attn_implementation", "attn_impl")
ACTOR = "actor_model_name_or_path"  # DeepSpeed-Chat's third step
TEACHER = ("teacher_model", "teacher_model_name_or_path")
TARGETS = ("lora_target_modules", "lora_target", "target_modules", "lora_modules")
# The programs and the task that each runs.
PROGRAMS: tuple[tuple[str, str], ...] = (
    (r"\btrl (?:sft)\b|\bsft(?:_\w+)?\.py|_sft\b|\bswift sft|sft_trainer", "sft"),
    (r"\btrl reward\b|\breward_modeling\.py|\btrain_reward", "rm"),
    (r"\btrl dpo\b|\bdpo(?:_\w+)?\.py", "dpo"),
    (r"\btrl kto\b|\bkto(?:_\w+)?\.py", "kto"),
    (r"\bppo(?:_\w+)?\.py", "ppo"),
    (r"\borpo(?:_\w+)?\.py", "orpo"),
    (r"\bcpo(?:_\w+)?\.py", "simpo"),
    (r"\bgkd(?:_\w+)?\.py", "gkd"),
    (r"\btrl grpo\b|\bgrpo(?:_\w+)?\.py|_grpo\.py", "grpo"),
    (r"\brun_clm\w*\.py|\bpretrain", "pretrain"),
)
LLAMAFACTORY, AXOLOTL, SWIFT, UNSLOTH = "LLaMA-Factory", "Axolotl", "ms-swift", "Unsloth"
TRAINERS = {LLAMAFACTORY: "llamafactory", AXOLOTL: "axolotl", SWIFT: "ms-swift", UNSLOTH: "unsloth"}
STAGES = {
    "sft": "sft",
    "pt": "pretrain",
    "rm": "rm",
    "reward": "rm",
    "gkd": "gkd",
    "grpo": "grpo",
    **{name: name for name in PREFERENCE},
}
TRL = re.compile(r"\btrl\b|(?:^|/|\s)(?:sft|dpo|grpo|reward_modeling|orpo|cpo|kto|gkd)\w*\.py|trl/")
DOUBLE = (
    "use_bnb_nested_quant", "double_quantization", "bnb_4bit_use_double_quant",
    "bnb_config_kwargs.bnb_4bit_use_double_quant",
)  # fmt: skip
IGNORED = re.compile(
    r"learning_rate|^lr|warmup|output|save|logging|eval|report_to|wandb|dataset|data_|template|max_samples|epoch|seed|"
    r"scheduler|overwrite|num_proc|preprocess|ddp_timeout|plot|do_train|do_eval|run_name|push_to|hub|weight_decay|(?<!_)adam_|"
    r"max_steps|trust_remote|config_file|accelerate_config|machine_rank|main_process|master_|node_rank|rdzv|tf32|"
    r"train_on|group_by|early_stop|special_tokens|tokenizer|val_|strict|local_rank|max_grad_norm|dataloader|resume|"
    r"beta|pref_|stage$|template|temperature|top_|reward_func|epsilon|loss_type|lora_alpha|alpha|use_cpu|same_network|"
    r"compute_environment|debug|downcast|main_training|gpu_ids|tpu|distributed_type|mixed_precision|zero3_init|zero3_save|"
    r"^module$|^m$|max_prompt|lazy|neftune|gradient_clipping|multinode|state_dict|backward_prefetch|forward_prefetch|"
    r"sync_module|use_orig|ram_efficient|wrap|cast|steps_per|wall_clock|scheduler|bucket|overlap|contiguous|sub_group|"
    r"live_param|reuse_dist|persistence|prefetch|gather_16bit|round_robin|initial_scale|loss_scale|hysteresis|"
    r"train_batch_size$|label|shuffle|base_model_config|model_type|is_\w+_model|debug|task_type|bnb_4bit_quant_type|"
    r"random_state|fast_inference|prompt_|host|port|evals_per|saves_per|path$|datasets|finetuning|cache_dir|add_eos|"
    r"low_cpu|^u$|^multi_gpu|bf16\.enabled|fp16\.enabled|pin_memory|pad_to_sequence_len|use_deepspeed|hybrid_engine|"
    r"ppo_epochs|num_padding|generation_batches|fsdp_sharding_strategy|fsdp_state_dict|flash_attn|rope_scaling|resize|"
    r"print_param|freeze_|image_|video_|shift_attn|activation_checkpointing"
)


def recognised(flags: Flags) -> bool:
    """True for settings of the Trainer or of something built like it."""
    names = {*flags.values, *flags.variables}
    telling = {"per_device_train_batch_size", "model_name_or_path", "base_model", "sft_type", "train_type", "lora_r",
               "finetuning_type", "zero_optimization.stage", "distributed_type", "model_id_or_path", "micro_batch_size",
               "gradient_accumulation_steps", "cutoff_len", "use_peft", ACTOR,
               "device_train_microbatch_size", "context_length", "enable_fsdp"}  # fmt: skip
    started = re.search(
        r"\btrl (?:sft|dpo|kto|grpo|reward)|llamafactory-cli|swift (?:sft|rlhf)|accelerate launch", flags.program
    )
    return bool(names & telling) or bool(started)


def built_on(flags: Flags, text: str) -> str:
    """The project whose command it is: LLaMA-Factory, Axolotl, ms-swift, trl, or "" for plain Transformers."""
    names, where = {*flags.values, *flags.variables}, f"{flags.program}\n{text}"
    if flags.has("unsloth"):
        return UNSLOTH
    if "finetuning_type" in names or re.search(r"llamafactory|LLaMA-Factory|llmtuner|train_bash\.py", where):
        return LLAMAFACTORY
    if ("base_model" in names and {"sequence_len", "adapter"} & names) or "axolotl" in where:
        return AXOLOTL
    if "context_length" in names:  # fsdp_qlora, a loop of its own
        return ""
    if {"sft_type", "train_type"} & names or re.search(r"\bswift (?:sft|rlhf)|/swift/", where):
        return SWIFT
    if TRL.search(flags.program) or "/trl/" in text or {"use_peft", "num_generations"} & names:
        return "trl"
    return ""


def fields(flags: Flags, project: str) -> dict[str, Any]:
    """The fields that a command with its files states."""
    if flags.has(ACTOR):
        return without_none(_chat(flags)) | {"accumulation": flags.integer("gradient_accumulation_steps_actor")}
    task = _task(flags)
    trl = project == "trl" or (task == "grpo" and project != SWIFT)
    found: dict[str, Any] = {
        "framework": "trl" if trl else "torch",
        "trainer": None if trl else TRAINERS.get(project, "transformers"),
        "task": task,
        "model": flags.text(*MODEL),
        **_gpus(flags),
        "micro_batch": flags.integer(*MICRO_BATCH),
        "global_batch": flags.integer("global_train_batch_size"),
        "checkpointing": _checkpointing(flags),
        "offload.activations": True if flags.on("activation_offloading", "use_unsloth_gc") else None,
        "reentrant": _reentrant(flags),
        "attention": _attention(flags),
        "packing": _packing(flags),
        "group_by_length": _grouped(flags, task),
        "padding_free": flags.switch("padding_free") if project in ("ms-swift", "trl") else None,
        "kernels": "liger" if flags.on(*LIGER, "liger_rms_norm") else None,
        "loss": "cut"
        if flags.on("cut_cross_entropy")
        else "chunked"
        if flags.on("chunked_cross_entropy")
        else "fused"
        if flags.on(*LIGER, "liger_fused_linear_cross_entropy")
        else None,
        **_optimizer(flags),
        **_adapters(flags),
        **_sharding(flags),
    }
    found |= _grpo(flags) if task == "grpo" else {"seq_len": flags.integer(*LENGTH)}
    if task == "grpo" and project == SWIFT:
        found |= _swift_grpo(flags)
    if flags.has("roles.reference", "precompute_ref_log_probs") and flags.on("precompute_ref_log_probs"):
        found["roles.reference"] = "none"
    if task == "gkd":
        found |= {"roles.teacher.model": flags.text(*TEACHER), "on_policy": flags.number("lmbda")}
        found["sft_alpha"] = flags.number("sft_alpha")
    if project == "ms-swift" and (flags.integer("sequence_parallel_size") or 1) > 1:
        size = flags.integer("celoss_parallel_size")
        found |= {"context_parallel": flags.integer("sequence_parallel_size"), "loss_chunk_size": size}
        found["loss"] = "chunked" if size else None
    if task == "dpo" and project == "ms-swift":
        found["sft_alpha"] = flags.number("rpo_alpha")
    found["precision"] = _precision(flags, found)
    if found["method"] is None and _full(flags):
        found["method"] = "full"
    return without_none(found) | {"accumulation": flags.integer("gradient_accumulation_steps")}


def _task(flags: Flags) -> str | None:
    preferred = flags.text("pref_loss")
    if preferred in PREFERENCE:
        return preferred
    stage = STAGES.get(flags.text("stage", "rlhf_type") or "")
    if not stage and flags.has("num_generations", "max_completion_length"):  # of TRL's GRPOConfig alone
        stage = "grpo"
    return stage or next((task for pattern, task in PROGRAMS if re.search(pattern, flags.program)), None)


def _gpus(flags: Flags) -> dict[str, int | None]:
    """All GPUs and those of a node; accelerate counts all processes, other launchers those of a node."""
    whole = flags.integer("num_processes")
    each = flags.integer("nproc_per_node", "num_gpus")
    # argparse takes what begins a name
    machines = flags.integer("nnodes", "num_nodes", "num_node", "num_machines") or 1
    if whole and whole % machines == 0:
        each = whole // machines
    return {"gpus": whole or (each and each * machines), "gpus_per_node": each if machines > 1 else None}


def _reentrant(flags: Flags) -> bool | None:
    """The kind of checkpointing: a key of a file, LLaMA-Factory's own, or a word of JSON on a command line."""
    if (told := flags.text(*REENTRANT)) is not None:
        return told.casefold() == "true"
    found = re.search(r"use_reentrant\W+(true|false)", flags.text("gradient_checkpointing_kwargs") or "", re.IGNORECASE)
    return found[1].casefold() == "true" if found else None


def _checkpointing(flags: Flags) -> str | None:
    return flags.recomputed(*CHECKPOINTING) or ("none" if flags.on("disable_gradient_checkpointing") else None)


def _attention(flags: Flags) -> str | None:
    spelled = {word: name for name, word in ATTENTION.items()} | {
        "flash_attn": "flash",
        "kernels-community/flash-attn2": "flash",
    }
    named = flags.text(*FLASH)
    if named in spelled:
        return spelled[named]
    flash = flags.text("flash_attention", "use_flash_attn", "flash_attn", "use_flash_attention_2")
    if flash is None:
        return None
    return "flash" if flags.on("flash_attention", "use_flash_attn", "flash_attn") and flash != "disabled" else None


def _packing(flags: Flags) -> bool | None:
    names = ("packing", "sample_packing", "neat_packing")
    return flags.on(*names) if flags.text(*names) is not None else None


def _grouped(flags: Flags, task: str | None) -> bool | None:
    """True if batches are grouped by length, which says nothing where sequences are packed."""
    asked = flags.on("group_by_length") or flags.text("train_sampling_strategy") == "group_by_length"
    joined = _packing(flags) or flags.on("padding_free")
    return True if asked and task in (None, "pretrain", "sft") and not joined else None


def _optimizer(flags: Flags) -> dict[str, Any]:
    """The optimizer and its implementation, by Transformers' name."""
    named, more = flags.text(*OPTIMIZER), flags.text("optim_args") or ""
    for name, facts in OPTIMIZERS.items():
        if (named and named == facts.spelled.swift) or flags.on(facts.spelled.llamafactory or "none"):
            return {"optimizer": name}
        if flags.on(facts.spelled.swift_switch or "none"):
            return {"optimizer": name, "galore_rank": flags.integer("galore_rank")}
        for implementation, spelled in facts.spelled.trl.items():
            if named == spelled.optim and more == spelled.optim_args:
                chosen = facts.usual if implementation not in facts.implementations else implementation
                return {"optimizer": name, "optimizer_impl": chosen if len(facts.spelled.trl) > 1 else None}
    return {"optimizer": "adamw" if named in ("adamw_hf", "adamw_torch_xla", "adamw") else None}


def _adapters(flags: Flags) -> dict[str, Any]:
    """The method, and the adapters of LoRA and QLoRA."""
    kind = flags.text("finetuning_type", "sft_type", "train_type", "adapter", "tuner_type")
    bits = flags.text("quantization_bit", "quant_bits")
    four, eight = flags.on("load_in_4bit", "q_lora") or bits == "4", flags.on("load_in_8bit") or bits == "8"
    rank = flags.integer("lora_r", "lora_rank", "lora_dim")
    kind = (kind or "").removeprefix("custom_").removeprefix("hqq_") or None
    uses = flags.on("use_peft", "use_lora") or kind in ("lora", "qlora") or (
        kind is None and flags.text("use_peft") is None and bool(rank)
    )  # fmt: skip
    if not uses:
        return {"method": None}
    named = flags.text(*TARGETS)
    everything = flags.on("lora_target_linear") or named in ("all", "all-linear", "ALL")
    double = flags.text(*DOUBLE)
    qlora = four or eight or kind == "qlora"
    return {
        "method": "qlora" if qlora else "lora",
        "load_in_8bit": True if eight else None,
        "lora.rank": rank,
        "lora.dropout": flags.number("lora_dropout"),
        "lora.dora": True if flags.on("use_dora", "peft_use_dora") else None,
        "lora.targets": "all-linear" if everything else listed(named) if named else None,
        "double_quantization": flags.on(*DOUBLE) if qlora and double is not None else None,
        "quantize_moe_experts": True if qlora and flags.on("quantize_moe_experts") else None,
    }


def _full(flags: Flags) -> bool:
    kind = flags.text("finetuning_type", "sft_type", "train_type", "tuner_type")
    return kind in ("full", "freeze") or flags.switch("use_peft") is False


def _precision(flags: Flags, found: Mapping[str, Any]) -> str | None:
    """The layout of weights and states that types of loading and of computing give together."""
    loaded, fp16 = flags.text("dtype", "torch_dtype"), flags.on("fp16")
    bf16 = (flags.text("bf16") or "").casefold() or None
    pure = flags.on("pure_bf16")
    sharding = str(found.get("sharding") or "")
    if fp16:
        return "fp16"
    if pure:
        return "bf16"
    on = bf16 is not None and flags.on("bf16")
    narrow = loaded in ("bfloat16", "bf16", "float16")
    if sharding.startswith("zero"):
        return "mixed" if on or bf16 == "auto" else None
    if found.get("method") in ("lora", "qlora"):
        return "bf16" if narrow else None
    if sharding.startswith("fsdp"):
        mixed = flags.text("mixed_precision")
        return (
            "bf16"
            if narrow and mixed == "no"
            else "fsdp-mixed"
            if on
            else "fp32"
            if bf16 == "false" and not narrow
            else None
        )
    if narrow and loaded:
        return "bf16"
    return "autocast" if on else "fp32" if bf16 == "false" else None


def _sharding(flags: Flags) -> dict[str, Any]:
    """Sharding and offload: of a file of settings, or as the name of one hints."""
    kind = (flags.text("distributed_type") or "").upper()
    stage = flags.integer("zero_optimization.stage", "deepspeed_config.zero_stage", "zero_stage")
    named = " ".join(
        flags.text(name) or "" for name in ("deepspeed", "config_file", "deepspeed_config", "accelerate_config")
    )
    hint = re.search(r"(?:zero|z)[-_]?([123])", named.casefold())
    fsdp = flags.text("fsdp")
    found: dict[str, Any] = {"grad_dtype": flags.text("data_types.grad_accum_dtype")}
    if flags.on("use_fsdp", "enable_fsdp"):
        kind = "FSDP"
    if stage or kind == "DEEPSPEED" or (hint and kind != "FSDP"):
        level = stage or (int(hint[1]) if hint else None)
        found["sharding"] = f"zero{level}" if level else None
        offloads = {"optimizer": _device(flags, "optimizer"), "parameters": _device(flags, "param")}
        if "offload" in named.casefold() and not any(offloads.values()):
            offloads = {"optimizer": True, "parameters": "3" in str(level)}
        found |= {f"offload.{name}": value for name, value in offloads.items()}
    elif (
        kind == "FSDP"
        or fsdp
        or "fsdp" in named.casefold()
        or flags.has("fsdp_config.sharding_strategy", "use_cpu_offload")
    ):
        version = flags.integer(*FSDP_VERSION) or 1
        offloaded = (
            flags.on("fsdp_config.fsdp_offload_params", "fsdp_offload_params", "use_cpu_offload")
            or "offload" in (fsdp or "")
            or None
        )
        found |= {"sharding": f"fsdp{version}", "offload.optimizer": offloaded, "offload.parameters": offloaded}
        found["no_sync"] = False if "sync_each_batch" in (flags.text("accelerator_config") or "") else None
    elif kind == "MULTI_GPU":
        found["sharding"] = "ddp"
    elif kind == "NO":
        found["sharding"] = "none"
    return found


def _chat(flags: Flags) -> dict[str, Any]:
    """The fields of DeepSpeed-Chat's PPO, by its flags (`training/step3_rlhf_finetuning/main.py`)."""
    stage = flags.number("actor_zero_stage", "zero_stage")
    flags.has("critic_zero_stage", "critic_gradient_checkpointing")
    rank = flags.integer("actor_lora_dim")
    offloads = flags.on("offload") or None
    return {
        "framework": "torch",
        "task": "ppo",
        "model": flags.text(ACTOR),
        "roles.critic.model": flags.text("critic_model_name_or_path"),
        **_gpus(flags),
        "micro_batch": flags.integer("per_device_training_batch_size", "per_device_train_batch_size"),
        "rollout.micro_batch": flags.integer("per_device_generation_batch_size"),
        "prompt_len": flags.integer("max_prompt_seq_len"),
        "response_len": flags.integer("max_answer_seq_len"),
        "rollout.engine": "hf",
        "sharding": None if stage is None else f"zero{int(stage)}" if stage else "ddp",
        "precision": "mixed",
        "checkpointing": "full" if flags.on("actor_gradient_checkpointing") else "none",
        "offload.optimizer": offloads,
        "roles.reference.offload.parameters": flags.on("offload_reference_model") or None,
        "method": "lora" if rank else None,
        "lora.rank": rank,
    }


def served(flags: Flags) -> dict[str, Any]:
    """The fields of a server of vLLM beside the trainer, from the command `trl vllm-serve` that starts it."""
    ranks = flags.integer("tensor_parallel_size") or 1
    return without_none(
        {
            "rollout.engine": "vllm",
            "rollout.tensor_parallel": ranks,
            "rollout.gpu_memory_utilization": flags.number("gpu_memory_utilization"),
            "rollout.gpus": ranks * (flags.integer("data_parallel_size") or 1),
        }
    )


def _device(flags: Flags, what: str) -> bool | None:
    names = (f"zero_optimization.offload_{what}.device", f"deepspeed_config.offload_{what}_device")
    value = flags.text(*names, f"offload_{what}_device")
    return None if value is None else value == "cpu"


def _grpo(flags: Flags) -> dict[str, Any]:
    """The fields of generation."""
    n, batch = flags.integer("num_generations"), flags.integer("generation_batch_size")
    uses = flags.text("use_vllm")
    beta = flags.number("beta")
    mode = flags.text("vllm_mode")
    found: dict[str, Any] = {
        "prompt_len": flags.integer("max_prompt_length"),
        "response_len": flags.integer("max_completion_length"),
        "rollout.n": n,
        "rollout.batch": batch // n if batch and n else None,
        "rollout.engine": None if uses is None else "vllm" if flags.on("use_vllm") else "hf",
        "roles.reference": None if beta is None else "none" if beta == 0 else {},
        "roles.reward": "none" if flags.has("reward_funcs") else None,
        "roles.reward.model": flags.text("reward_model_name_or_path"),
    }
    if flags.on("use_vllm") and mode != "server":
        found |= {
            "rollout.gpu_memory_utilization": flags.number("vllm_gpu_memory_utilization"),
            "rollout.tensor_parallel": flags.integer("vllm_tensor_parallel_size"),
            "rollout.sleep": flags.on("vllm_enable_sleep_mode") or None,
            "rollout.max_model_len": flags.integer("vllm_max_model_length"),
        }
    if mode == "server":
        found["placement"] = "separate"
    return found


def _swift_grpo(flags: Flags) -> dict[str, Any]:
    """The fields of generation that ms-swift names otherwise; `max_length` is that of prompts."""
    found: dict[str, Any] = {
        "prompt_len": flags.integer("max_length"),
        "rollout.max_model_len": flags.integer("vllm_max_model_len"),
        "rollout.move_model_batches": flags.integer("move_model_batches"),
    }
    if flags.text("vllm_mode") != "server":
        level = flags.integer("sleep_level")
        found["rollout.sleep"] = None if level is None else level > 0
        found |= {f"rollout.{name}": flags.on(name) or None for name in ("offload_model", "offload_optimizer")}
    return found
