"""Megatron-LM's own loop on Megatron-core: its layers on Transformer Engine, its optimizer, its parallelism.

With plain PyTorch it is the scenario's `trainer`, and its distributed optimizer the `sharding` that goes with it. Read
in Megatron-LM d98e8a64dd, `megatron/training/{arguments,training}.py` beside what `calc.engines.megatron` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import Path
from calc.base.refusal import Refusal
from calc.frameworks import megatron_core
from calc.frameworks.torch.trainers import habits as shared
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft")


def modelled(arch: Architecture, depths: int = 0) -> Architecture:
    """The model as Megatron-core has it, with `depths` of multi-token prediction."""
    own = megatron_core.modelled(arch, "trainer", "own", further=megatron_core.HYBRID)
    return megatron_core.with_depths(own, depths)


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Its defaults, by dotted key.

    With `--bf16` gradients are added up and reduced in fp32 (`accumulate_allreduce_grads_in_fp32`, `validate_args`),
    beside fp32 masters; by Megatron-FSDP in the weights' type (`megatron_fsdp_main_grads_dtype` auto). Tensor
    parallelism is taken with the sequence parallelism that its guide asks for.
    """
    shards = given.get("data_parallel_sharding_strategy", "no_shard") != "no_shard"
    return {
        "sharding": "megatron",  # --use-distributed-optimizer
        "precision": "mixed",  # --bf16
        "grad_dtype": "bf16" if shards else "fp32",
        "optimizer": "adamw",
        "optimizer_impl": "fused",  # Transformer Engine's FusedAdam
        "attention": "flash",  # attention_backend auto: a fused kernel
        "reentrant": True,  # its own `CheckpointFunction` (tensor_parallel/random.py)
        "sequence_parallel": int(given.get("tensor_parallel", 1)) > 1,
        "create_attention_mask_in_dataloader": True,  # unless a flag says no (training/arguments.py)
    }


def refuse(s: Scenario) -> Refusal | None:
    """The reason why Megatron-core cannot run `s`, or is not modelled for it, in one line, or None."""
    own: dict[str, tuple[Any, ...]] = {"packing": (False,), "optimizer": ("adamw", "muon")}
    return refuse_with(s, TASKS, own) or orthogonal_fault(s) or megatron_core.parts_fault(s)


def orthogonal_fault(s: Scenario) -> Refusal | None:
    """The reason why Muon cannot step where `s` has the states, or is not modelled there, in one line, or None."""
    if not OPTIMIZERS[s.optimizer].orthogonal:
        return None
    for name in ("optimizer", "fraction"):
        if value := getattr(s.offload, name):
            return Refusal(f"offload.{name}", f"{value} with optimizer {s.optimizer}", "none; not modelled")
    if s.data_parallel_sharding_strategy != "no_shard":
        given = f"{s.data_parallel_sharding_strategy!r} with optimizer {s.optimizer}"
        return Refusal("data_parallel_sharding_strategy", given, "no_shard; not modelled")
    return None


def refuse_with(s: Scenario, tasks: tuple[str, ...], own: Mapping[str, tuple[Any, ...]]) -> Refusal | None:
    """The same for a loop on Megatron-core that trains `tasks`, and has its `own` values for some fields."""
    given = f"with trainer {s.trainer}"
    fixed: dict[str, tuple[Any, ...]] = {
        "sharding": ("megatron",),
        "method": ("full",),
        "precision": ("mixed",),
        "grad_dtype": ("bf16", "fp32") if frees_gradients(s) else ("fp32",),
        "optimizer": ("adamw",),
        "optimizer_impl": ("fused",),
        "attention": ("flash",),
        "loss": ("full", "fused"),
        "checkpointing": ("none", "full", "selective"),
        "no_sync": (False,),
        "kernels": ("eager",),
        "optimizer_in_backward": (False,),
        "reentrant": megatron_core.reruns(s),
        **own,
    }
    if fault := shared.refuse(s, tasks, fixed, together=True):
        return fault
    for field in ("parameters", "activations"):
        if getattr(s.offload, field):
            return Refusal(f"offload.{field}", f"true {given}", "false; not modelled")
    if s.offload.fraction and s.data_parallel_sharding_strategy != "no_shard":
        strategy = f"{s.data_parallel_sharding_strategy!r} with offload.fraction"
        return Refusal("data_parallel_sharding_strategy", strategy, "no_shard; not modelled")
    if s.sequence_parallel and s.tensor_parallel == 1:
        return Refusal("sequence_parallel", f"true {given}", "with tensor_parallel above 1")
    cut = megatron_core.stages_fault(s) or megatron_core.chunks_fault(s) or megatron_core.linear_fault(s)
    return cut or length_fault(s) or experts_fault(s)


