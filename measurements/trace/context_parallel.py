"""Context parallelism over imaginary ranks: PyTorch's ring attention, as its `context_parallel` runs it."""

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention

from . import fsdp
from .case import Case

# In a ring, the first rank attends with half of its queries to what others send, and joins halves; the last does
# neither; those between do both, and take most memory.
RANKS = {1: {0}, 2: {0, 1}}

_exchange, _next = _attention._AllGatherRotater.exchange_buffers, _attention._AllGatherRotater.next_buffer


def _sends(self: _attention._AllGatherRotater, buffer: torch.Tensor) -> None:
    """NCCL keeps the buffer that it sends until somebody waits for the next one; here nothing is in transit."""
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
    """The inputs cut along the sequence, and attention that sees the other ranks' positions.

    A stage between a pipeline's first and last has no inputs of its own, and something has to be cut.
    """
    mesh = fsdp.mesh_of(case)["cp"]
    buffers = list(inputs.values()) or [torch.zeros(1, case.seq, dtype=torch.uint8, device="cuda")]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        yield
