"""Context parallelism over ranks that are not there: PyTorch's ring attention, as its `context_parallel` runs it."""

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention

from . import fsdp
from .case import Case

# Of ranks in a ring the first attends to what others send with half of its queries, and puts halves together; the last
# does neither; those between do both, and take most.
RANKS = {1: {0}, 2: {0, 1}}

_exchange, _next = _attention._AllGatherRotater.exchange_buffers, _attention._AllGatherRotater.next_buffer


def _sends(self: _attention._AllGatherRotater, buffer: torch.Tensor) -> None:
    """NCCL keeps what it sends until somebody waits for what arrives; nothing is on its way here."""
    if self._idx == 0:
        self.sent = buffer  # type: ignore[attr-defined]
    _exchange(self, buffer)


def _waits(self: _attention._AllGatherRotater) -> torch.Tensor:
    self.sent = None  # type: ignore[attr-defined]
    return _next(self)


_attention._AllGatherRotater.exchange_buffers = _sends  # type: ignore[method-assign]
_attention._AllGatherRotater.next_buffer = _waits  # type: ignore[method-assign]


@contextlib.contextmanager
def sharded(case: Case, inputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """The inputs cut along the sequence, and attention that sees the others' positions."""
    mesh = fsdp.mesh_of(case)["cp"]
    buffers = list(inputs.values())
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        yield