def frees_gradients(s: Scenario) -> bool:
    """True if gradients need not be fp32: Megatron-LM's own, which `--grad-reduce-in-bf16` leaves as they are, or a
    precision-aware optimizer's (`main_grads_dtype`).
    """
    return s.trainer == "megatron" or s.use_precision_aware_optimizer


def length_fault(s: Scenario) -> Refusal | None:
    """The reason why sequences cannot be cut evenly, in one line, or None.

    Context parallelism cuts each into twice as many pieces as it has ranks, of which one has the first and the last,
    the next the second and the last but one (`get_batch_on_this_cp_rank`); tensor-parallel ranks share these.
    """
    pieces = lcm(2 * s.context_parallel if s.context_parallel > 1 else 1,
                 s.context_parallel * (s.tensor_parallel if s.sequence_parallel else 1))  # fmt: skip
    if s.seq_len % pieces == 0:
        return None
    cut = {"tensor_parallel": s.tensor_parallel, "context_parallel": s.context_parallel}
    degrees = " and ".join(f"{name} = {degree}" for name, degree in cut.items() if degree > 1)
    return Refusal("seq_len", f"{s.seq_len} with trainer {s.trainer}", f"a multiple of {pieces}, for {degrees}")


def experts_fault(s: Scenario) -> Refusal | None:
    """The reason why experts cannot be spread over the GPUs as `s` asks, in one line, or None."""
    if not s.architecture.experts:
        return None
    if s.tensor_parallel > 1 and not s.sequence_parallel:  # `moe_layer.py`, `MoELayer.forward`
        return Refusal("sequence_parallel", "false with tensor_parallel above 1", "true for a model with experts")
    ranks, asked = s.gpus // s.pipeline_parallel, s.expert_parallel * s.expert_tensor_parallel
    if ranks % asked:  # `parallel_state.py`, `initialize_model_parallel`
        allowed = f"such that expert_parallel x expert_tensor_parallel = {asked} divides the {ranks} GPUs of a stage"
        return Refusal("expert_parallel", s.expert_parallel, allowed)
    return None


def keeps(s: Scenario) -> dict[str, Any]:
    """The fields that it sets in a trained `Role`: its data sets make masks, if asked (`create_attention_mask`)."""
    return {"masks": s.create_attention_mask_in_dataloader}


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: its own cross entropy over a rank's part of the vocabulary, in fp32; `fused` compiles it.

    `--cross-entropy-loss-fusion` (`fusions/fused_cross_entropy.py`), or with `--cross-entropy-fusion-impl te`
    Transformer Engine's (`language_module.py`, `compute_language_model_loss`).
    """
    if s.loss != "fused":
        return Path("vocab-parallel")
    return Path("vocab-parallel-te" if s.cross_entropy_fusion_impl == "te" else "vocab-parallel-compiled")


def notes(s: Scenario) -> Iterator[str]:
    """Notes on what no field of a scenario says."""
    yield megatron_core.computed(s)
    if s.context_parallel > 1 and s.cp_comm_type == "p2p":
        yield "context parallelism passes keys and values around a ring (cp_comm_type p2p)"
    if s.checkpointing == "full":
        yield "full recomputation is --recompute-method uniform with one layer at a time"
