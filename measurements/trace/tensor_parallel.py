"""Tensor parallelism over imaginary ranks: Transformers' own plan, or PyTorch's with sharded sequences."""

from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import _disable_current_modes
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from . import fsdp
from .case import Case

_propagate = ShardingPropagator._propagate_tensor_meta_non_cached


def _apart(self: ShardingPropagator, schema: Any) -> Any:
    """Keeps DTensor's shape inference, which runs operators on imaginary whole tensors, out of the step's memory."""
    with _disable_current_modes():
        return _propagate(self, schema)


ShardingPropagator._propagate_tensor_meta_non_cached = _apart  # type: ignore[method-assign]


def shard(case: Case, model: Any) -> None:
    """Cut a model before it has memory, then give it some; a tied head gets its embedding at the end."""
    mesh = fsdp.mesh_of(case)["tp"]
    if case.sequence_parallel:
        _sequences(model, mesh)
    else:
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=case.tp))
        apply_tensor_parallelism(model, mesh, plan)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    real = torch.empty_like(tensor, device="cuda")
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    tensors[name] = torch.nn.Parameter(real, tensor.requires_grad) if is_parameter else real
    model.tie_weights()


def _sequences(model: Any, mesh: DeviceMesh) -> None:
    """PyTorch's plan for Llama with the residual stream cut along the sequence and logits along the vocabulary.

    As in its tutorial and in torchtitan.
    """
    whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    layer = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(**whole),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.model.layers:
        parallelize_module(block, mesh, layer)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **({} if isinstance(model.model.norm, torch.nn.Identity) else {"model.norm": SequenceParallel()}),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
