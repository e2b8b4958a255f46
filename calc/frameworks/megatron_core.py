"""Megatron-core's models: what every framework that trains on it shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from calc.base.plan import Role
from calc.base.refusal import Refusal
from calc.models.architecture import Architecture, ConfigError
from calc.scenario.scenario import Scenario

# families whose layers are Megatron-core's own, by number and order of their tensors
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3",
    "glm4_moe", "gpt_oss", "llama4_text",
)  # fmt: skip
# and those whose attention is a gated delta rule in most layers (`experimental_attention_variant gated_delta_net`)
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# and those whose layers are one block each, many of them state spaces (`models/hybrid`)
HYBRID = ("nemotron_h",)
SEEING = ("qwen3_5_text", "qwen3_5_moe_text", "llama4_text")  # of which checkpoints have a vision tower
# Families whose language model has the layers of one of those, behind a vision tower that mcore-bridge leaves as
# Transformers has it: whole, in 16 bits, on each rank of the first stage (1.6.5 `model/mm_gpts/utils.py`,
# `HuggingFaceVit`, and `model/mm_gpt_model.py`)
TOWERS = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "internvl", "llama4",
    "glm4v_moe",
)  # fmt: skip
# Families whose layers are Megatron-core's with two norms more, behind attention and behind the MLP, whose gate and
# what it multiplies it cuts as it does others' (mcore-bridge 1.6.5 `model/gpts/glm4.py`; ms-swift 3.12.0 has the same)
GLM = ("glm4", "glm4v")


@lru_cache(maxsize=64)  # a search asks for each way of cutting a model
def modelled(
    arch: Architecture,
    field: str,
    other: str,
    layers: Literal["megatron", "megatron-plain"] = "megatron",
    *,
    given: str = "megatron",
    linear: str = "",
    by_head: bool = False,
    adapters: Literal["own", "whole", "shared"] = "own",
    towers: bool = False,
    further: tuple[str, ...] = (),
) -> Architecture:
    """The model as Megatron-core has it: fused projections and norms, attention without a window.

    `linear`: the first release whose linear attention was read, if an older one runs; `by_head`: it is mcore-bridge's.
    `adapters`: see `Architecture`. `towers`: its models may see. `further`: families
    whose layers are a library's own on Megatron-core.
    Raises ConfigError for a model with layers that were not read: of `field`, by whose value `given` Megatron trains
    and whose value would have to be `other`.
    """
    if linear and arch.delta:
        raise ConfigError(field, given, f"{other} for the family {arch.family}, or {linear}")
    families = (*FAMILIES, *LINEAR, *(TOWERS if towers else ()), *further)
    if arch.family not in families:
        known = f"Megatron-core's layers are modelled for {', '.join(families)}"
        raise ConfigError(field, given, f"{other} for the family {arch.family}; {known}")
    if arch.layer_inputs or any(spec.borrows for spec in arch.specs):
        raise ConfigError(
            field, given, f"{other} for layers that borrow keys or have inputs of their own; not modelled"
        )
    # mcore-bridge 1.6.5 `config/parser.py`: position_embedding_type none where layers are state spaces
    specs = tuple(spec._replace(slides=False, rotated=spec.rotated and not arch.ssm) for spec in arch.specs)
    delta = arch.delta and replace(arch.delta, by_head=by_head)
    own = replace(arch, modeling=layers, adapters=adapters, sliding_window=None, specs=specs, delta=delta)
    return replace(own, fused_gate_up=False) if arch.family in GLM else own


def with_depths(arch: Architecture, depths: int) -> Architecture:
    """The model with `depths` of multi-token prediction, whose layers are of the last one's kind.

    Megatron-LM d98e8a64dd `megatron/core/models/gpt/gpt_layer_specs.py`, `get_gpt_mtp_block_spec`.
    """
    return replace(arch, depths=arch.specs[-1:] * depths) if depths else arch


def computed(s: Scenario) -> str:
    """A note on the layers and the schedule with which a job is computed."""
    schedule = "1F1B" if s.virtual_pipeline == 1 else "1F1B interleaved"
    return f"computed with Transformer Engine's layers, RoPE fused, gradients added up within the products, {schedule}"


@lru_cache(maxsize=1024)
def stages_of(whole: Role, count: int) -> tuple[Role, ...]:
    """A role in `count` pipeline stages, each with the name of its own; itself in one."""
    if count == 1:
        return (whole,)
    return tuple(
        replace(whole, name=f"{whole.name}, stage {index + 1}", model=whole.name, pipeline=(index, count))
        for index in range(count)
    )


def named(names: Sequence[str], role: str) -> list[str]:
    """Those of the `names` of stages that are `role`'s, see `stages_of`."""
    return [name for name in names if name.partition(",")[0] == role]


