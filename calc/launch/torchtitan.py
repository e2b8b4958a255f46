"""torchtitan 0.3's command: `torchrun -m torchtitan.train` with a configuration of its registry, and flags over it.

Flags are fields of `config/configs.py` and `components/optimizer/optimizer.py`, as tyro spells them.
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.launch import shell
from calc.launch.shell import Launch, LaunchError, Placeholder, Words, option
from calc.scenario.scenario import Scenario

FIRST = "0.3"

# The module and configuration of a model (`models/*/config_registry.py`), those without converters to float8.
CONFIGS = {
    "llama-3.1-8b": ("llama3", "llama3_8b"), "llama-3.1-70b": ("llama3", "llama3_70b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"), "qwen3-1.7b": ("qwen3", "qwen3_1_7b"), "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
}  # fmt: skip
# Those with converters: by model, format, and layers at the end that stay in bf16 (`nvfp4_bf16_tail_fqns`, 15 %).
CONVERTED = {
    ("llama-3.1-8b", "mxfp8", None): ("llama3", "llama3_8b_mxfp8"),
    ("llama-3.1-8b", "nvfp4", 5): ("llama3", "llama3_8b_first_85_pct_layers_nvfp4"),
}  # fmt: skip
IMPLEMENTATIONS = {"fused": "fused", "foreach": "foreach", "single": "for-loop"}


def launch(s: Scenario) -> Launch:
    """The command for `s`; raises LaunchError if the registry has no configuration for it."""
    command = shell.command("torchrun", [*shell.torchrun(s), option("-m", "torchtitan.train"), *flags(s)])
    return Launch(shell.setting(s, command), notes=tuple(notes(s)))


def flags(s: Scenario) -> Iterator[Words]:
    """The flags of the job, and last the policy of checkpointing, which is a subcommand."""
    if s.task != "pretrain":
        # sft_qwen3_8b_math; the processor of samples is a function of the configuration (hf_datasets/text_datasets.py)
        own = "its registry has one configuration for chats, of Qwen3 8B, and another would be code of your own"
        raise LaunchError(f"task: given {s.task!r}, allowed for a command of torchtitan: pretrain; {own}")
    if s.model not in CONFIGS:
        allowed = ", ".join(CONFIGS)
        raise LaunchError(f"model: given {s.model!r}, allowed for a command of torchtitan: {allowed}")
    if s.optimizer != (usual := shell.does(s, "optimizer")):
        raise LaunchError(f"optimizer: given {s.optimizer!r}, allowed for a command of torchtitan: {usual}")
    if s.optimizer_in_backward:  # releases to 0.2 had a switch
        raise LaunchError("optimizer_in_backward: given true, allowed for a command of torchtitan: false")
    if s.float8 != "none" and (s.model, s.float8, s.bf16_layers_at_end) not in CONVERTED:
        known = "; ".join(f"{form} of {model} with {end or 'no'} layers in bf16" for model, form, end in CONVERTED)
        raise LaunchError(f"float8: given {s.float8!r}, allowed for a command of torchtitan: none; {known}")
    if s.loss != "chunked" and s.together == 1:
        raise LaunchError(
            f"loss: given {s.loss!r}, allowed for a command of torchtitan: chunked, as its configurations"
        )
    module, config = CONVERTED.get((s.model, s.float8, s.bf16_layers_at_end), CONFIGS[s.model])
    yield option("--module", module)
    yield option("--config", config)
    yield option("--hf_assets_path", Placeholder("ASSETS", "folder of the downloaded tokenizer"))
    yield option("--training.local_batch_size", s.micro_batch * (s.accumulation if s.pipeline_parallel > 1 else 1))
    yield option("--training.global_batch_size", s.global_batch)
    yield option("--training.seq_len", s.seq_len)
    yield option("--training.dtype", "bfloat16" if s.precision == "bf16" else "float32")
    yield option("--training.mixed_precision_param", "float32" if s.precision == "fp32" else "bfloat16")
    yield ("--training.disable_cuda_graphs",)
    if s.offload.parameters or s.offload.optimizer:
        yield ("--training.enable_cpu_offload",)
    if s.compile != "none":
        yield ("--compile.enable",)
        yield option("--compile.components", *s.compile.split("-and-"))
    if s.async_tensor_parallel:
        yield ("--compile.enable_async_tensor_parallel",)
    yield from degrees(s)
    yield option("--optimizer.implementation", IMPLEMENTATIONS[s.optimizer_impl])
    yield (f"activation-checkpoint:{s.checkpointing}",)


def degrees(s: Scenario) -> Iterator[Words]:
    """The flags of parallelism; shards and copies are over the GPUs that share no sequences."""
    copies = s.data_parallel if s.sharding == "ddp" else s.data_parallel_replicate
    yield option("--parallelism.data_parallel_replicate_degree", copies)
    yield option("--parallelism.data_parallel_shard_degree", s.data_parallel // copies)
    if s.expert_parallel > 1:
        yield option("--parallelism.expert_parallel_degree", s.expert_parallel)
    if s.reshard_after_forward == "never":
        yield option("--parallelism.fsdp_reshard_after_forward", "never")
    yield option("--parallelism.tensor_parallel_degree", s.tensor_parallel)
    yield option("--parallelism.pipeline_parallel_degree", s.pipeline_parallel)
    yield option("--parallelism.context_parallel_degree", s.context_parallel)
    if s.tensor_parallel > 1 and not s.sequence_parallel:
        yield ("--parallelism.no-enable-sequence-parallel",)
    if s.pipeline_parallel > 1:
        yield option("--parallelism.pipeline_parallel_microbatch_size", s.micro_batch)
    if s.virtual_pipeline > 1:
        yield option("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")


def notes(s: Scenario) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no flag sets."""
    yield shell.needs("ASSETS", "what scripts/download_hf_assets.py has downloaded of the model")
    yield from shell.on_every_node(s)
    if s.float8 == "mxfp8":
        yield "llama3_8b_mxfp8 converts the head, too, whose casts are not counted"
    yield from shell.unsaid(s, "attention", "grad_dtype", "packing", "no_sync", "reentrant")
    yield from shell.common_notes(s)
