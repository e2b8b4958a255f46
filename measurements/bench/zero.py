"""DeepSpeed's ZeRO on the device at hand: this process is the first rank, the other ranks do not exist.

DeepSpeed runs as installed but for two answers: it compiles nothing, and a gradient norm counts as a number whatever it
is. The norm comes from weights that no rank sent, as most of ZeRO-3's are; DeepSpeed would skip the step otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from measurements.training import zero_config

from .model import NotRun, ranks


def _joined(s: Mapping[str, Any], device: torch.device) -> Any:
    """DeepSpeed, with this process as the first rank of the scenario's."""
    if not find_spec("deepspeed"):
        raise NotRun("not run: deepspeed missing")
    # as its launcher would set them; it reads the first when it is imported
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(s["gpus"])}
    os.environ.update({"DS_ACCELERATOR": device.type, **launcher})
    import deepspeed
    from deepspeed.runtime.zero import stage3

    stage3.is_invalid_grad_norm = lambda norm: False
    deepspeed.ops.__compatible_ops__ = {}  # on a CPU it would build collectives of its own
    ranks(s["gpus"])
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed


def _config(s: Mapping[str, Any]) -> dict[str, Any]:
    stage = int(s["sharding"].removeprefix("zero"))
    accumulation = s["global_batch"] // (s["micro_batch"] * s["gpus"])
    return zero_config(stage, s["micro_batch"], accumulation, s["grad_dtype"])


def partition(model: torch.nn.Module, s: Mapping[str, Any], device: torch.device) -> None:
    """Move this rank's shards of a host model to `device`, as ZeRO-3's engine would of one that is there whole.

    Each parameter moves as it is cut, as it does where a model is built under `zero.Init`.
    """
    _joined(s, device).zero.Init(module=model, config_dict_or_path=_config(s))
    model.to(device)  # buffers; parameters are empty by now


def engine(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, s: Mapping[str, Any], device: torch.device
) -> Any:
    """DeepSpeed's engine around a model; without an optimizer, for forward alone."""
    deepspeed, config = _joined(s, device), _config(s)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
