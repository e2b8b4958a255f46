"""Megatron-core's norms and products on a tape, cut over tensor-parallel ranks, with adapters beside them.

Read in Megatron-LM d98e8a64dd `megatron/core/tensor_parallel/layers.py`, `fusions/fused_bias_dropout.py` and
TransformerEngine d0067d0d `pytorch/module/{layernorm_linear,linear}.py`.
"""

from __future__ import annotations

from calc.autograd.tape import Size, Tensor, of
from calc.memory.linears import WIDTH
from calc.memory.megatron_adapters import BF16, MegatronAdapters

MASK = 1  # byte of an element of a dropout mask


class MegatronLinears(MegatronAdapters):
    """Writes the norms and products of one of Megatron-core's layers."""

    def normed(self, x: Tensor, name: str, rows: Size | None = None) -> Tensor:
        """One kernel: keeps its input, the scale of each row in fp32, and its mean unless it is an RMSNorm.

        `rows`: those of this rank's positions if not given.
        """
        x = self.alone(x, name)
        statistics = Tensor(rows or Size({"": self.run.share}), 8 if self.arch.norm == "layer" else 4)
        weight = self.elements.get(name, self.arch.norm_elements) if self.run.trained else 0
        return self.tape.op(name, [x], x.width, x.b, saves=[x, statistics], weight=weight)

    def apart(self, x: Tensor, name: str, already: object = False) -> Tensor:
        """A contiguous copy of keys or values, unless they have a tensor of their own `already`."""
        return x if already else self.tape.op(f"{name}: contiguous", [x], x.width, x.b)

    def alone(self, x: Tensor, name: str) -> Tensor:
        """The input of Transformer Engine's norms, which copy a part of a wider product: nothing else keeps that then.

        PyTorch's and Apex's, of the `local` spec, read it where it lies (TransformerEngine d0067d0d
        `pytorch/ops/basic/{rmsnorm,layer_norm}.py`, `op_forward`, and `pytorch/module/base.py`, `prepare_forward`).
        """
        return self.apart(x, name, x.storage is x or self.arch.modeling == "megatron-local")

    def column(self, name: str, x: Tensor, out: Size, weight: int) -> Tensor:
        """A product cut by its outputs: keeps its input, with sequence parallelism as this rank has it.

        All positions are gathered for forward, and again for the gradient of the weight.
        """
        narrow = self.run.recipe != ""
        whole = (self.narrowed(WIDTH) if narrow else WIDTH * BF16) if self.run.sequences else self.narrowed(x.width)
        # the gradient of all positions, before it is reduced and scattered; that of the output, in 8 bits for each of
        # its products
        back = self.narrowed(out) * 2
        if self.run.sequences:
            back += WIDTH * BF16 + whole * (1 + narrow) * self.run.trained
        if self.beside(name):
            # the gradient of the norm's output is added to a copy (`_LayerNormLinear.backward`)
            back += x.size
        y = self.tape.op(
            name,
            [x],
            out,
            BF16,
            saves=self.read(x, original=name == "shared_linear_fc1"),
            scratch=whole,
            backward_scratch=back,
            weight=weight,
            multiplies=True,
        )
        return self.beside_column(name, x, y)

    def row(self, name: str, x: Tensor, weight: int) -> Tensor:
        """A product cut by its inputs, whose partial sums are added in place, or reduced and scattered."""
        saves = self.read(x, original=name == "linear_proj")
        y = self.tape.op(name, [x], WIDTH, BF16, saves=saves, weight=weight, scratch=self.narrowed(x.width),
                         backward_scratch=self.narrowed(WIDTH) * 2, multiplies=True)  # fmt: skip
        if self.run.sequences:
            y = self.tape.op(f"{name}: reduce-scatter", [y], self.stream, BF16)
        return self.beside_row(name, x, y)

    def whole_product(self, name: str, x: Tensor, out: Size, weight: str) -> Tensor:
        """A product that no rank shares: keeps its input."""
        trained = self.trained_elements(weight)
        saves = self.read(x, original="layernorm" in self.run.again)
        y = self.tape.op(name, [x], out, BF16, saves=saves, weight=trained, scratch=self.narrowed(x.width),
                         backward_scratch=self.narrowed(out) * 2, multiplies=True)  # fmt: skip
        return self.adapted_by(name, x, y, of(r=self.run.share))

    def added(self, residual: Tensor, y: Tensor, name: str) -> Tensor:
        """Bias, dropout and residual stream in one kernel: keeps the mask."""
        dropped = self.run.training and self.arch.residual_dropout
        mask = [Tensor(self.stream, MASK)] if dropped else []
        same = [residual] if dropped else [residual, y]
        return self.tape.op(f"{name}: add", [residual, y], self.stream, BF16, saves=mask, aliases=same)

    def trained_elements(self, *names: str) -> int:
        """Elements of the weights and biases called `names` that are trained."""
        return sum(self.elements.get(name, 0) for name in names) if self.run.trained else 0
