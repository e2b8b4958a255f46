"""The part of a model that one GPU holds where several share it: a slice of each layer, or some of the layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from calc.models.architecture import (
    Architecture,
    ConfigError,
    embedding_parameters,
    layer_parameters,
    tensors,
    vision_tensors,
)
from calc.models.mixers import Delta, Ssm

PADDED = 128  # rows of Megatron-core's embedding on a rank are a multiple of these


@lru_cache(maxsize=1024)
def part(arch: Architecture, ranks: int, expert_ranks: int = 1, expert_tensor: int = 1) -> Architecture:
    """One tensor-parallel rank's part of the model: its heads, its share of every width and of the vocabulary.

    Norms and routers stay whole. Transformers 5.23 `distributed/tensor_parallel.py` and each model's
    `base_model_tp_plan`; Megatron-LM cuts the same way, but for routed experts, which `expert_ranks` share, each of
    them cut over `expert_tensor`. Raises ConfigError for the field `tensor_parallel`, `expert_parallel` or
    `expert_tensor_parallel` if the model cannot be cut into so many parts, or is cut in a way that is not known here.
    """
    if expert_ranks > 1 or expert_tensor > 1:
        arch = _experts(arch, expert_ranks, expert_tensor)
    megatron = arch.megatron
    if megatron and not arch.unfused:
        # rows of the embedding are added until each rank has a multiple of 128 (`make_vocab_size_divisible_by`)
        rows = PADDED * ranks
        arch = replace(arch, vocab=-(-arch.vocab // rows) * rows)
    if ranks == 1:
        return arch
    for here, why in (
        (arch.fused_qkv or arch.fused_gate_up, "whose fused projections are gathered again"),
        (arch.qk_norm in ("width", "apart"), "whose queries and keys are gathered again for their norms"),
        (arch.mla and not megatron, "with latent attention"),
        (arch.ssm and not megatron, "with state spaces"),
        (arch.conv, "with convolutions"),
        (arch.positions and not megatron, "with learned positions"),
        (arch.broad and not megatron, "whose layers have heads of two sizes"),
        (arch.varied, "whose MLPs are of several widths"),
        (arch.delta and not megatron, "whose linear attention is gathered again"),
        ((arch.attention_sinks and not megatron) or arch.slopes or arch.lightning, "whose attention stays whole"),
        (arch.shared_experts and not megatron, "with shared experts"),
        (arch.altup or arch.hyper, "whose residual stream is of several"),
        (arch.vision and not megatron, "whose vision tower stays whole"),
        (arch.sound and not megatron, "whose part that hears stays whole"),
        (arch.passed, "whose layers for images stay whole"),
    ):
        if here:
            raise ConfigError(
                "tensor_parallel", ranks, f"1 for models of the family {arch.family}, {why}: not modelled"
            )
    # Megatron-core cuts routed experts apart from the rest, and shared ones with it
    widths = ("heads", "kv_heads", "intermediate", "shared_intermediate" if megatron else "moe_intermediate")
    if uneven := [name for name in widths if getattr(arch, name) % ranks]:
        name = uneven[0]
        raise ConfigError("tensor_parallel", ranks, f"a divisor of the model's {name} = {getattr(arch, name)}")
    cut = {name: getattr(arch, name) // ranks for name in widths}
    if arch.broad and arch.broad.kv_heads % ranks:
        raise ConfigError("tensor_parallel", ranks, f"a divisor of the {arch.broad.kv_heads} key heads of some layers")
    broad = arch.broad and arch.broad._replace(kv_heads=arch.broad.kv_heads // ranks)
    cut_delta, cut_ssm = arch.delta and _heads(arch.delta, ranks), arch.ssm and _groups(arch.ssm, ranks)
    return replace(arch, ranks=ranks, delta=cut_delta, ssm=cut_ssm, broad=broad, **cut)


def _groups(ssm: Ssm, ranks: int) -> Ssm:
    """One rank's groups of a state space, with their heads (Megatron-LM d98e8a64dd `core/ssm/mamba_mixer.py`)."""
    for name in ("groups", "heads"):
        if (count := getattr(ssm, name)) % ranks:
            raise ConfigError("tensor_parallel", ranks, f"a divisor of the {count} {name} of its state spaces")
    return replace(ssm, groups=ssm.groups // ranks, heads=ssm.heads // ranks)


def _heads(delta: Delta, ranks: int) -> Delta:
    """One rank's heads of a gated delta rule, with their channels of the convolution and their gates.

    Megatron-LM d98e8a64dd `megatron/core/ssm/gated_delta_net/common.py`, `_GDNBase`.
    """
    heads = {f"{name}_heads": getattr(delta, f"{name}_heads") for name in ("key", "value")}
    for name, count in heads.items():
        if count % ranks:
            raise ConfigError("tensor_parallel", ranks, f"a divisor of the model's linear_num_{name} = {count}")
    return replace(delta, **{name: count // ranks for name, count in heads.items()})


def _experts(arch: Architecture, ranks: int, tensor: int) -> Architecture:
    """The model with one rank's routed experts: of `ranks` that share them, and of `tensor` that share each.

    Megatron-LM cuts them apart from the rest (`megatron/core/transformer/moe/{moe_layer,experts}.py`).
    """
    if ranks > 1 and (not arch.experts or arch.experts % ranks):
        allowed = (
            f"a divisor of the model's {arch.experts} experts" if arch.experts else "1 for a model without experts"
        )
        raise ConfigError("expert_parallel", ranks, allowed)
    if tensor > 1 and (not arch.experts or arch.moe_intermediate % tensor):
        allowed = f"a divisor of the model's moe_intermediate = {arch.moe_intermediate}"
        raise ConfigError(
            "expert_tensor_parallel", tensor, allowed if arch.experts else "1 for a model without experts"
        )
    width = arch.moe_intermediate // tensor
    return replace(arch, expert_ranks=ranks, expert_tensor=tensor, moe_intermediate=width)


@lru_cache(maxsize=1024)
def layers_of(layers: int, stages: int) -> tuple[int, ...]:
    """The number of layers in each pipeline stage: as equal as can be, embedding and head counted as one layer each.

    As torchtitan divides them by default (`distributed/pipeline_parallel.py`, `generate_llm_fqn_per_model_part`).
    """
    each, over = divmod(layers + 2, stages)
    counts = [each + (index < over) for index in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


@lru_cache(maxsize=1024)
def device_layers(arch: Architecture, devices: int) -> tuple[int, ...]:
    """The layers that Accelerate puts on each of `devices` GPUs by `device_map="auto"`, the embedding on the first.

    A GPU but the last may have an equal share of all bytes and 1.25 layers more; the first keeps room for the largest
    module that is yet to come. Whichever is last has what is left, with the final norm and the head. Weights have one
    type, so that elements stand for bytes. A vision tower comes before the embedding, block by block; raises
    ConfigError for the field `device_map` if the first GPU has no room for all of it. accelerate 1.10.0
    `utils/modeling.py`, `get_balanced_memory` (whose mean of all leaves is less than a layer), `infer_auto_device_map`;
    the rule is that of 0.21, too.
    """
    layers = [layer_parameters(arch, spec) for spec in arch.specs]
    ends = [t.elements * t.count for t in tensors(arch) if t.count == 1 and t.module in ("norm", "head")]
    tower = _tower(arch)
    modules = [*tower, embedding_parameters(arch), *layers, *ends]
    allowed = sum(modules) // devices + int(1.25 * layers[0])
    counts, used, at = [0] * devices, 0, 0
    for n, size in enumerate(modules):
        kept = 0 if at else max(modules[n + 1 :], default=0)
        if at < devices - 1 and used + size > allowed - kept:
            used, at = 0, at + 1
        used += size
        if at and n < len(tower):
            raise ConfigError("device_map", "auto", f"GPUs of which the first holds the vision tower of {arch.family}")
        counts[at] += len(tower) < n <= len(tower) + len(layers)
    return tuple([count for count in counts if count])


def _tower(arch: Architecture) -> list[int]:
    """Elements of the blocks of a vision tower, one by one, and of all else in it; none without."""
    if arch.vision is None:
        return []
    blocks = [layer_parameters(arch.vision.blocks, spec) for spec in arch.vision.blocks.specs]
    return [*blocks, sum(t.elements * t.count for t in vision_tensors(arch)) - sum(blocks)]


@lru_cache(maxsize=1024)
def stage(
    arch: Architecture, index: int, stages: int, counts: tuple[int, ...] | None = None, chunks: int = 1
) -> Architecture:
    """The model as stage `index` of a pipeline holds it.

    Each stage has its layers, the first also the embedding, the last the final norm and the head. `counts`: the layers
    of each, where Megatron-core is told them, or Accelerate has placed them; `chunks`: a stage has so many pieces of
    the model, see `chunk`; without Megatron-core every piece is a stage of torchtitan's division, and rank `index` has
    one of each round of them (`distributed/pipeline_parallel.py`, `_get_stage_indices`). Raises ConfigError for the
    field `pipeline_parallel` or `virtual_pipeline` if a stage would have no layer, or if two stages would hold the same
    tensor, and for `pipeline_layers` if it is not a division.
    """
    if counts is not None and (len(counts) != stages or sum(counts) != arch.layers):
        allowed = f"as many counts as pipeline_parallel = {stages}, {arch.layers} layers together"
        raise ConfigError("pipeline_layers", list(counts), allowed)
    if stages == 1:
        return arch
    if arch.vision and not (arch.megatron or counts):
        raise ConfigError("pipeline_parallel", stages, f"1 for the family {arch.family}, with a vision tower")
    if arch.sound and not arch.megatron:
        raise ConfigError("pipeline_parallel", stages, f"1 for the family {arch.family}, with a part that hears")
    if arch.passed:
        raise ConfigError("pipeline_parallel", stages, f"1 for the family {arch.family}, with layers for images")
    if chunks > 1 and arch.megatron:
        pieces = [chunk(arch, index, stages, chunks, n, counts) for n in range(chunks)]
        specs = tuple(spec for piece in pieces for spec in piece.specs)
        return replace(pieces[0], specs=specs, ends=pieces[-1].ends, depths=pieces[-1].depths)
    if arch.megatron:
        return chunk(arch, index, stages, 1, 0, counts or megatron_layers(arch.layers, stages))
    if arch.tied:
        raise ConfigError("pipeline_parallel", stages, "1 for a model whose head is its embedding, at the other end")
    if stages > (most := (arch.layers + 2) // 2):
        raise ConfigError(
            "pipeline_parallel", stages, f"at most {most}, so that every stage has one of {arch.layers} layers"
        )
    if stages * chunks > most:
        allowed = f"at most {most // stages}, so that every piece has one of {arch.layers} layers"
        raise ConfigError("virtual_pipeline", chunks, allowed)
    counts = counts or layers_of(arch.layers, stages * chunks)
    held = [arch.specs[sum(counts[:n]) :][: counts[n]] for n in range(index, stages * chunks, stages)]
    own = tuple(spec for piece in held for spec in piece)
    vision = None if index else arch.vision
    return replace(arch, specs=own, embeds=index == 0, ends=index == stages - 1, vision=vision)


def megatron_layers(layers: int, stages: int) -> tuple[int, ...]:
    """The layers of each stage of Megatron-core: equal numbers or, if the layers do not divide, fewer in the last. By
    itself it takes equal numbers only: `num_layers_in_last_pipeline_stage` says how many the last has. Raises
    ConfigError for the field `pipeline_parallel` if the last would have none.
    """
    count = -(-layers // stages)
    if count * (stages - 1) >= layers:
        raise ConfigError("pipeline_parallel", stages, f"such that {layers} layers leave some to the last stage")
    return (*[count] * (stages - 1), layers - count * (stages - 1))


@lru_cache(maxsize=1024)
def chunk(
    arch: Architecture, index: int, stages: int, chunks: int, n: int, counts: tuple[int, ...] | None = None
) -> Architecture:
    """Chunk `n` of the `chunks` that stage `index` of Megatron-core's pipeline has, several if it is interleaved.

    Both ends have a copy of a tied embedding. The first chunks of all stages follow each other, then their second ones
    (`transformer_layer.py`, `get_transformer_layer_offset`). `counts`: the layers of each stage, if not equal. Raises
    ConfigError for the field `virtual_pipeline` if layers do not divide, and for `pipeline_layers` if those of a stage
    do not.
    """
    if counts is None:
        count, left = divmod(arch.layers, stages * chunks)
        if left or not count:
            allowed = f"such that {stages} stages with as many chunks divide the model's {arch.layers} layers"
            raise ConfigError("virtual_pipeline", chunks, f"{allowed}, or with pipeline_layers")
        counts = (count * chunks,) * stages
    pieces = chunk_layers(counts, chunks)
    below = sum(sum(turn) for turn in pieces[:n]) + sum(pieces[n][:index])
    begins, ends = index == n == 0, (index, n) == (stages - 1, chunks - 1)
    specs = arch.specs[below : below + pieces[n][index]]
    parts: dict[str, Any] = {} if begins else {"vision": None, "sound": None}
    return replace(arch, specs=specs, embeds=begins, ends=ends, tied=False, depths=arch.depths if ends else (), **parts)


def chunk_layers(counts: tuple[int, ...], chunks: int) -> list[list[int]]:
    """The layers of each stage's piece of the model, turn by turn, for stages of `counts` layers in `chunks` turns.

    A stage divides them evenly; the first piece and the last have one fewer where `counted_ends` do. Raises ConfigError
    for the field `pipeline_layers`.
    """
    ends = counted_ends(counts, chunks)
    if not ends and any(count % chunks for count in counts):
        allowed = f"multiples of virtual_pipeline = {chunks}, but for a layer fewer at the ends"
        raise ConfigError("pipeline_layers", list(counts), allowed)
    turns = [[-(-count // chunks) for count in counts] for _ in range(chunks)]
    turns[0][0] -= "embedding" in ends
    turns[-1][-1] -= "loss" in ends
    return turns


def counted_ends(counts: tuple[int, ...], chunks: int) -> list[Literal["embedding", "loss"]]:
    """The ends, embedding and loss, that count as a layer of their stage, so that all stages have equally many in
    `chunks` turns.

    Megatron-core's `account_for_{embedding,loss}_in_pipeline_split` (`transformer_block.py`,
    `get_num_layers_to_build`). None where each stage's own layers divide, which need no such count.
    """
    if not any(count % chunks for count in counts):
        return []
    whole = -(-max(counts) // chunks) * chunks
    missing = [whole - count for count in counts]
    if any(missing[1:-1]) or max(missing) > 1 or whole == chunks:
        return []
    ends: list[Literal["embedding", "loss"]] = ["embedding", "loss"]
    return [end for end, fewer in zip(ends, (missing[0], missing[-1]), strict=True) if fewer]


def account_for(counts: tuple[int, ...] | None, chunks: int) -> Iterator[str]:
    """The names of Megatron-core's settings by which `counted_ends` count."""
    for end in counted_ends(counts, chunks) if counts else ():
        yield f"account_for_{end}_in_pipeline_split"


def told_layers(
    layers: int, stages: int, counts: tuple[int, ...] | None, chunks: int
) -> dict[Literal["first", "last"], int]:
    """The stages whose layers Megatron-core has to be told, with their number; none where ends are counted instead.

    It divides the others evenly (`transformer_block.py`, `get_num_layers_to_build`).
    """
    counts = counts or megatron_layers(layers, stages)
    if counted_ends(counts, chunks):
        return {}
    between = counts[1] if stages > 2 else counts[0]
    told: dict[Literal["first", "last"], int] = {}
    if counts[0] != between:
        told["first"] = counts[0]
    if counts[-1] != between:
        told["last"] = counts[-1]
    return told
