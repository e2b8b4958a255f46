"""The words of a scenario: tasks, roles, shardings, and the degrees by which GPUs share sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

# The values of the fields that choose among words, as `scenario.schema.json` lists them.
Task = Literal[
    "pretrain", "sft", "rm", "dpo", "kto", "orpo", "simpo", "gkd", "ppo", "grpo", "reinforce++", "inference"
]  # fmt: skip
Trainer = Literal[
    "own",
    "transformers",
    "litgpt",
    "colossalai",
    "megatron",
    "llamafactory",
    "axolotl",
    "ms-swift",
    "torchtune",
    "torchtitan",
    "unsloth",
    "megatron-swift",
]
Method = Literal["full", "lora", "qlora"]
AdapterDtype = Literal["fp32", "bf16"]
AdapterInit = Literal["random", "pissa", "olora"]
ExpertsImplementation = Literal["transformers", "torchtitan", "automodel"]
OuterUnits = Literal["root", "kept", "freed", "embedding"]
DeviceMap = Literal["none", "auto"]
QatScheme = Literal["none", "int4"]
Resharding = Literal["default", "never", "all-but-last"]
AdapterUnits = Literal["own", "layer"]
Precision = Literal["bf16", "mixed", "fsdp-mixed", "autocast", "fp16", "fp32"]
Layout = Literal["bf16", "mixed", "fsdp-mixed", "autocast", "fp32"]  # a precision without its 16-bit type
Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "megatron"]
GradDtype = Literal["bf16", "fp16", "fp32"]
StateDtype = Literal["fp32", "bf16", "fp16", "fp8"]
MasterDtype = Literal["fp32", "fp16"]
Checkpointing = Literal["none", "full", "selective"]
Freeze = Literal["none", "tower", "vision"]
Attention = Literal["flash", "sdpa", "eager"]
Kernels = Literal["eager", "liger", "foak", "automodel", "xielu"]
FusedLoss = Literal["native", "te"]
OutputsKept = Literal["none", "backward", "step", "next"]
ContextExchange = Literal["p2p", "all_gather", "a2a"]
LinearAttention = Literal["torch", "fla"]
Loss = Literal["full", "chunked", "fused", "cut", "vocab-chunked"]
Float8 = Literal[
    "none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "nvfp4", "delayed", "blockwise"
]  # fmt: skip
Compile = Literal["none", "model", "loss", "model-and-loss"]
Logprob = Literal["log-softmax-fp32", "selective", "logsumexp"]
Generates = Literal["vllm", "sglang", "hf", "none"]
Placement = Literal["colocated", "separate"]

Family = Literal["none", "ddp", "zero", "fsdp", "megatron"]


class Sharded(NamedTuple):
    """A sharding in two parts: its family, and ZeRO's stage or FSDP's version, 0 for the others."""

    family: Family
    stage: int = 0

    @property
    def gathers(self) -> bool:
        """True if a rank has a part of the weights, and gathers whole ones to compute with."""
        return self.family == "fsdp" or self == ("zero", 3)


SHARDED: Mapping[Sharding, Sharded] = {
    "none": Sharded("none"),
    "ddp": Sharded("ddp"),
    "zero1": Sharded("zero", 1),
    "zero2": Sharded("zero", 2),
    "zero3": Sharded("zero", 3),
    "fsdp1": Sharded("fsdp", 1),
    "fsdp2": Sharded("fsdp", 2),
    "megatron": Sharded("megatron"),
}
RL = ("ppo", "grpo", "reinforce++")
# engines of their own, beside a trainer that generates itself, and what they are called
SERVERS: Mapping[Generates, str] = {"vllm": "vLLM", "sglang": "SGLang"}
NODE = 8  # GPUs of a node, unless given
PAIRED = ("rm", "dpo", "orpo", "simpo")  # a micro batch counts pairs: chosen and rejected run as one batch
PREFERENCE = ("dpo", "kto", "orpo", "simpo")  # the loss is one of log-probabilities of given sequences
DEEPSPEED: tuple[Sharding, ...] = tuple(name for name, own in SHARDED.items() if own.family == "zero")
FSDP: tuple[Sharding, ...] = tuple(name for name, own in SHARDED.items() if own.family == "fsdp")
SHARDINGS: tuple[Sharding, ...] = ("ddp", *DEEPSPEED, *FSDP)  # over several GPUs, with most trainers
# Trainers whose own code makes a model of its config's fields; the others read the config by Transformers.
OWN_MODELS: tuple[Trainer, ...] = ("litgpt", "megatron", "torchtune", "torchtitan")
# Trainers with shardings of their own, and of no others.
OWN_SHARDINGS: Mapping[str, tuple[Sharding, ...]] = {
    "megatron": ("megatron",),
    "megatron-swift": ("megatron",),
}
TOGETHER = ("tensor_parallel", "pipeline_parallel", "context_parallel")  # degrees by which GPUs share sequences
# The roles that a scenario can describe one by one. The trained model of the other tasks is described by the scenario's
# own fields, which every role takes over unless its own say otherwise.
ROLES: Mapping[str, tuple[str, ...]] = {
    "dpo": ("reference",),
    "kto": ("reference",),
    "gkd": ("teacher",),
    "ppo": ("actor", "critic", "reference", "reward"),
    "grpo": ("actor", "reference", "reward"),
    "reinforce++": ("actor", "reference", "reward"),
}
TRAINED_ROLES = ("actor", "critic")
# With `separate`, a role without GPUs of its own shares those of the first of these that runs.
PARTNERS: Mapping[str, tuple[str, ...]] = {
    "reference": ("actor", "critic"),
    "teacher": ("actor",),
    "reward": ("critic", "actor"),
    "critic": ("actor", "reward"),
}
