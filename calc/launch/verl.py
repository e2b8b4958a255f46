"""verl 0.9's command: `verl.trainer.main_ppo` with overrides of `verl/trainer/config/ppo_trainer.yaml`.

A key that decides memory is written even where it has its default. `+` stands before keys below `override_config`, a
mapping that is empty in the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.launch import shell, verl_megatron, verl_sft
from calc.launch.shell import Launch, LaunchError, Placeholder, Words, own
from calc.launch.verl_keys import DTYPES, ESTIMATORS, STRATEGIES, engine, key, model, prompts, unsaid
from calc.scenario.scenario import Scenario

FIRST = "0.9"

ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "ref", "rollout"))
SAYABLE = ("micro_batch", "sharding", "reference.precision", "offload.parameters")


def launch(s: Scenario) -> Launch:
    """The command for `s`; raises LaunchError if a key is missing that the job needs."""
    if not s.rollout:
        return verl_sft.launch(s)
    command = shell.command("python3 -m verl.trainer.main_ppo", keys(s))
    return Launch(shell.setting(s, command, switches_segments=True), notes=tuple(notes(s)))


def keys(s: Scenario) -> Iterator[Words]:
    """All overrides."""
    assert s.rollout
    if s.rollout.engine != "vllm":
        raise LaunchError(f"rollout.engine: given {s.rollout.engine!r}, allowed for a command of verl: vllm")
    actor = own(s, "actor")
    yield key("trainer.nnodes", s.nodes)
    yield key("trainer.n_gpus_per_node", s.gpus // s.nodes)
    yield key("trainer.logger", "[console]")  # the default wants a login at wandb, too
    yield key("data.train_files", Placeholder("TRAIN_FILES", "parquet file of the training prompts"))
    yield key("data.val_files", Placeholder("VAL_FILES", "parquet file of the validation prompts"))
    yield key("data.max_prompt_length", s.prompt_len)
    yield key("data.max_response_length", s.response_len)
    yield key("data.filter_overlong_prompts", True)
    yield key("data.train_batch_size", s.rollout.batch)
    yield key("algorithm.adv_estimator", ESTIMATORS[s.task])
    if actor.sharding == "megatron":
        yield key("model_engine", "megatron")
        yield from verl_megatron.model(MODEL, actor, shell.role_model(s, "actor"))
        yield key(f"{MODEL}.use_fused_kernels", actor.loss == "fused")
        yield from verl_megatron.engine(f"{ACTOR}.megatron", f"{ACTOR}.optim", actor)
        yield from batched(ACTOR, actor)
    else:
        yield from model(MODEL, actor, shell.role_model(s, "actor"))
        yield key(f"{MODEL}.use_liger", actor.kernels == "liger")
        yield key(f"{MODEL}.use_fused_kernels", actor.loss == "fused")
        yield from trained(ACTOR, "fsdp_config", actor)
    yield key(f"{ACTOR}.ppo_mini_batch_size", prompts(actor, "global_batch", "verl"))
    yield key(f"{ACTOR}.entropy_coeff", f"{s.entropy_coeff:g}")
    yield key(f"{ACTOR}.entropy_from_logits_with_chunking", s.entropy_from_logits_with_chunking)
    yield from reference(s)
    yield from rollout(s)
    if s.has("critic"):
        critic = own(s, "critic")
        if critic.sharding == "megatron":
            yield from verl_megatron.model("critic.model", critic, shell.role_model(s, "critic"))
            yield from verl_megatron.engine("critic.megatron", "critic.optim", critic)
            yield from batched("critic", critic)
        else:
            yield from model("critic.model", critic, shell.role_model(s, "critic"))
            yield from trained("critic", "fsdp", critic)
        yield key("critic.ppo_mini_batch_size", prompts(critic, "roles.critic.global_batch", "verl"))


def trained(where: str, config: str, s: Scenario) -> Iterator[Words]:
    """The keys of a trained model: sharding, engine, and micro batch."""
    yield key(f"{where}.strategy", STRATEGIES[s.sharding])
    yield from engine(f"{where}.{config}", f"{where}.optim", s)
    yield from batched(where, s)
    if s.context_parallel > 1:
        yield key(f"{where}.ulysses_sequence_parallel_size", s.context_parallel)


def batched(where: str, s: Scenario) -> Iterator[Words]:
    """The keys of a trained model's micro batch: a bound of tokens, or sequences."""
    yield key(f"{where}.use_dynamic_bsz", s.max_tokens_per_gpu is not None)
    if s.max_tokens_per_gpu:
        yield key(f"{where}.ppo_max_token_len_per_gpu", s.max_tokens_per_gpu)
    else:
        yield key(f"{where}.ppo_micro_batch_size_per_gpu", s.micro_batch)


