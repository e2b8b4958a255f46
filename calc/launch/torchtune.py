"""torchtune 0.6's command: `tune run` of a recipe, with one of its configurations and overrides of that.

Only models that have a configuration of the kind; `_recipe_registry.py` of 0.6.1 lists them.
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.base.optimizers import OPTIMIZERS
from calc.launch import shell
from calc.launch.shell import Launch, LaunchError, Placeholder, Words, option, word
from calc.models.lora import HEAD
from calc.scenario.scenario import Scenario

FIRST = "0.6"

# Configurations by model; each has those of full fine-tuning and LoRA, on several GPUs and, but for SEVERAL, on one.
CONFIGS = {
    "llama-3-8b": "llama3/8B", "llama-3.1-8b": "llama3_1/8B", "llama-3.2-1b": "llama3_2/1B",
    "llama-3.2-3b": "llama3_2/3B", "qwen2-0.5b": "qwen2/0.5B", "qwen2-1.5b": "qwen2/1.5B", "qwen2-7b": "qwen2/7B",
    "qwen2.5-0.5b": "qwen2_5/0.5B", "qwen2.5-1.5b": "qwen2_5/1.5B", "qwen2.5-3b": "qwen2_5/3B",
    "qwen2.5-7b": "qwen2_5/7B", "llama-3-70b": "llama3/70B", "llama-3.1-70b": "llama3_1/70B",
}  # fmt: skip
SEVERAL = ("llama-3-70b", "llama-3.1-70b")
FOUR_BITS = ("llama-3-8b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b")  # with a configuration of QLoRA
LOSSES = {"full": "torch.nn.CrossEntropyLoss", "chunked": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
OUTPUT = {"o_proj": "output_proj"}  # its name of attention's last product
MLP = {"gate_proj", "up_proj", "down_proj"}


def launch(s: Scenario) -> Launch:
    """The command for `s`; raises LaunchError if torchtune has no configuration for it."""
    recipe, config = recipe_of(s)
    start = "tune run" if s.sharding == "none" else f"tune run {spread(s)}"
    lines = [option("--config", config), *overrides(s)]
    return Launch(shell.setting(s, shell.command(f"{start} {recipe}", lines)), notes=tuple(notes(s)))


def spread(s: Scenario) -> str:
    """torchrun's flags, which `tune run` takes."""
    return " ".join(" ".join(words) for words in shell.torchrun(s))


def recipe_of(s: Scenario) -> tuple[str, str]:
    """The recipe and its configuration."""
    if s.task != "sft":
        raise LaunchError(f"task: given {s.task!r}, allowed for a command of torchtune: sft")
    single = s.sharding == "none"
    whole = [model for model in CONFIGS if not single or model not in SEVERAL]
    models = whole if s.method != "qlora" else FOUR_BITS
    if s.model not in models:
        given = f"model: given {s.model!r} with method {s.method}"
        raise LaunchError(f"{given}, allowed for a command of torchtune: {', '.join(models)}")
    if s.method == "qlora" and not single:
        raise LaunchError(f"method: given 'qlora' on {s.gpus} GPUs, allowed for a command of torchtune: on one")
    kind, where = ("full" if s.method == "full" else "lora"), ("single_device" if single else "distributed")
    name = f"{CONFIGS[s.model]}_{'full' if s.method == 'full' else s.method}"
    return f"{kind}_finetune_{where}", f"{name}_single_device" if single else name


def overrides(s: Scenario) -> Iterator[Words]:
    """The overrides, by key of the configuration."""
    yield key("checkpointer.checkpoint_dir", Placeholder("MODEL_DIR", "folder of the downloaded model"))
    yield key("tokenizer.max_seq_len", s.seq_len)
    yield key("batch_size", s.micro_batch)
    yield key("gradient_accumulation_steps", s.accumulation)
    yield key("dtype", s.precision)
    yield key("dataset.packed", s.packing)
    yield key("loss", LOSSES[s.loss])
    yield key("compile", s.compile == "model-and-loss")
    yield key("enable_activation_checkpointing", s.checkpointing == "full")
    yield key("enable_activation_offloading", s.offload.activations)
    yield key("optimizer", OPTIMIZERS[s.optimizer].spelled.torch)
    if s.method == "full":
        yield key("optimizer_in_bwd", s.optimizer_in_backward)
    eight_bit = s.sharding == "none" and s.method == "full"  # whose configuration names no implementation
    if s.optimizer_impl == "fused":
        yield key("optimizer.fused", True)
    elif not eight_bit:
        yield ("~optimizer.fused",)
    if s.lora:
        yield from adapters(s)
    if s.sharding != "none":
        yield key("fsdp_cpu_offload", s.offload.parameters or s.offload.optimizer)


def adapters(s: Scenario) -> Iterator[Words]:
    """The overrides of the adapters; the MLP's three are adapted together."""
    assert s.lora
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    targets = [*attention, *MLP] if isinstance(s.lora.targets, str) else list(s.lora.targets)
    whole = MLP & {*targets}
    if {*targets} - attention - MLP - {HEAD} or (whole and whole != MLP) or not {*targets} & attention:
        raise LaunchError(
            f"lora.targets: given {', '.join(targets)}, allowed for a command of torchtune: products of attention, "
            "with or without all three of the MLP, and the head"
        )
    names = [OUTPUT.get(name, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj") if name in targets]
    yield key("model.lora_attn_modules", f"[{','.join(names)}]")
    yield key("model.apply_lora_to_mlp", bool(whole))
    yield key("model.apply_lora_to_output", HEAD in targets)
    yield key("model.lora_rank", s.lora.rank)
    yield key("model.lora_dropout", s.lora.dropout)


def key(name: str, value: object) -> Words:
    """An override of one key."""
    return (f"{name}={value}",) if isinstance(value, Placeholder) else (word(f"{name}={value}"),)


def notes(s: Scenario) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no key sets."""
    yield shell.needs("MODEL_DIR", f"where `tune download {shell.model_name(s.model)}` has put the checkpoint")
    yield "the configuration names the data set and the tokenizer's file: dataset, tokenizer.path"
    yield from shell.on_every_node(s)
    if s.compile in ("model", "loss"):
        yield f"compile: {s.compile}: this recipe's key compiles the model and the loss, or neither"
    yield from shell.unsaid(s, "attention", "grad_dtype", "lora.units", "no_sync", "reentrant")
    yield from shell.common_notes(s)
