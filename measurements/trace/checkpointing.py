"""How layers are run again: all of them, or, with a policy for operators, all but what was kept."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from . import attention

aten = torch.ops.aten

# What torchtitan's policy "op" never computes again: attention, and sums over ranks. `aten.max` is there for scales of
# numbers in 8 bits. The flash-attn package's operator is its own, and not in the list.
SAVED = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        aten.max.default,
    }
)


class EverySecondProduct:
    """A policy for one call of one layer: of matrix products the first, the third and so on are kept, too.

    torchtitan's `selective_ac_option = "op"` (its `_custom_policy`).
    """

    def __init__(self) -> None:
        self.products = 0

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Whether the output of `op` is kept; PyTorch asks in forward alone."""
        kept = op in SAVED and not attention.in_package
        if op is aten.mm.default:
            self.products += 1
            kept = self.products % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(EverySecondProduct())


def options(ckpt: str) -> dict[str, Any]:
    """The arguments of `torch.utils.checkpoint.checkpoint` for `full`, `selective` or `reentrant`."""
    if ckpt == "selective":
        return {"use_reentrant": False, "context_fn": _contexts}
    return {"use_reentrant": ckpt == "reentrant"}
