"""verl 0.9's keys for its Megatron engine: a trained model and its adapters, and what stands below `actor.megatron`."""

from __future__ import annotations

from collections.abc import Iterator

from calc.launch.shell import Words
from calc.launch.verl_keys import key
from calc.models.lora import adaptable_names
from calc.models.slices import account_for, told_layers
from calc.scenario.scenario import Scenario

DEGREES = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
}
# Adam on the host, as verl's own scripts switch it on; without the first, masters of all parameters stay on the GPU.
AWARE = "use_precision_aware_optimizer"
HYBRID = (AWARE, "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d")
FRACTION = "optimizer_offload_fraction"
# fields of Megatron-core's TransformerConfig, as verl hands them on
CAPACITY, PADDING = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def model(where: str, s: Scenario, name: str) -> Iterator[Words]:
    """The keys of a trained model, and of Megatron-Bridge's adapters beside its linears."""
    yield key(f"{where}.path", name)
    if s.lora:
        yield key(f"{where}.lora.rank", s.lora.rank)
        targets = adaptable_names(s.architecture) if s.lora.targets == "all-linear" else s.lora.targets
        yield key(f"{where}.lora.target_modules", f"[{','.join(targets)}]")
        yield key(f"{where}.lora.dropout", f"{float(s.lora.dropout)}")


def engine(where: str, optim: str, s: Scenario) -> Iterator[Words]:
    """The keys of the engine at `where`, and of its optimizer; the reference takes its parallelism from the actor.

    `ref/megatron_ref.yaml`.
    """
    for field, called in DEGREES.items():
        yield key(f"{where}.{called}", getattr(s, field))
    if s.virtual_pipeline > 1:
        yield key(f"{where}.virtual_pipeline_model_parallel_size", s.virtual_pipeline)
    yield key(f"{where}.expert_tensor_parallel_size", s.expert_tensor_parallel)
    yield key(f"{where}.param_offload", s.offload.parameters)
    yield key(f"{where}.optimizer_offload", s.offload.optimizer)
    if s.offload.fraction:
        adam = f"+{optim}.override_optimizer_config"
        yield from (key(f"{adam}.{called}", called != AWARE or s.offload.masters) for called in HYBRID)
        yield key(f"{adam}.{FRACTION}", f"{s.offload.fraction:g}")
    layers = f"{where}.override_transformer_config"
    if s.recomputed:
        yield key(f"{layers}.recompute_granularity", "selective")
        yield key(f"{layers}.recompute_modules", f"[{','.join(sorted(s.recomputed))}]")
    if s.expert_capacity:
        yield key(f"+{layers}.{CAPACITY}", f"{s.expert_capacity:g}")
        yield key(f"+{layers}.{PADDING}", s.expert_padding)
    for called, value in RECOMPUTED.items() if s.checkpointing == "full" else ():
        yield key(f"{layers}.{called}", value)
    told = told_layers(s.architecture.layers, s.pipeline_parallel, s.pipeline_layers, s.virtual_pipeline)
    for which, count in told.items():
        yield key(f"+{layers}.num_layers_in_{which}_pipeline_stage", count)
    for name in account_for(s.pipeline_layers, s.virtual_pipeline):
        yield key(f"+{layers}.{name}", True)
