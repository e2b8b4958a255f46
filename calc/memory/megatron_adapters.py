"""Adapters beside Megatron-core's linears on a tape, ms-swift's and Megatron-Bridge's: what they keep on each rank.

A frozen linear of Transformer Engine keeps no input (`pytorch/module/{linear,layernorm_linear,grouped_linear}.py`,
`backward_needs_input`); the adapter keeps its own, a copy where inputs are dropped, and what its first matrix made.
Beside a linear cut by its outputs the second matrix is cut, beside one cut by its inputs the first, or both are, and
what one of them makes of a part is gathered. Read in ms-swift 3.12.0 `swift/megatron/tuners/lora.py`, mcore-bridge
1.6.5 `mcore_bridge/tuners/lora.py`, `LoraParallelLinear`, and Megatron-Bridge 0.3.1
`megatron/bridge/peft/{lora,lora_layers,utils}.py`, `ParallelLinearAdapter`.
"""

from __future__ import annotations

from math import prod

from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory.linears import WIDTH
from calc.memory.megatron_again import Again
from calc.models.architecture import Linear
from calc.models.lora import adaptable, joining, matches, shapes

BF16 = 2
# bytes of an element in 8 bits: blocks have a scale, four bytes for 128 elements or one for 32
EIGHT_BITS = {"delayed": 1.0, "tensorwise": 1.0, "blockwise": 33 / 32, "mxfp8": 33 / 32}


class MegatronAdapters(Again):
    """Writes adapters beside the linears of one of Megatron-core's layers."""

    def kept(self, x: Tensor) -> list[Tensor]:
        """The input that a linear keeps for the gradient of its weight, if that is trained."""
        return [x] if self.run.trained else []

    def read(self, x: Tensor, *, original: bool = False) -> list[Tensor]:
        """What a product keeps of its input `x`: the tensor, or in 8 bits a copy for the gradient of the weight.

        `original`: it is another's as well, and stays as it is, which delayed scaling cannot (`set_save_original_input`
        of Megatron-core; TransformerEngine d0067d0d `pytorch/module/linear.py`, `_linear_forward_impl`).
        """
        if not (narrow := EIGHT_BITS.get(self.run.recipe)) or (original and self.run.recipe != "delayed"):
            return self.kept(x)
        return [Tensor(x.width, narrow)] if self.run.trained else []

    def narrowed(self, x: Size) -> Size:
        """The copy in 8 bits of an operand, `x` wide, that one product alone reads; none in 16 bits."""
        return x * EIGHT_BITS.get(self.run.recipe, 0)

    def beside(self, name: str) -> Linear | None:
        """The linear called `name`, with `shared_` or `experts_` before, if it has an adapter."""
        if self.run.adapter is None:
            return None
        targets = self.run.adapter.targets
        if name == (joins := joining(self.arch)).name:
            return joins if targets == "all-linear" else None
        for linear in adaptable(self.arch, self.spec):
            last = linear.name.rpartition(".")[2]
            named = targets == "all-linear" or any(matches(linear, target) for target in targets)
            if f"{_owner(linear)}{last}" == name and named:
                return linear
        return None

    def beside_column(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Beside a linear cut by its outputs: the rank's own positions, whose product of low rank all ranks gather.

        Or all positions are gathered first, and kept (`gather_from_sequence_parallel_region`; in Megatron-Bridge the
        linear's own `return_layernorm_output_gathered`).
        """
        if self.run.adapter is None or not self.run.sequences:
            return self.adapted_by(name, x, y, of(r=1))
        if self.arch.adapters != "own":
            x = self.tape.op(f"{name}: LoRA gather", [x], WIDTH, BF16)
            return self.adapted_by(name, x, y, of(r=1))
        return self.adapted_by(name, x, y, of(r=self.run.share), every=of(r=BF16))

    def beside_row(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Beside a linear cut by its inputs: the product of low rank is reduced and scattered over the positions.

        Or it is added up for all positions, and of the second matrix's output each rank takes its own.
        """
        if self.run.adapter is None or not self.run.sequences:
            return self.adapted_by(name, x, y, of(r=1))
        if self.arch.adapters != "own":
            return self.adapted_by(name, x, y, of(r=1), out=WIDTH)
        return self.adapted_by(name, x, y, of(r=self.run.share), partial=of(r=BF16))

    def adapted_by(
        self,
        name: str,
        x: Tensor,
        y: Tensor,
        low: Size,
        *,
        every: Size = NOTHING,
        partial: Size = NOTHING,
        out: Size | None = None,
    ) -> Tensor:
        """`y + lora_B(lora_A(dropout(x)))·scaling`, with a product of the width `low` between the two matrices.

        `every`: that of all positions, gathered for the second matrix. `partial`: what the first makes before it is
        scattered. `out`: the width of the second's output, if that has more positions than `y`. `y` itself if the
        linear called `name` has no adapter.
        """
        linear = self.beside(name)
        if linear is None:
            return y
        adapter, tape, label = self.run.adapter, self.tape, f"{name}: LoRA"
        assert adapter
        first, second = map(prod, shapes(self.arch, linear, adapter.rank))
        source = x
        if adapter.dropout and self.run.training:
            source = tape.op(f"{label} dropout", [x], x.width, BF16, saves=[Tensor(x.width, 1)])
        wide = out or y.width
        down = tape.op(f"{label} A", [source], low, BF16, saves=[source], scratch=partial, backward_scratch=partial,
                       weight=first, multiplies=True)  # fmt: skip
        up = tape.op(f"{label} B", [down], wide, BF16, saves=[down], scratch=every, backward_scratch=every * 2,
                     weight=second, multiplies=True)  # fmt: skip
        if out and self.arch.adapters == "shared":
            # of the product's part all ranks' are gathered, each of which scales its own positions
            up = tape.op(f"{label} gather", [up], wide, BF16, scratch=wide * (BF16 / self.arch.ranks))
            up = tape.op(f"{label} scatter", [up], y.width, BF16, view=True)
        scaled = tape.op(f"{label} scale", [up], up.width, BF16)
        if out and self.arch.adapters == "whole":
            # a slice of the first dimension; backward gathers all of it
            scaled = tape.op(f"{label} scatter", [scaled], y.width, BF16, view=True)
        return tape.op(f"{label} add", [y, scaled], y.width, BF16, aliases=[y, scaled])


def _owner(linear: Linear) -> str:
    return "experts_" if linear.experts else "shared_" if ".shared_" in linear.name else ""
