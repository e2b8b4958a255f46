"""Jobs over everything that a command can spell, and commands read back as words."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from calc.base.optimizers import OPTIMIZERS, USUAL
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError

BASE = {"model": "llama-3-8b", "gpu": "a100-80-sxm"}
OPENRLHF, VERL, TRL = "openrlhf==0.11", "verl==0.9", "trl==1"

ADAPTERS = {"method": "lora", "lora.rank": 32, "lora.dropout": 0.1, "lora.targets": ["q_proj", "v_proj"]}
METHODS = ({}, {"method": "lora"}, ADAPTERS, {"method": "qlora"})
MACHINES = ({"gpus": 1}, {"gpus": 8}, {"gpus": 16, "gpus_per_node": 8})
ATTENTIONS: tuple[dict[str, Any], ...] = (
    {"attention": "flash"}, {"attention": "flash", "packing": True}, {"attention": "sdpa", "packing": False},
    {"attention": "eager", "packing": False},
)  # fmt: skip
SWITCHES: tuple[dict[str, Any], ...] = (
    {"checkpointing": "none"}, {"checkpointing": "full", "offload.optimizer": True},
    {"checkpointing": "full", "offload.optimizer": True, "offload.parameters": True},
    {"checkpointing": "none", "offload.parameters": True},
)  # fmt: skip
SHARED = ({"attention": "flash", "packing": True, "context_parallel": 4},)
BATCHES = ({"micro_batch": 2, "global_batch": 64},)
DYNAMIC: tuple[dict[str, Any], ...] = (
    {"max_tokens_per_gpu": 16_384},
    {"max_tokens_per_gpu": 8192, "entropy_coeff": 0.001, "rollout.max_tokens_per_gpu": 32_768},
)  # fmt: skip
OTHER = {"model": "llama-3.2-1b"}


def shardings(*names: str) -> tuple[dict[str, Any], ...]:
    """These ways of sharding, alone."""
    return tuple({"sharding": name} for name in names)


ZERO = shardings("none", "ddp", "zero1", "zero2", "zero3")
GRADIENTS: tuple[dict[str, Any], ...] = ({}, {"grad_dtype": "fp32"}, {"precision": "fp16"})


def supervised(framework: str, tasks: tuple[str, ...], *more: tuple[dict[str, Any], ...]) -> Iterator[dict[str, Any]]:
    """Tasks with one trained model, in every combination of what is above and of `more`."""
    for task in tasks:
        roles = ({}, {"roles.reference": "none"}, {"roles.reference": {"offload.parameters": True}})
        lengths = ({"seq_len": 4096},)
        yield from joined(framework, task, roles if task == "dpo" else ({},), lengths, BATCHES, *more)


def joined(framework: str, task: str, *axes: tuple[dict[str, Any], ...]) -> Iterator[dict[str, Any]]:
    """Every combination of the axes."""
    for chosen in itertools.product(*axes):
        yield {**BASE, "framework": framework, "task": task} | dict(itertools.chain(*[d.items() for d in chosen]))


KERNELS: tuple[dict[str, Any], ...] = ({}, {"kernels": "liger"})
LOSSES: tuple[dict[str, Any], ...] = ({}, {"loss": "fused", "kernels": "liger"})
LENGTHS = ({"prompt_len": 512, "response_len": 1536},)
SLEEPS: tuple[dict[str, Any], ...] = ({"rollout.sleep": True}, {"rollout.sleep": False})
ROLLOUTS = tuple(
    {"rollout.engine": "vllm", "rollout.gpu_memory_utilization": 0.6, "rollout.batch": 256} | sleep | {
        "rollout.tensor_parallel": tp
    }
    for sleep, tp in itertools.product(SLEEPS, (1, 2))
)  # fmt: skip
ROLES: tuple[dict[str, Any], ...] = (
    {}, {"roles.reference": "none"}, {"roles.reward": "none", "roles.reference": {}}, {"roles.critic": OTHER},
    {"roles.reward": OTHER, "roles.reference": {"offload.parameters": True}},
    {"roles.reward": OTHER | {"offload.parameters": True}}, {"roles.reward": OTHER, "roles.critic": OTHER},
    {"roles.reference": {"precision": "bf16", "micro_batch": 4}},
)  # fmt: skip
APART: tuple[dict[str, Any], ...] = (
    {"gpus": 8, "rollout.gpus": 4},
    {"gpus": 24, "gpus_per_node": 8, "rollout.gpus": 8},
    {"gpus": 8, "rollout.gpus": 2, "roles.critic": {"gpus": 2}},
    {"gpus": 8, "rollout.gpus": 2, "roles.critic": {"gpus": 2}, "roles.reward": {"gpus": 1}, "roles.actor": {"gpus": 3},
     "roles.reference": "none"},
    {"gpus": 8, "rollout.gpus": 2, "roles.reference": {"gpus": 2}, "roles.reward": "none"},
)  # fmt: skip


def openrlhf() -> Iterator[dict[str, Any]]:
    """OpenRLHF's jobs."""
    usual = (METHODS, ZERO, SWITCHES, ATTENTIONS, GRADIENTS, MACHINES)
    yield from supervised(OPENRLHF, ("pretrain", "sft", "rm", "dpo"), *usual)
    yield from supervised(
        OPENRLHF, ("sft", "rm", "dpo"), METHODS[:2], ZERO[2:], SWITCHES[:2], SHARED, KERNELS, MACHINES[1:]
    )
    n = ({"rollout.n": 4, "rollout.micro_batch": 4},)
    for task in ("ppo", "grpo", "reinforce++"):
        held = (ZERO[1:], SWITCHES[:2], ATTENTIONS[:3], GRADIENTS, BATCHES, LENGTHS)
        yield from joined(OPENRLHF, task, *held, ROLLOUTS, ROLES, n, MACHINES[1:])
        yield from joined(OPENRLHF, task, ZERO[3:], BATCHES[:1], LENGTHS, ROLLOUTS, DYNAMIC, KERNELS, MACHINES[1:])
        yield from joined(OPENRLHF, task, *held, ROLLOUTS[2:], APART, n, ({"placement": "separate"},))


