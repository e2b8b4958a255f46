"""FSDP 1 over imaginary ranks: PyTorch's `FullyShardedDataParallel`, on rank 0 of a fake process group.

Queries that would need a real card or a memory address are answered here.
"""

import os
from typing import Any

import torch
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, _flat_param
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from . import fsdp
from .case import Case


class Card:
    """`torch.cuda` as FSDP 1 sees it, with a card that is available."""

    def is_available(self) -> bool:
        """True, though there is no card."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


# Fake tensors have no addresses: the identity and size of their storages stand in for them.
_flat_param._same_storage = _same_storage
_flat_param._data_ptr_allocated = lambda tensor: tensor.untyped_storage().nbytes() > 0
torch._subclasses.FakeTensor.data_ptr = lambda tensor: tensor.untyped_storage()._cdata  # type: ignore[method-assign]


def _policy(case: Case, model: torch.nn.Module) -> Any:
    """A unit for each decoder layer; adapters in units of their own by PEFT's policy, or in their layer's."""
    layers = {type(layer) for layer in fsdp.layers(model)}
    if not case.lora_r or case.lora_units == "layer":
        return ModuleWrapPolicy(layers)
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(sorted(layer.__name__ for layer in layers))
    return fsdp_auto_wrap_policy(model)


def shard(case: Case, model: torch.nn.Module) -> FullyShardedDataParallel:
    """A model sharded over the case's ranks, with everything outside the layers in the root unit."""
    fsdp.ranks(case.fsdp)
    reduced = torch.bfloat16 if case.trainer else torch.float32  # Accelerate's plugin reduces in the compute type
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=_policy(case, model),
        mixed_precision=MixedPrecision(torch.bfloat16, reduced) if case.prec == "mp" else None,
        use_orig_params=True,
        device_id=0,
    )
    for unit in FullyShardedDataParallel.fsdp_modules(sharded):
        unit._device_handle = Card()
    return sharded
