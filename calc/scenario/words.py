"""The words of a scenario: tasks, roles, shardings, and the degrees by which GPUs share sequences."""

from __future__ import annotations

from collections.abc import Mapping

RL = ("ppo", "grpo", "reinforce++")
NODE = 8  # GPUs of a node, unless given
PAIRED = ("rm", "dpo")  # a micro batch counts pairs: chosen and rejected run as one batch
DEEPSPEED = ("zero1", "zero2", "zero3")
FSDP = ("fsdp1", "fsdp2")
SHARDINGS = ("ddp", *DEEPSPEED, *FSDP)  # over several GPUs
TOGETHER = ("tensor_parallel", "pipeline_parallel", "context_parallel")  # degrees by which GPUs share sequences
# The roles that a scenario can describe one by one. The trained model of the other tasks is described by the scenario's
# own fields, which every role takes over unless its own say otherwise.
ROLES: Mapping[str, tuple[str, ...]] = {
    "dpo": ("reference",),
    "ppo": ("actor", "critic", "reference", "reward"),
    "grpo": ("actor", "reference", "reward"),
    "reinforce++": ("actor", "reference", "reward"),
}
TRAINED_ROLES = ("actor", "critic")
# With `separate`, a role without GPUs of its own shares those of the first of these that runs.
PARTNERS: Mapping[str, tuple[str, ...]] = {
    "reference": ("actor", "critic"),
    "reward": ("critic", "actor"),
    "critic": ("actor", "reward"),
}
