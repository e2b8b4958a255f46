"""4-bit linears as bitsandbytes runs them: its own products and types, on packed weights without memory.

`Params4bit` packs a weight when it comes to the device, which a fake tensor cannot; here it is packed from the start.
"""

from typing import Any

import torch
from bitsandbytes.autograd._functions import matmul_4bit
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from torch import nn

from .scratch import RULES, rounded

BLOCK, NESTED = 64, 256  # weights of one scale, scales of one scale
HEADS = ("lm_head", "score")


class FourBits(Linear4bit):
    """A `Linear4bit` in NF4 with quantised scales, made from 16-bit weights and multiplied in 16 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.compute_dtype, self.compute_type_is_set = torch.bfloat16, True

        def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=linear.weight.device)

        elements = linear.weight.numel()
        blocks = -(-elements // BLOCK)
        scales = QuantState(blank(-(-blocks // NESTED)), code=blank(256), blocksize=NESTED, dtype=torch.float32)
        self.quant_state = QuantState(
            blank(blocks, dtype=torch.uint8), linear.weight.shape, blank(16), BLOCK, "nf4", torch.bfloat16,
            offset=blank(1)[0], state2=scales,
        )  # fmt: skip
        self.scales = (self.quant_state.absmax, self.quant_state.code, scales.absmax, scales.code)
        packed: Any = nn.Parameter(blank(-(-elements // 2), 1, dtype=torch.uint8), requires_grad=False)
        packed.compress_statistics, packed.quant_type = True, "nf4"
        self.weight = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Does what `Linear4bit.forward` does, which looks for its state on the weight."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return matmul_4bit(x.to(self.compute_dtype), self.weight, bias=bias, quant_state=self.quant_state).to(x.dtype)


def _product(a: torch.Tensor, packed: torch.Tensor, shape: list[int], *_: Any) -> int:
    """`_dequant_linear_fallback` (bitsandbytes `backends/cuda/ops.py`): the scales in fp32, the weight in a's type."""
    elements = shape[0] * shape[1]
    return rounded(4 * -(-elements // BLOCK)) + rounded(elements * a.element_size())


RULES[torch.ops.bitsandbytes.gemm_4bit.default] = _product


def quantise(model: Any) -> Any:
    """The model, frozen, with every linear except its head in 4 bits."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name not in HEADS:
                setattr(parent, name, FourBits(child))
    model.is_loaded_in_4bit = True
    return model