def verl() -> Iterator[dict[str, Any]]:
    """verl's jobs."""
    critics = ({}, {"roles.critic": {"sharding": "fsdp2", "offload.optimizer": True, "micro_batch": 1}})
    steps = ({}, {"optimizer_impl": "fused"}, {"optimizer_impl": "single"})
    usual = (METHODS[:3], shardings("fsdp1", "fsdp2"), SWITCHES, (ATTENTIONS[1], *SHARED), steps, MACHINES)
    yield from supervised(VERL, ("sft",), *usual)
    yield from supervised(VERL, ("sft",), METHODS[:2], DYNAMIC[:1], LOSSES, MACHINES)
    for task in ("ppo", "grpo", "reinforce++"):
        held = (METHODS[:3], shardings("fsdp1", "fsdp2"), SWITCHES, ATTENTIONS, steps, BATCHES, LENGTHS)
        roles = (*ROLES[:3], ROLES[-1], *(critics[1:] if task == "ppo" else ()))
        yield from joined(VERL, task, *held, ROLLOUTS, roles, ({"rollout.n": 4},), MACHINES[1:])
        layered = {**ROLLOUTS[0], "rollout.layered_summon": True, "rollout.micro_batch": 4}
        yield from joined(VERL, task, METHODS[:2], BATCHES, LENGTHS, ROLLOUTS, roles, DYNAMIC, MACHINES[1:])
        few = (
            METHODS[:2],
            SWITCHES[:1],
            ({}, {"data_parallel_replicate": 2}),
            SHARED,
            LOSSES,
            BATCHES,
            LENGTHS,
            (ROLLOUTS[0], layered),
        )
        yield from joined(VERL, task, *few, roles, ({"rollout.n": 4},), MACHINES[1:])


