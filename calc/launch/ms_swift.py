"""ms-swift 4's commands: `swift pt`, `swift sft` and `swift rlhf`, whose flags are fields of `swift/arguments`.

GRPO with vLLM on GPUs of its own has a second process there, `swift rollout`.
NPROC_PER_NODE and its like make it start torchrun (`cli/main.py` of 4.6.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.launch import hugging_face, shell
from calc.launch.shell import Launch, LaunchError, Placeholder, Words, option
from calc.scenario.scenario import Scenario
from calc.scenario.words import PREFERENCE

FIRST = "4"
FSDP = "fsdp.json"
BETA = 0.04  # arguments/rlhf_args.py:357 of 4.6.0; 0 leaves the reference out
HOST, PORT = "127.0.0.1", 8000  # of `swift rollout` (arguments/deploy_args.py:37 of 4.6.0)

COMMANDS = {"pretrain": "pt", "sft": "sft", **dict.fromkeys(("rm", "gkd", "grpo", *PREFERENCE), "rlhf")}
ATTENTION = {"flash": "flash_attn", "sdpa": "sdpa", "eager": "eager"}
# torch_dtype and mixed precision by our word; DeepSpeed and FSDP make fp32 of what they train.
PRECISIONS = {
    "bf16": ("bfloat16", "bf16"), "mixed": ("bfloat16", "bf16"), "fsdp-mixed": ("bfloat16", "bf16"),
    "autocast": ("float32", "bf16"), "fp16": ("float16", "fp16"), "fp32": ("float32", ""),
}  # fmt: skip


def launch(s: Scenario) -> Launch:
    """The command for `s` with its files; raises LaunchError if a flag is missing that the job needs."""
    trainer = shell.own(s, "actor") if s.rollout else s
    if not s.rollout:
        hugging_face.reference(s)
    files = hugging_face.sharding_files(trainer)
    if s.sharded.family == "fsdp":
        files[FSDP] = json.dumps(hugging_face.fsdp(s), indent=2) + "\n"
    seen = f"MIN_PIXELS={s.images.min_pixels} MAX_PIXELS={s.images.max_pixels} " if s.images else ""
    if s.loss_chunk_size:
        seen += f"CELOSS_PARALLEL_SIZE={s.loss_chunk_size} "
    command = seen + shell.command(f"swift {COMMANDS[s.task]}", flags(s, trainer))
    command = shell.setting(s, shell.several(trainer) + command)
    if s.rollout and s.placement == "separate":
        serves, first = server(s), trainer.gpus
        apart = [",".join(str(n) for n in range(at, end)) for at, end in ((first, s.gpus), (0, first))]
        command = f"CUDA_VISIBLE_DEVICES={apart[0]} {serves} &\nCUDA_VISIBLE_DEVICES={apart[1]} {command}"
    return Launch(command, files, tuple(notes(s, files)))


def flags(s: Scenario, trainer: Scenario) -> Iterator[Words]:
    """The command's flags; `trainer` is the scenario of the trained model."""
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
    beside = "lora_llm" if s.images and s.images.train_whole else "lora"
    yield option("--tuner_type", "full" if s.method == "full" else beside)
    yield option("--torch_dtype", dtype)
    yield option("--bf16", mixed == "bf16")
    yield option("--fp16", mixed == "fp16")
    yield option("--attn_impl", ATTENTION[s.attention])
    # a response comes on top of it (rlhf_trainers/rollout_mixin.py, `_template_context`)
    yield option("--max_length", s.prompt_len if s.rollout else s.seq_len)
    yield option("--packing", s.packing)
    yield option("--padding_free", s.padding_free)
    if s.context_parallel > 1:
        yield option("--sequence_parallel_size", s.context_parallel)
    if s.group_by_length:
        yield option("--group_by_length", True)
    yield option("--per_device_train_batch_size", s.micro_batch)
    yield option("--use_liger_kernel", s.loss == "fused" or s.kernels == "liger")
    spelled = OPTIMIZERS[s.optimizer].spelled
    own: dict[str, Any] = {spelled.swift_switch: True, "galore_rank": s.galore_rank} if spelled.swift_switch else {}
    own = {"optimizer": spelled.swift} if spelled.swift else own
    for name, value in hugging_face.arguments(trainer, own).items():
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
    if s.rollout:
        yield from grpo(s, trainer)


def grpo(s: Scenario, trainer: Scenario) -> Iterator[Words]:
    """The flags of generation and of its reward."""
    assert s.rollout
    yield option("--reward_funcs", Placeholder("REWARD", "name of a reward function"))
    yield option("--max_completion_length", s.response_len)
    yield option("--num_generations", s.rollout.n)
    yield option("--steps_per_generation", s.rollout.batch * s.rollout.n // (s.micro_batch * trainer.gpus))
    yield option("--beta", BETA if s.has("reference") else 0.0)
    yield option("--use_vllm", s.rollout.engine == "vllm")
    if s.rollout.engine != "vllm":
        return
    yield option("--vllm_mode", "server" if s.placement == "separate" else "colocate")
    if s.placement == "separate":
        yield option("--vllm_server_host", HOST)
        yield option("--vllm_server_port", PORT)
    else:
        yield from engine(s)
        yield option("--sleep_level", int(s.rollout.sleep))
        yield option("--offload_model", s.rollout.offload_model)
        yield option("--offload_optimizer", s.rollout.offload_optimizer)
    if s.rollout.move_model_batches:
        yield option("--move_model_batches", s.rollout.move_model_batches)


def engine(s: Scenario) -> Iterator[Words]:
    """The flags of vLLM, in the trainer's process or in its own."""
    assert s.rollout
    yield option("--vllm_gpu_memory_utilization", s.rollout.gpu_memory_utilization)
    yield option("--vllm_tensor_parallel_size", s.rollout.tensor_parallel)
    if s.rollout.max_model_len:
        yield option("--vllm_max_model_len", s.rollout.max_model_len)


def server(s: Scenario) -> str:
    """The command of vLLM on GPUs of its own, within one node."""
    assert s.rollout
    if s.nodes > 1:
        given = f"placement: given 'separate' on {s.nodes} nodes"
        raise LaunchError(f"{given}, allowed for a command of ms-swift: colocated")
    replicas = s.rollout.gpus // s.rollout.tensor_parallel
    model = [option("--model", shell.role_model(s, "actor")), option("--use_hf", True)]
    return shell.command("swift rollout", [*model, *engine(s), option("--vllm_data_parallel_size", replicas)])


def notes(s: Scenario, files: dict[str, str]) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no flag sets."""
    yield shell.needs("DATASET", "your data, or a data set's name")
    if s.rollout:
        yield shell.needs("REWARD", "one of ms-swift's reward functions, or one of a plugin of yours")
    yield from shell.of_files(s, files)
    yield from shell.unsaid(s, *hugging_face.unsaid(s), *hugging_face.LIGER)
    yield from shell.unsaid_of_roles(s, ("teacher.model",))
    yield from shell.common_notes(s)
