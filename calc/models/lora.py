"""LoRA's adapters beside a model's linears, and the number of their parameters, as PEFT counts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod

from calc.models.architecture import (
    CROSSING,
    Architecture,
    ConfigError,
    LayerSpec,
    Linear,
    Seeing,
    Tensor,
    layer_kinds,
    layer_tensors,
    linears,
    tensors,
    vision_tensors,
)
from calc.models.architecture import LATENT as LATENT_EXPERTS

# Megatron-core's linears by those of a checkpoint that it joins in one; latent attention's queries are `LATENT`
JOINED: Mapping[str, str] = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "gate_up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), "in_proj"),
    "in_proj": "in_proj",
    "out_proj": "out_proj",
    **{name: name for name in LATENT_EXPERTS},
}
LATENT = {"q_proj": "linear_q_proj"}
BY_INPUTS = ("linear_proj", "linear_fc2", "out_proj")  # linears that tensor-parallel ranks cut by their inputs
UNCUT = ("linear_q_down_proj", "linear_kv_down_proj", *LATENT_EXPERTS)
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")  # of an adapter; only DoRA has the last
HEAD = "lm_head"  # a linear below no layer, which is adapted where it is named alone
EMBEDDING = "embed_tokens"  # the table of the input's rows, which is no linear, and adapted where it is named alone
NORMS = "all-norm"  # every norm of the model, as ms-swift names them (4.6 `swift/pipelines/train/tuner.py`)
SAVED = ".modules_to_save"  # the end of a copy's name


def lora_parameters(arch: Architecture, rank: int, targets: str | Sequence[str]) -> int:
    """The adapter parameters PEFT adds: rank · (inputs + outputs) for each adapted Linear.

    `targets` is `all-linear` (every Linear but the head) or names matched as PEFT matches them: a module's whole name,
    the head's and the embedding's among them, or its end after a dot. Routed experts that Transformers 5 has fused are
    no Linears.

    Raises ConfigError for a name that matches no Linear, and for a rank below 1.
    """
    if type(rank) is not int or rank < 1:
        raise ConfigError("lora.rank", rank, "a positive integer")
    return _lora_elements(arch, rank, targets if isinstance(targets, str) else tuple(targets))


def adaptable(arch: Architecture, spec: LayerSpec) -> tuple[Linear, ...]:
    """The linears of a layer of the kind `spec` that may get an adapter, by the library whose code runs them."""
    if arch.megatron:
        return megatron_linears(arch, spec)
    return (*linears(arch, spec), *(expert_linears(arch) if spec.mlp == "experts" else ()))


def expert_linears(arch: Architecture) -> Iterator[Linear]:
    """The linears of routed experts that are modules of their own."""
    block, j = arch.experts_name or f"{arch.router.partition('.')[0]}.experts", arch.moe_intermediate
    for name in arch.expert_linears[:-1]:
        yield Linear(f"{block}.{name}", arch.expert_width, j, "mlp", arch.experts)
    for name in arch.expert_linears[-1:]:
        yield Linear(f"{block}.{name}", j, arch.expert_width, "mlp", arch.experts)


def adapted(arch: Architecture, spec: LayerSpec, targets: str | Sequence[str]) -> tuple[Linear, ...]:
    """The adaptable linears that `targets` name: `all-linear`, or the ends of module names."""
    linears = adaptable(arch, spec)
    return linears if targets == "all-linear" else tuple([x for x in linears if any(matches(x, t) for t in targets)])


def adapts_experts(arch: Architecture, targets: str | Sequence[str]) -> bool:
    """True if routed experts are linears of their own, and some of them get adapters."""
    return any(linear.experts for spec, _ in layer_kinds(arch) for linear in adapted(arch, spec, targets))


def matches(linear: Linear, target: object) -> bool:
    """True if `target` is the whole name of a linear, or its end after a dot (peft 0.21 `tuners/tuners_utils.py`)."""
    return f".{linear.name}".endswith(f".{target}")


def adaptable_names(arch: Architecture) -> list[str]:
    """The last parts of the names of all linears that may get an adapter, sorted."""
    linears = (linear for spec, _ in layer_kinds(arch) for linear in adaptable(arch, spec))
    return sorted({linear.name.rpartition(".")[2] for linear in linears})


@lru_cache(maxsize=4096)
def megatron_linears(arch: Architecture, spec: LayerSpec) -> tuple[Linear, ...]:
    """Megatron-core's linears of a layer: one makes queries, keys and values, one the gate and what it multiplies.

    Linear attention has one to all that it reads, and one behind it. Each routed expert of this rank has its own
    adapter, in one grouped product (ms-swift 4.6.0 `swift/megatron/utils/utils.py`, `find_all_linears`; mcore-bridge
    1.6.5 `tuners/lora.py`, `LoraParallelLinear.update_layer`).
    """
    names = {**JOINED, **(LATENT if spec.mixer == "latent" else {})}
    found: dict[str, Linear] = {}
    for t in layer_tensors(arch, spec):
        above, _, name = t.name.partition(".*.")[2].removesuffix(".weight").rpartition(".")
        if t.kind not in ("linear", "expert") or name not in names:
            continue
        outputs, inputs = t.shape[-2:] if t.kind == "linear" or not arch.experts_input_first else t.shape[:-3:-1]
        whole = f"{above}.{names[name]}"
        before = found[whole].outputs if whole in found else 0
        experts = t.shape[0] if t.kind == "expert" else 0
        found[whole] = Linear(whole, inputs, before + outputs, t.module, experts)
    return tuple(found.values())


def adapter_matrices(
    arch: Architecture, spec: LayerSpec, rank: int, targets: str | Sequence[str], count: int = 1
) -> Iterator[Tensor]:
    """The parts of an adapter for each adapted linear of a layer of the kind `spec`, of which the model has `count`."""
    for linear in adapted(arch, spec, targets):
        kind = "expert" if linear.experts and arch.megatron else "linear"
        for name, shape in zip(PARTS, shapes(arch, linear, rank), strict=False):
            yield Tensor(f"{linear.name}.{name}", shape, count * apart(arch, linear), kind, linear.kind)


def apart(arch: Architecture, linear: Linear) -> int:
    """The number of linears that `linear` stands for: Megatron-core's experts have one grouped product."""
    return 1 if arch.megatron else max(1, linear.experts)