def verl_megatron() -> Iterator[dict[str, Any]]:
    """verl's jobs on Megatron-core."""
    of = {"framework": "verl", "task": "grpo", "gpu": "h100-sxm", "gpus": 32, "sharding": "megatron"}
    lengths = {"prompt_len": 1024, "response_len": 1024, "rollout": {"n": 4, "batch": 128, "tensor_parallel": 4}}
    models = (
        {"model": "qwen2.5-7b"}, {"model": "qwen2.5-7b", "pipeline_parallel": 8},
        {"model": "qwen2.5-7b", "pipeline_parallel": 4, "virtual_pipeline": 7},
        {"model": "qwen2.5-7b", "pipeline_parallel": 2, "virtual_pipeline": 3, "pipeline_layers": [14, 14]},
        {"model": "qwen3-30b-a3b", "expert_parallel": 8, "pipeline_parallel": 2, "expert_capacity": 2},
        {"model": "qwen3-30b-a3b", "expert_parallel": 4, "expert_tensor_parallel": 2},
    )  # fmt: skip
    cuts = ({}, {"tensor_parallel": 2}, {"tensor_parallel": 2, "context_parallel": 2})
    moved = ({}, {"offload": {"parameters": True, "optimizer": True}}, {"offload": {"fraction": 0.5}})
    again = {"checkpointing": "selective", "recompute_modules": ["mlp", "moe_act"]}
    kept = ({}, {"checkpointing": "full", "loss": "fused"}, again)
    adapters = {"method": "lora", "lora.rank": 16, "lora.targets": ["linear_fc1", "linear_proj"], "lora.dropout": 0.5}
    critic = {"offload": {"optimizer": True}, "micro_batch": 1}
    roles = (
        {}, {"roles": {"reference": {"offload": {"parameters": True}}}}, {**adapters, "roles": {"reference": {}}},
        {"task": "ppo", "roles": {"critic": critic}}, {"task": "ppo", **adapters, "roles": {"critic": critic}},
    )  # fmt: skip
    batches = ({"micro_batch": 2}, {"max_tokens_per_gpu": 4096, "rollout.max_tokens_per_gpu": 8192})
    for parts in itertools.product(models, cuts, moved, kept, roles, batches):
        yield {**of, **lengths, **{name: value for part in parts for name, value in part.items()}}
    supervised = ({"task": "sft", "seq_len": 4096}, {"task": "sft", "seq_len": 4096, **adapters})
    for parts in itertools.product(models, cuts, moved, kept, supervised, (batches[0], {"max_tokens_per_gpu": 4096})):
        yield {**of, **{name: value for part in parts for name, value in part.items()}}


def slime() -> Iterator[dict[str, Any]]:
    """slime's jobs, with SGLang on the same GPUs or on others."""
    of = {"framework": "slime", "gpu": "h100-sxm", "gpus": 32, "gpus_per_node": 8}
    lengths = {"prompt_len": 1024, "response_len": 3072, "rollout.batch": 64, "rollout.n": 4}
    tasks = ({"task": "grpo"}, {"task": "reinforce++", "entropy_coeff": 0.001}, {"task": "ppo"})
    models = (
        {"model": "qwen3-4b"}, {"model": "qwen3-4b", "pipeline_parallel": 4, "virtual_pipeline": 3},
        {"model": "qwen3-30b-a3b", "expert_parallel": 8, "pipeline_parallel": 2, "expert_capacity": 1.5,
         "expert_padding": True},
        {"model": "qwen3-30b-a3b", "pipeline_parallel": 2, "virtual_pipeline": 5, "pipeline_layers": [24, 24]},
        {"model": "moonlight-16b-a3b", "expert_parallel": 4, "expert_tensor_parallel": 2},
    )  # fmt: skip
    cuts = ({}, {"tensor_parallel": 2, "context_parallel": 2})
    again = {"checkpointing": "selective", "recompute_modules": ["layernorm", "moe_act"]}
    kept = ({}, {"offload.optimizer": True, **again})
    roles = ({}, {"roles": {"reference": {}}})
    batches = ({"micro_batch": 2}, {"max_tokens_per_gpu": 8192, "rollout.max_tokens_per_gpu": 16384})
    places = (
        {"rollout.tensor_parallel": 4},
        {"placement": "separate", "rollout.gpus": 16, "rollout.tensor_parallel": 8},
    )
    for parts in itertools.product(tasks, models, cuts, kept, roles, batches, places):
        yield {**of, **lengths, **{name: value for part in parts for name, value in part.items()}}
    for parts in itertools.product(models, cuts, kept, ({"micro_batch": 2}, {"max_tokens_per_gpu": 8192})):
        yield {**of, "task": "sft", "seq_len": 4096, **{name: value for part in parts for name, value in part.items()}}


