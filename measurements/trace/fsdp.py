"""FSDP2 over imaginary ranks: rank 0 of a fake process group, with streams and events that do nothing."""

import contextlib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools import fake_collectives  # noqa: F401  (gives collectives a kernel for fake tensors)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from .case import LAYERS, Case

_concatenate = DeviceMesh._concatenate


def _joined(meshes: Any) -> Any:
    with _disable_current_modes():  # the mesh reads its own ranks
        return _concatenate(meshes)


DeviceMesh._concatenate = staticmethod(_joined)  # type: ignore[method-assign]


class Idle:
    """A stream or an event: nothing runs, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> "Idle":
        """Returns itself, as an event that is recorded on a stream."""
        return self

    def nothing(self, *args: Any) -> None:
        """Wait for nothing."""
        return None

    wait = wait_event = wait_stream = synchronize = nothing
    record_event = record

    def query(self) -> bool:
        """True: all work is done."""
        return True


def ranks(n: int, rank: int = 0) -> None:
    """Become one of `n` ranks; the others do not exist."""
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, Idle)
    torch.cuda.current_stream = lambda *args: Idle()  # type: ignore[assignment]
    torch.cuda.stream = lambda *args: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *args: None
    torch.Tensor.record_stream = lambda *args: None  # type: ignore[method-assign,assignment]
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)


def mesh_of(case: Case) -> DeviceMesh:
    """The ranks of a case: those of a tensor-parallel group are neighbours, then those that share a sequence."""
    return _mesh(case.stage, case.pp, max(case.fsdp, case.cp), case.cp, case.tp, case.rank)


@lru_cache(maxsize=1)  # submeshes can be joined again only if they come from one mesh
def _mesh(stage: int, pp: int, fsdp: int, cp: int, tp: int, rank: int) -> DeviceMesh:
    ranks(pp * fsdp * tp, (stage * fsdp + rank) * tp)
    _clear_sharding_prop_cache()  # entries of an earlier, similar mesh name process groups that are gone
    names, sizes = ("pp", "dp", "cp", "tp"), (pp, fsdp // cp, cp, tp)
    with _disable_current_modes():  # the mesh reads its own ranks
        if cp == 1:
            names, sizes = ("pp", "fsdp", "tp"), (pp, fsdp, tp)
        mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)
        if cp > 1:
            mesh["dp", "cp"]._flatten("fsdp")  # shards lie on both, as torchtitan has them
        return mesh


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers of a model, and the blocks of its vision tower, whatever is wrapped around it."""
    named = rf"(^|\.)({LAYERS}|blocks|layer)\.\d+$"
    return [module for name, module in model.named_modules() if re.search(named, name)]


def shard(case: Case, model: torch.nn.Module) -> torch.nn.Module:
    """Shard a model over the case's ranks: a unit for each decoder layer, the rest in the root unit."""
    mesh = mesh_of(case)["fsdp"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.trainer:  # as Accelerate's plugin has it
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy if case.prec == "mp" else MixedPrecisionPolicy()}
    reshard = case.reshard == "yes"
    for layer in layers(model):
        fully_shard(layer, reshard_after_forward=reshard, **options)
    return fully_shard(model, **options)


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Reduce no gradients inside, as Accelerate does it."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