def shapes(arch: Architecture, linear: Linear, rank: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of LoRA's two matrices beside a linear, as one rank holds them, and of DoRA's magnitudes.

    IA3 has one vector (peft 0.21 `tuners/ia3/layer.py`, `IA3Layer.update_layer`).

    Megatron-Bridge's are layers of Megatron-core both: beside a linear cut by its outputs, or not at all, the first is
    cut by its own; beside one cut by its inputs the second (0.3.1 `peft/utils.py`, `ParallelLinearAdapter`).
    """
    if arch.adapters == "vectors":
        return ((linear.inputs if linear.name.rpartition(".")[2] == arch.names.down else linear.outputs,),)
    if arch.adapters == "scaled":
        return (rank, linear.inputs), (linear.outputs, rank), (linear.outputs,)
    if arch.adapters != "shared":
        each = (linear.experts,) if linear.experts and arch.megatron else ()
        return (*each, rank, linear.inputs), (*each, linear.outputs, rank)
    if linear.experts:  # which expert tensor parallelism would cut, and no other
        return (rank, linear.inputs), (linear.outputs, rank)
    name = linear.name.rpartition(".")[2]
    first, second = (1, arch.ranks) if name in BY_INPUTS else (arch.ranks, arch.ranks if name in UNCUT else 1)
    return (rank // first, linear.inputs), (linear.outputs // second, rank)


def joining(arch: Architecture) -> Linear:
    """The product that joins both streams of a depth of multi-token prediction, which `all-linear` names, too."""
    return Linear("eh_proj", 2 * arch.hidden, arch.hidden, "mlp")


def joining_matrices(arch: Architecture, rank: int, targets: str | Sequence[str]) -> tuple[Tensor, ...]:
    """LoRA's two matrices beside that product of each depth."""
    if not (arch.depths and isinstance(targets, str)):
        return ()
    linear = joining(arch)
    return tuple([
        Tensor(f"mtp.{linear.name}.{name}", shape, len(arch.depths), "linear", linear.kind)
        for name, shape in zip(PARTS, shapes(arch, linear, rank), strict=False)
    ])  # fmt: skip


def embedding_matrices(arch: Architecture, rank: int, targets: str | Sequence[str]) -> tuple[Tensor, ...]:
    """LoRA's two matrices beside the embedding, if `targets` names it: a column for each token, and r to the model's h.

    A tied head's adapter is another (peft 0.21 `tuners/lora/layer.py`, `Embedding.update_layer`; without
    `ensure_weight_tying`, which is off by default).
    """
    if isinstance(targets, str) or EMBEDDING not in targets or not arch.embeds:
        return ()
    shapes = (rank, arch.embedding_rows), (arch.outer, rank)
    return tuple([
        Tensor(f"{EMBEDDING}.lora_embedding_{name}", shape, 1, "linear", "embed")
        for name, shape in zip("AB", shapes, strict=True)
    ])  # fmt: skip


def head_matrices(arch: Architecture, rank: int, targets: str | Sequence[str]) -> tuple[Tensor, ...]:
    """LoRA's two matrices beside the head, if `targets` names it."""
    if isinstance(targets, str) or HEAD not in targets:
        return ()
    shapes = (rank, arch.outer), (arch.vocab_part, rank)
    return tuple(
        [Tensor(f"{HEAD}.{name}", shape, 1, "linear", "head") for name, shape in zip("AB", shapes, strict=True)]
    )


def end_matrices(arch: Architecture, rank: int, targets: str | Sequence[str]) -> tuple[Tensor, ...]:
    """LoRA's matrices outside the layers: beside the embedding and beside the head."""
    return (*embedding_matrices(arch, rank, targets), *head_matrices(arch, rank, targets))


def saved_modules(arch: Architecture, names: Sequence[str]) -> tuple[Tensor, ...]:
    """The copies that PEFT trains whole beside adapters, in the order of the module, a tied one of each table.

    An embedding or a head that another pipeline stage has is not copied here.
    """
    shape = (arch.vocab_part, arch.outer)
    found = [Tensor(f"embed_tokens{SAVED}", shape, 1, "embedding", "embed")] * ("embed_tokens" in names)
    found += saved_norms(arch) if NORMS in names else []
    return (*found, *[Tensor(f"{HEAD}{SAVED}", shape, 1, "head", "head")] * (HEAD in names))


def saved_norms(arch: Architecture) -> list[Tensor]:
    """Copies of all norms of a model."""
    return [t._replace(name=f"{t.name}{SAVED}") for t in tensors(arch) if t.kind == "norm"]


def module_names(arch: Architecture, names: Sequence[str]) -> list[str]:
    """The names of modules that PEFT matches, in place of the word for all norms."""
    norms = [t.name.removesuffix(".weight").rpartition(".")[2] for t in tensors(arch) if t.kind == "norm"]
    return list(dict.fromkeys([m for name in names for m in (norms if name == NORMS else [name])]))


def passed_parameters(arch: Architecture, rank: int, targets: str | tuple[str, ...]) -> int:
    """The elements of both matrices in layers that text passes over, which get no gradients."""
    if not arch.passed:
        return 0
    return arch.passed * sum(sum(map(prod, shapes(arch, one, rank))) for one in adapted(arch, CROSSING, targets))


def bypassed_parameters(arch: Architecture, rank: int, targets: str | tuple[str, ...], *, whole: bool) -> int:
    """The elements of both matrices beside linears of a selective scan whose weights it multiplies with, past adapters.

    They get no gradients. `whole`: it is mamba-ssm's one operation, which has the weights of all linears behind its
    input's (transformers 5.23 `models/mamba/modeling_mamba.py`).
    """
    names = ("x_proj", "dt_proj", "out_proj") if whole else ("dt_proj",)
    selective = arch.ssm is not None and arch.ssm.rank > 0
    scans = [(spec, count) for spec, count in layer_kinds(arch) if selective and spec.mixer == "ssm"]
    found = [(one, count) for spec, count in scans for one in adapted(arch, spec, targets) if one.name.endswith(names)]
    return sum([count * sum(map(prod, shapes(arch, one, rank))) for one, count in found])


@lru_cache(maxsize=4096)
def vision_matrices(arch: Architecture, rank: int, part: Seeing) -> tuple[Tensor, ...]:
    """LoRA's two matrices for each linear of a part of the vision tower."""
    return tuple([
        Tensor(f"{linear.name.removesuffix('.weight')}.{name}", shape, linear.count, "linear", "vision")
        for linear in vision_tensors(arch, part)
        if linear.kind == "linear"
        for name, shape in (("lora_A", (rank, linear.shape[1])), ("lora_B", (linear.shape[0], rank)))
    ])  # fmt: skip


@lru_cache(maxsize=4096)
def _lora_elements(arch: Architecture, rank: int, targets: str | tuple[str, ...]) -> int:
    """The elements of both matrices, over every Linear that `targets` names."""
    layers = (*layer_kinds(arch), *[(spec, 1) for spec in arch.depths], *[(CROSSING, arch.passed)] * (arch.passed > 0))
    found = [(count, linear) for spec, count in layers for linear in adaptable(arch, spec)]
    names = adaptable_names(arch)
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError("lora.targets", targets, f"all-linear or a list of {', '.join(names)}", near=["all-linear"])
    wanted = names if isinstance(targets, str) else targets
    if HEAD in wanted:
        found.append((1, Linear(HEAD, arch.outer, arch.vocab_part, "head")))
    if EMBEDDING in wanted and arch.names.embedding == EMBEDDING:
        found.append((1, Linear(EMBEDDING, arch.embedding_rows, arch.outer, "embed")))

    for target in wanted:
        if not any(matches(linear, target) for _, linear in found):
            raise ConfigError("lora.targets", target, ", ".join(names), near=names)
    named = [(count, linear) for count, linear in found if any(matches(linear, target) for target in wanted)]
    joined = sum(t.elements * t.count for t in joining_matrices(arch, rank, targets))
    return joined + sum(
        count * apart(arch, linear) * sum(map(prod, shapes(arch, linear, rank))) for count, linear in named
    )