def reference(s: Scenario) -> Iterator[Words]:
    """The keys of a reference, which runs if a KL divergence is asked for.

    For grpo the divergence is a loss, for the others it is in the reward.
    """
    loss = s.task == "grpo"
    yield key(f"{ACTOR}.use_kl_loss", s.has("reference") and loss)
    yield key("algorithm.use_kl_in_reward", s.has("reference") and not loss)
    if s.has("reference"):
        role = own(s, "reference")
        yield from scored(REF, role.max_tokens_per_gpu, role.micro_batch)
        if role.sharding == "megatron" and not s.lora:
            yield key(f"{REF}.megatron.param_offload", role.offload.parameters)
        elif not s.lora:  # else the actor without its adapters
            yield key(f"{REF}.strategy", STRATEGIES.get(role.sharding, STRATEGIES[own(s, "actor").sharding]))
            yield key(f"{REF}.fsdp_config.model_dtype", DTYPES.get(role.precision, "fp32"))
            if role.data_parallel_replicate > 1:
                yield key(f"{REF}.fsdp_config.fsdp_size", role.shards)


def rollout(s: Scenario) -> Iterator[Words]:
    """The keys of vLLM, and of the actor's scoring of what it generates."""
    assert s.rollout
    yield key(f"{ROLLOUT}.name", "vllm")
    yield key(f"{ROLLOUT}.tensor_model_parallel_size", s.rollout.tensor_parallel)
    yield key(f"{ROLLOUT}.gpu_memory_utilization", s.rollout.gpu_memory_utilization)
    yield key(f"{ROLLOUT}.n", s.rollout.n)
    yield key(f"{ROLLOUT}.free_cache_engine", s.rollout.sleep)
    yield key(f"{ROLLOUT}.enforce_eager", s.rollout.enforce_eager)
    if s.rollout.max_model_len:
        yield key(f"{ROLLOUT}.max_model_len", s.rollout.max_model_len)
    yield key(f"{ROLLOUT}.max_num_seqs", s.rollout.max_num_seqs)
    yield key(f"{ROLLOUT}.max_num_batched_tokens", s.rollout.max_num_batched_tokens)
    actor = own(s, "actor")
    tokens = actor.max_tokens_per_gpu and (s.rollout.max_tokens_per_gpu or actor.max_tokens_per_gpu)
    yield from scored(ROLLOUT, tokens, s.rollout.micro_batch or actor.micro_batch)
    if s.lora:
        yield key(f"{ROLLOUT}.load_format", "safetensors")  # the base from its checkpoint: adapters alone are sent
        yield key(f"{ROLLOUT}.layered_summon", s.rollout.layered_summon)


def scored(where: str, tokens: int | None, micro_batch: int) -> Iterator[Words]:
    """The keys of one scoring forward: a dynamic batch of `tokens`, or a micro batch."""
    yield key(f"{where}.log_prob_use_dynamic_bsz", tokens is not None)
    if tokens:
        yield key(f"{where}.log_prob_max_token_len_per_gpu", tokens)
    else:
        yield key(f"{where}.log_prob_micro_batch_size_per_gpu", micro_batch)


def notes(s: Scenario) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no key sets."""
    yield shell.needs("TRAIN_FILES and VAL_FILES", "parquet files with a column `prompt` of chat messages")
    yield "rewards come from the function for the data's `data_source`, or reward.custom_reward_function.path"
    if s.nodes > 1:
        yield shell.ray_on_every_node(s)
    yield from shell.unsaid(s, *unsaid(s), "expandable_segments")
    yield from shell.unsaid_of_roles(s, SAYABLE)
    yield from shell.common_notes(s)
