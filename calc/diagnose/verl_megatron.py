"""Overrides of verl's Megatron engine read back as fields; the inverse of `calc/launch/verl_megatron.py`."""

from __future__ import annotations

from typing import Any

from calc.diagnose.flags import Flags, listed
from calc.launch.verl import ACTOR
from calc.launch.verl_megatron import AWARE, CAPACITY, DEGREES, FRACTION, HYBRID, PADDING, RECOMPUTED

SHARED = (*DEGREES.values(), "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size")


def chosen(flags: Flags) -> bool:
    """True for the Megatron engine, by the configuration's name, the engine's, or keys below `actor.megatron`."""
    flags.has("config_path")
    named = [flags.text(name) or "" for name in ("config_name", "model_engine", f"{ACTOR}.strategy")]
    degrees = [f"{ACTOR}.megatron.{called}" for called in DEGREES.values()]
    return any("megatron" in word for word in named) or any(flags.text(name) is not None for name in degrees)


def model(flags: Flags, where: str) -> dict[str, Any]:
    """The fields of a trained model and its adapters; FSDP's keys of checkpointing and padding are not read."""
    flags.has(*(f"{where}.{name}" for name in ("enable_gradient_checkpointing", "use_remove_padding", "lora_rank")))
    rank, targets = flags.integer(f"{where}.lora.rank"), flags.text(f"{where}.lora.target_modules")
    flags.has(f"{where}.lora.alpha")
    return {
        "loss": "fused" if flags.on(f"{where}.use_fused_kernels") else None,
        "method": "lora" if rank else None,
        "lora.rank": rank or None,
        "lora.targets": listed(targets) if rank and targets else None,
        "lora.dropout": flags.number(f"{where}.lora.dropout") if rank else None,
    }


def engine(flags: Flags, where: str, optim: str) -> dict[str, Any]:
    """The fields of the engine at `where`, and of its optimizer."""
    return {
        "sharding": "megatron",
        **{field: flags.integer(f"{where}.{called}") for field, called in DEGREES.items()},
        "expert_tensor_parallel": flags.integer(f"{where}.expert_tensor_parallel_size"),
        "virtual_pipeline": flags.integer(f"{where}.virtual_pipeline_model_parallel_size"),
        "offload.parameters": flags.switch(f"{where}.param_offload"),
        "offload.optimizer": flags.switch(f"{where}.optimizer_offload"),
        **_hybrid(flags, f"{optim}.override_optimizer_config"),
        **_layers(flags, f"{where}.override_transformer_config"),
    }


def _hybrid(flags: Flags, where: str) -> dict[str, Any]:
    """The share of the parameters that Adam steps on the host, if the optimizer is told so, and their masters."""
    names = {called: (f"{where}.{called}", f"+{where}.{called}") for called in (*HYBRID, FRACTION)}
    flags.has(*(name for both in names.values() for name in both))
    share = [value for name in names[FRACTION] if (value := flags.number(name)) is not None]
    if not (share and share[0] and any(flags.on(name) for name in names["optimizer_cpu_offload"])):
        return {}
    return {"offload.fraction": share[0], "offload.masters": any(flags.on(name) for name in names[AWARE])}


def _layers(flags: Flags, where: str) -> dict[str, Any]:
    """The fields on experts' capacity, and on layers, or parts of them, that run again for their backward."""

    def said(name: str) -> str | None:
        return flags.text(f"{where}.{name}", f"+{where}.{name}")

    flags.has(*(f"{plus}{where}.{name}" for name in RECOMPUTED for plus in ("", "+")))
    granularity, modules = said("recompute_granularity"), said("recompute_modules")
    return {
        "expert_capacity": flags.number(f"{where}.{CAPACITY}", f"+{where}.{CAPACITY}"),
        "expert_padding": flags.switch(f"{where}.{PADDING}", f"+{where}.{PADDING}"),
        "checkpointing": granularity if granularity in ("full", "selective") else None,
        "recompute_modules": listed(modules) if modules and granularity == "selective" else None,
    }
