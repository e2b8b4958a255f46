"""DeepSpeed's own engine and partitioning over imaginary ranks: one rank of a fake process group.

Queries that would need a real card or another rank are answered here; DeepSpeed's code is as installed.
"""

import contextlib
import logging
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from measurements.training import zero_config

from . import fsdp
from .case import Case

# DeepSpeed looks for its accelerator and for a launcher's settings when it is imported and initialised.
os.environ["DS_ACCELERATOR"] = "cuda"
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="1")
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
from deepspeed.utils import groups

_ROOM = 2**50  # free bytes that DeepSpeed is told of: where memory is short it does some work on the host


def _answer(value: object) -> Any:
    return lambda *args, **kwargs: value


def _pretend() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    card = get_accelerator()
    card.is_available = card.is_bf16_supported = _answer(True)
    card.device_count = _answer(1)
    card.supported_dtypes = _answer([torch.float, torch.half, torch.bfloat16])
    card.total_memory = card.available_memory = _answer(_ROOM)
    for counter in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(card, counter, _answer(0))
    for nothing in ("synchronize", "empty_cache", "reset_peak_memory_stats", "range_push", "range_pop", "manual_seed"):
        setattr(card, nothing, _answer(None))
    card.default_stream = card.current_stream = lambda *args: fsdp.Idle()
    # DeepSpeed compares the order of modules between ranks by value.
    coordinator.assert_ints_same_as_other_ranks = _answer(None)


_pretend()


def engine(case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    """DeepSpeed's engine around a model, with the defaults of its configuration; without an optimizer, for forward."""
    if not dist.is_initialized() or (dist.get_world_size(), dist.get_rank()) != (case.ranks, case.rank):
        fsdp.ranks(case.ranks, case.rank)
        comm.cdb = groups._WORLD_GROUP = None  # they belong to the ranks of an earlier case
    config = zero_config(case.zero, case.mb, case.grad_accum, case.grad_dtype, clip=1.0 if case.clip else 0.0)
    config["zero_optimization"]["memory_efficient_linear"] = case.efficient_linear
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints its memory use
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