def owner(s: Scenario, role: str) -> Scenario | None:
    """The scenario of a role; SFT names none, and its actor has the job's."""
    return s.role(role) or (s if role == "actor" else None)


def linear_fault(s: Scenario) -> Refusal | None:
    """The reason why a gated delta rule cannot run as `s` asks, or is not modelled so, in one line, or None.

    Without fla's kernels it raises an ImportError; context parallelism gives each rank some of the heads that a
    tensor-parallel rank has (Megatron-LM d98e8a64dd `megatron/core/ssm/gated_delta_net/common.py`, `_GDNBase.__init__`
    and `_build_head_perm_for_split_sections`).
    """
    delta = s.architecture.delta
    if delta is None:
        return None
    if s.linear_attention != "fla":
        return Refusal("linear_attention", f"{s.linear_attention!r} with Megatron-core", "fla, which it needs")
    heads = delta.key_heads // s.tensor_parallel
    if heads % s.context_parallel:
        allowed = f"a divisor of the {heads} key heads of linear attention that a tensor-parallel rank has"
        return Refusal("context_parallel", s.context_parallel, allowed)
    return None


def parts_fault(s: Scenario, known: bool = True) -> Refusal | None:
    """The reason why a part of a layer cannot be run again, in one line, or None.

    `known`: the Megatron-core below has all parts, as it does since 0.19 (`transformer_config.py`, `__post_init__`).
    """
    field, family = "recompute_modules", s.architecture.family
    named = ("mla_up_proj", s.architecture.mla), ("gdn_norm_out", s.architecture.delta), ("self_attn", False)
    for name, has in named:
        if name in s.recomputed and not has:
            return Refusal(field, f"{name} for the family {family}", "others; it has no such part")
    if "gdn_norm_out" in s.recomputed and not known:
        return Refusal(field, "gdn_norm_out", "others; what runs here does not know it")
    return None


def notes(s: Scenario) -> Iterator[str]:
    """Notes on what a checkpoint has beside what is counted, where the framework builds the whole of it."""
    if s.architecture.family in SEEING:
        yield "the language model alone is counted: the first stage has the checkpoint's vision tower, too"


def spread_fault(s: Scenario, given: str) -> Refusal | None:
    """The reason why the GPUs of a stage cannot share experts as `s` asks, `given` beside that, in one line; None if
    they can.
    """
    ranks, asked = s.gpus // s.pipeline_parallel, s.expert_parallel * s.expert_tensor_parallel
    if ranks % asked:
        return Refusal("expert_parallel", f"{s.expert_parallel} {given}", f"a divisor of a stage's {ranks} GPUs")
    if s.expert_imbalance > 1 and asked == 1:
        return Refusal("expert_imbalance", f"{s.expert_imbalance:g}", "1, or with expert_parallel above 1")
    return None


def stages_fault(s: Scenario) -> Refusal | None:
    """The reason why Megatron-core cannot divide its layers over stages as `s` asks, in one line, or None.

    It is told the layers of the first and of the last stage, and divides the others evenly.
    """
    if s.pipeline_layers is None or len(set(s.pipeline_layers[1:-1])) < 2:
        return None
    return Refusal("pipeline_layers", f"{[*s.pipeline_layers]}", "as many in each stage between first and last")


def chunks_fault(s: Scenario) -> Refusal | None:
    """The reason why the pieces of a stage cannot take turns, in one line, or None.

    Micro batches go through a piece in groups of as many as there are stages
    (`forward_backward_pipelining_with_interleaving`). Dynamic batches are made that many times some number (verl 0.9.1
    `workers/engine/megatron/transformer_impl.py`, `num_batches_divided_by`; slime 0.3.1 `utils/dp_schedule.py`).
    """
    if s.virtual_pipeline == 1 or s.max_tokens_per_gpu or s.accumulation % s.pipeline_parallel == 0:
        return None
    step, least = s.micro_batch * s.data_parallel, s.pipeline_parallel
    given = f"{s.global_batch} with virtual_pipeline = {s.virtual_pipeline}"
    return Refusal("global_batch", given, f"a multiple of {step * least}, so that stages take turns")


def reruns(s: Scenario) -> tuple[bool, ...]:
    """What `reentrant` may be: full recomputation runs a layer to its end.

    Its own `CheckpointFunction` (Megatron-LM d98e8a64dd `megatron/core/tensor_parallel/random.py`).
    """
    return (True,) if s.checkpointing == "full" else (True, False)