STEPPED: tuple[dict[str, Any], ...] = (
    *({"optimizer": name} for name, facts in OPTIMIZERS.items() if facts.spelled.trl and name != USUAL),
    {"optimizer": USUAL, "optimizer_impl": "foreach"}, {"optimizer": USUAL, "optimizer_impl": "single"}, {},
)  # fmt: skip
PRECISIONS: tuple[dict[str, Any], ...] = ({}, {"precision": "bf16"}, {"precision": "fp32"}, {"grad_dtype": "fp32"})


def trl() -> Iterator[dict[str, Any]]:
    """TRL's jobs."""
    sharded = (*ZERO, *shardings("fsdp1", "fsdp2"))
    usual = (METHODS, sharded, SWITCHES, ATTENTIONS, PRECISIONS, MACHINES)
    yield from supervised(TRL, ("sft", "rm", "dpo", "kto"), *usual, ({},))
    yield from supervised(TRL, ("sft",), METHODS[:2], sharded, SWITCHES[:1], STEPPED, MACHINES[:2])
    shorter = ROLLOUTS[-1] | {"rollout.max_model_len": 4096}
    engines = (*ROLLOUTS[:-1], shorter, {"rollout.engine": "hf", "rollout.batch": 256})
    held = (METHODS, sharded, SWITCHES[:3], ATTENTIONS[:1], BATCHES, LENGTHS, PRECISIONS, ({"rollout.n": 8},))
    roles = (ROLES[0], ROLES[2], {"roles.reward": OTHER})
    yield from joined(TRL, "grpo", *held, engines, roles, MACHINES)
    served: tuple[dict[str, Any], ...] = (
        {"rollout.tensor_parallel": 4}, {"rollout.tensor_parallel": 2},
        {"gpus": 24, "gpus_per_node": 8, "rollout.max_model_len": 4096},
    )  # fmt: skip
    server = ({"placement": "separate", "gpus": 8, "rollout.gpus": 4, "rollout.batch": 256, "rollout.engine": "vllm"},)
    yield from joined(TRL, "grpo", *held, server, served, roles)


ON_TRANSFORMERS = ("llamafactory", "axolotl", "ms-swift")


