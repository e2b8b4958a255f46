"""4-bit linears and experts as bitsandbytes runs them: its own products and types, on packed weights without memory.

`Params4bit` packs a weight when it comes to the device, which a fake tensor cannot; here it is packed from the start.
"""

from typing import Any

import torch
from bitsandbytes.autograd._functions import matmul_4bit
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Linear4bit, parametrize
from peft.tuners.lora import dora
from torch import nn

from .scratch import RULES, rounded

BLOCK, NESTED = 64, 256  # weights of one scale, scales of one scale
HEADS = ("lm_head", "score")


def _blank(like: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=like.device)


def state(weight: torch.Tensor) -> QuantState:
    """The scales of `weight` in NF4, quantised themselves."""
    blocks = -(-weight.numel() // BLOCK)
    scales = QuantState(
        _blank(weight, -(-blocks // NESTED)), code=_blank(weight, 256), blocksize=NESTED, dtype=torch.float32
    )
    return QuantState(
        _blank(weight, blocks, dtype=torch.uint8), weight.shape, _blank(weight, 16), BLOCK, "nf4", torch.bfloat16,
        offset=_blank(weight, 1)[0], state2=scales,
    )  # fmt: skip


def scales_of(own: QuantState) -> tuple[torch.Tensor, ...]:
    """The tensors of a weight's scales."""
    return own.absmax, own.code, own.state2.absmax, own.state2.code


def packed(weight: torch.Tensor) -> Any:
    """A parameter with two elements of `weight` in a byte."""
    found: Any = nn.Parameter(_blank(weight, -(-weight.numel() // 2), 1, dtype=torch.uint8), requires_grad=False)
    found.compress_statistics, found.quant_type = True, "nf4"
    return found


class FourBits(Linear4bit):
    """A `Linear4bit` in NF4 with quantised scales, made from 16-bit weights and multiplied in 16 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.compute_dtype, self.compute_type_is_set = torch.bfloat16, True

        self.quant_state = state(linear.weight)
        self.scales = scales_of(self.quant_state)
        self.weight = packed(linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Does what `Linear4bit.forward` does, which looks for its state on the weight."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return matmul_4bit(x.to(self.compute_dtype), self.weight, bias=bias, quant_state=self.quant_state).to(x.dtype)


def unpacked(module: nn.Module) -> torch.Tensor:
    """The weight of a linear, as PEFT's `dequantize_module_weight` has it, which looks for its state on the weight."""
    return dequantize_4bit(module.weight, module.quant_state) if isinstance(module, FourBits) else module.weight


def _product(a: torch.Tensor, packed: torch.Tensor, shape: list[int], *_: Any) -> int:
    """`_dequant_linear_fallback` (bitsandbytes `backends/cuda/ops.py`): the scales in fp32, the weight in a's type."""
    elements = shape[0] * shape[1]
    return rounded(4 * -(-elements // BLOCK)) + rounded(elements * a.element_size())


RULES[torch.ops.bitsandbytes.gemm_4bit.default] = _product


def _elements(codes: torch.Tensor, absmax: torch.Tensor, *_: Any) -> int:
    """Nothing: what the kernel makes is its output."""
    return 0


RULES[torch.ops.bitsandbytes.dequantize_4bit.default] = _elements
RULES[torch.ops.bitsandbytes.dequantize_blockwise.default] = _elements


def quantise_experts(model: Any) -> None:
    """Does what `parametrize.replace_parameter_4bit` does with each parameter of all experts, but for the packing."""
    for name, module in list(model.named_modules()):
        for key, weight in list(module._parameters.items()):
            if "expert" not in f"{name}.{key}".lower() or weight is None or weight.ndim < 3:
                continue
            own = state(weight)
            module.scales = (*getattr(module, "scales", ()), *scales_of(own))
            setattr(module, key, packed(weight))
            nn.utils.parametrize.register_parametrization(
                module, key, parametrize.Bnb4bitParametrization(own), unsafe=True
            )
            parametrize._register_parametrization_hooks(module, key)


def quantise(model: Any, *, experts: bool = False) -> Any:
    """The model, frozen, with every linear except its head in 4 bits, and its routed `experts` if asked."""
    model.requires_grad_(False)
    dora.dequantize_module_weight = unpacked
    if experts:
        quantise_experts(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name not in HEADS:
                setattr(parent, name, FourBits(child))
    model.is_loaded_in_4bit = True
    return model
