"""EasyR1's command: `verl.trainer.main` with overrides of `examples/config.yaml`, at its tag v0.3.2.

A key that decides memory is written even where it has its default.
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.frameworks.verl.easyr1 import STRATEGIES
from calc.launch import shell
from calc.launch.shell import Launch, LaunchError, Placeholder, Words, own
from calc.launch.verl_keys import ESTIMATORS, key, prompts
from calc.scenario.scenario import Scenario

FIRST = "easyr1-0.3.2"
DTYPES = {"fsdp-mixed": "null", "bf16": "bf16"}  # of the shards of what is trained
ACTOR, CRITIC, REF, ROLLOUT = (f"worker.{name}" for name in ("actor", "critic", "ref", "rollout"))
UPDATE, EXPERIENCE = "micro_batch_size_per_device_for_update", "micro_batch_size_per_device_for_experience"
SAYABLE = ("reference.offload.parameters",)


def launch(s: Scenario) -> Launch:
    """The command for `s`, which runs in a clone of the repository; raises LaunchError if a key is missing that the job
    needs.
    """
    command = shell.command("python3 -m verl.trainer.main", keys(s))
    return Launch(shell.setting(s, command), notes=tuple(notes(s)))


def keys(s: Scenario) -> Iterator[Words]:
    """All overrides."""
    assert s.rollout
    if s.rollout.engine != "vllm":
        raise LaunchError(f"rollout.engine: given {s.rollout.engine!r}, allowed for a command of EasyR1: vllm")
    yield key("config", "examples/config.yaml")
    yield key("trainer.nnodes", s.nodes)
    yield key("trainer.n_gpus_per_node", s.gpus // s.nodes)
    yield key("trainer.logger", "[console]")  # the default wants a login at wandb, too
    yield key("data.train_files", Placeholder("TRAIN_FILES", "a data set such as hiyouga/math12k@train"))
    yield key("data.val_files", Placeholder("VAL_FILES", "a data set such as hiyouga/math12k@test"))
    yield key("data.max_prompt_length", s.prompt_len)
    yield key("data.max_response_length", s.response_len)
    yield key("data.rollout_batch_size", s.rollout.batch)
    if s.images:
        yield key("data.min_pixels", s.images.min_pixels)
        yield key("data.max_pixels", s.images.max_pixels)
    yield key("algorithm.adv_estimator", ESTIMATORS[s.task])
    yield key("algorithm.disable_kl", not s.has("reference"))
    actor = own(s, "actor")
    yield from trained(ACTOR, actor, shell.role_model(s, "actor"), "global_batch")
    yield key(f"{ACTOR}.{EXPERIENCE}", s.rollout.micro_batch or actor.micro_batch)
    if s.has("reference"):
        yield key(f"{REF}.fsdp.enable_cpu_offload", own(s, "reference").offload.parameters)
    yield key(f"{ROLLOUT}.n", s.rollout.n)
    yield key(f"{ROLLOUT}.tensor_parallel_size", s.rollout.tensor_parallel)
    yield key(f"{ROLLOUT}.gpu_memory_utilization", s.rollout.gpu_memory_utilization)
    yield key(f"{ROLLOUT}.max_num_batched_tokens", s.rollout.max_num_batched_tokens)
    yield key(f"{ROLLOUT}.enforce_eager", s.rollout.enforce_eager)
    if s.has("critic"):
        yield from trained(CRITIC, own(s, "critic"), shell.role_model(s, "critic"), "roles.critic.global_batch")


def trained(where: str, s: Scenario, name: str, place: str) -> Iterator[Words]:
    """The keys of a trained model; `place` is the field of its global batch, which EasyR1 counts in prompts."""
    yield key(f"{where}.model.model_path", name)
    yield key(f"{where}.model.enable_gradient_checkpointing", s.checkpointing == "full")
    if s.images:
        yield key(f"{where}.model.freeze_vision_tower", s.images.freeze == "vision")
    yield key(f"{where}.padding_free", s.packing)
    yield key(f"{where}.ulysses_size", s.context_parallel)
    yield key(f"{where}.global_batch_size", prompts(s, place, "EasyR1"))
    yield key(f"{where}.{UPDATE}", s.micro_batch)
    yield key(f"{where}.fsdp.torch_dtype", DTYPES[s.precision])
    yield key(f"{where}.optim.strategy", STRATEGIES[s.optimizer])
    yield key(f"{where}.offload.offload_params", s.offload.parameters)
    yield key(f"{where}.offload.offload_optimizer", s.offload.optimizer)


def notes(s: Scenario) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no key sets."""
    yield "run it in a clone of EasyR1 at v0.3.2, whose examples/config.yaml it starts from"
    yield shell.needs("TRAIN_FILES and VAL_FILES", "data sets with a problem and an answer in each row")
    yield "rewards come from worker.reward.reward_function"
    if s.nodes > 1:
        yield shell.ray_on_every_node(s)
    yield from shell.unsaid(s, "rollout.max_num_seqs")
    yield from shell.unsaid_of_roles(s, SAYABLE)
    yield from shell.common_notes(s)