def trainer(name: str) -> Iterator[dict[str, Any]]:
    """The jobs of a trainer of plain PyTorch."""
    of = ({"trainer": name},)
    if name in ON_TRANSFORMERS:
        sharded = (*ZERO, *shardings("fsdp1", "fsdp2"))
        moved = (*SWITCHES, {"checkpointing": "full", "offload.activations": True})
        if name == "axolotl":
            yield from supervised(
                "torch", ("sft",), METHODS, ({"loss": "cut"}, {"loss": "cut", "kernels": "liger"}), of
            )
            four = {
                "model": "qwen3-30b-a3b",
                "method": "qlora",
                "quantize_moe_experts": True,
                "lora.targets": ["q_proj"],
            }
            yield from supervised("torch", ("sft",), (four,), ({}, {"checkpointing": "full"}), MACHINES[:1], of)
        eight = {"method": "qlora", "load_in_8bit": True}
        yield from supervised("torch", ("sft",), (eight,), ({}, {"checkpointing": "full"}), MACHINES[:1], of)
        usual = (METHODS, sharded, moved, ATTENTIONS, PRECISIONS, LOSSES, MACHINES)
        yield from supervised("torch", ("pretrain", "sft", "rm", "dpo"), *usual, of)
        kin = {"llamafactory": ("orpo", "simpo"), "ms-swift": ("kto", "orpo", "simpo", "gkd"), "axolotl": ()}[name]
        yield from supervised("torch", kin, METHODS, ZERO, MACHINES, of)
        if name == "ms-swift":
            yield from reinforced(of)
    elif name == "torchtune":
        held = (METHODS, ({}, {"loss": "full"}), ATTENTIONS[1:3], SWITCHES[:1], STEPPED[-3:], MACHINES, of)
        moved = {"checkpointing": "full", "offload.activations": True}
        yield from supervised("torch", ("sft",), METHODS, ({"optimizer_in_backward": False}, moved), MACHINES, of)
        yield from supervised("torch", ("sft",), *held, ({"model": "llama-3.1-8b"}, {"model": "qwen2.5-7b"}))
        yield from supervised("torch", ("sft",), METHODS[:2], SWITCHES[2:3], MACHINES[1:], of)
        yield from supervised("torch", ("sft",), METHODS[:2], ({"model": "llama-3.1-70b"},), MACHINES[1:], of)
    elif name == "torchtitan":
        cut = (*({place: 2} for place in ("tensor_parallel", "pipeline_parallel", "context_parallel")), {})
        few = ({"tensor_parallel": 4, "sequence_parallel": False}, *shardings("ddp", "fsdp2"))
        kept = tuple({"checkpointing": word} for word in ("none", "full", "selective"))
        held = (({"model": "llama-3.1-8b"}, {"model": "qwen3-14b"}), kept, STEPPED[-3:], MACHINES, of)
        yield from supervised("torch", ("pretrain",), *held, (*cut, *few))
        narrow = ({"float8": "mxfp8"}, {"float8": "nvfp4", "bf16_layers_at_end": 5})
        within = {"tensor_parallel": 2, "compile": "model", "async_tensor_parallel": True, "model": "llama-3.1-8b"}
        yield from supervised("torch", ("pretrain",), (within,), kept, MACHINES[1:], of)
        of_blocks = {"model": "llama-3.1-8b", "gpu": "b200", "compile": "model"}
        yield from supervised("torch", ("pretrain",), (of_blocks,), kept, narrow, MACHINES, of)
    elif name == "megatron-swift":
        ends = {"model": "qwen2.5-7b", "pipeline_layers": [14, 14], "virtual_pipeline": 3}
        stages = ({}, {"pipeline_layers": [18, 14]}, {"virtual_pipeline": 4}, ends)
        cut = (
            {"tensor_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}, {"context_parallel": 2}, {},
            *({"pipeline_parallel": 2, **more} for more in stages),
        )  # fmt: skip
        moved = ({"offload.optimizer": False}, {"offload.optimizer": True}, {"offload.fraction": 0.25},
                 {"offload.fraction": 1, "offload.masters": False},
                 {"use_precision_aware_optimizer": True, "grad_dtype": "bf16", "exp_avg_dtype": "fp8"},
                 {"float8": "tensorwise"}, {"float8": "delayed", "fp8_param_gather": True})  # fmt: skip
        some = {"checkpointing": "selective", "recompute_modules": ["core_attn", "mlp"]}
        held = (
            ({}, {"loss": "full"}),
            (*kept_or_not(), some, {"checkpointing": "selective"}),
            ({}, {"packing": True}),
            moved,
            MACHINES,
            of,
        )
        yield from supervised("torch", ("pretrain", "sft"), *held, cut)
        adapted = (
            {"method": "lora"},
            {"method": "lora", "lora.targets": ["linear_qkv", "linear_fc1"], "lora.rank": 16},
        )
        yield from supervised("torch", ("sft",), MACHINES, of, cut, adapted)
        yield from supervised("torch", ("rm", "dpo", "kto"), MACHINES, of, cut, (*adapted[:1], {}))
        other = ({"roles.reference.model": "llama-3.1-8b"}, {})
        yield from supervised("torch", ("dpo", "kto"), MACHINES, of, ({"loss": "full"}, {"packing": True}), other)
        spread = ({"expert_parallel": 2, "expert_capacity": 2, "expert_padding": True},
                  {"expert_parallel": 2, "expert_tensor_parallel": 2, "expert_capacity": 1.25}, {})  # fmt: skip
        moe = ({"model": "qwen3-30b-a3b"},)
        yield from supervised("torch", ("sft",), *held, moe, spread)
        yield from supervised("torch", ("sft",), moe, spread, of, MACHINES, adapted[:1])
        further = (
            {"attention": "eager", "padding_free": False, "checkpointing": "full"},
            {"mtp_num_layers": 2},
            {"checkpointing": "full", "recompute_num_layers": 4},
        )
        yield from supervised("torch", ("sft",), of, MACHINES, further)
    else:
        held = (METHODS, ({}, {"loss": "full"}), kept_or_not(), ({}, {"packing": True}), ({"lora.rank": 16}, {}), of)
        yield from supervised("torch", ("pretrain", "sft"), *held)


def reinforced(of: tuple[dict[str, Any], ...]) -> Iterator[dict[str, Any]]:
    """The jobs of ms-swift's GRPO, with vLLM beside the trainer, apart from it, and without."""
    away = {"rollout.sleep": True, "rollout.offload_model": True, "rollout.offload_optimizer": True}
    engines: tuple[dict[str, Any], ...] = (
        {"rollout.engine": "hf"}, {"rollout.engine": "vllm"}, {"rollout.engine": "vllm", **away},
        {"rollout.engine": "vllm", "rollout.move_model_batches": 8, "rollout.max_model_len": 4096},
        {"rollout.engine": "vllm", "placement": "separate", "gpus": 8, "rollout.gpus": 4, "global_batch": 64},
    )  # fmt: skip
    roles = ({}, {"roles.reference": "none"})
    lengths = ({"prompt_len": 1024, "response_len": 1024},)
    usual = ({"micro_batch": 2, "global_batch": 128},)
    yield from joined("torch", "grpo", of, usual, lengths, METHODS[:3], ZERO, roles, MACHINES, engines)


def kept_or_not() -> tuple[dict[str, Any], ...]:
    """Checkpointing, on and off."""
    return tuple({"checkpointing": word} for word in ("none", "full"))


def accepted(drawn: Iterator[dict[str, Any]], every: int = 1) -> Iterator[Scenario]:
    """The jobs that their framework runs, every so many of them."""
    for data in itertools.islice(drawn, 0, None, every):
        try:
            yield parse(data)
        except ScenarioError:
            continue


def processes(command: str) -> list[list[str]]:
    """The words of each process of a command, placeholders as `${NAME}`."""
    text = re.sub(r"\$\{([A-Z_]+):\?[^}]*\}", r"${\1}", command.replace("\\\n", " "))
    return [
        [word for word in shlex.split(line.removesuffix(" &")) if not word.startswith("CUDA_VISIBLE_DEVICES=")]
        for line in text.splitlines()
    ]


def same(found: Mapping[str, Any], s: Scenario) -> None:
    """Asserts that a command says, by dotted field, what the scenario says."""
    for place, value in found.items():
        given = field_of(s, place)
        given = list(given) if isinstance(given, tuple) else given
        assert value == given, f"{place}: the command says {value!r}, the scenario {given!r}"


def field_of(s: Scenario, place: str) -> Any:
    """A field by its dotted name; of a role as that sees it."""
    if place.startswith("roles."):
        _, name, place = place.split(".", 2)
        role = s.role(name)
        assert role, f"the command names a {name}, which does not run"
        return field_of(role, place)
    found: Any = s
    for part in place.split("."):
        found = getattr(found, part)
    return found
