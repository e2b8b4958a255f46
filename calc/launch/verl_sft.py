"""verl 0.9's SFT: `verl.trainer.sft_trainer_ray` with overrides of `trainer/config/sft_trainer_engine.yaml`."""

from __future__ import annotations

from collections.abc import Iterator

from calc.launch import shell, verl_megatron
from calc.launch.shell import Launch, Placeholder, Words
from calc.launch.verl_keys import STRATEGIES, engine, key, model, unsaid
from calc.scenario.scenario import Scenario


def launch(s: Scenario) -> Launch:
    """The command for `s`."""
    command = shell.command("python3 -m verl.trainer.sft_trainer_ray", keys(s))
    return Launch(shell.setting(s, command), notes=tuple(notes(s)))


def keys(s: Scenario) -> Iterator[Words]:
    """All overrides."""
    yield key("trainer.nnodes", s.nodes)
    yield key("trainer.n_gpus_per_node", s.gpus // s.nodes)
    yield key("trainer.logger", "[console]")  # the default wants a login at wandb, too
    yield key("data.train_files", Placeholder("TRAIN_FILES", "parquet file of the conversations"))
    yield key("data.max_length", s.seq_len)
    yield key("data.train_batch_size", s.global_batch)
    yield key("data.use_dynamic_bsz", s.max_tokens_per_gpu is not None)
    if s.max_tokens_per_gpu:
        yield key("data.max_token_len_per_gpu", s.max_tokens_per_gpu)
    else:
        yield key("data.micro_batch_size_per_gpu", s.micro_batch)
    if s.sharding == "megatron":
        yield key("engine", "megatron")
        yield key("optim", "megatron")
        yield from verl_megatron.model("model", s, shell.model_name(s.model))
        yield key("model.use_fused_kernels", s.loss == "fused")
        yield from verl_megatron.engine("engine", "optim", s)
        return
    yield from model("model", s, shell.model_name(s.model))
    yield key("model.use_liger", s.kernels == "liger")
    yield key("model.use_fused_kernels", s.loss == "fused")
    yield key("engine.strategy", STRATEGIES[s.sharding])
    yield key("engine.ulysses_sequence_parallel_size", s.context_parallel)
    yield from engine("engine", "optim", s)


def notes(s: Scenario) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no key sets."""
    yield shell.needs("TRAIN_FILES", "parquet file with a column `messages` of chat messages")
    if s.nodes > 1:
        yield shell.ray_on_every_node(s)
    yield from shell.unsaid(s, *unsaid(s))
    yield from shell.common_notes(s)
